"""Local reparameterisation and KL of Bayesian layers against draws, enumeration and hand-written models."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.func import functional_call

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.bayes import BayesianLayer, SpikeSlabPrior, bayesian, kl, plain_network
from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, factor
from pyro_l0.nn import L0Gate, NetworkGates, insert_gates

PRIOR = SpikeSlabPrior(0.2, 0.7)
LAYERS = {
    "dense": (lambda: nn.Linear(3, 2), (3,)),
    "no bias": (lambda: nn.Linear(3, 2, bias=False), (3,)),
    "convolution": (lambda: nn.Conv2d(2, 3, 2, stride=2, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "groups": (lambda: nn.Conv1d(2, 2, 3, groups=2), (2, 5)),
}


def made(layer, seed=0, has_gates=True):
    """A Bayesian layer in float64 whose parameters are all different."""
    torch.manual_seed(seed)
    new = BayesianLayer(layer.double(), PRIOR, has_gates, 0.5, 0.3)
    with torch.no_grad():
        new.mean.normal_(0, 0.5)
        new.log_scale.add_(0.3 * torch.randn_like(new.log_scale))
        if has_gates:
            new.logits.normal_(0, 1.5)
    return new


@pytest.mark.parametrize("has_gates", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_moments_are_those_of_drawn_weights(kind, has_gates):
    """Outputs have the mean and the variance that outputs of drawn weights have; 5 standard errors of 2,000 draws."""
    make, shape = LAYERS[kind]
    layer = made(make(), has_gates=has_gates)
    x = torch.randn(2, *shape, dtype=torch.float64)
    weights = torch.stack([layer.sample_weight() for _ in range(2_000)])
    with torch.no_grad():
        drawn = torch.vmap(lambda weight: functional_call(layer.layer, {"weight": weight}, (x,)))(weights)
        local = layer(x.repeat(2_000, *(1 for _ in shape))).view(drawn.shape)
    for of in (torch.mean, torch.var):
        parts = torch.stack([of(part, 0) for draws in (local, drawn) for part in draws.chunk(20)])
        errors = (parts.unflatten(0, (2, 20)).var(1).sum(0) / 20).sqrt()
        assert ((of(local, 0) - of(drawn, 0)).abs() < 5 * errors + 1e-9).all()


def test_gradient_of_the_expected_output_is_that_of_differences():
    """With the noise held, the derivative of a drawn output by each parameter."""
    layer = made(nn.Linear(3, 2))
    x = torch.randn(4, 3, dtype=torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)

    def loss(*given):
        torch.manual_seed(3)
        out = functional_call(layer, dict(zip(names, given, strict=True)), (x,))
        return out.square().sum()

    assert torch.autograd.gradcheck(loss, [value.detach().requires_grad_() for value in values])


def test_kl_is_that_of_a_hand_written_model():
    """Eq. 20 of L0_ELBO for a model with a gate site and a slab site of each weight."""
    net = nn.Sequential(made(nn.Linear(3, 2)))
    (layer,) = net
    prior = torch.full((6,), PRIOR.active_prob, dtype=torch.float64)

    def sites(logits, mean, scale):
        pyro.sample("z", BernoulliGate(logits=logits).to_event(1))
        pyro.sample("w", dist.Normal(mean, scale).to_event(1))

    def model():
        sites(prior.logit(), torch.zeros_like(prior), torch.full_like(prior, PRIOR.scale))

    def guide():
        sites(layer.logits.flatten(), layer.mean.flatten(), layer.slab.scale.flatten())

    expected = L0_ELBO("spike_slab", slab={"w": "z"}).loss(model, guide)
    assert float(kl(net).detach()) == pytest.approx(float(expected), rel=1e-6)


def test_slabs_of_a_unit_count_when_its_gate_is_open():
    """KL of a layer with gates on units: that of the gates, and the slabs of each row times P(z != 0)."""
    net = nn.Sequential(made(nn.Linear(3, 2), has_gates=False), L0Gate(2), nn.ReLU())
    (gate,) = NetworkGates(net).sites.values()
    with torch.no_grad():
        gate.location.copy_(torch.tensor([-1.0, 2.0]))
    layer = net[0]
    rows = torch.distributions.kl_divergence(layer.slab, Normal(0.0, PRIOR.scale)).sum(1)
    expected = gate.kl(HardConcrete.from_active_prob(torch.tensor(PRIOR.active_prob))) + (gate.active_prob * rows).sum()
    assert float(kl(net).detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_pyro_and_a_plain_loop_have_the_same_loss():
    """The KL as a factor of the model, under SVI, is the KL added to the loss."""
    net = nn.Sequential(made(nn.Linear(3, 2)))
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])

    def model():
        pyro.module("net", net)
        factor("kl", -kl(net))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Categorical(logits=net(x)), obs=y)

    svi = pyro.infer.SVI(model, lambda: None, pyro.optim.Adam({"lr": 0.0}), pyro.infer.Trace_ELBO())
    torch.manual_seed(5)
    under_pyro = svi.step()
    torch.manual_seed(5)
    plain = nn.functional.cross_entropy(net(x), y, reduction="sum") + kl(net)
    assert under_pyro == pytest.approx(float(plain.detach()), rel=1e-9)


def test_evaluation_is_the_median_model():
    layer = made(nn.Linear(3, 2)).eval()
    x = torch.randn(4, 3, dtype=torch.float64)
    weight = layer.mean * (layer.active_prob > 0.5)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.layer.bias))
    net = nn.Sequential(layer)
    torch.testing.assert_close(plain_network(net)(x), net(x))


def layers(**options):
    return bayesian(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), **options)


def tied():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layers(gates="units"), "'weight', 'unit' or None"),
        (lambda: layers(layers=["1"]), r"\['0', '2'\]"),
        (lambda: layers(prior=SpikeSlabPrior(0.0)), "prior.active_prob"),
        (lambda: layers(prior=SpikeSlabPrior(0.1, -1.0)), "positive scales"),
        (lambda: layers(init_active_prob=1.0), "init_active_prob"),
        (lambda: layers(init_scale=0.0), "positive scales"),
        (lambda: bayesian(tied()), "untie"),
        (lambda: bayesian(insert_gates(nn.Sequential(nn.Linear(2, 2)), {"0": L0Gate(2)})), "without hooks"),
        (lambda: bayesian(nn.TransformerEncoderLayer(4, 2, 8)), "MultiheadAttention"),
        (lambda: kl(nn.Linear(2, 2)), "has none"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_closed_gates_on_units_compact_a_bayesian_network():
    """Draws of the compacted network are plain networks of its size."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), nn.ReLU(), nn.Linear(3, 2))
    net = bayesian(net, gates="unit").eval()
    gates = NetworkGates(net)
    with torch.no_grad():
        for location in gates.locations():
            location[0] = -9.0
    x = torch.randn(3, 1, 4, 4)
    small = compact(net, gates.test_gates(), x).network
    torch.testing.assert_close(small(x), net(x))
    plain = plain_network(small, sample=True)
    assert plain[0][0].weight.shape == (3, 1, 3, 3)
    assert plain[3][0].weight.shape == (2, 12)
    assert not torch.equal(plain(x), plain_network(small, sample=True)(x))
