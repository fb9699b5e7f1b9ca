"""Guides over models with other latents beside gates and slabs: taken without being named, and right."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoNormal

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.diagnostics import to_arviz
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, check_fit, fit
from tests.infer.regressions import leave_one_out, regression, train
from tests.reference_posteriors import all_gates

N, P, GROUPS, RATE, WIDTH, SPREAD = 80, 4, 6, 0.3, 0.5, 0.8
SLAB = {"w": "z"}
CORRELATED = {"gates": "autoregressive", "slabs": "structured"}
OF = torch.arange(N) % GROUPS


def data():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(N, P) + 0.5 * normal(GROUPS, 1)[OF]  # so that gates depend on the intercepts
    x[:, 1] = x[:, 0] + 0.4 * normal(N)
    return x, 1.0 + 0.4 * x[:, 0] - 0.25 * x[:, 3] + 0.7 * normal(GROUPS)[OF] + normal(N)


X, Y = data()
ONE = torch.ones((), dtype=torch.float64)


def observe(intercept):
    regression(X, Y, BernoulliGate(probs=RATE * ONE), dist.Normal(0 * ONE, WIDTH * ONE), ONE, intercept)


def random_intercept():
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(ONE, SPREAD))
    observe(a[..., OF])


def hierarchy():
    mu, tau = pyro.sample("mu", dist.Normal(0 * ONE, 2.0)), pyro.sample("tau", dist.HalfNormal(ONE))
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(mu, tau))
    observe(a[..., OF])


def exact(taus=None):
    """Enumeration of the gates, and a grid of scales of the intercepts where they are unknown: probabilities, E[a]."""
    gates, members = all_gates(P), torch.nn.functional.one_hot(OF, GROUPS).double()
    log_taus = torch.log(SPREAD * ONE)[None] if taus is None else taus
    open_x = (X * gates[:, None])[:, None]
    covariance = torch.eye(N).double() + WIDTH**2 * open_x @ open_x.mT
    covariance = covariance + (2 * log_taus).exp()[:, None, None] * members @ members.mT
    log_prior = torch.zeros_like(log_taus)
    if taus is not None:
        covariance, log_prior = covariance + 4.0, dist.HalfNormal(ONE).log_prob(taus.exp()) + taus
        log_prior = log_prior + math.log(float(taus[1] - taus[0]))
    mean = torch.full_like(Y, 1.0 if taus is None else 0.0)
    log = dist.MultivariateNormal(mean, covariance).log_prob(Y) + log_prior
    log = log + (gates.sum(1) * math.log(RATE) + (1 - gates).sum(1) * math.log1p(-RATE))[:, None]
    weights = log.flatten().softmax(0).view_as(log)
    solved = torch.linalg.solve(covariance, (Y - mean)[:, None])[..., 0]
    own = (solved @ members) * (2 * log_taus).exp()[:, None]
    effect = (weights[..., None] * (own + (4 * solved.sum(-1, keepdim=True) if taus is not None else 1.0))).sum((0, 1))
    return weights.sum(1) @ gates, effect, float(log.logsumexp((0, 1)))


@pytest.mark.slow
def test_a_random_intercept():
    """Within .02 of the enumeration, and so are the check and a refined posterior; nothing is named."""
    probs, effect, evidence = exact()
    guide = AutoSpikeSlab(random_intercept, SLAB, **CORRELATED)
    result = fit(random_intercept, guide, steps=100, num_particles=64, seed=0)
    torch.testing.assert_close(guide.active_probs()["z"], probs, rtol=0, atol=0.02)
    torch.testing.assert_close(guide.summary()["a"].mean, effect, rtol=0, atol=0.03)
    assert result.evidence.importance_weighted == pytest.approx(evidence, abs=0.02)
    check = check_fit(random_intercept, guide, chains=64, flips=60, seed=0)
    assert check.ok
    # Four standard errors, which are .010.
    torch.testing.assert_close(check.active_probs["z"], probs, rtol=0, atol=4 * check.error)
    refined = guide.refine(seed=0, flips=300, chains=8)
    torch.testing.assert_close(refined.active_probs()["z"], probs, rtol=0, atol=0.02)
    torch.testing.assert_close(refined.summary()["a"].mean, effect, rtol=0, atol=0.03)
    assert sorted(to_arviz(random_intercept, guide, draws=20, seed=0)["posterior"]) == ["a", "w", "z", "z * w"]


@pytest.mark.slow
def test_a_hierarchy():
    """Of unknown mean and scale, whose joint mode is where all intercepts are equal."""
    probs, effect, evidence = exact(torch.linspace(-5.0, 2.0, 150, dtype=torch.float64))
    guide = AutoSpikeSlab(hierarchy, SLAB, **CORRELATED)
    result = fit(hierarchy, guide, steps=400, seed=0)
    torch.testing.assert_close(guide.active_probs()["z"], probs, rtol=0, atol=0.02)
    torch.testing.assert_close(guide.summary()["a"].mean, effect, rtol=0, atol=0.04)
    assert result.evidence.importance_weighted == pytest.approx(evidence, abs=0.1)
    assert not check_fit(hierarchy, guide).sites["z"].check.any()  # its intervals of mu and tau are a sixth too narrow


@pytest.mark.slow
def test_named_latents_are_drawn_before_the_gates():
    """Their check follows each chain's own draw."""
    probs, _, _ = exact()
    guide = AutoSpikeSlab(random_intercept, SLAB, hyper=("a",), **CORRELATED)
    fit(random_intercept, guide, steps=150, num_particles=64, seed=0)
    assert list(guide.joint.hyper.shapes) == ["a"]
    check = check_fit(random_intercept, guide)
    torch.testing.assert_close(check.active_probs["z"], probs, rtol=0, atol=0.05)


def test_local_latents_in_minibatches():
    """A normal for each observation, whose mean is half of what was seen; rows that a call is given, too."""
    n, y = 30, torch.linspace(-3, 3, 30)

    def model(rows):
        pyro.sample("z", BernoulliGate(probs=torch.tensor(0.3)))
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", n, subsample=rows):
            e = pyro.sample("e", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(e, 1.0), obs=y[rows])

    alone, rows, elbo = AutoSpikeSlab(model, SLAB), torch.arange(10), leave_one_out(num_particles=2)
    alone(rows)
    with pytest.raises(ValueError, match=r"plate 'data' of the guide to take the part .* Give the guide create_plates"):
        elbo.loss(model, alone, rows)
    guide = AutoSpikeSlab(model, SLAB, create_plates=lambda rows: pyro.plate("data", n, subsample=rows))
    guide(rows)
    loss = elbo(model, guide)
    train(lambda: loss(torch.randperm(n)[:10]), torch.optim.Adam(guide.parameters(), lr=0.05), 200)
    torch.testing.assert_close(guide.median(rows)["e"], y / 2, rtol=0, atol=0.5)
    for refuse in (lambda: check_fit(model, guide, rows), lambda: AutoSpikeSlab(model, SLAB, **CORRELATED)(rows)):
        with pytest.raises(ValueError, match="Expected site 'e' in plates of their full size, but 'data' is subsampl"):
            refuse()


def scales_of(count):
    return torch.ones(count, dtype=torch.float64)


KINDS = {
    "simplex": lambda: dist.Dirichlet(scales_of(3)),
    "unit interval": lambda: dist.Beta(2 * ONE, 2 * ONE),
    "interval": lambda: dist.Uniform(-ONE, 2 * ONE),
    "positive": lambda: dist.Gamma(2 * ONE, ONE),
    "heavy": lambda: dist.StudentT(3 * ONE, 0 * ONE, ONE),
    "matrix": lambda: dist.Normal(0 * ONE, ONE).expand([2, 3]).to_event(2),
    "vector": lambda: dist.MultivariateNormal(0 * scales_of(2), torch.eye(2).double()),
    "ordered": lambda: dist.TransformedDistribution(
        dist.Normal(0 * scales_of(3), 1.0).to_event(1), [dist.transforms.OrderedTransform()]
    ),
    "correlations": lambda: dist.LKJCholesky(3, ONE),
}


@pytest.mark.parametrize("options", [{}, CORRELATED], ids=["mean field", "correlated"])
@pytest.mark.parametrize("kind", KINDS)
def test_supports_and_shapes(kind, options):
    """Draws lie in the support, alone and in a plate of two; densities are those of the draws."""

    def model():
        a = pyro.sample("a", KINDS[kind]())
        with pyro.plate("two", 2):
            b = pyro.sample("b", KINDS[kind]())
        observe(0.1 * (a.sum() + b.sum()) if a.dim() < 2 else a[..., 1, 0] + b[..., 1, 0].sum())

    guide = AutoSpikeSlab(model, SLAB, **options)
    guide()
    loss = leave_one_out(num_particles=2).differentiable_loss(model, guide)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert all(torch.isfinite(x.grad).all() for x in guide.parameters() if x.grad is not None)
    draws, shape = guide.draws(5), KINDS[kind]().shape()
    assert draws["a"].shape == (5, *shape)
    assert draws["b"].shape == (5, 2, *shape)
    assert bool(KINDS[kind]().support.check(draws["b"]).all())
    assert guide.median()["b"].shape == (2, *shape)
    assert guide.summary(10)["b"].mean.shape == (2, *shape)


def test_auto_gate_takes_them_too():
    """But not in a list of guides; hyper=() leaves them to another function."""

    def model():
        with pyro.plate("units", 3):
            z = pyro.sample("z", HardConcrete.from_active_prob(0.3))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z.sum(), scale), obs=torch.tensor(1.0))

    guide = AutoGate(model)
    assert float(L0_ELBO(lam=0.1).terms(model, guide)["kl_other"]) > 0
    guides = AutoGuideList(model)
    guides.append(AutoGate(model))
    guides.append(AutoNormal(poutine.block(model, hide=["z"])))
    assert sorted(guides()) == ["scale", "z"]
    assert sorted(AutoSpikeSlab(random_intercept, SLAB, hyper=())()) == ["w", "z"]


@pytest.mark.parametrize("options", [{}, CORRELATED], ids=["mean field", "correlated"])
@pytest.mark.parametrize(
    ("latents", "error", "message"),
    [
        (
            lambda: sum(pyro.sample(f"a{i}", dist.Normal(0 * ONE, ONE)) for i in pyro.plate("parts", 2)),
            NotImplementedError,
            "does not support sequential",
        ),
        (
            lambda: 0 * pyro.sample("b", dist.Uniform(0 * ONE, pyro.sample("a", dist.Uniform(0 * ONE, ONE)))),
            ValueError,
            "latent site 'b' to have the same support in every run",
        ),
    ],
    ids=["sequential plates", "supports that move"],
)
def test_latents_that_no_guide_takes(options, latents, error, message):
    """Before anything is trained."""

    def model():
        observe(latents())

    for start in (lambda: fit(model, AutoSpikeSlab(model, SLAB, **options), steps=2, seed=0), AutoGate(model)):
        with pytest.raises(error, match=message):
            start()
