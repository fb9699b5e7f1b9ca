"""WRN-16-1 on CIFAR, dense, with dropout and gates: python tests/bench/wrn/wrn_table.py ROW --seed SEED --data-dir DIR

Trains a row of the table for 40 epochs on one core, in bfloat16 where autocast takes it, with a checkpoint after every
epoch in a folder of its own under ``--out``; the same command goes on from there, and adds a line to ``--lines`` at the
end. ``--options '{"depth": 10, "hold_out": 5000}'`` is for runs apart, with ``--out`` and ``--lines`` of their own.
``--table`` prints all lines as a table in Markdown, and ``--figure FILE`` draws error and expected multiply-adds
over the epochs as Figure 4 of the L0 paper.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from cifar_wrn import CifarRun, Options, PlainRun, Run
from common.cifar import load_cifar
from common.figures import save_figure
from common.gated_run import train
from common.plots import plot_training
from tests.bench.wrn.runs import BudgetRun

LINES = Path(__file__).parent / "runs.jsonl"
Line = dict[str, Any]
GATED = {"gate_learning_rate": 1.0, "shrink": True}
# A row's name on the command line, in the table, its run, and the options that differ from the example's.
ROWS: dict[str, tuple[str, Callable[..., CifarRun], dict[str, Any]]] = {
    "dense": ("dense", PlainRun, {"network": "dense"}),
    "dropout": ("dropout 0.3", PlainRun, {"network": "dropout"}),
    "low": ("Eq. 22, λ = 0.1", Run, {**GATED, "lam": 0.1}),
    "middle": ("Eq. 22, λ = 0.3", Run, {**GATED, "lam": 0.3}),
    "high": ("Eq. 22, λ = 1", Run, {**GATED, "lam": 1.0}),
    "prior": ("Eq. 21, rate 0.1, λ = 0.3", Run, {**GATED, "lam": 0.3, "prior_active_prob": 0.1}),
    "budget": ("half of the multiply-adds", BudgetRun, {"lam": 0.0}),
    "noise": ("Eq. 22, λ = 0.003, rate 30", Run, {**GATED, "lam": 0.003, "gate_learning_rate": 30.0}),
    # The paper's beta, and its prices in parts of the hard concrete's.
    "exponential": ("exponential, β = 6, λ = 0.6", Run, {**GATED, "family": "exponential", "beta": 6.0, "lam": 0.6}),
    "exponential_uniform": (
        "exponential and uniform, β = 8, λ = 0.6",
        Run,
        {**GATED, "family": "exponential_uniform", "beta": 8.0, "lam": 0.6},
    ),
    "power_law": ("power law, β = 2, λ = 1.2", Run, {**GATED, "family": "power_law", "beta": 2.0, "lam": 1.2}),
}


def finished(given: argparse.Namespace) -> Line:
    """Train a row to its end, from its checkpoint if there is one; what it ended with."""
    _, make, settings = ROWS[given.row]
    settings = settings | given.options
    named = {"row": given.row, "data": given.data, "seed": given.seed}
    common = {"depth": 16, "width": 1, "epochs": 40, "amp": True, "data": given.data, "seed": given.seed}
    options = Options(**(common | settings))
    images = load_cifar(given.data_dir, given.data)
    run = make(images.hold_out(options.hold_out) if options.hold_out else images, options)
    run.advance = _timed(run.advance)
    path = given.out / f"{given.data}-{given.row}-{given.seed}" / "checkpoint.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    train(run, path, {**named, "settings": settings}, path.exists(), True)
    last = run.history[-1]
    over = "test_error_percent", "train_error_percent", "expected_macs", "macs_left", "processor_seconds"
    line = {**named, "epochs": options.epochs, "macs": run.cost.total_macs, "weights": run.cost.total_weights}
    line |= {name: [round(entry[name], 2) for entry in run.history] for name in over}
    if isinstance(run, Run):
        line |= {name: last[name] for name in ("architecture", "weights_left")}
        line["certificate"] = run.compacted().certificate
    return line


def _timed(advance: Callable[[], Line]) -> Callable[[], Line]:
    """An epoch, and its seconds of processor time, which what else the machine does changes little."""

    def timed() -> Line:
        start = time.process_time()
        return {**advance(), "processor_seconds": time.process_time() - start}

    return timed


def _mean(values: Sequence[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def print_table(lines: list[Line]) -> None:
    """Means and deviations over seeds at the final epoch; the time is the last epoch's, in parts of the first's."""
    names = "data", "row", "seeds", "error, %", "expected MACs, %", "MACs left, %", "maps left", "time", "certificate"
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for data in ("cifar10", "cifar100"):
        for row, (name, *_) in ROWS.items():
            runs = [line for line in lines if (line["data"], line["row"]) == (data, row)]
            runs.sort(key=lambda run: run["seed"])
            if not runs:
                continue
            errors = _mean([run["test_error_percent"][-1] for run in runs], 2)
            expected, left = (
                _mean([100 * run[of][-1] / run["macs"] for run in runs], 1) for of in ("expected_macs", "macs_left")
            )
            seconds = [run["processor_seconds"] for run in runs]
            last = _mean([of[-1] / of[0] for of in seconds], 2)
            maps = ", ".join(dict.fromkeys("-".join(map(str, run.get("architecture", ["all"]))) for run in runs))
            certificate = max((run["certificate"] for run in runs if "certificate" in run), default=None)
            shown = "" if certificate is None else f"{certificate:.1e}"
            seeds = ", ".join(str(run["seed"]) for run in runs)
            print(f"| {data} | {name} | {seeds} | {errors} | {expected} | {left} | {maps} | {last} | {shown} |")


def draw(lines: list[Line], path: Path) -> None:
    """Error and expected multiply-adds over the epochs, means of the seeds of each row on CIFAR-10."""
    error, macs = "test error, %", "expected multiply-adds, millions"
    panels: dict[str, dict[str, list[float]]] = {error: {}, macs: {}}
    for row, (name, *_) in ROWS.items():
        runs = [line for line in lines if (line["data"], line["row"]) == ("cifar10", row)]
        if runs and row != "noise":  # an eighth curve would repeat the first one's style
            epochs = range(runs[0]["epochs"])
            panels[error][name] = [statistics.mean(run["test_error_percent"][i] for run in runs) for i in epochs]
            panels[macs][name] = [statistics.mean(run["expected_macs"][i] for run in runs) / 1e6 for i in epochs]
    axes = plot_training(panels)
    axes[1].legend().remove()  # the rows are those of the first panel
    save_figure(axes, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", nargs="?", choices=ROWS)
    parser.add_argument("--data", default="cifar10", choices=["cifar10", "cifar100"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--options", type=json.loads, default={}, help="further options of the example, as JSON")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/wrn"))
    parser.add_argument("--lines", type=Path, default=LINES)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [json.loads(text) for text in given.lines.read_text().splitlines()] if given.lines.exists() else []
    names = "row", "data", "seed"
    if given.row is not None and all(any(line[x] != getattr(given, x) for x in names) for line in lines):
        lines.append(finished(given))
        with given.lines.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    if given.table:
        print_table(lines)
    if given.figure is not None:
        draw(lines, given.figure)


if __name__ == "__main__":
    main()
