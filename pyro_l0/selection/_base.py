"""What the estimators share: how they are fitted, and what they say of their coefficients."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from pyro_l0.diagnostics import to_arviz
from pyro_l0.selection._parameters import check_parameters, seed_of
from pyro_l0.selection._predictive import quantiles, rows_of
from pyro_l0.selection.credible_sets import CredibleSet, credible_sets, open_gates
from pyro_l0.selection.design import Design
from pyro_l0.selection.methods import find_posterior
from pyro_l0.selection.posterior import Draws
from pyro_l0.selection.problem import Family

if TYPE_CHECKING:
    import arviz
    import pandas

__all__ = ["SpikeSlabEstimator"]

Array = NDArray[np.float64]
RandomState = int | np.random.RandomState | None

# Joint draws that are kept: the probability of a credible set has a standard error of .005 then.
_DRAWS = 2000


class SpikeSlabEstimator(SelectorMixin, BaseEstimator):  # type: ignore[misc]
    """A regression with spike-and-slab coefficients; see :class:`SpikeSlabRegressor` for parameters and attributes."""

    rate: float | None
    expected_size: float | None
    slab_scale: float | None
    standardize: bool
    fit_intercept: bool
    method: str
    random_state: RandomState

    n_features_in_: int
    pip_: Array
    draws_: Draws

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
        """Find the posterior of the coefficients.

        Args:
            X: features, shape ``(n, p)``, at least two observations.
            y: observations, shape ``(n,)``.

        Returns:
            The estimator.

        Raises:
            ValueError: a parameter, or the data, is not what it may be.
        """
        check_parameters(type(self).__name__, self.get_params(deep=False))
        x, target = self._validated(X, y)
        design = Design.of(x, target, **self._design_options())
        posterior, self.method_ = find_posterior(
            design.problem, self.method, draws=_DRAWS, seed=seed_of(self.random_state)
        )
        self._keep(design.raw(posterior))
        self._data = x, target
        self.credible_sets_: list[CredibleSet] = credible_sets(
            open_gates(self.draws_.coefficients, x.shape[1]), self.pip_, x, names=self._names()
        )
        return self

    def select(self, fdr: float = 0.05) -> NDArray[np.intp]:
        """The largest set of features whose expected share of false discoveries is small.

        It has the features of the largest inclusion probabilities, as many as keep the mean of 1 - PIP at most ``fdr``;
        of equal ones, those of the smaller index come first.

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
        return np.sort(order[: np.searchsorted(false, fdr, side="right")])

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
        """The fit as arviz's ``InferenceData``; see :func:`pyro_l0.diagnostics.to_arviz`."""
        check_is_fitted(self)
        return to_arviz(self)

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

    def _design_options(self) -> dict[str, Any]:
        names = ("rate", "expected_size", "slab_scale", "standardize", "fit_intercept")
        return {"family": self._family(), **{name: getattr(self, name) for name in names}}

    def _validated_features(self, x: ArrayLike) -> Array:
        """Features of new observations."""
        check_is_fitted(self)
        found: Array = validate_data(self, x, dtype=np.float64, reset=False)
        return found

    def _get_support_mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.n_features_in_, dtype=bool)
        mask[self.select()] = True
        return mask

    def _names(self) -> list[str]:
        """Of the features, as scikit-learn calls those without names."""
        return list(getattr(self, "feature_names_in_", [f"x{j}" for j in range(self.n_features_in_)]))
