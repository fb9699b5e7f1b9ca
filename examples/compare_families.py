"""Every gate family under one protocol: the same network, schedule and sweep of lambda, so that curves are compared.

``python examples/compare_families.py`` takes a minute and a half on two cores of a laptop: it trains the MLP on the
digits once per family, lambda and seed (the paper on mixtures prints one point per family; a sweep tells a better
family from a luckier lambda, with ``--lams 0.05 0.1 0.2 0.4 0.8 --epochs 100``). Runs that are already in
``--out`` are not repeated, so a sweep can be stopped and continued; runs of other options there are refused. Writes
``families.md`` (the table) and ``families.png`` (error against weights left).
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import itertools
import statistics
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

import mnist
from common.figures import save_figure
from common.networks import FamilyName
from common.plots import plot_frontier
from common.sweep import results

__all__ = ["Options", "main"]

# The MLP's points as the papers print them (best epoch): weights left of 266,200 and error in percent.
PRINTED = {
    "hard_concrete": [(69_266, 1.4), (26_642, 1.8)],
    "exponential": [(16_028, 1.8)],
    "power_law": [(11_322, 1.8)],
    "exponential_uniform": [(10_002, 1.8)],
}
GATE_LEARNING_RATE = 3e-3
ENTRIES = ("test_error_percent", "weights_left", "architecture")


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        data: embedded digits, or MNIST.
        data_dir: folder with MNIST's four files; downloaded if not given.
        families: which families.
        lams: the sweep: prices of one open weight in nats, each a run.
        seeds: each a run.
        epochs: passes over the training images.
        hold_out: report on so many training images instead of the test images.
        out: folder for the runs, the table and the figure.
    """

    data: Literal["digits", "mnist"] = "digits"
    data_dir: Path | None = None
    families: tuple[FamilyName, ...] = field(default=get_args(FamilyName))
    lams: tuple[float, ...] = (0.1, 0.4)
    seeds: tuple[int, ...] = (1,)
    epochs: int = 50
    hold_out: int = 0
    out: Path = field(default=Path("runs/families"))


def main(options: Options) -> list[dict[str, Any]]:
    """Run what is missing, write the table and the figure; returns one row per family and lambda."""
    command.check(options)
    with command.folder(options.out):
        runs = [_run_options(options, *x) for x in itertools.product(options.lams, options.families, options.seeds)]
        command.plan(max(1, sum(not (run.out / "metrics.json").exists() for run in runs)), "run")
        found = results(_train, runs, lambda run: run.out / "metrics.json", mnist.describe, ENTRIES)
        rows = []
        for family, lam in itertools.product(options.families, options.lams):
            mine = [m for o, m in zip(runs, found, strict=True) if o.family == family and o.lam == (lam,)]
            row = {
                "family": family,
                "lam": lam,
                "errors": [m["test_error_percent"] for m in mine],
                "weights": [m["weights_left"] for m in mine],
                "units": ["-".join(map(str, m["architecture"])) for m in mine],
            }
            rows.append(row)
        table = _table(rows, bool(options.hold_out))
        (options.out / "families.md").write_text(table)
        _plot(rows, options)
        print(table)
        return rows


def _run_options(options: Options, lam: float, family: FamilyName, seed: int) -> mnist.Options:
    both = {field.name for field in fields(mnist.Options)}
    run = mnist.Options(**{name: x for name, x in asdict(options).items() if name in both})
    run = replace(run, shrink=True, gate_learning_rate=GATE_LEARNING_RATE)
    return replace(run, family=family, lam=(lam,), seed=seed, out=options.out / f"{family}-{lam:g}-{seed}")


def _train(run: mnist.Options) -> None:
    torch.set_num_threads(1)  # a step of this network is too short for more
    mnist.main(run)
    command.advance()


def _table(rows: list[dict[str, Any]], held_out: bool) -> str:
    what = "held-out error" if held_out else "test error"
    lines = [f"| family | λ | {what} | weights left | units left |", "|---|---|---|---|---|"]
    for row in rows:
        error = f"{statistics.mean(row['errors']):.2f}"
        if len(row["errors"]) > 1:
            error += f" ± {statistics.stdev(row['errors']):.2f}"
        weights = round(statistics.mean(row["weights"]))
        lines.append(f"| {row['family']} | {row['lam']:g} | {error} % | {weights:,} | {', '.join(row['units'])} |")
    return "\n".join(lines) + "\n"


def _plot(rows: list[dict[str, Any]], options: Options) -> None:
    def points(family: str) -> list[list[float]]:
        mine = [row for row in rows if row["family"] == family]
        return [[statistics.mean(row[of]) for row in mine] for of in ("weights", "errors")]

    families = dict.fromkeys(row["family"] for row in rows)
    published = {family: list(zip(*PRINTED[family], strict=True)) for family in families if family in PRINTED}
    axes = plot_frontier(
        {family: points(family) for family in families},
        published if options.data == "mnist" else None,
        error=f"{'held-out' if options.hold_out else 'test'} error, %",
    )
    save_figure(axes, options.out / "families.png")


if __name__ == "__main__":
    command.run(main, Options, __doc__)
