"""Statements about which gates are open, and which entries the network's outputs depend on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import reduce

import numpy as np

from pyro_l0.nn.engine.maps import Axis, Index, Link, Maps, Read
from pyro_l0.nn.engine.record import Operation, Value

__all__ = ["FALSE", "TRUE", "Clause", "Needs", "NormalForms", "Statements", "TruthTables"]


Clause = frozenset[int]
TRUE, FALSE = 0, 1
_CASES = 512  # at random, which spare searches for a proof that would fail
_TRIES, _FEW = 2_000, 100  # steps of a search for gates that refute what was not proven so; few after one in vain


class Statements(ABC):
    """Monotone statements about gates, which are numbered, and arrays of numbers that stand for those of entries.

    Gates are numbered through, site after site.
    """

    @abstractmethod
    def gate(self, gate: int) -> int:
        """The number of the statement that a gate, numbered through, is open."""

    @abstractmethod
    def both(self, one: int, other: int) -> int:
        """The number of the statement that two hold."""

    @abstractmethod
    def some(self, statements: Iterable[int]) -> int:
        """The number of the statement that at least one holds; FALSE for none."""

    @abstractmethod
    def implies(self, one: int, other: int) -> bool:
        """Whether no case, of all or of many, shows that one statement holds without the other."""

    def every(self, statements: Iterable[int]) -> int:
        """The number of the statement that all hold; TRUE for none."""
        return reduce(self.both, statements, TRUE)

    def both_each(self, one: Index, other: Index) -> Index:
        """Entry by entry, that two statements hold."""
        return self._each(one, other, TRUE, self.both)

    def some_each(self, one: Index, other: Index) -> Index:
        """Entry by entry, that one of two statements holds."""
        return self._each(one, other, FALSE, lambda x, y: self.some((x, y)))

    def some_of_each(self, rows: Index) -> Index:
        """Along the last dimension, that one of the statements holds."""
        if rows.max(initial=TRUE) <= FALSE:
            return np.asarray(rows.min(-1, initial=FALSE))
        found = [self.some(set(row)) for row in rows.reshape(-1, rows.shape[-1]).tolist()]
        return np.array(found, dtype=np.int64).reshape(rows.shape[:-1])

    def outer(self, vectors: Sequence[Index]) -> Index:
        """That all entries of a combination hold, a dimension for each vector."""
        return reduce(lambda result, vector: self.both_each(result[..., np.newaxis], vector), vectors)

    def regroup(self, vectors: Sequence[Index], axes: Sequence[Axis], axis: Axis) -> Index:
        """The combinations of entries are those of other dimensions: that one holds in which an entry takes part."""
        flat = self.outer(vectors).reshape([other.size for other in axes])
        rows = np.moveaxis(flat, next(dim for dim, other in enumerate(axes) if other is axis), 0)
        return self.some_of_each(rows.reshape(axis.size, -1))

    def some_of(self, statements: Index) -> int:
        """As ``some``, of the numbers in an array of any shape."""
        if statements.max(initial=TRUE) <= FALSE:
            return int(statements.min(initial=FALSE))
        return self.some(set(statements.tolist()))

    def _each(self, one: Index, other: Index, neutral: int, combine: Callable[[int, int], int]) -> Index:
        if one.shape != other.shape:
            one, other = np.broadcast_arrays(one, other)
        if one.max(initial=TRUE) <= FALSE and other.max(initial=TRUE) <= FALSE:
            return np.asarray(np.maximum(one, other) if neutral == TRUE else np.minimum(one, other))
        if not (other != neutral).any() or not (one != other).any():
            return one.copy()
        if not (one != neutral).any():
            return other.copy()
        pairs, where = np.unique(one.ravel() + (other.ravel() << 32), return_inverse=True)
        found = [combine(x & 0xFFFFFFFF, x >> 32) for x in pairs.tolist()]
        return np.array(found, dtype=np.int64)[where].reshape(one.shape)


class NormalForms(Statements):
    """Statements in monotone conjunctive normal form: clauses that all hold, of literals of which one does.

    A literal is an open gate or, numbered behind the gates, another statement: written out, a disjunction of long
    conjunctions would have too many clauses. Absorption leaves out every clause that is seen to follow from another.
    Statements of the same clauses have one number. What follows is proven part by part, as in a free lattice, or else
    by a search for gates that refute it; ``is_proven`` says whether every search came to an end. ``sizes`` are each
    site's numbers of gates.

    Example:
        >>> statements = NormalForms([2])
        >>> one, other = statements.gate(0), statements.gate(1)
        >>> either = statements.some([one, other])  # follows from one
        >>> statements.clauses(statements.both(one, either))
        (frozenset({0}),)
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.of_literals: list[int] = []  # for which literals stand
        self._gates = sum(sizes)
        self._clauses: list[tuple[Clause, ...]] = [(), (frozenset(),)]
        self._numbers: dict[frozenset[Clause], int] = {frozenset(): TRUE, frozenset({frozenset()}): FALSE}
        self._known: dict[Clause, Clause] = {}  # one object for equal clauses: comparing long ones takes long
        self._both: dict[tuple[int, int], int] = {}
        self._some: dict[frozenset[int], int] = {}
        self._literals: dict[int, int] = {}
        self._with_clause: dict[Clause, set[int]] = {}  # literals of statements that have it
        self.is_proven = True  # whether what no case refuted was also proven, each time
        self._gate_cases = _cases(sizes)
        self._clause_cases: dict[Clause, int] = {}
        self._cases: dict[int, int] = {}  # by statement
        self._implied: dict[Clause, tuple[set[Clause], set[Clause]]] = {}  # what was asked about a clause, and yes
        self._entailed: dict[Clause, dict[int, bool]] = {}  # the same by statements
        self._gates_of: dict[int, list[int]] = {}
        self._by_gate: dict[Clause, dict[int, list[int]]] = {}  # its literals by one of the gates that they need

    def clauses(self, statement: int) -> tuple[Clause, ...]:
        """The clauses that a statement is the conjunction of, short ones first; none of TRUE, an empty one of FALSE."""
        return self._clauses[statement]

    def gate(self, gate: int) -> int:
        return self.number([frozenset({gate})])

    def number(self, clauses: Iterable[Clause]) -> int:
        """The number of the conjunction of some clauses, the same for all that absorption leaves alike."""
        given = [self._known.setdefault(clause, clause) for clause in clauses]
        key = frozenset(given)
        if key not in self._numbers:
            left = self._absorb(list(dict.fromkeys(given)))
            self._numbers[key] = self._numbers.setdefault(frozenset(left), len(self._clauses))
            if self._numbers[key] == len(self._clauses):
                self._clauses.append(tuple(left))
        return self._numbers[key]

    def both(self, one: int, other: int) -> int:
        if one == other or TRUE in (one, other) or FALSE in (one, other):
            return FALSE if FALSE in (one, other) else max(one, other)
        key = (one, other) if one < other else (other, one)
        if key not in self._both:
            self._both[key] = self.number([*self._clauses[one], *self._clauses[other]])
        return self._both[key]

    def some(self, statements: Iterable[int]) -> int:
        given = frozenset(statements) - {FALSE}
        if TRUE in given:
            return TRUE
        if len(given) < 2:
            return next(iter(given), FALSE)
        if given not in self._some:
            self._some[given] = self._disjunction([self._clauses[x] for x in sorted(given)])
        return self._some[given]

    def implies(self, one: int, other: int) -> bool:
        if self._cases_with(one) & ~self._cases_with(other):
            return False
        is_refuted = not self._implies(one, other) and self._is_refuted(one, other)
        self.is_proven &= is_refuted is not None
        return not is_refuted

    def _is_refuted(self, one: int, other: int) -> bool | None:
        """Whether some gates make a statement hold without another; None if that takes too long to find.

        Gates are closed until the other does not hold: all of one of its clauses, and so on for the statements among
        its literals. Where the first does not hold any more, closing further gates cannot help.
        """
        gates = frozenset(range(self._gates))
        left: list[tuple[frozenset[int], tuple[int, ...]]] = [(frozenset(), (other,))]  # closed, and what is to fail
        for _ in range(_TRIES if self.is_proven else _FEW):
            if not left:
                return False
            closed, failing = left.pop()
            found = self.holds((one, *failing), gates - closed)
            failing = tuple(x for x in failing if found[x])
            if found[one] and not failing:
                return True
            for clause in self._clauses[failing[-1]] if found[one] else ():
                literals = (self.of_literals[x - self._gates] for x in clause if x >= self._gates)
                left.append((closed.union(x for x in clause if x < self._gates), (*failing[:-1], *literals)))
        return None

    def holds(self, statements: Iterable[int], opened: Set[int]) -> dict[int, bool]:
        """Whether each of some statements holds if these gates alone are open."""
        found = dict[int, bool]()

        def find(statement: int) -> bool:
            if statement not in found:
                found[statement] = all(
                    any(x in opened if x < self._gates else find(self.of_literals[x - self._gates]) for x in clause)
                    for clause in self._clauses[statement]
                )
            return found[statement]

        return {statement: find(statement) for statement in statements}

    def _disjunction(self, parts: Sequence[tuple[Clause, ...]]) -> int:
        """One of several statements: what all have in common, and one of what else there is to each."""
        common = frozenset(parts[0]).intersection(*parts[1:])
        rests = [[clause for clause in part if clause not in common] for part in parts]
        if not all(rests):
            return self.number(common)
        joined = [rest[0] if len(rest) == 1 else frozenset({self._literal(self.number(rest))}) for rest in rests]
        return self.number([*common, frozenset[int]().union(*joined)])

    def _literal(self, statement: int) -> int:
        """The literal that stands for a statement in clauses, numbered behind the gates."""
        if statement not in self._literals:
            literal = self._literals[statement] = self._gates + len(self.of_literals)
            self.of_literals.append(statement)
            for clause in self._clauses[statement]:
                self._with_clause.setdefault(clause, set()).add(literal)
        return self._literals[statement]

    def _absorb(self, clauses: list[Clause]) -> list[Clause]:
        """The clauses from which the others follow, short ones first."""
        parts = [(other, literals) for other in clauses if (literals := self._with_clause.get(other))]
        wanted = set[int]().union(*(literals for _, literals in parts))
        reduced = [clause if clause.isdisjoint(wanted) else self._beside(clause, parts) for clause in clauses]
        unique = {self._known.setdefault(clause, clause): None for clause in reduced if clause is not None}
        ordered = sorted(unique, key=len)
        left = set(ordered)
        remaining = []
        for clause in ordered:
            left.discard(clause)
            if not self._follows(clause, left):
                remaining.append(clause)
                left.add(clause)
        return remaining

    def _beside(self, clause: Clause, parts: list[tuple[Clause, set[int]]]) -> Clause | None:
        """What a clause says beside others: its literals' statements without theirs; None if nothing.

        ``parts`` are the others, each with the literals that stand for statements that have it.
        """
        known: dict[int, list[Clause]] = {}
        for other, literals in parts:
            if other is not clause and not clause.isdisjoint(literals):
                for literal in sorted(clause & literals):
                    known.setdefault(literal, []).append(other)
        if not known:
            return clause
        left = set(clause)
        for literal, others in known.items():
            rest = [x for x in self._of_literal(literal) if x not in others]
            if not rest:
                return None
            left.discard(literal)
            left.update(rest[0] if len(rest) == 1 else {self._literal(self.number(rest))})
        return frozenset(left)

    def _of_literal(self, literal: int) -> tuple[Clause, ...]:
        return self._clauses[self.of_literals[literal - self._gates]]

    def _implies(self, one: int, other: int) -> bool:
        """Whether a statement is seen to follow from another: each clause of it does.

        That is proven part by part; cases only spare what must fail.
        """
        own = self._clauses[one]
        return not self._cases_with(one) & ~self._cases_with(other) and all(
            clause in own or self._entails(one, clause) for clause in self._clauses[other]
        )

    def _entails(self, one: int, clause: Clause) -> bool:
        """Whether a clause is seen to follow from a statement: from a clause of that, or one of its literals does.

        A statement is a meet of clauses and a clause a join of literals, which are gates and statements. In a free
        lattice a meet is below a join if and only if one of the meet's parts is below the join or the meet is below one
        of the join's parts (Whitman 1941, Free lattices). That is sound for gates; it may miss what follows by
        distributing one over the other, which ``_is_refuted`` then has to tell.
        """
        known = self._entailed.setdefault(clause, {})
        if one not in known:
            own = self._clauses[one]
            known[one] = (
                any(x <= clause for x in own)
                or any(self._implies(one, self.of_literals[x - self._gates]) for x in self._candidates(one, clause))
                or self._follows(clause, frozenset(own))
            )
        return known[one]

    def _candidates(self, one: int, clause: Clause) -> Iterator[int]:
        """The literals of a clause that may follow from a statement: these need no gate that it does not need."""
        if clause not in self._by_gate:
            index = defaultdict[int, list[int]](list)
            self._by_gate[clause] = index
            for literal in (x for x in clause if x >= self._gates):
                index[self._needed(self.of_literals[literal - self._gates])[0]].append(literal)
        found = self._by_gate[clause]
        return (literal for gate in self._needed(one)[:-1] for literal in found.get(gate, ()))

    def _needed(self, statement: int) -> list[int]:
        """The gates without which a statement does not hold, as single clauses say, and -1."""
        if statement not in self._gates_of:
            single = (gate for clause in self._clauses[statement] if len(clause) == 1 for gate in clause)
            self._gates_of[statement] = [*single, -1]
        return self._gates_of[statement]

    def _follows(self, clause: Clause, others: Set[Clause]) -> bool:
        """Whether a clause is seen to follow from one of others: from each literal of that."""
        asked, implying = self._implied.setdefault(clause, (set(), set()))
        new = others - asked
        asked |= new
        implying.update(other for other in new if self._is_within(other, clause))
        return not implying.isdisjoint(others)

    def _is_within(self, one: Clause, other: Clause) -> bool:
        if len(one) < 2 or len(other) < 2 or one <= other:  # what all literals need stands beside their clause
            return one <= other
        return not self._cases_of(one) & ~self._cases_of(other) and all(
            x in other or (x >= self._gates and self._entails(self.of_literals[x - self._gates], other)) for x in one
        )

    def _cases_with(self, statement: int) -> int:
        """The random cases in which a statement holds, as the bits of an integer."""
        if statement not in self._cases:
            held = map(self._cases_of, self._clauses[statement])
            self._cases[statement] = reduce(int.__and__, held, (1 << _CASES) - 1)
        return self._cases[statement]

    def _cases_of(self, clause: Clause) -> int:
        if clause not in self._clause_cases:
            held = (
                self._gate_cases[x] if x < self._gates else self._cases_with(self.of_literals[x - self._gates])
                for x in clause
            )
            self._clause_cases[clause] = reduce(int.__or__, held, 0)
        return self._clause_cases[clause]


def _cases(sizes: Sequence[int]) -> list[int]:
    """For each gate, in which cases it is open, a bit for each.

    Of some sites, from few to most, few or no gates are open, of the others many; in a quarter of cases nearly all.
    """
    rng = np.random.default_rng(0)
    shape = len(sizes), _CASES
    few = np.array(sizes)[:, np.newaxis] ** -rng.uniform(0, 1.5, shape)
    shares = np.where(rng.random(shape) < rng.random(_CASES) ** 3, few, rng.uniform(0.3, 1, shape))
    shares[:, : _CASES // 4] = 1 - float(1 + sum(sizes)) ** -rng.uniform(0, 1, _CASES // 4)
    parts = [np.packbits(rng.random((size, _CASES)) < share, axis=1) for size, share in zip(sizes, shares, strict=True)]
    return [int.from_bytes(row.tobytes(), "big") for part in parts for row in part]


class TruthTables(Statements):
    """Statements by the cases in which they hold. In each case some gates are closed.

    Example:
        >>> cases = TruthTables([{0}, {1}, {0, 1}])
        >>> one, other = cases.gate(0), cases.gate(1)
        >>> cases.count(np.array([one, cases.some([one, other]), TRUE]))
        array([2, 3, 1])
    """

    def __init__(self, closed: Sequence[Set[int]]) -> None:
        self._length = len(closed)
        whole = (1 << len(closed)) - 1
        self._cases = [whole, 0]
        self._numbers = {0: FALSE, whole: TRUE}  # without a case all are true
        self._gates = dict[int, int]()
        for case, gates in enumerate(closed):
            for gate in gates:
                self._gates[gate] = self._gates.get(gate, whole) & ~(1 << case)

    def gate(self, gate: int) -> int:
        return self._number(self._gates.get(gate, self._cases[TRUE]))

    def both(self, one: int, other: int) -> int:
        return one if one == other else self._number(self._cases[one] & self._cases[other])

    def some(self, statements: Iterable[int]) -> int:
        given = set(statements)
        if TRUE in given:
            return TRUE
        cases = 0
        for statement in given:
            cases |= self._cases[statement]
        return self._number(cases)

    def implies(self, one: int, other: int) -> bool:
        return not self._cases[one] & ~self._cases[other]

    def holds(self, statement: int, case: int) -> bool:
        """Whether a statement holds in a case, numbered as in ``closed``."""
        return bool(self._cases[statement] >> case & 1)

    def count(self, statements: Index) -> Index:
        """By case, how many of some statements hold."""
        found, times = np.unique(statements, return_counts=True)
        bits = b"".join(self._cases[x].to_bytes(-(-self._length // 8), "little") for x in found.tolist())
        rows = np.frombuffer(bits, dtype=np.uint8).reshape(len(found), -1)
        return np.asarray(times @ np.unpackbits(rows, axis=1, count=self._length, bitorder="little"))

    def _number(self, cases: int) -> int:
        if cases not in self._numbers:
            self._numbers[cases] = len(self._cases)
            self._cases.append(cases)
        return self._numbers[cases]


class Needs:
    """Goes through the operations from the last to the first.

    ``passes`` gives the statements that the entries of a link with ``where`` are not multiplied by zero, ``reads`` that
    entries are not left out of a sum over them. For given gates all statements are true or false.
    """

    def __init__(
        self,
        maps: Maps,
        statements: Statements,
        passes: Callable[[Operation, Link], Index],
        reads: Callable[[Read], Index],
    ) -> None:
        self._maps, self._statements = maps, statements
        self._needed = {axis: np.full(axis.size, TRUE) for axis in maps.fixed_axes}
        self.running: dict[Operation, int] = {}
        self.read: dict[Read, Index] = {}
        roots = set(maps.roots)
        self._add_whole([*maps.roots, *(value for call in maps.recording.calls for value in call.outputs)], TRUE)
        for operation in reversed(maps.recording.operations):
            runs = TRUE if roots.intersection(operation.inputs) else self._runs(operation)
            if runs == FALSE:
                continue
            self.running[operation] = runs
            self._add_whole([value for value in operation.inputs if not value.shape], runs)
            for relation in reversed(maps.relations[operation]):
                if isinstance(relation, Link):
                    entries = relation.back(self.of(relation.target, runs), FALSE)
                    if relation.where is not None:
                        entries = statements.both_each(entries, passes(operation, relation))
                    self._add(relation.source, entries)
                elif isinstance(relation, Read):
                    self.read[relation] = self._read(relation, reads(relation), runs)
                    for axis in relation.axes:
                        self._add(axis, self.read[relation])
                else:
                    targets = [self.of(axis, runs) for axis in relation.targets]
                    for axis in relation.sources:
                        self._add(axis, statements.regroup(targets, relation.sources, axis))

    def of(self, axis: Axis, runs: int = TRUE) -> Index:
        """The statements that an output's entries are needed, if its operation runs."""
        needed = self._needed[axis] if axis in self._needed else np.full(axis.size, FALSE)
        return needed if runs == TRUE else self._statements.both_each(needed, np.array([runs]))

    def _add(self, axis: Axis, entries: Index) -> None:
        before = self._needed.get(axis)
        self._needed[axis] = entries if before is None else self._statements.some_each(before, entries)

    def _add_whole(self, values: Iterable[Value], statement: int) -> None:
        for axis in (axis for value in values for axis in self._maps.dims(value)):
            self._add(axis, np.full(axis.size, statement))

    def _runs(self, operation: Operation) -> int:
        """The statement that some output of an operation has an entry that is needed in each dimension."""
        return self._statements.some(
            self._statements.every(self._statements.some_of(self.of(axis)) for axis in self._maps.dims(value))
            for value in operation.made
        )

    def _read(self, read: Read, entries: Index, runs: int) -> Index:
        """Entries are read if the operation runs, or if an entry of their group is needed behind it."""
        if read.behind is None:
            return entries if runs == TRUE else self._statements.both_each(entries, np.array([runs]))
        groups = self._statements.some_of_each(self.of(read.behind).reshape(read.groups, -1))
        return self._statements.both_each(entries, groups.repeat(len(entries) // read.groups))
