"""The components of mixtures on (0, 1); equation numbers are of the paper on mixture-distributed regularisation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.host import largest
from pyro_l0.maths.mixture import Point, bisected_quantile, log_s
from pyro_l0.maths.quadrature import around, drops
from pyro_l0.maths.special import Number, either, exp, expm1, last, log, log1mexp, log1p

_MOST_BREAKPOINTS = 12


_log1mexp = either(log1mexp, lambda x: math.log(-math.expm1(-x)))


class Exponential(NamedTuple):
    """Exponential densities truncated to the unit interval (Eq. 4-6)."""

    beta: Number

    def log_density(self, x: Point) -> Tensor:
        return (log(self.beta) - _log1mexp(self.beta)) - self.beta * x.s

    def log_below(self, x: Point) -> Tensor:
        return log1mexp(self.beta * x.s) - _log1mexp(self.beta)

    def log_above(self, x: Point) -> Tensor:
        return log1mexp(self.beta * x.s_bar) - self.beta * x.s - _log1mexp(self.beta)

    def log_between(self, low: Point, high: Point) -> Tensor:
        return log1mexp(self.beta * (high.s - low.s)) - _log1mexp(self.beta) - self.beta * low.s

    def logit_slope(self, logits: Tensor, x: Point) -> Tensor:
        both, density, _ = self._slope_parts(logits, x)
        return both / density

    def _slope_parts(self, logits: Tensor, x: Point) -> tuple[Tensor, Tensor, Tensor]:
        """R0 - R1 and the density over q (1 - q), both times 1 - exp(-beta); log(q (1 - q))."""
        near, far = -self.beta * x.s, -self.beta * x.s_bar
        log_q = F.logsigmoid(logits)
        log_rest = log_q - logits
        density = self.beta * (torch.exp(near - log_q) + torch.exp(far - log_rest))
        return torch.expm1(near) * torch.expm1(far), density, log_q + log_rest

    def draw(self, shape: torch.Size, like: Tensor) -> Tensor:
        u = torch.rand(shape, dtype=like.dtype, device=like.device)
        return -torch.log1p(u * expm1(-self.beta)) / self.beta

    def mixture_quantile(self, logits: Tensor, p: Tensor) -> Tensor:
        """The positive root of the quadratic that Eq. 6 = p is in exp(beta s), solved for its distance from 1."""
        upper = p > 0.5  # the mirrored mixture from its lower end, as 1 - p is exact there
        p, logits = torch.where(upper, 1 - p, p), torch.where(upper, -logits, logits)
        mass = -p * expm1(-self.beta)
        a = torch.sigmoid(logits) * exp(-self.beta)
        b = torch.sigmoid(-logits) + a - mass
        root = torch.sqrt(b * b + 4 * a * mass)
        rising = b >= 0
        near = torch.log1p(2 * mass / torch.where(rising, b + root, 1.0))
        far = torch.log(0.5 * torch.where(rising, 1.0, root - b + 2 * a)) - F.logsigmoid(logits) + self.beta
        s = (torch.where(rising, near, far) / self.beta).clamp(0, 1)
        return torch.where(upper, 1 - s, s)

    def breakpoints(self, dtype: torch.dtype) -> tuple[float, ...] | None:
        """Evenly, as the density turns from one exponential to the other within 1 / beta."""
        # The log density has zeros at a distance of pi / (2 beta) from the axis, where the components meet.
        panels = largest(self.beta) / (5 if dtype == torch.float64 else 10)
        if panels > _MOST_BREAKPOINTS:
            return None
        return tuple(k / math.ceil(panels) for k in range(1, math.ceil(panels)))

    def panel_edges(self, logits: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
        """Towards both ends and around the point where the components meet."""
        meeting = 0.5 - 0.5 * logits / self.beta
        return torch.cat((self._end_edges(low, high, dtype), around(meeting, 0.5 / self.beta, dtype)), -1)

    def _end_edges(self, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
        reach = drops(dtype, low.device) / last(self.beta)
        return torch.cat((low.unsqueeze(-1) + reach, high.unsqueeze(-1) - reach), -1)

    @property
    def mean(self) -> Number:
        return 1 / self.beta + exp(-self.beta) / expm1(-self.beta)


class ExponentialUniform(NamedTuple):
    """Truncated exponentials of which a share is uniform (Eq. 7)."""

    beta: Number
    epsilon: Number

    @property
    def _exponential(self) -> Exponential:
        return Exponential(self.beta)

    def _mix(self, exponential: Tensor, uniform: Tensor) -> Tensor:
        return torch.logaddexp(exponential + log1p(-self.epsilon), uniform + log(self.epsilon))

    def log_density(self, x: Point) -> Tensor:
        return self._mix(self._exponential.log_density(x), torch.zeros_like(x.s))

    def log_below(self, x: Point) -> Tensor:
        return self._mix(self._exponential.log_below(x), log_s(x))

    def log_above(self, x: Point) -> Tensor:
        return self._mix(self._exponential.log_above(x), log_s(x.mirrored))

    def log_between(self, low: Point, high: Point) -> Tensor:
        return self._mix(self._exponential.log_between(low, high), torch.log(high.s - low.s))

    def logit_slope(self, logits: Tensor, x: Point) -> Tensor:
        both, density, log_product = self._exponential._slope_parts(logits, x)
        share = self.epsilon / (1 - self.epsilon) * -expm1(-self.beta)
        return both / (density + share * torch.exp(-log_product))

    def draw(self, shape: torch.Size, like: Tensor) -> Tensor:
        which, uniform = torch.rand((2, *shape), dtype=like.dtype, device=like.device)
        return torch.where(which < self.epsilon, uniform, self._exponential.draw(shape, like))

    def mixture_quantile(self, logits: Tensor, p: Tensor) -> Tensor:
        return bisected_quantile(self, logits, p)

    def breakpoints(self, dtype: torch.dtype) -> tuple[float, ...] | None:
        return self._exponential.breakpoints(dtype)

    def panel_edges(self, logits: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
        """Those of the exponentials, and around the points where each meets the uniform share."""
        odds = log1p(-self.epsilon) - log(self.epsilon) + log(self.beta) - _log1mexp(self.beta)
        near = (odds + F.logsigmoid(-logits)) / self.beta
        far = 1 - (odds + F.logsigmoid(logits)) / self.beta
        meetings = [around(x, 1 / self.beta, dtype) for x in (near, far)]
        return torch.cat((self._exponential.panel_edges(logits, low, high, dtype), *meetings), -1)

    @property
    def mean(self) -> Number:
        return (1 - self.epsilon) * self._exponential.mean + 0.5 * self.epsilon


class PowerLaw(NamedTuple):
    """Powers of the distance from 0 (Eq. 8)."""

    beta: Number

    def log_density(self, x: Point) -> Tensor:
        return (1 / self.beta - 1) * log_s(x) - log(self.beta)

    def log_below(self, x: Point) -> Tensor:
        return log_s(x) / self.beta

    def log_above(self, x: Point) -> Tensor:
        return log1mexp(-log_s(x) / self.beta)

    def log_between(self, low: Point, high: Point) -> Tensor:
        log_low, log_high = log_s(low), log_s(high)
        return log_high / self.beta + log1mexp((log_high - log_low) / self.beta)

    def logit_slope(self, logits: Tensor, x: Point) -> Tensor:
        near, far = torch.log(x.s), torch.log(x.s_bar)
        gap = torch.exp(torch.minimum(near, far) / self.beta) + torch.expm1(torch.maximum(near, far) / self.beta)
        log_q = F.logsigmoid(logits)
        power = 1 / self.beta - 1
        return self.beta * gap / (torch.exp(power * near - log_q) + torch.exp(power * far - log_q + logits))

    def draw(self, shape: torch.Size, like: Tensor) -> Tensor:
        return torch.rand(shape, dtype=like.dtype, device=like.device) ** self.beta

    def mixture_quantile(self, logits: Tensor, p: Tensor) -> Tensor:
        return bisected_quantile(self, logits, p)

    def breakpoints(self, dtype: torch.dtype) -> tuple[float, ...] | None:
        """None: the log density is nearly linear on the logit axis."""
        return ()

    def panel_edges(self, logits: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=logits.dtype, device=logits.device)

    @property
    def mean(self) -> Number:
        return 1 / (1 + self.beta)
