"""Rules of look-ups by indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from pyro_l0.nn.engine.maps import Maps, rule
from pyro_l0.nn.engine.slots import CONSTANT, ZERO
from pyro_l0.nn.engine.tape import Operation, Value

__all__: list[str] = []


@rule("aten::embedding")
def embedding(maps: Maps, operation: Operation) -> None:
    """Rows stay, since any of them may be looked up; their features pass."""
    weight, indices, output = operation.value("weight"), operation.value("indices"), operation.output
    maps.fixes(weight, 0)
    maps.set_state(output, max(maps.state(weight), maps.state(indices), CONSTANT))
    maps.passes(weight, 1, output, output.rank - 1, nonzero=maps.state(indices))
    for dim in range(indices.rank):
        maps.same(indices, dim, output, dim)


@rule("aten::gather")
def gather(maps: Maps, operation: Operation) -> None:
    """The dimension that is looked up stays; of the others, those of the same size are the same."""
    x, index, output = operation.value("self"), operation.value("index"), operation.output
    dim = operation.integer("dim") % x.rank if x.rank else 0
    _look_up(maps, x, [index], output)
    for d in range(x.rank):
        if d != dim and x.shape[d] == output.shape[d]:
            maps.passes(x, d, output, d, nonzero=maps.state(index))
            maps.same(index, d, output, d)
        else:
            for value in (x, index, output):
                maps.fixes(value, d)


@rule("aten::index", "aten::index_select")
def index(maps: Maps, operation: Operation) -> None:
    """Dimensions that are looked up by tensors of numbers, or by one mask, stay; the others are the same."""
    x, output = operation.value("self"), operation.output
    if operation.name == "aten::index_select":
        given = [*[None] * (operation.integer("dim") % x.rank), operation.value("index")]
    else:
        given = list(cast(Sequence[Value | None], operation.arguments["indices"]))
    tensors = [i for i in given if isinstance(i, Value)]
    places = [d for d, i in enumerate(given) if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in tensors):
        if len(tensors) > 1:
            return maps.barrier()
        used, first, rank = list(range(places[0], places[0] + tensors[0].rank)), places[0], 1
    else:
        used, rank = places, max(i.rank for i in tensors)
        first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    _look_up(maps, x, tensors, output)
    for value in tensors:
        maps.fixes(value, *range(value.rank))
    maps.fixes(x, *used)
    maps.fixes(output, *range(first, first + rank))
    passed = [d for d in range(x.rank) if d not in used]
    free = [d for d in range(output.rank) if not first <= d < first + rank]
    for d, place in zip(passed, free, strict=True):
        maps.passes(x, d, output, place, nonzero=max(map(maps.state, tensors)))


@rule("aten::index_add", "aten::index_copy", "aten::scatter_add", "aten::scatter", "aten::scatter_reduce")
def write_by_index(maps: Maps, operation: Operation) -> None:
    """The dimension whose numbers are used stays; of the others, those of the same size are the same throughout."""
    x, numbers, output = operation.value("self"), operation.value("index"), operation.output
    source = operation.maybe("source") or operation.maybe("src")
    written = [value for value in (source, numbers if numbers.rank == x.rank else None) if value is not None]
    if source is None or source.rank != x.rank:
        return maps.barrier()
    used = operation.integer("dim") % x.rank
    maps.set_state(output, max(maps.state(x), maps.state(source), maps.state(numbers)))
    if numbers.rank < x.rank:
        maps.fixes(numbers, *range(numbers.rank))
    for dim, size in enumerate(x.shape):
        if dim == used or any(value.shape[dim] != size for value in written):
            for value in (x, output, *written):
                maps.fixes(value, dim)
            continue
        for value in (x, *written):
            maps.same(value, dim, output, dim)
        states = np.maximum(maps.states(x, dim), maps.states(source, dim))
        varies = np.maximum(states, np.uint8(maps.state(numbers)))
        maps.set_states(output, dim, np.where(states == ZERO, states, varies))


def _look_up(maps: Maps, x: Value, indices: list[Value], output: Value) -> None:
    """What is looked up in zeros is zero; what is looked up in constants varies with the index."""
    maps.set_state(output, ZERO if maps.state(x) == ZERO else max([maps.state(x), *map(maps.state, indices)]))
