"""A family, terms, a row of terms and a guide that are written here, outside the package, work all through it."""

import math
from typing import ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import constraints, kl_divergence
from torch.nn.functional import logsigmoid

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.compaction import Shrinker, compact
from pyro_l0.diagnostics.gradients import measure_gradient
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.infer import L0_ELBO, AutoGate, SparsityTarget
from pyro_l0.infer.elbo.terms import OBJECTIVES, Term
from pyro_l0.infer.guides.parameters import GateGuide
from pyro_l0.nn import L0Gate
from pyro_l0.nn.gate import name_gates
from tests.infer.regressions import train


class RectifiedLogistic(GateDistribution):
    """A logistic variable clipped to [0, 1]."""

    arg_constraints: ClassVar = {"loc": constraints.real, "scale": constraints.positive}
    learned: ClassVar = {"loc": constraints.real, "scale": constraints.positive}
    defaults: ClassVar = {"scale": 0.2}
    stretch = None

    def __init__(self, loc, scale=0.2, validate_args=None):
        self.loc, self.scale = torch.broadcast_tensors(torch.as_tensor(loc), torch.as_tensor(scale))
        super().__init__(self.loc.shape, validate_args=validate_args)

    def _state(self):
        return {"loc": self.loc, "scale": self.scale}

    @classmethod
    def parameters_at_rate(cls, rate, scale):
        return {"loc": scale * torch.logit(rate), "scale": scale}

    log_prob_zero = property(lambda self: logsigmoid(-self.loc / self.scale))
    log_active_prob = property(lambda self: logsigmoid(self.loc / self.scale))
    log_prob_one = property(lambda self: logsigmoid((self.loc - 1) / self.scale))
    log_interior_prob = property(
        lambda self: torch.log(self.interior_cdf(torch.ones(())) - self.interior_cdf(torch.zeros(())))
    )
    median = property(lambda self: self.loc.clamp(0, 1))
    test_gate = median

    def rsample(self, sample_shape=torch.Size()):
        u = torch.rand(torch.Size(sample_shape) + self.batch_shape, dtype=self.loc.dtype)
        return self.rectify(self.loc + self.scale * torch.logit(u, 1e-6))

    def log_interior_density(self, z):
        x = (z - self.loc) / self.scale
        return logsigmoid(x) + logsigmoid(-x) - torch.log(self.scale)

    def interior_cdf(self, z):
        return torch.sigmoid((z - self.loc) / self.scale)

    def _breakpoints(self):
        return None  # panels


def network(gates=4):
    pyro.set_rng_seed(0)
    net = nn.Sequential(nn.Linear(3, gates), nn.ReLU(), L0Gate(gates, init_jitter=0.0), nn.Linear(gates, 2))
    name_gates(net)
    return net


def regression(net, steps, elbo, guide, target=None):
    """Train on data that one hidden unit explains."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    y = torch.stack((x[:, 0].relu(), -x[:, 0].relu()), 1)

    def model():
        pyro.sample("y", dist.Normal(net(x), 0.3).to_event(2), obs=y)

    guide = guide(model)
    guide()
    optimiser = torch.optim.Adam([*net.parameters(), *guide.parameters()], lr=0.05)
    train(elbo(model, guide), optimiser, steps, target)
    return model, guide, x


def open_units(net, guide, x):
    return compact(net, guide.test_gates(), x[:1]).network.get_submodule("0").out_features


@pytest.mark.parametrize("objective", ["l0", "free_energy"])
def test_a_family_through_guide_objective_and_compaction(objective):
    """Its KL and its price are exact without a line for either, and its closed units leave."""
    pyro.set_rng_seed(0)
    q, p = RectifiedLogistic(torch.tensor([0.1, 0.8])), RectifiedLogistic.from_active_prob(torch.tensor(0.3))
    z = q.rsample((200_000,))
    sampled = (q.log_prob(z) - p.log_prob(z)).mean(0)
    torch.testing.assert_close(torch.distributions.kl_divergence(q, p), sampled, rtol=0.02, atol=0.02)

    net = network()
    elbo = L0_ELBO(objective, lam=3.0)
    model, guide, x = regression(net, 250, elbo, lambda model: AutoGate(model, family=RectifiedLogistic))
    parts = elbo.terms(model, guide)
    rate = guide.posterior()["2"].active_prob.detach()
    assert parts["l0"].item() == pytest.approx(3.0 * rate.sum().item(), rel=1e-5)
    assert (parts["kl_gate"] > 0) == (objective == "free_energy")
    assert 0 < open_units(net, guide, x) < 4


def horseshoe(layer):
    """A term: P(z != 0) times -log p(w) of each gate's weights, by the bound of Carvalho et al. (2010)."""

    def code_length(group, elbo):
        density = torch.log1p(4 / layer.weight.square().clamp(min=1e-6)) / math.sqrt(8 * math.pi**3)
        return (group.active_prob * -density.log().sum(0)).sum()

    return Term("horseshoe", code_length)


def test_a_users_term_is_added_priced_and_trained():
    net = network()
    elbo = L0_ELBO("l0", extra_terms=[horseshoe(net[3])], num_particles=2)
    model, guide, x = regression(net, 300, elbo, AutoGate)
    parts = elbo.terms(model, guide)
    assert list(parts) == ["nll", "l0", "l2", "kl_gate", "kl_slab", "kl_other", "horseshoe"]
    assert parts["l0"] == 0
    weights = net[3].weight.detach()
    bits = -torch.log(torch.log1p(4 / weights.square().clamp(min=1e-6)) / (2 * (2 * math.pi**3) ** 0.5)).sum(0)
    expected = (guide.posterior()["2"].active_prob * bits).sum()
    assert parts["horseshoe"].item() == pytest.approx(expected.item(), rel=1e-5)
    pyro.set_rng_seed(3)
    loss = elbo.loss(model, guide)
    pyro.set_rng_seed(3)
    assert sum(elbo.terms(model, guide).values()).item() == pytest.approx(loss, rel=1e-6)
    assert 0 < open_units(net, guide, x) < 4


def two_sites():
    pyro.sample("a", HardConcrete.from_active_prob(0.3).expand([3]).to_event(1))
    pyro.sample("b", HardConcrete.from_active_prob(0.3).expand([2]).to_event(1))


@pytest.mark.parametrize(("is_kl", "factor"), [(True, 0.25), (False, 1.0)])
def test_a_term_says_once_what_scales_it(is_kl, factor):
    """Sites come one by one in their shapes, though the guide draws them jointly; a term may pass sites by."""
    seen = []

    def count(group, elbo):
        seen.append((group.name, tuple(group.active_prob.shape), group.prior["name"], elbo.step))
        return group.active_prob.sum() if group.name == "b" else None

    guide = AutoGate(two_sites, init_active_prob=0.5, init_jitter=0.0)
    guide()
    elbo = L0_ELBO("l0", kl_scale=0.25, extra_terms=[Term("open", count, is_kl=is_kl)])
    assert elbo.terms(two_sites, guide)["open"].item() == pytest.approx(factor * 1.0)
    assert elbo.loss(two_sites, guide) == pytest.approx(factor * 1.0)
    assert seen[:2] == [("a", (3,), "a", 0), ("b", (2,), "b", 0)]


@pytest.mark.slow
def test_a_term_of_binary_gates_joins_the_exact_gradient():
    """What does not depend on draws stays analytic, what does goes through the estimator."""

    def model():
        z = pyro.sample("z", BernoulliGate.from_active_prob(0.5).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=torch.tensor(1.5))

    pyro.set_rng_seed(0)
    guide = AutoGate(model, family=BernoulliGate)
    guide()
    drawn = Term("product", lambda group, _: 2.0 * group.posterior["value"].prod(), uses_draws=True)
    analytic = Term("open", lambda group, _: 0.5 * group.active_prob.sum())
    elbo = L0_ELBO("l0", estimator="leave_one_out", num_particles=4, extra_terms=[drawn, analytic])
    report = measure_gradient(elbo, model, guide, draws=800, exact=True)
    assert (report.bias.abs() < 5 * report.standard_error).all()
    rates = guide.posterior()["z"].probs
    with_terms = 2.0 * rates.prod() + 0.5 * rates.sum()
    (slope,) = torch.autograd.grad(with_terms, guide.locations())
    without_terms = L0_ELBO("l0", estimator="leave_one_out", num_particles=4)
    plain = measure_gradient(without_terms, model, guide, draws=2, exact=True)
    torch.testing.assert_close(report.exact - plain.exact, slope)


def test_a_row_of_the_table_is_an_objective(monkeypatch):
    """A row of the user's: the likelihood and a price of E[z] in the place of P(z != 0)."""
    mean = Term("mean", lambda group, _: 4.0 * group.posterior["fn"].mean.sum())
    monkeypatch.setitem(OBJECTIVES, "mean", (OBJECTIVES["l0"][0], mean))
    net = network()
    elbo = L0_ELBO("mean")
    model, guide, x = regression(net, 250, elbo, AutoGate)
    assert elbo.terms(model, guide)["mean"].item() == pytest.approx(4 * guide.posterior()["2"].mean.sum().item())
    assert 0 < open_units(net, guide, x) < 4
    for options, message in (
        ({"lam": 1.0}, "Expected no lam for objective='mean'"),
        # Two terms of one name would be added up, and one's ``is_kl`` would scale both.
        ({"extra_terms": [mean]}, r"names other than .*'mean'.*, but got 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            L0_ELBO("mean", **options)


def test_dropped_sites_leave_every_coefficient():
    norms = {"a": lambda: torch.ones(3), "b": lambda: torch.ones(2)}
    elbo = L0_ELBO("l0", lam={"a": 1.0, "b": 2.0}, group_size={"a": 3.0}, weight_decay=0.5, square_norm=norms)
    elbo.drop(["a", "c"])
    assert (elbo.lam, elbo.group_size, elbo.weight_decay, list(elbo.square_norm)) == ({"b": 2.0}, {}, 0.5, ["b"])
    assert list(norms) == ["a", "b"]


class Handmade(nn.Module):
    """A guide of one's own: hard concretes of a temperature that AutoGate does not use."""

    def __init__(self, **sizes):
        super().__init__()
        self.log_odds = nn.ParameterDict({name: nn.Parameter(torch.full((n,), 2.0)) for name, n in sizes.items()})

    def forward(self, *args):
        for name, gate in self.posterior().items():
            pyro.sample(name, gate.to_event(1))

    def posterior(self):
        return {name: HardConcrete(x, 0.5) for name, x in self.log_odds.items()}

    @torch.no_grad()
    def test_gates(self):
        return {name: gate.test_gate for name, gate in self.posterior().items()}

    def locations(self):
        return list(self.log_odds.values())

    @torch.no_grad()
    def close(self, name, units):
        self.log_odds[name][units] = -15.0

    def keep(self, units):
        replaced = {}
        for name, index in units.items():
            old = self.log_odds.pop(name)
            new = nn.Parameter(old.detach()[index].clone()) if len(index) else None
            replaced[old] = new, index
            if new is not None:
                self.log_odds[name] = new
        return replaced


def test_a_guide_meets_a_target_and_is_compacted():
    net, guide = network(), Handmade(**{"2": 4})
    typed: GateGuide = guide
    target = SparsityTarget(typed, {"2": 0.25}, steps=150)
    _, _, x = regression(net, 150, L0_ELBO("l0"), lambda _: guide, target=target)
    assert target.fraction().item() == 0.25
    assert open_units(net, guide, x) == 1


def test_a_guide_shrinks_with_its_network():
    net, guide = network(), Handmade(**{"2": 4})
    optimiser = torch.optim.Adam([*net.parameters(), *guide.parameters()])
    holder = nn.Sequential(net)
    shrinker = Shrinker(holder[0], guide, torch.ones(1, 3), optimiser, patience=1)
    guide.close("2", torch.tensor([1, 3]))
    assert shrinker.step()
    assert holder[0].get_submodule("0").out_features == 2
    assert [x.shape for x in guide.parameters()] == [(2,)]
    assert any(guide.log_odds["2"] is x for group in optimiser.param_groups for x in group["params"])


def test_a_guides_gradient_is_measured():
    """The expected loss is a quadratic in the sum's first two moments, and a KL."""

    def model():
        z = pyro.sample("z", HardConcrete(torch.zeros(2), 0.5).to_event(1))
        pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=torch.tensor(1.5))

    pyro.set_rng_seed(0)
    guide = Handmade(z=2)
    report = measure_gradient(L0_ELBO("free_energy"), model, guide, draws=300)
    gate = guide.posterior()["z"]
    prior = HardConcrete(torch.zeros(2), 0.5)
    loss = 0.5 * ((1.5 - gate.mean.sum()) ** 2 + gate.variance.sum()) + kl_divergence(gate, prior).sum()
    (exact,) = torch.autograd.grad(loss, guide.locations())
    assert ((report.mean - exact).abs() < 5 * report.standard_error).all()
