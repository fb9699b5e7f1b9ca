"""Decides which units of a network stay; changes nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from pyro_l0.nn.fixed import check_gates
from pyro_l0.nn.graph import GateGraph
from pyro_l0.nn.kinds import LayerModule
from pyro_l0.nn.pieces import Constant
from pyro_l0.nn.reading import read_network
from pyro_l0.nn.tracing import operation

__all__ = ["Analysis", "Plan", "along", "analyse", "is_uniform", "plan", "plan_graph"]

Offset = Literal["none", "vector", "map"]
_FORMAT = 1
_AVERAGES = (F.avg_pool1d, F.avg_pool2d)


@dataclass(frozen=True)
class Plan:
    """What of a network stays, as numbers and names alone.

    Attributes:
        input_shape: shape of the example that the network was read with, batch included.
        gates: value of every gate by site.
        kept: by node of the traced network, the units that are still computed, in order.
        offsets: by node of a layer, how it makes up for inputs that are constant: ``"none"``, a bias ``"vector"``, or
            a ``"map"`` where padding makes it depend on the place.
        maps: the nodes whose constant units differ from place to place.
        shifts: the sums in which a branch is left as a constant.
    """

    input_shape: tuple[int, ...]
    gates: dict[str, tuple[float, ...]]
    kept: dict[str, tuple[int, ...]]
    offsets: dict[str, Offset]
    maps: tuple[str, ...]
    shifts: tuple[str, ...]

    def to_json(self) -> str:
        """This plan as JSON; floats keep every digit."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from :meth:`to_json`.

        Raises:
            ValueError: the text is no plan.
        """
        try:
            values = json.loads(text)
            if values.pop("format") != _FORMAT:
                raise ValueError("another format")
            return cls(
                tuple(values.pop("input_shape")),
                {name: tuple(gate) for name, gate in values.pop("gates").items()},
                {name: tuple(units) for name, units in values.pop("kept").items()},
                values.pop("offsets"),
                tuple(values.pop("maps")),
                tuple(values.pop("shifts")),
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"Expected the JSON of a compaction plan, but got {text[:60]!r} ({error}).") from error


@dataclass(frozen=True)
class Analysis:
    """What the gates make of every tensor of a network.

    Attributes:
        varies: by node, which units depend on the input.
        constants: by node, one example's tensor, shape ``(1, ...)``, right at the units that do not; others are 0.
        offsets: as in :class:`Plan`.
        sized: whether constants are what they are for inputs of the example's size alone.
    """

    varies: dict[str, Tensor]
    constants: dict[str, Tensor]
    offsets: dict[str, Offset]
    sized: bool


def plan(network: nn.Module, gates: Mapping[str, Tensor], example_input: Tensor, keep_gates: bool = False) -> Plan:
    """Find the units that neither vary with the input nor reach the output.

    A unit leaves if its gate is 0, if everything that reads it is gone, or if everything that it reads is gone. What
    a unit that leaves still hands on (a bias behind its gate, BatchNorm's shift, with padding or without) is kept as
    a constant, exactly.

    Args:
        network: a network with gates; it is not changed.
        gates: values in [0, 1] by site, each of shape ``(size,)``, such as ``guide.test_gates()``.
        example_input: one batch, for the shapes.
        keep_gates: whether the gates that are not 0 stay in the network, for :func:`rewrite` with the same option.
            Then what such a gate makes of a constant is no constant.

    Raises:
        ValueError: a gate has no value or a wrong one, or the network holds an operation that can't be followed.

    Example:
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), Gate(3), nn.Linear(3, 1))
        >>> plan(net, {"2": torch.tensor([1.0, 0.0, 0.5])}, torch.ones(1, 2)).kept["_0"]
        (0, 2)
    """
    graph = read_network(network, example_input)
    check_gates(network, gates)
    return plan_graph(graph, gates, example_input.shape, keep_gates)


def plan_graph(graph: GateGraph, gates: Mapping[str, Tensor], input_shape: torch.Size, keep_gates: bool) -> Plan:
    """:func:`plan` for a network that was read already, with gates that were checked."""
    found = analyse(graph, gates, keep_gates)
    kept = {name: needed & found.varies[name] for name, needed in _needed(graph, gates, found).items()}
    if keep_gates:  # a gate that acts at several places has one size
        for site in set(graph.sites.values()):
            places = [name for name, its_site in graph.gates.items() if its_site == site]
            anywhere = reduce(torch.logical_or, [kept[name] for name in places])
            kept.update(dict.fromkeys(places, anywhere))
    shifts = [
        name
        for name, step in graph.steps.items()
        if step.kind == "add"
        and any(
            not kept[p].any() and bool(found.constants[p].movedim(step.dim, 0)[kept[name]].any()) for p in step.parents
        )
    ]
    return Plan(
        tuple(input_shape),
        {site: tuple(value.double().tolist()) for site, value in gates.items()},
        {name: tuple(units.nonzero().flatten().tolist()) for name, units in kept.items()},
        found.offsets,
        tuple(name for name, value in found.constants.items() if not is_uniform(value, graph.steps[name].dim)),
        tuple(shifts),
    )


def _needed(graph: GateGraph, gates: Mapping[str, Tensor], found: Analysis) -> dict[str, Tensor]:
    """By node, the units that the output depends on."""
    needed: dict[str, Tensor] = {
        name: torch.zeros(step.size, dtype=torch.bool) for name, step in graph.steps.items() if step.kind != "shape"
    }
    for name, step in reversed(graph.steps.items()):
        if step.kind == "shape":
            continue
        here = torch.ones_like(needed[name]) if step.kind == "output" else needed[name]
        needed[name] = here
        if step.kind == "gate":
            here = here & (gates[graph.gates[name]] != 0).cpu()
        elif step.layer is not None:
            here = (here & found.varies[name]).any().expand(step.layer.in_units)
        elif step.kind in ("reshape", "expand"):
            read = torch.zeros(graph.steps[step.parents[0]].size, dtype=torch.bool)
            read[slice(None) if step.source is None else step.source[here & (step.source >= 0)]] = here.any()
            here = read
        for parent in step.parents:
            needed[parent] = needed[parent] | here
    return needed


@torch.no_grad()
def analyse(graph: GateGraph, gates: Mapping[str, Tensor], keep_gates: bool = False) -> Analysis:
    """Follow constants through a network whose gates are fixed.

    Args:
        graph: the network.
        gates: values by site.
        keep_gates: whether gates that are not 0 stay random, so that what they make of a constant varies.
    """
    varies, constants = dict[str, Tensor](), dict[str, Tensor]()
    offsets: dict[str, Offset] = {}
    sized = False
    like = next((p for module in graph.modules.values() for p in module.parameters()), torch.zeros(()))
    for node in graph.graph.nodes:
        name, step = node.name, graph.steps[node.name]
        if step.kind == "shape":
            continue
        if step.kind == "input":
            varies[name] = torch.ones(step.size, dtype=torch.bool)
            constants[name] = torch.zeros((1, *node.meta["shape"][1:]), dtype=like.dtype)
            continue
        if step.kind == "constant":
            varies[name] = torch.zeros(step.size, dtype=torch.bool)
            constants[name] = cast(Constant, graph.modules[str(node.target)]).value.cpu()
            continue
        varying, value = varies[step.parents[0]], constants[step.parents[0]]
        if step.kind in ("layer", "unitwise") and bool(value.any()):
            sized = sized or _reads_the_size(node, graph.modules)
        if step.kind == "gate":
            gate = gates[graph.gates[name]].to(value)
            if keep_gates:
                varying = varying | value.movedim(step.dim, 0).flatten(1).ne(0).any(1)
            varying, value = varying & (gate != 0), value * along(gate, value.dim(), step.dim)
        elif step.kind == "layer":
            offsets[name], value = _layer_on_constants(graph, name, value)
            varying = varying.any().expand(step.size)
        elif step.kind == "add":
            varying, value = varying | varies[step.parents[1]], value + constants[step.parents[1]]
        elif step.kind == "unitwise":
            value = _on_constants(node, graph.modules, value)
        elif step.kind in ("reshape", "expand"):
            varying, value = _renamed(node, graph, varying, value)
        varies[name] = varying
        constants[name] = value.masked_fill(along(varying, value.dim(), step.dim), 0.0)
        sized = sized or not is_uniform(constants[name], step.dim)
    return Analysis(varies, constants, offsets, sized)


def _renamed(node: fx.Node, graph: GateGraph, varying: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Which units of a reshaped or expanded tensor vary, and the constants among them."""
    step, shape = graph.steps[node.name], (1, *node.meta["shape"][1:])
    if step.source is None:
        return varying.any().expand(step.size), value.reshape(shape)
    if step.kind == "expand":
        varying = varying[step.source.clamp(min=0)] & (step.source >= 0)
        return varying, cast(Tensor, copy.deepcopy(graph.modules[str(node.target)]).cpu()(value))
    if value.numel() == torch.Size(shape).numel():
        return varying[step.source], value.reshape(shape)
    return varying[step.source], value.index_select(step.dim, step.source)  # units were selected


def along(value: Tensor, rank: int, dim: int) -> Tensor:
    """A vector as a tensor of a given rank, along a dimension."""
    view = [1] * rank
    view[dim] = -1
    return value.view(view)


def is_uniform(value: Tensor, dim: int) -> bool:
    """Whether every unit of a constant has one value at every place."""
    places = value.movedim(dim, 0).flatten(1)
    return bool((places == places[:, :1]).all())


def _layer_on_constants(graph: GateGraph, name: str, constants: Tensor) -> tuple[Offset, Tensor]:
    """How a layer takes in constant inputs, and what it makes of them alone."""
    step = graph.steps[name]
    assert step.layer is not None
    module = copy.deepcopy(graph.module(step.layer)).cpu().eval()
    value: Tensor = module(constants)
    parent = graph.steps[step.parents[0]]
    if not bool(constants.any()):
        return ("none" if module.bias is None else "vector"), value
    return ("map" if _pads_zeros(module) or not is_uniform(constants, parent.dim) else "vector"), value


def _pads_zeros(module: LayerModule) -> bool:
    """Whether a layer takes zeros for what is beyond the border."""
    if isinstance(module, nn.Linear) or module.padding_mode != "zeros":
        return False
    if isinstance(module.padding, str):
        return module.padding == "same" and any(size > 1 for size in module.kernel_size)
    return _any(module.padding)


def _reads_the_size(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether an operation makes of a constant what depends on the size of its input: by padding, or as an argument."""
    if node.op != "call_module":
        if node.target in _AVERAGES:
            return _any(node.kwargs.get("padding", (*node.args, 0, 0, 0, 0)[3]))
        return "pool" not in operation(node, modules) and any(arg.meta["shape"] is None for arg in node.all_input_nodes)
    module = modules[str(node.target)]
    if isinstance(module, (nn.AvgPool1d, nn.AvgPool2d)):
        return _any(module.padding)
    return isinstance(module, LayerModule) and _pads_zeros(module)


def _any(padding: object) -> bool:
    return any(padding) if isinstance(padding, tuple) else bool(padding)


def _on_constants(node: fx.Node, modules: Mapping[str, nn.Module], x: Tensor) -> Tensor:
    """A unitwise operation's value on the constant units; the others' is meaningless."""
    if node.op == "call_module":
        return cast(Tensor, copy.deepcopy(modules[str(node.target)]).cpu().eval()(x))

    def value(arg: fx.Node) -> Argument:
        return cast(Argument, x if arg.meta["value"] is None else arg.meta["value"])

    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    if node.op == "call_method":
        return cast(Tensor, getattr(x, str(node.target))(*args[1:], **kwargs))
    assert callable(node.target)
    return cast(Tensor, node.target(*args, **kwargs))
