"""Pure tensor maths of gates: no classes with state, no Pyro, float32-safe, fit for ``torch.compile``.

``docs/maths.md`` derives every formula; the comments here say which cancellation or overflow a form avoids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from pyro_l0.fast.switch import is_open

__all__ = [
    "DEFAULT_STRETCH",
    "MOST_NODES",
    "Nodes",
    "Stretch",
    "around",
    "cat_flat",
    "constant",
    "drops",
    "even_places",
    "gauss_legendre",
    "half_width",
    "hard_concrete_cdf_logit",
    "hard_concrete_draw",
    "hard_concrete_entropy",
    "hard_concrete_icdf",
    "hard_concrete_interior_icdf",
    "hard_concrete_kl_same_stretch",
    "hard_concrete_kl_same_temperature",
    "hard_concrete_log_density",
    "hard_concrete_log_density_in_t",
    "hard_concrete_log_probs",
    "hard_concrete_mean",
    "hard_concrete_transform",
    "hard_concrete_variance",
    "kept",
    "kl_from_terms",
    "klterm",
    "klterm_from_ratio",
    "largest",
    "last",
    "log1mexp",
    "log_ndtr",
    "log_ndtri",
    "logistic_noise",
    "make_stretch",
    "ndtr",
    "normal_log_density",
    "num_nodes",
    "opaque",
    "panel_nodes",
    "positive_part_mean",
    "psi",
    "readable",
    "rectified_normal_entropy",
    "rectified_normal_interior_icdf",
    "rectified_normal_kl",
    "rectified_normal_log_interior_prob",
    "rectified_normal_mean",
    "rectified_normal_moments",
    "rectified_normal_variance",
    "rule_nodes",
    "standard_normal_density",
    "stretch_nodes",
    "transformed",
]

_LOG_2PI = math.log(2 * math.pi)
_SQRT_2 = math.sqrt(2)
_LN2 = math.log(2)
_ONE = torch.ones(())
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
clamp_backward = torch.ops.aten.hardtanh_backward.default


class Stretch(NamedTuple):
    """Stretch limits and what follows from them alone, as numbers or as tensors.

    Attributes:
        gamma: lower limit, below 0.
        zeta: upper limit, above 1.
        width: ``zeta - gamma``.
        t0: logit of the unstretched variable at which the gate is 0.
        t1: logit of the unstretched variable at which the gate is 1.
    """

    gamma: float | Tensor
    zeta: float | Tensor
    width: float | Tensor
    t0: float | Tensor
    t1: float | Tensor


class Nodes(NamedTuple):
    """Quadrature nodes on the logit axis between the atoms, on a last dimension of size n.

    Attributes:
        t: nodes in t.
        weight: weights with respect to dt.
        z: the gate's value g(t).
        one_minus_z: 1 - g(t), without cancellation.
        slope: g'(t).
    """

    t: Tensor
    weight: Tensor
    z: Tensor
    one_minus_z: Tensor
    slope: Tensor


# ---------------------------------------------------------------- helpers


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(-x)) for x > 0, accurate at both ends."""
    small = x < _LN2
    # Each branch sees a harmless argument where the other one is used: autograd would turn 0 * inf into NaN.
    near = torch.log(-torch.expm1(-torch.where(small, x, 0.5)))
    far = torch.log1p(-torch.exp(-torch.where(small, 1.0, x)))
    return torch.where(small, near, far)


def _psi(x: Tensor) -> Tensor:
    # Cut at x^last / last!; the rest at |x| = 1/2 is 6e-18 of the value in float64, 2e-9 in float32.
    last = 15 if x.dtype == torch.float64 else 9
    series = x / last + 1
    for k in range(last - 1, 2, -1):
        series = torch.addcmul(_ONE.to(x), series, x, value=1 / k)
    return torch.where(x.abs() < 0.5, 0.5 * x * x * series, torch.expm1(x) - x)


# Autograd functions below take their context in ``forward``: with ``setup_context`` torch binds the signature anew
# at every call, which takes longer than the maths of a layer's gates. torch.compile and torch.func get the plain
# formulas instead, which they differentiate (forwards too), map and fuse by themselves.


def transformed() -> bool:
    """Whether torch.compile traces what runs now, or a transform of torch.func carries it out."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def opaque(x: Tensor) -> bool:
    """Whether no branch may be taken on a tensor's values: traced, mapped by ``torch.vmap``, or without any."""
    if torch.compiler.is_compiling() or x.is_meta:
        return True
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def readable(x: Tensor) -> bool:
    """Whether the host may look at a tensor's values without waiting for a device."""
    return x.device.type == "cpu" and not opaque(x)


def constant(x: Tensor) -> bool:
    """Whether a tensor can be replaced by its values: :func:`readable`, and nothing is derived by it."""
    if x.requires_grad or not readable(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return forward_ad.unpack_dual(x).tangent is None


def largest(x: float | Tensor) -> float:
    """The largest value, infinity where it cannot be read."""
    if not isinstance(x, Tensor):
        return x
    if not readable(x):
        return math.inf
    return float(x.detach().amax()) if x.numel() else 1.0


def kept(size: int) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Keep as many results of a function of hashable constants between calls; torch.compile takes them as they are.

    torch.compile cannot trace a named tuple among the arguments.
    """

    def decorate(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        cached: Any = lru_cache(size, typed=True)(function)

        @wraps(function)
        def call(*args: _Args.args, **options: _Args.kwargs) -> _Result:
            result: _Result = cached(*args, **options)
            return result

        constant: Callable[_Args, _Result] = torch.compiler.assume_constant_result(call)
        return constant

    return decorate


def _apply(function: Any, *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


class _Psi(torch.autograd.Function):
    """exp(x) - 1 - x. Its derivative is expm1(x), so x alone is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _psi(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.expm1(x)


def psi(x: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0, with full relative accuracy at small x."""
    return _psi(x) if transformed() else _apply(_Psi, x)


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


def kl_from_terms(
    log_q_zero: Tensor,
    log_p_zero: Tensor,
    log_q_one: Tensor,
    log_p_one: Tensor,
    log_q_nodes: Tensor,
    log_p_nodes: Tensor,
    weight: Tensor,
) -> Tensor:
    """KL of two gates from their atoms and their log densities at quadrature nodes (last dimension)."""
    interior = (klterm(log_q_nodes, log_p_nodes) * weight).sum(-1)
    return klterm(log_q_zero, log_p_zero) + klterm(log_q_one, log_p_one) + interior


@lru_cache(maxsize=64)
def _legendre(n: int) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.legendre.leggauss(n)
    return x, w


@kept(256)
def gauss_legendre(n: int, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the n-point Gauss-Legendre rule on [-1, 1], computed in double."""
    x, w = _legendre(n)
    return torch.tensor(x, dtype=dtype, device=device), torch.tensor(w, dtype=dtype, device=device)


@kept(256)
def _number_stretch(gamma: float, zeta: float) -> Stretch:
    t0 = math.log(-gamma) - math.log(zeta)
    t1 = math.log1p(-gamma) - math.log(zeta - 1)
    return Stretch(gamma, zeta, zeta - gamma, t0, t1)


def half_width(stretch: Stretch) -> float:
    """Half the length of [t0, t1], the largest one if there are several, infinity where it cannot be read."""
    return 0.5 * largest(stretch.t1 - stretch.t0)


def make_stretch(gamma: float | Tensor, zeta: float | Tensor, dtype: torch.dtype) -> Stretch:
    """The numbers that follow from the stretch limits, in double; tensors come back in ``dtype``."""
    if not isinstance(gamma, Tensor) and not isinstance(zeta, Tensor):
        return _number_stretch(gamma, zeta)
    low = torch.as_tensor(gamma, dtype=torch.float64)
    high = torch.as_tensor(zeta, dtype=torch.float64)
    low, high = torch.broadcast_tensors(low.to(high.device), high.to(low.device))
    t0 = torch.log(-low) - torch.log(high)
    t1 = torch.log1p(-low) - torch.log(high - 1)
    low, high, width, t0, t1 = (x.to(dtype) for x in (low, high, high - low, t0, t1))
    return Stretch(low, high, width, t0, t1)


def num_nodes(half_width: float, temperature: float, dtype: torch.dtype) -> int:
    """Gauss-Legendre nodes that integrate a gate's density in t to rounding.

    The integrand is analytic up to Im t = pi / max(1, temperature), which bounds the Bernstein ellipse around
    an interval of the given half width.

    Args:
        half_width: (t1 - t0) / 2.
        temperature: the largest temperature involved.
        dtype: float64 asks for 1e-12, float32 for 1e-7.
    """
    tol = 1e-12 if dtype == torch.float64 else 1e-7
    y = math.pi / (half_width * max(1.0, temperature))
    log_rho = math.asinh(y)
    return math.ceil(1.35 * math.log(1 / tol) / (2 * log_rho)) + 2


@kept(256)
def _number_nodes(gamma: float, zeta: float, n: int, dtype: torch.dtype, device: torch.device) -> Nodes:
    # Double first, then rounded once: the nodes of a stretch given by numbers never change.
    nodes = _tensor_nodes(
        Stretch(*(torch.tensor(x, dtype=torch.float64) for x in _number_stretch(gamma, zeta))),
        n,
        torch.float64,
        torch.device("cpu"),
    )
    return Nodes(*(x.to(dtype=dtype, device=device) for x in nodes))


DEFAULT_STRETCH = _number_stretch(-0.1, 1.1)


def _tensor_nodes(stretch: Stretch, n: int, dtype: torch.dtype, device: torch.device) -> Nodes:
    gamma, zeta, width, t0, t1 = (torch.as_tensor(x).unsqueeze(-1) for x in stretch)
    x, w = gauss_legendre(n, dtype, device)
    half = 0.5 * (t1 - t0)
    t = 0.5 * (t0 + t1) + half * x
    s, s_bar = torch.sigmoid(t), torch.sigmoid(-t)
    return Nodes(t, half * w, gamma + width * s, width * s_bar - (zeta - 1), width * s * s_bar)


def stretch_nodes(stretch: Stretch, n: int, dtype: torch.dtype, device: torch.device) -> Nodes:
    """Quadrature nodes on [t0, t1] of a stretch; kept between calls when the stretch is given by numbers."""
    gamma, zeta = stretch.gamma, stretch.zeta
    if isinstance(gamma, Tensor) or isinstance(zeta, Tensor):
        return _tensor_nodes(stretch, n, dtype, device)
    return _number_nodes(gamma, zeta, n, dtype, device)


# ---------------------------------------------------------------- hard concrete
# t(z) is the logit of the unstretched variable, a = temperature * t - log_alpha the logit of the cdf.


def logistic_noise(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard logistic draws with their full tails.

    The logit of a 24-bit uniform stops at 16.6 and may be infinite in float32. In main memory the uniform is drawn in
    double, which reaches 36.7 (a draw beyond has probability 2e-16); elsewhere, where double may be slow or missing,
    the log of a ratio of two exponentials reaches beyond 80, but takes four times as long on a CPU.
    """
    if device.type == "cpu":
        return torch.rand(shape, dtype=torch.float64).logit_(2.0**-54).to(dtype)
    tiny = torch.finfo(dtype).tiny
    log_e = torch.empty((2, *shape), dtype=dtype, device=device).exponential_().clamp_(min=tiny).log_()
    return log_e[0] - log_e[1]


def hard_concrete_transform(noise: Tensor, log_alpha: Tensor, temperature: float | Tensor, stretch: Stretch) -> Tensor:
    """The gate that standard logistic noise turns into (eq. 10-11 of the L0 paper)."""
    if isinstance(temperature, Tensor):
        y = (log_alpha + noise) / temperature
    else:
        y = torch.add(noise / temperature, log_alpha, alpha=1 / temperature)  # one operation in the graph
    return (stretch.gamma + stretch.width * torch.sigmoid(y)).clamp(0, 1)


class _HardConcreteDraw(torch.autograd.Function):
    """P(z != 0) of all gates in one vector, and a draw of each."""

    @staticmethod
    def forward(ctx: Any, noise: Tensor, temperature: float, stretch: Stretch, *log_alphas: Tensor) -> Any:
        y, x = _draw_logits(noise, temperature, stretch, log_alphas)
        s, active = torch.sigmoid(y), torch.sigmoid(x)
        z = (s * stretch.width).add_(stretch.gamma).clamp_(0, 1)
        ctx.save_for_backward(noise, y, s, z, x, active, *log_alphas)
        ctx.options = temperature, stretch
        ctx.set_materialize_grads(False)
        return active, *_split_like(z, log_alphas)

    @staticmethod
    def backward(ctx: Any, of_active: Tensor | None, *of_z: Tensor | None) -> Any:
        noise, y, s, z, x, active, *log_alphas = ctx.saved_tensors
        temperature, stretch = ctx.options
        if torch.is_grad_enabled():  # a graph of this gradient is being built
            y, x = _draw_logits(noise, temperature, stretch, log_alphas)
            s, active = torch.sigmoid(y), torch.sigmoid(x)
        pieces = zip(of_z, log_alphas, strict=True)
        grad = cat_flat([torch.zeros_like(a) if g is None else g for g, a in pieces])
        # The derivative of clamp at its result, 0 at the atoms; and sigmoid(-y), as 1 - s cancels near one.
        slope = (s * torch.sigmoid(-y)).mul_(stretch.width / temperature)
        grad = clamp_backward(grad, z, 0, 1).mul_(slope)
        if of_active is not None:
            grad.addcmul_(of_active, active * torch.sigmoid(-x))
        return None, None, None, *_split_like(grad, log_alphas)


def _draw_logits(
    noise: Tensor, temperature: float, stretch: Stretch, log_alphas: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits of the stretched variable and of P(z != 0)."""
    log_alpha = cat_flat(log_alphas)
    return torch.add(noise, log_alpha).div_(temperature), log_alpha - temperature * stretch.t0


def _split_like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([x.numel() for x in like])
    return [piece if x.dim() == 1 else piece.view(x.shape) for piece, x in zip(pieces, like, strict=True)]


def cat_flat(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of several tensors, one tensor after the other."""
    # A view of a vector as itself would still be a node of the graph.
    return torch.cat([x if x.dim() == 1 else x.reshape(-1) for x in tensors])


def hard_concrete_draw(
    log_alphas: Sequence[Tensor], temperature: float, stretch: Stretch
) -> tuple[list[Tensor], Tensor]:
    """Draw hard concretes of several sites with one temperature and stretch, given as numbers.

    A layer has few gates, so that a formula takes as long as its operations take to be called and to be recorded for
    the gradient. Here both happen once for all sites, and the graph has one node.

    Returns:
        The draws, each in the shape of its log alpha; P(z != 0) of all gates in one vector.
    """
    size = torch.Size([sum(a.numel() for a in log_alphas)])
    noise = logistic_noise(size, log_alphas[0].dtype, log_alphas[0].device)
    if transformed():
        y, x = _draw_logits(noise, temperature, stretch, log_alphas)
        z = (stretch.gamma + stretch.width * torch.sigmoid(y)).clamp(0, 1)
        return _split_like(z, log_alphas), torch.sigmoid(x)
    active, *draws = _HardConcreteDraw.apply(  # type: ignore[no-untyped-call]
        noise, temperature, stretch, *log_alphas
    )
    return draws, active


def hard_concrete_log_probs(
    log_alpha: Tensor, temperature: float | Tensor, stretch: Stretch
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log P(z = 0), log P(z = 1), log P(0 < z < 1) and log P(z != 0) (eq. 12, 24)."""
    a0 = temperature * stretch.t0 - log_alpha
    a1 = temperature * stretch.t1 - log_alpha
    log_active = F.logsigmoid(-a0)
    gap = torch.as_tensor(temperature * (stretch.t1 - stretch.t0), dtype=log_alpha.dtype, device=log_alpha.device)
    log_interior = F.logsigmoid(a1) + log_active + log1mexp(gap)
    return F.logsigmoid(a0), F.logsigmoid(-a1), log_interior, log_active


def _log(x: float | Tensor) -> float | Tensor:
    return torch.log(x) if isinstance(x, Tensor) else math.log(x)


def hard_concrete_log_density(z: Tensor, log_alpha: Tensor, temperature: float | Tensor, stretch: Stretch) -> Tensor:
    """Log density at 0 < z < 1 with respect to dz (eq. 23 stretched, eq. 26 before truncation)."""
    log_low = torch.log(z - stretch.gamma)
    log_high = torch.log(stretch.zeta - z)
    a = temperature * (log_low - log_high) - log_alpha
    return _log(temperature) + _log(stretch.width) - log_low - log_high + F.logsigmoid(a) + F.logsigmoid(-a)


def hard_concrete_log_density_in_t(t: Tensor, log_alpha: Tensor, temperature: float | Tensor) -> Tensor:
    """Log density with respect to dt, t the logit of the unstretched variable."""
    a = temperature * t - log_alpha
    return _log(temperature) + F.logsigmoid(a) + F.logsigmoid(-a)


def hard_concrete_cdf_logit(z: Tensor, log_alpha: Tensor, temperature: float | Tensor, stretch: Stretch) -> Tensor:
    """Logit of the cdf at 0 <= z <= 1 (eq. 24)."""
    return temperature * (torch.log(z - stretch.gamma) - torch.log(stretch.zeta - z)) - log_alpha


def hard_concrete_icdf(p: Tensor, log_alpha: Tensor, temperature: float | Tensor, stretch: Stretch) -> Tensor:
    """The smallest z with F(z) >= p."""
    return hard_concrete_transform(torch.log(p) - torch.log1p(-p), log_alpha, temperature, stretch)


def hard_concrete_interior_icdf(u: Tensor, log_alpha: Tensor, temperature: float | Tensor, stretch: Stretch) -> Tensor:
    """Quantile of the gate given 0 < z < 1 (eq. 29 with the limits 0 and 1).

    The logit of P0 + u * Pmid is the difference of two logs, each a sum of positive terms.
    """
    log_zero, log_one, log_interior, _ = hard_concrete_log_probs(log_alpha, temperature, stretch)
    below = torch.logaddexp(log_zero, torch.log(u) + log_interior)
    above = torch.logaddexp(log_one, torch.log1p(-u) + log_interior)
    return hard_concrete_transform(below - above, log_alpha, temperature, stretch)


def last(x: float | Tensor) -> float | Tensor:
    """Room for the node dimension."""
    return x.unsqueeze(-1) if isinstance(x, Tensor) else x


def hard_concrete_mean(log_alpha: Tensor, temperature: float | Tensor, nodes: Nodes) -> Tensor:
    """E[z], the integral of the survival function."""
    a = last(temperature) * nodes.t - log_alpha.unsqueeze(-1)
    measure = nodes.weight * nodes.slope
    mean, co_mean = (measure * torch.sigmoid(-a)).sum(-1), (measure * torch.sigmoid(a)).sum(-1)
    # Near 1 the slope of the mean is that of 1 - E[1 - z], whose terms are small instead of close to one.
    return torch.where(mean < 0.5, mean, 1 - co_mean)


def hard_concrete_variance(log_alpha: Tensor, temperature: float | Tensor, stretch: Stretch, nodes: Nodes) -> Tensor:
    """Var[z] as a sum of non-negative terms, so that small variances keep their relative accuracy."""
    a = last(temperature) * nodes.t - log_alpha.unsqueeze(-1)
    below, above = torch.sigmoid(a), torch.sigmoid(-a)
    mean = (nodes.weight * nodes.slope * above).sum(-1)
    co_mean = (nodes.weight * nodes.slope * below).sum(-1)
    log_zero, log_one, _, _ = hard_concrete_log_probs(log_alpha, temperature, stretch)
    m, m_bar = mean.unsqueeze(-1), co_mean.unsqueeze(-1)
    distance = torch.where(m < 0.5, nodes.z - m, m_bar - nodes.one_minus_z)
    interior = (nodes.weight * (last(temperature) * below * above * distance.square())).sum(-1)
    return torch.exp(log_zero) * mean.square() + torch.exp(log_one) * co_mean.square() + interior


def hard_concrete_entropy(log_alpha: Tensor, temperature: float | Tensor, stretch: Stretch, nodes: Nodes) -> Tensor:
    """Entropy with respect to the mixed measure; it may be negative."""
    log_zero, log_one, _, _ = hard_concrete_log_probs(log_alpha, temperature, stretch)
    log_density = hard_concrete_log_density_in_t(nodes.t, log_alpha.unsqueeze(-1), last(temperature))
    interior = (nodes.weight * torch.exp(log_density) * (log_density - torch.log(nodes.slope))).sum(-1)
    return -torch.exp(log_zero) * log_zero - torch.exp(log_one) * log_one - interior


class _Ends(NamedTuple):
    """A hard concrete q and the log-odds d by which it leads p, mirrored such that P(z = 0) <= 1/2 under q.

    Attributes:
        d: log alpha of q minus that of p.
        mirrored: where z was replaced by 1 - z, under which the KL does not change.
        v0, u0, v1, u1: cdf of q at 0, its complement, and the same below 1.
        between: v1 - v0, without cancellation.
        a0, a1: logits of v0 and v1.
    """

    d: Tensor
    mirrored: Tensor
    v0: Tensor
    u0: Tensor
    v1: Tensor
    u1: Tensor
    between: Tensor
    a0: Tensor
    a1: Tensor


def _ends(log_alpha_q: Tensor, log_alpha_p: Tensor, temperature: float | Tensor, stretch: Stretch) -> _Ends:
    a0 = temperature * stretch.t0 - log_alpha_q
    a1 = temperature * stretch.t1 - log_alpha_q
    d = log_alpha_q - log_alpha_p
    mirrored = a0 + a1 > 0
    sign = 1 - 2 * mirrored.to(d.dtype)
    a0, a1, d = torch.where(mirrored, -a1, a0), torch.where(mirrored, -a0, a1), d * sign
    v0, u0, v1, u1 = torch.sigmoid(a0), torch.sigmoid(-a0), torch.sigmoid(a1), torch.sigmoid(-a1)
    # v1 * u0 - v0 * u1 = v1 * u0 * (1 - exp(a0 - a1)), and the gap of the logits does not depend on q.
    gap = -temperature * (stretch.t1 - stretch.t0)
    between = v1 * u0 * -(torch.expm1(gap) if isinstance(gap, Tensor) else math.expm1(gap))
    return _Ends(d, mirrored, v0, u0, v1, u1, between, a0, a1)


def _log_ratios(e: _Ends, near: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For |d| < 3: d, L0, L1 = log(1 + kappa v0), log(1 + kappa v1), their difference, y and log1p(y) / y."""
    d = torch.where(near, e.d, 0.0)
    kappa = torch.expm1(d)
    l0, l1 = torch.log1p(kappa * e.v0), torch.log1p(kappa * e.v1)
    y = kappa * e.between / (1 + kappa * e.v0)
    delta = torch.log1p(y)
    tiny = y.abs() < 1e-4
    ratio = torch.where(tiny, 1 - y * (1 / 2 - y * (1 / 3 - y / 4)), delta / torch.where(tiny, 1.0, y))
    return d, l0, l1, delta, y, ratio


def _far_log_ratios(e: _Ends, near: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For |d| >= 3: d, L0, L1, exp(d) - 1 and exp(-d) - 1, which beyond 60 would overflow and no longer matter."""
    d = torch.where(near, 3.0, e.d)
    # softplus(a + d) - softplus(a); torch's softplus drops exp(-a) above 20.
    l0 = F.logsigmoid(-e.a0) - F.logsigmoid(-e.a0 - d)
    l1 = F.logsigmoid(-e.a1) - F.logsigmoid(-e.a1 - d)
    bounded = d.clamp(-60.0, 60.0)
    return d, l0, l1, torch.expm1(bounded), torch.expm1(-bounded)


def _kl_same_temperature(
    log_alpha_q: Tensor,
    log_alpha_p: Tensor,
    temperature: float | Tensor,
    stretch: Stretch,
    rule: tuple[Tensor, Tensor],
) -> Tensor:
    e = _ends(log_alpha_q, log_alpha_p, temperature, stretch)
    near = e.d.abs() < 3
    d, l0, l1, delta, _, ratio = _log_ratios(e, near)
    x, w = 0.5 * (rule[0] + 1), 0.5 * rule[1]
    step = delta.unsqueeze(-1) * x
    inner = _psi((d - 2 * l0).unsqueeze(-1) - 2 * step) * torch.exp(step)
    small = e.v0 * _psi(d - l0) + e.u1 * _psi(-l1) + e.between * ratio * (inner @ w)

    d, l0, l1, kappa, kappa_bar = _far_log_ratios(e, near)
    large = -d * e.v1 - 2 * e.between - l1 * (e.u1 + 2 / kappa_bar) - l0 * (e.v0 + 2 / kappa)
    return torch.where(near, small, large)


def _kl_same_temperature_slopes(
    log_alpha_q: Tensor,
    log_alpha_p: Tensor,
    temperature: float | Tensor,
    stretch: Stretch,
    rule: tuple[Tensor, Tensor],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Derivatives of the KL with respect to both locations and the temperature, those that are needed."""
    e = _ends(log_alpha_q, log_alpha_p, temperature, stretch)
    near = e.d.abs() < 3
    d, l0, l1, delta, y, ratio = _log_ratios(e, near)
    far_d, far_l0, far_l1, kappa, kappa_bar = _far_log_ratios(e, near)
    x, w = 0.5 * (rule[0] + 1), 0.5 * rule[1]
    step = delta.unsqueeze(-1) * x
    tiny = (y.abs() < 1e-4).unsqueeze(-1)
    # The cdf of q at the nodes and its complement.
    series = x * (1 + (x - 1) * delta.unsqueeze(-1) * (1 / 2 + (2 * x - 1) * delta.unsqueeze(-1) / 12))
    share = torch.where(tiny, series, torch.expm1(step) / torch.where(tiny, 1.0, y.unsqueeze(-1)))
    v = e.v0.unsqueeze(-1) + e.between.unsqueeze(-1) * share
    u = e.u1.unsqueeze(-1) + e.between.unsqueeze(-1) * (1 - share)
    sign = torch.where(e.mirrored, -1.0, 1.0)

    grad_q = grad_p = grad_t = None
    if needed[0]:
        ends = e.v0 * e.u0, e.v1 * e.u1
        small = ends[0] * l0 + ends[1] * (d - l1) + 2 * delta * ((v * u) @ w)
        large = (
            ends[0] * far_l0
            + ends[1] * (far_d - far_l1)
            - 2 * e.between / kappa_bar
            + 2 * (far_l1 - far_l0) / (kappa * kappa_bar)
            - e.between * (e.v0 + e.v1)
        )
        grad_q = sign * torch.where(near, small, large)
    if needed[1]:
        lead = torch.expm1((d - 2 * l0).unsqueeze(-1) - 2 * step) * (torch.exp(d).unsqueeze(-1) * v - u)
        small = torch.exp(-l0) * (
            e.between * ratio * (lead @ w) - e.v0 * e.u0 * torch.expm1(d - l0)
        ) + e.u1 * e.v1 * torch.expm1(-l1) * torch.exp(d - l1)
        p0, p1 = torch.sigmoid(e.a0 + far_d), torch.sigmoid(e.a1 + far_d)
        large = e.v1 - (1 + e.v1) * p1 + e.v0 * p0 - 2 * (p1 - p0) / kappa - 2 * (far_l1 - far_l0) / (kappa * kappa_bar)
        grad_p = sign * torch.where(near, small, large)
    if needed[2]:
        l0, l1 = torch.where(near, l0, far_l0), torch.where(near, l1, far_l1)
        rest_d = e.d - l1
        low = rest_d < 1
        # v1 exp(d - L1) is the cdf of p, which stays finite where the exponential does not.
        upper = torch.where(
            low,
            e.v1 * psi(torch.where(low, rest_d, 0.0)),
            torch.sigmoid(e.a1 + e.d) - e.v1 - e.v1 * rest_d,
        )
        lower = e.v0 * e.u0 * psi(-l0)
        t0, t1 = stretch.t0, stretch.t1
        grad_t = torch.where(e.mirrored, t1 * lower - t0 * e.u1 * upper, t1 * e.u1 * upper - t0 * lower)
    return [grad_q, grad_p, grad_t]


# Gates that are worked on at a time in main memory: their temporaries stay in the processor's cache.
_BLOCK = 2**16


def _in_blocks(
    function: Callable[..., list[Tensor | None]], stretch: Stretch, *args: float | Tensor
) -> list[Tensor | None]:
    """Apply an elementwise function of equally shaped tensors block by block, where that is faster and possible."""
    first = next(x for x in args if isinstance(x, Tensor))
    size = first.numel()
    whole_only = first.device.type != "cpu" or torch.is_grad_enabled() or isinstance(stretch.t0, Tensor)
    if size <= _BLOCK or whole_only:
        return function(*args)
    flat = [_flat(x) if isinstance(x, Tensor) else x for x in args]
    out: list[Tensor | None] = []
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        part = function(*(x[start:stop] if isinstance(x, Tensor) else x for x in flat))
        if not out:
            out = [None if y is None else torch.empty(size, dtype=y.dtype) for y in part]
        for whole, piece in zip(out, part, strict=True):
            if whole is not None and piece is not None:
                whole[start:stop] = piece
    return [None if y is None else y.view(first.shape) for y in out]


def _flat(x: Tensor) -> Tensor:
    """One dimension, without a copy of a number that was expanded."""
    if not any(x.stride()):
        return x[(0,) * x.dim()].expand(x.numel())
    return x.reshape(-1)


class _KLSameTemperature(torch.autograd.Function):
    """KL of two hard concretes with one temperature; see :func:`hard_concrete_kl_same_temperature`.

    The derivatives are written out, because autograd would keep some eighty intermediate tensors per step. They are
    sums of terms of one sign wherever the parameters saturate, and are themselves differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any,
        log_alpha_q: Tensor,
        log_alpha_p: Tensor,
        temperature: float | Tensor,
        stretch: Stretch,
        rule: tuple[Tensor, Tensor],
    ) -> Tensor:
        ctx.stretch, ctx.rule = stretch, rule
        ctx.number = None if isinstance(temperature, Tensor) else temperature
        tensors = (temperature,) if isinstance(temperature, Tensor) else ()
        ctx.save_for_backward(log_alpha_q, log_alpha_p, *tensors)

        def value(q: Tensor, p: Tensor, t: float | Tensor) -> list[Tensor | None]:
            return [_kl_same_temperature(q, p, t, stretch, rule)]

        (kl,) = _in_blocks(value, stretch, log_alpha_q, log_alpha_p, temperature)
        assert kl is not None
        return kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_alpha_q, log_alpha_p, *rest = ctx.saved_tensors
        temperature = rest[0] if rest else ctx.number
        needed = ctx.needs_input_grad[:3]

        def slopes(q: Tensor, p: Tensor, t: float | Tensor) -> list[Tensor | None]:
            return _kl_same_temperature_slopes(q, p, t, ctx.stretch, ctx.rule, needed)

        found = _in_blocks(slopes, ctx.stretch, log_alpha_q, log_alpha_p, temperature)
        return *(None if slope is None else grad * slope for slope in found), None, None


def hard_concrete_kl_same_temperature(
    log_alpha_q: Tensor,
    log_alpha_p: Tensor,
    temperature: float | Tensor,
    stretch: Stretch,
    rule: tuple[Tensor, Tensor],
) -> Tensor:
    """KL of two hard concretes with one temperature and one stretch, in closed form.

    With d the lead of q's log alpha, kappa = exp(d) - 1 and v the cdf of q, the log ratio of the densities is
    -d + 2 log(1 + kappa v), whose integral is elementary. It is O(d^2) but built from terms of O(d), so for |d| < 3
    the same integral is taken over log(1 + kappa v) instead, where the integrand is entire and non-negative and the
    given rule is exact to rounding.

    Args:
        log_alpha_q: location of q, broadcast against ``log_alpha_p``.
        log_alpha_p: location of p.
        temperature: the shared temperature; the gradient is that of the shared value.
        stretch: the shared stretch, a constant.
        rule: Gauss-Legendre nodes and weights on [-1, 1] (8 for float64, 5 for float32).
    """
    log_alpha_q, log_alpha_p = torch.broadcast_tensors(log_alpha_q, log_alpha_p)
    if isinstance(temperature, Tensor):
        temperature = temperature.expand_as(log_alpha_q)
    if transformed() or not is_open("kl"):
        return _kl_same_temperature(log_alpha_q, log_alpha_p, temperature, stretch, rule)
    return _apply(_KLSameTemperature, log_alpha_q, log_alpha_p, temperature, stretch, rule)


def _logsigmoid_change(a: Tensor, step: Tensor) -> Tensor:
    """log sigmoid(a + step) - log sigmoid(a), accurate for small steps."""
    small = step.abs() < 1
    exact = -torch.log1p(torch.expm1(-torch.where(small, step, 0.0)) * torch.sigmoid(-a))
    return torch.where(small, exact, F.logsigmoid(a + step) - F.logsigmoid(a))


def hard_concrete_kl_same_stretch(
    log_alpha_q: Tensor,
    temperature_q: float | Tensor,
    log_alpha_p: Tensor,
    temperature_p: float | Tensor,
    stretch: Stretch,
    nodes: Nodes,
) -> Tensor:
    """KL of two hard concretes with one stretch and any temperatures, by quadrature on the logit axis.

    The log ratios come from the change of the cdf's logit, so that nearly equal q and p keep their relative
    accuracy in float32.
    """

    def log_q_and_change(t: float | Tensor, side: int) -> tuple[Tensor, Tensor]:
        a = side * (temperature_q * t - log_alpha_q)
        step = side * ((temperature_p - temperature_q) * t - (log_alpha_p - log_alpha_q))
        return F.logsigmoid(a), _logsigmoid_change(a, step)

    log_zero, change_zero = log_q_and_change(stretch.t0, 1)
    log_one, change_one = log_q_and_change(stretch.t1, -1)
    atoms = klterm_from_ratio(log_zero, change_zero, log_zero + change_zero) + klterm_from_ratio(
        log_one, change_one, log_one + change_one
    )
    log_alpha_q, log_alpha_p = log_alpha_q.unsqueeze(-1), log_alpha_p.unsqueeze(-1)
    temperature_q, temperature_p = last(temperature_q), last(temperature_p)
    below, change_below = log_q_and_change(nodes.t, 1)
    above, change_above = log_q_and_change(nodes.t, -1)
    log_q = _log(temperature_q) + below + above
    change = _log(temperature_p / temperature_q) + change_below + change_above
    return atoms + (nodes.weight * klterm_from_ratio(log_q, change, log_q + change)).sum(-1)


# ---------------------------------------------------------------- rectified normal
# a = -loc / scale and b = (1 - loc) / scale are the atoms' places on the standard normal's axis.


def standard_normal_density(x: Tensor) -> Tensor:
    """Density of the standard normal."""
    return torch.exp(-0.5 * (x * x + _LOG_2PI))


class _LogNdtr(torch.autograd.Function):
    """log Phi. torch's own derivative loses accuracy far in the tail (2e-4 at -100 in float32)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        value: Tensor = torch.special.log_ndtr(x)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * _inverse_mills(x)


def log_ndtr(x: Tensor) -> Tensor:
    """Log of the standard normal cdf."""
    return _log_ndtr(x) if transformed() else _apply(_LogNdtr, x)


def _log_ndtr(x: Tensor) -> Tensor:
    # torch's own has no rule for torch.vmap.
    low = x < -1
    tail = torch.where(low, x, -1.0)
    below = torch.log(0.5 * torch.special.erfcx(-tail / _SQRT_2)) - 0.5 * tail.square()
    return torch.where(low, below, torch.log1p(-0.5 * torch.special.erfc(torch.where(low, -1.0, x) / _SQRT_2)))


def ndtr(x: Tensor) -> Tensor:
    """Standard normal cdf; torch's own is (1 + erf) / 2, which cancels in the lower tail."""
    erfc: Tensor = torch.special.erfc(-x / _SQRT_2)
    return 0.5 * erfc


def log_ndtri(log_p: Tensor) -> Tensor:
    """Standard normal quantile from the log of a probability <= 1/2, however small."""
    bulk = log_p > -10
    with torch.no_grad():
        target = torch.where(bulk, -20.0, log_p)
        x = -torch.sqrt(-2 * target - torch.log(-4 * math.pi * target))
        for _ in range(4):
            x = x - (log_ndtr(x) - target) / _inverse_mills(x)
    x = x.detach()  # torch.no_grad holds for the innermost transform of torch.func alone
    # One more Newton step outside no_grad carries the gradient, and a second one the derivative of that.
    target = torch.where(bulk, -20.0, log_p)
    slope = _inverse_mills(x)
    tail = x - (log_ndtr(x) - target) / slope
    residual = log_ndtr(tail) - target
    tail = tail - (residual - residual.detach()) / slope
    centre = torch.special.ndtri(torch.exp(torch.where(bulk, log_p, -1.0)))
    return torch.where(bulk, centre, tail)


def _inverse_mills(x: Tensor) -> Tensor:
    """Derivative of log_ndtr."""
    erfcx: Tensor = torch.special.erfcx(-x / _SQRT_2)
    return math.sqrt(2 / math.pi) / erfcx


def _positive_part_mean(x: Tensor) -> Tensor:
    density = standard_normal_density(x)
    direct = x * ndtr(x) + density
    # Only where it is used: erfcx overflows far above, and 0 * inf would be the derivative there.
    near = torch.where((x > -5) & (x < 0), x, -1.0)
    middle = density * (1 + near * math.sqrt(math.pi / 2) * torch.special.erfcx(-near / _SQRT_2))
    u = (-x).clamp(min=5.0)
    fraction = torch.zeros_like(u)
    for k in range(40, 0, -1):
        fraction = k / (u + fraction)
    tail = density * fraction / (u + fraction)
    return torch.where(x >= 0, direct, torch.where(x > -5, middle, tail))


class _PositivePartMean(torch.autograd.Function):
    """E max(0, x + e) for standard normal e; its derivative is the normal cdf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _positive_part_mean(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * ndtr(x)


def positive_part_mean(x: Tensor) -> Tensor:
    """E max(0, x + e) = x Phi(x) + phi(x), without the cancellation that the sum has at x < 0."""
    return _positive_part_mean(x) if transformed() else _apply(_PositivePartMean, x)


def _reflect(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The interval (a, b) or its mirror image, whichever has a + b <= 0, and whether it was mirrored."""
    mirrored = a + b > 0
    return torch.where(mirrored, -b, a), torch.where(mirrored, -a, b), mirrored


def rectified_normal_log_interior_prob(loc: Tensor, scale: Tensor) -> Tensor:
    """log P(0 < z < 1)."""
    a, b, _ = _reflect(-loc / scale, (1 - loc) / scale)
    # A wide scale makes the interval narrow, and a difference of its ends' probabilities cancels; there a series of
    # the density about the middle. The terms left out are below (middle * width)^6 / 322560.
    middle, width = (0.5 - loc) / scale, 1 / scale
    narrow = width * middle.abs().clamp(min=1.0) < (0.01 if a.dtype == torch.float64 else 0.1)
    m, w = torch.where(narrow, middle, 0.0).square(), torch.where(narrow, width, 0.01)
    series = w.square() / 24 * (m - 1) + w.square().square() / 1920 * (m * m - 6 * m + 3)
    about_middle = torch.log(w) + torch.log1p(series) - 0.5 * (m + _LOG_2PI)
    a, b = torch.where(narrow, -1.0, a), torch.where(narrow, 1.0, b)
    tail = b < 0.5
    a_tail, b_tail = torch.where(tail, a, -2.0), torch.where(tail, b, -1.0)
    log_b = log_ndtr(b_tail)
    in_tail = log_b + log1mexp(log_b - log_ndtr(a_tail))
    a_centre, b_centre = torch.where(tail, -1.0, a), torch.where(tail, 1.0, b)
    centre = torch.log(0.5 * (torch.erf(b_centre / _SQRT_2) - torch.erf(a_centre / _SQRT_2)))
    return torch.where(narrow, about_middle, torch.where(tail, in_tail, centre))


def rectified_normal_mean(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """E[z] and E[1 - z], each with full relative accuracy."""
    a, b = -loc / scale, (1 - loc) / scale
    mean = scale * (positive_part_mean(-a) - positive_part_mean(-b))
    co_mean = scale * (positive_part_mean(b) - positive_part_mean(a))
    # The larger of the two is one minus the smaller, whose derivative does not cancel.
    low = loc < 0.5
    return torch.where(low, mean, 1 - co_mean), torch.where(low, 1 - mean, co_mean)


def rectified_normal_moments(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrals of 1, e and e^2 against the standard normal density over (a, b)."""
    a, b = -loc / scale, (1 - loc) / scale
    m0 = torch.exp(rectified_normal_log_interior_prob(loc, scale))
    density_a, density_b = standard_normal_density(a), standard_normal_density(b)
    return m0, density_a - density_b, m0 + a * density_a - b * density_b


def rectified_normal_variance(loc: Tensor, scale: Tensor, rule: tuple[Tensor, Tensor]) -> Tensor:
    """Var[z] as a sum of non-negative terms; the interior by the given rule where the density lives."""
    a, b = -loc / scale, (1 - loc) / scale
    mean, co_mean = rectified_normal_mean(loc, scale)
    # Where the interval lies in a tail, the mass sits within 8 units of the edge that is nearer the centre.
    low = torch.maximum(a, torch.clamp(b - 8, max=-8.5))
    high = torch.minimum(b, torch.clamp(a + 8, min=8.5))
    x, w = rule
    half = (0.5 * (high - low)).unsqueeze(-1)
    e = (0.5 * (low + high)).unsqueeze(-1) + half * x
    z = loc.unsqueeze(-1) + scale.unsqueeze(-1) * e
    m, m_bar = mean.unsqueeze(-1), co_mean.unsqueeze(-1)
    distance = torch.where(m < 0.5, z - m, m_bar - (1 - z))
    interior = (half * w * standard_normal_density(e) * distance.square()).sum(-1)
    return ndtr(a) * mean.square() + ndtr(-b) * co_mean.square() + interior


def rectified_normal_kl(loc_q: Tensor, scale_q: Tensor, loc_p: Tensor, scale_p: Tensor) -> Tensor:
    """KL of two rectified normals in closed form, from the truncated moments of q.

    Its absolute error is a few roundings of its largest term; a relative one would need quadrature where q and p
    nearly coincide.
    """
    m0, m1, m2 = rectified_normal_moments(loc_q, scale_q)
    r, k = scale_q / scale_p, (loc_q - loc_p) / scale_p
    interior = -m0 * torch.log(r) + 0.5 * ((r * r - 1) * m2 + 2 * r * k * m1 + k * k * m0)
    log_q_zero = log_ndtr(-loc_q / scale_q)
    log_p_zero = log_ndtr(-loc_p / scale_p)
    log_q_one = log_ndtr((loc_q - 1) / scale_q)
    log_p_one = log_ndtr((loc_p - 1) / scale_p)
    atoms = torch.exp(log_q_zero) * (log_q_zero - log_p_zero) + torch.exp(log_q_one) * (log_q_one - log_p_one)
    return atoms + interior


def normal_log_density(z: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """Log density of a normal."""
    e = (z - loc) / scale
    return -0.5 * (e * e + _LOG_2PI) - torch.log(scale)


def rectified_normal_entropy(loc: Tensor, scale: Tensor) -> Tensor:
    """Entropy with respect to the mixed measure; it may be negative."""
    log_zero, log_one = log_ndtr(-loc / scale), log_ndtr((loc - 1) / scale)
    m0, _, m2 = rectified_normal_moments(loc, scale)
    interior = m0 * (torch.log(scale) + 0.5 * _LOG_2PI) + 0.5 * m2
    return interior - torch.exp(log_zero) * log_zero - torch.exp(log_one) * log_one


def rectified_normal_interior_icdf(u: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """Quantile given 0 < z < 1, from whichever tail is nearer, so that it holds far from the unit interval."""
    a, _, mirrored = _reflect(-loc / scale, (1 - loc) / scale)
    v = torch.where(mirrored, 1 - u, u).clamp(min=torch.finfo(u.dtype).tiny)
    log_p = torch.logaddexp(log_ndtr(a), torch.log(v) + rectified_normal_log_interior_prob(loc, scale))
    # The nearer tail has at most half of the mass below its interval's centre, but v may reach beyond it.
    upper = log_p > -_LN2
    tail = log_ndtri(torch.where(upper, -1.0, log_p))
    bulk = torch.special.ndtri(torch.exp(torch.where(upper, log_p, -1.0)))
    x = torch.where(upper, bulk, tail)
    return loc + scale * torch.where(mirrored, -x, x)


# ---------------------------------------------------------------- panels

MOST_NODES = 128  # of one rule: its nodes come from an eigenproblem of that size
# Where panels end: the log density has fallen by these from its top. Beyond the last one there is no mass to rounding.
_DROPS = {torch.float32: (2.0, 18.0), torch.float64: (2.0, 6.0, 18.0, 40.0)}
# A density on the logit axis has its nearest singularity at a height of pi / 2, so that panels are no longer than this.
_LONGEST_PANEL = 2.5
_MOST_EVEN_PANELS = 24  # half of the logits that float64 tells from infinity are in panels of 30


def drops(dtype: torch.dtype, device: torch.device) -> Tensor:
    """By how much a log density has fallen from its top where panels end, for a result of the given type."""
    return torch.tensor(_DROPS[dtype], dtype=torch.float64, device=device)


def around(top: Tensor, step: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Where a density has fallen that falls by a factor of e with every step, on both sides; shape ``(..., k)``."""
    reach = drops(dtype, top.device) * last(step)
    return torch.cat((top.unsqueeze(-1) - reach, top.unsqueeze(-1) + reach), -1)


def even_places(stretch: Stretch, device: torch.device) -> Tensor:
    """Values of z at even steps of the stretch's logit, so that no panel between two is too long."""
    most = 2 * half_width(stretch) / _LONGEST_PANEL
    count = math.ceil(min(most, _MOST_EVEN_PANELS)) if most < math.inf else _MOST_EVEN_PANELS // 2
    gamma, _, width, t0, t1 = (torch.as_tensor(x, dtype=torch.float64, device=device).detach() for x in stretch)
    share = torch.arange(1, count, dtype=torch.float64, device=device) / count
    t = t0.unsqueeze(-1) + (t1 - t0).unsqueeze(-1) * share
    return gamma.unsqueeze(-1) + width.unsqueeze(-1) * torch.sigmoid(t)


def rule_nodes(
    stretch: Stretch, breakpoints: tuple[float, ...], temperature: float, dtype: torch.dtype, device: torch.device
) -> Nodes | None:
    """Nodes of one rule between any two of some numbers, or None where a rule would need too many.

    Args:
        stretch: the stretch whose logit map is used.
        breakpoints: values of z in [0, 1] where the rule starts anew.
        temperature: the largest temperature involved.
        dtype: type of the nodes.
        device: device of the nodes.
    """
    sharpness = half_width(stretch) * max(1.0, temperature)
    if not sharpness < MOST_NODES / 4:  # needs more in either type, and infinity none
        return None
    n = num_nodes(half_width(stretch), temperature, dtype)
    if n > MOST_NODES:
        return None
    if not breakpoints:
        return stretch_nodes(stretch, n, dtype, device)
    gamma, zeta = stretch.gamma, stretch.zeta
    if isinstance(gamma, Tensor) or isinstance(zeta, Tensor):
        places = torch.tensor(breakpoints, dtype=dtype, device=device)
        return panel_nodes(stretch, [places], n, dtype, device)
    return _number_panels(gamma, zeta, breakpoints, n, dtype, device)


@kept(64)
def _number_panels(
    gamma: float, zeta: float, breakpoints: tuple[float, ...], n: int, dtype: torch.dtype, device: torch.device
) -> Nodes:
    places = [torch.tensor(breakpoints, dtype=torch.float64)]
    nodes = panel_nodes(_number_stretch(gamma, zeta), places, n, torch.float64, torch.device("cpu"))
    return Nodes(*(x.to(dtype=dtype, device=device) for x in nodes))


def panel_nodes(stretch: Stretch, breakpoints: list[Tensor], n: int, dtype: torch.dtype, device: torch.device) -> Nodes:
    """Nodes on [t0, t1] in panels that end at the breakpoints; panels of no width are harmless.

    Args:
        stretch: the stretch whose logit map is used.
        breakpoints: values of z in [0, 1], each of shape ``batch_shape + (k,)``. Where panels end does not move the
            integral, so no gradient passes.
        n: nodes per panel.
        dtype: type of the nodes.
        device: device of the nodes.
    """
    batch = torch.broadcast_shapes(*(x.shape[:-1] for x in breakpoints))
    z = torch.cat([x.detach().expand(*batch, x.shape[-1]) for x in breakpoints], -1).sort(-1).values
    gamma, zeta, width, t0, t1 = (torch.as_tensor(x, dtype=dtype, device=device).unsqueeze(-1) for x in stretch)
    inner = torch.log(z - gamma) - torch.log(zeta - z)
    edges = torch.cat((t0.expand_as(inner[..., :1]), inner, t1.expand_as(inner[..., :1])), -1)
    edges = edges.clamp(t0, t1)
    x, w = gauss_legendre(n, dtype, device)
    half = 0.5 * edges.diff(dim=-1).unsqueeze(-1)
    t = (0.5 * (edges[..., 1:] + edges[..., :-1]).unsqueeze(-1) + half * x).flatten(-2)
    s, s_bar = torch.sigmoid(t), torch.sigmoid(-t)
    return Nodes(t, (half * w).flatten(-2), gamma + width * s, width * s_bar - (zeta - 1), width * s * s_bar)
