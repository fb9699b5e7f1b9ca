"""Statements about which gates are open, in one form, so that equal ones have equal numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from pyro_l0.nn.engine.slots import Index

__all__ = ["FALSE", "TRUE", "Clause", "Formulas"]

Clause = frozenset[int]
TRUE, FALSE = 0, 1
_MOST_CLAUSES = 32


class Formulas:
    """Monotone statements: all of some clauses hold, and a clause holds if one of its gates is open.

    Statements are numbered, and arrays of numbers stand for the statements of a dimension's entries. A statement of
    more than 32 clauses loses its longest ones, and is then true more often.

    Example:
        >>> formulas = Formulas()
        >>> one, other = formulas.gate(0), formulas.gate(1)
        >>> formulas.clauses(formulas.both(one, formulas.some([one, other])))  # the second follows from the first
        (frozenset({0}),)
    """

    def __init__(self) -> None:
        self._clauses: list[tuple[Clause, ...]] = [(), (frozenset(),)]
        self._numbers: dict[frozenset[Clause], int] = {frozenset(): TRUE, frozenset({frozenset()}): FALSE}
        self._both: dict[tuple[int, int], int] = {}
        self._some: dict[frozenset[int], int] = {}

    def clauses(self, formula: int) -> tuple[Clause, ...]:
        """The clauses of a statement, none of which follows from another."""
        return self._clauses[formula]

    def gate(self, gate: int) -> int:
        """That one gate is open."""
        return self._number([frozenset({gate})])

    def both(self, one: int, other: int) -> int:
        """That two statements hold."""
        if one == other or TRUE in (one, other) or FALSE in (one, other):
            return FALSE if FALSE in (one, other) else max(one, other)
        key = (one, other) if one < other else (other, one)
        if key not in self._both:
            self._both[key] = self._number([*self._clauses[one], *self._clauses[other]])
        return self._both[key]

    def some(self, formulas: Iterable[int]) -> int:
        """That one of several statements holds."""
        given = frozenset(formulas) - {FALSE}
        if TRUE in given:
            return TRUE
        if len(given) < 2:
            return next(iter(given), FALSE)
        if given not in self._some:
            self._some[given] = self._disjunction([self._clauses[x] for x in sorted(given)])
        return self._some[given]

    def every(self, formulas: Iterable[int]) -> int:
        """That all of several statements hold."""
        total = TRUE
        for formula in formulas:
            total = self.both(total, formula)
        return total

    def both_each(self, one: Index, other: Index) -> Index:
        """Entry by entry, that two statements hold."""
        return self._each(one, other, TRUE, self.both)

    def some_each(self, one: Index, other: Index) -> Index:
        """Entry by entry, that one of two statements holds."""
        return self._each(one, other, FALSE, lambda x, y: self.some((x, y)))

    def _each(self, one: Index, other: Index, neutral: int, combine: Callable[[int, int], int]) -> Index:
        if one is other or not (other != neutral).any():
            return one
        if not (one != neutral).any():
            return other
        return np.array([combine(x, y) for x, y in zip(one.tolist(), other.tolist(), strict=True)], dtype=np.int64)

    def _disjunction(self, parts: list[tuple[Clause, ...]]) -> int:
        """One of several statements: what all have in common, and one clause of each of the rest together."""
        common = frozenset(parts[0]).intersection(*parts[1:])
        rests = [[clause for clause in part if clause not in common] for part in parts]
        if not all(rests):
            return self._number(common)
        joined = [frozenset[int]().union(*(rest[0] for rest in rests if len(rest) == 1))]
        for rest in rests:
            if len(rest) > 1:
                joined = _shortest({clause | other for clause in joined for other in rest})
        return self._number([*common, *joined])

    def _number(self, clauses: Iterable[Clause]) -> int:
        shortest = _shortest(set(clauses))
        key = frozenset(shortest)
        if key not in self._numbers:
            self._numbers[key] = len(self._clauses)
            self._clauses.append(tuple(shortest))
        return self._numbers[key]


def _shortest(clauses: set[Clause]) -> list[Clause]:
    """The clauses from which the others follow, short ones first."""
    kept: list[Clause] = []
    for clause in sorted(clauses, key=lambda clause: (len(clause), min(clause, default=0))):
        if not any(other <= clause for other in kept):
            kept.append(clause)
            if len(kept) == _MOST_CLAUSES:
                break
    return kept
