"""What closed gates make of a recorded network: which entries of every tensor can leave, and why others stay."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pyro_l0.nn.engine import rules
from pyro_l0.nn.engine.constants import read_what_stays, settle_constants
from pyro_l0.nn.engine.maps import ConstantInput, Maps, find_rule
from pyro_l0.nn.engine.shared_sizes import keep_parts_even, keep_results, pin_shared_sizes
from pyro_l0.nn.engine.slots import CONSTANT, VARIES, Axis, Mask
from pyro_l0.nn.engine.solve import Solution
from pyro_l0.nn.engine.tape import WRITE, Operation, Recording, Value
from pyro_l0.nn.gate_layer import gate_names

__all__ = ["Analysis", "Fold", "GateMap", "ReducedNorm", "analyse"]


@dataclass(frozen=True)
class Fold:
    """Inputs of a layer that are the same for every example: their contribution goes into its bias.

    They leave, except the last of a dimension and those that are also another unit elsewhere. These keep their entries,
    which are no longer computed correctly, so that their weights must be zero.
    """

    path: str  # the module that called the layer
    weight: str  # its name, as of the bias
    bias: str | None
    dim: int  # of the weight, which reads the inputs
    units: Tensor  # which of the inputs, in the numbering of the full layer
    constant: Tensor  # their values, shape ``(units,)``; or ``(units, *positions)`` where they differ between positions
    is_padded: bool  # whether the layer pads its input with zeros, so that the contribution is a map


@dataclass(frozen=True)
class GateMap:
    """The units in front of a gate and behind it, in the numbering of the full gate.

    Where they differ, the gate selects: a unit in front that is not behind ends here, and one behind that is not in
    front begins here, as zeros. Every unit that is in one alone is closed. All calls of a gate have one map.
    """

    kept_in: Tensor
    kept_out: Tensor


@dataclass(frozen=True)
class ReducedNorm:
    """A LayerNorm or RMSNorm that loses units; the removed ones were zeros, and still count in its mean."""

    path: str  # the module, an ``nn.LayerNorm`` or ``nn.RMSNorm``, or a subclass without a forward of its own
    size: int  # number of units that there were
    kept: Tensor  # those that stay


@dataclass(frozen=True)
class Analysis:
    """What :func:`analyse` returns. Indices are int64 on the CPU, in the numbering of the recorded network.

    Attributes:
        kept: by name of a parameter or buffer that was used (every name of a tied one), the indices that stay in
            each of its dimensions.
        folds: constant inputs that go into biases.
        gates: by site, what stays in front of and behind the gate.
        norms: norms that lose units.
        zero_channels: by path of a BatchNorm, its channels (in the full numbering) whose input is zero; set their
            running mean to 0, its limit.
        removed: by site, the units that are removed behind the gate.
        reasons: by site, the closed units that stay behind the gate or in front of it, and why.
        barriers: operations without a rule that units would have to pass, and how often.
        shrunk: by module path, sizes of tensors that shrank while the module ran, and their new values.
        maps: what the rules know of the recording.
        solution: which units stay.
    """

    kept: dict[str, tuple[Tensor, ...]]
    folds: list[Fold]
    gates: dict[str, GateMap]
    norms: list[ReducedNorm]
    zero_channels: dict[str, Tensor]
    removed: dict[str, Tensor]
    reasons: dict[str, dict[int, str]]
    barriers: Counter[str]
    shrunk: dict[str, dict[int, int]]
    maps: Maps
    solution: Solution

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a recorded value after the units were removed."""
        return tuple(self.solution.size(axis) for axis in self.maps.axes[value])

    def multiply_adds(self, kept: bool = True) -> int:
        """Multiply-adds of the recorded calls' contractions and convolutions, without scaled-dot-product attention.

        Args:
            kept: whether to count what stays, or else the recorded network.
        """
        return self._count(kept, is_attention=False)

    def attention_multiply_adds(self, kept: bool = True) -> int:
        """Multiply-adds of scaled-dot-product attention; torch's counter misses them on some machines."""
        return self._count(kept, is_attention=True)

    def _count(self, kept: bool, is_attention: bool) -> int:
        return sum(
            math.prod(self.solution.size(axis) if kept else axis.size for axis in product.axes)
            for product in self.maps.products
            if product.is_attention == is_attention
        )


def analyse(
    recording: Recording,
    closed: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None = None,
    folds: bool = True,
) -> Analysis:
    """Find the units that can be removed from a network whose closed gates are zero without changing its outputs.

    Args:
        recording: the network, recorded by :func:`record`.
        closed: by site, which gates are closed, bool of shape ``(size,)``; a missing site has none.
        values: by site, the values of gates that are fixed. Without them the other gates stay random, and what they
            make of a constant varies, as needed during training.
        folds: whether constant inputs of a layer may be folded into its bias. They stay during training, because their
            derivatives would change.

    Raises:
        ValueError: a site is not recorded, or a shape does not fit.

    Example:
        >>> from pyro_l0.nn import Gate
        >>> from pyro_l0.nn.engine import record
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), Gate(3), nn.Linear(3, 1))
        >>> analysis = analyse(record(net, torch.ones(1, 2)), {"2": torch.tensor([False, True, False])})
        >>> analysis.kept["0.weight"]
        (tensor([0, 2]), tensor([0, 1]))
    """
    maps = _apply_rules(recording, _masks(recording, closed), values, folds)
    constants = settle_constants(maps)
    solution = Solution(maps)
    while read_what_stays(maps, solution) or keep_parts_even(maps, solution) or keep_results(maps, solution):
        solution = Solution(maps)
    return _answer(maps, solution, constants)


def _masks(recording: Recording, closed: Mapping[str, Tensor]) -> dict[str, Mask]:
    gates = gate_names(recording.network)
    for site, mask in closed.items():
        if site not in gates:
            raise ValueError(f"Expected gates of the network, {sorted(gates)}, but got {site!r}.")
        if mask.dtype != torch.bool or mask.shape != (gates[site].size,):
            raise ValueError(
                f"Expected closed[{site!r}] to be a bool for each of {gates[site].size} gates, but got a "
                f"{mask.dtype} of shape {tuple(mask.shape)}."
            )
    return {site: mask.cpu().numpy() for site, mask in closed.items()}


def _apply_rules(
    recording: Recording, closed: dict[str, Mask], values: Mapping[str, Tensor] | None, folds: bool
) -> Maps:
    """Apply the rule of every operation."""
    maps = Maps(recording, closed, values, folds)
    for call in recording.calls:
        for value in call.inputs:
            maps.add(value, VARIES)
    for operation in recording.operations:
        maps.begin(operation)
        for value in operation.inputs:
            if value not in maps.axes:
                _add_given(maps, value)
        for value in operation.made:
            if value not in maps.axes:
                maps.add(value, VARIES)
        _apply_rule(maps, operation)
        for value in operation.made:
            maps.settle(value)
    for call in recording.calls:
        for value in call.outputs:
            if value not in maps.axes:
                _add_given(maps, value)
    for path, module in recording.network.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            _pin_attention(maps, path)
    pin_shared_sizes(maps)
    return maps


def _add_given(maps: Maps, value: Value) -> None:
    """A parameter, a buffer, or a tensor from elsewhere, which cannot be sliced."""
    maps.add(value, VARIES if value.is_given else CONSTANT)
    if value.is_given:
        for axis in maps.axes[value]:
            if axis.size > 1:
                maps.pin(axis.block, f"a tensor that is no parameter or buffer, at {maps.place}")


def _apply_rule(maps: Maps, operation: Operation) -> None:
    found = find_rule(operation.name)
    if found is not None:
        found(maps, operation)
    elif rules.pointwise.is_pointwise(operation):
        rules.pointwise.pointwise(maps, operation)
    elif operation.inputs:
        maps.barrier()
    else:
        rules.creation.create(maps, operation)


def _pin_attention(maps: Maps, path: str) -> None:
    prefix = f"{path}." if path else ""
    for name, value in maps.recording.named.items():
        if name.startswith(prefix):
            for axis in maps.axes[value]:
                maps.pin(axis.block, f"nn.MultiheadAttention in {path or 'the network'}, whose sizes are fixed")


def _answer(maps: Maps, solution: Solution, constants: dict[ConstantInput, Tensor]) -> Analysis:
    found = dict[int, Tensor]()

    def indices(axis: Axis) -> Tensor:
        key = id(solution.units[axis.block])
        if key not in found:
            found[key] = torch.from_numpy(solution.kept(axis))
        return found[key]

    kept = {name: tuple(map(indices, maps.axes[value])) for name, value in maps.recording.named.items()}
    gates = {call.site: GateMap(indices(call.front), indices(call.behind)) for call in maps.gates}
    removed, reasons = _gates_of(maps, solution)
    norms = {
        path: ReducedNorm(path, units.size, indices(units))
        for path, units in maps.norms
        if solution.size(units) < units.size
    }
    zeros = {path: torch.from_numpy(np.flatnonzero(mask)) for path, mask in maps.zero_channels.items() if mask.any()}
    barriers = Counter(
        text for operation, text in maps.barriers.items() if operation in solution.running or operation.name != WRITE
    )
    return Analysis(
        kept,
        _folds(maps, solution, constants),
        gates,
        list(norms.values()),
        zeros,
        removed,
        reasons,
        barriers,
        _shrunk(maps, solution),
        maps,
        solution,
    )


def _gates_of(maps: Maps, solution: Solution) -> tuple[dict[str, Tensor], dict[str, dict[int, str]]]:
    """By site, the units that leave behind a gate, and the closed ones that stay somewhere, and why."""
    removed, reasons = dict[str, Tensor](), dict[str, dict[int, str]]()
    for call in maps.gates:
        behind = set(solution.kept(call.behind).tolist())
        front = set(solution.kept(call.front).tolist())
        left = [unit for unit in range(call.behind.size) if unit not in behind]
        removed[call.site] = torch.tensor(left, dtype=torch.int64)
        is_closed = maps.closed.get(call.site, np.zeros(call.front.size, dtype=np.bool_))
        stays = {
            unit: solution.reason(call.behind if unit in behind else call.front, unit)
            for unit in np.flatnonzero(is_closed).tolist()
            if unit in behind or unit in front
        }
        reasons[call.site] = stays
    return removed, reasons


def _folds(maps: Maps, solution: Solution, constants: dict[ConstantInput, Tensor]) -> list[Fold]:
    """The constant inputs that leave their layer, once for each weight."""
    found = dict[Value, Fold]()
    for layer, constant in constants.items():
        axis = maps.axes[layer.input][layer.input_dim]
        units = np.flatnonzero(layer.candidates & ~solution.is_needed(axis))
        if len(units) and layer.operation in solution.running:
            bias = layer.bias.names[0] if layer.bias is not None else None
            found[layer.weight] = Fold(
                layer.operation.path,
                layer.weight.names[0],
                bias,
                layer.weight_dim,
                torch.from_numpy(units),
                constant[torch.from_numpy(units)],
                layer.is_padded,
            )
    return list(found.values())


def _shrunk(maps: Maps, solution: Solution) -> dict[str, dict[int, int]]:
    """By module path, what sizes became.

    A module's own operations decide before those of the modules inside: a size that stayed in its own code stayed for
    its attributes.
    """
    sizes = defaultdict[str, dict[int, set[int]]](lambda: defaultdict(set))
    for operation in maps.recording.operations:
        for axis in (axis for value in [*operation.inputs, *operation.made] for axis in maps.axes[value]):
            sizes[operation.path][axis.size].add(solution.size(axis))
    for path in sorted(sizes, key=lambda path: -path.count(".") - bool(path)):
        parent = path.rpartition(".")[0]
        for size, now in sizes[path].items() if path else ():
            sizes[parent].setdefault(size, now)
    return {path: {size: min(now) for size, now in each.items() if min(now) < size} for path, each in sizes.items()}
