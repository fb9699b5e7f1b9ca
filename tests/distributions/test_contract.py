"""What every gate family promises: Pyro's generic distribution checks, rewritten for atoms.

Two of Pyro's checks assume a density on the whole line and are replaced. Goodness of fit becomes a
binomial test for each atom and a fit of the interior; ``cdf(icdf(u)) == u`` becomes the two
inequalities that hold for any distribution with jumps.
"""

import copy
import io
import math
import pickle

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions.testing.gof import auto_goodness_of_fit
from scipy import stats
from torch.distributions import constraints, kl_divergence

from pyro_l0.distributions import GateDistribution, HardConcrete
from tests.cases import ATOMIC, FAMILIES, GATES, Case, build, columns, stack

# Every statistical test has a fixed seed. A p-value below 1e-6 would by chance be seen once in
# a million seeds; five standard errors once in two million.
SMALLEST_P_VALUE = 1e-6
STANDARD_ERRORS = 5

STATISTICS = (
    "mean",
    "variance",
    "median",
    "log_prob_zero",
    "log_prob_one",
    "log_interior_prob",
    "log_active_prob",
    "active_prob",
    "test_gate",
)


ATOMIC_GATES = tuple(Case(family, parameters) for family in ATOMIC for parameters in family.parameters)
interior = pytest.mark.interior  # a promise about densities and pathwise draws


def skip_without_interior(request, family):
    """Leave out the families of atoms alone where a test is about what lies between."""
    if request.node.get_closest_marker("interior") and not family.interior:
        pytest.skip("has atoms alone")


@pytest.fixture(params=FAMILIES + ATOMIC, ids=lambda family: family.gate.__name__)
def family(request):
    """Every family of cases.py."""
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


def pathwise(gate):
    """The ways to draw with a derivative, if there are any."""
    return (gate.rsample, gate.rsample_interior) if gate.has_rsample else ()


def randomised_pit(gate, draws):
    """Probability integral transform that spreads each atom evenly over its step of the cdf."""
    u = torch.rand_like(draws)
    value = gate.cdf(draws)
    p0, p1 = gate.log_prob_zero.exp(), gate.log_prob_one.exp()
    value = torch.where(draws == 0, u * p0, value)
    return torch.where(draws == 1, 1 - u * p1, value)


# --- shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_shape", [(), (4,), (3, 2)])
@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 1), (0,)])
def test_draws_and_log_prob_have_the_documented_shapes(family, sample_shape, batch_shape):
    """Draws have sample_shape + batch_shape, and so has their log_prob."""
    gate = build(family, family.parameters[0], batch_shape=batch_shape)
    assert gate.batch_shape == batch_shape
    assert gate.event_shape == ()
    assert gate.shape(sample_shape) == sample_shape + batch_shape
    for draw in (gate.sample, *pathwise(gate)):
        value = draw(torch.Size(sample_shape))
        assert value.shape == sample_shape + batch_shape
        assert value.dtype == torch.float64
        assert gate.log_prob(value).shape == sample_shape + batch_shape
        assert gate.cdf(value).shape == sample_shape + batch_shape
        assert gate.icdf(value).shape == sample_shape + batch_shape


@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 1), (0,)])
def test_statistics_have_the_batch_shape(family, batch_shape):
    """Every statistic, the entropy too, is a tensor of shape batch_shape."""
    gate = build(family, family.parameters[0], batch_shape=batch_shape)
    for name in STATISTICS:
        assert getattr(gate, name).shape == batch_shape, name
    assert gate.entropy().shape == batch_shape


def test_infer_shapes_foresees_the_shapes(family):
    """infer_shapes tells from parameter shapes what the constructor will do."""
    names = list(family.parameters[0])
    shapes = dict(zip(names, [(3, 1), (2,), (), (1,)], strict=False))
    tensors = {k: torch.full(s, family.parameters[0][k]) for k, s in shapes.items()}
    gate = family.gate(**tensors)
    assert family.gate.infer_shapes(**shapes) == (gate.batch_shape, gate.event_shape)


def test_parameters_broadcast_fully(family):
    """Each parameter and each statistic has the common shape, whichever parameter brought it."""
    for wide in family.parameters[0]:
        tensors = {
            name: torch.full((3, 1) if name == wide else (2,), value, dtype=torch.float64)
            for name, value in family.parameters[0].items()
        }
        gate = family.gate(**tensors)
        shape = torch.broadcast_shapes(*(x.shape for x in tensors.values()))
        assert gate.batch_shape == shape
        for name in STATISTICS:
            assert getattr(gate, name).shape == shape, (wide, name)
        assert gate.entropy().shape == shape
        assert gate.log_prob(torch.zeros(())).shape == shape
        assert gate.sample().shape == shape
        assert kl_divergence(gate, gate).shape == shape


def test_a_batch_is_its_members(family):
    """A batch of different parameters gives what each member gives alone."""
    batch = stack(family, family.parameters)
    members = [build(family, p) for p in family.parameters]
    for name in STATISTICS:
        alone = torch.stack([getattr(member, name) for member in members])
        # The batch shares one quadrature rule, that of its hardest member; 1e-9 is the accuracy
        # that the rule of docs/maths.md gives to the variance.
        torch.testing.assert_close(getattr(batch, name), alone, rtol=1e-9, atol=1e-12)
    value = torch.tensor([[0.0], [0.3], [1.0]], dtype=torch.float64)
    alone = torch.cat([member.log_prob(value) for member in members], -1)
    torch.testing.assert_close(batch.log_prob(value), alone, rtol=1e-12, atol=0)


def test_python_numbers_make_a_gate(family):
    """Plain floats are parameters too, in torch's default dtype."""
    gate = family.gate(**family.parameters[0])
    assert gate.batch_shape == ()
    assert gate.sample().dtype == torch.get_default_dtype()


def test_data_that_does_not_broadcast_is_refused(family):
    """log_prob names the shapes that do not fit."""
    gate = build(family, family.parameters[0], batch_shape=(3,))
    with pytest.raises(ValueError, match=r"[Bb]roadcast"):
        gate.log_prob(torch.zeros(2))


def test_bad_event_dimensions_are_refused(family):
    """to_event cannot take more dimensions than there are, nor log_prob a smaller event."""
    gate = build(family, family.parameters[0], batch_shape=(3,))
    with pytest.raises(ValueError, match="reinterpreted_batch_ndims"):
        gate.to_event(2)
    with pytest.raises(ValueError, match="event_shape"):
        gate.to_event(1).log_prob(torch.zeros(3, 2))


# --- support and validation -------------------------------------------------------------------


def test_support_includes_the_atoms(gate):
    """The support is [0, 1] with both ends, so the atoms pass validation."""
    value = torch.tensor([0.0, 0.5, 1.0, -0.1, 1.1])
    assert gate.support.check(value).tolist() == [True, True, True, False, False]
    assert gate.support.event_dim == 0
    assert gate.log_prob(torch.tensor([0.0, 1.0])).isfinite().all()


def test_every_parameter_is_constrained(family):
    """arg_constraints names every parameter of the constructor."""
    assert set(family.gate.arg_constraints) == set(family.parameters[0])
    for constraint in family.gate.arg_constraints.values():
        assert isinstance(constraint, constraints.Constraint)


def test_validation_can_be_switched_off(family):
    """validate_args=False accepts what validate_args=True refuses."""
    bad = {name: torch.tensor(math.nan) for name in family.parameters[0]}
    family.gate(**bad, validate_args=False)
    with pytest.raises(ValueError, match="invalid values"):
        family.gate(**bad, validate_args=True)
    gate = family.gate(**family.parameters[0], validate_args=False)
    gate.log_prob(torch.tensor(1.5))
    gate.expand((2,)).log_prob(torch.tensor(1.5))


def test_gates_say_what_they_are(case):
    """A gate is a GateDistribution, reparametrised or else enumerable, and prints its parameters."""
    gate = case.gate()
    assert isinstance(gate, GateDistribution)
    assert gate.has_rsample == case.family.interior
    assert gate.has_enumerate_support != case.family.interior
    assert repr(gate).startswith(type(gate).__name__ + "(")


def test_atoms_are_the_ends(gate):
    """Both families put mass on 0 and 1 and nowhere else."""
    assert tuple(gate.atoms) == (0.0, 1.0)


# --- expand, mask, to_event, copies -----------------------------------------------------------


def expansions(gate):
    """Every way to expand a gate of batch shape (2, 1)."""
    return {
        "by": gate.expand_by((4,)),
        "new dimension": gate.expand((4, 2, 1)),
        "existing dimension": gate.expand((2, 3)),
        "both": gate.expand(torch.Size((4, 2, 3))),
        "twice": gate.expand((2, 3)).expand((4, 2, 3)),
        "same": gate.expand((2, 1)),
        "list": gate.expand([4, 2, 3]),
    }


def test_expand_keeps_family_and_values(family):
    """An expanded gate is of the same class and gives the same numbers, in every form."""
    parameters = {k: torch.full((2, 1), v, dtype=torch.float64) for k, v in family.parameters[1].items()}
    gate = family.gate(**parameters)
    value = torch.tensor([[0.0], [0.3]], dtype=torch.float64)
    for form, expanded in expansions(gate).items():
        assert type(expanded) is family.gate, form
        shape = expanded.batch_shape
        for name in (*STATISTICS, *parameters):
            torch.testing.assert_close(getattr(expanded, name), getattr(gate, name).expand(shape), rtol=1e-14, atol=0)
        torch.testing.assert_close(expanded.entropy(), gate.entropy().expand(shape))
        torch.testing.assert_close(expanded.log_prob(value), gate.log_prob(value).expand(shape))
        for draw in (expanded.sample, *pathwise(expanded)):
            assert draw((5,)).shape == (5, *shape), form
        torch.testing.assert_close(kl_divergence(expanded, expanded), torch.zeros(shape).double())
        assert expanded._validate_args == gate._validate_args, form


def test_expand_shares_the_parameters(family):
    """Gradients flow from an expanded gate to the parameters of the original."""
    parameters = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in family.parameters[1].items()}
    family.gate(**parameters).expand((4,)).mean.sum().backward()
    for name, tensor in parameters.items():
        assert tensor.grad is not None, name
        assert tensor.grad != 0, name


def test_expand_keeps_a_subclass(family):
    """A user's subclass stays what it is."""
    sub = type("Sub", (family.gate,), {})
    assert type(sub(**family.parameters[0]).expand((3,))) is sub


@interior
def test_expand_keeps_has_rsample(family):
    """has_rsample_ set on one gate survives expand and leaves the class alone."""
    gate = family.gate(**family.parameters[0]).has_rsample_(False)
    assert gate.expand((2,)).has_rsample is False
    assert gate.expand((2,)).expand((3, 2)).has_rsample is False
    assert family.gate.has_rsample is True


def test_expand_to_an_impossible_shape_is_refused(family):
    """A batch of 3 does not expand to 2."""
    gate = build(family, family.parameters[0], batch_shape=(3,))
    with pytest.raises((RuntimeError, ValueError), match="expand"):
        gate.expand((2,))


def test_mask_switches_log_prob_off(gate):
    """A masked gate charges nothing where the mask is False."""
    mask = torch.tensor([True, False])
    value = torch.tensor([0.0, 0.0], dtype=torch.float64)
    masked = gate.expand((2,)).mask(mask)
    expected = gate.log_prob(value) * mask
    torch.testing.assert_close(masked.log_prob(value), expected)
    assert (gate.expand((2,)).mask(False).log_prob(value) == 0).all()


def test_to_event_sums(gate):
    """Independent gates add their log_prob and entropy and keep the mean."""
    batch = gate.expand((2, 3))
    value = batch.sample()
    joint = batch.to_event(1)
    assert joint.batch_shape == (2,)
    assert joint.event_shape == (3,)
    torch.testing.assert_close(joint.log_prob(value), batch.log_prob(value).sum(-1))
    torch.testing.assert_close(joint.entropy(), batch.entropy().sum(-1))
    torch.testing.assert_close(joint.mean, batch.mean)


def test_pickle_and_deepcopy(gate):
    """Copies give the same numbers."""
    buffer = io.BytesIO()
    pickle.dump(gate, buffer)
    buffer.seek(0)
    value = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    for twin in (pickle.load(buffer), copy.deepcopy(gate), copy.copy(gate)):
        assert type(twin) is type(gate)
        assert torch.equal(twin.log_prob(value), gate.log_prob(value))
        for name in STATISTICS:
            assert torch.equal(getattr(twin, name), getattr(gate, name)), name


def test_a_used_gate_can_be_pickled(gate):
    """Lazily computed statistics do not get in the way of a copy."""
    for name in STATISTICS:
        getattr(gate, name)
    gate.entropy()
    twin = pickle.loads(pickle.dumps(gate))
    assert torch.equal(twin.mean, gate.mean)


def test_pyro_sample_in_a_plate(family):
    """A gate is a Pyro distribution: a site in a plate gets the plate's shape."""

    def model():
        with pyro.plate("units", 5):
            return pyro.sample("z", family.gate(**family.parameters[0]))

    trace = pyro.poutine.trace(model).get_trace()
    assert trace.nodes["z"]["value"].shape == (5,)
    assert type(trace.nodes["z"]["fn"]) is family.gate
    trace.compute_log_prob()
    assert trace.nodes["z"]["log_prob_sum"].isfinite()


# --- the law ----------------------------------------------------------------------------------


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


def test_the_log_masses_are_consistent(gate):
    """The properties, log_prob at the atoms and the cdf tell the same masses."""
    at_atoms = gate.log_prob(torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(at_atoms[0], gate.log_prob_zero, rtol=1e-14, atol=0)
    torch.testing.assert_close(at_atoms[1], gate.log_prob_one, rtol=1e-14, atol=0)
    p0, p1, active = gate.log_prob_zero.exp(), gate.log_prob_one.exp(), gate.log_active_prob.exp()
    torch.testing.assert_close(gate.active_prob, active)
    torch.testing.assert_close(p0 + active, torch.ones_like(p0))
    torch.testing.assert_close(p1 + gate.log_interior_prob.exp(), active)
    torch.testing.assert_close(gate.cdf(torch.tensor(0.0).double()), p0)


def test_cdf_is_right_continuous_with_two_jumps(gate):
    """The cdf is 0 below 0, jumps at both atoms, rises between, and is 1 from 1 on."""
    value = torch.tensor([-0.25, 0.0, 1e-12, 0.3, 0.7, 1 - 1e-12, 1.0, 1.25], dtype=torch.float64)
    cdf = gate.cdf(value)
    assert cdf[0] == 0
    assert cdf[6] == 1
    assert cdf[7] == 1
    assert (cdf.diff() >= 0).all()
    torch.testing.assert_close(cdf[1], gate.log_prob_zero.exp())
    # 1e-12 beside an atom the density, at most about 50 here, moves the cdf by 5e-11.
    torch.testing.assert_close(cdf[2], cdf[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(1 - cdf[5], gate.log_prob_one.exp(), rtol=0, atol=1e-10)


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


def test_icdf_at_the_ends(gate):
    """Probabilities 0 and 1 give the ends of the support, not NaN."""
    ends = gate.icdf(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert ends.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_atoms_are_hit_as_often_as_their_mass_says(case, dtype):
    """A binomial test for each atom, on draws that equal it exactly."""
    torch.manual_seed(11)
    count = 100_000
    gate = case.gate(dtype)
    draws = gate.sample((count,))
    assert ((draws >= 0) & (draws <= 1)).all()
    for atom, log_mass in ((0, gate.log_prob_zero), (1, gate.log_prob_one)):
        hits = int((draws == atom).sum())
        mass = min(1.0, float(log_mass.exp()))
        assert stats.binomtest(hits, count, mass).pvalue > SMALLEST_P_VALUE, atom


@interior
def test_the_interior_fits_the_density(gate):
    """Pyro's goodness of fit on the draws strictly inside, under the conditional density."""
    torch.manual_seed(12)
    draws = gate.rsample((40_000,))
    inside = draws[(draws > 0) & (draws < 1)]
    density = (gate.log_prob(inside) - gate.log_interior_prob).exp()
    assert auto_goodness_of_fit(inside, density) > SMALLEST_P_VALUE


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


def test_plain_kolmogorov_smirnov_would_reject_a_correct_sampler(family):
    """Why the transform is randomised: without it the atoms look like an error."""
    torch.manual_seed(15)
    gate = build(family, family.parameters[1])
    values = gate.cdf(gate.sample((10_000,)))
    assert stats.kstest(values.numpy(), "uniform").pvalue < SMALLEST_P_VALUE


def test_mean_and_variance_are_those_of_the_draws(gate):
    """Monte Carlo within five standard errors."""
    torch.manual_seed(16)
    draws = gate.sample((100_000,))
    standard_error = (gate.variance / len(draws)).sqrt()
    assert (draws.mean() - gate.mean).abs() < STANDARD_ERRORS * standard_error
    squares = (draws - gate.mean) ** 2
    standard_error = squares.std() / math.sqrt(len(draws))
    assert (squares.mean() - gate.variance).abs() < STANDARD_ERRORS * standard_error


def test_entropy_is_that_of_the_draws(gate):
    """Minus the average log_prob of the draws, within five standard errors."""
    torch.manual_seed(17)
    log_prob = gate.log_prob(gate.sample((100_000,)))
    standard_error = log_prob.std() / math.sqrt(len(log_prob))
    assert (gate.entropy() + log_prob.mean()).abs() < STANDARD_ERRORS * standard_error


def test_same_seed_same_draws(gate):
    """Draws come from torch's generator and from nothing else."""
    torch.manual_seed(18)
    first = gate.sample((5,))
    torch.manual_seed(18)
    assert torch.equal(first, gate.sample((5,)))


@interior
def test_sample_carries_no_gradient(family):
    """sample is detached, rsample is not."""
    parameters = {k: torch.tensor(v, requires_grad=True) for k, v in family.parameters[0].items()}
    gate = family.gate(**parameters)
    assert not gate.sample().requires_grad
    assert gate.rsample().requires_grad
    assert gate.rsample_interior().requires_grad


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


# --- the interior sampler (Louizos eq. 29, corrected) -------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("log_alpha", [0.0, -3.0, 3.0, -30.0, 30.0])
def test_interior_draws_of_hard_concretes(log_alpha, dtype):
    """Draws lie strictly inside and follow the cdf conditioned on 0 < z < 1."""
    torch.manual_seed(19)
    gate = HardConcrete(torch.tensor(log_alpha, dtype=dtype))
    draws = gate.rsample_interior((10_000,))
    assert ((draws > 0) & (draws < 1)).all()
    # The conditional cdf in terms of the unclipped variable's odds, in float64: near an extreme
    # location the differences of the library's own cdf would vanish in rounding.
    z = draws.double().numpy()
    temperature = float(gate.temperature.double())
    at = lambda value: temperature * np.log((value + 0.1) / (1.1 - value)) - log_alpha  # noqa: E731
    below = lambda value: stats.logistic.cdf(at(value))  # noqa: E731
    above = lambda value: stats.logistic.sf(at(value))  # noqa: E731
    tail, sign = (below, 1) if log_alpha >= 0 else (above, -1)
    ends = tail(0.0), tail(1.0)
    values = sign * (tail(z) - ends[0]) / abs(ends[1] - ends[0])
    assert stats.kstest(values, "uniform").pvalue > SMALLEST_P_VALUE


@interior
def test_interior_draws_follow_the_conditional_law(gate):
    """The same for every family at moderate parameters."""
    torch.manual_seed(20)
    draws = gate.rsample_interior((10_000,))
    assert ((draws > 0) & (draws < 1)).all()
    p0 = gate.log_prob_zero.exp()
    values = (gate.cdf(draws) - p0) / gate.log_interior_prob.exp()
    assert stats.kstest(values.numpy(), "uniform").pvalue > SMALLEST_P_VALUE


@interior
def test_interior_draws_at_the_extremes(family):
    """Even where the interior has next to no mass, every draw is finite and inside."""
    torch.manual_seed(21)
    for parameters in family.extremes:
        draws = build(family, parameters, torch.float32).rsample_interior((1000,))
        assert ((draws > 0) & (draws < 1)).all(), parameters


# --- precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_are_computed_in_float32(family, dtype):
    """Half precision parameters give float32 results: those of the rounded parameters."""
    for parameters in family.parameters:
        if parameters.get("zeta", 2) - 1 < 0.05:
            continue  # 1.02 is not told from 1 in bfloat16
        rounded = {k: torch.tensor(v, dtype=dtype).float() for k, v in parameters.items()}
        half = family.gate(**{k: v.to(dtype) for k, v in rounded.items()})
        full = family.gate(**rounded)
        for name in STATISTICS:
            value = getattr(half, name)
            assert value.dtype == torch.float32, name
            torch.testing.assert_close(value, getattr(full, name), rtol=1e-6, atol=1e-7)
        value = torch.tensor([0.0, 0.5, 1.0])
        assert half.entropy().dtype == torch.float32
        torch.testing.assert_close(half.log_prob(value), full.log_prob(value))
        for draw in (half.sample, *pathwise(half)):
            assert draw((3,)).dtype == torch.float32
        assert half.cdf(value).dtype == torch.float32
        assert half.icdf(value).dtype == torch.float32
        assert kl_divergence(half, full).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_receive_gradients(family, dtype):
    """Gradients come back in the parameter's own dtype."""
    parameters = {k: torch.tensor(v, dtype=dtype, requires_grad=True) for k, v in family.parameters[0].items()}
    gate = family.gate(**parameters)
    (gate.mean + gate.entropy() + sum(draw() for draw in pathwise(gate))).backward()
    for name, tensor in parameters.items():
        assert tensor.grad.dtype == dtype, name
        assert tensor.grad.isfinite(), name


def test_float32_extremes_are_finite(family):
    """Extreme parameters in float32: no NaN and no infinity in any value or gradient."""
    points = torch.tensor([0.0, 1e-7, 0.5, 1 - 6e-8, 1.0] if family.interior else [0.0, 1.0])
    quantities = {
        name: (lambda gate, name=name: getattr(gate, name)) for name in STATISTICS
    } | {
        "entropy": lambda gate: gate.entropy(),
        "log_prob": lambda gate: gate.log_prob(points.unsqueeze(-1)),
        "cdf": lambda gate: gate.cdf(points.unsqueeze(-1)),
        "icdf": lambda gate: gate.icdf(torch.tensor([1e-30, 1e-7, 0.5, 1 - 6e-8]).unsqueeze(-1)),
        "rsample": lambda gate: gate.rsample((1000,)),
        "rsample_interior": lambda gate: gate.rsample_interior((1000,)),
    }  # fmt: skip
    if not family.interior:  # infinite, as they should be, and not there
        for name in ("log_interior_prob", "rsample", "rsample_interior"):
            del quantities[name]
    torch.manual_seed(22)
    for name, quantity in quantities.items():
        leaves = columns(family.extremes, torch.float32, requires_grad=True)
        value = quantity(family.gate(**leaves))
        assert value.isfinite().all(), (name, value)
        if not family.interior and not value.requires_grad:
            continue  # a step function of the parameters
        gradients = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert gradient is None or gradient.isfinite().all(), (name, leaf, gradient)


@interior
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log_prob_gradient_reaches_the_value(case, dtype):
    """The density is differentiable in z inside; at the atoms the derivative is 0, not NaN."""
    value = torch.tensor([0.0, 0.3, 1.0], dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(case.gate(dtype).log_prob(value).sum(), value)
    assert gradient.isfinite().all()
    assert gradient[0] == 0
    assert gradient[2] == 0
