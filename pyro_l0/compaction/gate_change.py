"""A selection of units, and zeros between units: what may stand where a gate stood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pyro_l0.nn.engine import Analysis, Maps, Operation, find_rule, rule
from pyro_l0.nn.engine.slots import ZERO
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import Gate, keep_being_called
from pyro_l0.nn.hooks import replace_gate

__all__ = ["Expand", "GateChange", "RoutedGate", "Select", "change_gate", "new_indices"]


class Select(nn.Module):
    """Some units of a tensor.

    Args:
        units: which, in order.
        dim: dimension of the units.
        size: number of units that there are.
        reads_input: whether what it selects from is an input of the network that nothing else reads.

    Raises:
        ValueError: the input has another number of units.
    """

    index: Tensor

    def __init__(self, units: Sequence[int], dim: int, size: int, reads_input: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.size = size
        self.reads_input = reads_input
        self.is_done = False  # by whoever hands in the units
        self.register_buffer("index", torch.tensor(units, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """The selected units."""
        if self.is_done:
            return x
        if x.shape[self.dim] != self.size:
            raise ValueError(
                f"Expected {self.size} units in dimension {self.dim}, of which {len(self.index)} are read, but got a "
                f"tensor of shape {tuple(x.shape)}."
            )
        return x.index_select(self.dim, self.index)


class Expand(nn.Module):
    """Units of a tensor and zeros between them.

    Args:
        units: where the tensor's units go, in order.
        dim: dimension of the units.
        size: number of units of the result.
    """

    index: Tensor

    def __init__(self, units: Sequence[int], dim: int, size: int) -> None:
        super().__init__()
        self.dim = dim
        self.size = size
        self.register_buffer("index", torch.tensor(units, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """All units."""
        shape = list(x.shape)
        shape[self.dim] = self.size
        return x.new_zeros(shape).index_copy(self.dim, self.index, x)


class RoutedGate(nn.Module):
    """A gate on some units of its input, with zeros between those of its output.

    Args:
        before: selects the units that are gated, or does nothing.
        gate: their gates.
        after: puts zeros between them, or does nothing.
    """

    def __init__(self, before: nn.Module, gate: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before = before
        self.gate = gate
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        """The gated units among zeros."""
        out: Tensor = self.after(self.gate(self.before(x)))
        return out

    def narrow(self, before: nn.Module, gate: nn.Module, after: nn.Module) -> None:
        """Gate fewer units; the arguments are those that stand in the place of the gate."""
        self.before, self.after = _chained(self.before, before), _chained(after, self.after)
        self.gate = gate


def _chained(one: nn.Module, other: nn.Module) -> nn.Module:
    """Two selections, or two expansions, one behind the other, as one."""
    if isinstance(one, nn.Identity) or isinstance(other, nn.Identity):
        return other if isinstance(one, nn.Identity) else one
    if isinstance(one, Select) and isinstance(other, Select):
        one.index = one.index[other.index]
        return one
    assert isinstance(one, Expand)
    assert isinstance(other, Expand)
    other.index = other.index[one.index]
    return other


@dataclass(frozen=True)
class GateChange:
    """What becomes of a gate in a network.

    Attributes:
        site: its name.
        units: the units of the gate that stay gates, in order.
        size: number of units that come in.
        read: for each of ``units``, its place among those that come in.
        put: for each of ``units``, its place among those that go out, between which there are zeros.
        out: number of units that go out.
        reads_input: whether what comes in is an input of the network that nothing else reads.
        fixed: the fixed gates of ``units``; None if they are all 1, went into weights, or stay random.
        random: whether the gate stays a site of a model.
    """

    site: str
    units: tuple[int, ...]
    size: int
    read: tuple[int, ...]
    put: tuple[int, ...]
    out: int
    reads_input: bool
    fixed: tuple[float, ...] | None
    random: bool

    @property
    def is_straight(self) -> bool:
        """Whether the units that come in go out, in the same order."""
        return self.read == tuple(range(self.size)) and self.put == tuple(range(self.out))


def change_gate(network: nn.Module, path: str, change: GateChange, like: Tensor) -> None:
    """Carry out what becomes of a gate.

    Args:
        network: the network, changed in place.
        path: of the gate in it.
        change: see :class:`GateChange`. Without units the gate is no site any more.
        like: a parameter of the network, for device and type.
    """
    gate = network.get_submodule(path)
    assert isinstance(gate, Gate)
    before: nn.Module = nn.Identity()
    after: nn.Module = nn.Identity()
    if change.read != tuple(range(change.size)):
        before = Select(change.read, gate.dim, change.size, change.reads_input).to(like.device)
    if change.put != tuple(range(change.out)):
        after = Expand(change.put, gate.dim, change.out).to(like.device)
    if change.random and change.units:
        _shrink_gate(gate, change.units)
        gate.site_name = change.site
        new: nn.Module = gate
    else:
        new = _fixed(change, gate.dim, like)
        new.register_forward_pre_hook(keep_being_called)
    holder = network.get_submodule(path.rpartition(".")[0])
    if isinstance(holder, RoutedGate):
        holder.narrow(before, new.train(gate.training), after)
        new = holder
    elif not change.is_straight:
        new = RoutedGate(before, new, after)
    replace_gate(network, holder if new is holder else gate, new.train(gate.training), change.size)


def _fixed(change: GateChange, dim: int, like: Tensor) -> nn.Module:
    if change.fixed is None or not change.units:
        return nn.Identity()
    return FixedGate(torch.tensor(change.fixed, dtype=torch.float64).to(like), dim)


def _shrink_gate(gate: Gate, units: tuple[int, ...]) -> None:
    """Keep some units of a gate, in place; its site's name stays."""
    if len(units) == gate.size:
        return
    index, size = torch.tensor(units, dtype=torch.long), gate.size
    gate.prior = gate.prior.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == (size,) else x)
    gate.prior = gate.prior.expand((len(units),))
    gate.size = len(units)
    gate._site = gate.prior.to_event(1)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------ selections and expansions in a network that shrinks again


_look_up, _put_in = find_rule("aten::index_select"), find_rule("aten::index_copy")


@rule("aten::index_select")
def select_units(maps: Maps, operation: Operation) -> None:
    """A unit that is selected is one unit in front and behind; what else is looked up is another rule's."""
    module = maps.module()
    if not isinstance(module, Select):
        assert _look_up is not None
        _look_up(maps, operation)
        return
    x, output = operation.value("self"), operation.output
    unit_dim = module.dim % x.rank
    for dim in range(x.rank):
        if dim != unit_dim:
            maps.passes(x, dim, output, dim)
    maps.part(x, unit_dim, output, unit_dim, module.index.cpu().numpy(), np.arange(len(module.index)))
    maps.tie(maps.axes[operation.value("index")][0], maps.axes[output][unit_dim])


@rule("aten::index_copy")
def expand_units(maps: Maps, operation: Operation) -> None:
    """A unit that is put between zeros is one unit in front and behind; what else is put in is another rule's."""
    module = maps.module()
    if not isinstance(module, Expand):
        assert _put_in is not None
        _put_in(maps, operation)
        return
    zeros, x, output = operation.value("self"), operation.value("source"), operation.output
    unit_dim = module.dim % x.rank
    for dim in range(x.rank):
        maps.same(zeros, dim, output, dim)
        if dim != unit_dim:
            maps.passes(x, dim, output, dim)
    maps.set_states(output, unit_dim, np.full(module.size, ZERO, dtype=np.uint8))
    maps.part(x, unit_dim, output, unit_dim, np.arange(x.shape[unit_dim]), module.index.cpu().numpy())
    maps.tie(maps.axes[operation.value("index")][0], maps.axes[x][unit_dim])


def new_indices(network: nn.Module, analysis: Analysis) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """What becomes of the selections and expansions of a network of which units leave.

    Returns:
        By path of one, its places, and the number of units that it selects from or expands to.
    """
    indices: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for operation in analysis.maps.recording.operations:
        module = network.get_submodule(operation.path)
        if operation.name not in ("aten::index_select", "aten::index_copy"):
            continue
        if not isinstance(module, (Select, Expand)):
            continue
        is_select = isinstance(module, Select)
        x = operation.value("self" if is_select else "source")
        fronts, behinds = (analysis.maps.axes[value][module.dim % x.rank] for value in (x, operation.output))
        front, behind = analysis.solution.kept(fronts), analysis.solution.kept(behinds)
        many, few = (front, behind) if is_select else (behind, front)
        indices[operation.path] = tuple(np.searchsorted(many, module.index.cpu().numpy()[few]).tolist())
        sizes[operation.path] = len(many)
    return indices, sizes
