"""Gates that stretch a variable on the unit interval and clip it, and integrals between the atoms."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import reduce
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.types import _size

from pyro_l0.distributions.gate import Bounded, GateDistribution, probability
from pyro_l0.maths import backend, quadrature, special
from pyro_l0.maths.mixture import Point
from pyro_l0.maths.quadrature import Nodes, Stretch
from pyro_l0.maths.special import Number

_SHARPEST = 1e12  # beyond it the density lies between a few double numbers
_SINGLE = 30.0  # up to this temperature single precision resolves a density's position
_SMOOTH = 2.0  # up to this temperature the panels that every gate gets are short enough
_NODES_PER_PANEL = {torch.float32: 10, torch.float64: 16}


def integrate(function: Callable[..., Tensor], *gates: GateDistribution) -> Tensor:
    """An integral between the atoms, on the logit axis of the narrowest stretch on each side.

    With a wider stretch the narrowest density would have a branch point just outside the interval. Moderate parameters
    take one Gauss-Legendre rule. Others, and those that cannot be read at no cost (on a device, under ``torch.vmap``
    or ``torch.compile``), take a fixed number of panels that end where the gates' densities have fallen by certain
    factors, in double, as the position of a sharp density is lost in single.

    The function gets nodes, the stretch whose logit axis they lie on and the gates, which may have become double.
    """
    own = reduce(torch.promote_types, (gate._like.dtype for gate in gates))
    dtype = torch.promote_types(own, torch.float32)  # a base of half precision alone is of a type below
    device = gates[0]._like.device
    stretch = _narrowest(gates)
    temperatures = [gate._node_temperature() for gate in gates]
    breakpoints = [gate._breakpoints() for gate in gates]
    numbers = tuple(sorted({z for points in breakpoints for z in points or ()}))
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
    for gate, temperature, points in zip(gates, temperatures, breakpoints, strict=True):
        if temperature > _SMOOTH or points is None:
            edges.append(gate.panel_edges(dtype))
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
    """A gate whose mean, variance and entropy are quadratures of its cdf and its density.

    A family of your own writes two methods besides those of :class:`~pyro_l0.distributions.GateDistribution`:

    - ``integrals(nodes)``: E[z] and E[1 - z], the integrals of P(Z > z) and of the cdf over (0, 1), shape
      ``batch_shape``. Nodes lie on a last dimension, which ``with_node_dim()`` gives the gate as well: ``nodes.z`` are
      values of z, and ``nodes.weight * nodes.slope`` stands for dz.
    - ``panel_edges(dtype)``: values of z where the density is narrow, shape ``batch_shape + (k,)``. If it falls from
      its top by a factor of e with every step, they are ``edges_around(top, step, dtype)``. Without this method
      integrals of sharp gates are less accurate.

    ``as_parameters(shared, **full)`` brings parameters to one type and shape; those that are shared by all gates may
    stay numbers. Logs and their gradients must be finite also for locations far outside of [0, 1], so write them with
    ``logsigmoid`` and ``expm1``, not as the log of a difference.
    """

    @abstractmethod
    def integrals(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
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
    mean, co_mean = gate.integrals(nodes)
    return torch.where(mean < 0.5, mean, 1 - co_mean)


def _variance(nodes: Nodes, stretch: Stretch, gate: QuadratureGate) -> Tensor:
    mean, co_mean = gate.integrals(nodes)
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


LIMITS = {"gamma": -0.1, "zeta": 1.1}  # of every family, by default
STRETCH_LIMITS = {"gamma": Bounded(upper=0), "zeta": Bounded(lower=1)}


class StretchedGate(GateDistribution):
    """A gate with stretch limits gamma < 0 and zeta > 1, kept as numbers where they are given as numbers."""

    _gamma: Number
    _zeta: Number
    _stretch: Stretch | None = None

    @property
    def gamma(self) -> Tensor:
        """Lower stretch limit, shape ``batch_shape``."""
        return self._filled(self._gamma)

    @property
    def zeta(self) -> Tensor:
        """Upper stretch limit, shape ``batch_shape``."""
        return self._filled(self._zeta)

    @property
    def stretch(self) -> Stretch:
        """Stretch limits and the logits that follow from them."""
        if self._stretch is not None:
            return self._stretch
        stretch = quadrature.make_stretch(self._gamma, self._zeta, self._like.dtype)
        # Kept, so that a KL sees one object; not with a graph, which belongs to one evaluation.
        if not backend.learned(self._gamma, self._zeta):
            self._stretch = stretch
        return stretch


class UnitIntervalGate(QuadratureGate, StretchedGate):
    """A stretched gate of a variable on (0, 1) that is given by its cdf, its density and its quantiles.

    Functions of the variable get a point as its distances from both ends.
    """

    # ------------------------------------------------------------ what a family writes

    @abstractmethod
    def _unit_log_density(self, x: Point) -> Tensor:
        """Log density of the unstretched variable on (0, 1) with respect to its own unit, not to that of z."""

    @abstractmethod
    def _unit_log_below(self, x: Point) -> Tensor:
        """log P(S <= s) of the unstretched variable, accurate where that is small."""

    @abstractmethod
    def _unit_log_above(self, x: Point) -> Tensor:
        """log P(S > s) of the unstretched variable, accurate where that is small."""

    @abstractmethod
    def _unit_log_between(self, low: Point, high: Point) -> Tensor:
        """log P(low < S <= high) of the unstretched variable, without cancellation."""

    @abstractmethod
    def _unit_rsample(self, shape: torch.Size) -> Tensor:
        """Draws of the unstretched variable in (0, 1), of the whole shape, differentiable in the parameters."""

    @abstractmethod
    def _unit_icdf(self, p: Tensor) -> Tensor:
        """The s with P(S <= s) = p of the unstretched variable, in [0, 1]."""

    # ------------------------------------------------------------ what follows

    def _point(self, z: Tensor) -> Point:
        """The unstretched variable at which the gate is z, by its distances from 0 and from 1."""
        gamma, zeta, width, *_ = self.stretch
        return Point((z - gamma) / width, (zeta - z) / width)

    @property
    def _ends(self) -> tuple[Point, Point]:
        zero = torch.zeros_like(self._like)
        return self._point(zero), self._point(zero + 1)

    @property
    def log_prob_zero(self) -> Tensor:
        """log P(z = 0), shape ``batch_shape``."""
        return self._unit_log_below(self._ends[0])

    @property
    def log_prob_one(self) -> Tensor:
        """log P(z = 1), shape ``batch_shape``."""
        return self._unit_log_above(self._ends[1])

    @property
    def log_interior_prob(self) -> Tensor:
        """log P(0 < z < 1), shape ``batch_shape``."""
        return self._unit_log_between(*self._ends)

    @property
    def log_active_prob(self) -> Tensor:
        """log P(z != 0), shape ``batch_shape``."""
        return self._unit_log_above(self._ends[0])

    @property
    def median(self) -> Tensor:
        """The smallest z with P(Z <= z) >= 1/2, shape ``batch_shape``."""
        return self.icdf(torch.full_like(self._like, 0.5))

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Pathwise draws, shape ``sample_shape + batch_shape``; the derivative is 0 at the atoms."""
        return self.rectify(self._unit_rsample(torch.Size(sample_shape) + self._like.shape))

    def icdf(self, value: Tensor) -> Tensor:
        """The smallest z with P(Z <= z) >= ``value``."""
        return self.rectify(self._unit_icdf(probability(value)))

    def base_distribution(self) -> TorchDistribution:
        """The variable on (0, 1) before it is stretched to (gamma, zeta) and clipped to [0, 1]."""
        return _UnitVariable(self)

    def rectify(self, value: Tensor) -> Tensor:
        """The gate in [0, 1] of a draw of ``base_distribution``, in its shape."""
        return (self.stretch.gamma + self.stretch.width * value).clamp(0, 1)

    def log_interior_density(self, z: Tensor) -> Tensor:
        """Log density with respect to dz at 0 < z < 1, in nats, shape of z and ``batch_shape``, broadcast."""
        return self._unit_log_density(self._point(z)) - special.log(self.stretch.width)

    def _log_density_in_t(self, nodes: Nodes, stretch: Stretch) -> Tensor:
        if stretch is not self.stretch:
            return super()._log_density_in_t(nodes, stretch)
        x = Point(torch.sigmoid(nodes.t), torch.sigmoid(-nodes.t))
        return self.with_node_dim()._unit_log_density(x) + F.logsigmoid(nodes.t) + F.logsigmoid(-nodes.t)

    def interior_cdf(self, z: Tensor) -> Tensor:
        """P(Z <= z) at 0 <= z < 1, shape of z and ``batch_shape``, broadcast."""
        return torch.exp(self._unit_log_below(self._point(z)))

    def integrals(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """E[z] and E[1 - z] by the nodes, shape ``batch_shape``."""
        gate, x = self.with_node_dim(), Point(torch.sigmoid(nodes.t), torch.sigmoid(-nodes.t))
        measure = nodes.weight * nodes.slope
        mean = (measure * torch.exp(gate._unit_log_above(x))).sum(-1)
        co_mean = (measure * torch.exp(gate._unit_log_below(x))).sum(-1)
        return mean, co_mean


class _UnitVariable(TorchDistribution):
    """The unstretched variable of a gate as a distribution of its own."""

    support = constraints.unit_interval
    has_rsample = True
    arg_constraints: ClassVar = {}

    def __init__(self, gate: UnitIntervalGate) -> None:
        self.gate = gate
        super().__init__(gate.batch_shape, validate_args=False)

    def expand(self, batch_shape: _size, _instance: Self | None = None) -> Self:
        return type(self)(self.gate.expand(batch_shape))

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        return self.gate._unit_rsample(torch.Size(sample_shape) + self.gate.batch_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.gate._unit_log_density(_inner_point(value))

    def cdf(self, value: Tensor) -> Tensor:
        return torch.exp(self.gate._unit_log_below(_inner_point(value)))

    def icdf(self, value: Tensor) -> Tensor:
        return self.gate._unit_icdf(probability(value))


def _inner_point(s: Tensor) -> Point:
    return Point(s, 1 - s)
