"""Rules of torch's recurrent layers and cells, and of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from pyro_l0.nn.engine.maps import CONSTANT, VARIES, ZERO, Index, Maps, Product
from pyro_l0.nn.engine.operations import rule
from pyro_l0.nn.engine.record import Operation, Value

__all__: list[str] = []


_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@rule("recurrent", calls=tuple(getattr(torch, kind) for kind in _KINDS))
def recurrent(maps: Maps, operation: Operation) -> None:
    """A layer has one size, so that hidden units of one number leave together from all its layers and directions.

    They leave where all recurrent weights and next layers that read them are zero, and nothing reads what is returned.
    """
    args, hidden = (*operation.args, *operation.kwargs.values()), operation.made[1]
    index = next(number for number, arg in enumerate(args) if isinstance(arg, bool))
    state, weights = args[index - 2], list(cast(Sequence[Value], args[index - 1]))
    _count(maps, operation, weights)
    each, directions = (4 if args[index] else 2), (2 if args[index + 4] else 1)
    if len(weights) != each * directions * cast(int, args[index + 1]):
        return maps.barrier()  # the units are projected
    _write(maps, operation, weights, [state] if isinstance(state, Value) else cast(Sequence[Value], state))
    for number in range(0, len(weights), each):
        of_input, of_hidden = weights[number : number + 2]
        _read(maps, (hidden, 2), (of_hidden, 1))
        if number < each * directions:
            _read(maps, (operation.inputs[0], -1), (of_input, 1))
            continue
        for entries in _chunks(of_input.shape[1], hidden.shape[2]):
            units = np.arange(len(entries))
            maps.slots.join_entries(maps.axes[of_input][1].dimension, entries, maps.axes[hidden][2].dimension, units)
        _read(maps, (of_input, 1))


@rule("recurrent_cell", calls=tuple(getattr(torch, f"{kind}_cell") for kind in _KINDS))
def cell(maps: Maps, operation: Operation) -> None:
    """A hidden unit leaves where the given state is zero, as behind a closed gate, and what is returned is not read."""
    args = (*operation.args, *operation.kwargs.values())
    x, state, of_input, of_hidden, *_ = args
    states = [state] if isinstance(state, Value) else list(cast(Sequence[Value], state))
    weights = [value for value in args[2:] if isinstance(value, Value)]
    _count(maps, operation, weights)
    _write(maps, operation, weights, states)
    _read(maps, (cast(Value, x), -1), (cast(Value, of_input), 1))
    _read(maps, (states[0], -1), (cast(Value, of_hidden), 1))


@rule("aten::_pack_padded_sequence", is_homogeneous=True)
@rule(
    "aten::_pad_packed_sequence",
    calls=(torch._VF._pad_packed_sequence,),
    arguments="input batch_sizes first padding_value",
    is_homogeneous=True,
)
def pack(maps: Maps, operation: Operation) -> None:
    """Examples and times stay; features pass."""
    x, output = operation.inputs[0], operation.output
    front, fill = (2 if x.rank > output.rank else 1), operation.arguments.get("padding_value")
    for dim in range(front, x.rank):
        maps.passes(x, dim, output, dim + output.rank - x.rank, CONSTANT if fill else ZERO)
    maps.fixes(x, *range(front))
    maps.fixes(output, *range(3 - front))
    for value in (*operation.inputs[1:], *operation.made[1:]):
        maps.fixes(value, 0)


def _write(maps: Maps, operation: Operation, weights: Sequence[Value], states: Sequence[Value]) -> None:
    """Each unit has a row for each of its equations, and its entry in the states and in what is returned."""
    made, size = operation.made, operation.made[-1].shape[-1]
    for output in made:
        for weight in weights:
            for rows in _chunks(weight.shape[0], size):
                for entries in _chunks(output.shape[-1], size):
                    maps.part(weight, 0, output, output.rank - 1, rows, entries)
        for state in states if output.shape[-1] == size else ():
            maps.same(state, state.rank - 1, output, output.rank - 1)
        maps.set_kind(output, VARIES)
    for value in dict.fromkeys([*operation.inputs, *made]):
        if value not in weights:
            maps.fixes(value, *range(max(value.rank - 1, 1)))


def _count(maps: Maps, operation: Operation, weights: Sequence[Value]) -> None:
    """Each weight is used for every example and time."""
    positions = maps.axes[operation.inputs[0]][:-1]
    for weight in weights:
        if weight.rank > 1:
            maps.products.append(Product(operation, (*maps.axes[weight], *positions), (weight,)))


def _chunks(length: int, size: int) -> list[Index]:
    return list(np.arange(length).reshape(-1, size))


def _read(maps: Maps, *operands: tuple[Value, int]) -> None:
    """Entries are read together where none of the factors is zero."""
    maps.reads(*operands, where=np.logical_and.reduce([maps.kinds(*operand) != ZERO for operand in operands]))
