"""Squared norms of the weights that read each unit of a gate, the gates' part of weight decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nn.utils import parametrize

from pyro_l0.nn.calls import record_called
from pyro_l0.nn.cost import PerDevice
from pyro_l0.nn.engine.analysis import analyse
from pyro_l0.nn.engine.readers import Use, find_readers
from pyro_l0.nn.engine.record import Example
from pyro_l0.nn.gate import gate_names

__all__ = ["SquareNorms", "square_norms"]


def square_norms(network: nn.Module, example: Example) -> SquareNorms:
    """Make the functions for ``square_norm`` of :class:`~pyro_l0.infer.L0_ELBO`, which weights them by P(z != 0).

    Args:
        network: any network with gates.
        example: what it is called with, as :class:`~pyro_l0.nn.NetworkCost` takes it.

    Returns:
        By gate site, a function that returns the squared norm of the weights that read each of its units, shape
        ``(size,)`` (Eq. 17 of the L0 paper).

    Raises:
        ValueError: a gate is never called or computes weights, or its units are read by weights that are neither
            parameters nor parametrised.

    Example:
        >>> from pyro_l0.nn import L0Gate
        >>> net = nn.Sequential(L0Gate(2), nn.Linear(2, 3))
        >>> square_norms(net, torch.ones(1, 2))["0"]().shape
        torch.Size([2])
    """
    recording = record_called(network, example)
    norms = {name: _SquareNorm(gate.size) for name, gate in gate_names(network).items()}
    for use in find_readers(analyse(recording, {}).maps):
        norms[use.site].add(_weight(network, use), use)
    return SquareNorms(norms)


@dataclass(frozen=True)
class _Weight:
    """Where a weight is found, and which of its entries are columns."""

    module: nn.Module
    name: str
    dim: int  # whose entries are columns
    groups: int  # of a convolution, each with columns of its own

    def now(self) -> Tensor:
        """The weight at this moment, differentiable; a parametrisation computes it at each access."""
        weight: Tensor = getattr(self.module, self.name)
        return weight

    def columns(self) -> Tensor:
        """The weight with what one unit reads in each slice of dimension 1."""
        weight = self.now()
        if self.groups > 1:
            parts: Tensor = weight.unflatten(0, (self.groups, -1)).movedim(0, 1)
            return parts.flatten(1, 2)
        return weight if self.dim == 1 else weight.movedim(self.dim, 1)


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
    """By gate site, a function of no arguments that returns the squared norms; ``square_norms`` makes them."""

    def together(self, names: Sequence[str]) -> Tensor | None:
        """The norms of several sites side by side, shape ``(n,)``; None if one of the functions has been replaced."""
        norms = [norm for norm in map(self.get, names) if isinstance(norm, _SquareNorm)]
        if len(norms) < len(names):
            return None
        # A layer behind a flattening is read by the maps' gates and by those of its features, and is gone over once.
        columns = _columns(list(dict.fromkeys(weight for norm in norms for weight in norm.weights)))
        return torch.cat([norm.of(columns) for norm in norms])


def _columns(weights: Sequence[_Weight]) -> dict[_Weight, Tensor]:
    """The squared norms of each weight's columns, in one node."""
    norms = _SquaredColumns.apply(*(weight.columns() for weight in weights))  # type: ignore[no-untyped-call]
    return dict(zip(weights, norms, strict=True))


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


class _SquareNorm:
    """Squared norm of the weights that read each unit of a gate, computed at each call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.weights: list[_Weight] = []
        # Which columns of a weight read units, None for all in order, and which units; None if both are all in order.
        self._units: list[tuple[PerDevice | None, PerDevice] | None] = []

    def add(self, weight: _Weight, use: Use) -> None:
        """Let a weight that reads the gate's units count, by which of its columns read which unit."""
        width = use.weight.shape[use.dim] * use.groups
        is_all = np.array_equal(use.entries, np.arange(width))
        entries = None if is_all else PerDevice(torch.from_numpy(use.entries))
        is_whole = is_all and width == self.size and np.array_equal(use.units, use.entries)
        self.weights.append(weight)
        self._units.append(None if is_whole else (entries, PerDevice(torch.from_numpy(use.units))))

    def __call__(self) -> Tensor:
        """Of each unit, the sum of squares of the weights that read it, shape ``(size,)``, differentiable."""
        return self.of(_columns(self.weights))

    def of(self, columns: Mapping[_Weight, Tensor]) -> Tensor:
        """As a call, from the sum of squares of each column by weight, which several gates may share."""
        total: Tensor | None = None
        for weight, parts in zip(self.weights, self._units, strict=True):
            norms = columns[weight]
            if parts is not None:
                entries, units = parts
                norms = norms if entries is None else norms[entries.on(norms.device)]
                norms = norms.new_zeros(self.size).index_add(0, units.on(norms.device), norms)
            total = norms if total is None else total + norms
        return torch.zeros(self.size) if total is None else total
