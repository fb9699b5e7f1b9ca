"""Summary statistics in place of data: observations that have given moments, and z-scores that fit correlations."""

from __future__ import annotations

import warnings
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_array

from pyro_l0.expect import expect

__all__ = ["Observations", "checked_means", "of_moments", "of_z_scores"]

Array = NDArray[np.float64]

# Relative size up to which an eigenvalue or a sum of squares is negative by rounding.
_ROUNDING = 1e-6
# Shares s in (1 - s) R + s I among which that of z-scores is sought, and variances t of effects, times n / p: with more
# than n / p these would explain more than the variance of y.
_SHARES = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 41)])
_EFFECTS = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 21)])[:, None]
_LEAST_VARIANCE = 1e-8
# By how many nats some share has to fit better than none, or one switched sign better than the given one. Where the
# correlations were right, these were up to 6 and 10 in simulations. Lower shares are from rounded correlations.
_MISFIT, _SWITCHED, _NOTABLE = 10.0, 16.0, 0.005
# Nats and standard errors from which a sign is named, as by Zou et al. (2022).
_SUSPECT, _LARGE = 2.0, 2.0


class Observations(NamedTuple):
    """Observations, each of the same weight, whose means are 0 and whose moments were given."""

    x: Array  # shape (m, p)
    y: Array  # shape (m,)
    names: list[Any] | None  # of the features

    @property
    def table(self) -> Any:
        """The features, with their names if they have any."""
        if self.names is None:
            return self.x
        import pandas

        return pandas.DataFrame(self.x, columns=self.names)


class _Correlations(NamedTuple):
    """A correlation matrix V diag(lambda) V'."""

    values: Array  # lambda, increasing
    vectors: Array  # V

    def observations(self, deviations: Array, crossed: Array, least: float = 0.0) -> tuple[Array, Array, float]:
        """X and y of p + 2 observations, and the mean square that y has apart from X, in y at least some.

        The columns have mean 0, these correlations with one another, the correlations ``crossed`` with y, and the given
        deviations; that of y is 1. The rows are those of diag(lambda)^1/2 V', one for the rest of y, and one of zeros,
        which a reflection takes to the direction of equal numbers, so that no other row has a part of this.
        """
        p, m = len(self.values), len(self.values) + 2
        # Raising the smallest eigenvalues leaves X'y as it is, and changes X'X by rounding.
        root = np.sqrt(self.values.clip(min=10 * p * np.finfo(np.float64).eps * self.values[-1]))
        rows = np.zeros((m, p + 1))
        rows[:p, :p] = root[:, None] * self.vectors.T * deviations
        rows[:p, p] = self.vectors.T @ crossed / root
        rest = 1 - float(rows[:p, p] @ rows[:p, p])
        rows[p, p] = np.sqrt(max(rest, least))
        normal = np.full(m, -1 / np.sqrt(m))
        normal[-1] += 1
        rows -= np.outer(normal, 2 / (normal @ normal) * (normal @ rows))
        rows *= np.sqrt(m)
        return rows[:, :p], rows[:, p], rest


def of_moments(square_x: ArrayLike, crossed: ArrayLike, square_y: float, n: float) -> Observations:
    """Observations with given X'X, X'y, y'y and number, if there can be any."""
    expect(Real, "a number", yty=square_y, n=n)
    matrix, vector, names = _aligned(square_x, crossed, n, "XtX", "Xty")
    diagonal = matrix.diagonal()
    if (diagonal < 0).any() or square_y <= 0:
        raise ValueError(
            f"Expected sums of squares that are not negative in XtX and a positive yty, but got {diagonal.min():.6g} "
            f"and {square_y:.6g}; pass X.T @ X and y @ y."
        )
    deviations = np.sqrt(diagonal)
    divisor = np.where(deviations > 0, deviations, 1.0)
    correlations = _Correlations(*np.linalg.eigh(matrix / np.outer(divisor, divisor)))
    least = correlations.values[0] / correlations.values[-1]
    x, y, rest = correlations.observations(deviations / np.sqrt(n), vector / divisor / np.sqrt(square_y))
    if least < -_ROUNDING or rest < -_ROUNDING:
        wrong = (
            f"XtX has a negative eigenvalue, {least:.2g} of the largest with features scaled to correlations"
            if least < -_ROUNDING
            else f"y @ y would be {1 - rest:.6g} times yty, or more, to go with Xty"
        )
        raise ValueError(
            f"Expected the moments of one set of observations in double precision, but no data have these: {wrong}. "
            "Take all of the same rows, centred or not, with missing values left out by rows."
        )
    return Observations(x, y * np.sqrt(square_y / n), names)


def checked_means(means: ArrayLike, rows: Observations) -> Array:
    """Those of the features of observations, shape ``(p,)``."""
    _refuse_another_order(means, rows.names, "XtX", "X_mean")
    found = np.asarray(means, dtype=np.float64)
    if found.shape != rows.x.shape[1:]:
        raise ValueError(f"Expected X_mean of shape {rows.x.shape[1:]}, one for each feature, but got {found.shape}.")
    return found


def of_z_scores(z: ArrayLike, correlation: ArrayLike, n: float) -> Observations:
    """Standardised observations with given correlations and t statistics of regressions on single features.

    Where these do not fit, the correlations are shrunk, with a warning.
    """
    expect(Real, "a number", n=n)
    matrix, scores, names = _aligned(correlation, z, n, "R", "z")
    if np.abs(matrix.diagonal() - 1).max() > 1e-3:
        raise ValueError(
            f"Expected R to be a correlation matrix, with ones on its diagonal, but got {matrix.diagonal().min():.4g} "
            f"to {matrix.diagonal().max():.4g}; pass covariances to from_moments."
        )
    crossed = scores / np.sqrt(scores**2 + n - 2)
    correlations = _Correlations(*np.linalg.eigh(matrix))
    share = _misfit(correlations, crossed * np.sqrt(n - 1), n, names)
    if share:
        correlations = _Correlations((1 - share) * correlations.values.clip(min=0) + share, correlations.vectors)
    # Where they did not fit, effects may explain more than y, whose variance the noise then has.
    x, y, _ = correlations.observations(np.ones(len(crossed)), crossed, least=float(share >= _NOTABLE))
    return Observations(x, y, names)


def _aligned(
    matrix: Any, vector: Any, n: float, of_matrix: str, of_vector: str
) -> tuple[Array, Array, list[Any] | None]:
    """A symmetric matrix and a vector of the same features, and the names of these if the matrix has any."""
    names = list(matrix.columns) if hasattr(matrix, "columns") else None
    square = check_array(matrix, dtype=np.float64, input_name=of_matrix)
    numbers = check_array(vector, dtype=np.float64, ensure_2d=False, input_name=of_vector)
    if numbers.ndim != 1 or square.shape != (len(numbers), len(numbers)):
        raise ValueError(
            f"Expected {of_matrix} of shape (p, p) and {of_vector} of shape (p,), but got {square.shape} and "
            f"{numbers.shape}."
        )
    if np.abs(square - square.T).max() > _ROUNDING * np.abs(square).max():
        raise ValueError(f"Expected {of_matrix} to be symmetric, but it is not; fill in both triangles.")
    _refuse_another_order(vector, names, of_matrix, of_vector)
    if n <= 2:
        raise ValueError(f"Expected n, the number of observations, to be above 2, but got {n!r}.")
    return square, numbers, names


def _refuse_another_order(vector: Any, names: list[Any] | None, of_matrix: str, of_vector: str) -> None:
    index = list(vector.index) if hasattr(vector, "iloc") else None
    if names and index and names != index and set(names) == set(index):
        raise ValueError(
            f"Expected {of_vector} in the order of {of_matrix}, but its names are in another; reorder it by "
            f"{of_vector}[{of_matrix}.columns]."
        )


def _misfit(correlations: _Correlations, z: Array, n: float, names: list[Any] | None) -> float:
    """The share s by which z-scores make R (1 - s) R + s I, 0 where they fit; a warning where it is not tiny.

    Along the eigenvectors z-scores are independent, N(0, (1 - s) lambda + s + t lambda^2), with independent effects of
    variance t: large effects, which are along large eigenvalues, do not count as a misfit. The s to shrink by is the
    likeliest without them. A sign is suspect where the conditional distribution of one z-score given the others makes
    the other sign more probable.

    References:
        Zou et al. (2022), PLoS Genetics 18(7): e1010299, for s and for switched signs, where t is 0.
    """
    values, vectors = correlations
    along = vectors.T @ z

    def variances(share: float) -> Array:
        found: Array = (1 - share) * values + share + n / len(z) * _EFFECTS * values**2
        return found.clip(min=_LEAST_VARIANCE)

    fits = np.array([-0.5 * (np.log(v) + along**2 / v).sum(1) for v in map(variances, _SHARES)])
    best, effects = np.unravel_index(fits.argmax(), fits.shape)
    variance = variances(_SHARES[best])[effects]
    precision = (vectors**2 / variance).sum(1)
    apart = vectors @ (along / variance) / precision  # of each from what the others predict
    switched = np.where(np.abs(z) > _LARGE, -2 * z * (z - apart) * precision, -np.inf)
    share = float(_SHARES[fits[:, 0].argmax()])
    if fits.max() - fits[0].max() <= _MISFIT and switched.max() <= _SWITCHED:
        return 0.0
    if share >= _NOTABLE or switched.max() > _SWITCHED:
        suspect = switched > _SUSPECT
        worst = np.argsort(-np.where(suspect, switched, -np.inf) if suspect.any() else -np.abs(apart) * precision**0.5)
        shown = worst[: min(5, int(suspect.sum()) or 5)]
        called = ", ".join(repr(names[j]) if names else str(j) for j in shown)
        warnings.warn(
            f"The z-scores do not fit the correlations R, which were taken as (1 - s) R + s I with s = {share:.2g}; "
            f"{'the other sign is more probable for' if suspect.any() else 'the largest deviations have'} {called}. "
            "Take R from the sample of z, with the same alleles counted.",
            UserWarning,
            stacklevel=4,
        )
    return share
