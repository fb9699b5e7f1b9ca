"""The logarithm of an unknown scale: its range, its nodes, and the priors of scales on it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["COARSE", "Axis", "log_half_cauchy", "log_half_normal"]

COARSE, _MOST = 24, 128  # nodes: few for the rounds in which a grid is laid


class Axis(NamedTuple):
    """A range of the logarithm of a scale; of length 0 where the scale is known."""

    low: float
    high: float
    curvature: float  # about the largest of minus a log posterior at its maximum, along the axis
    error: float  # of integrals, relative

    @property
    def known(self) -> bool:
        """Whether there is a single value."""
        return self.high <= self.low

    def nodes(self, size: int) -> Tensor:
        """Equally spaced nodes, or the known value."""
        return torch.linspace(self.low, self.high, 1 if self.known else size, dtype=torch.float64)

    def fine_nodes(self, times: int = 1) -> Tensor:
        """The nodes that the trapezoidal rule needs, or ``times`` as many.

        Steps of h err by 2 exp(-2 pi^2 / h^2) for a standard normal density, and by about exp(-pi^2 / (2 h)) for the
        density of the logarithm of a half-normal scale.
        """
        return self.nodes(times * self._fine)

    @property
    def _fine(self) -> int:
        digits = math.log(1 / self.error)
        step = math.pi * min(math.pi / (2 * digits), math.sqrt(2 / (self.curvature * (digits + math.log(2)))))
        return min(max(math.ceil(self.length / step) + 1, 3), _MOST)

    @property
    def settled(self) -> bool:
        """Whether integrals need no more nodes than there are coarse ones."""
        return self.known or self._fine <= COARSE

    def deficit(self) -> float:
        """How much higher a log posterior may be between two coarse nodes than at the better one.

        The worst is c (e^-2t - 1 + 2 t) / 4 at half a step t below the maximum, for a curvature c.
        """
        step = 0.0 if self.known else self.length / (COARSE - 1)
        return self.curvature / 4 * (math.expm1(step) - step)

    def zoomed(self, log_weights: Tensor, deficit: float) -> Axis:
        """The part on which nodes at equal distances have weight, but for a deficit, and one step beyond."""
        if self.known:
            return self
        step = self.length / (len(log_weights) - 1)
        kept = torch.nonzero(log_weights > log_weights.max() + math.log(self.error) - deficit)[:, 0]
        low, high = self.low + step * (int(kept[0]) - 1), self.low + step * (int(kept[-1]) + 1)
        return self._replace(low=max(low, self.low), high=min(high, self.high))

    @property
    def length(self) -> float:
        """Of the range."""
        return self.high - self.low


def step_of(nodes: Tensor) -> float:
    """Distance of nodes; 1 for a known value, which has a mass and no density."""
    return float(nodes[1] - nodes[0]) if len(nodes) > 1 else 1.0


def draw_nodes(probs: Tensor, state: Tensor, generator: torch.Generator) -> Tensor:
    """A node for each draw, shape ``(N,)``, from its state and the nodes' probabilities given each, ``(s, nodes)``."""
    below = probs.cumsum(1)
    # The distribution functions of all states one above the other: one search finds the nodes of all draws.
    ladder = below / below[:, -1:] + torch.arange(len(probs))[:, None]
    point = torch.rand(len(state), generator=generator, dtype=torch.float64)
    node = torch.searchsorted(ladder.flatten(), state + point) - state * probs.shape[1]
    return node.clamp(0, probs.shape[1] - 1)


def log_half_normal(log_scale: Tensor, unit: float) -> Tensor:
    """Log density of log_scale where the scale is half-normal."""
    t = log_scale - math.log(unit)
    return 0.5 * math.log(2 / math.pi) + t - 0.5 * (2 * t).exp()


def log_half_cauchy(log_scale: Tensor, unit: float) -> Tensor:
    """Log density of log_scale where the scale is half-Cauchy."""
    t = log_scale - math.log(unit)
    return math.log(2 / math.pi) - torch.logaddexp(t, -t)
