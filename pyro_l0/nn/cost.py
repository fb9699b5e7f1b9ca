"""Weights and multiply-adds of a network as differentiable functions of its gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from pyro_l0.nn.gate import Gate, gate_names
from pyro_l0.nn.graph import GateGraph, read_network

__all__ = ["NetworkCost", "square_norms"]


class NetworkCost:
    """Counts what open gates cost, weights without biases.

    A weight is left if the unit it reads and the unit it writes are both there, so closed units upstream and
    downstream count: between gates with counts a and b a dense layer keeps a * b weights. For probabilities the
    counts are expectations under independent gates; for gates of 0 and 1 they are the compacted network's numbers.

    Args:
        network: a network of dense layers and :class:`~pyro_l0.nn.Gate` layers.
        example_input: one batch of inputs, for the shapes.

    Attributes:
        group_sizes: by gate site, the number of weights that read one of its units: :math:`|g|` of Eq. 16, as
            ``group_size`` of :class:`~pyro_l0.infer.L0_ELBO` takes it.
        total_weights: weights with every gate open.
        total_macs: multiply-adds per example with every gate open.

    Raises:
        ValueError: the network holds a layer that can't be counted, or a gate value is missing or misshapen.

    Example:
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
        layers = self._graph.layers.values()
        self.total_weights = sum(layer.in_features * layer.out_features for layer in layers)
        self.total_macs = sum(layer.in_features * layer.out_features * layer.positions for layer in layers)
        self.group_sizes = dict.fromkeys(self._sizes, 0.0)
        for site, layer in _readers(self._graph):
            self.group_sizes[site] += layer.out_features

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
        given = dict(active)
        present, needed = self._graph.present(given), self._graph.needed(given)
        like = next(iter(active.values()), torch.zeros(()))
        total = torch.zeros((), dtype=like.dtype, device=like.device)
        for node in self._graph.graph.nodes:
            if node.name not in self._graph.layers:
                continue
            layer = self._graph.layers[node.name]
            read, written = present[node.all_input_nodes[0].name], needed[node.name]
            rows = layer.in_features if read is None else read.sum()
            columns = layer.out_features if written is None else written.sum()
            total = total + torch.as_tensor(rows * columns * (layer.positions if macs else 1))
        return total


def square_norms(network: nn.Module, example_input: Tensor) -> dict[str, _SquareNorm]:
    """By gate site, a function that returns the squared norm of the weights that read each of its units.

    For ``square_norm`` of :class:`~pyro_l0.infer.L0_ELBO`, which weighs it with P(z != 0) (Eq. 17).

    Args:
        network: a network of dense layers and gates.
        example_input: one batch of inputs, for the shapes.

    Example:
        >>> net = nn.Sequential(Gate(2), nn.Linear(2, 3))
        >>> square_norms(net, torch.ones(1, 2))["0"]().shape
        torch.Size([2])
    """
    graph = read_network(network, example_input)
    layers: dict[str, list[nn.Linear]] = {name: [] for name in graph.sites.values()}
    for site, layer in _readers(graph):
        layers[site].append(layer)
    return {name: _SquareNorm(found) for name, found in layers.items()}


def _readers(graph: GateGraph) -> Iterator[tuple[str, nn.Linear]]:
    """Each gate site with each dense layer that reads its units, directly or through elementwise operations."""
    for node in graph.graph.nodes:
        if node.name not in graph.layers:
            continue
        layer = graph.modules[str(node.target)]
        assert isinstance(layer, nn.Linear)
        frontier = list(node.all_input_nodes)
        while frontier:
            parent = frontier.pop()
            module = graph.modules.get(str(parent.target)) if parent.op == "call_module" else None
            if isinstance(module, Gate):
                yield graph.sites[str(parent.target)], layer
            if not isinstance(module, nn.Linear):
                frontier.extend(parent.all_input_nodes)


class _SquareNorm:
    """Squared norm of the columns of some layers' weights, read at each call."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers

    def __call__(self) -> Tensor:
        """Shape ``(size,)``."""
        return sum((layer.weight.square().sum(0) for layer in self.layers), torch.zeros(()))
