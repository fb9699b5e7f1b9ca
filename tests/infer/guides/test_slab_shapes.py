"""Slabs switched by groups of gates, and slabs whose KL has no closed form."""

import itertools
import math
from contextlib import ExitStack

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.distributions import kl_divergence

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.infer import L0_ELBO, AutoSpikeSlab, fit

DOUBLE = torch.float64


def elbo(**options):
    return L0_ELBO("spike_slab", slab={"w": "z"}, **options)


def normals(*shape):
    torch.manual_seed(1)
    return dist.Normal(torch.randn(shape, dtype=DOUBLE), 0.3), dist.Normal(torch.zeros(shape, dtype=DOUBLE), 1.5)


def gates(*shape):
    torch.manual_seed(2)
    return HardConcrete(torch.randn(shape, dtype=DOUBLE)), HardConcrete(torch.zeros(shape, dtype=DOUBLE))


def slab_term(z, w, z_plate=None, w_plate=None, **options):
    """The slab's term with gates and slab of (posterior, prior) each, in a plate (name, size) or one for each size."""

    def run(i):
        plates = {}
        for name, fns, plate in (("z", z, z_plate), ("w", w, w_plate)):
            sizes = enumerate(reversed(fns[i].batch_shape), 1)
            keys = [(*plate, 1)] if plate else [(f"plate {dim}", size, dim) for dim, size in sizes]
            with ExitStack() as stack:
                for key in keys:
                    plates[key] = plates.get(key) or pyro.plate(key[0], key[1], dim=-key[2])
                    stack.enter_context(plates[key])
                pyro.sample(name, fns[i])

    return elbo(**options).terms(lambda: run(1), lambda: run(0))["kl_slab"].item()


@pytest.mark.parametrize(
    ("z_shape", "z_event", "w_shape", "w_event", "aligned"),
    [
        ((), 0, (4,), 1, (1,)),
        ((2, 3), 2, (2, 3), 2, (2, 3)),
        ((2, 3), 0, (2, 3), 2, (2, 3)),
        ((1, 3), 2, (2, 3), 2, (1, 3)),
        ((2, 1), 2, (2, 2), 2, (2, 1)),
        ((3,), 1, (2, 3), 2, (1, 3)),
        ((3,), 1, (3, 3), 2, (1, 3)),
        ((3,), 1, (3, 3), 1, (1, 3)),
        ((2, 3), 1, (2, 3, 3), 2, (2, 1, 3)),
        ((2,), 0, (2, 3), 2, (2, 1)),
        ((3,), 1, (2, 3), 1, (1, 3)),
        ((2, 4), 1, (2, 3, 4), 2, (2, 1, 4)),
        ((3,), 0, (3, 5), 1, (3, 1)),  # in one plate: a whole event
        ((3,), 0, (3, 3), 1, (3, 1)),
    ],
)
def test_where_gates_act(z_shape, z_event, w_shape, w_event, aligned):
    """Batch dimensions belong together, and event dimensions lie along the last ones as in torch, squares or not."""
    z, w = gates(*z_shape), normals(*w_shape)
    expected = (z[0].active_prob.reshape(aligned) * kl_divergence(*w)).sum().item()
    found = slab_term([fn.to_event(z_event) for fn in z], [fn.to_event(w_event) for fn in w])
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("z_shape", "z_event", "w_shape", "w_event", "plates", "message"),
    [
        ((3,), 0, (3, 3), 2, (("units", 3), None), r"'z' that fit .* in one way.*\(1, 3\) or \(3, 1\).*to_event\(2"),
        ((2,), 1, (2, 3), 2, (None, None), r"1 where a gate is shared, such as \.expand\(\[2, 1\]\)\.to_event\(2\)"),
        ((2,), 1, (2, 3), 1, (None, None), r"one gate per event in the slab's plates"),
        ((2, 3), 1, (2, 3, 4), 2, (None, None), r"such as \.expand\(\[3, 1\]\)\.to_event\(2\)"),
        ((3,), 0, (3, 3), 1, (("inputs", 3), ("outputs", 3)), r"\(3, 1\) or \(1, 3\).*the same plates"),
        ((4,), 1, (2, 3), 2, (None, None), r"'z' that broadcast against .* 'w' of shape \(2, 3\), but got \(4,\)"),
    ],
)
def test_gates_that_fit_in_no_way_or_in_several(z_shape, z_event, w_shape, w_event, plates, message):
    z, w = gates(*z_shape), normals(*w_shape)
    with pytest.raises(ValueError, match=message):
        slab_term([fn.to_event(z_event) for fn in z], [fn.to_event(w_event) for fn in w], *plates)


def test_group_gates_by_enumeration_with_gradients():
    """A mask, a scale and a subsampled plate; the expectation over all states of Bernoulli gates, and its gradient."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=DOUBLE, requires_grad=True)
    loc = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=DOUBLE).requires_grad_()
    mask = torch.tensor([True, False, True, True])

    def run(z, w):
        with pyro.plate("rows", 12, subsample_size=4), poutine.mask(mask=mask), poutine.scale(scale=0.5):
            pyro.sample("z", z)
            pyro.sample("w", w.to_event(1))

    prior = dist.Normal(torch.zeros(4, 4, dtype=DOUBLE), 1.5)
    model = lambda: run(BernoulliGate(logits=torch.zeros(4, dtype=DOUBLE)), prior)  # noqa: E731
    guide = lambda: run(BernoulliGate(logits=logits), dist.Normal(loc, 0.3))  # noqa: E731
    with torch.enable_grad():
        objective = elbo(estimator="arm")
        found = objective.sum_terms([objective._get_trace(model, guide, (), {})])["kl_slab"]
    row = kl_divergence(dist.Normal(loc, 0.3), prior).sum(-1) * mask
    expected = torch.zeros((), dtype=DOUBLE)
    for state in itertools.product([0.0, 1.0], repeat=4):
        z = torch.tensor(state, dtype=DOUBLE)
        probability = torch.where(z > 0, logits.sigmoid(), (-logits).sigmoid()).prod()
        expected = expected + probability * 12 / 4 * 0.5 * (z * row).sum()
    torch.testing.assert_close(found, expected)
    for x, y in zip(*(torch.autograd.grad(value, [logits, loc]) for value in (found, expected)), strict=True):
        torch.testing.assert_close(x, y)


def quadrature(q, p, low, high, nodes=200_001):
    """KL(q || p) in one dimension by the trapezoidal rule."""
    x = torch.linspace(low, high, nodes, dtype=DOUBLE)
    log_q = q.log_prob(x)
    return torch.trapezoid(log_q.exp() * (log_q - p.log_prob(x)), x).item()


NORMAL = dist.Normal(torch.tensor(0.4, dtype=DOUBLE), 0.5)
LOGNORMAL = dist.LogNormal(torch.tensor(-0.3, dtype=DOUBLE), 0.4)


@pytest.mark.parametrize(
    ("q", "p", "low"),
    [
        (NORMAL, dist.StudentT(torch.tensor(3.0, dtype=DOUBLE)), -6.0),
        (NORMAL, dist.Cauchy(torch.tensor(0.0, dtype=DOUBLE), 1.0), -6.0),
        (LOGNORMAL, dist.HalfNormal(torch.tensor(1.0, dtype=DOUBLE)), 1e-3),
        (LOGNORMAL, dist.HalfCauchy(torch.tensor(1.0, dtype=DOUBLE)), 1e-3),
    ],
    ids=lambda x: type(x).__name__,
)
def test_slabs_without_a_registered_kl_are_sampled(q, p, low):
    """In mean over 40,000 draws P(z != 0) times the KL by quadrature, within five standard errors; its gradient too."""
    draws = 40_000
    pyro.set_rng_seed(4)
    gate = HardConcrete(torch.tensor(0.5, dtype=DOUBLE))
    loc = q.loc.detach().clone().expand(draws).clone().requires_grad_()
    posterior = type(q)(loc, q.scale)

    def run(w):
        with pyro.plate("draws", draws):
            pyro.sample("z", gate.expand([draws]))
            pyro.sample("w", w)

    value = elbo().differentiable_loss(lambda: run(p.expand([draws])), lambda: run(posterior))
    (slope,) = torch.autograd.grad(value, loc)
    truth, step = gate.active_prob.item() * quadrature(q, p, low, 12.0), 1e-4
    difference = sum(s * quadrature(type(q)(q.loc + s * step, q.scale), p, low, 12.0) for s in (1, -1)) / (2 * step)
    with torch.no_grad():
        w = posterior.sample()
        error = gate.active_prob * (posterior.log_prob(w) - p.log_prob(w)).std() / math.sqrt(draws)
    assert abs(value.item() / draws - truth) < 5 * error
    assert abs(slope.mean() - gate.active_prob * difference) < 5 * slope.std() / math.sqrt(draws)


@pytest.mark.slow
def test_a_joint_slab_takes_one_gate_per_event():
    """A multivariate normal against independent normals, sampled; by element it has no KL."""
    q = dist.MultivariateNormal(torch.zeros(3, dtype=DOUBLE), torch.eye(3, dtype=DOUBLE) + 0.5)
    p = dist.Normal(torch.zeros(3, dtype=DOUBLE), 2.0).to_event(1)
    exact = kl_divergence(q, dist.MultivariateNormal(torch.zeros(3, dtype=DOUBLE), 4 * torch.eye(3, dtype=DOUBLE)))
    z = gates()
    pyro.set_rng_seed(5)
    draws = torch.tensor([slab_term(z, (q, p)) for _ in range(1500)])
    expected = (z[0].active_prob * exact).item()
    assert abs(draws.mean().item() - expected) < 5 * draws.std().item() / math.sqrt(1500)
    with pytest.raises(ValueError, match="one gate at site 'z' for every event of slab site 'w'"):
        slab_term([fn.to_event(1) for fn in gates(3)], (q, p))


def test_a_slab_that_its_prior_does_not_admit():
    """A normal posterior of a half-normal slab draws negative values."""
    q, p = dist.Normal(torch.tensor([-5.0]), 0.1).to_event(1), dist.HalfNormal(torch.ones(1)).to_event(1)
    with pytest.raises(ValueError, match="to be within the support"):
        slab_term(gates(), (q, p))


@pytest.mark.filterwarnings("ignore:The loss was still falling")  # the closed gate is told from the others by then
@pytest.mark.parametrize("dims", [(None, None), (-2, -1)])
@pytest.mark.parametrize("options", [{}, {"gates": "autoregressive"}])
def test_summaries_of_two_plates_are_indexed_as_tensors_are(dims, options):
    """Without dimensions of their own Pyro puts the outer plate last; where it can't be open, the coefficient is 0."""

    def model():
        rates = torch.full((3, 2) if dims[0] else (2, 3), 0.5)
        rates[1, 0] = 1e-6
        with pyro.plate("rows", 3, dim=dims[0]), pyro.plate("columns", 2, dim=dims[1]):
            z, w = pyro.sample("z", BernoulliGate(rates)), pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal((z * w).sum(), 10.0), obs=torch.tensor(1.0))

    guide = AutoSpikeSlab(model, {"w": "z"}, **options)
    fit(model, guide, steps=60, num_particles=16, seed=5)
    found = guide.summary(500).to_frame()
    assert found["active_probs"].idxmin() == found["sd"].idxmin() == "w[1, 0]"
    sizes = (3, 2) if dims[0] else (2, 3)
    assert list(found.index) == [f"w[{i}, {j}]" for i in range(sizes[0]) for j in range(sizes[1])]
