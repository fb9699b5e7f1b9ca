"""Predictions of joint draws of sparse coefficients, and an estimator's posterior as arviz takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, issparse

from pyro_l0.diagnostics.inference_data import inference_data
from pyro_l0.selection.families.family import Family
from pyro_l0.selection.families.likelihood import shaped
from pyro_l0.selection.problem import Draws

if TYPE_CHECKING:
    import arviz

__all__ = [
    "expected",
    "linear_predictors",
    "log_likelihood",
    "parts_of",
    "quantiles",
    "replicated",
    "summaries",
    "to_inference_data",
    "variances",
]

Array = NDArray[np.float64]

# Numbers that are held at once, 32 MB: draws times features, or draws times observations.
_AT_ONCE = 4_000_000


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
    return (draws.rows(rows) for rows in np.split(every, range(size, len(every), size)))


def linear_predictors(draws: Draws, x: Array, offset: Array | None = None) -> Array:
    """Linear predictors of every draw at features ``(m, p)`` and offsets ``(m, K)``, shape ``(N, m, K)``."""
    outputs = draws.intercept.shape[1]
    by_output = (draws.coefficients[:, k::outputs] @ x.T for k in range(outputs))
    dense = (part.toarray() if issparse(part) else part for part in by_output)
    found = np.stack(list(dense), axis=2) + draws.intercept[:, None, :]
    if draws.background is not None:
        found += (draws.background @ x.T)[:, :, None]
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
) -> arviz.InferenceData:
    """Posterior draws, log likelihoods, replicated observations, the observations, and inclusion probabilities.

    A partial likelihood has neither log likelihoods nor replicated observations.

    The draws are in the units of the data; ``sample`` has the same by name. The gates' names are those of the features
    or of groups. Offsets have the shape ``(n, K)``.
    """
    predictors = linear_predictors(draws, x, offset)
    posterior = {"z": sample["gates"], **{name: values for name, values in sample.items() if name != "gates"}}
    gate = "feature" if list(gates) == list(names) else "group"
    outputs = ["output"] if sample["coef"].ndim == 3 else []
    groups: dict[str, dict[str, Any]] = {"posterior": {name: values[None] for name, values in posterior.items()}}
    observed = dict(family.observed(y))
    if not family.is_partial:
        new = replicated(family, predictors, draws, np.random.default_rng(0))
        groups["log_likelihood"] = {"y": log_likelihood(family, predictors, y, draws)[None]}
        groups["posterior_predictive"] = {"y": new[None]}
    return inference_data(
        {**groups, "observed_data": observed, "constant_data": {"P(z != 0)": active_probs}},
        coords={"feature": list(names), gate: list(gates)},
        dims={
            "z": [gate],
            "coef": [*outputs, "feature"],
            "background": ["feature"],
            "intercept": outputs,
            **{name: ["observation", "output"][: values.ndim] for name, values in observed.items()},
            "noise_scale": outputs[: sample.get("noise_scale", y).ndim - 1],
            "P(z != 0)": [gate],
        },
    )


def log_likelihood(family: Family, predictors: Array, y: Array, draws: Draws) -> Array:
    """Log probability of each observation at each draw, shape ``(N, n)``, from predictors ``(N, n, K)``."""
    tensors = {name: torch.from_numpy(value) for name, value in _parameters(family, draws).items()}
    eta = torch.from_numpy(predictors if family.has_outputs else predictors[..., 0])
    found: Array = family.log_prob(torch.from_numpy(y), eta, **tensors).numpy()
    return found


def replicated(family: Family, predictors: Array, draws: Draws, random: np.random.Generator) -> Array:
    """New observations at the same features, one set for each draw, shape ``(N, n)``, or ``(N, n, K)`` of responses."""
    eta = predictors if family.has_outputs else predictors[..., 0]
    return np.asarray(family.sample(eta, random, **_parameters(family, draws)), dtype=np.float64)


def expected(family: Family, predictors: Array, draws: Draws) -> Array:
    """Means of new observations at each draw, shape ``(N, n)``, or ``(N, n, K)`` of responses or classes."""
    eta = predictors if family.has_outputs else predictors[..., 0]
    return family.mean(eta, **_parameters(family, draws))


def variances(family: Family, predictors: Array, draws: Draws) -> Array:
    """Of a new observation over all draws, shape ``(n,)`` or ``(n, K)``, from predictors ``(N, n, K)``."""
    eta, parameters = predictors if family.has_outputs else predictors[..., 0], _parameters(family, draws)
    own = family.variance(eta, **parameters)
    if own is None:
        return np.asarray(replicated(family, predictors, draws, np.random.default_rng(0)).var(0))
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = own.mean(0) + family.mean(eta, **parameters).var(0)
    return found


def _parameters(family: Family, draws: Draws) -> dict[str, Array]:
    """The family's own, as it takes them."""
    noise = {} if np.isnan(draws.noise_scale).any() else {"noise_scale": draws.noise_scale}
    return shaped(family, {**noise, **draws.learned})
