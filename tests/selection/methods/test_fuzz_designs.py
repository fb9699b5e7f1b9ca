"""Thirty of the random designs that the bench compares by hundreds."""

import pytest

from tests.bench.posteriors.fuzz_designs import of_case

SEED = 7


@pytest.mark.parametrize("number", range(30))
def test_random_designs(number):
    """Against closed forms, importance sampling, repeated rows, permuted columns and predictions by hand."""
    kind, found = of_case(SEED, number)
    assert found == [], f"case {number} of seed {SEED}, {kind}"
