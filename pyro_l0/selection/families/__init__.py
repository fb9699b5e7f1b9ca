"""What a response can be: a file for each kind."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from pyro_l0.selection.families.bernoulli import Bernoulli, Binomial
from pyro_l0.selection.families.categorical import Categorical
from pyro_l0.selection.families.cox import Cox
from pyro_l0.selection.families.family import Family
from pyro_l0.selection.families.normal import Correlated, Gaussian, Multivariate
from pyro_l0.selection.families.ordinal import Ordinal
from pyro_l0.selection.families.poisson import NegativeBinomial, Poisson
from pyro_l0.selection.families.student import Student

__all__ = [
    "Bernoulli",
    "Binomial",
    "Categorical",
    "Correlated",
    "Cox",
    "Family",
    "Gaussian",
    "Multivariate",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Student",
    "family_of",
]


def _classes(y: ArrayLike) -> int:
    return int(np.asarray(y).max(initial=0)) + 1


_NAMED: dict[str, Callable[[ArrayLike], Family]] = {
    "gaussian": lambda y: Gaussian(),
    "multivariate": lambda y: Multivariate(np.shape(y)[-1]),
    "bernoulli": lambda y: Bernoulli(),
    "categorical": lambda y: Categorical(_classes(y)),
    "ordinal": lambda y: Ordinal(_classes(y)),
    "poisson": lambda y: Poisson(),
    "negative_binomial": lambda y: NegativeBinomial(),
    "breslow": lambda y: Cox(efron=False),
    "efron": lambda y: Cox(),
    "student": lambda y: Student(),
}


def family_of(family: str | Family, y: ArrayLike) -> Family:
    """A family by its name for some observations, or itself."""
    if isinstance(family, Family):
        return family
    if family not in _NAMED:
        raise ValueError(f"Expected a Family or one of {', '.join(_NAMED)}, but got {family!r}.")
    return _NAMED[family](y)
