"""Statements about gates, against truth tables."""

import itertools

import numpy as np
import pytest
import torch

from pyro_l0.nn.cost import Expectations
from pyro_l0.nn.engine.statements import FALSE, TRUE, NormalForms, TruthTables


def random_statement(statements, rng, depth):
    """A statement and the same as a function of the gates, which shares no code with it."""
    if depth == 0:
        gate = int(rng.integers(5))
        return statements.gate(gate), lambda z: z[gate]
    parts = [random_statement(statements, rng, depth - 1) for _ in range(int(rng.integers(2, 4)))]
    numbers, functions = [number for number, _ in parts], [function for _, function in parts]
    if rng.random() < 0.5:
        return statements.every(numbers), lambda z: all(function(z) for function in functions)
    return statements.some(numbers), lambda z: any(function(z) for function in functions)


@pytest.mark.parametrize("seed", range(20))
def test_statements_hold_where_they_should(seed):
    """For all gates that may be closed; and their probabilities at 0 and 1 are the same."""
    rng = np.random.default_rng(seed)
    statements = NormalForms([2, 3])
    statement, function = random_statement(statements, rng, 3)
    states = list(itertools.product((False, True), repeat=5))
    cases = TruthTables([{gate for gate, is_open in enumerate(z) if not is_open} for z in states])
    same, _ = random_statement(cases, np.random.default_rng(seed), 3)
    expectations = Expectations(statements, {"a": 2, "b": 3})
    number = expectations.add({statement: 2, TRUE: 1, FALSE: 5})
    assert cases.count(np.array([same, TRUE])).tolist() == [function(z) + 1 for z in states]
    for case, z in enumerate(states):
        assert cases.holds(same, case) == function(z)
        values = torch.tensor(z, dtype=torch.float64)
        assert expectations({"a": values[:2], "b": values[2:]})[number].item() == 2 * function(z) + 1


def test_what_follows_is_left_out():
    """One gate and that one of some is open; one of some pairs, beside one of the pairs."""
    statements = NormalForms([4])
    gates = [statements.gate(gate) for gate in range(4)]
    assert statements.both(gates[0], statements.some(gates)) == gates[0]
    pairs = [statements.both(gates[0], gates[1]), statements.both(gates[2], gates[3])]
    assert statements.both(pairs[0], statements.some(pairs)) == pairs[0]
    assert statements.some([pairs[0], TRUE]) == TRUE
    assert statements.both(pairs[0], FALSE) == FALSE


def test_probabilities_of_independent_gates():
    """One of two pairs: by hand, and all gates of a site by their sum."""
    statements = NormalForms([4])
    gates = [statements.gate(gate) for gate in range(4)]
    pairs = [statements.both(gates[0], gates[1]), statements.both(gates[2], gates[3])]
    expectations = Expectations(statements, {"a": 4})
    numbers = [expectations.add({statements.some(pairs): 1}), expectations.add(dict.fromkeys(gates, 3))]
    probs = torch.tensor([0.5, 0.4, 0.3, 0.2], dtype=torch.float64)
    values = expectations({"a": probs})
    assert values[numbers[0]].item() == pytest.approx(1 - (1 - 0.2) * (1 - 0.06))
    assert values[numbers[1]].item() == pytest.approx(3 * 1.4)
