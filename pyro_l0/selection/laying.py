"""Laying a grid of hyperparameters where the posterior of gate vectors is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

__all__ = ["Axes", "States", "lay"]

_LIGHT = 32.0  # nats below the heaviest state, beyond which a state has no part in the grid
_ROUNDS = 8  # at most


class States(Protocol):
    """Some gate vectors, with whatever has been computed of them once.

    Attributes:
        rows: which of all gate vectors, shape ``(m,)``.
    """

    @property
    def rows(self) -> Tensor:
        """As above."""
        ...

    def where(self, kept: Tensor) -> Self:
        """Some of them."""
        ...


GridT_co = TypeVar("GridT_co", covariant=True)
GridT = TypeVar("GridT")
StatesT = TypeVar("StatesT", bound=States)


class Axes(Protocol[GridT_co]):
    """Ranges of the logarithms of unknown scales."""

    @property
    def size(self) -> float:
        """Product of the lengths of the ranges; 0 where every scale is known."""
        ...

    @property
    def deficit(self) -> float:
        """By how much a log posterior may be higher between the nodes of the coarse grid than at one of them."""
        ...

    def coarse(self) -> GridT_co:
        """Few nodes."""
        ...

    def fine(self, times: int = 1) -> GridT_co:
        """As many nodes as integrals need, or so many times as many on each axis."""
        ...

    def zoomed(self, log_weights: Tensor) -> Self:
        """The part where the nodes of the coarse grid have weight."""
        ...


def lay(
    axes: Axes[GridT],
    groups: list[StatesT],
    log_gates: Tensor,
    log_joint: Callable[[StatesT, GridT], Iterator[tuple[Tensor, Tensor]]],
) -> tuple[Tensor, Axes[GridT]]:
    """Integrate over a grid, after rounds in which its range shrinks to where the weight is and light states drop out.

    Args:
        axes: ranges to begin with.
        groups: all gate vectors.
        log_gates: their log priors, shape ``(S,)``.
        log_joint: of a group and a grid: rows of some of its states with their log p(y, node | z), shape
            ``(s, *nodes)``.

    Returns:
        log p(y, z) of every state, shape ``(S,)``, and the ranges in the end.
    """
    log_marginal = torch.full_like(log_gates, -math.inf)
    for _ in range(_ROUNDS):
        if not axes.size:
            break
        weights = _weigh(groups, axes.coarse(), log_gates, log_joint, log_marginal)
        bound = log_marginal.max() - _LIGHT - axes.deficit
        groups = [group.where(log_marginal[group.rows] > bound) for group in groups]
        before, axes = axes.size, axes.zoomed(weights)
        if axes.size > 0.7 * before:
            break
    _weigh(groups, axes.fine(), log_gates, log_joint, log_marginal)
    return log_marginal, axes


def _weigh(
    groups: list[StatesT],
    grid: GridT,
    log_gates: Tensor,
    log_joint: Callable[[StatesT, GridT], Iterator[tuple[Tensor, Tensor]]],
    log_marginal: Tensor,
) -> Tensor:
    """Fill in the log marginals of the groups' states, and give the log weights of the nodes."""
    nodes: Tensor | None = None
    for group in groups:
        for rows, values in log_joint(group, grid):
            flat = values.flatten(1)
            most = flat.amax(1)
            joint = (flat - most[:, None]).exp_()
            most = most + log_gates[rows]
            log_marginal[rows] = most + joint.sum(1).log()
            added = (((most - most.max()).exp() @ joint).log() + most.max()).view(values.shape[1:])
            nodes = added if nodes is None else torch.logaddexp(nodes, added)
    assert nodes is not None
    return nodes
