"""Which weights read the units of a gate, and which write them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pyro_l0.nn.engine.maps import Axis, Index, Link, Maps, Read, Reshape
from pyro_l0.nn.engine.record import Operation, Value

__all__ = ["Use", "find_readers", "find_writers", "weights_of"]


@dataclass(frozen=True, eq=False)
class Use:
    """A weight whose entries read, or write, the units of a gate."""

    site: str  # the gate's
    weight: Value
    dim: int  # whose entries do
    entries: Index  # shape ``(pairs,)``
    units: Index  # which each reads or writes, shape ``(pairs,)``; every pair is there once
    path: str  # a module that reads or writes them by the weight
    groups: int = 1  # of a convolution; entries count through the inputs of all groups

    @property
    def each(self) -> int:
        """Number of weights in a pair."""
        return math.prod(self.weight.shape) // (self.weight.shape[self.dim] * self.groups)


_Root = tuple[Value, tuple[int, ...]]


def weights_of(maps: Maps) -> dict[Operation, dict[Value, _Root]]:
    """By contraction, its operands that do not depend on the network's input, with the parameter each was made of.

    An operand that is a view of a parameter, a transposition for example, is that parameter, and comes with the
    dimension of it for each of its own; one that is computed otherwise, as a parametrisation does, stands for itself.
    """
    inputs = {value for call in maps.recording.calls for value in call.inputs}
    roots: dict[Value, _Root] = {}
    varying = set(inputs)
    for operation in maps.recording.operations:
        given = list(dict.fromkeys(operation.inputs))
        for output in operation.made:
            if varying.intersection(given) or not given:
                varying.add(output)
            elif len(given) == 1 and (operation.name == "gate" or getattr(operation.function, "is_view", False)):
                roots.update(_root_of(maps, operation, output, roots))
    found: dict[Operation, dict[Value, _Root]] = {}
    for product in maps.products:
        operation = product.operation
        lowest = 1 if operation.name.startswith("recurrent") else 0  # without the biases
        found[operation] = {
            value: roots.get(value, _own(value))
            for value in operation.inputs
            if value not in varying and value is not operation.added and value.rank > lowest and not value.is_given
        }
    return found


def _own(value: Value) -> _Root:
    return value, tuple(range(value.rank))


def _root_of(maps: Maps, operation: Operation, output: Value, roots: dict[Value, _Root]) -> dict[Value, _Root]:
    """What a view of a tensor's entries, all of them, is a view of; nothing if its dimensions are others."""
    (x,) = set(operation.inputs)
    root, of_root = roots.get(x, _own(x))
    sources = {relation.target: relation.source for relation in maps.relations[operation] if isinstance(relation, Link)}
    dims = [maps.axes[x].index(sources[axis]) if axis in sources else None for axis in maps.axes[output]]
    if any(dim is None and size > 1 for dim, size in zip(dims, output.shape, strict=True)):
        return {}
    if math.prod(x.shape) != math.prod(output.shape):
        return {}
    return {output: (root, tuple(0 if dim is None else of_root[dim] for dim in dims))}


def find_readers(maps: Maps) -> list[Use]:
    """The weights that read units of each gate, with no other weight in between."""
    weights = weights_of(maps)
    found: dict[_Key, set[tuple[int, int]]] = {}
    for site in dict.fromkeys(call.site for call in maps.gates):
        pairs = {call.behind: _identity(call.behind) for call in maps.gates if call.site == site}
        for operation in maps.recording.operations:
            reads = weights.get(operation, {})
            grouped = _grouped(maps, operation, pairs) if reads else None
            for relation in maps.relations[operation]:
                if isinstance(relation, Read):
                    held = [pairs[axis] for axis in relation.axes if axis in pairs]
                    for weight, dim in _read_with(maps, relation, reads) if held else ():
                        found.setdefault((site, weight, dim, 1, operation.path), set()).update(*held)
                elif grouped is not None or not reads:
                    _follow(pairs, relation)
            if grouped is not None:
                key, entries = grouped
                found.setdefault((site, *key, operation.path), set()).update(entries)
    return _uses(found)


def find_writers(maps: Maps) -> list[Use]:
    """The weights that write units of each gate, with neither another weight nor a flattening in between."""
    weights = weights_of(maps)
    found: dict[_Key, set[tuple[int, int]]] = {}
    for site in dict.fromkeys(call.site for call in maps.gates):
        pairs = {call.front: _identity(call.front) for call in maps.gates if call.site == site}
        for operation in reversed(maps.recording.operations):
            given = weights.get(operation, {})
            axes = {axis: (x, dim) for x in given for dim, axis in enumerate(maps.axes[x])}
            for relation in maps.relations[operation]:
                if isinstance(relation, Link) and relation.target in pairs:
                    moved = _moved(relation, pairs[relation.target], is_back=True)
                    if relation.source in axes:
                        value, dim = axes[relation.source]
                        root, dims = given[value]
                        key = site, root, dims[dim], 1, operation.path
                        found.setdefault(key, set()).update(moved)
                    elif not given:
                        pairs.setdefault(relation.source, set()).update(moved)
                elif isinstance(relation, Reshape) and len(relation.sources) == 1:
                    _regroup(pairs, relation.targets, relation.sources)
    return _uses(found)


_Pairs = dict[Axis, set[tuple[int, int]]]  # by dimension, its entries with the units that they hold
_Key = tuple[str, Value, int, int, str]


def _identity(axis: Axis) -> set[tuple[int, int]]:
    return {(unit, unit) for unit in range(axis.size)}


def _uses(found: dict[_Key, set[tuple[int, int]]]) -> list[Use]:
    """Each weight once, whichever modules use it."""
    together: dict[tuple[str, Value, int, int], tuple[str, set[tuple[int, int]]]] = {}
    for (site, weight, dim, groups, path), pairs in found.items():
        together.setdefault((site, weight, dim, groups), (path, set()))[1].update(pairs)
    uses = []
    for (site, weight, dim, groups), (path, pairs) in together.items():
        columns = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        uses.append(Use(site, weight, dim, columns[:, 0], columns[:, 1], path, groups))
    return uses


def _read_with(maps: Maps, read: Read, weights: dict[Value, _Root]) -> Iterator[tuple[Value, int]]:
    """The weights that an operation sums over together with its input, and by which dimension."""
    for value, (root, dims) in weights.items():
        for dim, axis in zip(dims, maps.axes[value], strict=True):
            if axis in read.axes:
                yield root, dim


def _grouped(
    maps: Maps, operation: Operation, pairs: _Pairs
) -> tuple[tuple[Value, int, int], set[tuple[int, int]]] | None:
    """The weight of a convolution in groups that reads units, whose inputs are pairs of a group and an entry of it."""
    if not operation.name.endswith("convolution") or operation.integer("groups") == 1:
        return None
    axis = maps.axes[operation.value("input")][1]
    if axis not in pairs:
        return None
    is_transposed = bool(operation.arguments["transposed"])
    groups = 1 if is_transposed else operation.integer("groups")
    return (operation.value("weight"), 0 if is_transposed else 1, groups), pairs[axis]


def _follow(pairs: _Pairs, relation: Link | Reshape) -> None:
    """Pass units on from an operation's input to its output."""
    if isinstance(relation, Reshape):
        _regroup(pairs, relation.sources, relation.targets)
    elif relation.source in pairs:
        given = _moved(relation, pairs[relation.source])
        pairs[relation.target] = pairs[relation.target] | given if relation.target in pairs else given


def _moved(link: Link, pairs: set[tuple[int, int]], is_back: bool = False) -> set[tuple[int, int]]:
    """The pairs of an output for those of an input, or the reverse."""
    if link.source_entries is None and link.target_entries is None:
        return pairs
    sources = np.arange(link.source.size) if link.source_entries is None else link.source_entries
    targets = np.arange(link.target.size) if link.target_entries is None else link.target_entries
    before, behind = (targets, sources) if is_back else (sources, targets)
    moved = dict(zip(before.tolist(), behind.tolist(), strict=True))
    return {(moved[entry], unit) for entry, unit in pairs if entry in moved}


def _regroup(pairs: _Pairs, sources: tuple[Axis, ...], targets: tuple[Axis, ...]) -> None:
    """Pass units on between dimensions of the same entries: an entry holds what takes part in it."""
    if not any(axis in pairs for axis in sources):
        return
    flat = np.arange(math.prod(axis.size for axis in sources))
    before = np.unravel_index(flat, [axis.size for axis in sources])
    behind = np.unravel_index(flat, [axis.size for axis in targets])
    for axis, entries in zip(sources, before, strict=True):
        units_of = defaultdict[int, list[int]](list)
        for entry, unit in pairs.get(axis, ()):
            units_of[entry].append(unit)
        for target, others in zip(targets, behind, strict=True) if units_of else ():
            held = {
                (b, unit) for a, b in set(zip(entries.tolist(), others.tolist(), strict=True)) for unit in units_of[a]
            }
            pairs[target] = pairs.get(target, set()) | held
