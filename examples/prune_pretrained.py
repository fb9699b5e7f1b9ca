"""Prune a trained network to half of its multiply-adds, and to a twentieth, by ``pyro_l0.prune``.

A small residual network learns scikit-learn's digits. Then ``prune`` takes a copy of it to every budget, with as many
epochs as the training had. The table has the test error in percent when the units were taken out and at the end, and
the part of the budget that the network uses.

``python examples/prune_pretrained.py`` takes one to two minutes on one core. With seed 1 the dense network has an error
of 1.1 %. Expect 1 to 3 % with half or 30 % of the multiply-adds. So few steps are not enough for a twentieth: 9 %.

Writes ``pruned.md``, ``pruned.png`` and the pruned networks to ``--out``. A killed command goes on from there with
``--resume``.
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_l0
from common.data import load_digits
from common.figures import plot_curves, save_figure
from common.residual import ResidualNetwork
from pyro_l0.pruning import Training

__all__ = ["Options", "Row", "main"]

BATCH = 64
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        budgets: largest fractions of the multiply-adds.
        epochs: passes over the training images before and while a network is pruned.
        seed: seed of everything random.
        out: folder for the networks, the table and the plot.
        resume: go on from the checkpoints in it.
    """

    budgets: tuple[float, ...] = (0.5, 0.3, 0.1, 0.05)
    epochs: int = 15
    seed: int = 1
    out: Path = field(default=Path("runs/prune_pretrained"))
    resume: bool = False


class Row(NamedTuple):
    """A line of the table."""

    budget: float
    cut: float  # test error in percent, as cut
    end: float
    used: float  # part of the budget


def main(options: Options) -> list[Row]:
    """Train a network, prune it to every budget, write the table and the plot; returns one row per budget."""
    command.check(options)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with command.folder(options.out):
        command.advise("the same command with --resume goes on from the checkpoints")
        images = load_digits()
        train_x, test_x = (x.unflatten(1, images.image_shape) for x in (images.train_x, images.test_x))

        @torch.no_grad()
        def error(network: nn.Module) -> float:
            predicted = torch.cat([network.eval()(x).argmax(1) for x in test_x.split(500)])
            return 100 * float((predicted != images.test_y).float().mean())

        torch.manual_seed(options.seed)
        dense = ResidualNetwork(1, (16, 32))
        train(dense, DataLoader(TensorDataset(train_x, images.train_y), BATCH, shuffle=True), options.epochs)
        print(f"dense network: {error(dense):.2f} % test error")
        rows = []
        for budget in options.budgets:
            torch.manual_seed(options.seed)
            loader = DataLoader(TensorDataset(train_x, images.train_y), BATCH, shuffle=True)
            training = Training(evaluate=error, checkpoint=options.out / f"{budget:g}.pt", resume=options.resume)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the report's notes, printed below
                pruned = pyro_l0.prune(
                    dense, F.cross_entropy, loader, test_x[:2], budget, epochs=options.epochs, training=training
                )
            torch.save(pruned.network, options.out / f"{budget:g}-network.pt")
            left, full = pruned.report.left["macs"]
            rows.append(Row(budget, pruned.report.cut, pruned.report.end, left / full / budget))
            print("\n".join([f"budget {budget:g}:", *(f"  {line}" for line in str(pruned.report).splitlines())]))
        text = table(rows, error(dense))
        (options.out / "pruned.md").write_text(text + "\n")
        _plot(rows, error(dense), options.out / "pruned.png")
        print(text)
        return rows


def train(network: nn.Module, loader: DataLoader, epochs: int) -> None:
    """Train a network in place by Adam, whose steps fall to 0 by a cosine."""
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * len(loader))
    network.train()
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimiser.step()
            schedule.step()


def table(rows: list[Row], dense: float) -> str:
    """Rows as Markdown."""
    lines = [f"Test error of the dense network: {dense:.2f} %.", ""]
    lines += ["| budget | error as cut, % | error at the end, % | part of the budget used |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {x.budget:g} | {x.cut:.2f} | {x.end:.2f} | {x.used:.3f} |" for x in rows])


def _plot(rows: list[Row], dense: float, path: Path) -> None:
    """Error at the end against the multiply-adds that are left."""
    points = [[row.budget * row.used for row in rows], [row.end for row in rows]]
    labels = {"xlabel": "multiply-adds, of the dense network's", "ylabel": "test error, %"}
    axes = plot_curves({"pruned": points}, lines={"dense": dense}, xscale="log", **labels)
    axes.set_xticks(points[0], [f"{100 * fraction:.2g} %" for fraction in points[0]])
    axes.minorticks_off()
    save_figure(axes, path)


if __name__ == "__main__":
    command.run(main, Options, __doc__)
