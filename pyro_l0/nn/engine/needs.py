"""Which gates have to be open for an entry of a recorded tensor to be read on the way to the outputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyro_l0.nn.engine.formulas import FALSE, TRUE, Formulas
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.presence import Presence, factors, outer_both, rows_of
from pyro_l0.nn.engine.slots import Axis, Index, Link, Mask, Read, Reshape
from pyro_l0.nn.engine.tape import Operation, Value

__all__ = ["find_needs"]


def find_needs(
    formulas: Formulas, gates: dict[str, Index], opened: Maps, closed: Maps, presence: Presence
) -> list[tuple[int, Index]]:
    """Go through the operations from the last to the first; return blocks of entries, and when each has to stay.

    Arguments are those of :func:`~pyro_l0.nn.engine.presence.find_presence`, and what it returns.
    """
    finder = _Finder(formulas, gates, opened, closed, presence)
    return list(finder.required())


class _Finder:
    def __init__(
        self, formulas: Formulas, gates: dict[str, Index], opened: Maps, closed: Maps, presence: Presence
    ) -> None:
        self.formulas, self.gates, self.opened, self.closed, self.presence = formulas, gates, opened, closed, presence
        self._needed = {axis: np.full(axis.size, TRUE) for axis in opened.fixed_axes}
        self._numbers: dict[Value, int] = {}
        self._to_bias = {id(layer.read) for layer in opened.constant_inputs}

    def required(self) -> Iterator[tuple[int, Index]]:
        """Blocks, and for each of their entries the statement that it has to stay."""
        recording = self.opened.recording
        for call in recording.calls:
            for value in (*call.inputs, *call.outputs):
                for axis in self.opened.axes[value]:
                    yield axis.block, np.full(axis.size, TRUE)
        for value in [*self.opened.roots, *(x for call in recording.calls for x in call.outputs)]:
            self._numbers[value] = TRUE
            for axis in self.opened.axes[value]:
                self._needed[axis] = np.full(axis.size, TRUE)
        looks = set(self.opened.roots)
        for operation in reversed(recording.operations):
            runs = TRUE if looks.intersection(operation.inputs) else self._runs(operation)
            if runs == FALSE:
                continue
            for value in operation.inputs:
                self._numbers[value] = self.formulas.some((self._numbers.get(value, FALSE), runs))
            # What one of them has more, at the end, are entries that stayed for the sake of even parts.
            relations = zip(self.opened.relations[operation], self.closed.relations[operation], strict=False)
            for relation, other in reversed(list(relations)):
                if isinstance(relation, Link):
                    self._link(operation, relation, runs)
                elif isinstance(relation, Reshape):
                    self._reshape(relation, runs)
                else:
                    assert isinstance(other, Read)
                    entries = self._read(relation, other.where, runs)
                    yield relation.axes[0].block, entries
                    for axis in relation.axes:
                        self._add(axis, entries)

    def _runs(self, operation: Operation) -> int:
        """The statement that the outputs depend on an operation."""
        values = [value for value in operation.outputs if value is not None]
        return self.formulas.some(
            self.formulas.every(self.formulas.some_of(self._of(axis)) for axis in self.opened.axes[value])
            if value.shape
            else self._numbers.get(value, FALSE)
            for value in values
        )

    def _of(self, axis: Axis, runs: int = TRUE) -> Index:
        """The statements that an output's entries are needed, if its operation runs."""
        needed = self._needed[axis] if axis in self._needed else np.full(axis.size, FALSE)
        return self.formulas.both_each(needed, np.full(axis.size, runs))

    def _add(self, axis: Axis, entries: Index) -> None:
        self._needed[axis] = self.formulas.some_each(self._of(axis), entries)

    def _link(self, operation: Operation, link: Link, runs: int) -> None:
        needed = self._of(link.target, runs)
        if link.target_entries is not None:
            needed = needed[link.target_entries]
        if link.where is not None:
            needed = self.formulas.both_each(needed, self._where(operation, link))
        if link.source_entries is not None:
            spread = np.full(link.source.size, FALSE)
            spread[link.source_entries] = needed
            needed = spread
        self._add(link.source, needed)

    def _where(self, operation: Operation, link: Link) -> Index:
        """The statements that an entry is not multiplied by zero."""
        if operation.name == "gate":
            return self.gates[str(operation.arguments["site"])]
        total = np.full(link.target.size, TRUE)
        output = next(x for x in operation.outputs if x is not None and _place(self.opened, x, link.target) is not None)
        output_dim = _place(self.opened, output, link.target)
        assert output_dim is not None
        for value in factors(self.opened, operation) or ():
            axes = self.opened.axes[value]
            if any(axis is link.source for axis in axes):
                continue
            dim = output_dim - output.rank + value.rank
            if dim >= 0 and axes[dim].size == link.target.size:
                total = self.formulas.both_each(total, self.presence.nonzero[axes[dim]])
            else:
                total = self.formulas.both_each(total, np.full(len(total), self.presence.whole(self.opened, value)[0]))
        return total

    def _reshape(self, relation: Reshape, runs: int) -> None:
        flat = outer_both(self.formulas, [self._of(axis, runs) for axis in relation.targets])
        for axis in relation.sources:
            rows = rows_of(flat, relation.sources, axis)
            self._add(axis, self.formulas.some_of_each(rows))

    def _read(self, read: Read, closed: Mask | None, runs: int) -> Index:
        """The statements that entries are read: those that are with closed gates always, others unless zero."""
        size = read.axes[0].size
        entries = np.full(size, TRUE)
        if read.where is not None and closed is not None:
            for number, axis in enumerate(read.axes):
                is_input = number == 0 and id(read) in self._to_bias
                known = self.presence.varies if is_input else self.presence.nonzero
                entries = self.formulas.both_each(entries, known[axis])
            entries = np.where(read.where, np.where(closed, TRUE, entries), FALSE)
        runs_each = np.full(size, runs)
        if read.behind is not None:
            groups = self._of(read.behind).reshape(read.groups, -1)
            each = self.formulas.some_of_each(groups)
            runs_each = each.repeat(size // read.groups)
        return self.formulas.both_each(entries, runs_each)


def _place(maps: Maps, value: Value, axis: Axis) -> int | None:
    """Which dimension of a value an axis is."""
    return next((dim for dim, other in enumerate(maps.axes[value]) if other is axis), None)
