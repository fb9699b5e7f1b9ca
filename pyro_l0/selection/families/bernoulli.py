"""Labels of two classes, and successes out of trials."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from pyro_l0.selection.families.family import Array, Family
from pyro_l0.selection.families.polya_gamma import draw_polya_gamma

__all__ = ["Bernoulli", "Binomial"]


class Bernoulli(Family):
    """Labels 0 and 1, or shares of ones, with log odds eta."""

    expected = "0 and 1, or shares between them"
    slab_unit = 2.0
    is_augmented = True

    def takes(self, y: Array) -> NDArray[np.bool_]:
        return (y >= 0) & (y <= 1)

    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        return y * eta - F.softplus(eta)

    def derivatives(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        prob = torch.sigmoid(eta)
        return y - prob, prob * torch.sigmoid(-eta)

    def augmented(
        self, y: Tensor, eta: Tensor, generator: torch.Generator, **parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        return (y - 0.5).expand_as(eta), draw_polya_gamma(eta, generator)

    def curvature_slope(self, y: Tensor, eta: Tensor, covariance: Tensor, **parameters: Tensor) -> Tensor:
        prob = torch.sigmoid(eta)
        return prob * (1 - prob) * (1 - 2 * prob) * covariance

    def null_predictor(self, y: Tensor, weight: Tensor) -> Tensor:
        """With half an observation more of each label."""
        n, ones = weight.sum(), (weight * y).sum()
        return ((ones + 0.5) / (n - ones + 0.5)).log()[None]

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        return np.asarray(random.random(eta.shape) < expit(eta), dtype=np.float64)

    def mean(self, eta: Array, **parameters: Array) -> Array:
        probs: Array = expit(eta)
        return probs


class Binomial(Bernoulli):
    """Successes y out of trials, shape ``(n,)``, with log odds eta of a success."""

    def __init__(self, trials: Array) -> None:
        self.trials = trials

    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        return y * eta - torch.from_numpy(self.trials) * F.softplus(eta)

    def log_constant(self, y: Tensor, **parameters: Tensor) -> Tensor:
        """Log of the number of ways to have y successes in the trials, shape ``(1, n)``."""
        trials = torch.from_numpy(self.trials)
        return ((trials + 1).lgamma() - (y + 1).lgamma() - (trials - y + 1).lgamma())[None]

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        return random.binomial(np.rint(self.trials).astype(np.int64), expit(eta)).astype(np.float64)
