"""Mixtures on (0, 1) of a component and its mirror image, stretched and clipped.

Component 0 has its mass near 0, and component 1 is its mirror image. A component gets a point as the pair (s, 1 - s),
both with full relative accuracy, so that the mirror image is the same function with the pair swapped. Logits are those
of the weight q of component 1; equation numbers are those of the paper on mixture-distributed regularisation.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.backend import Context, apply, largest
from pyro_l0.maths.quadrature import Stretch, drops, edges_around
from pyro_l0.maths.special import (
    Number,
    clamp_backward,
    either,
    exp,
    expm1,
    inside_unit_interval,
    last,
    log,
    log1mexp,
    log1p,
)

_MOST_BREAKPOINTS = 12

_log1mexp = either(log1mexp, lambda x: math.log(-math.expm1(-x)))


class Point(NamedTuple):
    """A point of the unit interval, from both ends: 1 - s loses what is small."""

    s: Tensor  # distance from 0
    s_bar: Tensor  # distance from 1

    @property
    def mirrored(self) -> Point:
        """The point 1 - s, at which the component near 0 has the value of the one near 1."""
        return Point(self.s_bar, self.s)


class Component(Protocol):
    """The component of a mixture that has its mass near 0, with cdf R0; R1 is that of its mirror image."""

    def log_density(self, x: Point) -> Tensor:
        """log r0, with respect to ds."""

    def log_below(self, x: Point) -> Tensor:
        """log R0(s) = log P(S <= s), accurate where that is small."""

    def log_above(self, x: Point) -> Tensor:
        """log(1 - R0(s)), accurate where that is small."""

    def log_between(self, low: Point, high: Point) -> Tensor:
        """log(R0(high) - R0(low)), without cancellation."""

    def logit_slope(self, logits: Tensor, x: Point) -> Tensor:
        """How far a point moves with the logits, q (1 - q) (R0 - R1) over the mixture's density (Eq. 12)."""

    def draw(self, shape: torch.Size, like: Tensor) -> Tensor:
        """Independent draws of a tensor's type and device."""

    def mixture_quantile(self, logits: Tensor, p: Tensor) -> Tensor:
        """The point that a draw of the mixture stays below with probability p."""

    def breakpoints(self, dtype: torch.dtype) -> tuple[float, ...] | None:
        """Shares of the unit interval at which a quadrature rule starts anew, None where they would be too many."""

    def panel_edges(self, logits: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
        """Where panels end that resolve the mixture between two values of s; shape ``logits.shape + (k,)``."""

    @property
    def mean(self) -> Number:
        """The mean of s, in (0, 1/2) for a component near 0."""


def log_s(x: Point) -> Tensor:
    """log s, from 1 - s where that is smaller."""
    low = x.s < 0.5
    return torch.where(low, torch.log(torch.where(low, x.s, 0.5)), torch.log1p(-torch.where(low, 0.5, x.s_bar)))


def _mix(logits: Tensor, zero: Tensor, one: Tensor) -> Tensor:
    return torch.logaddexp(F.logsigmoid(-logits) + zero, F.logsigmoid(logits) + one)


def log_density(component: Component, logits: Tensor, x: Point) -> Tensor:
    """log((1 - q) r0 + q r1) with q = sigmoid(logits), with respect to ds."""
    return _mix(logits, component.log_density(x), component.log_density(x.mirrored))


def log_below(component: Component, logits: Tensor, x: Point) -> Tensor:
    """log P(S <= s) of the mixture, accurate where that is small."""
    return _mix(logits, component.log_below(x), component.log_above(x.mirrored))


def log_above(component: Component, logits: Tensor, x: Point) -> Tensor:
    """log P(S > s) of the mixture, accurate where that is small."""
    return _mix(logits, component.log_above(x), component.log_below(x.mirrored))


def log_between(component: Component, logits: Tensor, low: Point, high: Point) -> Tensor:
    """log P(low < S <= high) of the mixture, without cancellation."""
    return _mix(logits, component.log_between(low, high), component.log_between(high.mirrored, low.mirrored))


@torch.no_grad()
def bisected_quantile(component: Component, logits: Tensor, p: Tensor) -> Tensor:
    """The point that a draw of the mixture stays below with probability p, by bisection."""
    logits, p = torch.broadcast_tensors(logits, p)
    low, high = torch.zeros_like(p), torch.ones_like(p)
    lower_half = p < 0.5
    # From whichever tail is nearer, so that both ends keep their accuracy.
    goal = torch.where(lower_half, torch.log(p), torch.log1p(-p))
    for _ in range(60 if p.dtype == torch.float64 else 30):
        middle = 0.5 * (low + high)
        x = Point(middle, 1 - middle)
        right = torch.where(lower_half, log_below(component, logits, x) < goal, log_above(component, logits, x) > goal)
        low, high = torch.where(right, middle, low), torch.where(right, high, middle)
    middle = 0.5 * (low + high)
    return torch.where(p <= 0, 0.0, torch.where(p >= 1, 1.0, middle))


def attach_gradient(component: Component, logits: Tensor, s: Tensor, p: Tensor | None = None) -> Tensor:
    """Points s of the unit interval with their implicit derivatives for the mixture's parameters (Eq. 12).

    A point with P(S <= s) = p moves with a parameter by the change of the cdf over the density, however it was found.
    Right to second order; what torch derives from that in turn is not. Give ``p`` if it has a gradient too.
    """
    s = inside_unit_interval(s.detach())

    def residual(s: Tensor) -> Tensor:
        x = Point(s, 1 - s)
        below, above = log_below(component, logits, x), log_above(component, logits, x)
        # From whichever tail is nearer: the change of the other one would be lost in rounding.
        change = torch.where(below < above, torch.exp(below), -torch.exp(above))
        if p is not None:
            change = change - p
        return change - change.detach()

    log_f = log_density(component, logits, Point(s, 1 - s)).detach()
    # Every step of this iteration for the point whose cdf stays as it was is right to one more order.
    moved = s - residual(s) * torch.exp(-log_f)
    return moved - residual(moved) * torch.exp(-log_f)


def unstretched_draw(component: Component, logits: Tensor, shape: torch.Size) -> Tensor:
    """Draws of the mixture by choosing a component first, without a gradient."""
    s = component.draw(shape, logits)
    one = torch.rand(shape, dtype=logits.dtype, device=logits.device) < torch.sigmoid(logits.detach())
    return torch.where(one, 1 - s, s)


def _gate_slope(component: Component, logits: Tensor, s: Tensor, stretch: Stretch) -> Tensor:
    """Derivative of the gate at an unstretched draw for the logits (Eq. 12), 0 at the atoms."""
    z = (stretch.gamma + stretch.width * s).clamp(0, 1)
    # Where the slope is finite.
    s = s.clamp(-stretch.gamma / stretch.width, (1 - stretch.gamma) / stretch.width)  # type: ignore[arg-type]
    slope = component.logit_slope(logits, Point(s, 1 - s)) * stretch.width
    return clamp_backward(slope, z, 0, 1)


class _MixtureGateDraw(torch.autograd.Function):
    """Draws of the stretched and clipped mixture with their derivative for the logits (Eq. 12) as one node."""

    @staticmethod
    def forward(
        ctx: Context[tuple[Component, Stretch]],
        logits: Tensor,
        shape: torch.Size,
        component: Component,
        stretch: Stretch,
    ) -> Tensor:
        s = unstretched_draw(component, logits, shape)
        if ctx.needs_input_grad[0]:
            ctx.options = component, stretch
            ctx.save_for_backward(_gate_slope(component, logits, s, stretch), logits, s)
        return (stretch.gamma + stretch.width * s).clamp_(0, 1)

    @staticmethod
    def backward(ctx: Context[tuple[Component, Stretch]], grad: Tensor) -> tuple[Tensor | None, ...]:
        slope, logits, s = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of this gradient is being built
            component, stretch = ctx.options
            slope = _gate_slope(component, logits, attach_gradient(component, logits, s), stretch)
        return (grad * slope).sum_to_size(logits.shape), None, None, None


def gate_draw(logits: Tensor, shape: torch.Size, component: Component, stretch: Stretch) -> Tensor:
    """Draws of the stretched and clipped mixture, differentiable in the logits alone."""
    return apply(_MixtureGateDraw, logits, shape, component, stretch)


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
        """The positive root of the quadratic that Eq. 6 = p is in exp(beta s), solved for its distance from 1.

        With q = sigmoid(logits) and E = exp(-beta), y = exp(beta s) - 1 solves a y^2 + b y = p (1 - E), with a = q E,
        b = 1 - q + q E - p (1 - E) and p (1 - E) the ``mass``: by 2 mass / (b + root) where b is not negative
        (``near``), else by (root - b) / 2 a (``far``, with the logarithm of 1 + y from that of a), so nothing cancels.
        """
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
        return torch.cat((self._end_edges(low, high, dtype), edges_around(meeting, 0.5 / self.beta, dtype)), -1)

    def _end_edges(self, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
        reach = drops(dtype, low.device) / last(self.beta)
        return torch.cat((low.unsqueeze(-1) + reach, high.unsqueeze(-1) - reach), -1)

    @property
    def mean(self) -> Number:
        return 1 / self.beta + exp(-self.beta) / expm1(-self.beta)


class ExponentialUniform(NamedTuple):
    """Truncated exponentials of rate beta > 0, of which a share epsilon in (0, 1) is uniform (Eq. 7)."""

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
        meetings = [edges_around(x, 1 / self.beta, dtype) for x in (near, far)]
        return torch.cat((self._exponential.panel_edges(logits, low, high, dtype), *meetings), -1)

    @property
    def mean(self) -> Number:
        return (1 - self.epsilon) * self._exponential.mean + 0.5 * self.epsilon


class PowerLaw(NamedTuple):
    """R0(s) = s^(1 / beta) with beta > 1 (Eq. 8): the larger beta, the nearer to 0."""

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
