"""KL divergences as properties of any gates, and by the closed form of hard concretes."""

from itertools import product

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch.distributions import kl_divergence

from pyro_l0.distributions import HardConcrete, RectifiedNormal
from tests.cases import FAMILIES, build, double
from tests.reference import HardConcreteReference, kl

# --- properties ---------------------------------------------------------------------------------

TEMPERATURES = st.floats(0.1, 2)
STRETCHES = st.sampled_from([(-0.1, 1.1), (-0.2, 1.3), (-0.01, 1.02), (-0.5, 1.5)])
GATES = [
    st.tuples(st.floats(0, 1), st.floats(0, 1), STRETCHES).map(lambda x, family=family: (family, family.random(*x)))
    for family in FAMILIES
]
ANY_GATE = st.one_of(*GATES)

# A fixed seed and no deadline: the first call on a machine is slower than the rest.
properties = settings(max_examples=60, deadline=None, database=None)


@seed(51)
@properties
@given(ANY_GATE, ANY_GATE)
def test_kl_is_never_negative(q, p):
    value = kl_divergence(build(*q), build(*p))
    # A few roundings of terms of the KL's own size, and of order one.
    assert value >= -1e-14
    assert not value.isnan()


@seed(56)
@properties
@given(st.floats(1e-4, 1 - 1e-4), st.floats(1e-3, 1 - 1e-3), STRETCHES)
def test_from_active_prob_gives_both_probabilities(active_prob, one_given_active, stretch):
    """P(z != 0) and P(z = 1 | z != 0) come out as asked."""
    gate = HardConcrete.from_active_prob(
        double(active_prob), one_given_active=double(one_given_active), gamma=stretch[0], zeta=stretch[1]
    )
    torch.testing.assert_close(gate.active_prob, double(active_prob), rtol=1e-11, atol=0)
    given_active = (gate.log_prob_one - gate.log_active_prob).exp()
    # 1 - pi eta close to 1 - pi costs digits of the temperature: 1e-4 of eps relative at worst.
    torch.testing.assert_close(given_active, double(one_given_active), rtol=1e-10, atol=0)
    assert gate.temperature > 0


@seed(57)
@properties
@given(st.floats(1e-6, 1 - 1e-6), TEMPERATURES, st.floats(0.1, 2))
def test_from_active_prob_gives_the_rate(active_prob, temperature, scale):
    """P(z != 0) comes out as asked, for both families."""
    rate = double(active_prob)
    for gate in (
        HardConcrete.from_active_prob(rate, temperature=temperature),
        RectifiedNormal.from_active_prob(rate, scale=scale),
    ):
        torch.testing.assert_close(gate.active_prob, rate, rtol=1e-11, atol=0)


# --- the closed form ------------------------------------------------------------------------------


def test_equal_hard_concretes_have_exactly_no_kl():
    """The closed form is exact at d = 0, value and gradient, in float32 too."""
    for dtype, log_alpha in product((torch.float32, torch.float64), (-90.0, -2.0, 0.0, 7.0, 90.0)):
        q = torch.tensor(log_alpha, dtype=dtype, requires_grad=True)
        p = torch.tensor(log_alpha, dtype=dtype, requires_grad=True)
        value = kl_divergence(HardConcrete(q), HardConcrete(p))
        assert value == 0
        assert torch.autograd.grad(value, (q, p)) == (0, 0)


@pytest.mark.parametrize("temperature", [0.1, 2 / 3, 2.0])
@pytest.mark.parametrize("log_alpha", [-15.0, 0.0])
@pytest.mark.parametrize("d", [2.0**-20, 2.0**-13, 2.0**-7, -(2.0**-10)])
def test_nearly_equal_hard_concretes_in_float32(log_alpha, temperature, d):
    """The closed form keeps its relative accuracy where the KL is of the order of d^2 = 1e-12."""
    # The numbers that float32 stores, so that the twin sees the same ones.
    stored = [torch.tensor(x).item() for x in (log_alpha, log_alpha + d, temperature)]
    if stored[0] == stored[1]:
        pytest.skip("d is below float32's spacing here")
    q = torch.tensor(stored[0], requires_grad=True)
    p = torch.tensor(stored[1], requires_grad=True)
    value = kl_divergence(HardConcrete(q, stored[2]), HardConcrete(p, stored[2]))
    q_twin, p_twin = (HardConcreteReference(x, stored[2], -0.1) for x in stored[:2])
    expected = float(kl(q_twin, p_twin))
    # MATH: 1.2e-6 on the full grid; 5e-6 leaves room for another machine's exp and log.
    assert abs(value.item() / expected - 1) < 5e-6
    by_q, by_p = torch.autograd.grad(value, (q, p))
    # To leading order the KL is I d^2 / 2, so its derivatives are +-2 KL / d, up to O(d^2).
    assert abs(by_q.item() / (-2 * expected / d) - 1) < abs(d) + 1e-5
    assert abs(by_p.item() / (2 * expected / d) - 1) < abs(d) + 1e-5


def test_mixed_precision():
    """A float32 posterior against a float64 prior is computed, not refused."""
    q = HardConcrete(torch.tensor(0.5))
    p = HardConcrete(double(-1.0))
    expected = kl_divergence(HardConcrete(double(0.5)), p)
    torch.testing.assert_close(kl_divergence(q, p).double(), expected, rtol=1e-5, atol=0)


def test_a_shared_temperature_gets_both_derivatives():
    """One tensor in q and p: the derivative is the sum of the two partial ones, and expand keeps it."""
    shared = double(0.7, requires_grad=True)
    q, p = HardConcrete(double(1.5), shared), HardConcrete(double(-1.0), shared)
    (total,) = torch.autograd.grad(kl_divergence(q, p), shared)
    (expanded,) = torch.autograd.grad(kl_divergence(q.expand((3,)), p.expand((3,))).sum(), shared)
    torch.testing.assert_close(expanded, 3 * total, rtol=1e-11, atol=0)
    of_q, of_p = double(0.7, requires_grad=True), double(0.7, requires_grad=True)
    value = kl_divergence(HardConcrete(double(1.5), of_q), HardConcrete(double(-1.0), of_p))
    parts = torch.autograd.grad(value, (of_q, of_p))
    torch.testing.assert_close(total, parts[0] + parts[1], rtol=1e-11, atol=0)
    assert abs(parts[1].item()) > 1e-2


@pytest.mark.parametrize("side", [0, 1], ids=["of q", "of p"])
@pytest.mark.parametrize("other", ["number", "tensor", "learnable"])
def test_an_equal_temperature_is_not_a_shared_one(side, other):
    """One side's temperature is learnable and the other's merely equal: only the first one's derivative arrives."""
    own = double(0.7, requires_grad=True)
    same = {"number": 0.7, "tensor": double(0.7), "learnable": double(0.7, requires_grad=True)}[other]
    of_q, of_p = (own, same) if side == 0 else (same, own)
    value = kl_divergence(HardConcrete(double(0.3), of_q), HardConcrete(double(-1.0), of_p))
    (actual,) = torch.autograd.grad(value, own)
    # Central differences of the twin in this temperature alone; step 1e-10 in 60 digits.
    step, moved = 1e-10, []
    for s in (step, -step):
        q, p = (0.7 + s * (side == k) for k in (0, 1))
        moved.append(kl(HardConcreteReference(0.3, q), HardConcreteReference(-1.0, p)))
    # 0.7 +- 1e-10 are rounded to doubles, an error of 1e-16 in the step: 1e-6 relative.
    assert abs(actual.item() / float((moved[0] - moved[1]) / (2 * step)) - 1) < 5e-6


def test_a_learnable_stretch_gets_its_gradient():
    """Learnable limits leave the closed form, whose derivatives take the stretch as constant."""
    shared = [double(x, requires_grad=True) for x in (-0.1, 1.1)]
    value = kl_divergence(HardConcrete(double(0.3), 0.7, *shared), HardConcrete(double(-1.0), 0.7, *shared))
    constant = kl_divergence(HardConcrete(double(0.3), 0.7), HardConcrete(double(-1.0), 0.7))
    torch.testing.assert_close(value, constant, rtol=1e-10, atol=0)
    step = 1e-6  # central differences: rounding 1e-10, curvature 1e-12
    for index, actual in enumerate(torch.autograd.grad(value, shared)):
        moved = []
        for sign in (1, -1):
            limits = [-0.1, 1.1]
            limits[index] += sign * step
            q, p = HardConcrete(double(0.3), 0.7, *limits), HardConcrete(double(-1.0), 0.7, *limits)
            moved.append(kl_divergence(q, p))
        torch.testing.assert_close(actual, (moved[0] - moved[1]) / (2 * step), rtol=1e-7, atol=1e-9)
