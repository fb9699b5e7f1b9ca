"""The greatest set of units that can leave, and why the others stay."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from pyro_l0.nn.engine.formulas import FALSE, TRUE, Formulas
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.needs import Needs
from pyro_l0.nn.engine.slots import Axis, Index, Mask, Read, outer
from pyro_l0.nn.engine.tape import Operation

__all__ = ["Solution"]

_NETWORK_INPUT, _NETWORK_OUTPUT = "network input", "network output"
_IN_A_PRODUCT = "its dimension is a product of others, such as heads and features, and none of them can leave"
_LAST = "the last of its dimension"
_GIVEN = Formulas([])  # of given gates: all statements are true or false


class Solution:
    """Which units stay: those that are read, what boxes need to stay boxes, and one of every dimension."""

    def __init__(self, maps: Maps) -> None:
        self.units: list[Index] = maps.slots.units()
        count = 1 + max((int(block.max()) for block in self.units if len(block)), default=-1)
        self.stays: Mask = np.zeros(count, dtype=np.bool_)
        self.reasons: npt.NDArray[np.int64] = np.full(count, -1)
        self.texts: list[str] = []
        self._needs = Needs(maps, _GIVEN, lambda _, link: _statements(link.where, link.target), _given_reads)
        self._require(maps)
        boxes = maps.distinct_boxes(self.units)
        while any([self._fit(*box) for box in boxes]) or self._keep_one(maps):  # noqa: C419
            pass

    @property
    def running(self) -> Collection[Operation]:
        """The operations that the outputs depend on."""
        return self._needs.running.keys()

    def is_needed(self, axis: Axis) -> Mask:
        """For each entry of a dimension, whether the outputs depend on it."""
        return np.asarray(self._needs.of(axis) == TRUE)

    def kept(self, axis: Axis) -> Index:
        """The entries of a dimension that stay."""
        return np.flatnonzero(self.stays[self.units[axis.block]])

    def size(self, axis: Axis) -> int:
        """How many entries of a dimension stay."""
        return int(np.count_nonzero(self.stays[self.units[axis.block]]))

    def reason(self, axis: Axis, entry: int) -> str:
        """Why an entry stays."""
        return self.texts[int(self.reasons[self.units[axis.block][entry]])]

    def _require(self, maps: Maps) -> None:
        """Keep inputs, outputs, what is pinned and what is read."""
        for call in maps.recording.calls:
            for values, text in ((call.inputs, _NETWORK_INPUT), (call.outputs, _NETWORK_OUTPUT)):
                for axis in (axis for value in values for axis in maps.axes[value]):
                    self._keep(self.units[axis.block], text)
        for block, text in maps.pins:
            self._keep(self.units[block], text)
        for block, entries, text in maps.kept:
            self._keep(self.units[block][entries], text)
        for operation in maps.recording.operations:
            for relation in maps.relations[operation]:
                if isinstance(relation, Read) and relation in self._needs.read:
                    units = self.units[relation.axes[0].block]
                    self._keep(units[self._needs.read[relation] == TRUE], relation.reason)

    def _keep(self, units: Index, text: str) -> bool:
        """Let units stay; return whether that is new for some."""
        units = units[~self.stays[units]]
        if not len(units):
            return False
        if text not in self.texts:
            self.texts.append(text)
        self.stays[units] = True
        self.reasons[units] = self.texts.index(text)
        return True

    def _fit(self, factors: list[Index], flat: Index) -> bool:
        """Keep what has to stay for a flat entry to leave iff one of its factors' entries does."""
        flat = flat.reshape([len(units) for units in factors])
        stays = self.stays[flat]
        text = self.texts[self.reasons[flat[stays][0]]] if stays.any() else _IN_A_PRODUCT
        is_changed = False
        for dim, units in enumerate(factors):
            some = np.asarray(stays.any(axis=tuple(d for d in range(len(factors)) if d != dim)))
            is_changed |= self._keep(units[some], text)
        every = outer(np.logical_and, [self.stays[units] for units in factors])
        return self._keep(flat[every], _IN_A_PRODUCT) or is_changed

    def _keep_one(self, maps: Maps) -> bool:
        """Let no dimension become empty; return whether one would have.

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


def _statements(mask: Mask | None, axis: Axis) -> Index:
    return np.full(axis.size, TRUE) if mask is None else np.where(mask, np.int64(TRUE), np.int64(FALSE))


def _given_reads(read: Read) -> Index:
    return _statements(read.where, read.axes[0])
