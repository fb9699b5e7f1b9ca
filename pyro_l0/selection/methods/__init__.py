"""The methods of finding a posterior by name, and which one suits a problem."""

from __future__ import annotations

from collections.abc import Callable

from pyro_l0.selection.methods.background import mixed_posterior
from pyro_l0.selection.methods.enumeration import enumerate_posterior
from pyro_l0.selection.methods.sampling import tempered_posterior
from pyro_l0.selection.problem import JointProblem, Problem, SelectionPosterior

__all__ = ["METHODS", "find_posterior"]

# Features up to which a sum over all subsets takes less time than chains; other families need a Newton iteration for
# each subset, whose time grows with the observations, and sum over one feature more where these are few.
_FEW_GAUSSIAN, _FEW_JOINT, _FEW, _SHORT = 15, 11, 8, 1000


METHODS: dict[str, Callable[..., SelectionPosterior]] = {
    "enumerate": enumerate_posterior,
    "tempered": tempered_posterior,
}


def find_posterior(
    problem: Problem | JointProblem, method: str, *, draws: int, seed: int
) -> tuple[SelectionPosterior, str]:
    """The posterior of a problem, and the method that found it.

    The method is a key of ``METHODS``, or ``"auto"``, which enumerates few features and samples the gates of more, and
    those of families with parameters of their own.
    """
    if method == "auto":
        few = _few(problem)
        method = "enumerate" if problem.gates <= few and not problem.is_sampled else "tempered"
    if not problem.gates and not problem.is_sampled:
        method = "enumerate"  # the one gate vector that there is
    if isinstance(problem, Problem) and problem.background is not None:
        return mixed_posterior(problem, METHODS[method], draws=draws, seed=seed), method
    return METHODS[method](problem, draws=draws, seed=seed), method


def _few(problem: Problem | JointProblem) -> int:
    """Gates up to which they are enumerated."""
    if isinstance(problem, JointProblem):
        return _FEW_JOINT
    if not problem.family.has_closed_form:
        return _FEW + (len(problem.y) <= _SHORT)
    return _FEW_GAUSSIAN - 2 * (problem.background is not None)  # a sum for each ratio
