"""Groups of gate vectors with as many open features, their prior, and what both kinds of evidence do with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from pyro_l0.maths.tempered_gibbs import BetaBinomialGates, GatePrior, IndependentGates, distinct_rows
from pyro_l0.selection.problem import Prior

__all__ = ["Group", "distinct_states", "draw_rate", "draws_of", "gate_prior", "groups_of", "sparse_rows"]


class Group(NamedTuple):
    """States with the same number of open features."""

    rows: Tensor  # which states, shape (m,)
    open: Tensor  # their open features, shape (m, k)
    known: tuple[Tensor, ...] = ()  # what has been computed once of each state

    def where(self, kept: Tensor) -> Group:
        """Some of the states."""
        if bool(kept.all()):
            return self
        return Group(self.rows[kept], self.open[kept], tuple(x[kept] for x in self.known))

    def split(self, size: int) -> Iterator[Group]:
        """Groups of at most ``size`` states."""
        parts = zip(*(x.split(size) for x in (self.rows, self.open, *self.known)), strict=True)
        return (Group(rows, opened, tuple(known)) for rows, opened, *known in parts if len(rows))


def groups_of(on: Tensor) -> list[Group]:
    """States grouped by how many features are open, from which are, bool, shape ``(S, p)``."""
    count = on.sum(1)
    found = []
    for k in count.unique().tolist():
        rows = torch.nonzero(count == k)[:, 0]
        found.append(Group(rows, torch.nonzero(on[rows])[:, 1].reshape(len(rows), k)))
    return found


def distinct_states(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each of some gate vectors once, which of these every one is, and how often they occur."""
    first, state = distinct_rows(z)
    return z[first], state, state.bincount()


def draws_of(rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Which draws have one of some states, and which of these each has."""
    place = torch.full((int(state.max()) + 1,), -1)
    place[rows] = torch.arange(len(rows))
    drawn = torch.nonzero(place[state] >= 0)[:, 0]
    return drawn, place[state[drawn]]


def gate_prior(prior: Prior) -> GatePrior:
    """The prior of the gates, with an unknown rate integrated out."""
    if isinstance(prior.rate, tuple):
        return BetaBinomialGates(*prior.rate)
    return IndependentGates(torch.tensor(math.log(prior.rate) - math.log1p(-prior.rate), dtype=torch.float64))


def draw_rate(prior: Prior, z: Tensor, generator: torch.Generator) -> NDArray[np.float64]:
    """P(z = 1) given gates of shape ``(N, G)``, shape ``(N,)``."""
    if not isinstance(prior.rate, tuple):
        return np.full(len(z), prior.rate)
    opened = z.sum(1).numpy()
    # By numpy, as torch draws Beta variables from its global generator alone.
    rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
    return rng.beta(prior.rate[0] + opened, prior.rate[1] + z.shape[1] - opened)


def sparse_rows(parts: list[tuple[Group, Tensor]], rows: int, p: int, outputs: int) -> csr_array:
    """Coefficients of the open features, shape ``(m, k, outputs)`` for each group, as the rows of a sparse matrix."""
    at, columns, values = [], [], []
    for group, beta in parts:
        place = group.open[:, :, None] * outputs + torch.arange(outputs)
        at.append(group.rows[:, None, None].expand_as(place).flatten())
        columns.append(place.flatten())
        values.append(beta.flatten())
    where = (torch.cat(at).numpy(), torch.cat(columns).numpy())
    return csr_array((torch.cat(values).numpy(), where), shape=(rows, p * outputs))
