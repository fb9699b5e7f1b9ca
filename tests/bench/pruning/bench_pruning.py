"""What ``prune`` costs in error: python tests/bench/pruning/bench_pruning.py --out OUT

Networks: ``mlp``, 784-300-100 on MNIST with gates for its inputs; ``cnn``, three convolutions with BatchNorm and a
dense layer on MNIST; ``resnet``, a residual network of three blocks on 5,000 of CIFAR-10's images, 2,000 to test;
``plain``, three convolutions with max pools and a hidden layer, without BatchNorm, on as many other images of CIFAR-10.
Each is trained for 1,200 to 3,000 steps and then pruned in 1,000 steps, for every budget and seed. A row of the table
is a network and a budget: mean and standard deviation of the test error.

The data are MNIST's four files, in ``--mnist`` or the folder that PYRO_L0_MNIST names, and CIFAR-10's batches, in
``--cifar`` or PYRO_L0_CIFAR. A run takes some seconds for the MLP, half a minute for the CNN and one to two minutes
for the other two; what is in OUT is not run again. ``--table`` prints what is there and runs nothing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

import pyro_l0
from common.cifar import load_cifar
from common.data import load_mnist
from common.residual import ResidualNetwork
from common.sweep import read_result, write_json
from pyro_l0.nn import L0Gate, insert_gates, suggest_gates
from pyro_l0.pruning import Training
from pyro_l0.training import Checkpoint

STEPS, PASS = 1000, 50  # batches per pass, of which there are whole numbers in all the steps
DENSE_STEPS = {"mlp": 3000, "cnn": 2000, "resnet": 1200, "plain": 1200}
BUDGETS = (0.3, 0.05)
CIFAR_TRAIN, CIFAR_TEST = 5000, 2000
LEARNING_RATE, FALL = 1e-3, 0.75  # from which part of the steps on the rate falls
ENTRIES = ("budget", "seed", "dense", "cut", "end", "used")
Row = dict[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]


class Shuffled:
    """Passes over some data in whole batches, shuffled anew in each; ``count`` of them."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, count: int) -> None:
        self.x, self.y, self.batch_size, self.count = x, y, batch_size, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.x)).split(self.batch_size)[: self.count]:
            yield self.x[chosen], self.y[chosen]


def train(
    network: nn.Module,
    batches: Iterable[Any],
    steps: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> None:
    """Train in place by Adam, whose steps fall to 0 by a cosine over the last quarter."""
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)
    passes = itertools.chain.from_iterable(itertools.repeat(batches))
    network.train()
    for step, (x, y) in enumerate(itertools.islice(passes, steps)):
        done = max(0.0, (step / steps - FALL) / (1 - FALL))
        optimiser.param_groups[0]["lr"] = LEARNING_RATE * (0.5 + 0.5 * math.cos(math.pi * done))
        optimiser.zero_grad()
        loss_fn(network(x), y).backward()
        optimiser.step()


def mlp() -> nn.Module:
    """The MLP 784-300-100 on images, without gates."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def cnn() -> nn.Module:
    """Convolutions 5x5 and 3x3 of stride 2 with BatchNorm, 16-32-64 maps, their means, and 64 dense units."""
    layers: list[nn.Module] = []
    for before, maps, size in ((1, 16, 5), (16, 32, 3), (32, 64, 3)):
        layers += [nn.Conv2d(before, maps, size, 2, size // 2), nn.BatchNorm2d(maps), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def resnet() -> nn.Module:
    return ResidualNetwork(3, (16, 32, 64), stride=2)


def plain() -> nn.Module:
    """Convolutions 3x3 of 24, 48 and 64 maps, the first of stride 2 and the others before max pools, and 128 units."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU()]
    for before, maps in ((24, 48), (48, 64)):
        layers += [nn.Conv2d(before, maps, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


MAKE = {"mlp": mlp, "cnn": cnn, "resnet": resnet, "plain": plain}


@dataclass(frozen=True, eq=False)
class Problem:
    """A network, the batches of its training, and its test images."""

    name: str
    batches: Shuffled
    test_x: Tensor
    test_y: Tensor

    @torch.no_grad()
    def error(self, network: nn.Module) -> float:
        network.eval()
        wrong = [network(x).argmax(1) != y for x, y in zip(self.test_x.split(500), self.test_y.split(500), strict=True)]
        return 100 * float(torch.cat(wrong).float().mean())


def problem(network: str, mnist: Path | None, cifar: Path | None) -> Problem:
    """A network and its data."""
    if network in ("resnet", "plain"):
        images = load_cifar(cifar)
        part = int(network == "plain")  # which of the images
        train, test = (slice(part * count, (part + 1) * count) for count in (CIFAR_TRAIN, CIFAR_TEST))
        train_x, test_x = ((x.float() / 255 - 0.47) / 0.25 for x in (images.train_x[train], images.test_x[test]))
        return Problem(network, Shuffled(train_x, images.train_y[train], 64, PASS), test_x, images.test_y[test])
    digits = load_mnist(mnist)
    train_x, test_x = (x.unflatten(1, digits.image_shape) for x in (digits.train_x, digits.test_x))
    return Problem(network, Shuffled(train_x, digits.train_y, 100, PASS), test_x, digits.test_y)


def pretrained(problem: Problem, seed: int, path: Path) -> nn.Module:
    """The dense network of a seed, trained, or read from where it was written when it was."""
    checkpoint = Checkpoint(path, {"seed": seed, "steps": DENSE_STEPS[problem.name]})
    torch.manual_seed(seed)
    network = MAKE[problem.name]()
    if path.exists():
        checkpoint.load(network.load_state_dict)
    else:
        train(network, problem.batches, DENSE_STEPS[problem.name])
        checkpoint.save(network.state_dict())
    return network


def places(network: nn.Module, example: Tensor) -> dict[str, L0Gate]:
    """Gates behind activations, or the max pools after them, and behind what flattens images.

    Places on the same units, as in a residual stream, have one gate, because what these units cost leaves only where
    all of them are closed. Parts of units, as the pixels of a flattened map, have none.
    """
    kinds = nn.ReLU, nn.MaxPool2d, nn.Flatten
    found = (place for place in suggest_gates(network, example).locations if not place.is_composite)
    return {place.path: place.gate for place in found if isinstance(network.get_submodule(place.path), kinds)}


def prune(problem: Problem, network: nn.Module, budget: float, seed: int) -> Row:
    """Prune a copy of a trained network; how it did is a row of the table."""
    torch.manual_seed(seed)
    pyro.set_rng_seed(seed)
    example = problem.test_x[:1]
    gated = insert_gates(network, places(network, example))
    options: dict[str, Any] = {"epochs": STEPS // PASS, "training": Training(evaluate=problem.error)}
    report = pyro_l0.prune(gated, F.cross_entropy, problem.batches, example, budget, **options).report
    left, full = report.left["macs"]
    row = {"budget": budget, "seed": seed, "dense": problem.error(network)}
    return {**row, "cut": report.cut, "end": report.end, "used": left / full / budget}


def run(network: str, options: argparse.Namespace) -> list[Row]:
    """The rows of a network, those that are missing computed unless the table alone is asked for."""
    rows, data, described = [], None, {"network": network, "steps": STEPS}
    for seed, budget in itertools.product(options.seeds, options.budget):
        path = options.out / f"{network}-gates-{budget:g}-{seed}.json"
        if not path.exists():
            if options.table:
                continue
            data = data or problem(network, options.mnist, options.cifar)
            dense = pretrained(data, seed, options.out / f"{network}-dense-{seed}.pt")
            start = time.perf_counter()
            row = prune(data, dense, budget, seed)
            write_json(path, {**row, "seconds": time.perf_counter() - start, "options": described})
            print(network, row, f"{time.perf_counter() - start:.0f} s", flush=True)
        rows.append(read_result(path, described, ENTRIES))
    return rows


def spread(rows: Sequence[Row], entry: str) -> str:
    """Mean and standard deviation, the latter of several seeds alone."""
    mean = f"{statistics.fmean(row[entry] for row in rows):.2f}"
    return mean if len(rows) == 1 else f"{mean} ± {statistics.stdev(row[entry] for row in rows):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--network", choices=list(MAKE), nargs="+", default=list(MAKE))
    parser.add_argument("--budget", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--mnist", type=Path, default=os.environ.get("PYRO_L0_MNIST"))
    parser.add_argument("--cifar", type=Path, default=os.environ.get("PYRO_L0_CIFAR"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {network: run(network, options) for network in options.network}
    print("| network | budget | dense, % | as cut, % | at the end, % | part of the budget used | seeds |")
    print("|---|---|---|---|---|---|---|")
    for network, budget in itertools.product(found, options.budget):
        if rows := [row for row in found[network] if row["budget"] == budget]:
            errors = " | ".join(spread(rows, entry) for entry in ("dense", "cut", "end"))
            used = statistics.fmean(row["used"] for row in rows)
            print(f"| {network} | {budget:g} | {errors} | {used:.3f} | {len(rows)} |")


if __name__ == "__main__":
    main()
