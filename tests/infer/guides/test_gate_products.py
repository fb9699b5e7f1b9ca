"""Gates that switch slabs together, against enumeration, and gates that do anything else, which are refused."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0 import BernoulliGate
from pyro_l0.infer import AutoSpikeSlab, check_fit, fit
from tests.reference_posteriors import all_gates

N = 40
OTHERWISE = r" Sum the gates out by sample_posterior, or, for a fit alone, use gates='mean_field'.* without hyper\."


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data(columns):
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(N, columns, generator=draw)
    return x, 0.4 * x[:, -1] + torch.randn(N, generator=draw)


def site(gate, slab, count=(), rate=0.3):
    """Gates and, unless the name is empty, their slabs."""
    z = pyro.sample(gate, BernoulliGate(probs=torch.full(count, rate)).to_event(len(count)))
    return z, pyro.sample(slab, dist.Normal(torch.zeros(count), 1.0).to_event(len(count))) if slab else None


def observe(x, coefficients, y):
    pyro.sample("y", dist.Normal((coefficients @ x.mT).squeeze(-2), 1.0).to_event(1), obs=y)


def heredity(x, y):
    """The second effect needs the first."""
    (z, w), (v, u) = site("z", "w"), site("v", "u")
    observe(x, torch.stack([z * w, z * v * u], -1).unsqueeze(-2), y)


def heredity_of_pairs(x, y):
    """An interaction needs both main effects, and has a gate of its own."""
    (z, w), (v, u) = site("z", "w", (2,)), site("v", "u")
    last = z.prod(-1) * v * u
    observe(x, torch.cat([z * w, last.unsqueeze(-1)], -1).unsqueeze(-2), y)


def bilevel(x, y):
    """A gate for each group of two features and one for each feature."""
    (g, _), (z, w) = site("g", "", (2,), 0.5), site("z", "w", (4,))
    observe(x, (g.repeat_interleave(2, -1) * z * w).unsqueeze(-2), y)


def switched_offset(x, y):
    """A latent that is no slab has a gate, which is not its own."""
    (z, w), b = site("z", "w", (2,)), pyro.sample("b", dist.Normal(0.0, 1.0))
    observe(x, torch.cat([z * w, (z[..., :1] * b.unsqueeze(-1))], -1).unsqueeze(-2), y)


CASES = {  # with the columns that gates open, and their prior
    heredity: ({"w": "z", "u": "v"}, lambda g: torch.stack([g[:, 0], g[:, 0] * g[:, 1]], 1), (0.3, 0.3)),
    heredity_of_pairs: (
        {"w": "z", "u": "v"},
        lambda g: torch.cat([g[:, :2], g.prod(1, keepdim=True)], 1),
        (0.3, 0.3, 0.3),
    ),
    bilevel: ({"w": "z"}, lambda g: g[:, [0, 0, 1, 1]] * g[:, 2:], (0.5, 0.5, 0.3, 0.3, 0.3, 0.3)),
    switched_offset: ({"w": "z"}, lambda g: g[:, [0, 1, 0]], (0.3, 0.3)),
}


def exact(model):
    """Data, P(z = 1 | y) and log p(y)."""
    _, columns, rate = CASES[model]
    gates = all_gates(len(rate))
    on = columns(gates)
    x, y = data(on.shape[1])
    open_x = x * on[:, None]
    log = dist.MultivariateNormal(torch.zeros(N), torch.eye(N) + open_x @ open_x.mT).log_prob(y)
    log = log + dist.Bernoulli(torch.tensor(rate)).log_prob(gates).sum(1)
    return x, y, log.softmax(0) @ gates, float(log.logsumexp(0))


def together(probs, guide):
    return torch.cat([probs[name].reshape(-1) for name in guide.active_probs()])


@pytest.mark.parametrize("model", CASES, ids=lambda model: model.__name__)
def test_products_of_gates_are_exact(model):
    """With the slabs integrated out, summed over all gates and sampled, by a guide that has not been trained."""
    x, y, probs, _ = exact(model)
    guide = AutoSpikeSlab(model, CASES[model][0], slabs="structured")
    found = guide.refine(x, y, seed=0, chains=8, flips=300)
    torch.testing.assert_close(together(found.active_probs(), guide), probs, atol=0.03, rtol=0)
    gates, (quadratic, prior, *_) = all_gates(len(probs)), guide.collapsed(x, y)
    log = quadratic.log_evidence(gates) + prior.log_prob(gates)
    torch.testing.assert_close(log.softmax(0) @ gates, probs, atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES, ids=lambda model: model.__name__)
def test_a_guide_of_products_learns_the_posterior(model):
    """Structured slabs are the exact posterior given the gates: the bound is the evidence."""
    x, y, probs, evidence = exact(model)
    guide = AutoSpikeSlab(model, CASES[model][0], gates="autoregressive", slabs="structured")
    result = fit(model, guide, x, y, seed=0, steps=400)
    torch.testing.assert_close(together(guide.active_probs(), guide), probs, atol=0.03, rtol=0)
    assert result.evidence.elbo == pytest.approx(evidence, abs=0.05)
    assert check_fit(model, guide, x, y, seed=0).ok


def other(kind):
    """A model in which gates do more than to switch slabs."""

    def model(x, y):
        z, w = site("z", "w", (2,))
        scale = 0.5 + z[..., 1] if kind == "slab" else torch.ones_like(z[..., 0])
        v = site("v", "")[0] if kind == "or" else 0.0
        a = pyro.sample("a", dist.Normal(0.0, scale)) if kind in ("slab", "tilt") else 0.0
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0 + z[..., 0])) if kind == "hyper" else 1.0
        mean = ((z * w).unsqueeze(-2) @ x.mT).squeeze(-2)
        count = z.sum(-1, keepdim=True)
        if kind == "logits":
            return pyro.sample("y", dist.Bernoulli(logits=mean + 0.5 * count).to_event(1), obs=(y > 0).double())
        mean = mean + {"intercept": 0.3 * count, "or": (v + (1 - v) * z[..., :1]), "tilt": a * (1 - z[..., :1])}.get(
            kind, torch.as_tensor(a).unsqueeze(-1)
        )
        noise = 0.8 + 0.3 * count if kind == "noise" else torch.as_tensor(sigma).unsqueeze(-1)
        pyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y)

    return model


@pytest.mark.parametrize("kind", ["intercept", "noise", "logits", "or", "tilt", "slab", "hyper"])
@pytest.mark.parametrize("options", [{"slabs": "structured"}, {"gates": "autoregressive"}, {}], ids=len)
def test_gates_that_do_more_are_refused_before_any_training(kind, options):
    """By a fit of a correlated guide, and by what relies on an expansion for a mean field."""
    x, y = data(2)
    model = other(kind)
    guide = AutoSpikeSlab(model, {"w": "z"}, **options)
    message = {
        "slab": "priors of slabs and other latents that do not depend on gates, but that of 'a' changes",
        "hyper": "priors of slabs and other latents that do not depend on gates, but that of 'sigma' changes",
    }.get(kind, "products with their gates, and gates in no other way, but closing gates of 'z'.* makes")
    with pytest.raises(ValueError, match=f"{message}.*{OTHERWISE}"):
        fit(model, guide, x, y, steps=1) if options else guide.refine(x, y)


def test_a_prior_that_all_open_and_all_closed_gates_leave():
    """Of a gate that depends on others that differ."""

    def model(x, y):
        z, w = site("z", "w", (2,))
        v = pyro.sample("v", BernoulliGate(probs=0.2 + 0.5 * z[..., 0] * (1 - z[..., 1])))
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
        observe(x, torch.cat([z * w, (v * u).unsqueeze(-1)], -1).unsqueeze(-2), y)

    with pytest.raises(ValueError, match="but from one value of 'z' to another it changes by"):
        AutoSpikeSlab(model, {"w": "z", "u": "v"}).refine(*data(3))


def test_gates_that_switch_other_slabs_than_before_are_refused():
    """A guide knows the products of its first call; other data with the same products are right."""

    def model(x, y, needs_main=True):
        (z, w), (v, u) = site("z", "w"), site("v", "u")
        on = z * v if needs_main else v
        observe(x, torch.stack([z * w, on * u], -1).unsqueeze(-2), y)

    x, y = data(2)
    guide = AutoSpikeSlab(model, slab={"w": "z", "u": "v"}, slabs="structured")
    guide.refine(x, y, seed=0)
    for of_guide in (guide.refine, guide.collapsed):
        with pytest.raises(ValueError, match="switch others; make a new guide"):
            of_guide(x, y, False)
    other = y.flip(0)
    again = guide.refine(x, other, flips=100, seed=0).active_probs()
    new = AutoSpikeSlab(model, slab={"w": "z", "u": "v"}, slabs="structured")
    found = new.refine(x, other, flips=100, seed=0).active_probs()
    for name, probs in found.items():
        assert torch.allclose(again[name], probs, atol=0.02)
