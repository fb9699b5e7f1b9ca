"""Rules of sums of products: dense layers, matrix products, einsum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyro_l0.nn.engine.maps import Maps, Product, rule
from pyro_l0.nn.engine.slots import ZERO, Axis
from pyro_l0.nn.engine.tape import Operation, Value

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


@rule("aten::linear")
def linear(maps: Maps, operation: Operation) -> None:
    """Inputs are summed over; an input leaves if it is zero, or if it is constant and goes into the bias."""
    x, weight = operation.value("input"), operation.value("weight")
    front = _LETTERS[: x.rank - 1]
    label = "nk"[-weight.rank :]
    contract(maps, [(x, front + "k"), (weight, label)], front + label[:-1], operation.added, folds=weight.rank == 2)


@rule(*_PRODUCTS)
def multiply(maps: Maps, operation: Operation) -> None:
    """A matrix product: the inner dimension is summed over, and an entry leaves if it is zero in one factor."""
    one, left, other, right, result = _PRODUCTS[operation.name.removesuffix("_")]
    factors = [(operation.value(one), left), (operation.value(other), right)]
    contract(maps, factors, result, operation.added, folds=result == "mn")


@rule("aten::matmul")
def matmul(maps: Maps, operation: Operation) -> None:
    """Matrix products for every entry of the dimensions in front, such as batch and heads, which are broadcast."""
    one, other = operation.value("self"), operation.value("other")
    rank = max(one.rank, other.rank, 2) - 2
    front = _LETTERS[:rank]
    left = "k" if one.rank == 1 else front[rank - one.rank + 2 :] + "mk"
    right = "k" if other.rank == 1 else front[rank - other.rank + 2 :] + "kn"
    result = front + ("m" if one.rank > 1 else "") + ("n" if other.rank > 1 else "")
    contract(maps, [(one, left), (other, right)], result, folds=other.rank == 2)


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
    folds: bool = False,
) -> None:
    """A sum over products: a letter for every dimension; those of ``result`` pass, the others are summed over.

    The last dimensions of ``bias``, which is added, are those of the output. With ``folds`` the first factor's
    constants may leave into a bias, where the second one is a layer's weight.
    """
    output = maps.operation.output
    folds = folds and not operands[0][0].names and maps.takes_constants(operands[1][0], bias)
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
            if folds:
                maps.reads_or_folds(found[0], found[1], where, bias)
            else:
                maps.reads(*found, where=where)
    _set_states(maps, operands, result, output)
    if bias is not None:
        _add(maps, bias, output)
    if len(operands) > 1:
        axes: dict[str, Axis] = {letter: maps.axes[x][dim] for letter, ((x, dim), *_) in places.items()}
        maps.products.append(Product(maps.operation, tuple(axes.values())))


def _set_states(maps: Maps, operands: Sequence[_Labelled], result: str, output: Value) -> None:
    """A slice of a product is zero if it is in one factor, and varies if it does in one."""
    wholes = [maps.state(x) for x, _ in operands]
    is_zero = ZERO in wholes
    maps.set_state(output, ZERO if is_zero else max(wholes))
    for dim, letter in enumerate("" if is_zero else result):
        dims = [(x, term.index(letter) if letter in term else x.rank) for x, term in operands]
        each = [maps.broadcast_states(x, place, output.shape[dim]) for x, place in dims]
        zero = np.logical_or.reduce([states == ZERO for states in each])
        maps.set_states(output, dim, np.where(zero, np.uint8(ZERO), np.maximum.reduce(each)))


def _add(maps: Maps, bias: Value, output: Value) -> None:
    """Something is added to an output; it is not zero any more, unless both are."""
    for output_dim in range(output.rank):
        dim = output_dim - output.rank
        states = maps.broadcast_states(bias, dim, output.shape[output_dim])
        if -dim <= bias.rank and bias.shape[dim] == output.shape[output_dim]:
            maps.same(bias, dim, output, output_dim)
        elif -dim <= bias.rank:
            maps.fixes(bias, dim)
        maps.set_states(output, output_dim, np.maximum(states, maps.states(output, output_dim)))
    if not output.shape:
        maps.set_state(output, max(maps.state(output), maps.state(bias)))
