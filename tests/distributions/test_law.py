"""The law of every gate family: its slow twin in mpmath, and Pyro's generic checks, rewritten for atoms.

Two of Pyro's checks assume a density on the whole line and are replaced. Goodness of fit becomes a
binomial test for each atom and a fit of the interior; ``cdf(icdf(u)) == u`` becomes the two
inequalities that hold for any distribution with jumps.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_l0.distributions import HardConcrete
from tests.cases import ATOMIC, FAMILIES, Case
from tests.reference import mp

# Every statistical test has a fixed seed. A p-value below 1e-6 would by chance be seen once in
# a million seeds.
SMALLEST_P_VALUE = 1e-6

interior = pytest.mark.interior  # a promise about densities and pathwise draws


def randomised_pit(gate, draws):
    """Probability integral transform that spreads each atom evenly over its step of the cdf."""
    u = torch.rand_like(draws)
    value = gate.cdf(draws)
    p0, p1 = gate.log_prob_zero.exp(), gate.log_prob_one.exp()
    value = torch.where(draws == 0, u * p0, value)
    return torch.where(draws == 1, 1 - u * p1, value)


def test_total_mass_is_one(gate):
    """Both atoms and the integral of exp(log_prob) make one."""
    # 60 Gauss-Legendre nodes on each of 40 panels, finer towards the ends where a narrow stretch
    # has its structure; doubling either changes the sum by less than 1e-13.
    nodes, weights = np.polynomial.legendre.leggauss(60)
    half = 0.5 * np.logspace(-6, 0, 20)
    edges = np.concatenate([[0.0], half, 1 - half[-2::-1], [1.0]])
    width = np.diff(edges)[:, None] / 2
    points = torch.from_numpy(edges[:-1, None] + width * (nodes + 1)).reshape(-1)
    inside = gate.log_prob(points).exp() @ torch.from_numpy(width * weights).reshape(-1)
    atoms = gate.log_prob(torch.tensor([0.0, 1.0], dtype=torch.float64)).exp().sum()
    torch.testing.assert_close(inside, gate.log_interior_prob.exp(), rtol=1e-11, atol=0)
    torch.testing.assert_close(inside + atoms, torch.ones_like(inside), rtol=1e-11, atol=0)


def test_cdf_and_icdf_are_galois_inverses(case):
    """cdf(icdf(u)) >= u and icdf(cdf(x)) <= x, with equality inside."""
    gate = case.gate()
    rounding = 1e-12  # a few hundred float64 epsilons: icdf divides by the density
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    there_and_back = gate.cdf(gate.icdf(u))
    assert (there_and_back >= u - rounding).all()
    inside = (gate.icdf(u) > 0) & (gate.icdf(u) < 1)
    assert inside.any() == case.family.interior
    torch.testing.assert_close(there_and_back[inside], u[inside], rtol=0, atol=rounding)
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert (gate.icdf(gate.cdf(x)) <= x + 1e-9).all()  # 1e-9: the density may be as low as 1e-6
    assert torch.equal(gate.median, gate.icdf(torch.tensor(0.5, dtype=torch.float64)))
    assert gate.icdf(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist() == [0.0, 1.0]


def test_no_quantile_outside_of_the_unit_interval(case):
    """NaN, as torch's distributions have, for each number below 0 or above 1."""
    u = torch.tensor([-1.0, -1e-9, 0.5, 1 + 1e-9, 2.0, math.nan], dtype=torch.float64)
    assert case.gate().icdf(u).isnan().tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_randomised_integral_transform_is_uniform(case, dtype):
    """Kolmogorov-Smirnov on 10,000 draws, each atom spread over its step of the cdf first."""
    torch.manual_seed(13)
    gate = case.gate(dtype)
    values = randomised_pit(gate, gate.sample((10_000,)))
    assert stats.kstest(values.double().numpy(), "uniform").pvalue > SMALLEST_P_VALUE


def test_the_integral_transform_has_power():
    """The same test tells temperature 0.60 from 0.667, and so would see a wrong sampler."""
    torch.manual_seed(14)
    # Where P(z = 0) is about one half, a change of temperature moves it most.
    log_alpha = torch.tensor(-1.5, dtype=torch.float64)
    draws = HardConcrete(log_alpha, 0.60).sample((10_000,))
    right = randomised_pit(HardConcrete(log_alpha, 0.60), draws)
    wrong = randomised_pit(HardConcrete(log_alpha, 0.667), draws)
    assert stats.kstest(right.numpy(), "uniform").pvalue > SMALLEST_P_VALUE
    assert stats.kstest(wrong.numpy(), "uniform").pvalue < SMALLEST_P_VALUE


@interior
def test_sample_carries_no_gradient(family):
    parameters = {k: torch.tensor(v, requires_grad=True) for k, v in family.parameters[0].items()}
    gate = family.gate(**parameters)
    assert not gate.sample().requires_grad
    assert gate.rsample().requires_grad


@interior
def test_the_base_distribution_rectified_is_the_gate(gate):
    """Quantiles of the unclipped variable, clipped, are the gate's; its tails are the atoms."""
    base = gate.base_distribution()
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    torch.testing.assert_close(gate.rectify(base.icdf(u)), gate.icdf(u), rtol=0, atol=1e-12)
    torch.manual_seed(23)
    draws = gate.rectify(base.rsample((10_000,)))
    values = randomised_pit(gate, draws)
    assert stats.kstest(values.numpy(), "uniform").pvalue > SMALLEST_P_VALUE


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
