"""Positions of a guide's gates, measured from the points at which their test gates close."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributions import constraints, transform_to

from pyro_l0.distributions.gate import GateDistribution, concatenate
from pyro_l0.infer.guides.protocol import GateGuide

__all__ = ["CLOSED", "HIGHEST", "LOWEST", "OPENED", "GatePositions", "closing_locations"]

# In units of the logit of P(z != 0). Of a hard concrete, log alpha between -6 and 6, whose test gate closes at -log 11.
HIGHEST, LOWEST = math.log(11) + 6, math.log(11) - 6
OPENED, CLOSED = 1.0, -1.0  # of a gate that a correction opens or closes
_RANGE = 30.0  # of the search, on the real line on which locations are learned
_HALVINGS = 60


class GatePositions:
    r"""The locations of a guide's gates, side by side and in one unit.

    A position is 0 where the test gate closes and positive where it is open; near there its unit is that of the logit
    of P(z != 0), whatever the family. For a hard concrete it is :math:`\log \alpha - \log(-\gamma / \zeta)`.
    The guide has been called before.
    """

    def __init__(self, guide: GateGuide) -> None:
        self._guide = guide
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}  # one number for a site, or one for each gate
        for (site, gate), location in zip(guide.posterior().items(), guide.locations(), strict=True):
            name, constraint = next(iter(gate.learned.items()))
            now = location.detach()
            now = now if constraint is constraints.real else transform_to(constraint)(now)
            if now.shape != getattr(gate, name).shape or not torch.allclose(now, getattr(gate, name)):
                raise ValueError(
                    f"Expected guide.locations() to hold {name} of gate site {site!r} on the real line, as "
                    f"transform_to({constraint}) takes it, but got another tensor."
                )

    @torch.no_grad()
    def read(self) -> Tensor:
        """The positions of all gates, site after site in the guide's order, shape ``(n,)``."""
        scales = self._scales()
        found = [
            ((location.float() - closing) * slope).flatten()
            for location, (closing, slope) in zip(self._guide.locations(), scales.values(), strict=True)
        ]
        return torch.cat(found) if found else torch.zeros(0)

    def follow(self) -> None:
        """Forget the closing points of gates with further parameters, which may have changed."""
        self._kept = {site: kept for site, kept in self._kept.items() if not kept[0].dim()}

    @torch.no_grad()
    def slopes(self) -> Tensor:
        """Derivatives of P(z != 0) by the locations, in the order of :meth:`read`; shape ``(n,)``."""
        gates = list(self._guide.posterior().values())
        joint = concatenate(gates)
        if joint is not None and next(iter(joint.learned.values())) is constraints.real:
            return joint.active_slope.float()
        found = zip(gates, self._guide.locations(), strict=True)
        return torch.cat([(gate.active_slope * _stretching(gate, at)).flatten().float() for gate, at in found])

    @torch.no_grad()
    def write(self, positions: Tensor) -> None:
        """Put the gates at positions, in the order of :meth:`read`; shape ``(n,)``."""
        start = 0
        for location, (closing, slope) in zip(self._guide.locations(), self._scales().values(), strict=True):
            end = start + location.numel()
            location.copy_(positions[start:end].view(location.shape) / slope + closing)
            start = end

    @torch.no_grad()
    def open_all(self, active_prob: float) -> float:
        """Give every gate a P(z != 0), or the nearest that :data:`HIGHEST` allows.

        Returns the largest distance of a location from where its gate closes, in the location's own unit.
        """
        distance = 0.0
        scales = self._scales()
        for (site, gate), location in zip(self._guide.posterior().items(), self._guide.locations(), strict=True):
            closing, slope = scales[site]
            wanted = _search(gate, lambda at: at.active_prob >= active_prob)
            opened = torch.minimum(wanted, closing + HIGHEST / slope).to(location)
            location.copy_(opened)
            distance = max(distance, float((opened - closing).max()))
        return distance

    def _scales(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """By site, the locations at which gates close, and the slope of the logit of P(z != 0) there."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for (site, gate), location in zip(self._guide.posterior().items(), self._guide.locations(), strict=True):
            kept = self._kept.get(site)
            is_one = len(gate.learned) == 1 and not any(isinstance(x, Tensor) for x in gate.fixed_options.values())
            if kept is None or kept[0].device != location.device or kept[0].shape not in ((), location.shape):
                kept = _scale(gate)
                if is_one:  # nothing but the location differs from gate to gate
                    kept = (kept[0].flatten()[0], kept[1].flatten()[0])
                self._kept[site] = kept
            found[site] = kept
        return found


def closing_locations(gate: GateDistribution) -> Tensor:
    """Where each test gate closes, on the real line on which locations are learned; shape ``batch_shape``."""
    return _search(gate, lambda at: at.test_gate > 0)


def _scale(gate: GateDistribution) -> tuple[Tensor, Tensor]:
    """Where each gate closes, and the slope there; shape ``batch_shape``."""
    closing = closing_locations(gate)
    with torch.enable_grad():
        there = closing.double().requires_grad_()
        at = _placed(gate, there)
        (slope,) = torch.autograd.grad((at.log_active_prob - at.log_prob_zero).sum(), there)
    return closing, slope.float()


def _stretching(gate: GateDistribution, location: Tensor) -> Tensor:
    """Derivative of the first learned parameter by its value on the real line."""
    constraint = next(iter(gate.learned.values()))
    with torch.enable_grad():
        at = location.detach().requires_grad_()
        (slope,) = torch.autograd.grad(transform_to(constraint)(at).sum(), at)
    return slope


def _search(gate: GateDistribution, is_past: Callable[[GateDistribution], Tensor]) -> Tensor:
    """The lowest locations past a point, the other parameters as they are; shape ``batch_shape``."""
    low = torch.full(gate.batch_shape, -_RANGE, dtype=torch.float64, device=gate.active_prob.device)
    high = -low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        past = is_past(_placed(gate, middle))
        low, high = torch.where(past, low, middle), torch.where(past, middle, high)
    return high.float()


def _placed(gate: GateDistribution, location: Tensor) -> GateDistribution:
    """The gate in double precision with other locations, given on the real line."""
    (name, constraint), *others = gate.learned.items()
    value = location if constraint is constraints.real else transform_to(constraint)(location)
    kept = {other: getattr(gate, other).detach().double() for other, _ in others}
    return gate.apply_to_tensors(lambda x: x.detach().double()).with_learned(**{name: value}, **kept)
