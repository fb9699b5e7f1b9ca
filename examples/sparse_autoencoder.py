"""Sparse autoencoders with L0 gates per example, beside top-k and L1, at the same number of active units.

An encoder gives each unit a magnitude for every example, and an L0 gate whose logit says how far that is above a
threshold; their product is the unit. A target keeps the gates to as many active units as top-k has, and a controller
moves the price of L1 until it has as many.
``superposition`` sums about 3 of 64 features, whose directions have 24 dimensions: one is recovered if a column of the
decoder has a cosine above 0.9 with it. ``activations`` are the second hidden layer of an MLP that learns digits.

``python examples/sparse_autoencoder.py`` takes a minute on one core. Writes a picture to ``--out``.
Sources: arXiv:2404.16014, 2407.14435 (L0 and gated units), 2406.04093 (top-k), 2209.10652 (superposition).
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import load_digits
from common.figures import figure_axes, plot_bars, plot_curves, save_figure
from pyro_l0.infer import ActiveTarget
from pyro_l0.nn import L0Gate

__all__ = ["Options", "Row", "main"]

METHODS, DIMENSIONS, FEATURES, RECOVERED = ("L0", "top-k", "L1"), 24, 64, 0.9
BATCH, LEARNING_RATE, GAIN = 200, 3e-3, 0.01  # the gain is of the price's logarithm, per step
SHARPNESS, THRESHOLD = 60.0, 0.4  # logits per unit of magnitude, and the magnitude at which gates are even at the start
USAGE = 0.3  # part of the mean rate at which a unit that explains nothing stays open


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        steps: of every training.
        seeds: each a run.
        out: folder for the picture.
    """

    steps: int = 3000
    seeds: tuple[int, ...] = (1,)
    out: Path = field(default=Path("runs/sparse_autoencoder"))


class Data(NamedTuple):
    train: Tensor  # (N, d)
    test: Tensor
    active: int
    units: int
    directions: Tensor  # of known features, (d, features)


class Row(NamedTuple):
    unexplained: float  # of the variance of the test examples, in percent
    active: float  # units per example
    dead: float  # units that are active in no example
    cosines: Tensor  # of each known feature with the nearest column


def main(options: Options) -> dict[tuple[str, str], list[Row]]:
    """Print the table and write the picture; returns a row for each seed by data set and method."""
    command.check(options)
    rows: dict[tuple[str, str], list[Row]] = {}
    with command.folder(options.out):
        command.plan(len(options.seeds) * 2 * len(METHODS) * options.steps)
        for seed in options.seeds:
            torch.manual_seed(seed)
            for name, data in {"superposition": superposition(), "activations": activations(options.steps)}.items():
                for method in METHODS:
                    rows.setdefault((name, method), []).append(measure(train(method, data, options.steps), data))
        print("data           method   unexplained %   active units     dead units   recovered of 64  mean cosine")
        for (name, method), found in rows.items():
            known = [[(row.cosines > RECOVERED).sum(), row.cosines.mean()] if len(row.cosines) else [] for row in found]
            columns = torch.tensor([[*row[:3], *more] for row, more in zip(found, known, strict=True)])
            spread = [f"{x.mean():9.2f} ± {x.std(correction=int(len(x) > 1)):.2f}" for x in columns.T]
            print(f"{name:15s}{method:6s}", *spread)
        error = {key: sum(row.unexplained for row in found) for key, found in rows.items()}
        better = all(error[name, "L0"] < error[name, "L1"] for name, _ in rows)
        most = all((row.cosines > RECOVERED).float().mean() >= 0.9 for row in rows["superposition", "L0"])
        print(f"L0 leaves less unexplained than L1: {better}. It recovers nine tenths of the features: {most}.")
        plot(rows, options.out / "sparse_autoencoder.png")
    return rows


def superposition() -> Data:
    """Sums of a few non-negative features times directions."""
    directions = F.normalize(torch.randn(DIMENSIONS, FEATURES), dim=0)
    x = ((torch.rand(25_000, FEATURES) < 3 / FEATURES) * (0.5 + torch.rand(25_000, FEATURES))) @ directions.T
    return scaled(x[5000:], x[:5000], 3, FEATURES, directions)


def activations(steps: int) -> Data:
    """A hidden layer of a trained MLP, on digits that are moved by up to a pixel."""
    images = load_digits()
    moves = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    parts = [part.view(-1, 8, 8) for part in (images.train_x, images.test_x)]
    x, test_x = (torch.cat([part.roll(move, (1, 2)).flatten(1) for move in moves]) for part in parts)
    hidden = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    network = nn.Sequential(hidden, nn.Linear(64, 10))
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    for _ in range(steps):
        chosen = torch.randint(len(x), (BATCH,))
        optimiser.zero_grad()
        F.cross_entropy(network(x[chosen]), images.train_y[chosen % len(images.train_y)]).backward()
        optimiser.step()
    return scaled(hidden(x).detach(), hidden(test_x).detach(), 8, 128, torch.zeros(64, 0))


def scaled(train: Tensor, test: Tensor, active: int, units: int, directions: Tensor) -> Data:
    """Centred, and scaled so that a unit which is active is about 1."""
    mean = train.mean(0)
    scale = math.sqrt(active / (train - mean).square().sum(1).mean())
    return Data(scale * (train - mean), scale * (test - mean), active, units, directions)


class Autoencoder(nn.Module):
    """``forward`` gives the reconstruction, the active units, what the price is paid for, and the gates of L0."""

    def __init__(self, method: str, data: Data) -> None:
        super().__init__()
        self.method, self.active = method, data.active
        directions = F.normalize(torch.randn(data.train.shape[1], data.units), dim=0)
        self.threshold = nn.Parameter(torch.full((data.units,), THRESHOLD))
        for name, weight in {"decoder": directions, "encoder": directions.T}.items():
            self.add_module(name, nn.Linear(*weight.T.shape))
            self.get_submodule(name).load_state_dict({"weight": weight, "bias": torch.zeros(len(weight))})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, L0Gate | None]:
        units, gate = self.encoder(x - self.decoder.bias).relu(), None
        price_of = units.sum(1).mean()  # L1, as columns have norm 1
        if self.method == "top-k":
            units = units * (units >= units.topk(self.active).values[:, -1:])
        active = units != 0
        if self.method == "L0":
            # Gates move thresholds only, as in JumpReLU autoencoders (2407.14435).
            gate = L0Gate.from_logits(SHARPNESS * (units.detach() - self.threshold)).train(self.training)
            # The KL of an even usage of the units to theirs: without it many die. In logs, as rates may underflow.
            log_usage = gate.distribution.log_active_prob.logsumexp(0) - math.log(len(x))
            price_of = -USAGE * self.active * log_usage.mean()
            units, active = gate(units), active & (gate.test_gate != 0)
        return self.decoder(units), active, price_of, gate


def train(method: str, data: Data, steps: int) -> Autoencoder:
    """Train an autoencoder until it has the wanted number of active units."""
    network = Autoencoder(method, data)
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    target = ActiveTarget(data.active, steps=max(steps, 10))
    price, first = 0.0 if method == "top-k" else 0.01, 0.0
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (steps - step) / (0.3 * steps))
        x = data.train[torch.randint(len(data.train), (BATCH,))]
        reconstruction, active, price_of, gate = network(x)
        if gate is not None:
            target.add_gradient(gate.distribution)
            price = float(target.multiplier)
        optimiser.zero_grad()
        ((reconstruction - x).square().sum(1).mean() + price * price_of).backward()
        optimiser.step()
        command.advance()
        if gate is not None:
            target.ascend()
        network.decoder.weight.data = F.normalize(
            network.decoder.weight.data, dim=0
        )  # or L1 is evaded by large columns
        count = float(active.sum(1).float().mean())
        first = first or max(count, data.active)
        wanted = first * (data.active / first) ** min(1.0, 2 * step / steps)  # it falls in half of the steps
        price *= math.exp(GAIN * max(-1.0, min(1.0, math.log((count + 1e-3) / wanted))))
    return network.eval()


@torch.no_grad()
def measure(network: Autoencoder, data: Data) -> Row:
    """Count on the test examples, with deterministic gates."""
    reconstruction, active, *_ = network(data.test)
    left = (reconstruction - data.test).square().sum() / (data.test - data.test.mean(0)).square().sum()
    cosines = (network.decoder.weight.T @ data.directions).amax(0)
    return Row(100 * left.item(), active.sum(1).float().mean().item(), (~active.any(0)).sum().item(), cosines)


def plot(rows: dict[tuple[str, str], list[Row]], path: Path) -> None:
    """What is unexplained, and how near the decoders come to the true features."""
    bars, curves = figure_axes(1, 2, figsize=(9, 3.2))
    tasks = ["superposition", "activations"]
    errors = {method: [[row.unexplained for row in rows[task, method]] for task in tasks] for method in METHODS}
    means = {method: [statistics.mean(x) for x in errors[method]] for method in METHODS}
    spreads = {method: [statistics.stdev(x) if len(x) > 1 else 0.0 for x in errors[method]] for method in METHODS}
    plot_bars(means, tasks, ylabel="unexplained variance, %", title="At equal L0", spreads=spreads, axes=bars)
    cosines = {
        method: torch.stack([row.cosines.sort().values for row in rows["superposition", method]]).mean(0)
        for method in METHODS
    }
    labels = {"xlabel": "true features, sorted", "ylabel": "cosine with the nearest column"}
    plot_curves(cosines, title="superposition", axes=curves, **labels)
    save_figure((bars, curves), path)


if __name__ == "__main__":
    command.run(main, Options, __doc__)
