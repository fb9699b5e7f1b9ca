"""Regressions of further responses with spike-and-slab coefficients."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import Tags, assert_all_finite
from sklearn.utils.validation import _check_sample_weight, _check_y, check_consistent_length

from pyro_l0.selection.design.encode import tabular
from pyro_l0.selection.estimator import Array, SpikeSlabEstimator, SpikeSlabRegression
from pyro_l0.selection.families import (
    Bernoulli,
    Binomial,
    Cox,
    Family,
    Multivariate,
    NegativeBinomial,
    Ordinal,
    Student,
)
from pyro_l0.selection.families.cox import CoxLikelihood
from pyro_l0.selection.predictive import linear_predictors, parts_of
from pyro_l0.selection.regressions import SpikeSlabClassifier, SpikeSlabPoissonRegressor
from pyro_l0.selection.summary_statistics import of_z_scores

__all__ = [
    "SpikeSlabBinomialRegressor",
    "SpikeSlabCox",
    "SpikeSlabGLM",
    "SpikeSlabMultiTaskRegressor",
    "SpikeSlabNegativeBinomial",
    "SpikeSlabOrdinal",
    "SpikeSlabRobust",
]


@dataclass(kw_only=True, eq=False, repr=False)
class SpikeSlabCox(SpikeSlabEstimator):
    r"""Cox regression of survival times, some of them censored, with coefficients that are exactly zero or not.

    The hazard of an observation is :math:`h(t) \exp(X \beta)`, with any function h. The partial likelihood takes the
    likelihood's place, which is the limit under a gamma process prior of the cumulative h that says ever less
    (Kalbfleisch 1978, JRSS B 40, section 4; Sinha, Ibrahim and Chen 2003, Biometrika 90). There is no intercept. The
    priors are those of :class:`SpikeSlabRegressor`, except that an unknown slab scale is half-normal with scale 1.

    Observations y are a structured array, as scikit-survival has them: a bool field says whether the event happened,
    the other one when, or when the observation was last seen without it. Numbers are times of events, none censored.

    Parameters and attributes are those of :class:`SpikeSlabRegressor`, without a noise scale; these differ.

    Args:
        ties: how events at the same time are taken, by ``"efron"`` or by ``"breslow"``.

    Attributes:
        intercept_: what makes the log risk at the features' means zero.
        log_evidence_: that of the partial likelihood, in nats: only differences mean something.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(100, 4))
        >>> time = rng.exponential(np.exp(-x[:, 2]))
        >>> y = np.rec.fromarrays([time < 2, np.minimum(time, 2)], names="event,time")
        >>> model = SpikeSlabCox(random_state=0).fit(x, y)
        >>> model.select(), model.predict_survival(x[:3], [0.5, 1.0]).shape
        (array([2]), (3, 2))
    """

    _is_positive = True

    ties: str = "efron"
    fit_intercept: bool = field(default=True, init=False)

    def predict(self, X: ArrayLike, *, offset: ArrayLike | None = None) -> Array:
        """Predict the log risk, shape ``(m,)``: the posterior mean of X beta, less that at the means of the features.

        It is larger where events come sooner. Arguments are those of :meth:`SpikeSlabRegressor.predict`.
        """
        return self._mean(*self._validated_new(X, offset))

    def predict_survival(self, X: ArrayLike, times: ArrayLike, *, offset: ArrayLike | None = None) -> Array:
        """Predict the probability that the event has not happened, averaged over the posterior.

        The cumulative hazard is Breslow's estimate, or Efron's with his ties, at each draw of the coefficients. After
        the last event it does not rise any more.

        Args:
            X: features, shape ``(m, p)``.
            times: when, shape ``(T,)``.
            offset: as for ``predict``.

        Returns:
            Shape ``(m, T)``.
        """
        new = self._validated_new(X, offset)
        at = np.asarray(times, dtype=np.float64)
        if at.ndim != 1 or np.isnan(at).any():
            raise ValueError(f"Expected times of shape (T,) without NaN, but got {times!r}; pass a list of numbers.")
        old, y, _, known, _ = self._data
        time, event = torch.from_numpy(np.abs(y)), torch.from_numpy(~np.signbit(y))
        likelihood = CoxLikelihood(time, event, self.ties == "efron")
        before = np.searchsorted(likelihood.times.numpy()[::-1], at, side="right")
        total = np.zeros((len(new[0]), len(at)))
        for draws in parts_of(self.draws_, max(len(y), total.size)):
            hazard = (-likelihood.log_totals(torch.from_numpy(linear_predictors(draws, old, known)))).exp().numpy()
            cumulative = np.pad(hazard[:, ::-1].cumsum(1), ((0, 0), (1, 0)))[:, before]
            with np.errstate(divide="ignore", over="ignore"):
                total += np.exp(-np.exp(linear_predictors(draws, *new) + np.log(cumulative)[:, None])).sum(0)
        return total / len(self.draws_.rate)

    def score(self, X: ArrayLike, y: ArrayLike, *, offset: ArrayLike | None = None) -> float:
        """Harrell's concordance: how often the one of two whose event came first has the larger predicted risk.

        Equal risks count one half. Observations are those of ``fit``, and offsets those of ``predict``.
        """
        risk = self.predict(X, offset=offset)
        time, event = map(np.asarray, _times_and_events(y))
        check_consistent_length(risk, time)
        right = pairs = 0.0
        for i in np.flatnonzero(event):
            later = risk[(time > time[i]) | (~event & (time == time[i]))]
            right += np.count_nonzero(later < risk[i]) + 0.5 * np.count_nonzero(later == risk[i])
            pairs += len(later)
        if not pairs:
            raise ValueError("Expected an event before another observation's time, but there is none; pass more rows.")
        return right / pairs

    def sample_y(self, X: ArrayLike) -> NDArray[Any]:  # type: ignore[override]
        """Refuses: the partial likelihood says nothing on the times themselves."""
        raise NotImplementedError("Expected a distribution of y, but Cox's model has none; use predict_survival.")

    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        time, event = _times_and_events(y)
        found, time = super()._validated(x, time)
        if (time < 0).any() or not event.any():
            raise ValueError(
                "Expected times that are not negative, and at least one event, but got a smallest time of "
                f"{time.min():g} and {np.count_nonzero(event)} events; a field of type bool says where it happened."
            )
        self._family = Cox(self.ties == "efron")
        return found, np.copysign(time, event - 0.5)


def _times_and_events(y: ArrayLike) -> tuple[Any, NDArray[np.bool_]]:
    """The fields of a structured array, or times as they are and an event for each."""
    found = np.asarray(y)
    names = found.dtype.names
    kinds = {"event" if found.dtype[name].kind == "b" else "time": found[name] for name in names or ()}
    if names is None and (found.ndim < 2 or found.shape[1] == 1):
        return y, np.ones(found.shape[:1], dtype=bool)
    if names is None or len(names) != 2 or len(kinds) != 2:
        raise ValueError(
            "Expected y to have a field of type bool, for the events, and one of times, but got "
            f"{found.dtype if names else f'the shape {found.shape}'}; make it by np.rec.fromarrays([event == 1, time], "
            "names='event,time')."
        )
    return kinds["time"], kinds["event"]


# Of every fit, which no parameter of a family may be named like: attributes, with an underscore, and draws.
_RESULTS = {"coef", "coef_sd", "credible_sets", "draws", "error", "feature_names_in", "gates", "intercept"}
_RESULTS |= {"log_evidence", "method", "n_features_in", "ok", "pip", "problems", "rate", "slab_scale"}


@dataclass(kw_only=True, eq=False, repr=False)
class SpikeSlabGLM(SpikeSlabRegression):
    r"""Regression of any response, with coefficients that are exactly zero or not.

    The response is a :class:`~pyro_l0.selection.Family`, one of the library's or one of your own: it says how
    observations depend on the intercept plus X beta. Parameters of the family are learned beside the coefficients by
    exact chains; without any, the posterior is found as that of :class:`SpikeSlabPoissonRegressor`.

    Parameters and attributes are those of :class:`SpikeSlabRegressor`, without a noise scale; these differ.
    Unless the family ``is_location``, the intercept and features that are always in are normal with mean 0 and standard
    deviation 10, and an unknown slab scale is half-normal with the family's ``slab_unit``.

    Args:
        family: the distribution of y.

    Attributes:
        coef_: posterior means of the coefficients, shape ``(p,)``, or ``(K, p)`` of a family with K linear predictors.
        intercept_: posterior mean of the intercept, or of K of them.

    The posterior means of the family's parameters are attributes by their names with an underscore.

    Example:
        >>> import numpy as np
        >>> from pyro_l0.selection.families import Poisson
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(100, 4))
        >>> counts = rng.poisson(np.exp(1 + x[:, 2]))
        >>> SpikeSlabGLM(family=Poisson(), random_state=0).fit(x, counts).select()
        array([2])
    """

    family: Family

    @property
    def _has_outputs(self) -> bool:  # type: ignore[override]
        return self.family.has_outputs

    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        family = self._family = self.family
        is_several = family.has_outputs and family.is_location
        found, target = self._finite(x, y, y_numeric=True, multi_output=is_several, ensure_min_samples=2)
        self._outputs = ("output", range(family.outputs)) if family.has_outputs else None
        target = np.array(target, dtype=np.float64)
        if taken := sorted(_RESULTS & self._reported(target)):
            raise ValueError(
                f"Expected parameters of {family} with names of their own, but {', '.join(map(repr, taken))} is a "
                "result of every fit; rename it."
            )
        return found, target

    def _reported(self, target: Array) -> set[str]:
        """The names of the family's parameters as users see them."""
        if self.family.is_partial or self.family.has_closed_form or not self.family.takes(target).all():
            return set()
        named = self.family.likelihood(torch.from_numpy(target), None, None, 1.0).named()
        return {*self.family.reported({name: value.numpy() for name, value in named.items()})}


class SpikeSlabBinomialRegressor(RegressorMixin, SpikeSlabEstimator):  # type: ignore[misc]
    """Logistic regression of successes out of trials, whose coefficients are exactly zero with a learned probability.

    The log odds of a success are the intercept plus X beta. The posterior is that of
    :class:`~pyro_l0.selection.SpikeSlabClassifier` with a row for each trial; ``log_evidence_`` has the binomial
    coefficients. Predictions and ``sample_y`` are of one trial.

    Parameters and attributes are those of :class:`~pyro_l0.selection.SpikeSlabRegressor`, without a noise scale.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(60, 4))
        >>> trials = rng.integers(1, 9, size=60)
        >>> successes = rng.binomial(trials, 1 / (1 + np.exp(-2 * x[:, 2])))
        >>> SpikeSlabBinomialRegressor(random_state=0).fit(x, successes, trials=trials).select()
        array([2])
    """

    _family = Bernoulli()
    _is_positive = True

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        offset: ArrayLike | None = None,
        trials: ArrayLike | None = None,
    ) -> Self:
        """Find the posterior of the coefficients, as :meth:`SpikeSlabRegressor.fit` does.

        Args:
            X: features, shape ``(n, p)``.
            y: successes, shape ``(n,)``.
            sample_weight: how many equal rows each row stands for, shape ``(n,)``.
            offset: known part of the log odds, shape ``(n,)``.
            trials: out of how many, shape ``(n,)`` or one number for all rows. By default 1; if some of y are above 1,
                the largest of them, with a warning.
        """
        successes, total = _counted(y, trials)
        own = _check_sample_weight(sample_weight, successes, dtype=np.float64)
        super().fit(X, _shares(successes, total), total * own, offset=offset)
        successes, total, own = (part[total * own > 0] for part in (successes, total, own))
        self._data = self._data._replace(y=successes, weight=own, trials=total)
        self.log_evidence_ += float(own @ Binomial(total).log_constant(torch.from_numpy(successes))[0].numpy())
        return self

    def predict(self, X: ArrayLike, *, offset: ArrayLike | None = None) -> Array:
        """Predict the share of successes, shape ``(m,)``: the probability of one, averaged over the posterior.

        Times the trials, it is their expected number. Arguments are those of :meth:`SpikeSlabRegressor.predict`.
        """
        return self._expected(*self._validated_new(X, offset))

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        offset: ArrayLike | None = None,
        trials: ArrayLike | None = None,
    ) -> float:
        """The coefficient of determination of the shares, weighted by the trials; arguments are those of ``fit``."""
        successes, total = _counted(y, trials)
        weight = total * _check_sample_weight(sample_weight, successes)
        return float(r2_score(_shares(successes, total), self.predict(X, offset=offset), sample_weight=weight))


def _shares(successes: Array, trials: Array) -> Array:
    return np.divide(successes, trials, out=np.zeros_like(successes), where=trials > 0)


def _counted(y: ArrayLike, trials: ArrayLike | None) -> tuple[Array, Array]:
    """Successes, and out of how many, shape ``(n,)`` each."""
    successes = np.array(_check_y(y, y_numeric=True, estimator="SpikeSlabBinomialRegressor"), dtype=np.float64)
    if trials is None:
        trials = max(float(successes.max()), 1.0)
        if trials > 1:
            warnings.warn(
                f"Expected trials, as some of y are above 1, but got none: each y is taken to be out of {trials:g}, "
                "the largest. Pass trials.",
                stacklevel=3,
            )
    total = np.asarray(trials, dtype=np.float64)
    assert_all_finite(total, input_name="trials")
    if total.shape not in ((), successes.shape):
        raise ValueError(
            f"Expected trials to be a number or of shape {successes.shape}, one for each row, but got {total.shape}."
        )
    total = np.broadcast_to(total, successes.shape)
    wrong = np.flatnonzero((successes < 0) | (successes > total))
    if len(wrong):
        raise ValueError(
            f"Expected from 0 to as many successes as there are trials in each row, but row {wrong[0]} has "
            f"{successes[wrong[0]]:g} of {total[wrong[0]]:g}; y are successes, not failures or shares."
        )
    return successes, total


class SpikeSlabNegativeBinomial(SpikeSlabPoissonRegressor):
    r"""Regression of counts that vary more than Poisson ones, with coefficients that are exactly zero or not.

    The logarithm of the mean :math:`\mu` is the intercept plus X beta, and the variance is
    :math:`\mu + \alpha \mu^2`, with a dispersion :math:`\alpha` that is learned: its root, the standard deviation of
    what multiplies the mean from one observation to the next, is half-normal with scale 1. As :math:`\alpha` goes to 0
    the counts are Poisson. All other priors are those of :class:`SpikeSlabPoissonRegressor`.

    Parameters and attributes are those of :class:`SpikeSlabRegressor`, without a noise scale, and with one attribute
    more.

    Attributes:
        dispersion_: posterior mean of the dispersion; ``sample`` has its draws.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(200, 4))
        >>> counts = rng.poisson(np.exp(1 + x[:, 2]) * rng.gamma(2.0, 0.5, size=200))
        >>> SpikeSlabNegativeBinomial(random_state=0).fit(x, counts).select()
        array([2])
    """

    _family = NegativeBinomial()


class SpikeSlabOrdinal(SpikeSlabClassifier):
    r"""Regression of ordered classes by cumulative logits, with coefficients that are exactly zero or not.

    The probability of class k or one before it is :math:`\sigma(c_k - X \beta)`, with increasing thresholds c that are
    learned: at the features' means, all vectors of class probabilities have the same prior density. The priors of gates
    and coefficients are those of :class:`SpikeSlabClassifier`. ``fit_intercept`` only says that features are centred.
    An offset has the shape ``(n,)`` for any number of classes.

    Labels are ordered as numbers are, or as a pandas Series of ordered categories says; text without such an order is
    taken in that of the alphabet, with a warning.

    Parameters and attributes are those of :class:`SpikeSlabRegressor`, without a noise scale, and with two more
    attributes.

    Attributes:
        classes_: the labels, in their order.
        thresholds_: posterior means of the thresholds, shape ``(classes - 1,)``, from which X beta plus ``intercept_``
            is subtracted.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(150, 4))
        >>> grades = np.digitize(2 * x[:, 1] + rng.logistic(size=150), [-1, 0, 2])
        >>> model = SpikeSlabOrdinal(random_state=0).fit(x, grades)
        >>> model.select(), model.predict_proba(x).shape
        (array([1]), (150, 4))
    """

    _has_outputs = False

    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        found, numbers = super()._validated(x, y)
        self._family, self._outputs = Ordinal(len(self.classes_)), None
        dtype: Any = getattr(y, "dtype", None)
        if getattr(dtype, "ordered", False):
            order = dtype.categories.get_indexer(self.classes_).argsort()
            self.classes_ = self.classes_[order]
            numbers = order.argsort()[numbers.astype(np.intp)].astype(np.float64)
        elif self.classes_.dtype.kind not in "biuf":
            warnings.warn(
                f"Labels of text are ordered as in the alphabet: {self.classes_.tolist()}. Pass a pandas Series of "
                "ordered categories for another order.",
                stacklevel=4,
            )
        return found, numbers

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # of classes without an order, such as scikit-learn's blobs
        return tags


@dataclass(kw_only=True, eq=False, repr=False)
class SpikeSlabRobust(SpikeSlabRegression):
    r"""Linear regression with Student-t noise, with coefficients that are exactly zero or not.

    The noise of :math:`y = \text{intercept} + X \beta + \text{noise}` has a scale that is learned, under a half-Cauchy
    prior, and degrees of freedom that are given, or learned under a Gamma(2, .1) prior (Juarez and Steel 2010, Journal
    of Business & Economic Statistics 28). The unit of the priors is 1.4826 times the median distance of y to its
    median, which a few wild observations do not change: it is the scale of the half-Cauchy prior and of the half-normal
    one of an unknown slab scale, and a tenth of the deviation of the normal one of the intercept around that median.

    Parameters and attributes are those of :class:`SpikeSlabRegressor`, with these instead of its noise scale.

    Args:
        degrees_of_freedom: of the noise, such as 4; None: they are learned.

    Attributes:
        noise_scale_: posterior mean of the noise's scale, which is less than its standard deviation.
        degrees_of_freedom_: their posterior mean.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(100, 4))
        >>> y = x[:, 0] - x[:, 3] + rng.standard_t(1.5, size=100)
        >>> SpikeSlabRobust(random_state=0).fit(x, y).select()
        array([0, 3])
    """

    degrees_of_freedom: float | None = None

    def predict(self, X: ArrayLike, *, offset: ArrayLike | None = None) -> Array:  # type: ignore[override]
        """Posterior means of the middles of new observations, of shape ``(m,)``; their variance may not exist.

        Arguments are those of :meth:`SpikeSlabRegressor.predict`; ``predict_quantiles`` has intervals.
        """
        return self._mean(*self._validated_new(X, offset))

    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        self._family = Student(self.degrees_of_freedom)
        return super()._validated(x, y)


class SpikeSlabMultiTaskRegressor(SpikeSlabRegression):
    r"""Linear regressions of several responses, or on several data sets, in which a feature has effects in all or none.

    Responses of the same observations are the columns of y. Populations or studies are lists of an X and a y for each,
    with the same features. The model is that of :class:`SpikeSlabRegressor` for each of K responses or data sets, with
    one gate for each feature, effects of their own, and a noise scale :math:`\sigma_k` for each,

    .. math:: y_k \sim N(\text{intercept}_k + X_k \beta_k, \sigma_k^2), \quad \beta_{jk} = z_j w_{jk}.

    The noise of one response is independent of that of another. Each is divided by its standard deviation, less what
    features that are always in explain, so that one slab scale suits all: it is in these deviations, and half-normal
    with scale 1 if it is learned. Features are standardised within a data set, and may be constant in some.

    A y of shape ``(n,)`` is one response, K = 1, and has the posterior of :class:`SpikeSlabRegressor`. Parameters and
    attributes are those of it; ``noise_scale`` is always learned, ``"auto"`` enumerates up to 11 features, and these
    attributes differ.

    Attributes:
        coef_: posterior means of the coefficients, shape ``(K, p)``.
        coef_sd_: posterior standard deviations of the coefficients, in the same shape.
        intercept_: posterior means of the intercepts, shape ``(K,)``.
        noise_scale_: posterior means of the noise's standard deviations, in the units of y, shape ``(K,)``.
        credible_sets_: as there; features of several data sets correlate by all rows, less the means of their set.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(100, 4))
        >>> y = x[:, [1]] * [2.0, -1.0, 0.5] + rng.normal(size=(100, 3))
        >>> model = SpikeSlabMultiTaskRegressor(random_state=0).fit(x, y)
        >>> model.select(), model.predict(x).shape
        (array([1]), (100, 3))
        >>> two = SpikeSlabMultiTaskRegressor(random_state=0).fit(
        ...     [x, x[:50]], [y[:, 0], y[:50, 1]]
        ... )
        >>> two.select(), two.coef_.shape
        (array([1]), (2, 4))
    """

    _has_outputs = True
    _set_of: NDArray[np.intp] | None = None  # the data set of each row, while several are fitted

    def fit(self, X: Any, y: Any, sample_weight: Any | None = None, *, offset: Any | None = None) -> Self:
        """Find the posterior of the coefficients, with errors and warnings as :meth:`SpikeSlabPoissonRegressor.fit`.

        Args:
            X: features, shape ``(n, p)``, or a list of K such tables, one for each data set.
            y: observations, shape ``(n, K)``, or a list of K vectors, shape ``(n_k,)``.
            sample_weight: how many equal observations each row stands for, shape ``(n,)``, or a list of such.
            offset: known part of y, in its shape, or a list of such.

        Returns:
            The estimator. ``predict`` takes one X, and has a column for each data set.
        """
        if not _are_tables(X):
            return self._fit(X, y, sample_weight, offset)
        rows = [np.shape(table)[0] for table in X]
        if min(rows) < 2:
            raise ValueError(
                f"Expected at least two rows in each X, but number {int(np.argmin(rows))} has {min(rows)}."
            )
        for name, parts in (("y", y), ("sample_weight", sample_weight), ("offset", offset)):
            shapes = [np.shape(part) for part in parts] if np.iterable(parts) else parts
            if parts is not None and shapes != [(n,) for n in rows]:
                raise ValueError(
                    f"Expected {name} to be a list of {len(X)} vectors, one for each X, of lengths {rows}, but got "
                    f"{shapes}."
                )
        y, weight, known = (None if parts is None else np.concatenate(parts) for parts in (y, sample_weight, offset))
        self._set_of = np.repeat(np.arange(len(X)), rows)
        try:
            if known is not None and len(X) > 1:
                known = np.tile(known, (len(X), 1)).T
            return self._fit(_stacked(X), y, weight, known)
        finally:
            del self._set_of

    @classmethod
    def from_z_scores(
        cls,
        z: Sequence[ArrayLike],
        R: Sequence[ArrayLike],
        n: Sequence[float],
        *,
        panel_size: Sequence[float | None] | None = None,
        **parameters: Any,
    ) -> Self:
        """Fit to z-scores and correlations of several populations or studies, as in genetics.

        Args:
            z: those of each, as for :meth:`SpikeSlabRegressor.from_z_scores`: a list of vectors of shape ``(p,)``.
            R: correlations of the features in each, a list of matrices of shape ``(p, p)``, or of rows of panels, with
                the same features.
            n: numbers of observations.
            panel_size: numbers of rows of the panels that R are of, None for R of the same sample.
            parameters: those of the constructor.

        Returns:
            The fitted estimator; its coefficients are in standard deviations of y_k for one of a feature. It refuses to
            predict.

        Raises:
            ValueError: the lists are not of one length, or as for one study.
        """
        sizes = [None] * len(z) if panel_size is None else panel_size
        if not len(z) == len(R) == len(n) == len(sizes):
            raise ValueError(
                f"Expected as many z, R and n, one for each study, and panel_size, but got {len(z)}, {len(R)}, "
                f"{len(n)} and {len(sizes)}."
            )
        each = list(map(of_z_scores, z, R, n, sizes))  # without a frame, which warnings would name
        weight = [np.full(len(rows.y), rows.number / len(rows.y)) for rows in each]
        fitted = cls(**parameters).fit([rows.table for rows in each], [rows.y for rows in each], weight)
        return fitted._without_observations(fitted.fit_intercept)

    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        if self._set_of is None:
            found, target = self._finite(x, y, y_numeric=True, multi_output=True, ensure_min_samples=2)
            target = np.array(target, dtype=np.float64).reshape(len(target), -1)
        else:
            found, of_own = self._finite(x, y, y_numeric=True, ensure_min_samples=2)
            target = np.full((len(of_own), self._set_of[-1] + 1), np.nan)
            target[np.arange(len(of_own)), self._set_of] = of_own
        self._outputs = "response", list(getattr(y, "columns", range(target.shape[1])))
        self._family = Multivariate(target.shape[1])
        return found, target

    def _correlating(self, x: Array, y: Array, weight: Array | None) -> Array:
        if not np.isnan(y).any():
            return x
        found = x.copy()
        for own in ~np.isnan(y.T):
            found[own] -= np.average(x[own], axis=0, weights=None if weight is None else weight[own])
        return found

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output, tags.target_tags.single_output = True, False
        return tags


def _are_tables(X: Any) -> bool:
    """Whether there are several tables, in a list, and not one."""
    return isinstance(X, list | tuple) and len(X) > 0 and all(np.ndim(table) == 2 for table in X)


def _stacked(tables: Sequence[Any]) -> Any:
    """Data sets of the same features, one below the other."""
    if sparse := [k for k, table in enumerate(tables) if issparse(table)]:
        raise TypeError(f"Expected dense X, but number {sparse[0]} is sparse; pass its toarray().")
    tables = [tabular(table) for table in tables]
    names = [list(getattr(table, "columns", range(np.shape(table)[1]))) for table in tables]
    if wrong := [k for k, own in enumerate(names) if own != names[0]]:
        raise ValueError(
            f"Expected the same features in all X, in the same order, but those of number {wrong[0]} differ from those "
            "of number 0; reorder or leave out columns."
        )
    if not all(hasattr(table, "iloc") for table in tables):
        return np.concatenate([np.asarray(table) for table in tables])
    import pandas

    found = pandas.concat(tables, ignore_index=True)
    for j in range(found.shape[1]):
        columns = [table.iloc[:, j] for table in tables]
        if all(str(column.dtype) == "category" for column in columns):  # whose levels may differ
            found.isetitem(j, pandas.api.types.union_categoricals(columns, ignore_order=True))
    return found
