"""Rules of sums of products: dense layers, matrix products, einsum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyro_l0.nn.engine.maps import ConstantInput, Maps, Product
from pyro_l0.nn.engine.registry import rule
from pyro_l0.nn.engine.slots import ZERO, Axis, States
from pyro_l0.nn.engine.tape import Operation, Value

__all__ = ["contract"]

_LETTERS = "abcdefghij"  # of dimensions in front
_Labelled = tuple[Value, str]


@rule("aten::linear")
def linear(maps: Maps, operation: Operation) -> None:
    """Inputs are summed over; an input leaves if it is zero, or constant and so for the bias."""
    x, weight, bias = operation.value("input"), operation.value("weight"), operation.maybe("bias")
    front = _LETTERS[: x.rank - 1]
    if weight.rank == 1:
        return contract(maps, [(x, front + "k"), (weight, "k")], front, bias)
    constant = _constant_input(maps, x, weight, bias, 1)
    contract(maps, [(x, front + "k"), (weight, "nk")], front + "n", bias, constant)


@rule("aten::addmm", "aten::baddbmm", "aten::addmv")
def add_product(maps: Maps, operation: Operation) -> None:
    """A matrix product, and a tensor that is added to it."""
    ranks = {"aten::addmm": ("mk", "kn", "mn"), "aten::baddbmm": ("bmk", "bkn", "bmn"), "aten::addmv": ("mk", "k", "m")}
    names = ("mat1", "mat2", "batch1", "batch2", "mat", "vec")
    one, other = (operation.value(name) for name in operation.arguments if name in names)
    labels = ranks[operation.name.removesuffix("_")]
    bias = operation.value("self")
    constant = _constant_input(maps, one, other, bias, 0) if operation.name == "aten::addmm" else None
    contract(maps, [(one, labels[0]), (other, labels[1])], labels[2], bias, constant)


@rule("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot")
def multiply(maps: Maps, operation: Operation) -> None:
    """A matrix product: the inner dimension is summed over, and an entry leaves if it is zero in one factor."""
    labels = {
        "aten::mm": ("mk", "kn", "mn"),
        "aten::bmm": ("bmk", "bkn", "bmn"),
        "aten::mv": ("mk", "k", "m"),
        "aten::dot": ("k", "k", ""),
        "aten::vdot": ("k", "k", ""),
    }[operation.name]
    one, other = operation.inputs if len(operation.inputs) > 1 else operation.inputs * 2
    constant = _constant_input(maps, one, other, None, 0) if operation.name == "aten::mm" else None
    contract(maps, [(one, labels[0]), (other, labels[1])], labels[2], None, constant)


@rule("aten::matmul")
def matmul(maps: Maps, operation: Operation) -> None:
    """Matrix products for every entry of the dimensions in front, such as batch and heads, which are broadcast."""
    one, other = operation.value("self"), operation.value("other")
    rank = max(one.rank, other.rank, 2) - 2
    front = _LETTERS[:rank]
    left = "k" if one.rank == 1 else front[rank - one.rank + 2 :] + "mk"
    right = "k" if other.rank == 1 else front[rank - other.rank + 2 :] + "kn"
    result = front + ("m" if one.rank > 1 else "") + ("n" if other.rank > 1 else "")
    constant = _constant_input(maps, one, other, None, 0) if other.rank == 2 else None
    contract(maps, [(one, left), (other, right)], result, None, constant)


@rule("aten::bilinear")
def bilinear(maps: Maps, operation: Operation) -> None:
    """Pairs of inputs are summed over; an input leaves if it is zero."""
    one, other, weight = (operation.value(name) for name in ("input1", "input2", "weight"))
    front = _LETTERS[: one.rank - 1]
    operands = [(one, front + "k"), (weight, "nkl"), (other, front + "l")]
    contract(maps, operands, front + "n", operation.maybe("bias"))


@rule("aten::einsum")
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
    constant: ConstantInput | None = None,
    output: Value | None = None,
) -> None:
    """A sum over products: a letter for every dimension; those of the result pass, the others are summed over.

    Args:
        maps: what is known so far.
        operands: the factors.
        result: letters of the output.
        bias: what is added, its last dimensions those of the output.
        constant: says that the first factor's constant inputs may leave into a bias.
        output: the output; the operation's first one without it.
    """
    operation = maps.operation
    output = operation.output if output is None else output
    sizes = {letter: size for x, term in operands for letter, size in zip(term, x.shape, strict=True) if size > 1}
    places: dict[str, list[tuple[Value, int]]] = {}
    for x, term in operands:
        for dim, letter in enumerate(term):
            if x.shape[dim] == sizes.get(letter, 1):
                places.setdefault(letter, []).append((x, dim))
            else:
                maps.fixes(x, dim)  # one entry for all
    for letter, found in places.items():
        if letter in result:
            for x, dim in found:
                maps.same(x, dim, output, result.index(letter))
        else:
            where = np.logical_and.reduce([maps.states(x, dim) != ZERO for x, dim in found])
            if constant is not None and found[0][0] is constant.input:
                maps.leave_to_bias(constant, found, where)
            else:
                maps.reads(*found, where=where)
    _set_states(maps, operands, result, output)
    if bias is not None:
        _add(maps, bias, output)
    if len(operands) > 1:
        axes: dict[str, Axis] = {letter: maps.axes[x][dim] for letter, ((x, dim), *_) in places.items()}
        maps.products.append(Product(operation, tuple(axes.values())))


def _set_states(maps: Maps, operands: Sequence[_Labelled], result: str, output: Value) -> None:
    """A slice of a product is zero if it is in one factor, and varies if it does in one."""
    wholes = [maps.state(x) for x, _ in operands]
    is_zero = ZERO in wholes
    if not output.shape:
        maps.set_state(output, ZERO if is_zero else max(wholes))
    for dim, letter in enumerate(result):
        each: list[States] = []
        for (x, term), whole in zip(operands, wholes, strict=True):
            has = letter in term and x.shape[term.index(letter)] == output.shape[dim]
            each.append(
                maps.states(x, term.index(letter)) if has else np.full(output.shape[dim], whole, dtype=np.uint8)
            )
        zero = np.logical_or.reduce([states == ZERO for states in each]) | is_zero
        maps.set_states(output, dim, np.where(zero, np.uint8(ZERO), np.maximum.reduce(each)))


def _add(maps: Maps, bias: Value, output: Value) -> None:
    """Something is added to an output; it is not zero any more, unless both are."""
    for output_dim in range(output.rank):
        dim = output_dim - output.rank + bias.rank
        states = np.full(output.shape[output_dim], maps.state(bias), dtype=np.uint8)
        if dim >= 0 and bias.shape[dim] == output.shape[output_dim]:
            maps.same(bias, dim, output, output_dim)
            states = maps.states(bias, dim)
        elif dim >= 0:
            maps.fixes(bias, dim)
        maps.set_states(output, output_dim, np.maximum(states, maps.states(output, output_dim)))
    if not output.shape:
        maps.set_state(output, max(maps.state(output), maps.state(bias)))


def _constant_input(maps: Maps, x: Value, weight: Value, bias: Value | None, weight_dim: int) -> ConstantInput | None:
    """Where the constants of an input may go, if there is a place."""
    if x.names or not maps.takes_constants(weight, bias):
        return None
    return ConstantInput(maps.operation, x, weight, bias, x.rank - 1, weight_dim, False)
