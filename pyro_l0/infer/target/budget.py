"""Costs of gates with their limits, and the gates that stay open within these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from pyro_l0.distributions.gate import check_rate
from pyro_l0.expect import expect, expect_count

__all__ = ["Budget", "BudgetTooSmallError", "Choice", "Cost", "read_budgets"]

Cost = Callable[[Mapping[str, Tensor]], Tensor]
_MINIMUM = 0.75  # of the units that an equal rate of open units at every site would leave within the budget
_ROUNDING = 1e-6
_SURELY = 0.5  # of what a gate costs by its price; one that would not fit even so is not tried
_HALVINGS = 25
_BEFORE = 1e-3  # between positions
_FIRST = 1e6  # added to the position of a gate that closes after all others


def read_budgets(
    budget: float | Sequence[float] | Mapping[str, float],
    cost: Cost | Mapping[str, Cost] | None,
    gates: Mapping[str, Tensor],
) -> tuple[dict[str, float], dict[str, Cost | None], list[float]]:
    """What a user gave: final budgets by name, their costs (None: a site's open gates), and intermediate budgets."""
    if isinstance(budget, Mapping):
        for name, value in budget.items():
            check_rate(f"budget[{name!r}]", value, "a target")
        if cost is None:
            unknown = [name for name in budget if name not in gates]
            if unknown:
                raise ValueError(f"Expected a budget by gate site, one of {sorted(gates)}, but got {unknown[0]!r}.")
            return dict(budget), dict.fromkeys(budget), []
        if not isinstance(cost, Mapping) or cost.keys() != budget.keys():
            names = sorted(cost) if isinstance(cost, Mapping) else "one cost without a name"
            raise ValueError(f"Expected a cost for each budget of {sorted(budget)}, but got {names}.")
        return dict(budget), dict(cost), []
    budgets = list(budget) if isinstance(budget, Sequence) else [budget]
    if not budgets or any(b >= a for a, b in itertools.pairwise(budgets)):
        raise ValueError(f"Expected budgets that fall from one to the next, but got {budgets}.")
    for value in budgets:
        check_rate("budget", value, "a target")
    if cost is None or isinstance(cost, Mapping):
        raise ValueError("Expected one cost with one budget for the network, or budgets by the names of several costs.")
    return {"cost": budgets[-1]}, {"cost": cost}, budgets[:-1]


class BudgetTooSmallError(ValueError):
    """The smallest network, of one open gate per site, costs more than its budget."""


class Budget:
    """Costs as fractions of the full network's, with their final limits.

    A cost of None counts the open gates of the site of its name. ``minimums`` says how many gates of each site stay
    open before others close, and ``least`` how many never close: those of ``at_least``, and one of several. Of the
    sites in ``multiple_of`` as many gates are open as a multiple of the number there, or all.
    """

    def __init__(
        self,
        costs: Mapping[str, Cost | None],
        limits: Mapping[str, float],
        like: Mapping[str, Tensor],
        at_least: Mapping[str, int] | None = None,
        multiple_of: Mapping[str, int] | None = None,
    ) -> None:
        self.sizes = {site: gate.numel() for site, gate in like.items()}
        kept = _by_site("at_least", at_least, 0, self.sizes)
        self.steps = dict.fromkeys(like, 1) | _by_site("multiple_of", multiple_of, 1, self.sizes)
        self.least = {site: self._whole(site, max(kept.get(site, 0), int(n > 1))) for site, n in self.sizes.items()}
        self.names = list(costs)
        self._costs = [partial(_open_gates, name) if cost is None else cost for name, cost in costs.items()]
        self.sites = [name if cost is None else None for name, cost in costs.items()]
        device = next(iter(like.values())).device
        self.final = torch.tensor([limits[name] for name in self.names], dtype=torch.float32, device=device)
        self.total = torch.ones_like(self.final)
        self.total = self.fraction({site: torch.ones_like(gate) for site, gate in like.items()})
        for name, total in zip(self.names, self.total.tolist(), strict=True):
            if not total > 0:
                raise ValueError(f"Expected a cost above 0 with all gates open, but {name!r} is {total}.")
        self.minimums = self._minimums(like)

    def _whole(self, site: str, number: int) -> int:
        """The next number of open gates that a site may have."""
        return min(self.sizes[site], -(-number // self.steps[site]) * self.steps[site])

    def to(self, device: torch.device) -> None:
        """Follow the gates to another device."""
        self.final, self.total = self.final.to(device), self.total.to(device)

    def fraction(self, gates: Mapping[str, Tensor]) -> Tensor:
        """Costs over those of the full network, shape ``(k,)``, of P(z != 0) or of 0 and 1 by site."""
        return torch.stack([torch.as_tensor(cost(gates)).reshape(()) for cost in self._costs]).float() / self.total

    def prices(self, active: Mapping[str, Tensor]) -> Tensor:
        """Derivatives of the logs of the expected costs by P(z != 0), all sites side by side; shape ``(k, n)``."""
        with torch.inference_mode(False), torch.enable_grad():
            at = {site: gate.detach().clone().requires_grad_() for site, gate in active.items()}
            rows = [
                torch.autograd.grad(value, list(at.values()), retain_graph=True, materialize_grads=True)
                for value in torch.log(self.fraction(at))
            ]
        return torch.stack([torch.cat([x.flatten() for x in row]) for row in rows])

    def _minimums(self, like: Mapping[str, Tensor]) -> dict[str, int]:
        """How many gates of each site are kept before others."""
        sizes = self.sizes

        def cost(rate: float) -> Tensor:
            # A single gate switches a whole branch, which may go.
            numbers = {site: max(self.least[site], round(rate * n)) for site, n in sizes.items()}
            return self.fraction({site: _first(like[site], n) for site, n in numbers.items()})

        smallest = cost(0.0)
        if bool((smallest > self.final * (1 + _ROUNDING)).any()):
            needed = {name: round(x, 4) for name, x in zip(self.names, smallest.tolist(), strict=True)}
            given = {name: round(x, 4) for name, x in zip(self.names, self.final.tolist(), strict=True)}
            is_plain = max(self.least.values()) <= 1
            kept = "the gates that at_least and multiple_of keep open meet"
            least = "one open gate per site meets" if is_plain else kept
            raise BudgetTooSmallError(
                f"Expected a budget that {least}, which costs {needed} of the full network, but got {given}; give a "
                "larger budget, or gates for more of the network."
            )
        found = dict.fromkeys(sizes, 0.0)
        for k, site in enumerate(self.sites):
            low, high = 0.0, 1.0
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                low, high = (middle, high) if bool(cost(middle)[k] <= self.final[k]) else (low, middle)
            for name in sizes if site is None else [site]:
                found[name] = min(low, found[name]) if found[name] else low
        wanted = {site: round(_MINIMUM * found[site] * n) if n > 1 else 0 for site, n in sizes.items()}
        return {site: max(self.least[site], n // self.steps[site] * self.steps[site]) for site, n in wanted.items()}


class Choice:
    """The gates that should be open: the lowest close until the limits hold, then the highest that fit open.

    A site keeps as many of its highest gates as its minimum before others close, and those that never close. Where it
    has multiples of a number of gates, so many that follow each other are one block: it closes and opens as a whole, by
    the mean of its positions.

    Args:
        budget: the costs.
        limits: on their fractions, shape ``(k,)``.
        positions: by which gates are ranked, all sites side by side, shape ``(n,)``.
        is_open: the gates that are open now, shape ``(n,)``.
        prices: from :meth:`Budget.prices`, taken not long ago; from them follows where to search first.
        shapes: of the sites.

    Attributes:
        open: the choice, 0 or 1 for each gate, shape ``(n,)``.
    """

    def __init__(
        self,
        budget: Budget,
        limits: Tensor,
        positions: Tensor,
        is_open: Tensor,
        prices: Tensor,
        shapes: Mapping[str, torch.Size],
    ) -> None:
        self._budget, self._limits, self._shapes = budget, limits * (1 + _ROUNDING), shapes
        self.open = is_open.to(positions)
        self._sites = [site for site, shape in shapes.items() for _ in range(shape.numel())]
        self._last = set[int]()
        self._blocks: dict[int, list[int]] = {}  # by its first gate, the gates of a block; others are on their own
        lifted, start, followers = positions.clone(), 0, set[int]()
        for site, shape in shapes.items():
            end = start + shape.numel()
            minimum = min(budget.minimums[site], end - start)
            best = start + positions[start:end].topk(minimum).indices
            if budget.steps[site] > 1:
                blocks, left = self._split(site, start, positions[start:end], lifted)
                followers.update(left, *(block[1:] for block in blocks))
                self._blocks.update({block[0]: block for block in blocks})
                best = best.new_tensor([j for block in blocks for j in block][:minimum])
            if minimum:
                self._last.update(best[: budget.least[site]].tolist())
                self.open[best] = 1.0
                lifted[best] += _FIRST
            start = end
        self._order: list[int] = [j for j in lifted.argsort().tolist() if j not in followers]
        self._fractions = self._fraction(self.open)
        self._saved = prices * self._fractions.unsqueeze(1)  # about what each open gate saves and each closed one costs
        for first, block in self._blocks.items():
            self._saved[:, first] = self._saved[:, block].sum(1)
        for k in range(len(limits)):
            self._close(k)
        self._reopen()

    def _split(self, site: str, start: int, own: Tensor, lifted: Tensor) -> tuple[list[list[int]], list[int]]:
        """The blocks of a site's gates from above, and gates that are in none, as gates of the site have left."""
        step = self._budget.steps[site]
        blocks = [block.tolist() for block in (start + own.argsort(descending=True, stable=True)).split(step)]
        left = blocks.pop() if len(own) % step and len(own) < self._budget.sizes[site] else []
        self.open[left] = 0.0
        for block in blocks:
            self.open[block] = self.open[block].max()
            # Of blocks at one position an incomplete one closes first.
            lifted[block] = own[[j - start for j in block]].mean() - (_BEFORE if len(block) < step else 0.0)
        return blocks, left

    def _close(self, k: int) -> None:
        """Close gates from below, as few as it takes for a limit."""
        if bool(self._fractions[k] <= self._limits[k]):
            return
        site, is_open = self._budget.sites[k], self.open.tolist()
        can_close = [j for j in self._order if is_open[j] and j not in self._last and site in (None, self._sites[j])]
        saved = self._saved[k][can_close].cumsum(0)
        guess = int((self._fractions[k] - saved > self._limits[k]).sum()) + 1

        @cache
        def fractions(number: int) -> Tensor:
            return self._fraction(self._changed(can_close[:number], 0.0))

        number = first_that(lambda n: bool(fractions(n)[k] <= self._limits[k]), len(can_close), guess)
        self.open, self._fractions = self._changed(can_close[:number], 0.0), fractions(number)

    def _reopen(self) -> None:
        """Open closed gates from above, as many as fit together, then those of other sites that still fit."""
        is_open = self.open.tolist()
        closed = [j for j in reversed(self._order) if not is_open[j]]
        room = (self._limits - self._fractions).unsqueeze(1)

        def fits(indices: list[int]) -> bool:
            return bool((self._fraction(self._changed(indices, 1.0)) <= self._limits).all())

        guess = int((self._saved[:, closed].cumsum(1) <= room).all(0).sum())
        number = first_that(lambda n: not fits(closed[: n + 1]), len(closed), guess)
        self.open = self._changed(closed[:number], 1.0)
        if number:
            room = (self._limits - self._fraction(self.open)).unsqueeze(1)
        hopeful = (_SURELY * self._saved <= room).all(0).tolist()
        full = {self._sites[j] for j in closed[number : number + 1]}  # the first that does not fit with those before it
        for j in closed[number + 1 :]:
            if len(full) == len(self._shapes):
                return
            if self._sites[j] not in full:
                if hopeful[j] and fits([j]):
                    self.open = self._changed([j], 1.0)
                else:
                    full.add(self._sites[j])

    def _fraction(self, gates: Tensor) -> Tensor:
        pieces = gates.split([shape.numel() for shape in self._shapes.values()])
        sites = zip(self._shapes.items(), pieces, strict=True)
        return self._budget.fraction({site: piece.view(shape) for (site, shape), piece in sites})

    def _changed(self, indices: list[int], value: float) -> Tensor:
        """The open gates, with some of them set."""
        new = self.open.clone()
        new[[gate for j in indices for gate in self._blocks.get(j, (j,))]] = value
        return new


def first_that(holds: Callable[[int], bool], length: int, guess: int) -> int:
    """The smallest number below a length for which a statement holds that holds for all larger ones, or the length.

    The search goes from a guess by doubling steps.
    """
    low, high = -1, length  # it does not hold at low, and does at high
    at, step = min(max(guess, 0), length - 1), 1
    while low < at < high:  # until it is between two numbers that were tried
        if holds(at):
            high, at = at, at - step
        else:
            low, at = at, at + step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _by_site(name: str, given: Mapping[str, int] | None, smallest: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Numbers by gate site, checked."""
    given = {} if given is None else given
    expect(Mapping, "a dict of numbers by gate site", **{name: given})
    for site, number in given.items():
        if site not in sizes:
            raise ValueError(f"Expected {name} by gate site, of {sorted(sizes)}, but got {site!r}.")
        expect_count(smallest, **{f"{name}[{site!r}]": number})
    return dict(given)


def _first(like: Tensor, number: int) -> Tensor:
    """Gates of which the first ones are open."""
    return (torch.arange(like.numel(), device=like.device) < number).to(like).view(like.shape)


def _open_gates(site: str, gates: Mapping[str, Tensor]) -> Tensor:
    """The number of open gates of a site; none if the site has left."""
    like = next(iter(gates.values()))
    return gates[site].sum() if site in gates else like.new_zeros(())
