"""What keeping to a budget adds to a step with gates: python tests/bench/steps/bench_prune_step.py [--steps 1000 3000]

A step of ``prune`` in its phase with gates calls ``SparsityTarget.add_gradient`` and ``ascend``; the plain gated step
has the same loss, gates and optimisers without them. The two calls are timed within the steps of a whole run, so that
the looks at the deterministic network count as often as they come, in processor time, which other work on the machine
changes little. A row per network: the plain step (the median over forty parts of the run), what the two calls add to
it on average, and the ratio of the two steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.pruning import Training
from pyro_l0.pruning.insertion_points import put_gates
from pyro_l0.pruning.phases import BatchLoss, GatedPhase
from tests.bench.pruning import bench_pruning
from tests.bench.pruning.bench_target import vit


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def lenet() -> nn.Module:
    """LeNet-5 of the L0 paper, 20-50-500."""
    return nn.Sequential(
        nn.Unflatten(-1, (1, 28, 28)),
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


def residual() -> nn.Module:
    """A stem and three blocks."""
    stem = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(
        nn.Unflatten(-1, (1, 28, 28)),
        *(stem, nn.BatchNorm2d(16), nn.ReLU(), Block(16), Block(16), Block(16)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (bench_pruning.mlp, 100),
    "lenet5": (lenet, 100),
    "residual": (residual, 100),
    "vit": (vit, 100),
}


def measure(make: Callable[[], nn.Module], size: int, steps: int) -> tuple[float, float]:
    """Milliseconds of the plain gated step, and what the target adds to it on average."""
    torch.manual_seed(0)
    x, y = torch.rand(size, 784), torch.randint(10, (size,))
    gated = put_gates(make(), x[:2], None, lambda *_: True).network
    loss = BatchLoss(F.cross_entropy, torch.device("cpu"), None)
    phase = GatedPhase(gated, loss, NetworkBudget(gated, x[:2], 0.3, pretrained=True), steps, Training())
    target, spent = phase.target, [0.0]

    def timed(call: Callable[[], None]) -> Callable[[], None]:
        def wrapper() -> None:
            start = time.process_time()
            call()
            spent[0] += time.process_time() - start

        return wrapper

    target.add_gradient, target.ascend = timed(target.add_gradient), timed(target.ascend)  # type: ignore[method-assign]
    part, plain, added = steps // 40, list[float](), list[float]()
    for _ in range(40):
        spent[0], start = 0.0, time.process_time()
        for _ in range(part):
            phase.step([(x, y)])
        plain.append((time.process_time() - start - spent[0]) / part)
        added.append(spent[0] / part)
    return 1000 * statistics.median(plain), 1000 * statistics.fmean(added)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", type=int, default=[1000, 3000])
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | steps | plain step, ms | added, ms | ratio |\n|---|---|---|---|---|", flush=True)
    for name in options.network:
        for steps in options.steps:
            plain, added = measure(*NETWORKS[name], steps)
            print(f"| {name} | {steps} | {plain:.2f} | {added:.3f} | {1 + added / plain:.3f} |", flush=True)


if __name__ == "__main__":
    main()
