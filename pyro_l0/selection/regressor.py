"""Linear regression with spike-and-slab coefficients."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin

from pyro_l0.selection.estimator import Array, RandomState, SpikeSlabEstimator
from pyro_l0.selection.predictive import averages
from pyro_l0.selection.problem import Family

__all__ = ["SpikeSlabRegressor"]


class SpikeSlabRegressor(RegressorMixin, SpikeSlabEstimator):  # type: ignore[misc]
    r"""Linear regression whose coefficients are exactly zero with a probability that is learned.

    The model is

    .. math:: y \sim N(\text{intercept} + X \beta, \text{noise\_scale}^2), \quad \beta_j = z_j w_j, \quad
        z_j \sim \text{Bernoulli}(\text{rate}), \quad w_j \sim N(0, \text{slab\_scale}^2),

    with a flat prior on the intercept. If features are standardised, the coefficients of this model are those of the
    standardised features; ``coef_``, ``coef_sd_``, ``intercept_`` and all draws are in the units of the data.

    The effect of a constant feature cannot be told from the intercept: its inclusion probability and coefficient are 0,
    a warning names it, and the prior does not count it.

    Categorical columns of a data frame become a dummy for each level, none left out, and have one gate each. The
    dummies of a factor are standardised by one divisor, the root of their summed variances, so that the slab scale
    means the same for factors and numbers: a factor of two levels has the inclusion probability of a 0/1 column.

    Args:
        rate: prior inclusion probability of every feature, or of every group. If neither this nor ``expected_size`` is
            given, it is learned, under a Beta(1, sqrt(p)) prior.
        expected_size: expected number of features, or groups, with an effect; the rate is then
            ``expected_size / n_features``.
        slab_scale: standard deviation of the nonzero effects, of standardised features if these are standardised; None:
            it is learned, under a half-normal prior whose scale is the standard deviation of y.
        noise_scale: standard deviation of the noise, in the unit of y; None: it is learned, under a half-Cauchy prior
            whose scale is the standard deviation of y.
        standardize: whether features are divided by their standard deviations first.
        fit_intercept: whether there is an intercept; otherwise nothing is centred.
        method: ``"enumerate"`` sums over all subsets, up to 20 features; ``"tempered"`` samples them, up to 10,000
            features; ``"auto"`` enumerates up to 15 features, or 8 in families other than the Gaussian, and samples
            more.
        groups: the group of each feature, shape ``(p,)``: whole numbers from 0 on. A group has one gate, which opens or
            closes all of its coefficients. None: each feature, and each categorical column, is one.
        random_state: an int makes fits reproducible; None takes fresh random numbers. Neither changes numpy's global
            generator.

    Attributes:
        pip_: P(z = 1 | y) of every feature, its inclusion probability, shape ``(p,)``; of every group with ``groups``.
        coef_: posterior means of the coefficients, shape ``(p,)``, the dummies of a categorical column side by side;
            closed gates count as 0.
        coef_sd_: posterior standard deviations of the coefficients, shape ``(p,)``.
        intercept_: posterior mean of the intercept; 0 without one.
        noise_scale_: posterior mean of the standard deviation of the noise, in the unit of y.
        slab_scale_: posterior mean of the slab scale, for standardised features if these are standardised.
        rate_: posterior mean of the rate.
        log_evidence_: log p(y) in nats, or its estimate; with an intercept, that of y without its mean.
        credible_sets_: groups of correlated features, one of which has an effect with probability .95 or more.
        draws_: joint draws in the units of the data; ``sample`` returns them by name.
        method_: the method that was used.
        n_features_in_: number of features, p.
        feature_names_in_: names of the features, if X had names.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(100, 5))
        >>> y = x[:, 0] - x[:, 3] + rng.normal(size=100)
        >>> SpikeSlabRegressor(random_state=0).fit(x, y).select()
        array([0, 3])

    References:
        George and McCulloch (1997), Statistica Sinica 7, for the model; Zanella and Roberts (2019), arXiv:1805.00541,
        for the sampler; Wang et al. (2020), JRSS B 82, for credible sets.
    """

    def __init__(
        self,
        *,
        rate: float | None = None,
        expected_size: float | None = None,
        slab_scale: float | None = None,
        noise_scale: float | None = None,
        standardize: bool = True,
        fit_intercept: bool = True,
        method: str = "auto",
        groups: ArrayLike | None = None,
        random_state: RandomState = None,
    ) -> None:
        super().__init__(
            rate=rate,
            expected_size=expected_size,
            slab_scale=slab_scale,
            standardize=standardize,
            fit_intercept=fit_intercept,
            method=method,
            groups=groups,
            random_state=random_state,
        )
        self.noise_scale = noise_scale

    def predict(self, X: ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:  # noqa: N803
        """Predict the posterior mean of new observations.

        Args:
            X: features, shape ``(m, p)``.
            return_std: whether to return the standard deviation of a new observation, noise included, too.

        Returns:
            The means, shape ``(m,)``, and with ``return_std`` the standard deviations in the same shape.
        """
        x = self._validated_features(X)
        mean: Array = x @ self.coef_ + self.intercept_
        if not return_std:
            return mean
        variance = averages(self.draws_, x, lambda predictor: (predictor[..., 0] - predictor[..., 0].mean(0)) ** 2)
        return mean, np.sqrt(variance + (self.draws_.noise_scale**2).mean())

    def _family(self) -> Family:
        return "gaussian"
