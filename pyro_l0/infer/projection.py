"""Which open gates to close so that a network is within its budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

_WASTE = 0.95
_Place = tuple[str, int]  # site, and place in the flattened site
_Gates = dict[str, Tensor]


def places_to_close(
    open_gates: _Gates,
    probs: Mapping[str, Tensor],
    fraction: Callable[[_Gates], Tensor],
    budget: Tensor,
    sites: Sequence[str],
) -> dict[str, list[int]]:
    """The least valuable open gates without which a network is within its budget.

    Args:
        open_gates: 1 for gates that are open, 0 for others; changed to what is left.
        probs: P(z != 0) by site, by which the gates leave from below.
        fraction: cost of given gates over that of all, shape ``(k,)``.
        budget: largest fraction of each constraint, shape ``(k,)``.
        sites: the site that each constraint is on; empty where one is on all.

    Returns:
        Places in the flattened site, by site.

    Raises:
        ValueError: no network with an open gate per site is within the budget.
    """
    order = sorted(
        (prob, name, i)
        for name, of_site in probs.items()
        for i, prob in enumerate(of_site.flatten().tolist())
        if bool(open_gates[name].flatten()[i])
    )
    closed = _close([(name, i) for _, name, i in order], open_gates, fraction, budget, sites)
    if bool((fraction(open_gates) > budget).any()):
        raise ValueError(f"Expected a budget that one open gate per site meets, but got {budget.tolist()}.")
    leaving: dict[str, list[int]] = {}
    for name, i in reversed(closed):  # those that a later one made needless stay open
        gate = open_gates[name].view(-1)
        gate[i] = 1.0
        if bool((fraction(open_gates) > budget).any()):
            gate[i] = 0.0
            leaving.setdefault(name, []).append(i)
    return leaving


def _close(
    order: Sequence[_Place],
    open_gates: _Gates,
    fraction: Callable[[_Gates], Tensor],
    budget: Tensor,
    sites: Sequence[str],
) -> list[_Place]:
    """Close gates in their order until the budget holds or each site has but one; return them in that order."""
    closed: list[_Place] = []
    # First without the gates that would waste the budget, such as the map of an early layer; then with them.
    for least in (_WASTE * budget, 0.0 * budget):
        for name, i in order:
            over = fraction(open_gates) > budget
            if not bool(over.any()):
                break
            gate = open_gates[name].view(-1)
            concerned = not sites or (name in sites and bool(over[sites.index(name)]))
            if not gate[i] or gate.sum() <= 1 or not concerned:
                continue
            gate[i] = 0.0
            if bool((over & (fraction(open_gates) < least)).any()):
                gate[i] = 1.0
            else:
                closed.append((name, i))
    return closed
