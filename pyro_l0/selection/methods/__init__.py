"""The methods of finding a posterior by name, and which one suits a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyro_l0.selection.design.design import Design
from pyro_l0.selection.methods.background import mixed_posterior, probability_of_background
from pyro_l0.selection.methods.enumeration import enumerate_posterior
from pyro_l0.selection.methods.sampling import tempered_posterior
from pyro_l0.selection.problem import JointProblem, Problem, SelectionPosterior

__all__ = ["METHODS", "find_posterior"]

# Features up to which a sum over all subsets takes less time than chains; other families need a Newton iteration for
# each subset, whose time grows with the observations, and sum over one feature more where these are few.
_FEW_GAUSSIAN, _FEW_JOINT, _FEW, _SHORT = 15, 11, 8, 1000
_PROBABLE = 0.3  # probability of a background, by chains without one, from which on it is integrated over

METHODS: dict[str, Callable[..., SelectionPosterior]] = {
    "enumerate": enumerate_posterior,
    "tempered": tempered_posterior,
}


def find_posterior(
    problem: Problem | JointProblem,
    method: str,
    design: Design | None = None,
    *,
    draws: int,
    seed: int,
) -> tuple[SelectionPosterior, str]:
    """The posterior of a problem, and the method that found it.

    The method is a key of ``METHODS``, or ``"auto"``, which enumerates few features and samples the gates of more, and
    those of families with parameters of their own. The background of the ``design`` is integrated over where chains
    find it probable.
    """
    if method == "auto":
        method = "enumerate" if problem.gates <= _few(problem) and not problem.is_sampled else "tempered"
    if not problem.gates and not problem.is_sampled:
        method = "enumerate"  # the one gate vector that there is
    if isinstance(problem, JointProblem):
        return METHODS[method](problem, draws=draws, seed=seed), method
    if problem.background is not None:
        return mixed_posterior(problem, METHODS[method], draws=draws, seed=seed), method
    found = METHODS[method](problem, draws=draws, seed=seed)
    if design is None or method != "tempered" or found.active_probs.max() <= 0.5:
        return found, method
    background = design.background
    if background is None or probability_of_background(problem, background, found.draws) <= _PROBABLE:
        return found, method
    mixed = replace(problem, background=background)
    return mixed_posterior(mixed, METHODS[method], draws=draws, seed=seed, without=found), method


def _few(problem: Problem | JointProblem) -> int:
    """Gates up to which they are enumerated."""
    if isinstance(problem, JointProblem):
        return _FEW_JOINT
    if not problem.family.has_closed_form:
        return _FEW + (len(problem.y) <= _SHORT)
    return _FEW_GAUSSIAN - 2 * (problem.background is not None)  # a sum for each ratio
