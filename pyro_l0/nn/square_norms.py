"""Squared norms of the weights that read each unit of a gate, the gates' part of weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nn.utils import parametrize

from pyro_l0.fast.gated_linear import record_norms, recorded_norms
from pyro_l0.nn.engine.analysis import analyse
from pyro_l0.nn.engine.readers import Use, find_readers
from pyro_l0.nn.engine.record import Example
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.per_device import PerDevice
from pyro_l0.nn.read_called import record_called

__all__ = ["SquareNorms", "square_norms"]


def square_norms(network: nn.Module, example: Example) -> SquareNorms:
    """By gate site, a function that returns the squared norm of the weights that read each of its units.

    For ``square_norm`` of :class:`~pyro_l0.infer.L0_ELBO`, which weighs it with P(z != 0) (Eq. 17).

    Args:
        network: any network with gates.
        example: what it is called with, as :class:`~pyro_l0.nn.NetworkCost` takes it.

    Raises:
        ValueError: a gate is never called or computes weights, or its units are read by weights that are neither
            parameters nor parametrised.

    Example:
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(Gate(2), nn.Linear(2, 3))
        >>> square_norms(net, torch.ones(1, 2))["0"]().shape
        torch.Size([2])
    """
    recording = record_called(network, example)
    sizes = {name: gate.size for name, gate in gate_names(network).items()}
    reads: dict[str, list[_Read]] = {name: [] for name in sizes}
    for use in find_readers(analyse(recording, {}).maps):
        reads[use.site].append(_Read(_weight(network, use), use))
    return SquareNorms({name: _SquareNorm(sizes[name], found) for name, found in reads.items()})


@dataclass(frozen=True)
class _Weight:
    """Where a weight is found, and which of its entries are columns.

    Attributes:
        module: the module that holds it.
        name: its name there.
        dim: its dimension whose entries are columns.
        groups: number of groups of a convolution, each with columns of its own.
    """

    module: nn.Module
    name: str
    dim: int
    groups: int

    def now(self) -> Tensor:
        """The weight as it is, which a parametrisation computes at each access."""
        weight: Tensor = getattr(self.module, self.name)
        return weight

    def columns(self) -> Tensor:
        """The weight with the columns in dimension 1."""
        weight = self.now()
        if self.groups > 1:
            parts: Tensor = weight.unflatten(0, (self.groups, -1)).movedim(0, 1)
            return parts.flatten(1, 2)
        return weight if self.dim == 1 else weight.movedim(self.dim, 1)

    def parameter(self) -> Tensor | None:
        """The parameter whose norms a dense layer may record on the way."""
        # Weights that a parametrisation computes at each access are others each time.
        parameter: Tensor | None = self.module._parameters.get(self.name)
        return parameter if self.dim == 1 and self.groups == 1 else None


def _weight(network: nn.Module, use: Use) -> _Weight:
    name = use.weight.names[0] if use.weight.names else ""
    if not name:
        module = network.get_submodule(use.path)
        found = _Weight(module, "weight", use.dim, use.groups)
        if parametrize.is_parametrized(module, "weight") and found.now().shape == use.weight.shape:
            return found
        raise ValueError(
            f"Expected units of gate {use.site!r} that are read by parameters, but {use.path or 'the network'!r} reads "
            f"them by weights of shape {use.weight.shape} that it computes; compute them by "
            "torch.nn.utils.parametrize, or give L0_ELBO a square_norm of your own."
        )
    path, _, attribute = name.partition(".parametrizations.") if ".parametrizations." in name else name.rpartition(".")
    return _Weight(network.get_submodule(path), attribute.split(".")[0], use.dim, use.groups)


class SquareNorms(dict[str, Callable[[], Tensor]]):
    """By gate site, a function that returns the squared norm of the weights that read each of its units."""

    def during(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """A context for the network's forward pass and the norms of some sites after it.

        Dense layers that multiply their weights by gates compute the norms, and their part of the gradient, on the way.
        """
        found = [weight for norm in map(self.get, names) if isinstance(norm, _SquareNorm) for weight in norm.weights]
        parameters = [weight.parameter() for weight in found]
        return record_norms(parameter for parameter in parameters if parameter is not None)

    def together(self, names: Sequence[str]) -> Tensor | None:
        """The norms of several sites side by side, shape ``(n,)``, going over no weights twice.

        None if one of the functions has been replaced by another's.
        """
        norms = [norm for norm in map(self.get, names) if isinstance(norm, _SquareNorm)]
        if len(norms) < len(names):
            return None
        weights = list(dict.fromkeys(weight for norm in norms for weight in norm.weights))
        columns = _columns(weights)
        plain = all(len(norm.reads) == 1 and norm.reads[0].is_whole(norm.size) for norm in norms)
        if plain and len(weights) == len(norms):
            return torch.cat(list(columns.values()))
        # A layer behind a flattening is read by the maps' gates and by those of its features, and is gone over once.
        return torch.cat([norm.of(columns) for norm in norms])


def _columns(weights: Sequence[_Weight]) -> dict[_Weight, Tensor]:
    """The squared norms of each weight's columns: recorded ones, and all others in one node."""
    now = {weight: weight.columns() for weight in weights}
    recorded = {weight: recorded_norms(columns) for weight, columns in now.items()}
    others = [weight for weight, norms in recorded.items() if norms is None]
    if others:
        norms = _SquaredColumns.apply(*(now[weight] for weight in others))  # type: ignore[no-untyped-call]
        recorded.update(zip(others, norms, strict=True))
    return recorded  # type: ignore[return-value]  # there are none left without


class _SquaredColumns(torch.autograd.Function):
    """Squared norms of columns, over all dimensions but the second, with one pass over the weights per gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*weights)
        return tuple(w.square().sum([dim for dim in range(w.dim()) if dim != 1]) for w in weights)

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: Tensor) -> tuple[Tensor, ...]:
        weights: tuple[Tensor, ...] = ctx.saved_tensors
        return tuple(
            w * (2 * grad).reshape((1, -1) + (1,) * (w.dim() - 2)) for w, grad in zip(weights, grads, strict=True)
        )


class _Read:
    """A weight that reads units of a gate: by which of its columns, and the unit that each reads."""

    def __init__(self, weight: _Weight, use: Use) -> None:
        self.weight = weight
        self._size = use.weight.shape[use.dim] * use.groups
        is_all = np.array_equal(use.entries, np.arange(self._size))
        self.inputs = None if is_all else PerDevice(torch.from_numpy(use.entries))
        self.units = PerDevice(torch.from_numpy(use.units))
        self._in_order = is_all and np.array_equal(use.units, use.entries)

    def is_whole(self, size: int) -> bool:
        """Whether its inputs are the units, in order."""
        return self._in_order and self._size == size

    def of_units(self, norms: Tensor, size: int) -> Tensor:
        """What belongs to each of the gate's units, of the squared norms for each of the layer's inputs."""
        if self.is_whole(size):
            return norms
        if self.inputs is not None:
            norms = norms[self.inputs.on(norms.device)]
        return norms.new_zeros(size).index_add(0, self.units.on(norms.device), norms)


class _SquareNorm:
    """Squared norm of the weights of some layers that read each unit, computed at each call."""

    def __init__(self, size: int, reads: list[_Read]) -> None:
        self.size = size
        self.reads = reads
        self.weights = [read.weight for read in reads]

    def __call__(self) -> Tensor:
        """Shape ``(size,)``."""
        return self.of(_columns(self.weights))

    def of(self, columns: Mapping[_Weight, Tensor]) -> Tensor:
        """The same, from the squared norms of each layer's columns."""
        total: Tensor | None = None
        for read in self.reads:
            norms = read.of_units(columns[read.weight], self.size)
            total = norms if total is None else total + norms
        return torch.zeros(self.size) if total is None else total
