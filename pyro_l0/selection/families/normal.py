"""Numbers with normal noise, of one response or of several."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, HalfCauchy

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


class _Noise(HalfCauchy):
    """The scale of noise, of which tiny ones are impossible."""

    def __init__(self, scale: Tensor, least: float) -> None:
        self._least = least
        super().__init__(scale, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        density: Tensor = super().log_prob(value)  # type: ignore[no-untyped-call]
        return torch.where(value < self._least, -math.inf, density)


class Multivariate(Gaussian):
    """K responses around K linear predictors, each with independent normal noise of a scale of its own."""

    has_closed_form = False
    has_outputs = True
    is_augmented = True

    def __init__(self, outputs: int) -> None:
        self.outputs = outputs

    def priors(self, y: Tensor, unit: float) -> Mapping[str, Distribution]:
        scale = torch.full((self.outputs,), unit, dtype=torch.float64)
        return {"noise_scale": _Noise(scale, smallest_noise(1.0, unit**2))}

    def check(self, y: Array, weight: Array, intercept: bool) -> None:
        """Refuse a response that does not vary."""
        middle = self.middle(y, weight) * intercept
        constant = np.flatnonzero(self.unit(y - middle, weight) <= 10 * np.finfo(np.float64).eps * np.abs(middle))
        if len(constant):
            raise ValueError(
                f"Expected each response to vary, but that of column {constant[0]} does not; leave it out."
            )

    def derivatives(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        precision = parameters["noise_scale"] ** -2
        return precision * (y - eta), torch.diag_embed(precision.expand_as(eta))

    def augmented(
        self, y: Tensor, eta: Tensor, generator: torch.Generator, **parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """It is quadratic as it is."""
        precision = parameters["noise_scale"] ** -2
        return precision * y, precision

    def drawn(self, y: Tensor, eta: Tensor, weight: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
        square = (weight * (y - eta).square()).sum(-2)
        half = (0.5 * weight.sum()).expand_as(square).contiguous()
        return {"noise_scale": (0.5 * square / torch._standard_gamma(half, generator=generator)).sqrt()}

    def slope(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        return (y - eta) * parameters["noise_scale"] ** -2

    def unit(self, y: Array, weight: Array) -> Array:
        """Of each response, shape ``(K,)``, which it is divided by."""
        deviations: Array = np.sqrt(np.average(y**2, axis=0, weights=weight))
        return deviations
