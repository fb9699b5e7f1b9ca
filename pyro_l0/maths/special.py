"""Special functions with full relative accuracy; the comments say which cancellation or overflow a form avoids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_l0.maths.backend import Context, apply, transformed

Number = float | Tensor
LOG_2PI = math.log(2 * math.pi)
SQRT_2 = math.sqrt(2)
LN_2 = math.log(2)
_ONE = torch.ones(())
clamp_backward: Callable[[Tensor, Tensor, float, float], Tensor] = torch.ops.aten.hardtanh_backward.default
_Map = Callable[[Tensor], Tensor]


def either(of_tensor: _Map, of_number: Callable[[float], float]) -> Callable[[Number], Number]:
    """A function that takes Python's numbers and tensors alike, from one of each kind."""
    return lambda x: of_tensor(x) if isinstance(x, Tensor) else of_number(x)


exp, expm1 = either(torch.exp, math.exp), either(torch.expm1, math.expm1)
log, log1p = either(torch.log, math.log), either(torch.log1p, math.log1p)


def last(x: Number) -> Number:
    """A tensor with one more dimension of size 1, the last, for the nodes; a number as it is."""
    return x.unsqueeze(-1) if isinstance(x, Tensor) else x


def cat_flat(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of several tensors, one tensor after the other."""
    # A view of a vector as itself would still be a node of the graph.
    return torch.cat([x if x.dim() == 1 else x.reshape(-1) for x in tensors])


def inside_unit_interval(z: Tensor) -> Tensor:
    """Keep interior draws off the atoms, which rounding may reach."""
    info = torch.finfo(z.dtype)
    return z.clamp(info.tiny, 1 - info.eps / 2)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(-x)) for x > 0, accurate at both ends."""
    small = x < LN_2
    # Each branch sees a harmless argument where the other one is used: autograd would turn 0 * inf into NaN.
    near = torch.log(-torch.expm1(-torch.where(small, x, 0.5)))
    far = torch.log1p(-torch.exp(-torch.where(small, 1.0, x)))
    return torch.where(small, near, far)


class _Unary(torch.autograd.Function):
    """A function of one tensor with its derivative, for which that tensor alone is kept."""

    @staticmethod
    def forward(ctx: Context[_Map], x: Tensor, value: _Map, slope: _Map) -> Tensor:
        ctx.options = slope
        ctx.save_for_backward(x)
        return value(x)

    @staticmethod
    def backward(ctx: Context[_Map], grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return grad * ctx.options(x), None, None


def plain_psi(x: Tensor) -> Tensor:
    """:func:`psi` as operations that autograd follows one by one."""
    # Cut at x^last / last!; the rest at |x| = 1/2 is 6e-18 of the value in float64, 2e-9 in float32.
    last = 15 if x.dtype == torch.float64 else 9
    series, one = x / last + 1, _ONE.to(x)
    for k in range(last - 1, 2, -1):
        series = torch.addcmul(one, series, x, value=1 / k)
    return torch.where(x.abs() < 0.5, 0.5 * x * x * series, torch.expm1(x) - x)


def psi(x: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0, with full relative accuracy at small x."""
    return plain_psi(x) if transformed() else apply(_Unary, x, plain_psi, torch.expm1)


def klterm(log_q: Tensor, log_p: Tensor) -> Tensor:
    """q log(q/p) - q + p >= 0 from log q and log p.

    Summed over atoms and integrated over the interior it gives the KL, because both sides have total mass one;
    unlike q log(q/p) it has no negative terms, so nothing cancels.
    """
    return klterm_from_ratio(log_q, log_p - log_q, log_p)


def klterm_from_ratio(log_q: Tensor, x: Tensor, log_p: Tensor) -> Tensor:
    """:func:`klterm` when x = log p - log q is known better than as a difference."""
    near = x < 1
    q = torch.exp(log_q)
    # Far above, exp(log_p) stays finite where exp(log_q) * exp(x) would be 0 * inf.
    close = q * psi(torch.where(near, x, 0.0))
    # An atom without mass under q in float arithmetic contributes p, whatever the ratio.
    far = torch.where(near, 0.0, torch.exp(log_p) - q - q * torch.where(q > 0, x, 0.0))
    return torch.where(near, close, far)


def standard_normal_density(x: Tensor) -> Tensor:
    """exp(-x^2 / 2) / sqrt(2 pi); 0 where it underflows."""
    return torch.exp(-0.5 * (x * x + LOG_2PI))


def log_ndtr(x: Tensor) -> Tensor:
    """log P(X <= x) of a standard normal, with a derivative that is accurate far in the tail."""
    # torch's own derivative loses accuracy far in the tail (2e-4 at -100 in float32).
    return _log_ndtr(x) if transformed() else apply(_Unary, x, torch.special.log_ndtr, _inverse_mills)


def _log_ndtr(x: Tensor) -> Tensor:
    # torch's own has no rule for torch.vmap.
    low = x < -1
    tail = torch.where(low, x, -1.0)
    below = torch.log(0.5 * torch.special.erfcx(-tail / SQRT_2)) - 0.5 * tail.square()
    return torch.where(low, below, torch.log1p(-0.5 * torch.special.erfc(torch.where(low, -1.0, x) / SQRT_2)))


def ndtr(x: Tensor) -> Tensor:
    """Standard normal cdf; torch's own is (1 + erf) / 2, which cancels in the lower tail."""
    erfc: Tensor = torch.special.erfc(-x / SQRT_2)
    return 0.5 * erfc


def _inverse_mills(x: Tensor) -> Tensor:
    """The derivative of log_ndtr: density over cdf, which goes like -x far below 0."""
    erfcx: Tensor = torch.special.erfcx(-x / SQRT_2)
    return math.sqrt(2 / math.pi) / erfcx


def _positive_part_mean(x: Tensor) -> Tensor:
    density = standard_normal_density(x)
    direct = x * ndtr(x) + density
    # Only where it is used: erfcx overflows far above, and 0 * inf would be the derivative there.
    near = torch.where((x > -5) & (x < 0), x, -1.0)
    middle = density * (1 + near * math.sqrt(math.pi / 2) * torch.special.erfcx(-near / SQRT_2))
    u = (-x).clamp(min=5.0)
    fraction = torch.zeros_like(u)
    for k in range(40, 0, -1):
        fraction = k / (u + fraction)
    tail = density * fraction / (u + fraction)
    return torch.where(x >= 0, direct, torch.where(x > -5, middle, tail))


def positive_part_mean(x: Tensor) -> Tensor:
    """E max(0, x + e) = x Phi(x) + phi(x), without the cancellation that the sum has at x < 0."""
    return _positive_part_mean(x) if transformed() else apply(_Unary, x, _positive_part_mean, ndtr)
