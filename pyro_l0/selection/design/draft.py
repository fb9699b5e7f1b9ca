"""A regression on its way to a problem, and what a step of this way is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from scipy.sparse import csc_array, issparse

from pyro_l0.expect import expect
from pyro_l0.selection.families.family import Array, Family
from pyro_l0.selection.problem import SelectionPosterior

__all__ = ["LEAST", "MOST", "Draft", "Step", "check_sizes"]

# Sizes whose squares, and products of some of these, are finite in float64 and not zero.
LEAST, MOST = 1e-60, 1e60


@dataclass(kw_only=True)
class Draft:
    """A regression on its way to a problem, as the steps so far have left it; settings are those of the estimators."""

    family: Family
    x: Any  # features, shape (n, p); those of a Gaussian regression may be sparse, by columns once they are centred
    y: Any  # observations, shape (n,) or (n, K), as the family takes them
    weight: Array | None = None  # how many observations each row stands for, shape (n,), all positive
    offset: Array | None = None  # known part of the linear predictors, shape (n, K)
    root: Array | None = None  # L, lower triangular, of the noise's covariance noise_scale^2 L L'
    names: Sequence[str] = ()  # of the features, for messages
    gate_of: Any = None  # which gate, of 0 to G - 1, switches each feature, shape (p,); by default its own
    factor_of: Any = None  # equal numbers for features that are the dummies of one factor, shape (p,)
    rate: float | tuple[float, float] | Array | None = None  # a pair: of a Beta prior; of a gate without one, NaN
    expected_size: float | None = None
    always_in_scale: float | None = None
    slab_scale: float | None = None
    noise_scale: float | None = None
    standardize: bool = True
    fit_intercept: bool = True
    background: bool = False  # whether each feature has a small effect, too
    deviation: Array = field(init=False)  # of the features since they are centred, shape (p,); 0 for a constant
    constant: set[int] = field(init=False)  # which features are, since they are scaled
    variance: Array = field(init=False)  # of each column since features are scaled, shape (p,)
    always: int = field(default=0, init=False)  # how many of the features, the last ones, are always in
    taken: float = field(default=0.0, init=False)  # observations that flat priors take

    def __post_init__(self) -> None:
        expect(bool | np.bool_, "True or False", standardize=self.standardize, fit_intercept=self.fit_intercept)
        expect(Real | tuple | np.ndarray | None, "a number, a pair of numbers or an array", rate=self.rate)
        scales = {"slab_scale": self.slab_scale, "noise_scale": self.noise_scale}
        expect(Real | None, "a number", expected_size=self.expected_size, **scales)
        self.x = csc_array(self.x, dtype=np.float64) if issparse(self.x) else np.asarray(self.x, dtype=np.float64)
        self.y = np.asarray(self.y, dtype=np.float64)
        _check_data(self.x, self.y, self.family)
        if issparse(self.x) and (self.root is not None or self.background):
            self.x = self.x.toarray()
        self.gate_of = np.arange(self.x.shape[1]) if self.gate_of is None else self.gate_of
        self.names = self.names or [f"x{j}" for j in range(self.x.shape[1])]
        is_normal = self.family.has_closed_form
        if self.noise_scale is not None and not is_normal:
            raise ValueError(
                f"Expected no noise_scale for the family {self.family}, but got {self.noise_scale}; leave it out."
            )
        if is_normal and self.fit_intercept and self.noise_scale is None and self.number <= 1:
            raise ValueError(
                f"Expected weights that sum to more than 1, as an intercept takes one observation, but got "
                f"{self.number:.3g}. Multiply relative weights by n / sum, or set noise_scale."
            )
        check_sizes(self)

    @property
    def rows(self) -> Array:
        """The weight of each row, shape ``(n,)``; 1 where none was given."""
        return np.ones(len(self.y)) if self.weight is None else self.weight

    @property
    def number(self) -> float:
        """The number of observations, as weights count them."""
        return float(len(self.y)) if self.weight is None else float(self.weight.sum())

    @property
    def gated(self) -> int:
        """How many of the features, the first ones, have a gate."""
        return len(self.gate_of) - self.always


class Step(ABC):
    """A change of a regression on its way to a problem: all that is known of the change is here.

    A step is applied once, and keeps what it takes to undo it.
    """

    @abstractmethod
    def apply(self, draft: Draft) -> None:
        """Change the regression; arrays of it are changed in place where they are its own."""

    def undo(self, found: SelectionPosterior, rng: np.random.Generator) -> SelectionPosterior:
        """A posterior of the regression before the change, from that of the one after; by default the same."""
        return found


def _check_data(x: Any, y: Array, family: Family) -> None:
    """Refuse what the family does not take."""
    wanted = x.shape[:1] + y.shape[1:2] * (family.is_location and family.has_outputs)
    if x.ndim != 2 or 0 in x.shape or y.shape != wanted:
        raise ValueError(
            f"Expected X of shape (n, p) and y of shape (n,), neither of them empty, but got {x.shape} and {y.shape}."
        )
    if not np.isfinite(x.data if issparse(x) else x).all():
        raise ValueError("Expected X to be finite, but it holds NaN or infinity; impute or drop rows.")
    known = y[~np.isnan(y)] if family.is_joint else y
    wrong = known[~(family.takes(known) & np.isfinite(known))]
    if len(wrong):
        raise ValueError(f"Expected y of the family {family} to hold {family.expected}, but got {wrong[0]:g}.")


def check_sizes(draft: Draft, after: str = "") -> None:
    """Refuse numbers whose squares leave the range of float64."""
    ends = [draft.x.max(0), draft.x.min(0)]
    spread = np.abs([end.toarray() if issparse(end) else end for end in ends]).max(0)
    outside = np.flatnonzero((spread > 0) & ~((spread > LEAST) & (spread < MOST)))
    sizes = [(f"feature {draft.names[j]!r}", spread[j]) for j in outside[:1]]
    largest = float(np.nanmax(np.abs(draft.y)))
    if largest and not LEAST < largest < MOST:
        sizes.append(("y", largest))
    for name, size in sizes:
        raise ValueError(
            f"Expected the largest absolute value of {name}{after} to lie between {LEAST:g} and {MOST:g}, where "
            f"squares are finite and not zero, but it is {size:g}; choose another unit."
        )
