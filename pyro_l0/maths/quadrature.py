"""Gauss-Legendre rules and panels on the logit axis of a stretch."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_l0.maths.backend import cached, largest
from pyro_l0.maths.special import Number, last

Rule = tuple[Tensor, Tensor]  # nodes and weights on [-1, 1]


class Stretch(NamedTuple):
    """Stretch limits and what follows from them alone, as numbers or as tensors."""

    gamma: Number  # lower limit, below 0
    zeta: Number  # upper limit, above 1
    width: Number
    t0: Number  # logit of the unstretched variable at which the gate is 0
    t1: Number  # the same at which it is 1


class Nodes(NamedTuple):
    """Quadrature nodes on the logit axis between the atoms, on a last dimension of size n."""

    t: Tensor
    weight: Tensor  # with respect to dt
    z: Tensor  # the gate's value g(t)
    one_minus_z: Tensor  # without cancellation
    slope: Tensor  # g'(t)


@cached(256)
def gauss_legendre(n: int, dtype: torch.dtype, device: torch.device | None = None) -> Rule:
    """Nodes and weights of the n-point Gauss-Legendre rule on [-1, 1], computed in double."""
    x, w = np.polynomial.legendre.leggauss(n)
    return torch.tensor(x, dtype=dtype, device=device), torch.tensor(w, dtype=dtype, device=device)


@cached(256)
def _number_stretch(gamma: float, zeta: float) -> Stretch:
    t0 = math.log(-gamma) - math.log(zeta)
    t1 = math.log1p(-gamma) - math.log(zeta - 1)
    return Stretch(gamma, zeta, zeta - gamma, t0, t1)


DEFAULT_STRETCH = _number_stretch(-0.1, 1.1)


def half_width(stretch: Stretch) -> float:
    """Half the length of [t0, t1], the largest one if there are several, infinity where it cannot be read."""
    return 0.5 * largest(stretch.t1 - stretch.t0)


def make_stretch(gamma: Number, zeta: Number, dtype: torch.dtype) -> Stretch:
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
    """Gauss-Legendre nodes that integrate a gate's density in t to rounding, up to the largest temperature involved.

    The integrand is analytic up to Im t = pi / max(1, temperature), which bounds the Bernstein ellipse around
    an interval of the given half width.
    """
    tol = 1e-12 if dtype == torch.float64 else 1e-7
    y = math.pi / (half_width * max(1.0, temperature))
    log_rho = math.asinh(y)
    return math.ceil(1.35 * math.log(1 / tol) / (2 * log_rho)) + 2


MOST_NODES = 128  # of one rule: its nodes come from an eigenproblem of that size
# Where panels end: the log density has fallen by these from its top. Beyond the last one there is no mass to rounding.
_DROPS = {torch.float32: (2.0, 18.0), torch.float64: (2.0, 6.0, 18.0, 40.0)}
# A density on the logit axis has its nearest singularity at a height of pi / 2, so that panels are no longer than this.
_LONGEST_PANEL = 2.5
_MOST_EVEN_PANELS = 24  # half of the logits that float64 tells from infinity are in panels of 30


def drops(dtype: torch.dtype, device: torch.device) -> Tensor:
    """By how much a log density has fallen from its top where panels end, for a result of the given type."""
    return torch.tensor(_DROPS[dtype], dtype=torch.float64, device=device)


def edges_around(top: Tensor, step: Number, dtype: torch.dtype) -> Tensor:
    """Values of z on both sides of a density's top where panels of a quadrature end, shape ``top.shape + (k,)``.

    Args:
        top: where the density is largest.
        step: distance over which it falls by a factor of e.
        dtype: type of the result that is asked for, which says how far the density still counts.
    """
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
    """Nodes of one rule between any two of some values of z in [0, 1], or None where a rule would need too many."""
    sharpness = half_width(stretch) * max(1.0, temperature)
    if not sharpness < MOST_NODES / 4:  # needs more in either type, and infinity none
        return None
    n = num_nodes(half_width(stretch), temperature, dtype)
    if n > MOST_NODES:
        return None
    return stretch_nodes(stretch, n, dtype, device, breakpoints)


def stretch_nodes(
    stretch: Stretch, n: int, dtype: torch.dtype, device: torch.device, breakpoints: tuple[float, ...] = ()
) -> Nodes:
    """Quadrature nodes on [t0, t1], n between any two breakpoints; cached where a stretch is given by numbers."""
    gamma, zeta = stretch.gamma, stretch.zeta
    if isinstance(gamma, Tensor) or isinstance(zeta, Tensor):
        edges = torch.tensor(breakpoints, dtype=dtype, device=device)
        return panel_nodes(stretch, [edges], n, dtype, device)
    return _number_nodes(gamma, zeta, breakpoints, n, dtype, device)


@cached(256)
def _number_nodes(
    gamma: float, zeta: float, breakpoints: tuple[float, ...], n: int, dtype: torch.dtype, device: torch.device
) -> Nodes:
    # Double first, then rounded once.
    edges = [torch.tensor(breakpoints, dtype=torch.float64)]
    nodes = panel_nodes(_number_stretch(gamma, zeta), edges, n, torch.float64, torch.device("cpu"))
    return Nodes(*(x.to(dtype=dtype, device=device) for x in nodes))


def panel_nodes(stretch: Stretch, breakpoints: list[Tensor], n: int, dtype: torch.dtype, device: torch.device) -> Nodes:
    """Nodes on [t0, t1], n per panel, in panels that end at the breakpoints; panels of no width are harmless.

    Breakpoints are values of z in [0, 1], each of shape ``batch_shape + (k,)``. Where panels end does not move the
    integral, so no gradient passes.
    """
    batch = torch.broadcast_shapes(*(x.shape[:-1] for x in breakpoints))
    z = torch.cat([x.detach().expand(*batch, x.shape[-1]) for x in breakpoints], -1).sort(-1).values
    gamma, zeta, width, t0, t1 = (torch.as_tensor(x, dtype=dtype, device=device).unsqueeze(-1) for x in stretch)
    inner = torch.log(z - gamma) - torch.log(zeta - z)
    edges = torch.cat((t0.expand(*inner.shape[:-1], 1), inner, t1.expand(*inner.shape[:-1], 1)), -1)
    edges = edges.clamp(t0, t1)
    x, w = gauss_legendre(n, dtype, device)
    half = 0.5 * edges.diff(dim=-1).unsqueeze(-1)
    t = (0.5 * (edges[..., 1:] + edges[..., :-1]).unsqueeze(-1) + half * x).flatten(-2)
    s, s_bar = torch.sigmoid(t), torch.sigmoid(-t)
    return Nodes(t, (half * w).flatten(-2), gamma + width * s, width * s_bar - (zeta - 1), width * s * s_bar)
