"""Rules of operations that move entries and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from pyro_l0.nn.engine.maps import Maps, rule
from pyro_l0.nn.engine.slots import CONSTANT, ZERO, Index
from pyro_l0.nn.engine.tape import Operation, Value

__all__: list[str] = []


@rule(
    "aten::view",
    "aten::_unsafe_view",
    "aten::reshape",
    "aten::_reshape_alias",
    "aten::unsqueeze",
    "aten::squeeze",
    "aten::flatten",
    "aten::unflatten",
)
def view(maps: Maps, operation: Operation) -> None:
    """Dimensions are merged and split: an entry of a merged dimension leaves iff one of its factors' entries does."""
    x, output = operation.value("self"), operation.output
    if x.shape == output.shape:
        return _permute(maps, x, output, range(x.rank))
    if not math.prod(x.shape):
        return maps.barrier()
    for dim, size in enumerate(x.shape):
        if size == 1:
            maps.fixes(x, dim)
    for dims, output_dims in _common_parts(x.shape, output.shape):
        if len(dims) == len(output_dims) == 1:
            maps.passes(x, dims[0], output, output_dims[0])
        else:
            maps.reshape([maps.axes[x][d] for d in dims], [maps.axes[output][d] for d in output_dims])
    state = maps.state(x)
    for dim, size in enumerate(output.shape):
        if size == 1:
            maps.set_states(output, dim, np.full(1, state, dtype=np.uint8))
    if not output.shape:
        maps.set_state(output, state)


def _common_parts(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest groups of dimensions that hold the same entries before and after; those of size 1 left out."""
    left = [dim for dim, size in enumerate(before) if size != 1]
    right = [dim for dim, size in enumerate(after) if size != 1]
    while left:
        dims, output_dims = [left.pop(0)], [right.pop(0)]
        size, output_size = before[dims[0]], after[output_dims[0]]
        while size != output_size:
            if size < output_size:
                dims.append(left.pop(0))
                size *= before[dims[-1]]
            else:
                output_dims.append(right.pop(0))
                output_size *= after[output_dims[-1]]
        yield dims, output_dims


@rule("aten::permute", "aten::t", "aten::numpy_T", "aten::mT", "aten::transpose", "aten::swapaxes")
def permute(maps: Maps, operation: Operation) -> None:
    """Dimensions are reordered: all as given, two of them, or those of a matrix."""
    x = operation.value("self")
    order = operation.integers("dims") or list(range(x.rank))
    if order and "dim0" in operation.arguments:
        one, other = operation.integer("dim0"), operation.integer("dim1")
        order[one], order[other] = order[other], order[one]
    elif "dims" not in operation.arguments:
        order.reverse()
    _permute(maps, x, operation.output, [dim % x.rank for dim in order])


def _permute(maps: Maps, x: Value, output: Value, order: Sequence[int]) -> None:
    for output_dim, dim in enumerate(order):
        maps.passes(x, dim, output, output_dim)
    if not output.shape:
        maps.set_state(output, maps.state(x))


@rule("aten::expand", "aten::expand_as", "aten::broadcast_to", "aten::repeat")
def expand(maps: Maps, operation: Operation) -> None:
    """A repeated dimension is a product of the copies, which all stay, and of what is copied; one entry alone stays."""
    x, output = operation.value("self"), operation.output
    new = output.rank - x.rank
    maps.set_state(output, maps.state(x))
    for dim, size in enumerate(x.shape):
        if size == output.shape[dim + new]:
            maps.passes(x, dim, output, dim + new)
        elif operation.name == "aten::repeat":
            copies = maps.fixed(output.shape[dim + new] // size)
            maps.reshape([copies, maps.axes[x][dim]], [maps.axes[output][dim + new]])
        else:
            maps.fixes(x, dim)


@rule("aten::cat", "aten::concat")
def concatenate(maps: Maps, operation: Operation) -> None:
    """One dimension's entries are joined end to end; the other dimensions are the same."""
    output = operation.output
    tensors = [x for x in operation.inputs if math.prod(x.shape)]
    dim = int(operation.arguments["dim"]) % output.rank  # type: ignore[call-overload]
    start = 0
    for x in tensors:
        entries = np.arange(x.shape[dim])
        maps.part(x, dim, output, dim, entries, entries + start)
        start += x.shape[dim]
    _share(maps, tensors, output, {d: d for d in range(output.rank) if d != dim})


@rule("aten::stack")
def stack(maps: Maps, operation: Operation) -> None:
    """Tensors are joined along a new dimension, which stays."""
    output = operation.output
    dim = operation.integer("dim") % output.rank
    states = np.array([maps.state(x) for x in operation.inputs], dtype=np.uint8)
    maps.fixes(output, dim)
    maps.set_states(output, dim, states)
    _share(maps, operation.inputs, output, {d: d + (d >= dim) for d in range(output.rank - 1)})


def _share(maps: Maps, tensors: Sequence[Value], output: Value, dims: dict[int, int]) -> None:
    """Dimensions that several inputs have in common with the output."""
    for dim, output_dim in dims.items():
        for x in tensors:
            maps.same(x, dim, output, output_dim)
        maps.set_states(output, output_dim, np.maximum.reduce([maps.states(x, dim) for x in tensors]))


@rule("aten::slice", "aten::narrow")
def cut(maps: Maps, operation: Operation) -> None:
    """A range of one dimension; the other dimensions are the same."""
    x, output = operation.value("self"), operation.output
    dim = operation.integer("dim") % x.rank
    entries = np.arange(x.shape[dim])
    if operation.name == "aten::narrow":
        entries = entries[operation.integer("start") :][: operation.integer("length")]
    else:
        start, end, step = (operation.arguments[name] for name in ("start", "end", "step"))
        entries = entries[slice(start, end, step)]
    _take(maps, x, output, dim, entries)


@rule("aten::split", "aten::split_with_sizes", "aten::unsafe_split", "aten::chunk", "aten::tensor_split")
def split(maps: Maps, operation: Operation) -> None:
    """Consecutive ranges of one dimension; the other dimensions are the same."""
    x = operation.inputs[0]
    dim = operation.integer("dim") % x.rank
    start = 0
    for output in operation.made:
        _take(maps, x, output, dim, np.arange(start, start + output.shape[dim]))
        start += output.shape[dim]


@rule("aten::flip")
def flip(maps: Maps, operation: Operation) -> None:
    """Dimensions are read backwards."""
    x, output = operation.value("self"), operation.output
    flipped = [dim % x.rank for dim in operation.integers("dims")]
    maps.passes_rest(x, output, *flipped)
    for dim in flipped:
        maps.part(x, dim, output, dim, np.arange(x.shape[dim])[::-1], np.arange(x.shape[dim]))


def _take(maps: Maps, x: Value, output: Value, dim: int, entries: Index) -> None:
    if len(entries) == x.shape[dim]:
        maps.passes_rest(x, output)
    else:
        maps.passes_rest(x, output, dim)
        maps.part(x, dim, output, dim, entries, np.arange(len(entries)))


@rule("aten::select", "aten::unbind")
def select(maps: Maps, operation: Operation) -> None:
    """One entry of a dimension, or each by itself; that dimension stays, the others are the same."""
    x = operation.value("self")
    dim = operation.integer("dim") % x.rank
    maps.fixes(x, dim)
    for number, output in enumerate(operation.made):
        index = operation.integer("index") if operation.name == "aten::select" else number
        for d in range(x.rank):
            if d != dim:
                maps.passes(x, d, output, d - (d > dim))
        state = min(int(maps.states(x, dim)[index]), maps.state(x))
        if not output.shape:
            maps.set_state(output, state)
        for axis in maps.axes[output]:
            axis.states = np.minimum(axis.states, np.uint8(state))


@rule("aten::constant_pad_nd", "aten::pad")
def pad(maps: Maps, operation: Operation) -> None:
    """Constant entries are added at both ends of a dimension, where they stay; other modes copy entries."""
    x, output = operation.inputs[0], operation.output
    amounts = operation.integers("pad")
    state = CONSTANT if operation.arguments["value"] else ZERO
    is_constant = operation.arguments.get("mode", "constant") == "constant"
    for dim, size in enumerate(x.shape):
        place = 2 * (x.rank - 1 - dim)
        before, behind = amounts[place : place + 2] if place < len(amounts) else (0, 0)
        if before == behind == 0:
            maps.passes(x, dim, output, dim, state)
        elif min(before, behind) < 0 or not is_constant:
            maps.fixes(x, dim)
            maps.fixes(output, dim)
            maps.set_states(output, dim, np.full(output.shape[dim], max(maps.state(x), state), dtype=np.uint8))
        else:
            maps.set_states(output, dim, np.full(size + before + behind, state, dtype=np.uint8))
            maps.part(x, dim, output, dim, np.arange(size), np.arange(size) + before)
            new = np.ones(size + before + behind, dtype=np.bool_)
            new[before : before + size] = False
            maps.reads((output, dim), where=new)
            maps.set_states(output, dim, np.maximum(maps.states(output, dim), np.uint8(state)))


@rule("aten::pixel_shuffle", "aten::pixel_unshuffle")
def pixel_shuffle(maps: Maps, operation: Operation) -> None:
    """The image stays. Where a channel becomes pixels of several, or the reverse, one leaves iff all of these leave."""
    x, output = operation.value("self"), operation.output
    before, behind = [maps.axes[x][-3]], [maps.axes[output][-3]]
    is_unshuffled = operation.name == "aten::pixel_unshuffle"
    factor = operation.integer("downscale_factor" if is_unshuffled else "upscale_factor")
    (before if is_unshuffled else behind).append(maps.fixed(factor**2))
    for value in (x, output):
        maps.fixes(value, -2, -1)
    maps.passes_rest(x, output, -3, -2, -1)
    maps.reshape(before, behind)


@rule("aten::channel_shuffle", "aten::native_channel_shuffle")
def channel_shuffle(maps: Maps, operation: Operation) -> None:
    """Channels of several groups are shuffled; the groups stay, so that the same channels of all groups leave."""
    x, output, groups = operation.value("self"), operation.output, operation.integer("groups")
    maps.passes_rest(x, output, 1)
    group, place = maps.fixed(groups), maps.free(x.shape[1] // groups)
    maps.reshape([maps.axes[x][1]], [group, place])
    maps.reshape([place, group], [maps.axes[output][1]])


@rule("aten::view_as_complex", "aten::view_as_real")
def view_as_complex(maps: Maps, operation: Operation) -> None:
    """The last dimension of the real tensor, a real part and an imaginary one, stays; the others are the same."""
    x, output = operation.value("self"), operation.output
    for dim in range(min(x.rank, output.rank)):
        maps.passes(x, dim, output, dim)
    maps.fixes(x if x.rank > output.rank else output, -1)
