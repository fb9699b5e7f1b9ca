"""Correlated guides as a user meets them: with Pyro's losses, handlers and Predictive, and in files."""

import copy
import io
import math
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import Adam

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, check_fit, fit
from tests.infer.regressions import correlated_guide, features, leave_one_out, regression, shaken, train
from tests.reference_posteriors import GaussianPosterior
from tests.spike_slab_designs import Design

N, P, RATE = 60, 3, 0.2
SLAB = {"w": "z"}
X = torch.randn(N, P, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
X[:, 1] = X[:, 0] + 0.15 * X[:, 1]  # the first two nearly the same
Y = 0.5 * X[:, 0] + torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
ONE, ZERO = X.new_ones(()), X.new_zeros(())


PAIRS = Design("pairs", X, Y, tau=1.0)
UNKNOWN = replace(PAIRS, sigma=dist.HalfNormal(2 * ONE))


def known(y=Y):
    return PAIRS.model(X, y)


def unknown(y=Y):
    return UNKNOWN.model(X, y)


def correlated(model=unknown, slab=SLAB, seed=0, **options):
    if model is unknown:
        options.setdefault("hyper", ("sigma",))
    return correlated_guide(model, slab, seed, **options)


def moved(guide):
    """The guide after its first call, every parameter a little off its start."""
    guide()
    return shaken(guide, 0.3)


@pytest.fixture(scope="module")
def exact():
    """The posterior with known noise, by enumeration."""
    return GaussianPosterior(X, Y, 1.0, 1.0, RATE).summary()


@pytest.mark.parametrize(
    "loss",
    [
        lambda: Trace_ELBO(),
        lambda: Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1),
        lambda: leave_one_out(),
        lambda: leave_one_out(vectorize_particles=True),
    ],
)
def test_svi_from_the_first_call(loss):
    """A guide that has not been called is set up inside of the loss; its parameters are in the store and move."""
    guide = correlated()
    svi = SVI(unknown, guide, Adam({"lr": 0.01}), loss())
    svi.step()
    names = [name for name, parameter in guide.named_parameters() if parameter.numel()]
    before = {name: x.detach().clone() for name, x in guide.named_parameters()}
    assert {name.split(".", 1)[1].replace("$$$", ".") for name in pyro.get_param_store()} == set(names)
    for _ in range(3):
        svi.step()
    still = [name for name, x in guide.named_parameters() if torch.equal(x, before[name])]
    assert still == ["joint.hyper_posterior.coupling"]  # of one latent with those before it


def test_the_trace_has_the_joint_density():
    """log_prob_sum of a trace, against gates by the chain, noise by its log-normal and slabs by their Gaussian."""
    guide = moved(correlated())
    trace = poutine.trace(guide).get_trace()
    sigma, z, w = (trace.nodes[name]["value"] for name in ("sigma", "z", "w"))
    joint = guide.joint
    t = sigma.log().reshape(1, 1)
    density = dist.Normal(joint.hyper_posterior.loc, joint.hyper_posterior.log_scale.exp()).log_prob(t).sum() - t.sum()
    shift = t - joint.hyper_start
    odds = joint.chain.log_odds(guide.sites["z"]["logits"], z[None], shift)
    density = density + BernoulliGate(logits=odds).log_prob(z).sum()
    given = joint.slab_posterior.given(z[None], shift)
    precision = given.root @ given.root.mT  # the prior's deviations are 1
    density = density + dist.MultivariateNormal(given.mean, precision_matrix=precision).log_prob(w).sum()
    torch.testing.assert_close(trace.log_prob_sum(), density, rtol=1e-8, atol=1e-8)


def test_in_a_list_of_guides():
    """Another guide of the other latents; trained by either loss, from the first call."""

    def model():
        with poutine.scale(scale=1.0):
            pyro.sample("extra", dist.Normal(ZERO, ONE))
        unknown()

    guide = AutoGuideList(model)
    guide.append(correlated(poutine.block(model, hide=["extra"]), hyper=("sigma",)))
    guide.append(AutoNormal(poutine.block(model, expose=["extra"])))
    for loss in (leave_one_out(), Trace_ELBO()):
        svi = SVI(model, guide, Adam({"lr": 0.01}), loss)
        assert all(math.isfinite(svi.step()) for _ in range(3))
    assert sorted(guide()) == ["extra", "sigma", "w", "z"]
    assert any(name.startswith("AutoGuideList.0.joint") for name in pyro.get_param_store())


def test_copies_files_and_states_give_the_same_draws():
    """deepcopy, torch.save, and a state that is loaded before or after the first call; of parts that SVI stepped."""
    guide = correlated()
    SVI(unknown, guide, Adam({"lr": 0.01}), leave_one_out()).step()
    shaken(guide, 0.3)
    file = io.BytesIO()
    torch.save(guide, file)
    file.seek(0)
    early, late = correlated(seed=5), correlated(seed=6)
    early.load_state_dict(guide.state_dict())
    early()
    late()
    late.load_state_dict(guide.state_dict())

    def draws(one):
        torch.manual_seed(7)
        return one.draws(3)

    for other in (copy.deepcopy(guide), torch.load(file, weights_only=False), early, late):
        for name, expected in draws(guide).items():
            assert torch.equal(draws(other)[name], expected)
    with pytest.raises(ValueError, match="Expected an AutoSpikeSlab with its model, but this one was copied or loaded"):
        copy.deepcopy(guide).refine()


@pytest.mark.slow
def test_fit_and_check_on_near_duplicates(exact):
    """Autoregressive: within .05 of the enumeration, a tight bound and no alarm. A mean field is found out."""
    probs, evidence = exact.inclusion, exact.log_evidence
    guide = correlated(known)
    result = fit(known, guide, steps=250, seed=2)
    check = check_fit(known, guide)
    torch.testing.assert_close(guide.active_probs()["z"], probs, rtol=0, atol=0.05)
    torch.testing.assert_close(check.active_probs["z"], probs, rtol=0, atol=0.05)
    assert check.ok
    assert evidence - 0.1 < result.evidence.elbo < evidence + 0.02
    assert result.evidence.importance_weighted == pytest.approx(evidence, abs=0.05)
    pyro.set_rng_seed(0)
    lone = AutoSpikeSlab(known, SLAB, family=BernoulliGate, init_active_prob=0.5, init_jitter=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a loss that still falls
        fit(known, lone, steps=150, seed=2)
    check = check_fit(known, lone)
    assert float((lone.active_probs()["z"] - probs).abs().max()) > 0.07
    assert not check.ok
    assert "the guide misses a part of the posterior" in check.problems[0]
    torch.testing.assert_close(check.active_probs["z"], probs, rtol=0, atol=0.06)


@pytest.mark.slow
def test_hard_concrete_gates_with_structured_slabs():
    """Against importance sampling from the prior; chains, which know two values, refuse them."""

    def model():
        regression(x, Y, HardConcrete.from_active_prob(X.new_tensor(RATE)), dist.Normal(ZERO, ONE))

    x = X.clone()
    x[:, 1] = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    torch.manual_seed(2)
    z = HardConcrete.from_active_prob(X.new_tensor(RATE)).expand([60_000, P]).sample()
    w = torch.randn_like(z)
    weights = (-0.5 * (Y - (z * w) @ x.mT).square().sum(-1)).softmax(0)
    assert 1 / weights.square().sum() > 1000
    exact = weights @ (z != 0).double()
    pyro.set_rng_seed(0)
    guide = AutoSpikeSlab(model, SLAB, family=HardConcrete, slabs="structured")
    guide()
    loss = L0_ELBO("spike_slab", slab=SLAB, num_particles=2)(model, guide)
    train(loss, torch.optim.Adam(guide.parameter_groups(0.1)), 150)
    torch.testing.assert_close(guide.active_probs()["z"], exact, rtol=0, atol=0.15)
    with pytest.raises(ValueError, match=r"Expected binary gates at site 'z'.*HardConcrete"):
        check_fit(model, guide)


# ------------------------------------------------------------ Pyro's Predictive


DRAWS = 400
ERRORS = 5


@pytest.fixture(scope="module")
def data():
    """Features 0 and 1 are nearly the same."""
    torch.manual_seed(61)
    x = torch.randn(60, 4)
    x[:, 1] = x[:, 0] + 0.05 * torch.randn(60)
    return x, 0.6 * x[:, 0] + 0.5 * torch.randn(60)


def model(x, y=None):
    z, w = features(x.shape[1], 0.3)
    beta = pyro.deterministic("beta", z * w)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(beta @ x.T, 0.5), obs=y)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"gates": "autoregressive", "slabs": "structured"}], ids=["mean field", "joint"]
)
def test_gates_are_zero_as_often_as_the_guide_says(options, parallel, data):
    """Within five standard errors of P(z = 0); predictions of new rows are those of the coefficients."""
    guide = AutoSpikeSlab(model, slab={"w": "z"}, **options)
    pyro.set_rng_seed(62)
    guide(*data)
    new = torch.eye(4)[:3]
    drawn = Predictive(model, guide=guide, num_samples=DRAWS, parallel=parallel)(new)
    z, beta, y = (drawn[name].reshape(DRAWS, -1) for name in ("z", "beta", "y"))
    assert ((z == 0) | (z == 1)).all()
    assert torch.equal(beta == 0, z == 0)
    probs = guide.active_probs()["z"]
    assert ((z.mean(0) - probs).abs() < ERRORS * (probs * (1 - probs) / DRAWS).sqrt()).all()
    noise = y - beta[:, :3]
    assert abs(noise.mean()) < ERRORS * 0.5 / math.sqrt(noise.numel())
    assert noise.std().item() == pytest.approx(0.5, rel=0.05)


def test_draws_of_a_refined_posterior(data):
    """Of the same features at most one is open, which the predictions of both together show; the guide is as before."""
    guide = AutoSpikeSlab(model, slab={"w": "z"}, slabs="structured")
    pyro.set_rng_seed(63)
    guide(*data)
    before = guide.active_probs()["z"]
    refined = guide.refine(*data, seed=0)
    draws = refined.draws(DRAWS)
    drawn = Predictive(model, posterior_samples=draws, parallel=True)(torch.eye(4))
    beta = drawn["beta"].reshape(DRAWS, 4)
    assert torch.equal(beta, draws["z"] * draws["w"])
    assert torch.equal(guide.active_probs()["z"], before)
    assert drawn["y"].shape == (DRAWS, 4)
    is_open = beta != 0
    assert (is_open[:, :2].sum(1) == 1).float().mean() > 0.8
    assert is_open.float().mean(0)[:2].min() > 0.1


def test_a_network_has_the_same_weights_in_all_draws(data):
    """Of an AutoGate only the gates vary."""
    net = torch.nn.Linear(4, 1)

    def gated(x, y=None):
        pyro.module("net", net)
        z = pyro.sample("z", BernoulliGate(probs=torch.full((4,), 0.5)).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(net(x * z)[:, 0], 1e-6), obs=y)

    guide = AutoGate(gated, BernoulliGate)
    pyro.set_rng_seed(64)
    guide(*data)
    drawn = Predictive(gated, guide=guide, num_samples=200, return_sites=("z", "y"))(torch.ones(1, 4))
    z = drawn["z"].reshape(200, 4)
    torch.testing.assert_close(drawn["y"][:, 0], net(z)[:, 0], atol=1e-5, rtol=0)
    assert 2 <= len(z.unique(dim=0)) <= 16
