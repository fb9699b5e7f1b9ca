"""What keeping to a budget adds to a step with gates: python tests/bench/bench_prune_step.py [--steps 1000 3000]

A step of ``prune`` in its phase with gates calls ``SparsityTarget.add_gradient`` and ``ascend``; the plain gated step has
the same loss, guide and optimisers without them. Both run in turns of a few steps, over the steps of a whole run, so
that the looks at the deterministic network count as often as they come. A row per network: the median over turns of
the plain step, the time that the two calls add on average, with the looks, and the ratio of the two steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from bench_target import VisionTransformer

from pyro_l0.nn import NetworkCost
from pyro_l0.pruning.batches import BatchLoss
from pyro_l0.pruning.phases import GatedPhase, TargetOptions
from pyro_l0.pruning.places import put_gates


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """The maps, changed."""
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def mlp() -> nn.Module:
    """784-300-100-10."""
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


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
    "mlp": (mlp, 100),
    "lenet5": (lenet, 100),
    "residual": (residual, 100),
    "vit": (VisionTransformer, 100),
}


def measure(make: Callable[[], nn.Module], size: int, steps: int, taken: int) -> tuple[float, float]:
    """Milliseconds of the plain gated step, and what the target adds to it on average over ``steps``.

    Of a long run, the steps of one look in ``steps / taken`` are taken, with the looks that belong to them.
    """
    pyro.set_rng_seed(0)
    x, y = torch.rand(size, 784), torch.randint(10, (size,))
    gated = put_gates(make(), x[:2], None, lambda _: True).network
    cost = NetworkCost(gated, x[:2]).macs
    options = TargetOptions(0.1, cost, steps, True, lambda *_: None)
    phase = GatedPhase(gated, BatchLoss(F.cross_entropy, torch.device("cpu"), None), (x, y), options, None, None)
    target, spent = phase.target, [0.0, 0.0]

    def timed(call: Callable[[], None]) -> Callable[[], None]:
        def wrapper() -> None:
            start = time.perf_counter()
            call()
            spent[0] += time.perf_counter() - start

        return wrapper

    target.add_gradient, target.ascend = timed(target.add_gradient), timed(target.ascend)  # type: ignore[method-assign]
    plain, added = [], []
    for step in range(taken):
        if step % (taken // 40) == 0:  # in turns, as the machine's speed changes
            spent[1], before = spent[0], len(plain)
        start, by_target = time.perf_counter(), spent[0]
        phase.step([(x, y)])
        plain.append(time.perf_counter() - start - (spent[0] - by_target))
        if (step + 1) % (taken // 40) == 0:
            typical = statistics.median(plain[before:])
            added.append((spent[0] - spent[1]) / (taken // 40) / typical)
    typical = statistics.median(plain)
    return 1000 * typical, 1000 * typical * statistics.median(added)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", type=int, default=[1000, 3000])
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | steps | plain step, ms | added, ms | ratio |\n|---|---|---|---|---|", flush=True)
    for name in options.network:
        for steps in options.steps:
            for _ in range(options.repeat):
                plain, added = measure(*NETWORKS[name], steps, steps)
                print(f"| {name} | {steps} | {plain:.2f} | {added:.3f} | {1 + added / plain:.3f} |", flush=True)


if __name__ == "__main__":
    main()
