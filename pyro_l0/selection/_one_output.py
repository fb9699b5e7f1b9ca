"""Regressions with one linear predictor, whose coefficients are a vector and whose intercept is a number."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import validate_data

from pyro_l0.selection._base import Array, SpikeSlabEstimator

__all__ = ["OneOutput"]


class OneOutput(SpikeSlabEstimator):
    """The observations are numbers, and each feature has one coefficient."""

    def _validated(self, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
        found, target = validate_data(self, x, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        return np.array(found), np.array(target, dtype=np.float64)

    def _as_coef(self, values: Array) -> Array:
        return values

    def _as_intercept(self, values: Array) -> Array:
        return values[:, 0]
