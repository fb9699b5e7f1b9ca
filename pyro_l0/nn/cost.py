"""Weights and multiply-adds of a network as differentiable functions of its gates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.nn.deferred import record_norms, recorded_norms
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.graph import GateGraph, Kind, Layer, PerDevice, read_network

__all__ = ["NetworkCost", "square_norms"]


class NetworkCost:
    """Counts what open gates cost, weights without biases.

    A weight is left if the unit it reads and the unit it writes are both there, so closed units upstream and
    downstream count: between gates with counts a and b a dense layer keeps a * b weights, a convolution a * b kernels,
    and a branch without open gates keeps nothing. For gates of 0 and 1 the counts are those of the compacted network;
    for probabilities they are expectations under independent gates, where branches meet up to their correlation.

    Args:
        network: a network of dense layers, convolutions and :class:`~pyro_l0.nn.Gate` layers.
        example_input: one batch of inputs, for the shapes.

    Attributes:
        group_sizes: by gate site, the number of weights that read one of its units: :math:`|g|` of Eq. 16, as
            ``group_size`` of :class:`~pyro_l0.infer.L0_ELBO` takes it.
        filter_sizes: by gate site, the number of weights that write one of its units: a convolution's filter, the
            group that the L0 paper prices for feature maps.
        total_weights: weights with every gate open.
        total_macs: multiply-adds per example with every gate open.

    Raises:
        ValueError: the network holds a layer that can't be counted, or a gate value is missing or misshapen.

    Example:
        >>> from pyro_l0.nn import Gate
        >>> cost = NetworkCost(nn.Sequential(Gate(4), nn.Linear(4, 3), Gate(3), nn.Linear(3, 2)), torch.ones(1, 4))
        >>> cost.group_sizes, cost.total_weights
        ({'0': 3.0, '2': 2.0}, 18)
        >>> cost.weights({"0": torch.tensor([1.0, 1.0, 0.0, 0.0]), "2": torch.tensor([1.0, 0.0, 0.0])})
        tensor(4.)

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 16 and section 4.1.
    """

    def __init__(self, network: nn.Module, example_input: Tensor) -> None:
        self._graph = read_network(network, example_input)
        self._sizes = {name: gate.size for name, gate in gate_names(network).items()}
        layers = self._graph.layers().values()
        self.total_weights = sum(layer.in_units * layer.out_units * layer.taps for layer in layers)
        self.total_macs = sum(layer.in_units * layer.out_units * layer.taps * layer.positions for layer in layers)
        self.group_sizes = dict.fromkeys(self._sizes, 0.0)
        self.filter_sizes = dict.fromkeys(self._sizes, 0.0)
        for site, layer, units in _readers(self._graph):
            # Per gate; behind a flattening a map is as many inputs as it has places.
            self.group_sizes[site] += layer.out_units * layer.taps * int((units >= 0).sum()) / self._sizes[site]
        for site, layer in _writers(self._graph):
            self.filter_sizes[site] += layer.in_units * layer.taps

    def weights(self, active: Mapping[str, Tensor]) -> Tensor:
        """Weights left, shape ``()``.

        Args:
            active: by site, P(z != 0) of each gate (for the expectation) or ``(z != 0).float()`` (for a given
                network), shape ``(size,)``.
        """
        return self._count(active, macs=False)

    def macs(self, active: Mapping[str, Tensor]) -> Tensor:
        """Multiply-adds left per example, shape ``()``; arguments as in :meth:`weights`."""
        return self._count(active, macs=True)

    def _count(self, active: Mapping[str, Tensor], macs: bool) -> Tensor:
        if active.keys() != self._sizes.keys():
            raise ValueError(f"Expected one entry per gate site {sorted(self._sizes)}, but got {sorted(active)}.")
        for name, value in active.items():
            if value.shape != (self._sizes[name],):
                raise ValueError(f"Expected {name!r} of shape ({self._sizes[name]},), but got {tuple(value.shape)}.")
        present, needed = self._graph.present(active), self._graph.needed(active)
        like = next(iter(active.values()), torch.zeros(()))
        total = torch.zeros((), dtype=like.dtype, device=like.device)
        for name, layer in self._graph.layers().items():
            read = present[self._graph.steps[name].parents[0]]
            written = needed[name]
            each = layer.taps * (layer.positions if macs else 1)
            total = total + read.count(layer.in_units) * written.count(layer.out_units) * each
        return total


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
    graph = read_network(network, example_input)
    layers: dict[str, list[tuple[nn.Module, Tensor]]] = {name: [] for name in graph.sites.values()}
    for site, layer, units in _readers(graph):
        layers[site].append((graph.modules[layer.path], units))
    sizes = {name: gate.size for name, gate in gate_names(network).items()}
    return SquareNorms({name: _SquareNorm(sizes[name], found) for name, found in layers.items()})


def _readers(graph: GateGraph) -> Iterator[tuple[str, Layer, Tensor]]:
    """Each gate site with each layer that reads its units, and the unit that each of the layer's inputs stems from.

    That is -1 for an input that is constant. Once, where a gate acts at several places in front of a layer.
    """
    for name, layer in graph.layers().items():
        found: set[tuple[str, tuple[int, ...]]] = set()
        frontier = [(parent, torch.arange(layer.in_units)) for parent in graph.steps[name].parents]
        seen: set[str] = set()
        while frontier:
            parent, units = frontier.pop()
            step = graph.steps[parent]
            if parent in seen:
                continue
            seen.add(parent)
            if step.kind == "gate" and (key := (graph.site(parent), tuple(units.tolist()))) not in found:
                found.add(key)
                yield graph.site(parent), layer, units
            if step.kind in ("reshape", "expand") and step.source is not None:
                units = torch.where(units < 0, -1, step.source[units])
            elif step.kind not in ("gate", "unitwise", "add"):
                continue
            frontier += [(before, units) for before in step.parents]


def _writers(graph: GateGraph) -> Iterator[tuple[str, Layer]]:
    """Each gate site with each layer that writes its units, once."""
    found: set[tuple[str, str]] = set()
    for name, step in graph.steps.items():
        if step.kind == "gate":
            for parent in _upstream(graph, name, through={"gate", "unitwise", "add"}):
                layer = graph.steps[parent].layer
                if layer is not None and (key := (graph.site(name), layer.path)) not in found:
                    found.add(key)
                    yield graph.site(name), layer


def _upstream(graph: GateGraph, name: str, through: set[Kind]) -> list[str]:
    """The nodes that a node's input comes from, up to and with the first that are not of the given kinds."""
    found: dict[str, None] = {}
    frontier = list(graph.steps[name].parents)
    while frontier:
        parent = frontier.pop()
        if parent not in found:
            found[parent] = None
            if graph.steps[parent].kind in through:
                frontier.extend(graph.steps[parent].parents)
    return list(found)


class SquareNorms(dict[str, Callable[[], Tensor]]):
    """By gate site, a function that returns the squared norm of the weights that read each of its units."""

    def during(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """A context for the network's forward pass and the norms of some sites after it.

        Dense layers that multiply their weights by gates compute the norms, and their part of the gradient, on the way.
        """
        layers = [layer for norm in map(self.get, names) if isinstance(norm, _SquareNorm) for layer, _ in norm.layers]
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
        layers = list(dict.fromkeys(layer for norm in norms for layer, _ in norm.layers))
        columns = _columns(layers)
        plain = all(len(norm.layers) == 1 and len(norm.layers[0][1]) == norm.size for norm in norms)
        if plain and len(layers) == len(norms):
            return torch.cat(list(columns.values()))
        # A layer behind a flattening is read by the maps' gates and by those of its features, and is gone over once.
        return torch.cat([norm.of(columns) for norm in norms])


def _columns(layers: Sequence[nn.Module]) -> dict[nn.Module, Tensor]:
    """The squared norms of each layer's columns: recorded ones, and all others in one node."""
    weights: dict[nn.Module, Any] = {layer: layer.weight for layer in layers}
    recorded = {layer: recorded_norms(weight) for layer, weight in weights.items()}
    others = [layer for layer, norms in recorded.items() if norms is None]
    if others:
        columns = _SquaredColumns.apply(*(weights[layer] for layer in others))  # type: ignore[no-untyped-call]
        recorded.update(zip(others, columns, strict=True))
    return recorded  # type: ignore[return-value]  # there are none left without


class _SquaredColumns(torch.autograd.Function):
    """Squared norms of columns, over all dimensions but the second, with one pass over the weights per gradient."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*weights)
        return tuple(w.square().sum([dim for dim in range(w.dim()) if dim != 1]) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        weights: tuple[Tensor, ...] = ctx.saved_tensors
        return tuple(
            w * (2 * grad).reshape((1, -1) + (1,) * (w.dim() - 2)) for w, grad in zip(weights, grads, strict=True)
        )


class _SquareNorm:
    """Squared norm of the weights of some layers that read each unit, computed at each call."""

    def __init__(self, size: int, layers: list[tuple[nn.Module, Tensor]]) -> None:
        self.size = size
        self.layers = layers
        # One more place at the end for inputs that are constant.
        self._places = [PerDevice(units % (size + 1)) for _, units in layers]

    def __call__(self) -> Tensor:
        """Shape ``(size,)``."""
        return self.of(_columns([layer for layer, _ in self.layers]))

    def of(self, columns: Mapping[nn.Module, Tensor]) -> Tensor:
        """The same, from the squared norms of each layer's columns."""
        total: Tensor | None = None
        for (layer, units), places in zip(self.layers, self._places, strict=True):
            norms = columns[layer]
            if len(units) != self.size:
                norms = norms.new_zeros(self.size + 1).index_add(0, places.on(norms.device), norms)[:-1]
            total = norms if total is None else total + norms
        return torch.zeros(self.size) if total is None else total
