"""The dimensions of recorded tensors: which entries are one unit, what is known of them, and who reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

__all__ = [
    "CONSTANT",
    "VARIES",
    "ZERO",
    "Axis",
    "Box",
    "Index",
    "Link",
    "Mask",
    "Read",
    "Reshape",
    "Slots",
    "States",
    "outer",
]

# What is known of a slice of a tensor: all zeros, the same whatever the network is given, or neither.
ZERO, CONSTANT, VARIES = 0, 1, 2
Mask = npt.NDArray[np.bool_]
States = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
_Entry = TypeVar("_Entry", bound=np.generic)


class Axis:
    """One dimension of a recorded tensor: its block in :class:`Slots`, and what is known of each entry's slice."""

    def __init__(self, size: int, block: int, state: int) -> None:
        self.size = size
        self.block = block
        self.states: States = np.full(size, state, dtype=np.uint8)

    @property
    def state(self) -> int:
        """What is known of the whole tensor, as far as this dimension tells."""
        return int(self.states.max()) if self.size else ZERO


class Slots:
    """Entries of dimensions, in blocks of one dimension each, and which of them are the same unit.

    Two dimensions that agree entry by entry are joined as wholes, which costs nothing; others by pairs of entries.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parents: list[int] = []
        self._pairs: list[tuple[int, Index, int, Index]] = []
        self._units: list[Index] | None = None  # as long as nothing is added or joined

    def new(self, size: int) -> int:
        """A block of entries that belong to nothing yet."""
        self._units = None
        self._sizes.append(size)
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def root(self, block: int) -> int:
        """The block that stands for all that it was joined with."""
        while self._parents[block] != block:
            self._parents[block] = self._parents[self._parents[block]]
            block = self._parents[block]
        return block

    def join(self, one: int, other: int) -> None:
        """Entry i of one block is the same unit as entry i of the other."""
        one, other = self.root(one), self.root(other)
        assert self._sizes[one] == self._sizes[other]
        self._units = self._units if one == other else None
        self._parents[max(one, other)] = min(one, other)

    def join_entries(self, one: int, entries: Index, other: int, others: Index) -> None:
        """Some entries of one block are the same units as some of the other."""
        if len(entries):
            self._units = None
            self._pairs.append((one, entries, other, others))

    def units(self) -> list[Index]:
        """The unit of every entry, by block; joined blocks share their array."""
        if self._units is None:
            self._units = self._find_units()
        return self._units

    def _find_units(self) -> list[Index]:
        roots = [self.root(block) for block in range(len(self._parents))]
        starts, total = dict[int, int](), 0
        for root in dict.fromkeys(roots):
            starts[root] = total
            total += self._sizes[root]
        ones = [starts[roots[one]] + entries for one, entries, _, _ in self._pairs]
        others = [starts[roots[other]] + entries for _, _, other, entries in self._pairs]
        if ones:
            rows, columns = np.concatenate(ones), np.concatenate(others)
            graph = coo_matrix((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(total, total))
            labels = connected_components(graph, directed=False)[1].astype(np.int64)
        else:
            labels = np.arange(total)
        of_root = {root: labels[start : start + self._sizes[root]] for root, start in starts.items()}
        return [of_root[root] for root in roots]


@dataclass(frozen=True, eq=False)
class Box:
    """A dimension whose entries are the pairs (or triples, ...) of entries of others, last one fastest.

    An entry of the flat dimension leaves if and only if one of its factors' entries leaves.
    """

    factors: tuple[int, ...]  # their blocks
    flat: int
    is_view: bool  # whether the factors are dimensions of tensors, which the network's code tells apart


@dataclass(frozen=True, eq=False)
class Link:
    """Entries of an operation's input are read by entries of its output alone, one by one."""

    source: Axis  # of the input
    target: Axis  # of the output
    source_entries: Index | None = None  # which are read; None for all
    target_entries: Index | None = None  # which read them, in the same order; None for all
    where: Mask | None = None  # whether an entry is read at all, by entry that is linked; None for all


@dataclass(frozen=True, eq=False)
class Reshape:
    """The entries of some dimensions, in order, are the entries of others, in order."""

    sources: tuple[Axis, ...]
    targets: tuple[Axis, ...]

    def pass_states(self) -> None:
        """A slice is as variable as the most variable of what it takes part in."""
        flat = outer(np.minimum, [axis.states for axis in self.sources])
        flat = flat.reshape([axis.size for axis in self.targets])
        for dim, axis in enumerate(self.targets):
            axis.states = flat.max(axis=tuple(d for d in range(flat.ndim) if d != dim))


@dataclass(frozen=True, eq=False)
class Read:
    """Entries of an operation's input that it reads together, so that they have to stay while its output is needed."""

    axes: tuple[Axis, ...]  # of the same entries, in one or several inputs
    where: Mask | None  # which entries are read; None for all
    reason: str  # why they stay
    groups: int = 1  # with ``behind``: an entry is read only if an entry of its group is needed there
    behind: Axis | None = None  # the output's dimension in groups


def outer(function: np.ufunc, vectors: Sequence[npt.NDArray[_Entry]]) -> npt.NDArray[_Entry]:
    """A function of every combination of the vectors' entries, a dimension for each vector."""
    return reduce(function.outer, vectors)
