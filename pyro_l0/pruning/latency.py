"""The time of a network's call as a function of its gates, from tables of measured times."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_l0.compaction import compact
from pyro_l0.nn.calls import record_called
from pyro_l0.nn.cost import Expectations, PerDevice
from pyro_l0.nn.engine import Example, Operation, Value, calls_of, find_entry
from pyro_l0.nn.engine.dependency import Dependencies, find_dependencies
from pyro_l0.nn.engine.record import example_of
from pyro_l0.nn.engine.statements import FALSE, TRUE, NormalForms
from pyro_l0.nn.gate import gate_names
from pyro_l0.training.processes import rank, share_value

__all__ = ["Latency", "call_of", "measure_latency"]

_INTERVALS = 4  # between which further sizes are looked for
_FAR = 0.02  # of the whole time, by which a table may be off between its sizes
_WHOLE = (1, 2, 4, 16)  # of the units of each site one in so many is left in networks that are timed as a whole
_WAIT, _LEAST_WAIT, _LESS, _SECONDS = 20, 3, 0.01, 1.0  # calls without a shorter one, how much shorter, and a limit
_PATIENCE = 6  # so many times as long is waited where whole networks are timed, which set the scale
Units = tuple[tuple[int, int], ...]  # statements on which entries stay, and how many entries have each
Run = Callable[[], object]


class Latency:
    """Predicts the microseconds of a network's call from its gates; ``prune(..., cost="latency")`` uses it.

    Operations of a recorded call that work on the same units are timed alone with fewer and fewer units, which gives a
    table over the number of units read and written. Its sizes lie close together where times jump, with straight lines
    in between. Operations on more than two kinds of units, and those that do not depend on their number, have no table:
    their time, and by how much operations are slower in the network than alone, come from four sizes of the whole
    network, with straight lines in between.

    ``latency(active)`` is the time of a call in microseconds, shape ``()``, for P(z != 0) or 0 and 1 of each gate by
    site. The value comes from the tables. The derivative is that of straight lines from one unit to all, because
    between its steps a table has a derivative of zero.

    Args:
        network: a network with gates, on the device where it is timed.
        example: what it is called with; the times are those of this batch.
        measured: the attribute ``measured`` of an earlier object, whose times are used again.

    Raises:
        ValueError: no operation that depends on the gates can be timed.
    """

    def __init__(self, network: nn.Module, example: Example, measured: Mapping[str, float] | None = None) -> None:
        recording, example = record_called(network, example), example_of(example, network)
        dependencies = find_dependencies(
            recording, lambda _: NormalForms([gate.size for gate in gate_names(network).values()])
        )
        self.measured = dict(measured or {"gates": float(sum(dependencies.sizes.values()))})
        self._network, self._example = network, example
        self._device = next(network.parameters()).device
        self._before: Run | None = None
        parts = {f"one in {k}": _first(dependencies.sizes, k, self._device) for k in _WHOLE}
        if not parts.keys() <= self.measured.keys():
            runs = [call_of(compact(network, gates, example).network, example) for gates in parts.values()]
            self._before = runs[-1]  # between operations caches are as in a network, which are not those of a loop
            self.measured.update(zip(parts, microseconds(runs, self._device), strict=True))
        groups: dict[tuple[Units, ...], list[_Work]] = {}
        for operation in recording.operations:
            work = _Work(operation, dependencies)
            if 0 < len(work.units) <= 2 and work.can_shrink():
                groups.setdefault(work.units, []).append(work)
        if not groups:
            raise ValueError(
                "Expected a network that takes less time with fewer units, but no operation that depends on its gates "
                "can be timed; take another cost, such as macs."
            )
        self._expectations = Expectations(dependencies.statements, dependencies.sizes)
        self._tables = [self._table(f"group {i}", *group) for i, group in enumerate(groups.items())]
        sums, first = np.unique([float(self._sum(gates)) for gates in parts.values()], return_index=True)
        times = np.array([self.measured[name] for name in parts])[first]
        slope = (times[1:2] - times[:1]) / (sums[1:2] - sums[:1])  # down to a network without what is in tables
        rest = np.maximum(times[:1] - slope * sums[:1], 0) if len(sums) > 1 else np.zeros(1)
        knots, values = np.insert(sums, 0, 0.0), np.maximum.accumulate([*rest, *times])
        self._whole = [PerDevice(torch.tensor(x, dtype=torch.float32)) for x in (values, knots)]

    def __call__(self, active: Mapping[str, Tensor]) -> Tensor:
        """Microseconds of a call, shape ``()``, for ``active``, which has P(z != 0) or 0 and 1 of each gate by site."""
        return _interpolate(self._whole, [self._sum(active)])

    def _sum(self, active: Mapping[str, Tensor]) -> Tensor:
        """Of the times of operations by themselves, shape ``()``."""
        sums = self._expectations(active)
        return torch.stack([table(sums) for table in self._tables]).sum()

    def compare(self, pruned: nn.Module) -> tuple[float, float]:
        """Measure the microseconds of a pruned network and of the one with all gates open, now."""
        sizes = {site: gate.size for site, gate in gate_names(self._network).items()}
        whole = compact(self._network, _first(sizes, 1, self._device), self._example).network
        ours, theirs = microseconds([call_of(x, self._example) for x in (pruned, whole)], self._device)
        return ours, theirs

    def _table(self, name: str, units: tuple[Units, ...], works: Sequence[_Work]) -> _Table:
        """The microseconds that operations on the same units take, at numbers of units from 0 to all of them."""
        sizes = [sum(times for _, times in own) for own in units]
        far = _FAR * self.measured["one in 1"]

        def measure(*numbers: int) -> float:
            if 0 in numbers:
                return 0.0
            key = f"{name}, {numbers}"
            if key not in self.measured:
                run = _in_turn([work.prepare(dict(zip(units, numbers, strict=True))) for work in works])
                (self.measured[key],) = microseconds([run], self._device, self._before, 1)
            return self.measured[key]

        knots = []
        for dim, size in enumerate(sizes):

            def line(number: int, dim: int = dim) -> float:
                return measure(*sizes[:dim], number, *sizes[dim + 1 :])

            coarse = sorted({round(1 + (size - 1) * i / _INTERVALS) for i in range(_INTERVALS + 1)})
            between = [n for pair in itertools.pairwise(coarse) for n in _between(line, *pair, far)]
            knots.append([0, *sorted({*coarse, *between})])
        values = torch.tensor([measure(*numbers) for numbers in itertools.product(*knots)])
        return _Table(values.view([len(x) for x in knots]), knots, [self._expectations.add(dict(x)) for x in units])


class _Work:
    """An operation that can be run with fewer of the ``units`` whose kinds its tensors have."""

    def __init__(self, operation: Operation, dependencies: Dependencies[NormalForms]) -> None:
        self._operation = operation
        self._dims: dict[Value, list[tuple[int, Units, int]]] = {value: [] for value in operation.inputs}
        for value, dims in self._dims.items():
            for dim, axis in enumerate(dependencies.maps.axes[value]):
                found, counts = np.unique(dependencies.remaining(axis), return_counts=True)
                if not set(found.tolist()) <= {TRUE, FALSE}:
                    times = math.gcd(*counts.tolist())
                    dims.append((dim, tuple(zip(found.tolist(), (counts // times).tolist(), strict=True)), times))
        kinds = sorted({units for dims in self._dims.values() for _, units, _ in dims})
        # A single unit says that some of others are open, or that a branch is, which is in their numbers as well.
        self.units = tuple([units for units in kinds if len(units) > 1] or kinds[:1])

    def prepare(self, numbers: Mapping[Units, int]) -> Run:
        """A call that runs the operation on tensors with so many units of each kind, for the clock."""

        def shrunk(value: Value) -> Tensor:
            tensor = value.tensor.detach()
            for dim, units, times in self._dims[value]:
                if units in numbers:
                    tensor = tensor.narrow(dim, 0, times * numbers[units])
            return tensor.clone()

        one = self._operation
        args, kwargs = tree_map_only(Value, shrunk, (one.args, one.kwargs))
        name = find_entry(one.name).size
        if (before := one.arguments.get(name)) not in (None, 1):
            args, kwargs = (), tree_map_only(Value, shrunk, one.arguments)
            size = next(times * numbers[x] for dims in self._dims.values() for _, x, times in dims if x in numbers)
            kwargs[name] = size if isinstance(before, int) else [size]
        return partial(one.function, *args, **kwargs)

    @torch.no_grad()
    def can_shrink(self) -> bool:
        """Whether it runs with one unit of each kind; views of a given size do not, and take no time."""
        try:
            self.prepare(dict.fromkeys(self.units, 1))()
        except (RuntimeError, TypeError, ValueError):
            return False
        return self._operation.name != "gate"


class _Table:
    """Times over numbers of units, shape ``(len(knots[0]), ...)``, with straight lines between them."""

    def __init__(self, values: Tensor, knots: Sequence[Sequence[int]], sums: Sequence[int]) -> None:
        self._sums = sums
        for dim in range(values.dim()):
            # What disturbs a measurement makes it longer, so that with fewer units it takes no longer than with more.
            values = values.flip(dim).cummin(dim).values.flip(dim)
        ends = [torch.tensor([min(1, len(x) - 2), len(x) - 1]) for x in knots]
        positions = [torch.tensor(x, dtype=torch.float32) for x in knots]
        corners = values[torch.meshgrid(*ends, indexing="ij")]
        self._steps = [PerDevice(x) for x in (values, *positions)]
        self._line = [PerDevice(x) for x in (corners, *(x[own] for x, own in zip(positions, ends, strict=True)))]

    def __call__(self, sums: Sequence[Tensor]) -> Tensor:
        at = [sums[number] for number in self._sums]
        line = _interpolate(self._line, at)
        return line + (_interpolate(self._steps, at) - line).detach()


def _interpolate(table: Sequence[PerDevice], at: Sequence[Tensor]) -> Tensor:
    """Linear in each dimension between knots, and beyond them; shape ``()``."""
    values, *knots = (x.on(at[0].device) for x in table)
    for positions, x in zip(knots, at, strict=True):
        above = torch.searchsorted(positions, x.detach().float().view(1)).clamp(1, len(positions) - 1)
        (low, high), (lower, upper) = (
            [y.index_select(0, i)[0] for i in (above - 1, above)] for y in (positions, values)
        )
        values = lower + (upper - lower) * ((x - low) / (high - low))
    return values


def _between(line: Callable[[int], float], low: int, high: int, far: float) -> list[int]:
    """Sizes between two, as close as it takes for straight lines to be right."""
    middle = (low + high) // 2
    if middle in (low, high):
        return []
    expected = line(low) + (middle - low) / (high - low) * (line(high) - line(low))
    if abs(line(middle) - expected) <= far:
        return [middle]
    return [*_between(line, low, middle, far), middle, *_between(line, middle, high, far)]


def _first(sizes: Mapping[str, int], part: int, device: torch.device) -> dict[str, Tensor]:
    """Gates of which the first ones are open, one in so many."""
    return {site: (torch.arange(size, device=device) < size / part).float() for site, size in sizes.items()}


def _in_turn(runs: Sequence[Run]) -> Run:
    def run() -> None:
        for one in runs:
            one()

    return run


def call_of(network: nn.Module, example: Example) -> Run:
    """A call without arguments that runs a network on all calls of an example, in evaluation mode."""
    network.eval()
    return _in_turn([partial(network, *args, **kwargs) for args, kwargs in calls_of(example)])


@torch.no_grad()
def microseconds(
    runs: Sequence[Run], device: torch.device, before: Run | None = None, patience: int = _PATIENCE
) -> list[float]:
    """The shortest time of each of some functions, which are called in turn until none gets shorter.

    Each call comes after one of ``before``, or another one of itself. On the CPU with one thread it is that thread's
    processor time, as if no other process ran.
    """
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    least, begun, waited, limit = [math.inf] * len(runs), time.perf_counter(), 0, patience * _SECONDS * len(runs)
    while waited < patience * _WAIT and (waited < _LEAST_WAIT or time.perf_counter() - begun < limit):
        waited += 1
        for i, run in enumerate(runs):
            (before or run)()
            _wait_for(device)
            start = clock()
            run()
            _wait_for(device)
            passed = clock() - start
            if passed < (1 - _LESS) * least[i]:
                waited = 0
            least[i] = min(least[i], passed)
    return [1e6 * x for x in least]


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def measure_latency(network: nn.Module, example: Example, measured: Mapping[str, float] | None) -> Latency:
    """The times that the first process measures, in all of them."""
    first = Latency(network, example, measured) if rank() == 0 else None
    times = share_value(None if first is None else first.measured)
    return Latency(network, example, times) if first is None else first
