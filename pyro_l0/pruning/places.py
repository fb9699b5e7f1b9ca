"""Where the gates go that prune a network."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from pyro_l0.compaction import CompactionError, compact
from pyro_l0.nn import Gate, gate_heads, gate_names, insert_gates, name_gates, suggest_gates
from pyro_l0.nn.engine import Example

__all__ = ["GatedNetwork", "put_gates"]

_Value = TypeVar("_Value")
# What compaction may raise of a network that holds sizes which can't be changed.
_REFUSALS = (CompactionError, ValueError, TypeError)


@dataclass(frozen=True)
class GatedNetwork:
    """A network with gates whose units can leave.

    Attributes:
        network: a copy, with gates.
        skipped: by module path, why there is no gate.
    """

    network: nn.Module
    skipped: dict[str, str] = field(default_factory=dict)


def put_gates(network: nn.Module, example: Example, gates: Mapping[str, Gate] | None) -> GatedNetwork:
    """Put gates to where closing one of them makes a network smaller, and its units can be taken out.

    A gate per head of attention, and one per unit behind modules whose units leave alone, such as activations and the
    norms of inner convolutions. A network that has gates already keeps them.

    Args:
        network: it is not changed.
        example: what it is called with.
        gates: by module path, the gates to put in, if it is not the places above.

    Raises:
        ValueError: there is no place for a gate, or units of the given gates can't be taken out.
    """
    if gates is not None or gate_names(network):
        gated = _with_gates(network, {}, gates or {})
        refusal = _refusal(gated, example)
        if refusal is not None:
            raise ValueError(f"Expected gates whose units can be taken out of the network, but: {refusal}")
        return GatedNetwork(gated)
    suggested = suggest_gates(network, example)
    heads = {**suggested.heads, **_of_torch(network)}
    skipped: dict[str, str] = {}
    for place in suggested.places:
        if place.coupled:
            skipped[place.path] = f"its units leave only together with those behind {', '.join(place.coupled[:3])}"
    places = {place.path: place.gate for place in suggested.places if not place.coupled}
    of_heads = {place.path for place in suggested.places if place.is_attention} if heads else set[str]()
    places = {path: gate for path, gate in places.items() if path not in of_heads}
    heads = {path: number for path, number in heads.items() if number > 1}
    together = None
    if heads or places:
        together, why = _tried(network, example, heads, places)
        if together is None:  # one of them is in the way
            for path in (*heads, *places):
                alone, why = _tried(network, example, _only(heads, path), _only(places, path))
                if alone is None:
                    skipped[path] = why
            heads, places = _without(heads, skipped), _without(places, skipped)
            if heads or places:
                together, why = _tried(network, example, heads, places)
    if together is None:
        reasons = "; ".join(f"{path}: {why}" for path, why in {**suggested.refused, **skipped}.items())
        raise ValueError(
            "Expected a network with a place behind which a closed gate makes it smaller, but found none; write Gate "
            f"layers into it, or give gates by module path. {reasons}"
        )
    return GatedNetwork(together, skipped)


def _of_torch(network: nn.Module) -> dict[str, int]:
    """The output projections of torch's attention, with their numbers of heads."""
    return {
        f"{path}.out_proj": module.num_heads
        for path, module in network.named_modules()
        if path and isinstance(module, nn.MultiheadAttention)
    }


def _tried(
    network: nn.Module, example: Example, heads: Mapping[str, int], places: Mapping[str, Gate]
) -> tuple[nn.Module | None, str]:
    """The network with these gates, or None and why their units can't be taken out."""
    try:
        gated = _with_gates(network, heads, places)
    except (ValueError, TypeError) as error:
        return None, str(error)
    refusal = _refusal(gated, example)
    return (gated, "") if refusal is None else (None, refusal)


def _with_gates(network: nn.Module, heads: Mapping[str, int], places: Mapping[str, Gate]) -> nn.Module:
    fresh = {path: Gate(gate.size, gate.dim, gate.prior.expand((gate.size,))) for path, gate in places.items()}
    gated = insert_gates(gate_heads(network, heads), fresh)
    name_gates(gated)
    return gated


def _refusal(gated: nn.Module, example: Example) -> str | None:
    """Why the first of every site's units, or all but these, can't be taken out; None if they can."""
    for first in (0.0, 1.0):
        closed = {}
        for site, gate in gate_names(gated).items():
            value = torch.full((gate.size,), 1 - first)
            value[: gate.size - gate.size // 2] = first
            closed[site] = value if gate.size > 1 else torch.ones(1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compact(gated, closed, example)
        except _REFUSALS as error:
            return str(error)
    return None


def _only(given: Mapping[str, _Value], path: str) -> dict[str, _Value]:
    return {path: given[path]} if path in given else {}


def _without(given: Mapping[str, _Value], paths: Iterable[str]) -> dict[str, _Value]:
    return {path: value for path, value in given.items() if path not in set(paths)}
