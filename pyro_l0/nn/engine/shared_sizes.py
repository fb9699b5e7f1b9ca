"""Sizes that modules' integers give: what must stay for each to be one size, and what the integers become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pyro_l0.nn.engine.held import Held, Holder
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.slots import Axis, Read
from pyro_l0.nn.engine.solve import Solution
from pyro_l0.nn.engine.tape import SizeUse

__all__ = ["find_integers", "keep_parts_even", "pin_shared_sizes"]


def pin_shared_sizes(maps: Maps) -> None:
    """Keep what would leave sizes different that one held integer gives.

    For example, a head's entries of queries and of values leave independently, but both have the size ``head_dim``.
    """
    of_integer: dict[str, list[Axis]] = {}
    for use in maps.recording.sizes:
        if use.value in maps.axes:
            of_integer.setdefault(use.integer.text, []).append(maps.axes[use.value][use.dim])
    is_changed = True
    while is_changed:
        is_changed = False
        factors = _Factors(maps)
        for text, axes in of_integer.items():
            found = [factors.of(axis.block) for axis in axes]
            common = found[0]
            for other in found[1:]:
                common = common & other
            apart = {block for each in found for block in each - common}
            for block in apart:
                maps.pin(block, f"{text}, which is the size of other units, too")
            is_changed |= bool(apart)


def keep_parts_even(maps: Maps, solution: Solution) -> bool:
    """Keep units where ``chunk`` or ``tensor_split`` would cut the rest elsewhere; return whether any are kept."""
    is_changed = False
    for operation in maps.recording.operations:
        number = operation.arguments.get("chunks", operation.arguments.get("indices_or_sections"))
        if operation not in solution.running or not isinstance(number, int):
            continue
        dim = operation.integer("dim")
        axes = [maps.axes[part][dim] for part in operation.made]
        kept = [solution.kept(axis) for axis in axes]
        now = [len(entries) for entries in kept]
        parts: Any = operation.function(torch.empty(sum(now)), number)
        even = [len(part) for part in parts]
        even += [0] * (len(now) - len(even))
        if even == now:
            continue
        left = [np.setdiff1d(np.arange(axis.size), entries) for axis, entries in zip(axes, kept, strict=True)]
        more = [entries[: max(want - n, 0)] for entries, want, n in zip(left, even, now, strict=True)]
        for axis, entries in zip(axes, more if any(map(len, more)) else left, strict=True):
            where = np.isin(np.arange(axis.size), entries)
            text = f"even parts in {operation.path or 'the network'}"
            maps.relations[operation].append(Read((axis,), where, text))
        is_changed = True
    return is_changed


class _Factors:
    """The units whose numbers multiply to the size of a dimension; those that stay are left out."""

    def __init__(self, maps: Maps) -> None:
        units = maps.slots.units()
        self._first: dict[bytes, int] = {}
        self._name = [self._first.setdefault(x.tobytes(), block) for block, x in enumerate(units)]
        self._pinned = {self._name[block] for block, _ in maps.pins}
        self._boxes = {self._name[box.flat]: box.factors for box in maps.boxes if len(units[box.flat]) > 1}

    def of(self, block: int, around: frozenset[int] = frozenset()) -> Counter[int]:
        """By block, how often it is a factor."""
        name = self._name[block]
        if name in self._pinned:
            return Counter()
        if name not in self._boxes or name in around:
            return Counter([name])
        found: Counter[int] = Counter()
        for factor in self._boxes[name]:
            found += self.of(factor, around | {name})
        return found


def find_integers(uses: Sequence[SizeUse], size: Callable[[SizeUse], int]) -> dict[Holder, int]:
    """The integers that modules are to hold, for the sizes that they give to become others."""
    found: dict[Holder, int] = {}
    wanted = {(use.integer.text, size(use)): use.integer for use in uses}
    for (_, new), integer in sorted(wanted.items(), key=lambda item: len(item[1].holders)):
        unknown = [holder for holder in integer.holders if holder not in found]
        if len(unknown) == 1:
            (holder,) = unknown
            fitting = (x for x in _possible(integer, holder, new) if integer.formula({**found, holder: x}) == new)
            found.update((holder, value) for value in [next(fitting, None)] if value is not None)
    return found


def _possible(integer: Held, holder: Holder, new: int) -> Sequence[int]:
    """Values that an integer may take for the one that it is a part of to become another."""
    return [new] if len(integer.holders) == 1 else range(1, integer.holders[holder] + 1)
