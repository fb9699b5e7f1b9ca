"""Rules of convolutions, with groups and transposed ones."""

from __future__ import annotations

import numpy as np

from pyro_l0.nn.engine.maps import Maps, Product, rule
from pyro_l0.nn.engine.slots import CONSTANT, ZERO, Reshape, States
from pyro_l0.nn.engine.tape import Operation, Value

__all__: list[str] = []


@rule("aten::convolution", "aten::_convolution")
def convolution(maps: Maps, operation: Operation) -> None:
    """Input channels are summed over, group by group; images and kernels stay.

    An input channel leaves if it is zero, or if it is constant and goes into the bias. With groups, whole groups leave,
    or the same channels of every group; in a depthwise convolution a channel is one unit throughout.
    """
    x, weight, bias, output = operation.value("input"), operation.value("weight"), operation.added, operation.output
    is_transposed, groups = bool(operation.arguments["transposed"]), operation.integer("groups")
    maps.passes(x, 0, output, 0)
    images = range(2, x.rank)
    state = ZERO if ZERO in (maps.state(x), maps.state(weight)) else max(maps.state(x), maps.state(weight))
    for value in (x, weight, output):
        maps.fixes(value, *images)
    if groups == 1:
        _dense(maps, operation, x, weight, bias, is_transposed)
    elif groups == x.shape[1] == output.shape[1]:
        maps.same(x, 1, output, 1)
        maps.same(weight, 0, output, 1)
        maps.fixes(weight, 1)
        maps.set_states(output, 1, np.where(maps.states(weight, 0) == ZERO, np.uint8(ZERO), maps.states(x, 1)))
    else:
        _grouped(maps, x, weight, output, groups, is_transposed)
    for dim in images:
        maps.set_states(output, dim, np.full(output.shape[dim], state, dtype=np.uint8))
    if maps.state(weight) > CONSTANT:
        for axis in maps.axes[output]:
            axis.states = np.where(axis.states == ZERO, axis.states, np.uint8(state))
    if bias is not None:
        maps.same(bias, 0, output, 1)
        for dim in range(output.rank):
            maps.set_states(output, dim, np.maximum(maps.states(output, dim), np.uint8(maps.state(bias))))
    image = x if is_transposed else output
    axes = (*maps.axes[weight], *(maps.axes[image][dim] for dim in (0, *images)))
    maps.products.append(Product(operation, axes))


def _dense(maps: Maps, operation: Operation, x: Value, weight: Value, bias: Value | None, is_transposed: bool) -> None:
    """Every output channel reads every input channel."""
    weight_in, weight_out = (0, 1) if is_transposed else (1, 0)
    where = (maps.states(x, 1) != ZERO) & (maps.states(weight, weight_in) != ZERO)
    if not is_transposed and maps.takes_constants(weight, bias):
        is_padded = any(operation.integers("padding")) and any(size > 1 for size in weight.shape[2:])
        maps.reads_or_folds((x, 1), (weight, weight_in), where, bias, is_padded)
    else:
        maps.reads((x, 1), (weight, weight_in), where=where)
    maps.same(weight, weight_out, operation.output, 1)
    is_zero = maps.states(weight, weight_out) == ZERO
    maps.set_states(operation.output, 1, np.where(is_zero, np.uint8(ZERO), np.uint8(maps.state(x))))


def _grouped(maps: Maps, x: Value, weight: Value, output: Value, groups: int, is_transposed: bool) -> None:
    """The channels are pairs of a group and a place in the group; a group's outputs read its inputs.

    In memory a weight, which may be computed, is (out, in of a group), or transposed (in, out of a group).
    """
    states, inputs, behind = maps.states(x, 1), maps.axes[x][1], maps.axes[output][1]
    group, place_in, place_out = map(maps.free, (groups, x.shape[1] // groups, behind.size // groups))
    maps.box([group.block, place_in.block], inputs.block)
    maps.box([group.block, place_out.block], behind.block)
    maps.tie(maps.axes[weight][1], place_out if is_transposed else place_in)
    for place in (place_in, place_out):
        if place.size == 1:
            maps.pin(place.block)
    relations = maps.relations[maps.operation]
    if is_transposed:
        maps.reads((x, 1), (weight, 0), where=states != ZERO, groups=groups, behind=behind)
        relations.append(Reshape((group, maps.axes[weight][1]), (behind,)))
    else:
        maps.same(weight, 0, output, 1)
        relations.append(Reshape((group, maps.axes[weight][1]), (inputs,)))  # needed where one of these is
        maps.reads((x, 1), where=states != ZERO, groups=groups, behind=behind)
    each: States = states.reshape(groups, -1).max(1).repeat(behind.size // groups)
    maps.set_states(output, 1, each)
