"""KL of two hard concretes: the closed form for one temperature, quadrature for two."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.fast.switch import is_on
from pyro_l0.maths.backend import Context, apply, transformed
from pyro_l0.maths.quadrature import Nodes, Rule, Stretch
from pyro_l0.maths.special import Number, expm1, klterm_from_ratio, last, log, plain_psi, psi


class _Ends(NamedTuple):
    """A hard concrete q and the log-odds d by which it leads p, mirrored such that P(z = 0) <= 1/2 under q.

    Attributes:
        d: log alpha of q minus that of p.
        mirrored: where z was replaced by 1 - z, under which the KL does not change.
        sign: -1 where mirrored, else 1.
        v0, u0, v1, u1: cdf of q at 0, its complement, and the same below 1.
        between: v1 - v0, without cancellation.
        a0, a1: logits of v0 and v1.
    """

    d: Tensor
    mirrored: Tensor
    sign: Tensor
    v0: Tensor
    u0: Tensor
    v1: Tensor
    u1: Tensor
    between: Tensor
    a0: Tensor
    a1: Tensor


def _ends(log_alpha_q: Tensor, log_alpha_p: Tensor, temperature: Number, stretch: Stretch) -> _Ends:
    a0 = temperature * stretch.t0 - log_alpha_q
    a1 = temperature * stretch.t1 - log_alpha_q
    d = log_alpha_q - log_alpha_p
    mirrored = a0 + a1 > 0
    sign = torch.where(mirrored, -1.0, 1.0).to(d.dtype)
    a0, a1, d = torch.where(mirrored, -a1, a0), torch.where(mirrored, -a0, a1), d * sign
    v0, u0, v1, u1 = torch.sigmoid(a0), torch.sigmoid(-a0), torch.sigmoid(a1), torch.sigmoid(-a1)
    # v1 * u0 - v0 * u1 = v1 * u0 * (1 - exp(a0 - a1)), and the gap of the logits does not depend on q.
    gap = -temperature * (stretch.t1 - stretch.t0)
    between = v1 * u0 * -expm1(gap)
    return _Ends(d, mirrored, sign, v0, u0, v1, u1, between, a0, a1)


class _Near(NamedTuple):
    """Where |d| < 3: d; log(1 + kappa v) at both ends; their difference delta = log(1 + y), and its ratio to y.

    The rule's nodes x and weights w are on [0, 1]; a step is delta * x.
    """

    d: Tensor
    l0: Tensor
    l1: Tensor
    delta: Tensor
    y: Tensor
    ratio: Tensor
    x: Tensor
    w: Tensor
    step: Tensor


def _near_ratios(e: _Ends, near: Tensor, rule: Rule) -> _Near:
    d = torch.where(near, e.d, 0.0)
    kappa = torch.expm1(d)
    l0, l1 = torch.log1p(kappa * e.v0), torch.log1p(kappa * e.v1)
    y = kappa * e.between / (1 + kappa * e.v0)
    delta = torch.log1p(y)
    tiny = y.abs() < 1e-4
    ratio = torch.where(tiny, 1 - y * (1 / 2 - y * (1 / 3 - y / 4)), delta / torch.where(tiny, 1.0, y))
    x, w = 0.5 * (rule[0] + 1), 0.5 * rule[1]
    return _Near(d, l0, l1, delta, y, ratio, x, w, delta.unsqueeze(-1) * x)


class _Far(NamedTuple):
    """Where |d| >= 3: d, the logs at both ends, exp(d) - 1 and exp(-d) - 1.

    Beyond 60 these two would overflow and no longer matter.
    """

    d: Tensor
    l0: Tensor
    l1: Tensor
    kappa: Tensor
    kappa_bar: Tensor


def _far_ratios(e: _Ends, near: Tensor) -> _Far:
    d = torch.where(near, 3.0, e.d)
    # softplus(a + d) - softplus(a); torch's softplus drops exp(-a) above 20.
    l0 = F.logsigmoid(-e.a0) - F.logsigmoid(-e.a0 - d)
    l1 = F.logsigmoid(-e.a1) - F.logsigmoid(-e.a1 - d)
    bounded = d.clamp(-60.0, 60.0)
    return _Far(d, l0, l1, torch.expm1(bounded), torch.expm1(-bounded))


def _closed_form(log_alpha_q: Tensor, log_alpha_p: Tensor, temperature: Number, stretch: Stretch, rule: Rule) -> Tensor:
    e = _ends(log_alpha_q, log_alpha_p, temperature, stretch)
    near = e.d.abs() < 3
    return _value(e, near, _near_ratios(e, near, rule), _far_ratios(e, near))


def _value(e: _Ends, near: Tensor, n: _Near, f: _Far) -> Tensor:
    """The KL, elementwise.

    Near, where |d| < 3, it is sum of ``v0`` psi(d - L0), ``u1`` psi(-L1) and D delta / (e^delta - 1) times the integral
    of psi(d - 2 (L0 + delta x)) e^(delta x) over x in [0, 1], with psi(x) = e^x - 1 - x, D = ``between``, the factor
    delta / (e^delta - 1) = ``ratio`` and delta x = ``step`` at the nodes. Far, it is the closed form, with ``kappa`` =
    e^d - 1 and ``kappa_bar`` = e^-d - 1. Both are in docs/lab/derivations.md, "KL without cancellation", "KL of two
    gates".
    """
    inner = (n.d - 2 * n.l0).unsqueeze(-1) - 2 * n.step
    # One call for both atoms and the nodes: a layer has few gates, and a call costs more than its elements.
    terms = plain_psi(torch.cat([(n.d - n.l0).unsqueeze(-1), -n.l1.unsqueeze(-1), inner], -1))
    zero, one, inner = terms[..., 0], terms[..., 1], terms[..., 2:] * torch.exp(n.step)
    small = e.v0 * zero + e.u1 * one + e.between * n.ratio * (inner @ n.w)
    large = -f.d * e.v1 - 2 * e.between - f.l1 * (e.u1 + 2 / f.kappa_bar) - f.l0 * (e.v0 + 2 / f.kappa)
    return torch.where(near, small, large)


def _value_and_slopes(
    log_alpha_q: Tensor,
    log_alpha_p: Tensor,
    temperature: Number,
    stretch: Stretch,
    rule: Rule,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The KL and its derivatives for both locations and the temperature, those that are needed."""
    e = _ends(log_alpha_q, log_alpha_p, temperature, stretch)
    near = e.d.abs() < 3
    n, f = _near_ratios(e, near, rule), _far_ratios(e, near)
    out: list[Tensor | None] = [_value(e, near, n, f), None, None, None]
    if needed[0] or needed[1]:
        v, u = _cdf_at_nodes(e, n)
        if needed[0]:
            out[1] = e.sign * torch.where(near, *_slopes_q(e, n, f, v * u))
        if needed[1]:
            out[2] = e.sign * torch.where(near, *_slopes_p(e, n, f, v, u))
    if needed[2]:
        out[3] = _slope_temperature(e, torch.where(near, n.l0, f.l0), torch.where(near, n.l1, f.l1), stretch)
    return out


def _cdf_at_nodes(e: _Ends, n: _Near) -> tuple[Tensor, Tensor]:
    """v and 1 - v at the nodes, without cancellation, shape of the gates and then the nodes."""
    delta = n.delta.unsqueeze(-1)
    tiny = (n.y.abs() < 1e-4).unsqueeze(-1)
    series = n.x * (1 + (n.x - 1) * delta * (1 / 2 + (2 * n.x - 1) * delta / 12))
    share = torch.where(tiny, series, torch.expm1(n.step) / torch.where(tiny, 1.0, n.y.unsqueeze(-1)))
    between = e.between.unsqueeze(-1)
    return e.v0.unsqueeze(-1) + between * share, e.u1.unsqueeze(-1) + between * (1 - share)


def _slopes_q(e: _Ends, n: _Near, f: _Far, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Derivative for the log alpha of q near and far, given v * u at the nodes.

    v0 u0 L0 + v1 u1 (d - L1) + 2 times the integral of v u over omega = log(1 + kappa v), which runs through delta x:
    by nodes near, and in closed form far. docs/lab/derivations.md, "KL without cancellation".
    """
    low, high = e.v0 * e.u0, e.v1 * e.u1
    small = low * n.l0 + high * (n.d - n.l1) + 2 * n.delta * (spread @ n.w)
    large = (
        low * f.l0
        + high * (f.d - f.l1)
        - 2 * e.between / f.kappa_bar
        + 2 * (f.l1 - f.l0) / (f.kappa * f.kappa_bar)
        - e.between * (e.v0 + e.v1)
    )
    return small, large


def _slopes_p(e: _Ends, n: _Near, f: _Far, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Derivative for the log alpha of p near and far, given the cdf of q at the nodes and its complement.

    The sum of q (e^x - 1) times the derivative of log p over atoms and interior, x = log(p / q): x is d - L0 at 0, -L1
    at 1, and d - 2 omega between, where p's own cdf is e^(d - omega) v. Far in closed form, with ``p0`` and ``p1`` the
    cdf of p at both ends.
    """
    lead = torch.expm1((n.d - 2 * n.l0).unsqueeze(-1) - 2 * n.step) * (torch.exp(n.d).unsqueeze(-1) * v - u)
    small = torch.exp(-n.l0) * (
        e.between * n.ratio * (lead @ n.w) - e.v0 * e.u0 * torch.expm1(n.d - n.l0)
    ) + e.u1 * e.v1 * torch.expm1(-n.l1) * torch.exp(n.d - n.l1)
    p0, p1 = torch.sigmoid(e.a0 + f.d), torch.sigmoid(e.a1 + f.d)
    rest = 2 * (f.l1 - f.l0) / (f.kappa * f.kappa_bar)
    return small, e.v1 - (1 + e.v1) * p1 + e.v0 * p0 - 2 * (p1 - p0) / f.kappa - rest


def _slope_temperature(e: _Ends, l0: Tensor, l1: Tensor, stretch: Stretch) -> Tensor:
    """Derivative for the shared temperature, given log(1 + kappa v) at both ends."""
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
    return torch.where(e.mirrored, t1 * lower - t0 * e.u1 * upper, t1 * e.u1 * upper - t0 * lower)


# Gates that are worked on at a time in main memory: their temporaries stay in the processor's cache.
_CHUNK = 2**16


def _in_chunks(function: Callable[..., list[Tensor | None]], stretch: Stretch, *args: Number) -> list[Tensor | None]:
    """Apply an elementwise function of equally shaped tensors chunk by chunk, where that is faster and possible."""
    first = next(x for x in args if isinstance(x, Tensor))
    size = first.numel()
    whole_only = first.device.type != "cpu" or torch.is_grad_enabled() or isinstance(stretch.t0, Tensor)
    if size <= _CHUNK or whole_only:
        return function(*args)
    flat = [_flat(x) if isinstance(x, Tensor) else x for x in args]
    out: list[Tensor | None] = []
    for start in range(0, size, _CHUNK):
        stop = min(start + _CHUNK, size)
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


class _SameTemperature(torch.autograd.Function):
    """KL of two hard concretes with one temperature; see :func:`same_temperature`.

    The derivatives are written out, because autograd would keep some eighty intermediate tensors per step. They share
    most of their parts with the value, so that both are computed at once. They are sums of terms of one sign wherever
    the parameters saturate, and are themselves differentiable.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[float, Stretch, Rule]],
        log_alpha_q: Tensor,
        log_alpha_p: Tensor,
        temperature: Number,
        stretch: Stretch,
        rule: Rule,
    ) -> Tensor:
        ctx.options = 0.0 if isinstance(temperature, Tensor) else temperature, stretch, rule
        kl, *slopes = _at_once(ctx, log_alpha_q, log_alpha_p, temperature)
        given = (temperature,) if isinstance(temperature, Tensor) else ()
        ctx.save_for_backward(log_alpha_q, log_alpha_p, *given, *(slope for slope in slopes if slope is not None))
        assert kl is not None
        return kl

    @staticmethod
    def backward(ctx: Context[tuple[float, Stretch, Rule]], grad: Tensor) -> tuple[Tensor | None, ...]:
        log_alpha_q, log_alpha_p, *rest = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        saved = rest[len(rest) - sum(needed) :]
        if torch.is_grad_enabled():  # a derivative of the derivative is asked for
            temperature = rest[0] if len(rest) > len(saved) else ctx.options[0]
            _, *slopes = _at_once(ctx, log_alpha_q, log_alpha_p, temperature)
        else:
            found = iter(saved)
            slopes = [next(found) if needs else None for needs in needed]
        return *(None if slope is None else grad * slope for slope in slopes), None, None


def _at_once(
    ctx: Context[tuple[float, Stretch, Rule]], log_alpha_q: Tensor, log_alpha_p: Tensor, temperature: Number
) -> list[Tensor | None]:
    """The value and its slopes, chunk by chunk."""
    _, stretch, rule = ctx.options

    def chunk(q: Tensor, p: Tensor, t: Number) -> list[Tensor | None]:
        return _value_and_slopes(q, p, t, stretch, rule, ctx.needs_input_grad[:3])

    return _in_chunks(chunk, stretch, log_alpha_q, log_alpha_p, temperature)


def same_temperature(
    log_alpha_q: Tensor, log_alpha_p: Tensor, temperature: Number, stretch: Stretch, rule: Rule
) -> Tensor:
    """KL of two hard concretes with one temperature and one constant stretch, in closed form.

    With d the lead of q's log alpha, kappa = exp(d) - 1 and v the cdf of q, the log ratio of the densities is
    -d + 2 log(1 + kappa v), whose integral is elementary. It is O(d^2) but built from terms of O(d), so for |d| < 3
    the same integral is taken over log(1 + kappa v) instead, where the integrand is entire and non-negative and the
    given Gauss-Legendre rule (8 nodes for float64, 5 for float32) is exact to rounding. The temperature's gradient is
    that of the shared value.
    """
    log_alpha_q, log_alpha_p = torch.broadcast_tensors(log_alpha_q, log_alpha_p)
    if isinstance(temperature, Tensor):
        temperature = temperature.expand_as(log_alpha_q)
    if transformed() or not is_on("kl"):
        return _closed_form(log_alpha_q, log_alpha_p, temperature, stretch, rule)
    return apply(_SameTemperature, log_alpha_q, log_alpha_p, temperature, stretch, rule)


def _logsigmoid_change(a: Tensor, step: Tensor) -> Tensor:
    """log sigmoid(a + step) - log sigmoid(a), accurate for small steps."""
    small = step.abs() < 1
    exact = -torch.log1p(torch.expm1(-torch.where(small, step, 0.0)) * torch.sigmoid(-a))
    return torch.where(small, exact, F.logsigmoid(a + step) - F.logsigmoid(a))


def same_stretch(
    log_alpha_q: Tensor,
    temperature_q: Number,
    log_alpha_p: Tensor,
    temperature_p: Number,
    stretch: Stretch,
    nodes: Nodes,
) -> Tensor:
    """KL of two hard concretes with one stretch and any temperatures, by quadrature on the logit axis.

    The log ratios come from the change of the cdf's logit, so that nearly equal q and p keep their relative
    accuracy in float32.
    """

    def log_q_and_change(t: Number, side: int) -> tuple[Tensor, Tensor]:
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
    log_q = log(temperature_q) + below + above
    change = log(temperature_p / temperature_q) + change_below + change_above
    return atoms + (nodes.weight * klterm_from_ratio(log_q, change, log_q + change)).sum(-1)
