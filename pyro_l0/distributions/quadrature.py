"""Moments and entropy of a gate by quadrature between the atoms."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from pyro_l0._numerics import Nodes
from pyro_l0.distributions.gate import GateDistribution

__all__ = ["QuadratureGate"]


class QuadratureGate(GateDistribution):
    """A gate whose mean, variance and entropy are quadratures of its cdf and its density."""

    @abstractmethod
    def _integrals(self) -> tuple[Tensor, Tensor, Nodes]:
        """E[z] and E[1 - z], the integrals of the survival function and of the cdf, and the nodes."""

    @property
    def mean(self) -> Tensor:
        """E[z], shape ``batch_shape``."""
        mean, co_mean, _ = self._integrals()
        return torch.where(mean < 0.5, mean, 1 - co_mean)

    @property
    def variance(self) -> Tensor:
        """Var[z], shape ``batch_shape``."""
        mean, co_mean, nodes = self._integrals()
        m, m_bar = mean.unsqueeze(-1), co_mean.unsqueeze(-1)
        distance = torch.where(m < 0.5, nodes.z - m, m_bar - nodes.one_minus_z)
        interior = (nodes.weight * torch.exp(self._log_density_at(nodes)) * distance.square()).sum(-1)
        zero, one = torch.exp(self.log_prob_zero), torch.exp(self.log_prob_one)
        return zero * mean.square() + one * co_mean.square() + interior

    def entropy(self) -> Tensor:
        """Entropy with respect to the mixed measure, which may be negative; shape ``batch_shape``."""
        nodes = self._nodes()
        log_density = self._log_density_at(nodes)
        density = nodes.weight * torch.exp(log_density)
        # Where there is no density in float arithmetic, its share is 0, and so is that of an atom without mass.
        interior = torch.where(density > 0, density * (log_density - torch.log(nodes.slope)), 0.0).sum(-1)
        log_zero, log_one = (x.clamp_min(-1e4) for x in (self.log_prob_zero, self.log_prob_one))
        return -torch.exp(log_zero) * log_zero - torch.exp(log_one) * log_one - interior
