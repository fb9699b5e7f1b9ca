"""Rules of operations that work on each entry by itself, with broadcasting, and of gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_l0.nn.engine.maps import CONSTANT, VARIES, ZERO, GateCall, Kinds, Maps, Mask
from pyro_l0.nn.engine.operations import rule
from pyro_l0.nn.engine.record import Operation, Value
from pyro_l0.nn.engine.sizes import are_numbers

__all__ = ["pointwise"]


_HOMOGENEOUS = "relu leaky_relu abs neg clone alias contiguous detach lift_fresh lift_fresh_copy _to_copy"
_NOT_CALLED_SO = """__and__ __or__ _conj bernoulli dropout elu hardsigmoid hardswish hardtanh log_sigmoid_forward
masked_fill mish native_dropout prelu relu6 softplus where _prelu_kernel"""


@rule(*(f"aten::{name}" for name in _HOMOGENEOUS.split()), is_homogeneous=True)
@rule(*(f"aten::{name}" for name in _NOT_CALLED_SO.split()))
@rule("aten::floor_divide", integers=are_numbers)
def pointwise(maps: Maps, operation: Operation) -> None:
    """Each entry of the output is made of the entries at its position; zeros stay zeros where the function says so.

    Whether a product is zero where one factor is, a sum where all terms are, and an activation where its input is,
    follows from the function's values at zeros.
    """
    operands = list(dict.fromkeys(operation.inputs))
    is_random = torch.Tag.nondeterministic_seeded in getattr(operation.function, "tags", ())
    if is_random and not operation.name.startswith(("aten::native_dropout", "aten::dropout")):
        combine(maps, operation, operands, [])
        maps.set_kind(operation.output, VARIES)
        return
    combine(maps, operation, operands, _zeroing(operation, operands))


@rule("aten::copy_")
def copy(maps: Maps, operation: Operation) -> None:
    """The output is what is copied; nothing reads the previous values, which have the same units."""
    before, source = operation.value("self"), operation.value("src")
    combine(maps, operation, [source], [(0,)])
    maps.replaces(before, operation.output)


@rule("aten::glu")
def glu(maps: Maps, operation: Operation) -> None:
    """Each entry of the first half of a dimension, by the sigmoid of the same one of the second half."""
    x, output = operation.value("self"), operation.output
    half_dim = operation.integer("dim") % x.rank
    for dim, size in enumerate(output.shape):
        if dim != half_dim:
            maps.passes(x, dim, output, dim)
        else:
            for start in (size, 0):
                entries = np.arange(start, start + size)
                maps.part(x, dim, output, dim, entries, np.arange(size), is_factor=start == 0)
            kinds = maps.kinds(x, dim)
            both = np.maximum(kinds[:size], kinds[size:])
            maps.set_kinds(output, dim, np.where(kinds[:size] == ZERO, np.uint8(ZERO), both))


@rule("aten::fill_", integers=are_numbers)
@rule("aten::zero_", "aten::normal_", "aten::uniform_", "aten::bernoulli_", "aten::exponential_")
def overwrite(maps: Maps, operation: Operation) -> None:
    """Nothing reads the previous values, which have the same units."""
    before, output = operation.value("self"), operation.output
    maps.replaces(before, output)
    number = operation.maybe("value")
    filled = CONSTANT if number is None else maps.kind(number)
    maps.set_kind(output, {"aten::zero_": ZERO, "aten::fill_": filled}.get(operation.name, VARIES))


def combine(maps: Maps, operation: Operation, operands: Sequence[Value], zeroing: Sequence[tuple[int, ...]]) -> None:
    """Tie the dimensions of operands that are broadcast against each other to those of the output.

    The output is zero where all operands of a group of ``zeroing``, by their numbers, are.
    """
    output = operation.output
    for output_dim, size in enumerate(output.shape):
        dim = output_dim - output.rank
        kinds = [maps.broadcast_kinds(x, dim, size) for x in operands]
        for number, operand in enumerate(operands):
            if -dim <= operand.rank and operand.shape[dim] == size:
                others = [kinds[group[0]] == ZERO for group in zeroing if len(group) == 1 and group != (number,)]
                where: Mask | None = ~np.logical_or.reduce(others) if others else None
                maps.same(operand, dim, output, output_dim, where)
            elif -dim <= operand.rank:
                maps.fixes(operand, dim)  # one entry for all
        maps.set_kinds(output, output_dim, _kinds_of(kinds, zeroing))
    if not output.shape:
        numbers = [np.array([maps.kind(x)], dtype=np.uint8) for x in operands]
        maps.set_kind(output, int(_kinds_of(numbers, zeroing)[0]))


def _kinds_of(kinds: Sequence[Kinds], zeroing: Sequence[tuple[int, ...]]) -> Kinds:
    result: Kinds = np.maximum(np.maximum.reduce(kinds), np.uint8(CONSTANT))
    for group in zeroing:
        is_zero = np.logical_and.reduce([kinds[number] == ZERO for number in group])
        result = np.where(is_zero, np.uint8(ZERO), result)
    return result


_seen: dict[object, list[tuple[int, ...]]] = {}


def _zeroing(operation: Operation, operands: Sequence[Value]) -> list[tuple[int, ...]]:
    """The groups of operands whose zeros make zeros: single ones, such as factors, and all numbers, such as terms."""
    key = (
        operation.function,
        repr(tree_map_only(Value, lambda x: (operands.index(x), x.dtype), (operation.args, operation.kwargs))),
    )
    if key not in _seen:
        others = [[0, 1] if x.dtype == torch.bool else [1, 0, -1] for x in operands]
        groups: list[tuple[int, ...]] = [(number,) for number in range(len(operands))]
        numbers = tuple(number for number, x in enumerate(operands) if x.dtype != torch.bool)
        groups.append(numbers or tuple(range(len(operands))))
        choices = [[[0] if number in group else other for number, other in enumerate(others)] for group in groups]
        _seen[key] = [
            group for group, choice in zip(groups, choices, strict=True) if _is_zero(operation, operands, choice)
        ]
    return _seen[key]


def _is_zero(operation: Operation, operands: Sequence[Value], choices: Sequence[Sequence[int]]) -> bool:
    """Whether an operation gives zeros for all choices of its operands: zeros (0) and some other numbers (1, −1).

    Results that are not a number (0 / 0) are ignored: then the network's own output is not one either.
    """
    for chosen in product(*choices):
        probes = {x: _probe(x, choice) for x, choice in zip(operands, chosen, strict=True)}
        try:
            result = _called(operation, probes)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        first = result[0] if isinstance(result, (tuple, list)) else result
        if not isinstance(first, Tensor) or first.is_meta or bool((first.ne(0) & ~first.isnan()).any()):
            return False
    return True


def _called(operation: Operation, tensors: Mapping[Value, Tensor]) -> object:
    args, kwargs = tree_map_only(Value, lambda value: tensors[value].clone(), (operation.args, operation.kwargs))
    return operation.function(*args, **kwargs)


def _probe(value: Value, choice: int) -> Tensor:
    number = 0.7 * choice if value.dtype.is_floating_point or value.dtype.is_complex else 3 * choice
    if value.dtype == torch.uint8 or value.dtype == torch.bool:
        number = abs(number)
    device = "cpu" if value.tensor.is_meta else value.tensor.device
    return torch.full((1,) if value.shape else (), number, dtype=value.dtype, device=device)


@rule("gate", is_homogeneous=True)
def gate(maps: Maps, operation: Operation) -> None:
    """An open unit is one unit in front and behind. A closed one ends in front, and begins behind as zeros.

    What an open gate makes of a constant varies, unless the gate's value is fixed.
    """
    x, output, site = operation.value("input"), operation.output, str(operation.arguments["site"])
    unit_dim = operation.integer("dim") % x.rank
    size = x.shape[unit_dim]
    is_closed = maps.closed.get(site, np.zeros(size, dtype=np.bool_))
    maps.passes_rest(x, output, unit_dim)
    front, behind = maps.axes[x][unit_dim], maps.axes[output][unit_dim]
    maps.same(x, unit_dim, output, unit_dim, where=~is_closed, tied=not is_closed.any())
    if is_closed.any():
        open_units = np.flatnonzero(~is_closed)
        maps.slots.join_entries(front.dimension, open_units, behind.dimension, open_units)
    maps.set_kinds(output, unit_dim, np.where(is_closed, np.uint8(ZERO), maps.kinds(x, unit_dim)))
    if maps.values is None:
        for axis in maps.axes[output]:
            axis.kinds = np.where(axis.kinds == CONSTANT, np.uint8(VARIES), axis.kinds)
    for call in maps.gates:
        if call.site == site:  # one module, so one size in front and one behind
            maps.tie(call.front, front)
            maps.tie(call.behind, behind)
    maps.gates.append(GateCall(site, front, behind, bool(operation.arguments["is_whole"])))
