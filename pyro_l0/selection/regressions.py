"""Linear, logistic and Poisson regression with spike-and-slab coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils._missing import is_pandas_na, is_scalar_nan
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import column_or_1d

from pyro_l0.selection.estimator import Array, SpikeSlabEstimator, SpikeSlabRegression
from pyro_l0.selection.families import Bernoulli, Categorical, Correlated, Family, Gaussian, Poisson
from pyro_l0.selection.summary_statistics import Observations, checked_means, of_moments, of_z_scores

__all__ = ["SpikeSlabClassifier", "SpikeSlabPoissonRegressor", "SpikeSlabRegressor"]


@dataclass(kw_only=True, eq=False, repr=False)
class SpikeSlabRegressor(SpikeSlabRegression):
    r"""Linear regression whose coefficients are exactly zero with a probability that is learned.

    The model is

    .. math:: y \sim N(\text{intercept} + X \beta, \sigma^2), \quad \beta_j = z_j w_j, \quad
        z_j \sim \text{Bernoulli}(\text{rate}), \quad w_j \sim N(0, \tau^2),

    with ``noise_scale`` :math:`\sigma`, ``slab_scale`` :math:`\tau` and a flat prior on the intercept. If features
    are standardised, the coefficients of this model are those of the standardised features; ``coef_``,
    ``coef_sd_``, ``intercept_`` and all draws are in the units of the data.

    The effect of a constant feature cannot be told from the intercept: its inclusion probability and coefficient are 0,
    a warning names it, and the prior does not count it.

    Noise of a known covariance, as of time series, is an argument of :meth:`fit`.

    Categorical columns of a data frame become a dummy for each level, none left out, and have one gate each. The
    dummies of a factor are standardised by one divisor, the root of their summed variances, so that the slab scale
    means the same for factors and numbers: a factor of two levels has the inclusion probability of a 0/1 column.

    Args:
        rate: prior inclusion probability of every feature, or of every group: a number above 0 and up to 1, an array of
            shape ``(p,)``, or a dict or series by names, or by positions where no column has a number for a name. If
            neither this nor ``expected_size`` is given, it is learned, under a Beta(1, sqrt(p)) prior. Features of rate
            1 are always in. A dict with rates of 1 alone leaves one rate of all other features to be learned, or to
            ``expected_size``; any other dict names all features.
        expected_size: expected number of features, or groups, with an effect; the rate is then
            ``expected_size / n_features``. Those that are always in do not count.
        always_in_scale: standard deviation of the effects of features that are always in, of standardised ones if these
            are standardised; in a linear regression in units of the noise scale. None: their prior is that of the
            intercept, which is flat in a linear regression. If they and the intercept are collinear, as the dummies of
            a category, the effects are then the smallest of those that fit equally well.
        slab_scale: standard deviation of the nonzero effects, of standardised features if these are standardised; None:
            it is learned, under a half-normal prior whose scale is the standard deviation of y, less what features that
            are always in explain.
        noise_scale: standard deviation of the noise, in the unit of y; None: it is learned, under a half-Cauchy prior
            of that scale.
        background: whether each feature with a gate has a small effect u, too, as in genetics: y ~ N(X (beta + u),
            noise). Small effects everywhere otherwise make credible sets that hold no large one. The u are normal with
            a common variance, for the features as the slabs see them. The ratio r of the variances that they and the
            noise give y is 0 with a prior probability of .5, or one of five values from .02 to 5.12. The fit then takes
            about six times as long, and sparse X become dense. Where few large effects explain y no better than many
            small ones, sets are lost.
        standardize: whether features are divided by their standard deviations first.
        fit_intercept: whether there is an intercept; otherwise nothing is centred.
        method: ``"enumerate"`` sums over all subsets, up to 20 features; ``"tempered"`` samples them, up to 100,000
            features; ``"auto"`` enumerates up to 15 features, 13 with a background, or 8 in families other than the
            Gaussian (9 up to 1,000 observations), and samples more. Regressions with a dispersion, thresholds or
            Student-t noise sample parameters, gates and coefficients together, without an approximation: ``method`` is
            then ``"auto"`` or ``"tempered"``, and ``log_evidence_`` is NaN, as it is not estimated.
        groups: the group of each feature, shape ``(p,)`` or by names as for ``rate``: whole numbers from 0 on. A group
            has one gate, which opens or closes all of its coefficients. None: each feature, and each categorical
            column, is one.
        random_state: an int makes fits reproducible; None takes fresh random numbers. Neither changes numpy's global
            generator.
        verbose: whether bars show the progress of what takes long.

    Attributes:
        pip_: P(z = 1 | y) of every feature, its inclusion probability, shape ``(p,)``; of every group with ``groups``.
            It is 1 if a feature is always in.
        error_: Monte Carlo standard errors of ``pip_``, in its shape; 0 where all subsets were summed over.
        ok_: whether no error is above .05, and nothing else was found to be wrong.
        problems_: what is wrong, in sentences.
        coef_: posterior means of the coefficients, shape ``(p,)``, the dummies of a categorical column side by side;
            closed gates count as 0.
        coef_sd_: posterior standard deviations of the coefficients, shape ``(p,)``.
        intercept_: posterior mean of the intercept; 0 without one.
        noise_scale_: posterior mean of the standard deviation of the noise, in the unit of y.
        slab_scale_: posterior mean of the slab scale, for standardised features if these are standardised.
        rate_: posterior mean of the rate; the rates where features have their own.
        log_evidence_: log p(y) in nats, or its estimate; that of y without what an intercept and features with a flat
            prior explain. NaN where coefficients are so far from normal that it cannot be told.
        background_: P(r | y), a dict by r; ``{0.0: 1.0}`` without a background.
        background_coef_: posterior means of the small effects, shape ``(p,)``, which predictions add to ``coef_``; 0
            without a background, and for features that are always in.
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

    _takes_sparse = True

    noise_scale: float | None = None
    background: bool = False

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        offset: ArrayLike | None = None,
        noise_covariance: ArrayLike | None = None,
    ) -> Self:
        """Find the posterior of the coefficients, with errors and warnings as :meth:`SpikeSlabPoissonRegressor.fit`.

        Args:
            X: features, shape ``(n, p)``, as for the other estimators.
            y: observations, shape ``(n,)``.
            sample_weight: how many equal observations each row stands for, shape ``(n,)``.
            offset: known part of y, shape ``(n,)``.
            noise_covariance: that of the noise of all rows, up to the factor ``noise_scale**2``: shape ``(n, n)``,
                or its lower Cholesky factor, which has zeros above the diagonal; or variances alone, shape ``(n,)``. It
                is an argument here, not of the constructor, as it belongs to the rows. The unit of ``noise_scale``, and
                the scale of its prior if it is learned, are those of the whitened y. ``predict`` returns the linear
                predictor, without the correlation of new rows with these. The noise of new rows is unknown:
                ``return_std``, ``predict_quantiles`` and ``sample_y`` are refused.

        Returns:
            The estimator.
        """
        if noise_covariance is not None and sample_weight is not None:
            raise ValueError(
                "Expected no sample_weight beside noise_covariance, which does not tell the noise of repeated rows. If "
                "the weights w are precisions, divide the covariance by np.sqrt(np.outer(w, w)) instead."
            )
        self._family = Gaussian() if noise_covariance is None else Correlated()
        return self._fit(X, y, sample_weight, offset, noise_covariance)

    @classmethod
    def from_moments(
        cls,
        XtX: ArrayLike,
        Xty: ArrayLike,
        yty: float,
        n: float,
        *,
        X_mean: ArrayLike | None = None,
        y_mean: float | None = None,
        **parameters: Any,
    ) -> Self:
        """Fit to sums of squares and products; the posterior is that of the data.

        With an intercept the sums are those of centred data: less the means of X and y.

        Args:
            XtX: X'X, shape ``(p, p)``; a data frame gives names.
            Xty: X'y, shape ``(p,)``.
            yty: y'y.
            n: number of observations.
            X_mean: means of the features, shape ``(p,)``, for the intercept and predictions.
            y_mean: mean of y, for the same.
            parameters: those of the constructor.

        Returns:
            The fitted estimator. Without means its intercept is NaN, and it refuses to predict.

        Raises:
            ValueError: no data have these moments, or shapes or means do not fit.

        Example:
            >>> import numpy as np
            >>> rng = np.random.default_rng(0)
            >>> x = rng.normal(size=(100, 5))
            >>> y = x[:, 0] - x[:, 3] + rng.normal(size=100)
            >>> x, y = x - x.mean(0), y - y.mean()
            >>> moments = x.T @ x, x.T @ y, y @ y
            >>> SpikeSlabRegressor.from_moments(*moments, n=100, random_state=0).select()
            array([0, 3])
        """
        return cls(**parameters)._fit_summary(of_moments(XtX, Xty, yty, n), X_mean, y_mean)

    @classmethod
    def from_z_scores(
        cls, z: ArrayLike, R: ArrayLike, n: float, *, panel_size: float | None = None, **parameters: Any
    ) -> Self:
        """Fit to z-scores of regressions on one feature each and the features' correlations, as in genetics.

        Take R from the sample of z. If there is only a reference panel, say of how many rows it is: the posterior then
        allows for the error of its correlations, which otherwise becomes false effects where n is far larger.

        The posterior is that of standardised features and y, so coefficients are in standard deviations of y for one of
        a feature. It is the one of the data if z are the t statistics of regressions with an intercept.

        Of a panel of B rows, the error of R b adds about R h / B to the covariance R (1 - h) / n of X'y / n, with h the
        share of y's variance that the effects b explain. So z count as those of n' observations, 1 / n' = 1 / n +
        h / ((1 - h) B); h is what forward selection explains. This is an approximation: it is of normal features, takes
        the estimated R where the true one stands, and has one n' for all effects, so that sets of the largest one are
        wider than they have to be, and effects that explain less than about 25 / B of h are not found. An infinite B
        changes nothing.

        Args:
            z: estimates divided by their standard errors, shape ``(p,)``.
            R: correlations of the features, shape ``(p, p)``, in the same sample or of a panel; or the rows of a panel,
                shape ``(B, p)``, raw or standardised, from which no p x p matrix is made where B is smaller. A square R
                is always one of correlations: of a panel with p rows, pass these. A data frame gives names.
            n: number of observations that z are of.
            panel_size: number of rows, B, of the panel that R is of; above 2. None: R is of the sample of z, or has the
                rows itself.
            parameters: those of the constructor.

        Returns:
            The fitted estimator, with credible sets, whose purity is from R. It refuses to predict.

        Raises:
            ValueError: R is no correlation matrix, a feature of a panel is constant, or the shapes do not fit.

        Warns:
            UserWarning: z and R do not belong together, as where R is of another sample or alleles are switched. R of
                the sample is then shrunk towards independence, the noise counts as at least as large as y, and the
                features that fit worst are named. R of a panel is only compared for switched alleles, and not shrunk;
                that a panel is of another population, say, may go unnoticed.

        Example:
            >>> import numpy as np
            >>> rng = np.random.default_rng(0)
            >>> x, panel = rng.normal(size=(5000, 30)), rng.normal(size=(200, 30))
            >>> y = x[:, 3] - x[:, 7] + rng.normal(size=5000)
            >>> r = np.corrcoef(x.T, y)[-1, :-1]
            >>> z = r * np.sqrt(4998 / (1 - r**2))
            >>> SpikeSlabRegressor.from_z_scores(z, panel, 5000, random_state=0).select()
            array([3, 7])

        References:
            Zou et al. (2022), PLoS Genetics 18(7): e1010299, for the check; McCreight et al., SuSiE 2.0, for the noise
            of a finite panel, there (h + (R b)_j^2) / B for each feature j and effect given the other effects.
        """
        return cls(**parameters)._fit_summary(of_z_scores(z, R, n, panel_size), None, None)

    def _fit_summary(self, rows: Observations, x_mean: ArrayLike | None, y_mean: float | None) -> Self:
        """Fit to observations of equal weight that have the moments of others, if means are known to be these."""
        is_known = x_mean is not None
        if is_known != (y_mean is not None) or (is_known and not self.fit_intercept):
            raise ValueError(
                "Expected X_mean and y_mean both or neither, and neither without an intercept, but got "
                f"{x_mean!r} and {y_mean!r}."
            )
        if x_mean is not None:
            rows = rows._replace(x=rows.x + checked_means(x_mean, rows))
        weight = np.full(len(rows.y), rows.number / len(rows.y))
        self.fit(rows.table, rows.y + (y_mean or 0.0), sample_weight=weight)
        return self._without_observations(self.fit_intercept and not is_known)


class SpikeSlabClassifier(ClassifierMixin, SpikeSlabEstimator):  # type: ignore[misc]
    """Logistic regression whose coefficients are exactly zero with a probability that is learned.

    Two classes have one linear predictor, the log odds of the second class. More classes have one each, and a softmax
    gives their probabilities; a feature then has one gate, which opens or closes its coefficients for all classes.
    The priors are those of :class:`SpikeSlabRegressor`, except that an intercept is normal with mean 0 and standard
    deviation 10, and an unknown slab scale half-normal with scale 2.

    A feature that separates the classes, constant within each of them, is no problem: the slab keeps its coefficient
    finite, and exact chains find its distribution, which is far from normal.

    Parameters and attributes are those of :class:`SpikeSlabRegressor`, without a noise scale; these differ.

    Attributes:
        classes_: the labels, in increasing order.
        coef_: posterior means of the coefficients, shape ``(1, p)`` for two classes and ``(classes, p)`` for more.
        coef_sd_: posterior standard deviations of the coefficients, in the same shape.
        intercept_: posterior means of the intercepts, shape ``(1,)`` or ``(classes,)``.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(200, 4))
        >>> labels = np.where(3 * x[:, 1] + rng.logistic(size=200) > 0, "yes", "no")
        >>> model = SpikeSlabClassifier(random_state=0).fit(x, labels)
        >>> model.select(), model.predict_proba(x).shape
        (array([1]), (200, 2))
    """

    _has_outputs = True

    def predict_proba(self, X: ArrayLike, *, offset: ArrayLike | None = None) -> Array:
        """Probabilities of the classes, averaged over the posterior.

        Args:
            X: features, shape ``(m, p)``.
            offset: known part of the linear predictors, shape ``(m,)``, or ``(m, classes)`` of three or more; 0 by
                default, also after a fit with one.

        Returns:
            Shape ``(m, classes)``, in the order of ``classes_``.
        """
        probs = self._expected(*self._validated_new(X, offset))
        return probs if probs.ndim > 1 else np.stack([1 - probs, probs], axis=1)

    def predict(self, X: ArrayLike, *, offset: ArrayLike | None = None) -> NDArray[np.generic]:
        """Labels of the most probable classes, shape ``(m,)``; arguments are those of ``predict_proba``."""
        likeliest = self.predict_proba(X, offset=offset).argmax(1)  # first: it says so if the estimator is not fitted
        labels: NDArray[np.generic] = self.classes_[likeliest]
        return labels

    def score(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, *, offset: ArrayLike | None = None
    ) -> float:
        """The share of right labels; arguments are those of ``fit``."""
        return float(accuracy_score(y, self.predict(X, offset=offset), sample_weight=sample_weight))

    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        given = np.asarray(y)
        objects = enumerate(given.ravel() if given.dtype.kind == "O" and y is not None else ())
        missing = [row for row, label in objects if label is None or is_scalar_nan(label) or is_pandas_na(label)]
        if missing:
            raise ValueError(
                f"Expected a label in each row, but {len(missing)} are None or NaN, first in row {missing[0]}; leave "
                "these rows out."
            )
        found, labels = self._finite(x, y, ensure_min_samples=2)
        if type_of_target(labels, input_name="y") == "continuous":
            raise ValueError(
                f"Expected labels, but got numbers that are not whole, such as {labels[labels % 1 != 0][0]:g}; number "
                "them in their order by np.unique(y, return_inverse=True)[1]. Unknown label type: continuous."
            )
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(column_or_1d(labels), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "This solver needs samples of at least 2 classes in the data, but the data contains only one class: "
                f"{self.classes_.tolist()[0]!r}"
            )
        if len(self.classes_) == 2:
            self._family, self._outputs = Bernoulli(), None
        else:
            self._family, self._outputs = Categorical(len(self.classes_)), ("class", self.classes_)
        return np.array(found), numbers.astype(np.float64)


class SpikeSlabPoissonRegressor(SpikeSlabRegression):
    """Poisson regression whose coefficients are exactly zero with a probability that is learned.

    The logarithm of the mean is the intercept plus X beta. The priors are those of :class:`SpikeSlabRegressor`, except
    that the intercept is normal with mean 0 and standard deviation 10, and an unknown slab scale half-normal with scale
    1. As in scikit-learn's ``PoissonRegressor``, observations need not be whole, only not negative; for rates, say, the
    formula is a likelihood in name only.

    Parameters and attributes are those of :class:`SpikeSlabRegressor`, without a noise scale.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(100, 4))
        >>> counts = rng.poisson(np.exp(1 + x[:, 2]))
        >>> SpikeSlabPoissonRegressor(random_state=0).fit(x, counts).select()
        array([2])
    """

    _family: Family = Poisson()
    _is_positive = True
