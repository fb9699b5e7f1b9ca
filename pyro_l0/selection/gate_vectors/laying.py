"""Laying a grid of hyperparameters where the posterior of gate vectors is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

__all__ = ["Axes", "Laid", "LogJoint", "StateGroup", "heaviest", "integrated", "lay"]

_LIGHT = 32.0  # nats below the heaviest state, beyond which a state has no part in the grid
_ROUNDS = 8  # at most
_ENOUGH = 512  # states


class StateGroup(Protocol):
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
StatesT = TypeVar("StatesT", bound=StateGroup)
LogJoint = Callable[[StatesT, GridT], Iterator[tuple[Tensor, Tensor]]]


class Axes(Protocol[GridT_co]):
    """Ranges of the logarithms of unknown scales."""

    @property
    def size(self) -> float:
        """Product of the lengths of the ranges that are not of length 0."""
        ...

    @property
    def settled(self) -> bool:
        """Whether the ranges are short enough, or every scale is known."""
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


class Laid(NamedTuple, Generic[GridT, StatesT]):
    """Where a grid has been laid.

    Attributes:
        axes: ranges in the end.
        groups: the states that are left.
        log_marginal: log p(y, z) on the coarse grid, shape ``(S,)``.
    """

    axes: Axes[GridT]
    groups: list[StatesT]
    log_marginal: Tensor


def lay(
    axes: Axes[GridT], groups: list[StatesT], log_gates: Tensor, log_joint: LogJoint[StatesT, GridT]
) -> Laid[GridT, StatesT]:
    """Shrink the ranges of a grid in rounds to where the weight is, while light states drop out.

    Args:
        axes: ranges to begin with.
        groups: all gate vectors.
        log_gates: their log priors, shape ``(S,)``.
        log_joint: of a group and a grid: rows of some of its states with their log p(y, node | z), shape
            ``(s, *nodes)``.
    """
    log_marginal = torch.full_like(log_gates, -math.inf)
    for _ in range(_ROUNDS):
        if axes.settled:
            break
        weights = _weigh(groups, axes.coarse(), log_gates, log_joint, log_marginal)
        bound = log_marginal.max() - _LIGHT - axes.deficit
        groups = [group.where(log_marginal[group.rows] > bound) for group in groups]
        before, axes = axes.size, axes.zoomed(weights)
        if axes.size > 0.7 * before:
            break
    return Laid(axes, groups, log_marginal)


def integrated(laid: Laid[GridT, StatesT], log_gates: Tensor, log_joint: LogJoint[StatesT, GridT]) -> Tensor:
    """log p(y, z) of every state, shape ``(S,)``: on the fine grid, or on the coarse one for light states.

    Args:
        laid: of the same states.
        log_gates: see :func:`lay`.
        log_joint: see :func:`lay`.
    """
    log_marginal = laid.log_marginal.clone()
    _weigh(laid.groups, laid.axes.fine(), log_gates, log_joint, log_marginal)
    return log_marginal


def heaviest(z: Tensor, weights: Tensor) -> Tensor:
    """The states that tell where the grid lies, if they are many.

    Args:
        z: gates, shape ``(S, p)``.
        weights: of the states, shape ``(S,)``.
    """
    return z[weights.topk(min(_ENOUGH, len(z))).indices]


def _weigh(
    groups: list[StatesT],
    grid: GridT,
    log_gates: Tensor,
    log_joint: LogJoint[StatesT, GridT],
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
