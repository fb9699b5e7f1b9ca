"""Derivatives: against differences, against the exact mean, and against the papers' formulas."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from pyro_l0.distributions import HardConcrete, RectifiedNormal
from pyro_l0.maths import hard_concrete, quadrature
from tests.cases import FAMILIES, GATES

STANDARD_ERRORS = 5

STATISTICS = (
    "mean",
    "variance",
    "log_prob_zero",
    "log_prob_one",
    "log_interior_prob",
    "log_active_prob",
    "active_prob",
)
STRETCH = (-0.1, 1.1)


@pytest.fixture(params=GATES, ids=repr)
def case(request):
    """Every family at every representative parameter set."""
    return request.param


def leaves(case):
    """The case's parameters as leaf tensors."""
    return tuple(torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in case.parameters.values())


def make(case, values):
    """The case's gate from its parameters in order."""
    return case.family.gate(**dict(zip(case.parameters, values, strict=True)))


# --- against differences ------------------------------------------------------------------------
# gradcheck compares with central differences of step 1e-6, whose rounding and curvature leave
# about 1e-8 on values of order one: its default tolerance of 1e-5 and 1e-3 is tightened to 1e-6.


def check(function, inputs):
    """gradcheck with a tolerance that fits float64."""
    assert gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(case, name):
    """Every statistic is differentiable in every parameter."""
    check(lambda *values: getattr(make(case, values), name), leaves(case))


def test_entropy(case):
    """The entropy too."""
    check(lambda *values: make(case, values).entropy(), leaves(case))


def test_log_prob(case):
    """In the parameters at both atoms and inside, and in z inside."""
    atoms = torch.tensor([0.0, 1.0], dtype=torch.float64)
    check(lambda *values: make(case, values).log_prob(atoms), leaves(case))
    inside = torch.tensor([0.01, 0.3, 0.9], dtype=torch.float64, requires_grad=True)
    check(lambda z, *values: make(case, values).log_prob(z), (inside, *leaves(case)))


def test_cdf(case):
    """In the parameters everywhere, in z inside."""
    inside = torch.tensor([0.01, 0.3, 0.9], dtype=torch.float64, requires_grad=True)
    check(lambda z, *values: make(case, values).cdf(z), (inside, *leaves(case)))


def test_icdf(case):
    """At probabilities that lead well inside."""
    gate = case.gate()
    # Nearer an atom the quantile may bend so much that differences of step 1e-6 miss its slope.
    ends = gate.cdf(torch.tensor([0.2, 0.8], dtype=torch.float64))
    u = torch.lerp(ends[0], ends[1], torch.tensor([0.0, 0.5, 1.0]).double()).requires_grad_()
    check(lambda p, *values: make(case, values).icdf(p), (u, *leaves(case)))


@pytest.mark.parametrize("seed", [34, 35])
def test_draws_move_as_the_cdf_says(case, seed):
    """A draw with P(Z <= z) = u moves by minus the change of the cdf over the density, and not at all at an atom."""
    inputs = leaves(case)
    torch.manual_seed(seed)
    gate = make(case, inputs)
    for all_draws in (gate.rsample((1000,)), gate.rectify(gate.base_distribution().rsample((1000,)))):
        chosen = torch.cat([torch.nonzero((all_draws > 0) & (all_draws < 1))[:20], torch.arange(20)[:, None]])
        draws = all_draws[chosen[:, 0]]
        z = draws.detach()
        inside = (z > 0) & (z < 1)
        assert inside.any()
        density = gate.log_prob(z).exp().detach()
        for k, leaf in enumerate(inputs):
            step = 1e-5 * max(1e-2, abs(leaf.item()))
            ends = []
            for side in (step, -step):
                moved = [x.detach() + side * (i == k) for i, x in enumerate(inputs)]
                ends.append(make(case, moved).cdf(z))
            expected = torch.where(inside, -(ends[0] - ends[1]) / (2 * step) / density, 0.0)
            for i in range(len(z)):
                (actual,) = torch.autograd.grad(draws[i], leaf, retain_graph=True)
                # Differences of a cdf of order one are rounded to 1e-16, over a step of 1e-7 and the density.
                slack = 1e-9 + 2e-16 / step / density[i].item()
                torch.testing.assert_close(actual, expected[i], rtol=1e-6, atol=slack)


def test_rsample(case):
    """At frozen noise: no draw of this seed lies within a step of a clip point."""
    if not case.family.frozen_noise:
        pytest.skip("its draws jump between components")

    def draw(*values):
        torch.manual_seed(31)
        return make(case, values).rsample((20,))

    draws = draw(*leaves(case))
    inside = draws[(draws > 0) & (draws < 1)]
    assert inside.numel() > 0
    assert inside.min() > 1e-4
    assert inside.max() < 1 - 1e-4
    check(draw, leaves(case))


def test_rsample_interior(case):
    """The interior sampler is reparametrised too."""

    def draw(*values):
        torch.manual_seed(32)
        return make(case, values).rsample_interior((20,))

    check(draw, leaves(case))


def test_clipped_draws_have_no_gradient(case):
    """A draw at an atom does not move with the parameters."""
    torch.manual_seed(33)
    inputs = leaves(case)
    draws = make(case, inputs).rsample((5000,))
    clipped = (draws == 0) | (draws == 1)
    assert clipped.any()
    assert all((g == 0).all() for g in torch.autograd.grad(draws[clipped].sum(), inputs))


def test_test_gate_follows_its_parameters(case):
    """The deterministic gate is differentiable where it is not clipped."""
    inputs = leaves(case)
    gate = make(case, inputs)
    if 1e-3 < gate.test_gate < 1 - 1e-3:
        check(lambda *values: make(case, values).test_gate, inputs)


# --- pathwise against exact ----------------------------------------------------------------------


@pytest.mark.parametrize("power", [1, 2])
def test_pathwise_gradient_of_an_average(case, power):
    """The average pathwise derivative of z^k agrees with differences of the exact E[z^k]."""
    torch.manual_seed(34)
    count = 100_000
    inputs = leaves(case)
    # One copy of the parameters for each draw gives one derivative for each draw.
    copies = tuple(x.detach().expand(count).clone().requires_grad_() for x in inputs)
    samples = torch.autograd.grad((make(case, copies).rsample() ** power).sum(), copies)

    def exact(values):
        gate = make(case, values)
        return gate.mean if power == 1 else gate.variance + gate.mean**2

    step = 1e-5  # central differences: error about 1e-10, far below a standard error of 1e-3
    for index, (name, pathwise) in enumerate(zip(case.parameters, samples, strict=True)):
        up, down = ([x + sign * step * (i == index) for i, x in enumerate(inputs)] for sign in (1, -1))
        expected = (exact(up) - exact(down)) / (2 * step)
        standard_error = pathwise.std() / math.sqrt(count)
        assert (pathwise.mean() - expected).abs() < STANDARD_ERRORS * standard_error, name


def test_a_sampled_kl_has_a_biased_gradient():
    """Why every KL is exact: the pathwise gradient of log q - log p misses the moving atoms."""
    torch.manual_seed(35)
    log_alpha = torch.tensor(0.3, dtype=torch.float64)
    copies = log_alpha.expand(400_000).clone().requires_grad_()
    prior = HardConcrete(torch.tensor(-1.0, dtype=torch.float64))
    posterior = HardConcrete(copies)
    z = posterior.rsample()
    (sampled,) = torch.autograd.grad((posterior.log_prob(z) - prior.log_prob(z)).sum(), copies)
    leaf = log_alpha.clone().requires_grad_()
    (exact,) = torch.autograd.grad(torch.distributions.kl_divergence(HardConcrete(leaf), prior), leaf)
    # The two numbers of docs: +0.4069 and +0.3441, both to four digits.
    assert abs(exact.item() - 0.4069) < 5e-5
    standard_error = sampled.std().item() / math.sqrt(len(sampled))
    assert abs(sampled.mean().item() - 0.3441) < STANDARD_ERRORS * standard_error + 5e-5


# --- formulas ------------------------------------------------------------------------------------


def sigmoid_slope(x):
    """sigmoid(x) sigmoid(-x)."""
    return torch.sigmoid(x) * torch.sigmoid(-x)


def test_hard_concrete_draw_formulas():
    """dz/d log_alpha = g'(y) / beta and dz/d beta = -y g'(y) / beta, both 0 at the atoms."""
    gamma, zeta = STRETCH
    noise = torch.linspace(-6, 6, 41, dtype=torch.float64)
    log_alpha = torch.full_like(noise, 0.4).requires_grad_()
    temperature = torch.full_like(noise, 0.7).requires_grad_()
    stretch = quadrature.make_stretch(gamma, zeta, torch.float64)
    z = hard_concrete.transform(noise, log_alpha, temperature, stretch)
    by_location, by_temperature = torch.autograd.grad(z.sum(), (log_alpha, temperature))
    y = (0.4 + noise) / 0.7
    slope = (zeta - gamma) * sigmoid_slope(y) * ((z > 0) & (z < 1))
    assert (slope == 0).any()
    assert (slope > 0).any()
    torch.testing.assert_close(by_location, slope / 0.7, rtol=1e-12, atol=0)
    torch.testing.assert_close(by_temperature, -y * slope / 0.7, rtol=1e-12, atol=0)


def test_rectified_normal_draw_formulas():
    """dz/d loc = 1 and dz/d scale = (z - loc) / scale inside, 0 at the atoms."""
    u = torch.linspace(0.01, 0.99, 41, dtype=torch.float64)
    loc = torch.full_like(u, 0.4).requires_grad_()
    scale = torch.full_like(u, 0.5).requires_grad_()
    z = RectifiedNormal(loc, scale).icdf(u)
    by_loc, by_scale = torch.autograd.grad(z.sum(), (loc, scale))
    inside = ((z > 0) & (z < 1)).double()
    torch.testing.assert_close(by_loc, inside, rtol=1e-12, atol=0)
    torch.testing.assert_close(by_scale, inside * (z - 0.4) / 0.5, rtol=1e-12, atol=1e-15)


def logit_rule(gamma, zeta, count=60):
    """Gauss-Legendre in the logit t of the unstretched variable: nodes, weights, g'(t)."""
    start, stop = math.log(-gamma / zeta), math.log((1 - gamma) / (zeta - 1))
    nodes, weights = quadrature.gauss_legendre(count, torch.float64)
    t = start + (stop - start) * (nodes + 1) / 2
    return t, weights * (stop - start) / 2, (zeta - gamma) * sigmoid_slope(t)


@pytest.mark.parametrize("temperature", [0.1, 2 / 3, 2.0])
@pytest.mark.parametrize("log_alpha", [-8.0, -1.0, 0.0, 3.0])
def test_slope_of_the_mean(log_alpha, temperature):
    """dm/d log_alpha = int g' sigmoid(a) sigmoid(-a) dt, and it is positive."""
    t, weight, slope = logit_rule(*STRETCH)
    expected = (weight * slope * sigmoid_slope(temperature * t - log_alpha)).sum()
    leaf = torch.tensor(log_alpha, dtype=torch.float64, requires_grad=True)
    (actual,) = torch.autograd.grad(HardConcrete(leaf, temperature).mean, leaf)
    assert actual > 0
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("log_alpha_p", [-6.0, -1.0, 0.29, 0.31, 2.0, 9.0])
@pytest.mark.parametrize("temperature", [0.1, 2 / 3, 2.0])
def test_kl_derivatives_with_one_temperature(log_alpha_p, temperature):
    """The closed derivatives of the closed form."""
    log_alpha_q = 0.3
    q = torch.tensor(log_alpha_q, dtype=torch.float64, requires_grad=True)
    p = torch.tensor(log_alpha_p, dtype=torch.float64, requires_grad=True)
    kl = torch.distributions.kl_divergence(HardConcrete(q, temperature), HardConcrete(p, temperature))
    actual = torch.autograd.grad(kl, (q, p))

    # In plain double arithmetic: the formulas cancel only to about eps / d.
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    t1 = math.log(1.1 / 0.1)
    a0, a1 = -temperature * t1 - log_alpha_q, temperature * t1 - log_alpha_q
    d = log_alpha_q - log_alpha_p
    kappa = math.expm1(d)
    v0, v1, p0, p1 = sigmoid(a0), sigmoid(a1), sigmoid(a0 + d), sigmoid(a1 + d)
    l0, l1 = math.log1p(kappa * v0), math.log1p(kappa * v1)
    common = 2 * math.exp(d) / kappa**2 * (l1 - l0)
    by_q = (
        v0 * (1 - v0) * l0 + v1 * (1 - v1) * (d - l1) + 2 * math.exp(d) / kappa * (v1 - v0) - common - (v1**2 - v0**2)
    )
    by_p = v1 - (1 + v1) * p1 + v0 * p0 - 2 / kappa * (p1 - p0) + common
    # The two formulas subtract terms of size 1/d^2 here at most 1e4.
    torch.testing.assert_close(actual[0].item(), by_q, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(actual[1].item(), by_p, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("q", [(0.3, 0.7), (-4.0, 0.2), (2.0, 1.5)])
@pytest.mark.parametrize("p", [(-1.0, 0.5), (0.3, 0.9), (5.0, 2.0)])
def test_kl_derivatives_with_two_temperatures(q, p):
    """The derivatives as boundary terms plus one integral each."""
    inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (*q, *p)]
    kl = torch.distributions.kl_divergence(HardConcrete(*inputs[:2]), HardConcrete(*inputs[2:]))
    actual = torch.autograd.grad(kl, inputs)

    (lq, bq), (lp, bp) = q, p
    t, weight, _ = logit_rule(*STRETCH)
    t0, t1 = torch.tensor([-math.log(11), math.log(11)], dtype=torch.float64)
    lsig = torch.nn.functional.logsigmoid

    def cdf_logits(at):
        return bq * at - lq, bp * at - lp

    def log_ratio(at):
        aq, ap = cdf_logits(at)
        return math.log(bq / bp) + lsig(aq) + lsig(-aq) - lsig(ap) - lsig(-ap)

    def density(at):
        return sigmoid_slope(cdf_logits(at)[0])

    aq, ap = cdf_logits(t)
    log_ratio_slope = bq * (1 - 2 * torch.sigmoid(aq)) - bp * (1 - 2 * torch.sigmoid(ap))
    (aq0, ap0), (aq1, ap1) = cdf_logits(t0), cdf_logits(t1)
    zero, one = lsig(aq0) - lsig(ap0), lsig(-aq1) - lsig(-ap1)
    mass_zero, mass_one = torch.sigmoid(aq0), torch.sigmoid(-aq1)
    s0, s1 = density(t0), density(t1)
    first = s0 * (log_ratio(t0) - zero) + s1 * (one - log_ratio(t1))
    second = t0 * s0 * (zero - log_ratio(t0)) + t1 * s1 * (log_ratio(t1) - one)
    rising = 1 - 2 * torch.sigmoid(ap)
    expected = (
        first + (weight * density(t) * log_ratio_slope).sum(),
        second - (weight * t * density(t) * log_ratio_slope).sum(),
        mass_zero * torch.sigmoid(-ap0) - mass_one * torch.sigmoid(ap1) + (weight * bq * density(t) * rising).sum(),
        -mass_zero * t0 * torch.sigmoid(-ap0)
        + mass_one * t1 * torch.sigmoid(ap1)
        - (weight * bq * density(t) * (1 / bp + t * rising)).sum(),
    )
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


def test_active_probability_slope():
    """d active_prob / d log_alpha = sigmoid(a) sigmoid(-a): it never dies (unlike a clamped cdf)."""
    leaf = torch.tensor([-60.0, -20.0, 0.0, 20.0], dtype=torch.float64, requires_grad=True)
    (actual,) = torch.autograd.grad(HardConcrete(leaf).active_prob.sum(), leaf)
    expected = sigmoid_slope(-2 / 3 * math.log(11) - leaf.detach())
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=0)
    assert (actual > 0).all()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.gate.__name__)
def test_no_gradient_is_lost_after_a_look_without_gradients(family):
    """What is first computed under no_grad must not be kept for a later call with gradients."""

    def gradients(look_first):
        parameters = {
            k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in family.parameters[1].items()
        }
        gate = family.gate(**parameters)
        if look_first:
            gate.sample()
            with torch.no_grad():
                [getattr(gate, name) for name in STATISTICS]
        total = sum(getattr(gate, name) for name in STATISTICS) + gate.entropy()
        return torch.autograd.grad(total, list(parameters.values()))

    assert gradients(look_first=True) == gradients(look_first=False)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.gate.__name__)
def test_backward_twice(family):
    """Statistics of one gate can be differentiated in two separate backward passes."""
    parameters = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in family.parameters[0].items()}
    gate = family.gate(**parameters)
    gate.mean.backward()
    gate.entropy().backward()
    gate.log_active_prob.backward()
    gate.mean.backward()
    assert all(tensor.grad.isfinite() for tensor in parameters.values())
