"""What closed gates make of a recorded network: which entries of every tensor can leave, and why others stay."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_l0.nn.engine import rules
from pyro_l0.nn.engine.maps import (
    CONSTANT,
    VARIES,
    ZERO,
    Axis,
    ConstantInput,
    Index,
    Maps,
    Mask,
    Read,
    outer,
)
from pyro_l0.nn.engine.operations import find_entry, is_pointwise
from pyro_l0.nn.engine.record import WRITE, Operation, Recording, Value
from pyro_l0.nn.engine.sizes import Comparison, Dimension, Holder, Source
from pyro_l0.nn.engine.statements import FALSE, TRUE, Needs, NormalForms
from pyro_l0.nn.gate import gate_names

_NETWORK_INPUT, _NETWORK_OUTPUT = "network input", "network output"
_IN_A_PRODUCT = "its dimension is a product of others, such as heads and features, and none of them can leave"
LAST = "the last of its dimension"
_GIVEN = NormalForms([])  # of given gates: all statements are true or false


class Solution:
    """Which units stay: those that are read, what boxes need to stay boxes, and one of every dimension."""

    def __init__(self, maps: Maps) -> None:
        self.units: list[Index] = maps.slots.units()
        count = 1 + max((int(units.max()) for units in self.units if len(units)), default=-1)
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
        """The operations that the outputs depend on at these gates."""
        return self._needs.running.keys()

    def is_needed(self, axis: Axis) -> Mask:
        """For each entry of a dimension, whether the outputs depend on it."""
        return np.asarray(self._needs.of(axis) == TRUE)

    def remaining(self, axis: Axis) -> Index:
        """The indices of a dimension's entries that stay, in order."""
        return np.flatnonzero(self.stays[self.units[axis.dimension]])

    def size(self, axis: Axis) -> int:
        """How many entries of a dimension stay."""
        return int(np.count_nonzero(self.stays[self.units[axis.dimension]]))

    def reason(self, axis: Axis, entry: int) -> str:
        """The operation, module or pin for which an entry stays, in words."""
        return self.texts[int(self.reasons[self.units[axis.dimension][entry]])]

    def _require(self, maps: Maps) -> None:
        """Keep inputs, outputs, what is pinned and what is read."""
        for call in maps.recording.calls:
            for values, text in ((call.inputs, _NETWORK_INPUT), (call.outputs, _NETWORK_OUTPUT)):
                for axis in (axis for value in values for axis in maps.axes[value]):
                    self._keep(self.units[axis.dimension], text)
        for dimension, text in maps.pins:
            self._keep(self.units[dimension], text)
        for dimension, entries, text in maps.pinned_entries:
            self._keep(self.units[dimension][entries], text)
        for operation in maps.recording.operations:
            for relation in maps.relations[operation]:
                if isinstance(relation, Read) and relation in self._needs.read:
                    units = self.units[relation.axes[0].dimension]
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
        written in the network's code. Views of one dimension that have factors of the same sizes have the same ones, as
        attention makes heads and a gate on heads reads them.
        """
        is_gated = np.zeros(len(self.stays), dtype=np.bool_)
        for call in maps.gates:
            for axis in (call.front, call.behind):
                is_gated[self.units[axis.dimension]] = True
        views: dict[tuple[int, ...], list[list[Index]]] = {}
        for box in maps.boxes:
            if box.is_view:
                parts = [self.units[factor] for factor in box.factors]
                views.setdefault((id(self.units[box.flat]), *map(len, parts)), []).append(parts)
        for same in (same for alike in views.values() for same in zip(*alike, strict=True)):
            if any(is_gated[units].any() for units in same):
                is_gated[np.concatenate(same)] = True
        factors = {id(units) for alike in views.values() for parts in alike for units in parts}
        empty = {
            id(units): units
            for axes in maps.axes.values()
            for units in (self.units[axis.dimension] for axis in axes)
            if len(units) and not self.stays[units].any()
        }
        for key, units in empty.items():
            self._keep(units if key in factors and not is_gated[units].any() else units[:1], LAST)
        return bool(empty)


def _statements(mask: Mask | None, axis: Axis) -> Index:
    return np.full(axis.size, TRUE) if mask is None else np.where(mask, np.int64(TRUE), np.int64(FALSE))


def _given_reads(read: Read) -> Index:
    return _statements(read.where, read.axes[0])


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
            for dimension in free.fix(integers.reached(equation), lambda: integers.agree(equation)):  # noqa: B023
                maps.pin(dimension, equation.text)


def keep_parts_even(maps: Maps, solution: Solution) -> bool:
    """Keep units where ``chunk``, ``tensor_split`` or ``split`` would cut the rest elsewhere; return whether any."""
    before = len(maps.pinned_entries)
    for operation in maps.recording.operations:
        number = operation.arguments.get(find_entry(operation.name).parts)
        if operation in solution.running and isinstance(number, int):
            axes = [maps.axes[part][operation.integer("dim")] for part in operation.made]
            parts: Any = operation.function(torch.empty(sum(map(solution.size, axes))), int(number))
            _keep_even(maps, solution, axes, [len(part) for part in parts], operation.path)
    for axes in (list(_axes(maps, x).values()) for x in maps.recording.comparisons if x.is_even):
        most = max(map(solution.size, axes), default=0)
        _keep_even(maps, solution, axes, [most] * len(axes), "a split")
    return len(maps.pinned_entries) > before


def _keep_even(maps: Maps, solution: Solution, axes: Sequence[Axis], want: list[int], location: str) -> None:
    """Keep units for parts to have the sizes that are wanted; all, if no more units can make them so."""
    remaining = [solution.remaining(axis) for axis in axes]
    want = want + [0] * (len(remaining) - len(want))
    if [len(entries) for entries in remaining] == want:
        return
    left = [np.setdiff1d(np.arange(axis.size), entries) for axis, entries in zip(axes, remaining, strict=True)]
    more = [rest[: max(size - len(entries), 0)] for rest, size, entries in zip(left, want, remaining, strict=True)]
    for axis, entries in zip(axes, more if any(map(len, more)) else left, strict=True):
        maps.pinned_entries.append((axis.dimension, entries, f"even parts in {location or 'the network'}"))


def keep_results(maps: Maps, solution: Solution) -> bool:
    """Keep units where code would compare the sizes of the rest with another result; return whether that keeps any."""
    integers, before = _Integers(maps, solution.size), len(maps.pinned_entries)
    known = dict[Source, int](integers.values().items())
    for x in maps.recording.comparisons:
        known.update((source, solution.size(axis)) for source, axis in _axes(maps, x).items())
        try:
            is_kept = x.function(*x.sides(known)) == x.result
        except ZeroDivisionError:
            is_kept = False
        for axis in [] if is_kept else integers.reached(x):
            if solution.size(axis) < axis.size:
                maps.pinned_entries.append((axis.dimension, np.arange(axis.size), x.text))
    return len(maps.pinned_entries) > before


def find_integers(maps: Maps, solution: Solution) -> dict[Holder, int]:
    """The integers that modules are to hold, for the sizes that they give to become those of the units that stay."""
    return _Integers(maps, solution.size).values()


def _axes(maps: Maps, x: Comparison) -> dict[Source, Axis]:
    """By the sizes that a comparison is of, the dimensions that rules know."""
    dims = maps.recording.dimensions
    found = {source: dims[source] for source in x.sources if isinstance(source, Dimension) and source in dims}
    return {source: maps.axes[value][dim] for source, (value, dim) in found.items() if value in maps.axes}


class _Integers:
    """What modules' integers are, by equations with sizes.

    In the recorded call the code compared integers, as in ``x.shape[-1] == self.heads * self.width``, and those that
    were equal are equations for what they are made of: sizes of tensors, which the cut gives, and integers that modules
    hold. Taken by how many of the latter they have, the first equation in which one is new defines it. ``solve`` finds
    it from the difference of both sides at 0 and at 1, which gives the root of a linear equation; the root is tried in
    the equation itself, and where that does not hold, as with remainders, the integer stays what it is. The others are
    checks (``agree``). In exact fractions; our own.
    """

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
        """The integers after the cut, by who holds them: those whose equations have a positive whole solution."""
        solutions = {holder: self.solve(holder) for holder in self.definitions}
        return {holder: int(value) for holder, value in solutions.items() if value == int(value) > 0}

    def agree(self, equation: Comparison) -> bool:
        """Whether both sides of an equation are the same."""
        return bool(self._difference(equation, self._known(equation)) == 0)

    def reached(self, equation: Comparison) -> list[Axis]:
        """The dimensions of an equation's sizes, and of the equations that define its integers."""
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
    """Sizes as polynomials of which units stay, at a random point: what is equal there is equal for all cuts.

    A size is a sum over units, 1 for each that stays. Here a unit that can leave weighs a random integer below 2^16,
    one that stays 1, a unit of a flat dimension the product of its factors' weights, and units on both sides of a gate
    the same. Two polynomials of degree d that differ are equal at such a point with a probability of at most d / 65,534
    (Schwartz 1980; Zippel 1979). ``fix`` keeps whole dimensions and lets go of each without which sizes still agree.
    """

    def __init__(self, maps: Maps) -> None:
        self._units = units = maps.slots.units()
        first: dict[bytes, int] = {}
        names = {id(x): first.setdefault(x.tobytes(), dimension) for dimension, x in enumerate(units)}
        self._name = [names[id(x)] for x in units]
        self._factors = {self._name[x.flat]: x.factors for x in maps.boxes if len(units[x.flat]) > 1}
        boxes = maps.distinct_boxes(units)
        # On both sides of a gate units leave, if they can; parts that are to be even keep the same number.
        even = [list(_axes(maps, x).values()) for x in maps.recording.comparisons if x.is_even]
        pairs = [(call.front, call.behind) for call in maps.gates] + [(x[0], x[1]) for x in even if len(x) == 2]
        equal = [(units[one.dimension], units[other.dimension]) for one, other in pairs]
        count = 1 + max((int(x.max()) for x in units if len(x)), default=-1)
        self._random = np.random.default_rng(0).integers(2, 2**16, count)
        self._whole = np.zeros(count, dtype=np.bool_)
        ends = [axis for call in maps.recording.calls for x in (*call.inputs, *call.outputs) for axis in maps.axes[x]]
        single = [dimension for dimension, entries in enumerate(units) if len(entries) == 1]
        for dimension in {
            self._name[x] for x in (*(axis.dimension for axis in ends), *single, *(x for x, _ in maps.pins))
        }:
            for leaf in (dimension, *self._leaves(dimension)):
                self._whole[units[leaf]] = True
        linked = [np.concatenate(x) for x in (*equal, *([*factors, flat] for factors, flat in boxes))]
        self._part = _connect(linked, count)
        self._parts: dict[int, _Part] = {}
        for pair in (x for x in equal if len(x[0])):
            self._parts.setdefault(int(self._part[pair[0][0]]), _Part()).equal.append(pair)
        for box in (x for x in boxes if len(x[1])):
            self._parts.setdefault(int(self._part[box[1][0]]), _Part()).boxes.append(box)
        self._weights = np.zeros(count, dtype=np.int64)
        self._spread(np.arange(count))

    def size(self, axis: Axis) -> int:
        """A dimension's size at the random point: equal for two dimensions if they always have equal sizes."""
        return int(self._weights[self._units[axis.dimension]].sum())

    def fix(self, axes: Sequence[Axis], agree: Callable[[], bool]) -> list[int]:
        """Few dimensions that have to stay for sizes to agree; from now on they do."""
        leaves = {self._name[leaf]: leaf for axis in axes for leaf in self._leaves(axis.dimension)}
        before, fixed = self._whole.copy(), list[int]()
        changing = np.concatenate([self._units[leaf] for leaf in leaves.values()] or [np.zeros(0, dtype=np.int64)])
        self._whole[changing] = True
        for leaf in leaves.values():
            units = self._units[leaf]
            self._whole[units] = before[units]
            self._spread(changing)
            if not agree():
                self._whole[units] = True
                fixed += [] if before[units].all() else [leaf]
        self._spread(changing)
        return fixed

    def _spread(self, changed: Index) -> None:
        """Let units weigh what was drawn for them, those that stay 1, and pairs of factors the product.

        Of the units that did not change, those that are linked with none of these weigh the same as before.
        """
        self._weights[changed] = np.where(self._whole[changed], 1, self._random[changed])
        parts = [self._parts[x] for x in np.unique(self._part[changed]).tolist() if x in self._parts]
        for part in parts:
            for units in (*(x for pair in part.equal for x in pair), *(x for xs, y in part.boxes for x in (*xs, y))):
                self._weights[units] = np.where(self._whole[units], 1, self._random[units])
            for _ in range(2):  # flat dimensions may be factors of others
                for one, other in part.equal:
                    self._weights[other] = np.where(self._whole[other], 1, self._weights[one])
                for factors, flat in part.boxes:
                    self._weights[flat] = outer(np.multiply, [self._weights[x] for x in factors]).ravel()

    def _leaves(self, dimension: int, around: frozenset[int] = frozenset()) -> list[int]:
        """The dimensions that multiply to a flat one, at all depths; a dimension without factors itself."""
        name = self._name[dimension]
        factors = () if name in around else self._factors.get(name, ())
        return [leaf for x in factors for leaf in self._leaves(x, around | {name})] or [dimension]


@dataclass
class _Part:
    """Units that are linked: by gates and splits, whose sides are equal, and by boxes, of factors and their product."""

    equal: list[tuple[Index, Index]] = field(default_factory=list)
    boxes: list[tuple[list[Index], Index]] = field(default_factory=list)


def _connect(groups: Sequence[Index], count: int) -> Index:
    """For each unit, the least one that it is linked with by groups of units."""
    least, is_new = np.arange(count), True
    while is_new:
        is_new = False
        for units in (units for units in groups if len(units)):
            first = least[units].min()
            is_new |= bool((least[units] != first).any())
            least[units] = first
    return least


def choose_constants(maps: Maps) -> dict[ConstantInput, Tensor]:
    """Decide which constant inputs may leave, and return the constants, ``(inputs,)`` or ``(inputs, *positions)``.

    A bias absorbs an input if its value is the same at all calls of the layer, and at all positions or at least for
    all examples, where the layer pads.
    """
    of_weight = defaultdict[Value, list[ConstantInput]](list)
    for layer in maps.constant_inputs:
        of_weight[layer.weight].append(layer)
    chosen = {weight: layers for weight, layers in of_weight.items() if any(x.candidates.any() for x in layers)}
    values = _Evaluation(maps).run([layer.input for layers in chosen.values() for layer in layers])
    constants = dict[ConstantInput, Tensor]()
    for layers in chosen.values():
        # Units in front, then examples and positions.
        tensors = [values[layer.input].detach().cpu().movedim(layer.input_dim, 0) for layer in layers]
        known = [maps.kinds(layer.input, layer.input_dim) < VARIES for layer in layers]
        fits = _agree(layers, tensors, known)
        for layer, tensor in zip(layers, tensors, strict=True):
            layer.reads[layer.candidates & ~fits] = True
            constants[layer] = _reduced(tensor, layer.candidates & fits)
    return constants


def read_what_stays(maps: Maps, solution: Solution) -> bool:
    """Let layers read constants that stay for another reason and that nothing else computes; return whether any do."""
    is_changed = False
    for layer in maps.constant_inputs:
        axis = maps.axes[layer.input][layer.input_dim]
        stays = solution.stays[solution.units[axis.dimension]]
        missed = layer.candidates & ~layer.reads & stays & ~solution.is_needed(axis)
        if layer.operation in solution.running and missed.any():
            layer.reads[missed] = True
            is_changed = True
    return is_changed


def _agree(layers: list[ConstantInput], tensors: list[Tensor], known: list[Mask]) -> Mask:
    """The inputs that are the same at all calls, for all examples, and for dense layers at all positions."""
    first = tensors[0]
    fits: Mask = np.logical_and.reduce(known)
    for layer, tensor in zip(layers, tensors, strict=True):
        if layer.weight.rank > 2:  # images
            fits &= (tensor == tensor[:, :1]).flatten(1).all(1).numpy()
        if layer.weight.rank > 2 and tensor.shape[2:] == first.shape[2:]:
            fits &= (tensor[:, 0] == first[:, 0]).flatten(1).all(1).numpy()
        else:
            fits &= (tensor.flatten(1) == first.flatten(1)[:, :1]).all(1).numpy()
    return fits


def _reduced(tensor: Tensor, chosen: Mask) -> Tensor:
    """One number for each unit if all chosen ones have the same at all positions, else one for each position."""
    positions = tensor.flatten(1)[torch.from_numpy(chosen)]
    is_uniform = bool((positions == positions[:, :1]).all())
    return tensor.flatten(1)[:, 0] if is_uniform else tensor[:, 0]


class _Evaluation:
    """Runs recorded operations again with fixed gates. Only what does not vary has a meaning in the results."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps
        self._values: dict[Value, Tensor] = {}

    def run(self, wanted: Iterable[Value]) -> dict[Value, Tensor]:
        """By value, its tensor for the recorded example with the gates fixed; operations run in recorded order."""
        operations = self._before(wanted)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for operation in self.maps.recording.operations:
                if operation in operations:
                    self._repeat(operation)
        return {value: self._tensor(value) for value in wanted}

    def _before(self, wanted: Iterable[Value]) -> set[Operation]:
        """The operations that made what has something constant in it."""
        makers = {x: operation for operation in self.maps.recording.operations for x in operation.made}
        found, waiting = set[Operation](), list(wanted)
        while waiting:
            value = waiting.pop()
            maker = makers.get(value)
            if maker is None or maker in found or maker in self.maps.barriers:
                continue
            if self.maps.kind(value) < VARIES or any((x.kinds < VARIES).any() for x in self.maps.axes[value]):
                found.add(maker)
                waiting.extend(maker.inputs)
        return found

    def _tensor(self, value: Value) -> Tensor:
        return self._values.get(value, value.tensor.detach())

    def _repeat(self, operation: Operation) -> None:
        changes = operation.name.endswith("_")
        args, kwargs = tree_map_only(
            Value,
            lambda x: self._tensor(x).clone() if changes else self._tensor(x),
            (operation.args, operation.kwargs),
        )
        result = operation.function(*args, **kwargs)
        if operation.name == "gate":
            assert isinstance(result, Tensor)
            result = self._gated(operation, result)
        results = result if isinstance(result, (tuple, list)) else [result]
        for value, tensor in zip(operation.outputs, results, strict=True):
            if value is not None and isinstance(tensor, Tensor):
                self._values[value] = tensor

    def _gated(self, operation: Operation, x: Tensor) -> Tensor:
        site, dim = str(operation.arguments["site"]), operation.integer("dim") % x.dim()
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        if self.maps.values is not None and site in self.maps.values:
            x = x * self.maps.values[site].to(x).view(shape)
        if site in self.maps.closed:
            # In place on a copy: a new tensor would be contiguous, where recorded views may rely on the strides of x.
            x = x.clone().masked_fill_(torch.from_numpy(self.maps.closed[site]).to(x.device).view(shape), ZERO)
        return x


@dataclass(frozen=True)
class Fold:
    """Inputs of a layer that are the same for every example: their contribution goes into its bias.

    They leave, except the last of a dimension and those that are also another unit elsewhere. These keep their entries,
    which are no longer computed correctly, so that their weights must be zero.
    """

    path: str  # the module that called the layer
    weight: str  # its name, as of the bias
    bias: str | None
    dim: int  # of the weight, which reads the inputs
    units: Tensor  # which of the inputs, in the numbering of the full layer
    constant: Tensor  # their values, shape ``(units,)``; or ``(units, *positions)`` where they differ between positions
    is_padded: bool  # whether the layer pads its input with zeros, so that the contribution is a map


@dataclass(frozen=True)
class GateMap:
    """The units in front of a gate and behind it, in the numbering of the full gate.

    Where they differ, the gate selects: a unit in front that is not behind ends here, and one behind that is not in
    front begins here, as zeros. Every unit that is in one alone is closed. All calls of a gate have one map.
    """

    front: Tensor
    behind: Tensor


@dataclass(frozen=True)
class ReducedNorm:
    """A LayerNorm or RMSNorm that loses units; the removed ones were zeros, and still count in its mean."""

    path: str  # the module, an ``nn.LayerNorm`` or ``nn.RMSNorm``, or a subclass without a forward of its own
    size: int  # number of units that there were
    remaining: Tensor  # those that stay


@dataclass(frozen=True)
class Analysis:
    """What :func:`analyse` returns. Indices are int64 on the CPU, in the numbering of the recorded network.

    Attributes:
        remaining: by name of a parameter or buffer that was used (every name of a tied one), the indices that stay in
            each of its dimensions.
        folds: constant inputs that go into biases.
        gates: by site, what stays in front of and behind the gate.
        norms: norms that lose units.
        zero_channels: by path of a BatchNorm, its channels (in the full numbering) whose input is zero; set their
            running mean to 0, its limit.
        removed: by site, the units that are removed behind the gate.
        reasons: by site, the closed units that stay behind the gate or in front of it, and why.
        barriers: operations without a rule that units would have to pass, and how often.
        shrunk: by module path, sizes of tensors that shrank while the module ran, and their new values.
        maps: what the rules know of the recording.
        solution: which units stay.
    """

    remaining: dict[str, tuple[Tensor, ...]]
    folds: list[Fold]
    gates: dict[str, GateMap]
    norms: list[ReducedNorm]
    zero_channels: dict[str, Tensor]
    removed: dict[str, Tensor]
    reasons: dict[str, dict[int, str]]
    barriers: Counter[str]
    shrunk: dict[str, dict[int, int]]
    maps: Maps
    solution: Solution

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a recorded value after the units were removed."""
        return tuple(self.solution.size(axis) for axis in self.maps.axes[value])

    def multiply_adds(self, remaining: bool = True) -> int:
        """Multiply-adds of the recorded calls' contractions and convolutions, without scaled-dot-product attention.

        Args:
            remaining: whether to count what stays, or else the recorded network.
        """
        return self._count(remaining, is_attention=False)

    def attention_multiply_adds(self, remaining: bool = True) -> int:
        """Multiply-adds of scaled-dot-product attention; torch's counter misses them on some machines."""
        return self._count(remaining, is_attention=True)

    def _count(self, remaining: bool, is_attention: bool) -> int:
        return sum(
            math.prod(self.solution.size(axis) if remaining else axis.size for axis in product.axes)
            for product in self.maps.products
            if product.is_attention == is_attention
        )


def analyse(
    recording: Recording,
    closed: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None = None,
    folds: bool = True,
    zeros: Set[str] = frozenset(),
) -> Analysis:
    """Find the units that can be removed from a network whose closed gates are zero without changing its outputs.

    Args:
        recording: the network, recorded by :func:`record`.
        closed: by site, which gates are closed, bool of shape ``(size,)``; a missing site has none.
        values: by site, the values of gates that are fixed. Without them the other gates stay random, and what they
            make of a constant varies, as needed during training.
        folds: whether constant inputs of a layer may be folded into its bias. They stay during training, because their
            derivatives would change.
        zeros: names of parameters whose slices of zeros are zeros for good, as pruning leaves them.

    Raises:
        ValueError: a site is not recorded.

    Example:
        >>> from pyro_l0.nn import L0Gate
        >>> from pyro_l0.nn.engine import record
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), L0Gate(3), nn.Linear(3, 1))
        >>> closed = {"2": torch.tensor([False, True, False])}
        >>> analysis = analyse(record(net, torch.ones(1, 2)), closed)
        >>> analysis.remaining["0.weight"]
        (tensor([0, 2]), tensor([0, 1]))
    """
    maps = _apply_rules(recording, _masks(recording, closed), values, folds, zeros)
    constants = choose_constants(maps)
    solution = Solution(maps)
    while read_what_stays(maps, solution) or keep_parts_even(maps, solution) or keep_results(maps, solution):
        solution = Solution(maps)
    return _answer(maps, solution, constants)


def _masks(recording: Recording, closed: Mapping[str, Tensor]) -> dict[str, Mask]:
    gates = gate_names(recording.network)
    for site in closed:
        if site not in gates:
            raise ValueError(f"Expected gates of the network, {sorted(gates)}, but got {site!r}.")
    return {site: mask.cpu().numpy() for site, mask in closed.items()}


def _apply_rules(
    recording: Recording,
    closed: dict[str, Mask],
    values: Mapping[str, Tensor] | None,
    folds: bool,
    zeros: Set[str],
) -> Maps:
    maps = Maps(recording, closed, values, folds)
    for call in recording.calls:
        for value in call.inputs:
            maps.add(value, VARIES)
    for operation in recording.operations:
        maps.begin(operation)
        for value in operation.inputs:
            if value not in maps.axes:
                _add_given(maps, value)
                if not zeros.isdisjoint(value.names):
                    _find_zeros(maps, value)
        for value in operation.made:
            if value not in maps.axes:
                maps.add(value, VARIES)
        _apply_rule(maps, operation)
        for value in operation.made:
            maps.equalise(value)
    for call in recording.calls:
        for value in call.outputs:
            if value not in maps.axes:
                _add_given(maps, value)
    for path, module in recording.network.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            _pin_attention(maps, path)
    pin_shared_sizes(maps)
    return maps


def _add_given(maps: Maps, value: Value) -> None:
    """A parameter, a buffer, or a tensor from elsewhere, which cannot be sliced."""
    maps.add(value, VARIES if value.is_given else CONSTANT)
    if value.is_given:
        for axis in maps.axes[value]:
            if axis.size > 1:
                maps.pin(axis.dimension, f"a tensor that is no parameter or buffer, at {maps.location}")


def _find_zeros(maps: Maps, value: Value) -> None:
    """Say which slices of a parameter are zeros, by dimension; the others are constants."""
    nonzero = value.tensor.detach() != 0
    for dim in range(value.rank):
        some = nonzero.movedim(dim, 0).flatten(1).any(1).cpu().numpy() if value.rank > 1 else nonzero.cpu().numpy()
        maps.set_kinds(value, dim, np.where(some, np.uint8(CONSTANT), np.uint8(ZERO)))


def _apply_rule(maps: Maps, operation: Operation) -> None:
    found = find_entry(operation.name).rule
    if found is not None:
        try:
            found(maps, operation)
        except Exception as error:
            error.add_note(f"This was raised by the rule of {operation.name}, for {operation.location}.")
            raise
    elif is_pointwise(operation):
        rules.pointwise.pointwise(maps, operation)
    elif operation.inputs:
        maps.barrier()
    else:
        rules.movement.create(maps, operation)


def _pin_attention(maps: Maps, path: str) -> None:
    prefix = f"{path}." if path else ""
    for name, value in maps.recording.named.items():
        if name.startswith(prefix):
            for axis in maps.axes[value]:
                maps.pin(axis.dimension, f"nn.MultiheadAttention in {path or 'the network'}, whose sizes are fixed")


def _answer(maps: Maps, solution: Solution, constants: dict[ConstantInput, Tensor]) -> Analysis:
    found = dict[int, Tensor]()

    def indices(axis: Axis) -> Tensor:
        key = id(solution.units[axis.dimension])
        if key not in found:
            found[key] = torch.from_numpy(solution.remaining(axis))
        return found[key]

    remaining = {name: tuple(map(indices, maps.axes[value])) for name, value in maps.recording.named.items()}
    gates = {call.site: GateMap(indices(call.front), indices(call.behind)) for call in maps.gates}
    removed, reasons = _gates_of(maps, solution)
    norms = {
        path: ReducedNorm(path, units.size, indices(units))
        for path, units in maps.norms
        if solution.size(units) < units.size
    }
    zeros = {path: torch.from_numpy(np.flatnonzero(mask)) for path, mask in maps.zero_channels.items() if mask.any()}
    barriers = Counter(
        text for operation, text in maps.barriers.items() if operation in solution.running or operation.name != WRITE
    )
    return Analysis(
        remaining,
        _folds(maps, solution, constants),
        gates,
        list(norms.values()),
        zeros,
        removed,
        reasons,
        barriers,
        _shrunk(maps, solution),
        maps,
        solution,
    )


def _gates_of(maps: Maps, solution: Solution) -> tuple[dict[str, Tensor], dict[str, dict[int, str]]]:
    """By site, the units that leave behind a gate, and the closed ones that stay somewhere, and why."""
    removed, reasons = dict[str, Tensor](), dict[str, dict[int, str]]()
    for call in maps.gates:
        behind = set(solution.remaining(call.behind).tolist())
        front = set(solution.remaining(call.front).tolist())
        left = [unit for unit in range(call.behind.size) if unit not in behind]
        removed[call.site] = torch.tensor(left, dtype=torch.int64)
        is_closed = maps.closed.get(call.site, np.zeros(call.front.size, dtype=np.bool_))
        stays = {
            unit: solution.reason(call.behind if unit in behind else call.front, unit)
            for unit in np.flatnonzero(is_closed).tolist()
            if unit in behind or unit in front
        }
        reasons[call.site] = stays
    return removed, reasons


def _folds(maps: Maps, solution: Solution, constants: dict[ConstantInput, Tensor]) -> list[Fold]:
    """The constant inputs that leave their layer, once for each weight."""
    found = dict[Value, Fold]()
    for layer, constant in constants.items():
        axis = maps.axes[layer.input][layer.input_dim]
        units = np.flatnonzero(layer.candidates & ~solution.is_needed(axis))
        if len(units) and layer.operation in solution.running:
            bias = layer.bias.names[0] if layer.bias is not None else None
            found[layer.weight] = Fold(
                layer.operation.path,
                layer.weight.names[0],
                bias,
                layer.weight_dim,
                torch.from_numpy(units),
                constant[torch.from_numpy(units)],
                layer.is_padded,
            )
    return list(found.values())


def _shrunk(maps: Maps, solution: Solution) -> dict[str, dict[int, int]]:
    """By module path, what sizes became.

    A module's own operations decide before those of the modules inside: a size that stayed in its own code stayed for
    its attributes.
    """
    sizes = defaultdict[str, dict[int, set[int]]](lambda: defaultdict(set))
    for operation in maps.recording.operations:
        for axis in (axis for value in [*operation.inputs, *operation.made] for axis in maps.axes[value]):
            sizes[operation.path][axis.size].add(solution.size(axis))
    for path in sorted(sizes, key=lambda path: -path.count(".") - bool(path)):
        parent = path.rpartition(".")[0]
        for size, now in sizes[path].items() if path else ():
            sizes[parent].setdefault(size, now)
    return {path: {size: min(now) for size, now in each.items() if min(now) < size} for path, each in sizes.items()}
