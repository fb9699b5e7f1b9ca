"""Which gates have to be open for an entry of a recorded tensor to stay, as statements about the gates.

An example: in ``Linear(4, 3) -> ReLU -> Gate(3) -> Linear(3, 2)``, where ``g0, g1, g2`` say that the gates are open,

1. forwards (``presence.py``): unit i behind the gate is not zero if ``gi``; the output varies if ``g0 or g1 or g2``;
2. backwards (``needs.py``): the last layer reads unit i if ``gi`` and the output is needed, which it is; through the
   gate, unit i in front is needed if ``gi``; the first layer runs, and its inputs stay, for certain;
3. here: what a statement asks for stays, on both sides of an open gate, so that the second weight keeps
   ``2 * (g0 + g1 + g2)`` of its entries and the first one ``4 * (g0 + g1 + g2)``.

Statements rather than numbers: a count of given gates would come out right with truth values as well, but the
probability of unit i would be that of ``gi and gi``, the square of its own. ``formulas.py`` says ``gi``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pyro_l0.nn.engine.analysis import analyse
from pyro_l0.nn.engine.constants import settle_constants
from pyro_l0.nn.engine.formulas import FALSE, TRUE, Formulas
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.needs import Needs
from pyro_l0.nn.engine.presence import Presence
from pyro_l0.nn.engine.slots import Axis, Index, Read
from pyro_l0.nn.engine.tape import Recording
from pyro_l0.nn.gate_layer import gate_names

__all__ = ["Dependencies", "find_dependencies"]


@dataclass(frozen=True)
class Dependencies:
    """Answer of :func:`find_dependencies`."""

    formulas: Formulas
    sizes: dict[str, int]  # by site, the number of its gates, which statements number through in this order
    maps: Maps  # with all gates open
    units: list[Index]  # of every entry, by block, where gates keep the units in front and behind apart
    stays: Index  # by unit, the statement that it stays; gates that leave do so in a compacted network

    def kept(self, axis: Axis) -> Index:
        """For each entry of a dimension, the statement that it stays."""
        return self.stays[self.units[axis.block]]


def find_dependencies(recording: Recording) -> Dependencies:
    """Find what the entries of a network's tensors depend on, by the rules' answers for open and for closed gates.

    What is zero with all gates closed and not with all open depends on the gates that it comes from: a product on
    each of its factors, and all else on any of its inputs. What is not zero with all gates closed never is.
    """
    sizes = {site: gate.size for site, gate in gate_names(recording.network).items()}
    ones = {site: torch.ones(size) for site, size in sizes.items()}
    opened = analyse(recording, {}, ones).maps
    all_closed = analyse(recording, {site: torch.ones(size, dtype=torch.bool) for site, size in sizes.items()}, ones)
    _forget_what_was_kept(all_closed.maps)
    formulas = Formulas(list(sizes.values()))
    gates, number = dict[str, Index](), 0
    for site, size in sizes.items():
        gates[site] = np.array([formulas.gate(number + unit) for unit in range(size)], dtype=np.int64)
        number += size
    units = all_closed.solution.units
    kept = _Kept(formulas, units, len(all_closed.solution.stays))
    presence = Presence(formulas, gates, opened, all_closed.maps)
    of_closed = {
        read: other
        for operation, relations in opened.relations.items()
        for read, other in zip(relations, all_closed.maps.relations[operation], strict=True)
        if isinstance(read, Read) and isinstance(other, Read)
    }
    needs = Needs(opened, formulas, presence.passes, lambda read: presence.reads(read, of_closed[read].where))
    certain = [axis.block for call in recording.calls for x in (*call.inputs, *call.outputs) for axis in opened.axes[x]]
    for block in [*certain, *(block for block, _ in (*opened.pins, *all_closed.maps.pins))]:
        kept.add(units[block], np.full(len(units[block]), TRUE))
    for read, entries in needs.read.items():
        kept.add(units[read.axes[0].block], entries)
    kept.settle(opened, gates)
    return Dependencies(formulas, sizes, opened, units, kept.stays)


def _forget_what_was_kept(maps: Maps) -> None:
    """Let layers read only the constants that no bias can absorb, not those that keep a dimension from being empty."""
    for layer in maps.constant_inputs:
        layer.reads[layer.candidates] = False
    settle_constants(maps)


class _Kept:
    """By unit, the statement that it stays, as far as it is known."""

    def __init__(self, formulas: Formulas, units: list[Index], count: int) -> None:
        self.formulas, self.units = formulas, units
        self.stays: Index = np.full(count, FALSE)
        self._seen: dict[tuple[int, int, int], tuple[int, int]] = {}

    def add(self, units: Index, entries: Index) -> bool:
        """Units stay if statements hold; return whether that is new for some."""
        new = np.flatnonzero((entries != FALSE) & (self.stays[units] != TRUE))
        pairs = zip(units[new].tolist(), entries[new].tolist(), strict=True)
        return bool(np.any([self._raise(unit, formula) for unit, formula in pairs]))

    def settle(self, maps: Maps, gates: dict[str, Index]) -> None:
        """Open gates have one unit in front and behind, and an entry of a box stays iff all its factors do."""
        boxes = maps.distinct_boxes(self.units)
        calls = [(gates[x.site], self.units[x.front.block], self.units[x.behind.block]) for x in maps.gates]
        passed = dict.fromkeys(units for call in calls for units in zip(*(x.tolist() for x in call), strict=True))
        is_changed = True
        while is_changed:
            is_changed = bool(np.any([self._pass(*units) for units in (*passed, *reversed(passed))]))
            for factors, flat in boxes:
                is_changed |= self._fit(factors, flat)

    def _raise(self, unit: int, formula: int) -> bool:
        before = int(self.stays[unit])
        after = self.formulas.some((before, formula))
        if self.formulas.is_the_same(before, after):
            return False
        self.stays[unit] = after
        return True

    def _pass(self, gate: int, front: int, behind: int) -> bool:
        """One unit in front of an open gate and behind it."""
        known = int(self.stays[front]), int(self.stays[behind])
        if front == behind or self._seen.get((gate, front, behind)) == known:
            return False
        is_changed = self._raise(front, self.formulas.both(gate, known[1]))
        is_changed |= self._raise(behind, self.formulas.both(gate, int(self.stays[front])))
        self._seen[gate, front, behind] = int(self.stays[front]), int(self.stays[behind])
        return is_changed

    def _fit(self, factors: list[Index], flat: Index) -> bool:
        """A factor's entry stays if a combination that it takes part in does, and a combination if all its entries."""
        entries = self.stays[flat.reshape([len(units) for units in factors])]
        is_changed = False
        for dim, units in enumerate(factors):
            rows = np.moveaxis(entries, dim, 0).reshape(len(units), -1)
            is_changed |= self.add(units, self.formulas.some_of_each(rows))
        return self.add(flat, self.formulas.outer([self.stays[units] for units in factors]).ravel()) or is_changed
