"""Quantiles, linear predictors and predictive averages of joint draws of sparse coefficients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from pyro_l0.selection.posterior import Draws

__all__ = ["averages", "linear_predictors", "quantiles", "rows_of"]

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


def averages(draws: Draws, x: Array, value: Callable[[Array], Array]) -> Array:
    """Averages over draws of a function of the linear predictors at features of m observations, shape ``(m, ...)``.

    The function takes ``(N, some observations, K)`` to ``(N, some observations, ...)``.
    """
    size = max(1, _AT_ONCE // draws.intercept.size)
    parts = (x[start : start + size] for start in range(0, len(x), size))
    return np.concatenate([value(linear_predictors(draws, part)).mean(0) for part in parts])


def rows_of(draws: Draws, rows: NDArray[np.intp]) -> Draws:
    """Some of the draws, in the order that is given."""
    return Draws(*(part[rows] for part in draws))


def linear_predictors(draws: Draws, x: Array) -> Array:
    """Linear predictors of every draw at features ``(m, p)``, shape ``(N, m, K)``."""
    outputs = draws.intercept.shape[1]
    by_output = (draws.coefficients[:, k::outputs] @ x.T for k in range(outputs))
    return np.stack(list(by_output), axis=2) + draws.intercept[:, None, :]
