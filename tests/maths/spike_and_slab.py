"""Designs of few features, and their spike and slab summed over all vectors of gates, by other formulas than ours."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_l0.maths.collapsed import CollapsedQuadratic
from pyro_l0.maths.second_order import DenseQuadratic, DesignQuadratic
from pyro_l0.maths.tempered_gibbs import IndependentGates


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def log_evidence(curvature: Tensor, linear: Tensor, z: Tensor, scale: float | Tensor) -> Tensor:
    """Of vectors of gates, one for each element, under a quadratic likelihood; by the library's own formula."""
    return CollapsedQuadratic(DenseQuadratic(curvature, linear), scale).log_evidence(z)


def vectors(gates: int) -> Tensor:
    """All vectors of zeros and ones."""
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=gates)), dtype=torch.float64)


def with_each(z: Tensor, value: float) -> Tensor:
    """Every vector with one gate after the other set to a value: shape ``(S * G, G)``, gates running faster."""
    gates = z.shape[1]
    copies = z[:, None].repeat(1, gates, 1)
    each = torch.arange(gates)
    copies[:, each, each] = value
    return copies.flatten(0, 1)


def prior(rate: float) -> IndependentGates:
    return IndependentGates(torch.tensor(math.log(rate) - math.log1p(-rate), dtype=torch.float64))


@dataclass(frozen=True)
class Regression:
    """y ~ N(X beta, 1 / weights)."""

    x: Tensor
    y: Tensor
    weights: Tensor

    @staticmethod
    def drawn(n: int, p: int, seed: int, rho: float = 0.0, copies: int = 0) -> Regression:
        """Neighbours have correlation rho, and the first feature has so many copies."""
        generator = seeded(seed)
        x = torch.randn(n, p, generator=generator, dtype=torch.float64)
        for j in range(1, p):
            x[:, j] = rho * x[:, j - 1] + math.sqrt(1 - rho**2) * x[:, j]
        x[:, 1 : copies + 1] = x[:, :1]
        weights = 0.5 + torch.rand(n, generator=generator, dtype=torch.float64)
        noise = torch.randn(n, generator=generator, dtype=torch.float64) / weights.sqrt()
        return Regression(x, 0.5 * x[:, 0] - 0.3 * x[:, p // 2] + noise, weights)

    @property
    def linear(self) -> Tensor:
        return self.x.T @ (self.weights * self.y)

    def dense(self) -> DenseQuadratic:
        return DenseQuadratic(self.x.T @ (self.weights[:, None] * self.x), self.linear)

    def wide(self) -> DesignQuadratic:
        return DesignQuadratic((self.weights.sqrt()[:, None] * self.x).T, self.linear)

    def log_likelihood(self, beta: Tensor) -> Tensor:
        return -0.5 * (self.weights * (self.y - beta @ self.x.T).square()).sum(-1)

    def log_evidence(self, on: Tensor, scale: float | Tensor, factor: Tensor | None = None) -> Tensor:
        """Of vectors of open elements beside that of none: the outcome is normal, with the slabs' part added."""
        factor = on.new_ones(len(on)) if factor is None else factor
        noise = torch.diag_embed(1 / (factor[:, None] * self.weights))
        loaded = self.x * (on * scale)[:, None]
        zero = torch.zeros_like(self.y)
        with_slabs, without = (MultivariateNormal(zero, c) for c in (noise + loaded @ loaded.mT, noise))
        return with_slabs.log_prob(self.y) - without.log_prob(self.y)


def active_probs(log_weights: Tensor, z: Tensor) -> Tensor:
    return torch.softmax(log_weights, 0) @ z
