"""Rules of sums, means and other numbers of whole dimensions."""

from __future__ import annotations

from pyro_l0.nn.engine.maps import Maps, rule
from pyro_l0.nn.engine.rules.pointwise import pointwise
from pyro_l0.nn.engine.slots import CONSTANT, ZERO
from pyro_l0.nn.engine.tape import Operation, Value

__all__: list[str] = []


@rule("aten::sum", "aten::linalg_vector_norm", "aten::nansum")
def sum_up(maps: Maps, operation: Operation) -> None:
    """Entries are summed over; one leaves if it is zero."""
    is_counted = operation.name == "aten::linalg_vector_norm" and float(str(operation.arguments["ord"])) <= 0
    _reduce(maps, operation, zeros_leave=not is_counted)


_NUMBERS = """mean amax amin max min prod any all argmax argmin var std var_mean std_mean logsumexp median nanmedian
mode norm count_nonzero aminmax kthvalue"""


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
        maps.reads((x, dim), where=maps.states(x, dim) != ZERO if zeros_leave else None)
    rest = [dim for dim in range(x.rank) if dim not in dims]
    for output in operation.made:
        least = _least(operation, output)
        maps.set_state(output, max(maps.state(x), least))
        for place, dim in enumerate(rest):
            maps.passes(x, dim, output, dim if keeps else place, least)


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
    """What becomes of zeros: constants in sums of exponentials, and where places are returned."""
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
