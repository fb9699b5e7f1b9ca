"""Which layers read the units of a gate, and which write them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.graph import GateGraph, Layer
from pyro_l0.nn.kinds import Kind
from pyro_l0.nn.reading import misplaced, read_network, units_held

__all__ = ["read_called", "readers", "weight_id", "writers"]


def read_called(network: nn.Module, example_input: Tensor) -> GateGraph:
    """:func:`read_network`, where every gate is called on units."""
    graph = read_network(network, example_input)
    called = {graph.site(name) for name, step in graph.steps.items() if step.kind == "gate"}
    for path, gate in gate_names(network).items():
        if path not in called:
            where = next(name for name, module in network.named_modules() if module is gate)
            raise misplaced(path, where, "is never called")
    return graph


def weight_id(graph: GateGraph, layer: Layer) -> int:
    """The same number for layers that share their weights."""
    module = graph.module(layer)
    weight = module._parameters.get("weight")  # one that a parametrisation computes is another at each access
    return id(module if weight is None else weight)


def readers(graph: GateGraph) -> Iterator[tuple[str, Layer, Tensor, Tensor]]:
    """Each gate site with each layer that reads its units: the layer's inputs, and the unit that each stems from.

    An input that holds several units, as a map that features were made into, is there several times; one that is
    constant is not. Once, where a gate acts at several places in front of a layer or of layers with the same weights.
    """
    shapes = {node.name: node.meta.get("shape") for node in graph.graph.nodes}
    found: set[tuple[object, ...]] = set()
    for name, layer in graph.layers().items():
        inputs = torch.arange(layer.in_units)
        frontier = [(parent, inputs, inputs) for parent in graph.steps[name].parents]
        seen: set[str] = set()
        while frontier:
            parent, inputs, units = frontier.pop()
            step = graph.steps[parent]
            if parent in seen:
                continue
            seen.add(parent)
            if step.kind == "gate":
                key = (graph.site(parent), weight_id(graph, layer), tuple(inputs.tolist()), tuple(units.tolist()))
                if key not in found:
                    found.add(key)
                    yield graph.site(parent), layer, inputs, units
            if step.kind in ("reshape", "expand"):
                held = step.source
                if held is None:
                    (before,) = step.parents
                    example, result = (torch.Size((1, *shapes[node][1:])) for node in (before, parent))
                    held = units_held(example, graph.steps[before], result, step.dim)
                inputs, units = _stems(inputs, held[units])
            elif step.kind not in ("gate", "unitwise", "add"):
                continue
            frontier += [(before, inputs, units) for before in step.parents]


def _stems(inputs: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of inputs and the units that they hold, each once; a negative unit is none."""
    if held.dim() > 1:
        pairs = torch.stack([inputs[:, None].expand_as(held), held]).flatten(1).unique(dim=1)
        inputs, held = pairs[0], pairs[1]
    return inputs[held >= 0], held[held >= 0]


def writers(graph: GateGraph) -> Iterator[tuple[str, Layer]]:
    """Each gate site with each layer that writes its units, once."""
    found: set[tuple[str, int]] = set()
    for name, step in graph.steps.items():
        if step.kind == "gate":
            for parent in _upstream(graph, name, through={"gate", "unitwise", "add"}):
                layer = graph.steps[parent].layer
                if layer is not None and (key := (graph.site(name), weight_id(graph, layer))) not in found:
                    found.add(key)
                    yield graph.site(name), layer


def _upstream(graph: GateGraph, name: str, through: set[Kind]) -> list[str]:
    """The nodes that a node's input comes from, up to and with the first that are not of the given kinds."""
    found: dict[str, None] = {}
    frontier = list(graph.steps[name].parents)
    while frontier:
        parent = frontier.pop()
        if parent not in found:
            found[parent] = None
            if graph.steps[parent].kind in through:
                frontier.extend(graph.steps[parent].parents)
    return list(found)
