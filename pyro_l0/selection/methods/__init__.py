"""The methods of finding a posterior by name, and which one suits a problem."""

from __future__ import annotations

from typing import Protocol

from pyro_l0.selection.methods.enumeration import enumerate_posterior
from pyro_l0.selection.methods.mean_field import mean_field_posterior
from pyro_l0.selection.methods.sampling import tempered_posterior
from pyro_l0.selection.methods.variational import autoregressive_posterior
from pyro_l0.selection.posterior import SelectionPosterior
from pyro_l0.selection.problem import Problem

__all__ = ["METHODS", "find_posterior"]

# Features up to which all subsets are summed over, which takes a second or less; other families need a Newton iteration
# for each subset.
_FEW_GAUSSIAN, _FEW = 15, 8


class _Method(Protocol):
    def __call__(self, problem: Problem, *, draws: int, seed: int) -> SelectionPosterior: ...


METHODS: dict[str, _Method] = {
    "enumerate": enumerate_posterior,
    "autoregressive": autoregressive_posterior,
    "mean_field": mean_field_posterior,
    "tempered": tempered_posterior,
}


def find_posterior(problem: Problem, method: str, *, draws: int, seed: int) -> tuple[SelectionPosterior, str]:
    """The posterior of a problem, and the method that found it.

    Args:
        problem: what to solve.
        method: a key of ``METHODS``; ``"auto"`` enumerates few features and samples the gates of more.
        draws: joint draws that are made.
        seed: of all random numbers.

    Raises:
        ValueError: the method takes no groups or weights, and there are some.
    """
    if method == "auto":
        few = _FEW_GAUSSIAN if problem.family == "gaussian" else _FEW
        method = "enumerate" if problem.gates <= few else "tempered"
    special = (problem.gate_of, problem.weight, problem.observations)
    if method in ("mean_field", "autoregressive") and any(part is not None for part in special):
        raise ValueError(
            f"Expected no groups and no sample_weight with method={method!r}, which treats features and rows alike; "
            "use 'auto', 'enumerate' or 'tempered'."
        )
    if not problem.gates:
        method = "enumerate"  # the one gate vector that there is
    return METHODS[method](problem, draws=draws, seed=seed), method
