"""The dimensions of recorded tensors, and the rules' vocabulary: which entries belong together, which are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from pyro_l0.nn.engine.record import WRITE, Operation, Recording, Value

# What is known of a slice of a tensor: all zeros, the same whatever the network is given, or neither.
ZERO, CONSTANT, VARIES = 0, 1, 2
Mask = npt.NDArray[np.bool_]
Kinds = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
_Entry = TypeVar("_Entry", bound=np.generic)


class Axis:
    """One dimension of a recorded tensor: its number in :class:`Slots`, and what is known of each entry's slice."""

    def __init__(self, size: int, dimension: int, kind: int) -> None:
        self.size = size
        self.dimension = dimension
        self.kinds: Kinds = np.full(size, kind, dtype=np.uint8)

    @property
    def kind(self) -> int:
        """What is known of the whole tensor, as far as this dimension tells."""
        return int(self.kinds.max()) if self.size else ZERO


class Slots:
    """Entries of dimensions, which are numbered, and which of them are the same unit.

    Two dimensions that agree entry by entry are joined as wholes, which costs nothing; others by pairs of entries.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parents: list[int] = []
        self._pairs: list[tuple[int, Index, int, Index]] = []
        self._units: list[Index] | None = None  # as long as nothing is added or joined

    def new(self, size: int) -> int:
        """A dimension whose entries belong to nothing yet."""
        self._units = None
        self._sizes.append(size)
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def root(self, dimension: int) -> int:
        """The dimension that stands for all that it was joined with; paths are halved on the way."""
        while self._parents[dimension] != dimension:
            self._parents[dimension] = self._parents[self._parents[dimension]]
            dimension = self._parents[dimension]
        return dimension

    def join(self, one: int, other: int) -> None:
        """Entry i of one dimension is the same unit as entry i of the other."""
        one, other = self.root(one), self.root(other)
        assert self._sizes[one] == self._sizes[other]
        self._units = self._units if one == other else None
        self._parents[max(one, other)] = min(one, other)

    def join_entries(self, one: int, entries: Index, other: int, others: Index) -> None:
        """Some entries of one dimension are the same units as some of the other."""
        if len(entries):
            self._units = None
            self._pairs.append((one, entries, other, others))

    def units(self) -> list[Index]:
        """The unit of every entry, by dimension; joined dimensions share their array."""
        if self._units is None:
            self._units = self._find_units()
        return self._units

    def _find_units(self) -> list[Index]:
        roots = [self.root(dimension) for dimension in range(len(self._parents))]
        starts, total = dict[int, int](), 0
        for root in dict.fromkeys(roots):
            starts[root] = total
            total += self._sizes[root]
        ones = [starts[roots[one]] + entries for one, entries, _, _ in self._pairs]
        others = [starts[roots[other]] + entries for _, _, other, entries in self._pairs]
        if ones:
            rows, columns = np.concatenate(ones), np.concatenate(others)
            graph = coo_matrix((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(total, total))
            labels = connected_components(graph, directed=False)[1].astype(np.int64)
        else:
            labels = np.arange(total)
        of_root = {root: labels[start : start + self._sizes[root]] for root, start in starts.items()}
        return [of_root[root] for root in roots]


@dataclass(frozen=True, eq=False)
class Box:
    """A dimension whose entries are the pairs (or triples, ...) of entries of others, last one fastest.

    An entry of the flat dimension leaves if and only if one of its factors' entries leaves.
    """

    factors: tuple[int, ...]  # their dimensions
    flat: int
    is_view: bool  # whether the factors are dimensions of tensors, which the network's code tells apart


@dataclass(frozen=True, eq=False)
class Link:
    """Entries of an operation's input are read by entries of its output alone, one by one."""

    source: Axis  # of the input
    target: Axis  # of the output
    source_entries: Index | None = None  # which are read; None for all
    target_entries: Index | None = None  # which read them, in the same order; None for all
    where: Mask | None = None  # whether an entry is read at all, by entry that is linked; None for all
    is_factor: bool = False  # whether a zero makes a zero, whatever else is linked with the same entry

    def forward(self, entries: Index, rest: int) -> Index:
        """What is known of the input's entries (last dimension) at those of the output; ``rest`` of others."""
        return _moved(entries, self.source_entries, self.target_entries, self.target.size, rest)

    def back(self, entries: Index, rest: int) -> Index:
        """What is known of the output's entries (last dimension) at those of the input; ``rest`` of others."""
        return _moved(entries, self.target_entries, self.source_entries, self.source.size, rest)


def _moved(entries: Index, before: Index | None, behind: Index | None, size: int, rest: int) -> Index:
    entries = entries if before is None else entries[..., before]
    if behind is None:
        return entries
    moved = np.full((*entries.shape[:-1], size), rest)
    moved[..., behind] = entries
    return moved


@dataclass(frozen=True, eq=False)
class Reshape:
    """The entries of some dimensions, in order, are the entries of others, in order."""

    sources: tuple[Axis, ...]
    targets: tuple[Axis, ...]

    def pass_kinds(self) -> None:
        """A slice is as variable as the most variable of what it takes part in."""
        flat = outer(np.minimum, [axis.kinds for axis in self.sources])
        flat = flat.reshape([axis.size for axis in self.targets])
        for dim, axis in enumerate(self.targets):
            axis.kinds = flat.max(axis=tuple(d for d in range(flat.ndim) if d != dim))


@dataclass(frozen=True, eq=False)
class Read:
    """Entries of an operation's input that it reads together, so that they have to stay while its output is needed."""

    axes: tuple[Axis, ...]  # of the same entries, in one or several inputs
    where: Mask | None  # which entries are read; None for all
    reason: str  # why they stay
    groups: int = 1  # with ``behind``: an entry is read only if an entry of its group is needed there
    behind: Axis | None = None  # the output's dimension in groups


def outer(function: np.ufunc, vectors: Sequence[npt.NDArray[_Entry]]) -> npt.NDArray[_Entry]:
    """A function of every combination of the vectors' entries, a dimension for each vector."""
    return reduce(function.outer, vectors)


@dataclass(frozen=True, eq=False)
class GateCall:
    """One call of a gate: the units in front of it and behind it; and whether it is one for any number of units."""

    site: str
    front: Axis
    behind: Axis
    is_whole: bool = False


@dataclass(frozen=True, eq=False)
class ConstantInput:
    """A layer whose constant inputs may leave, if its bias absorbs them."""

    operation: Operation  # the layer's call
    input: Value
    weight: Value
    bias: Value | None
    input_dim: int  # which is summed over
    weight_dim: int
    is_padded: bool  # whether it pads images with zeros
    read: Read  # which entries are read, those that do not leave
    candidates: Mask  # which are constant and would be read

    @property
    def reads(self) -> Mask:
        """Which entries are read; changes where it is changed."""
        assert self.read.where is not None
        return self.read.where


@dataclass(frozen=True, eq=False)
class Product:
    """The dimensions whose sizes multiply to an operation's multiply-adds, and the inputs that it multiplies.

    The last product of an operation makes its result: a zero in one factor makes a zero.
    """

    operation: Operation
    axes: tuple[Axis, ...]
    factors: tuple[Value, ...]
    is_attention: bool = False


@dataclass(eq=False)
class Maps:
    """What the rules know of a recording; a :func:`rule` calls its methods to say how entries belong together."""

    recording: Recording
    closed: Mapping[str, Mask]  # by site, which gates are closed
    values: Mapping[str, Tensor] | None  # by site, of gates that are fixed; None where they stay random
    folds: bool  # whether constant inputs of a layer may leave into its bias
    slots: Slots = field(default_factory=Slots)
    axes: dict[Value, list[Axis]] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)  # dimensions that are products of others
    fixed_axes: list[Axis] = field(default_factory=list)  # of no tensor, whose entries stay
    relations: dict[Operation, list[Link | Reshape | Read]] = field(default_factory=dict)  # what each operation reads
    gates: list[GateCall] = field(default_factory=list)
    norms: list[tuple[str, Axis]] = field(default_factory=list)  # by path, those that can do with fewer units
    constant_inputs: list[ConstantInput] = field(default_factory=list)  # into whose biases constants may go
    products: list[Product] = field(default_factory=list)  # of which the multiply-adds are made
    zero_channels: dict[str, Mask] = field(default_factory=dict)  # by path of a BatchNorm, zero in front of it
    barriers: dict[Operation, str] = field(default_factory=dict)  # of which nothing is known
    pins: list[tuple[int, str]] = field(default_factory=list)  # dimensions that have to stay, and why
    pinned_entries: list[tuple[int, Index, str]] = field(
        default_factory=list
    )  # entries that also do, for these closed gates
    roots: list[Value] = field(default_factory=list)  # that the network's own code branches on
    _numbers: dict[Value, Axis] = field(default_factory=dict)
    _operation: Operation | None = None

    def begin(self, operation: Operation) -> None:
        """Let what rules say from now on be of an operation."""
        self._operation = operation
        self.relations[operation] = []

    def add(self, value: Value, kind: int) -> None:
        """A value whose dimensions belong to nothing yet."""
        self.axes[value] = [Axis(size, self.slots.new(size), kind) for size in value.shape]
        if not value.shape:
            self._numbers[value] = Axis(1, -1, kind)

    def dims(self, value: Value) -> list[Axis]:
        """The dimensions of a value; for a number, one of size 1 that stands for it and is not in the slots."""
        return self.axes[value] or [self._numbers[value]]

    def kind(self, value: Value) -> int:
        """What is known of a whole tensor, ``ZERO`` (0), ``CONSTANT`` (1) or ``VARIES`` (2)."""
        return min(axis.kind for axis in self.dims(value))

    def kinds(self, value: Value, dim: int) -> Kinds:
        """What is known of each slice of a tensor along a dimension, shape ``(size,)``."""
        return self.axes[value][dim].kinds

    def broadcast_kinds(self, value: Value, dim: int, size: int) -> Kinds:
        """The same along a dimension of an output: for each entry that of the whole where it reads the whole."""
        if -value.rank <= dim < value.rank and value.shape[dim] == size:
            return self.kinds(value, dim)
        return np.full(size, self.kind(value), dtype=np.uint8)

    def set_kinds(self, value: Value, dim: int, kinds: Kinds) -> None:
        """Say what is known of each slice of a tensor along a dimension, shape ``(size,)``."""
        self.axes[value][dim].kinds = kinds

    def set_kind(self, value: Value, kind: int) -> None:
        """Say what is known of a whole tensor."""
        for axis in self.dims(value):
            axis.kinds = np.full(axis.size, kind, dtype=np.uint8)

    def same(
        self,
        source: Value,
        dim: int,
        target: Value,
        target_dim: int,
        where: Mask | None = None,
        tied: bool = True,
        is_factor: bool = False,
    ) -> None:
        """Say that entry i of an input's dimension is read by entry i of the output's dimension, and by no other.

        Args:
            source: the input.
            dim: its dimension.
            target: the output.
            target_dim: its dimension.
            where: which entries are read at all, bool of shape ``(size,)``; by default all.
            tied: whether one is removed if and only if the other is.
            is_factor: whether a zero makes a zero, whatever the other inputs are.
        """
        one, other = self.axes[source][dim], self.axes[target][target_dim]
        if tied:
            self.slots.join(one.dimension, other.dimension)
        self._say(Link(one, other, where=where, is_factor=is_factor))

    def passes(
        self,
        source: Value,
        dim: int,
        target: Value,
        target_dim: int,
        least: int = ZERO,
        nonzero: int = ZERO,
        is_factor: bool = False,
    ) -> None:
        """Say that entry i of an input is entry i of the output, and just as constant.

        Args:
            source: the input.
            dim: its dimension.
            target: the output.
            target_dim: its dimension.
            least: what entries become at least, such as :data:`CONSTANT` for zeros to which something is added.
            nonzero: what entries that are not zero become at least.
            is_factor: whether a zero makes a zero, whatever the other inputs are; of a single input it always does.
        """
        kinds = self.kinds(source, dim)
        self.same(source, dim, target, target_dim, is_factor=is_factor)
        if nonzero:
            kinds = np.where(kinds == ZERO, kinds, np.maximum(kinds, np.uint8(nonzero)))
        self.set_kinds(target, target_dim, np.maximum(kinds, np.uint8(least)) if least else kinds)

    def passes_rest(self, source: Value, target: Value, *dims: int, least: int = ZERO) -> None:
        """All dimensions but some pass, as :meth:`passes` says, each to the one of its number."""
        for dim in range(source.rank):
            if not {dim, dim - source.rank}.intersection(dims):
                self.passes(source, dim, target, dim, least)

    def part(
        self,
        source: Value,
        dim: int,
        target: Value,
        target_dim: int,
        entries: Index,
        target_entries: Index,
        is_factor: bool = False,
    ) -> None:
        """Say that ``entries`` of an input are ``target_entries`` of the output, in order, and just as constant.

        With ``is_factor`` they multiply what other parts have there: a zero makes a zero.
        """
        one, other = self.axes[source][dim], self.axes[target][target_dim]
        self.slots.join_entries(one.dimension, entries, other.dimension, target_entries)
        self._say(Link(one, other, entries, target_entries, is_factor=is_factor))
        kinds = other.kinds.copy()
        kinds[target_entries] = one.kinds[entries]
        other.kinds = kinds

    def replaces(self, before: Value, output: Value) -> None:
        """The output has the units of a value, which it overwrites or has the sizes of, and reads nothing of it."""
        for dim in range(before.rank):
            self.tie(self.axes[before][dim], self.axes[output][dim])

    def tie(self, one: Axis, other: Axis) -> None:
        """Entry i of one dimension is the same unit as entry i of another."""
        self.slots.join(one.dimension, other.dimension)

    def reads(
        self, *operands: tuple[Value, int], where: Mask | None = None, groups: int = 1, behind: Axis | None = None
    ) -> None:
        """Say that entries of inputs are read together: a sum over them needs those that are not zero.

        Args:
            operands: inputs and their dimensions, which hold the same units.
            where: which entries are read, bool of shape ``(size,)``; by default all, zeros too.
            groups: with ``behind``, the number of groups.
            behind: the output's dimension; entries of a group are read for the entries of the same group.
        """
        axes = tuple(self.axes[value][dim] for value, dim in operands)
        for axis in axes[1:]:
            self.tie(axes[0], axis)
        self._say(Read(axes, where, self.location, groups, behind))

    def fixes(self, value: Value, *dims: int) -> None:
        """Say that all entries of these dimensions of an input or output must stay for the operation to run."""
        for dim in dims:
            self.reads((value, dim))
            self.pin(self.axes[value][dim].dimension)

    def mixes(self, value: Value, *dims: int) -> None:
        """Say that entries of an input's dimensions, which pass, share a number, such as a mean of all, zeros too."""
        output = self.operation.output
        for dim in dims:
            self.reads((value, dim))
            self.set_kinds(output, dim, np.full(output.shape[dim], self.axes[output][dim].kind, dtype=np.uint8))

    def takes_constants(self, weight: Value, bias: Value | None) -> bool:
        """Whether constants may leave into a layer's bias: it is a parameter, or missing in a layer of torch's."""
        if not self.folds or not weight.names:
            return False
        if bias is None:
            return isinstance(self.module(), (nn.Linear, nn.modules.conv._ConvNd))
        return bool(bias.names)

    def reads_or_folds(
        self, x: tuple[Value, int], weight: tuple[Value, int], where: Mask, bias: Value | None, is_padded: bool = False
    ) -> None:
        """Entries are read together as in :meth:`reads`, but the constant ones may leave into a layer's bias."""
        varies = self.kinds(*x) == VARIES
        self.reads(x, weight, where=where & varies)
        read = self.relations[self.operation][-1]
        assert isinstance(read, Read)
        (value, dim), (parameter, weight_dim) = x, weight
        self.constant_inputs.append(
            ConstantInput(self.operation, value, parameter, bias, dim, weight_dim, is_padded, read, where & ~varies)
        )

    def pin(self, dimension: int, reason: str | None = None) -> None:
        """Keep all entries of a dimension, for a reason in words: by default, the place of the operation."""
        self.pins.append((dimension, reason or self.location))

    def box(self, factors: Sequence[int], flat: int, is_view: bool = False) -> None:
        """Entries of a dimension are the combinations of entries of others, the last one running fastest."""
        self.boxes.append(Box(tuple(factors), flat, is_view))

    def distinct_boxes(self, units: list[Index]) -> list[tuple[list[Index], Index]]:
        """The units of the factors of each box, and those of the product; boxes of the same units once."""
        boxes = [([units[factor] for factor in box.factors], units[box.flat]) for box in self.boxes]
        return list({(*map(id, factors), id(flat)): (factors, flat) for factors, flat in boxes}.values())

    def reshape(self, sources: Sequence[Axis], targets: Sequence[Axis]) -> None:
        """Say that the entries of some dimensions of an input are, in order, those of some of the output's."""
        dimensions = [axis.dimension for axis in sources]
        flat = dimensions[0] if len(sources) == 1 else self.slots.new(math.prod(axis.size for axis in sources))
        if len(sources) > 1:
            self.box(dimensions, flat, is_view=True)
        if len(targets) > 1:
            self.box([axis.dimension for axis in targets], flat, is_view=True)
        else:
            self.slots.join(flat, targets[0].dimension)
        relation = Reshape(tuple(sources), tuple(targets))
        relation.pass_kinds()
        self._say(relation)

    def free(self, size: int) -> Axis:
        """A dimension of no tensor, a factor in :meth:`reshape`."""
        return Axis(size, self.slots.new(size), VARIES)

    def fixed(self, size: int) -> Axis:
        """A dimension of no tensor, whose entries stay: a factor in :meth:`reshape`, such as copies or positions."""
        axis = self.free(size)
        self.pin(axis.dimension)
        self.fixed_axes.append(axis)
        return axis

    def barrier(self) -> None:
        """Say that nothing is known of the operation: all that it touches stays."""
        self.barriers[self.operation] = self.location
        for value in [*self.operation.inputs, *self.operation.made]:
            for dim in range(value.rank):
                if self.operation.name == WRITE:  # which does not run, and matters only if the memory is read again
                    self.reads((value, dim))
                else:
                    self.fixes(value, dim)

    @property
    def operation(self) -> Operation:
        """The operation whose rule is running; there has to be one."""
        assert self._operation is not None
        return self._operation

    @property
    def location(self) -> str:
        """The operation and the module that it runs in, for messages."""
        return self.operation.location

    def module(self) -> nn.Module:
        """The innermost module in whose call the operation ran."""
        return self.recording.network.get_submodule(self.operation.path)

    def equalise(self, value: Value) -> None:
        """A tensor that one dimension shows to be zero, or constant, is so along every dimension."""
        kind = self.kind(value)
        if kind < VARIES:
            for axis in self.axes[value]:
                axis.kinds = np.minimum(axis.kinds, kind)

    def _say(self, relation: Link | Reshape | Read) -> None:
        self.relations[self.operation].append(relation)


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is one of torch's class, or of a subclass that inherits its forward."""
    return isinstance(module, kind) and type(module).forward is kind.forward
