"""What a user may give as a budget, in one form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from pyro_l0.distributions.parameters import check_rate
from pyro_l0.infer.target.budget import Cost

__all__ = ["falling", "named"]


def falling(budget: float | Sequence[float] | Mapping[str, float]) -> list[float]:
    """The budgets of one run, the last one last."""
    if isinstance(budget, Mapping):
        return [0.0]
    budgets = list(budget) if isinstance(budget, Sequence) else [budget]
    if not budgets or any(b >= a for a, b in itertools.pairwise(budgets)):
        raise ValueError(f"Expected budgets that fall from one to the next, but got {budgets}.")
    return budgets


def named(
    budget: float | Sequence[float] | Mapping[str, float],
    cost: Cost | Mapping[str, Cost] | None,
    gates: Mapping[str, Tensor],
) -> tuple[dict[str, float], dict[str, Cost | None]]:
    """Final budgets and costs by name; None for the number of open gates of a site."""
    if isinstance(budget, Mapping):
        for name, value in budget.items():
            check_rate(f"budget[{name!r}]", value, "a target")
        if cost is None:
            unknown = [name for name in budget if name not in gates]
            if unknown:
                raise ValueError(f"Expected a budget by gate site, one of {sorted(gates)}, but got {unknown[0]!r}.")
            return dict(budget), dict.fromkeys(budget)
        if not isinstance(cost, Mapping) or cost.keys() != budget.keys():
            names = sorted(cost) if isinstance(cost, Mapping) else "one cost without a name"
            raise ValueError(f"Expected a cost for each budget of {sorted(budget)}, but got {names}.")
        return dict(budget), dict(cost)
    for value in falling(budget):
        check_rate("budget", value, "a target")
    if cost is None or isinstance(cost, Mapping):
        raise ValueError("Expected one cost with one budget for the network, or budgets by the names of several costs.")
    return {"cost": falling(budget)[-1]}, {"cost": cost}
