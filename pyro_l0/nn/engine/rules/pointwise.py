"""Rules of operations that work on each entry by itself, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.record import Operation, Value
from pyro_l0.nn.engine.registry import rule
from pyro_l0.nn.engine.slots import CONSTANT, VARIES, ZERO, Mask, States

__all__ = ["is_pointwise", "pointwise"]


def is_pointwise(operation: Operation) -> bool:
    """Whether torch itself calls an operation pointwise."""
    return torch.Tag.pointwise in getattr(operation.function, "tags", ())


_NOT_CALLED_SO = """alias clone contiguous detach dropout elu hardsigmoid hardswish hardtanh leaky_relu lift_fresh
lift_fresh_copy masked_fill mish native_dropout prelu relu6 softplus where _prelu_kernel _to_copy zeros_like ones_like
full_like"""


@rule(*(f"aten::{name}" for name in _NOT_CALLED_SO.split()))
def pointwise(maps: Maps, operation: Operation) -> None:
    """Each entry of the output is made of the entries in its place; zeros stay zeros where the function says so.

    Whether a product is zero where one factor is, a sum where all terms are, and an activation where its input is,
    follows from the function's values at zeros.
    """
    operands = list(dict.fromkeys(operation.inputs))
    is_random = torch.Tag.nondeterministic_seeded in getattr(operation.function, "tags", ())
    if is_random and not operation.name.startswith(("aten::native_dropout", "aten::dropout")):
        combine(maps, operation, operands, [], False)
        maps.set_state(operation.output, VARIES)
        return
    combine(maps, operation, operands, *_zeros(operation, operands))


@rule("aten::copy_")
def copy(maps: Maps, operation: Operation) -> None:
    """The output is what is copied; what was there before is read by nobody, but keeps its place."""
    before, source = operation.value("self"), operation.value("src")
    combine(maps, operation, [source], [0], True)
    for dim in range(before.rank):
        maps.tie(maps.axes[before][dim], maps.axes[operation.output][dim])


@rule("aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::bernoulli_", "aten::exponential_")
def overwrite(maps: Maps, operation: Operation) -> None:
    """What was there before is read by nobody, but keeps its place."""
    before, output = operation.value("self"), operation.output
    for dim in range(before.rank):
        maps.tie(maps.axes[before][dim], maps.axes[output][dim])
    known = {"aten::zero_": ZERO, "aten::fill_": CONSTANT}
    maps.set_state(output, known.get(operation.name, VARIES))


def combine(
    maps: Maps, operation: Operation, operands: Sequence[Value], zeroing: Sequence[int], is_zero_of_zeros: bool
) -> None:
    """Tie the dimensions of operands that are broadcast against each other to those of the output.

    Args:
        maps: what is known so far.
        operation: the operation.
        operands: its inputs.
        zeroing: the operands (by number) whose zeros make zeros, whatever the others are.
        is_zero_of_zeros: whether the output is zero where all operands are.
    """
    output = operation.output
    for output_dim, size in enumerate(output.shape):
        dims = [output_dim - output.rank + operand.rank for operand in operands]
        is_same = [dim >= 0 and x.shape[dim] == size for x, dim in zip(operands, dims, strict=True)]
        states = [
            maps.states(x, dim) if same else np.full(size, maps.state(x), dtype=np.uint8)
            for x, dim, same in zip(operands, dims, is_same, strict=True)
        ]
        for number, (operand, dim, same) in enumerate(zip(operands, dims, is_same, strict=True)):
            if same:
                others = [states[other] == ZERO for other in zeroing if other != number]
                where: Mask | None = ~np.logical_or.reduce(others) if others else None
                maps.same(operand, dim, output, output_dim, where)
            elif dim >= 0:
                maps.fixes(operand, dim)  # one entry for all
        maps.set_states(output, output_dim, _states_of(states, zeroing, is_zero_of_zeros))
    if not output.shape:
        numbers = [np.array([maps.state(x)], dtype=np.uint8) for x in operands]
        maps.set_state(output, int(_states_of(numbers, zeroing, is_zero_of_zeros)[0]))


def _states_of(states: Sequence[States], zeroing: Sequence[int], is_zero_of_zeros: bool) -> States:
    result: States = np.maximum.reduce(states)
    if not is_zero_of_zeros:
        result = np.maximum(result, np.uint8(CONSTANT))
    for number in zeroing:
        result = np.where(states[number] == ZERO, np.uint8(ZERO), result)
    return result


_seen: dict[object, tuple[list[int], bool]] = {}


def _zeros(operation: Operation, operands: Sequence[Value]) -> tuple[list[int], bool]:
    """The operands whose zeros make zeros, and whether zeros in all of them do."""
    key = (
        operation.function,
        repr(tree_map_only(Value, lambda x: (operands.index(x), x.dtype), (operation.args, operation.kwargs))),
    )
    if key not in _seen:
        alone = [
            number
            for number in range(len(operands))
            if _is_zero(operation, operands, [[0] if i == number else [1, 0, -1] for i in range(len(operands))])
        ]
        choices = [[0, 1] if x.dtype == torch.bool else [0] for x in operands]
        if all(x.dtype == torch.bool for x in operands):
            choices = [[0] for _ in operands]
        _seen[key] = alone, _is_zero(operation, operands, choices)
    return _seen[key]


def _is_zero(operation: Operation, operands: Sequence[Value], choices: Sequence[Sequence[int]]) -> bool:
    """Whether an operation gives zeros for all choices of its operands: zeros (0) and some other numbers (1, −1)."""
    for chosen in product(*choices):
        probes = {x: _probe(x, choice) for x, choice in zip(operands, chosen, strict=True)}
        args, kwargs = tree_map_only(Value, _Copies(probes), (operation.args, operation.kwargs))
        try:
            result = operation.function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        first = result[0] if isinstance(result, (tuple, list)) else result
        if not isinstance(first, Tensor) or bool(first.ne(0).any()):
            return False
    return True


class _Copies(dict[Value, Tensor]):
    """Copies of tensors in the places of values."""

    def __call__(self, value: Value) -> Tensor:
        return self[value].clone()


def _probe(value: Value, choice: int) -> Tensor:
    number = 0.7 * choice if value.dtype.is_floating_point or value.dtype.is_complex else 3 * choice
    if value.dtype == torch.uint8 or value.dtype == torch.bool:
        number = abs(number)
    return torch.full((1,) if value.shape else (), number, dtype=value.dtype, device=value.tensor.device)
