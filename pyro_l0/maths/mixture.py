"""Mixtures on (0, 1) of a component and its mirror image, stretched and clipped.

Component 0 has its mass near 0, and component 1 is its mirror image. A component gets a point as the pair (s, 1 - s),
both with full relative accuracy, so that the mirror image is the same function with the pair swapped. Logits are those
of the weight q of component 1; equation numbers are those of the paper on mixture-distributed regularisation.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.host import Context, apply
from pyro_l0.maths.quadrature import Stretch
from pyro_l0.maths.special import Number, clamp_backward, inside_unit_interval


class Point(NamedTuple):
    """A point of the unit interval."""

    s: Tensor  # distance from 0
    s_bar: Tensor  # distance from 1

    @property
    def mirrored(self) -> Point:
        """The point as the other component sees it."""
        return Point(self.s_bar, self.s)


class Component(Protocol):
    """The component of a mixture that has its mass near 0, with cdf R0; R1 is that of its mirror image."""

    def log_density(self, x: Point) -> Tensor:
        """Log density."""

    def log_below(self, x: Point) -> Tensor:
        """log R0."""

    def log_above(self, x: Point) -> Tensor:
        """log(1 - R0)."""

    def log_between(self, low: Point, high: Point) -> Tensor:
        """Log of the mass between two points."""

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
        """Mean of a draw."""


def log_s(x: Point) -> Tensor:
    """log s, accurate near 1 too."""
    low = x.s < 0.5
    return torch.where(low, torch.log(torch.where(low, x.s, 0.5)), torch.log1p(-torch.where(low, 0.5, x.s_bar)))


def _mix(logits: Tensor, zero: Tensor, one: Tensor) -> Tensor:
    return torch.logaddexp(F.logsigmoid(-logits) + zero, F.logsigmoid(logits) + one)


def log_density(component: Component, logits: Tensor, x: Point) -> Tensor:
    """Log density of the mixture."""
    return _mix(logits, component.log_density(x), component.log_density(x.mirrored))


def log_below(component: Component, logits: Tensor, x: Point) -> Tensor:
    """Log of the mixture's cdf."""
    return _mix(logits, component.log_below(x), component.log_above(x.mirrored))


def log_above(component: Component, logits: Tensor, x: Point) -> Tensor:
    """Log of one minus the mixture's cdf."""
    return _mix(logits, component.log_above(x), component.log_below(x.mirrored))


def log_between(component: Component, logits: Tensor, low: Point, high: Point) -> Tensor:
    """Log of the mixture's mass between two points."""
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
