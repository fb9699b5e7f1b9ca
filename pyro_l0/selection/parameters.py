"""Checks of the estimators' parameters, with scikit-learn's messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_random_state

from pyro_l0.selection.methods import METHODS

__all__ = ["check_parameters", "checked_groups", "seed_of"]


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_) and bool(np.isfinite(float(value)))


def _positive(value: Any) -> bool:
    return value is None or (_is_real(value) and value > 0)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_seed(value: object) -> bool:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**32
    return value is None or is_integer or isinstance(value, np.random.RandomState)


_METHODS = ("auto", *METHODS)

# Whether a value is allowed, and what is expected in words.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "rate": (lambda value: _positive(value) and (value is None or value < 1), "a float in the range (0, 1) or None"),
    "expected_size": (_positive, "a float in the range (0, n_features) or None"),
    "slab_scale": (_positive, "a float in the range (0, inf) or None"),
    "noise_scale": (_positive, "a float in the range (0, inf) or None"),
    "standardize": (_is_flag, "an instance of 'bool'"),
    "fit_intercept": (_is_flag, "an instance of 'bool'"),
    "method": (lambda value: isinstance(value, str) and value in _METHODS, f"a str among {set(_METHODS)}"),
    "random_state": (_is_seed, "an int in the range [0, 2**32 - 1], an instance of 'RandomState' or None"),
}


def check_parameters(estimator: str, parameters: Mapping[str, Any]) -> None:
    """Refuse bad parameters of an estimator, as ``get_params`` gives them."""
    for name, (is_allowed, expected) in _RULES.items():
        if name in parameters and not is_allowed(parameters[name]):
            raise ValueError(
                f"The {name!r} parameter of {estimator} must be {expected}. Got {parameters[name]!r} instead."
            )
    if parameters["rate"] is not None and parameters["expected_size"] is not None:
        raise ValueError(
            f"The 'rate' and 'expected_size' parameters of {estimator} say the same thing, so that one of them must be "
            f"None. Got rate={parameters['rate']!r} and expected_size={parameters['expected_size']!r} instead."
        )


def checked_groups(groups: ArrayLike | None, features: int) -> NDArray[np.intp]:
    """The group of each feature, shape ``(features,)``; its own index by default."""
    if groups is None:
        return np.arange(features)
    found = np.asarray(groups)
    fits = found.shape == (features,) and found.dtype.kind in "iu"
    if not fits or set(found.tolist()) != set(range(int(found.max()) + 1)):
        raise ValueError(
            f"Expected groups to be whole numbers from 0 on, one for each of {features} features and none left out, "
            f"but got {groups!r}; names become numbers by np.unique(names, return_inverse=True)[1]."
        )
    return found.astype(np.intp)


def seed_of(random_state: int | np.random.RandomState | None) -> int:
    """A seed by scikit-learn's convention, but without drawing from numpy's global generator where none is given."""
    if random_state is None:
        return int(np.random.default_rng().integers(2**31 - 1))
    return int(check_random_state(random_state).randint(2**31 - 1))
