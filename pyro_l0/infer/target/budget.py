"""Costs of gates with their limits, and the gates that stay open within these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor

__all__ = ["Budget", "BudgetTooSmallError", "Cost", "apart"]

Cost = Callable[[Mapping[str, Tensor]], Tensor]
_FLOOR = 0.75  # of the units that an equal rate of open units at every site would leave within the budget
_ROUNDING = 1e-6
_SURELY = 0.5  # of what a gate costs by its price; one that would not fit even so is not tried
_HALVINGS = 25
_FIRST = 1e6  # added to the position of a gate that closes after all others


class BudgetTooSmallError(ValueError):
    """The least network, of one open gate per site, costs more than its budget."""


class Budget:
    """Costs as fractions of the full network's, their final limits, and what they allow.

    Args:
        costs: by name, the cost of given gates by site; or None for the number of open gates of the site of that name.
        limits: by name, the largest fraction of the full cost, shape ``()`` each.
        like: a gate by site, for sizes and devices.

    Attributes:
        names: of the costs.
        sites: of each cost that counts a site's open gates, the site; None for the others.
        final: the limits, shape ``(k,)``.
        total: costs of the full network, shape ``(k,)``.
        floors: by site, how many gates stay open before others close, at least one of several.

    Raises:
        BudgetTooSmallError: the least network is not within the limits.
        ValueError: a full network costs nothing.
    """

    def __init__(
        self, costs: Mapping[str, Cost | None], limits: Mapping[str, float], like: Mapping[str, Tensor]
    ) -> None:
        self.names = list(costs)
        self._costs = [partial(_open_gates, name) if cost is None else cost for name, cost in costs.items()]
        self.sites = [name if cost is None else None for name, cost in costs.items()]
        first = next(iter(like.values()))
        self.final = torch.tensor([limits[name] for name in self.names], dtype=torch.float32, device=first.device)
        self.total = torch.ones_like(self.final)
        sizes = {site: gate.numel() for site, gate in like.items()}
        self.total = self.fraction({site: torch.ones_like(gate) for site, gate in like.items()})
        for name, total in zip(self.names, self.total.tolist(), strict=True):
            if not total > 0:
                raise ValueError(f"Expected a cost above 0 with all gates open, but {name!r} is {total}.")
        self.floors = self._floors(sizes, like)

    def to(self, device: torch.device) -> None:
        """Follow the gates to another device."""
        self.final, self.total = self.final.to(device), self.total.to(device)

    def fraction(self, gates: Mapping[str, Tensor]) -> Tensor:
        """Costs over those of the full network, shape ``(k,)``.

        Args:
            gates: by site, P(z != 0) or 0 and 1.
        """
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

    def _floors(self, sizes: Mapping[str, int], like: Mapping[str, Tensor]) -> dict[str, int]:
        """The gates of each site that are kept before others; see :attr:`floors`."""

        def counts(rate: float) -> dict[str, int]:
            # A single gate switches a whole branch, which may go.
            return {site: max(int(n > 1), round(rate * n)) for site, n in sizes.items()}

        def cost(rate: float) -> Tensor:
            return self.fraction({site: _first(like[site], n) for site, n in counts(rate).items()})

        least = cost(0.0)
        if bool((least > self.final * (1 + _ROUNDING)).any()):
            needed = {name: round(x, 4) for name, x in zip(self.names, least.tolist(), strict=True)}
            given = {name: round(x, 4) for name, x in zip(self.names, self.final.tolist(), strict=True)}
            raise BudgetTooSmallError(
                f"Expected a budget that one open gate per site meets, which costs {needed} of the full network, but "
                f"got {given}; give a larger budget, or gates for more of the network."
            )
        found = dict.fromkeys(sizes, 0.0)
        for k, site in enumerate(self.sites):
            limited = [site] if site is not None else list(sizes)
            low, high = 0.0, 1.0
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                low, high = (middle, high) if bool(cost(middle)[k] <= self.final[k]) else (low, middle)
            for name in limited:
                found[name] = min(low, found[name]) if found[name] else low
        return {site: int(n > 1) and max(1, round(_FLOOR * found[site] * n)) for site, n in sizes.items()}

    def keep_within(
        self, limits: Tensor, positions: Mapping[str, Tensor], is_open: Mapping[str, Tensor], prices: Tensor
    ) -> Tensor:
        """The gates that should be open: the lowest close until the limits hold, then the highest that fit open.

        A site keeps as many of its highest gates as its floor before others close, and its last one of several.

        Args:
            limits: on the fractions, shape ``(k,)``.
            positions: by site, by which gates are ranked.
            is_open: by site, the gates that are open now.
            prices: from :meth:`prices`, taken not long ago; from them follows where to search first.

        Returns:
            Which ones should be, side by side, of type bool and shape ``(n,)``.
        """
        return _Choice(self, limits * (1 + _ROUNDING), positions, is_open, prices).made()


class _Choice:
    """One decision on which gates stay open."""

    def __init__(
        self,
        budget: Budget,
        limits: Tensor,
        positions: Mapping[str, Tensor],
        is_open: Mapping[str, Tensor],
        prices: Tensor,
    ) -> None:
        self._budget, self._limits = budget, limits
        self._shapes = {site: gate.shape for site, gate in positions.items()}
        self._open = torch.cat([gate.flatten() for gate in is_open.values()]).to(next(iter(positions.values())))
        lifted, self._sites, self._last = list[Tensor](), list[str](), set[int]()
        for site, gate in positions.items():
            start, flat = len(self._sites), gate.flatten().clone()
            floor = min(budget.floors[site], len(flat))
            if floor:
                best = flat.topk(floor).indices
                self._last.add(start + int(best[0]))
                self._open[start + best] = 1.0
                flat[best] += _FIRST
            lifted.append(flat)
            self._sites += [site] * len(flat)
        self._order: list[int] = torch.cat(lifted).argsort().tolist()
        self._fractions = self._fraction(self._open)
        self._saved = prices * self._fractions.unsqueeze(1)  # about what each open gate saves and each closed one costs

    def made(self) -> Tensor:
        """The gates that should be open."""
        for k in range(len(self._limits)):
            self._close(k)
        self._reopen()
        return self._open > 0

    def _fraction(self, gates: Tensor) -> Tensor:
        return self._budget.fraction(apart(gates, self._shapes))

    def _close(self, k: int) -> None:
        """Close gates from below, as few as it takes for a limit."""
        if bool(self._fractions[k] <= self._limits[k]):
            return
        site, is_open = self._budget.sites[k], self._open.tolist()
        can_close = [j for j in self._order if is_open[j] and j not in self._last and site in (None, self._sites[j])]
        saved = self._saved[k][can_close].cumsum(0)
        guess = int((self._fractions[k] - saved > self._limits[k]).sum()) + 1

        @cache
        def fractions(number: int) -> Tensor:
            return self._fraction(self._changed(can_close[:number], 0.0))

        number = first_that(lambda n: bool(fractions(n)[k] <= self._limits[k]), len(can_close), guess)
        self._open, self._fractions = self._changed(can_close[:number], 0.0), fractions(number)

    def _reopen(self) -> None:
        """Open closed gates from above, as many as fit together, then those of other sites that still fit."""
        is_open = self._open.tolist()
        closed = [j for j in reversed(self._order) if not is_open[j]]
        room = (self._limits - self._fractions).unsqueeze(1)

        def fits(places: list[int]) -> bool:
            return bool((self._fraction(self._changed(places, 1.0)) <= self._limits).all())

        guess = int((self._saved[:, closed].cumsum(1) <= room).all(0).sum())
        number = first_that(lambda n: not fits(closed[: n + 1]), len(closed), guess)
        self._open = self._changed(closed[:number], 1.0)
        if number:
            room = (self._limits - self._fraction(self._open)).unsqueeze(1)
        hopeful = (_SURELY * self._saved <= room).all(0).tolist()
        full = {self._sites[j] for j in closed[number : number + 1]}  # the first that does not fit with those before it
        for j in closed[number + 1 :]:
            if self._sites[j] not in full:
                if hopeful[j] and fits([j]):
                    self._open = self._changed([j], 1.0)
                else:
                    full.add(self._sites[j])
            if len(full) == len(self._shapes):
                return

    def _changed(self, places: list[int], value: float) -> Tensor:
        """The open gates, with some places set."""
        new = self._open.clone()
        new[places] = value
        return new


def first_that(holds: Callable[[int], bool], length: int, guess: int) -> int:
    """The smallest number for which a statement holds that holds for all larger ones; the length, if for none below.

    Args:
        holds: the statement, on numbers from 0 to below the length.
        length: where to stop.
        guess: from where the search goes, by doubling steps.
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


def apart(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The entries of each site in its shape."""
    pieces = flat.split([shape.numel() for shape in shapes.values()])
    return {site: piece.view(shape) for (site, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _first(like: Tensor, number: int) -> Tensor:
    """Gates of which the first ones are open."""
    return (torch.arange(like.numel(), device=like.device) < number).to(like).view(like.shape)


def _open_gates(site: str, gates: Mapping[str, Tensor]) -> Tensor:
    """The number of open gates of a site; none if the site has left."""
    like = next(iter(gates.values()))
    return gates[site].sum() if site in gates else like.new_zeros(())
