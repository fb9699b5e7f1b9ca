"""Predictions of joint draws of sparse coefficients, and an estimator's posterior as arviz takes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, issparse
from scipy.special import betaln, expit, gammaln, log_expit, log_softmax

from pyro_l0.diagnostics.inference_data import inference_data
from pyro_l0.selection.problem import PARTIAL, Draws, Family

if TYPE_CHECKING:
    import arviz

__all__ = [
    "linear_predictors",
    "log_choices",
    "log_likelihood",
    "parts_of",
    "quantiles",
    "replicated",
    "rows_of",
    "summaries",
    "to_inference_data",
]

Array = NDArray[np.float64]

# Numbers that are held at once, 32 MB: draws times features, or draws times observations.
_AT_ONCE = 4_000_000
# Of the mean of counts, its logarithm: numpy draws up to 9.2e18, and far from the data a mean may be infinite.
_MOST_LOG = 43.0


def quantiles(coefficients: csr_array, probs: Sequence[float]) -> Array:
    """Quantiles of each column of sparse draws, shape ``(N, C)`` to ``(len(probs), C)``."""
    found = np.zeros((len(probs), coefficients.shape[1]))
    columns = coefficients.tocsc()
    # Most of thousands of columns are zeros, and need no work.
    filled = np.flatnonzero(np.diff(columns.indptr))
    width = max(1, _AT_ONCE // coefficients.shape[0])
    for start in range(0, len(filled), width):
        some = filled[start : start + width]
        found[:, some] = np.quantile(columns[:, some].toarray(), probs, axis=0)
    return found


def summaries(draws: Draws, x: Array, offset: Array | None, summary: Callable[[Array], Array]) -> Array:
    """A summary of the draws' linear predictors at features of m observations, shape ``(m, ...)``.

    It takes predictors of some of the observations, ``(N, some, K)``, to ``(some, ...)``. Offsets are of ``(m, K)``.
    """
    size = max(1, _AT_ONCE // draws.intercept.size)
    rows = (slice(start, start + size) for start in range(0, x.shape[0], size))
    parts = ((x[some], None if offset is None else offset[some]) for some in rows)
    return np.concatenate([summary(linear_predictors(draws, *part)) for part in parts])


def parts_of(draws: Draws, numbers: int) -> Iterator[Draws]:
    """The draws in parts, by how many numbers one of them needs."""
    size, every = max(1, _AT_ONCE // numbers), np.arange(len(draws.rate))
    return (rows_of(draws, rows) for rows in np.split(every, range(size, len(every), size)))


def rows_of(draws: Draws, rows: NDArray[np.intp]) -> Draws:
    """Some of the draws, in the order that is given."""
    learned = {name: values[rows] for name, values in draws.learned.items()}
    return Draws(**{name: getattr(draws, name)[rows] for name in Draws._fields[:-2]}, learned=learned)


def linear_predictors(draws: Draws, x: Array, offset: Array | None = None) -> Array:
    """Linear predictors of every draw at features ``(m, p)`` and offsets ``(m, K)``, shape ``(N, m, K)``."""
    outputs = draws.intercept.shape[1]
    by_output = (draws.coefficients[:, k::outputs] @ x.T for k in range(outputs))
    dense = (part.toarray() if issparse(part) else part for part in by_output)
    found = np.stack(list(dense), axis=2) + draws.intercept[:, None, :]
    return found if offset is None else found + offset


def to_inference_data(
    family: Family,
    draws: Draws,
    sample: dict[str, NDArray[Any]],
    active_probs: Array,
    x: Array,
    y: Array,
    names: Sequence[str],
    gates: Sequence[str],
    offset: Array | None = None,
    trials: Array | None = None,
) -> arviz.InferenceData:
    """Posterior draws, log likelihoods, replicated observations, the observations, and inclusion probabilities.

    A partial likelihood has neither log likelihoods nor replicated observations.

    The draws are in the units of the data; ``sample`` has the same by name. The gates' names are those of the features
    or of groups. Offsets have the shape ``(n, K)``; Bernoulli observations are successes where there are trials,
    shape ``(n,)``.
    """
    predictors = linear_predictors(draws, x, offset)
    posterior = {"z": sample["gates"], **{name: values for name, values in sample.items() if name != "gates"}}
    gate = "feature" if list(gates) == list(names) else "group"
    outputs = ["output"] if sample["coef"].ndim == 3 else []
    groups = {"posterior": {name: values[None] for name, values in posterior.items()}}
    if family in PARTIAL:
        observed = {"time": np.abs(y), "event": ~np.signbit(y)}
    else:
        new = replicated(family, predictors, draws, np.random.default_rng(0), trials)
        groups["log_likelihood"] = {"y": log_likelihood(family, predictors, y, draws, trials)[None]}
        groups["posterior_predictive"] = {"y": new[None]}
        observed = {"y": y}
    return inference_data(
        {**groups, "observed_data": observed, "constant_data": {"P(z != 0)": active_probs}},
        coords={"feature": list(names), gate: list(gates)},
        dims={
            "z": [gate],
            "coef": [*outputs, "feature"],
            "intercept": outputs,
            **{name: ["observation", "output"][: values.ndim] for name, values in observed.items()},
            "noise_scale": outputs[: sample.get("noise_scale", y).ndim - 1],
            "P(z != 0)": [gate],
        },
    )


def log_choices(successes: Array, trials: Array) -> Array:
    """Log binomial coefficients."""
    found: Array = gammaln(trials + 1) - gammaln(successes + 1) - gammaln(trials - successes + 1)
    return found


def log_likelihood(family: Family, predictors: Array, y: Array, draws: Draws, trials: Array | None = None) -> Array:
    """Log probability of each observation at each draw, shape ``(N, n)``, from predictors ``(N, n, K)``."""
    eta = predictors if family == "multivariate" else predictors[..., 0]
    found: Array
    if family == "categorical":
        found = log_softmax(predictors, axis=-1)[:, np.arange(len(y)), y.astype(int)]
    elif family in ("gaussian", "multivariate"):
        scale = draws.noise_scale[:, None]
        found = -0.5 * ((y - eta) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)
    elif trials is not None:
        found = y * eta + trials * log_expit(-eta) + log_choices(y, trials)
    elif family == "bernoulli":
        found = log_expit(np.where(y > 0, eta, -eta))
    elif family == "negative_binomial":
        alpha = draws.learned["dispersion"][:, None]
        odds = eta + np.log(alpha)
        choices = -betaln(y + 1, 1 / alpha) - np.log(y + 1 / alpha)
        found = choices + y * log_expit(odds) + log_expit(-odds) / alpha
    elif family == "ordinal":
        cuts = np.pad(draws.learned["thresholds"], ((0, 0), (1, 1)), constant_values=((0, 0), (-np.inf, np.inf)))
        lower, upper = (cuts[:, y.astype(int) + i] - eta for i in (0, 1))
        found = log_expit(upper) + log_expit(-lower) + np.log(-np.expm1(lower - upper))
    elif family == "student":
        degrees, scale = draws.learned["degrees_of_freedom"][:, None], draws.noise_scale[:, None]
        constant = gammaln((degrees + 1) / 2) - gammaln(degrees / 2) - 0.5 * np.log(degrees * np.pi) - np.log(scale)
        found = constant - (degrees + 1) / 2 * np.log1p(((y - eta) / scale) ** 2 / degrees)
    else:
        found = y * eta - np.exp(eta) - gammaln(y + 1)
    return found


def replicated(
    family: Family, predictors: Array, draws: Draws, rng: np.random.Generator, trials: Array | None = None
) -> Array:
    """New observations at the same features, one set for each draw, shape ``(N, n)``."""
    eta = predictors if family == "multivariate" else predictors[..., 0]
    if family == "categorical":
        # The largest of the predictors with Gumbel noise has the probabilities of the softmax.
        found = np.argmax(predictors + rng.gumbel(size=predictors.shape), axis=-1)
    elif family in ("gaussian", "multivariate"):
        found = eta + draws.noise_scale[:, None] * rng.standard_normal(eta.shape)
    elif trials is not None:
        found = rng.binomial(np.rint(trials).astype(np.int64), expit(eta))
    elif family == "bernoulli":
        found = rng.random(eta.shape) < expit(eta)
    elif family == "negative_binomial":
        alpha = np.broadcast_to(draws.learned["dispersion"][:, None], eta.shape)
        mean = np.exp(np.minimum(eta, _MOST_LOG)) * alpha * rng.gamma(1 / alpha)
        found = rng.poisson(np.minimum(mean, math.exp(_MOST_LOG)))
    elif family == "ordinal":
        latent = eta + rng.logistic(size=eta.shape)
        found = np.stack([latent > cut[:, None] for cut in draws.learned["thresholds"].T]).sum(0)
    elif family == "student":
        noise = rng.standard_t(draws.learned["degrees_of_freedom"][:, None], size=eta.shape)
        found = eta + draws.noise_scale[:, None] * noise
    else:
        found = rng.poisson(np.exp(np.minimum(eta, _MOST_LOG)))
    return np.asarray(found, dtype=np.float64)
