"""Gates that stretch a variable on the unit interval beyond both ends and clip it there."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.types import _size

from pyro_l0.distributions.gate import GateDistribution, probability
from pyro_l0.distributions.parameters import Bounded
from pyro_l0.distributions.quadrature import QuadratureGate
from pyro_l0.maths import host, quadrature, special
from pyro_l0.maths.mixture import Point
from pyro_l0.maths.quadrature import Nodes, Stretch
from pyro_l0.maths.special import Number

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
        if not host.learned(self._gamma, self._zeta):
            self._stretch = stretch
        return stretch


class UnitIntervalGate(QuadratureGate, StretchedGate):
    """A stretched gate of a variable on (0, 1) that is given by its cdf, its density and its quantiles.

    Functions of the variable get a point as its distances from both ends.
    """

    # ------------------------------------------------------------ what a family writes

    @abstractmethod
    def _unit_log_density(self, x: Point) -> Tensor:
        """Log density of the unstretched variable."""

    @abstractmethod
    def _unit_log_below(self, x: Point) -> Tensor:
        """Log of its cdf."""

    @abstractmethod
    def _unit_log_above(self, x: Point) -> Tensor:
        """Log of one minus its cdf."""

    @abstractmethod
    def _unit_log_between(self, low: Point, high: Point) -> Tensor:
        """Log of its mass between two points."""

    @abstractmethod
    def _unit_rsample(self, shape: torch.Size) -> Tensor:
        """Pathwise draws."""

    @abstractmethod
    def _unit_icdf(self, p: Tensor) -> Tensor:
        """Its quantiles."""

    # ------------------------------------------------------------ what follows

    def _point(self, z: Tensor) -> Point:
        """The unstretched variable at a value of the gate."""
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
        """The variable on the unit interval that is stretched and clipped."""
        return _UnitVariable(self)

    def rectify(self, value: Tensor) -> Tensor:
        """The gate for a draw of the base distribution."""
        return (self.stretch.gamma + self.stretch.width * value).clamp(0, 1)

    def _log_density(self, z: Tensor) -> Tensor:
        return self._unit_log_density(self._point(z)) - special.log(self.stretch.width)

    def _log_density_in_t(self, nodes: Nodes, stretch: Stretch) -> Tensor:
        if stretch is not self.stretch:
            return super()._log_density_in_t(nodes, stretch)
        x = Point(torch.sigmoid(nodes.t), torch.sigmoid(-nodes.t))
        return self._with_node_dim()._unit_log_density(x) + F.logsigmoid(nodes.t) + F.logsigmoid(-nodes.t)

    def _cdf(self, z: Tensor) -> Tensor:
        return torch.exp(self._unit_log_below(self._point(z)))

    def _integrals(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        gate, x = self._with_node_dim(), Point(torch.sigmoid(nodes.t), torch.sigmoid(-nodes.t))
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
