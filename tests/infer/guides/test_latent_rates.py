"""What a guide takes over from gates whose prior depends on a latent variable, and from others."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_l0 import HardConcrete, RectifiedNormal
from pyro_l0.infer import AutoGate

USUAL = 2 / 3


def temperature_of(model, *args, **options):
    """The guide's temperature, of a guide that sees the gates alone."""
    guide = AutoGate(poutine.block(model, expose=["z"]), **options)
    guide(*args)
    return guide.posterior()["z"].fixed_options["temperature"]


def gate(rate=0.2, **options):
    return pyro.sample("z", HardConcrete.from_active_prob(rate, **options).expand([3]).to_event(1))


def rate_per_gate():
    with pyro.plate("features", 3):
        pi = pyro.sample("pi", dist.Beta(1.0, 4.0))
        pyro.sample("z", HardConcrete.from_active_prob(pi, one_given_active=0.9))


def read_back():
    gate(one_given_active=pyro.sample("q", dist.Uniform(0.6, 0.9)).item())


def not_reparameterised():
    gate(temperature=(0.3, 0.5)[int(pyro.sample("k", dist.Bernoulli(0.5)))])


def behind_a_gate_and_a_network():
    pyro.sample("before", HardConcrete(torch.zeros(2)).to_event(1))
    hidden = torch.nn.functional.dropout(pyro.sample("h", dist.Normal(0.0, 1.0)), 0.5)
    gate(temperature=0.2 + torch.sigmoid(hidden))


def of_rows(size=6):
    temperatures = torch.linspace(0.2, 0.7, size)
    with pyro.plate("rows", size, subsample_size=3) as index:
        pyro.sample("z", HardConcrete(torch.zeros(3), temperatures[index]))


@pytest.mark.parametrize("model", [rate_per_gate, read_back, not_reparameterised, behind_a_gate_and_a_network, of_rows])
def test_what_depends_on_a_draw_is_not_inherited(model):
    """Latents of every kind, and the rows of a minibatch; the stretch is still the prior's."""
    for seed in range(3):
        pyro.set_rng_seed(seed)
        assert temperature_of(model) == USUAL
        assert temperature_of(model, family_options={"temperature": 0.4}) == 0.4


def test_only_what_depends_on_a_draw_is_left_out():
    """One of the fixed parameters may."""

    def model():
        gate(temperature=pyro.sample("t", dist.Gamma(2.0, 4.0)), gamma=-0.2)

    guide = AutoGate(poutine.block(model, hide=["t"]))
    guide()
    assert guide.posterior()["z"].fixed_options == {"temperature": USUAL, "gamma": -0.2, "zeta": 1.1}


def beside_a_latent():
    pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    gate(temperature=0.4)


def with_a_parameter():
    pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    gate(temperature=pyro.param("t", torch.tensor(0.4)) * 1)


def with_data(x, temperature):
    with pyro.plate("rows", 8, subsample_size=4):
        pyro.sample("local", dist.Normal(0.0, 1.0))
    gate(rate=x.mean(), temperature=temperature)


def conditioned():
    gate(temperature=pyro.sample("t", dist.Gamma(2.0, 4.0)))


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (beside_a_latent, ()),
        (with_a_parameter, ()),
        (with_data, (torch.full((3,), 0.3), 0.4)),
        (poutine.condition(conditioned, {"t": torch.tensor(0.4)}), ()),
    ],
)
def test_what_no_draw_changes_is_inherited(model, args):
    """Numbers, parameters and arguments of the model, and latents that are given."""
    assert float(temperature_of(model, *args)) == pytest.approx(0.4)


def test_a_look_at_other_draws_changes_no_random_number():
    """The model is run again with generators of its own."""
    for family, runs in ((HardConcrete, 11), (RectifiedNormal, 1)):  # another family takes nothing over
        count = 0

        def model():
            nonlocal count
            count += 1
            beside_a_latent()

        pyro.set_rng_seed(0)
        beside_a_latent()
        torch.randn(3)
        expected = torch.rand(2)
        pyro.set_rng_seed(0)
        guide = AutoGate(poutine.block(model, hide=["scale"]), family=family)
        guide.median()
        assert torch.equal(torch.rand(2), expected)
        assert count == runs


def test_a_model_of_gates_alone_is_run_once():
    """Networks with gates, for which a run has its price and its effects."""
    count = 0

    def model():
        nonlocal count
        count += 1
        for i in range(2):
            pyro.sample(f"z{i}", HardConcrete(torch.zeros(3), temperature=0.4).to_event(1))

    AutoGate(model)()
    assert count == 1
