"""Which gates have to be open for an entry of a recorded tensor not to be zero, and to vary with the input."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pyro_l0.nn.engine.formulas import FALSE, TRUE, Formulas
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.slots import VARIES, ZERO, Axis, Index, Link, Mask, Read, Reshape
from pyro_l0.nn.engine.tape import Operation, Value

__all__ = ["Presence", "factors", "find_presence", "outer_both", "rows_of"]


@dataclass(eq=False)
class Presence:
    """For the entries of every dimension, the statements that their slices are not zero, and that they vary.

    Attributes:
        formulas: the statements.
        nonzero: by dimension, that an entry's slice is not zero.
        varies: by dimension, that it is another for another input.
        numbers: the same two of tensors without dimensions.
    """

    formulas: Formulas
    nonzero: dict[Axis, Index] = field(default_factory=dict)
    varies: dict[Axis, Index] = field(default_factory=dict)
    numbers: dict[Value, tuple[int, int]] = field(default_factory=dict)

    def whole(self, maps: Maps, value: Value) -> tuple[int, int]:
        """The statements that a tensor is not zero as a whole, and that it varies."""
        if not value.shape:
            return self.numbers[value]
        nonzero, varies = (
            self.formulas.every(self.formulas.some_of(known[axis]) for axis in maps.axes[value])
            for known in (self.nonzero, self.varies)
        )
        return nonzero, varies


def find_presence(formulas: Formulas, gates: dict[str, Index], opened: Maps, closed: Maps) -> Presence:
    """Go through the operations from the first to the last.

    Args:
        formulas: the statements.
        gates: by site, the statements that each gate is open.
        opened: what the rules say with all gates open: what is zero then always is.
        closed: what they say with all gates closed: what is not zero then never is.
    """
    finder = _Finder(formulas, gates, opened, closed, Presence(formulas))
    for value in opened.axes:
        if not value.shape:
            finder.known.numbers[value] = (TRUE, TRUE if opened.state(value) == VARIES else FALSE)
    for operation in opened.recording.operations:
        for value in operation.inputs:
            finder.begin(value)
        finder.speak(operation)
    for call in opened.recording.calls:
        for value in call.outputs:
            finder.begin(value)
    return finder.known


def factors(maps: Maps, operation: Operation) -> list[Value] | None:
    """The tensors of which a zero in one makes a zero of the result; None if there are none such."""
    product = next((product for product in maps.products if product.operation is operation), None)
    if product is not None and product.is_attention:
        return [operation.value("value")]
    if product is not None:
        added = operation.maybe("bias") or (operation.maybe("self") if "add" in operation.name else None)
        return [value for value in dict.fromkeys(operation.inputs) if value is not added]
    if any(isinstance(x, Link) and x.where is not None for x in maps.relations[operation]):
        return [x for x in dict.fromkeys(operation.inputs) if x.dtype.is_floating_point or x.dtype.is_complex]
    return None


class _Finder:
    """Says the statements of each operation's outputs."""

    def __init__(
        self, formulas: Formulas, gates: dict[str, Index], opened: Maps, closed: Maps, known: Presence
    ) -> None:
        self.formulas, self.gates, self.opened, self.closed, self.known = formulas, gates, opened, closed, known

    def begin(self, value: Value) -> None:
        """What no operation made is what it is, whatever the gates are."""
        for axis, other in zip(self.opened.axes[value], self.closed.axes[value], strict=True):
            if axis not in self.known.nonzero:
                self.known.nonzero[axis] = _true_where(other.states != ZERO)
                self.known.varies[axis] = _true_where(other.states == VARIES)

    def speak(self, operation: Operation) -> None:
        """Say the statements of an operation's outputs."""
        own = {axis for x in operation.outputs if x is not None for axis in self.opened.axes[x]}
        for relation in self.opened.relations[operation]:
            if isinstance(relation, Reshape):
                for axis in set(relation.targets) - own:  # of no tensor, between two reshapes
                    self.known.nonzero[axis] = self._reshape(relation, axis, self.known.nonzero)
                    self.known.varies[axis] = self._reshape(relation, axis, self.known.varies)
        for output in operation.outputs:
            if output is None:
                continue
            for axis, other in zip(self.opened.axes[output], self.closed.axes[output], strict=True):
                is_open = (
                    (other.states == ZERO) & (axis.states != ZERO),
                    (other.states < VARIES) & (axis.states == VARIES),
                )
                nonzero, varies = _true_where(other.states != ZERO), _true_where(other.states == VARIES)
                if is_open[0].any() or is_open[1].any():
                    found_nonzero, found_varies = self._follow(operation, output, axis)
                    nonzero = np.where(is_open[0], found_nonzero, nonzero)
                    varies = np.where(is_open[1], self.formulas.both_each(found_varies, nonzero), varies)
                self.known.nonzero[axis], self.known.varies[axis] = nonzero, varies
            if not output.shape:
                self.known.numbers[output] = self._number(operation, output)

    def _number(self, operation: Operation, output: Value) -> tuple[int, int]:
        nonzero, varies = self._whole(operation, operation.inputs)
        low, high = self.closed.state(output), self.opened.state(output)
        nonzero = TRUE if low != ZERO else nonzero if high != ZERO else FALSE
        return nonzero, TRUE if low == VARIES else varies if high == VARIES else FALSE

    def _whole(self, operation: Operation, inputs: list[Value]) -> tuple[int, int]:
        """The statements of a result that depends on tensors as wholes."""
        wholes = {value: self.known.whole(self.opened, value) for value in inputs}
        varies = self.formulas.some(whole[1] for whole in wholes.values())
        product = factors(self.opened, operation)
        if product is None:
            return self.formulas.some(whole[0] for whole in wholes.values()), varies
        nonzero = self.formulas.every(wholes[value][0] for value in product if value in wholes)
        return nonzero, self.formulas.both(nonzero, varies)

    def _follow(self, operation: Operation, output: Value, axis: Axis) -> tuple[Index, Index]:
        """What the relations say of a dimension of an output."""
        relations = self.opened.relations[operation]
        links = [x for x in relations if isinstance(x, Link) and x.target is axis]
        if operation.name == "gate" and links[0].where is not None:
            gates = self.gates[str(operation.arguments["site"])]
            known = self.known.nonzero[links[0].source], self.known.varies[links[0].source]
            return self.formulas.both_each(known[0], gates), self.formulas.both_each(known[1], gates)
        for relation in relations:
            if isinstance(relation, Reshape) and axis in relation.targets:
                return self._reshape(relation, axis, self.known.nonzero), self._reshape(
                    relation, axis, self.known.varies
                )
            if isinstance(relation, Read) and relation.behind is axis:
                return self._groups(relation, axis)
        if links:
            return self._links(operation, axis, links)
        nonzero, varies = self._whole(operation, operation.inputs)
        return np.full(axis.size, nonzero), np.full(axis.size, varies)

    def _reshape(self, relation: Reshape, axis: Axis, known: dict[Axis, Index]) -> Index:
        flat = outer_both(self.formulas, [known.get(x, _always(x)) for x in relation.sources])
        rows = rows_of(flat, relation.targets, axis)
        return self.formulas.some_of_each(rows)

    def _groups(self, relation: Read, axis: Axis) -> tuple[Index, Index]:
        """Each group of outputs is made of a group of inputs."""
        found = []
        for known in (self.known.nonzero, self.known.varies):
            groups = known[relation.axes[0]].reshape(relation.groups, -1)
            found.append(self.formulas.some_of_each(groups).repeat(axis.size // relation.groups))
        return found[0], found[1]

    def _links(self, operation: Operation, axis: Axis, links: list[Link]) -> tuple[Index, Index]:
        """Entries made of linked entries of some inputs, and of others as wholes."""
        sources = {
            value: link
            for link in links
            for value in operation.inputs
            if any(link.source is x for x in self.opened.axes[value])
        }
        rest = [value for value in dict.fromkeys(operation.inputs) if value not in sources]
        nonzero, varies = np.full(axis.size, FALSE), np.full(axis.size, FALSE)
        product = factors(self.opened, operation)
        is_part = any(link.target_entries is not None for link in links)
        if not is_part:
            whole_nonzero, whole_varies = self._whole(operation, rest) if rest else (FALSE, FALSE)
            if product is None:
                nonzero = np.full(axis.size, whole_nonzero)
            varies = np.full(axis.size, whole_varies)
        for link in links:
            nonzero = self.formulas.some_each(nonzero, _spread(link, self.known.nonzero[link.source]))
            varies = self.formulas.some_each(varies, _spread(link, self.known.varies[link.source]))
        if self._is_mixed(operation, links):
            varies = np.full(axis.size, self.formulas.some_of(varies))
        if product is not None:
            nonzero = np.full(axis.size, TRUE)
            for value in product:
                each = (
                    _spread(sources[value], self.known.nonzero[sources[value].source])
                    if value in sources
                    else np.full(axis.size, self.known.whole(self.opened, value)[0])
                )
                nonzero = self.formulas.both_each(nonzero, each)
        return nonzero, varies

    def _is_mixed(self, operation: Operation, links: list[Link]) -> bool:
        """Whether an operation that hands entries on reads them together as well, as a norm does."""
        read = [axis for x in self.opened.relations[operation] if isinstance(x, Read) for axis in x.axes]
        return any(link.source is axis for link in links for axis in read)


def outer_both(formulas: Formulas, vectors: list[Index]) -> Index:
    """The statement that all entries of a combination hold, for every combination, the last one running fastest."""
    result = vectors[0]
    for vector in vectors[1:]:
        result = formulas.both_each(result.repeat(len(vector)), np.tile(vector, len(result)))
    return result


def rows_of(flat: Index, axes: tuple[Axis, ...], axis: Axis) -> Index:
    """A row of the combinations that each entry of one of their dimensions takes part in."""
    dim = next(dim for dim, other in enumerate(axes) if other is axis)
    return np.moveaxis(flat.reshape([other.size for other in axes]), dim, 0).reshape(axis.size, -1)


def _true_where(mask: Mask) -> Index:
    return np.where(mask, np.int64(TRUE), np.int64(FALSE))


def _always(axis: Axis) -> Index:
    return np.full(axis.size, TRUE)


def _spread(link: Link, entries: Index) -> Index:
    """Statements of the input's entries at those of the output; where none is linked, FALSE."""
    entries = entries if link.source_entries is None else entries[link.source_entries]
    if link.target_entries is None:
        return entries
    spread = np.full(link.target.size, FALSE)
    spread[link.target_entries] = entries
    return spread
