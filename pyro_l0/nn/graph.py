"""Reads a network once: what produces and what consumes the units of every gate.

Today it knows dense layers and what stands between them; any other module that holds weights is refused by name,
because a wrong count is worse than none.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from pyro_l0.nn.gate import Gate, gate_names

__all__ = ["GateGraph", "LinearNode", "read_network"]

# Elementwise modules and functions: unit i of the output depends on unit i of the input alone, and 0 maps to 0 or
# to a constant that the layer's bias absorbs.
_ELEMENTWISE_MODULES = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Dropout,
    nn.Identity,
    nn.BatchNorm1d,
)
_ELEMENTWISE_FUNCTIONS = frozenset(
    {
        torch.relu,
        torch.tanh,
        torch.sigmoid,
        nn.functional.relu,
        nn.functional.leaky_relu,
        nn.functional.elu,
        nn.functional.gelu,
        nn.functional.silu,
        nn.functional.softplus,
        nn.functional.dropout,
        nn.functional.tanh,
        nn.functional.sigmoid,
    }
)
_ELEMENTWISE_METHODS = frozenset({"relu", "tanh", "sigmoid", "contiguous"})
_ADDITIONS = frozenset({operator.add, torch.add})
_FLATTEN = frozenset({torch.flatten})


@dataclass(frozen=True)
class LinearNode:
    """A dense layer between gated units.

    Attributes:
        path: module path.
        in_features: inputs.
        out_features: outputs.
        positions: how often the layer is applied per example; 1 for a plain batch of vectors.
    """

    path: str
    in_features: int
    out_features: int
    positions: int


@dataclass(frozen=True)
class GateGraph:
    """A traced network.

    Attributes:
        graph: the fx graph, with gates as leaves.
        modules: the modules of its nodes by path.
        sites: site name of each gate by path.
        layers: the dense layers by fx node name.
    """

    graph: fx.Graph
    modules: dict[str, nn.Module]
    sites: dict[str, str]
    layers: dict[str, LinearNode]

    def present(self, active: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """For each node, the probability that each of its units is not exactly zero; None stands for all ones."""
        present: dict[str, Tensor | None] = {}
        for node in self.graph.nodes:
            parents = [present[parent.name] for parent in node.all_input_nodes]
            module = self.modules.get(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, Gate):
                before, gate = parents[0], active[self.sites[str(node.target)]]
                present[node.name] = gate if before is None else gate * before
            elif isinstance(module, nn.Linear) or node.op in ("placeholder", "get_attr"):
                present[node.name] = None
            elif _is_addition(node):
                present[node.name] = _either(parents)
            else:
                present[node.name] = parents[0] if parents else None
        return present

    def needed(self, active: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """For each node, the probability that some consumer uses each of its units; None stands for all ones."""
        needed: dict[str, list[Tensor | None]] = {node.name: [] for node in self.graph.nodes}
        result: dict[str, Tensor | None] = {}
        for node in reversed(self.graph.nodes):
            uses = needed[node.name]
            here = _either(uses) if uses else None
            result[node.name] = here
            module = self.modules.get(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, Gate):
                gate = active[self.sites[str(node.target)]]
                here = gate if here is None else gate * here
            elif isinstance(module, nn.Linear):
                here = None
            for parent in node.all_input_nodes:
                needed[parent.name].append(here)
        return result


def _either(probs: list[Tensor | None]) -> Tensor | None:
    """Probability that at least one of independent events happens."""
    if any(prob is None for prob in probs):
        return None
    none = torch.ones(())
    for prob in probs:
        assert prob is not None
        none = none.to(prob) * (1 - prob)
    return 1 - none if len(probs) > 1 else probs[0]


def _is_addition(node: fx.Node) -> bool:
    return (node.op == "call_function" and node.target in _ADDITIONS) or (
        node.op == "call_method" and node.target == "add"
    )


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Gate) or super().is_leaf_module(m, module_qualified_name)


def read_network(network: nn.Module, example_input: Tensor) -> GateGraph:
    """Trace a network of dense layers and gates.

    Args:
        network: the network; it is not changed.
        example_input: one batch, for the shapes.

    Raises:
        ValueError: the network holds a layer or an operation whose units can't be followed yet.
    """
    graph = _Tracer().trace(network)
    modules = dict(network.named_modules())
    # Shapes alone are wanted: on a copy, whose gates pass their input on instead of asking Pyro for a sample.
    gates: dict[int, Any] = {id(module): nn.Identity() for module in modules.values() if isinstance(module, Gate)}
    shadow = fx.GraphModule(copy.deepcopy(network, gates).eval(), graph)
    with torch.no_grad():
        ShapeProp(shadow).propagate(example_input)
    layers = {}
    for node in graph.nodes:
        _check(node, modules)
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Linear):
            shape = node.meta["tensor_meta"].shape
            positions = int(torch.Size(shape[1:-1]).numel())
            layers[node.name] = LinearNode(str(node.target), module.in_features, module.out_features, positions)
    paths = {id(gate): name for name, gate in gate_names(network).items()}
    sites = {path: paths[id(module)] for path, module in modules.items() if isinstance(module, Gate)}
    network_graph = GateGraph(graph, modules, sites, layers)
    ones = {paths[id(module)]: torch.ones(module.size) for module in modules.values() if isinstance(module, Gate)}
    present = network_graph.present(ones)
    for name, layer in layers.items():
        units = present[_input(graph, name)]
        if units is not None and len(units) != layer.in_features:
            raise ValueError(
                f"Expected one gate per input of layer {layer.path!r}, which has {layer.in_features}, "
                f"but got {len(units)}."
            )
    return network_graph


def _input(graph: fx.Graph, name: str) -> str:
    return str(next(node.all_input_nodes[0].name for node in graph.nodes if node.name == name))


def _check(node: fx.Node, modules: dict[str, nn.Module]) -> None:
    if node.op in ("placeholder", "output", "get_attr"):
        return
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, (nn.Linear, Gate, nn.Flatten, *_ELEMENTWISE_MODULES)):
            return
        what = f"module {node.target!r} ({type(module).__name__})"
    elif node.op == "call_method":
        if node.target in _ELEMENTWISE_METHODS or node.target in ("flatten", "add"):
            return
        what = f"method {node.target!r}"
    else:
        if node.target in _ELEMENTWISE_FUNCTIONS | _ADDITIONS | _FLATTEN:
            return
        what = f"function {getattr(node.target, '__name__', node.target)!r}"
    raise ValueError(f"Expected dense layers, gates and elementwise operations, but got {what}.")
