"""What the estimators share: parameters, fitting, selection, draws and summaries."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import SelectorMixin
from sklearn.metrics import r2_score
from sklearn.utils import Tags, assert_all_finite, check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import _check_feature_names_in, _check_sample_weight, check_is_fitted, validate_data

from pyro_l0.expect import expect_count
from pyro_l0.maths.monte_carlo import MOST_ERROR, doubts
from pyro_l0.maths.tempered_gibbs import progress
from pyro_l0.selection.credible_sets import CredibleSet, credible_sets, open_gates
from pyro_l0.selection.design.design import Design
from pyro_l0.selection.design.draft import Draft
from pyro_l0.selection.design.encode import Encode, check_labels, coded, labels_of, levels_of, tabular
from pyro_l0.selection.design.joint import JointDesign, design_of
from pyro_l0.selection.design.noise import root_of
from pyro_l0.selection.families import Binomial, Family
from pyro_l0.selection.methods import METHODS, find_posterior
from pyro_l0.selection.methods.background import probability_of_background
from pyro_l0.selection.predictive import (
    expected,
    quantiles,
    replicated,
    summaries,
    to_inference_data,
    variances,
)
from pyro_l0.selection.problem import RATIOS, BackgroundEffects, SelectionPosterior

if TYPE_CHECKING:
    import arviz
    import pandas

__all__ = ["SpikeSlabEstimator", "SpikeSlabRegression", "seed_of"]

Array = NDArray[np.float64]
RandomState = int | np.random.RandomState | None
Rates = float | ArrayLike | Mapping[str | int, float] | None


def _by_names(given: Any, names: Sequence[Any], values: str, kinds: str) -> Array:
    """What a dict or series has for each name, or for positions where all names are text; NaN where it has nothing."""
    place = {name: i for i, name in enumerate(names)}
    has_positions = all(isinstance(name, str) for name in names)
    place |= {i: i for i in range(len(names)) if has_positions}
    found = np.full(len(names), np.nan)
    for key, value in given.items():
        if key not in place:
            by = "names or positions" if has_positions or isinstance(names, range) else "names"
            raise ValueError(f"Expected {values} by {by} of {kinds}, but got {key!r}; there are {len(names)}.")
        if not np.isnan(found[place[key]]):
            raise ValueError(f"Expected {values} by names of {kinds}, but {key!r} is there twice; leave one out.")
        found[place[key]] = value
    return found


def _checked_groups(groups: ArrayLike | None, names: Sequence[Any]) -> NDArray[np.intp]:
    """The group of each feature, shape ``(features,)``; its own index by default."""
    features = len(names)
    if groups is None:
        return np.arange(features)
    found = np.asarray(_by_names(groups, names, "groups", "features") if hasattr(groups, "items") else groups)
    if hasattr(groups, "items") and (found == np.floor(found)).all():
        found = found.astype(np.intp)
    fits = found.shape == (features,) and found.dtype.kind in "iu"
    if not fits or set(found.tolist()) != set(range(int(found.max()) + 1)):
        raise ValueError(
            f"Expected groups to be whole numbers from 0 on, one for each of {features} features and none left out, "
            f"but got {groups!r}; names become numbers by np.unique(names, return_inverse=True)[1]."
        )
    return found.astype(np.intp)


def _checked_offset(offset: Any, rows: int, outputs: int, names: Sequence[Any]) -> Array | None:
    """What is added to the linear predictors, shape ``(rows, outputs)``; a frame may have their names in any order."""
    if offset is None:
        return None
    if len(names) and set(getattr(offset, "columns", ())) == set(names):
        offset = offset[list(names)]
    found = np.asarray(offset, dtype=np.float64)
    assert_all_finite(found, input_name="offset")
    wanted = (rows,) if outputs == 1 else (rows, outputs)
    if found.shape != wanted:
        raise ValueError(
            f"Expected an offset of shape {wanted}, one for each linear predictor, but got {found.shape}; a constant "
            "is in the intercept."
        )
    return np.array(found.reshape(rows, outputs))


def _repeated(weight: Array) -> NDArray[np.intp]:
    """The index of each row as often as its weight says; a ValueError refuses fractions."""
    if (weight != np.floor(weight)).any():
        raise ValueError("Expected whole weights to repeat rows by, but some are fractions; fit whole ones.")
    return np.repeat(np.arange(len(weight)), weight.astype(np.intp))


def _warn_of_background(design: Design, found: SelectionPosterior) -> None:
    """Where small effects of all features are more probable than not."""
    is_told = len(found.active_probs) > _FEW and found.active_probs.max() > 0.5
    effects = design.small_effects() if is_told else None
    share = probability_of_background(design.problem, effects, found.draws) if effects else 0.0
    if share > _PROBABLE:
        warnings.warn(
            f"With a probability of about {share:.2f} all features have small effects, beside those that are found: "
            "credible sets may then hold no large effect, and features be selected for their neighbours. Fit with "
            "background=True.",
            UserWarning,
            stacklevel=4,
        )


def seed_of(random_state: int | np.random.RandomState | None) -> int:
    """A seed by scikit-learn's convention, but without drawing from numpy's global generator where none is given."""
    if random_state is None:
        return int(np.random.default_rng().integers(2**31 - 1))
    return int(check_random_state(random_state).randint(2**31 - 1))


_PRIORS = ("expected_size", "always_in_scale", "slab_scale", "noise_scale")
_OF_DRAFT = (*_PRIORS, "standardize", "fit_intercept", "background")
# Joint draws that are kept; the probability of a credible set then has a standard error of .005.
_DRAWS = 2000
_FEW = 15  # gates up to which small effects are seen one by one
_PROBABLE = 0.7  # probability of small effects of all features from which on a fit without them warns
# Draws for arviz, whose log likelihoods take memory for each draw and observation.
_FOR_ARVIZ = 1000


class _Data(NamedTuple):
    """What an estimator was fitted to, without rows of weight zero."""

    x: Any
    y: Array
    weight: Array | None
    offset: Array | None
    trials: Array | None = None  # of which y are the successes


@dataclass(kw_only=True, eq=False, repr=False)
class SpikeSlabEstimator(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    """A regression with spike-and-slab coefficients; see :class:`SpikeSlabRegressor` for parameters and attributes.

    With ``_has_outputs`` coefficients have a row and the intercept an entry for each linear predictor. Otherwise there
    is one, and its coefficients are a vector.
    """

    _parameter_constraints: ClassVar[dict[str, list[object]]] = {
        "rate": [Interval(Real, 0, 1, closed="right"), "array-like", dict, None],
        **{name: [Interval(Real, 0, None, closed="neither"), None] for name in (*_PRIORS, "degrees_of_freedom")},
        "standardize": ["boolean"],
        "fit_intercept": ["boolean"],
        "method": [StrOptions({"auto", *METHODS})],
        "family": [Family],
        "background": ["boolean"],
        "ties": [StrOptions({"breslow", "efron"})],
        "random_state": ["random_state"],
        "verbose": ["boolean"],
    }

    _family: Family = field(init=False)  # distribution of y, known once it was validated
    _outputs: tuple[str, Any] | None = field(default=None, init=False)  # kind and names of several linear predictors
    _labels: list[Any] | None = field(default=None, init=False)  # of the columns of a data frame
    _takes_sparse = _is_positive = _has_outputs = False

    rate: Rates = None
    expected_size: float | None = None
    always_in_scale: float | None = None
    slab_scale: float | None = None
    standardize: bool = True
    fit_intercept: bool = True
    method: str = "auto"
    groups: ArrayLike | None = None
    random_state: RandomState = None
    verbose: bool = False

    def fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, *, offset: ArrayLike | None = None
    ) -> Self:
        """Find the posterior of the coefficients.

        Args:
            X: features, shape ``(n, p)``, at least two observations. A categorical column of a data frame, by pandas
                or polars, becomes a dummy for each of its levels, all with one gate.
            y: observations, shape ``(n,)``, or ``(n, K)`` of several responses.
            sample_weight: frequency weights, shape ``(n,)``: how many equal observations each row stands for. Whole
                weights give the posterior of repeated rows; others are powers of the likelihoods. Relative weights
                should sum to n. Those of survival times are whole.
            offset: known part of the linear predictor of each observation, shape ``(n,)``; ``(n, classes)`` of three
                or more classes, ``(n, K)`` of several responses, or a frame with these names in any order. That of
                counts is the logarithm of their exposure.

        Returns:
            The estimator.

        Raises:
            ValueError: a parameter or the data are out of range.
            TypeError: X is sparse, which only a linear regression takes, or has no categories where the fit had some.

        Warns:
            UserWarning: features are constant; their inclusion probabilities and coefficients are 0. Or chains
                of a linear regression say that all of more than 15 probably have small effects; ``background=True``
                allows for these.
            ConvergenceWarning: the fit is not ``ok_``; ``problems_`` has the text.
        """
        return self._fit(X, y, sample_weight, offset)

    def _fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None,
        offset: ArrayLike | None,
        noise_covariance: ArrayLike | None = None,
    ) -> Self:
        """As ``fit``; ``noise_covariance``, shape ``(n, n)``, is for linear regressions alone."""
        self._validate_params()
        parameters = self.get_params(deep=False)
        table = tabular(X)
        self._labels = labels_of(table)
        levels = levels_of(table)
        x, target = self._validated(coded(table, levels), y)
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, x, ensure_non_negative=True)
        known = _checked_offset(offset, x.shape[0], self._family.outputs, self._output_names())
        root = None if noise_covariance is None else root_of(noise_covariance, x.shape[0])
        if weight is not None:
            rows, weight = self._counted_rows(weight)
            x, target, known = x[rows], target[rows], None if known is None else known[rows]
        self._encode = Encode.of(levels, x.shape[1])
        self._group_of = _checked_groups(self.groups, self._names())
        rate = self._checked_rate()
        draft = Draft(
            family=self._family,
            x=x,
            y=target,
            weight=weight,
            offset=known,
            root=root,
            names=self._names(),
            gate_of=self._group_of,
            rate=rate,
            **{name: parameters[name] for name in _OF_DRAFT if name in parameters},
        )
        self._encode.apply(draft)
        x, self._gate_of = draft.x, draft.gate_of
        design = design_of(draft)
        seed = seed_of(self.random_state)
        with progress(bool(self.verbose)):
            posterior, self.method_ = find_posterior(design.problem, self.method, draws=_DRAWS, seed=seed)
        if isinstance(design, Design) and getattr(self, "background", None) is False and self.method_ == "tempered":
            _warn_of_background(design, posterior)
        self._keep(design, posterior, seed)
        if rate is not None and not np.isnan(rate).any():
            self.rate_ = rate
        self.problems_ = (*posterior.problems, *self._unsure())
        self.ok_ = not self.problems_
        if self.problems_:
            warnings.warn(" ".join(self.problems_), ConvergenceWarning, stacklevel=3)
        self._data = _Data(x, target, weight, known)
        # Which gates are always open: a constant feature has none.
        self._is_in = np.equal(np.nan if rate is None else rate, 1.0) & (self.pip_ > 0)
        self.credible_sets_: list[CredibleSet] = credible_sets(
            open_gates(self.draws_.coefficients, self._gate_of) & ~self._is_in,
            np.where(self._is_in, 0.0, self.pip_),
            self._correlating(x, target, weight),
            names=self._gate_names(),
            gate_of=self._gate_of,
            weights=weight,
        )
        return self

    def select(self, fdr: float = 0.1) -> NDArray[np.intp]:
        """Select the largest set of probable features with an expected false discovery rate of at most ``fdr``.

        Features enter by decreasing inclusion probability, while it is above one half and the mean of 1 - PIP is at
        most ``fdr``; of equal ones, the smaller index comes first. Without the bound of one half, certain features
        would make room for improbable ones. Features whose ``error_`` is above .05 are left out. If features are in
        groups, whole groups are selected. Those of rate 1 are always selected, beside the others and without a share in
        the rate of false ones.

        Args:
            fdr: expected share of selected features without an effect, in [0, 1].

        Returns:
            Indices of the features, or of the groups, in increasing order; empty if there is no such set.

        Raises:
            ValueError: ``fdr`` is not between 0 and 1.

        Warns:
            UserWarning: no member of a credible set is selected, as features that correlate share its probability.
        """
        check_is_fitted(self)
        if not 0 <= fdr <= 1:
            raise ValueError(f"Expected fdr to be between 0 and 1, but got {fdr!r}.")
        pips = np.where(self.error_ <= MOST_ERROR, self.pip_, 0.0)
        order = np.argsort(-pips, kind="stable")
        order = order[~self._is_in[order]]
        false = np.cumsum(1 - pips[order]) / np.arange(1, len(order) + 1)
        # The means increase with the size of the set, as 1 - PIP does.
        size = min(np.searchsorted(false, fdr, side="right"), np.count_nonzero(pips[order] > 0.5))
        chosen = np.sort(np.concatenate([order[:size], np.flatnonzero(self._is_in)]))
        shared = [found for found in self.credible_sets_ if len(found.features) > 1 and found.probability >= 1 - fdr]
        missed = [str(found) for found in shared if not np.isin(found.features, chosen).any()]
        if missed:
            more = f" and of {len(missed) - 3} more sets" if len(missed) > 3 else ""
            warnings.warn(
                f"Of {' and of '.join(missed[:3])}{more} some member has an effect, but none is selected, as no single "
                "one is probable enough. Report the set, or leave out all of its features but one and fit again.",
                stacklevel=2,
            )
        return chosen

    def transform(self, X: ArrayLike) -> Any:
        """Reduce X to the selected features; a categorical one becomes the dummies of its levels.

        Args:
            X: features, shape ``(m, p)``.

        Returns:
            The selected features, shape ``(m, q)``, in an array, or in a data frame after ``set_output``.
        """
        check_is_fitted(self)
        check_labels(X, self._labels)
        if not self._encode.levels or not self._get_support_mask().any():
            return super().transform(X)
        return self._validated_features(X)[:, self._selected_columns()]

    def get_feature_names_out(self, input_features: ArrayLike | None = None) -> NDArray[np.object_]:
        """Names of the columns that ``transform`` returns, ``city[Rome]`` for a dummy.

        Args:
            input_features: names of the features; by default those of the fit.
        """
        check_is_fitted(self)
        given = _check_feature_names_in(self, input_features)
        names = self._encode.names(self._names() if input_features is None else list(given))
        return np.fromiter(names, dtype=object)[self._selected_columns()]

    def sample(self, n: int = 1000) -> dict[str, NDArray[Any]]:
        """Draw jointly from the posterior, in the units of the data.

        The first draws are those of the fit, in order; further ones are picked from these at random. The same call
        gives the same draws.

        Args:
            n: number of draws.

        Returns:
            Arrays by name, ``coef``, shape ``(n, *coef_.shape)``, in which the coefficients of closed gates are exactly
            0; ``gates``, bool, shape ``(n, *pip_.shape)``; ``intercept``, shape ``(n, *intercept_.shape)``;
            ``slab_scale``, ``rate`` if it is one for all, and, where the family has noise, ``noise_scale``, shape
            ``(n,)`` each, or ``(n, K)`` for the noise of several responses; what else the family has, such as
            ``dispersion``; and with a background the small effects, ``background``, shape ``(n, p)``, which add to
            ``coef``, and ``background_ratio``, shape ``(n,)``.
        """
        check_is_fitted(self)
        expect_count(1, n=n)
        kept = len(self.draws_.rate)
        more = np.random.default_rng(kept).integers(kept, size=max(0, n - kept))
        draws = self.draws_.rows(np.concatenate([np.arange(min(n, kept)), more]))
        found = {
            "coef": self._as_coef(draws.coefficients.toarray()),
            "gates": open_gates(draws.coefficients, self._gate_of),
            "intercept": self._as_intercept(draws.intercept),
        }
        scales = {name: getattr(draws, name) for name in ("slab_scale", "rate", "noise_scale")}
        known = {name: values for name, values in scales.items() if not np.isnan(values).any()}
        if draws.background is not None:
            known |= {"background": draws.background, "background_ratio": draws.ratio}
        return {**found, **known, **draws.learned}

    def sample_y(
        self, X: ArrayLike, n_samples: int = 1, random_state: RandomState = 0, *, offset: ArrayLike | None = None
    ) -> NDArray[Any]:
        """Draw new observations from their posterior predictive distribution.

        Args:
            X: features, shape ``(m, p)``.
            n_samples: number of draws. Each is of one draw of the coefficients, scales included, at all rows of X.
            random_state: seed of the draws, as for the estimator.
            offset: known part of the linear predictors, as for predictions.

        Returns:
            The observations, or labels of their classes, shape ``(m, n_samples)``; ``(m, K, n_samples)`` of several
            responses.
        """
        new = self._validated_new(X, offset)
        expect_count(1, n_samples=n_samples)
        rng = np.random.default_rng(seed_of(random_state))
        draws = self.draws_.rows(rng.integers(len(self.draws_.rate), size=n_samples))
        found = summaries(draws, *new, lambda eta: np.moveaxis(replicated(self._family, eta, draws, rng), 0, -1))
        return self.classes_[found.astype(np.intp)] if hasattr(self, "classes_") else found

    def interval(self, level: float = 0.9) -> Array:
        """Central intervals of the coefficients, atoms at zero included.

        Args:
            level: minimum posterior probability of an interval; .9 is from the 5 % to the 95 % quantile.

        Returns:
            Lower and upper ends, shape ``(*coef_.shape, 2)``.
        """
        check_is_fitted(self)
        if not 0 < level < 1:
            raise ValueError(f"Expected a level between 0 and 1, but got {level!r}.")
        ends = quantiles(self.draws_.coefficients, ((1 - level) / 2, (1 + level) / 2))
        return np.moveaxis(self._as_coef(ends), 0, -1)

    def summary(self) -> "pandas.DataFrame":
        """A table with a row for each coefficient: of each feature, level of a categorical one, and class of several.

        Its columns are the inclusion probability and the coefficient's mean, standard deviation, 5 % and 95 %
        quantile; if ``groups`` were given, the group comes first.
        """
        import pandas

        check_is_fitted(self)
        lower, upper = np.moveaxis(self.interval(0.9), -1, 0)
        per_feature = {"mean": self.coef_, "sd": self.coef_sd_, "5 %": lower, "95 %": upper}
        columns = {name: np.atleast_2d(values).T.ravel() for name, values in per_feature.items()}
        rows = self._rows()
        gate_of = np.repeat(self._gate_of, len(rows) // len(self._gate_of))
        group = {} if self.groups is None else {"group": gate_of}
        return pandas.DataFrame({**group, "PIP": self.pip_[gate_of], **columns}, index=rows)

    def to_arviz(self) -> "arviz.InferenceData":
        """Convert the fit to arviz's ``InferenceData``, with the data that it was fitted to.

        Its posterior has the gates ``z``, the coefficients ``coef``, the intercept, the scales and the rate, as in
        ``sample``; slabs of closed gates are not drawn, as they have no effect. There are log likelihoods (in nats) and
        replicated observations ``y``, with classes numbered in the order of ``classes_``, and the inclusion
        probabilities ``P(z != 0)`` as constant data. A row of weight k appears k times. A Cox regression, and one with
        a ``noise_covariance``, has no log likelihoods of single observations and no replicated ones; observations of
        the former are ``time`` and ``event``.

        Raises:
            ValueError: a weight is not whole, or the fit was to summary statistics or several data sets.
            ImportError: arviz is not installed.
        """
        check_is_fitted(self)
        if not hasattr(self, "_data"):
            raise ValueError("Expected a fit to observations, but this one is to summary statistics; use sample().")
        x, y, weight, offset, trials = self._data
        if self._family.is_joint and np.isnan(y).any():
            raise ValueError(
                "Expected a fit to responses of the same rows, but they are of several data sets; use sample()."
            )
        if weight is not None:
            rows = _repeated(weight)
            x, y = x[rows], y[rows]
            offset, trials = (None if part is None else part[rows] for part in (offset, trials))
        draws = self.draws_.rows(np.arange(min(len(self.draws_.rate), _FOR_ARVIZ)))
        sample = self.sample(len(draws.rate))
        names = self._column_names(), self._gate_names()
        family = self._family if trials is None else Binomial(trials)
        return to_inference_data(family, draws, sample, self.pip_, x, y, *names, offset)

    def _counted_rows(self, weight: Array) -> tuple[NDArray[np.intp], Array | None]:
        """Which rows count, and how often each; a partial likelihood takes each as often as its weight says."""
        if not self._family.is_partial:
            rows = np.flatnonzero(weight > 0)
            return rows, np.array(weight[rows], dtype=np.float64)
        return _repeated(weight), None

    def _checked_rate(self) -> float | Array | None:
        """One for all gates, or of each, NaN where a dict or series has none."""
        rate: Any = self.rate
        if rate is None or isinstance(rate, Real):
            return rate  # type: ignore[return-value]
        number = int(self._group_of.max()) + 1
        kinds = "features" if self.groups is None else "groups"
        if hasattr(rate, "items"):
            found = _by_names(rate, self._names() if self.groups is None else range(number), "rates", kinds)
            values = np.array([value for _, value in rate.items()], dtype=np.float64)
        else:
            found = values = np.array(rate, dtype=np.float64)
        if found.shape != (number,) or not ((values > 0) & (values <= 1)).all():
            raise ValueError(
                f"Expected rates above 0 and up to 1 of {number} {kinds}, but got {rate!r}; 1 is for {kinds} that are "
                "always in."
            )
        return found

    def _unsure(self) -> tuple[str, ...]:
        """The least certain inclusion probabilities, if they are too uncertain, and what would make them surer."""
        worst, order = float(self.error_.max(initial=0.0)), np.argsort(-self.error_, kind="stable")
        names = ", ".join(repr(self._gate_names()[g]) for g in order[self.error_[order] > MOST_ERROR][:5])
        return doubts(
            worst,
            f"the sampler's chains disagree on {names}. Average {math.ceil((worst / MOST_ERROR) ** 2)} fits with other "
            "random_states, leave out nearly equal ones of these features, give an expected_size, or, up to 20 "
            "features, use method='enumerate'.",
        )

    def _keep(self, design: Design | JointDesign, found: SelectionPosterior, seed: int) -> None:
        """Set the attributes from a posterior of the problem, in the units of the data."""
        raw = design.posterior(found, seed)
        self.pip_, self.draws_, self.log_evidence_ = raw.active_probs, raw.draws, raw.log_evidence
        self.error_ = raw.error
        self.coef_, self.coef_sd_ = (self._as_coef(part.reshape(1, -1))[0] for part in (raw.mean, raw.sd))
        self.intercept_ = self._as_intercept(raw.intercept[None])[0]
        for name in ("slab_scale", "noise_scale", "rate"):
            values, known = getattr(raw.draws, name), getattr(design.problem.prior, name)
            if not np.isnan(values).any():
                setattr(self, f"{name}_", known if isinstance(known, float) else values.mean(0))
        if hasattr(self, "background"):
            effects = raw.background or BackgroundEffects(RATIOS[:1], np.ones(1), np.zeros(len(self._gate_of)))
            self.background_ = dict(zip(effects.ratios.tolist(), effects.probs.tolist(), strict=True))
            self.background_coef_ = effects.mean
        for name, values in raw.draws.learned.items():
            setattr(self, f"{name}_", values.mean(0))

    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        """Features and observations as numbers; attributes of the data are set."""
        sparse = "csc" if self._takes_sparse else False
        found, target = self._finite(x, y, accept_sparse=sparse, y_numeric=True, ensure_min_samples=2)
        return found, np.array(target, dtype=np.float64)

    def _finite(self, *data: ArrayLike, **options: Any) -> Any:
        """What ``validate_data`` returns for X, or X and y, if no feature has missing values."""
        found = validate_data(self, *data, dtype=np.float64, ensure_all_finite="allow-nan", **options)
        sums = np.ravel((found if len(data) == 1 else found[0]).sum(0))
        missing = [repr(name) for name, total in zip(self._names(), sums, strict=True) if np.isnan(total)]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ValueError(
                f"Expected X without missing values, but there are NaN in {shown}. Fill them in by a transformer of "
                "sklearn.impute in front, or drop their rows or these features."
            )
        return found

    def _correlating(self, x: Array, y: Array, weight: Array | None) -> Array:
        """The features, of which those that correlate share credible sets."""
        return x

    def _without_observations(self, is_centred: bool) -> Self:
        """After a fit to summary statistics, which have no observation; with an intercept, they have no means."""
        del self._data
        if is_centred:
            self.intercept_ = self.intercept_ * np.nan
            self.draws_ = self.draws_._replace(intercept=self.draws_.intercept * np.nan)
        return self

    def _as_coef(self, values: Array) -> Array:
        """Coefficients of draws, shape ``(N, p K)``, in the shape ``(N, *coef_.shape)``."""
        if not self._has_outputs:
            return values
        return np.moveaxis(values.reshape(len(values), len(self._gate_of), -1), 1, 2)

    def _as_intercept(self, values: Array) -> Array:
        """Intercepts of draws, shape ``(N, K)``, in the shape ``(N, *intercept_.shape)``."""
        return values if self._has_outputs else values[:, 0]

    def _rows(self) -> "pandas.Index":
        import pandas

        names = self._column_names()
        if self._outputs is None:
            return pandas.Index(names, name="feature", tupleize_cols=False)
        kind, outputs = self._outputs
        return pandas.MultiIndex.from_product([names, outputs], names=["feature", kind])

    def _validated_features(self, x: ArrayLike) -> Array:
        check_is_fitted(self)
        if np.isnan(self.intercept_).any():
            raise ValueError(
                "Expected the means of X and y to predict by, but the fit got none; give X_mean and y_mean to "
                "from_moments."
            )
        sparse = "csr" if self._takes_sparse else False
        check_labels(x, self._labels)
        found = self._finite(coded(tabular(x), self._encode.levels), accept_sparse=sparse, reset=False)
        return self._encode.dummies(found)

    def _expected(self, x: Array, offset: Array | None) -> Array:
        """Posterior means of new observations, shape ``(m,)`` or ``(m, K)``; of classes, their probabilities."""
        if self._family.is_location:
            return self._mean(x, offset)  # without the noise of draws
        return summaries(self.draws_, x, offset, lambda eta: expected(self._family, eta, self.draws_).mean(0))

    def _mean(self, x: Array, offset: Array | None) -> Array:
        """Posterior means of the linear predictors of new observations, shape ``(m,)`` or ``(m, K)``."""
        found: Array = x @ (self.coef_ + getattr(self, "background_coef_", 0.0)).T + self.intercept_
        return found if offset is None else found + offset.reshape(found.shape)

    def _validated_new(self, x: ArrayLike, offset: ArrayLike | None) -> tuple[Array, Array | None]:
        """Features and offset of new observations, the latter of shape ``(m, K)``."""
        found = self._validated_features(x)
        return found, _checked_offset(offset, found.shape[0], self.draws_.intercept.shape[1], self._output_names())

    def _get_support_mask(self) -> NDArray[np.bool_]:
        check_is_fitted(self)
        return np.isin(self._group_of, self.select())

    def _selected_columns(self) -> NDArray[np.bool_]:
        """Which coefficients belong to selected features, bool; a feature of m levels has several."""
        return self._get_support_mask()[self._encode.feature_of]

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse, tags.target_tags.positive_only = self._takes_sparse, self._is_positive
        tags.target_tags.required = True
        return tags

    def _names(self) -> list[Any]:
        """Of the features, as scikit-learn calls those without names; columns may have numbers for names."""
        return self._labels or [f"x{j}" for j in range(self.n_features_in_)]

    def _output_names(self) -> list[Any]:
        """The names of several linear predictors, such as classes; none where there is one."""
        return [] if self._outputs is None else list(self._outputs[1])

    def _column_names(self) -> list[str]:
        """The names of the coefficients: of a feature with levels, one for each."""
        return self._encode.names(self._names())

    def _gate_names(self) -> list[str]:
        """Of features or groups, which have inclusion probabilities."""
        return self._names() if self.groups is None else [f"group {g}" for g in range(len(self.pip_))]


class SpikeSlabRegression(RegressorMixin, SpikeSlabEstimator):  # type: ignore[misc]
    """An estimator whose observations are numbers, so that they have means and quantiles."""

    def predict(
        self, X: ArrayLike, *, return_std: bool = False, offset: ArrayLike | None = None
    ) -> Array | tuple[Array, Array]:
        """Predict the posterior mean of new observations.

        Args:
            X: features, shape ``(m, p)``; a linear regression takes sparse ones, too.
            return_std: whether to return the standard deviation of a new observation, noise included, too.
            offset: known part of the linear predictors, in the shape of that of ``fit``; 0 by default, an exposure of
                one, also after a fit with one.

        Returns:
            The means, shape ``(m,)``, or ``(m, K)`` of several responses, and with ``return_std`` the standard
            deviations in the same shape.
        """
        new = self._validated_new(X, offset)
        mean = self._expected(*new)
        if not return_std:
            return mean
        around = (new[0], None) if self._family.is_location else new  # an offset only shifts them
        return mean, np.sqrt(summaries(self.draws_, *around, lambda eta: variances(self._family, eta, self.draws_)))

    def score(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None, *, offset: ArrayLike | None = None
    ) -> float:
        """The coefficient of determination of ``predict``; arguments are those of ``fit``."""
        return float(r2_score(y, self.predict(X, offset=offset), sample_weight=sample_weight))

    def predict_quantiles(
        self, X: ArrayLike, probs: float | Sequence[float] = (0.05, 0.5, 0.95), *, offset: ArrayLike | None = None
    ) -> Array:
        """Quantiles of new observations, their noise included: two of them are the ends of an interval.

        They are those of one observation for each of the 2,000 draws of the fit.

        Args:
            X: features, shape ``(m, p)``.
            probs: probabilities of the quantiles; .05 and .95 bound an interval of probability .9.
            offset: known part of the linear predictors, as for predictions.

        Returns:
            Shape ``(m, len(probs))``, or ``(m, K, len(probs))`` of several responses; without the last dimension for
            one probability.
        """
        new = self._validated_new(X, offset)
        rng = np.random.default_rng(0)

        def of_some(eta: Array) -> Array:
            drawn = replicated(self._family, eta, self.draws_, rng)
            found = np.quantile(drawn, probs, axis=0, method="inverted_cdf")
            return np.moveaxis(found, 0, -1) if np.ndim(probs) else found

        return summaries(self.draws_, *new, of_some)
