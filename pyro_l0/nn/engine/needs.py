"""Which entries of recorded tensors the network's outputs depend on, for given gates or as statements about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from pyro_l0.nn.engine.formulas import FALSE, TRUE, Formulas
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.slots import Axis, Index, Link, Read
from pyro_l0.nn.engine.tape import Operation, Value

__all__ = ["Needs"]


class Needs:
    """Goes through the operations from the last to the first.

    ``passes`` gives the statements that the entries of a link with ``where`` are not multiplied by zero, ``reads`` that
    entries are not left out of a sum over them. For given gates all statements are true or false.
    """

    def __init__(
        self,
        maps: Maps,
        formulas: Formulas,
        passes: Callable[[Operation, Link], Index],
        reads: Callable[[Read], Index],
    ) -> None:
        self._maps, self._formulas = maps, formulas
        self._needed = {axis: np.full(axis.size, TRUE) for axis in maps.fixed_axes}
        self.running: dict[Operation, int] = {}
        self.read: dict[Read, Index] = {}
        roots = set(maps.roots)
        self._add_whole([*maps.roots, *(value for call in maps.recording.calls for value in call.outputs)], TRUE)
        for operation in reversed(maps.recording.operations):
            runs = TRUE if roots.intersection(operation.inputs) else self._runs(operation)
            if runs == FALSE:
                continue
            self.running[operation] = runs
            self._add_whole([value for value in operation.inputs if not value.shape], runs)
            for relation in reversed(maps.relations[operation]):
                if isinstance(relation, Link):
                    where = None if relation.where is None else passes(operation, relation)
                    self._add(relation.source, self._linked(relation, where, runs))
                elif isinstance(relation, Read):
                    self.read[relation] = self._read(relation, reads(relation), runs)
                    for axis in relation.axes:
                        self._add(axis, self.read[relation])
                else:
                    targets = [self.of(axis, runs) for axis in relation.targets]
                    for axis in relation.sources:
                        self._add(axis, formulas.regroup(targets, relation.sources, axis))

    def of(self, axis: Axis, runs: int = TRUE) -> Index:
        """The statements that an output's entries are needed, if its operation runs."""
        needed = self._needed[axis] if axis in self._needed else np.full(axis.size, FALSE)
        return needed if runs == TRUE else self._formulas.both_each(needed, np.array([runs]))

    def _add(self, axis: Axis, entries: Index) -> None:
        self._needed[axis] = self._formulas.some_each(self._needed[axis], entries) if axis in self._needed else entries

    def _add_whole(self, values: Iterable[Value], statement: int) -> None:
        for axis in (axis for value in values for axis in self._maps.dims(value)):
            self._add(axis, np.full(axis.size, statement))

    def _runs(self, operation: Operation) -> int:
        """The statement that the outputs depend on an operation."""
        return self._formulas.some(
            self._formulas.every(self._formulas.some_of(self.of(axis)) for axis in self._maps.dims(value))
            for value in operation.made
        )

    def _linked(self, link: Link, where: Index | None, runs: int) -> Index:
        """An entry is needed if one that reads it is, and if it is not multiplied by zero."""
        needed = self.of(link.target, runs)
        if link.target_entries is not None:
            needed = needed[link.target_entries]
        if where is not None:
            needed = self._formulas.both_each(needed, where)
        if link.source_entries is None:
            return needed
        spread = np.full(link.source.size, FALSE)
        spread[link.source_entries] = needed
        return spread

    def _read(self, read: Read, entries: Index, runs: int) -> Index:
        """Entries are read if the operation runs, or if an entry of their group is needed behind it."""
        if read.behind is None:
            return entries if runs == TRUE else self._formulas.both_each(entries, np.array([runs]))
        groups = self._formulas.some_of_each(self.of(read.behind).reshape(read.groups, -1))
        return self._formulas.both_each(entries, groups.repeat(len(entries) // read.groups))
