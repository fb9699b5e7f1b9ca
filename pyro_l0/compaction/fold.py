"""What is removed without its values being lost: constant inputs of layers, and gates between 0 and 1."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_l0.compaction.calls import Arguments, run
from pyro_l0.compaction.layers import pads_zeros
from pyro_l0.nn.engine import Operation, Recording, Value

__all__ = [
    "Constant",
    "NotConstantError",
    "contribution",
    "gates_into_weights",
    "input_dim",
    "is_layer",
    "layer_constants",
]

Constant = Tensor
"""One example's input of a layer, shape ``(1, ...)``: constants at the units that are removed, zeros elsewhere."""

_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class NotConstantError(ValueError):
    """Inputs of a layer that are not the same for every example after all."""


def is_layer(module: nn.Module) -> bool:
    """Whether constant inputs of a module can go into its bias: a dense layer or a convolution without groups."""
    is_one = isinstance(module, nn.Linear) or (isinstance(module, nn.modules.conv._ConvNd) and module.groups == 1)
    return is_one and "weight" in module._parameters


def input_dim(layer: nn.Module) -> int:
    """The dimension of a layer's weight that reads the inputs."""
    return 0 if isinstance(layer, nn.modules.conv._ConvNd) and layer.transposed else 1


@torch.no_grad()
def layer_constants(
    reference: nn.Module, units: Mapping[str, Sequence[int]], calls: Sequence[Arguments]
) -> dict[str, Constant]:
    """By layer, the ``units`` of its input that are the same for every example, in a network with fixed gates.

    Raises NotConstantError if they differ between examples or between calls of the layer.
    """
    found: dict[str, Constant] = {}

    def note(path: str, module: nn.Module, x: Tensor) -> None:
        dim = -1 if isinstance(module, nn.Linear) else 1
        index = torch.tensor(units[path], dtype=torch.long, device=x.device)
        x = x.detach().movedim(dim, 1).index_select(1, index)
        weight = cast(Tensor, module.weight)
        zeros = x.new_zeros((1, weight.shape[input_dim(module)], *x.shape[2:]))
        whole = zeros.index_copy(1, index, x[:1]).movedim(1, dim)
        known = found.setdefault(path, whole)
        if known.shape != whole.shape or not _same(x, x[:1]) or not _same(known, whole):
            raise NotConstantError(
                f"Expected inputs of layer {path!r} behind closed gates to be the same for every example, but they "
                "differ between rows, between examples of other sizes, or between calls of the layer."
            )

    def hook(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, inputs: note(path, module, inputs[0])

    handles = [reference.get_submodule(path).register_forward_pre_hook(hook(path)) for path in units]
    try:
        for call in calls if units else ():
            run(reference.eval(), call)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal but for rounding, which may differ between rows."""
    if not one.numel():
        return True
    return bool((one - other).abs().max() <= 100 * torch.finfo(one.dtype).eps * one.abs().max())


@torch.no_grad()
def contribution(layer: nn.Module, constant: Constant) -> tuple[Tensor, bool]:
    """What a layer makes of constant inputs, without its bias, and whether that is a map.

    It has shape ``(outputs,)``, or as a map ``(1, ...)``.
    """
    if isinstance(layer, nn.Linear):
        out, dim = F.linear(constant, layer.weight), -1
    else:
        assert isinstance(layer, nn.modules.conv._ConvNd)
        dim = 1
        if layer.transposed:
            options = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
            out = cast(Any, _TRANSPOSED[layer.weight.dim() - 3])(constant, layer.weight, None, *options)
        else:
            out = cast(Any, layer)._conv_forward(constant, layer.weight, None)
    positions = constant.movedim(dim, 1).flatten(2) if constant.dim() > 2 else constant[..., None]
    if pads_zeros(layer) or not _same(positions, positions[..., :1]):
        return out, True
    return out.movedim(dim, 0).flatten(1)[:, 0], False


# ------------------------------------------------------------ gates between 0 and 1


_UNITWISE = {"relu", "relu_", "leaky_relu", "leaky_relu_", "clone", "alias", "contiguous", "_to_copy", "abs", "neg"}
_MOVING = {
    *("view", "_unsafe_view", "reshape", "flatten", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand"),
    *("select", "slice"),
}
_POOLING = {
    *(f"{kind}_pool{n}d" for kind in ("avg", "max", "adaptive_avg", "_adaptive_avg") for n in (1, 2, 3)),
    *(f"max_pool{n}d_with_indices" for n in (2, 3)),
    "mean",
}


@torch.no_grad()
def gates_into_weights(
    recording: Recording, gates: Mapping[str, Tensor], layers: Collection[str]
) -> tuple[dict[str, Tensor], set[str]]:
    """The positive gates that can go into weights behind them, as what is between is positively homogeneous.

    Returns, by name of a weight of ``layers``, the factor of each of its inputs; and the sites of these gates.
    """
    readers: dict[int, list[Operation]] = {}
    for operation in recording.operations:
        for value in operation.inputs:
            readers.setdefault(id(value), []).append(operation)
    factors: dict[str, Tensor] = {}
    folded: set[str] = set()
    for site, gate in gates.items():
        found: dict[str, Tensor] | None = {}
        for operation in recording.operations:
            if operation.name == "gate" and operation.arguments["site"] == site and found is not None:
                view = [1] * operation.output.rank
                view[operation.integer("dim")] = -1
                factor = gate.view(view).expand(operation.output.shape)
                weight = _weight_of(operation.value("input"), recording.operations)
                if weight is None:
                    found = _follow(operation.output, factor, readers, found, layers)
                elif len(weight.names) == len(readers[id(weight)]) == 1 and weight.names[0] not in found:
                    found[weight.names[0]] = factor.reshape(weight.shape)[0]
                else:
                    found = None
        if found is not None:
            folded.add(site)
            for name, factor in found.items():
                factors[name] = factor * factors[name] if name in factors else factor
    return factors, folded


def _weight_of(value: Value, operations: Sequence[Operation]) -> Value | None:
    """The recurrent layer's weight that a gate multiplies, whose inputs may be grouped by direction."""
    for operation in operations:
        if value in operation.made and operation.name == "aten::view":
            value = operation.value("self")
    return value if value.rank == 2 and any("weight_" in name for name in value.names) else None


def _follow(
    value: Value,
    factor: Tensor,
    readers: Mapping[int, list[Operation]],
    found: dict[str, Tensor],
    layers: Collection[str],
) -> dict[str, Tensor] | None:
    """Follow a factor to the weights of every layer that reads a value; None where that can't be done."""
    if value.is_output:
        return None
    for operation in readers.get(id(value), ()):
        name = operation.name.removeprefix("aten::")
        is_recurrent = name == "recurrent"
        if is_recurrent or name in ("linear", "convolution", "conv1d", "conv2d", "conv3d"):
            inputs = [x for x in operation.inputs if any("weight_ih_l0" in name for name in x.names)]
            for weight in inputs if is_recurrent else [operation.value("weight")]:
                vector = _inputs_factor(operation, value, weight, factor)
                is_once = len(readers[id(weight)]) == 1 and len(weight.names) == 1
                if vector is None or not is_once or not (is_recurrent or weight.names[0] in layers):
                    return None
                found[weight.names[0]] = vector * found.get(weight.names[0], 1.0)  # along all ways to its one input
            if is_recurrent and not inputs:
                return None  # they are computed
            continue
        is_joined = name in ("cat", "index_select", "_pack_padded_sequence", "_pad_packed_sequence")
        behind = _joined(operation, value, factor) if is_joined else None
        if len(operation.inputs) == 1 and not is_joined:
            behind = _behind(operation, name, factor)
        if behind is None or _follow(operation.output, behind, readers, found, layers) is None:
            return None
    return found


def _behind(operation: Operation, name: str, factor: Tensor) -> Tensor | None:
    """The factor of an operation's output."""
    if name in _UNITWISE or name == "gate":
        return factor
    if name in _MOVING:
        return cast(Tensor, operation.function(factor.contiguous(), *operation.args[1:], **operation.kwargs))
    if name in _POOLING and factor.dim() > 2:
        if name == "mean" and 1 in [dim % factor.dim() for dim in operation.integers("dim") or range(factor.dim())]:
            return None
        positions = factor.flatten(2)
        if not bool((positions == positions[..., :1]).all()):
            return None
        shape = operation.output.shape
        return positions[..., 0].view(*factor.shape[:2], *[1] * (len(shape) - 2)).expand(shape)
    return None


def _joined(operation: Operation, value: Value, factor: Tensor) -> Tensor | None:
    """The factor behind a concatenation, or where examples and times are put elsewhere, with zeros between them."""
    if operation.name == "aten::cat":
        parts = [factor if x is value else torch.ones(x.shape, dtype=factor.dtype) for x in operation.inputs]
        return torch.cat(parts, operation.integer("dim"))
    rows, is_padded = factor.flatten(0, -2), bool(operation.arguments.get("padding_value"))
    if is_padded or operation.integers("dim") in ([-1], [factor.dim() - 1]) or not bool((rows == rows[:1]).all()):
        return None
    return rows[0].expand(operation.output.shape)


def _inputs_factor(operation: Operation, value: Value, weight: Value, factor: Tensor) -> Tensor | None:
    """The factor of each input of a layer, if it is the same at every position."""
    is_dense = operation.name in ("aten::linear", "recurrent")
    if operation.inputs[0] is not value or weight is value:
        return None
    if not is_dense and (operation.arguments.get("transposed") or operation.integer("groups") != 1):
        return None
    inputs = factor.movedim(-1 if is_dense else 1, 0).flatten(1)
    return inputs[:, 0] if bool((inputs == inputs[:, :1]).all()) else None
