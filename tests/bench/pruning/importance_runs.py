"""Gates and importance scores on one problem: training, pruning by a method, and the table of their errors."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_l0
from pyro_l0.nn import L0Gate, insert_gates, suggest_gates
from pyro_l0.pruning import Training
from pyro_l0.pruning.phases import Distillation
from pyro_l0.training import Checkpoint
from tests.bench.pruning.importance import prune_by_importance, train
from tests.bench.pruning.masks import MASKS, drawn_as, schedule

__all__ = ["METHODS", "Problem", "Row", "Shuffled", "pretrain", "prune", "table"]

TITLES = {
    "gates": "gates (pyro_l0.prune)",
    "l1": "L1, the same fraction of each layer",
    "l1_global": "L1, over all layers",
    "taylor": "Taylor per multiply-add",
    "taylor_floor": "Taylor per multiply-add, with a floor",
    "fisher": "Fisher per multiply-add",
    "fisher_floor": "Fisher per multiply-add, with a floor",
}
METHODS = tuple(TITLES)
TITLES |= {mask: f"gates, {mask}" for mask in MASKS}
ENTRIES = ("method", "budget", "seed", "dense", "cut", "end", "used")
Row = dict[str, Any]


class Shuffled:
    """Passes over some data in whole batches, shuffled anew in each; ``count`` of them if that is given."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, count: int | None = None) -> None:
        self.x, self.y, self.batch_size = x, y, batch_size
        self.count = len(x) // batch_size if count is None else count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.x)).split(self.batch_size)[: self.count]:
            yield self.x[chosen], self.y[chosen]


class Taught(Shuffled):
    """The same batches, whose targets are the classes and what a network in evaluation mode says of the inputs."""

    def __init__(self, batches: Shuffled, teacher: nn.Module) -> None:
        super().__init__(batches.x, batches.y, batches.batch_size, batches.count)
        self.teacher = teacher.eval()

    def __iter__(self) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        for x, y in super().__iter__():
            with torch.no_grad():
                taught = self.teacher(x)
            yield x, (y, taught)


@dataclass(frozen=True, eq=False)
class Problem:
    """What is trained and pruned, and for how many passes before the pruning and during it."""

    make: Callable[[], nn.Module]
    batches: Shuffled
    test_x: Tensor
    test_y: Tensor
    dense_epochs: int
    epochs: int
    finetune: float | None = None  # the part of them that gates leave to the network as cut
    distil: tuple[float, float] | None = None  # weight and temperature, for every method

    @property
    def example(self) -> Tensor:
        """What the network is called with."""
        return self.test_x[:1]

    @torch.no_grad()
    def error(self, network: nn.Module) -> float:
        network.eval()
        wrong = [network(x).argmax(1) != y for x, y in zip(self.test_x.split(500), self.test_y.split(500), strict=True)]
        return 100 * float(torch.cat(wrong).float().mean())


def pretrain(problem: Problem, seed: int, path: Path) -> nn.Module:
    """The dense network of a seed, trained, or read from where it was written when it was."""
    described = {"seed": seed, "epochs": problem.dense_epochs, "batches": len(problem.batches)}
    checkpoint = Checkpoint(path, described)
    torch.manual_seed(seed)
    network = problem.make()
    if path.exists():
        checkpoint.load(network.load_state_dict)
    else:
        train(network, problem.batches, problem.dense_epochs * len(problem.batches), F.cross_entropy)
        checkpoint.save(network.state_dict())
    return network


def places(network: nn.Module, example: Tensor) -> dict[str, L0Gate]:
    """Gates for every method: behind activations, or the max pools after them, and behind what flattens images.

    Places on the same units, as in a residual stream, have one gate, because what these units cost leaves only where
    all of them are closed. Parts of units, as the pixels of a flattened map, have none.
    """
    gates: dict[str, L0Gate] = {}
    for place in suggest_gates(network, example).locations:
        before = network.get_submodule(place.path)
        if isinstance(before, nn.ReLU | nn.MaxPool2d | nn.Flatten) and not place.is_composite:
            shared = [gates[path] for path in place.coupled if path in gates]
            gates[place.path] = shared[0] if shared else place.gate
    return gates


def prune(problem: Problem, network: nn.Module, method: str, budget: float, seed: int) -> Row:
    """Prune a copy of a trained network without gates by one method; how it did is a row of the table."""
    torch.manual_seed(seed)
    pyro.set_rng_seed(seed)
    gated = insert_gates(network, places(network, problem.example))
    row: Row = {"method": method, "budget": budget, "seed": seed, "dense": problem.error(network)}
    if method not in ("gates", *MASKS):
        steps = problem.epochs * len(problem.batches)
        batches, loss = problem.batches, F.cross_entropy
        if problem.distil is not None:
            batches, loss = Taught(batches, network), taught_loss(*problem.distil)
        found = prune_by_importance(gated, method, budget, batches, steps, loss, problem.example, problem.error)
        units = {site: int(gate.sum()) for site, gate in found.gates.items()}
        return {**row, "cut": found.cut, "end": found.end, "used": found.fraction / budget, "units": units}
    own = {"finetune": problem.finetune, "distil": problem.distil, "make_schedule": schedule(method)}
    training = Training(evaluate=problem.error, **own)
    options = {"epochs": problem.epochs, "training": training}
    with drawn_as(method):
        pruned = pyro_l0.prune(gated, F.cross_entropy, problem.batches, problem.example, budget, **options)
    left, full = pruned.report.left["macs"]
    units = {site: sum(value > 0 for value in gate) for site, gate in pruned.plan.gates.items()}
    return {**row, "cut": pruned.report.cut, "end": pruned.report.end, "used": left / full / budget, "units": units}


def taught_loss(weight: float, temperature: float) -> Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]:
    """The loss of :class:`Distillation` on outputs, and on targets that hold the teacher's outputs."""
    distillation = Distillation(nn.Identity(), weight, temperature)

    def loss(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        y, taught = targets
        return torch.lerp(F.cross_entropy(outputs, y), distillation.divergence(outputs, taught, y), weight)

    return loss


def summaries(rows: Sequence[Row]) -> dict[float, dict[str, list[Row]]]:
    """Rows by budget and method; of several ways of one score, the one of the smallest mean error at the end."""
    found: dict[float, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["budget"], {}).setdefault(row["method"], []).append(row)
    best: dict[float, dict[str, list[Row]]] = {}
    for budget, methods in found.items():
        ways = itertools.groupby(sorted(methods, key=[*TITLES].index), _family)
        names = [min(names, key=lambda name, methods=methods: _mean(methods[name], "end")) for _, names in ways]
        best[budget] = {name: methods[name] for name in names}
    return best


def _family(method: str) -> str:
    return method.partition("_")[0]


def table(rows: Sequence[Row]) -> str:
    """Rows of budgets and methods, as Markdown."""
    dense = list({row["seed"]: row for row in rows}.values())
    lines = [
        f"Test error of the dense network: {_spread(dense, 'dense')} %.",
        "",
        "| budget | method | error at the cut, % | error at the end, % | part of the budget used | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for budget, methods in summaries(rows).items():
        for method, found in methods.items():
            errors = f"{_spread(found, 'cut')} | {_spread(found, 'end')}"
            lines.append(f"| {budget:g} | {TITLES[method]} | {errors} | {_mean(found, 'used'):.3f} | {len(found)} |")
    return "\n".join(lines)


def _mean(rows: Sequence[Row], entry: str) -> float:
    return statistics.fmean(row[entry] for row in rows)


def _spread(rows: Sequence[Row], entry: str) -> str:
    """Mean and standard deviation, the latter of several seeds alone."""
    mean = f"{_mean(rows, entry):.2f}"
    return mean if len(rows) == 1 else f"{mean} ± {statistics.stdev(row[entry] for row in rows):.2f}"
