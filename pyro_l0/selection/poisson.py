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

    The logarithm of the mean is the intercept plus X beta, with the priors of :class:`SpikeSlabRegressor`; that of the
    intercept is normal with mean 0 and standard deviation 10, that of an unknown slab scale half-normal with scale 1.
    Observations that are not negative and no integers, such as rates, enter by the same formula, as in scikit-learn's
    ``PoissonRegressor``; then it is a likelihood in name only.

    Args:
        rate: see :class:`SpikeSlabRegressor`, as for all others.
        expected_size: number of features that are expected to have an effect.
        slab_scale: standard deviation of the effects that are not zero; None: it is learned.
        standardize: whether features are divided by their standard deviations first.
        fit_intercept: whether there is an intercept.
        method: see :class:`SpikeSlabRegressor`.
        groups: the group of each feature, with one gate for each group.
        random_state: an int makes fits reproducible.

    Attributes:
        pip_: P(z = 1 | y) of every feature, shape ``(p,)``.
        coef_: posterior means of the coefficients, shape ``(p,)``.
        coef_sd_: their posterior standard deviations, shape ``(p,)``.
        intercept_: posterior mean of the intercept.
        slab_scale_: posterior mean of the slab scale, of features as the model takes them.
        rate_: posterior mean of the rate.
        log_evidence_: log p(y), or its estimate.
        credible_sets_: groups of correlated features, of which one has an effect with probability .95 or more.
        draws_: joint draws in the units of the data.
        method_: the method that was used.
        n_features_in_: p.
        feature_names_in_: names of the features, where X had names.
    """

    def predict(self, X: ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:  # noqa: N803
        """The posterior mean of new counts.

        Args:
            X: features, shape ``(m, p)``.
            return_std: whether to return the standard deviation of a new count, too.

        Returns:
            The means over the posterior draws, shape ``(m,)``, and the standard deviations in the same shape if they
            are asked for.
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
