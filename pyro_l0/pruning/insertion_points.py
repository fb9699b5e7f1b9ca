"""Where a network gets the gates that prune it, and how many units of its modules it keeps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from pyro_l0.compaction.compact import refusal
from pyro_l0.expect import expect
from pyro_l0.nn import L0Gate, NetworkCost, gate_heads, insert_gates, suggest_gates
from pyro_l0.nn.engine import Example, Recording, analyse, record
from pyro_l0.nn.engine.readers import find_readers, find_writers
from pyro_l0.nn.gate import GateLayer, gate_names
from pyro_l0.nn.insert import hooks_of
from pyro_l0.nn.suggest import Suggestions

__all__ = ["GatedNetwork", "gates_at_least", "gates_in_step", "put_gates"]


def gates_at_least(gated: nn.Module, at_least: Mapping[str, float]) -> dict[str, int]:
    """By site, how many gates never close: as many as the paths of modules ask that hold it, or that it stands behind.

    A whole number is one of units, and any other a fraction of those at each site, rounded up.
    """
    sites = {gate: site for site, gate in gate_names(gated).items()}
    hooked = [(path, hook.gate) for path, hook in hooks_of(gated) if isinstance(hook.gate, GateLayer)]
    behind = {gate for _, gate in hooked}
    own = [(path, x) for path, x in gated.named_modules() if isinstance(x, GateLayer) and x not in behind]
    found: dict[str, int] = {}
    for path, number in at_least.items():
        gates = [gate for at, gate in own + hooked if not path or at == path or at.startswith(f"{path}.")]
        if not gates:
            there = ", ".join(repr(at) for at, _ in own + hooked)
            raise ValueError(f"Expected at_least by the paths of modules, with gates behind {there}, but got {path!r}.")
        for gate in gates:
            units = number if isinstance(number, int) else math.ceil(number * gate.size - 1e-6)
            if not 0 <= units <= gate.size:
                raise ValueError(
                    f"Expected at_least[{path!r}] from 0 to the {gate.size} units of gate site {sites[gate]!r}, but "
                    f"got {number}; a fraction suits modules with several sites."
                )
            found[sites[gate]] = max(found.get(sites[gate], 0), units)
    return found


def gates_in_step(gated: nn.Module, example: Example, multiple_of: int) -> dict[str, int]:
    """By site, a number of which a multiple of its gates is open.

    With it every dimension of a weight that belongs to the site keeps a multiple of ``multiple_of``: of heads of 64
    features any number will do for 8.
    """
    entries = dict.fromkeys(gate_names(gated), 0)
    maps = analyse(record(gated, example), {}).maps
    for use in (*find_writers(maps), *find_readers(maps)):
        for number in np.unique(np.bincount(use.units)).tolist():
            entries[use.site] = math.gcd(entries[use.site], number)
    return {site: multiple_of // math.gcd(multiple_of, number or 1) for site, number in entries.items()}


# A gate that is shared makes a plainer network: units leave the stream, with no zeros instead of them.
_AS_SMALL = 1.5
_FRACTION = 0.5  # of a budget, which the least network may take
_NAMED = 8  # of the modules without a gate, in a message
Sites = list[
    tuple[tuple[str, ...], GateLayer | int]
]  # the paths behind which a gate acts, and the gate or a number of heads


@dataclass(frozen=True)
class GatedNetwork:
    """A network with gates whose units can leave."""

    network: nn.Module  # a copy, with gates
    skipped: dict[str, str] = field(default_factory=dict)  # by module path, why there is no gate
    in_the_way: dict[str, str] = field(default_factory=dict)  # units that can't leave, though it would save something
    better: tuple[str, ...] = ()  # modules behind which gates would meet the budget, if these do not

    @property
    def reasons(self) -> str:
        """Where there is no gate, and why, or where there should be, as a sentence."""
        if self.better:
            return f" Without gates=, prune puts gates behind {', '.join(self.better)}, which can meet it."
        return f" There is no gate behind {_reasons(self.skipped)}." if self.skipped else ""


def put_gates(
    network: nn.Module,
    recording: Recording,
    gates: Mapping[str, GateLayer] | None,
    suffices: Callable[[nn.Module, float], bool],
) -> GatedNetwork:
    """Put gates where a closed one makes a network smaller, and its units can be taken out.

    A gate per head of attention, and one per unit behind modules whose units leave alone, such as activations and the
    norms of inner convolutions. If with these the network can't become well smaller than is wanted (``suffices``, for
    a part of the budget), a gate, too, for every unit of a residual stream, at all locations where the stream is
    written or read, and for inputs of the network; and if even that is too large, for parts of larger units.
    ``gates``, by module path, go in place of all these. A network that has gates already keeps them.
    """
    expect(Mapping | None, "a dict of gates by module path", gates=gates)
    for path, gate in (gates or {}).items():
        expect(GateLayer, "an L0Gate", **{f"gates[{path!r}]": gate})
    if gates is not None or gate_names(network):
        given = gates or {}
        together = {id(gate): [path for path in given if given[path] is gate] for gate in given.values()}
        gated = _with_gates(network, [(tuple(paths), given[paths[0]]) for paths in together.values()])
        halves = {site: (torch.arange(gate.size) < (gate.size + 1) // 2) for site, gate in gate_names(gated).items()}
        for first in (True, False):
            closed = {site: x.float() if first else x.float().flip(0) for site, x in halves.items()}
            why = refusal(gated, closed, recording.example)
            if why is not None:
                raise ValueError(f"Expected gates whose units can be taken out of the network, but: {why}")
        if gate_names(network) or suffices(gated, 1.0):
            return GatedNetwork(gated)
        other = put_gates(network, recording, None, suffices).network
        return GatedNetwork(gated, better=tuple(path for path, _ in hooks_of(other)) if suffices(other, 1.0) else ())
    suggested = suggest_gates(network, recording)
    heads: Sites = [((path,), number) for path, number in suggested.heads.items() if number > 1]
    points, inputs = heads + _alone(suggested, are_inputs=False), _alone(suggested, are_inputs=True)
    skipped = _why_not(suggested, inputs)
    found = _with_gates(network, points) if points else None
    parts: Sites = [((x.path,), x.gate) for x in suggested.locations if x.is_composite and not x.coupled]
    for fraction, more in ((_FRACTION, [*_streams(network, recording.example, suggested), *inputs]), (1.0, parts)):
        if more and (found is None or not suffices(found, fraction)):
            points = [*points, *more]
            found = _with_gates(network, points)
    skipped = {path: why for path, why in skipped.items() if path not in _paths(points) or path in suggested.in_the_way}
    if found is None:
        raise ValueError(
            "Expected a network with an insertion point behind which a closed gate makes it smaller, but found none; "
            f"write L0Gates into it, or give gates by module path. {_reasons(skipped)}"
        )
    return GatedNetwork(found, skipped, suggested.in_the_way)


def _why_not(suggested: Suggestions, inputs: Sites) -> dict[str, str]:
    """By module path, why there is no gate unless the budget asks for it."""
    why = dict(suggested.refused)
    for location in suggested.locations:
        if location.coupled:
            why[location.path] = f"its units leave only together with those behind {', '.join(location.coupled[:3])}"
        elif location.is_composite:
            why[location.path] = "its units are parts of larger ones"
    return why | {path: "its units are the network's inputs" for paths, _ in inputs for path in paths}


def _reasons(skipped: Mapping[str, str]) -> str:
    named = [f"{path}: {why}" for path, why in skipped.items()]
    others = [f"{len(named) - _NAMED} others, of which suggest_gates tells"] if len(named) > _NAMED else []
    return "; ".join(named[:_NAMED] + others)


def _paths(sites: Sites) -> set[str]:
    """The paths of all modules behind which some site has a gate."""
    return {path for paths, _ in sites for path in paths}


def _alone(suggested: Suggestions, are_inputs: bool) -> Sites:
    """The locations whose units leave alone: those of the network's inputs, or those that some layer computes."""
    alone = [x for x in suggested.locations if not x.coupled and not x.is_composite]
    return [((x.path,), x.gate) for x in alone if x.is_input is are_inputs]


def _streams(network: nn.Module, example: Example, suggested: Suggestions) -> Sites:
    """Gates for coupled locations: those that share one, or, if that takes less out, one for each."""
    left = {x.path: x for x in suggested.locations if x.coupled}
    found: Sites = []
    while left:
        first = next(iter(left))
        group = [left.pop(path) for path in (first, *left[first].coupled) if path in left]
        inner = [x for x in group if not any(y.path.startswith(f"{x.path}.") for y in group)]
        gates = dict.fromkeys(x.gate for x in inner)
        together: Sites = [(tuple(x.path for x in inner if x.gate is gate), gate) for gate in gates]
        apart: Sites = [((x.path,), x.gate) for x in inner]
        least, otherwise = (_least(_with_gates(network, x), example) for x in (together, apart))
        found += together if least <= _AS_SMALL * otherwise else apart
    return found


def _least(gated: nn.Module, example: Example) -> float:
    """The multiply-adds of a network with one open gate per site."""
    counts = NetworkCost(gated, example)
    return float(counts.macs({site: (torch.arange(size) < 1).float() for site, size in counts.sizes.items()}))


def _with_gates(network: nn.Module, sites: Sites) -> nn.Module:
    """A copy with gates of its own, of which each process draws its own; one behind several modules is one gate."""
    gates: dict[str, GateLayer] = {}
    heads = {paths[0]: number for paths, number in sites if isinstance(number, int)}
    for paths, gate in sites:
        if not isinstance(gate, int):
            gates.update(dict.fromkeys(paths, copy.deepcopy(gate)))  # not the one parameter of a stream
    gated = insert_gates(gate_heads(network, heads), gates)
    for layer in gate_names(gated).values():
        assert isinstance(layer, L0Gate)
        layer.sync_draws = False
    return gated.to(next((p.device for p in network.parameters()), "cpu"))
