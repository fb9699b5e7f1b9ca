"""The rectified normal gate (stochastic gates)."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pyro.distributions import Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.types import _size

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.distributions.parameters import Bounded, as_parameters, check_rate
from pyro_l0.maths import host, quadrature, rectified_normal, special
from pyro_l0.maths.special import Number


class RectifiedNormal(GateDistribution):
    r"""Gate :math:`z = \min(1, \max(0, x))` with :math:`x \sim N(\mu, s^2)`.

    ``log_prob`` is a log mass at 0 and 1 and a log density in between, with respect to
    :math:`\delta_0 + \mathrm{Lebesgue}(0, 1) + \delta_1`. Half-precision parameters are computed in float32.

    Args:
        loc: location, shape ``batch_shape``.
        scale: positive, broadcast against ``loc``.

    Shape:
        ``rsample(sample_shape)`` gives ``sample_shape + batch_shape``.

    Raises:
        ValueError: a parameter is outside its constraint, or the shapes do not broadcast.

    Example:
        >>> RectifiedNormal(torch.tensor([-0.5, 0.5]), 0.5).active_prob
        tensor([0.1587, 0.8413])

    References:
        Yamada, Lindenbaum, Negahban, Kluger (2020), arXiv:1810.04247; the end of section 2.2 of the L0 paper.
    """

    arg_constraints: ClassVar = {"loc": Bounded(), "scale": Bounded(lower=0)}
    learned: ClassVar = {"loc": constraints.real, "scale": constraints.positive}

    def __init__(self, loc: Number, scale: Number, validate_args: bool | None = None) -> None:
        (self.loc, self.scale), _ = as_parameters({}, loc=loc, scale=scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    @classmethod
    def from_active_prob(cls, active_prob: Number, scale: Number = 0.5, validate_args: bool | None = None) -> Self:
        """The rectified normal with P(z != 0) = ``active_prob``.

        Args:
            active_prob: wanted rate, in (0, 1), of the shape that the gate gets.
            scale: standard deviation before rectification; 0.5 as in the paper on stochastic gates.
            validate_args: whether the gate checks its arguments.

        Raises:
            ValueError: ``active_prob`` is not strictly between 0 and 1, or ``scale`` is not positive.

        Example:
            >>> RectifiedNormal.from_active_prob(0.25).active_prob
            tensor(0.2500)
        """
        check_rate("active_prob", active_prob, cls.__name__)
        (rate, scale), _ = as_parameters({}, active_prob=active_prob, scale=scale)
        return cls(scale * torch.special.ndtri(rate), scale, validate_args=validate_args)

    @property
    def log_prob_zero(self) -> Tensor:
        """log P(z = 0), shape ``batch_shape``."""
        return special.log_ndtr(-self.loc / self.scale)

    @property
    def log_prob_one(self) -> Tensor:
        """log P(z = 1), shape ``batch_shape``."""
        return special.log_ndtr((self.loc - 1) / self.scale)

    @property
    def log_interior_prob(self) -> Tensor:
        """log P(0 < z < 1), shape ``batch_shape``."""
        return rectified_normal.log_interior_prob(self.loc, self.scale)

    @property
    def log_active_prob(self) -> Tensor:
        """log P(z != 0), shape ``batch_shape``."""
        return special.log_ndtr(self.loc / self.scale)

    @property
    def median(self) -> Tensor:
        """The smallest z with P(Z <= z) >= 1/2, which is also the gate without noise; shape ``batch_shape``."""
        return self.loc.clamp(0, 1)

    @property
    def mean(self) -> Tensor:
        """E[z], shape ``batch_shape``."""
        return rectified_normal.mean(self.loc, self.scale)[0]

    @property
    def variance(self) -> Tensor:
        """Var[z], shape ``batch_shape``."""
        rule = quadrature.gauss_legendre(48, self.loc.dtype, self.loc.device)
        return rectified_normal.variance(self.loc, self.scale, rule)

    def entropy(self) -> Tensor:
        """Entropy in nats with respect to the mixed measure; may be negative; shape ``batch_shape``."""
        return rectified_normal.entropy(self.loc, self.scale)

    def rsample(self, sample_shape: _size = torch.Size()) -> Tensor:
        """Pathwise draws, shape ``sample_shape + batch_shape``; the derivative is 0 at the atoms."""
        shape = torch.Size(sample_shape) + self.loc.shape
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return (self.loc + self.scale * noise).clamp(0, 1)

    def icdf(self, value: Tensor) -> Tensor:
        """The smallest z with P(Z <= z) >= ``value``."""
        e: Tensor = torch.special.ndtri(value)
        return (self.loc + self.scale * e).clamp(0, 1)

    def base_distribution(self) -> TorchDistribution:
        """Normal distribution with the same location and scale."""
        return Normal(self.loc, self.scale, validate_args=False)

    def rectify(self, value: Tensor) -> Tensor:
        """The gate for a draw of the base distribution."""
        return value.clamp(0, 1)

    def _log_density(self, z: Tensor) -> Tensor:
        return rectified_normal.log_density(z, self.loc, self.scale)

    def _cdf(self, z: Tensor) -> Tensor:
        return special.ndtr((z - self.loc) / self.scale)

    def _node_temperature(self) -> float:
        return host.largest(1 / self.scale)

    def _breakpoints(self) -> None:
        return None  # the density may be sharp anywhere between the atoms

    def _panel_edges(self, dtype: torch.dtype) -> Tensor:
        loc, scale = self.loc.unsqueeze(-1), self.scale.unsqueeze(-1)
        distance = (loc.clamp(0, 1) - loc) / scale  # of the top between the atoms
        reach = scale * torch.sqrt(distance.square() + 2 * quadrature.drops(dtype, loc.device))
        return torch.cat((loc - reach, loc + reach), -1)
