"""Rules of operations that make or move entries and compute nothing: views, cuts, padding, pools, look-ups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.nn.engine.maps import CONSTANT, VARIES, ZERO, Index, Maps
from pyro_l0.nn.engine.operations import rule
from pyro_l0.nn.engine.record import Operation, Value
from pyro_l0.nn.engine.sizes import are_inner_sizes, are_numbers, are_parts, are_repeats, are_sizes

__all__ = ["create"]


_ORDERED = ("aten::arange", "aten::linspace", "aten::logspace", "aten::hann_window", "aten::hamming_window")
_LIKE = "zeros_like ones_like full_like empty_like rand_like randn_like randint_like"


@rule(*(f"aten::{name}" for name in _LIKE.split()))
def create_like(maps: Maps, operation: Operation) -> None:
    """Nothing is read but the sizes, which are those of the input."""
    create(maps, operation)
    maps.replaces(operation.value("self"), operation.output)


_MADE = "new_zeros new_ones new_full new_empty zeros ones full empty rand randn arange linspace"


@rule("aten::scalar_tensor", integers=are_numbers)
@rule(*(f"aten::{name}" for name in _MADE.split()), integers=are_sizes)
def create(maps: Maps, operation: Operation) -> None:
    """Nothing is read; zeros are zero, random numbers vary, and other tensors are constant."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(operation.function, "tags", ())
    number = operation.arguments.get("fill_value", operation.arguments.get("s"))
    is_zero = operation.name in ("aten::zeros", "aten::new_zeros", "aten::zeros_like") or number == 0
    kind = VARIES if is_random else ZERO if is_zero else CONSTANT
    for output in operation.made:
        maps.set_kind(output, kind)
        if operation.name in _ORDERED and output.shape[0] > 1:  # which numbers they are, code can't say of fewer
            maps.pin(maps.axes[output][0].dimension)


@rule(
    "aten::view",
    "aten::_unsafe_view",
    "aten::reshape",
    "aten::_reshape_alias",
    is_homogeneous=True,
    integers=are_sizes,
)
@rule("aten::unsqueeze", "aten::squeeze", "aten::flatten", is_homogeneous=True)  # whose integers are dimensions
@rule("aten::unflatten", is_homogeneous=True, integers=are_inner_sizes)
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
    kind = maps.kind(x)
    for dim, size in enumerate(output.shape):
        if size == 1:
            maps.set_kinds(output, dim, np.full(1, kind, dtype=np.uint8))
    if not output.shape:
        maps.set_kind(output, kind)


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


@rule("aten::permute", "aten::t", "aten::numpy_T", "aten::mT", "aten::transpose", "aten::swapaxes", is_homogeneous=True)
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
        maps.set_kind(output, maps.kind(x))


@rule("aten::expand", "aten::expand_as", "aten::broadcast_to", is_homogeneous=True, integers=are_sizes)
@rule("aten::repeat", is_homogeneous=True, integers=are_numbers)
def expand(maps: Maps, operation: Operation) -> None:
    """A repeated dimension is a product of the copies, which all stay, and of what is copied; one entry alone stays."""
    x, output = operation.value("self"), operation.output
    new = output.rank - x.rank
    maps.set_kind(output, maps.kind(x))
    for dim, size in enumerate(x.shape):
        if size == output.shape[dim + new]:
            maps.passes(x, dim, output, dim + new)
        elif operation.name == "aten::repeat":
            copies = maps.fixed(output.shape[dim + new] // size)
            maps.reshape([copies, maps.axes[x][dim]], [maps.axes[output][dim + new]])
        else:
            maps.fixes(x, dim)


@rule("aten::cat", "aten::concat", is_homogeneous=True)
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
    kinds = np.array([maps.kind(x) for x in operation.inputs], dtype=np.uint8)
    maps.fixes(output, dim)
    maps.set_kinds(output, dim, kinds)
    _share(maps, operation.inputs, output, {d: d + (d >= dim) for d in range(output.rank - 1)})


def _share(maps: Maps, tensors: Sequence[Value], output: Value, dims: dict[int, int]) -> None:
    """Dimensions that several inputs have in common with the output."""
    for dim, output_dim in dims.items():
        for x in tensors:
            maps.same(x, dim, output, output_dim)
        maps.set_kinds(output, output_dim, np.maximum.reduce([maps.kinds(x, dim) for x in tensors]))


@rule("aten::slice", is_homogeneous=True)
@rule("aten::narrow", is_homogeneous=True, integers=are_sizes)
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


@rule("aten::chunk", calls=(torch.chunk, Tensor.chunk), arguments="input chunks dim", parts="chunks")
@rule(
    "aten::tensor_split",
    calls=(torch.tensor_split, Tensor.tensor_split),
    arguments="input indices_or_sections dim",
    parts="indices_or_sections",
)
@rule("aten::split", "aten::split_with_sizes", "aten::unsafe_split", integers=are_parts)
def split(maps: Maps, operation: Operation) -> None:
    """Consecutive ranges of one dimension; the other dimensions are the same."""
    x = operation.inputs[0]
    dim = int(cast(int | None, operation.arguments["dim"]) or 0) % x.rank
    start = 0
    for output in operation.made:
        _take(maps, x, output, dim, np.arange(start, start + output.shape[dim]))
        start += output.shape[dim]


@rule("aten::flip", is_homogeneous=True)
def flip(maps: Maps, operation: Operation) -> None:
    """Entries of flipped dimensions are linked in reverse, all others as they are."""
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


@rule("aten::unbind")
@rule("aten::select", is_homogeneous=True)
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
        kind = min(int(maps.kinds(x, dim)[index]), maps.kind(x))
        if not output.shape:
            maps.set_kind(output, kind)
        for axis in maps.axes[output]:
            axis.kinds = np.minimum(axis.kinds, np.uint8(kind))


@rule("aten::pad", "aten::constant_pad_nd", calls=(F.pad,), arguments="input pad mode value", integers=are_numbers)
def pad(maps: Maps, operation: Operation) -> None:
    """Constant entries are added at both ends of a dimension, where they stay; other modes copy entries."""
    x, output = operation.inputs[0], operation.output
    amounts = operation.integers("pad")
    kind = CONSTANT if operation.arguments["value"] else ZERO
    is_constant = operation.arguments.get("mode") in (None, "constant")
    for dim, size in enumerate(x.shape):
        start = 2 * (x.rank - 1 - dim)
        before, behind = amounts[start : start + 2] if start < len(amounts) else (0, 0)
        if before == behind == 0:
            maps.passes(x, dim, output, dim, kind)
        elif min(before, behind) < 0 or not is_constant:
            maps.fixes(x, dim)
            maps.fixes(output, dim)
            maps.set_kinds(output, dim, np.full(output.shape[dim], max(maps.kind(x), kind), dtype=np.uint8))
        else:
            maps.set_kinds(output, dim, np.full(size + before + behind, kind, dtype=np.uint8))
            maps.part(x, dim, output, dim, np.arange(size), np.arange(size) + before)
            new = np.ones(size + before + behind, dtype=np.bool_)
            new[before : before + size] = False
            maps.reads((output, dim), where=new)
            maps.set_kinds(output, dim, np.maximum(maps.kinds(output, dim), np.uint8(kind)))


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
    group, channel = maps.fixed(groups), maps.free(x.shape[1] // groups)
    maps.reshape([maps.axes[x][1]], [group, channel])
    maps.reshape([channel, group], [maps.axes[output][1]])


@rule("aten::view_as_complex", "aten::view_as_real")
def view_as_complex(maps: Maps, operation: Operation) -> None:
    """The last dimension of the real tensor, a real part and an imaginary one, stays; the others are the same."""
    x, output = operation.value("self"), operation.output
    for dim in range(min(x.rank, output.rank)):
        maps.passes(x, dim, output, dim)
    maps.fixes(x if x.rank > output.rank else output, -1)


_POOLS = """max_pool{n}d avg_pool{n}d max_pool{n}d_with_indices _adaptive_avg_pool{n}d adaptive_avg_pool{n}d
adaptive_max_pool{n}d reflection_pad{n}d replication_pad{n}d mkldnn_max_pool{n}d upsample_nearest{n}d
_upsample_nearest_exact{n}d fractional_max_pool{n}d quantized_max_pool{n}d"""
_RESIZES = "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa"


@rule(
    *(f"aten::{name.format(n=n)}" for name in _POOLS.split() for n in (1, 2, 3)),
    is_homogeneous=True,
)
@rule(*(f"aten::{name}" for name in _RESIZES.split()))
def pool(maps: Maps, operation: Operation) -> None:
    """Images stay; channels pass, each by itself, and one that is zero or constant is so afterwards."""
    x = operation.inputs[0]
    match = re.search(r"(\d)d", operation.name)
    assert match is not None
    image = range(-int(match[1]), 0)
    maps.fixes(x, *image)
    for output in operation.made:
        maps.set_kind(output, maps.kind(x))
        maps.passes_rest(x, output, *image)
        maps.fixes(output, *image)


@rule("aten::embedding")
def embedding(maps: Maps, operation: Operation) -> None:
    """Rows stay, since any of them may be looked up; their features pass."""
    weight, indices, output = operation.value("weight"), operation.value("indices"), operation.output
    maps.fixes(weight, 0)
    maps.set_kind(output, max(maps.kind(weight), maps.kind(indices), CONSTANT))
    maps.passes(weight, 1, output, output.rank - 1, nonzero=maps.kind(indices))
    for dim in range(indices.rank):
        maps.same(indices, dim, output, dim)


@rule("aten::gather")
def gather(maps: Maps, operation: Operation) -> None:
    """The dimension that is looked up stays; of the others, those of the same size are the same."""
    x, index, output = operation.value("self"), operation.value("index"), operation.output
    dim = operation.integer("dim") % x.rank if x.rank else 0
    _look_up(maps, x, [index], output)
    for d in range(x.rank):
        if d != dim and x.shape[d] == output.shape[d]:
            maps.passes(x, d, output, d, nonzero=maps.kind(index))
            maps.same(index, d, output, d)
        else:
            for value in (x, index, output):
                maps.fixes(value, d)


@rule("aten::index")
@rule("aten::index_select", is_homogeneous=True)
def index(maps: Maps, operation: Operation) -> None:
    """Dimensions that are looked up by tensors of numbers, or by one mask, stay; the others are the same."""
    x, output = operation.value("self"), operation.output
    if operation.name == "aten::index_select":
        given = [*[None] * (operation.integer("dim") % x.rank), operation.value("index")]
    else:
        given = list(cast(Sequence[Value | None], operation.arguments["indices"]))
    tensors = [i for i in given if isinstance(i, Value)]
    indexed = [d for d, i in enumerate(given) if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in tensors):
        if len(tensors) > 1:
            return maps.barrier()
        used, first, rank = list(range(indexed[0], indexed[0] + tensors[0].rank)), indexed[0], 1
    else:
        used, rank = indexed, max(i.rank for i in tensors)
        first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    _look_up(maps, x, tensors, output)
    for value in tensors:
        maps.fixes(value, *range(value.rank))
    maps.fixes(x, *used)
    maps.fixes(output, *range(first, first + rank))
    passed = [d for d in range(x.rank) if d not in used]
    free = [d for d in range(output.rank) if not first <= d < first + rank]
    for d, target in zip(passed, free, strict=True):
        maps.passes(x, d, output, target, nonzero=max(map(maps.kind, tensors)))


@rule("aten::index_add", "aten::index_copy", "aten::scatter_add", "aten::scatter", "aten::scatter_reduce")
def write_by_index(maps: Maps, operation: Operation) -> None:
    """The dimension whose numbers are used stays; of the others, those of the same size are the same throughout."""
    x, numbers, output = operation.value("self"), operation.value("index"), operation.output
    source = operation.maybe("source") or operation.maybe("src")
    written = [value for value in (source, numbers if numbers.rank == x.rank else None) if value is not None]
    if source is None or source.rank != x.rank:
        return maps.barrier()
    used = operation.integer("dim") % x.rank
    maps.set_kind(output, max(maps.kind(x), maps.kind(source), maps.kind(numbers)))
    if numbers.rank < x.rank:
        maps.fixes(numbers, *range(numbers.rank))
    for dim, size in enumerate(x.shape):
        if dim == used or any(value.shape[dim] != size for value in written):
            for value in (x, output, *written):
                maps.fixes(value, dim)
            continue
        for value in (x, *written):
            maps.same(value, dim, output, dim)
        kinds = np.maximum(maps.kinds(x, dim), maps.kinds(source, dim))
        varies = np.maximum(kinds, np.uint8(maps.kind(numbers)))
        maps.set_kinds(output, dim, np.where(kinds == ZERO, kinds, varies))


@rule("aten::one_hot", "aten::interpolate", "aten::unfold", integers=are_sizes)
@rule("aten::repeat_interleave", integers=are_repeats)
@rule("aten::tensor", integers=are_numbers)
def unknown(maps: Maps, operation: Operation) -> None:
    """Only what integers do is known; of most of these torch makes other operations."""
    maps.barrier()


def _look_up(maps: Maps, x: Value, indices: list[Value], output: Value) -> None:
    """What is looked up in zeros is zero; what is looked up in constants varies with the index."""
    maps.set_kind(output, ZERO if maps.kind(x) == ZERO else max([maps.kind(x), *map(maps.kind, indices)]))
