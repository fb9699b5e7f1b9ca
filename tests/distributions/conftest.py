"""The families that the shared tests run on."""

import pytest

from tests.cases import ATOMIC, FAMILIES, GATES, Case

ATOMIC_GATES = tuple(Case(family, parameters) for family in ATOMIC for parameters in family.parameters)


def skip_without_interior(request, family):
    """Leave out the families of atoms alone where a test is about what lies between."""
    if request.node.get_closest_marker("interior") and not family.interior:
        pytest.skip("has atoms alone")


@pytest.fixture(params=FAMILIES + ATOMIC, ids=lambda family: family.gate.__name__)
def family(request):
    skip_without_interior(request, request.param)
    return request.param


@pytest.fixture(params=GATES + ATOMIC_GATES, ids=repr)
def case(request):
    """Every family at every representative parameter set."""
    skip_without_interior(request, request.param.family)
    return request.param


@pytest.fixture
def gate(case):
    """The library's gate of a case, in float64."""
    return case.gate()
