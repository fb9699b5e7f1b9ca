"""What layers and gates become: layers with constants, reduced norms, selections of units, smaller gates."""

# Without annotations as strings, which torch.jit.script can't read.

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from pyro_l0.nn.engine import Analysis, Maps, Operation, find_entry
from pyro_l0.nn.engine.maps import ZERO, runs_as
from pyro_l0.nn.engine.operations import ENTRIES, Rule
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import GateLayer, keep_being_called


class _Shifted(nn.Module):
    """A layer that adds a constant to its output: the contribution of inputs that were removed."""

    shift: Tensor
    _conv_forward: Any

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output plus the constant."""
        out: Tensor = self._conv_forward(input, self.weight, self.bias)
        return out + self.shift


class ShiftedLinear(_Shifted, nn.Linear):
    """A dense layer plus a constant."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)


class ShiftedConv1d(_Shifted, nn.Conv1d):
    """A convolution plus ``shift``, of shape ``(1, channels, length)``: constant inputs that went, with the padding."""


class ShiftedConv2d(_Shifted, nn.Conv2d):
    """A convolution plus ``shift``, of shape ``(1, channels, height, width)``; see :class:`ShiftedConv1d`."""


class ShiftedConv3d(_Shifted, nn.Conv3d):
    """A convolution plus ``shift``, of shape ``(1, channels, depth, height, width)``; see :class:`ShiftedConv1d`."""


_KINDS = (ShiftedLinear, ShiftedConv1d, ShiftedConv2d, ShiftedConv3d)
_SHIFTED: dict[type[nn.Module], type[nn.Module]] = {kind.__bases__[1]: kind for kind in _KINDS}


def add_shift(module: nn.Module, shift: Tensor) -> None:
    """Let a dense layer or a convolution add a constant, shape ``(1, ...)``, beside those that it adds already."""
    if isinstance(module, _Shifted):
        module.shift = module.shift + shift
        return
    module.__class__ = next(shifted for kind, shifted in _SHIFTED.items() if runs_as(module, kind))
    module.register_buffer("shift", shift.clone())


def takes_shift(module: nn.Module) -> bool:
    """Whether a layer can add a constant that differs between positions: one whose forward is torch's."""
    return isinstance(module, _KINDS) or any(runs_as(module, kind) for kind in _SHIFTED)


def pads_zeros(module: nn.Module) -> bool:
    """Whether a layer reads zeros beyond the border."""
    if not isinstance(module, nn.modules.conv._ConvNd) or module.padding_mode != "zeros":
        return False
    if module.transposed:
        return any(size > 1 for size in module.kernel_size)  # fewer inputs reach its border
    return any(module._reversed_padding_repeated_twice)


class ReducedLayerNorm(nn.LayerNorm):
    r"""Layer normalisation that counts removed units as zeros.

    Of ``size`` units, :math:`N`, the set :math:`K` is left. The mean is :math:`\mu = \sum_{i \in K} x_i / N`, the
    variance

    .. math:: v = \frac{1}{N} \Big[ \sum_{i \in K} (x_i - \mu)^2 + (N - |K|) \mu^2 \Big],

    because every removed unit differs from the mean by :math:`\mu`.
    """

    recorded_as = nn.LayerNorm
    size: int

    def forward(self, input: Tensor) -> Tensor:
        """Normalise over the units that are left and the zeros that are not there."""
        left = self.normalized_shape[0]
        mean = input.sum(-1, keepdim=True) / self.size
        centred = input - mean
        squares = centred.square().sum(-1, keepdim=True) + (self.size - left) * mean.square()
        out = centred * torch.rsqrt(squares / self.size + self.eps)
        if self.weight is not None:
            out = out * self.weight
        return out if self.bias is None else out + self.bias


class ReducedRMSNorm(nn.RMSNorm):
    """Root mean square normalisation that counts removed units as zeros, of ``size`` units."""

    recorded_as = nn.RMSNorm
    size: int

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the units that are left and the zeros that are not there."""
        # In place of finfo(x.dtype).eps, which scripts and symbolic traces can't ask for.
        eps = (3 * (x.new_full((), 4 / 3) - 1) - 1).abs() if self.eps is None else self.eps
        out = x * torch.rsqrt(x.square().sum(-1, keepdim=True) / self.size + eps)
        return out if self.weight is None else out * self.weight


_REDUCED: dict[type[nn.Module], type[nn.Module]] = {nn.LayerNorm: ReducedLayerNorm, nn.RMSNorm: ReducedRMSNorm}


def reduce_norm(module: nn.Module, size: int) -> None:
    """Let a norm, reduced before or not, count removed units as zeros; ``size`` is the number of units at the start."""
    module.__class__ = next((new for kind, new in _REDUCED.items() if runs_as(module, kind)), type(module))
    if not isinstance(module, (ReducedLayerNorm, ReducedRMSNorm)):
        raise TypeError(f"Expected nn.LayerNorm or nn.RMSNorm to lose units, but got {type(module).__name__}.")
    module.size = size


class _Indexed(nn.Module):
    """Units at some indices of a dimension of ``size``."""

    index: Tensor

    def __init__(self, units: Sequence[int], dim: int, size: int) -> None:
        super().__init__()
        self.dim, self.size = dim, size
        self.register_buffer("index", torch.tensor(units, dtype=torch.long))


class Select(_Indexed):
    """Some units of a tensor, in order; ``size`` is how many there are.

    ``reads_input`` says that it selects from an input of the network that nothing else reads.
    """

    def __init__(self, units: Sequence[int], dim: int, size: int, reads_input: bool) -> None:
        super().__init__(units, dim, size)
        self.reads_input = reads_input
        self.is_done = False  # the caller has selected the units

    def forward(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The selected units of ``size``; ``dim`` is ignored. A ValueError says that ``x`` has more units or fewer."""
        return x if self.is_done else _selected(x, self.index, self.dim, self.size)


class Expand(_Indexed):
    """Units of a tensor, put at ``units`` of ``size``, and zeros between them."""

    def forward(self, x: Tensor, dim: int | None = None) -> Tensor:
        """``size`` units in dimension ``self.dim``, zeros where there were none; the argument ``dim`` is ignored."""
        return _expanded(x, self.index, self.dim, self.size)


def _selected(x: Tensor, index: Tensor, dim: int, size: int) -> Tensor:
    is_script = torch.jit.is_scripting()  # type: ignore[attr-defined]
    if (is_script or not is_tracing()) and x.shape[dim] != size:
        raise ValueError(
            f"Expected {size} units in dimension {dim}, of which {len(index)} are read, but got a tensor of shape "
            f"{list(x.shape)}."
        )
    return x.index_select(dim, index)


def _expanded(x: Tensor, index: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_zeros(shape).index_copy(dim, index, x)


# Symbolic traces take them whole, as they can't follow sizes.
torch.fx.wrap("_selected")
torch.fx.wrap("_expanded")


class NoGate(nn.Identity):
    """What is left of a gate whose values are 1 or went into weights, for code that calls it with a dimension."""

    def forward(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The units as they are; ``dim`` is ignored."""
        return x


class RoutedGate(nn.Module):
    """A gate on the units that ``before`` selects; ``after`` puts zeros between them. Either may do nothing."""

    def __init__(self, before: nn.Module, gate: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.gate, self.after = before, gate, after

    def forward(self, x: Tensor, dim: int | None = None) -> Tensor:
        """Select the units that have gates, multiply, and put them among zeros; ``dim`` is ignored."""
        out: Tensor = self.after(self.gate(self.before(x)))
        return out

    def narrow(self, before: nn.Module, gate: nn.Module, after: nn.Module) -> None:
        """Gate fewer units: the arguments replace the gate."""
        self.before, self.after = _chained(self.before, before), _chained(after, self.after)
        self.gate = gate


def _chained(one: nn.Module, other: nn.Module) -> nn.Module:
    """Two selections, or two expansions, one after the other, as one."""
    if isinstance(one, nn.Identity):
        return other
    if isinstance(one, Select) and isinstance(other, Select):
        one.index = one.index[other.index]
    elif isinstance(one, Expand) and isinstance(other, Expand):
        other.index = other.index[one.index]
        return other
    return one


@dataclass(frozen=True)
class GateChange:
    """What a gate becomes where units on one side of it leave, or both, and weights may take it in."""

    site: str
    units: tuple[int, ...]  # that stay gates, in order
    size: int  # number of units that come in
    read: tuple[int, ...]  # for each of ``units``, its index among those that come in
    put: tuple[int, ...]  # for each of ``units``, its index among those that go out, between which there are zeros
    out: int  # number of units that go out
    reads_input: bool  # whether what comes in is an input of the network that nothing else reads
    fixed: tuple[float, ...] | None  # the gates of ``units``; None if all are 1, went into weights, or stay random
    random: bool  # whether the gate stays a site of a model
    takes_dim: bool  # whether code calls it with a dimension


def change_gate(
    network: nn.Module, path: str, change: GateChange, like: Tensor, fused: Set[nn.Module]
) -> tuple[nn.Module, tuple[nn.Module, int]]:
    """What is to be replaced in a network that a gate changes, by what, and how many units that gets.

    ``like`` is a parameter of the network, for device and type; ``fused`` are the modules that torch's fused
    transformer layers may bypass.
    """
    gate = network.get_submodule(path)
    assert isinstance(gate, GateLayer)
    before: nn.Module = nn.Identity()
    after: nn.Module = nn.Identity()
    new: nn.Module = NoGate() if change.takes_dim else nn.Identity()
    if change.read != tuple(range(change.size)):
        before = Select(change.read, gate.dim, change.size, change.reads_input).to(like.device)
    if change.put != tuple(range(change.out)):
        after = Expand(change.put, gate.dim, change.out).to(like.device)
    if change.random and change.units:
        if len(change.units) < gate.size:
            gate.narrow(torch.tensor(change.units, dtype=torch.long))
        gate.site_name = change.site
        new = gate
    elif change.fixed is not None and change.units:
        new = FixedGate(torch.tensor(change.fixed, dtype=torch.float64).to(like), gate.dim)
        new._forward_pre_hooks.clear()
    holder = network.get_submodule(path.rpartition(".")[0])
    if isinstance(holder, RoutedGate):
        holder.narrow(before, new, after)
        return holder, (holder.train(gate.training), change.size)
    if not (isinstance(before, nn.Identity) and isinstance(after, nn.Identity)):
        new = RoutedGate(before, new, after)
    if not isinstance(new, (GateLayer, nn.Identity)) and gate in fused:
        new.register_forward_pre_hook(keep_being_called)
    return gate, (new.train(gate.training), change.size)


# ------------------------------------------------------------ selections and expansions in a network that shrinks again


def move_units(own: Rule, maps: Maps, operation: Operation) -> None:
    """Before and after a selection or an expansion a unit is the same; elsewhere the engine's own rule holds."""
    module = maps.module()
    if not isinstance(module, _Indexed):
        return own(maps, operation)
    is_select = isinstance(module, Select)
    before, output = operation.value("self"), operation.output
    x = before if is_select else operation.value("source")
    unit_dim = module.dim % x.rank
    for dim in range(x.rank):
        if not is_select:
            maps.same(before, dim, output, dim)
        if dim != unit_dim:
            maps.passes(x, dim, output, dim)
    index, each = module.index.cpu().numpy(), np.arange(len(module.index))
    if not is_select:
        maps.set_kinds(output, unit_dim, np.full(module.size, ZERO, dtype=np.uint8))
    maps.part(x, unit_dim, output, unit_dim, *((index, each) if is_select else (each, index)))
    maps.tie(maps.axes[operation.value("index")][0], maps.axes[output if is_select else x][unit_dim])


for _name in ("aten::index_select", "aten::index_copy"):
    _entry = find_entry(_name)
    assert _entry.rule is not None
    ENTRIES[_name] = replace(_entry, rule=partial(move_units, _entry.rule))


def new_indices(network: nn.Module, analysis: Analysis) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """By path of a selection or an expansion, its new indices, and how many units it selects from or makes."""
    indices: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for operation in analysis.maps.recording.operations:
        module = network.get_submodule(operation.path)
        if isinstance(module, _Indexed) and "index" in operation.arguments:
            is_select = isinstance(module, Select)
            x = operation.value("self" if is_select else "source")
            ends = x, operation.output
            few, many = (
                analysis.solution.remaining(analysis.maps.axes[value][module.dim % x.rank])
                for value in (reversed(ends) if is_select else ends)
            )
            indices[operation.path] = tuple(np.searchsorted(many, module.index.cpu().numpy()[few]).tolist())
            sizes[operation.path] = len(many)
    return indices, sizes
