"""The gate sites of a guide as a diagnosis looks at them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_l0.diagnostics.holdings import AnyOptimiser, Holding, find_holding
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.infer.guides.auto_gate import AutoGate
from pyro_l0.infer.guides.protocol import GateGuide

__all__ = ["GateSite", "gate_sites"]

_FAR = 40.0  # on the scale of log alpha, where every gate is closed that closes at all
_HALVINGS = 40


@dataclass(frozen=True)
class GateSite:
    """One site, every tensor flat and in float32 or more.

    Attributes:
        name: of the site.
        gate: its posterior, without gradients.
        parameter: the guide's, which places its gates.
        holding: how an optimiser holds the parameter.
        test_gate: the deterministic gates.
        location: where the gates are, on the scale of the parameter.
        closing: where their test gates become 0 on that scale; minus infinity for gates that can't be closed by their
            location or whose family is not known.
        start: where the guide placed them before training; None if that is not known.
    """

    name: str
    gate: GateDistribution
    parameter: Tensor
    holding: Holding | None
    test_gate: Tensor
    location: Tensor
    closing: Tensor
    start: float | None

    @property
    def is_open(self) -> Tensor:
        """Which gates are open in the deterministic network."""
        return self.test_gate > 0

    @property
    def distance(self) -> Tensor:
        """How far each open gate is from closing."""
        return (self.location - self.closing)[self.is_open]


@torch.no_grad()
def gate_sites(guide: GateGuide, optimisers: Sequence[AnyOptimiser], is_opened: bool) -> list[GateSite]:
    """The sites of a guide.

    Args:
        guide: after its first call.
        optimisers: of the training.
        is_opened: whether a target has opened the gates, so that they did not start where the guide placed them.
    """
    sites = []
    for (name, gate), parameter in zip(guide.posterior().items(), guide.locations(), strict=True):
        flat = parameter.detach().flatten()
        location = flat.to(torch.promote_types(flat.dtype, torch.float32))
        start = _start(guide, name, gate) if isinstance(guide, AutoGate) and not is_opened else None
        holding = find_holding(parameter, optimisers)
        test_gate = gate.test_gate.detach().flatten()
        closing = _closing(gate, parameter.detach()).flatten()
        sites.append(GateSite(name, gate, parameter, holding, test_gate, location, closing, start))
    return sites


def _closing(gate: GateDistribution, parameter: Tensor) -> Tensor:
    """Where the test gates become 0, by halving."""
    key, constraint = next(iter(gate.learned.items()))
    transform = transform_to(constraint)
    current = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
    others = {name: getattr(gate, name).detach().to(current) for name in gate.learned if name != key}
    if not torch.allclose(transform(current), getattr(gate, key).to(current), rtol=1e-2):
        return torch.full_like(current, -math.inf)

    def is_closed(x: Tensor) -> Tensor:
        return gate.with_learned(**{key: transform(x), **others}).test_gate == 0

    low, high = current.clamp(max=0) - _FAR, current.clamp(min=0) + _FAR
    can_close = is_closed(low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        closed = is_closed(middle)
        low, high = torch.where(closed, middle, low), torch.where(closed, high, middle)
    return torch.where(can_close, low, -math.inf)


def _start(guide: AutoGate, name: str, gate: GateDistribution) -> float | None:
    """Where a guide placed the gates of a site, on the scale of the parameter, if that is one number."""
    rate = guide.init_active_prob
    rate = rate.get(name, 0.9) if not isinstance(rate, float | int) else rate
    key, constraint = next(iter(gate.learned.items()))
    try:
        first = type(gate).from_active_prob(torch.tensor(rate), **gate.fixed_options)
    except ValueError:  # another rate per gate
        return None
    location = transform_to(constraint).inv(getattr(first, key))
    return float(location) if location.numel() == 1 else None
