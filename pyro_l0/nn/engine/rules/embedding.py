"""Rules of look-ups by indices."""

from __future__ import annotations

import numpy as np

from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.registry import rule
from pyro_l0.nn.engine.slots import CONSTANT, ZERO
from pyro_l0.nn.engine.tape import Operation, Value

__all__: list[str] = []


@rule("aten::embedding")
def embedding(maps: Maps, operation: Operation) -> None:
    """Rows stay, since any of them may be asked for; their features pass."""
    weight, indices, output = operation.value("weight"), operation.value("indices"), operation.output
    maps.fixes(weight, 0)
    maps.set_state(output, max(maps.state(weight), maps.state(indices), CONSTANT))
    maps.passes(weight, 1, output, output.rank - 1)
    if maps.state(indices) > CONSTANT:
        states = maps.states(weight, 1)
        maps.set_states(output, output.rank - 1, np.where(states == ZERO, states, np.uint8(maps.state(indices))))
    for dim in range(indices.rank):
        maps.same(indices, dim, output, dim)


@rule("aten::index_select")
def index_select(maps: Maps, operation: Operation) -> None:
    """The dimension that is looked up stays, since its numbers are used; the other dimensions are the same."""
    x, index, output = operation.value("self"), operation.value("index"), operation.output
    dim = operation.integer("dim") % x.rank
    _look_up(maps, x, [index], output)
    maps.fixes(x, dim)
    maps.fixes(output, dim)
    for d in range(x.rank):
        if d != dim:
            _pass_on(maps, x, d, output, d, [index])


@rule("aten::gather")
def gather(maps: Maps, operation: Operation) -> None:
    """The dimension that is looked up stays; of the others, those of the same size are the same."""
    x, index, output = operation.value("self"), operation.value("index"), operation.output
    dim = operation.integer("dim") % x.rank if x.rank else 0
    _look_up(maps, x, [index], output)
    for d in range(x.rank):
        if d != dim and x.shape[d] == output.shape[d]:
            _pass_on(maps, x, d, output, d, [index])
            maps.same(index, d, output, d)
        else:
            for value in (x, index, output):
                maps.fixes(value, d)


@rule("aten::index")
def index(maps: Maps, operation: Operation) -> None:
    """Dimensions that are looked up by tensors stay; the others are the same."""
    x, output = operation.value("self"), operation.output
    given = operation.arguments["indices"]
    assert isinstance(given, (list, tuple))
    indices = [*given, *[None] * (x.rank - len(given))]
    if len(indices) != x.rank or any(isinstance(i, Value) and i.dtype.is_floating_point for i in indices):
        return maps.barrier()
    used = [d for d, i in enumerate(indices) if i is not None]
    tensors = [i for i in indices if isinstance(i, Value)]
    if any(str(i.dtype) in ("torch.bool", "torch.uint8") for i in tensors):
        return maps.barrier()
    rank = max(i.rank for i in tensors)
    is_together = used == list(range(used[0], used[-1] + 1))
    first = used[0] if is_together else 0
    _look_up(maps, x, tensors, output)
    for value in tensors:
        maps.fixes(value, *range(value.rank))
    maps.fixes(x, *used)
    maps.fixes(output, *range(first, first + rank))
    passed = [d for d in range(x.rank) if d not in used]
    places = [d for d in range(output.rank) if not first <= d < first + rank]
    for d, place in zip(passed, places, strict=True):
        _pass_on(maps, x, d, output, place, tensors)


def _look_up(maps: Maps, x: Value, indices: list[Value], output: Value) -> None:
    """What is looked up in zeros is zero; what is looked up in constants varies with the index."""
    maps.set_state(output, ZERO if maps.state(x) == ZERO else max([maps.state(x), *map(maps.state, indices)]))


def _pass_on(maps: Maps, x: Value, dim: int, output: Value, output_dim: int, indices: list[Value]) -> None:
    maps.same(x, dim, output, output_dim)
    states = maps.states(x, dim)
    varies = max(maps.state(i) for i in indices)
    maps.set_states(output, output_dim, np.where(states == ZERO, states, np.maximum(states, np.uint8(varies))))
