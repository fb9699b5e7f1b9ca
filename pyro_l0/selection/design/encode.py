"""The step from the columns of a data frame to numbers: a categorical one becomes a dummy for each of its levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyro_l0.selection.design.draft import Draft, Step

if TYPE_CHECKING:
    import pandas

__all__ = ["Encode", "check_labels", "coded", "labels_of", "levels_of", "tabular"]


@dataclass(frozen=True)
class Encode(Step):
    """Numbered levels become columns, whose coefficients are those of the estimator.

    A categorical feature has a dummy for each of its levels and none is left out: their effects have one prior, which
    does not depend on which level would have been the reference, and which makes them identifiable.
    """

    levels: dict[int, pandas.Index]  # of categorical features, by their positions
    feature_of: NDArray[np.intp]  # the feature of each column, shape (C,)

    @staticmethod
    def of(levels: dict[int, pandas.Index], features: int) -> Encode:
        """The step for p features, of which some have levels, by position; the others are numbers."""
        width = [len(levels.get(j, "1")) for j in range(features)]
        return Encode(levels, np.repeat(np.arange(features), width))

    def apply(self, draft: Draft) -> None:
        draft.x, draft.gate_of = self.dummies(draft.x), draft.gate_of[self.feature_of]
        draft.names, draft.factor_of = self.names(list(draft.names)), self.feature_of if self.levels else None

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
    """Raise a ValueError if a column without levels holds text, dates or durations."""
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
