"""What an objective refuses of its own options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import get_args

from torch import Tensor

from pyro_l0.infer.blocks import Block, Kind
from pyro_l0.infer.coefficients import Coefficient, Options, check_coefficient
from pyro_l0.infer.estimators import EstimatorName
from pyro_l0.infer.terms import OBJECTIVES, PRICE, SLAB_KL, TERMS, Term

__all__ = ["check_draws", "check_extra_terms", "check_numbers", "check_objective", "check_slab"]


def check_objective(objective: str) -> None:
    """Refuse an objective that the table does not have."""
    if objective not in OBJECTIVES:
        *names, last = map(repr, OBJECTIVES)
        raise ValueError(f"Expected objective {', '.join(names)} or {last}, but got {objective!r}.")


def check_numbers(kl_scale: float | Callable[[int], float], **coefficients: Coefficient) -> None:
    """Refuse coefficients that are negative or not finite."""
    for name, value in coefficients.items():
        check_coefficient(name, value)
    if not callable(kl_scale):
        check_coefficient("kl_scale", kl_scale)
        if isinstance(kl_scale, Tensor) and kl_scale.dim():
            raise ValueError(f"Expected kl_scale to be one number, but got a shape of {tuple(kl_scale.shape)}.")


def check_draws(num_particles: object, estimator: EstimatorName | None, vectorize_particles: bool) -> None:
    """Refuse numbers of particles, and estimators that do not go with them."""
    if isinstance(num_particles, bool) or not isinstance(num_particles, int) or num_particles < 1:
        raise ValueError(f"Expected num_particles of at least 1, but got {num_particles!r}.")
    if estimator is not None and estimator not in get_args(EstimatorName):
        raise ValueError(f"Expected estimator to be one of {get_args(EstimatorName)}, but got {estimator!r}.")
    if estimator == "leave_one_out" and num_particles < 2:
        raise ValueError(f"Expected num_particles of at least 2 for 'leave_one_out', but got {num_particles}.")
    if estimator is not None and vectorize_particles:
        raise ValueError("Expected no vectorize_particles with an estimator, which draws particles by itself.")


def check_slab(objective: str, slab: Mapping[str, str] | None, **prices: Coefficient) -> None:
    """Refuse slabs for an objective without their KL, and none for one with it; and prices for one without them."""
    terms = OBJECTIVES[objective]
    if slab and SLAB_KL not in terms:
        raise ValueError(f"Expected slab for objective='spike_slab' only, but got {slab!r} for {objective!r}.")
    if not slab and SLAB_KL in terms:
        raise ValueError(f"Expected slab={{'w': 'z', ...}} for objective={objective!r}, but got none.")
    for name, value in prices.items() if PRICE not in terms else ():
        if isinstance(value, Tensor | Mapping) or value != 0:
            raise ValueError(
                f"Expected no {name} for objective={objective!r}, whose slab KL is the price of a weight, "
                f"but got {value!r}."
            )


def check_extra_terms(extra_terms: Sequence[Term]) -> tuple[Term, ...]:
    """A user's own terms, whose values are looked at where those of the table are known to be right."""
    names = [term.name for term in TERMS]
    for term in extra_terms:
        if not isinstance(term, Term):
            raise TypeError(f"Expected extra_terms to be pyro_l0.infer.Term, but got {type(term).__name__}.")
        if term.kind not in get_args(Kind):
            raise ValueError(
                f"Expected the kind of extra term {term.name!r} in {get_args(Kind)}, but got {term.kind!r}."
            )
        if term.name in names:
            raise ValueError(f"Expected extra terms with names other than {names}, but got {term.name!r}.")
        names.append(term.name)
    return tuple(term._replace(value=partial(_scalar, term)) for term in extra_terms)


def _scalar(term: Term, block: Block, options: Options) -> Tensor | None:
    value = term.value(block, options)
    if value is not None and not (isinstance(value, Tensor) and value.shape == ()):
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"Expected extra term {term.name!r} to be a tensor of shape () at site {block.name!r}, but got {got}; sum "
            "it over the gates."
        )
    return value
