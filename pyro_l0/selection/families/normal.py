"""Numbers with normal noise, of one response or of several."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from pyro_l0.selection.families.family import Array, Family

__all__ = ["Correlated", "Gaussian", "Multivariate", "smallest_noise"]

_SMALLEST_NOISE = 1e-5


def smallest_noise(n: float, square_y: float) -> float:
    """The lower end of an unknown noise scale: 1e-5 times the root mean square of y."""
    return _SMALLEST_NOISE * math.sqrt(square_y / n)


class Gaussian(Family):
    """Numbers around eta with normal noise."""

    is_location = True
    has_closed_form = True

    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        scale = parameters["noise_scale"]
        return -0.5 * ((y - eta) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        return eta + parameters["noise_scale"] * random.standard_normal(eta.shape)

    def mean(self, eta: Array, **parameters: Array) -> Array:
        return eta

    def variance(self, eta: Array, **parameters: Array) -> Array:
        return np.broadcast_to(parameters["noise_scale"] ** 2, eta.shape)


class Correlated(Gaussian):
    """Numbers around eta with normal noise that correlates between the rows of a fit: that of others is unknown."""

    is_partial = True

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        raise ValueError(
            "Expected a fit that tells the noise of new observations, but noise_covariance tells that of the fitted "
            "rows; predict their means, or add noise of your own to sample()'s coef @ X.T + intercept, "
            "and background @ X.T where there is a background."
        )

    def variance(self, eta: Array, **parameters: Array) -> Array:
        return self.sample(eta, np.random.default_rng())


class Multivariate(Gaussian):
    """K responses around K linear predictors, each with independent normal noise of a scale of its own.

    A response that was not observed is NaN.
    """

    has_outputs = True
    is_joint = True

    def __init__(self, outputs: int) -> None:
        self.outputs = outputs
