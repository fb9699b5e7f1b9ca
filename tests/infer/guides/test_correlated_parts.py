"""The parts of a correlated guide, each by itself: gates, other latents, rates, draws, gradient and evidence."""

import contextlib
import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_l0 import BernoulliGate
from pyro_l0.infer import L0_ELBO, AutoSpikeSlab, fit
from pyro_l0.infer.elbo.estimators import leave_one_out
from pyro_l0.infer.guides.correlated import GateChain, HyperPosterior
from pyro_l0.infer.posterior.check_fit import Evidence, log_ratios
from pyro_l0.infer.slabs import Conditional
from pyro_l0.infer.target import InferenceTarget
from tests.infer.regressions import correlated_guide, regression, shaken
from tests.maths.spike_and_slab import log_evidence
from tests.reference_posteriors import all_gates

P, SIGMA, TAU, RATE = 3, 0.9, 0.7, 0.3
SLAB = {"w": "z"}
STATES = all_gates(P)
X = torch.randn(12, P, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
X[:, 1] = X[:, 0] + 0.3 * X[:, 1]
Y = 0.6 * X[:, 0] + torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def model(p=P, rate=None):
    gate = BernoulliGate(probs=X.new_tensor(RATE) if rate is None else rate)
    regression(X[:, :p], Y, gate, dist.Normal(X.new_zeros(()), X.new_tensor(TAU)), X.new_tensor(SIGMA))


def correlated(program=model, **options):
    guide = correlated_guide(program, SLAB, 3, **options)
    guide()
    return guide


def chain(hyper=0):
    torch.manual_seed(5)
    return shaken(GateChain(P, hyper, coupled=True, like=X), 1.0)


def test_gates_of_a_chain_given_those_before():
    """Log odds entry by entry, of which the upper triangle is no part; frequencies of all sets of draws."""
    gates, base, shift, n = chain(hyper=2), X.new_tensor([0.4, -1.0, 0.2]), X.new_tensor([0.7, -0.3]), 40_000
    odds = gates.log_odds(base, STATES, shift.expand(len(STATES), 2)).detach()
    for i, z in enumerate(STATES):
        for j in range(P):
            exact = base[j] + gates.tilt[j] @ shift + sum(gates.coupling[j, k] * z[k] for k in range(j))
            torch.testing.assert_close(odds[i, j], exact.detach())
    torch.manual_seed(6)
    draws = gates.sample(base, shift.expand(n, 2))
    exact = BernoulliGate(logits=odds).log_prob(STATES).sum(-1).exp()
    torch.testing.assert_close(exact.sum(), X.new_ones(()))
    found = (draws[:, None] == STATES).all(-1).double().mean(0)
    assert bool(((found - exact).abs() < 4 * (exact * (1 - exact) / n).sqrt()).all())


def test_marginals_are_those_of_the_enumeration():
    """active_probs, the posterior's gates and draws, within the error that is promised."""
    guide = shaken(correlated(), 0.5)
    odds = guide.joint.chain.log_odds(guide.sites["z"]["logits"], STATES, X.new_zeros(8, 0)).detach()
    exact = BernoulliGate(logits=odds).log_prob(STATES).sum(-1).exp() @ STATES
    torch.manual_seed(7)
    for found in (guide.active_probs()["z"], guide.posterior()["z"].active_prob, guide.draws(10_000)["z"].mean(0)):
        torch.testing.assert_close(found, exact, rtol=0, atol=0.02)


def test_drawn_is_a_density_of_its_value_alone():
    value = torch.tensor([0.3, -0.2])
    fn = Conditional(dist.Normal(torch.zeros(2), 2.0), value)
    assert fn.sample() is value
    assert fn.rsample() is value
    torch.testing.assert_close(fn.log_prob(value), dist.Normal(0.0, 2.0).log_prob(value))


def test_hyper_posterior_is_one_gaussian():
    """The conditionals multiply to the density of mean and covariance; draws have these moments."""
    posterior = HyperPosterior(X.new_tensor([1.0, -2.0, 0.5]))
    torch.manual_seed(8)
    with torch.no_grad():
        posterior.coupling.normal_()
        posterior.log_scale.normal_()
        values, means, deviations = posterior.draw(20_000)
    root = posterior.log_scale.exp().diag() + posterior.coupling.tril(-1)
    exact = torch.distributions.MultivariateNormal(posterior.loc, scale_tril=root)
    density = dist.Normal(means, deviations).log_prob(values).sum(-1)
    torch.testing.assert_close(density, exact.log_prob(values).detach())
    error = exact.variance.sqrt().detach() / math.sqrt(20_000)
    assert bool(((values.mean(0) - posterior.loc.detach()).abs() < 4 * error).all())


def with_rate(transform=lambda rate: rate):
    return lambda: model(rate=transform(pyro.sample("rate", dist.Beta(X.new_tensor(1.5), X.new_tensor(4.0)))))


def test_a_conjugate_rate_leaves_the_beta_binomial():
    """log p(z, rate) - log q(rate | z) is log B(a + k, b + p - k) - log B(a, b), whatever rate was drawn."""
    program = with_rate()
    guide = correlated(program, hyper=("rate",))
    assert [rate.name for rate in guide.joint.rates] == ["rate"]
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        drawn = poutine.trace(guide).get_trace()
        scored = poutine.trace(poutine.replay(program, drawn)).get_trace()
        drawn.compute_log_prob()
        scored.compute_log_prob()
        k = drawn.nodes["z"]["value"].sum()
        found = sum(scored.nodes[name]["log_prob_sum"] for name in ("rate", "z")) - drawn.nodes["rate"]["log_prob_sum"]
        a, b = 1.5 + k, 4.0 + P - k
        exact = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        exact = exact - math.lgamma(1.5) - math.lgamma(4.0) + math.lgamma(5.5)
        torch.testing.assert_close(found.detach(), exact)
        seen.add(int(k))
    assert len(seen) > 1


def test_a_rate_that_is_not_itself_the_gates_probability_is_learned():
    """Half a Beta variable has no Beta posterior."""
    guide = correlated(with_rate(lambda rate: 0.5 * rate), hyper=("rate",))
    assert guide.joint.rates == ()
    assert guide.joint.hyper.size == 1


def exact_loss(guide, objective, lam):
    """The objective as a sum over all gates, slabs integrated out, differentiable for the guide's parameters."""
    base = guide.sites["z"]["logits"]
    odds = guide.joint.chain.log_odds(base, STATES, X.new_zeros(len(STATES), 0))
    log_q = BernoulliGate(logits=odds).log_prob(STATES).sum(-1)
    given = guide.joint.slab_posterior.given(STATES, X.new_zeros(len(STATES), 0))
    precision = torch.diag(X.new_full((P,), 1 / TAU)) @ given.root @ given.root.mT / TAU
    slabs = torch.distributions.MultivariateNormal(given.mean, precision_matrix=precision)
    prior = torch.distributions.MultivariateNormal(X.new_zeros(P), torch.eye(P, dtype=X.dtype) * TAU**2)
    gated = X * STATES[:, None]
    residual = Y - (gated @ given.mean.unsqueeze(-1)).squeeze(-1)
    spread = torch.einsum("sni,sij,snj->s", gated, slabs.covariance_matrix, gated)
    loss = 0.5 * (residual.square().sum(-1) + spread) / SIGMA**2 + len(X) * math.log(SIGMA * math.sqrt(2 * math.pi))
    loss = loss + torch.distributions.kl_divergence(slabs, prior)
    if objective != "l0":
        loss = loss + log_q - BernoulliGate(probs=X.new_tensor(RATE)).log_prob(STATES).sum(-1)
    return (log_q.exp() * loss).sum() + lam * (log_q.exp() @ STATES).sum()


@pytest.mark.parametrize("temper", [1.0, 0.3])
@pytest.mark.parametrize("particles", [2, 3])
def test_leave_one_out_is_unbiased_over_all_draws(particles, temper):
    """Summed over every pair and triple of gates: the gradient of E[log q] and the tempered rest, without noise."""
    gates, base = chain(), X.new_tensor([0.4, -1.0, 0.2]).requires_grad_()
    log_q = BernoulliGate(logits=gates.log_odds(base, STATES, X.new_zeros(8, 0))).log_prob(STATES).sum(-1)
    rest = STATES @ X.new_tensor([2.0, -3.0, 1.0]) + 4 * STATES[:, 0] * STATES[:, 1]  # of the loss, beside log q
    parameters = [base, gates.coupling]
    objective = (log_q.exp() * (log_q + temper * rest)).sum()
    expected = torch.autograd.grad(objective, parameters, retain_graph=True)
    total = X.new_zeros(())
    for drawn in itertools.product(range(8), repeat=particles):
        i = torch.tensor(drawn)
        total = total + log_q[i].sum().exp().detach() * leave_one_out(rest[i] + log_q[i].detach(), log_q[i], temper)
    for found, exact in zip(torch.autograd.grad(total, parameters), expected, strict=True):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("objective", ["spike_slab", "free_energy", "l0"])
def test_gradient_is_that_of_the_enumerated_objective(objective, mapped):
    """Mean loss and gradient for gates, couplings and slabs, within 4.5 standard errors of the exact ones."""
    guide = shaken(correlated(), 0.5)
    lam = 0.0 if objective == "spike_slab" else 0.4
    parameters = [x for x in guide.parameters() if x.numel()]
    exact = exact_loss(guide, objective, lam)
    expected = torch.cat([x.flatten() for x in torch.autograd.grad(exact, parameters)])
    elbo = L0_ELBO(
        objective,
        lam=lam,
        slab=SLAB if objective == "spike_slab" else None,
        estimator="leave_one_out",
        num_particles=40 if mapped else 3,
        vectorize_particles=mapped,
    )
    pyro.set_rng_seed(9)
    losses, rows = [], []
    for _ in range(100):
        loss = elbo.differentiable_loss(model, guide)
        rows.append(torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)]))
        losses.append(loss.detach())
    found, values = torch.stack(rows), torch.stack(losses)
    error = found.std(0) / math.sqrt(len(found))
    assert bool(((found.mean(0) - expected).abs() <= 4.5 * error + 1e-9).all())
    assert bool((expected.abs() > 4.5 * error).sum() >= 6)  # else a gradient of 0 would do
    assert abs(float(values.mean() - exact.detach())) < 4.5 * float(values.std()) / math.sqrt(len(values))


def exactly(p=2):
    """A guide that is the posterior of two features."""
    guide = correlated(lambda: model(p))
    x, slabs = X[:, :p], guide.joint.slab_posterior
    curvature, linear = x.mT @ x / SIGMA**2, x.mT @ Y / SIGMA**2
    slabs.factor.copy_(torch.linalg.cholesky(curvature))
    slabs.linear.copy_(torch.linalg.solve_triangular(slabs.factor, linear.unsqueeze(-1), upper=False).squeeze(-1))
    states = X.new_tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]])
    scores = log_evidence(curvature, linear, states, X.new_tensor(TAU)) + states.sum(-1) * math.log(RATE / (1 - RATE))
    total = scores.logsumexp(0) + p * math.log(1 - RATE) + dist.Normal(X.new_zeros(()), SIGMA).log_prob(Y).sum()
    with torch.no_grad():
        guide.sites["z"]["logits"][0] = scores[2:].logsumexp(0) - scores[:2].logsumexp(0)
        guide.sites["z"]["logits"][1] = scores[1] - scores[0]
        guide.joint.chain.coupling[1, 0] = scores[3] - scores[2] - scores[1] + scores[0]
    return guide, float(total)


@pytest.mark.parametrize("mapped", [True, False, None])
def test_log_ratios_of_the_exact_posterior_are_the_evidence(mapped):
    """Every draw's, to nine digits; and all bounds of them."""
    guide, exact = exactly()
    ratios = log_ratios(InferenceTarget(guide.model, slab=guide.slab), guide, mapped)[0](20)
    torch.testing.assert_close(ratios, X.new_full((20,), exact), rtol=1e-9, atol=0)
    evidence = Evidence.of(ratios)
    assert evidence.elbo == pytest.approx(exact, rel=1e-9)
    assert evidence.importance_weighted == pytest.approx(exact, rel=1e-9)
    assert evidence.effective == pytest.approx(1.0)
    assert evidence.standard_error < 1e-8


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    ("gates", "gate_events", "slabs", "slab_events", "plate"),
    [
        ((2,), 1, (2,), 1, None),
        ((2, 1), 2, (2, 3), 2, None),
        ((2, 3), 2, (2, 3), 2, None),
        ((2, 3), 1, (2, 3), 1, 2),
        ((2,), 0, (2, 3), 1, 2),
    ],
)
def test_log_ratios_of_slabs_in_events(gates, gate_events, slabs, slab_events, plate, mapped):
    """A mean field that is the posterior of normal means: every draw has the evidence, by a sum over all gates."""
    y = X.flatten()[: math.prod(slabs)].view(slabs)

    def means():
        with pyro.plate("rows", plate) if plate else contextlib.nullcontext():
            z = pyro.sample("z", BernoulliGate(probs=X.new_tensor(RATE)).expand(gates).to_event(gate_events))
            w = pyro.sample("w", dist.Normal(X.new_zeros(slabs), TAU).to_event(slab_events))
            open_w = w * z.reshape(*z.shape, *[1] * (len(slabs) - len(gates)))
            pyro.sample("y", dist.Normal(open_w, SIGMA).to_event(slab_events), obs=y)

    zero, wide = X.new_zeros(()), math.hypot(SIGMA, TAU)
    each = dist.Normal(zero, wide).log_prob(y) - dist.Normal(zero, SIGMA).log_prob(y)
    by_gate = each.reshape(*gates, -1).sum(-1)
    states = all_gates(by_gate.numel())
    log = states @ by_gate.flatten() + dist.Bernoulli(X.new_full(states.shape, RATE)).log_prob(states).sum(-1)
    exact = log.logsumexp(0) + dist.Normal(zero, SIGMA).log_prob(y).sum()
    guide = AutoSpikeSlab(means, SLAB)
    guide()
    variance = 1 / (SIGMA**-2 + TAU**-2)
    with torch.no_grad():
        guide.sites["z"]["logits"].copy_(by_gate + math.log(RATE / (1 - RATE)))
        guide.sites["w"]["loc"].copy_(variance * y / SIGMA**2)
        guide.sites["w"]["log_scale"].fill_(0.5 * math.log(variance))
    pyro.set_rng_seed(4)
    ratios = log_ratios(InferenceTarget(means, slab=guide.slab), guide, mapped)[0](20)
    torch.testing.assert_close(ratios, exact.expand(20), rtol=1e-9, atol=0)
    found = fit(means, guide, steps=100, num_particles=4, learning_rate=1e-4, seed=0)
    assert found.log_evidence == pytest.approx(float(exact), abs=1e-3)


def test_an_exact_posterior_has_no_gradient():
    """With the costs of all draws the same, the gates' gradient is 0 at every step, not on average."""
    guide, exact = exactly()
    elbo = L0_ELBO("spike_slab", slab=SLAB, estimator="leave_one_out", num_particles=6, vectorize_particles=True)
    loss = elbo.differentiable_loss(guide.model, guide)
    assert float(loss.detach()) == pytest.approx(-exact, rel=1e-9)
    gradients = torch.autograd.grad(loss, [guide.sites["z"]["logits"], guide.joint.chain.coupling])
    assert all(float(x.abs().max()) < 1e-8 for x in gradients)


def test_evidence_of_unequal_ratios():
    """Mean, its error, log mean and effective size of three numbers."""
    evidence = Evidence.of(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).log())
    assert evidence.elbo == pytest.approx(math.log(2))
    assert evidence.importance_weighted == pytest.approx(math.log(7 / 3))
    assert evidence.effective == pytest.approx(49 / 21 / 3)
    assert evidence.standard_error == pytest.approx(math.log(2) / math.sqrt(3))
