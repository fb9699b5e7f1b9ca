"""What of a network stays, by the names of its parameters and modules: numbers and names alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from pyro_l0.compaction.fold import Constant, NotConstantError, contribution, gates_into_weights, input_dim, is_layer
from pyro_l0.compaction.gate_change import GateChange, new_indices
from pyro_l0.compaction.layers import ReducedLayerNorm, ReducedRMSNorm, takes_shift
from pyro_l0.compaction.sizes import Attributes, Size, torch_sizes
from pyro_l0.nn.engine import Analysis, GateMap, Operation, Recording
from pyro_l0.nn.gate_layer import GateLayer, gate_names

__all__ = ["LayerFold", "Plan", "constant_units", "make_plan"]

_Kept = dict[str, tuple[Tensor | None, ...]]

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

    :func:`~pyro_l0.compaction.compact` makes it, and :func:`~pyro_l0.compaction.apply.apply_plan` repeats it.

    Attributes:
        gates: value of every gate by site.
        kept: by name of a parameter or buffer that is cut, the indices that stay along each dimension; None for all.
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
    kept: dict[str, tuple[tuple[int, ...] | None, ...]]
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

    def kept_indices(self) -> dict[str, tuple[Tensor | None, ...]]:
        """``kept`` as tensors."""
        return {
            name: tuple(None if index is None else torch.tensor(index, dtype=torch.long) for index in indices)
            for name, indices in self.kept.items()
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
    """The same with tuples for lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(entry) for name, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


# ------------------------------------------------------------ from the analysis of a recorded call


def constant_units(network: nn.Module, analysis: Analysis) -> dict[str, tuple[int, ...]] | None:
    """By path of a layer, the inputs that can be folded; None if code other than a layer's reads them."""
    found: dict[str, tuple[int, ...]] = {}
    for fold in analysis.folds:
        path, _, name = fold.weight.rpartition(".")
        units = tuple(fold.units.tolist())
        if fold.path != path or name != "weight" or not is_layer(network.get_submodule(path)):
            return None
        if found.setdefault(path, units) != units:
            return None
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
    kept = _kept(network, analysis)
    indices, sizes = new_indices(network, analysis)
    for path in indices:
        kept.pop(f"{path}.index", None)
    factors: dict[str, Tensor] = {}
    folded: set[str] = set()
    if not keep_gates:
        factors, folded = _factors(network, recording, analysis, gates)
    paths = {gate: path for path, gate in network.named_modules() if isinstance(gate, GateLayer)}
    changes = {
        paths[gate]: change
        for site, gate in gate_names(network).items()
        if (change := _change(recording, site, gate, gates[site], analysis.gates.get(site), keep_gates, site in folded))
    }
    return Plan(
        gates={site: tuple(value.double().tolist()) for site, value in gates.items()},
        kept={name: tuple(None if x is None else tuple(x.tolist()) for x in new) for name, new in kept.items()},
        changes=changes,
        folds=tuple(_fold(network.get_submodule(path), path, units[path], constants[path], kept) for path in units),
        factors={name: tuple(factor.double().tolist()) for name, factor in factors.items()},
        norms={norm.path: _size(network.get_submodule(norm.path), norm.size) for norm in analysis.norms},
        zero_channels={p: tuple(x.tolist()) for p, x in analysis.zero_channels.items()} if keep_gates else {},
        attributes={**_attributes(network, analysis, kept), **{path: {"size": size} for path, size in sizes.items()}},
        indices={f"{path}.index": index for path, index in indices.items()},
    )


def _kept(network: nn.Module, analysis: Analysis) -> _Kept:
    """The indices that stay, of tensors that are cut."""
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict(keep_vars=True).items()}
    shapes.update({name: tuple(tensor.shape) for name, tensor in network.named_buffers(remove_duplicate=False)})
    found: _Kept = {}
    for name, kept in analysis.kept.items():
        indices = tuple(None if len(x) == n else x for x, n in zip(kept, shapes[name], strict=True))
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
    """What a gate becomes; None if it stays as it is."""
    every = torch.arange(gate.size)
    kept_in, kept_out = (every, every) if found is None else (found.kept_in, found.kept_out)
    inside, behind = kept_in.tolist(), kept_out.tolist()
    units = [unit for unit in inside if unit in set(behind)]
    if keep_gates and not bool((value[units] != 0).any()):
        units = []  # the code around them needs their zeros alone
    if keep_gates and len(units) == gate.size:
        return None
    left = value.detach().double().cpu()[units]
    calls = [x for x in recording.operations if x.name == "gate" and x.arguments["site"] == site]
    is_one = bool((left == 1).all())
    return GateChange(
        site=site,
        units=tuple(units),
        size=len(inside),
        read=tuple(i for i, unit in enumerate(inside) if unit in set(units)),
        put=tuple(i for i, unit in enumerate(behind) if unit in set(units)),
        out=len(behind),
        reads_input=_reads_input(recording, calls),
        fixed=None if keep_gates or is_folded or is_one else tuple(left.tolist()),
        random=keep_gates,
        takes_dim=any(call.arguments["takes_dim"] for call in calls),
    )


def _reads_input(recording: Recording, calls: list[Operation]) -> bool:
    """Whether a gate with these calls alone reads an input of the network."""
    if len(calls) != 1 or not calls[0].value("input").is_input:
        return False
    return sum(calls[0].value("input") in operation.inputs for operation in recording.operations) == 1


def _factors(
    network: nn.Module, recording: Recording, analysis: Analysis, gates: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], set[str]]:
    """Gates that go into weights: those whose units that stay are open."""
    candidates: dict[str, Tensor] = {}
    for site, found in analysis.gates.items():
        gate = gates[site].detach().double().cpu()
        left = gate[found.kept_in]
        if not bool((left == 1).all()) and bool((left > 0).all()):
            candidates[site] = torch.where(gate > 0, gate, 1.0)
    layers = {f"{path}.weight" if path else "weight" for path, module in network.named_modules() if is_layer(module)}
    return gates_into_weights(recording, candidates, layers)


def _fold(layer: nn.Module, path: str, units: tuple[int, ...], constant: Constant, kept: _Kept) -> LayerFold:
    value, is_map = contribution(layer, constant)
    if not is_map:
        return LayerFold(path, units, None)
    if not takes_shift(layer):
        raise NotConstantError(f"Expected a layer at {path!r} whose forward is torch's, which can add a map.")
    shape = list(value.shape[1:])
    rows = kept[f"{path}.weight"][1 - input_dim(layer)] if f"{path}.weight" in kept else None
    if rows is not None:
        shape[-1 if isinstance(layer, nn.Linear) else 0] = len(rows)
    return LayerFold(path, units, tuple(shape))


def _size(module: nn.Module, size: int) -> int:
    """The units of a norm before any were removed."""
    return module.size if isinstance(module, (ReducedLayerNorm, ReducedRMSNorm)) else size


def _attributes(network: nn.Module, analysis: Analysis, kept: _Kept) -> Attributes:
    """The integers of torch's modules that follow their tensors."""
    found: Attributes = {}
    for path, module in network.named_modules():
        names = {name: f"{path}.{name}".removeprefix(".") for name in (*module._parameters, *module._buffers)}
        own = {name: kept[key] for name, key in names.items() if key in kept}
        shrunk = analysis.shrunk.get(path, {})
        new = torch_sizes(module, own, shrunk) if own or shrunk else {}
        if new:
            found[path] = new
    for norm in analysis.norms:
        found.setdefault(norm.path, {})["normalized_shape"] = (len(norm.kept),)
    return found
