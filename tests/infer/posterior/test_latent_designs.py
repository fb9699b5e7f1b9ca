"""Latents that multiply coefficients, as factors do loadings: fitted, checked and refused, against integrals."""

import math
import warnings
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0.infer import AutoSpikeSlab, check_fit, fit
from pyro_l0.infer.guides.correlated import Structure, correlated_posterior
from pyro_l0.infer.target import InferenceTarget
from tests.infer.regressions import features
from tests.reference_posteriors import all_gates

RATE, NOISE, N = 0.3, 0.6, 25
SLAB, CORRELATED = {"w": "z"}, {"gates": "autoregressive", "slabs": "structured"}
GRID = torch.linspace(-4, 4, 81, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loadings(size):
    z, w = features(size, RATE, dim=-1)
    return z * w


def factors():
    with pyro.plate("rows", N, dim=-2):
        return pyro.sample("x", dist.Normal(0.0, 1.0))


def observe(mean, y):
    with pyro.plate("observations", len(y), dim=-2), pyro.plate("observed", y.shape[1], dim=-1):
        pyro.sample("y", dist.Normal(mean, NOISE), obs=y)


FACTORS = normal(N, 1) * torch.tensor([1.2, -1.0, 0.0]) + NOISE * normal(N, 3, seed=1)
ANCHORED = normal(N, 1) * torch.tensor([1.0, 0.8, 0.0]) + NOISE * normal(N, 3, seed=2)


def factor_analysis():
    observe(factors() * loadings(3), FACTORS)


def anchored():
    """The first column has a loading of 1, so that x has a slope where all gates are closed."""
    x, b = factors(), loadings(2)
    observe(x * torch.cat([torch.ones_like(b[..., :1]), b], -1), ANCHORED)


def integrated_out():
    b = loadings(3)
    covariance = NOISE**2 * torch.eye(3) + b.unsqueeze(-1) * b.unsqueeze(-2)
    with pyro.plate("rows", N):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(3), covariance), obs=FACTORS)


DESIGN = normal(30, 3, seed=3)
TIMES = DESIGN @ torch.tensor([0.8, 0.0, 0.3]) + 0.5 * normal(30, seed=4)


def amplified():
    """A regression whose coefficients are multiplied by groups' latents."""
    with pyro.plate("groups", 2):
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
    b = loadings(3)
    with pyro.plate("data", 30):
        mean = u[..., torch.arange(30) % 2] * (b @ DESIGN.mT)
        pyro.sample("y", dist.Normal(mean, NOISE), obs=TIMES)


def exact_by_loadings(y, given):
    """P(z = 1) by a grid of the loadings of each gate vector, x integrated out, beside loadings without a gate."""
    y, logs, gates = y.double(), [], all_gates(y.shape[1] - len(given))
    for z in gates:
        axes = [GRID if k else GRID[40:41] for k in z]
        b = torch.cartesian_prod(*axes).reshape(-1, len(z))
        full = torch.cat([torch.tensor(given).double().expand(len(b), -1), b], 1)
        size = full.square().sum(1)
        explained = ((full @ (y.mT @ y)) * full).sum(1) / (NOISE**2 + size)
        log = -N / 2 * torch.log1p(size / NOISE**2) + explained / 2 / NOISE**2
        log = log - (b.square() / 2).sum(1) + z.sum() * math.log(0.1 / math.sqrt(2 * math.pi))
        logs.append(torch.logsumexp(log, 0) + dist.Bernoulli(torch.full_like(z, RATE)).log_prob(z).sum())
    return torch.stack(logs).softmax(0) @ gates


def exact_amplified():
    """P(z = 1) by a grid of both latents, the coefficients integrated out."""
    gates, at = all_gates(3), torch.cartesian_prod(GRID[::4], GRID[::4])
    x = at[:, torch.arange(30) % 2, None] * DESIGN.double()
    logs = []
    for z in gates:
        open_x = x * z
        covariance = NOISE**2 * torch.eye(30).double() + open_x @ open_x.mT
        log = dist.MultivariateNormal(torch.zeros(30).double(), covariance).log_prob(TIMES.double())
        logs.append((log - at.square().sum(1) / 2).logsumexp(0))
    log = torch.stack(logs) + dist.Bernoulli(torch.full_like(gates, RATE)).log_prob(gates).sum(1)
    return log.softmax(0) @ gates


CASES = {
    "factors": (factor_analysis, lambda: exact_by_loadings(FACTORS, [])),
    "integrated out": (integrated_out, lambda: exact_by_loadings(FACTORS, [])),
    "anchored": (anchored, lambda: exact_by_loadings(ANCHORED, [1.0])),
    "amplified": (amplified, exact_amplified),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [CORRELATED, {}], ids=["correlated", "mean field"])
@pytest.mark.parametrize("case", CASES)
def test_a_fit_is_right_or_says_that_it_is_not(case, options):
    """Within .06, what the check lets pass; nothing is named. Otherwise there is a warning."""
    model, exact = CASES[case]
    guide = AutoSpikeSlab(model, SLAB, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(model, guide, seed=0)
    off = float((guide.active_probs()["z"].flatten() - exact()).abs().max())
    assert off < 0.06 or (caught and not result.ok)
    if options and case != "amplified":
        assert off < 0.06
    check = check_fit(model, guide, seed=1)
    repaired = float((check.active_probs["z"].flatten() - exact()).abs().max())
    assert repaired < 0.06 or not check.ok


def test_factors_that_are_integrated_out():
    """Between two modes of opposite signs the likelihood has no slope; neither expansion nor Laplace stays there."""
    found = AutoSpikeSlab(integrated_out, SLAB, slabs="structured").refine(seed=0, flips=300)
    torch.testing.assert_close(found.active_probs()["z"].double(), exact_by_loadings(FACTORS, []), rtol=0, atol=0.03)


@pytest.mark.parametrize("model", [factor_analysis, anchored, amplified])
def test_refine_refuses_to_hold_them(model):
    """By name, also where hyper names them; what it advises is right."""
    for options in (
        {},
        {"slabs": "structured"},
        {"slabs": "structured", "hyper": ["u" if model is amplified else "x"]},
    ):
        with pytest.raises(ValueError, match=r"refine holds others fixed, but got site '[xu]' .* Use fit with gates="):
            AutoSpikeSlab(model, SLAB, **options).refine(seed=0)


# ------------------------------------------------------------ which latents are added


OF, LABELS = torch.arange(30) % 3, torch.ones(30)
SUMS = {
    "counts": lambda m: dist.Poisson(m.exp()),
    "labels": lambda m: dist.Bernoulli(logits=m),
    "heavy tails": lambda m: dist.StudentT(3.0, m, 1.0),
    "one normal": lambda m: dist.MultivariateNormal(m, torch.eye(30) + 0.5),
    "an event": lambda m: dist.Normal(m, 1.0).to_event(1),
}
PRODUCTS = {
    "slopes": lambda m, a, u: m * (1 + a),
    "two latents": lambda m, a, u: m + a * u,
    "curved": lambda m, a, u: m + a + a * m,
}


def drawn_before_the_gates(observation):
    def model():
        b = loadings(3)
        with pyro.plate("groups", 3):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))[..., OF]
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 30) if observation(LABELS, LABELS, LABELS).batch_shape else nullcontext():
            pyro.sample("y", observation(b @ DESIGN.mT, a, u), obs=LABELS)

    return list(correlated_posterior(InferenceTarget(model, slab=SLAB), Structure(True, True, True), None).hyper.shapes)


@pytest.mark.parametrize("kind", SUMS)
def test_what_is_added_is_drawn_with_the_slabs(kind):
    """Whatever the likelihood."""
    assert drawn_before_the_gates(lambda m, a, u: SUMS[kind](m + a + u)) == []


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("likelihood", ["counts", "heavy tails"])
def test_what_multiplies_is_drawn_before_the_gates(kind, likelihood):
    """One of two latents that multiply each other, and the logarithm of a noise."""
    found = drawn_before_the_gates(lambda m, a, u: SUMS[likelihood](PRODUCTS[kind](m, a, u)))
    assert found == (["u"] if kind == "two latents" else ["a"])
    assert drawn_before_the_gates(lambda m, a, u: dist.Normal(m + a, u.exp())) == ["u"]
