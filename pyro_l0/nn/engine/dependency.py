"""Which gates have to be open for an entry of a recorded tensor to stay, to vary, or not to be zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Generic, TypeVar

import numpy as np
import torch

from pyro_l0.nn.engine.analysis import Analysis, analyse, choose_constants
from pyro_l0.nn.engine.maps import VARIES, ZERO, Axis, Index, Link, Maps, Mask, Read, Reshape
from pyro_l0.nn.engine.record import Operation, Recording, Value
from pyro_l0.nn.engine.statements import FALSE, TRUE, Needs, Statements
from pyro_l0.nn.gate import gate_names

__all__ = ["Dependencies", "Presence", "find_dependencies"]


Of = TypeVar("Of", bound=Statements)
NONZERO, VARYING = 0, 1  # rows of what is known


class Presence:
    """For the entries of every dimension, the statements that their slices are not zero, and that they vary.

    ``gates`` are by site the statements that each gate is open. What is zero with all gates open (``opened``) always
    is; what is not zero with all gates closed (``closed``) never is.
    """

    def __init__(self, statements: Statements, gates: dict[str, Index], opened: Maps, closed: Maps) -> None:
        self.statements, self.gates, self.maps = statements, gates, opened
        of_weight = defaultdict[Value, list[Read]](list)
        for layer in opened.constant_inputs:
            of_weight[layer.weight].append(layer.read)
        self._to_bias = {read: calls for calls in of_weight.values() for read in calls}
        at_least = {
            axis: other
            for value in opened.axes
            for axis, other in zip(opened.dims(value), closed.dims(value), strict=True)
        }
        self.known: dict[Axis, Index] = {axis: _rows(other) for axis, other in at_least.items()}
        for operation in opened.recording.operations:
            for reshape in [x for x in opened.relations[operation] if isinstance(x, Reshape)]:
                for axis in set(reshape.targets).difference(at_least):  # of no tensor, between two reshapes
                    self.known[axis] = self._regroup(reshape, axis)
            for axis in (axis for output in operation.made for axis in opened.dims(output)):
                self._refine(operation, axis)

    def whole(self, value: Value) -> Index:
        """The statements that a tensor is not zero as a whole, and that it varies, shape ``(2, 1)``."""
        known = [self.known[axis] for axis in self.maps.dims(value)]
        return np.array([[self.statements.every(self.statements.some_of(x[row]) for x in known)] for row in (0, 1)])

    def passes(self, operation: Operation, link: Link) -> Index:
        """The statements that the entries of a link are not multiplied by zero."""
        if operation.name == "gate":
            return self.gates[str(operation.arguments["site"])]
        total = np.full(link.target.size, TRUE)
        outputs = ((x, dim, axis) for x in operation.made for dim, axis in enumerate(self.maps.axes[x]))
        behind = next(dim - x.rank for x, dim, axis in outputs if axis is link.target)
        for value in factors(self.maps, operation) or ():
            axes = self.maps.axes[value]
            if any(axis is link.source for axis in axes):
                continue
            is_same = value.rank + behind >= 0 and axes[behind].size == link.target.size
            known = self.known[axes[behind]] if is_same else self.whole(value)
            total = self.statements.both_each(total, known[NONZERO])
        return total

    def reads(self, read: Read, closed: Mask | None) -> Index:
        """The statements that a sum needs entries: those that it has with closed gates always, others unless zero."""
        entries = np.full(read.axes[0].size, TRUE)
        if read.where is None or closed is None:
            return entries
        for number, axis in enumerate(read.axes):
            is_read = self.known[axis][NONZERO]
            if number == 0 and read in self._to_bias:  # a constant may leave if it is one at all calls of the layer
                calls = [self.known[call.axes[0]] for call in self._to_bias[read]]
                is_same = np.logical_and.reduce([call[NONZERO] == is_read for call in calls])
                varies = reduce(self.statements.some_each, [call[VARYING] for call in calls])
                is_read = np.where(is_same, varies, is_read)
            entries = self.statements.both_each(entries, is_read)
        return np.where(read.where, np.where(closed, TRUE, entries), FALSE)

    def _refine(self, operation: Operation, axis: Axis) -> None:
        """Find the statements of a dimension of an output, where open gates make a difference."""
        known = self.known[axis]
        is_asked = _rows(axis) < known  # TRUE where it is FALSE with closed gates
        if is_asked.any():
            found = self._follow(operation, axis)
            known[NONZERO] = np.where(is_asked[NONZERO], found[NONZERO], known[NONZERO])
            found[VARYING] = self.statements.both_each(found[VARYING], known[NONZERO])
            known[VARYING] = np.where(is_asked[VARYING], found[VARYING], known[VARYING])

    def _follow(self, operation: Operation, axis: Axis) -> Index:
        """What the relations say of a dimension of an output."""
        relations = self.maps.relations[operation]
        links = [x for x in relations if isinstance(x, Link) and x.target is axis]
        if operation.name == "gate" and links and links[0].where is not None:
            gates = self.gates[str(operation.arguments["site"])]
            return self.statements.both_each(self.known[links[0].source], gates)
        for relation in relations:
            if isinstance(relation, Reshape) and axis in relation.targets:
                return self._regroup(relation, axis)
            if isinstance(relation, Read) and relation.behind is axis:
                groups = self.known[relation.axes[0]].reshape(2, relation.groups, -1)
                found = self.statements.some_of_each(groups).repeat(axis.size // relation.groups, axis=1)
                others = [x for x in operation.inputs if relation.axes[0] not in self.maps.axes[x]]
                found[VARYING] = self.statements.some_each(found[VARYING], self._together(operation, others)[VARYING])
                return found
        if links:
            return self._links(operation, axis, links)
        return self._together(operation, operation.inputs).repeat(axis.size, axis=1)

    def _regroup(self, relation: Reshape, axis: Axis) -> Index:
        known = [self.known.get(x, np.full((2, x.size), TRUE)) for x in relation.sources]
        return np.stack([self.statements.regroup([x[row] for x in known], relation.targets, axis) for row in (0, 1)])

    def _together(self, operation: Operation, inputs: Iterable[Value]) -> Index:
        """The statements of a result that depends on tensors as wholes, shape ``(2, 1)``."""
        wholes = {value: self.whole(value) for value in inputs}
        total = np.array([[self.statements.some(x[row, 0] for x in wholes.values())] for row in (0, 1)])
        product = factors(self.maps, operation)
        if product is not None:
            nonzero = self.statements.every(int(wholes[x][NONZERO, 0]) for x in product if x in wholes)
            total[:, 0] = nonzero, self.statements.both(nonzero, int(total[VARYING, 0]))
        return total

    def _links(self, operation: Operation, axis: Axis, links: list[Link]) -> Index:
        """Entries made of linked entries of some inputs, and of others as wholes."""
        linked = {
            value: link.forward(self.known[link.source], FALSE)
            for link in links
            for value in operation.inputs
            if any(link.source is x for x in self.maps.axes[value])
        }
        rest = [value for value in dict.fromkeys(operation.inputs) if value not in linked]
        found = np.full((2, axis.size), FALSE)
        if rest and all(link.target_entries is None for link in links):
            found = self._together(operation, rest).repeat(axis.size, axis=1)
            found = _without_factors(found, rest)
        for link in links:
            each = link.forward(self.known[link.source], FALSE)
            of_link = [x for x in linked if any(link.source is axis for axis in self.maps.axes[x])]
            found = self.statements.some_each(found, _without_factors(each, of_link))
        for link in (link for link in links if link.is_factor):
            at = slice(None) if link.target_entries is None else link.target_entries
            found[NONZERO, at] = self.statements.both_each(
                found[NONZERO, at], link.forward(self.known[link.source], FALSE)[NONZERO, at]
            )
        read = [axis for x in self.maps.relations[operation] if isinstance(x, Read) for axis in x.axes]
        if any(link.source is axis for link in links for axis in read):  # it reads them together, too, as a norm does
            found[VARYING] = self.statements.some_of(found[VARYING])
        product = factors(self.maps, operation)
        if product is not None:
            found[NONZERO] = TRUE
            for value in product:
                each = linked[value] if value in linked else self.whole(value)
                found[NONZERO] = self.statements.both_each(found[NONZERO], each[NONZERO])
        return found


def factors(maps: Maps, operation: Operation) -> list[Value] | None:
    """The tensors of which a zero in one makes a zero of the result; None if there are none such."""
    product = next((product for product in reversed(maps.products) if product.operation is operation), None)
    if product is not None:
        return list(dict.fromkeys(product.factors))
    if any(isinstance(x, Link) and x.where is not None for x in maps.relations[operation]):
        return [x for x in dict.fromkeys(operation.inputs) if x.dtype.is_floating_point or x.dtype.is_complex]
    return None


def _rows(axis: Axis) -> Index:
    """The statements as far as the rules tell them."""
    return np.where(np.stack([axis.kinds != ZERO, axis.kinds == VARIES]), np.int64(TRUE), np.int64(FALSE))


def _without_factors(entries: Index, values: Iterable[Value]) -> Index:
    """Statements of a result that is zero with closed gates: indices and parameters, always there, add nothing."""
    if any(not value.names and (value.dtype.is_floating_point or value.dtype.is_complex) for value in values):
        return entries
    return np.stack([np.where(entries[NONZERO] == TRUE, FALSE, entries[NONZERO]), entries[VARYING]])


@dataclass(frozen=True)
class Dependencies(Generic[Of]):
    """Which statements about gates each entry of a recorded network stays by; from :func:`find_dependencies`."""

    statements: Of
    sizes: dict[str, int]  # by site, the number of its gates, which statements number through in this order
    opened: Analysis  # with all gates open
    units: list[Index]  # of every entry, by dimension, where gates keep the units in front and behind apart
    stays: Index  # by unit, the statement that it stays; gates that leave do so in a compacted network

    @property
    def maps(self) -> Maps:
        """What the rules know, with all gates open."""
        return self.opened.maps

    def remaining(self, axis: Axis) -> Index:
        """For each entry of a dimension, the statement that it stays."""
        return self.stays[self.units[axis.dimension]]


def find_dependencies(recording: Recording, make: Callable[[Maps], Of]) -> Dependencies[Of]:
    """Find what the entries of a network's tensors depend on, by the rules' answers for open and for closed gates.

    What is zero with all gates closed and not with all open depends on the gates that it comes from: a product on
    each of its factors, and all else on any of its inputs. ``make`` makes the statements from the maps with all open.
    """
    sizes = {site: gate.size for site, gate in gate_names(recording.network).items()}
    ones = {site: torch.ones(size) for site, size in sizes.items()}
    whole = analyse(recording, {}, ones)
    opened = whole.maps
    all_closed = analyse(recording, {site: torch.ones(size, dtype=torch.bool) for site, size in sizes.items()}, ones)
    for layer in all_closed.maps.constant_inputs:  # read only if no bias can absorb it, whatever becomes empty
        layer.reads[layer.candidates] = False
    choose_constants(all_closed.maps)
    statements = make(opened)
    gates, number = dict[str, Index](), 0
    for site, size in sizes.items():
        gates[site] = np.array([statements.gate(number + unit) for unit in range(size)], dtype=np.int64)
        number += size
    units = all_closed.solution.units
    remaining = _Remaining(statements, units, len(all_closed.solution.stays))
    presence = Presence(statements, gates, opened, all_closed.maps)
    of_closed = {
        read: other
        for operation, relations in opened.relations.items()
        for read, other in zip(relations, all_closed.maps.relations[operation], strict=True)
        if isinstance(read, Read) and isinstance(other, Read)
    }
    needs = Needs(opened, statements, presence.passes, lambda read: presence.reads(read, of_closed[read].where))
    certain = [
        axis.dimension for call in recording.calls for x in (*call.inputs, *call.outputs) for axis in opened.axes[x]
    ]
    for dimension in [*certain, *(dimension for dimension, _ in (*opened.pins, *all_closed.maps.pins))]:
        remaining.add(units[dimension], np.full(len(units[dimension]), TRUE))
    for read, entries in needs.read.items():
        remaining.add(units[read.axes[0].dimension], entries)
    remaining.solve(opened, gates)
    return Dependencies(statements, sizes, whole, units, remaining.stays)


class _Remaining:
    """By unit, the statement that it stays.

    A unit on one side of an open gate stays if that on the other side does, and so along any path of open gates: the
    disjunction, over paths, of that both what is known at its other end and all gates on the way hold. As in Gaussian
    elimination, with "some" for sums and "both" for products, units leave one by one, those of fewest links first, and
    their neighbours are then linked by the ways through them (``_order``; Tarjan 1981, A unified approach to path
    problems). Two passes, forwards and back, tell each unit what is known of all others (``_pass``).

    Gates and boxes tell a unit what is known of others that it belongs with, without what it told them itself: nothing
    comes back, except where boxes make a ring.
    """

    def __init__(self, statements: Statements, units: list[Index], count: int) -> None:
        self.statements, self.units = statements, units
        self.stays: Index = np.full(count, FALSE)

    def add(self, units: Index, entries: Index) -> None:
        """Units stay if statements hold."""
        new = np.flatnonzero((entries != FALSE) & (self.stays[units] != TRUE))
        for unit, statement in zip(units[new].tolist(), entries[new].tolist(), strict=True):
            self.stays[unit] = self.statements.some((int(self.stays[unit]), statement))

    def solve(self, maps: Maps, gates: dict[str, Index]) -> None:
        """Open gates have one unit in front and behind, and an entry of a box stays iff all its factors do."""
        order = self._order(maps, gates)
        linked = np.array([unit for unit, _ in order], dtype=np.int64)
        boxes = [_Box(*box, np.full(len(self.stays), FALSE)) for box in maps.distinct_boxes(self.units)]
        touching = defaultdict[int, list[_Box]](list)
        for box in boxes:
            for unit in (unit for units in (*box.factors, box.flat) for unit in units.tolist()):
                touching[unit].append(box)
        for found in touching.values():
            for box in found if len(found) > 1 else ():
                box.beside.update((other, None) for other in found if other is not box or found.count(box) > 1)
        told = np.full(len(self.stays), FALSE)  # by gates
        is_new = True
        while is_new:
            told[linked] = self._pass(order, self._known(linked, boxes))
            is_new = bool(np.any([self._fit(box, told) for box in boxes]))
        self.stays[linked] = self._known(linked, boxes, told)
        for box in boxes:
            for units in (*box.factors, box.flat):
                self.stays[units] = self._known(units, {box: None, **box.beside}, told)

    def _known(self, units: Index, boxes: Iterable[_Box], told: Index | None = None) -> Index:
        """The statements by which units stay for reasons of their own, for some boxes, or for gates (``told``)."""
        found = [self.stays[units], *(box.told[units] for box in boxes), *([] if told is None else [told[units]])]
        return reduce(self.statements.some_each, found)

    def _order(self, maps: Maps, gates: dict[str, Index]) -> list[tuple[int, dict[int, int]]]:
        """The units that gates link, with those that come later and that are linked with them by what has to be open.

        Those with the fewest links come first, and then link all that they were linked with: elimination.
        """
        links = defaultdict[int, dict[int, int]](dict)

        def link(one: int, other: int, way: int) -> None:
            if one != other:
                links[one][other] = links[other][one] = self.statements.some((links[one].get(other, FALSE), way))

        for call in maps.gates:
            sides = (self.units[axis.dimension].tolist() for axis in (call.front, call.behind))
            for one, other, gate in zip(*sides, gates[call.site].tolist(), strict=True):
                link(one, other, gate)
        order, waiting = [], [(len(others), unit) for unit, others in links.items()]
        heapify(waiting)
        while waiting:
            number, unit = heappop(waiting)
            if number == len(links.get(unit, ())):
                others = links.pop(unit)
                order.append((unit, others))
                for other in others:
                    del links[other][unit]
                for one, other in combinations(others, 2):
                    link(one, other, self.statements.both(others[one], others[other]))
                for other in others:
                    heappush(waiting, (len(links[other]), other))
        return order

    def _pass(self, order: list[tuple[int, dict[int, int]]], known: Index) -> list[int]:
        """What units hear of those on the other sides of open gates, from what is known of each."""
        heard = {unit: {unit: statement} for (unit, _), statement in zip(order, known.tolist(), strict=True)}
        for unit, all_later in order:
            statement = self.statements.some(heard[unit].values())
            for later, way in all_later.items():
                heard[later][unit] = self.statements.both(way, statement)
        for unit, all_later in reversed(order):
            for later, way in all_later.items():
                statement = self.statements.some(x for source, x in heard[later].items() if source != unit)
                heard[unit][later] = self.statements.both(way, statement)
        return [
            self.statements.some(x for source, x in by_source.items() if source != unit)
            for unit, by_source in heard.items()
        ]

    def _fit(self, box: _Box, told: Index) -> bool:
        """A factor's entry stays if a combination that it takes part in does, and a combination if all its entries."""
        shape = [len(units) for units in box.factors]
        flat = self._known(box.flat, box.beside, told).reshape(shape)
        rows = [np.moveaxis(flat, dim, 0).reshape(size, -1) for dim, size in enumerate(shape)]
        some = list(map(self.statements.some_of_each, rows))
        own = [self._known(units, box.beside, told) for units in box.factors]
        is_changed = [self._tell(box, units, entries, told) for units, entries in zip(box.factors, some, strict=True)]
        every = self.statements.outer(list(map(self.statements.some_each, own, some)))
        return self._tell(box, box.flat, every.ravel(), told) or any(is_changed)

    def _tell(self, box: _Box, units: Index, entries: Index, told: Index) -> bool:
        """Let a box say that units stay if statements hold; return whether that is new for some."""
        known, is_new = self._known(units, {box: None, **box.beside}, told), False
        for number in np.flatnonzero((entries != FALSE) & (known != entries)).tolist():
            if not self.statements.implies(int(entries[number]), int(known[number])):
                unit, is_new = units[number], True
                box.told[unit] = self.statements.some((int(box.told[unit]), int(entries[number])))
        return is_new


@dataclass(frozen=True, eq=False)
class _Box:
    """The units of a box, what it tells them, and those that have some of them as well."""

    factors: list[Index]
    flat: Index
    told: Index
    beside: dict[_Box, None] = field(default_factory=dict)
