"""The methods of finding a posterior by name, and which one suits a problem."""

from __future__ import annotations

from collections.abc import Callable

from pyro_l0.selection.methods.background import mixed_posterior
from pyro_l0.selection.methods.enumeration import enumerate_posterior
from pyro_l0.selection.methods.sampling import tempered_posterior
from pyro_l0.selection.problem import Problem, SelectionPosterior

__all__ = ["METHODS", "find_posterior"]

# Features up to which a sum over all subsets takes less time than chains; other families need a Newton iteration for
# each subset, whose time grows with the observations, and sum over one feature more where these are few.
_FEW_GAUSSIAN, _FEW, _SHORT = 15, 8, 1000


METHODS: dict[str, Callable[..., SelectionPosterior]] = {
    "enumerate": enumerate_posterior,
    "tempered": tempered_posterior,
}


def find_posterior(problem: Problem, method: str, *, draws: int, seed: int) -> tuple[SelectionPosterior, str]:
    """The posterior of a problem, and the method that found it.

    The method is a key of ``METHODS``, or ``"auto"``, which enumerates few features and samples the gates of more, and
    those of families with parameters of their own.
    """
    if method == "auto":
        few = _FEW_GAUSSIAN if problem.family.has_closed_form else _FEW + (len(problem.y) <= _SHORT)
        few -= 2 * (problem.background is not None)  # a sum for each ratio
        method = "enumerate" if problem.gates <= few and not problem.is_sampled else "tempered"
    if not problem.gates and not problem.is_sampled:
        method = "enumerate"  # the one gate vector that there is
    if problem.background is not None:
        return mixed_posterior(problem, METHODS[method], draws=draws, seed=seed), method
    return METHODS[method](problem, draws=draws, seed=seed), method
