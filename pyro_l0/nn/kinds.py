"""What each operation does to units: its kind, or a refusal by name."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import Gate
from pyro_l0.nn.pieces import Constant, Expand, Select, Shift, Sized
from pyro_l0.nn.tracing import operation, place

__all__ = ["Convolution", "Kind", "LayerModule", "dims_read", "is_homogeneous", "kind_of", "shape_of", "tensors"]


Kind = Literal["input", "layer", "gate", "unitwise", "reshape", "expand", "constant", "add", "output", "shape"]
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
LayerModule = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_REMEDY = (
    " Make a network of what is before or behind it, and read that one; the model calls both and what is between them."
)
# Each operation that keeps units apart by its names: modules, functions, methods. First those with f(s x) = s f(x) for
# s > 0, so that a gate between 0 and 1 may wait for the next layer's weights.
_HOMOGENEOUS: frozenset[object] = frozenset().union(
    (nn.ReLU, F.relu, torch.relu, "relu"),
    (nn.LeakyReLU, F.leaky_relu),
    (nn.Dropout, F.dropout),
    (nn.Dropout2d, F.dropout2d),
    (nn.Identity, "contiguous"),
    (nn.MaxPool1d, F.max_pool1d),
    (nn.MaxPool2d, F.max_pool2d, torch.max_pool2d),
    (nn.AvgPool1d, F.avg_pool1d),
    (nn.AvgPool2d, F.avg_pool2d),
    (nn.AdaptiveAvgPool1d,),
    (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d),
    (nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d),
    (torch.mean, "mean"),
    (Sized,),
)
_UNITWISE = _HOMOGENEOUS.union(
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    (nn.ELU, F.elu),
    (nn.SELU, F.selu),
    (nn.GELU, F.gelu),
    (nn.SiLU, F.silu),
    (nn.Mish, F.mish),
    (nn.Hardswish, F.hardswish),
    (nn.ReLU6, F.relu6),
    (nn.Tanh, F.tanh, torch.tanh, "tanh"),
    (nn.Sigmoid, F.sigmoid, torch.sigmoid, "sigmoid"),
    (nn.Softplus, F.softplus),
    (operator.add, torch.add, "add", operator.sub),
    (operator.mul, torch.mul, "mul", operator.truediv),
    (Shift,),
)
_MODULES: dict[object, Kind] = {
    **dict.fromkeys(_UNITWISE, "unitwise"),
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), "layer"),
    **dict.fromkeys((nn.Flatten, nn.Unflatten, Select), "reshape"),
    Gate: "gate",
    Expand: "expand",
    Constant: "constant",
}
_ADDITIONS = frozenset({operator.add, torch.add, "add", operator.iadd})
_RESHAPES = frozenset({torch.flatten, torch.reshape, torch.squeeze, "flatten", "view", "reshape", "squeeze"})
_SHAPES = frozenset({getattr, operator.getitem, "size", operator.mul, operator.floordiv})


def is_homogeneous(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a unitwise node takes s x to s times its value at x, for every s > 0."""
    names = type(modules[str(node.target)]).__mro__ if node.op == "call_module" else (node.target,)
    return not _HOMOGENEOUS.isdisjoint(names)


def shape_of(node: fx.Node) -> torch.Size | None:
    """The shape of a node's value, None if that is no tensor."""
    shape: torch.Size | None = node.meta.get("shape")
    return shape


def tensors(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that are tensors, in the order of its arguments."""
    return [arg for arg in node.all_input_nodes if shape_of(arg) is not None]


def kind_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> Kind:
    """What a node does to units, or a refusal by name."""
    if node.op == "placeholder":
        return "input"
    if node.op == "output":
        output = node.args[0]
        if len(tensors(node)) == 1 and isinstance(output, fx.Node):
            return "output"
        got = "what is no tensor"
        if isinstance(output, (tuple, list, dict)):
            got = f"a {type(output).__name__.removeprefix('immutable_')} of {len(output)}"
        raise ValueError(
            f"Expected a network that returns one tensor, but got {got} {place(node)}; wrap it in a module whose "
            "forward returns the tensor that counts."
        )
    if node.op == "call_module":
        kind = _kind_of_module(node.target, modules[str(node.target)])
        what = f"module {node.target!r} ({operation(node, modules)})"
    elif node.op == "get_attr":
        kind = None
        used = "a tensor made", f"parameter or buffer {node.target!r}, used directly"
        what = f"{used['_constant' not in str(node.target)]} {place(node)}"
    else:
        kind, count = _kind_of_function(node), len(tensors(node))
        of = f" of {count} tensors" if count > 1 else ""
        what = f"{node.op.removeprefix('call_')} {operation(node, modules)!r}{of} {place(node)}"
    if kind is None:
        raise ValueError(
            f"Expected dense layers, convolutions, gates, unitwise operations, pooling, flattening and sums, "
            f"but got {what}.{_REMEDY}"
        )
    return kind


def _kind_of_module(path: object, module: nn.Module) -> Kind | None:
    if isinstance(module, FixedGate):
        raise ValueError(
            f"Expected a network with Gate layers, but {path!r} is a FixedGate: the gates of this network "
            "are fixed already. Pass the network as it was before fix_gates or compact."
        )
    if isinstance(module, Convolution) and module.groups != 1:
        raise ValueError(f"Expected convolutions with groups=1, but {path!r} has {module.groups}.{_REMEDY}")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
        raise ValueError(f"Expected running statistics in {path!r}, but it has none.{_REMEDY}")
    return next((_MODULES[known] for known in type(module).__mro__ if known in _MODULES), None)


def _kind_of_function(node: fx.Node) -> Kind | None:
    inputs = tensors(node)
    if shape_of(node) is None and node.target in _SHAPES:
        return "shape"
    if len(inputs) == 2 and node.target in _ADDITIONS and node.kwargs.get("alpha", 1) == 1:
        return "add"
    if len(inputs) == 1 and node.target in _RESHAPES:
        return "reshape"
    if len(inputs) != 1 or node.target not in _UNITWISE:
        return None
    if any(0 in dims_read(arg) for arg in node.all_input_nodes if shape_of(arg) is None):
        raise ValueError(
            f"Expected {node.name!r} {place(node)} not to depend on the size of the batch; let it depend on "
            "the sizes of one example."
        )
    return "unitwise"


def dims_read(node: fx.Node) -> set[int]:
    """The dimensions of a tensor on whose sizes the value of a node depends that is no tensor."""
    parents = [(arg, shape_of(arg)) for arg in node.all_input_nodes]
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
