"""What tests of several examples share."""

import tracemalloc

import pytest


@pytest.fixture
def little_memory():
    """A test takes no more than a file of MNIST does."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80_000_000
