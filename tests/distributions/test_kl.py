"""KL divergences: against the slow twins, in every wrapper, as properties of any gates, and by closed forms."""

from itertools import product

import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch.distributions import kl_divergence

from pyro_l0.distributions import HardConcrete, HardKumaraswamy, Rectified, RectifiedNormal
from tests.cases import FAMILIES, build, double
from tests.reference import HardConcreteReference, RectifiedNormalReference, kl

PAIRS = tuple(product(FAMILIES, FAMILIES))


@pytest.fixture(params=PAIRS, ids=lambda pair: "-".join(family.gate.__name__ for family in pair))
def pair(request):
    return request.param


# --- values -------------------------------------------------------------------------------------


# A pair has a formula or a rule of its own, so that every pair is tested at its first parameters. What that
# may miss is an error at some parameters alone, for which the slow tests take all of them.
@pytest.mark.parametrize(
    "some", [slice(1, 2), pytest.param(slice(2, 9), marks=pytest.mark.slow)], ids=["one", "others"]
)
def test_values_against_the_slow_twins(pair, some):
    """Every pair of families at every pair of representative parameters."""
    q_family, p_family = pair
    for q, p in list(product(q_family.parameters[:3], p_family.parameters[1:4]))[some]:
        if q == p:
            continue
        expected = kl(q_family.reference(**q), p_family.reference(**p))
        actual = kl_divergence(build(q_family, q), build(p_family, p))
        # 1e-10 is what the quadrature rule is chosen for; the closed forms are better.
        assert abs(actual.item() / float(expected) - 1) < 1e-10, (q, p)


# --- nearly equal, equal, extreme ---------------------------------------------------------------


def test_equal_gates(case):
    """The KL of a gate and itself is 0 with gradient 0, by the closed form and by quadrature."""
    family, parameters = case.family, case.parameters
    for shared in (True, False):
        q = {k: double(v, requires_grad=True) for k, v in parameters.items()}
        p = q if shared else {k: double(v, requires_grad=True) for k, v in parameters.items()}
        value = kl_divergence(family.gate(**q), family.gate(**p))
        # A few roundings of terms of order one.
        assert abs(value.item()) < 1e-14
        leaves = [*q.values()] if shared else [*q.values(), *p.values()]
        for gradient in torch.autograd.grad(value, leaves, allow_unused=True):
            assert gradient is None or abs(gradient.item()) < 1e-12


@pytest.mark.parametrize("parameters", [(0.5, 0.5), (-0.3, 0.4), (1.2, 0.6), (0.4, 0.15)])
def test_nearly_equal_rectified_normals(parameters):
    """The closed form has a small absolute error, also where q and p nearly coincide."""
    loc, scale = parameters
    for d in (1e-2, 1e-3, 1e-4):
        q, p = (loc, scale), (loc + d, scale * (1 + d))
        expected = float(kl(RectifiedNormalReference(*q), RectifiedNormalReference(*p)))
        value = kl_divergence(RectifiedNormal(*map(double, q)), RectifiedNormal(*map(double, p)))
        # A few roundings of terms of order one: at d = 1e-4 still 1e-6 relative.
        assert abs(value.item() - expected) < 5e-15
        single = kl_divergence(RectifiedNormal(*map(torch.tensor, q)), RectifiedNormal(*map(torch.tensor, p)))
        assert abs(single.item() - expected) < 2e-6


def test_extreme_pairs_are_finite_in_float32(pair):
    """Extreme q against extreme p: no NaN and no infinity in value or gradient."""
    q_family, p_family = pair
    combinations = list(product(q_family.extremes, p_family.extremes))
    leaves = []
    gates = []
    for family, side in ((q_family, 0), (p_family, 1)):
        tensors = {
            name: torch.tensor([c[side][name] for c in combinations], requires_grad=True)
            for name in combinations[0][side]
        }
        leaves += tensors.values()
        gates.append(family.gate(**tensors))
    value = kl_divergence(*gates)
    assert value.isfinite().all()
    # A few float32 epsilons of terms that are in the hundreds here may fall below 0.
    assert (value >= -1e-6 * value.abs().max()).all()
    for gradient in torch.autograd.grad(value.sum(), leaves, allow_unused=True):
        assert gradient is None or gradient.isfinite().all()


# --- wrappers -----------------------------------------------------------------------------------


def gates(pair, batch_shape):
    """A q and a p of the pair's families."""
    return (
        build(pair[0], pair[0].parameters[0], batch_shape=batch_shape),
        build(pair[1], pair[1].parameters[1], batch_shape=batch_shape),
    )


def test_to_event_sums(pair):
    q, p = gates(pair, (2, 3, 4))
    plain = kl_divergence(q, p)
    assert plain.shape == (2, 3, 4)
    torch.testing.assert_close(kl_divergence(q.to_event(1), p.to_event(1)), plain.sum(-1))
    torch.testing.assert_close(kl_divergence(q.to_event(2), p.to_event(2)), plain.sum((-1, -2)))
    torch.testing.assert_close(kl_divergence(q.to_event(3), p.to_event(3)), plain.sum())


def test_mask_on_both_sides(pair):
    """The same mask on both sides switches the KL off where it is False."""
    q, p = gates(pair, (3,))
    mask = torch.tensor([True, False, True])
    value = kl_divergence(q.mask(mask), p.mask(mask))
    torch.testing.assert_close(value, kl_divergence(q, p) * mask)
    both = kl_divergence(q.to_event(1).mask(True), p.to_event(1).mask(True))
    torch.testing.assert_close(both, kl_divergence(q, p).sum())


def test_expand_on_either_side(pair):
    """Expanded gates keep their registered KL; shapes broadcast between q and p."""
    q, p = gates(pair, ())
    value = kl_divergence(q, p)
    for expanded in (
        kl_divergence(q.expand((4,)), p),
        kl_divergence(q, p.expand((4,))),
        kl_divergence(q.expand((4,)), p.expand((4,))),
    ):
        assert expanded.shape == (4,)
        torch.testing.assert_close(expanded, value.expand(4), rtol=1e-14, atol=0)
    assert kl_divergence(q.expand((4, 1)), p.expand((3,))).shape == (4, 3)
    twice = kl_divergence(q.expand_by((4,)).to_event(1), p.expand_by((4,)).to_event(1))
    torch.testing.assert_close(twice, 4 * value)


# --- refusals -----------------------------------------------------------------------------------

STRANGERS = [
    dist.Normal(0.0, 1.0),
    dist.Beta(1.0, 1.0),
    dist.Bernoulli(0.5),
    dist.Delta(torch.tensor(0.0)),
    dist.Uniform(0.0, 1.0),
    dist.LogNormal(0.0, 1.0),
    dist.ContinuousBernoulli(0.5),
]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.gate.__name__)
def test_a_gate_and_another_kind_are_refused(family, stranger):
    """TypeError either way round: NotImplementedError would make Pyro sample without a word."""
    gate = family.gate(**family.parameters[0])
    names = [family.gate.__name__, type(stranger).__name__]
    with pytest.raises(TypeError, match=".*".join(names)):
        kl_divergence(gate, stranger)
    with pytest.raises(TypeError, match=".*".join(reversed(names))):
        kl_divergence(stranger, gate)


# --- digits that were once lost -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_atom_below_the_smallest_number(dtype):
    """A hard Kumaraswamy whose P(z = 0) is e^-112: its log mass, its KLs and their gradient stay finite."""
    a = torch.tensor(45.0, dtype=dtype, requires_grad=True)
    q = HardKumaraswamy(a, torch.tensor(0.7, dtype=dtype))
    p = HardKumaraswamy.from_active_prob(torch.tensor(0.1, dtype=dtype))
    assert q.log_prob_zero.item() == pytest.approx(-112.17747418, rel=1e-6)
    divergence = kl_divergence(q, p)
    assert divergence.item() == pytest.approx(21.2265036, rel=1e-6)
    (slope,) = torch.autograd.grad(divergence, a)
    assert slope.item() == pytest.approx(9.09105e-3, rel=1e-4)
    assert kl_divergence(p, q).item() == pytest.approx(109.140405, rel=1e-6)


def test_a_wide_rectified_normal():
    """Hardly any mass inside, whose logarithm must not come from a difference of two ends."""
    for loc in (0.3, 1.2, 99.0):
        exact = RectifiedNormal(torch.tensor(loc, dtype=torch.float64), 100.0).log_interior_prob
        found = RectifiedNormal(torch.tensor(loc), 100.0).log_interior_prob
        torch.testing.assert_close(found.double(), exact, rtol=3e-7, atol=0)


@pytest.mark.parametrize("family", [HardConcrete, HardKumaraswamy])
def test_a_limit_that_is_a_number_keeps_its_digits(family):
    """Beside the other limit as a tensor, in double."""
    one = torch.ones(1, dtype=torch.float64)
    learned = (one,) * len(family.learned)
    mixed, numbers = family(*learned, gamma=-0.1 * one, zeta=1.001), family(*learned, gamma=-0.1, zeta=1.001)
    torch.testing.assert_close(mixed.log_prob_one, numbers.log_prob_one, rtol=1e-14, atol=0)


def test_shapes_that_broadcast_for_any_base():
    r = Rectified(dist.Normal(torch.zeros(3), 1.0))
    torch.testing.assert_close(kl_divergence(r.expand(torch.Size([2, 3])), r), torch.zeros(2, 3))
    column = RectifiedNormal(torch.zeros(3, 1), 1.0)
    assert kl_divergence(column, Rectified(dist.Normal(torch.zeros(4), 1.0))).shape == (3, 4)


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
