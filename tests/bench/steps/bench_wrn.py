"""A training step of a gated wide residual network beside the dense one: python tests/bench/steps/bench_wrn.py

Random images, batch 128, SGD with Nesterov momentum, steps in turn in one process; prints the medians, their ratio and
the peak of the process's memory. On a GPU (``--device cuda``) steps are synchronised; ``--amp`` takes bfloat16.
The defaults are WRN-16-4; ``--depth 28 --width 10`` is the papers' network.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from cifar_wrn import Options, Run
from common.data import Images
from common.residual import wide_resnet
from pyro_l0.nn import L0Gate
from tests.bench.timing import medians, options_of, peak_kib, seconds_in_turn


def without_gates(net: nn.Module) -> nn.Module:
    """The network with nothing in the place of its gates."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, L0Gate):
                setattr(module, name, nn.Identity())
    return net


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--lam", type=float, default=0.001)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = options.batch_size
    x, y = torch.randint(0, 256, (2 * size, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (2 * size,))
    run = Run(
        Images(x, y, x[:2], y[:2], (3, 32, 32)),
        Options(depth=options.depth, width=options.width, device=options.device, amp=options.amp, lam=options.lam),
    )
    run.net.train()
    device = run.device
    index = torch.arange(size, device=device)
    dense = without_gates(wide_resnet(options.depth, options.width)).to(device).train()
    optimiser = torch.optim.SGD(dense.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    autocast = torch.autocast(device.type, torch.bfloat16) if options.amp else nullcontext()

    def gated_step() -> None:
        run.optimiser.zero_grad()
        with autocast:
            loss = run.loss(*run.batch(index)) / len(run.train_x)
        loss.backward()
        run.optimiser.step()

    def dense_step() -> None:
        optimiser.zero_grad()
        with autocast:
            images, labels = run.batch(index)
            loss = F.cross_entropy(dense(images), labels)
        loss.backward()
        optimiser.step()

    seconds = medians(seconds_in_turn({"dense": dense_step, "gated": gated_step}, options.rounds, device=device.type))
    macs = 3 * 2 * run.cost.total_macs * size  # forward and two backward products, two operations each
    print(f"WRN-{options.depth}-{options.width}, batch {size}, {options.device}, {options.threads} threads")
    print(f"dense {seconds['dense']:8.3f} s a step, {macs / seconds['dense'] / 1e12:7.2f} TFLOP/s")
    print(f"gated {seconds['gated']:8.3f} s a step, ratio {seconds['gated'] / seconds['dense']:.3f}")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    else:
        print(f"peak memory of the process with both networks {peak_kib() / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
