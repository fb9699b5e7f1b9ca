"""Reads a network once, and refuses by name what can't be followed."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pyro_l0.nn.gate import Gate, gate_names
from pyro_l0.nn.graph import GateGraph, Layer, Step, units_held
from pyro_l0.nn.kinds import Convolution, Kind, LayerModule, kind_of, shape_of, tensors
from pyro_l0.nn.pieces import Expand, Select
from pyro_l0.nn.tracing import operation, place, trace

__all__ = ["read_called", "read_network"]


def read_network(network: nn.Module, example_input: Tensor) -> GateGraph:
    """Trace a network of dense layers, convolutions and gates.

    Args:
        network: the network; it is not changed. It is read as it is in evaluation mode.
        example_input: one batch, for the shapes.

    Raises:
        ValueError: the network holds a layer or an operation whose units can't be followed, or gates that do not sit
            on the units of their tensor, or its code can't be read off without data.
        TypeError: ``network`` is no module or ``example_input`` no tensor.
    """
    if isinstance(network, nn.Module):
        for where, module in network.named_modules():
            if isinstance(module, Gate) and "parametrizations" in where.split("."):
                raise _misplaced(module.site_name or where, where, "computes weights, which are not counted")
    graph, left_out = trace(network, example_input)
    modules = dict(network.named_modules(remove_duplicate=False))
    kinds = {node.name: kind_of(node, modules) for node in graph.nodes}
    _check_single_use(graph, modules)
    _check_in_place(graph, modules)
    dims = _unit_dims(graph, modules, kinds)
    paths = {id(gate): name for name, gate in gate_names(network).items()}
    sites = {path: paths[id(module)] for path, module in modules.items() if isinstance(module, Gate)}
    steps: dict[str, Step] = {}
    for node in graph.nodes:
        steps[node.name] = _step(node, kinds, modules, dims, steps)
    return GateGraph(graph, modules, sites, steps, left_out)


def read_called(network: nn.Module, example_input: Tensor) -> GateGraph:
    """:func:`read_network`, where every gate is called on units."""
    graph = read_network(network, example_input)
    for site, gate in gate_names(network).items():
        if site not in graph.gates.values():
            path = next(name for name, module in network.named_modules() if module is gate)
            raise _misplaced(site, path, "is never called")
    return graph


def _misplaced(site: str, path: str, why: str) -> ValueError:
    """The refusal of a gate, with its module's path, that acts on no units but does what ``why`` says."""
    return ValueError(
        f"Expected gates that are called on the units of a tensor, but gate {site!r} (module {path!r}) {why}; "
        "put it behind the layer whose units it gates, or take it out."
    )


def _check_single_use(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    seen: set[int] = set()
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if module is None or isinstance(module, Gate) or not (norm or any(True for _ in module.parameters())):
            continue
        if id(module) in seen:
            raise ValueError(
                f"Expected every layer to be called once, but {node.target!r} is called again; make it two layers, or "
                "leave what they belong to out of the network."
            )
        seen.add(id(module))


def _check_in_place(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Refuse an operation in place whose argument is used again: what is put in between may copy it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        positional = node.target in (F.relu, F.elu, F.selu, F.leaky_relu, F.silu, F.mish, F.hardswish, F.relu6)
        if not (
            getattr(module, "inplace", False)
            or node.kwargs.get("inplace", False)
            or (positional and any(arg is True for arg in node.args))
            or node.target is operator.iadd
        ):
            continue
        changed = tensors(node)[0]
        if any(order[user] > order[node] for user in changed.users):
            raise ValueError(
                f"Expected {node.name!r} {place(node)} not to change {changed.name!r} in place, which is used again; "
                "take the operation that does not work in place."
            )


def _unit_dims(graph: fx.Graph, modules: Mapping[str, nn.Module], kinds: Mapping[str, Kind]) -> dict[str, int]:
    """The dimension that holds the units of each node's output, from the layers and gates around it."""
    dims: dict[str, int] = {}
    links: list[tuple[str, str]] = []

    def fix(node: fx.Node, dim: int, why: object) -> None:
        shape = shape_of(node)
        assert shape is not None
        dim = dim + len(shape) if dim < 0 else dim
        if dims.setdefault(node.name, dim) != dim:
            raise ValueError(
                f"Expected {why!r} to act on dimension {dims[node.name]}, which holds the units of a tensor of shape "
                f"{tuple(shape)}, but got {dim} {place(node)}."
            )

    for node in graph.nodes:
        kind = kinds[node.name]
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        inputs = tensors(node)
        dim: int | None = None
        if isinstance(module, nn.Linear):
            dim = -1
        elif (
            isinstance(module, Convolution | nn.modules.batchnorm._BatchNorm)
            or "pool" in operation(node, modules).lower()
        ):
            dim = 1
        elif isinstance(module, (Gate, Select, Expand)):
            dim = module.dim
        if dim is not None:
            fix(inputs[0], dim, node.target)
            fix(node, dim, node.target)
        if kind in ("unitwise", "add", "output"):
            links += [(node.name, parent.name) for parent in inputs]
    changed = True
    while changed:
        changed = False
        for one, other in links:
            for a, b in ((one, other), (other, one)):
                if a in dims and b not in dims:
                    dims[b] = dims[a]
                    changed = True
    return dims


def _step(
    node: fx.Node,
    kinds: Mapping[str, Kind],
    modules: Mapping[str, nn.Module],
    dims: Mapping[str, int],
    steps: Mapping[str, Step],
) -> Step:
    kind = kinds[node.name]
    if kind == "shape":
        return Step(kind)
    inputs = tensors(node)
    parents = {parent.name: steps[parent.name] for parent in inputs}
    shape = shape_of(inputs[0] if kind == "output" else node)
    assert shape is not None
    dim = dims.get(node.name, 1)
    _check_dims(node, kind, parents, shape, dim)
    step = Step(kind, () if kind == "constant" else tuple(parents), dim, shape[dim])
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    if isinstance(module, LayerModule):
        return replace(step, layer=_layer(str(node.target), module, shape))
    if isinstance(module, Select):
        return replace(step, source=module.index.cpu())
    if isinstance(module, Expand):
        source = torch.full((step.size,), -1)
        source[module.index.cpu()] = torch.arange(len(module.index))
        return replace(step, source=source)
    if kind == "reshape":
        return replace(step, source=_source(node, shape, dim, steps))
    if isinstance(module, Gate) and module.size != step.size:
        raise ValueError(
            f"Expected one gate per unit of {step.parents[0]!r}, which has {step.size}, but {node.target!r} has "
            f"{module.size}."
        )
    if kind in ("unitwise", "add") and any(parent.size != step.size for parent in parents.values()):
        raise ValueError(
            f"Expected {node.name!r} {place(node)} to keep units apart, but it takes {', '.join(map(repr, parents))} "
            f"with {' and '.join(str(parent.size) for parent in parents.values())} units to {step.size}."
        )
    return step


def _layer(path: str, module: LayerModule, shape: torch.Size) -> Layer:
    if isinstance(module, nn.Linear):
        return Layer(path, module.in_features, module.out_features, 1, math.prod(shape[1:-1]))
    taps = math.prod(module.kernel_size)
    return Layer(path, module.in_channels, module.out_channels, taps, math.prod(shape[2:]))


def _check_dims(node: fx.Node, kind: Kind, parents: Mapping[str, Step], shape: torch.Size, dim: int) -> None:
    """Refuse units that stand elsewhere than those that they are made of, or nowhere."""
    if node.op != "call_module" and node.target in (torch.mean, "mean"):
        _check_mean(node, next(iter(parents.values())))
    for parent in parents.values():
        if kind in ("unitwise", "add") and parent.size and parent.dim != dim:
            raise ValueError(
                f"Expected units in dimension {parent.dim} throughout, but {node.name!r} {place(node)} has "
                f"them in {dim}; let layers and gates around it act on one dimension."
            )
    if len(shape) <= dim:
        raise ValueError(
            f"Expected a batch of units at {node.name!r} {place(node)}, with the batch in dimension 0 and the units in "
            f"{dim}, but got shape {tuple(shape)}."
        )


def _check_mean(node: fx.Node, parent: Step) -> None:
    """Refuse a mean that mixes units, or after which they stand in another dimension."""
    before, after = shape_of(tensors(node)[0]), shape_of(node)
    assert before is not None
    assert after is not None
    given = cast(int | list[int] | None, node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None))
    listed = [given] if isinstance(given, int) else range(len(before)) if given is None else given
    over = [dim % len(before) for dim in listed]
    message = f"Expected {operation(node, {})!r} {place(node)} to keep units apart and where they are"
    for dim, what in ((0, "the batch"), (parent.dim, f"its {parent.size} units")):
        if dim in over:
            raise ValueError(
                f"{message}, but it averages over dimension {dim} of a tensor of shape {tuple(before)}, which holds "
                f"{what}; average over other dimensions, or leave this part out of the network."
            )
    if len(after) < len(before) and min(over) < parent.dim:
        raise ValueError(
            f"{message}, but it averages over dimension {min(over)} of a tensor of shape {tuple(before)}, in front of "
            f"the {parent.size} units in dimension {parent.dim}; put the units in dimension 1, as convolutions have "
            "them, or leave this part out of the network."
        )


def _source(node: fx.Node, shape: torch.Size, dim: int, steps: Mapping[str, Step]) -> Tensor | None:
    """The unit of the parent that each unit of a reshaped tensor holds, None if some unit holds several."""
    parent = tensors(node)[0]
    before = shape_of(parent)
    assert before is not None
    if before[0] != shape[0]:
        raise ValueError(
            f"Expected reshapes to keep the batch in front, but {node.name!r} takes {tuple(before)} to {tuple(shape)} "
            f"{place(node)}; write x.flatten(1), or x.shape[0] in the place of -1."
        )
    ids = units_held(before, steps[parent.name], shape, dim)
    return ids[:, 0].clone() if bool((ids == ids[:, :1]).all()) else None
