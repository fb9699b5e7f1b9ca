"""Thirty of the random designs that the bench compares by hundreds."""

import pytest

from tests.bench.posteriors.fuzz_designs import of_case

SEED = 7


# The last one's labels nearly separate: Laplace's approximation leaves .10 beyond an end of its interval.
@pytest.mark.parametrize(("seed", "number"), [*((SEED, i) for i in range(30)), (0, 326)])
def test_random_designs(seed, number):
    """Against closed forms, importance sampling, repeated rows, permuted columns and predictions by hand."""
    kind, found = of_case(seed, number)
    assert found == [], f"case {number} of seed {seed}, {kind}"
