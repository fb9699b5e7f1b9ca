"""Regressions of further responses with spike-and-slab coefficients."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import Tags
from sklearn.utils._param_validation import StrOptions
from sklearn.utils.validation import check_consistent_length

from pyro_l0.selection.estimator import Array, RandomState, SpikeSlabEstimator
from pyro_l0.selection.methods.likelihoods import CoxLikelihood
from pyro_l0.selection.predictive import linear_predictors, parts_of
from pyro_l0.selection.problem import Family

__all__ = ["SpikeSlabCox"]


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
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(100, 4))
        >>> time = rng.exponential(np.exp(-x[:, 2]))
        >>> y = np.rec.fromarrays([time < 2, np.minimum(time, 2)], names="event,time")
        >>> model = SpikeSlabCox(random_state=0).fit(x, y)
        >>> model.select(), model.predict_survival(x[:3], [0.5, 1.0]).shape
        (array([2]), (3, 2))
    """

    _parameter_constraints: ClassVar[dict[str, list[object]]] = {
        **SpikeSlabEstimator._parameter_constraints,
        "ties": [StrOptions({"breslow", "efron"})],
    }

    def __init__(
        self,
        *,
        ties: str = "efron",
        rate: float | None = None,
        expected_size: float | None = None,
        slab_scale: float | None = None,
        standardize: bool = True,
        method: str = "auto",
        groups: ArrayLike | None = None,
        random_state: RandomState = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            rate=rate,
            expected_size=expected_size,
            slab_scale=slab_scale,
            standardize=standardize,
            method=method,
            groups=groups,
            random_state=random_state,
            verbose=verbose,
        )
        self.ties = ties

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # type: ignore[override]  # noqa: N803
        """Find the posterior of the coefficients.

        Args:
            X: features, shape ``(n, p)``, as for the other estimators.
            y: a structured array of events and times, or times, shape ``(n,)``. Repeat rows instead of weights.

        Returns:
            The estimator.

        Raises:
            ValueError: a parameter or the data are out of range, or all observations are censored.

        Warns:
            UserWarning, ConvergenceWarning: as the other estimators do.
        """
        return super().fit(X, y)

    def predict(self, X: ArrayLike) -> Array:  # noqa: N803
        """Predict the log risk: the posterior mean of X beta, less that at the means of the features.

        Args:
            X: features, shape ``(m, p)``.

        Returns:
            Shape ``(m,)``; larger where events come sooner.
        """
        found: Array = self._validated_features(X) @ self.coef_ + self.intercept_
        return found

    def predict_survival(self, X: ArrayLike, times: ArrayLike) -> Array:  # noqa: N803
        """Predict the probability that the event has not happened, averaged over the posterior.

        The cumulative hazard is Breslow's estimate, or Efron's with his ties, at each draw of the coefficients. After
        the last event it does not rise any more.

        Args:
            X: features, shape ``(m, p)``.
            times: when, shape ``(T,)``.

        Returns:
            Shape ``(m, T)``.
        """
        x = self._validated_features(X)
        at = np.asarray(times, dtype=np.float64)
        if at.ndim != 1 or np.isnan(at).any():
            raise ValueError(f"Expected times of shape (T,) without NaN, but got {times!r}; pass a list of numbers.")
        old, y = self._data[:2]
        likelihood = CoxLikelihood(torch.from_numpy(np.abs(y)), torch.from_numpy(~np.signbit(y)), self.ties == "efron")
        before = np.searchsorted(likelihood.times.numpy()[::-1], at, side="right")
        total = np.zeros((len(x), len(at)))
        for draws in parts_of(self.draws_, max(len(y), total.size)):
            hazard = (-likelihood.log_totals(torch.from_numpy(linear_predictors(draws, old)))).exp().numpy()
            cumulative = np.pad(hazard[:, ::-1].cumsum(1), ((0, 0), (1, 0)))[:, before]
            with np.errstate(divide="ignore", over="ignore"):
                total += np.exp(-np.exp(linear_predictors(draws, x) + np.log(cumulative)[:, None])).sum(0)
        return total / len(self.draws_.rate)

    def score(self, X: ArrayLike, y: ArrayLike) -> float:  # noqa: N803
        """Harrell's concordance: how often the one of two whose event came first has the larger predicted risk.

        Args:
            X: features, shape ``(m, p)``.
            y: events and times, as for ``fit``.

        Returns:
            Between 0 and 1; equal risks count one half.
        """
        risk = self.predict(X)
        time, event = _times_and_events(y)
        check_consistent_length(risk, time)
        right = pairs = 0.0
        for i in np.flatnonzero(event):
            later = risk[(time > time[i]) | (~event & (time == time[i]))]
            right += np.count_nonzero(later < risk[i]) + 0.5 * np.count_nonzero(later == risk[i])
            pairs += len(later)
        if not pairs:
            raise ValueError("Expected an event before another observation's time, but there is none; pass more rows.")
        return right / pairs

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: RandomState = 0) -> NDArray[Any]:  # noqa: N803
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
        return found, np.copysign(time, event - 0.5)

    def _family(self) -> Family:
        return "efron" if self.ties == "efron" else "breslow"

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = tags.target_tags.positive_only = True
        return tags


def _times_and_events(y: ArrayLike) -> tuple[Any, NDArray[np.bool_]]:
    """The fields of a structured array, or times as they are and an event for each."""
    found = np.asarray(y)
    names = found.dtype.names
    if names is None:
        return y, np.ones(found.shape[:1], dtype=bool)
    kinds = {"event" if found.dtype[name].kind == "b" else "time": found[name] for name in names}
    if len(names) != 2 or len(kinds) != 2:
        raise ValueError(
            f"Expected y to have a field of type bool, for the events, and one of times, but got {found.dtype}; make "
            "it by np.rec.fromarrays([event, time], names='event,time')."
        )
    return kinds["time"], kinds["event"]
