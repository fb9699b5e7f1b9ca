"""Costs of gates with their limits, and the gates that stay open within these."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from pyro_l0.distributions.gate import check_rate
from pyro_l0.expect import expect, expect_count

__all__ = ["Budget", "BudgetTooSmallError", "Budgets", "Cost", "gates_within"]

Cost = Callable[[Mapping[str, Tensor]], Tensor]
Budgets = float | Sequence[float] | Mapping[str, float]
_Chunk = tuple[int, ...]  # gates of a site that close and open as one; mostly a single gate
_MINIMUM = 0.75  # of the units that an equal rate of open units at every site would leave within the budget
_ROUNDING = 1e-6
_SURELY = 0.5  # of what a gate costs by its coefficient; one that would not fit even so is not tried
_HALVINGS = 25
_BEFORE = 1e-3  # between positions
_FIRST = 1e6  # added to the position of a gate that closes after all others


class BudgetTooSmallError(ValueError):
    """The smallest network, of one open gate per site, costs more than its budget."""


class Budget:
    """Costs as fractions of the full network's, with their limits.

    A cost of None counts the open gates of the site of its name. ``least`` says how many gates of each site never
    close: those of ``at_least``, and one of several. Of the sites in ``multiple_of`` as many gates are open as a
    multiple of the number there, or all.

    Args:
        budget: largest fraction of the cost, or several that fall; or one of each of several costs, by name.
        cost: the cost, or several by the names of their budgets; None for the open gates of the sites by whose names
            budgets are given.
        like: all gates by site, whose values do not matter.
        at_least: by site, how many of its gates never close.
        multiple_of: by site, of what number the open gates are a multiple.

    Attributes:
        names: of the costs; ``"cost"`` of a single one.
        final: the limits, shape ``(k,)``.
        intermediate: the limits on the way to a single one.
        total: costs of the full network, shape ``(k,)``.
        smallest: costs of the smallest network over those of the full one, shape ``(k,)``.

    Raises:
        ValueError: a budget is outside (0, 1), or has no cost of its name; budgets do not fall; a site is unknown.
    """

    def __init__(
        self,
        budget: Budgets,
        cost: Cost | Mapping[str, Cost] | None,
        like: Mapping[str, Tensor],
        at_least: Mapping[str, int] | None = None,
        multiple_of: Mapping[str, int] | None = None,
    ) -> None:
        limits, costs, self.intermediate = _read(budget, cost)
        self.sizes = {site: gate.numel() for site, gate in like.items()}
        at_least = _by_site("at_least", at_least, 0, self.sizes)
        self.steps = dict.fromkeys(like, 1) | _by_site("multiple_of", multiple_of, 1, self.sizes)
        self.least = {site: self._whole(site, max(at_least.get(site, 0), int(n > 1))) for site, n in self.sizes.items()}
        self.names = list(costs)
        self._costs = [partial(_open_gates, name) if cost is None else cost for name, cost in costs.items()]
        self.sites = [name if cost is None else None for name, cost in costs.items()]
        device = next(iter(like.values())).device
        self.final = torch.tensor([limits[name] for name in self.names], dtype=torch.float32, device=device)
        with torch.inference_mode(False), torch.enable_grad():
            opened = {site: torch.ones_like(gate).requires_grad_() for site, gate in like.items()}
            try:
                values = [torch.as_tensor(cost(opened)) for cost in self._costs]
            except KeyError as error:
                sites = ", ".join(map(repr, like))
                raise ValueError(f"Expected a cost of the sites {sites}, but it asks for {error}.") from error
        self.total = torch.stack([value.detach().reshape(()) for value in values]).to(self.final)
        for name, value, total in zip(self.names, values, self.total.tolist(), strict=True):
            if not total > 0:
                raise ValueError(f"Expected a cost above 0 with all gates open, but {name!r} is {total}.")
            if not value.requires_grad:
                raise ValueError(
                    f"Expected a cost that torch can differentiate by its gates, but {name!r} has no gradient; compute "
                    "it from the tensors that it is given, without detach() and NumPy."
                )
        self._like = like
        self.smallest = self._at_rate(0.0)

    def _whole(self, site: str, number: int) -> int:
        """The next number of open gates that a site may have."""
        return min(self.sizes[site], -(-number // self.steps[site]) * self.steps[site])

    def to(self, device: torch.device) -> None:
        """Move the limits to the device where the gates are now."""
        self.final, self.total = self.final.to(device), self.total.to(device)
        self._like = {site: gate.to(device) for site, gate in self._like.items()}

    def fraction(self, gates: Mapping[str, Tensor]) -> Tensor:
        """Costs over those of the full network, shape ``(k,)``, of P(z != 0) or of 0 and 1 by site."""
        return torch.stack([torch.as_tensor(cost(gates)).reshape(()) for cost in self._costs]).float() / self.total

    def coefficients(self, active: Mapping[str, Tensor]) -> Tensor:
        """Derivatives of the logs of the expected costs by P(z != 0), all sites side by side; shape ``(k, n)``."""
        with torch.inference_mode(False), torch.enable_grad():
            at = {site: gate.detach().clone().requires_grad_() for site, gate in active.items()}
            rows = [
                torch.autograd.grad(value, list(at.values()), retain_graph=True, materialize_grads=True)
                for value in torch.log(self.fraction(at))
            ]
        return torch.stack([torch.cat([x.flatten() for x in row]) for row in rows])

    def _at_rate(self, rate: float) -> Tensor:
        """Costs with such a rate of open gates at every site, as fractions; shape ``(k,)``."""
        # A single gate switches a whole branch, which may go.
        numbers = {site: max(self.least[site], round(rate * n)) for site, n in self.sizes.items()}
        return self.fraction({site: _first(self._like[site], n) for site, n in numbers.items()})

    def is_within(self, fraction: float = 1.0) -> bool:
        """Whether the smallest network takes no more than a part of the budget."""
        return bool((self.smallest <= fraction * self.final * (1 + _ROUNDING)).all())

    def check(self) -> None:
        """Raise a BudgetTooSmallError if even the smallest network does not meet the budget."""
        _ = self.minimums  # found now, as a cost may soon be that of a network that has shrunk
        if self.is_within():
            return
        needed = {name: round(x, 4) for name, x in zip(self.names, self.smallest.tolist(), strict=True)}
        given = {name: round(x, 4) for name, x in zip(self.names, self.final.tolist(), strict=True)}
        is_plain = max(self.least.values()) <= 1
        smallest_is = "one open gate per site" if is_plain else "the gates that at_least and multiple_of keep open"
        is_flat = is_plain and max(needed.values()) >= 1
        advice = (
            "A cost has to fall as gates close."
            if is_flat
            else "Give a larger budget, or gates for more of the network."
        )
        raise BudgetTooSmallError(
            f"Expected a budget that {smallest_is} meet, which cost {needed} of the full network, but got {given}. "
            f"{advice}"
        )

    @cached_property
    def minimums(self) -> dict[str, int]:
        """How many gates of each site stay open before others close."""
        found = dict.fromkeys(self.sizes, 0.0)
        for k, site in enumerate(self.sites):
            low, high = 0.0, 1.0
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                low, high = (middle, high) if bool(self._at_rate(middle)[k] <= self.final[k]) else (low, middle)
            for name in self.sizes if site is None else [site]:
                found[name] = min(low, found[name]) if found[name] else low
        wanted = {site: round(_MINIMUM * found[site] * n) if n > 1 else 0 for site, n in self.sizes.items()}
        return {site: max(self.least[site], n // self.steps[site] * self.steps[site]) for site, n in wanted.items()}


def _read(
    budget: Budgets, cost: Cost | Mapping[str, Cost] | None
) -> tuple[dict[str, float], Mapping[str, Cost | None], list[float]]:
    """Final limits by name, their costs, and intermediate limits."""
    costs: object = cost
    if isinstance(budget, Mapping):
        final, falling = dict(budget), list[float]()
        costs = dict.fromkeys(budget) if cost is None else cost
    else:
        falling = list(budget) if isinstance(budget, Sequence) else [budget]
        if not falling or any(b >= a for a, b in itertools.pairwise(falling)):
            raise ValueError(f"Expected budgets that fall from one to the next, but got {falling}.")
        final = {"cost": falling[-1]}
        costs = {"cost": cost} if callable(cost) else cost
    for name, value in final.items() if isinstance(budget, Mapping) else (("", x) for x in falling):
        check_rate(f"budget[{name!r}]" if name else "budget", value, "a target")
    if not isinstance(costs, Mapping) or costs.keys() != final.keys():
        given = sorted(costs) if isinstance(costs, Mapping) else "one without a name" if cost else "none"
        raise ValueError(
            f"Expected one cost with one budget for the network, or a cost for each of several, but got budgets of "
            f"{sorted(final)} and costs {given}."
        )
    return final, costs, falling[:-1]


def gates_within(
    budget: Budget,
    limits: Tensor,
    positions: Tensor,
    is_open: Tensor,
    coefficients: Tensor,
    shapes: Mapping[str, torch.Size],
) -> Tensor:
    """Close the lowest gates until the limits hold, then open the highest that fit.

    A site keeps as many of its highest gates as its minimum before others close, and those that never close. Where it
    has multiples of a number of gates, so many that follow each other are one chunk, which closes and opens as a whole,
    by the mean of its positions. Positions, open gates and the result, 0 or 1, have all sites side by side, shape
    ``(n,)``; ``limits`` are on fractions of the costs, shape ``(k,)``; recent coefficients say where to search first.

    By greed, not the best set that fits: in a given order a fraction does not rise as more chunks close, so that the
    least number of them that meets a limit is found by :func:`first_that`, begun at the number whose sum of ``saved``
    would meet it. For several costs each is met in turn; what is then free is filled from the highest position down.
    """
    limits = limits * (1 + _ROUNDING)
    site_of = [site for site, shape in shapes.items() for _ in range(shape.numel())]
    chunks, fixed, gates = _rank(budget, positions, is_open, shapes)

    def fractions(gates: Tensor) -> Tensor:
        pieces = gates.split([shape.numel() for shape in shapes.values()])
        sites = zip(shapes.items(), pieces, strict=True)
        return budget.fraction({site: piece.view(shape) for (site, shape), piece in sites})

    # About what each open gate saves and each closed one costs; that of a chunk stands at its first gate.
    saved = coefficients * fractions(gates).unsqueeze(1)
    for chunk in chunks:
        if len(chunk) > 1:
            saved[:, chunk[0]] = saved[:, list(chunk)].sum(1)
    for k, only in enumerate(budget.sites):
        values = gates.tolist()
        can_close = [x for x in chunks if values[x[0]] and x[0] not in fixed and only in (None, site_of[x[0]])]
        gates = _close(gates, can_close, lambda x: fractions(x)[k], limits[k], saved[k])  # noqa: B023  # called at once
    values = gates.tolist()
    closed = [chunk for chunk in reversed(chunks) if not values[chunk[0]]]
    return _reopen(gates, closed, fractions, limits, saved, site_of)


def _rank(
    budget: Budget, positions: Tensor, is_open: Tensor, shapes: Mapping[str, torch.Size]
) -> tuple[list[_Chunk], set[int], Tensor]:
    """Chunks of gates, the lowest first; the gates that never close; and those that are open before others close."""
    gates, ranks, start = is_open.to(positions), positions.clone(), 0
    chunk_of: dict[int, _Chunk] = {}  # by its first gate, none for those behind it; gates without one are alone
    fixed = set[int]()
    for site, shape in shapes.items():
        size, step = shape.numel(), budget.steps[site]
        own = positions[start : start + size]
        minimum = min(budget.minimums[site], size)
        if step == 1:
            best = start + own.topk(minimum).indices
        else:
            from_above = start + own.argsort(descending=True, stable=True)
            left = size % step if size < budget.sizes[site] else 0  # in no chunk, as gates of the site have left
            chunked, rest = from_above.split([size - left, left])
            best = chunked[:minimum]
            gates[rest] = 0.0
            chunk_of |= dict.fromkeys(from_above.tolist(), ())
            for chunk in chunked.split(step) if len(chunked) else ():
                chunk_of[int(chunk[0])] = tuple(chunk.tolist())
                gates[chunk] = gates[chunk].max()
                # Of chunks at one position an incomplete one closes first.
                ranks[chunk] = positions[chunk].mean() - (_BEFORE if len(chunk) < step else 0.0)
        fixed.update(best[: budget.least[site]].tolist())
        gates[best] = 1.0
        ranks[best] += _FIRST
        start += size
    chunks = [chunk_of.get(j, (j,)) for j in ranks.argsort().tolist()]
    return [chunk for chunk in chunks if chunk], fixed, gates


def _close(
    gates: Tensor, chunks: list[_Chunk], fraction: Callable[[Tensor], Tensor], limit: Tensor, saved: Tensor
) -> Tensor:
    """Close chunks in their order, as few as it takes for a fraction within a limit; all, if these do not suffice."""
    now = fraction(gates)
    if bool(now <= limit):
        return gates
    saved_by_chunk = saved[[chunk[0] for chunk in chunks]]
    guess = int((now - saved_by_chunk.cumsum(0) > limit).sum()) + 1
    number = first_that(lambda n: bool(fraction(_set(gates, chunks[:n], 0.0)) <= limit), len(chunks), guess)
    return _set(gates, chunks[:number], 0.0)


def _reopen(
    gates: Tensor,
    chunks: list[_Chunk],
    fractions: Callable[[Tensor], Tensor],
    limits: Tensor,
    saved: Tensor,
    site_of: list[str],
) -> Tensor:
    """Open chunks in their order, as many as fit together, then those of other sites that still fit."""

    def fits(more: list[_Chunk]) -> bool:
        return bool((fractions(_set(gates, more, 1.0)) <= limits).all())

    saved_by_chunk = saved[:, [chunk[0] for chunk in chunks]]
    left = (limits - fractions(gates)).unsqueeze(1)
    guess = int((saved_by_chunk.cumsum(1) <= left).all(0).sum())
    number = first_that(lambda n: not fits(chunks[: n + 1]), len(chunks), guess)
    gates = _set(gates, chunks[:number], 1.0)
    left = (limits - fractions(gates)).unsqueeze(1)
    is_hopeful = (_SURELY * saved_by_chunk <= left).all(0).tolist()
    full = {site_of[chunk[0]] for chunk in chunks[number : number + 1]}  # where the first is that does not fit
    for chunk, may_fit in zip(chunks[number + 1 :], is_hopeful[number + 1 :], strict=True):
        site = site_of[chunk[0]]
        if site in full:
            continue
        if may_fit and fits([chunk]):
            gates = _set(gates, [chunk], 1.0)
        else:
            full.add(site)
    return gates


def _set(gates: Tensor, chunks: list[_Chunk], value: float) -> Tensor:
    """A copy of the gates, in which those of some chunks have a value, 0 or 1."""
    new = gates.clone()
    new[[j for chunk in chunks for j in chunk]] = value
    return new


def first_that(holds: Callable[[int], bool], length: int, guess: int) -> int:
    """The smallest number below a length for which a statement holds that holds for all larger ones, or the length.

    The search goes from a guess by doubling steps, and then by halves between the last two (Bentley and Yao 1976): so a
    guess that is off by k takes about 2 log2(k) tries. Between tries it does not hold at ``low``, and does at ``high``.
    """
    low, high = -1, length  # it does not hold at low, and does at high
    at, step = min(max(guess, 0), length - 1), 1
    while low < at < high:  # until it is between two numbers that were tried
        if holds(at):
            high, at = at, at - step
        else:
            low, at = at, at + step
        step *= 2
    return low + 1 + bisect_left(range(low + 1, high), True, key=holds)


def _by_site(name: str, given: Mapping[str, int] | None, smallest: int, sizes: Mapping[str, int]) -> dict[str, int]:
    given = {} if given is None else given
    expect(Mapping, "a dict of numbers by gate site", **{name: given})
    for site, number in given.items():
        if site not in sizes:
            raise ValueError(f"Expected {name} by gate site, of {sorted(sizes)}, but got {site!r}.")
        expect_count(smallest, **{f"{name}[{site!r}]": number})
    return dict(given)


def _first(like: Tensor, number: int) -> Tensor:
    """Gates of 0 and 1 in a tensor's shape, of which the first ``number`` are open."""
    return (torch.arange(like.numel(), device=like.device) < number).to(like).view(like.shape)


def _open_gates(site: str, gates: Mapping[str, Tensor]) -> Tensor:
    """The number of open gates of a site; none if the site has left."""
    like = next(iter(gates.values()))
    return gates[site].sum() if site in gates else like.new_zeros(())
