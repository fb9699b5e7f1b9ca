"""Sizes that code computes from integers and other sizes: what must stay for them to fit, and what integers become."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from pyro_l0.nn.engine.held import Comparison, Dimension, Holder, Source
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.slots import Axis, outer
from pyro_l0.nn.engine.solve import Solution

__all__ = ["find_integers", "keep_parts_even", "keep_results", "pin_shared_sizes"]

_EXACT = {operator.floordiv: lambda x, y: Fraction(x) / y, operator.mod: lambda x, y: 0}  # what is divided is divisible


def pin_shared_sizes(maps: Maps) -> None:
    """Keep what would leave sizes different that the network's code expects to be equal.

    For example, a head's entries of queries and of values leave independently, but both have the size ``head_dim``.
    """
    if not maps.recording.comparisons:
        return
    free = _FreeSizes(maps)
    integers = _Integers(maps, free.size)
    for equation in integers.equations:
        if not integers.agree(equation):
            for block in free.fix(integers.reached(equation), lambda: integers.agree(equation)):  # noqa: B023
                maps.pin(block, equation.text)


def keep_parts_even(maps: Maps, solution: Solution) -> bool:
    """Keep units where ``chunk``, ``tensor_split`` or ``split`` would cut the rest elsewhere; return whether any."""
    before = len(maps.kept)
    for operation in maps.recording.operations:
        number = operation.arguments.get("chunks", operation.arguments.get("indices_or_sections"))
        if operation in solution.running and isinstance(number, int):
            axes = [maps.axes[part][operation.integer("dim")] for part in operation.made]
            parts: Any = operation.function(torch.empty(sum(map(solution.size, axes))), int(number))
            _keep_even(maps, solution, axes, [len(part) for part in parts], operation.path)
    for axes in (list(_axes(maps, x).values()) for x in maps.recording.comparisons if x.is_even):
        most = max(map(solution.size, axes), default=0)
        _keep_even(maps, solution, axes, [most] * len(axes), "a split")
    return len(maps.kept) > before


def _keep_even(maps: Maps, solution: Solution, axes: Sequence[Axis], want: list[int], place: str) -> None:
    """Keep units for parts to have the sizes that are wanted; all, if no more units can make them so."""
    kept = [solution.kept(axis) for axis in axes]
    want = want + [0] * (len(kept) - len(want))
    if [len(entries) for entries in kept] == want:
        return
    left = [np.setdiff1d(np.arange(axis.size), entries) for axis, entries in zip(axes, kept, strict=True)]
    more = [rest[: max(size - len(entries), 0)] for rest, size, entries in zip(left, want, kept, strict=True)]
    for axis, entries in zip(axes, more if any(map(len, more)) else left, strict=True):
        maps.kept.append((axis.block, entries, f"even parts in {place or 'the network'}"))


def keep_results(maps: Maps, solution: Solution) -> bool:
    """Keep units where code would compare the sizes of the rest with another result; return whether any are kept."""
    integers, before = _Integers(maps, solution.size), len(maps.kept)
    known = dict[Source, int](integers.values().items())
    for x in maps.recording.comparisons:
        known.update((source, solution.size(axis)) for source, axis in _axes(maps, x).items())
        try:
            is_kept = x.function(*x.sides(known)) == x.result
        except ZeroDivisionError:
            is_kept = False
        for axis in [] if is_kept else integers.reached(x):
            if solution.size(axis) < axis.size:
                maps.kept.append((axis.block, np.arange(axis.size), x.text))
    return len(maps.kept) > before


def find_integers(maps: Maps, solution: Solution) -> dict[Holder, int]:
    """The integers that modules are to hold, for the sizes that they give to become those of the units that stay."""
    return _Integers(maps, solution.size).values()


def _axes(maps: Maps, x: Comparison) -> dict[Source, Axis]:
    """By the sizes that a comparison is of, the dimensions that rules know."""
    dims = maps.recording.dimensions
    found = {source: dims[source] for source in x.sources if isinstance(source, Dimension) and source in dims}
    return {source: maps.axes[value][dim] for source, (value, dim) in found.items() if value in maps.axes}


class _Integers:
    """What modules' integers are, by equations with sizes."""

    def __init__(self, maps: Maps, size: Callable[[Axis], int]) -> None:
        self._maps, self._size = maps, size
        self.definitions: dict[Holder, Comparison] = {}
        self.equations: list[Comparison] = []  # with no other integer unknown
        for equation in sorted(maps.recording.comparisons, key=lambda x: len(_holders(x))):
            unknown = [holder for holder in _holders(equation) if holder not in self.definitions]
            if equation.is_equation and not equation.is_even and len(unknown) < 2:
                self.equations.append(equation)
                self.definitions.update(dict.fromkeys(unknown, equation))

    def values(self) -> dict[Holder, int]:
        """The integers, as far as they are whole."""
        found = {holder: self.solve(holder) for holder in self.definitions}
        return {holder: int(value) for holder, value in found.items() if value == int(value) > 0}

    def agree(self, equation: Comparison) -> bool:
        """Whether both sides of an equation are the same."""
        return bool(self._difference(equation, self._known(equation)) == 0)

    def reached(self, equation: Comparison) -> list[Axis]:
        """The dimensions that an equation is about, by its integers, too."""
        others = [self.definitions.get(holder, equation) for holder in _holders(equation)]
        inner = [axis for other in others if other is not equation for axis in self.reached(other)]
        return [*_axes(self._maps, equation).values(), *inner]

    def solve(self, holder: Holder) -> Any:
        """The integer for which its equation holds, if that is linear; else its present value."""
        equation = self.definitions[holder]
        known = self._known(equation, holder)
        at_0, at_1 = (self._difference(equation, {**known, holder: x}) for x in (0, 1))
        if at_0 is not None and at_1 is not None and at_0 != at_1:
            root = Fraction(at_0) / (at_0 - at_1)
            if self._difference(equation, {**known, holder: root}) == 0:
                return root
        return equation.sources[holder]

    def _known(self, equation: Comparison, but: Holder | None = None) -> dict[Source, Any]:
        sizes: dict[Source, Any] = {x: self._size(axis) for x, axis in _axes(self._maps, equation).items()}
        return sizes | {x: self.solve(x) for x in _holders(equation) if x != but and x in self.definitions}

    def _difference(self, equation: Comparison, known: Mapping[Source, Any]) -> Any:
        try:
            one, other = equation.sides(known, _EXACT)
        except ZeroDivisionError:
            return None
        return one - other


def _holders(equation: Comparison) -> list[Holder]:
    return [source for source in equation.sources if isinstance(source, Holder)]


class _FreeSizes:
    """Sizes as polynomials of which units stay, at a random point: what is equal there is equal for all cuts."""

    def __init__(self, maps: Maps) -> None:
        self._units = units = maps.slots.units()
        first: dict[bytes, int] = {}
        names = {id(x): first.setdefault(x.tobytes(), block) for block, x in enumerate(units)}
        self._name = [names[id(x)] for x in units]
        self._factors = {self._name[x.flat]: x.factors for x in maps.boxes if len(units[x.flat]) > 1}
        self._boxes = maps.distinct_boxes(units)
        # On both sides of a gate units leave, if they can; parts that are to be even keep the same number.
        even = [list(_axes(maps, x).values()) for x in maps.recording.comparisons if x.is_even]
        pairs = [(call.front, call.behind) for call in maps.gates] + [(x[0], x[1]) for x in even if len(x) == 2]
        self._pairs = [(units[one.block], units[other.block]) for one, other in pairs]
        count = 1 + max((int(x.max()) for x in units if len(x)), default=-1)
        self._drawn = np.random.default_rng(0).integers(2, 2**16, count)
        self._whole = np.zeros(count, dtype=np.bool_)
        ends = [axis for call in maps.recording.calls for x in (*call.inputs, *call.outputs) for axis in maps.axes[x]]
        single = [block for block, entries in enumerate(units) if len(entries) == 1]
        for block in {self._name[x] for x in (*(axis.block for axis in ends), *single, *(x for x, _ in maps.pins))}:
            for leaf in (block, *self._leaves(block)):
                self._whole[units[leaf]] = True
        self._spread()

    def size(self, axis: Axis) -> int:
        """The size of a dimension."""
        return int(self._weights[self._units[axis.block]].sum())

    def fix(self, axes: Sequence[Axis], agree: Callable[[], bool]) -> list[int]:
        """Few blocks that have to stay for sizes to agree; from now on they do."""
        leaves = {self._name[leaf]: leaf for axis in axes for leaf in self._leaves(axis.block)}
        before, fixed = self._whole.copy(), list[int]()
        for leaf in leaves.values():
            self._whole[self._units[leaf]] = True
        for leaf in leaves.values():
            units = self._units[leaf]
            self._whole[units] = before[units]
            self._spread()
            if not agree():
                self._whole[units] = True
                fixed += [] if before[units].all() else [leaf]
        self._spread()
        return fixed

    def _spread(self) -> None:
        """Let units weigh what was drawn for them, those that stay 1, and pairs of factors the product."""
        self._weights = np.where(self._whole, 1, self._drawn)
        for _ in range(2):  # flat dimensions may be factors of others
            for one, other in self._pairs:
                self._weights[other] = np.where(self._whole[other], 1, self._weights[one])
            for factors, flat in self._boxes:
                self._weights[flat] = outer(np.multiply, [self._weights[x] for x in factors]).ravel()

    def _leaves(self, block: int, around: frozenset[int] = frozenset()) -> list[int]:
        """The blocks whose sizes multiply to that of a block."""
        name = self._name[block]
        factors = () if name in around else self._factors.get(name, ())
        return [leaf for x in factors for leaf in self._leaves(x, around | {name})] or [block]
