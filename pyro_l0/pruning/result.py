"""What pruning returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from pyro_l0.compaction.plan import Plan
from pyro_l0.infer.target.report import TargetReport

__all__ = ["Pruned", "PruningReport"]


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
        units: by site, how many of its units stay, and of how many; less than are open where several leave together.
        notes: what may have gone better, and what to do.
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
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class Pruned:
    """What :func:`~pyro_l0.prune` returns: a smaller network and how it was made.

    Attributes:
        network: the small network, of the class that was given, fine-tuned and in evaluation mode.
        report: what was reached, and notes.
        certificate: largest relative difference between the compacted network and the one with fixed gates that it
            was made from; see :class:`~pyro_l0.compaction.storage.Compacted`.
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
