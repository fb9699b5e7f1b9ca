"""Integrals of gates between the atoms: one rule, or panels where that would need too many nodes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.maths import quadrature
from pyro_l0.maths.quadrature import Nodes, Stretch

_SHARPEST = 1e12  # beyond it the density lies between a few double numbers
_SINGLE = 30.0  # up to this temperature single precision tells a density's place well enough
_SMOOTH = 2.0  # up to this temperature the panels that every gate gets are short enough
_NODES_PER_PANEL = {torch.float32: 10, torch.float64: 16}


def integrate(function: Callable[..., Tensor], *gates: GateDistribution) -> Tensor:
    """An integral between the atoms, on the logit axis of the narrowest stretch on each side.

    With a wider stretch the narrowest density would have a branch point just outside the interval. Moderate parameters
    take one Gauss-Legendre rule. Others, and those that cannot be read at no cost (on a device, under ``torch.vmap``
    or ``torch.compile``), take a fixed number of panels that end where the gates' densities have fallen by certain
    factors, in double, as the place of a sharp density is lost in single.

    The function gets nodes, the stretch whose logit axis they lie on and the gates, which may have become double.
    """
    own = reduce(torch.promote_types, (gate._like.dtype for gate in gates))
    dtype = torch.promote_types(own, torch.float32)  # a base of half precision alone is of a type below
    device = gates[0]._like.device
    stretch = _narrowest(gates)
    temperatures = [gate._node_temperature() for gate in gates]
    breakpoints = [gate._breakpoints() for gate in gates]
    numbers = tuple(sorted({z for places in breakpoints for z in places or ()}))
    if None not in breakpoints:
        nodes = quadrature.rule_nodes(stretch, numbers, max(temperatures), dtype, device)
        if nodes is not None:
            return function(nodes, stretch, *gates)
    if _SHARPEST < max(temperatures) < math.inf:
        raise ValueError(
            f"Expected a temperature, concentration, beta or 1 / scale of at most {_SHARPEST:g} in an integral of "
            f"{' and '.join(type(gate).__name__ for gate in gates)}, but got {max(temperatures):g}; "
            "a gate as sharp as that has its mass at one point."
        )
    double = torch.float64 if device.type != "mps" else dtype  # which has no double
    if max(temperatures) > _SINGLE:
        gates = tuple(gate.apply_to_tensors(lambda x: x.to(double) if x.is_floating_point() else x) for gate in gates)
        stretch = _narrowest(gates)
    edges = [quadrature.even_places(stretch, device), torch.tensor(numbers, dtype=double, device=device)]
    for gate, temperature, places in zip(gates, temperatures, breakpoints, strict=True):
        if temperature > _SMOOTH or places is None:
            edges.append(gate._panel_edges(dtype))
    edges = [x.nan_to_num(0.0).clamp(0, 1) for x in edges]
    nodes = quadrature.panel_nodes(stretch, edges, _NODES_PER_PANEL[dtype], double, device)
    if max(temperatures) <= _SINGLE:
        nodes = Nodes(*(x.to(dtype) for x in nodes))
    return function(nodes, stretch, *gates).to(own)


def _narrowest(gates: tuple[GateDistribution, ...]) -> Stretch:
    found = [gate.stretch for gate in gates if gate.stretch is not None]
    return reduce(_narrower, found) if found else quadrature.DEFAULT_STRETCH


def _narrower(x: Stretch, y: Stretch) -> Stretch:
    if x is y:
        return x
    if any(isinstance(limit, Tensor) for limit in (*x, *y)):
        limits = (x.gamma, y.gamma, x.zeta, y.zeta)
        dtype = reduce(torch.promote_types, (limit.dtype for limit in limits if isinstance(limit, Tensor)))
        low, other_low, high, other_high = (torch.as_tensor(limit, dtype=torch.float64) for limit in limits)
        return quadrature.make_stretch(torch.maximum(low, other_low), torch.minimum(high, other_high), dtype)
    return quadrature.make_stretch(max(x.gamma, y.gamma), min(x.zeta, y.zeta), torch.float64)


class QuadratureGate(GateDistribution):
    """A gate whose mean, variance and entropy are quadratures of its cdf and its density."""

    @abstractmethod
    def _integrals(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """E[z] and E[1 - z], the integrals of the survival function and of the cdf."""

    @property
    def mean(self) -> Tensor:
        """E[z], shape ``batch_shape``."""
        return integrate(_mean, self)

    @property
    def variance(self) -> Tensor:
        """Var[z], shape ``batch_shape``."""
        return integrate(_variance, self)

    def entropy(self) -> Tensor:
        """Entropy in nats with respect to the mixed measure; may be negative; shape ``batch_shape``."""
        return integrate(_entropy, self)


def _mean(nodes: Nodes, _: Stretch, gate: QuadratureGate) -> Tensor:
    mean, co_mean = gate._integrals(nodes)
    return torch.where(mean < 0.5, mean, 1 - co_mean)


def _variance(nodes: Nodes, stretch: Stretch, gate: QuadratureGate) -> Tensor:
    mean, co_mean = gate._integrals(nodes)
    m, m_bar = mean.unsqueeze(-1), co_mean.unsqueeze(-1)
    distance = torch.where(m < 0.5, nodes.z - m, m_bar - nodes.one_minus_z)
    interior = (nodes.weight * torch.exp(gate._log_density_in_t(nodes, stretch)) * distance.square()).sum(-1)
    zero, one = torch.exp(gate.log_prob_zero), torch.exp(gate.log_prob_one)
    return zero * mean.square() + one * co_mean.square() + interior


def _entropy(nodes: Nodes, stretch: Stretch, gate: QuadratureGate) -> Tensor:
    log_density = gate._log_density_in_t(nodes, stretch)
    density = nodes.weight * torch.exp(log_density)
    # Where there is no density in float arithmetic, its share is 0, and so is that of an atom without mass.
    interior = torch.where(density > 0, density * (log_density - torch.log(nodes.slope)), 0.0).sum(-1)
    log_zero, log_one = (x.clamp_min(-1e4) for x in (gate.log_prob_zero, gate.log_prob_one))
    return -torch.exp(log_zero) * log_zero - torch.exp(log_one) * log_one - interior
