"""Rules of normalisations, sums, means and other numbers of whole dimensions."""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn.engine.maps import CONSTANT, VARIES, ZERO, Maps, runs_as
from pyro_l0.nn.engine.operations import rule
from pyro_l0.nn.engine.record import Operation, Value
from pyro_l0.nn.engine.rules.pointwise import pointwise
from pyro_l0.nn.engine.sizes import are_sizes


@rule("aten::sum", "aten::linalg_vector_norm", "aten::nansum")
def sum_up(maps: Maps, operation: Operation) -> None:
    """Entries are summed over; one leaves if it is zero."""
    is_counted = operation.name == "aten::linalg_vector_norm" and float(str(operation.arguments["ord"])) <= 0
    _reduce(maps, operation, zeros_leave=not is_counted)


_NUMBERS = """amin max min prod any all argmax argmin var std var_mean std_mean logsumexp median nanmedian
mode norm count_nonzero aminmax kthvalue"""


@rule("aten::mean", "aten::amax", is_homogeneous=True)
@rule(*(f"aten::{name}" for name in _NUMBERS.split()))
def reduce(maps: Maps, operation: Operation) -> None:
    """Entries make one number, in which zeros count as well, so that all of them stay.

    So does the mean of squares of an RMSNorm that is written out.
    """
    _reduce(maps, operation, zeros_leave=False)


def _reduce(maps: Maps, operation: Operation, zeros_leave: bool) -> None:
    x = operation.inputs[0]
    if len(operation.inputs) > 1:  # the larger one of two tensors
        return pointwise(maps, operation)
    given = operation.integers("dim")
    dims = {dim % x.rank for dim in given} if given and x.rank else set(range(x.rank))
    keeps = bool(operation.arguments.get("keepdim", False))
    for dim in sorted(dims):
        maps.reads((x, dim), where=maps.kinds(x, dim) != ZERO if zeros_leave else None)
    rest = [dim for dim in range(x.rank) if dim not in dims]
    for output in operation.made:
        least = _least(operation, output)
        maps.set_kind(output, max(maps.kind(x), least))
        for index, dim in enumerate(rest):
            maps.passes(x, dim, output, dim if keeps else index, least)


_ORDERS = """cumsum cumprod cummax cummin logcumsumexp sort argsort topk roll _fft_c2c _fft_r2c _fft_c2r"""


@rule(*(f"aten::{name}" for name in _ORDERS.split()))
def along(maps: Maps, operation: Operation) -> None:
    """Entries of some dimensions are read in their order, and stay; the other dimensions are the same."""
    x = operation.inputs[0]
    given = operation.integers("dims" if operation.name == "aten::roll" else "dim") or list(range(x.rank))
    dims = {dim % x.rank for dim in given} if x.rank else set()
    for output in operation.made:
        maps.passes_rest(x, output, *dims, least=_least(operation, output))
        maps.fixes(output, *dims)
    maps.fixes(x, *dims)


def _least(operation: Operation, output: Value) -> int:
    """What becomes of zeros: constants in sums of exponentials, and where positions are returned."""
    is_number = output.dtype.is_floating_point or output.dtype.is_complex
    return CONSTANT if operation.name in ("aten::logsumexp", "aten::logcumsumexp") or not is_number else ZERO


@rule("aten::tril", "aten::triu")
def triangle(maps: Maps, operation: Operation) -> None:
    """Part of each matrix becomes zero; matrices stay, and the dimensions in front are the same."""
    x, output = operation.value("self"), operation.output
    maps.passes_rest(x, output)
    maps.fixes(x, -2, -1)


@rule("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::_assert_async")
def number(maps: Maps, operation: Operation) -> None:
    """The network's code reads the number, and may branch on it."""
    maps.roots.extend(operation.inputs)


@rule(
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_batch_norm_with_update",
    "aten::_batch_norm_no_update",
    "aten::cudnn_batch_norm",
    "aten::batch_norm",
)
def batch_norm(maps: Maps, operation: Operation) -> None:
    """Each channel by itself: a channel of zeros becomes constant, its shift.

    Entries of the other dimensions share a mean and a scale, at the latest in training mode, and stay.
    """
    x = operation.value("input")
    channel = min(1, x.rank - 1)
    is_zero = maps.kinds(x, channel) == ZERO
    before = maps.zero_channels.get(operation.path)
    maps.zero_channels[operation.path] = is_zero if before is None else is_zero & before
    maps.passes_rest(x, operation.output, least=_smallest(maps, operation))
    _scale(maps, operation, channel)
    maps.mixes(x, *(dim for dim in range(x.rank) if dim != channel))


@rule(
    "aten::instance_norm",
    calls=(F.instance_norm,),
    arguments="input running_mean running_var weight bias use_input_stats momentum eps",
)
def instance_norm(maps: Maps, operation: Operation) -> None:
    """Each channel of each example by itself, zeros stay zeros without a bias; images stay."""
    x, output = operation.value("input"), operation.output
    maps.passes_rest(x, output, least=_smallest(maps, operation))
    _scale(maps, operation, 1)
    if operation.maybe("bias") is None and operation.maybe("running_mean") is None:
        maps.set_kinds(output, 1, maps.kinds(x, 1))
    maps.mixes(x, *range(2, x.rank))
    maps.fixes(x, *range(2, x.rank))


def _smallest(maps: Maps, operation: Operation) -> int:
    """What a norm makes of zeros: constants, if its weight and bias are."""
    parameters = [operation.maybe(name) for name in ("weight", "bias")]
    return max([CONSTANT, *(maps.kind(x) for x in parameters if x is not None)])


def _scale(maps: Maps, operation: Operation, *dims: int) -> None:
    """Weights and statistics have the entries of the output along some dimensions; a weight of zero leaves the bias."""
    weight, bias = operation.maybe("weight"), operation.maybe("bias")
    for number, dim in enumerate(dims if weight is not None else ()):
        assert weight is not None
        shift = np.uint8(ZERO) if bias is None else maps.kinds(bias, number)
        kinds = maps.kinds(operation.output, dim)
        maps.set_kinds(operation.output, dim, np.where(maps.kinds(weight, number) == ZERO, shift, kinds))
    for name in ("weight", "bias", "running_mean", "running_var"):
        parameter = operation.maybe(name)
        for number, dim in enumerate(dims if parameter is not None else ()):
            assert parameter is not None
            maps.same(parameter, number, operation.output, dim)


@rule("aten::native_group_norm")
def group_norm(maps: Maps, operation: Operation) -> None:
    """Groups of channels share a mean and a scale, so that whole groups leave; images stay."""
    x, output, groups = operation.value("input"), operation.output, operation.integer("group")
    least = _smallest(maps, operation)
    maps.passes(x, 0, output, 0, least)
    for dim in range(2, x.rank):
        maps.same(x, dim, output, dim)
        maps.fixes(x, dim)
    channels = maps.axes[output][1]
    maps.tie(maps.axes[x][1], channels)
    maps.box([maps.slots.new(groups), maps.fixed(channels.size // groups).dimension], channels.dimension)
    maps.reads((x, 1), groups=groups, behind=channels)
    each = maps.kinds(x, 1).reshape(groups, -1).max(1).repeat(channels.size // groups)
    maps.set_kinds(output, 1, np.maximum(each, np.uint8(least)))
    _scale(maps, operation, 1)


@rule("aten::native_layer_norm", "aten::layer_norm", size="normalized_shape", integers=are_sizes)
def layer_norm(maps: Maps, operation: Operation) -> None:
    """Units share a mean and a scale. A unit that is zero may leave a LayerNorm of torch, which then counts it still.

    Its output varies nevertheless, with the mean, so that it leaves only if what reads it is closed, too.
    """
    count = len(operation.integers("normalized_shape"))
    _normalise_units(maps, operation, nn.LayerNorm, operation.value("input"), count)


@rule(
    "aten::rms_norm",
    "aten::_fused_rms_norm",
    calls=(F.rms_norm,),
    arguments="input normalized_shape weight eps",
    size="normalized_shape",
    integers=are_sizes,
)
def rms_norm(maps: Maps, operation: Operation) -> None:
    """Units share a scale. A unit that is zero stays zero, and may leave an RMSNorm of torch, which then counts it."""
    shape = operation.integers("normalized_shape")
    x, output = operation.value("input"), operation.output
    zeros = maps.kinds(x, x.rank - 1) == ZERO
    _normalise_units(maps, operation, nn.RMSNorm, x, len(shape))
    if len(shape) == 1:
        maps.set_kinds(output, x.rank - 1, np.where(zeros, np.uint8(ZERO), np.uint8(VARIES)))


@rule("aten::_weight_norm_interface", "aten::_weight_norm")
def weight_norm(maps: Maps, operation: Operation) -> None:
    """A weight whose slices along one dimension have given norms: that dimension passes, the others stay."""
    x, length, output = operation.value("v"), operation.value("g"), operation.output
    dim = operation.integer("dim") % x.rank
    maps.set_kind(output, max(maps.kind(x), maps.kind(length)))
    maps.same(x, dim, output, dim)
    for d in range(x.rank):
        if d == dim:
            maps.same(length, d, output, d)
        else:
            maps.fixes(x, d)
            maps.fixes(output, d)


def _normalise_units(maps: Maps, operation: Operation, layer: type[nn.Module], x: Value, count: int) -> None:
    output, least = operation.output, _smallest(maps, operation)
    normed = range(x.rank - count, x.rank)
    maps.passes_rest(x, output, least=least)
    for dim in normed:
        maps.set_kinds(output, dim, np.full(x.shape[dim], max(maps.kind(x), least), dtype=np.uint8))
    _scale(maps, operation, *normed)
    if count == 1 and runs_as(maps.module(), layer):  # other code may do something else with its units
        maps.norms.append((operation.path, maps.axes[x][-1]))
        maps.reads((x, x.rank - 1), where=maps.kinds(x, x.rank - 1) != ZERO)
    else:
        maps.fixes(x, *normed)
