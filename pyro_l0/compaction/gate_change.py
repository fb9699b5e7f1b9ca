"""What a gate becomes: nothing, fixed gates, a selection of units, zeros between units, or a smaller gate."""

# Without annotations as strings, which torch.jit.script can't read.
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pyro_l0.nn.engine import Analysis, Maps, Operation, find_rule, rule
from pyro_l0.nn.engine.slots import ZERO
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import Gate
from pyro_l0.nn.gate_layer import GateLayer, keep_being_called
from pyro_l0.nn.hooks import replace_gate

__all__ = ["Expand", "GateChange", "RoutedGate", "Select", "change_gate", "new_indices"]


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
        """The selected units."""
        return x if self.is_done else _selected(x, self.index, self.dim, self.size)


class Expand(_Indexed):
    """Units of a tensor, put at ``units`` of ``size``, and zeros between them."""

    def forward(self, x: Tensor, dim: int | None = None) -> Tensor:
        """All units."""
        return _expanded(x, self.index, self.dim, self.size)


def _selected(x: Tensor, index: Tensor, dim: int, size: int) -> Tensor:
    is_script = torch.jit.is_scripting()  # type: ignore[attr-defined]
    if (is_script or torch._C._get_tracing_state() is None) and x.shape[dim] != size:
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
        """The units."""
        return x


class RoutedGate(nn.Module):
    """A gate on the units that ``before`` selects; ``after`` puts zeros between them. Either may do nothing."""

    def __init__(self, before: nn.Module, gate: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.gate, self.after = before, gate, after

    def forward(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The gated units among zeros."""
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
    """What a gate in a network becomes."""

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


def change_gate(network: nn.Module, path: str, change: GateChange, like: Tensor) -> None:
    """Change a gate in a network, in place; ``like`` is a parameter of the network, for device and type."""
    gate = network.get_submodule(path)
    assert isinstance(gate, GateLayer)
    before: nn.Module = nn.Identity()
    after: nn.Module = nn.Identity()
    new: nn.Module = NoGate() if change.takes_dim and not isinstance(gate, Gate) else nn.Identity()
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
        replace_gate(network, holder, holder.train(gate.training), change.size)
        return
    if not (isinstance(before, nn.Identity) and isinstance(after, nn.Identity)):
        new = RoutedGate(before, new, after)
    fused = [layer for layer in network.modules() if isinstance(layer, nn.TransformerEncoderLayer)]
    if not isinstance(new, (GateLayer, nn.Identity)) and any(gate in layer.modules() for layer in fused):
        new.register_forward_pre_hook(keep_being_called)
    replace_gate(network, gate, new.train(gate.training), change.size)


# ------------------------------------------------------------ selections and expansions in a network that shrinks again


_OWN = {name: find_rule(name) for name in ("aten::index_select", "aten::index_copy")}  # the engine's


@rule("aten::index_select", "aten::index_copy")
def move_units(maps: Maps, operation: Operation) -> None:
    """Before and after a selection or an expansion a unit is the same; elsewhere the engine's own rule holds."""
    module = maps.module()
    if not isinstance(module, _Indexed):
        own = _OWN[operation.name.removesuffix("_")]
        assert own is not None
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
        maps.set_states(output, unit_dim, np.full(module.size, ZERO, dtype=np.uint8))
    maps.part(x, unit_dim, output, unit_dim, *((index, each) if is_select else (each, index)))
    maps.tie(maps.axes[operation.value("index")][0], maps.axes[output if is_select else x][unit_dim])


def new_indices(network: nn.Module, analysis: Analysis) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """By path of a selection or an expansion, its new indices, and how many units it selects from or makes."""
    indices: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for operation in analysis.maps.recording.operations:
        module = network.get_submodule(operation.path)
        is_select = isinstance(module, Select) and operation.name == "aten::index_select"
        is_expand = isinstance(module, Expand) and operation.name == "aten::index_copy"
        if is_select or is_expand:
            assert isinstance(module, _Indexed)
            x = operation.value("self" if is_select else "source")
            ends = x, operation.output
            few, many = (
                analysis.solution.kept(analysis.maps.axes[value][module.dim % x.rank])
                for value in (reversed(ends) if is_select else ends)
            )
            indices[operation.path] = tuple(np.searchsorted(many, module.index.cpu().numpy()[few]).tolist())
            sizes[operation.path] = len(many)
    return indices, sizes
