"""Which gates have to be open for the network's outputs to depend on an entry of a recorded tensor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyro_l0.nn.engine.formulas import FALSE, TRUE
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.presence import NONZERO, VARYING, Presence, factors
from pyro_l0.nn.engine.slots import Axis, Index, Link, Mask, Read, Reshape
from pyro_l0.nn.engine.tape import Operation, Value

__all__ = ["find_needs"]


def find_needs(presence: Presence, opened: Maps, closed: Maps) -> Iterator[tuple[int, Index]]:
    """Go through the operations from the last to the first; yield blocks of entries, and when each has to stay.

    Args:
        presence: when entries are zero, and when they vary.
        opened: what the rules say with all gates open.
        closed: what they say with all gates closed.
    """
    needs = _Needs(presence, opened)
    recording = opened.recording
    outputs = [x for call in recording.calls for x in call.outputs]
    for value in [*outputs, *(x for call in recording.calls for x in call.inputs)]:
        for axis in opened.axes[value]:
            yield axis.block, np.full(axis.size, TRUE)
    needs.add_whole([*opened.roots, *outputs], TRUE)
    for operation in reversed(recording.operations):
        runs = TRUE if set(opened.roots).intersection(operation.inputs) else needs.runs(operation)
        if runs == FALSE:
            continue
        needs.add_whole([value for value in operation.inputs if not value.shape], runs)
        # What one of them has more, at the end, are entries that stayed for the sake of even parts.
        relations = zip(opened.relations[operation], closed.relations[operation], strict=False)
        for relation, other in reversed(list(relations)):
            if isinstance(relation, Link):
                needs.add(relation.source, needs.linked(operation, relation, runs))
            elif isinstance(relation, Reshape):
                needs.regroup(relation, runs)
            else:
                assert isinstance(other, Read)
                entries = needs.read(relation, other.where, runs)
                yield relation.axes[0].block, entries
                for axis in relation.axes:
                    needs.add(axis, entries)


class _Needs:
    """By dimension, the statements that the outputs depend on its entries, as far as they are known."""

    def __init__(self, presence: Presence, maps: Maps) -> None:
        self.presence, self.maps, self.formulas = presence, maps, presence.formulas
        self._needed = {axis: np.full(axis.size, TRUE) for axis in maps.fixed_axes}
        self._to_bias = {id(layer.read) for layer in maps.constant_inputs}

    def of(self, axis: Axis, runs: int = TRUE) -> Index:
        """The statements that an output's entries are needed, if its operation runs."""
        return self.formulas.both_each(self._needed.get(axis, np.full(axis.size, FALSE)), np.array([runs]))

    def add(self, axis: Axis, entries: Index) -> None:
        """Entries are needed for another reason."""
        self._needed[axis] = self.formulas.some_each(self.of(axis), entries)

    def add_whole(self, values: list[Value], statement: int) -> None:
        """All entries of tensors are needed."""
        for axis in (axis for value in values for axis in self.maps.dims(value)):
            self.add(axis, np.full(axis.size, statement))

    def runs(self, operation: Operation) -> int:
        """The statement that the outputs depend on an operation."""
        return self.formulas.some(
            self.formulas.every(self.formulas.some_of(self.of(axis)) for axis in self.maps.dims(value))
            for value in operation.outputs
            if value is not None
        )

    def linked(self, operation: Operation, link: Link, runs: int) -> Index:
        """The statements that an input's entries are needed by the entries that read them."""
        needed = self.of(link.target, runs)
        if link.target_entries is not None:
            needed = needed[link.target_entries]
        if link.where is not None:
            needed = self.formulas.both_each(needed, self._where(operation, link))
        if link.source_entries is None:
            return needed
        spread = np.full(link.source.size, FALSE)
        spread[link.source_entries] = needed
        return spread

    def _where(self, operation: Operation, link: Link) -> Index:
        """The statements that an entry is not multiplied by zero."""
        if operation.name == "gate":
            return self.presence.gates[str(operation.arguments["site"])]
        total = np.full(link.target.size, TRUE)
        values = [value for value in operation.outputs if value is not None]
        behind = next(dim - x.rank for x in values for dim, axis in enumerate(self.maps.axes[x]) if axis is link.target)
        for value in factors(self.maps, operation) or ():
            axes = self.maps.axes[value]
            if any(axis is link.source for axis in axes):
                continue
            is_same = value.rank + behind >= 0 and axes[behind].size == link.target.size
            known = self.presence.known[axes[behind]] if is_same else self.presence.whole(value)
            total = self.formulas.both_each(total, known[NONZERO])
        return total

    def regroup(self, relation: Reshape, runs: int) -> None:
        """An entry is needed if one that it takes part in is."""
        targets = [self.of(axis, runs) for axis in relation.targets]
        for axis in relation.sources:
            self.add(axis, self.formulas.regroup(targets, relation.sources, axis))

    def read(self, read: Read, closed: Mask | None, runs: int) -> Index:
        """The statements that entries are read: those that are with closed gates always, others unless zero."""
        size = read.axes[0].size
        entries = np.full(size, TRUE)
        if read.where is not None and closed is not None:
            for number, axis in enumerate(read.axes):
                row = VARYING if number == 0 and id(read) in self._to_bias else NONZERO
                entries = self.formulas.both_each(entries, self.presence.known[axis][row])
            entries = np.where(read.where, np.where(closed, TRUE, entries), FALSE)
        if read.behind is None:
            return self.formulas.both_each(entries, np.array([runs]))
        groups = self.formulas.some_of_each(self.of(read.behind).reshape(read.groups, -1))
        return self.formulas.both_each(entries, groups.repeat(size // read.groups))
