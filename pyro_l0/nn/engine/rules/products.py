"""Rules of sums of products: dense layers, matrix products, einsum, convolutions, attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.nn.engine.maps import CONSTANT, ZERO, Axis, Kinds, Maps, Product, Reshape
from pyro_l0.nn.engine.operations import rule
from pyro_l0.nn.engine.record import Operation, Value
from pyro_l0.nn.engine.sizes import are_sizes

__all__ = ["contract"]


_LETTERS = "abcdefghij"  # of dimensions in front
_Labelled = tuple[Value, str]
_PRODUCTS = {  # the factors' names, their dimensions, and those of the result
    "aten::mm": ("self", "mk", "mat2", "kn", "mn"),
    "aten::addmm": ("mat1", "mk", "mat2", "kn", "mn"),
    "aten::bmm": ("self", "bmk", "mat2", "bkn", "bmn"),
    "aten::baddbmm": ("batch1", "bmk", "batch2", "bkn", "bmn"),
    "aten::mv": ("self", "mk", "vec", "k", "m"),
    "aten::addmv": ("mat", "mk", "vec", "k", "m"),
    "aten::dot": ("self", "k", "tensor", "k", ""),
    "aten::vdot": ("self", "k", "other", "k", ""),
}


@rule("aten::linear", calls=(F.linear,), arguments="input weight bias")
def linear(maps: Maps, operation: Operation) -> None:
    """Inputs are summed over; an input leaves if it is zero, or if it is constant and goes into the bias."""
    x, weight = operation.value("input"), operation.value("weight")
    front = _LETTERS[: x.rank - 1]
    label = "nk"[-weight.rank :]
    operands = [(x, front + "k"), (weight, label)]
    contract(maps, operands, front + label[:-1], operation.maybe("bias"), folds=weight.rank == 2)


@rule(*_PRODUCTS)
def multiply(maps: Maps, operation: Operation) -> None:
    """A matrix product: the inner dimension is summed over, and an entry leaves if it is zero in one factor."""
    one, left, other, right, result = _PRODUCTS[operation.name.removesuffix("_")]
    factors = [(operation.value(one), left), (operation.value(other), right)]
    added = None if one == "self" else operation.value("self")
    contract(maps, factors, result, added, folds=result == "mn")


@rule("aten::matmul", calls=(torch.matmul, Tensor.matmul, Tensor.__matmul__), arguments="self other")
def matmul(maps: Maps, operation: Operation) -> None:
    """Matrix products for every entry of the dimensions in front, such as batch and heads, which are broadcast."""
    one, other = operation.value("self"), operation.value("other")
    rank = max(one.rank, other.rank, 2) - 2
    front = _LETTERS[:rank]
    left = "k" if one.rank == 1 else front[rank - one.rank + 2 :] + "mk"
    right = "k" if other.rank == 1 else front[rank - other.rank + 2 :] + "kn"
    result = front + ("m" if one.rank > 1 else "") + ("n" if other.rank > 1 else "")
    contract(maps, [(one, left), (other, right)], result, folds=other.rank == 2)


@rule("aten::bilinear", calls=(torch.bilinear,), arguments="input1 input2 weight bias")
def bilinear(maps: Maps, operation: Operation) -> None:
    """Pairs of inputs are summed over; an input leaves if it is zero."""
    one, other, weight = (operation.value(name) for name in ("input1", "input2", "weight"))
    front = _LETTERS[: one.rank - 1]
    operands = [(one, front + "k"), (weight, "nkl"), (other, front + "l")]
    contract(maps, operands, front + "n", operation.maybe("bias"))


@rule("aten::einsum", calls=(torch.einsum,))
def einsum(maps: Maps, operation: Operation) -> None:
    """What the equation says: letters of the result pass, the others are summed over."""
    equation, operands = operation.args[0], operation.inputs
    if not isinstance(equation, str):
        return maps.barrier()
    left, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        result = "..." * ("." in left) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    terms = left.split(",")
    hidden = [x.rank - len(term.replace("...", "")) for x, term in zip(operands, terms, strict=False)]
    terms = [term.replace("...", _digits(count)) for term, count in zip(terms, hidden, strict=False)]
    result = result.replace("...", _digits(max(hidden)))
    if len(terms) != len(operands) or any(len(set(term)) < len(term) for term in [*terms, result]):
        return maps.barrier()
    contract(maps, list(zip(operands, terms, strict=True)), result)


def _digits(count: int) -> str:
    """Labels of the dimensions that an ellipsis stands for, the same from the end."""
    return "".join(str(number) for number in reversed(range(count)))


def contract(
    maps: Maps,
    operands: Sequence[_Labelled],
    result: str,
    bias: Value | None = None,
    folds: bool = False,
) -> None:
    """A sum over products: a letter for every dimension; those of ``result`` pass, the others are summed over.

    The last dimensions of ``bias``, which is added, are those of the output. With ``folds`` the first factor's
    constants may leave into a bias, where the second one is a layer's weight.
    """
    output = maps.operation.output
    folds = folds and not operands[0][0].names and maps.takes_constants(operands[1][0], bias)
    sizes = {letter: size for x, term in operands for letter, size in zip(term, x.shape, strict=True) if size > 1}
    of_letter: dict[str, list[tuple[Value, int]]] = {}
    for x, term in operands:
        for dim, letter in enumerate(term):
            if x.shape[dim] == sizes.get(letter, 1):
                of_letter.setdefault(letter, []).append((x, dim))
            else:
                maps.fixes(x, dim)  # one entry for all
    for letter, found in of_letter.items():
        if letter in result:
            for x, dim in found:
                maps.same(x, dim, output, result.index(letter))
        else:
            where = np.logical_and.reduce([maps.kinds(x, dim) != ZERO for x, dim in found])
            if folds:
                maps.reads_or_folds(found[0], found[1], where, bias)
            else:
                maps.reads(*found, where=where)
    _set_states(maps, operands, result, output)
    if bias is not None:
        _add(maps, bias, output)
    if len(operands) > 1:
        axes: dict[str, Axis] = {letter: maps.axes[x][dim] for letter, ((x, dim), *_) in of_letter.items()}
        maps.products.append(Product(maps.operation, tuple(axes.values()), tuple(x for x, _ in operands)))


def _set_states(maps: Maps, operands: Sequence[_Labelled], result: str, output: Value) -> None:
    """A slice of a product is zero if it is in one factor, and varies if it does in one."""
    wholes = [maps.kind(x) for x, _ in operands]
    is_zero = ZERO in wholes
    maps.set_kind(output, ZERO if is_zero else max(wholes))
    for dim, letter in enumerate("" if is_zero else result):
        dims = [(x, term.index(letter) if letter in term else x.rank) for x, term in operands]
        each = [maps.broadcast_kinds(x, number, output.shape[dim]) for x, number in dims]
        zero = np.logical_or.reduce([kinds == ZERO for kinds in each])
        maps.set_kinds(output, dim, np.where(zero, np.uint8(ZERO), np.maximum.reduce(each)))


def _add(maps: Maps, bias: Value, output: Value) -> None:
    """Something is added to an output; it is not zero any more, unless both are."""
    for output_dim in range(output.rank):
        dim = output_dim - output.rank
        kinds = maps.broadcast_kinds(bias, dim, output.shape[output_dim])
        if -dim <= bias.rank and bias.shape[dim] == output.shape[output_dim]:
            maps.same(bias, dim, output, output_dim)
        elif -dim <= bias.rank:
            maps.fixes(bias, dim)
        maps.set_kinds(output, output_dim, np.maximum(kinds, maps.kinds(output, output_dim)))
    if not output.shape:
        maps.set_kind(output, max(maps.kind(output), maps.kind(bias)))


@rule(
    "aten::convolution",
    "aten::_convolution",
    "aten::conv1d",
    "aten::conv2d",
    "aten::conv3d",
    size="groups",
    integers=are_sizes,
)
def convolution(maps: Maps, operation: Operation) -> None:
    """Input channels are summed over, group by group; images and kernels stay.

    An input channel leaves if it is zero, or if it is constant and goes into the bias. With groups, whole groups leave,
    or the same channels of every group; in a depthwise convolution a channel is one unit throughout.
    """
    x, weight, bias, output = (
        operation.value("input"),
        operation.value("weight"),
        operation.maybe("bias"),
        operation.output,
    )
    is_transposed, groups = bool(operation.arguments.get("transposed")), operation.integer("groups")
    maps.passes(x, 0, output, 0)
    images = range(2, x.rank)
    kind = ZERO if ZERO in (maps.kind(x), maps.kind(weight)) else max(maps.kind(x), maps.kind(weight))
    for value in (x, weight, output):
        maps.fixes(value, *images)
    if groups == 1:
        _dense(maps, operation, x, weight, bias, is_transposed)
    elif groups == x.shape[1] == output.shape[1]:
        maps.same(x, 1, output, 1)
        maps.same(weight, 0, output, 1)
        maps.fixes(weight, 1)
        maps.set_kinds(output, 1, np.where(maps.kinds(weight, 0) == ZERO, np.uint8(ZERO), maps.kinds(x, 1)))
    else:
        _grouped(maps, x, weight, output, groups, is_transposed)
    for dim in images:
        maps.set_kinds(output, dim, np.full(output.shape[dim], kind, dtype=np.uint8))
    if maps.kind(weight) > CONSTANT:
        for axis in maps.axes[output]:
            axis.kinds = np.where(axis.kinds == ZERO, axis.kinds, np.uint8(kind))
    if bias is not None:
        maps.same(bias, 0, output, 1)
        for dim in range(output.rank):
            kinds = maps.kinds(bias, 0) if dim == 1 else np.uint8(maps.kind(bias))
            maps.set_kinds(output, dim, np.maximum(maps.kinds(output, dim), kinds))
    image = x if is_transposed else output
    axes = (*maps.axes[weight], *(maps.axes[image][dim] for dim in (0, *images)))
    maps.products.append(Product(operation, axes, (x, weight)))


def _dense(maps: Maps, operation: Operation, x: Value, weight: Value, bias: Value | None, is_transposed: bool) -> None:
    """Every output channel reads every input channel."""
    weight_in, weight_out = (0, 1) if is_transposed else (1, 0)
    where = (maps.kinds(x, 1) != ZERO) & (maps.kinds(weight, weight_in) != ZERO)
    if not is_transposed and maps.takes_constants(weight, bias):
        is_padded = any(operation.integers("padding")) and any(size > 1 for size in weight.shape[2:])
        maps.reads_or_folds((x, 1), (weight, weight_in), where, bias, is_padded)
    else:
        maps.reads((x, 1), (weight, weight_in), where=where)
    maps.same(weight, weight_out, operation.output, 1)
    is_zero = maps.kinds(weight, weight_out) == ZERO
    maps.set_kinds(operation.output, 1, np.where(is_zero, np.uint8(ZERO), np.uint8(maps.kind(x))))


def _grouped(maps: Maps, x: Value, weight: Value, output: Value, groups: int, is_transposed: bool) -> None:
    """The channels are pairs of a group and an entry of it; a group's outputs read its inputs.

    In memory a weight, which may be computed, is (out, in of a group), or transposed (in, out of a group).
    """
    kinds, inputs, behind = maps.kinds(x, 1), maps.axes[x][1], maps.axes[output][1]
    group, channel_in, channel_out = map(maps.free, (groups, x.shape[1] // groups, behind.size // groups))
    maps.box([group.dimension, channel_in.dimension], inputs.dimension)
    maps.box([group.dimension, channel_out.dimension], behind.dimension)
    maps.tie(maps.axes[weight][1], channel_out if is_transposed else channel_in)
    for channel in (channel_in, channel_out):
        if channel.size == 1:
            maps.pin(channel.dimension)
    relations = maps.relations[maps.operation]
    if is_transposed:
        maps.reads((x, 1), (weight, 0), where=kinds != ZERO, groups=groups, behind=behind)
        relations.append(Reshape((group, maps.axes[weight][1]), (behind,)))
    else:
        maps.same(weight, 0, output, 1)
        relations.append(Reshape((group, maps.axes[weight][1]), (inputs,)))  # needed where one of these is
        maps.reads((x, 1), where=kinds != ZERO, groups=groups, behind=behind)
    each: Kinds = kinds.reshape(groups, -1).max(1).repeat(behind.size // groups)
    if not is_transposed:
        each = np.where(maps.kinds(weight, 0) == ZERO, np.uint8(ZERO), each)
    maps.set_kinds(output, 1, each)


@rule("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax", "aten::softmax", "aten::log_softmax")
def softmax(maps: Maps, operation: Operation) -> None:
    """Entries of its dimension share a sum, and stay; the other dimensions, such as heads, pass."""
    x, output = operation.value("self"), operation.output
    maps.passes_rest(x, output, least=CONSTANT)
    if x.rank:
        maps.mixes(x, operation.integer("dim") % x.rank)


@rule(
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    calls=(F.scaled_dot_product_attention,),
    arguments="query key value attn_mask dropout_p is_causal scale enable_gqa",
)
def attention(maps: Maps, operation: Operation) -> None:
    """Heads pass; features of values pass; those of queries and keys stay, since their number sets the scale.

    Tokens stay. With fewer keys than queries, a head of the keys leaves iff all heads of queries that read it do.
    """
    query, key, value = (operation.value(name) for name in ("query", "key", "value"))
    output, rank = operation.output, query.rank
    for x in (query, key, value):
        for dim in range(rank - 2):
            if x.shape[dim] == output.shape[dim]:
                maps.same(x, dim, output, dim)
            else:
                _share_heads(maps, x, output, dim)
    mask = operation.maybe("attn_mask") or operation.maybe("attn_bias")
    weights = max(maps.kind(x) for x in (query, key, mask) if x is not None)
    for dim in (*range(rank - 2), rank - 1):
        if value.shape[dim] == output.shape[dim]:  # zeros stay zeros; constants are weighted token by token
            kinds = maps.kinds(value, dim)
            maps.set_kinds(output, dim, np.where(kinds == ZERO, kinds, np.maximum(kinds, np.uint8(weights))))
    maps.same(query, rank - 2, output, rank - 2)
    maps.same(value, rank - 1, output, rank - 1)
    where = np.logical_and(maps.kinds(query, rank - 1) != ZERO, maps.kinds(key, rank - 1) != ZERO)
    maps.reads(
        (query, rank - 1), (key, rank - 1), where=where if operation.arguments.get("scale") is not None else None
    )
    maps.reads((key, rank - 2), (value, rank - 2))
    if mask is not None:
        _mask(maps, mask, output)
    axes = (*maps.axes[query], maps.axes[key][rank - 2])
    maps.products.append(Product(operation, axes, (query, key), is_attention=True))
    values = (*maps.axes[query][: rank - 1], maps.axes[key][rank - 2], maps.axes[value][rank - 1])
    maps.products.append(Product(operation, values, (value,), is_attention=True))


def _share_heads(maps: Maps, x: Value, output: Value, dim: int) -> None:
    """Several heads of queries read one head of keys and values."""
    sharing = maps.fixed(output.shape[dim] // x.shape[dim])
    maps.reshape([maps.axes[x][dim], sharing], [maps.axes[output][dim]])


def _mask(maps: Maps, mask: Value, output: Value) -> None:
    """A mask's tokens stay; its heads, if it has several, are those of the output."""
    for dim in range(mask.rank):
        output_dim = dim - mask.rank + output.rank
        if dim < mask.rank - 2 and mask.shape[dim] == output.shape[output_dim]:
            maps.same(mask, dim, output, output_dim)
        else:
            maps.fixes(mask, dim)
