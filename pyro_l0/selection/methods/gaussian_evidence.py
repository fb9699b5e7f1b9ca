r"""Gate vectors of a Gaussian regression: exact evidence, moments and draws.

Let lambda_i and v_i be the eigenvalues and eigenvectors of the open block of X'X, c_i = v_i . X'y, and
r = (slab_scale / noise_scale)^2. Then

.. math:: \log p(y | z) = -\tfrac n2 \log(2 \pi \sigma^2) - \frac{y'y - a(r)}{2 \sigma^2} - \tfrac12 d(r), \quad
    a(r) = \sum_i \frac{r c_i^2}{1 + r \lambda_i}, \quad d(r) = \sum_i \log(1 + r \lambda_i),

and given y the coefficients are normal with mean sum_i v_i r c_i / (1 + r lambda_i) and covariance
sigma^2 sum_i v_i v_i' r / (1 + r lambda_i). So one decomposition serves every node of a grid, and the sums are the same
for all noise scales with the same r: a grid has nodes of log sqrt(r), and nodes of log noise_scale for each of these,
around sqrt((y'y - a(r)) / n).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.maths.second_order import Quadratic, open_positions
from pyro_l0.selection.families.normal import smallest_noise
from pyro_l0.selection.methods.grid import (
    NEGLIGIBLE,
    NODES,
    Batch,
    Grid,
    GridEvidence,
    batches_of,
    distinct_vectors,
    draws_of,
    nodes_around_mode,
    sparse_rows,
)
from pyro_l0.selection.problem import Draws, Problem

__all__ = ["GaussianEvidence", "Spectra", "noise_widths", "search_rounds"]

_ENTRIES = 2**17  # numbers in the largest array of a step: 512 kB, for which memory is at hand
# Nodes of an unknown noise scale, where the ratio's are searched and for integrals: as densities close to normal, of so
# many observations, need, and as others do. Draws, which are spread over cells, take the most.
_MANY, _CLOSE_TO_NORMAL, _SKEWED = 30, (6, 10), (12, 32)
_FACTORS = 8  # 1 + r lambda whose product is taken before the logarithm


class Spectra(NamedTuple):
    """A batch of m gate vectors with up to k open gates, and the decompositions of their open blocks."""

    rows: Tensor  # which gate vectors, shape (m,)
    open: Tensor  # their open features, shape (m, k)
    values: Tensor  # lambda, shape (m, k)
    projected: Tensor  # c, shape (m, k)
    vectors: Tensor  # v, in columns, shape (m, k, k)

    @staticmethod
    def of(quadratic: Quadratic, rows: Tensor, features: Tensor, valid: Tensor | None = None) -> Spectra:
        """Of open features, shape ``(m, k)``; those that are not valid get zeros, which no sum sees."""
        blocks, linear = quadratic.blocks(features), quadratic.linear[features]
        if valid is not None:
            blocks, linear = blocks * (valid[:, :, None] & valid[:, None, :]), linear * valid
        values, vectors = torch.linalg.eigh(blocks)
        projected = (vectors.mT @ linear[:, :, None])[:, :, 0]
        return Spectra(rows, features, values.clamp(min=0), projected, vectors)

    def at(self, index: Tensor) -> Spectra:
        """Those of some gate vectors."""
        return Spectra(*(x[index] for x in self))

    def sums(self, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """a(r) and d(r) at log ratios of shape ``(m, R)``."""
        ratio = (2 * log_ratio).exp()
        explained, log_det = torch.zeros(2, *ratio.shape, dtype=torch.float64)
        parts = zip(self.values.split(_FACTORS, 1), self.projected.square().split(_FACTORS, 1), strict=True)
        for some_values, some_squares in parts:
            product = torch.ones_like(log_det)
            for value, square in zip(some_values.T, some_squares.T, strict=True):
                shrunk = 1 + value[:, None] * ratio
                explained.addcdiv_(square[:, None].expand_as(shrunk), shrunk)
                product *= shrunk
            log_det += product.log_()
        return explained.mul_(ratio), log_det

    def gains(self, log_ratio: Tensor) -> Tensor:
        """r / (1 + r lambda), shape ``(m, k, R)``, for log ratios of shape ``(m, R)``."""
        return 1 / ((-2 * log_ratio)[:, None, :].exp() + self.values[:, :, None])

    def moments(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """Means of the open coefficients and of their squares, each of shape ``(m, k)``."""
        probs, gains = grid.probs(), self.gains(grid.log_ratio)
        means = self.vectors @ (gains * self.projected[:, :, None])
        by_ratio = probs.sum(2)[:, None, :]
        noise = (probs * (2 * grid.log_noise).exp()).sum(2)[:, None, :]
        spread = self.vectors.square() @ (gains * noise).sum(2, keepdim=True)
        return (means * by_ratio).sum(2), (means.square() * by_ratio).sum(2) + spread[:, :, 0]

    def draw(self, log_ratio: Tensor, log_noise: Tensor, generator: torch.Generator) -> Tensor:
        """Open coefficients given the scales of each gate vector, shape ``(m, k)``."""
        gains = self.gains(log_ratio[:, None])[:, :, 0]
        noise = torch.randn(gains.shape, generator=generator, dtype=torch.float64)
        coordinates = gains * self.projected + log_noise[:, None].exp() * gains.sqrt() * noise
        return (self.vectors @ coordinates[:, :, None])[:, :, 0]


class GaussianEvidence(GridEvidence[Spectra]):
    """Gate vectors of a Gaussian regression with everything else integrated out.

    Each has its own grid of the unknown scales, around their mode. A mean square residual counts as at least that of
    the smallest noise, 1e-5 times the root mean square of y: where the features explain y without a rest, the density
    of the noise scale has no other bound.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        y = problem.y
        self._n, self._p = problem.size, problem.x.shape[1]
        self._square_y = float(y @ y)
        if not self._n:
            raise ValueError("Expected at least one observation, and two with an intercept; got none to learn from.")
        if problem.prior.noise_scale is None and self._square_y == 0:
            raise ValueError("Expected y to vary, as the noise scale is unknown, but y is constant; set noise_scale.")
        both = problem.prior.noise_scale is None and problem.prior.slab_scale is None
        self._coarse, self._fine = (_CLOSE_TO_NORMAL if self._n > _MANY else _SKEWED) if both else (1, 1)
        self._quadratic = problem.quadratic

    def moments(self, z: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Means of the coefficients and of their squares over gate vectors of weights that sum to one, ``(p, K)``."""
        first, second = torch.zeros(2, self._p, dtype=torch.float64)
        for batch in self._batches(self.problem.checked(z)):
            mean, square = batch.moments(self._grid(batch, self._nodes(batch)[0]))
            weight = weights[batch.rows, None]
            first.index_add_(0, batch.open.flatten(), (weight * mean).flatten())
            second.index_add_(0, batch.open.flatten(), (weight * square).flatten())
        return first[:, None], second[:, None]

    def draws(self, z: Tensor, generator: torch.Generator) -> Draws:
        """One draw of the coefficients and of what is unknown for each gate vector."""
        distinct, vector = distinct_vectors(self.problem.checked(z))
        log_ratio, log_noise = torch.empty(2, len(z), dtype=torch.float64)
        parts = []
        for batch in self._batches(distinct):
            rows, which = draws_of(batch.rows, vector)
            grid = self._grid(batch, self._nodes(batch)[0], _SKEWED[1])
            log_ratio[rows], log_noise[rows] = grid.draw(which, generator)
            if self.problem.prior.slab_scale is not None:
                log_noise[rows] = math.log(self.problem.prior.slab_scale) - log_ratio[rows]
            beta = batch.at(which).draw(log_ratio[rows], log_noise[rows], generator)
            parts.append((Batch(rows, batch.open[which]), beta[:, :, None]))
        return Draws(
            sparse_rows(parts, len(z), self._p, 1),
            torch.zeros(len(z), 1, dtype=torch.float64).numpy(),
            (log_ratio + log_noise).exp().numpy(),
            log_noise.exp().numpy(),
            self.problem.prior.draw_rate(z, generator),
        )

    def drawn_scales(self, z: Tensor, theta: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The logarithms of noise and slab scale drawn anew given each gate vector, shape ``(S, 2)``."""
        batch = Spectra.of(self._quadratic, torch.arange(len(z)), *open_positions(self.problem.switched(z > 0)))
        log_ratio, log_noise = self._grid(batch, self._nodes(batch)[0], _SKEWED[1]).draw(batch.rows, generator)
        if self.problem.prior.slab_scale is not None:
            log_noise = math.log(self.problem.prior.slab_scale) - log_ratio
        return torch.stack([log_noise, log_ratio + log_noise], 1)

    def _batches(self, z: Tensor) -> Iterator[Spectra]:
        for rows, features in batches_of(
            self.problem.switched(z), lambda k: _ENTRIES // (NODES * max(self._fine, k) + k * k)
        ):
            yield Spectra.of(self._quadratic, rows, features)

    def _nodes(self, batch: Spectra) -> tuple[Tensor, Tensor]:
        """Nodes of the log ratio of slab and noise scale, and rough log evidences; see ``GridEvidence``."""
        prior = self.problem.prior
        (lowest, highest), (least, most) = prior.slab_range(), self._noise_range()
        return nodes_around_mode(
            lambda nodes: self._grid(batch, nodes, self._coarse).log_by_ratio(),
            torch.tensor([lowest - most, highest - least], dtype=torch.float64).expand(len(batch.rows), 2),
            # With a known slab scale the ratio is as sure as the noise scale, whose density may be narrow.
            rounds=1 if prior.slab_scale is None else search_rounds(self._n),
        )

    def _noise_range(self) -> tuple[float, float]:
        """The least and the largest log noise scale that matter, over all gate vectors; equal if it is known."""
        known = self.problem.prior.noise_scale
        if known is not None:
            return math.log(known), math.log(known)
        below, above = noise_widths(self._n)
        smallest = math.log(smallest_noise(self._n, self._square_y))
        return smallest - below, 0.5 * math.log(self._square_y / self._n) + above

    def _grid(self, batch: Spectra, nodes: Tensor, number: int | None = None) -> Grid:
        """The grid whose log ratios are given, with so many nodes of an unknown noise scale."""
        prior, n = self.problem.prior, self._n
        explained, log_det = batch.sums(nodes)
        least = n * smallest_noise(n, self._square_y) ** 2 if prior.noise_scale is None else 0.0
        residual = (self._square_y - explained)[:, :, None].clamp(min=least)
        if prior.noise_scale is not None:
            log_noise = torch.full_like(residual, math.log(prior.noise_scale))
        elif prior.slab_scale is not None:
            log_noise = math.log(prior.slab_scale) - nodes[:, :, None]
        else:
            below, above = noise_widths(n)
            steps = torch.linspace(-below, above, self._fine if number is None else number, dtype=torch.float64)
            log_noise = 0.5 * (residual / n).log() + steps
        log_joint = torch.addcmul(-n * log_noise, residual, (-2 * log_noise).exp_(), value=-0.5)
        log_joint -= 0.5 * log_det[:, :, None] + 0.5 * n * math.log(2 * math.pi)
        log_joint += prior.log_noise(log_noise)
        log_joint += prior.log_slab(log_noise + nodes[:, :, None])
        return Grid(nodes, log_noise, log_joint)


def search_rounds(n: float) -> int:
    """In which the log noise scale of n observations is found, whose density may be narrow."""
    return max(2, math.ceil(math.log10(max(n, 30.0) / 30)))


def noise_widths(n: float) -> tuple[float, float]:
    """How far below and above its mode the log noise scale may be.

    At a distance t from it the likelihood is lower by n (t + (e^-2t - 1) / 2) nats, which is at least n t^2 below, and
    n t^2 / (1 + t) above, where the priors may have risen by 2 t.
    """
    free = max(n - 2, 1.0)
    above = (NEGLIGIBLE + 2 + math.sqrt((NEGLIGIBLE + 2) ** 2 + 4 * free * NEGLIGIBLE)) / (2 * free)
    return math.sqrt(NEGLIGIBLE / n), above
