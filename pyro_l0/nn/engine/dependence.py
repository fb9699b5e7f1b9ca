"""Which gates have to be open for an entry of a recorded tensor to stay, as statements about the gates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pyro_l0.nn.engine.analysis import Analysis, analyse
from pyro_l0.nn.engine.constants import settle_constants
from pyro_l0.nn.engine.formulas import FALSE, TRUE, Formulas
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.needs import find_needs
from pyro_l0.nn.engine.presence import find_presence, outer_both
from pyro_l0.nn.engine.slots import Axis, Index
from pyro_l0.nn.engine.tape import Recording
from pyro_l0.nn.gate import gate_names

__all__ = ["Dependence", "depend"]


@dataclass(frozen=True)
class Dependence:
    """Answer of :func:`depend`.

    Attributes:
        formulas: the statements.
        sizes: by site, the number of its gates. In statements, gates are numbered through in this order.
        maps: what the rules said of the recording with all gates open.
        units: the unit of every entry, by block, where gates keep the units in front and behind apart.
        stays: by unit, the number of the statement that it stays; gates that leave do so in a compacted network.
    """

    formulas: Formulas
    sizes: dict[str, int]
    maps: Maps
    units: list[Index]
    stays: Index

    def kept(self, axis: Axis) -> Index:
        """For each entry of a dimension, the statement that it stays."""
        return self.stays[self.units[axis.block]]


def depend(recording: Recording) -> Dependence:
    """Find what the entries of a network's tensors depend on, by the rules' answers for open and for closed gates.

    What is zero with all gates closed and not with all open is so by those gates from which it comes: a product by
    one of its factors, and all else by all that it consists of. What is not zero with all gates closed never is.
    """
    sizes = {site: gate.size for site, gate in gate_names(recording.network).items()}
    ones = {site: torch.ones(size) for site, size in sizes.items()}
    opened = analyse(recording, {}, ones)
    closed = analyse(recording, {site: torch.ones(size, dtype=torch.bool) for site, size in sizes.items()}, ones)
    _forget_what_was_kept(closed.maps)
    formulas = Formulas(list(sizes.values()))
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    gates = {
        site: np.array([formulas.gate(starts[site] + unit) for unit in range(size)], dtype=np.int64)
        for site, size in sizes.items()
    }
    presence = find_presence(formulas, gates, opened.maps, closed.maps)
    required = find_needs(formulas, gates, opened.maps, closed.maps, presence)
    kept = _Kept(formulas, opened.maps, closed, gates)
    for block, entries in required:
        kept.require(block, entries)
    for block, _ in opened.maps.pins:
        kept.require(block, np.full(len(kept.units[block]), TRUE))
    kept.settle()
    return Dependence(formulas, sizes, opened.maps, kept.units, kept.stays)


def _forget_what_was_kept(maps: Maps) -> None:
    """Let layers read only the constants that no bias can take in, not those that stay lest a dimension be empty."""
    for layer in maps.constant_inputs:
        assert layer.read is not None
        assert layer.read.where is not None
        assert layer.candidates is not None
        layer.read.where[layer.candidates] = False
    settle_constants(maps)


class _Kept:
    """By unit, the statement that it stays, as far as it is known."""

    def __init__(self, formulas: Formulas, maps: Maps, closed: Analysis, gates: dict[str, Index]) -> None:
        self.formulas = formulas
        self.units = closed.solution.units
        self.stays: Index = np.full(len(closed.solution.stays), FALSE)
        self._boxes = {
            (tuple(id(self.units[x]) for x in box.factors), id(self.units[box.flat])): (
                [self.units[x] for x in box.factors],
                self.units[box.flat],
            )
            for box in maps.boxes
        }
        pairs = [
            (gate, front, behind)
            for call in maps.gates
            for gate, front, behind in zip(
                gates[call.site].tolist(),
                self.units[call.front.block].tolist(),
                self.units[call.behind.block].tolist(),
                strict=True,
            )
            if front != behind
        ]
        self._gates = list(dict.fromkeys(pairs))
        self._seen: dict[tuple[int, int, int], tuple[int, int]] = {}

    def require(self, block: int, entries: Index) -> None:
        """Entries of a block stay if statements hold."""
        self._add(self.units[block], entries)

    def settle(self) -> None:
        """Open gates have one unit in front and behind, and an entry of a box stays iff all its factors do."""
        is_changed = True
        while is_changed:
            is_changed = self._pass_gates()
            for factors, flat in self._boxes.values():
                is_changed |= self._fit(factors, flat)

    def _add(self, units: Index, entries: Index) -> bool:
        new = np.flatnonzero((entries != FALSE) & (self.stays[units] != TRUE))
        is_changed = False
        for unit, formula in zip(units[new].tolist(), entries[new].tolist(), strict=True):
            is_changed |= self._raise(unit, formula)
        return is_changed

    def _raise(self, unit: int, formula: int) -> bool:
        before = int(self.stays[unit])
        after = self.formulas.some((before, formula))
        if self.formulas.is_the_same(before, after):
            return False
        self.stays[unit] = after
        return True

    def _pass_gates(self) -> bool:
        is_changed = False
        for pairs in (self._gates, reversed(self._gates)):
            for gate, front, behind in pairs:
                known = int(self.stays[front]), int(self.stays[behind])
                if self._seen.get((gate, front, behind)) == known:
                    continue
                is_changed |= self._raise(front, self.formulas.both(gate, known[1]))
                is_changed |= self._raise(behind, self.formulas.both(gate, int(self.stays[front])))
                self._seen[gate, front, behind] = int(self.stays[front]), int(self.stays[behind])
        return is_changed

    def _fit(self, factors: list[Index], flat: Index) -> bool:
        shaped = flat.reshape([len(units) for units in factors])
        entries = self.stays[shaped]
        is_changed = False
        for dim, units in enumerate(factors):
            rows = np.moveaxis(entries, dim, 0).reshape(len(units), -1)
            some = self.formulas.some_of_each(rows)
            is_changed |= self._add(units, some)
        every = outer_both(self.formulas, [self.stays[units] for units in factors])
        return self._add(flat, every) or is_changed
