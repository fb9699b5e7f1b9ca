"""Other ways to prune units, on the same network, schedule and accounting as ours.

``python tests/bench/pruning/comparators.py --data mnist`` trains an MLP 784-300-100 with each method and prunes it by
the rule that the method's paper publishes; the library counts what is left and compacts it. A group is what reads a
unit, as in the L0 paper. ``--methods`` chooses, ``--strength`` scales every method's one knob, which is set for the MLP
on MNIST. ``--network lenet5`` has the method in the second convolution, whose units are maps, and in both dense layers;
a map that no dense input is left of leaves, too. Runs that are already in ``--out`` are not repeated; runs of other
options there are refused.

Each method's penalty, and when a unit leaves:

- dropout: none; never.
- concrete_dropout: entropy and weights per layer (Gal et al. 2017); never.
- generalized: Beta prior on each unit's rate (Srinivas, Babu 2016); its rate is below 1/2.
- sparse_vd: KL per weight (Molchanov et al. 2017); all its weights have log alpha above 3.
- vibnet: KL of unit noise (Dai et al. 2018); its noise exceeds its signal.
- sbp: KL of log-normal noise (Neklyudov et al. 2017); signal to noise is below 1.
- bc_gnj: KL of group and weight noise (Louizos et al. 2017); log alpha of its group is above 3.
- bc_ghs: KL of half-Cauchy scales and weight noise (the same); the mode of its scale is below a twentieth.
- group_lasso: norm of a group, by proximal steps (Yuan, Lin 2006); its group is 0.
- admm: distance from a pruned copy (Boyd et al. 2011); it is not among the k largest.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common import command
from common.data import Images, load_images
from common.networks import NetworkName, build
from common.sweep import results, write_json
from pyro_l0.compaction import compact
from pyro_l0.nn import NetworkCost, fix_gates
from pyro_l0.nn.gate import name_gates
from pyro_l0.training.epochs import check_finite
from tests.bench.pruning.comparator_methods import METHODS, Convolution, Layer

__all__ = ["Options", "main", "train"]

MethodName = Literal[tuple(METHODS)]


@dataclass(frozen=True)
class Options:
    """The command line."""

    data: Literal["digits", "mnist"] = "digits"
    data_dir: Path | None = None
    """Folder with MNIST's four files; downloaded if not given."""
    network: NetworkName = "mlp"
    methods: tuple[MethodName, ...] = field(default=tuple(METHODS))
    strength: tuple[float, ...] = (1.0,)
    """Factors on each method's knob, each a run."""
    epochs: int = 100
    seeds: tuple[int, ...] = (1,)
    hold_out: int = 0
    """Report on so many training images instead of the test images."""
    out: Path = field(default=Path("runs/comparators"))


Task = tuple[Options, str, float, int]  # with strength and seed
ENTRIES = ("method", "strength", "test_error_percent", "weights_left", "architecture")


def lenet5(make: Callable[[int, int], Layer]) -> nn.Sequential:
    """LeNet-5 without gates, and a method's layers in it."""
    convolution = Convolution(make(20, 50 * 25), 5)
    front = nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)
    middle = convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*front, *middle, make(800, 500), nn.ReLU(), make(500, 10))


def train(
    images: Images, method: str, epochs: int, seed: int, strength: float, network: NetworkName = "mlp"
) -> dict[str, Any]:
    """Train a network by one method, whose penalty is charged in full from half of the epochs on, and prune it."""
    torch.manual_seed(seed)
    make = partial(METHODS[method], strength=strength)
    if network == "mlp":
        net = nn.Sequential(make(images.train_x.shape[1], 300), nn.ReLU(), make(300, 100), nn.ReLU(), make(100, 10))
    else:
        net = lenet5(make)
    layers = [module for module in net.modules() if isinstance(module, Layer)]
    optimiser = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
    total = epochs * math.ceil(len(images.train_x) / 100)
    step = 0
    start = time.perf_counter()
    for _ in range(epochs):
        for index in torch.randperm(len(images.train_x)).split(100):
            optimiser.zero_grad()
            warm = min(1.0, 2 * (step + 1) / total)
            penalty = sum((layer.penalty() for layer in layers), torch.zeros(()))
            loss = F.cross_entropy(net(images.train_x[index]), images.train_y[index])
            (loss + warm / len(images.train_x) * penalty).backward()
            optimiser.step()
            step += 1
            for layer in layers:
                layer.after_step(step / total)
    check_finite(epochs, float(loss.detach()), net)
    found = _measure(images, net, network)
    return {"method": method, "strength": strength, **found, "seconds": time.perf_counter() - start}


@torch.no_grad()
def _measure(images: Images, net: nn.Sequential, network: NetworkName) -> dict[str, Any]:
    """The pruned network, compacted: its error and its size."""
    plain = build(network, images.train_x.shape[1])
    kinds = nn.Linear, nn.Conv2d
    copies = [layer for layer in plain if isinstance(layer, kinds)]
    stay = []
    for layer, copy in zip((m for m in net if isinstance(m, (*kinds, Layer, Convolution))), copies, strict=True):
        if isinstance(layer, kinds):
            copy.load_state_dict(layer.state_dict())
            continue
        own = layer.layer if isinstance(layer, Convolution) else layer
        weight, keep = own.pruned()
        keep = keep.clone()
        keep[weight.abs().sum(0).argmax()] = True  # a network that is left without a unit says nothing
        stay.append(keep.float())
        is_dense = own is layer
        copy.weight.copy_(weight if is_dense else layer.as_filters(weight))
        copy.bias.copy_(own.linear.bias if is_dense else own.linear.bias.view(len(copy.bias), -1).sum(1))
    if network == "lenet5":
        stay.insert(1, stay[1].view(50, 16).amax(1))
    gates = dict(zip(name_gates(plain), stay, strict=True))
    cost = NetworkCost(plain, images.test_x[:1])
    small = compact(plain, gates, images.test_x[:100])
    predicted = torch.cat([fix_gates(plain, gates)(x).argmax(-1) for x in images.test_x.split(1000)])
    return {
        "test_error_percent": 100 * float((predicted != images.test_y).float().mean()),
        "architecture": [int(gate.sum()) for gate in gates.values()],
        "weights_left": int(cost.weights(gates)),
        "certificate": small.certificate,
    }


def main(options: Options) -> list[dict[str, Any]]:
    """Run what is missing and write the table; returns one row per method, strength and seed."""
    command.check(options)
    with command.folder(options.out):
        return _sweep(options)


def _sweep(options: Options) -> list[dict[str, Any]]:
    tasks = list(itertools.product([options], options.methods, options.strength, options.seeds))
    described = _described(options)
    rows = results(_run, tasks, _result, lambda task: described, ENTRIES)
    lines = ["| method | strength | test error | weights left | units left |", "|---|---|---|---|---|"]
    for row in rows:
        units = "-".join(map(str, row["architecture"]))
        error = f"{row['test_error_percent']:.2f} %"
        lines.append(f"| {row['method']} | {row['strength']:g} | {error} | {row['weights_left']:,} | {units} |")
    (options.out / "comparators.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return rows


def _described(options: Options) -> dict[str, Any]:
    """The options that decide what all of a sweep's runs find."""
    return {name: getattr(options, name) for name in ("data", "network", "epochs", "hold_out")}


def _result(task: Task) -> Path:
    options, method, strength, seed = task
    return options.out / f"{method}-{strength:g}-{seed}.json"


def _run(task: Task) -> None:
    options, method, strength, seed = task
    torch.set_num_threads(1)
    images = load_images(options.data, options.data_dir, options.hold_out)
    found = train(images, method, options.epochs, seed, strength, options.network)
    write_json(_result(task), {**found, "options": _described(options)})


if __name__ == "__main__":
    command.run(main, Options, __doc__)
