"""The greatest set of units that can leave, and why the others stay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyro_l0.nn.engine.formulas import FALSE, TRUE, Formulas
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.needs import Needs
from pyro_l0.nn.engine.slots import Axis, Box, Index, Mask, Read, outer
from pyro_l0.nn.engine.tape import Operation

__all__ = ["Solution", "solve"]

_NETWORK_INPUT, _NETWORK_OUTPUT = "network input", "network output"
_GIVEN = Formulas([])  # of given gates: all statements are true or false
_IN_A_PRODUCT = "its dimension is a product of others, such as heads and features, and none of them can leave"
_LAST = "the last of its dimension"


@dataclass(frozen=True)
class Solution:
    """Which units stay.

    Attributes:
        units: the unit of every entry, by block.
        stays: by unit.
        reasons: by unit, why it stays, as a number in ``texts``; -1 if it leaves.
        texts: the reasons.
        needs: the operations and the entries that the outputs depend on.
    """

    units: list[Index]
    stays: Mask
    reasons: npt.NDArray[np.int64]
    texts: list[str]
    needs: Needs

    @property
    def running(self) -> Collection[Operation]:
        """The operations that the outputs depend on."""
        return self.needs.running.keys()

    def is_needed(self, axis: Axis) -> Mask:
        """For each entry of a dimension, whether the outputs depend on it."""
        return np.asarray(self.needs.of(axis) == TRUE)

    def kept(self, axis: Axis) -> Index:
        """The entries of a dimension that stay."""
        return np.flatnonzero(self.stays[self.units[axis.block]])

    def size(self, axis: Axis) -> int:
        """How many entries of a dimension stay."""
        return int(np.count_nonzero(self.stays[self.units[axis.block]]))

    def reason(self, axis: Axis, entry: int) -> str:
        """Why an entry stays."""
        return self.texts[int(self.reasons[self.units[axis.block][entry]])]


def solve(maps: Maps) -> Solution:
    """Find the greatest set of units that can leave: none of them is read, and boxes stay boxes."""
    needs = Needs(maps, _GIVEN, lambda _, link: _statements(link.where, link.target), _given_reads)
    units = maps.slots.units()
    count = 1 + max((int(block.max()) for block in units if len(block)), default=-1)
    required = _Required(units, np.zeros(count, dtype=np.bool_), np.full(count, -1), [])
    for call in maps.recording.calls:
        for values, text in ((call.inputs, _NETWORK_INPUT), (call.outputs, _NETWORK_OUTPUT)):
            for value in values:
                for axis in maps.axes[value]:
                    required.require(axis.block, None, text)
    for block, text in maps.pins:
        required.require(block, None, text)
    for operation in maps.recording.operations:
        for relation in maps.relations[operation]:
            if isinstance(relation, Read) and relation in needs.read:
                required.require(relation.axes[0].block, needs.read[relation] == TRUE, relation.reason)
    boxes = _distinct(maps, units)
    required.fit(boxes)
    while required.keep_one(maps):
        required.fit(boxes)
    return Solution(units, required.stays, required.reasons, required.texts, needs)


def _statements(mask: Mask | None, axis: Axis) -> Index:
    return np.full(axis.size, TRUE) if mask is None else np.where(mask, np.int64(TRUE), np.int64(FALSE))


def _given_reads(read: Read) -> Index:
    return _statements(read.where, read.axes[0])


class _Required:
    """The units that have to stay so far."""

    def __init__(self, units: list[Index], stays: Mask, reasons: npt.NDArray[np.int64], texts: list[str]) -> None:
        self.units, self.stays, self.reasons, self.texts = units, stays, reasons, texts
        self._numbers: dict[str, int] = {}

    def require(self, block: int, entries: Mask | None, text: str) -> bool:
        """Entries of a block have to stay; says whether that is new of some."""
        units = self.units[block] if entries is None else self.units[block][entries]
        return self._keep(units[~self.stays[units]], text)

    def _keep(self, units: Index, text: str) -> bool:
        if not len(units):
            return False
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        self.stays[units] = True
        self.reasons[units] = self._numbers[text]
        return True

    def fit(self, boxes: list[Box]) -> None:
        """Keep what has to stay for a flat entry to leave iff one of its factors' entries does."""
        is_changed = True
        while is_changed:
            is_changed = False
            for box in boxes:
                is_changed |= self._fit(box)

    def _fit(self, box: Box) -> bool:
        sizes = [len(self.units[factor]) for factor in box.factors]
        flat = self.units[box.flat].reshape(sizes)
        stays = self.stays[flat]
        is_changed = False
        for dim, factor in enumerate(box.factors):
            some: Mask = np.asarray(stays.any(axis=tuple(d for d in range(len(sizes)) if d != dim)))
            if self.require(factor, some, self._text_of(flat[stays])):
                is_changed = True
        every = outer(np.logical_and, [self.stays[self.units[factor]] for factor in box.factors])
        missing = flat[every & ~self.stays[flat]]
        return self._keep(missing, _IN_A_PRODUCT) or is_changed

    def _text_of(self, units: Index) -> str:
        """Why the first of some units stays."""
        return self.texts[self.reasons[units[0]]] if len(units) else _IN_A_PRODUCT

    def keep_one(self, maps: Maps) -> bool:
        """Let no dimension become empty; says whether one would have.

        A factor of a view that no gate closes, such as the features of a head, stays whole: its size tends to be
        written in the network's code.
        """
        is_gated = np.zeros(len(self.stays), dtype=np.bool_)
        for call in maps.gates:
            for axis in (call.front, call.behind):
                is_gated[self.units[axis.block]] = True
        factors = {id(self.units[factor]) for box in maps.boxes if box.is_view for factor in box.factors}
        empty = {
            id(block): block
            for axes in maps.axes.values()
            for block in (self.units[axis.block] for axis in axes)
            if len(block) and not self.stays[block].any()
        }
        for key, block in empty.items():
            self._keep(block if key in factors and not is_gated[block].any() else block[:1], _LAST)
        return bool(empty)


def _distinct(maps: Maps, units: list[Index]) -> list[Box]:
    """The boxes that differ in their units."""
    found = {(tuple(id(units[x]) for x in box.factors), id(units[box.flat])): box for box in maps.boxes}
    return list(found.values())
