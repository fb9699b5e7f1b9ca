"""Squared norms of the weights that read each unit of a gate, the gates' part of weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx

from pyro_l0.fast.gated_linear import record_norms, recorded_norms
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.kinds import LayerModule
from pyro_l0.nn.reading import read_called
from pyro_l0.nn.units import PerDevice

__all__ = ["SquareNorms", "square_norms"]


def square_norms(network: nn.Module, example_input: Tensor) -> SquareNorms:
    """By gate site, a function that returns the squared norm of the weights that read each of its units.

    For ``square_norm`` of :class:`~pyro_l0.infer.L0_ELBO`, which weighs it with P(z != 0) (Eq. 17).

    Args:
        network: a network of dense layers, convolutions and gates.
        example_input: one batch of inputs, for the shapes.

    Example:
        >>> from pyro_l0.nn import Gate
        >>> net = nn.Sequential(Gate(2), nn.Linear(2, 3))
        >>> square_norms(net, torch.ones(1, 2))["0"]().shape
        torch.Size([2])
    """
    graph = read_called(network, example_input)
    layers: dict[str, list[_Read]] = {name: [] for name in graph.sites.values()}
    for site, layer, inputs, units in graph.readers():
        layers[site].append(_Read(graph.module(layer), layer.in_units, inputs, units))
    sizes = {name: gate.size for name, gate in gate_names(network).items()}
    return SquareNorms({name: _SquareNorm(sizes[name], found) for name, found in layers.items()})


class SquareNorms(dict[str, Callable[[], Tensor]]):
    """By gate site, a function that returns the squared norm of the weights that read each of its units."""

    def during(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """A context for the network's forward pass and the norms of some sites after it.

        Dense layers that multiply their weights by gates compute the norms, and their part of the gradient, on the way.
        """
        layers = [layer for norm in map(self.get, names) if isinstance(norm, _SquareNorm) for layer in norm.modules]
        # Weights that a parametrisation computes at each access are others each time.
        weights = [layer._parameters.get("weight") for layer in layers]
        return record_norms(weight for weight in weights if weight is not None)

    def together(self, names: Sequence[str]) -> Tensor | None:
        """The norms of several sites side by side, shape ``(n,)``, going over no weights twice.

        None if one of the functions has been replaced by another's.
        """
        norms = [norm for norm in map(self.get, names) if isinstance(norm, _SquareNorm)]
        if len(norms) < len(names):
            return None
        layers = list(dict.fromkeys(layer for norm in norms for layer in norm.modules))
        columns = _columns(layers)
        plain = all(len(norm.reads) == 1 and norm.reads[0].is_whole(norm.size) for norm in norms)
        if plain and len(layers) == len(norms):
            return torch.cat(list(columns.values()))
        # A layer behind a flattening is read by the maps' gates and by those of its features, and is gone over once.
        return torch.cat([norm.of(columns) for norm in norms])


def _columns(layers: Sequence[LayerModule]) -> dict[LayerModule, Tensor]:
    """The squared norms of each layer's columns: recorded ones, and all others in one node."""
    weights = {layer: layer.weight for layer in layers}
    recorded = {layer: recorded_norms(weight) for layer, weight in weights.items()}
    others = [layer for layer, norms in recorded.items() if norms is None]
    if others:
        columns = _SquaredColumns.apply(*(weights[layer] for layer in others))  # type: ignore[no-untyped-call]
        recorded.update(zip(others, columns, strict=True))
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
    """A layer that reads units of a gate: which of its inputs, and the unit that each stems from."""

    def __init__(self, module: LayerModule, size: int, inputs: Tensor, units: Tensor) -> None:
        self.module = module
        self.inputs = None if torch.equal(inputs, torch.arange(size)) else PerDevice(inputs)
        self.units = PerDevice(units)
        self._in_order = self.inputs is None and torch.equal(units, inputs)
        self._size = size

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
        self.modules = [read.module for read in reads]

    def __call__(self) -> Tensor:
        """Shape ``(size,)``."""
        return self.of(_columns(self.modules))

    def of(self, columns: Mapping[LayerModule, Tensor]) -> Tensor:
        """The same, from the squared norms of each layer's columns."""
        total: Tensor | None = None
        for read in self.reads:
            norms = read.of_units(columns[read.module], self.size)
            total = norms if total is None else total + norms
        return torch.zeros(self.size) if total is None else total
