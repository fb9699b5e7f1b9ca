"""Weights and multiply-adds of a network as differentiable functions of its gates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pyro_l0.nn.deferred import record_norms, recorded_norms
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.graph import GateGraph, Kind, Layer, PerDevice, Units, misplaced, read_network, units_held

__all__ = ["NetworkCost", "square_norms"]


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
        self._graph = _read(network, example_input)
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
        for site, layer, inputs, _ in _readers(self._graph):
            # Per gate; behind a flattening a map is as many inputs as it has places.
            self._group_sizes[site] += layer.out_units * layer.taps * len(inputs) / self._sizes[site]
        for site, layer in _writers(self._graph):
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


def _read(network: nn.Module, example_input: Tensor) -> GateGraph:
    """:func:`read_network`, where every gate is called on units."""
    graph = read_network(network, example_input)
    called = {graph.site(name) for name, step in graph.steps.items() if step.kind == "gate"}
    for path, gate in gate_names(network).items():
        if path not in called:
            where = next(name for name, module in network.named_modules() if module is gate)
            raise misplaced(path, where, "is never called")
    return graph


def _tied_layers(graph: GateGraph) -> list[list[str]]:
    """The layers by node name, those that share their weights together."""
    tied: dict[int, list[str]] = {}
    for name, layer in graph.layers().items():
        tied.setdefault(_weight_id(graph, layer), []).append(name)
    return list(tied.values())


def _weight_id(graph: GateGraph, layer: Layer) -> int:
    module = graph.modules[layer.path]
    weight = module._parameters.get("weight")  # one that a parametrisation computes is another at each access
    return id(module if weight is None else weight)


def _count_shared(reads: Sequence[Units], writes: Sequence[Units], layer: Layer) -> Tensor:
    """Expected number of pairs of units whose weight one of several layers needs."""
    (read, own_reads), (written, own_writes) = _in_common(reads), _in_common(writes)
    none: Tensor | float = 1.0
    for one, other in zip(own_reads, own_writes, strict=True):
        none = none * (1 - _vector(one, layer.in_units)[:, None] * _vector(other, layer.out_units))
    some = _vector(read, layer.in_units)[:, None] * _vector(written, layer.out_units) * (1 - none)
    return some.sum()


def _in_common(parts: Sequence[Units]) -> tuple[Units, list[Units]]:
    """What is common to several events, and what else there is to each."""
    if all(part is parts[0] for part in parts):
        return parts[0], [Units() for _ in parts]
    shared = {site: prob for site, prob in parts[0].sites.items() if all(site in part.sites for part in parts)}
    others = [{site: prob for site, prob in part.sites.items() if site not in shared} for part in parts]
    return Units(shared), [Units(sites, part.rest) for sites, part in zip(others, parts, strict=True)]


def _vector(units: Units, size: int) -> Tensor:
    probs = units.probs()
    return torch.ones(size) if probs is None else probs.expand(size)


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
    graph = _read(network, example_input)
    layers: dict[str, list[_Read]] = {name: [] for name in graph.sites.values()}
    for site, layer, inputs, units in _readers(graph):
        layers[site].append(_Read(graph.modules[layer.path], layer.in_units, inputs, units))
    sizes = {name: gate.size for name, gate in gate_names(network).items()}
    return SquareNorms({name: _SquareNorm(sizes[name], found) for name, found in layers.items()})


def _readers(graph: GateGraph) -> Iterator[tuple[str, Layer, Tensor, Tensor]]:
    """Each gate site with each layer that reads its units: the layer's inputs, and the unit that each stems from.

    An input that holds several units, as a map that features were made into, is there several times; one that is
    constant is not. Once, where a gate acts at several places in front of a layer or of layers with the same weights.
    """
    shapes = {node.name: node.meta.get("shape") for node in graph.graph.nodes}
    found: set[tuple[Any, ...]] = set()
    for name, layer in graph.layers().items():
        inputs = torch.arange(layer.in_units)
        frontier = [(parent, inputs, inputs) for parent in graph.steps[name].parents]
        seen: set[str] = set()
        while frontier:
            parent, inputs, units = frontier.pop()
            step = graph.steps[parent]
            if parent in seen:
                continue
            seen.add(parent)
            if step.kind == "gate":
                key = (graph.site(parent), _weight_id(graph, layer), tuple(inputs.tolist()), tuple(units.tolist()))
                if key not in found:
                    found.add(key)
                    yield graph.site(parent), layer, inputs, units
            if step.kind in ("reshape", "expand"):
                held = step.source
                if held is None:
                    (before,) = step.parents
                    example, result = (torch.Size((1, *shapes[node][1:])) for node in (before, parent))
                    held = units_held(example, graph.steps[before], result, step.dim)
                inputs, units = _stems(inputs, held[units])
            elif step.kind not in ("gate", "unitwise", "add"):
                continue
            frontier += [(before, inputs, units) for before in step.parents]


def _stems(inputs: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of inputs and the units that they hold, each once; a negative unit is none."""
    if held.dim() > 1:
        pairs = torch.stack([inputs[:, None].expand_as(held), held]).flatten(1).unique(dim=1)
        inputs, held = pairs[0], pairs[1]
    return inputs[held >= 0], held[held >= 0]


def _writers(graph: GateGraph) -> Iterator[tuple[str, Layer]]:
    """Each gate site with each layer that writes its units, once."""
    found: set[tuple[str, int]] = set()
    for name, step in graph.steps.items():
        if step.kind == "gate":
            for parent in _upstream(graph, name, through={"gate", "unitwise", "add"}):
                layer = graph.steps[parent].layer
                if layer is not None and (key := (graph.site(name), _weight_id(graph, layer))) not in found:
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


class _Read:
    """A layer that reads units of a gate: which of its inputs, and the unit that each stems from."""

    def __init__(self, module: nn.Module, size: int, inputs: Tensor, units: Tensor) -> None:
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

    def of(self, columns: Mapping[nn.Module, Tensor]) -> Tensor:
        """The same, from the squared norms of each layer's columns."""
        total: Tensor | None = None
        for read in self.reads:
            norms = read.of_units(columns[read.module], self.size)
            total = norms if total is None else total + norms
        return torch.zeros(self.size) if total is None else total
