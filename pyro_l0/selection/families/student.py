"""Numbers with Student-t noise."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Gamma, HalfCauchy

from pyro_l0.selection.families.family import Array, Family

__all__ = ["Student"]

_DEVIATIONS = 1.4826  # standard deviations of a normal variable in its median absolute one
_DEGREES = 5.0  # of freedom, to start from


class Student(Family):
    """Numbers around eta with Student-t noise, whose degrees of freedom are known or have a Gamma(2, .1) prior.

    That prior is the one of Juarez and Steel (2010), Journal of Business & Economic Statistics 28.
    """

    is_location = True
    is_augmented = True
    reach = math.inf  # its slope is bounded

    def __init__(self, degrees_of_freedom: float | None = None) -> None:
        self.degrees_of_freedom = degrees_of_freedom

    def priors(self, y: Tensor, unit: float) -> Mapping[str, Distribution]:
        shape, rate = torch.tensor([2.0, 0.1], dtype=torch.float64)
        unknown = {"degrees_of_freedom": Gamma(shape, rate, validate_args=False)}
        noise = HalfCauchy(torch.tensor(unit, dtype=torch.float64), validate_args=False)
        return {"noise_scale": noise, **(unknown if self.degrees_of_freedom is None else {})}

    def start(self, y: Tensor, weight: Tensor, unit: float) -> Mapping[str, Tensor]:
        return {"degrees_of_freedom": torch.tensor(_DEGREES, dtype=torch.float64)}

    def check(self, y: Array, weight: Array, intercept: bool) -> None:
        """Refuse observations whose density has an infinite integral where the noise's scale goes to 0.

        If k of n are equal, an intercept fits them up to the scale s, and the density goes as s to the power of
        degrees (n - k) - k + 1. Unknown degrees can be as small as they like, but have hardly any weight there unless
        more than half of the observations are equal.
        """
        degrees = self.degrees_of_freedom
        values, which = np.unique(y, return_inverse=True)
        equal = np.bincount(which, weight) * (intercept | (values == 0))
        k, n = equal.max(), weight.sum()
        if (k > 2 and 2 * k > n) if degrees is None else k - 1 - intercept >= degrees * (n - k):
            value = f"{values[equal.argmax()]:g}"
            raise ValueError(
                f"Expected fewer equal values of y, less the offset, but {k:g} of {n:g} are {value}: the posterior is "
                "improper, with a noise scale of 0. Fit whether y is that by SpikeSlabClassifier, and the other rows "
                "by this estimator."
            )

    def log_density(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> Tensor:
        scale, degrees = self._parameters(parameters)
        constant = (0.5 * (degrees + 1)).lgamma() - (0.5 * degrees).lgamma() - 0.5 * (degrees * math.pi).log()
        return constant - scale.log() - 0.5 * (degrees + 1) * (((y - eta) / scale).square() / degrees).log1p()

    def derivatives(self, y: Tensor, eta: Tensor, **parameters: Tensor) -> tuple[Tensor, Tensor]:
        """With the expectation of minus the second derivatives, as the log density is not concave."""
        scale, degrees = self._parameters(parameters)
        residual = y - eta
        slope = (degrees + 1) * residual / (degrees * scale.square() + residual.square())
        return slope, ((degrees + 1) / (degrees + 3) / scale.square()).expand_as(eta)

    def augmented(
        self, y: Tensor, eta: Tensor, generator: torch.Generator, **parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """By the precision of each observation, whose noise is then normal."""
        scale, degrees = self._parameters(parameters)
        rate = 0.5 * (degrees * scale.square() + (y - eta).square())
        weight = torch._standard_gamma((0.5 * (degrees + 1)).expand_as(rate).contiguous(), generator=generator) / rate
        return weight * y, weight

    def sample(self, eta: Array, random: np.random.Generator, **parameters: Array) -> Array:
        noise: Array = random.standard_t(np.broadcast_to(parameters["degrees_of_freedom"], eta.shape))
        return eta + parameters["noise_scale"] * noise

    def mean(self, eta: Array, **parameters: Array) -> Array:
        return eta

    def reported(self, parameters: Mapping[str, Array]) -> Mapping[str, Array]:
        """With the degrees of freedom where they are known, too."""
        known = np.full_like(parameters["noise_scale"], self.degrees_of_freedom or math.nan)
        return {"degrees_of_freedom": known, **parameters}

    def middle(self, y: Array, weight: Array) -> Array:
        """The median, which a few wild observations do not change."""
        return np.atleast_1d(_median(y, weight))

    def unit(self, y: Array, weight: Array) -> float:
        """1.4826 times the median distance to the median; the root mean square where half of them are none."""
        return _DEVIATIONS * _median(np.abs(y), weight) or super().unit(y, weight)

    def _parameters(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        scale, known = parameters["noise_scale"], self.degrees_of_freedom
        return scale, parameters["degrees_of_freedom"] if known is None else torch.full_like(scale, known)


def _median(values: Array, weight: Array) -> float:
    """The smallest value up to which lies half of the weight."""
    order = np.argsort(values)
    below = weight[order].cumsum()
    return float(values[order[np.searchsorted(below, 0.5 * below[-1])]])
