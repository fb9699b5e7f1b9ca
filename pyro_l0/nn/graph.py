"""Reads a network once: what produces and what consumes the units of every gate.

A *unit* is an entry of one dimension of a tensor: a feature or a feature map. Dense layers and convolutions read the
units of one tensor and write those of another; everything else keeps units apart (elementwise operations, pooling,
normalisation by running statistics), renames them (flattening) or adds them up (residual sums). What fits none of
these is refused by name, because a wrong count is worse than none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import Gate, gate_names
from pyro_l0.nn.pieces import Constant, Expand, Select, Shift, Sized
from pyro_l0.nn.tracing import operation, place, trace

__all__ = [
    "GateGraph",
    "Kind",
    "Layer",
    "PerDevice",
    "Step",
    "Units",
    "dims_read",
    "either",
    "is_homogeneous",
    "misplaced",
    "operation",
    "read_network",
    "units_held",
]

Kind = Literal["input", "layer", "gate", "unitwise", "reshape", "expand", "constant", "add", "output", "shape"]

_Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_REMEDY = (
    " Make a network of what is before or behind it, and read that one; the model calls both and what is between them."
)
# f(s x) = s f(x) for s > 0, so that a gate between 0 and 1 may wait for the next layer's weights.
_HOMOGENEOUS_MODULES = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.Dropout,
    nn.Dropout2d,
    nn.Identity,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    Sized,
)
_UNITWISE_MODULES = (
    *_HOMOGENEOUS_MODULES,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.ReLU6,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    Shift,
)
_HOMOGENEOUS_FUNCTIONS = frozenset(
    {
        torch.relu,
        F.relu,
        F.leaky_relu,
        F.dropout,
        F.dropout2d,
        F.max_pool1d,
        F.max_pool2d,
        torch.max_pool2d,
        F.avg_pool1d,
        F.avg_pool2d,
        F.adaptive_avg_pool2d,
        F.adaptive_max_pool2d,
        torch.mean,
    }
)
_UNITWISE_FUNCTIONS = _HOMOGENEOUS_FUNCTIONS | {
    torch.tanh,
    torch.sigmoid,
    F.elu,
    F.selu,
    F.gelu,
    F.silu,
    F.mish,
    F.hardswish,
    F.relu6,
    F.softplus,
    F.tanh,
    F.sigmoid,
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    torch.add,
    torch.mul,
}
_HOMOGENEOUS_METHODS = frozenset({"relu", "contiguous", "mean"})
_UNITWISE_METHODS = _HOMOGENEOUS_METHODS | {"tanh", "sigmoid", "add", "mul"}
_ADDITIONS = frozenset({operator.add, torch.add, "add", operator.iadd})
_RESHAPES = frozenset({torch.flatten, torch.reshape, torch.squeeze, "flatten", "view", "reshape", "squeeze"})
_SHAPES = frozenset({getattr, operator.getitem, "size", operator.mul, operator.floordiv})


@dataclass(frozen=True)
class Layer:
    """A dense layer or a convolution.

    Attributes:
        path: module path.
        in_units: features or maps that it reads.
        out_units: features or maps that it writes.
        taps: weights per pair of these: 1, or the size of the kernel.
        positions: places per example where it is applied.
    """

    path: str
    in_units: int
    out_units: int
    taps: int
    positions: int


@dataclass(frozen=True)
class Step:
    """One node of the traced network.

    Attributes:
        kind: what it does to units.
        parents: names of the nodes whose units it takes.
        dim: dimension of its output that holds the units.
        size: number of units.
        layer: for layers, the layer.
        source: for ``"reshape"``, the parent's unit that each unit stems from; None where units are mixed. For
            ``"expand"`` the same, and -1 for units that are constant.
    """

    kind: Kind
    parents: tuple[str, ...] = ()
    dim: int = 1
    size: int = 0
    layer: Layer | None = None
    source: Tensor | None = None


class PerDevice:
    """A constant of the network, moved to a device once: the host waits for what it moves.

    Args:
        value: on the CPU.
    """

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._moved = {value.device: value}

    def on(self, device: torch.device) -> Tensor:
        """The same on a device."""
        if device not in self._moved:
            self._moved[device] = self._value.to(device)
        return self._moved[device]


@dataclass(frozen=True)
class Units:
    """Probability of an event for each unit of a tensor, as a product over gate sites and of what is no gate's.

    The factors are kept apart so that a gate which acts twice on the same units, as in a residual stream, counts once.

    Attributes:
        sites: the gates' probabilities by site.
        rest: the other factor; None stands for ones.
    """

    sites: Mapping[str, Tensor] = field(default_factory=dict)
    rest: Tensor | None = None

    def probs(self) -> Tensor | None:
        """The product, None for ones."""
        total = self.rest
        for prob in self.sites.values():
            total = prob if total is None else total * prob
        return total

    def gated(self, site: str, prob: Tensor) -> Units:
        """The same, and the gate of a site is open."""
        return Units({**self.sites, site: prob}, self.rest)

    def count(self, size: int) -> Tensor | float:
        """Expected number of units."""
        probs = self.probs()
        if probs is None:
            return float(size)
        return probs.sum() if probs.dim() else size * probs

    def any(self) -> Units:
        """Probability that there is one unit at all, a scalar."""
        probs = self.probs()
        if probs is None or not probs.dim():
            return Units({}, probs)
        return Units({}, 1 - _product(1 - probs))


class _Product(torch.autograd.Function):
    """Product over the last dimension; factors of 0 have their gradient without the host's counting them."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return factors.prod(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (factors,) = ctx.saved_tensors
        one = torch.ones_like(factors[..., :1])
        before = torch.cat([one, factors[..., :-1]], -1).cumprod(-1)
        behind = torch.cat([one, factors[..., 1:].flip(-1)], -1).cumprod(-1).flip(-1)
        return grad.unsqueeze(-1) * before * behind


def _product(factors: Tensor) -> Tensor:
    product: Tensor = _Product.apply(factors)  # type: ignore[no-untyped-call]
    return product


def either(parts: Iterable[Units]) -> Units:
    """At least one of several events, independent but for the gates that they share."""
    units = list(parts)
    if len(units) == 1:
        return units[0]
    if not units:
        return Units({}, torch.zeros(()))
    shared = {site: prob for site, prob in units[0].sites.items() if all(site in part.sites for part in units)}
    none: Tensor | None = None
    for part in units:
        own = Units({site: prob for site, prob in part.sites.items() if site not in shared}, part.rest).probs()
        if own is None:
            return Units(shared)
        none = 1 - own if none is None else none * (1 - own)
    assert none is not None
    return Units(shared, 1 - none)


@dataclass(frozen=True)
class GateGraph:
    """A traced network.

    Attributes:
        graph: the fx graph, with gates as leaves.
        modules: the modules of its nodes by path.
        sites: site name of each gate by path.
        steps: what each node does, by name and in order.
        left_out: what of the network's code is no operation of the graph, in words: what it does in training alone.
    """

    graph: fx.Graph
    modules: dict[str, nn.Module]
    sites: dict[str, str]
    steps: dict[str, Step]
    left_out: tuple[str, ...] = ()

    def layers(self) -> dict[str, Layer]:
        """The layers by node name."""
        return {name: step.layer for name, step in self.steps.items() if step.layer is not None}

    def site(self, name: str) -> str:
        """The site of a gate's node."""
        return self.sites[str(next(node.target for node in self.graph.nodes if node.name == name))]

    def present(self, active: Mapping[str, Tensor]) -> dict[str, Units]:
        """For each node, that each of its units varies with the input.

        Args:
            active: P(z != 0) of every gate by site.
        """
        present: dict[str, Units] = {}
        device = next((probs.device for probs in active.values()), None)
        targets = {node.name: str(node.target) for node in self.graph.nodes}
        for name, step in self.steps.items():
            parents = [present[parent] for parent in step.parents]
            if step.kind == "gate":
                site = self.sites[targets[name]]
                present[name] = parents[0].gated(site, active[site])
            elif step.kind == "layer" or (step.kind == "reshape" and step.source is None):
                present[name] = parents[0].any()
            elif step.kind == "reshape":
                probs = parents[0].probs()
                if probs is not None and probs.dim():
                    probs = probs[self._stems[name].on(probs.device)]
                present[name] = Units({}, probs)
            elif step.kind == "expand":
                probs = parents[0].probs()
                probs = torch.ones((), device=device) if probs is None else probs
                each = probs[self._stems[name].on(probs.device)] if probs.dim() else probs
                present[name] = Units({}, each * self._stemming[name].on(probs.device).to(probs.dtype))
            elif step.kind == "constant":
                present[name] = Units({}, torch.zeros(()))
            elif step.kind == "add":
                present[name] = either(parents)
            else:
                present[name] = parents[0] if parents else Units()
        return present

    def needed(self, active: Mapping[str, Tensor]) -> dict[str, Units]:
        """For each node, that the output depends on each of its units; arguments as in :meth:`present`."""
        uses: dict[str, list[Units]] = {name: [] for name in self.steps}
        needed: dict[str, Units] = {}
        targets = {node.name: str(node.target) for node in self.graph.nodes}
        for name, step in reversed(self.steps.items()):
            here = Units() if step.kind == "output" else either(uses[name])
            needed[name] = here
            if step.kind == "gate":
                site = self.sites[targets[name]]
                here = here.gated(site, active[site])
            elif step.kind == "layer" or (step.kind == "reshape" and step.source is None):
                here = here.any()
            elif step.kind == "reshape":
                probs = here.probs()
                if probs is not None and step.source is not None and probs.dim():
                    copies = self._copies[name].on(probs.device)
                    absent = torch.cat([1 - probs, probs.new_ones(1)]).index_select(0, copies.flatten())
                    here = Units({}, 1 - _product(absent.view_as(copies)))
            elif step.kind == "expand":
                probs = here.probs()
                if probs is not None and probs.dim():
                    here = Units({}, probs[self._copies[name].on(probs.device)])
            for parent_name in step.parents:
                uses[parent_name].append(here)
        return needed

    @cached_property
    def _sources(self) -> dict[str, Tensor]:
        """By node that renames or expands units, the parent's unit that each stems from, -1 for none."""
        return {
            name: step.source
            for name, step in self.steps.items()
            if step.kind in ("reshape", "expand") and step.source is not None
        }

    @cached_property
    def _stems(self) -> dict[str, PerDevice]:
        return {name: PerDevice(source.clamp(min=0)) for name, source in self._sources.items()}

    @cached_property
    def _stemming(self) -> dict[str, PerDevice]:
        return {name: PerDevice(source >= 0) for name, source in self._sources.items()}

    @cached_property
    def _copies(self) -> dict[str, PerDevice]:
        """Those that stem from each of the parent's units.

        An expansion has one of each; where units are renamed there is a row for each, filled up by the number of all.
        """
        copies = {}
        for name, source in self._sources.items():
            order = source.argsort(stable=True)
            stems = source[order]
            if self.steps[name].kind == "expand":
                copies[name] = PerDevice(order[stems >= 0])
                continue
            counts = torch.bincount(source, minlength=self.steps[self.steps[name].parents[0]].size)
            rows = stems.new_full((len(counts), int(counts.max())), len(order))
            rows[stems, torch.arange(len(order)) - (counts.cumsum(0) - counts)[stems]] = order
            copies[name] = PerDevice(rows)
        return copies


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
                raise misplaced(module.site_name or where, where, "computes weights, which are not counted")
    graph, left_out = trace(network, example_input)
    modules = dict(network.named_modules(remove_duplicate=False))
    kinds = {node.name: _kind(node, modules) for node in graph.nodes}
    _check_single_use(graph, modules)
    _check_in_place(graph, modules)
    dims = _unit_dims(graph, modules, kinds)
    paths = {id(gate): name for name, gate in gate_names(network).items()}
    sites = {path: paths[id(module)] for path, module in modules.items() if isinstance(module, Gate)}
    steps: dict[str, Step] = {}
    for node in graph.nodes:
        steps[node.name] = _step(node, kinds, modules, dims, steps)
    return GateGraph(graph, modules, sites, steps, left_out)


def misplaced(site: str, path: str, why: str) -> ValueError:
    """The refusal of a gate that acts on no units.

    Args:
        site: its name.
        path: of its module.
        why: what it does instead, as half a sentence.
    """
    return ValueError(
        f"Expected gates that are called on the units of a tensor, but gate {site!r} (module {path!r}) {why}; "
        "put it behind the layer whose units it gates, or take it out."
    )


def is_homogeneous(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a unitwise node takes s x to s times its value at x, for every s > 0."""
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _HOMOGENEOUS_MODULES)
    return node.target in (_HOMOGENEOUS_FUNCTIONS if node.op == "call_function" else _HOMOGENEOUS_METHODS)


def _shape(node: fx.Node) -> torch.Size | None:
    shape: torch.Size | None = node.meta.get("shape")
    return shape


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that are tensors, in the order of its arguments."""
    return [arg for arg in node.all_input_nodes if _shape(arg) is not None]


def _kind(node: fx.Node, modules: Mapping[str, nn.Module]) -> Kind:
    if node.op == "placeholder":
        return "input"
    if node.op == "output":
        if len(_tensors(node)) == 1 and isinstance(node.args[0], fx.Node):
            return "output"
        raise ValueError(
            f"Expected a network that returns one tensor, but got {_described(node.args[0])} {place(node)}; wrap it in "
            "a module whose forward returns the tensor that counts."
        )
    if _shape(node) is None and node.op != "call_module" and node.target in _SHAPES:
        return "shape"
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, FixedGate):
            raise ValueError(
                f"Expected a network with Gate layers, but {node.target!r} is a FixedGate: the gates of this network "
                "are fixed already. Pass the network as it was before fix_gates or compact."
            )
        if isinstance(module, Gate):
            return "gate"
        if isinstance(module, nn.Linear):
            return "layer"
        if isinstance(module, _Convolution):
            if module.groups != 1:
                raise ValueError(
                    f"Expected convolutions with groups=1, but {node.target!r} has {module.groups}.{_REMEDY}"
                )
            return "layer"
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ValueError(f"Expected running statistics in {node.target!r}, but it has none.{_REMEDY}")
        if isinstance(module, _UNITWISE_MODULES):
            return "unitwise"
        if isinstance(module, (nn.Flatten, nn.Unflatten, Select)):
            return "reshape"
        if isinstance(module, (Expand, Constant)):
            return "expand" if isinstance(module, Expand) else "constant"
        what = f"module {node.target!r} ({type(module).__name__})"
    elif node.op == "get_attr":
        made = (
            "a tensor made"
            if "_constant" in str(node.target)
            else f"parameter or buffer {node.target!r}, used directly"
        )
        what = f"{made} {place(node)}"
    else:
        inputs = _tensors(node)
        if len(inputs) == 2 and node.target in _ADDITIONS and node.kwargs.get("alpha", 1) == 1:
            return "add"
        if len(inputs) == 1 and node.target in _RESHAPES:
            return "reshape"
        if len(inputs) == 1 and node.target in (
            _UNITWISE_FUNCTIONS if node.op == "call_function" else _UNITWISE_METHODS
        ):
            if any(0 in dims_read(arg) for arg in node.all_input_nodes if _shape(arg) is None):
                raise ValueError(
                    f"Expected {node.name!r} {place(node)} not to depend on the size of the batch; let it depend on "
                    "the sizes of one example."
                )
            return "unitwise"
        of = f" of {len(inputs)} tensors" if len(inputs) > 1 else ""
        what = f"{node.op.removeprefix('call_')} {operation(node, modules)!r}{of} {place(node)}"
    raise ValueError(
        f"Expected dense layers, convolutions, gates, unitwise operations, pooling, flattening and sums, "
        f"but got {what}.{_REMEDY}"
    )


def _described(output: Any) -> str:
    """What a network returns, if that is not one tensor of its own making."""
    if isinstance(output, (tuple, list, dict)):
        return f"a {type(output).__name__.removeprefix('immutable_')} of {len(output)}"
    return "what is no tensor"


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
        changed = _tensors(node)[0]
        if any(order[user] > order[node] for user in changed.users):
            raise ValueError(
                f"Expected {node.name!r} {place(node)} not to change {changed.name!r} in place, which is used again; "
                "take the operation that does not work in place."
            )


def dims_read(node: fx.Node) -> set[int]:
    """The dimensions of a tensor on whose sizes the value of a node depends that is no tensor."""
    parents = [(arg, _shape(arg)) for arg in node.all_input_nodes]
    sizes = [shape for _, shape in parents if shape is not None]
    if sizes:  # the sizes of a tensor, or one of them
        rank = len(sizes[0])
        if node.target == "size" and len(node.args) > 1 and isinstance(node.args[1], int):
            return {node.args[1] % rank}
        return set(range(rank))
    read: set[int] = set().union(*(dims_read(arg) for arg, _ in parents))
    which = node.args[1] if node.target is operator.getitem else None
    if isinstance(which, int | slice):
        places = sorted(read)[which]
        return set(places) if isinstance(places, list) else {places}
    return read


def _unit_dims(graph: fx.Graph, modules: Mapping[str, nn.Module], kinds: Mapping[str, Kind]) -> dict[str, int]:
    """The dimension that holds the units of each node's output, from the layers and gates around it."""
    dims: dict[str, int] = {}
    links: list[tuple[str, str]] = []

    def fix(node: fx.Node, dim: int, why: object) -> None:
        shape = _shape(node)
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
        inputs = _tensors(node)
        if isinstance(module, nn.Linear):
            fix(inputs[0], -1, node.target)
            fix(node, -1, node.target)
        elif (
            isinstance(module, (*_Convolution, nn.modules.batchnorm._BatchNorm))
            or "pool" in operation(node, modules).lower()
        ):
            fix(inputs[0], 1, node.target)
            fix(node, 1, node.target)
        elif isinstance(module, (Gate, Select, Expand)):
            fix(inputs[0], module.dim, node.target)
            fix(node, module.dim, node.target)
        if kind in ("unitwise", "add", "output"):
            if kind != "output":
                links += [(node.name, parent.name) for parent in inputs]
            else:
                links.append((node.name, inputs[0].name))
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
    inputs = _tensors(node)
    parents = tuple(parent.name for parent in inputs)
    shape = _shape(inputs[0] if kind == "output" else node)
    assert shape is not None
    dim = dims.get(node.name, 1)
    if node.op != "call_module" and node.target in (torch.mean, "mean"):
        _check_mean(node, steps[parents[0]])
    for parent in inputs:
        if kind in ("unitwise", "add") and steps[parent.name].size and steps[parent.name].dim != dim:
            raise ValueError(
                f"Expected units in dimension {steps[parent.name].dim} throughout, but {node.name!r} {place(node)} has "
                f"them in {dim}; let layers and gates around it act on one dimension."
            )
    if len(shape) <= dim:
        raise ValueError(
            f"Expected a batch of units at {node.name!r} {place(node)}, with the batch in dimension 0 and the units in "
            f"{dim}, but got shape {tuple(shape)}."
        )
    size = shape[dim]
    if kind == "layer":
        module = modules[str(node.target)]
        if isinstance(module, nn.Linear):
            positions = math.prod(shape[1:-1])
            layer = Layer(str(node.target), module.in_features, module.out_features, 1, positions)
        else:
            assert isinstance(module, _Convolution)
            taps = math.prod(module.kernel_size)
            layer = Layer(str(node.target), module.in_channels, module.out_channels, taps, math.prod(shape[2:]))
        return Step(kind, parents, dim, size, layer)
    select = modules.get(str(node.target)) if node.op == "call_module" else None
    if isinstance(select, Select):
        return Step(kind, parents, dim, size, source=select.index.cpu())
    if isinstance(select, Expand):
        taken = size - select.constants.shape[select.dim]
        order = select.order.cpu()
        return Step(kind, parents, dim, size, source=torch.where(order < taken, order, -1))
    if kind == "constant":
        return Step(kind, (), dim, size)
    before = _shape(inputs[0]) if kind == "reshape" else None
    if before is not None and before[0] != shape[0]:
        raise ValueError(
            f"Expected reshapes to keep the batch in front, but {node.name!r} takes {tuple(before)} to {tuple(shape)} "
            f"{place(node)}; write x.flatten(1), or x.shape[0] in the place of -1."
        )
    if kind == "reshape":
        return Step(kind, parents, dim, size, source=_source(inputs[0], shape, dim, steps))
    if kind == "gate":
        gate = modules[str(node.target)]
        assert isinstance(gate, Gate)
        if gate.size != size:
            raise ValueError(
                f"Expected one gate per unit of {parents[0]!r}, which has {size}, but {node.target!r} has {gate.size}."
            )
    elif kind in ("unitwise", "add") and any(steps[parent].size != size for parent in parents):
        raise ValueError(
            f"Expected {node.name!r} {place(node)} to keep units apart, but it takes {', '.join(map(repr, parents))} "
            f"with {' and '.join(str(steps[parent].size) for parent in parents)} units to {size}."
        )
    return Step(kind, parents, dim, size)


def _check_mean(node: fx.Node, parent: Step) -> None:
    """Refuse a mean that mixes units, or after which they stand in another dimension."""
    before, after = _shape(_tensors(node)[0]), _shape(node)
    assert before is not None
    assert after is not None
    over = _mean_dims(node, len(before))
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


def _mean_dims(node: fx.Node, rank: int) -> list[int]:
    given = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if given is None:
        return list(range(rank))
    entries: Any = given if isinstance(given, (tuple, list)) else [given]
    return [entry % rank for entry in entries]


def units_held(before: torch.Size, parent: Step, shape: torch.Size, dim: int) -> Tensor:
    """The units of the parent that each unit of a reshaped tensor holds, one row for each.

    Args:
        before: shape of the parent's tensor.
        parent: the parent.
        shape: shape of the reshaped tensor.
        dim: dimension of its units.
    """
    view = [1] * len(before)
    view[parent.dim] = parent.size
    ids = torch.arange(parent.size).view(view).expand(before).reshape(shape)
    return ids.movedim(dim, 0).reshape(shape[dim], -1)


def _source(parent: fx.Node, shape: torch.Size, dim: int, steps: Mapping[str, Step]) -> Tensor | None:
    """The unit of the parent that each unit of a reshaped tensor holds, None if some unit holds several."""
    before = _shape(parent)
    assert before is not None
    ids = units_held(before, steps[parent.name], shape, dim)
    return ids[:, 0].clone() if bool((ids == ids[:, :1]).all()) else None
