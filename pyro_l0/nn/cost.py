"""Weights and multiply-adds of a network as differentiable functions of its gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.graph import GateGraph, Layer
from pyro_l0.nn.reading import read_called
from pyro_l0.nn.units import Units, in_common

__all__ = ["NetworkCost"]


class NetworkCost:
    """Counts what open gates cost, weights without biases.

    A weight is left if the unit it reads and the unit it writes are both there, so closed units upstream and
    downstream count: between gates with counts a and b a dense layer keeps a * b weights, a convolution a * b kernels,
    and a branch without open gates keeps nothing. For gates of 0 and 1 the counts are those of the compacted network;
    for probabilities they are expectations under independent gates, where branches meet up to their correlation.
    Weights that several layers share count once, and are left if one of the layers needs them.

    Args:
        network: a network of dense layers, convolutions and :class:`~pyro_l0.nn.Gate` layers.
        example_input: one batch of inputs, for the shapes.

    Attributes:
        filter_sizes: by gate site, the number of weights that write one of its units: a convolution's filter, the
            group that the L0 paper prices for feature maps; 0 for gates of the network's inputs.
        total_weights: weights with every gate open.
        total_macs: multiply-adds per example with every gate open.

    Raises:
        ValueError: the network holds a layer that can't be counted or a gate that is not called on units, or a gate
            value is missing or misshapen.
        TypeError: the example is of an integer type that the network does not take.

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
        self._graph = read_called(network, example_input)
        self._sizes = {name: gate.size for name, gate in gate_names(network).items()}
        self._tied = _tied_layers(self._graph)
        layers = self._graph.layers()
        self.total_weights = sum(
            layers[names[0]].in_units * layers[names[0]].out_units * layers[names[0]].taps for names in self._tied
        )
        self.total_macs = sum(
            layer.in_units * layer.out_units * layer.taps * layer.positions for layer in layers.values()
        )
        self._group_sizes = dict.fromkeys(self._sizes, 0.0)
        self.filter_sizes = dict.fromkeys(self._sizes, 0.0)
        for site, layer, inputs, _ in self._graph.readers():
            # Per gate; behind a flattening a map is as many inputs as it has places.
            self._group_sizes[site] += layer.out_units * layer.taps * len(inputs) / self._sizes[site]
        for site, layer in self._graph.writers():
            self.filter_sizes[site] += layer.in_units * layer.taps

    @property
    def group_sizes(self) -> dict[str, float]:
        """By gate site, the number of weights that read one of its units.

        This is :math:`|g|` of Eq. 16, as ``group_size`` of :class:`~pyro_l0.infer.L0_ELBO` takes it.

        Raises:
            ValueError: no weights read the units of a gate, which would be free of charge.
        """
        unread = [name for name, size in self._group_sizes.items() if not size]
        if unread:
            raise ValueError(
                f"Expected layers that read the units of {' and '.join(map(repr, unread))}, but there are none on the "
                "way to the network's output, so that the group size would be 0 and the gate free of charge; take it "
                "out, or give L0_ELBO a group_size of your own, such as that of filter_sizes."
            )
        return self._group_sizes

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
        layers, steps = self._graph.layers(), self._graph.steps
        for names in [[name] for name in layers] if macs else self._tied:
            layer = layers[names[0]]
            reads, writes = [present[steps[name].parents[0]] for name in names], [needed[name] for name in names]
            each = layer.taps * (layer.positions if macs else 1)
            if len(names) == 1:
                total = total + reads[0].count(layer.in_units) * writes[0].count(layer.out_units) * each
            else:
                total = total + _count_shared(reads, writes, layer) * each
        return total


def _tied_layers(graph: GateGraph) -> list[list[str]]:
    """The layers by node name, those that share their weights together."""
    tied: dict[int, list[str]] = {}
    for name, layer in graph.layers().items():
        tied.setdefault(graph.weight_id(layer), []).append(name)
    return list(tied.values())


def _count_shared(reads: Sequence[Units], writes: Sequence[Units], layer: Layer) -> Tensor:
    """Expected number of pairs of units whose weight one of several layers needs."""
    (read, own_reads), (written, own_writes) = _apart(reads), _apart(writes)
    none: Tensor | float = 1.0
    for one, other in zip(own_reads, own_writes, strict=True):
        none = none * (1 - _vector(one, layer.in_units)[:, None] * _vector(other, layer.out_units))
    some = _vector(read, layer.in_units)[:, None] * _vector(written, layer.out_units) * (1 - none)
    return some.sum()


def _apart(parts: Sequence[Units]) -> tuple[Units, list[Units]]:
    """What is common to several events, and what else there is to each."""
    if all(part is parts[0] for part in parts):
        return parts[0], [Units() for _ in parts]
    shared, others = in_common(parts)
    return Units(shared), others


def _vector(units: Units, size: int) -> Tensor:
    probs = units.probs()
    return torch.ones(size) if probs is None else probs.expand(size)
