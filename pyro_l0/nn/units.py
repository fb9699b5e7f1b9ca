"""Probabilities of events for every unit of a tensor, which share the gates that they depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_l0.nn.expectation import product
from pyro_l0.nn.per_device import PerDevice

__all__ = ["PerDevice", "Units", "either", "in_common", "product"]


@dataclass(frozen=True)
class Units:
    """Probability of an event for each unit of a tensor, as a product over gate sites and of what is no gate's.

    The factors are kept apart so that a gate which acts twice on the same units, as in a residual stream, counts once.

    Attributes:
        sites: the gates' probabilities by site.
        rest: the other factor; None stands for ones.
    """

    sites: Mapping[str, Tensor] = field(default_factory=dict)
    rest: Tensor | None = None

    def probs(self) -> Tensor | None:
        """The product, None for ones."""
        total = self.rest
        for prob in self.sites.values():
            total = prob if total is None else total * prob
        return total

    def gated(self, site: str, prob: Tensor) -> Units:
        """The same, and the gate of a site is open."""
        return Units({**self.sites, site: prob}, self.rest)

    def count(self, size: int) -> Tensor | float:
        """Expected number of units."""
        probs = self.probs()
        if probs is None:
            return float(size)
        return probs.sum() if probs.dim() else size * probs

    def any(self) -> Units:
        """Probability that there is one unit at all, a scalar."""
        probs = self.probs()
        if probs is None or not probs.dim():
            return Units({}, probs)
        return Units({}, 1 - product(1 - probs))


def either(parts: Iterable[Units]) -> Units:
    """At least one of several events, independent but for the gates that they share."""
    units = list(parts)
    if len(units) == 1:
        return units[0]
    if not units:
        return Units({}, torch.zeros(()))
    shared, others = in_common(units)
    none: Tensor | None = None
    for part in others:
        own = part.probs()
        if own is None:
            return Units(shared)
        none = 1 - own if none is None else none * (1 - own)
    assert none is not None
    return Units(shared, 1 - none)


def in_common(parts: Sequence[Units]) -> tuple[dict[str, Tensor], list[Units]]:
    """The sites that several events share, and what else there is to each."""
    shared = {site: prob for site, prob in parts[0].sites.items() if all(site in part.sites for part in parts)}
    return shared, [
        Units({site: part.sites[site] for site in part.sites if site not in shared}, part.rest) for part in parts
    ]
