"""The progress of a sparsity target, in numbers and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TargetReport"]


@dataclass(frozen=True)
class TargetReport:
    """The progress of a :class:`~pyro_l0.infer.SparsityTarget`, from its ``report()``; it prints as text.

    Attributes:
        step: steps taken.
        steps: number of steps with gates.
        fraction: by constraint, the cost of the deterministic network as a fraction of the full one's.
        budget: by constraint, the largest fraction at the end.
        undecided: the share of gates whose test gate is neither 0 nor 1.
        multiplier: by constraint, nats per unit of cost, such as per multiply-add.
        at_minimum: sites with no more open gates than their minimum, which close after all others.
        open: by site, the numbers of open gates and of all gates.
    """

    step: int
    steps: int
    fraction: Mapping[str, float]
    budget: Mapping[str, float]
    undecided: float
    multiplier: Mapping[str, float]
    at_minimum: tuple[str, ...]
    open: Mapping[str, tuple[int, int]]

    @property
    def of_budget(self) -> float:
        """The largest share of a budget that is used; above 1 if a budget is not met."""
        return max(self.fraction[name] / self.budget[name] for name in self.budget)

    def __str__(self) -> str:
        lines = [f"step {self.step} of {self.steps}, {self.undecided:.1%} of the gates undecided"]
        for name, budget in self.budget.items():
            lines.append(
                f"{name}: {self.fraction[name]:.4f} of the full network, budget {budget:.4g}, "
                f"{self.multiplier[name]:.3g} nats per unit of cost"
            )
        width = max((len(site) for site in self.open), default=0)
        for site, (number, of) in self.open.items():
            minimum = ", at its minimum" if site in self.at_minimum else ""
            lines.append(f"{site.ljust(width)}  {number} of {of} gates open{minimum}")
        return "\n".join(lines)
