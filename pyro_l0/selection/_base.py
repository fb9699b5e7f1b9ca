"""What the estimators share: how they are fitted, and what they say of their coefficients."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import SelectorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from pyro_l0.selection._inference_data import to_inference_data
from pyro_l0.selection._parameters import check_parameters, seed_of
from pyro_l0.selection._predictive import quantiles, rows_of
from pyro_l0.selection.credible_sets import CredibleSet, credible_sets, open_gates
from pyro_l0.selection.design import Design, make_design
from pyro_l0.selection.methods import find_posterior
from pyro_l0.selection.posterior import Draws, SelectionPosterior
from pyro_l0.selection.problem import Family

if TYPE_CHECKING:
    import arviz
    import pandas

__all__ = ["SpikeSlabEstimator"]

Array = NDArray[np.float64]
RandomState = int | np.random.RandomState | None

# Joint draws that are kept: the probability of a credible set has a standard error of .005 then.
_DRAWS = 2000
# Those that are handed to arviz: log likelihoods take room for each of them and each observation.
_FOR_ARVIZ = 1000
# Standard error of an inclusion probability, beyond which the sampler is said to have failed.
_UNSURE = 0.05


class SpikeSlabEstimator(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    """A regression with spike-and-slab coefficients; see :class:`SpikeSlabRegressor` for parameters and attributes."""

    n_features_in_: int
    pip_: Array
    coef_: Array
    coef_sd_: Array
    draws_: Draws

    def __init__(
        self,
        *,
        rate: float | None = None,
        expected_size: float | None = None,
        slab_scale: float | None = None,
        standardize: bool = True,
        fit_intercept: bool = True,
        method: str = "auto",
        random_state: RandomState = None,
    ) -> None:
        self.rate = rate
        self.expected_size = expected_size
        self.slab_scale = slab_scale
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.method = method
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
        """Find the posterior of the coefficients.

        Args:
            X: features, shape ``(n, p)``, at least two observations.
            y: observations, shape ``(n,)``.

        Returns:
            The estimator.

        Raises:
            ValueError: a parameter, or the data, is not what it may be.

        Warns:
            ConvergenceWarning: the sampler's chains disagree about an inclusion probability, whose standard error is
                more than .05.
        """
        check_parameters(type(self).__name__, self.get_params(deep=False))
        x, target = self._validated(X, y)
        design = make_design(
            x, target, self._family(), **self._priors(), standardize=self.standardize, fit_intercept=self.fit_intercept
        )
        seed = seed_of(self.random_state)
        posterior, self.method_ = find_posterior(design.problem, self.method, draws=_DRAWS, seed=seed)
        self._warn_of_chains(posterior.standard_error)
        self._keep(design, posterior, seed)
        self._data = x, target
        self.credible_sets_: list[CredibleSet] = credible_sets(
            open_gates(self.draws_.coefficients, x.shape[1]), self.pip_, x, names=self._names()
        )
        return self

    def select(self, fdr: float = 0.1) -> NDArray[np.intp]:
        """The largest set of features that probably have an effect, and of which few are expected not to.

        It has the features of the largest inclusion probabilities above one half, as many as keep the mean of 1 - PIP
        at most ``fdr``; of equal ones, those of the smaller index come first. Without the bound of one half, some
        features that are certain would make room for others that are more likely to be without effect than not.

        Args:
            fdr: share of the selected features that may have no effect, in the mean over the posterior.

        Returns:
            Their indices in increasing order; empty if there is no such set.

        Raises:
            ValueError: ``fdr`` is not between 0 and 1.
        """
        check_is_fitted(self)
        if not 0 <= fdr <= 1:
            raise ValueError(f"Expected fdr to be between 0 and 1, but got {fdr!r}.")
        order = np.argsort(-self.pip_, kind="stable")
        false = np.cumsum(1 - self.pip_[order]) / np.arange(1, len(order) + 1)
        # The means increase with the size of the set, as 1 - PIP does.
        size = min(np.searchsorted(false, fdr, side="right"), np.count_nonzero(self.pip_ > 0.5))
        return np.sort(order[:size])

    def sample(self, n: int = 1000) -> dict[str, NDArray[Any]]:
        """Joint draws from the posterior, in the units of the data.

        They are taken from the draws that the fit has made, in order while these suffice, and at random after that. The
        same call gives the same draws.

        Args:
            n: how many.

        Returns:
            By name: ``coef``, shape ``(n, *coef_.shape)``, in which the coefficients of closed gates are exactly 0;
            ``gates``, bool, shape ``(n, p)``; ``intercept``, shape ``(n, *intercept_.shape)``; ``slab_scale``, ``rate``
            and, where the family has noise, ``noise_scale``, shape ``(n,)`` each.

        Raises:
            ValueError: n is not a positive integer.
        """
        check_is_fitted(self)
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise ValueError(f"Expected n to be a positive integer, but got {n!r}.")
        kept = len(self.draws_.rate)
        more = np.random.default_rng(kept).integers(kept, size=max(0, n - kept))
        draws = rows_of(self.draws_, np.concatenate([np.arange(min(n, kept)), more]))
        found = {
            "coef": self._as_coef(draws.coefficients.toarray()),
            "gates": open_gates(draws.coefficients, self.n_features_in_),
            "intercept": self._as_intercept(draws.intercept),
            "slab_scale": draws.slab_scale,
            "rate": draws.rate,
        }
        return found if np.isnan(draws.noise_scale).any() else {**found, "noise_scale": draws.noise_scale}

    def interval(self, level: float = 0.9) -> Array:
        """Central intervals of the coefficients, atoms at zero included.

        Args:
            level: posterior probability that an interval has at least; .9 is from the 5 % to the 95 % quantile.

        Returns:
            Lower and upper ends, shape ``(*coef_.shape, 2)``.

        Raises:
            ValueError: the level is not between 0 and 1.
        """
        check_is_fitted(self)
        if not 0 < level < 1:
            raise ValueError(f"Expected level to be between 0 and 1, but got {level!r}.")
        ends = quantiles(self.draws_.coefficients, ((1 - level) / 2, (1 + level) / 2))
        return np.moveaxis(self._as_coef(ends), 0, -1)

    def summary(self) -> pandas.DataFrame:
        """A row for each feature, or for each feature and class, in the order of the features.

        Its columns are the inclusion probability, and the mean, the standard deviation, the 5 % and the 95 % quantile
        of the coefficient.
        """
        import pandas

        check_is_fitted(self)
        lower, upper = np.moveaxis(self.interval(0.9), -1, 0)
        per_feature = {"mean": self.coef_, "sd": self.coef_sd_, "5 %": lower, "95 %": upper}
        columns = {name: np.atleast_2d(values).T.ravel() for name, values in per_feature.items()}
        rows = self._rows()
        return pandas.DataFrame({"PIP": np.repeat(self.pip_, len(rows) // len(self.pip_)), **columns}, index=rows)

    def to_arviz(self) -> arviz.InferenceData:
        """The fit as arviz's ``InferenceData``, with the data that it was fitted to.

        Its posterior has the gates ``z``, the coefficients ``coef``, the intercept, the scales and the rate, as
        ``sample`` gives them; slabs of closed gates, which have no part in the model, are not drawn. There are log
        likelihoods and replicated observations ``y``, in which classes are numbered in the order of ``classes_``, and
        the inclusion probabilities ``P(z != 0)`` as constant data.
        """
        check_is_fitted(self)
        draws = rows_of(self.draws_, np.arange(min(len(self.draws_.rate), _FOR_ARVIZ)))
        sample = self.sample(len(draws.rate))
        return to_inference_data(self._family(), draws, sample, self.pip_, *self._data, self._names())

    def _warn_of_chains(self, standard_error: Array | None) -> None:
        """Say which inclusion probability is the least certain, if it is too uncertain to be used."""
        if standard_error is None or standard_error.max() <= _UNSURE:
            return
        worst = int(standard_error.argmax())
        unsure = int((standard_error > _UNSURE).sum())
        warnings.warn(
            f"The sampler's chains disagree: the inclusion probability of feature {self._names()[worst]!r} has a "
            f"standard error of {standard_error[worst]:.2f}, and {unsure} of {len(standard_error)} have one of more "
            f"than {_UNSURE}. Do not use this fit before another random_state agrees with it. Up to 20 features, "
            "method='enumerate' has no such error; otherwise a given expected_size, fewer copies of the same feature, "
            "or fewer features help.",
            ConvergenceWarning,
            stacklevel=3,
        )

    def _keep(self, design: Design, found: SelectionPosterior, seed: int) -> None:
        """Take a posterior of the problem over, in the units of the data."""
        raw = design.posterior(found, seed)
        self.pip_, self.draws_, self.log_evidence_ = raw.inclusion, raw.draws, raw.log_evidence
        self.coef_, self.coef_sd_ = (self._as_coef(part.reshape(1, -1))[0] for part in (raw.mean, raw.sd))
        # The problem's own intercept is zero where a flat one was integrated out: then the mean has no sampling error.
        intercept = found.draws.intercept.mean(0) + design.offset - design.centre @ raw.mean
        self.intercept_ = self._as_intercept(intercept[None])[0]
        for name in ("slab_scale", "noise_scale", "rate"):
            values, known = getattr(raw.draws, name), getattr(design.problem.prior, name)
            if not np.isnan(values).any():
                setattr(self, f"{name}_", known if isinstance(known, float) else float(values.mean()))

    @abstractmethod
    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        """Features and observations as numbers; attributes of the data are set."""

    @abstractmethod
    def _family(self) -> Family:
        """The distribution of y, after it was validated."""

    def _as_coef(self, values: Array) -> Array:
        """Coefficients of draws, shape ``(N, p K)``, in the shape ``(N, *coef_.shape)``."""
        return np.moveaxis(values.reshape(len(values), self.n_features_in_, -1), 1, 2)

    def _as_intercept(self, values: Array) -> Array:
        """Intercepts of draws, shape ``(N, K)``, in the shape ``(N, *intercept_.shape)``."""
        return values

    def _rows(self) -> pandas.Index:
        """What the rows of the summary are called."""
        import pandas

        return pandas.Index(self._names(), name="feature")

    def _priors(self) -> dict[str, float | None]:
        """What is known of the hyperparameters."""
        return {"rate": self.rate, "expected_size": self.expected_size, "slab_scale": self.slab_scale}

    def _validated_features(self, x: ArrayLike) -> Array:
        """Features of new observations."""
        check_is_fitted(self)
        found: Array = validate_data(self, x, dtype=np.float64, reset=False)
        return found

    def _get_support_mask(self) -> NDArray[np.bool_]:
        check_is_fitted(self)
        mask = np.zeros(self.n_features_in_, dtype=bool)
        mask[self.select()] = True
        return mask

    def _names(self) -> list[str]:
        """Of the features, as scikit-learn calls those without names."""
        return list(getattr(self, "feature_names_in_", [f"x{j}" for j in range(self.n_features_in_)]))
