"""Every family against its slow twin in mpmath, in float64 and in float32."""

import pytest
import torch

from tests.cases import ATOMIC, FAMILIES, Case
from tests.reference import mp

PROBABILITIES = {"log_prob_zero": "p0", "log_prob_one": "p1", "log_active_prob": "active_prob"}
CASES = [
    Case(family, parameters)
    for family in FAMILIES + ATOMIC
    # Every second extreme: those of one location differ in the shape alone.
    for parameters in (*family.parameters, *family.extremes[::2])
]


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=CASES, ids=repr)
def pair(request, dtype):
    """A gate, and its twin at the numbers that the gate's type can hold."""
    gate = request.param.gate(dtype)
    stored = {name: getattr(gate, name).item() for name in request.param.parameters}
    return gate, request.param.family.reference(**stored)


def agree(value, expected, relative, absolute=0.0):
    assert value.double().item() == pytest.approx(float(expected), rel=relative, abs=absolute)


def test_probabilities(pair, dtype):
    """Masses and their logs, however small; log_prob and the cdf, outside of the interval too."""
    gate, twin = pair
    relative = 1e-10 if dtype == torch.float64 else 5e-6
    # 1e-15 is a few epsilons beside a probability whose log is as small as -1e-13.
    slack = 1e-15 if dtype == torch.float64 else 5e-6
    for name, mass in PROBABILITIES.items():
        agree(getattr(gate, name), mp.log(getattr(twin, mass)), relative, slack)
    for z in (0.0, 0.25, 0.875, 1.0):
        agree(gate.log_prob(torch.tensor(z, dtype=dtype)), twin.log_prob(z), relative, slack)
    for z in (-0.5, 0.0, 0.25, 0.875, 1.0, 1.5):
        agree(gate.cdf(torch.tensor(z, dtype=dtype)), twin.cdf(z), relative, slack)


# An integral of 60 digits takes half a second, so that the slow tests take all parameters but one of a family's.
OF_MOMENTS = [
    pytest.param(case, marks=() if case.parameters in case.family.parameters[1:2] else pytest.mark.slow, id=repr(case))
    for case in CASES
]


@pytest.mark.parametrize("case", OF_MOMENTS)
def test_moments(case):
    gate, twin = case.gate(), case.reference()
    agree(gate.mean, twin.mean, 1e-10)
    agree(gate.variance, twin.variance, 1e-10)
    agree(gate.entropy(), twin.entropy, 1e-10, 1e-9)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_moments_in_single_precision(case):
    """Those of double precision at the numbers that float32 can hold, far tails and all."""
    single = case.gate(torch.float32)
    double = single.apply_to_tensors(lambda x: x.double())
    agree(single.mean, double.mean, 1e-5, 1e-30)
    agree(single.variance, double.variance, 1e-5, 1e-30)
    agree(single.entropy(), double.entropy(), 1e-5, 5e-6)


def test_quantiles(pair, dtype):
    gate, twin = pair
    relative, absolute = (1e-10, 1e-13) if dtype == torch.float64 else (1e-5, 1e-5)
    for u in (0.03125, 0.5, 0.9375):
        agree(gate.icdf(torch.tensor(u, dtype=dtype)), twin.icdf(u), relative, absolute)
    agree(gate.median, twin.median, relative, absolute)
