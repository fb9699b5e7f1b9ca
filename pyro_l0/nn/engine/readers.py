"""Which weights read the units of a gate, and which write them."""

from __future__ import annotations

import math
from collections import defaultdict
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
        """How many weights a pair has: those that read its entry, or write it."""
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
            elif len(given) == 1 and (operation.name == "gate" or operation.is_view):
                roots.update(_root_of(maps, operation, output, roots))
    found: dict[Operation, dict[Value, _Root]] = {}
    for product in maps.products:
        found.setdefault(product.operation, {}).update(
            (value, roots.get(value, _own(value)))
            for value in product.factors
            if value not in varying and value.rank and not value.is_given
        )
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
    """The weights that read units of each gate, with no other weight in between that sums over them."""
    weights = _axes_of_weights(maps)
    factors = {(x.operation, axis) for x in maps.products for value in x.factors for axis in maps.axes[value]}
    found = defaultdict[_Key, set[_Pair]](set)
    for site in dict.fromkeys(call.site for call in maps.gates):
        pairs = {call.behind: _identity(call.behind) for call in maps.gates if call.site == site}
        for operation in maps.recording.operations:
            axes, path = weights.get(operation, {}), operation.path
            of_weights = [x for x in maps.relations[operation] if isinstance(x, Link) and x.source in axes]
            for relation in maps.relations[operation]:
                if isinstance(relation, Read):
                    held = [pairs[axis] for axis in relation.axes if axis in pairs]
                    for axis in relation.axes:
                        if held and axis in axes:
                            found[site, *axes[axis], 1, path].update(*held)
                elif isinstance(relation, Link) and relation.source in pairs:
                    moved = _moved(relation, pairs[relation.source])
                    is_factor = (operation, relation.source) in factors  # of a product for each unit
                    beside = [x for x in of_weights if is_factor and x.target is relation.target and x is not relation]
                    for link in beside:
                        found[site, *axes[link.source], 1, path] |= _moved(link, moved, is_back=True)
                    if beside or not axes:
                        held_behind = pairs.get(relation.target)
                        pairs[relation.target] = moved if held_behind is None else held_behind | moved
                elif isinstance(relation, Reshape) and not axes:
                    _regroup(pairs, relation.sources, relation.targets)
                elif isinstance(relation, Reshape) and relation.targets[0] in pairs:  # the inputs of a weight in groups
                    for axis in relation.sources:
                        if axis in axes:
                            groups = relation.targets[0].size // axis.size
                            found[site, *axes[axis], groups, path] |= pairs[relation.targets[0]]
    return _uses(found)


def find_writers(maps: Maps) -> list[Use]:
    """The weights that write units of each gate, with neither another weight nor a flattening in between."""
    weights = _axes_of_weights(maps)
    found = defaultdict[_Key, set[_Pair]](set)
    for site in dict.fromkeys(call.site for call in maps.gates):
        pairs = {call.front: _identity(call.front) for call in maps.gates if call.site == site}
        for operation in reversed(maps.recording.operations):
            axes = weights.get(operation, {})
            for relation in maps.relations[operation]:
                if isinstance(relation, Link) and relation.target in pairs:
                    moved = _moved(relation, pairs[relation.target], is_back=True)
                    if relation.source in axes:
                        found[site, *axes[relation.source], 1, operation.path] |= moved
                    elif not axes:
                        pairs.setdefault(relation.source, set()).update(moved)
                elif isinstance(relation, Reshape) and len(relation.sources) == 1:
                    _regroup(pairs, relation.targets, relation.sources)
    return _uses(found)


_Pair = tuple[int, int]  # an entry, and a unit that it holds
_Pairs = dict[Axis, set[_Pair]]  # by dimension
_Key = tuple[str, Value, int, int, str]


def _identity(axis: Axis) -> set[_Pair]:
    return {(unit, unit) for unit in range(axis.size)}


def _uses(found: dict[_Key, set[_Pair]]) -> list[Use]:
    """Each weight once, whichever modules use it."""
    together: dict[tuple[str, Value, int, int], tuple[str, set[_Pair]]] = {}
    for (site, weight, dim, groups, path), pairs in found.items():
        together.setdefault((site, weight, dim, groups), (path, set()))[1].update(pairs)
    uses = []
    for (site, weight, dim, groups), (path, pairs) in together.items():
        columns = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        uses.append(Use(site, weight, dim, columns[:, 0], columns[:, 1], path, groups))
    return uses


def _axes_of_weights(maps: Maps) -> dict[Operation, dict[Axis, tuple[Value, int]]]:
    """By contraction, the dimensions of its weights, each with the parameter and its dimension."""
    return {
        operation: {
            axis: (root, dim)
            for value, (root, dims) in weights.items()
            for dim, axis in zip(dims, maps.axes[value], strict=True)
        }
        for operation, weights in weights_of(maps).items()
    }


def _moved(link: Link, pairs: set[_Pair], is_back: bool = False) -> set[_Pair]:
    """The pairs of an output for those of an input, or the reverse."""
    if link.source_entries is None and link.target_entries is None:
        return pairs
    one, other = np.arange(link.source.size), np.arange(link.target.size)
    moved = (link.forward(one, -1) if is_back else link.back(other, -1)).tolist()
    return {(moved[entry], unit) for entry, unit in pairs if moved[entry] >= 0}


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
