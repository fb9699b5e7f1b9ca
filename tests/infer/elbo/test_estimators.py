"""Gradient estimators of Bernoulli gates, against exact enumeration of every gate vector."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.diagnostics.gradients import measure_gradient
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.infer.elbo.estimators import Estimators, Evaluation, leave_one_out
from tests.cases import first_by_default

STANDARD_ERRORS = 4
GATES = 10
UNBIASED = ("score_function", "leave_one_out", "arm", "rebar")
BY_SLOPE = ("straight_through", "reinmax")

torch.manual_seed(81)
X = torch.randn(12, GATES, dtype=torch.float64)
Y = X @ torch.linspace(1.5, -1.0, GATES, dtype=torch.float64) + 0.3 * torch.randn(12, dtype=torch.float64)
LOGITS = torch.linspace(-1.5, 1.5, GATES, dtype=torch.float64)
WEIGHT = torch.linspace(1.2, -0.7, GATES, dtype=torch.float64)


class Linear(torch.nn.Module):
    """A linear model of ten gated features with learned weights."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(WEIGHT.clone())

    def forward(self):
        z = pyro.sample("z", PRIOR.to_event(1))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal(X @ (self.weight * z), 1.0), obs=Y)


def guide_at(model, logits=LOGITS):
    """A guide of Bernoulli gates with given log odds."""
    guide = AutoGate(model, BernoulliGate, init_jitter=0.0)
    guide()
    with torch.no_grad():
        guide.sites["z"]["logits"].copy_(logits)
    return guide


PRIOR = BernoulliGate(logits=torch.full((GATES,), -0.5, dtype=torch.float64))


def exact(model, logits, lam=0.3):
    """The loss and its gradients by a sum over 1,024 gate vectors."""
    logits = logits.clone().requires_grad_()
    vectors = torch.tensor(list(itertools.product((0.0, 1.0), repeat=GATES)), dtype=torch.float64)
    log_q = torch.distributions.Bernoulli(logits=logits).log_prob(vectors).sum(-1)
    nll = -dist.Normal((vectors * model.weight) @ X.T, 1.0).log_prob(Y).sum(-1)
    price = lam * torch.sigmoid(logits).sum()
    loss = (log_q.exp() * nll).sum() + price + kl_divergence(BernoulliGate(logits=logits), PRIOR).sum()
    return loss.detach(), torch.autograd.grad(loss, [logits, model.weight])


def draws(name, count, num_particles=1):
    """Losses and gradients of many steps, of the logits and of the weights."""
    model = Linear()
    guide = guide_at(model)
    loss = L0_ELBO("free_energy", lam=0.3, estimator=name, num_particles=num_particles)(model, guide)
    rows, losses = [], []
    for _ in range(count):
        value = loss()
        gradient = torch.autograd.grad(value, [guide.sites["z"]["logits"], model.weight])
        rows.append(torch.cat(gradient))
        losses.append(value.detach())
    return torch.stack(losses), torch.stack(rows)


def compared(name, count):
    """How far mean gradients are from a sum over all gate vectors, in standard errors, and the mean loss."""
    losses, rows = draws(name, count, 2 if name == "leave_one_out" else 1)
    value, gradients = exact(Linear(), LOGITS)
    deviations = (rows.mean(0) - torch.cat(gradients)) / (rows.std(0) / math.sqrt(count))
    return deviations.abs(), (losses.mean() - value).abs() / (losses.std() / math.sqrt(count))


@pytest.mark.parametrize("name", first_by_default((*UNBIASED, "reinmax")))
def test_unbiased(name):
    """Loss and gradients for gates and weights, within four standard errors of the sum over all gate vectors.

    ReinMax is, too, as the loss is a quadratic.
    """
    torch.manual_seed(82)
    # The first steps of the score function have no baseline yet: unbiased too, but of another variance.
    of_gradients, of_loss = compared(name, 800)
    assert of_gradients.max() < STANDARD_ERRORS
    assert of_loss < STANDARD_ERRORS


def test_the_baseline_of_the_score_function_is_kept_for_a_resumed_run():
    """An objective with the state of another has its loss, gradients and baseline to the last bit."""

    def two_steps(elbo, model, guide):
        for _ in range(2):
            loss = elbo.differentiable_loss(model, guide)
        return torch.autograd.grad(loss, guide.sites["z"]["logits"])[0], elbo.state_dict()

    model = Linear()
    guide, first, second = guide_at(model), L0_ELBO(estimator="score_function"), L0_ELBO(estimator="score_function")
    two_steps(first, model, guide)
    second.load_state_dict(first.state_dict())
    found = []
    for elbo in (first, second):
        pyro.set_rng_seed(86)
        found.append(two_steps(elbo, model, guide))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][1]["baseline"] is not None


def test_straight_through_is_biased():
    """Its gradient for the gates is off by far more than its error; that of the weights is exact."""
    torch.manual_seed(83)
    deviations, _ = compared("straight_through", 500)
    assert deviations[:GATES].max() > 10
    assert deviations[GATES:].max() < STANDARD_ERRORS


def mean_slope(name, cost, logits, monkeypatch):
    """The mean gradient of an estimator over all draws, and the exact one, shape ``(gates,)``."""
    vectors = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(logits))), dtype=torch.float64)
    every = logits.expand(len(vectors), -1).clone().requires_grad_()
    log_q = torch.distributions.Bernoulli(logits=every).log_prob(vectors).sum(-1)
    (exact,) = torch.autograd.grad((log_q.exp() * cost(vectors)).sum(), every)
    monkeypatch.setattr(BernoulliGate, "sample", lambda gate: vectors)
    found, surrogate = Estimators(name)(
        lambda values: Evaluation({}, cost(values["z"])), {"z": BernoulliGate(logits=every)}
    )
    assert surrogate.shape == found[0].cost.shape == (len(vectors),)
    (slopes,) = torch.autograd.grad((found[0].cost + surrogate).sum(), every)
    return (log_q.exp()[:, None] * slopes).sum(0).detach(), exact.sum(0)


def test_reinmax_is_exact_for_quadratics(monkeypatch):
    """Also where gates are multiplied, and up to rounding at log odds of 30; straight-through is not."""
    torch.manual_seed(89)
    root, linear = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    logits = torch.tensor([-1.5, -0.3, 0.8, 30.0], dtype=torch.float64)

    def cost(z):
        return (z @ root).square().sum(-1) + z @ linear

    biases = {}
    for name in BY_SLOPE:
        found, exact = mean_slope(name, cost, logits, monkeypatch)
        biases[name] = (found - exact).abs()
    assert biases["reinmax"].max() < 1e-13
    assert biases["straight_through"][:3].min() > 0.05


def test_reinmax_is_less_biased_for_a_quartic(monkeypatch):
    r"""f = (z - c)^4 has the mean slopes p (1 - p) (f'(0) + f'(1)) / 2 and p (1 - p) E[f'(z)].

    At some c the latter is near by chance, but not on average.
    """
    logits, square = torch.linspace(-2.5, 2.5, 4, dtype=torch.float64), dict.fromkeys(BY_SLOPE, 0.0)
    rates = torch.sigmoid(logits)
    for shift in (-0.8, 0.1, 0.5, 0.9, 1.8):
        at_zero, at_one = 4 * (-shift) ** 3, 4 * (1 - shift) ** 3
        weights = {"straight_through": rates, "reinmax": torch.full_like(rates, 0.5)}
        for name in BY_SLOPE:
            found, exact = mean_slope(name, lambda z, shift=shift: (z - shift).pow(4).sum(-1), logits, monkeypatch)
            mean = (1 - weights[name]) * at_zero + weights[name] * at_one
            torch.testing.assert_close(found, rates * (1 - rates) * mean)
            square[name] += float((found - exact).square().sum())
    assert 0 < square["reinmax"] < 0.25 * square["straight_through"]


def test_reinmax_in_plates():
    """Gates of two plates, with several particles, against the sum over 64 gate vectors."""

    def model():
        with pyro.plate("rows", 2, dim=-2), pyro.plate("columns", 3, dim=-1):
            z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.3, dtype=torch.float64)))
        pyro.sample("y", dist.Normal((z * WEIGHT[:6].view(2, 3)).sum(), 0.5), obs=torch.tensor(1.0).double())

    pyro.set_rng_seed(90)
    guide = AutoGate(model, BernoulliGate, init_active_prob=0.7, init_jitter=0.5)
    guide()
    elbo = L0_ELBO("free_energy", lam=0.2, estimator="reinmax", num_particles=2)
    report = measure_gradient(elbo, model, guide, draws=150, exact=True)
    assert report.mean.shape == (6,)
    assert (report.bias.abs() < STANDARD_ERRORS * report.standard_error).all()


def test_pathwise_gates_beside_them():
    """A hard concrete keeps its pathwise gradient next to a Bernoulli gate."""

    def model():
        a = pyro.sample("a", BernoulliGate(logits=torch.zeros(2)).to_event(1))
        b = pyro.sample("b", HardConcrete(torch.zeros(3)).to_event(1))
        pyro.sample("y", dist.Normal((a.sum() * b).sum(), 1.0), obs=torch.tensor(2.0))

    a = torch.zeros(2, requires_grad=True)
    b = torch.full((3,), 0.5, requires_grad=True)

    def guide():
        pyro.sample("a", BernoulliGate(logits=a).to_event(1))
        pyro.sample("b", HardConcrete(b).to_event(1))

    pyro.set_rng_seed(87)
    elbo = L0_ELBO("free_energy", estimator="rebar", num_particles=3)
    elbo.differentiable_loss(model, guide).backward()
    assert (a.grad != 0).all()
    assert (b.grad != 0).any()


@pytest.mark.parametrize("name", UNBIASED)
def test_gates_of_an_example_answer_for_its_own_cost(name):
    torch.manual_seed(88)
    number, gates, draws = 3, 2, 20_000
    weight = torch.randn(number, gates, dtype=torch.float64)
    # A cost that no gate changes, but by which all would move if costs were summed.
    constant = torch.tensor([0.0, 0.0, 100.0], dtype=torch.float64)
    logits = torch.tensor([[-1.0, 0.5], [0.3, -0.2], [0.8, 1.0]], dtype=torch.float64, requires_grad=True)

    def cost(z):
        return (1 + (weight * z).sum(-1)).square() + constant

    vectors = torch.tensor(list(itertools.product((0.0, 1.0), repeat=gates)), dtype=torch.float64)[:, None]
    probs = torch.distributions.Bernoulli(logits=logits).log_prob(vectors).sum(-1).exp()
    expected = torch.autograd.grad((probs * cost(vectors)).sum(), logits)[0][:2]
    many = logits.expand(draws, number, gates)
    q = BernoulliGate(logits=many)
    if name == "leave_one_out":
        z = q.sample((2,))
        surrogate = leave_one_out(cost(z), q.log_prob(z).sum(-1), 1.0)
    else:
        estimator = Estimators(name)
        estimator.baseline = torch.tensor(1.0, dtype=torch.float64)
        found, surrogate = estimator(lambda values: Evaluation({}, cost(values["z"])), {"z": q})
        assert found[0].cost.shape == surrogate.shape == (draws, number)
    (slopes,) = torch.autograd.grad(surrogate.sum(), many)
    slopes = slopes[:, :2]
    assert (slopes.mean(0) - expected).abs().le(STANDARD_ERRORS * slopes.std(0) / math.sqrt(draws)).all()


@pytest.mark.parametrize("name", [*UNBIASED, *BY_SLOPE])
def test_a_loss_without_gradients_is_that_of_the_particles(name):
    """Also where particles were asked for together, which only leave-one-out draws so."""

    def model():
        z = pyro.sample("z", BernoulliGate(probs=torch.full((3,), 0.5)).to_event(1))
        pyro.factor("y", -((z.sum() - 1) ** 2))

    def guide():
        pyro.sample("z", BernoulliGate(logits=torch.zeros(3, requires_grad=True)).to_event(1))

    torch.manual_seed(0)
    elbo = L0_ELBO(estimator=name, num_particles=400, vectorize_particles=True, max_plate_nesting=0)
    assert elbo.loss(model, guide) == pytest.approx(1.0, abs=0.3)  # variance 1.5, four standard errors


def test_a_value_needs_no_estimator():
    model = Linear()
    assert math.isfinite(L0_ELBO("l0", lam=0.1).loss(model, guide_at(model)))


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("arm", "rebar")]


@pytest.mark.parametrize("name", ["score_function", "straight_through", *LONG])
def test_every_particle_has_its_own_draw_of_all_latents(name):
    """The variance of the loss falls as one over the particles, also where it comes from a latent that is no gate.

    With y = b + noise and a gate that hardly matters, losses are (y - b)^2 / 2 plus a constant with b ~ N(0, 1): their
    variance is 1/2 over the number of particles, here to five standard errors.
    """

    def model():
        pyro.sample("z", BernoulliGate(probs=torch.tensor(0.5)))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(b, 1.0), obs=torch.tensor(0.0))

    def guide():
        pyro.sample("z", BernoulliGate(logits=torch.zeros((), requires_grad=True)))
        pyro.sample("b", dist.Normal(torch.zeros((), requires_grad=True), 1.0))

    pyro.set_rng_seed(0)
    elbo, steps = L0_ELBO("free_energy", estimator=name, num_particles=8), 200
    losses = torch.stack([elbo.differentiable_loss(model, guide).detach() for _ in range(steps)])
    assert losses.var() * 8 == pytest.approx(0.5, abs=5 * 0.5 * math.sqrt(3.5 / steps))  # the kurtosis is 3 + 12 / 8
