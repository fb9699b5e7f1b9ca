"""An optimiser goes on with the parameters of a smaller network and the parts of its state that belong to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.compaction.plan import Plan
from pyro_l0.nn.graph import GateGraph

__all__ = ["Replaced", "layer_slices", "move"]


Replaced = dict[nn.Parameter, tuple[nn.Parameter | None, tuple[Tensor, ...]]]


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


def _slice(value: Any, shape: torch.Size, places: tuple[Tensor, ...]) -> Any:
    if not isinstance(value, Tensor) or value.shape != shape:
        return value
    for dim, index in enumerate(places):
        value = value.index_select(dim, index.to(value.device))
    return value.clone()
