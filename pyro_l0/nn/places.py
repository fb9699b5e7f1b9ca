"""Where the units of a tensor are."""

from __future__ import annotations

from collections.abc import Iterable

from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.tape import Value

__all__ = ["are_same_units", "unit_dim", "unit_dims"]


def unit_dims(maps: Maps, value: Value) -> list[int]:
    """The dimensions of a tensor that are dimensions of weights as well, so that closing entries cuts weights."""
    blocks = {
        maps.slots.root(axis.block)
        for weight in maps.recording.named.values()
        if weight.rank > 1
        for axis in maps.axes[weight]
        if axis.size > 1
    }
    return [dim for dim, axis in enumerate(maps.axes[value]) if maps.slots.root(axis.block) in blocks]


def unit_dim(maps: Maps, value: Value) -> int | None:
    """The one such dimension; None if there are none or several."""
    found = unit_dims(maps, value)
    return found[0] if len(found) == 1 else None


def are_same_units(maps: Maps, outputs: Iterable[tuple[Value, int]]) -> bool:
    """Whether dimensions of tensors, such as a module's at its calls, have the same units in the same order."""
    units = maps.slots.units()
    return len({tuple(units[maps.axes[value][dim].block].tolist()) for value, dim in outputs}) <= 1
