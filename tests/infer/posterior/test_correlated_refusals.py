"""What correlated guides and their fits refuse or warn of, and the dtypes and sizes that they take."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.infer import L0_ELBO, AutoSpikeSlab, check_fit, fit
from pyro_l0.infer.posterior import fit as fitting
from pyro_l0.infer.posterior.check_fit import log_ratios
from pyro_l0.infer.target import InferenceTarget
from tests.infer.regressions import correlated_guide, leave_one_out

SLAB = {"w": "z"}
X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] + torch.randn(20, generator=torch.Generator().manual_seed(1))
INSTEAD = "use gates='mean_field' and slabs='independent', without hyper"


def features(prior=None, size=2, **plate):
    with pyro.plate("features", size, **plate):
        z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.2)))
        return z, pyro.sample("w", dist.Normal(0.0, 1.0) if prior is None else prior)


def observe(mean, noise=1.0, y=Y):
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


def model(prior=None, combine=torch.mul, noise=1.0, size=2, **plate):
    observe(combine(*features(prior, size, **plate)) @ X.mT, noise)


def with_noise():
    with poutine.scale(scale=1.0):
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    model(noise=sigma)


def correlated(program=model, slab=SLAB, **options):
    return correlated_guide(program, slab, **options)


# ------------------------------------------------------------ refused when it is made or first called


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": dist.Laplace(0.0, 1.0)}, "Expected a Normal prior of slab site 'w'.*Laplace.*"),
        ({"combine": torch.add}, "Expected slabs 'w' to enter .* as products .* closing gates of 'z' makes .*"),
    ],
)
def test_models_that_suit_a_mean_field_alone(options, message):
    """Whether slabs depend on each other or on their gates alone; and again: the guide is not half set up."""
    for slabs in ("structured", "independent"):
        guide = correlated(lambda: model(**options), slabs=slabs)
        for _ in range(2):
            with pytest.raises(ValueError, match=message + INSTEAD):
                guide()


def test_subsampled_plates():
    """Of data that are drawn anew, while a part that is handed on will do."""

    def of_minibatches(**options):
        z, w = features()
        with pyro.plate("data", len(X), **options) as i:
            pyro.sample("y", dist.Normal((z * w) @ X[i].mT, 1.0), obs=Y[i])

    with pytest.raises(ValueError, match=r"plate 'features' draws a part of the data anew\. .*AutoSpikeSlab\(model"):
        correlated(lambda: model(size=4, subsample_size=2))()
    half = correlated(lambda: of_minibatches(subsample=torch.arange(10)))
    half()
    curvature = half.joint.slab_posterior.quadratic()[0].detach()
    torch.testing.assert_close(curvature, 2 * X[:10].mT @ X[:10], rtol=1e-3, atol=1e-2)  # for all 20


def test_options_that_do_not_fit():
    """Families without a chain, kinds that there are not, names that are no sites."""
    for options, message in (
        ({"family": HardConcrete}, "Expected family=BernoulliGate for gates='autoregressive', but got HardConcrete"),
        ({"gates": "chain"}, "Expected gates to be one of .*'autoregressive'.* but got 'chain'"),
        ({"slabs": "full"}, "Expected slabs to be one of .*'structured'.* but got 'full'"),
    ):
        with pytest.raises(ValueError, match=message):
            correlated(**options)
    with pytest.raises(TypeError, match="Expected hyper to be a list of sites, but got a value of type str"):
        correlated(with_noise, hyper="sigma")
    for name in ("sigm", "w", "z", "y"):
        with pytest.raises(ValueError, match=f"Expected hyper to name latent sites .* but got '{name}'"):
            correlated(with_noise, hyper=(name,))()
    with pytest.raises(ValueError, match="Expected slab to name latent sites of the model, but 'v' is none"):
        correlated(slab={"w": "v"})()


# ------------------------------------------------------------ refused later


def test_a_guide_that_was_not_called():
    """Summaries and parameters, of which there are none yet."""
    for kind in ({}, {"gates": "mean_field", "slabs": "independent"}):
        guide = correlated(**kind)
        for ask in (
            guide.parameter_groups,
            guide.active_probs,
            guide.summary,
            lambda: guide.draws(2),  # noqa: B023
            lambda: check_fit(model, guide),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="The guide has not seen the model yet; call it once"):
                ask()


@pytest.mark.parametrize("kind", [{}, {"gates": "mean_field", "slabs": "independent", "family": BernoulliGate}])
def test_a_latent_site_that_no_guide_has(kind):
    """By its name, from a fit, its evidence and its check, and without a warning of something else before."""
    guide = correlated(with_noise, hyper=(), **kind)
    guide()
    target = InferenceTarget(with_noise, slab=guide.slab)
    for ask in (
        lambda: fit(with_noise, guide, steps=5),
        lambda: log_ratios(target, guide),
        lambda: log_ratios(target, guide, False)[0](5),
    ):
        with pytest.raises(ValueError, match="Latent site 'sigma' of the model has no posterior in the guide"):
            ask()
    with pytest.raises(ValueError, match="'sigma' are none of its sites; name them in hyper"):
        check_fit(with_noise, guide)


def test_gates_whose_prior_depends_on_others():
    """Chains do not know it: the check refuses."""

    def program():
        v = pyro.sample("v", BernoulliGate(probs=torch.tensor(0.3)))
        with pyro.plate("features", 2):
            z = pyro.sample("z", BernoulliGate(probs=0.1 + 0.5 * v))
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
        observe(u * v + (z * w) @ X.mT)

    guide = correlated(program, {**SLAB, "u": "v"})
    guide()
    with pytest.raises(ValueError, match="but from one value of 'z' to another it changes by"):
        check_fit(guide.model, guide)


@pytest.mark.parametrize("see", [True, False])
def test_a_gate_without_a_slab(see):
    """One that nothing sees keeps its prior; one that the observations see is refused."""

    def program():
        v = pyro.sample("v", BernoulliGate(probs=torch.tensor(0.3)))
        z, w = features()
        observe((z * w) @ X.mT)
        if see:
            pyro.sample("t", dist.Normal(v, 1.0), obs=torch.tensor(2.0))

    guide = correlated(program, gates="mean_field", slabs="independent")
    guide()
    if see:
        with pytest.raises(ValueError, match=r"to enter the model as products .* closing gates of 'v'"):
            guide.refine(seed=0)
    else:
        # Sixteen chains with 1200 flips of three gates.
        assert float(guide.refine(seed=0).active_probs()["v"]) == pytest.approx(0.3, abs=0.03)


def test_slabs_and_units_of_a_correlated_guide():
    """There are no slabs by themselves, and units do not leave: the other parts would not know."""

    def program():
        z = pyro.sample("z", BernoulliGate(probs=torch.full((2,), 0.2)).to_event(1))
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal((z * w) @ X.mT, 1.0).to_event(1), obs=Y)

    guide = correlated(program)
    guide()
    with pytest.raises(ValueError, match="they depend on their gates; use draws"):
        guide.slabs()
    with pytest.raises(ValueError, match="outside of plates and of correlated guides, but got 'z'"):
        guide.keep({"z": torch.tensor([0])})


def test_a_model_that_cannot_be_mapped(monkeypatch):
    """It is fitted particle by particle, with a warning that says so; a loss that was told to map it refuses."""

    def branching():
        z, w = features()
        observe((z * w) @ X.mT if z[0].item() > 0 else z[1] * w[1] * X[:, 1])

    guide = correlated(branching)
    monkeypatch.setattr(fitting, "_DRAWS", 50)
    with pytest.warns(UserWarning, match="one by one|still falling") as caught:
        result = fit(branching, guide, steps=12, num_particles=4, seed=0)
    assert sum("one by one" in str(warning.message) for warning in caught) == 1
    assert len(result.losses) == 12
    elbo = leave_one_out(vectorize_particles=True)
    with pytest.raises(RuntimeError, match=r"vmap[^$]*Set vectorize_particles=False"):
        elbo.differentiable_loss(branching, guide)


def test_parameters_can_not_be_made_in_many_particles_at_once():
    """Pyro makes them at their first call."""

    def coin():
        pyro.sample("z", BernoulliGate(logits=pyro.param("logits", torch.zeros(2))).to_event(1))

    def toss():
        z = pyro.sample("z", BernoulliGate(probs=torch.full((2,), 0.5)).to_event(1))
        pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=torch.ones(()))

    elbo = L0_ELBO("free_energy", estimator="leave_one_out", num_particles=2, vectorize_particles=True)
    with pytest.raises(RuntimeError, match=r"Set vectorize_particles=False"):
        elbo.differentiable_loss(toss, coin)


# ------------------------------------------------------------ dtypes and sizes


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_data_of_another_dtype_than_the_default(default):
    """Priors of the default dtype over data of the other: a step of training, its check, and finite numbers."""
    other = torch.float64 if default is torch.float32 else torch.float32
    x, y = X.to(other), Y.to(other)
    torch.set_default_dtype(default)

    def mixed():
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        z, w = features()
        observe((z * w * x).sum(-1), sigma, y)

    guide = correlated(mixed, hyper=("sigma",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The loss was still falling")
        fit(mixed, guide, steps=3, num_particles=4)
        assert check_fit(mixed, guide, flips=9).active_probs["z"].isfinite().all()
    assert {x.dtype for x in guide.draws(2).values()} == {default}


@pytest.mark.parametrize("p", [1, 12])
def test_one_feature_and_more_features_than_observations(p):
    """With every hyperparameter unknown, in one pass of fit and check; probabilities stay apart from 0 and 1."""
    x = torch.randn(8, p, generator=torch.Generator().manual_seed(2))
    y = x[:, 0] + torch.randn(8, generator=torch.Generator().manual_seed(3))

    def program():
        sigma, tau = pyro.sample("sigma", dist.HalfCauchy(1.0)), pyro.sample("tau", dist.HalfNormal(1.0))
        rate = pyro.sample("rate", dist.Beta(1.0, 4.0))
        with pyro.plate("features", p):
            z = pyro.sample("z", BernoulliGate(probs=rate))
            w = pyro.sample("w", dist.Normal(0.0, tau))
        pyro.deterministic("beta", z * w)
        observe((z * w) @ x.mT, sigma, y)

    guide = correlated(program, hyper=("sigma", "tau", "rate"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss was still falling")
        fit(program, guide, steps=40, num_particles=16, seed=0)
    probs = guide.active_probs()["z"]
    assert probs.shape == (p,)
    assert float(probs.min()) > 0.02
    assert float(probs.max()) < 0.98
    draws = guide.draws(500)
    assert bool((draws["sigma"] > 0).all() and (draws["tau"] > 0).all())
    assert 0.05 < float(draws["rate"].mean()) < 0.6
    assert check_fit(program, guide, flips=9).active_probs["z"].isfinite().all()


@pytest.mark.parametrize("rate", [0, -0.1, float("nan"), float("inf")])
def test_fit_refuses_a_learning_rate_that_trains_nothing(rate):
    """Before the model is run."""
    with pytest.raises(ValueError, match="Expected a positive, finite learning_rate, but got"):
        fit(print, AutoSpikeSlab(print, slab={"w": "z"}), learning_rate=rate)
