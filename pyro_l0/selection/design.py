"""From features and observations in their own units to a problem, and from its posterior back to their units."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csc_array, csr_array, hstack, issparse
from torch import Tensor

from pyro_l0.expect import expect
from pyro_l0.maths.second_order import SparseColumns, shrunk
from pyro_l0.selection.families.family import Family
from pyro_l0.selection.problem import Draws, Prior, Problem, SelectionPosterior

if TYPE_CHECKING:
    import pandas

__all__ = [
    "Columns",
    "Design",
    "check_labels",
    "coded",
    "default_rate",
    "labels_of",
    "levels_of",
    "make_design",
    "tabular",
]


@dataclass(frozen=True)
class Columns:
    """Which columns stand for each feature.

    A categorical feature has a dummy for each of its levels and none is left out: their effects have one prior, which
    does not depend on which level would have been the reference, and which makes them identifiable.
    """

    levels: dict[int, pandas.Index]  # of categorical features, by their positions
    feature_of: NDArray[np.intp]  # the feature of each column, shape (C,)

    @staticmethod
    def of(levels: dict[int, pandas.Index], features: int) -> Columns:
        """The columns of some number of features."""
        width = [len(levels.get(j, "1")) for j in range(features)]
        return Columns(levels, np.repeat(np.arange(features), width))

    def names(self, features: list[str]) -> list[str]:
        """Those of the columns, from those of the features: ``city[Rome]`` for a dummy."""
        each = ([f"{name}[{level}]" for level in self.levels.get(j, ())] or [name] for j, name in enumerate(features))
        return [name for names in each for name in names]

    def dummies(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The columns of features whose levels are numbered, shape ``(n, p)`` to ``(n, C)``."""
        if not self.levels:
            return x
        found = x[:, self.feature_of]
        for j, levels in self.levels.items():
            found[:, self.feature_of == j] = x[:, [j]] == np.arange(len(levels))
        return found


def tabular(x: ArrayLike) -> ArrayLike:
    """A data frame of polars as one of pandas, without pyarrow, and sparse columns as dense ones; all else as it is."""
    frame: Any = x
    if hasattr(x, "get_columns"):
        import pandas

        columns = {column.name: column for column in frame.get_columns()}
        factors = {name for name, column in columns.items() if str(column.dtype).startswith(("Categorical", "Enum"))}
        frame = pandas.DataFrame({name: column.to_numpy() for name, column in columns.items()})
        return frame.astype(dict.fromkeys(factors, "category"))  # type: ignore[no-any-return]
    if hasattr(x, "isetitem"):
        sparse = [j for j, dtype in enumerate(frame.dtypes) if str(dtype).startswith("Sparse")]
        frame = frame.copy() if sparse else frame
        for j in sparse:
            frame.isetitem(j, frame.iloc[:, j].sparse.to_dense())
    return frame  # type: ignore[no-any-return]


def labels_of(x: ArrayLike) -> list[Any] | None:
    """The names of a data frame's columns; None for what has no names."""
    return list(x.columns) if hasattr(x, "columns") else None


def check_labels(x: ArrayLike, labels: list[Any] | None) -> None:
    """Refuse a frame whose columns have other numbers for names than in the fit; scikit-learn compares text alone."""
    found = labels_of(x)
    if found and labels and found != labels and str not in map(type, found + labels):
        raise ValueError(f"Expected the columns {labels}, in this order, but got {found}; pass X[columns of the fit].")


def levels_of(x: ArrayLike) -> dict[int, pandas.Index]:
    """The levels that occur in each categorical column of a data frame, by position."""
    frame: Any = x
    if not hasattr(x, "isetitem"):
        return {}
    return {
        j: frame.iloc[:, j].cat.remove_unused_categories().cat.categories
        for j, dtype in enumerate(frame.dtypes)
        if getattr(dtype, "name", "") == "category"
    }


def coded(x: ArrayLike, levels: dict[int, pandas.Index]) -> ArrayLike:
    """A data frame with numbers instead of levels, NaN where one is missing; refuses other levels, and other text."""
    if hasattr(x, "isetitem"):
        _refuse_text(x, levels)
    if not levels:
        return x
    if not hasattr(x, "isetitem"):
        raise TypeError(
            f"Expected a DataFrame, as some features are categorical, but got {type(x).__name__}; pass one with the "
            "columns of the fit."
        )
    frame: Any = x
    columns = {j: frame.iloc[:, j] for j in levels if j < frame.shape[1]}
    found = frame.copy()
    for j, column in columns.items():
        codes = levels[j].get_indexer(column).astype(np.float64)
        unknown = column[(codes < 0) & column.notna()]
        if len(unknown):
            raise ValueError(
                f"Expected the levels {levels[j].tolist()} in {frame.columns[j]!r}, but got {unknown.iloc[0]!r}; its "
                "effect is not known from the fit."
            )
        found.isetitem(j, np.where(codes < 0, np.nan, codes))
    return found  # type: ignore[no-any-return]


def _refuse_text(frame: Any, levels: dict[int, pandas.Index]) -> None:
    """Refuse text, dates and durations."""
    import pandas

    infer = pandas.api.types.infer_dtype
    kinds = [(name, infer(column, skipna=True)) for j, (name, column) in enumerate(frame.items()) if j not in levels]
    text = [name for name, kind in kinds if kind == "string"]
    times = [name for name, kind in kinds if kind.startswith(("date", "timedelta", "period"))]
    if times:
        raise ValueError(
            f"Expected numbers or categorical columns, but {times} hold times; pass numbers, such as days by "
            f"X[{times[0]!r}].map(lambda day: day.toordinal()) or other units by .astype('int64')."
        )
    if text:
        raise ValueError(
            f"Expected numbers or categorical columns, but {text} hold text; pass "
            f"X.astype({dict.fromkeys(text, 'category')}), or cast them to pl.Categorical in polars."
        )


# Sizes whose squares, and products of some of these, are finite in float64 and not zero.
_LEAST, _MOST = 1e-60, 1e60
# Of the deviation of y: less noise is hidden by the rounding of sums of squares, and the determinant of wider slabs
# overflows.
_LEAST_NOISE, _MOST_SLAB = 1e-7, 1e10
_INTERCEPT = 10.0  # deviation of the intercept's prior, of the size of y or of logits and log means


class IntegratedOut(NamedTuple):
    """Features A of a Gaussian regression that are always in, which its problem does not have.

    Their coefficients are N(0, s^2 noise_scale^2), with an infinite s for a flat prior. Given those of the others, X,
    they have the mean B'Q'(y - X beta) and the covariance noise_scale^2 B'B, B'B = (A'A + s^-2)^-1 and Q = A B'.
    """

    root: NDArray[np.float64]  # B, shape (k, a)
    crossed: NDArray[np.float64]  # Q'X, shape (k, p)
    target: NDArray[np.float64]  # Q'y, shape (k,)
    taken: int  # observations, by a flat prior: the rank of A
    log_evidence: float  # what no other feature changes

    def means(self, beta: Any) -> NDArray[np.float64]:
        """Of the coefficients given those of the other features, shape ``(N, p)`` to ``(N, a)``."""
        found: NDArray[np.float64] = (self.target - beta @ self.crossed.T) @ self.root
        return found


@dataclass(frozen=True)
class Design:
    """A problem, and how to return to the units of the data.

    A coefficient in these units is that of the problem times ``factor`` and ``unit``, and the intercept is that of the
    problem times ``unit`` plus ``level`` less ``centre`` . coefficients. Scales of slabs stay those of the problem's:
    with standardised features, of the change of the linear predictor for one standard deviation of a feature.
    """

    problem: Problem
    factor: NDArray[np.float64]  # shape (p,); 0 for a constant feature, which the problem does not have
    gated: NDArray[np.intp]  # the features that have a gate, as the problem has them
    always: NDArray[np.intp]  # those that are always in, which come next
    centre: NDArray[np.float64]  # what was subtracted from the features, shape (p,)
    level: NDArray[np.float64]  # with an intercept the middle of observations with noise, less that of the offset; (K,)
    observations: float  # their number
    flat_intercept: bool  # whether one was integrated out
    gate_of: NDArray[np.intp]  # which of G gates switches each feature, shape (p,)
    integrated: IntegratedOut | None  # a Gaussian regression's features that are always in
    unit: float | NDArray[np.float64] = 1.0  # what the responses of a multivariate regression were divided by, (K,)

    def posterior(self, found: SelectionPosterior, seed: int) -> SelectionPosterior:
        """A posterior of the problem in the units of the data; Gaussian intercepts are drawn given the rest."""
        rng = np.random.default_rng(seed)
        if self.integrated is not None:
            found = self._with_integrated(found, self.integrated, rng)
        varying = np.concatenate([self.gated, self.always])
        gates = np.unique(self.gate_of[self.gated])
        mean, sd = np.zeros((2, len(self.factor), self.problem.outputs))
        mean[varying], sd[varying] = (part * self.factor[varying, None] * self.unit for part in (found.mean, found.sd))
        active_probs, error = np.zeros((2, int(self.gate_of.max()) + 1))
        active_probs[gates], active_probs[self.gate_of[self.always]] = found.active_probs, 1.0
        error[gates] = 0.0 if found.standard_error is None else found.standard_error
        draws = self._draws(found.draws, varying, rng)
        known = None if found.standard_error is None else error
        return replace(found, active_probs=active_probs, mean=mean, sd=sd, draws=draws, standard_error=known)

    def _with_integrated(
        self, found: SelectionPosterior, out: IntegratedOut, rng: np.random.Generator
    ) -> SelectionPosterior:
        """With the coefficients of features that are always in, whose deviations are partly those of the draws."""
        draws, means = found.draws, out.means(found.draws.coefficients)
        noise = draws.noise_scale[:, None] * rng.standard_normal((len(means), len(out.root)))
        variance = means.var(0) + (draws.noise_scale**2).mean() * (out.root**2).sum(0)
        coefficients = csr_array(hstack([draws.coefficients, csr_array(means + noise @ out.root)]))
        return replace(
            found,
            mean=np.concatenate([found.mean, out.means(found.mean.T).T]),
            sd=np.concatenate([found.sd, np.sqrt(variance)[:, None]]),
            draws=draws._replace(coefficients=coefficients),
            log_evidence=found.log_evidence + out.log_evidence,
        )

    def _draws(self, draws: Draws, varying: NDArray[np.intp], rng: np.random.Generator) -> Draws:
        outputs = self.problem.outputs
        beta = draws.coefficients
        feature, output = np.divmod(beta.indices, outputs)
        data = beta.data * self.factor[varying[feature]] * np.broadcast_to(self.unit, outputs)[output]
        shape = (beta.shape[0], len(self.factor) * outputs)
        coefficients = csr_array((data, varying[feature] * outputs + output, beta.indptr), shape=shape)
        # One column for each output: the features' centres in the rows of its coefficients.
        centres = np.kron(self.centre[:, None], np.eye(outputs))
        intercept = draws.intercept * self.unit + self.level - coefficients @ centres
        if self.flat_intercept:
            noise = draws.noise_scale / math.sqrt(self.observations)
            intercept = intercept + noise[:, None] * rng.standard_normal(intercept.shape)
        noise_scale = draws.noise_scale * self.unit
        return draws._replace(coefficients=coefficients, intercept=intercept, noise_scale=noise_scale)


def make_design(
    x: ArrayLike,
    y: ArrayLike,
    family: Family,
    *,
    rate: float | tuple[float, float] | NDArray[np.float64] | None = None,
    expected_size: float | None = None,
    always_in_scale: float | None = None,
    slab_scale: float | None = None,
    noise_scale: float | None = None,
    standardize: bool = True,
    fit_intercept: bool = True,
    gate_of: NDArray[np.intp] | None = None,
    factor_of: NDArray[np.intp] | None = None,
    weight: NDArray[np.float64] | None = None,
    offset: NDArray[np.float64] | None = None,
    names: Sequence[str] = (),
) -> Design:
    """The problem of a regression with spike-and-slab coefficients.

    The problem leaves constant features out: their effect cannot be told from the intercept's, and the prior of the
    others does not count them.

    Args:
        x: features, shape ``(n, p)``; sparse ones, of a Gaussian regression, stay sparse.
        y: observations, shape ``(n,)``, as the family takes them; of several responses ``(n, K)``.
        family: distribution of the observations.
        rate: this, and the five that follow, as for the estimators; a pair are the parameters of a Beta prior, and an
            array of shape ``(G,)`` has NaN where the rate is that of no rate.
        expected_size: of the gates of features that vary, a rate of expected_size / G.
        always_in_scale: for features of deviation 1, times the noise scale of a Gaussian regression.
        slab_scale: for features of deviation 1 if these are standardised.
        noise_scale: of a Gaussian regression alone.
        standardize: divide the features by their standard deviations, without an intercept by their root mean squares.
            Otherwise the unit of an unknown slab scale is divided by the root mean square of their deviations.
        fit_intercept: whether there is an intercept; that of a Gaussian regression is integrated out.
        gate_of: which gate, of 0 to G - 1, switches each feature, shape ``(p,)``; by default each has its own.
        factor_of: equal numbers for features that are the dummies of one factor, shape ``(p,)``, which are standardised
            by one divisor: the root of their summed variances, so that the factor counts as one feature of deviation 1.
        weight: how many observations each row stands for, shape ``(n,)``, all positive; one by default.
        offset: known part of the linear predictors, shape ``(n, K)``. With an intercept it is centred, so that the
            prior of the intercept is that of the linear predictor at average features and offset.
        names: of the features, for messages.
    """
    expect(bool | np.bool_, "True or False", standardize=standardize, fit_intercept=fit_intercept)
    expect(Real | tuple | np.ndarray | None, "a number, a pair of numbers or an array", rate=rate)
    expect(Real | None, "a number", expected_size=expected_size, slab_scale=slab_scale, noise_scale=noise_scale)
    features, observations = _checked(x, y, family)
    is_sparse = issparse(features)
    gaussian = family.has_closed_form
    number = float(len(observations)) if weight is None else float(weight.sum())
    if noise_scale is not None and not gaussian:
        raise ValueError(f"Expected no noise_scale for the family {family}, but got {noise_scale}; leave it out.")
    if gaussian and fit_intercept and noise_scale is None and number <= 1:
        raise ValueError(
            f"Expected weights that sum to more than 1, as an intercept takes one observation, but got {number:.3g}. "
            "Multiply relative weights by n / sum, or set noise_scale."
        )
    labels = np.fromiter(names or [f"x{j}" for j in range(features.shape[1])], dtype=object)
    _check_sizes(features, observations, labels)
    rows = np.ones(len(observations)) if weight is None else weight
    total = features.T @ rows if is_sparse else np.einsum("ij,i->j", features, rows)
    centre = total / number if fit_intercept else np.zeros(features.shape[1])
    level = np.zeros(family.outputs)
    if offset is not None and family.is_location:
        observations, offset = observations - offset.reshape(observations.shape), None
    elif offset is not None and fit_intercept:
        level = -np.average(offset, axis=0, weights=weight)
        offset = offset + level
    family.check(observations, rows, fit_intercept)
    if family.is_location and fit_intercept:
        level = family.middle(observations, rows)
        observations = observations - level
    size: Any = family.unit(observations, rows) if family.is_location else 1.0
    scale: Any = 1.0
    if np.ndim(size):
        size, scale = 1.0, size
        constant = np.flatnonzero(scale <= 10 * np.finfo(np.float64).eps * np.abs(level))
        if len(constant):
            raise ValueError(
                f"Expected each response to vary, but that of column {constant[0]} does not; leave it out."
            )
        observations = observations / scale
    if not is_sparse:
        # Where there are many features their columns are read, and a copy with other rows would take as long.
        features = np.subtract(features, centre, order="F" if gaussian else "C")
        square = np.einsum("ij,ij,i->j", features, features, rows)
    else:
        square = _sparse_squares(features, centre, rows)
    each = np.sqrt(square / number)
    each[each <= 10 * np.finfo(np.float64).eps * np.abs(centre)] = 0.0  # a constant, up to rounding
    deviation = each if factor_of is None else np.sqrt(np.bincount(factor_of, each**2))[factor_of]
    if not each.all():
        _warn_of_constants(labels[each == 0].tolist())
    gate_of = np.arange(len(each)) if gate_of is None else gate_of
    rate = np.ones(int(gate_of.max()) + 1) if isinstance(rate, Real) and rate == 1 else rate
    is_in = rate[gate_of] == 1 if isinstance(rate, np.ndarray) else np.zeros(len(each), dtype=bool)
    if always_in_scale is not None and not is_in.any():
        raise ValueError(
            f"Expected no always_in_scale, as no feature has a rate of 1, but got {always_in_scale}; leave it out."
        )
    gated, always = np.flatnonzero((each > 0) & ~is_in), np.flatnonzero((each > 0) & is_in)
    varying = np.concatenate([gated, always])
    if len(gated) < len(each):
        features = features[:, varying]
    divisor = deviation[varying] if standardize else np.ones(len(varying))

    root = torch.from_numpy(np.sqrt(rows))
    if gaussian and weight is not None:
        observations = observations * root.numpy()
    if not is_sparse:
        features /= divisor
        if gaussian and weight is not None:
            features *= root.numpy()[:, None]
    columns: Tensor | SparseColumns = (
        SparseColumns.of(features, centre[varying], divisor, root, square[varying])
        if is_sparse
        else torch.from_numpy(features).T
    )
    target, integrated = torch.from_numpy(observations), None
    if gaussian and len(always):
        columns, target, integrated = _integrated_out(columns, target, len(gated), always_in_scale)
        size = float(target.norm()) / math.sqrt(number)
    size = size or 1.0
    taken = float(fit_intercept) + (integrated.taken if integrated else 0)
    if integrated and taken >= number:
        raise ValueError(
            f"Expected more observations than features that are always in take, but they, and an intercept, take "
            f"{taken:g} of {number:g}; set always_in_scale."
        )
    width = 1.0 if standardize or is_in.all() else math.sqrt(float(np.mean(deviation[~is_in] ** 2))) or 1.0
    gates, number_of = np.unique(gate_of[gated], return_inverse=True)
    intercept_scale = _INTERCEPT * size
    prior = Prior(
        _rate(rate, expected_size, gates),
        slab_scale,
        noise_scale,
        slab_unit=family.slab_unit * size / width,
        noise_unit=size,
        intercept_scale=intercept_scale,
        always_scale=always_in_scale or intercept_scale,
    )
    _check_scales(prior, size, 1.0 if standardize else float(deviation.max()) or 1.0)
    problem = Problem(
        family,
        columns.T if isinstance(columns, Tensor) else torch.empty(len(rows), len(gated), device="meta"),
        target,
        prior,
        intercept=fit_intercept and family.has_intercept and not gaussian,
        always=0 if gaussian else len(always),
        gate_of=None if np.array_equal(number_of, np.arange(len(gated))) else torch.from_numpy(number_of),
        weight=None if gaussian or weight is None else torch.from_numpy(weight),
        offset=None if offset is None else torch.from_numpy(offset),
        observations=number - taken if gaussian else None,
        sparse=columns if isinstance(columns, SparseColumns) else None,
    )
    factor = np.zeros(len(each))
    factor[varying] = 1 / divisor
    flat = gaussian and fit_intercept
    return Design(problem, factor, gated, always, centre, level, number, flat, gate_of, integrated, scale)


def _integrated_out(
    columns: Tensor | SparseColumns, y: Tensor, gated: int, scale: float | None
) -> tuple[Tensor | SparseColumns, Tensor, IntegratedOut]:
    """Features with a gate, as rows, and y, with products x'(I - QQ')x as the features after these leave them."""
    first, last = columns[:gated], columns[gated:]
    always = last.dense() / last.divisor if isinstance(last, SparseColumns) else last.T
    n, missing = len(y), max(0, len(last) - len(y))  # directions of which the data say nothing
    left, sizes, right = torch.linalg.svd(torch.nn.functional.pad(always, (0, 0, 0, missing)), full_matrices=False)
    precision = 0.0 if scale is None else scale**-2
    seen = (sizes > max(always.shape) * torch.finfo(sizes.dtype).eps * sizes[0]) | (precision > 0)
    gains = (sizes[seen].square() + precision).rsqrt()
    q, root, rest = left[:n, seen] * sizes[seen] * gains, gains[:, None] * right[seen], precision * gains.square()
    # (I - Q t Q')^2 = I - QQ', as the columns of Q are orthogonal and their squares sum to 1 - rest.
    along = q, 1 / (1 + rest.sqrt())
    log_evidence = 0.5 * float(rest.log().sum()) if precision else 0.0
    taken = 0 if precision else len(gains)
    found = IntegratedOut(root.numpy(), (first @ q).T.numpy(), (q.T @ y).numpy(), taken, log_evidence)
    left_over = first.shrunk(*along) if isinstance(first, SparseColumns) else shrunk(first.T, *along).T
    return left_over, shrunk(y, *along), found


def default_rate(features: int) -> tuple[float, float]:
    """Parameters of the Beta prior of an unknown rate: 1 and the square root of the number of features.

    The number of open gates is then about geometric with a mean of sqrt(p). A flat prior would give thousands of open
    gates with tiny slabs as much weight as a few.
    """
    return 1.0, math.sqrt(features)


def _checked(x: ArrayLike, y: ArrayLike, family: Family) -> tuple[Any, NDArray[np.float64]]:
    """Features and observations in float64, if they are what the family takes; sparse features by columns."""
    features = csc_array(x, dtype=np.float64) if issparse(x) else np.asarray(x, dtype=np.float64)
    observations = np.asarray(y, dtype=np.float64)
    wanted = features.shape[:1] + observations.shape[1:2] * (family.is_location and family.has_outputs)
    if features.ndim != 2 or 0 in features.shape or observations.shape != wanted:
        raise ValueError(
            "Expected X of shape (n, p) and y of shape (n,), neither of them empty, but got "
            f"{features.shape} and {observations.shape}."
        )
    if not np.isfinite(features.data if issparse(features) else features).all():
        raise ValueError("Expected X to be finite, but it holds NaN or infinity; impute or drop rows.")
    wrong = observations[~(family.takes(observations) & np.isfinite(observations))]
    if len(wrong):
        raise ValueError(f"Expected y of the family {family} to hold {family.expected}, but got {wrong[0]:g}.")
    return features, observations


def _rate(
    rate: float | tuple[float, float] | NDArray[np.float64] | None, expected_size: float | None, gates: NDArray[np.intp]
) -> float | tuple[float, float] | NDArray[np.float64]:
    """Of some gates; an array leaves them all to be learned, or none."""
    p = len(gates)
    if isinstance(rate, np.ndarray) and np.isnan(rate).any():
        if not np.isnan(rate[gates]).all():
            raise ValueError(
                "Expected a rate for each feature, or none but rates of 1, but some are missing; add them, or leave "
                "out those below 1."
            )
        rate = None
    if rate is not None and expected_size is not None:
        raise ValueError(f"Expected a rate or an expected_size, but got both: {rate} and {expected_size}.")
    if expected_size is not None:
        rate = expected_size / max(p, 1)
    if isinstance(rate, Real) and not 0 < rate < 1:
        raise ValueError(
            f"Expected a rate between 0 and 1, or an expected_size between 0 and the number of features, {p}, but got "
            f"{rate if expected_size is None else expected_size}; groups count as one feature each, and constant "
            "features not at all."
        )
    if isinstance(rate, np.ndarray):
        return rate[gates]
    return default_rate(max(p, 1)) if rate is None else rate


def _check_sizes(features: Any, observations: NDArray[np.float64], names: NDArray[np.object_]) -> None:
    """Refuse numbers whose squares leave the range of float64."""
    ends = [features.max(0), features.min(0)]
    spread = np.abs([end.toarray() if issparse(end) else end for end in ends]).max(0)
    outside = np.flatnonzero((spread > 0) & ~((spread > _LEAST) & (spread < _MOST)))
    sizes = [(f"feature {names[j]!r}", spread[j]) for j in outside[:1]]
    largest = float(np.abs(observations).max())
    if largest and not _LEAST < largest < _MOST:
        sizes.append(("y", largest))
    for name, size in sizes:
        raise ValueError(
            f"Expected the largest absolute value of {name} to lie between {_LEAST:g} and {_MOST:g}, where squares are "
            f"finite and not zero, but it is {size:g}; choose another unit."
        )


def _check_scales(prior: Prior, size: float, width: float) -> None:
    """Refuse scales that are numerically 0 or infinite, given the size of y and the largest deviation of a feature."""
    noise_range = _LEAST_NOISE * size, _MOST * size
    slab_range = _LEAST * size / width, _MOST_SLAB * size / width
    for name, scale, (least, most) in (
        ("noise_scale", prior.noise_scale, noise_range),
        ("slab_scale", prior.slab_scale, slab_range),
    ):
        if scale is not None and not least <= scale <= most:
            raise ValueError(
                f"Expected {name} to lie between {least:g} and {most:g}, in view of the size of y, but got {scale:g}; "
                "None learns it."
            )


def _warn_of_constants(names: Sequence[str]) -> None:
    shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    warnings.warn(
        f"Constant features have no effect that could be found: the inclusion probability and the coefficient of "
        f"{shown} are 0. Leave them out.",
        UserWarning,
        stacklevel=4,
    )


def _sparse_squares(features: csc_array, centre: NDArray[np.float64], weight: NDArray[np.float64]) -> Any:
    """Weighted sums of squares of centred features, shape ``(p,)``."""
    column = np.repeat(np.arange(len(centre)), np.diff(features.indptr))
    stored = weight[features.indices]
    apart = np.bincount(column, stored * (features.data - centre[column]) ** 2, len(centre))
    return apart + centre**2 * (weight.sum() - np.bincount(column, stored, len(centre)))
