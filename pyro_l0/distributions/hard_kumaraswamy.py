"""The hard Kumaraswamy gate."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_l0.distributions.gate import Bounded, as_parameters
from pyro_l0.distributions.stretched import LIMITS, STRETCH_LIMITS, UnitIntervalGate
from pyro_l0.maths import backend, quadrature, special
from pyro_l0.maths.mixture import Point, log_s
from pyro_l0.maths.special import Number, log1mexp

_SMALL = -40.0  # log of a number that is lost beside 1


class HardKumaraswamy(UnitIntervalGate):
    r"""Gate on :math:`[0, 1]` from a Kumaraswamy variable that is stretched and clipped.

    .. math:: P(s > x) = (1 - x^a)^b, \qquad z = \min(1, \max(0, s(\zeta - \gamma) + \gamma)).

    Args:
        concentration1: a, positive; a larger one moves mass to 1. Shape ``batch_shape``; 0.5 in ``from_active_prob``
            and guides by default.
        concentration0: b, positive; a larger one moves mass to 0. Broadcast against a.
        gamma: lower stretch limit, below 0.
        zeta: upper stretch limit, above 1.

    Example:
        >>> HardKumaraswamy(torch.tensor([0.5, 2.0]), 0.5).active_prob
        tensor([0.8434, 0.9965])

    References:
        Bastings, Aziz, Titov (2019), arXiv:1905.08160.
    """

    arg_constraints: ClassVar = {
        "concentration1": Bounded(lower=0),
        "concentration0": Bounded(lower=0),
        **STRETCH_LIMITS,
    }
    learned: ClassVar = {"concentration1": constraints.positive, "concentration0": constraints.positive}
    defaults: ClassVar = {"concentration1": 0.5, **LIMITS}  # below 1 the gate prefers its ends
    fixed = ("gamma", "zeta")

    def __init__(
        self,
        concentration1: Number,
        concentration0: Number,
        gamma: Number = -0.1,
        zeta: Number = 1.1,
        validate_args: bool | None = None,
    ) -> None:
        (self.concentration1, self.concentration0), (self._gamma, self._zeta) = as_parameters(
            {"gamma": gamma, "zeta": zeta}, concentration1=concentration1, concentration0=concentration0
        )
        super().__init__(self.concentration1.shape, validate_args=validate_args)

    @classmethod
    def parameters_at_rate(cls, rate: Tensor, concentration1: Tensor, gamma: Number, zeta: Number) -> dict[str, Number]:
        """The second concentration for a first one."""
        unit = cls(concentration1, torch.ones_like(concentration1), gamma, zeta)
        b = torch.log(rate) / unit.log_active_prob
        return {"concentration1": concentration1, "concentration0": b, "gamma": gamma, "zeta": zeta}

    def _unit_log_density(self, x: Point) -> Tensor:
        return _log_density(log_s(x), self.concentration1, self.concentration0)

    def _unit_log_below(self, x: Point) -> Tensor:
        return _log_below(log_s(x), self.concentration1, self.concentration0)

    def _unit_log_above(self, x: Point) -> Tensor:
        return _log_above(log_s(x), self.concentration1, self.concentration0)

    def _unit_log_between(self, low: Point, high: Point) -> Tensor:
        return _log_between(log_s(low), log_s(high), self.concentration1, self.concentration0)

    def _unit_rsample(self, shape: torch.Size) -> Tensor:
        a, b = self.concentration1, self.concentration0
        # Under torch.vmap draws differ between the mapped only if what they fill is mapped, as one of the two may be.
        e = (a * b if backend.transformed() else a).new_empty(shape).exponential_()
        return torch.exp(_quantile_of_exponential(e, a, b))

    def _unit_icdf(self, p: Tensor) -> Tensor:
        log_quantile = _quantile_of_exponential(-torch.log1p(-p), self.concentration1, self.concentration0)
        return torch.exp(log_quantile)

    def _node_temperature(self) -> float:
        # On the logit axis the density is a product of powers as those of a hard concrete are.
        return max(1.0, backend.largest(self.concentration1), backend.largest(self.concentration0)) / 2

    def panel_edges(self, dtype: torch.dtype) -> Tensor:
        """Values of z where panels of a quadrature end, shape ``batch_shape + (k,)``."""
        a, b = self.concentration1.unsqueeze(-1), self.concentration0.unsqueeze(-1)
        # With S the survival function, e = -log S is a unit exponential, whose log has a density of one top, at e = 1.
        low, high = (-self._unit_log_above(end).unsqueeze(-1) for end in self._ends)
        top = torch.minimum(low.clamp(min=1.0), high)
        drops = quadrature.drops(dtype, a.device)
        e = torch.cat((top * torch.exp(-drops), top + drops), -1)
        s = torch.exp(_quantile_of_exponential(e, a, b))
        return special.last(self.stretch.gamma) + special.last(self.stretch.width) * s


# The unstretched variable has the survival function (1 - s^a)^b; ``log_s`` is log s, from whichever end is nearer.


def _log_above(log_s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """log P(S > s) = b log(1 - s^a), from log s <= 0."""
    return b * log1mexp(-a * log_s)


def _log_below(log_s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """log P(S <= s) = log(1 - (1 - s^a)^b), from log s <= 0, to rounding also where s^a underflows."""
    log_power = a * log_s
    first = torch.log(b) + log_power
    # b s^a to rounding, where s^a itself would underflow.
    small = (log_power < _SMALL) & (first < _SMALL)
    return torch.where(small, first, log1mexp(-b * log1mexp(-torch.where(small, _SMALL, log_power))))


def _log_between(log_low: Tensor, log_high: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """log P(low < S <= high), from the logs of both."""
    above = _log_above(log_low, a, b)
    return above + log1mexp(above - _log_above(log_high, a, b))


def _log_density(log_s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Log density of s with respect to ds, from log s <= 0."""
    return torch.log(a) + torch.log(b) + (a - 1) * log_s + (b - 1) * log1mexp(-a * log_s)


def _quantile_of_exponential(e: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """log s at a survival function of exp(-e), which is the quantile of a unit exponential e's probability."""
    return log1mexp((e / b).clamp(min=torch.finfo(e.dtype).tiny)) / a
