"""Every method's target is the log joint of the model's own trace: scales, masks, rates, rows, observed gates."""

import math
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.diagnostics import to_arviz
from pyro_l0.infer import L0_ELBO, AutoSpikeSlab, check_fit, fit, sample_posterior, target
from pyro_l0.infer.posterior import log_joint
from pyro_l0.infer.posterior.log_joint import LogJoint
from pyro_l0.infer.target import InferenceTarget
from tests.bench.posteriors.fuzz_models import Case, tried
from tests.infer.regressions import correlated_guide, features
from tests.reference_posteriors import all_gates

pytestmark = pytest.mark.filterwarnings("ignore:The loss was still falling", "ignore:These draws are not")
SLAB = {"w": "z"}
X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([0.5, 0.0, 0.35]) + torch.randn(30, generator=torch.Generator().manual_seed(1))


def observe(mean, noise=1.0):
    with pyro.plate("data", len(Y)):
        pyro.sample("y", dist.Normal(mean, noise), obs=Y)


def evidence(gates, width=1.0, x=X, y=Y, noise=1.0):
    """log p(y | z) of each vector of gates, in float64."""
    x, y = x.double(), y.double()
    open_x = x * gates[:, None]
    covariance = noise**2 * torch.eye(len(y)).double() + width**2 * open_x @ open_x.mT
    return dist.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)


def probabilities(log_gates, **options):
    """P(z = 1 | y) of three gates with some log prior."""
    gates = all_gates(3)
    return (evidence(gates, **options) + log_gates(gates)).softmax(0) @ gates


def refined(model, slab=SLAB, **options):
    found = AutoSpikeSlab(model, slab, slabs="structured").refine(seed=0, chains=8, flips=400, **options)
    return found, torch.cat([x.reshape(-1) for x in found.active_probs().values()]).double()


def close(found, right, atol=0.03):
    """Within five standard errors of some thousand draws that are not independent."""
    torch.testing.assert_close(found.double(), right, atol=atol, rtol=0)


@pytest.mark.parametrize("seed", range(30))
def test_random_models(seed):
    """Against sums over all gates, or refused in words; by turns a fit, a mean field and chains, which take longer."""
    case, methods = Case(seed), ["collapsed", "log joint"]
    methods += {3: ["refine"], 12: ["fit"], 17: ["mean field"], 21: ["refine"], 24: ["fit"]}.get(seed, [])
    for method in methods:
        outcome, details = tried(case, method)
        assert outcome != "WRONG", (method, case.kind, case.features, details)


# ------------------------------------------------------------ the comparison itself


def plain(scale=1.0, noise_of_no_site=None, prior=None):
    with pyro.plate("features", 3):
        with poutine.scale(scale=scale):
            z = pyro.sample("z", BernoulliGate(probs=0.3))
        w = pyro.sample("w", dist.Normal(0.0, 1.0) if prior is None else prior)
    observe((z * w) @ X.mT + (0.0 if noise_of_no_site is None else noise_of_no_site * torch.randn(30)))


def beta(children=False):
    rate = pyro.sample("rate", dist.Beta(1.0, 3.0))
    if children:
        with pyro.plate("children", 4):
            pyro.sample("s", dist.Bernoulli(rate), obs=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    z, w = features(3, rate)
    observe((z * w) @ X.mT)


def as_prior(rate):
    """A rate that counts by its prior alone."""
    return rate and rate._replace(open=torch.tensor(1.0).double(), closed=torch.tensor(3.0).double())


def test_a_run_is_drawn_when_it_is_read():
    """Once, so that seeds mean what they did before; and again in a copy."""
    before = torch.get_rng_state()
    found = InferenceTarget(plain, slab={"w": "z"})
    assert torch.equal(before, torch.get_rng_state())
    first, after = found.latent, torch.get_rng_state()
    assert not torch.equal(before, after)
    assert torch.equal(first["w"], found.sites["w"]["value"])
    assert torch.equal(after, torch.get_rng_state())
    assert not torch.equal(first["w"], replace(found).latent["w"])


def test_a_target_without_a_scale_is_found(monkeypatch):
    """As where the library forgets one: the site and both changes are named."""
    monkeypatch.setattr(target, "without_scales", lambda sites, slab: dict(sites))
    with pytest.raises(ValueError, match=r"that AutoSpikeSlab .* from one value of 'z' to another it"):
        refined(lambda: plain(5.0))
    refined(plain)


def test_a_target_with_another_rate_is_found(monkeypatch):
    """A rate that is taken for conjugate by its prior."""
    rate = InferenceTarget.conjugate_rate
    monkeypatch.setattr(InferenceTarget, "conjugate_rate", lambda *args: as_prior(rate(*args)))
    with pytest.raises(ValueError, match=r"from one value of 'rate' to another it changes by .* Make a new guide"):
        refined(lambda: beta(children=True))
    refined(beta)


def test_another_density_of_a_sampler_is_found(monkeypatch):
    monkeypatch.setattr(log_joint, "log_prob", lambda site: site["fn"].log_prob(site["value"]))
    with pytest.raises(ValueError, match=r"the log density that sample_posterior uses .* from one value of 'z' to"):
        LogJoint(InferenceTarget(lambda: plain(5.0)))
    LogJoint(InferenceTarget(plain))


def test_a_model_that_differs_under_vmap_is_found():
    """Before a step of training; the model as it should be is taken."""

    def model(differs=True):
        z, w = features(3, 0.3)
        several = torch._C._functorch.is_batchedtensor(w)
        observe((z * w) @ X.mT + (0.3 * w[0] if several and differs else 0.0))

    guide = AutoSpikeSlab(model, SLAB)
    with pytest.raises(ValueError, match=r"the log density that fit uses .* 'w'.* Let no code of the model"):
        fit(model, guide, steps=1)
    fit(lambda: model(False), AutoSpikeSlab(lambda: model(False), SLAB), steps=1, num_particles=2)


@pytest.mark.parametrize("method", ["refine", "collapsed", "check_fit", "fit", "sample_posterior"])
def test_what_is_drawn_and_is_no_site(method):
    """By every method, which names the site that it moves; drawn as a site it is a latent."""

    def model():
        return plain(noise_of_no_site=1.0)

    guide = AutoSpikeSlab(model, SLAB)
    guide()
    methods = {
        "refine": guide.refine,
        "collapsed": guide.collapsed,
        "check_fit": lambda: check_fit(model, guide),
        "fit": lambda: fit(model, guide, steps=1),
        "sample_posterior": lambda: sample_posterior(model),
    }
    message = r"the same in every run .* that of 'y' is not: something is drawn that is no site\. Draw it by pyro"
    with pytest.raises(ValueError, match=message):
        methods[method]()


# ------------------------------------------------------------ scales and masks


def per_gate():
    with poutine.scale(scale=torch.tensor(2.0)):
        z = pyro.sample("z", BernoulliGate(probs=torch.tensor([0.2, 0.4, 0.3])).to_event(1))
    with poutine.scale(scale=0.25):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(X @ (z * w), 1.0).to_event(1), obs=Y)


def masked():
    """Gates of which a distribution's own mask leaves two without a prior."""
    with pyro.plate("features", 3):
        z = pyro.sample("z", BernoulliGate(probs=0.2).expand([3]).mask(torch.tensor([True, False, False])))
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    observe((z * w) @ X.mT)


def masked_nowhere():
    """A handler that leaves all gates as they are."""
    with pyro.plate("features", 3), poutine.mask(mask=torch.ones(3, dtype=torch.bool)):
        z = pyro.sample("z", BernoulliGate(probs=0.3))
    with pyro.plate("slabs", 3), poutine.scale(scale=torch.ones(())):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    observe((z * w) @ X.mT)


def scaled_under_a_rate():
    """A latent rate, gates that count three times, one of them masked."""
    rate = pyro.sample("rate", dist.Beta(2.0, 2.0))
    with pyro.plate("features", 3):
        with poutine.scale(scale=3.0), poutine.mask(mask=torch.tensor([True, True, False])):
            z = pyro.sample("z", BernoulliGate(probs=rate))
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    observe((z * w) @ X.mT)


def log_odds(probs, weights=1.0):
    return lambda gates: (gates * torch.logit(torch.tensor(probs).double()) * torch.tensor(weights)).sum(1)


def of_rate(gates):
    count = 3 * gates[:, :2].sum(1)
    return torch.lgamma(2 + count) + torch.lgamma(8 - count)


SCALED = {
    per_gate: (log_odds([0.2, 0.4, 0.3], 2.0), {"width": 2.0}),
    masked: (log_odds([0.2, 0.5, 0.5]), {}),
    masked_nowhere: (log_odds([0.3] * 3), {}),
    scaled_under_a_rate: (of_rate, {}),
}


@pytest.mark.parametrize("model", SCALED, ids=lambda model: model.__name__)
def test_scales_and_masks(model):
    """N(0, 1)^(1/4) is N(0, 2^2), p(z)^2 has twice the log odds, and what is masked has log odds 0."""
    log_gates, options = SCALED[model]
    right = probabilities(log_gates, **options)
    close(refined(model)[1], right)
    guide = correlated_guide(model)
    fit(model, guide, steps=120, num_particles=64, seed=0)
    close(guide.active_probs()["z"], right, 0.04)
    close(check_fit(model, guide, seed=0).active_probs["z"], right, 0.04)


def test_the_evidence_of_a_scaled_model_with_unknown_noise():
    """p(y, z, w, sigma)^(1/2), by a sum over gates and a quadrature in log sigma."""

    def whole():
        with poutine.scale(scale=0.5):
            sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
            z, w = features(3, 0.3)
            observe((z * w) @ X.mT, sigma)

    gates, sigmas = all_gates(3), torch.linspace(-1.5, 1.5, 121).double().exp()
    rows = []
    for sigma in sigmas:
        # N(m, s)^(1/2) is N(m, s sqrt 2) times (8 pi s^2)^(1/4).
        log = evidence(gates, math.sqrt(2.0), noise=float(sigma) * math.sqrt(2))
        log = log + 0.25 * (3 * math.log(8 * math.pi) + len(Y) * (8 * math.pi * sigma**2).log())
        log = log + 0.5 * (gates * math.log(0.3) + (1 - gates) * math.log(0.7)).sum(1)
        prior = 0.5 * dist.HalfNormal(torch.tensor(1.0).double()).log_prob(sigma)
        rows.append(log.logsumexp(0) + prior + sigma.log() + math.log(3 / 120))
    right = float(torch.stack(rows).logsumexp(0))
    guide = correlated_guide(whole)
    assert fit(whole, guide, steps=200, num_particles=64, seed=0).evidence[2] == pytest.approx(right, abs=0.05)


@pytest.mark.parametrize("estimator", ["leave_one_out", "score_function", "vectorized"])
def test_the_loss_at_the_posterior_of_a_scaled_prior(estimator):
    """It is minus the log of the prior's total mass, whatever is drawn: where gates are closed, too."""

    def prior():
        with poutine.scale(scale=3.0), pyro.plate("features", 2):
            pyro.sample("z", BernoulliGate(probs=torch.tensor([0.2, 0.6])))
        with poutine.scale(scale=torch.tensor(0.5)):
            pyro.sample("w", dist.Normal(torch.zeros(2), 1.5).to_event(1))

    p = torch.tensor([0.2, 0.6])
    mass = (p**3 + (1 - p) ** 3).log().sum() + 2 * (
        0.5 * math.log(2 * math.pi * 4.5) - 0.25 * math.log(2 * math.pi * 2.25)
    )
    start = {"w": torch.zeros(2)}
    guide = AutoSpikeSlab(prior, {"w": "z"}, init_scale=1.5 * math.sqrt(2), init_loc=start, family=BernoulliGate)
    guide()
    guide.sites["z"]["logits"].data = 3 * torch.logit(p)
    options = {"estimator": "leave_one_out" if estimator == "vectorized" else estimator}
    elbo = L0_ELBO("spike_slab", slab=SLAB, num_particles=4, vectorize_particles=estimator == "vectorized", **options)
    for loss in (elbo.differentiable_loss(prior, guide).item(), elbo.loss(prior, guide)):
        assert loss == pytest.approx(-float(mass), abs=1e-4)


def laplace_slab():
    with poutine.scale(scale=2.0):
        plain(prior=dist.Laplace(0.0, 1.0))


def masked_slab():
    with pyro.plate("features", 3):
        z = pyro.sample("z", BernoulliGate(probs=0.3))
        with poutine.mask(mask=torch.tensor([True, False, True])):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
    observe((z * w) @ X.mT)


def hard_gate():
    with poutine.scale(scale=2.0):
        z = pyro.sample("z", HardConcrete(torch.zeros(3)).to_event(1))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(X @ (z * w), 1.0).to_event(1), obs=Y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (laplace_slab, "slab site 'w' under a scale or a mask to have a Normal prior .* Laplace.* times 2"),
        (masked_slab, r"slab site 'w' under .* a Normal prior that is proper, .* times \[1.0, 0.0, 1.0\]"),
        (hard_gate, "gate site 'z' under a scale or a mask to have a BernoulliGate prior"),
    ],
)
def test_scales_that_have_no_posterior(model, message):
    """Refused by a fit before any step; and by a sampler, if it can't take them either."""
    guide = AutoSpikeSlab(model, SLAB)
    with pytest.raises(ValueError, match=message):
        fit(model, guide, steps=1)
    if model is not laplace_slab:
        with pytest.raises(ValueError, match=r"a mask makes it flat|gate site 'z' without a scale or a mask"):
            sample_posterior(model, slab=SLAB)


# ------------------------------------------------------------ rates with other children


def test_a_rate_with_counts_and_gates_of_two_sites():
    """Three of ten by a binomial variable, and gates of two sites of which one counts half."""

    def model():
        rate = pyro.sample("rate", dist.Beta(1.0, 3.0))
        pyro.sample("count", dist.Binomial(10, rate), obs=torch.tensor(7.0))
        z = pyro.sample("z", BernoulliGate(probs=rate.expand(2)).to_event(1))
        with poutine.scale(scale=0.5):
            v = pyro.sample("v", BernoulliGate(probs=rate))
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(X @ torch.cat([z * w, (v * u)[None]]), 1.0).to_event(1), obs=Y)

    def log_gates(gates):
        count = gates[:, :2].sum(1) + 0.5 * gates[:, 2]
        return torch.lgamma(8 + count) + torch.lgamma(6 + 2.5 - count)

    found, probs = refined(model, {"w": "z", "u": "v"})
    right = probabilities(log_gates)
    close(probs, right)
    draws = found.draws(4000)
    count = draws["z"].sum(1) + 0.5 * draws["v"]
    assert float((draws["rate"] - (8 + count) / 16.5).mean()) == pytest.approx(0, abs=0.01)  # 5 sd / sqrt(4000)


def test_a_rate_that_the_likelihood_uses():
    """It is no conjugate one: held at one value, given which the gates are right, and learned by a fit."""

    def model():
        rate = pyro.sample("rate", dist.Beta(2.0, 2.0))
        z, w = features(3, rate)
        observe((z * w) @ X.mT + 3 * rate.unsqueeze(-1))

    found, probs = refined(model)
    rate = found.draws(2)["rate"]
    assert rate[0] == rate[1]
    close(probs, probabilities(log_odds([float(rate[0])] * 3), y=Y - 3 * rate[0]))
    rates, gates = (torch.arange(400).double() + 0.5) / 400, all_gates(3)
    log = torch.stack(
        [evidence(gates, y=Y - 3 * r) + (gates * r.log() + (1 - gates) * (1 - r).log()).sum(1) for r in rates]
    )
    log = log + dist.Beta(2.0, 2.0).log_prob(rates.float()).double()[:, None]
    guide = correlated_guide(model)
    fit(model, guide, steps=200, num_particles=64, seed=0)
    close(guide.active_probs()["z"], log.flatten().softmax(0).reshape(log.shape).sum(0) @ gates, 0.04)


def test_the_prior_of_another_latent_that_uses_the_rate():
    """A scale that is the rate: as before."""

    def model():
        rate = pyro.sample("rate", dist.Beta(2.0, 2.0))
        b = pyro.sample("b", dist.Normal(0.0, rate))
        z, w = features(3, rate)
        observe((z * w) @ X.mT + b.unsqueeze(-1))

    found, probs = refined(model)
    draws = found.draws(2)
    assert draws["rate"][0] == draws["rate"][1]
    x = torch.cat([X, torch.ones(30, 1)], 1)
    gates = torch.cat([all_gates(3), float(draws["rate"][0]) * torch.ones(8, 1).double()], 1)
    log = evidence(gates, x=x) + log_odds([float(draws["rate"][0])] * 3)(gates[:, :3])
    close(probs, log.softmax(0) @ gates[:, :3])


# ------------------------------------------------------------ a part of the rows


def minibatches(noise=1.0, rows=8, slope=1.0):
    def model():
        z, w = features(3, 0.3)
        with pyro.plate("data", 30, subsample_size=rows) as index:
            pyro.sample("y", dist.Normal(slope * (z * w) @ X[index].mT, noise), obs=Y[index])

    return model


@pytest.mark.parametrize(("noise", "rows", "slope"), [(1.0, 8, 1.0), (0.4, 4, 1.0), (2.0, 20, 0.5)])
def test_the_evidence_of_drawn_rows_is_a_bound(noise, rows, slope):
    """log p(y) of all rows, to five standard errors; where the log of a mean ratio was tens of nats above."""
    found = fit(
        minibatches(noise, rows, slope), AutoSpikeSlab(minibatches(noise, rows, slope), SLAB), steps=100, seed=0
    )
    gates = all_gates(3)
    log = evidence(gates, slope, noise=noise) + (gates * math.log(0.3) + (1 - gates) * math.log(0.7)).sum(1)
    bound = found.evidence
    assert found.log_evidence == found.elbo == bound.elbo <= float(log.logsumexp(0)) + 5 * bound.standard_error
    assert not found.ok
    assert math.isnan(found.error)
    assert "plates draw rows of the data" in found.problems[0]


def inside(dims, size=None):
    """Gates for each row of a plate that may be subsampled, with slabs of some shape."""

    def model():
        with pyro.plate("data", 12, subsample_size=size) as rows:
            z = pyro.sample("z", BernoulliGate(probs=0.4))
            w = pyro.sample("w", dist.Normal(torch.zeros(dims), 1.0).to_event(len(dims)))
            z, y = (x.reshape(x.shape + (1,) * len(dims)) for x in (z, Y[:12][rows]))
            pyro.sample("y", dist.Normal(z * w, 1.0).to_event(len(dims)), obs=y.expand(w.shape))

    return model


@pytest.mark.parametrize("dims", [(), (2,), (2, 3)])
def test_gates_inside_a_plate_of_drawn_rows(dims):
    """Summaries are of all rows; with all the data arviz has them too."""
    guide = AutoSpikeSlab(inside(dims, 5), SLAB)
    fit(inside(dims, 5), guide, steps=3, num_particles=4, seed=0)
    assert guide.coefficients(7)["w"].shape == (7, 12, *dims)
    assert guide.quantiles([0.1, 0.9], 50)["w"].shape == (2, 12, *dims)
    summary = guide.summary(50)["w"]
    assert summary.shape == summary.active_probs.shape == (12, *dims)
    first = summary.active_probs.reshape(12, -1)
    assert torch.equal(first, guide.active_probs()["z"][:, None].expand_as(first))
    assert to_arviz(inside(dims), guide, draws=6, seed=0)["posterior"]["z * w"].shape == (1, 6, 12, *dims)
    for ask in (guide.refine, guide.collapsed, lambda: check_fit(guide.model, guide)):
        with pytest.raises(ValueError, match=r"plate 'data' draws a part of the data anew\. Leave subsample_size out"):
            ask()
    assert AutoSpikeSlab(inside(dims), SLAB).refine(flips=20, seed=0).active_probs()["z"].shape == (12,)


# ------------------------------------------------------------ observed gates


def sites():
    z = [pyro.sample(f"z{i}", BernoulliGate(probs=torch.tensor(0.3))) for i in range(3)]
    w = [pyro.sample(f"w{i}", dist.Normal(torch.tensor(0.0), 1.0)) for i in range(3)]
    observe(sum((z[i] * w[i]).unsqueeze(-1) * X[:, i] for i in range(3)))


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("named", [True, False])
def test_an_observed_gate(value, named):
    """Whether or not slab names it; its coefficient is in summaries if it does."""
    model = poutine.condition(sites, {"z1": torch.tensor(value)})
    slab = {f"w{i}": f"z{i}" for i in ((0, 1, 2) if named else (0, 2))}
    gates = all_gates(3)
    gates = gates[gates[:, 1] == value]
    right = ((evidence(gates) + log_odds([0.3] * 3)(gates)).softmax(0) @ gates)[[0, 2]]
    found, probs = refined(model, slab)
    close(probs, right)
    guide = correlated_guide(model, slab)
    fit(model, guide, steps=100, num_particles=64, seed=0)
    close(torch.stack(list(guide.active_probs().values())), right, 0.04)
    assert check_fit(model, guide, seed=0).active_probs.keys() == {"z0", "z2"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = sample_posterior(model, slab=slab, num_samples=20, warmup_steps=10, num_chains=2, seed=0)
    mean_field = AutoSpikeSlab(model, slab)
    fit(model, mean_field, steps=3, num_particles=4, seed=0)
    for posterior in (found, guide, mean_field, samples) if named else ():
        summary = posterior.summary(50)
        of_one = summary["z1 * w1" if posterior is samples else "w1"]
        assert of_one.active_probs == value
        assert (of_one.sd == 0) == (value == 0)


def test_gates_of_a_plate_that_are_observed():
    """All gates of one site, beside those of another."""

    def model():
        z, w = features(2, 0.3)
        v, u = pyro.sample("v", BernoulliGate(probs=torch.tensor(0.3))), pyro.sample("u", dist.Normal(0.0, 1.0))
        observe((z * w) @ X[:, :2].mT + (v * u).unsqueeze(-1) * X[:, 2])

    conditioned = poutine.condition(model, {"z": torch.tensor([1.0, 0.0])})
    found, probs = refined(conditioned, {"w": "z", "u": "v"})
    gates = torch.tensor([[1.0, 0, 0], [1, 0, 1]]).double()
    close(probs, ((evidence(gates) + log_odds([0.3] * 3)(gates)).softmax(0) @ gates)[2:])
    assert found.summary(20)["w"].active_probs.tolist() == [1.0, 0.0]


# ------------------------------------------------------------ slabs with a mean, and others than normal


@pytest.mark.parametrize("mean", [0.7, -2.0])
def test_slabs_with_a_prior_mean(mean):
    """w ~ N(m, 1): the features of open gates also move the mean of y."""
    model = lambda: plain(prior=dist.Normal(mean, 1.0))  # noqa: E731
    gates = all_gates(3)
    log = torch.stack([evidence(g[None], y=Y - mean * (X @ g.float()))[0] for g in gates]) + log_odds([0.3] * 3)(gates)
    right = log.softmax(0) @ gates
    found, probs = refined(model)
    close(probs, right)
    draws = found.draws(4000)
    closed = draws["w"][draws["z"] == 0]
    assert float(closed.mean()) == pytest.approx(mean, abs=5 / math.sqrt(len(closed)))
    guide = AutoSpikeSlab(model, SLAB)
    fit(model, guide, steps=60, num_particles=32, seed=0)
    close(check_fit(model, guide, seed=0).active_probs["z"], right, 0.05)


def test_centred_varying_slopes():
    """Slopes around a latent mean: by the chains of a check, against a sum over gates with the mean integrated out."""

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        z, w = features(3, 0.5, dist.Normal(mu, 0.5))
        observe((z * w) @ X.mT)

    gates, x, y = all_gates(3), X.double(), Y.double()
    open_x = x * gates[:, None]
    along = open_x.sum(2, keepdim=True)
    covariance = torch.eye(30).double() + 0.25 * open_x @ open_x.mT + along @ along.mT
    right = dist.MultivariateNormal(torch.zeros(30).double(), covariance).log_prob(y).softmax(0) @ gates
    guide = correlated_guide(model)
    fit(model, guide, steps=200, num_particles=64, seed=0)
    close(guide.active_probs()["z"], right, 0.04)
    close(check_fit(model, guide, seed=0).active_probs["z"], right, 0.04)


@pytest.mark.slow
@pytest.mark.parametrize("prior", [dist.LogNormal(-0.5, 0.5), dist.HalfNormal(1.0), dist.Laplace(0.0, 0.5)], ids=repr)
def test_slabs_that_are_not_normal(prior):
    """Refused by what integrates them out; the sampler that is named is right, by quadrature of two features."""

    def model():
        z, w = features(2, 0.5, prior)
        observe((z * w) @ X[:, ::2].mT)

    guide = AutoSpikeSlab(model, SLAB)
    guide()
    for ask in (guide.refine, guide.collapsed, lambda: check_fit(model, guide)):
        with pytest.raises(ValueError, match=r"Expected a Normal prior of slab site 'w'.*; use sample_posterior, or"):
            ask()
    grid = torch.linspace(0.005, 3, 300)
    grid = torch.cat([-grid, grid]) if isinstance(prior, dist.Laplace) else grid
    weight, grid = prior.log_prob(grid).double().log_softmax(0), grid.double()

    def integrated(*columns):
        """log p(y) with slabs on some columns."""
        mean, log = torch.zeros(30).double(), torch.zeros(())
        for column in columns:
            mean, log = mean.unsqueeze(-2) + grid[:, None] * X[:, column].double(), log.unsqueeze(-1) + weight
        return (dist.Normal(mean, 1.0).log_prob(Y.double()).sum(-1) + log).flatten().logsumexp(0)

    of_gates = torch.stack([integrated(), integrated(0), integrated(2), integrated(0, 2)]).softmax(0)
    right = torch.stack([of_gates[1] + of_gates[3], of_gates[2] + of_gates[3]])
    found = sample_posterior(model, slab=SLAB, num_samples=150, warmup_steps=100, num_chains=2, seed=0)
    close(found.active_probs()["z"], right, 0.08)  # five standard errors of 300 draws of which a third count
