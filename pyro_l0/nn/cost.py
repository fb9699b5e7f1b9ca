"""Weights and multiply-adds of a network as differentiable functions of its gates, and which units stay anyway."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from pyro_l0.nn.calls import record_called
from pyro_l0.nn.engine.analysis import LAST, Analysis, analyse
from pyro_l0.nn.engine.dependency import Dependencies, find_dependencies
from pyro_l0.nn.engine.maps import Axis, Index, Maps
from pyro_l0.nn.engine.readers import Use, find_readers, find_writers, weights_of
from pyro_l0.nn.engine.record import Example, Operation, Recording, Value
from pyro_l0.nn.engine.statements import TRUE, Clause, NormalForms, TruthTables
from pyro_l0.nn.fixed import check_value
from pyro_l0.nn.gate import gate_names

__all__ = ["ClosedUnits", "Expectations", "NetworkCost", "PerDevice", "Report", "Stay"]


class PerDevice:
    """A constant on the CPU that is moved to each device only once, as the host waits for that."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._moved = {value.device: value}

    def on(self, device: torch.device) -> Tensor:
        """The constant on a device, moved there once."""
        if device not in self._moved:
            self._moved[device] = self._value.to(device)
        return self._moved[device]


class Expectations:
    """Sums of probabilities of statements about gates that are independent of each other.

    A probability is a product over clauses, and the probability that none of a clause's literals holds one over
    literals; this is exact where no gate is in two of them. Gates are numbered through in the order of ``sizes``.
    """

    def __init__(self, statements: NormalForms, sizes: Mapping[str, int]) -> None:
        self._statements, self._sizes = statements, sizes
        starts = itertools.accumulate(sizes.values(), initial=0)
        self._sites = {(start, size): site for start, (site, size) in zip(starts, sizes.items(), strict=False)}
        self._numbers: dict[tuple[tuple[int, int], ...], int] = {}

    def add(self, statements: Mapping[int, int]) -> int:
        """Announce a sum of statements, each with a number of times; return the sum's number."""
        return self._numbers.setdefault(tuple(sorted(statements.items())), len(self._numbers))

    def __call__(self, active: Mapping[str, Tensor]) -> list[Tensor]:
        """The expected values of all sums, each of shape ``()``; by site, ``active`` is P(z != 0) of each gate."""
        circuit, sums = self._compiled
        values = circuit([active[site] for site in self._sizes]) if any(one.nodes is not None for one in sums) else None
        return [one(active, values) for one in sums]

    @cached_property
    def _compiled(self) -> tuple[_Circuit, list[_Sum]]:
        circuit = _Circuit(self._statements, sum(self._sizes.values()))
        plain = [self._plain_sum(statements) for statements in self._numbers]
        for statements, one in zip(self._numbers, plain, strict=True):
            if one is None:
                for statement, _ in statements:
                    circuit.add(statement)
        circuit.arrange()
        return circuit, [
            one
            or _sum_of_nodes([circuit.position(statement) for statement, _ in statements], [n for _, n in statements])
            for statements, one in zip(self._numbers, plain, strict=True)
        ]

    def _plain_sum(self, statements: Sequence[tuple[int, int]]) -> _Sum | None:
        """A sum over all gates of a site, or the probability that one of them is open; None if it is neither."""
        clauses = [self._statements.clauses(statement) for statement, _ in statements]
        times = {count for _, count in statements}
        if len(times) > 1 or any(len(found) != 1 for found in clauses):
            return None
        gates = frozenset[int]().union(*(clause for (clause,) in clauses))
        if not gates:
            return None
        site = self._sites.get((min(gates), len(gates))) if max(gates) - min(gates) == len(gates) - 1 else None
        if site is None or (len(clauses) > 1 and len(clauses) < len(gates)):
            return None
        return _Sum(times.pop(), site, is_any=len(clauses) == 1 and len(gates) > 1)


@dataclass(frozen=True)
class _Sum:
    """So many times the sum over a site's gates, or the probability that one of them is open, or a sum over nodes."""

    times: int | PerDevice
    site: str = ""
    is_any: bool = False
    nodes: PerDevice | None = None

    def __call__(self, active: Mapping[str, Tensor], values: Tensor | None) -> Tensor:
        if self.nodes is None:
            probs = active[self.site]
            total = 1 - _product(1 - probs) if self.is_any else probs.sum()
        else:
            assert values is not None
            each = values.index_select(0, self.nodes.on(values.device))
            total = (each if isinstance(self.times, int) else each * self.times.on(values.device)).sum()
        return total * self.times if isinstance(self.times, int) and self.times > 1 else total


def _sum_of_nodes(nodes: list[int], counts: list[int]) -> _Sum:
    times = counts[0] if len(set(counts)) == 1 else PerDevice(torch.tensor(counts))
    return _Sum(times, nodes=PerDevice(torch.tensor(nodes)))


class _Circuit:
    """Probabilities of statements, computed level by level: gates, what is made of them, what is made of that."""

    def __init__(self, statements: NormalForms, gates: int) -> None:
        self._statements, self._gates = statements, gates
        self._nodes: dict[tuple[bool, tuple[int, ...]], int] = {}  # all or some of which nodes; gates come first
        self._levels: dict[int, int] = {}
        self._of_statement: dict[int, int] = {}
        self._of_clause: dict[Clause, int] = {}
        self._positions: dict[int, int] = {}
        self._steps: list[tuple[bool, PerDevice]] = []

    def add(self, statement: int) -> int:
        """Make nodes of a statement, its clauses and their literals; return the statement's node, for ``position``."""
        if statement not in self._of_statement:
            clauses = map(self._clause, self._statements.clauses(statement))
            self._of_statement[statement] = self._node(True, clauses)
        return self._of_statement[statement]

    def _clause(self, clause: Clause) -> int:
        if clause not in self._of_clause:
            self._of_clause[clause] = self._node(False, map(self._literal, clause))
        return self._of_clause[clause]

    def arrange(self) -> None:
        """Find a position for every node, behind those of the gates and the numbers 0 and 1.

        A node's level is one more than the highest of its parts'. Nodes of one level, of one kind and of as many parts
        up to the next power of two are a step: a matrix of their parts' positions, filled up by what changes nothing, 1
        where all hold (a product) and 0 where some do (1 less a product of 1 less each). So a call gathers and
        multiplies once a step.
        """
        zero, one = self._gates, self._gates + 1
        position = self._gates + 2
        steps: dict[tuple[int, bool, int], list[tuple[int, tuple[int, ...]]]] = {}
        for (is_all, parts), node in self._nodes.items():
            width = max(len(parts) - 1, 0).bit_length()
            steps.setdefault((self._levels[node], is_all, width), []).append((node, parts))
        for (_, is_all, width), nodes in sorted(steps.items()):
            fill = one if is_all else zero
            rows = [[self._position(x) for x in parts] + [fill] * ((1 << width) - len(parts)) for _, parts in nodes]
            self._positions.update({node: position + row for row, (node, _) in enumerate(nodes)})
            self._steps.append((is_all, PerDevice(torch.tensor(rows))))
            position += len(nodes)

    def position(self, statement: int) -> int:
        """The index of a statement's probability in what a call returns; after ``arrange``."""
        return self._position(self._of_statement[statement])

    def __call__(self, probs: Sequence[Tensor]) -> Tensor:
        """The probabilities of all nodes, in one vector, from P(z != 0) of each site's gates in the order of sites."""
        values = torch.cat([*probs, probs[0].new_zeros(1), probs[0].new_ones(1)])
        for is_all, positions in self._steps:
            index = positions.on(values.device)
            factors = values.index_select(0, index.flatten()).view(index.shape)
            values = torch.cat([values, _product(factors) if is_all else 1 - _product(1 - factors)])
        return values

    def _position(self, node: int) -> int:
        return self._positions.get(node, node)

    def _literal(self, literal: int) -> int:
        return literal if literal < self._gates else self.add(self._statements.of_literals[literal - self._gates])

    def _node(self, is_all: bool, parts: Iterable[int]) -> int:
        given = tuple(parts)
        if len(given) == 1:
            return given[0]
        if (is_all, given) not in self._nodes:
            node = self._nodes[is_all, given] = self._gates + len(self._nodes)
            self._levels[node] = 1 + max((self._levels.get(x, 0) for x in given), default=0)
        return self._nodes[is_all, given]


class _Product(torch.autograd.Function):
    """Product over the last dimension; factors of 0 have their gradient without the host's counting them."""

    @staticmethod
    def forward(ctx: FunctionCtx, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return factors.prod(-1)

    @staticmethod
    def backward(ctx: BackwardCFunction, grad: Tensor) -> Tensor:
        (factors,) = ctx.saved_tensors
        one = torch.ones_like(factors[..., :1])
        before = torch.cat([one, factors[..., :-1]], -1).cumprod(-1)
        behind = torch.cat([one, factors[..., 1:].flip(-1)], -1).cumprod(-1).flip(-1)
        return grad.unsqueeze(-1) * before * behind


def _product(factors: Tensor) -> Tensor:
    if factors.shape[-1] <= 4:
        return reduce(torch.mul, factors.unbind(-1))
    total: Tensor = _Product.apply(factors)  # type: ignore[no-untyped-call]
    return total


@dataclass(frozen=True)
class Stay:
    """Units that stay on one side of a gate, or on both, when they are closed."""

    site: str
    units: tuple[int, ...]
    where: str  # ``"in front"``: weights that write them stay; ``"behind"``: those that read them; or ``"both"``
    why: str  # the operation and the module that need them

    @property
    def verdict(self) -> str:
        """Where the units stay, and why, as the end of a sentence."""
        position = (
            "on both sides of" if self.where == "both" else self.where if self.where == "behind" else "in front of"
        )
        return f"stay {position} the gate ({self.why})"

    def __str__(self) -> str:
        return f"gate {self.site!r}, {_ranges(self.units)}: {self.verdict}"


@dataclass(frozen=True)
class Report:
    """What :meth:`~pyro_l0.nn.NetworkCost.report` returns; it prints as text.

    Attributes:
        stays: units that stay, each with its gate's ``site``, the ``units``, ``where`` they stay (``"in front"`` of the
            gate, ``"behind"`` it, or ``"both"``) and ``why``.
    """

    stays: tuple[Stay, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.stays)) or "every unit leaves with its gate"


class ClosedUnits:
    """What leaves of a network with one unit of a gate closed, alone or with all gates on the same unit.

    Args:
        recording: the network.
        most: of how many units of a gate, evenly spaced; by default of all.
    """

    def __init__(self, recording: Recording, most: int | None = None) -> None:
        self._recording = recording
        self._sizes = {site: gate.size for site, gate in gate_names(recording.network).items()}
        self._units = [
            (site, unit)
            for site, size in self._sizes.items()
            for unit in np.linspace(0, size - 1, min(size, most or size)).astype(int).tolist()
        ]
        self._dependencies = find_dependencies(recording, self._cases)

    def saved(self) -> dict[str, tuple[float, float]]:
        """By site, the weights and the multiply-adds per example that closing one unit alone saves, on average."""
        maps, number = self._dependencies.maps, len(self._units)
        left = np.stack([self._left(_weights(maps)), self._left(_multiply_adds(maps)) / _examples(self._recording)])
        saved: dict[str, list[npt.NDArray[np.float64]]] = {site: [] for site in self._sizes}
        for (site, _), each in zip(self._units, (left[:, :1] - left[:, 1 : number + 1]).T, strict=True):
            saved[site].append(each)
        return {site: tuple(np.mean(each, 0).tolist()) for site, each in saved.items()}

    def written(self) -> set[str]:
        """The sites of gates whose units some weight writes; those of the network's inputs are none."""
        return {use.site for use in find_writers(self._dependencies.maps)}

    def report(self) -> Report:
        """Find what keeps units, by closing half of the gates and then the others."""
        closings = [
            {site: (torch.arange(size) + shift) % 2 == 0 for site, size in self._sizes.items()} for shift in (0, 1)
        ]
        analyses = [analyse(self._recording, closing) for closing in closings]
        lines: dict[tuple[str, str, str], list[int]] = {}
        for site, unit, front, behind in self._staying():
            where = "both" if front and behind else "in front" if front else "behind"
            lines.setdefault((site, where, _why(analyses[unit % 2], site, unit, behind)), []).append(unit)
        return Report(tuple(Stay(site, tuple(units), where, why) for (site, where, why), units in lines.items()))

    def _cases(self, maps: Maps) -> TruthTables:
        """No gate is closed; each unit alone; each with the gates on the same unit."""
        starts = dict(zip(self._sizes, accumulate(self._sizes.values(), initial=0), strict=False))
        units, together = maps.slots.units(), dict[int, set[int]]()
        same = {call.site: units[call.front.dimension].tolist() for call in maps.gates}
        for site, common in same.items():
            for unit, one in enumerate(common):
                together.setdefault(one, set()).add(starts[site] + unit)
        alone = [{starts[site] + unit} for site, unit in self._units]
        return TruthTables([set(), *alone, *(together[same[site][unit]] for site, unit in self._units)])

    def _left(self, products: _Products) -> Index:
        """By case, a sum over products of numbers of entries that stay."""
        sizes: dict[int, Index] = {}
        total = np.zeros(1 + 2 * len(self._units), dtype=np.int64)
        for _, axes in products:
            for axis in axes:
                if axis.dimension not in sizes:
                    sizes[axis.dimension] = self._dependencies.statements.count(self._dependencies.remaining(axis))
            total += math.prod(sizes[axis.dimension] for axis in axes)
        return total

    def _staying(self) -> Iterator[tuple[str, int, bool, bool]]:
        """The units that stay in front of a gate or behind it, where it and those on the same unit are closed.

        A gate on a whole branch has no units behind it.
        """
        calls = {call.site: call for call in self._dependencies.maps.gates}
        for case, (site, unit) in enumerate(self._units, 1 + len(self._units)):
            call = calls[site]
            front, behind = (
                self._dependencies.statements.holds(int(self._dependencies.remaining(axis)[unit]), case)
                for axis in (call.front, call.behind)
            )
            if front or (behind and not call.is_whole):
                yield site, unit, front, behind and not call.is_whole


_Products = list[tuple[Value | Operation, Sequence[Axis]]]
"""Dimensions whose sizes multiply to a number of weights or multiply-adds, with what these are of."""


def _weights(maps: Maps) -> _Products:
    """The dimensions of each weight, without biases."""
    roots = dict.fromkeys(root for found in weights_of(maps).values() for root, _ in found.values())
    return [(value, maps.axes[value]) for value in roots]


def _multiply_adds(maps: Maps) -> _Products:
    """The dimensions whose sizes multiply to multiply-adds, of all examples together."""
    return [(product.operation, product.axes) for product in maps.products]


def _parameters(maps: Maps) -> _Products:
    """The dimensions of each parameter that was used."""
    used = dict.fromkeys(maps.recording.named[x] for x in _own(maps.recording) if x in maps.recording.named)
    return [(value, maps.axes[value]) for value in used]


def _own(recording: Recording) -> dict[str, nn.Parameter]:
    """The parameters of a network but for those of its gates, by name."""
    of_gates = {p for gate in gate_names(recording.network).values() for p in gate.parameters()}
    return {name: p for name, p in recording.network.named_parameters() if p not in of_gates}


def _examples(recording: Recording) -> int:
    return math.prod(recording.calls[0].inputs[0].shape[:1]) if recording.calls[0].inputs else 1


def _why(analysis: Analysis, site: str, unit: int, is_behind: bool) -> str:
    call = next(call for call in analysis.maps.gates if call.site == site)
    axis = call.behind if is_behind else call.front
    if not analysis.solution.stays[analysis.solution.units[axis.dimension][unit]]:
        return "other gates are open"
    reason = analysis.solution.reason(axis, unit)
    path, is_computed, _ = reason.rpartition(" in ")[2].partition(".parametrizations.")
    if is_computed:
        reason += f"; remove it first: torch.nn.utils.parametrize.remove_parametrizations on {path!r}"
    return reason


def _ranges(units: Sequence[int]) -> str:
    """Units in words, such as ``units 0-3, 7``."""
    breaks = np.flatnonzero(np.diff(units) != 1) + 1
    parts = [(part[0], part[-1]) for part in np.split(np.array(units), breaks)]
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return f"unit{'s' if len(units) > 1 else ''} {', '.join(texts)}"


class NetworkCost:
    """Counts the weights (without biases), parameters and multiply-adds that open gates leave in a network.

    A weight is left if the unit it reads and the unit it writes are both left, so closed units upstream and downstream
    count: between gates with a and b open units a dense layer keeps a * b weights, a convolution a * b kernels, and a
    branch without open gates keeps nothing. For gates of 0 and 1 the counts are those of the compacted network, except
    for units that it keeps so that a layer has one, a split has the same parts, or a comparison of sizes the same
    result. For probabilities they are expectations under independent gates, and the numbers of units that a layer reads
    and writes count as independent. Weights that several layers share count once.

    When it is made, its counts are compared: all multiply-adds with those of torch's counter, all parameters with
    ``network.parameters()``, and what statements about gates leave, with all gates open and in one random cut, with the
    sizes that compaction would give each tensor; at its first use, each formula with these.

    Args:
        network: any network with :class:`~pyro_l0.nn.L0Gate` layers.
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
        ValueError: a gate is never called or computes weights, a gate value is missing, misshapen or outside [0, 1], or
            a count is not that of the network.
        TypeError: ``network`` is not a module, a gate value is not a tensor, or the example is of an integer type that
            the network does not take.

    Warns:
        UserWarning: code compares sizes so that small networks have more than is counted.

    Example:
        >>> from pyro_l0.nn import L0Gate
        >>> net = nn.Sequential(L0Gate(4), nn.Linear(4, 3), L0Gate(3), nn.Linear(3, 2))
        >>> cost = NetworkCost(net, torch.ones(1, 4))
        >>> cost.group_sizes, cost.total_weights
        ({'0': 3.0, '2': 2.0}, 18)
        >>> z = {"0": torch.tensor([1.0, 1.0, 0.0, 0.0]), "2": torch.tensor([1.0, 0.0, 0.0])}
        >>> cost.weights(z)
        tensor(4.)

    References:
        Louizos, Welling, Kingma (2018), arXiv:1712.01312; eq. 16 and section 4.1.
    """

    def __init__(self, network: nn.Module, example: Example) -> None:
        with FlopCounterMode(display=False) as counter:
            self._recording = record_called(network, example)
        self.sizes = {name: gate.size for name, gate in gate_names(network).items()}
        self._dependencies = find_dependencies(self._recording, lambda _: NormalForms([*self.sizes.values()]))
        maps, own = self._dependencies.maps, _own(self._recording)
        unused = sum(p.numel() for name, p in own.items() if name not in self._recording.named)
        self._weights = _Count(self._dependencies, _weights(maps), 1)
        self._macs = _Count(self._dependencies, _multiply_adds(maps), _examples(self._recording))
        self._parameters = _Count(self._dependencies, _parameters(maps), 1, unused)
        self.total_weights = self._weights.total
        self.total_parameters = self._parameters.total
        self.total_macs = self._macs.total
        _agree("parameters", "the network", self.total_parameters, sum(p.numel() for p in own.values()))
        _compare_with_torch(maps, int(counter.get_total_flops()) // 2)
        self._check_cuts()
        self._check_comparisons()
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
        return self._count(self._weights, active)

    def macs(self, active: Mapping[str, Tensor]) -> Tensor:
        """Multiply-adds left per example, shape ``()``; arguments as in :meth:`weights`."""
        return self._count(self._macs, active)

    def parameters(self, active: Mapping[str, Tensor]) -> Tensor:
        """Parameters left, shape ``()``; arguments as in :meth:`weights`.

        Biases and parameters of norms count, biases that compaction adds for constants do not.
        """
        return self._count(self._parameters, active)

    def report(self) -> Report:
        """The units that stay even if their gates close, and why.

        Example:
            >>> from pyro_l0.nn import L0Gate
            >>> net = nn.Sequential(nn.Linear(2, 3), L0Gate(3))
            >>> print(NetworkCost(net, torch.ones(1, 2)).report())
            gate '1', units 0-2: stay behind the gate (network output)
        """
        return ClosedUnits(self._recording).report()

    def _per_unit(self, uses: Iterable[Use]) -> dict[str, float]:
        sizes = dict.fromkeys(self.sizes, 0.0)
        for use in uses:
            sizes[use.site] += len(use.units) * use.each / self.sizes[use.site]
        return sizes

    def _count(self, count: _Count, active: Mapping[str, Tensor]) -> Tensor:
        """An expected count; where a statement is not proven, that of given gates is found from what they leave."""
        self._check(active)
        total = count(active)
        is_read = not (torch._C._are_functorch_transforms_active() or any(x.is_meta for x in active.values()))
        if self._dependencies.statements.is_proven or not is_read:
            return total
        values = torch.cat([active[site].detach().cpu() for site in self.sizes])
        if bool(((values != 0) & (values != 1)).any()):
            return total
        closed = set(torch.nonzero(values == 0).flatten().tolist())
        left = find_dependencies(self._recording, lambda _: TruthTables([closed]))
        stays = np.array([left.statements.holds(x, 0) for x in left.stays.tolist()], dtype=np.bool_)
        return total + (count.left(lambda axis: int(stays[left.units[axis.dimension]].sum())) - total.detach())

    def _check_cuts(self) -> None:
        """Compare what stays with all gates open, and with some closed at random, with what can leave the network."""
        number, gates = sum(self.sizes.values()), iter(range(sum(self.sizes.values())))
        of_site = {site: [next(gates) for _ in range(size)] for site, size in self.sizes.items()}
        closed = np.random.default_rng(0).random(number) < min(0.3, 2 / max(len(self.sizes), 1))
        cut = {site: torch.from_numpy(closed[found]) for site, found in of_site.items()}
        ones = {site: torch.ones(size) for site, size in self.sizes.items()}
        whole, some = self._dependencies.opened, analyse(self._recording, cut, ones)
        for analysis, mask in ((whole, closed & False), (some, closed)):
            opened = set(np.flatnonzero(~mask).tolist())
            found = self._dependencies.statements.holds(self._dependencies.stays.tolist(), opened)
            stays = np.array([found[x] for x in self._dependencies.stays.tolist()], dtype=np.bool_)
            given = {site: torch.from_numpy(~mask[each]).double() for site, each in of_site.items()}
            is_more = bool(analysis.maps.pinned_entries) or LAST in analysis.solution.texts  # stays than the gates need
            for what, count, products in (
                ("weights", self._weights, _weights(analysis.maps)),
                ("multiply-adds", self._macs, _multiply_adds(analysis.maps)),
                ("parameters", self._parameters, _parameters(analysis.maps)),
            ):
                own = count.sizes(lambda axis: int(stays[self._dependencies.units[axis.dimension]].sum()))  # noqa: B023
                count.known.append((what, given, own))
                for size, (source, axes) in zip(own, products, strict=True):
                    left = math.prod(map(analysis.solution.size, axes))
                    _agree(what, source, size, size if is_more and size < left else left)

    def _check_comparisons(self) -> None:
        """Warn where code compares sizes so that compaction keeps units of small networks, which do not count here."""
        if all(x.is_equation or x.is_even for x in self._recording.comparisons):
            return
        least = {site: torch.arange(size) > 0 for site, size in self.sizes.items()}
        pinned = analyse(self._recording, least).maps.pinned_entries
        texts = {x.text for x in self._recording.comparisons if not (x.is_equation or x.is_even)}
        if kept := sorted(texts & {text for _, _, text in pinned}):
            warnings.warn(
                f"Expected code that takes the same way whatever leaves, but it compares {kept[0]}: where few units "
                "are left, compaction keeps more, which are not counted. Compare no sizes, or count what compact "
                "returns.",
                stacklevel=3,
            )

    def _check(self, active: Mapping[str, Tensor]) -> None:
        if not isinstance(active, Mapping) or active.keys() != self.sizes.keys():
            got = sorted(map(str, active)) if isinstance(active, Mapping) else repr(active)
            raise ValueError(f"Expected one entry per gate site {sorted(self.sizes)}, but got {got}.")
        for name, value in active.items():
            # Read where no device has to be waited for; differences go beyond 0 and 1.
            is_read = getattr(value, "is_cpu", True) and not torch._C._are_functorch_transforms_active()
            check_value(name, self.sizes[name], value, 1e-3 if is_read else None)


def _agree(what: str, source: Value | Operation | str, count: float, right: float) -> None:
    """Raise a ValueError if an expected count is not that of the network, where all gates are 0 or 1."""
    if count != right:
        if isinstance(source, Value):
            source = repr(source.names[0]) if source.names else "a computed weight"
        elif isinstance(source, Operation):
            source = source.location
        raise ValueError(
            f"Expected to count the {right:,.0f} {what} of {source}, but got {count:,.0f}. "
            "Please report it with the network; meanwhile train it with L0_ELBO, whose group_size you give."
        )


def _compare_with_torch(maps: Maps, total: int) -> None:
    """Refuse multiply-adds that torch's counter counts otherwise; it has no formula for some operations."""
    own = Counter[Operation]()
    for product in maps.products:
        own[product.operation] += math.prod(axis.size for axis in product.axes)
    if total != sum(own.values()):
        for operation in maps.recording.operations:
            is_product = len([x for x in operation.inputs if x.rank > 1]) > 1
            counted = _count_by_torch(operation) if is_product else 0
            _agree("multiply-adds", operation, own[operation], counted or own[operation])


def _count_by_torch(operation: Operation) -> int:
    given = tree_map_only(Value, lambda x: x.tensor.detach().to("meta"), (operation.args, operation.kwargs))
    with FlopCounterMode(display=False) as counter, suppress(Exception):  # not all run without numbers
        operation.function(*given[0], **given[1])
    return int(counter.get_total_flops()) // 2


class _Count:
    """A sum over products of numbers of entries that stay, by the dimensions of each product.

    It is divided by ``per``, and ``more`` comes to it whatever leaves.
    """

    def __init__(self, dependencies: Dependencies[NormalForms], products: _Products, per: int, more: int = 0) -> None:
        self._dependencies = dependencies
        self._products = [list(axes) for _, axes in products]
        self._per = per
        self._more = more
        total = more + sum(self.sizes(lambda axis: axis.size))
        self.total = total // per if total % per == 0 else total / per
        self._histograms: dict[int, tuple[dict[int, int], tuple[Clause, ...]]] = {}
        self.known: list[tuple[str, dict[str, Tensor], list[int]]] = []  # products of some gates, for comparison

    def sizes(self, size: Callable[[Axis], int]) -> list[int]:
        """The products, from the number of entries that stay of each dimension."""
        return [math.prod(map(size, axes)) for axes in self._products]

    def left(self, size: Callable[[Axis], int]) -> float:
        """The sum, from the number of entries that stay of each dimension."""
        return self._total(self.sizes(size))

    def _total(self, sizes: list[int]) -> float:
        return (sum(sizes) + self._more) / self._per

    def __call__(self, active: Mapping[str, Tensor]) -> Tensor:
        """The expected sum for P(z != 0) by site, shape ``()``; at the first call it is compared with counts."""
        total = self._sum(*self._compiled, active)
        while self.known:  # at the first call
            what, given, sizes = self.known.pop()
            found, right = float(self._sum(*self._compiled, given)), self._total(sizes)
            _agree(what, "the network", right if math.isclose(found, right) else found, right)
        return total

    def _sum(
        self,
        expectations: Expectations,
        terms: dict[tuple[int, ...], float],
        constant: float,
        active: Mapping[str, Tensor],
    ) -> Tensor:
        like = next(iter(active.values()), torch.zeros(()))
        sums = expectations(active)
        total = like.new_full((), constant)
        for numbers, times in terms.items():
            total = total + reduce(torch.mul, [sums[number] for number in numbers]) * times
        return total

    @cached_property
    def _compiled(self) -> tuple[Expectations, dict[tuple[int, ...], float], float]:
        """Sums of probabilities, the terms (by the numbers of a term's sums, how often it counts), and a constant."""
        expectations = Expectations(self._dependencies.statements, self._dependencies.sizes)
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
        statements = self._dependencies.statements
        for clause in shared:  # once, and not at all where one of the sums is zero without it
            if not any(self._is_implied(clause, histogram) for histogram in sums):
                sums.append({statements.number([clause]): 1})
        return factor, tuple(sorted(expectations.add(histogram) for histogram in sums))

    def _is_implied(self, clause: Clause, histogram: Mapping[int, int]) -> bool:
        clauses = self._dependencies.statements.clauses
        return all(any(other <= clause for other in clauses(statement)) for statement in histogram)

    def _split(self, axis: Axis) -> tuple[dict[int, int], tuple[Clause, ...]]:
        """How many entries stay if a statement holds, for each statement, and what all of them have in common."""
        key = id(self._dependencies.units[axis.dimension])
        if key not in self._histograms:
            statements = self._dependencies.statements
            found, counts = np.unique(self._dependencies.remaining(axis), return_counts=True)
            clauses = [statements.clauses(statement) for statement in found.tolist()]
            common = tuple(clause for clause in clauses[0] if all(clause in other for other in clauses[1:]))
            histogram: dict[int, int] = {}
            for each, count in zip(clauses, counts.tolist(), strict=True):
                rest = statements.number([clause for clause in each if clause not in common])
                histogram[rest] = histogram.get(rest, 0) + count
            self._histograms[key] = histogram, common
        return self._histograms[key]
