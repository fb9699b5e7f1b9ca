"""Regression of counts with spike-and-slab coefficients."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils import Tags

from pyro_l0.selection.estimator import Array, SpikeSlabEstimator
from pyro_l0.selection.predictive import averages
from pyro_l0.selection.problem import Family

__all__ = ["SpikeSlabPoissonRegressor"]


class SpikeSlabPoissonRegressor(RegressorMixin, SpikeSlabEstimator):  # type: ignore[misc]
    """Poisson regression whose coefficients are exactly zero with a probability that is learned.

    The logarithm of the mean is the intercept plus X beta. The priors are those of :class:`SpikeSlabRegressor`, except
    that the intercept is normal with mean 0 and standard deviation 10, and an unknown slab scale half-normal with scale
    1. As in scikit-learn's ``PoissonRegressor``, observations need not be whole, only not negative; for rates, say, the
    formula is a likelihood in name only.

    Parameters and attributes are those of :class:`SpikeSlabRegressor`, without a noise scale.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(100, 4))
        >>> counts = rng.poisson(np.exp(1 + x[:, 2]))
        >>> SpikeSlabPoissonRegressor(random_state=0).fit(x, counts).select()
        array([2])
    """

    def predict(self, X: ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:  # noqa: N803
        """Predict the posterior mean of new counts.

        Args:
            X: features, shape ``(m, p)``.
            return_std: whether to return the standard deviation of a new count, too.

        Returns:
            The means over the posterior draws, shape ``(m,)``, and with ``return_std`` the standard deviations in the
            same shape.
        """
        x = self._validated_features(X)
        with np.errstate(over="ignore", invalid="ignore"):  # far from the data a mean may be infinite
            mean = averages(self.draws_, x, _mean)
            if not return_std:
                return mean
            return mean, np.sqrt(mean + averages(self.draws_, x, lambda eta: (_mean(eta) - _mean(eta).mean(0)) ** 2))

    def _family(self) -> Family:
        return "poisson"

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


def _mean(predictors: Array) -> Array:
    found: Array = np.exp(predictors[..., 0])
    return found
