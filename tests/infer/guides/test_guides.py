"""AutoGate, AutoSpikeSlab and RectifyReparam."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList

from pyro_l0 import HardConcrete, RectifiedNormal
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab
from pyro_l0.infer.reparam import RectifyReparam
from tests.infer.regressions import regression, train


def model():
    with pyro.plate("units", 4):
        pyro.sample("a.z", HardConcrete.from_active_prob(0.2, temperature=0.5))
    pyro.sample("b", RectifiedNormal(0.3, 0.5).expand([2, 3]).to_event(2))
    pyro.sample("scale", dist.LogNormal(0.0, 1.0))


def started(program=model, **options):
    guide = AutoGate(program, **options)
    guide()
    return guide


def test_every_gate_and_other_latents():
    """Sites, shapes, and starts by active probability; in a list of guides gates alone."""
    guide = started(init_active_prob={"a.z": 0.3}, init_jitter=0.0)
    assert {name: gate.batch_shape for name, gate in guide.posterior().items()} == {"a.z": (4,), "b": (2, 3)}
    torch.testing.assert_close(guide.posterior()["a.z"].active_prob.detach(), torch.full((4,), 0.3))
    torch.testing.assert_close(guide.posterior()["b"].active_prob.detach(), torch.full((2, 3), 0.9))
    values = guide()
    assert {name: value.shape for name, value in values.items()} == {"a.z": (4,), "b": (2, 3), "scale": ()}
    medians = guide.median()
    assert float(medians.pop("scale")) > 0
    assert all(
        torch.equal(x, y) for x, y in zip(medians.values(), (g.median for g in guide.posterior().values()), strict=True)
    )
    guides = AutoGuideList(model)
    guides.append(AutoGate(model))
    assert list(guides()) == ["a.z", "b"]


def test_the_prior_fixes_what_is_not_learned():
    """The temperature is the prior's, so that the KL is closed; options replace it."""
    assert started().posterior()["a.z"].fixed_options == {"temperature": 0.5, "gamma": -0.1, "zeta": 1.1}
    other = started(family_options={"temperature": 0.7}).posterior()["a.z"]
    assert other.fixed_options["temperature"] == 0.7


def test_jitter_is_that_of_the_paper():
    """A normal of standard deviation 0.01 on log alpha; 10,000 draws know theirs to 0.7 %."""

    def model():
        pyro.sample("z", HardConcrete(0.0).expand([10_000]).to_event(1))

    log_alpha = started(model).posterior()["z"].log_alpha
    assert log_alpha.std().item() == pytest.approx(0.01, rel=0.035)


def test_local_gates_in_a_subsampled_plate():
    """Parameters have the plate's full size; a step moves the rows that were drawn."""
    target = torch.linspace(0, 1, 8)

    def model():
        with pyro.plate("data", 8, subsample_size=3) as index:
            z = pyro.sample("z", HardConcrete(0.0))
            pyro.sample("y", dist.Normal(z, 0.1), obs=target[index])

    guide = started(model, init_jitter=0.0)
    before = guide.posterior()["z"].log_alpha.detach().clone()
    assert before.shape == (8,)
    train(L0_ELBO()(model, guide), torch.optim.SGD(guide.parameters(), lr=0.1), 1)
    assert (guide.posterior()["z"].log_alpha != before).sum() == 3


def test_starts_of_slabs():
    x, y = torch.randn(5, 6), torch.randn(5)
    model = partial(regression, gate=HardConcrete.from_active_prob(0.2), slab=dist.Normal(0.0, 1.0))
    start = torch.arange(6.0)
    guide = AutoSpikeSlab(model, slab={"w": "z"}, init_scale=0.2, init_loc={"w": start})
    guide(x, y)
    assert torch.equal(guide.slabs()["w"].mean.detach(), start)
    assert sorted(guide.median(x, y)) == ["w", "z"]
    assert list(guide.test_gates()) == ["z"]
    assert guide.slabs()["w"].scale.tolist() == pytest.approx([0.2] * 6)


GATES = [HardConcrete(torch.tensor([0.3, -1.0]), 0.6), RectifiedNormal(torch.tensor([0.3, 0.9]), 0.4)]


@pytest.mark.parametrize("gate", GATES, ids=lambda g: type(g).__name__)
def test_rectified_draws_have_the_gates_law(gate):
    """Mean and atoms of 40,000 draws, within five standard errors."""
    draws = 40_000
    with pyro.plate("draws", draws, dim=-1):
        z = poutine.reparam(lambda: pyro.sample("z", gate.to_event(1)), {"z": RectifyReparam()})()
    assert z.shape == (draws, 2)
    error = gate.variance.sqrt() / math.sqrt(draws)
    assert ((z.mean(0) - gate.mean).abs() < 5 * error).all()
    active = gate.active_prob
    assert (((z != 0).float().mean(0) - active).abs() < 5 * (active * (1 - active) / draws).sqrt()).all()


def test_parameters_per_gate_that_are_not_learned():
    """Gates with a temperature each are closed and dropped each by its own."""

    def model():
        pyro.sample("z", HardConcrete(torch.zeros(4), temperature=torch.tensor([0.2, 0.6, 2.0, 0.7])).to_event(1))

    guide = started(model, init_active_prob=0.5, init_jitter=0.0)
    guide.close("z", torch.tensor([2, 0]))
    expected = torch.tensor([1e-6, 0.5, 1e-6, 0.5])
    torch.testing.assert_close(guide.posterior()["z"].active_prob.detach(), expected, rtol=1e-4, atol=0)
    guide.keep({"z": torch.tensor([1, 2])})
    gate = guide.posterior()["z"]
    assert gate.temperature.tolist() == pytest.approx([0.6, 2.0])
    torch.testing.assert_close(gate.active_prob.detach(), expected[1:3], rtol=1e-4, atol=0)


def test_reparameterised_gates_keep_their_mask():
    """What was masked is not scored."""

    def model():
        with pyro.plate("units", 2):
            pyro.sample("z", HardConcrete(torch.zeros(2)).mask(torch.tensor([True, False])))

    trace = poutine.trace(poutine.reparam(model, {"z": RectifyReparam()})).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["z_base"]["log_prob"].ne(0).tolist() == [True, False]


# ------------------------------------------------------------ what is taken over from the prior


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
