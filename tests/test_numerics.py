"""The pure functions: helpers against 50-digit arithmetic, quadrature rules, torch.compile."""

import math

import mpmath
import pytest
import torch
from scipy import stats
from torch.autograd import gradcheck, gradgradcheck

from pyro_l0.maths import hard_concrete, hard_concrete_kl, quadrature, rectified_normal, special

mp = mpmath.MPContext()
mp.dps = 50

DTYPES = (torch.float32, torch.float64)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def compare(function, exact, slope, points, dtype, epsilons):
    """Value and derivative of a function against exact ones, in epsilons of relative error."""
    x = torch.tensor(points, dtype=dtype, requires_grad=True)
    value = function(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    allowed = epsilons * torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).tiny
    for point, v, g in zip(x.tolist(), value.tolist(), gradient.tolist(), strict=True):
        for name, actual, expected in (("value", v, exact(point)), ("slope", g, slope(point))):
            # Below the smallest normal number there is no relative accuracy to be had.
            error = abs(mp.mpf(actual) - expected)
            assert error <= allowed * abs(expected) + tiny, (name, point, actual, float(expected))


# --- helpers ------------------------------------------------------------------------------------


@both_dtypes
def test_log1mexp(dtype):
    """log(1 - exp(-x)): near 0, near log 2 where the branches meet, and far out."""
    points = [1e-30, 1e-7, 0.1, 0.69, math.log(2), 0.7, 3.0, 20.0, 60.0]
    exact = lambda x: mp.log(-mp.expm1(-mp.mpf(x)))  # noqa: E731
    slope = lambda x: 1 / mp.expm1(mp.mpf(x))  # noqa: E731
    compare(special.log1mexp, exact, slope, points, dtype, 8)


@both_dtypes
def test_log1mexp_stays_finite(dtype):
    """The unused branch sends no NaN into the gradient, however large the argument."""
    x = torch.tensor([1e-30, 80.0, 500.0, 1e30], dtype=dtype, requires_grad=True)
    value = special.log1mexp(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert value.isfinite().all()
    assert gradient.isfinite().all()


@both_dtypes
def test_psi(dtype):
    """exp(x) - 1 - x: small x, where it is x^2 / 2, and on both sides of the branches' border."""
    points = [-80.0, -3.0, -1.0, -0.51, -0.5, -0.49, -1e-3, -1e-10]
    points += [1e-10, 1e-3, 0.2, 0.49, 0.5, 0.51, 0.99, 1.0, 3.0, 80.0]
    exact = lambda x: mp.expm1(mp.mpf(x)) - mp.mpf(x)  # noqa: E731
    # Beyond the border expm1(x) - x loses a factor of |x| / psi(x), about 4 at 1/2.
    compare(special.psi, exact, lambda x: mp.expm1(mp.mpf(x)), points, dtype, 16)


@both_dtypes
def test_psi_at_zero(dtype):
    """Exactly 0 with exactly no slope, so that equal gates have exactly no KL."""
    x = torch.zeros((), dtype=dtype, requires_grad=True)
    value = special.psi(x)
    assert value == 0
    assert torch.autograd.grad(value, x)[0] == 0


@both_dtypes
def test_klterm(dtype):
    """q log(q/p) - q + p from logs: its value, and q (lq - lp) and p - q as derivatives."""
    eps = torch.finfo(dtype).eps
    logs = [-50.0, -10.0, -3.1, -3.0, -1.0, -0.9990234375, -1e-3, 0.0, 2.0]
    for first in logs:
        for second in logs:
            lq = torch.tensor(first, dtype=dtype, requires_grad=True)
            lp = torch.tensor(second, dtype=dtype, requires_grad=True)
            value = special.klterm(lq, lp)
            by_q, by_p = torch.autograd.grad(value, (lq, lp))
            x, y = mp.mpf(lq.item()), mp.mpf(lp.item())
            q, p = mp.exp(x), mp.exp(y)
            expected = q * (x - y) - q + p
            assert value >= 0
            # The difference of the logs is rounded to eps of the larger log.
            lost = eps * max(1, abs(first), abs(second)) * abs(q * (x - y))
            assert abs(value.item() - expected) <= 16 * (eps * expected + lost * abs(x - y) + lost)
            scale = max(q, p)
            assert abs(by_q.item() - q * (x - y)) <= 16 * eps * (1 + abs(first)) * scale * max(1, abs(x - y))
            assert abs(by_p.item() - (p - q)) <= 16 * eps * (1 + abs(second)) * scale


@both_dtypes
def test_klterm_of_equals(dtype):
    """No KL and no derivative where q = p, at any size."""
    logs = torch.tensor([-1e4, -90.0, -1.0, 0.0, 3.0], dtype=dtype, requires_grad=True)
    other = logs.detach().clone().requires_grad_()
    value = special.klterm(logs, other)
    assert (value == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(value.sum(), (logs, other)))


def test_klterm_at_the_extremes_of_float32():
    """Logs of masses that underflow on either side: finite values and derivatives."""
    logs = torch.tensor([-1e4, -200.0, -90.0, -1.0, -1e-30, 0.0])
    lq = logs.repeat_interleave(6).requires_grad_()
    lp = logs.repeat(6).requires_grad_()
    value = special.klterm(lq, lp)
    assert value.isfinite().all()
    assert (value >= 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(value.sum(), (lq, lp)))


def test_helpers_can_be_differentiated_twice():
    """Custom derivatives are themselves differentiable."""
    x = torch.tensor([-2.0, -0.3, 0.2, 0.7, 2.0], dtype=torch.float64, requires_grad=True)
    positive = x.detach().abs().requires_grad_()
    assert gradgradcheck(special.psi, (x,))
    assert gradgradcheck(special.log1mexp, (positive,))
    assert gradgradcheck(special.klterm, (x, positive))
    assert gradgradcheck(special.log_ndtr, (x,))
    assert gradgradcheck(special.positive_part_mean, (x,))


@both_dtypes
def test_log_ndtr(dtype):
    """Log of the normal cdf and its slope, the inverse Mills ratio, deep into the tail."""
    points = [-100.0, -30.0, -8.0, -3.0, -1.0, 0.0, 0.7, 3.0]
    exact = lambda x: mp.log(mp.ncdf(mp.mpf(x)))  # noqa: E731
    slope = lambda x: mp.npdf(mp.mpf(x)) / mp.ncdf(mp.mpf(x))  # noqa: E731
    # erfcx, exp(-x^2 / 2) and log carry x^2 / 2 roundings on the upper side: 5 at 3.
    compare(special.log_ndtr, exact, slope, points, dtype, 64)


@both_dtypes
def test_ndtr(dtype):
    """The normal cdf keeps its relative accuracy in the lower tail."""
    points = [-8.0, -5.0, -2.0, -0.5, 0.0, 0.5, 3.0]
    exact = lambda x: mp.ncdf(mp.mpf(x))  # noqa: E731
    # Rounding x / sqrt(2) moves exp(-x^2 / 2) by x^2 epsilons: 64 at -8.
    compare(special.ndtr, exact, lambda x: mp.npdf(mp.mpf(x)), points, dtype, 128)


@both_dtypes
def test_log_ndtri_inverts_log_ndtr(dtype):
    """Quantile from the log of a probability, where the probability itself underflows."""
    points = [-7000.0, -500.0, -90.0, -20.0, -10.5, -9.5, -3.0, -0.8]

    def exact(log_p):
        target = mp.mpf(log_p)
        guess = -mp.sqrt(-2 * target) if log_p < -2 else mp.mpf(-1)
        return mp.findroot(lambda x: mp.log(mp.ncdf(x)) - target, guess)

    def slope(log_p):
        x = exact(log_p)
        return mp.ncdf(x) / mp.npdf(x)

    # The slope is Phi / phi at a rounded x: x^2 / 2 roundings, |log p| at most 10 in the bulk.
    compare(special.log_ndtri, exact, slope, points, dtype, 128)


@both_dtypes
def test_positive_part_mean(dtype):
    """x Phi(x) + phi(x) in its three branches; the slope is Phi."""
    points = [-8.0, -3.01, -2.99, -1.0, -1e-4, 0.0, 0.5, 4.0]
    exact = lambda x: mp.mpf(x) * mp.ncdf(mp.mpf(x)) + mp.npdf(mp.mpf(x))  # noqa: E731
    # The middle branch subtracts two numbers whose difference is 1/10 of them at -3.
    compare(special.positive_part_mean, exact, lambda x: mp.ncdf(mp.mpf(x)), points, dtype, 128)


def test_logistic_noise_has_its_full_tails():
    """Finite in float32, logistic by Kolmogorov-Smirnov, and beyond a 24-bit uniform's 16.6."""
    torch.manual_seed(61)
    noise = hard_concrete.logistic_noise(torch.Size((2_000_000,)), torch.float32, torch.device("cpu"))
    assert noise.isfinite().all()
    assert stats.kstest(noise[:100_000].double().numpy(), "logistic").pvalue > 1e-6
    # Counts beyond 10 on either side: 90.8 expected, five standard deviations are 48.
    for side in (noise, -noise):
        assert abs(int((side > 10).sum()) - 2e6 / (1 + math.exp(10))) < 48


# --- quadrature ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5, 8, 28, 71])
def test_gauss_legendre_is_exact_for_polynomials(n):
    """n nodes integrate x^k exactly up to k = 2 n - 1."""
    x, w = quadrature.gauss_legendre(n, torch.float64)
    assert x.shape == w.shape == (n,)
    for k in (0, 1, 2 * n - 2, 2 * n - 1):
        expected = 2 / (k + 1) if k % 2 == 0 else 0.0
        assert abs(float((w * x**k).sum()) - expected) < 1e-13  # n roundings


def test_more_nodes_for_sharper_integrands():
    """The rule grows with temperature, with a narrower stretch and with precision."""
    count = quadrature.num_nodes
    half = math.log(11)
    assert count(half, 1.0, torch.float64) < count(half, 2.0, torch.float64)
    assert count(half, 0.1, torch.float64) == count(half, 1.0, torch.float64)
    assert count(half, 1.0, torch.float64) < count(2 * half, 1.0, torch.float64)
    assert count(half, 1.0, torch.float32) < count(half, 1.0, torch.float64)
    # Memory is proportional to it: what is enough at the default stretch.
    assert count(half, 1.0, torch.float32) <= 14
    assert count(half, 2.0, torch.float32) <= 22


@pytest.mark.parametrize("temperature", [0.1, 2 / 3, 2.0])
@pytest.mark.parametrize("limits", [(-0.1, 1.1), (-0.01, 1.01), (-0.001, 1.001), (-0.5, 1.5)])
def test_the_rule_integrates_a_gate(limits, temperature):
    """Mean, variance and entropy do not change when the nodes are doubled."""
    stretch = quadrature.make_stretch(*limits, torch.float64)
    n = quadrature.num_nodes(quadrature.half_width(stretch), temperature, torch.float64)
    log_alpha = torch.linspace(-15, 15, 31, dtype=torch.float64)
    few, many = (quadrature.stretch_nodes(stretch, count, torch.float64, torch.device("cpu")) for count in (n, 2 * n))
    for function in (hard_concrete.variance, hard_concrete.entropy):
        torch.testing.assert_close(
            function(log_alpha, temperature, stretch, few),
            function(log_alpha, temperature, stretch, many),
            rtol=1e-10,  # the tolerance of the stored values; the rule asks for 1e-12 in the mean
            atol=1e-11,
        )
    torch.testing.assert_close(
        hard_concrete.mean(log_alpha, temperature, few),
        hard_concrete.mean(log_alpha, temperature, many),
        rtol=1e-11,
        atol=0,
    )


@pytest.mark.parametrize("limits", [(-0.1, 1.1), (-0.2, 1.3), (-0.001, 1.001)])
@both_dtypes
def test_nodes_of_a_stretch(limits, dtype):
    """Nodes lie inside, z and 1 - z add up, and g' integrates to one."""
    stretch = quadrature.make_stretch(*limits, dtype)
    nodes = quadrature.stretch_nodes(stretch, 80, dtype, torch.device("cpu"))
    eps = torch.finfo(dtype).eps
    assert ((nodes.z > 0) & (nodes.z < 1) & (nodes.one_minus_z > 0)).all()
    torch.testing.assert_close(nodes.z + nodes.one_minus_z, torch.ones(80, dtype=dtype))
    assert abs(float((nodes.weight * nodes.slope).sum()) - 1) < 80 * eps
    assert abs(float(nodes.weight.sum()) - 2 * quadrature.half_width(stretch)) < 80 * eps * 10


def test_limits_as_numbers_and_as_tensors():
    """Both give the same stretch and the same nodes; tensors bring a batch and gradients."""
    limits = torch.tensor([[-0.1, 1.1], [-0.2, 1.3]], dtype=torch.float64)
    batch = quadrature.make_stretch(limits[:, 0], limits[:, 1], torch.float64)
    nodes = quadrature.stretch_nodes(batch, 20, torch.float64, torch.device("cpu"))
    assert nodes.t.shape == (2, 20)
    for row, (gamma, zeta) in enumerate(limits.tolist()):
        one = quadrature.make_stretch(gamma, zeta, torch.float64)
        for a, b in zip(batch, one, strict=True):
            assert abs(a[row].item() - b) < 1e-14
        alone = quadrature.stretch_nodes(one, 20, torch.float64, torch.device("cpu"))
        for a, b in zip(nodes, alone, strict=True):
            torch.testing.assert_close(a[row], b, rtol=1e-13, atol=1e-15)


def test_nodes_in_panels():
    """Panels between breakpoints integrate the same, and an empty panel does no harm."""
    stretch = quadrature.make_stretch(-0.1, 1.1, torch.float64)
    breakpoints = torch.tensor([[0.0, 0.3], [0.2, 0.2], [0.4, 1.0]], dtype=torch.float64)
    nodes = quadrature.panel_nodes(stretch, [breakpoints], 20, torch.float64, torch.device("cpu"))
    assert nodes.t.shape == (3, 60)
    area = (nodes.weight * nodes.slope * nodes.z**2).sum(-1)
    torch.testing.assert_close(area, torch.full_like(area, 1 / 3), rtol=1e-13, atol=0)


# --- hard concrete ------------------------------------------------------------------------------


@pytest.mark.parametrize("log_alpha_q", [-40.0, -20.0, -2.0, 0.0, 5.0, 19.0, 45.0])
@pytest.mark.parametrize("log_alpha_p", [-43.0, -22.9, -17.8, -1.0, 6.0, 21.0, 44.0])
def test_closed_kl_is_exact_to_rounding(log_alpha_q, log_alpha_p):
    """The closed form against the same formula in 50 digits, in float64.

    A softplus that returns its argument above 20 would show here as 2e-9.
    """
    temperature = 1.0849674940109253
    stretch = quadrature.make_stretch(-0.1, 1.1, torch.float64)
    rule = quadrature.gauss_legendre(8, torch.float64)
    q, p = (torch.tensor(x, dtype=torch.float64) for x in (log_alpha_q, log_alpha_p))
    value = hard_concrete_kl.same_temperature(q, p, temperature, stretch, rule)

    lq, lp, beta = mp.mpf(log_alpha_q), mp.mpf(log_alpha_p), mp.mpf(temperature)
    t0, t1 = mp.log(mp.mpf(0.1) / mp.mpf(1.1)), mp.log((1 + mp.mpf(0.1)) / (mp.mpf(1.1) - 1))
    d = lq - lp
    v0, v1 = (1 / (1 + mp.exp(lq - beta * t)) for t in (t0, t1))
    l0, l1 = (mp.log(1 + mp.expm1(d) * v) for v in (v0, v1))
    w0, w1 = mp.exp(l0), mp.exp(l1)
    expected = v0 * (l0 - d) + (1 - v1) * l1 - (d + 2) * (v1 - v0) + 2 / mp.expm1(d) * (w1 * l1 - w0 * l0)
    # A few hundred epsilons of the largest term; the total is well conditioned.
    assert abs(value.item() / expected - 1) < 1e-13


def test_closed_kl_can_be_differentiated_twice():
    """Its written-out derivatives are right and themselves differentiable, on both branches."""
    stretch = quadrature.make_stretch(-0.1, 1.1, torch.float64)
    rule = quadrature.gauss_legendre(8, torch.float64)
    q = torch.tensor([-6.0, -1.0, 0.3, 2.0, 7.0], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([4.0, -1.2, 1.5, -3.0, 6.0], dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def value(*inputs):
        return hard_concrete_kl.same_temperature(*inputs, stretch, rule)

    assert gradcheck(value, (q, p, temperature))
    assert gradgradcheck(value, (q, p, temperature))


@pytest.mark.parametrize("temperature", ["number", "one", "many"])
def test_many_gates_give_what_few_give(temperature):
    """Large tensors are worked on in blocks, which must not show in values or gradients."""
    torch.manual_seed(62)
    shape = (3, 50_000)
    q, p = torch.randn(2, *shape).mul(4).unbind(0)
    p[2] = p[0]
    stretch = quadrature.make_stretch(-0.1, 1.1, torch.float32)
    rule = quadrature.gauss_legendre(5, torch.float32)
    beta = {"number": 2 / 3, "one": torch.tensor(2 / 3), "many": torch.rand(shape) + 0.1}[temperature]

    def run(at):
        tensors = [x[at].clone().requires_grad_() for x in (q, p.expand(shape))]
        one = beta if not isinstance(beta, torch.Tensor) or beta.dim() == 0 else beta[at]
        if isinstance(one, torch.Tensor):
            tensors.append(one.clone().requires_grad_())
            one = tensors[-1]
        value = hard_concrete_kl.same_temperature(*tensors[:2], one, stretch, rule)
        return value.detach(), *torch.autograd.grad(value.sum(), tensors)

    everything = run(slice(None))
    assert everything[0].shape == shape
    rows = [run(row) for row in range(3)]
    for whole, parts in zip(everything, zip(*rows, strict=True), strict=True):
        # A temperature shared by all gates adds its gradient up over 150,000 of them, in another order.
        together = torch.stack(parts) if whole.dim() == 2 else torch.stack(parts).sum()
        torch.testing.assert_close(whole, together, rtol=1e-4 if whole.dim() == 0 else 1e-6, atol=1e-6)


# --- torch.compile ------------------------------------------------------------------------------


def parameters(*values):
    """A batch of five around each value."""
    offsets = torch.linspace(-0.1, 0.1, 5)
    return tuple((offsets + value).requires_grad_() for value in values)


STRETCH = quadrature.make_stretch(-0.1, 1.1, torch.float32)
NODES = quadrature.stretch_nodes(STRETCH, 16, torch.float32, torch.device("cpu"))
RULE = quadrature.gauss_legendre(8, torch.float32)

# What is compiled, and with which inputs; the temperature once as a number and once as a tensor.
COMPILED = {
    "log1mexp": (special.log1mexp, parameters(1.0)),
    "psi": (special.psi, parameters(0.2)),
    "klterm": (special.klterm, parameters(-1.0, -2.0)),
    "hc_transform": (
        lambda e, a, b: hard_concrete.transform(e, a, b, STRETCH),
        parameters(0.3, 0.5, 0.7),
    ),
    "hc_transform_number": (
        lambda e, a: hard_concrete.transform(e, a, 2 / 3, STRETCH),
        parameters(0.3, 0.5),
    ),
    "hc_log_probs": (
        lambda a, b: torch.stack(hard_concrete.log_probs(a, b, STRETCH)),
        parameters(0.5, 0.7),
    ),
    "hc_log_density": (
        lambda z, a, b: hard_concrete.log_density(z, a, b, STRETCH),
        parameters(0.5, 0.5, 0.7),
    ),
    "hc_icdf": (
        lambda u, a, b: hard_concrete.icdf(u, a, b, STRETCH),
        parameters(0.5, 0.5, 0.7),
    ),
    "hc_interior_icdf": (
        lambda u, a, b: hard_concrete.interior_icdf(u, a, b, STRETCH),
        parameters(0.5, 0.5, 0.7),
    ),
    "hc_mean": (lambda a, b: hard_concrete.mean(a, b, NODES), parameters(0.5, 0.7)),
    "hc_variance": (
        lambda a, b: hard_concrete.variance(a, b, STRETCH, NODES),
        parameters(0.5, 0.7),
    ),
    "hc_entropy": (
        lambda a, b: hard_concrete.entropy(a, b, STRETCH, NODES),
        parameters(0.5, 0.7),
    ),
    "hc_kl_closed": (
        lambda q, p, b: hard_concrete_kl.same_temperature(q, p, b, STRETCH, RULE),
        parameters(0.5, -1.0, 0.7),
    ),
    "hc_kl_closed_number": (
        lambda q, p: hard_concrete_kl.same_temperature(q, p, 2 / 3, STRETCH, RULE),
        parameters(0.5, -1.0),
    ),
    "hc_kl_quadrature": (
        lambda q, b, p, c: hard_concrete_kl.same_stretch(q, b, p, c, STRETCH, NODES),
        parameters(0.5, 0.7, -1.0, 0.9),
    ),
    "rn_log_interior_prob": (rectified_normal.log_interior_prob, parameters(0.4, 0.5)),
    "rn_mean": (
        lambda m, s: torch.stack(rectified_normal.mean(m, s)),
        parameters(0.4, 0.5),
    ),
    "rn_variance": (
        lambda m, s: rectified_normal.variance(m, s, RULE),
        parameters(0.4, 0.5),
    ),
    "rn_entropy": (rectified_normal.entropy, parameters(0.4, 0.5)),
    "rn_kl": (rectified_normal.kl, parameters(0.4, 0.5, 0.2, 0.6)),
    "rn_interior_icdf": (rectified_normal.interior_icdf, parameters(0.5, 0.4, 0.5)),
}


@pytest.fixture
def validation_survives():
    """torch.compile switches the validation of all distributions off; later tests rely on it."""
    before = torch.distributions.Distribution._validate_args
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


def value_and_gradients(function, inputs):
    """A function's value and the gradients of its sum."""
    value = function(*inputs)
    return value.detach(), torch.autograd.grad(value.sum(), inputs)


def check_compiled(name, backend):
    """One graph without breaks, with the same value and gradients as eager execution."""
    torch.compiler.reset()
    function, inputs = COMPILED[name]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    expected = value_and_gradients(function, inputs)
    actual = value_and_gradients(compiled, inputs)
    # Fused kernels may use other exp and log: a few float32 epsilons.
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("validation_survives")
@pytest.mark.parametrize("name", COMPILED)
def test_functions_are_one_graph(name):
    """torch.compile(fullgraph=True) accepts every pure function; the eager backend is quick."""
    check_compiled(name, "eager")


@pytest.mark.slow
@pytest.mark.usefixtures("validation_survives")
@pytest.mark.parametrize("name", COMPILED)
def test_functions_compile(name):
    """The same through the real compiler."""
    check_compiled(name, "inductor")
