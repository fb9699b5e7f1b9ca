"""The columns that features become: their numbers as they are, and a dummy for each level of a categorical one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse

if TYPE_CHECKING:
    import pandas

__all__ = ["Columns", "coded", "levels_of", "tabular"]


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
    if hasattr(x, "iloc"):
        sparse = [j for j, dtype in enumerate(frame.dtypes) if str(dtype).startswith("Sparse")]
        frame = frame.copy() if sparse else frame
        for j in sparse:
            frame.isetitem(j, frame.iloc[:, j].sparse.to_dense())
    return frame  # type: ignore[no-any-return]


def levels_of(x: ArrayLike) -> dict[int, pandas.Index]:
    """The levels that occur in each categorical column of a data frame, by position; refuses sparse features."""
    frame: Any = x
    if issparse(x):
        raise TypeError(
            f"Expected a dense X, but got a sparse one: centring fills the zeros in, and {frame.shape} numbers take "
            f"{8e-6 * frame.shape[0] * frame.shape[1]:.0f} MB in any case. Pass X.toarray()."
        )
    if not hasattr(x, "iloc"):
        return {}
    return {
        j: frame.iloc[:, j].cat.remove_unused_categories().cat.categories
        for j, dtype in enumerate(frame.dtypes)
        if getattr(dtype, "name", "") == "category"
    }


def coded(x: ArrayLike, levels: dict[int, pandas.Index]) -> ArrayLike:
    """A data frame with numbers instead of levels, NaN where one is missing; refuses other levels, and other text."""
    if hasattr(x, "iloc"):
        _refuse_text(x, levels)
    if not levels:
        return x
    if not hasattr(x, "iloc"):
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
    import pandas

    infer = pandas.api.types.infer_dtype
    columns = enumerate(frame.items())
    text = [name for j, (name, column) in columns if j not in levels and infer(column, skipna=True) == "string"]
    if text:
        raise ValueError(
            f"Expected numbers or categorical columns, but {text} hold text; pass "
            f"X.astype({dict.fromkeys(text, 'category')}), or cast them to pl.Categorical in polars."
        )
