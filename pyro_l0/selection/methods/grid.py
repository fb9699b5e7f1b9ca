"""Evidence of gate vectors with unknown scales integrated out, on a grid of the scales for each gate vector.

Gate vectors are evaluated in batches that have equally many open features. A grid lies around the mode of what the
scales are given its gate vector, and integrals over the scales' logarithms are sums over its nodes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from scipy.sparse import csr_array
from torch import Tensor

from pyro_l0.maths.tempered_gibbs import counted, distinct_rows, open_counts
from pyro_l0.selection.problem import Problem

# Nodes of an axis: to find the mode, and to integrate. The trapezoidal rule errs by 2 exp(-2 pi^2 / h^2) at steps of h
# standard deviations, and by about exp(-pi^2 / (2 h)) for the log of a half-normal scale, which takes the most.
COARSE, NODES = 18, 30
NEGLIGIBLE = 9.0  # nats below the mode, where integrals end: 4.2 deviations of a normal density
_LONG = 1.0  # seconds after which batches show a bar
_LIGHT = 20.0  # nats below the likeliest gate vector, beyond which a rough integral is enough


class AnyBatch(Protocol):
    """Gate vectors that have equally many open features."""

    @property
    def rows(self) -> Tensor:
        """Which of all gate vectors these are, shape ``(m,)``."""

    @property
    def open(self) -> Tensor:
        """Their open features, shape ``(m, k)``."""

    def at(self, index: Tensor) -> Self:
        """The gate vectors at indices of the batch."""


BatchT = TypeVar("BatchT", bound=AnyBatch)


class Batch(NamedTuple):
    """A batch without anything else; see :class:`AnyBatch`."""

    rows: Tensor
    open: Tensor

    def at(self, index: Tensor) -> Batch:
        """The gate vectors at indices of the batch, shape ``(m',)``."""
        return Batch(self.rows[index], self.open[index])


def batches_of(on: Tensor, most: Callable[[int], int]) -> Iterator[Batch]:
    """Batches of gate vectors by which features are open, bool, shape ``(S, p)``.

    ``most`` says how many gate vectors with k open features a batch may have.
    """
    count = open_counts(on).long()
    with counted(len(on), "gate vectors", _LONG) as bar:
        for k in count.unique().tolist():
            rows = torch.nonzero(count == k)[:, 0]
            features = torch.nonzero(on[rows])[:, 1].reshape(len(rows), k)
            size = max(1, most(k))
            for batch in map(Batch, rows.split(size), features.split(size)):
                yield batch
                bar.update(len(batch.rows))


class GridEvidence(ABC, Generic[BatchT]):
    """Gate vectors of a problem with everything else integrated out."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def log_marginal(self, z: Tensor) -> Tensor:
        """log p(y, z) for gates of shape ``(S, G)``; rough where it is 20 nats below that of another gate vector."""
        z = self.problem.checked(z)
        log_gates = self.problem.prior.gates().log_prob(z)
        log_joint = torch.full_like(log_gates, -math.inf)
        for batch in self._batches(z):
            nodes, rough = self._nodes(batch)
            log_joint[batch.rows] = log_gates[batch.rows] + rough
            likely = torch.nonzero(log_joint[batch.rows] > log_joint.max() - _LIGHT)[:, 0]
            if len(likely):
                grid = self._grid(batch.at(likely), nodes[likely])
                log_joint[batch.rows[likely]] = log_gates[batch.rows[likely]] + grid.log_marginal()
        return log_joint

    @abstractmethod
    def _batches(self, z: Tensor) -> Iterator[BatchT]:
        """Gate vectors in batches that fit in memory."""

    @abstractmethod
    def _nodes(self, batch: BatchT) -> tuple[Tensor, Tensor]:
        """Nodes of the grid's first axis for each gate vector, shape ``(m, R)``, and its rough log p(y | z)."""

    @abstractmethod
    def _grid(self, batch: BatchT, nodes: Tensor) -> Grid:
        """The grids of a batch on its nodes, shape ``(m, R)``, with the joint density at every one."""


def nodes_around_mode(log_density: Callable[[Tensor], Tensor], ends: Tensor, rounds: int = 1) -> tuple[Tensor, Tensor]:
    """Nodes where each of s densities is not negligible, between ends of shape ``(s, 2)``: shape ``(s, NODES)``.

    Coarse nodes, on which the density is evaluated, span the ends. The nodes then go from the first to the last coarse
    one within ``NEGLIGIBLE`` nats of the highest, and one more on either side. Further rounds search there again, for a
    density that is much narrower than a coarse step. A known value, whose ends are equal, is one node.

    The second result is the logarithm of the integral over the last coarse nodes, shape ``(s,)``.
    """
    if bool((ends[:, 0] == ends[:, 1]).all()):
        return ends[:, :1], log_density(ends[:, :1])[:, 0]
    for _ in range(rounds):
        nodes = spaced(ends, COARSE)
        log_densities = log_density(nodes)
        matters = (log_densities >= log_densities.amax(1, keepdim=True) - NEGLIGIBLE).int()
        first, last = matters.argmax(1), COARSE - 1 - matters.flip(1).argmax(1)
        around = torch.stack([first - 1, last + 1], 1).clamp(0, COARSE - 1)
        ends = nodes.gather(1, around)
    return spaced(ends, NODES), log_densities.logsumexp(1) + _spacing(nodes).log()


def spaced(ends: Tensor, number: int) -> Tensor:
    """Nodes at equal distances from ends of shape ``(s, 2)``, shape ``(s, number)``."""
    return ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * torch.linspace(0, 1, number, dtype=ends.dtype)


def _spacing(nodes: Tensor) -> Tensor:
    """Distance of nodes along the last axis; 1 for a known value, which has a mass and no density."""
    return nodes[..., 1] - nodes[..., 0] if nodes.shape[-1] > 1 else torch.ones_like(nodes[..., 0])


class Grid(NamedTuple):
    """R nodes of the log of slab scale / noise scale for each of s gate vectors, and M log noise scales for each node.

    Without noise, the ratio is the slab scale, and M is 1.
    """

    log_ratio: Tensor  # shape (s, R)
    log_noise: Tensor  # shape (s, R, M)
    log_joint: Tensor  # log p(y, node | z), a density by the unknown scales' logarithms, shape (s, R, M)

    @staticmethod
    def of_one(nodes: Tensor, log_joint: Tensor) -> Grid:
        """Of one unknown scale, whose nodes and densities have the shape ``(s, R)``."""
        return Grid(nodes, torch.zeros_like(nodes)[:, :, None], log_joint[:, :, None])

    def log_by_ratio(self) -> Tensor:
        """log p(y, log ratio | z), shape ``(s, R)``."""
        return self.log_joint.logsumexp(2) + _spacing(self.log_noise).log()

    def log_marginal(self) -> Tensor:
        """log p(y | z), shape ``(s,)``."""
        return self.log_by_ratio().logsumexp(1) + _spacing(self.log_ratio).log()

    def probs(self) -> Tensor:
        """Probabilities of the nodes given each gate vector, shape ``(s, R, M)``."""
        return self.log_joint.flatten(1).softmax(1).view_as(self.log_joint)

    def draw(self, vector: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """A log ratio and log noise scale for each draw, given which gate vector it has, shape ``(N,)``.

        A node is drawn by its probability, and then a point of its cell.
        """
        node = _drawn_columns(self.probs().flatten(1), vector, generator)
        of_ratio = node // self.log_noise.shape[2]
        log_ratio = self.log_ratio[vector, of_ratio]
        log_noise = self.log_noise.flatten(1)[vector, node]
        in_cell = torch.rand(2, len(node), generator=generator, dtype=torch.float64) - 0.5
        if self.log_ratio.shape[1] > 1:
            log_ratio = log_ratio + _spacing(self.log_ratio)[vector] * in_cell[0]
        if self.log_noise.shape[2] > 1:
            log_noise = log_noise + _spacing(self.log_noise[:, 0])[vector] * in_cell[1]
        return log_ratio, log_noise


def _drawn_columns(probs: Tensor, row: Tensor, generator: torch.Generator | None) -> Tensor:
    """A column for each draw, shape ``(N,)``, from its row and the columns' probabilities in each, ``(s, columns)``."""
    below = probs.cumsum(1)
    # The distribution functions of all rows one above the other: one search finds the columns of all draws.
    ladder = below / below[:, -1:] + torch.arange(len(probs))[:, None]
    point = torch.rand(len(row), generator=generator, dtype=torch.float64)
    column = torch.searchsorted(ladder.flatten(), row + point) - row * probs.shape[1]
    return column.clamp(0, probs.shape[1] - 1)


def distinct_vectors(z: Tensor) -> tuple[Tensor, Tensor]:
    """Each of some gate vectors once, and which of these every one is."""
    first, vector = distinct_rows(z)
    return z[first], vector


def draws_of(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Which draws have a gate vector among ``rows``, and which of these each has; ``vector`` is that of every draw."""
    position = torch.full((int(torch.cat([rows, vector]).max()) + 1,), -1)
    position[rows] = torch.arange(len(rows))
    drawn = torch.nonzero(position[vector] >= 0)[:, 0]
    return drawn, position[vector[drawn]]


def sparse_rows(parts: Sequence[tuple[Batch, Tensor]], rows: int, p: int, outputs: int) -> csr_array:
    """Coefficients of the open features, shape ``(m, k, outputs)`` for each batch, as the rows of a sparse matrix."""
    at, columns, values = [], [], []
    for batch, beta in parts:
        column = batch.open[:, :, None] * outputs + torch.arange(outputs)
        at.append(batch.rows[:, None, None].expand_as(column).flatten())
        columns.append(column.flatten())
        values.append(beta.flatten())
    where = (torch.cat(at).numpy(), torch.cat(columns).numpy())
    return csr_array((torch.cat(values).numpy(), where), shape=(rows, p * outputs))
