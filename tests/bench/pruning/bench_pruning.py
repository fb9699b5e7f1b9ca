"""Gates beside importance scores: python tests/bench/pruning/bench_pruning.py --out OUT

Networks: ``mlp``, 784-300-100 on MNIST with gates for its inputs; ``cnn``, three convolutions with BatchNorm and a
dense layer on MNIST; ``resnet``, a residual network of three blocks on 5,000 of CIFAR-10's images, 2,000 to test, with
which nothing of ours was chosen but the share of the steps after the cut; ``plain``, three convolutions with max pools
and a hidden layer, without BatchNorm, on as many other images of CIFAR-10, with which nothing was chosen. Each is
trained for 1,200 to 3,000 steps and then pruned by every method in 1,000 steps, for every budget and seed. A row of the
table is a network, a budget and a method: mean and standard deviation of the test error.

The data are MNIST's four files, in ``--mnist`` or the folder that MNIST_DIR names, and CIFAR-10's batches, in
``--cifar`` or CIFAR_DIR. A run takes some seconds for the MLP, half a minute for the CNN and one to two minutes for the
other two; what is in OUT is not run again, so that a long comparison may be interrupted, or shared out by
``--network``, ``--budget``, ``--method`` and ``--seeds``. ``--table`` prints what is there and runs nothing. With
``--finetune`` gates leave another part of the steps to the network as cut, and with ``--distil WEIGHT TEMPERATURE``
every method distils from the trained network, for each of which OUT should be another folder.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common.cifar import load_cifar
from common.data import load_mnist
from common.residual import ResidualNetwork
from common.sweep import read_result, write_json
from tests.bench.pruning.importance_runs import ENTRIES, METHODS, Problem, Row, Shuffled, pretrain, prune, table
from tests.bench.pruning.masks import MASKS

STEPS, PASS = 1000, 50  # batches per pass, of which there are whole numbers in all the steps
DENSE_STEPS = {"mlp": 3000, "cnn": 2000, "resnet": 1200, "plain": 1200}
BUDGETS = (0.3, 0.05)
CIFAR_TRAIN, CIFAR_TEST = 5000, 2000


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


def problem(network: str, mnist: Path | None, cifar: Path | None) -> Problem:
    """A network and its data."""
    if network in ("resnet", "plain"):
        images = load_cifar(cifar)
        part = int(network == "plain")  # which of the images
        train, test = (slice(part * count, (part + 1) * count) for count in (CIFAR_TRAIN, CIFAR_TEST))
        train_x, test_x = ((x.float() / 255 - 0.47) / 0.25 for x in (images.train_x[train], images.test_x[test]))
        batches, test_y = Shuffled(train_x, images.train_y[train], 64, PASS), images.test_y[test]
    else:
        digits = load_mnist(mnist)
        train_x, test_x = (x.unflatten(1, digits.image_shape) for x in (digits.train_x, digits.test_x))
        batches, test_y = Shuffled(train_x, digits.train_y, 100, PASS), digits.test_y
    return Problem(MAKE[network], batches, test_x, test_y, DENSE_STEPS[network] // PASS, STEPS // PASS)


def run(network: str, budgets: Sequence[float], options: argparse.Namespace) -> list[Row]:
    """The rows of a network, those that are missing computed unless the table alone is asked for."""
    rows, data = [], None
    for seed, budget, method in itertools.product(options.seeds, budgets, options.method):
        path = options.out / f"{network}-{method}-{budget:g}-{seed}.json"
        described = {"network": network, "steps": STEPS}
        if options.finetune is not None:
            described["finetune"] = options.finetune
        if options.distil is not None:
            described["distil"] = options.distil
        if not path.exists():
            if options.table:
                continue
            own = {"finetune": options.finetune, "distil": options.distil and tuple(options.distil)}
            data = data or replace(problem(network, options.mnist, options.cifar), **own)
            dense = pretrain(data, seed, options.out / f"{network}-dense-{seed}.pt")
            start = time.perf_counter()
            row = prune(data, dense, method, budget, seed)
            write_json(path, {**row, "seconds": time.perf_counter() - start, "options": described})
            errors = f"dense {row['dense']:.2f} %, at the cut {row['cut']:.2f} %, at the end {row['end']:.2f} %"
            seconds = f"{time.perf_counter() - start:.0f} s"
            print(
                f"{network} {budget:g} {method} seed {seed}: {errors}, {row['used']:.3f} of the budget, {seconds}",
                flush=True,
            )
        rows.append(read_result(path, described, ENTRIES))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--network", choices=list(DENSE_STEPS), nargs="+", default=list(DENSE_STEPS))
    parser.add_argument("--budget", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--method", choices=(*METHODS, *MASKS), nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--finetune", type=float)
    parser.add_argument("--distil", type=float, nargs=2, metavar=("WEIGHT", "TEMPERATURE"))
    parser.add_argument("--mnist", type=Path, default=os.environ.get("MNIST_DIR"))
    parser.add_argument("--cifar", type=Path, default=os.environ.get("CIFAR_DIR"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {network: run(network, options.budget, options) for network in options.network}
    for network, rows in found.items():
        if rows:
            print(f"\n{network}. {table(rows)}", flush=True)


if __name__ == "__main__":
    main()
