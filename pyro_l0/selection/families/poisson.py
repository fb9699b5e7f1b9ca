"""Counts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_l0.selection.families.family import Array, Family

__all__ = ["NegativeBinomial", "Poisson"]

# Of the mean of counts, its logarithm: numpy draws up to 9.2e18, and far from the data a mean may be infinite.
_MOST_LOG = 43.0


class Poisson(Family):
    """Counts whose means have the logarithms eta; they need not be whole."""

    expected = "numbers that are not negative"

    def takes(self, y: Array) -> NDArray[np.bool_]:
        return y >= 0

    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        return y * eta - eta.exp()

    def log_constant(self, y: Tensor, **parameters: Tensor) -> Tensor:
        return -torch.lgamma(y + 1)[None]

    def derivatives(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        mean = eta.exp()
        return y - mean, mean

    def curvature_slope(self, y: Tensor, eta: Tensor, covariance: Tensor, **parameters: Tensor) -> Tensor:
        return eta.exp() * covariance

    def null_predictor(self, y: Tensor, weight: Tensor) -> Tensor:
        """Log of the mean count, with half a count added, so that it is finite where all y are 0; shape ``(1,)``."""
        return (((weight * y).sum() + 0.5) / weight.sum()).log()[None]

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        return random.poisson(np.exp(np.minimum(eta, _MOST_LOG))).astype(np.float64)

    def mean(self, eta: Array, **parameters: Array) -> Array:
        with np.errstate(over="ignore"):  # far from the data a mean may be infinite
            means: Array = np.exp(eta)
        return means

    def variance(self, eta: Array, **parameters: Array) -> Array:
        return self.mean(eta)


class _HalfNormalRoot(Distribution):
    """A positive number whose root is half-normal with scale 1."""

    arg_constraints = {}  # noqa: RUF012  as torch declares it
    support = constraints.positive

    def __init__(self) -> None:
        super().__init__(validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return -0.5 * (value + value.log() + math.log(2 * math.pi))


class NegativeBinomial(Poisson):
    """Counts whose means mu have the logarithms eta, and of variance mu + alpha mu^2.

    With u = eta + log alpha, the log density is that of y successes and 1 / alpha failures of log odds u, plus a part
    without u. The root of the dispersion alpha, the deviation of what multiplies the mean, is half-normal with scale 1.
    """

    def priors(self, y: Tensor, unit: float) -> Mapping[str, Distribution]:
        return {"dispersion": _HalfNormalRoot()}

    def start(self, y: Tensor, weight: Tensor, unit: float) -> Mapping[str, Tensor]:
        return {"dispersion": torch.ones((), dtype=torch.float64)}

    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        dispersion = parameters["dispersion"]
        odds = eta + dispersion.log()
        return y * odds - (y + 1 / dispersion) * F.softplus(odds)

    def log_constant(self, y: Tensor, **parameters: Tensor) -> Tensor:
        return _log_rising(1 / parameters["dispersion"], y) - (y + 1).lgamma()

    def derivatives(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        odds, failures = eta + parameters["dispersion"].log(), 1 / parameters["dispersion"]
        prob, other = torch.sigmoid(odds), torch.sigmoid(-odds)
        return y * other - failures * prob, (y + failures) * prob * other

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        alpha = np.broadcast_to(parameters["dispersion"], eta.shape)
        mean = np.exp(np.minimum(eta, _MOST_LOG)) * alpha * random.gamma(1 / alpha)
        return random.poisson(np.minimum(mean, math.exp(_MOST_LOG))).astype(np.float64)

    def variance(self, eta: Array, **parameters: Array) -> Array:
        mean = self.mean(eta)
        with np.errstate(over="ignore"):
            return mean + parameters["dispersion"] * mean**2


_STIRLING = 1e4  # beyond which his series has a relative error of 1e-15


def _log_rising(x: Tensor, y: Tensor) -> Tensor:
    """log(Gamma(x + y) / Gamma(x)); beyond some x by Stirling's series, as log gammas of 1e15 have an error of 2."""
    large = x.clamp(min=_STIRLING)
    series = (large - 0.5) * (y / large).log1p() + y * ((large + y).log() - 1) - y / (12 * large * (large + y))
    return torch.where(x > _STIRLING, series, (x + y).lgamma() - x.lgamma())
