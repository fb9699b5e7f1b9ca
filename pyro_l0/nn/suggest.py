"""Where gates would cut something in a network that has none."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pyro_l0.nn.calls import Calls, follow_calls, idle_gates, record_called
from pyro_l0.nn.cost import ClosedUnits
from pyro_l0.nn.engine.maps import Axis, Link, Maps, Mask, Read, Reshape, outer
from pyro_l0.nn.engine.record import Example, Operation, Recording, Value, containing, example_of
from pyro_l0.nn.gate import GateLayer, gate_names
from pyro_l0.nn.heads import gate_heads, is_dense
from pyro_l0.nn.insert import has_gate_behind, hooks_of, insert_gates
from pyro_l0.nn.l0_gate import L0Gate

__all__ = ["Location", "Suggestions", "suggest_gates"]

_UNITS = 16  # of a gate, of which savings are counted


@dataclass(frozen=True)
class Location:
    """A module behind which a gate would cut something.

    A unit that ``coupled`` locations share can be removed only if the gates of all of them are closed.
    """

    path: str  # of the module
    gate: L0Gate  # for its output; one for all locations with the same units
    weights: float  # that one unit's closing saves, on average over its units, with all other gates open
    macs: float  # multiply-adds per example that it saves, likewise
    parameters: tuple[str, ...]  # that lose entries with a unit
    coupled: tuple[str, ...]  # other locations on the same units, such as a residual stream's
    is_composite: bool  # whether its units are parts of larger ones that can have gates, such as a head's queries
    is_input: bool  # whether no weight writes its units, as those of the network's inputs


class Suggestions(Mapping[str, L0Gate]):
    """What :func:`~pyro_l0.nn.suggest_gates` returns: gates by module path, for :func:`~pyro_l0.nn.insert_gates`.

    It prints as a table, in which locations that are coupled with one another, as on a residual stream, have the number
    of their group: a unit leaves where it is closed behind all of them.

    Attributes:
        locations: of each suggested module its ``path``, its ``gate``, the ``weights`` and ``macs`` that a closed unit
            saves, the ``parameters`` that it is cut from, and the paths of modules that it is ``coupled`` with.
        refused: by path of other modules, why a gate behind them would cut nothing or also act elsewhere, or why its
            units can't be taken out.
        heads: by path of a dense layer, the number of attention heads that it reads, for ``gate_heads``.
        in_the_way: those of ``refused`` that would have cut something, had it been possible to take their units out.
    """

    def __init__(
        self,
        locations: tuple[Location, ...],
        refused: Mapping[str, str],
        heads: Mapping[str, int],
        in_the_way: Mapping[str, str],
    ) -> None:
        self.locations, self.heads, self.in_the_way = locations, dict(heads), dict(in_the_way)
        self.refused = {**refused, **in_the_way}
        self._gates = {location.path: location.gate for location in locations}

    def __getitem__(self, path: str) -> L0Gate:
        return self._gates[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._gates)

    def __len__(self) -> int:
        return len(self._gates)

    def __str__(self) -> str:
        rows = [("behind", "gate", "weights/unit", "macs/unit", "coupled", "parameters")]
        groups = (group for group in _together(self.locations) if len(group) > 1)
        group_of = {at.path: f"group {number}" for number, group in enumerate(groups, 1) for at in group}
        for at in self.locations:
            numbers = f"{at.weights:,.0f}", f"{at.macs:,.0f}"
            rows.append((at.path, str(at.gate), *numbers, group_of.get(at.path, ""), _few(at.parameters)))
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if not self.locations:
            lines = ["no module without a gate behind which one would cut something"]
        lines += [
            f"{path} reads {heads} heads: gate_heads(network, {{{path!r}: {heads}}})"
            for path, heads in self.heads.items()
        ]
        return "\n".join([*lines, *(f"no gate behind {path}: {why}" for path, why in self.refused.items())])


def suggest_gates(network: nn.Module, example: Example) -> Suggestions:
    """Find the modules behind which a gate would cut something.

    If modules pass units on one by one, as a layer and its activation do, it suggests the last one, where a closed gate
    makes true zeros. The savings are counted on a copy of the network with all gates. What is suggested can be cut: a
    copy is compacted with some gates of each closed by chance, and those that are in the way are refused.

    Args:
        network: the network; it is not changed.
        example: what it is called with, as :class:`~pyro_l0.nn.NetworkCost` takes it.

    Returns:
        The gates by module path, which print as a table of what each unit saves.

    Raises:
        ValueError: the network does not take the example.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> print(suggest_gates(net, torch.ones(1, 2)))
        behind  gate                             weights/unit  macs/unit  coupled  parameters
        1       L0Gate(3, dim=-1, HardConcrete)  3             3                   0.bias, 0.weight, 2.weight
        no gate behind 2: it makes the network's output
    """
    calls = follow_calls(network, example)
    example = example_of(example, network)  # of copies with gates, too
    found, refused = _candidates(network, calls)
    gates = {path: gate for path, outputs in found.items() if (gate := _gate(outputs)) is not None}
    locations: list[Location] = []
    parts, composites = _parts(calls.maps, found)
    if gates:
        gated = insert_gates(network, gates)
        names: dict[nn.Module, str] = {gate: site for site, gate in gate_names(gated).items()}
        sites = {path: names[hook.gate] for path, hook in hooks_of(gated) if hook.suffix == "1"}
        closed = ClosedUnits(record_called(gated, example), _UNITS)
        saved, written = closed.saved(), closed.written()
        idle = idle_gates(gated, example)
        why = dict.fromkeys(idle, "its units change no output")
        why |= {stay.site: f"its units {stay.verdict}" for stay in reversed(closed.report().stays)}
        parameters, coupled = _shared(calls.maps, found)
        streams = _streams(calls.maps, found, gates)
        # Recurrent units are one in front of a gate and behind: they leave with it alone, or nothing does.
        recurrent = {path for path in gates if isinstance(network.get_submodule(path), nn.RNNBase | nn.RNNCellBase)}
        leaving = {path for path in recurrent if saved[sites[path]][0] > 0}
        for path in gates:
            site, others = sites[path], () if path in leaving else coupled[path]
            if others and leaving.issuperset(others):
                refused[path] = f"its units are those of {_few(others)}"
            elif site not in idle and (max(saved[site]) > 0 or (path in recurrent and others and site not in why)):
                at = streams[path], *saved[site], parameters[path], others, path in composites, site not in written
                locations.append(Location(path, *at))
            else:
                together = f"its units leave only together with those behind {_few(others)}"
                refused[path] = why.get(site) or (together if others else "nothing leaves with its units")
    heads = _heads(network, calls)
    in_the_way = Trial(network, example, locations, heads, parts).sort()
    left = tuple(x for x in locations if (x.path, False) not in in_the_way)
    heads = {path: number for path, number in heads.items() if (path, True) not in in_the_way}
    return Suggestions(left, refused, heads, {path: why for (path, _), why in in_the_way.items()})


Found = dict[str, list[tuple[Value, int]]]
"""By path, what a module returns at each call, and the dimension of its units."""


def _dim_of(outputs: Sequence[tuple[Value, int]]) -> int | None:
    """The dimension of the units at every call, counted from the front or the end; None if none has them all."""
    value, dim = outputs[0]
    dims = [dim - value.rank, dim] if dim == value.rank - 1 else [dim, dim - value.rank]
    return next((d for d in dims if all(d in (own, own - other.rank) for other, own in outputs)), None)


def _gate(outputs: Sequence[tuple[Value, int]]) -> L0Gate | None:
    """A gate for the units at every call; None if no dimension has them all."""
    (value, dim), found = outputs[0], _dim_of(outputs)
    return None if found is None else L0Gate(value.shape[dim], dim=found, init_jitter=0.0)


def _streams(maps: Maps, found: Found, gates: Mapping[str, L0Gate]) -> dict[str, L0Gate]:
    """By path a gate, one for all paths with the same units in the same order, as on a residual stream."""
    units, streams = maps.slots.units(), dict[tuple[int, ...], list[str]]()
    for path in gates:
        value, dim = found[path][0]
        streams.setdefault(tuple(units[maps.axes[value][dim].dimension].tolist()), []).append(path)
    shared: dict[str, L0Gate] = {}
    for paths in streams.values():
        together = _gate([output for path in paths for output in found[path]]) if len(paths) > 1 else None
        of_dim: dict[int, L0Gate] = {}
        for path in paths:
            shared[path] = together or of_dim.setdefault(gates[path].dim, gates[path])
    return shared


def _candidates(network: nn.Module, calls: Calls) -> tuple[Found, dict[str, str]]:
    """The tensors and dimensions that a gate could act on, and why not behind other modules."""
    found: Found = {}
    refused: dict[str, str] = {}
    users, read, ends = _users(calls.maps.recording), _read_outside(calls.maps.recording), _Outputs(calls.maps)
    paths = {part for path in {x.path for x in calls.maps.recording.operations} for part in containing(path)}
    busy = {module for path, module in network.named_modules() if path in paths}
    returned: dict[Value | None, dict[nn.Module, Value | None]] = {}
    for module, made in calls.of.items():
        returned.setdefault(made[0].output, {})[module] = made[0].input
    for path, module in network.named_modules():
        own = calls.of_one(module)
        is_gate = isinstance(module, GateLayer) or has_gate_behind(module)
        if not path or is_gate or not own or "parametrizations" in path.split("."):
            continue  # the last compute weights
        values = [call.output for call in own if call.output is not None]
        if path in read:
            refused[path] = "code outside of it reads its parameters"
        elif isinstance(module, nn.RNNBase) and module.proj_size:
            refused[path] = "proj_size projects its hidden units"
        elif len(values) < len(own):
            refused[path] = "it does not return a tensor that operations use"
        elif not any(_has_other(module, returned.get(value, {}), busy, value) for value in values):
            dims = [[dim for dim in calls.unit_dims(value) if value.shape[dim] > 1 and dim > 0] for value in values]
            outputs = [(value, found_there[-1]) for value, found_there in zip(values, dims, strict=True) if found_there]
            why = [reason for output in zip(values, dims, strict=True) if (reason := ends.reason(*output)) is not None]
            if why:
                refused[path] = why[0]
            elif not calls.are_same_units(outputs):
                refused[path] = f"it is called {len(own)} times, on different units"
            elif outputs and _dim_of(outputs) is None:
                refused[path] = f"it is called {len(own)} times, with its units in several dimensions"
            elif outputs and len(outputs) == len(values):
                found[path] = outputs
    return _without_passed_on(calls.maps, users, found), refused


def _read_outside(recording: Recording) -> set[str]:
    """The modules of which operations of other modules read a parameter."""
    found: set[str] = set()
    for operation in recording.operations:
        for value in operation.inputs:
            owners = [containing(name.rpartition(".")[0]) for name in value.names]  # of every name of a tied one
            inside = set(containing(operation.path))
            if owners and not any(modules[0] in inside for modules in owners if modules):
                found.update(path for modules in owners for path in modules if path not in inside)
    return found


def _users(recording: Recording) -> dict[Value, list[Operation]]:
    """The operations that use a value and on which the network's outputs depend."""
    users: dict[Value, list[Operation]] = {}
    needed = {value for call in recording.calls for value in call.outputs}
    for operation in reversed(recording.operations):
        if not needed.isdisjoint(operation.made):
            needed.update(operation.inputs)
            for value in dict.fromkeys(operation.inputs):
                users.setdefault(value, []).append(operation)
    return users


def _passed_by(maps: Maps, operation: Operation, unit: Axis) -> list[Axis]:
    """The dimension of an operation's output that has the same units, if it has no other activation; or none."""
    if len([x for x in operation.inputs if not x.names]) > 1:
        return []
    links = [x for x in maps.relations[operation] if isinstance(x, Link) and x.source is unit]
    return [x.target for x in links if x.source_entries is None and x.target in maps.axes[operation.output]]


def _without_passed_on(maps: Maps, users: Mapping[Value, list[Operation]], found: Found) -> Found:
    """Without tensors that only become another of them, unit by unit."""
    others = {value for outputs in found.values() for value, _ in outputs}

    def is_passed_on(value: Value, dim: int) -> bool:
        unit, last = maps.axes[value][dim], value
        while len(users.get(last, [])) == 1:
            (operation,) = users[last]
            if operation.name == "gate":
                return True
            passed = _passed_by(maps, operation, unit)
            is_mixed = any(isinstance(x, Read) and unit in x.axes for x in maps.relations[operation])
            is_split = any(value in users for value in operation.made[1:])  # as where a pool's indices are used
            if len(passed) != 1 or is_mixed or is_split:
                return False
            last, unit = operation.output, passed[0]
            if last in others:
                return True
        return False

    return {path: outputs for path, outputs in found.items() if not all(is_passed_on(*output) for output in outputs)}


class _Outputs:
    """Which entries of dimensions are outputs of the network, found from its end to its start.

    By dimension, a mask of three columns: an entry becomes an output, as a class does by a softmax or a new shape; it
    reaches one through sums, products and new shapes; a layer reads it.
    """

    def __init__(self, maps: Maps) -> None:
        self._maps, self._masks = maps, dict[Axis, Mask]()
        self._values = {output for call in maps.recording.calls for output in call.outputs}
        for axis in (axis for value in self._values for axis in maps.axes[value]):
            self._of(axis)[:, :2] = True
        for operation in reversed(maps.recording.operations):
            relations = maps.relations[operation]
            passed = {x.source for x in relations if isinstance(x, Link)}
            columns = np.array([len([x for x in operation.inputs if not x.names]) < 2, True, True])
            for one in relations:
                if isinstance(one, Link):
                    self._pass(one, columns)
                elif isinstance(one, Reshape):
                    self._reshape(one, columns)
                elif any(x.names for x in operation.inputs):
                    for axis in set(one.axes) - passed:  # a norm reads its units and passes them on
                        self._of(axis)[:, 2] |= True if one.where is None else one.where

    def reason(self, value: Value, dims: Sequence[int]) -> str | None:
        """Why units of the last of some dimensions of a tensor are outputs; None if they are not."""
        plain, reached, read = (
            self._of(self._maps.axes[value][dims[-1]]).T if dims else np.zeros((3, 1), dtype=np.bool_)
        )
        if value in self._values or plain.any():
            return "it makes the network's output"
        is_output = bool((reached & ~read).any())
        return "it makes the network's output, through sums, products and new shapes alone" if is_output else None

    def _of(self, axis: Axis) -> Mask:
        return self._masks.setdefault(axis, np.zeros((axis.size, 3), dtype=np.bool_))

    def _pass(self, link: Link, columns: Mask) -> None:
        source, target = self._of(link.source), self._of(link.target)
        found = (target if link.target_entries is None else target[link.target_entries]) & columns
        found = found if link.where is None else found & link.where[:, None]
        np.logical_or.at(source, np.arange(len(source)) if link.source_entries is None else link.source_entries, found)

    def _reshape(self, relation: Reshape, columns: Mask) -> None:
        for column, function in enumerate((np.logical_and, np.logical_and, np.logical_or)):
            flat = outer(function, [self._of(axis)[:, column] & columns[column] for axis in relation.targets])
            flat = flat.reshape([axis.size for axis in relation.sources])
            for dim, axis in enumerate(relation.sources):
                self._of(axis)[:, column] |= flat.any(axis=tuple(d for d in range(flat.ndim) if d != dim))


def _has_other(own: nn.Module, returned: Mapping[nn.Module, Value | None], busy: Set[nn.Module], value: Value) -> bool:
    """Whether another module returns the same tensor: one inside, or one that made it.

    By module that returns it, ``returned`` is what each got. One that only passes it on, such as the Identity of a
    shortcut, may be one of several that use it; ``busy`` modules run operations.
    """
    makers = {module for module, before in returned.items() if before is not value or module in busy}
    return any(module in returned for module in own.modules() if module is not own) or (
        own not in makers and bool(makers)
    )


def _shared(maps: Maps, found: Found) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """By path, the parameters and the other paths that have some of the same units."""
    units = maps.slots.units()
    of_path = {
        path: {unit for value, dim in outputs for unit in units[maps.axes[value][dim].dimension].tolist()}
        for path, outputs in found.items()
    }
    of_name = {
        name: {unit for axis in maps.axes[value] if axis.size > 1 for unit in units[axis.dimension].tolist()}
        for name, value in sorted(maps.recording.named.items())
    }

    boxes = maps.distinct_boxes(units)
    count = 1 + max((int(entries.max()) for entries in units if len(entries)), default=-1)

    def sharing(path: str, own: set[int], sets: Mapping[str, set[int]]) -> tuple[str, ...]:
        return tuple(other for other in sets if other != path and not own.isdisjoint(sets[other]))

    def leaving(own: set[int]) -> set[int]:
        """With combinations that units take part in, such as a map's positions behind a flatten."""
        mask, before = np.zeros(count, dtype=np.bool_), -1
        mask[[*own]] = True
        while before != np.count_nonzero(mask):
            before = int(np.count_nonzero(mask))
            for factors, flat in boxes:
                parts = [mask[entries] for entries in factors]
                if any(map(np.any, parts)):
                    mask[flat[outer(np.logical_or, parts).ravel()]] = True
        return set(np.flatnonzero(mask).tolist())

    return (
        {path: sharing(path, leaving(own), of_name) for path, own in of_path.items()},
        {path: sharing(path, own, of_path) for path, own in of_path.items()},
    )


def _attended(maps: Maps) -> set[int]:
    """The dimensions of products of activations, such as the heads of attention."""
    return {
        maps.slots.root(axis.dimension)
        for product in maps.products
        if product.is_attention or not any(value.names for value in product.operation.inputs)
        for axis in product.axes
    }


def _parts(maps: Maps, found: Found) -> tuple[dict[str, int], set[str]]:
    """By path whose units are parts side by side, such as heads or what is split, a part's size; and composites."""
    units, parts, composites = maps.slots.units(), dict[str, int](), set[str]()
    roots = {
        path: {maps.slots.root(maps.axes[value][dim].dimension) for value, dim in outputs}
        for path, outputs in found.items()
    }
    wholes = _attended(maps).union(*roots.values())
    for box in maps.boxes:
        flat, factors = set(units[box.flat].tolist()), {maps.slots.root(dimension) for dimension in box.factors}
        for path, own in roots.items():
            if not all(flat.isdisjoint(units[root].tolist()) for root in own):
                parts[path] = len(units[box.factors[-1]])
                composites.update([path] if not wholes.isdisjoint(factors) else [])
    for links in maps.relations.values():
        for link in (x for x in links if isinstance(x, Link)):
            root, entries = maps.slots.root(link.source.dimension), link.source_entries
            parts.update({path: len(entries) for path, own in roots.items() if entries is not None and root in own})
    return parts, composites


def _heads(network: nn.Module, calls: Calls) -> dict[str, int]:
    """By path of a dense layer, the number of heads whose features, side by side, it reads.

    Heads of queries that share keys and values leave together, and count as one.
    """
    attention = {path: x for path, x in network.named_modules() if path and isinstance(x, nn.MultiheadAttention)}
    maps, found = calls.maps, {f"{path}.out_proj": module.num_heads for path, module in attention.items()}
    attended = _attended(maps)
    boxes = [
        (maps.slots.root(box.flat), [maps.slots.root(dimension) for dimension in box.factors]) for box in maps.boxes
    ]
    shared = {flat: factors[0] for flat, factors in boxes if flat in attended}
    for path, module in network.named_modules():
        value = next((call.input for call in calls.of.get(module, [])), None)
        if is_dense(module) and value is not None:
            last = maps.slots.root(maps.axes[value][-1].dimension)
            for flat, factors in boxes:
                if flat == last and len(factors) == 2 and attended.issuperset(factors):
                    found[path] = len(maps.slots.units()[shared.get(factors[0], factors[0])])
    return found


Key = tuple[str, bool]
"""The path of a module, and whether it is the heads that it reads that have gates, or the units behind it."""


class Trial:
    """Cuts a random part of each site of a copy of a network, and finds those that can't be cut.

    A site is a path, or several whose units leave only together. Sites of one kind, such as those of all layers of a
    stack, are tried together.
    """

    def __init__(
        self,
        network: nn.Module,
        example: Example,
        locations: Iterable[Location],
        heads: Mapping[str, int],
        parts: Mapping[str, int],
    ) -> None:
        self.network, self.example, self.heads, self.parts = network, example, heads, parts
        self.gates = {x.path: x.gate for x in locations}
        self.kinds: dict[object, list[tuple[Key, ...]]] = {}
        alone = [((path, True),) for path in heads]
        together = sorted(_together(locations), key=lambda paths: any(x.is_composite for x in paths))
        for site in [*alone, *(tuple((x.path, False) for x in paths) for paths in together)]:
            modules = {
                (re.sub(r"\d+", "#", path), is_head, type(network.get_submodule(path))) for path, is_head in site
            }
            self.kinds.setdefault(frozenset(modules), []).append(site)
        self._good: list[tuple[Key, ...]] = []
        self._refused: dict[Key, str] = {}
        self._random = torch.Generator().manual_seed(0)
        self._masks: dict[object, Tensor] = {}

    def sort(self) -> dict[Key, str]:
        """Why some of the sites can't be cut, beside all others."""
        if self.kinds:
            self._add(list(self.kinds.values()))
        return self._refused

    def _add(self, kinds: Sequence[list[tuple[Key, ...]]]) -> None:
        """Take those kinds of sites that can be cut with what is good already."""
        sites = [site for kind in kinds for site in kind]
        why = self._refusal([*self._good, *sites])
        if why is None:
            self._good += sites
        elif len(kinds) > 1:
            for half in (kinds[: len(kinds) // 2], kinds[len(kinds) // 2 :]):
                self._add(half)
        else:
            first, *others = sites
            if others:
                self._add([[first]])
            if others and first in self._good:
                for more in (others[: len(others) // 2], others[len(others) // 2 :]):
                    self._add([more] if more else [])
            else:
                self._refused.update({key: why for site in sites for key in site})

    def _refusal(self, sites: Sequence[tuple[Key, ...]]) -> str | None:
        from pyro_l0.compaction.compact import first_refusal

        site_of = {key: site for site in sites for key in site}
        gates = {path: self.gates[path] for path, is_head in site_of if not is_head}
        try:
            gated = gate_heads(self.network, {path: self.heads[path] for path, is_head in site_of if is_head})
            gated = insert_gates(gated, {path: copy.copy(gate) for path, gate in gates.items()})
        except (ValueError, TypeError) as error:
            return str(error)
        keys = {hook.gate: (path, hook.suffix == "gate") for path, hook in hooks_of(gated)}
        has_parts = any(is_head or path in self.parts for path, is_head in site_of)

        def choices() -> Iterator[dict[str, Tensor]]:
            for number in range(3 if has_parts else 1):
                values = {site: torch.ones(gate.size) for site, gate in gate_names(gated).items()}
                for site, gate in gate_names(gated).items():
                    key = keys.get(gate, ("", False))  # or one that the network had before
                    if key in site_of and (number or not key[1]):
                        values[site] = self._values(key, site_of[key], gate.size, number)
                yield values

        return first_refusal(gated, choices(), self.example)

    def _values(self, key: Key, site: tuple[Key, ...], size: int, number: int) -> Tensor:
        """Gates of which a quarter to three are closed, the same at all of a site; at last the same in each part."""
        part = self.parts.get(key[0], size) if number == 2 and not key[1] else size
        part = part if size % part == 0 else size
        name = site, size, part, number
        if name not in self._masks:
            order = torch.randperm(part, generator=self._random).repeat(size // part)
            closed = int(torch.randint(max(1, part // 4), max(1, 3 * part // 4) + 1, (), generator=self._random))
            self._masks[name] = (order >= min(closed, part - 1)).float()
        return self._masks[name]


def _together(locations: Iterable[Location]) -> Iterator[list[Location]]:
    """The locations that share units, directly or by others."""
    left = {x.path: x for x in locations}
    while left:
        todo, group = [next(iter(left))], list[Location]()
        while todo:
            at = left.pop(todo.pop(), None)
            if at is not None:
                group.append(at)
                todo += at.coupled
        yield group


def _few(names: tuple[str, ...]) -> str:
    """Names with commas between them; of five or more the first three, and how many others there are."""
    return ", ".join(names if len(names) < 5 else [*names[:3], f"and {len(names) - 3} others"])
