"""What pruning returns, and what may have gone better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_l0.compaction.plan import Plan
from pyro_l0.infer.control.budget import Cost
from pyro_l0.infer.control.sparsity_target import TargetReport
from pyro_l0.pruning.phases import BatchLoss

__all__ = [
    "Note",
    "Pruned",
    "PruningReport",
    "choice_of",
    "largest_unit",
    "looks_untrained",
    "notes_on",
    "notes_on_latency",
]


FEW_STEPS = 300
_LARGE = 0.05  # of a budget, for a unit
_USED = 0.95  # of a budget
_FAR = 3.0  # times the error of the network as it was given
_SLOW = 1.1  # of a budget of latency, as it was measured
_UNTRAINED = 0.95  # of the loss with shuffled targets


class Note(NamedTuple):
    """A sentence on how a run went, for the report and, if it is a warning, as such."""

    text: str
    is_warning: bool  # whether there is something to do about it


@torch.no_grad()
def looks_untrained(network: nn.Module, loss: BatchLoss, batch: object) -> bool:
    """Whether outputs fit their targets no better than others' targets; False where that is unknown."""
    training = network.training
    network.eval()
    try:
        inputs, targets = loss.split(batch)
        outputs = loss.outputs(network, inputs)
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or not outputs.dim() or len(outputs) < 8:
            return False
        if targets.shape[:1] != outputs.shape[:1]:
            return False
        order = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(0)).to(outputs.device)
        own, others = (float(loss.of_outputs(x, targets)) for x in (outputs, outputs[order]))
    finally:
        network.train(training)
    return not own < _UNTRAINED * others


@torch.no_grad()
def largest_unit(
    budgets: Mapping[str, float], costs: Mapping[str, Cost], gates: Mapping[str, Tensor], in_step: Mapping[str, int]
) -> float:
    """The largest share of a budget, by the name of its cost, that an open unit takes, or those that leave with it."""
    is_open = {site: (gate != 0).float() for site, gate in gates.items()}
    largest = 0.0
    full = {site: torch.ones_like(gate) for site, gate in gates.items()}
    for name, cost in costs.items():
        whole, limit = float(cost(is_open)), budgets[name] * float(cost(full))
        for site, gate in is_open.items():
            if bool(gate.any()):
                without = gate.clone()
                without[gate.topk(min(in_step.get(site, 1), len(gate))).indices] = 0.0
                largest = max(largest, (whole - float(cost({**is_open, site: without}))) / limit)
    return largest


def notes_on(
    report: TargetReport,
    largest: float,
    steps: int,
    untrained: bool,
    errors: tuple[float | None, float | None],
    in_the_way: Mapping[str, str],
) -> list[Note]:
    """The notes on a run of so many steps, with the report of its target when the gates were done.

    ``errors`` are of the network as it was given and of the compacted one; ``in_the_way`` says by module path why units
    could not be taken out.
    """
    notes: list[Note] = []

    def tell(text: str, is_warning: bool = True) -> None:
        notes.append(Note(text, is_warning))

    if untrained:
        tell(
            "The network looks untrained: its loss is about that with shuffled targets. Give pretrained=False, or load "
            "its weights first."
        )
    if steps < FEW_STEPS:
        tell(f"{steps} steps are few; give epochs for {FEW_STEPS} or more.")
    for path, why in in_the_way.items():
        tell(f"There is no gate behind {path!r}, whose units can't be removed: {why}")
    used = report.of_budget
    if used < _USED:
        tell(
            f"{used:.1%} of the budget is used; the largest unit takes {largest:.1%} of it. A larger budget, or "
            "finer gates, would use more."
        )
    elif largest > _LARGE:
        tell(f"The largest unit takes {largest:.1%} of the budget, which can't be met more exactly.", False)
    if report.at_minimum:
        tell(
            f"Sites at their minimum: {', '.join(report.at_minimum)}. The budget is small for these layers.",
            False,
        )
    dense, cut = errors
    if dense is not None and cut is not None and cut > _FAR * dense >= 0:
        tell(f"The error was {dense:.4g} and is {cut:.4g} as cut; more epochs, or a larger budget, keep more of it.")
    return notes


def choice_of(kept: str, losses: Mapping[str, float], steps: int) -> str | None:
    """Which of two cuts was kept, as a sentence with the losses of both after so many steps; None if there was one."""
    if not losses:
        return None
    (other,) = losses.keys() - {kept}
    return (
        f"The units chosen by {_named(kept)} were kept: {steps} steps after the cut their loss on held-out batches was "
        f"{losses[kept]:.4g}, and {losses[other]:.4g} of those by {_named(other)}."
    )


def _named(by: str) -> str:
    return by if by == "gates" else f"{by} scores"


def notes_on_latency(times: tuple[float, float], budgets: Mapping[str, float]) -> list[Note]:
    """A note where the pruned network takes longer than its budget; the times are its own and the whole network's."""
    reached = times[0] / times[1]
    budget = budgets.get("latency", budgets.get("cost", 1.0))
    if reached <= _SLOW * budget:
        return []
    text = f"The latency was measured to be {reached:.1%} of the whole network's, and the budget is {budget:.1%}. "
    return [Note(text + "Measure where nothing else runs, with a larger example, or give a smaller budget.", True)]


@dataclass(frozen=True)
class PruningReport:
    """How a network was pruned; it prints as text.

    Attributes:
        target: the budgets, and how much of them the deterministic network used at the last step with gates, before any
            unit was removed.
        left: by ``"macs"`` (multiply-adds per example), ``"weights"`` and ``"parameters"``, how many are left, and of
            how many; if ``"latency"`` is a cost, also the microseconds of a call, measured on both networks.
        dense: error (by ``evaluate``) of the network as it was given; None without it.
        cut: error of the compacted network before fine-tuning.
        end: error of the network that is returned.
        largest_unit: the largest share of a budget that one unit takes, or one block of ``multiple_of`` units.
        skipped: by module path, why there is no gate.
        units: by site, how many of its units stay, and of how many; fewer than are open, where several leave together.
        notes: what may have gone better, and what to do.
        choice: whether the units chosen by gates or those of the best scores were kept, with both losses; None if there
            was no trial, as of frozen weights or a network that was not trained before.
    """

    target: TargetReport
    left: Mapping[str, tuple[float, float]]
    dense: float | None
    cut: float | None
    end: float | None
    largest_unit: float
    skipped: Mapping[str, str]
    units: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...]
    choice: str | None = None

    def __str__(self) -> str:
        units = {"latency": " microseconds"}
        lines = [
            f"{name}: {n:,.0f} of {of:,.0f}{units.get(name, '')} ({n / of:.1%})"
            for name, (n, of) in self.left.items()
            if of
        ]
        numbers = {"as given": self.dense, "as cut": self.cut, "at the end": self.end}
        lines += [f"{when}: {value:.4g}" for when, value in numbers.items() if value is not None]
        lines.append(str(self.target))
        for site, (left, of) in self.units.items():
            if left != self.target.open.get(site, (left, of))[0]:
                lines.append(f"{site}: {left} of {of} units stay, as some leave only together")
        if self.choice is not None:
            lines.append(self.choice)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class Pruned:
    """What :func:`~pyro_l0.prune` returns: a smaller network and how it was made.

    Attributes:
        network: the small network, of the class that was given, fine-tuned unless its weights are frozen, and in
            evaluation mode.
        report: what was reached, and notes.
        certificate: largest relative difference between the compacted network and the one with fixed gates that it
            was made from; see :class:`~pyro_l0.compaction.Compacted`.
        history: an entry for every epoch: its number, the steps taken, the mean loss, the fraction of the full
            network's cost, and the error by ``evaluate``.
        plan: which part of every tensor is kept, by the names of the network with gates.
        on_the_way: the networks of the larger budgets, if several were given, in their order.
    """

    network: nn.Module
    report: PruningReport
    certificate: float
    history: tuple[Mapping[str, float], ...] = field(repr=False)
    plan: Plan = field(repr=False)
    on_the_way: tuple[Pruned, ...] = field(default=())
