r"""Gate vectors of a Gaussian regression: exact evidence, moments and draws.

Let lambda_i and v_i be the eigenvalues and eigenvectors of the open block of X'X, c_i = v_i . X'y, and
r = (slab_scale / noise_scale)^2. Then

.. math:: \log p(y | z) = -\tfrac n2 \log(2 \pi \sigma^2) - \frac{y'y - a(r)}{2 \sigma^2} - \tfrac12 d(r), \quad
    a(r) = \sum_i \frac{r c_i^2}{1 + r \lambda_i}, \quad d(r) = \sum_i \log(1 + r \lambda_i),

and given y the coefficients are normal with mean sum_i v_i r c_i / (1 + r lambda_i) and covariance
sigma^2 sum_i v_i v_i' r / (1 + r lambda_i). So one decomposition serves every node of a grid, and the sums are the same
for all noise scales with the same r: the grid has the axes log sqrt(r) and log noise_scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.maths.second_order import quadratic_of
from pyro_l0.selection.methods.grid import (
    Grid,
    GridAxes,
    Group,
    Laid,
    distinct_states,
    draw_rate,
    draws_of,
    gate_prior,
    groups_of,
    heaviest,
    lay,
    sparse_rows,
)
from pyro_l0.selection.problem import Draws, Problem

__all__ = ["GaussianStates"]

_ENTRIES = 2**19  # numbers in the largest array of a step: 4 MB
_FINER = 2  # the grid of draws, compared with the grid of integrals
_FACTORS = 8  # 1 + r lambda whose product is taken before the logarithm


class GaussianStates:
    """Gate vectors of a Gaussian regression with everything else integrated out.

    Unknown scales are integrated on a grid that is laid where the posterior of the given states is. A state that is
    e^-32 times lighter than the heaviest, or less, has its evidence to a few nats alone. An unknown noise scale is
    bounded from below by 1e-5 times the root mean square of y: where the features explain y without a rest, its density
    has no other bound.
    """

    def __init__(self, problem: Problem) -> None:
        x, y = problem.x, problem.y
        self.problem = problem
        self._n, self._p = problem.size, x.shape[1]
        self._square_y = float(y @ y)
        if not len(y):
            raise ValueError("Expected at least one observation, and two with an intercept; got none to learn from.")
        if problem.prior.noise_scale is None and self._square_y == 0:
            raise ValueError("Expected y to vary, as the noise scale is unknown, but y is constant; set noise_scale.")
        self._linear = x.T @ y
        self._quadratic = quadratic_of(x, self._linear)

    def log_marginal(self, z: Tensor) -> Tensor:
        """log p(y, z) with hyperparameters and coefficients integrated out, for gates of shape ``(S, G)``."""
        z = self.problem.checked(z)
        return self._laid(z).integrated()

    def moments(self, z: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Means of the coefficients and of their squares over states of weights that add up to one, each ``(p, K)``."""
        z = self.problem.checked(z)
        grid = self._laid(heaviest(z, weights)).axes.fine()
        first, second = torch.zeros(2, self._p, dtype=torch.float64)
        for group in groups_of(self.problem.switched(z)):
            k = group.open.shape[1]
            for part in group.split(max(1, _ENTRIES // (grid.log_noise.numel() + k * (len(grid.log_ratio) + k)))):
                spectrum = self._spectrum(part.open)
                mean, square = spectrum.moments(self._probs(spectrum, grid), grid)
                weight = weights[part.rows, None]
                first.index_add_(0, part.open.flatten(), (weight * mean).flatten())
                second.index_add_(0, part.open.flatten(), (weight * square).flatten())
        return first[:, None], second[:, None]

    def draws(self, z: Tensor, generator: torch.Generator) -> Draws:
        """One draw of the coefficients and of what is unknown for each state."""
        distinct, state, _ = distinct_states(self.problem.checked(z))
        grid = self._laid(distinct).axes.fine(_FINER)
        log_ratio, log_noise = torch.empty(2, len(z), dtype=torch.float64)
        parts = []
        for group in groups_of(self.problem.switched(distinct)):
            k = group.open.shape[1]
            for part in group.split(max(1, _ENTRIES // (grid.log_noise.numel() + k * k))):
                spectrum = self._spectrum(part.open)
                rows, place = draws_of(part.rows, state)
                log_ratio[rows], log_noise[rows] = grid.draw(self._probs(spectrum, grid), place, generator)
                beta = spectrum.at(place).draw(log_ratio[rows], log_noise[rows], generator)
                parts.append((Group(rows, part.open[place]), beta[:, :, None]))
        return Draws(
            sparse_rows(parts, len(z), self._p, 1),
            torch.zeros(len(z), 1, dtype=torch.float64).numpy(),
            (log_ratio + log_noise).exp().numpy(),
            log_noise.exp().numpy(),
            draw_rate(self.problem.prior, z, generator),
        )

    def _laid(self, z: Tensor) -> Laid:
        """Lay a grid where these states have their posterior."""
        on = self.problem.switched(z)
        groups = [self._with_eigenvalues(group) for group in groups_of(on)]
        log_gates = gate_prior(self.problem.prior).log_prob(z)
        axes = GridAxes.gaussian(
            self.problem.prior, self._n, int(on.sum(1).max()), self._square_y, lambda x: self._least_residual(groups, x)
        )
        return lay(axes, groups, log_gates, self._parts)

    def _parts(self, group: Group, grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of some of a group's states and their log p(y, node | z)."""
        for part in group.split(max(1, _ENTRIES // grid.log_prior.numel())):
            values, squares = part.known
            yield part.rows, self._log_joint(values, squares, grid)

    def _with_eigenvalues(self, group: Group) -> Group:
        """A group with lambda and c^2, each of shape ``(m, k)``; the vectors would take k times as much room."""
        k = group.open.shape[1]
        spectra = [self._spectrum(part.open) for part in group.split(max(1, _ENTRIES // max(1, k * k)))]
        squares = torch.cat([x.projected.square() for x in spectra])
        return group._replace(known=(torch.cat([x.values for x in spectra]), squares))

    def _spectrum(self, index: Tensor) -> _Spectrum:
        values, vectors = torch.linalg.eigh(self._quadratic.blocks(index))
        projected = (vectors.mT @ self._linear[index][:, :, None])[:, :, 0]
        return _Spectrum(values.clamp(min=0), projected, vectors)

    def _least_residual(self, groups: list[Group], log_ratio: float) -> float:
        ratio = torch.tensor([log_ratio], dtype=torch.float64)
        explained = [_sums(values, squares, ratio)[0].max() for values, squares in (group.known for group in groups)]
        return self._square_y - max(map(float, explained))

    def _probs(self, spectrum: _Spectrum, grid: Grid) -> Tensor:
        """Probabilities of the nodes given each state, shape ``(s, R, M)``."""
        log_joint = self._log_joint(spectrum.values, spectrum.projected.square(), grid)
        return log_joint.flatten(1).softmax(1).view_as(log_joint)

    def _log_joint(self, values: Tensor, squares: Tensor, grid: Grid) -> Tensor:
        """log p(y, node | z), shape ``(s, R, M)``."""
        explained, log_det = _sums(values, squares, grid.log_ratio)
        residual = (self._square_y - explained).clamp(min=0)
        alone = grid.log_prior - self._n * (grid.log_noise + 0.5 * math.log(2 * math.pi))
        log_joint = torch.addcmul(alone, residual[:, :, None], -0.5 * (-2 * grid.log_noise).exp())
        return log_joint.sub_(0.5 * log_det[:, :, None])


class _Spectrum(NamedTuple):
    """Decomposition of the open blocks of s states with k open gates."""

    values: Tensor  # lambda, shape (s, k)
    projected: Tensor  # c, shape (s, k)
    vectors: Tensor  # v, in columns, shape (s, k, k)

    def at(self, state: Tensor) -> _Spectrum:
        """Of certain states, shape ``(N,)``."""
        return _Spectrum(*(x[state] for x in self))

    def _gains(self, log_ratio: Tensor) -> Tensor:
        """r / (1 + r lambda), shape ``(s, k, R)``, for log ratios of shape ``(s or 1, R)``."""
        return 1 / ((-2 * log_ratio)[:, None, :].exp() + self.values[:, :, None])

    def moments(self, probs: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Means of the open coefficients and of their squares, each of shape ``(s, k)``."""
        gains = self._gains(grid.log_ratio[None])
        means = self.vectors @ (gains * self.projected[:, :, None])
        by_ratio = probs.sum(2)[:, None, :]
        noise = (probs * (2 * grid.log_noise).exp()).sum(2)[:, None, :]
        spread = self.vectors.square() @ (gains * noise).sum(2, keepdim=True)
        return (means * by_ratio).sum(2), (means.square() * by_ratio).sum(2) + spread[:, :, 0]

    def draw(self, log_ratio: Tensor, log_noise: Tensor, generator: torch.Generator) -> Tensor:
        """Open coefficients given the scales of each state, shape ``(s, k)``."""
        gains = self._gains(log_ratio[:, None])[:, :, 0]
        noise = torch.randn(gains.shape, generator=generator, dtype=torch.float64)
        coordinates = gains * self.projected + log_noise[:, None].exp() * gains.sqrt() * noise
        return (self.vectors @ coordinates[:, :, None])[:, :, 0]


def _sums(values: Tensor, squares: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """a(r) and d(r), each of shape ``(m, R)``."""
    ratio = (2 * log_ratio).exp()
    explained, log_det = torch.zeros(2, len(values), len(ratio), dtype=torch.float64)
    for some_values, some_squares in zip(values.split(_FACTORS, 1), squares.split(_FACTORS, 1), strict=True):
        product = torch.ones_like(log_det)
        for value, square in zip(some_values.T, some_squares.T, strict=True):
            shrunk = 1 + value[:, None] * ratio
            explained.addcdiv_(square[:, None].expand_as(shrunk), shrunk)
            product *= shrunk
        log_det += product.log_()
    return explained.mul_(ratio), log_det
