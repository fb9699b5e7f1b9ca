"""What of a network stays, by the names of its parameters and modules, and the integers that modules keep."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

from pyro_l0.compaction.calls import Arguments, run
from pyro_l0.compaction.layers import GateChange, ReducedLayerNorm, ReducedRMSNorm, new_indices, pads_zeros, takes_shift
from pyro_l0.nn.engine import Analysis, GateMap, Maps, Operation, Recording, Value, find_entry
from pyro_l0.nn.engine.analysis import find_integers
from pyro_l0.nn.engine.maps import Link, Read
from pyro_l0.nn.engine.sizes import OF_WEIGHT
from pyro_l0.nn.gate import GateLayer, gate_names

Size = int | tuple[int, ...]
Attributes = dict[str, dict[str, Size]]
"""By module path, the attributes that change and their new values."""

_Shapes = Mapping[str, tuple[int, ...]]


def torch_sizes(
    module: nn.Module, remaining: Mapping[str, Sequence[Tensor | None]], shrunk: Mapping[int, int]
) -> dict[str, Size]:
    """New values of the integers of one module of torch, whose tensors are yet to be cut.

    By name of its own tensors, ``remaining`` are the indices that stay along each dimension; ``shrunk`` has the sizes
    that shrank while the module ran, for modules without tensors.
    """
    if parametrize.is_parametrized(module):
        return {}  # its weights are computed from others
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    shapes = {
        name: tuple(
            size if index is None else len(index)
            for size, index in zip(tensor.shape, remaining.get(name, (None,) * tensor.dim()), strict=True)
        )
        for name, tensor in own.items()
    }
    new = _torch_sizes(module, shapes, remaining["weight"][0] if "weight" in remaining else None, shrunk)
    return {name: value for name, value in new.items() if getattr(module, name) != value}


def _torch_sizes(
    module: nn.Module, shapes: _Shapes, index: Tensor | None, shrunk: Mapping[int, int]
) -> Mapping[str, Size]:
    """The integers of a module with tensors of these shapes; the index says which rows of its weight stay."""
    if isinstance(module, nn.modules.conv._ConvNd):
        groups = module.groups
        if groups > 1:
            groups = _groups_left(groups, module.weight.shape[0], index)
        rows, columns = shapes["weight"][0], shapes["weight"][1] * groups
        inputs, outputs = (rows, columns) if module.transposed else (columns, rows)
        return {"in_channels": inputs, "out_channels": outputs, "groups": groups}
    for kind, names in OF_WEIGHT.items():
        if isinstance(module, kind):
            return dict(zip(names, shapes["weight"], strict=False))
    if isinstance(module, nn.modules.batchnorm._NormBase):  # instance normalisation among them
        size = module.num_features
        (left,) = shapes.get("running_mean") or shapes.get("weight") or (shrunk.get(size, size),)
        return {"num_features": left}
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        end = "_l0" if isinstance(module, nn.RNNBase) else ""
        return {"input_size": shapes[f"weight_ih{end}"][1], "hidden_size": shapes[f"weight_hh{end}"][1]}
    if isinstance(module, nn.GroupNorm):
        size, groups = module.num_channels, module.num_groups
        if "weight" not in shapes:
            left = shrunk.get(size, size)
            return {"num_channels": left, "num_groups": groups * left // size}
        return {"num_channels": shapes["weight"][0], "num_groups": _groups_left(groups, size, index)}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        # Without a weight, the norms of the analysis say whether units leave; another dimension may have their size.
        return {"normalized_shape": shapes["weight"]} if "weight" in shapes else {}
    if isinstance(module, nn.ChannelShuffle):
        return {"groups": shrunk.get(module.groups, module.groups)}
    if isinstance(module, nn.Unflatten):
        return {"unflattened_size": tuple(shrunk.get(size, size) for size in module.unflattened_size)}
    return {}


def _groups_left(groups: int, size: int, index: Tensor | None) -> int:
    """How many of equally large groups have an index that stays."""
    return groups if index is None else len((index // (size // groups)).unique())


def followed_sizes(network: nn.Module, analysis: Analysis) -> Attributes:
    """The integers of users' modules that code takes sizes from and that change with the units that stay."""
    attributes: Attributes = {}
    for holder, value in find_integers(analysis.maps, analysis.solution).items():
        before = getattr(network.get_submodule(holder.path), holder.name)
        own = attributes.get(holder.path, {}).get(holder.name, before)
        new = value if isinstance(own, int) else tuple(value if i == holder.position else x for i, x in enumerate(own))
        if new != own:
            attributes.setdefault(holder.path, {})[holder.name] = new
    return attributes


def set_attributes(network: nn.Module, attributes: Mapping[str, Mapping[str, Size]]) -> None:
    """Give attributes their new values; a list stays a list."""
    for path, values in attributes.items():
        module = network.get_submodule(path)
        for name, value in values.items():
            is_list = isinstance(getattr(module, name), list)
            setattr(module, name, list(value) if is_list and isinstance(value, tuple) else value)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


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
    if units.keys() - found.keys():
        raise NotConstantError("Expected layers that evaluation calls, but training alone calls some.")
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


_Factor = tuple[Tensor, Tensor]  # of each entry, and 0 for entries that are zeros whatever the network is given


@torch.no_grad()
def gates_into_weights(maps: Maps, gates: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """The positive gates that can go into weights behind them, as what is between is positively homogeneous.

    Returns, by name of a weight, the factor of each of its inputs; and the sites of these gates.
    """
    readers: dict[int, list[Operation]] = {}
    makers = {value: operation for operation in maps.recording.operations for value in operation.made}
    for operation in maps.recording.operations:
        for value in operation.inputs:
            readers.setdefault(id(value), []).append(operation)
    factors: dict[str, Tensor] = {}
    folded: set[str] = set()
    for site, gate in gates.items():
        found: dict[str, Tensor] | None = {}
        for operation in maps.recording.operations:
            if operation.name == "gate" and operation.arguments["site"] == site and found is not None:
                view = [1] * operation.output.rank
                view[operation.integer("dim")] = -1
                factor = gate.view(view).expand(operation.output.shape)
                weight = _weight_of(operation.value("input"), makers)
                if weight is None:
                    found = _follow(maps, operation.output, (factor, torch.ones_like(factor)), readers, found)
                elif len(weight.names) == len(readers[id(weight)]) == 1 and weight.names[0] not in found:
                    found[weight.names[0]] = factor.reshape(weight.shape)[0]
                else:
                    found = None
        if found is not None:
            folded.add(site)
            for name, factor in found.items():
                factors[name] = factor * factors[name] if name in factors else factor
    return factors, folded


def _weight_of(value: Value, makers: Mapping[Value, Operation]) -> Value | None:
    """The recurrent layer's weight that a gate multiplies, whose inputs may be grouped by direction."""
    maker = makers.get(value)
    if maker is not None and maker.is_view and value.tensor.is_contiguous():
        before = maker.inputs[0]
        value = before if before.tensor.numel() == value.tensor.numel() and before.tensor.is_contiguous() else value
    return value if value.rank == 2 and any("weight_" in name for name in value.names) else None


def _follow(
    maps: Maps,
    value: Value,
    factor: _Factor,
    readers: Mapping[int, list[Operation]],
    found: dict[str, Tensor],
) -> dict[str, Tensor] | None:
    """Follow a factor to the weights of every layer that reads a value; None where that can't be done."""
    if value.is_output:
        return None
    for operation in readers.get(id(value), ()):
        weights = _weights_that_read(maps, operation, value)
        for weight, dim in weights:
            vector = _inputs_factor(factor, dim)
            if vector is None or len(readers[id(weight)]) > 1 or len(weight.names) > 1:
                return None
            found[weight.names[0]] = vector * found.get(weight.names[0], 1.0)  # along all ways to its one input
        if weights:
            continue
        behind = _behind(operation, value, factor)
        if behind is None or _follow(maps, operation.output, behind, readers, found) is None:
            return None
    return found


def _weights_that_read(maps: Maps, operation: Operation, value: Value) -> list[tuple[Value, int]]:
    """The weights that a product sums a value over with, along their dimension 1, and the value's dimension."""
    relations, axes = maps.relations[operation], maps.axes[value]
    summed = [axis for x in relations if isinstance(x, Read) and len(x.axes) > 1 for axis in x.axes if axis in axes]
    if operation.inputs.count(value) > 1 or any(isinstance(x, Link) and x.source in summed for x in relations):
        return []  # it goes into the result twice, as a state does
    return [
        (weight, axes.index(axis))
        for axis in dict.fromkeys(summed)
        for weight in dict.fromkeys(operation.inputs)
        if weight.names and weight is not value and weight.rank > 1
        if any(isinstance(x, Read) and axis in x.axes and maps.axes[weight][1] in x.axes for x in relations)
    ]


def _behind(operation: Operation, value: Value, factor: _Factor) -> _Factor | None:
    """The factor of an operation's output.

    Sums with weights w >= 0, and maxima, of entries with factors c have a factor if all of these are equal: by Cauchy
    and Schwarz, if sum(w c) sum(w / c) = sum(w)^2.
    """
    if not find_entry(operation.name).is_homogeneous:
        return None
    factors, present = factor
    times, per, once = (_run(operation, value, x) for x in (present * factors, present / factors, present))
    if not torch.allclose(times * per, once.square(), rtol=_ROUNDING, atol=0):
        return None
    is_present = once != 0
    return torch.where(is_present, times / once, 1.0), is_present.to(times)


_ROUNDING = 1e-12  # of sums of up to a thousand numbers in float64


def _run(operation: Operation, value: Value, x: Tensor) -> Tensor:
    """An operation's output for one of its inputs, where others of numbers are 1."""

    def given(other: Value) -> Tensor:
        if other is value:
            return x.clone(memory_format=torch.contiguous_format)
        return torch.ones(other.shape, dtype=x.dtype) if other.dtype.is_floating_point else other.tensor.detach().cpu()

    args, kwargs = tree_map_only(Value, given, (operation.args, operation.kwargs))
    kwargs = {name: argument for name, argument in kwargs.items() if name not in ("dtype", "device")}
    result: Any = operation.function(*args, **kwargs)
    return cast(Tensor, result[0] if isinstance(result, (tuple, list)) else result)


def _inputs_factor(factor: _Factor, dim: int) -> Tensor | None:
    """The factor of each input of a layer, if it is the same at every position."""
    factors, present = (x.movedim(dim, 0).flatten(1) for x in factor)
    largest = (factors * present).amax(1, keepdim=True)
    if not torch.allclose(present * factors, present * largest, rtol=_ROUNDING, atol=0):
        return None
    return torch.where(largest > 0, largest, 1.0)[:, 0]


_Indices = dict[str, tuple[Tensor | None, ...]]

_FORMAT = 2


@dataclass(frozen=True)
class LayerFold:
    """Inputs of a layer that are the same for every example and are folded into its bias, or into a map."""

    layer: str
    units: tuple[int, ...]  # the inputs that are removed
    shape: tuple[int, ...] | None  # of the map, for the outputs that stay; None where one value per output is enough


@dataclass(frozen=True)
class Plan:
    """Which parts of a network compaction keeps, as plain numbers and names.

    :func:`~pyro_l0.compaction.compact` makes it, and :func:`~pyro_l0.compaction.apply_plan` repeats it.

    Attributes:
        gates: value of every gate by site.
        remaining: by name of a parameter or buffer that is cut, the indices that stay along each dimension, or
            None for all.
        changes: by path of a gate, what it becomes.
        folds: constant inputs of layers that are folded into biases and maps.
        factors: by name of a weight, factors of its inputs: gates between 0 and 1 that went into it.
        norms: by path of a norm that loses units, how many there were at the start.
        zero_channels: by path of a BatchNorm, channels whose running mean is set to 0, its limit.
        attributes: by path of a module, its integers that change.
        indices: by name of a buffer that holds indices of units, the new indices.
        input_sizes: sizes of one example's inputs if the smaller network accepts no others, because constants of
            removed units depend on them.
    """

    gates: dict[str, tuple[float, ...]]
    remaining: dict[str, tuple[tuple[int, ...] | None, ...]]
    changes: dict[str, GateChange]
    folds: tuple[LayerFold, ...]
    factors: dict[str, tuple[float, ...]]
    norms: dict[str, int]
    zero_channels: dict[str, tuple[int, ...]]
    attributes: dict[str, dict[str, Size]]
    indices: dict[str, tuple[int, ...]]
    input_sizes: tuple[tuple[int, ...], ...] | None = None

    @property
    def keeps_gates(self) -> bool:
        """Whether gates stay sites of a model, as while training."""
        return any(change.random for change in self.changes.values())

    def remaining_indices(self) -> dict[str, tuple[Tensor | None, ...]]:
        """``remaining`` as tensors of indices by name: one for each dimension, None for those that stay whole."""
        return {
            name: tuple(None if index is None else torch.tensor(index, dtype=torch.long) for index in indices)
            for name, indices in self.remaining.items()
        }

    def to_json(self) -> str:
        """The plan as JSON; floats keep every digit."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from the text of :meth:`to_json`.

        Raises:
            ValueError: the text is not a plan.
        """
        try:
            values = json.loads(text)
            if values.pop("format") != _FORMAT:
                raise ValueError("another format")
            values = {name: _with_tuples(value) for name, value in values.items()}
            values["changes"] = {path: GateChange(**change) for path, change in values["changes"].items()}
            values["folds"] = tuple(LayerFold(**fold) for fold in values["folds"])
            plan = cls(**values)
            for part in (plan, *plan.changes.values(), *plan.folds):
                for name, kind in get_type_hints(type(part)).items():
                    if not _fits(getattr(part, name), kind):
                        raise ValueError(f"{name} is no {kind}")
            return plan
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"Expected the JSON of a compaction plan, but got {text[:60]!r} ({error}).") from error


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type, and finite."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is not None:
        entries = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(_fits(x, inner[0 if origin is tuple else 1]) for x in entries)
    return type(value) in (int, float) and math.isfinite(value) if kind is float else type(value) is kind


def _with_tuples(value: Any) -> Any:
    """What JSON holds, with its lists as tuples, at all depths."""
    if isinstance(value, dict):
        return {name: _with_tuples(entry) for name, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


# ------------------------------------------------------------ from the analysis of a recorded call


def constant_units(network: nn.Module, analysis: Analysis) -> dict[str, tuple[int, ...]]:
    """By path of a layer, the inputs that can be folded; NotConstantError if code other than a layer's reads them."""
    found: dict[str, tuple[int, ...]] = {}
    for fold in analysis.folds:
        path, _, name = fold.weight.rpartition(".")
        units = tuple(fold.units.tolist())
        is_read = fold.path == path and name == "weight" and is_layer(network.get_submodule(path))
        if not is_read or found.setdefault(path, units) != units:
            raise NotConstantError(f"Expected constants in front of layers, but {fold.weight!r} reads them elsewhere.")
    return found


def make_plan(
    network: nn.Module,
    recording: Recording,
    analysis: Analysis,
    gates: Mapping[str, Tensor],
    constants: Mapping[str, Constant],
    units: Mapping[str, tuple[int, ...]],
    keep_gates: bool,
) -> Plan:
    """The plan for an analysis, without the integers of users' modules.

    By path of a layer, ``constants`` are its inputs that are folded, and ``units`` which these are. With
    ``keep_gates`` open gates stay sites.
    """
    left = _remaining(network, analysis)
    indices, sizes = new_indices(network, analysis)
    for path in indices:
        left.pop(f"{path}.index", None)
    factors: dict[str, Tensor] = {}
    folded: set[str] = set()
    if not keep_gates:
        factors, folded = _factors(analysis, gates)
    paths = {gate: path for path, gate in network.named_modules() if isinstance(gate, GateLayer)}
    changes = {
        paths[gate]: change
        for site, gate in gate_names(network).items()
        if (change := _change(recording, site, gate, gates[site], analysis.gates.get(site), keep_gates, site in folded))
    }
    return Plan(
        gates={site: tuple(value.double().tolist()) for site, value in gates.items()},
        remaining={name: tuple(None if x is None else tuple(x.tolist()) for x in new) for name, new in left.items()},
        changes=changes,
        folds=tuple(_fold(network.get_submodule(path), path, units[path], constants[path], left) for path in units),
        factors={name: tuple(factor.double().tolist()) for name, factor in factors.items()},
        norms={norm.path: _size(network.get_submodule(norm.path), norm.size) for norm in analysis.norms},
        zero_channels={p: tuple(x.tolist()) for p, x in analysis.zero_channels.items()} if keep_gates else {},
        attributes={**_attributes(network, analysis, left), **{path: {"size": size} for path, size in sizes.items()}},
        indices={f"{path}.index": index for path, index in indices.items()},
    )


def _remaining(network: nn.Module, analysis: Analysis) -> _Indices:
    """By name of a parameter or buffer that is cut, the indices that stay in each dimension, None for all."""
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict(keep_vars=True).items()}
    shapes.update({name: tuple(tensor.shape) for name, tensor in network.named_buffers(remove_duplicate=False)})
    found: _Indices = {}
    for name, every in analysis.remaining.items():
        indices = tuple(None if len(x) == n else x for x, n in zip(every, shapes[name], strict=True))
        if any(x is not None for x in indices):
            found[name] = indices
    return found


def _change(
    recording: Recording,
    site: str,
    gate: GateLayer,
    value: Tensor,
    found: GateMap | None,
    keep_gates: bool,
    is_folded: bool,
) -> GateChange | None:
    """What becomes of a gate, by the units that stay in front of it and behind it; None if it stays as it is."""
    every = torch.arange(gate.size)
    found = found or GateMap(every, every)
    inside, behind = found.front.tolist(), found.behind.tolist()
    outside = set(behind)
    units = [unit for unit in inside if unit in outside]
    if keep_gates and not bool((value[units] != 0).any()):
        units = []  # the code around them needs their zeros alone
    if keep_gates and len(units) == gate.size:
        return None
    chosen, left = set(units), value.detach().double().cpu()[units]
    calls = [x for x in recording.operations if x.name == "gate" and x.arguments["site"] == site]
    is_one = bool((left == 1).all())
    return GateChange(
        site=site,
        units=tuple(units),
        size=len(inside),
        read=tuple(i for i, unit in enumerate(inside) if unit in chosen),
        put=tuple(i for i, unit in enumerate(behind) if unit in chosen),
        out=len(behind),
        reads_input=_reads_input(recording, calls),
        fixed=None if keep_gates or is_folded or is_one else tuple(left.tolist()),
        random=keep_gates,
        takes_dim=any(call.arguments["takes_dim"] for call in calls),
    )


def _reads_input(recording: Recording, calls: list[Operation]) -> bool:
    if len(calls) != 1 or not calls[0].value("input").is_input:
        return False
    return sum(calls[0].value("input") in operation.inputs for operation in recording.operations) == 1


def _factors(analysis: Analysis, gates: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """Gates that go into weights: those whose units that stay are open."""
    candidates: dict[str, Tensor] = {}
    for site, found in analysis.gates.items():
        gate = gates[site].detach().double().cpu()
        left = gate[found.front]
        if not bool((left == 1).all()) and bool((left > 0).all()):
            candidates[site] = torch.where(gate > 0, gate, 1.0)
    return gates_into_weights(analysis.maps, candidates)


def _fold(layer: nn.Module, path: str, units: tuple[int, ...], constant: Constant, indices: _Indices) -> LayerFold:
    value, is_map = contribution(layer, constant)
    if not is_map:
        return LayerFold(path, units, None)
    if not takes_shift(layer):
        raise NotConstantError(f"Expected a layer at {path!r} whose forward is torch's, which can add a map.")
    shape = list(value.shape[1:])
    rows = indices[f"{path}.weight"][1 - input_dim(layer)] if f"{path}.weight" in indices else None
    if rows is not None:
        shape[-1 if isinstance(layer, nn.Linear) else 0] = len(rows)
    return LayerFold(path, units, tuple(shape))


def _size(module: nn.Module, size: int) -> int:
    """The units of a norm before any were removed."""
    return module.size if isinstance(module, (ReducedLayerNorm, ReducedRMSNorm)) else size


def _attributes(network: nn.Module, analysis: Analysis, indices: _Indices) -> Attributes:
    """The integers of torch's modules that follow their tensors."""
    found: Attributes = {}
    for path, module in network.named_modules():
        names = {name: f"{path}.{name}".removeprefix(".") for name in (*module._parameters, *module._buffers)}
        own = {name: indices[key] for name, key in names.items() if key in indices}
        shrunk = analysis.shrunk.get(path, {})
        new = torch_sizes(module, own, shrunk) if own or shrunk else {}
        if new:
            found[path] = new
    for norm in analysis.norms:
        found.setdefault(norm.path, {})["normalized_shape"] = (len(norm.remaining),)
    return found
