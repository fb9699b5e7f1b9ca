"""An optimiser goes on with the parameters of a smaller network and the parts of its state that belong to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyro_l0.compaction.plan import Plan
from pyro_l0.nn.graph import GateGraph
from pyro_l0.nn.kinds import LayerModule

__all__ = ["Replaced", "add_biases", "check_state", "layer_slices", "move"]


Replaced = dict[nn.Parameter, tuple[nn.Parameter | None, tuple[Tensor, ...]]]


def check_state(optimiser: torch.optim.Optimizer) -> None:
    """Refuse an optimiser whose state can't be cut to the parameters that are left."""
    for parameter, state in optimiser.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"Expected an optimiser whose state has the shapes of the parameters, but {key!r} of "
                    f"{type(optimiser).__name__} has {tuple(value.shape)} for {tuple(parameter.shape)}."
                )


def add_biases(optimiser: torch.optim.Optimizer, graph: GateGraph, network: nn.Module) -> None:
    """Let an optimiser train the biases that layers got in place of the constants of units that left."""
    modules = dict(network.named_modules())
    for layer in graph.layers().values():
        small = modules.get(layer.path)
        if not isinstance(small, LayerModule) or graph.module(layer).bias is not None or small.bias is None:
            continue
        for group in optimiser.param_groups:
            if any(parameter is small.weight for parameter in group["params"]):
                group["params"].append(small.bias)


def layer_slices(graph: GateGraph, found: Plan, small: nn.Module) -> Replaced:
    """For each parameter of a network, the one in the smaller network and its places along each dimension."""
    new = dict(small.named_parameters())
    replaced: Replaced = {}
    for node in graph.graph.nodes:
        if node.op != "call_module":
            continue
        step, path = graph.steps[node.name], str(node.target)
        rows = torch.tensor(found.kept[node.name], dtype=torch.long)
        for name, parameter in graph.modules[path].named_parameters(recurse=False):
            places: tuple[Tensor, ...] = (rows,)
            if step.kind == "layer" and name == "weight":
                places = rows, torch.tensor(found.kept[step.parents[0]], dtype=torch.long)
            replaced[parameter] = new.get(f"{path}.{name}"), places
    return replaced


def move(optimiser: torch.optim.Optimizer, replaced: Replaced) -> None:
    """Let an optimiser go on with the new parameters and the parts of its state that belong to them."""
    for group in optimiser.param_groups:
        params: list[nn.Parameter] = []
        for old in group["params"]:
            new, places = replaced.get(old, (old, ()))
            state = optimiser.state.pop(old, None) if new is not old else None
            if new is None:
                continue
            params.append(new)
            if state is not None:
                optimiser.state[new] = {key: _slice(value, old.shape, places) for key, value in state.items()}
        group["params"] = params


def _slice(value: object, shape: torch.Size, places: tuple[Tensor, ...]) -> object:
    if not isinstance(value, Tensor) or value.shape != shape:
        return value
    for dim, index in enumerate(places):
        value = value.index_select(dim, index.to(value.device))
    return value.clone()
