"""Expected numbers of units that stay, as differentiable functions of the gates' probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from pyro_l0.nn.engine.formulas import Formulas
from pyro_l0.nn.per_device import PerDevice

__all__ = ["Expectations"]


class Expectations:
    """Sums of probabilities of statements about gates that are independent of each other.

    A probability is a product over clauses, and the probability that none of a clause's literals holds one over
    literals; this is exact where no gate is in two of them. Gates are numbered through in the order of ``sizes``.
    """

    def __init__(self, formulas: Formulas, sizes: Mapping[str, int]) -> None:
        self._formulas, self._sizes = formulas, sizes
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
        circuit = _Circuit(self._formulas, sum(self._sizes.values()))
        plain = [self._plain_sum(statements) for statements in self._numbers]
        for statements, one in zip(self._numbers, plain, strict=True):
            if one is None:
                for formula, _ in statements:
                    circuit.add(formula)
        circuit.arrange()
        return circuit, [
            one or _sum_of_nodes([circuit.place(formula) for formula, _ in statements], [n for _, n in statements])
            for statements, one in zip(self._numbers, plain, strict=True)
        ]

    def _plain_sum(self, statements: Sequence[tuple[int, int]]) -> _Sum | None:
        """A sum over all gates of a site, or the probability that one of them is open; None if it is neither."""
        clauses = [self._formulas.clauses(formula) for formula, _ in statements]
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

    def __init__(self, formulas: Formulas, gates: int) -> None:
        self._formulas, self._gates = formulas, gates
        self._nodes: dict[tuple[bool, tuple[int, ...]], int] = {}  # all or some of which nodes; gates come first
        self._levels: dict[int, int] = {}
        self._of_formula: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._steps: list[tuple[bool, PerDevice]] = []

    def add(self, formula: int) -> int:
        """Announce a statement; return its node."""
        if formula not in self._of_formula:
            clauses = [self._node(False, map(self._literal, x)) for x in self._formulas.clauses(formula)]
            self._of_formula[formula] = self._node(True, clauses)
        return self._of_formula[formula]

    def arrange(self) -> None:
        """Find a place for every node, behind those of the gates and the numbers 0 and 1."""
        zero, one = self._gates, self._gates + 1
        place = self._gates + 2
        steps: dict[tuple[int, bool, int], list[tuple[int, tuple[int, ...]]]] = {}
        for (is_all, parts), node in self._nodes.items():
            width = max(len(parts) - 1, 0).bit_length()
            steps.setdefault((self._levels[node], is_all, width), []).append((node, parts))
        for (_, is_all, width), nodes in sorted(steps.items()):
            fill = one if is_all else zero
            rows = [[self._place(x) for x in parts] + [fill] * ((1 << width) - len(parts)) for _, parts in nodes]
            self._places.update({node: place + row for row, (node, _) in enumerate(nodes)})
            self._steps.append((is_all, PerDevice(torch.tensor(rows))))
            place += len(nodes)

    def place(self, formula: int) -> int:
        """Where the probability of a statement stands."""
        return self._place(self._of_formula[formula])

    def __call__(self, probs: Sequence[Tensor]) -> Tensor:
        """All probabilities."""
        values = torch.cat([*probs, probs[0].new_zeros(1), probs[0].new_ones(1)])
        for is_all, places in self._steps:
            index = places.on(values.device)
            factors = values.index_select(0, index.flatten()).view(index.shape)
            values = torch.cat([values, _product(factors) if is_all else 1 - _product(1 - factors)])
        return values

    def _place(self, node: int) -> int:
        return self._places.get(node, node)

    def _literal(self, literal: int) -> int:
        return literal if literal < self._gates else self.add(self._formulas.statements[literal - self._gates])

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
    """The product over the last dimension."""
    if factors.shape[-1] <= 4:
        return reduce(torch.mul, factors.unbind(-1))
    total: Tensor = _Product.apply(factors)  # type: ignore[no-untyped-call]
    return total
