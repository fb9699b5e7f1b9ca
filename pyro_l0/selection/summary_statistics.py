"""Summary statistics in place of data: observations that have given moments, and z-scores that fit correlations."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple, Self

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
# By how many nats some share has to fit better than none, or one switched sign better than the given one: 8 were never
# reached by signs in 1,050 simulations of 200 features with the right correlations. With a panel of B rows the latter
# is times 3 + p / B: 17 were reached in 4 of 100 with 500 rows for 200 features, ten of which had z-scores of up to 40.
# Lower shares are from rounded correlations.
_MISFIT, _SWITCHED, _NOTABLE = 10.0, 9.0, 0.005
# Nats and standard errors from which a sign is a suspect, as by Zou et al. (2022), and how many of these are looked at.
_SUSPECT, _LARGE, _MOST_SUSPECTS = 2.0, 2.0, 5
# Of forward selection: the least share of a feature that those before leave, and the largest number.
_LEFT, _STEPS = 1e-3, 50
_SAMPLE = "Take R from the sample of z, with the same alleles counted, or pass panel_size where it is of a panel."


class Observations(NamedTuple):
    """Observations, each of the same weight, whose means are 0 and whose moments were given."""

    x: Array  # shape (m, p)
    y: Array  # shape (m,)
    names: list[Any] | None  # of the features
    number: float  # of the observations that they stand for

    @property
    def table(self) -> Any:
        """The features, with their names if they have any."""
        if self.names is None:
            return self.x
        import pandas

        return pandas.DataFrame(self.x, columns=self.names)


class _Correlations(NamedTuple):
    """A correlation matrix V diag(lambda) V', of rank k."""

    values: Array  # lambda, increasing, shape (k,)
    vectors: Array  # V, shape (p, k)

    @classmethod
    def of_panel(cls, rows: Array, names: list[Any] | None) -> Self:
        """Those of B rows of features, without a p x p matrix where B is smaller."""
        centred = rows - rows.mean(0)
        deviations = centred.std(0)
        constant = np.flatnonzero(deviations <= 10 * np.finfo(np.float64).eps * np.abs(rows).max(0))
        if len(constant):
            called = _called(constant[:1], names)
            raise ValueError(f"Expected each feature to vary in the panel R, but {called} does not; leave it out.")
        centred /= deviations * np.sqrt(len(rows))
        if len(rows) >= rows.shape[1]:
            return cls(*np.linalg.eigh(centred.T @ centred))
        values, left = np.linalg.eigh(centred @ centred.T)
        # One is 0, as rows are centred; it comes first.
        return cls(values[1:], centred.T @ left[:, 1:] / np.sqrt(values[1:].clip(min=np.finfo(np.float64).tiny)))

    def above(self, least: float) -> Self:
        """The eigenvalues above a limit, and above what rounding makes of 0, with their vectors."""
        kept = self.values > max(least, 10 * len(self.vectors) * np.finfo(np.float64).eps * self.values[-1])
        return type(self)(self.values[kept], self.vectors[:, kept])

    def with_crossed(self, crossed: Array, most: float) -> Self:
        """The largest eigenvalues that explain up to the most of y, and a direction that has the rest of X'y.

        Its eigenvalue is what makes it explain half of what is left of y: correlations change little, as many features
        share the direction.
        """
        along = self.vectors.T @ crossed
        explained = np.cumsum((along**2 / self.values)[::-1])[::-1]
        kept = explained <= most
        rest = crossed - self.vectors[:, kept] @ along[kept]
        size = float(rest @ rest)
        if (kept.all() and len(kept) == len(crossed)) or not size:
            return self
        value = 2 * size / (1 - max(explained[kept], default=0.0))
        return type(self)(
            np.append(self.values[kept], value), np.column_stack([self.vectors[:, kept], rest / np.sqrt(size)])
        )

    def observations(self, deviations: Array, crossed: Array, least: float = 0.0) -> tuple[Array, Array, float]:
        """X and y of k + 2 observations, and the mean square that y has apart from X, in y at least some.

        The columns have mean 0, these correlations with one another, the correlations ``crossed`` with y, and the given
        deviations; that of y is 1. The rows are those of diag(lambda)^1/2 V', one for the rest of y, and one of zeros,
        which a reflection takes to the direction of equal numbers, so that no other row has a part of this:
        Householder's I - 2 h h' / h'h with h = e_m - 1 / sqrt(m) (``normal``), which exchanges e_m and the vector of 1
        / sqrt(m).
        """
        p, k = self.vectors.shape
        m = k + 2
        # Raising the smallest eigenvalues leaves X'y as it is, and changes X'X by rounding.
        root = np.sqrt(self.values.clip(min=10 * p * np.finfo(np.float64).eps * self.values.max()))
        rows = np.zeros((m, p + 1))
        rows[:k, :p] = root[:, None] * self.vectors.T * deviations
        rows[:k, p] = self.vectors.T @ crossed / root
        rest = 1 - float(rows[:k, p] @ rows[:k, p])
        rows[k, p] = np.sqrt(max(rest, least))
        normal = np.full(m, -1 / np.sqrt(m))
        normal[-1] += 1
        rows -= np.outer(normal, 2 / (normal @ normal) * (normal @ rows))
        rows *= np.sqrt(m)
        return rows[:, :p], rows[:, p], rest

    def forward(
        self, crossed: Array, weights: Array, noise: float = 0.0, most: float = np.inf
    ) -> tuple[float, float, Array]:
        """The square that forward selection explains, the same less 2 log p + 4 for each feature, and products left.

        The features' products are V diag(weights) V', and their products with what is explained are given. A step needs
        a square of 2 log p + 4, times 1 + noise * the square that is explained already. No more than the most can be.

        By Gram-Schmidt without the rows: of what the chosen features leave, x_j has the product ``crossed``_j with y
        and the square ``left``_j, and would explain ``gains`` = crossed^2 / left. The products of all features with the
        direction of the chosen one are a column of the Cholesky factor of V diag(weights) V', pivoted by gain.
        """
        vectors = self.vectors
        penalty = 2 * np.log(len(crossed)) + 4
        left, total = vectors**2 @ weights, 0.0
        columns: list[Array] = []
        least = _LEFT * left.max()
        for _ in range(_STEPS):
            gains = np.divide(crossed**2, left, out=np.zeros_like(left), where=left > least)
            gains[total + gains > most] = 0.0
            best = int(gains.argmax())
            if gains[best] < penalty * (1 + noise * total):
                break
            column = vectors @ (weights * vectors[best]) - sum(one * one[best] for one in columns)
            column /= np.sqrt(left[best])
            total += float(gains[best])
            crossed = crossed - column * crossed[best] / np.sqrt(left[best])
            left = left - column**2
            columns.append(column)
        return total, total - penalty * len(columns), crossed


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
    return Observations(x, y * np.sqrt(square_y / n), names, n)


def checked_means(means: ArrayLike, rows: Observations) -> Array:
    """Those of the features of observations, shape ``(p,)``."""
    _refuse_another_order(means, rows.names, "XtX", "X_mean")
    found = np.asarray(means, dtype=np.float64)
    if found.shape != rows.x.shape[1:]:
        raise ValueError(f"Expected X_mean of shape {rows.x.shape[1:]}, one for each feature, but got {found.shape}.")
    return found


def of_z_scores(z: ArrayLike, correlation: ArrayLike, n: float, panel_size: float | None = None) -> Observations:
    """Standardised observations with given correlations and t statistics of regressions on single features.

    Where these do not fit, the correlations are shrunk, with a warning. Correlations of a panel are not: n is lowered.
    """
    expect(Real, "a number", n=n)
    shape = np.shape(correlation)
    is_factor = len(shape) == 2 and shape[0] != shape[1] == len(np.ravel(z))
    matrix, scores, names = _aligned(correlation, z, n, "R", "z", is_factor)
    if panel_size is None and is_factor:
        panel_size = len(matrix)
    expect(Real | None, "a number", panel_size=panel_size)
    if panel_size is not None and not panel_size > 2:
        raise ValueError(
            f"Expected panel_size, the rows of the panel that R is of, to be above 2, but got {panel_size!r}."
        )
    if is_factor:
        correlations = _Correlations.of_panel(matrix, names)
    elif np.abs(matrix.diagonal() - 1).max() > 1e-3:
        raise ValueError(
            f"Expected R to be a correlation matrix, with ones on its diagonal, but got {matrix.diagonal().min():.4g} "
            f"to {matrix.diagonal().max():.4g}; pass covariances to from_moments."
        )
    else:
        correlations = _Correlations(*np.linalg.eigh(matrix))
    crossed = scores / np.sqrt(scores**2 + n - 2)
    standard = crossed * np.sqrt(n - 1)
    if panel_size is not None and panel_size < np.inf:
        return _of_panel(correlations.above(1 / panel_size), crossed, n, float(panel_size), names)
    share = _misfit(correlations, standard, n, names)
    if share:
        correlations = _Correlations((1 - share) * correlations.values.clip(min=0) + share, correlations.vectors)
    # Where they did not fit, effects may explain more than y, whose variance the noise then has.
    x, y, _ = correlations.observations(np.ones(len(crossed)), crossed, least=float(share >= _NOTABLE))
    return Observations(x, y, names, n)


def _of_panel(
    correlations: _Correlations, crossed: Array, n: float, size: float, names: list[Any] | None
) -> Observations:
    r"""Observations so few that their noise is that of correlations with y and of the panel.

    The mean of X'y / n is R b, of which a panel of B rows has an estimate. Where these are normal, the covariance of
    its error is (h R + R b b' R) / B with h = b'Rb, as B times the estimate is a Wishart matrix. The second part moves
    R b along itself alone, which is a relative error of b that is the same for all features, and is left out. The first
    adds to that of X'y / n, which is (1 - h) R / n: together, that of n' observations with 1 / n' = 1 / n +
    h / ((1 - h) B). For h, what forward selection explains is taken, where each step allows for this noise.
    """
    scores = crossed * np.sqrt(n - 1)
    explained = min(correlations.forward(scores, correlations.values, 1 / size)[0] / n, 1 - 1 / n)
    _misfit(correlations, scores, n, names, 1 - explained + explained * n / size, size)
    deviations = np.sqrt((correlations.vectors**2 @ correlations.values).clip(min=0.1))
    crossed = crossed * deviations
    number = 1 / (1 / n + explained / ((1 - explained) * size))
    if number <= 2:
        raise ValueError(
            f"Expected a larger panel than one of {size:g} rows, as the effects explain {explained:.4f} of y and its "
            "error hides them; take R from the sample of z."
        )
    completed = correlations.with_crossed(crossed, (1 + explained) / 2)
    x, y, _ = completed.observations(1 / deviations, crossed)
    return Observations(x, y, names, number)


def _aligned(
    matrix: Any, vector: Any, n: float, of_matrix: str, of_vector: str, is_factor: bool = False
) -> tuple[Array, Array, list[Any] | None]:
    """A symmetric matrix, or rows, and a vector of the same features, and the names of these if the matrix has any."""
    names = list(matrix.columns) if hasattr(matrix, "columns") else None
    square = check_array(matrix, dtype=np.float64, input_name=of_matrix)
    numbers = check_array(vector, dtype=np.float64, ensure_2d=False, input_name=of_vector)
    if numbers.ndim != 1 or (square.shape != (len(numbers), len(numbers)) and not is_factor):
        raise ValueError(
            f"Expected {of_matrix} of shape (p, p) and {of_vector} of shape (p,), but got {square.shape} and "
            f"{numbers.shape}."
        )
    if not is_factor and np.abs(square - square.T).max() > _ROUNDING * np.abs(square).max():
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


def _misfit(
    correlations: _Correlations,
    z: Array,
    n: float,
    names: list[Any] | None,
    noise: float = 1.0,
    panel_size: float = np.inf,
) -> float:
    """The share s by which z-scores make R (1 - s) R + s I, 0 where they fit; a warning where it is not tiny.

    Along the eigenvectors z-scores are independent, N(0, noise ((1 - s) lambda + s) + t lambda^2), with independent
    effects of variance t: large effects, which are along large eigenvalues, do not count as a misfit. The s to shrink
    by is the likeliest without them. A few large effects are no misfit either: s and t are those of what forward
    selection leaves, where this is likelier. A sign is suspect where the conditional distribution of one z-score given
    the others makes the other sign more probable, and is named if it stays so once forward selection has added large
    effects to z-scores with one sign and with the other. A panel of a finite size always has a share; it is warned of
    for signs alone.

    References:
        Zou et al. (2022), PLoS Genetics 18(7): e1010299, for s and for switched signs, where t is 0.
    """
    values, vectors = correlations
    along = vectors.T @ z
    outside = z - vectors @ along
    beyond = len(z) - len(values)
    explained, penalised_square, rest = correlations.forward(z, values, 1 / panel_size, n)

    def variances(share: float) -> tuple[Array, float]:
        found: Array = noise * ((1 - share) * values + share) + n / len(z) * _EFFECTS * values**2
        return found.clip(min=_LEAST_VARIANCE), max(noise * share, _LEAST_VARIANCE)

    def fits(of: Array) -> Array:
        found = [(np.log(v) + of**2 / v).sum(1) + beyond * np.log(w) + outside_square / w for v, w in spread]
        return -0.5 * np.array(found)

    spread, outside_square = [variances(share) for share in _SHARES], (beyond > 0) * outside @ outside
    by_effects = np.stack([fits(along), fits(vectors.T @ rest) - 0.5 * (explained - penalised_square)])
    _, best, effects = np.unravel_index(by_effects.argmax(), by_effects.shape)
    variance, outer = spread[best][0][effects], (beyond > 0) / spread[best][1]
    precision = vectors**2 @ (1 / variance - outer) + outer
    deviation = vectors @ (along / variance) + outside * outer  # precision times that of each from what others predict
    switched = np.where(np.abs(z) > _LARGE, 2 * z * (deviation - z * precision), -np.inf)
    squares = values**2 / variance

    def penalised(sign: Array) -> float:
        return 0.5 * correlations.forward(vectors @ (values / variance * sign), squares, most=n)[1]

    suspects = [j for j in np.argsort(-switched)[:_MOST_SUSPECTS] if switched[j] > _SUSPECT]
    given = penalised(along) if suspects else 0.0
    for j in suspects:
        switched[j] += penalised(along - 2 * z[j] * vectors[j]) - given
    suspects = sorted((j for j in suspects if switched[j] > _SUSPECT), key=lambda j: -switched[j])
    is_exact = panel_size == np.inf
    is_switched = bool(suspects) and switched[suspects[0]] > _SWITCHED * (1 if is_exact else 3 + len(z) / panel_size)
    share = float(_SHARES[by_effects[0, :, 0].argmax()]) if is_exact else 0.0
    least = 10 * len(z) * np.finfo(np.float64).eps * values.max()
    is_possible = float((along**2 / values.clip(min=least)).sum()) <= n  # else features explain more than all of y
    if not is_switched and (not is_exact or (is_possible and by_effects.max() - by_effects[:, 0].max() <= _MISFIT)):
        return 0.0
    if share >= _NOTABLE or is_switched:
        called = _called(suspects or np.argsort(-np.abs(deviation) / precision**0.5)[:_MOST_SUSPECTS], names)
        taken = f", which were taken as (1 - s) R + s I with s = {share:.2g}" if is_exact else " of the panel"
        warnings.warn(
            f"The z-scores do not fit the correlations R{taken}; "
            f"{'the other sign is more probable for' if suspects else 'the largest deviations have'} {called}. "
            f"{_SAMPLE if is_exact else 'Count the same alleles in both, or leave these features out.'}",
            UserWarning,
            stacklevel=4 + (not is_exact),
        )
    return share


def _called(features: Iterable[int], names: list[Any] | None) -> str:
    return ", ".join(repr(names[j]) if names else str(j) for j in features)
