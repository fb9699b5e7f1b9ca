"""Nodes of the ratio of slab scale and noise scale, and of the noise scale, of a Gaussian regression."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.selection.gate_vectors.hyper_axis import Axis, draw_nodes, log_half_cauchy, log_half_normal, step_of
from pyro_l0.selection.problem import Prior

__all__ = ["GaussianGrid", "GridAxes", "smallest_noise"]

_SMALLEST_NOISE = 1e-5
_ERROR = 1e-8
_NEGLIGIBLE = 20.0  # nats below the largest density, where the ranges begin


class GaussianGrid(NamedTuple):
    """R nodes of the log of slab scale / noise scale, and M nodes of the log noise scale for each of them.

    Attributes:
        log_ratio: shape ``(R,)``.
        log_noise: shape ``(R, M)``.
        log_prior: log prior density of the unknown scales times the area of a cell, shape ``(R, M)``.
        steps: sizes of a cell; 0 where there is one node.
        log_slab: of a slab scale that is known, from which the noise scale follows; otherwise None.
    """

    log_ratio: Tensor
    log_noise: Tensor
    log_prior: Tensor
    steps: tuple[float, float]
    log_slab: float | None

    def draw(self, probs: Tensor, state: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws of log ratio and log noise scale, each of shape ``(N,)``, spread over their cells.

        Args:
            probs: of the nodes given each state, shape ``(s, R, M)``.
            state: of each draw, shape ``(N,)``.
            generator: of the random numbers.
        """
        node = draw_nodes(probs.flatten(1), state, generator)
        row = node // self.log_noise.shape[1]
        spread = torch.rand(2, len(node), generator=generator, dtype=torch.float64) - 0.5
        log_ratio = self.log_ratio[row] + self.steps[0] * spread[0]
        if self.log_slab is not None:
            return log_ratio, self.log_slab - log_ratio
        return log_ratio, self.log_noise.flatten()[node] + self.steps[1] * spread[1]


@dataclass(frozen=True)
class GridAxes:
    """Where the grid lies.

    A known noise scale is the one node of the axis ``noise``. Where the slab scale is known and the noise scale is not,
    the ratio tells the noise scale, and ``noise`` has one node that is not used.
    """

    prior: Prior
    ratio: Axis
    noise: Axis

    @staticmethod
    def start(
        prior: Prior, n: float, most_open: int, square_y: float, least_residual: Callable[[float], float]
    ) -> GridAxes:
        """Everything that the posterior may reach.

        Args:
            prior: of the scales.
            n: observations.
            most_open: gates of a state.
            square_y: y'y.
            least_residual: smallest y'y - a(r) of all states at a log ratio, which falls with the ratio.
        """
        slab, noise = prior.slab_scale, prior.noise_scale
        slab_range = (
            (math.log(prior.slab_unit) - _NEGLIGIBLE, math.log(prior.slab_unit) + 2.0)
            if slab is None
            else (math.log(slab), math.log(slab))
        )
        if noise is None:
            floor = math.log(smallest_noise(n, square_y))
            low, high = _noise_range(prior, n, square_y, least_residual(slab_range[1] - floor), floor)
        else:
            low = high = math.log(noise)
        derived = slab is not None and noise is None
        ratio = Axis(slab_range[0] - high, slab_range[1] - low, 2.0 * (most_open + 1 + (n if derived else 0)), _ERROR)
        return GridAxes(prior, ratio, Axis(low, low if derived else high, 2.0 * n, _ERROR))

    @property
    def size(self) -> float:
        """Product of the lengths of the axes that are unknown."""
        return (self.ratio.length or 1.0) * (self.noise.length or 1.0)

    @property
    def settled(self) -> bool:
        """See :meth:`Axis.settled`."""
        return self.ratio.settled and self.noise.settled

    @property
    def deficit(self) -> float:
        """See :meth:`Axis.deficit`, of the coarse grid."""
        return self.ratio.deficit() + self.noise.deficit()

    def coarse(self) -> GaussianGrid:
        """The grid of :meth:`zoomed`."""
        return self._grid(self.ratio.coarse_nodes(), self.noise.coarse_nodes())

    def fine(self, times: int = 1) -> GaussianGrid:
        """The grid that integrals are taken on, or one with so many times as many nodes on each axis."""
        return self._grid(self.ratio.fine_nodes(times), self.noise.fine_nodes(times))

    def zoomed(self, log_weights: Tensor) -> GridAxes:
        """The part where the nodes of the coarse grid have weight, from their log weights of shape ``(R, M)``."""
        ratio = self.ratio.zoomed(log_weights.logsumexp(1), self.deficit)
        return replace(self, ratio=ratio, noise=self.noise.zoomed(log_weights.logsumexp(0), self.deficit))

    def _grid(self, log_ratio: Tensor, log_noise: Tensor) -> GaussianGrid:
        prior = self.prior
        log_slab = None
        nodes = log_noise.expand(len(log_ratio), -1)
        if prior.slab_scale is not None and prior.noise_scale is None:
            log_slab = math.log(prior.slab_scale)
            nodes = (log_slab - log_ratio)[:, None]
        log_prior = torch.full_like(nodes, math.log(step_of(log_ratio)) + math.log(step_of(log_noise)))
        if prior.noise_scale is None:
            log_prior = log_prior + log_half_cauchy(nodes, prior.noise_unit)
        if prior.slab_scale is None:
            log_prior = log_prior + log_half_normal(nodes + log_ratio[:, None], prior.slab_unit)
        steps = tuple(step_of(x) if len(x) > 1 else 0.0 for x in (log_ratio, log_noise))
        return GaussianGrid(log_ratio, nodes, log_prior, (steps[0], steps[1]), log_slab)


def smallest_noise(n: float, square_y: float) -> float:
    """The lower end of an unknown noise scale: 1e-5 times the root mean square of y."""
    return _SMALLEST_NOISE * math.sqrt(square_y / n)


def _noise_range(prior: Prior, n: float, square_y: float, least_residual: float, floor: float) -> tuple[float, float]:
    """Of the log noise scale.

    The likelihood's logarithm is -n (t + (e^-2t - 1) / 2) at a distance t from its maximum, and the prior's slope lies
    between 1, below its unit, and -1.
    """
    below = min(2.0, 2 * math.sqrt(_NEGLIGIBLE / n))
    above = min(_NEGLIGIBLE / n + 0.5, 2 * math.sqrt(_NEGLIGIBLE / n))
    middle = 0.5 * math.log(square_y / n)
    top = max(middle, math.log(prior.noise_unit)) if n < 20 else middle
    low = floor if least_residual <= 0 else max(0.5 * math.log(least_residual / n) - below, floor)
    return low, top + above
