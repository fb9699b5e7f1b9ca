"""Weights and multiply-adds of a network as differentiable functions of its gates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property, reduce

import numpy as np
import torch
from torch import Tensor, nn

from pyro_l0.nn.calls import record_called
from pyro_l0.nn.costs.expectation import Expectations
from pyro_l0.nn.costs.report import Report, report
from pyro_l0.nn.engine.dependency import Dependencies, find_dependencies
from pyro_l0.nn.engine.formulas import TRUE, Clause
from pyro_l0.nn.engine.readers import Use, find_readers, find_writers, weights_of
from pyro_l0.nn.engine.record import Example
from pyro_l0.nn.engine.slots import Axis
from pyro_l0.nn.fixed import check_value
from pyro_l0.nn.gate_layer import gate_names

__all__ = ["NetworkCost"]


class NetworkCost:
    """Counts the weights (without biases), parameters and multiply-adds that open gates leave in a network.

    A weight is left if the unit it reads and the unit it writes are both left, so closed units upstream and downstream
    count: between gates with a and b open units a dense layer keeps a * b weights, a convolution a * b kernels, and a
    branch without open gates keeps nothing. For gates of 0 and 1 the counts are those of the compacted network (if
    nothing of a layer is left, the compacted network keeps one unit, which does not count here). For probabilities they
    are expectations under independent gates, and the numbers of units that a layer reads and writes count as
    independent. Weights that several layers share count once.

    Args:
        network: any network with :class:`~pyro_l0.nn.Gate` or L0Gate layers.
        example: what it is called with: a tensor, a tuple of positional arguments, a dict of keywords, or a list of
            such calls, whose multiply-adds are counted together.

    Attributes:
        sizes: by gate site, the number of gates.
        filter_sizes: by gate site, the number of weights that write one of its units: a convolution's filter, the
            group that the L0 paper prices for feature maps; 0 for gates of the network's inputs.
        total_weights: weights with every gate open.
        total_parameters: parameters with every gate open, those of biases and norms included.
        total_macs: multiply-adds per example with every gate open, of matrix products, convolutions and attention.

    Raises:
        ValueError: a gate is never called or computes weights, or a gate value is missing, misshapen or outside [0, 1].
        TypeError: ``network`` is not a module, a gate value is not a tensor, or the example is of an integer type that
            the network does not take.

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

    def __init__(self, network: nn.Module, example: Example) -> None:
        self._recording = record_called(network, example)
        self.sizes = {name: gate.size for name, gate in gate_names(network).items()}
        self._dependencies = find_dependencies(self._recording)
        maps = self._dependencies.maps
        weights = dict.fromkeys(root for found in weights_of(maps).values() for root in found.values())
        self._weights = _Count(self._dependencies, [maps.axes[weight] for weight in weights], 1)
        batch = self._recording.calls[0].inputs[0].shape[:1] if self._recording.calls[0].inputs else ()
        self._macs = _Count(self._dependencies, [product.axes for product in maps.products], math.prod(batch))
        of_gates = {p for gate in gate_names(network).values() for p in gate.parameters()}
        named = {name: p for name, p in network.named_parameters() if p not in of_gates}
        used = dict.fromkeys(maps.recording.named[name] for name in named if name in maps.recording.named)
        unused = sum(p.numel() for name, p in named.items() if name not in maps.recording.named)
        self._parameters = _Count(self._dependencies, [maps.axes[value] for value in used], 1, unused)
        self.total_weights = self._weights.total
        self.total_parameters = self._parameters.total
        self.total_macs = self._macs.total
        self._group_sizes = self._per_unit(find_readers(maps))
        for call in maps.gates:
            if call.is_whole:
                others = {name: torch.full((size,), float(name != call.site)) for name, size in self.sizes.items()}
                self._group_sizes[call.site] = self.total_weights - float(self._weights(others))
        self.filter_sizes = self._per_unit(find_writers(maps))

    @property
    def group_sizes(self) -> dict[str, float]:
        """By gate site, the number of weights that read one of its units; for a gate on a whole branch, the branch's.

        This is :math:`|g|` of Eq. 16, the ``group_size`` of :class:`~pyro_l0.infer.L0_ELBO`.

        Raises:
            ValueError: no weights read the units of a gate, so it would be free.
        """
        unread = [name for name, size in self._group_sizes.items() if not size]
        if unread:
            raise ValueError(
                f"Expected layers that read the units of {' and '.join(map(repr, unread))}, but the network's output "
                "depends on none. Remove the gate, or pass a group_size of your own to L0_ELBO, such as filter_sizes."
            )
        return self._group_sizes

    def weights(self, active: Mapping[str, Tensor]) -> Tensor:
        """Weights left, shape ``()``.

        Args:
            active: by site, P(z != 0) of each gate (for the expectation) or ``(z != 0).float()`` (for a given
                network), shape ``(size,)``.
        """
        self._check(active)
        return self._weights(active)

    def macs(self, active: Mapping[str, Tensor]) -> Tensor:
        """Multiply-adds left per example, shape ``()``; arguments as in :meth:`weights`."""
        self._check(active)
        return self._macs(active)

    def parameters(self, active: Mapping[str, Tensor]) -> Tensor:
        """Parameters left, shape ``()``; arguments as in :meth:`weights`.

        Biases and parameters of norms count, biases that compaction adds for constants do not.
        """
        self._check(active)
        return self._parameters(active)

    def report(self) -> Report:
        """The units that stay even if their gates close, and why.

        Example:
            >>> from pyro_l0.nn import Gate
            >>> print(NetworkCost(nn.Sequential(nn.Linear(2, 3), Gate(3)), torch.ones(1, 2)).report())
            gate '1', units 0-2: stay behind the gate (network output)
        """
        return report(self._recording, self._dependencies)

    def _per_unit(self, uses: Iterable[Use]) -> dict[str, float]:
        sizes = dict.fromkeys(self.sizes, 0.0)
        for use in uses:
            sizes[use.site] += len(use.units) * use.each / self.sizes[use.site]
        return sizes

    def _check(self, active: Mapping[str, Tensor]) -> None:
        if not isinstance(active, Mapping) or active.keys() != self.sizes.keys():
            got = sorted(map(str, active)) if isinstance(active, Mapping) else repr(active)
            raise ValueError(f"Expected one entry per gate site {sorted(self.sizes)}, but got {got}.")
        for name, value in active.items():
            # Read where no device has to be waited for; differences go beyond 0 and 1.
            is_read = getattr(value, "is_cpu", True) and not torch._C._are_functorch_transforms_active()
            check_value(name, self.sizes[name], value, 1e-3 if is_read else None)


class _Count:
    """A sum over products of numbers of entries that stay, by the dimensions of each product.

    It is divided by ``per``, and ``more`` comes to it whatever leaves.
    """

    def __init__(self, dependencies: Dependencies, products: Iterable[Iterable[Axis]], per: int, more: int = 0) -> None:
        self._dependencies = dependencies
        self._products = [list(axes) for axes in products]
        self._per = per
        self._more = more
        total = more + sum(math.prod(axis.size for axis in axes) for axes in self._products)
        self.total = total // per if total % per == 0 else total / per
        self._histograms: dict[int, tuple[dict[int, int], tuple[Clause, ...]]] = {}

    def __call__(self, active: Mapping[str, Tensor]) -> Tensor:
        """The expected sum, shape ``()``."""
        expectations, terms, constant = self._compiled
        like = next(iter(active.values()), torch.zeros(()))
        sums = expectations(active)
        total = like.new_full((), constant)
        for numbers, times in terms.items():
            total = total + reduce(torch.mul, [sums[number] for number in numbers]) * times
        return total

    @cached_property
    def _compiled(self) -> tuple[Expectations, dict[tuple[int, ...], float], float]:
        """Sums of probabilities, the terms (by the numbers of a term's sums, how often it counts), and a constant."""
        expectations = Expectations(self._dependencies.formulas, self._dependencies.sizes)
        times: dict[tuple[int, ...], float] = {}
        for axes in self._products:
            count, sums = self._term(axes, expectations)
            times[sums] = times.get(sums, 0.0) + count / self._per
        constant = times.pop((), 0.0) + self._more
        return expectations, times, constant

    def _term(self, axes: list[Axis], expectations: Expectations) -> tuple[int, tuple[int, ...]]:
        """A product's constant factor, and the sums that it is made of."""
        factor, sums = 1, list[dict[int, int]]()
        shared = dict[Clause, None]()
        for axis in axes:
            histogram, common = self._split(axis)
            shared.update(dict.fromkeys(common))
            if histogram.keys() <= {TRUE}:
                factor *= histogram.get(TRUE, 0)
            else:
                sums.append(histogram)
        formulas = self._dependencies.formulas
        for clause in shared:  # once, and not at all where one of the sums is zero without it
            if not any(self._is_implied(clause, histogram) for histogram in sums):
                sums.append({formulas.number([clause]): 1})
        return factor, tuple(sorted(expectations.add(histogram) for histogram in sums))

    def _is_implied(self, clause: Clause, histogram: Mapping[int, int]) -> bool:
        clauses = self._dependencies.formulas.clauses
        return all(any(other <= clause for other in clauses(formula)) for formula in histogram)

    def _split(self, axis: Axis) -> tuple[dict[int, int], tuple[Clause, ...]]:
        """How many entries stay if a statement holds, for each statement, and what all of them have in common."""
        key = id(self._dependencies.units[axis.block])
        if key not in self._histograms:
            formulas = self._dependencies.formulas
            found, counts = np.unique(self._dependencies.kept(axis), return_counts=True)
            clauses = [formulas.clauses(formula) for formula in found.tolist()]
            common = tuple(clause for clause in clauses[0] if all(clause in other for other in clauses[1:]))
            histogram: dict[int, int] = {}
            for each, count in zip(clauses, counts.tolist(), strict=True):
                rest = formulas.number([clause for clause in each if clause not in common])
                histogram[rest] = histogram.get(rest, 0) + count
            self._histograms[key] = histogram, common
        return self._histograms[key]
