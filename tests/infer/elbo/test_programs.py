"""Programs of other kinds than the examples': each is right, or refused by a message that names the thing."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import nn

from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate, factor
from pyro_l0.infer.record import sample
from pyro_l0.infer.reparam import RectifyReparam, complete_samples
from pyro_l0.infer.runs import forked_generators
from pyro_l0.nn import L0Gate, NetworkCost
from tests.networks import Net

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
NETS = [nn.Sequential(L0Gate(3), nn.Linear(3, 2))]


def gates():
    return pyro.sample("z", HardConcrete(torch.zeros(3)).to_event(1))


def with_a_global():
    F.cross_entropy(NETS[0](X), Y)


def with_a_nonlocal():
    net = NETS[0]
    return lambda: print(end=str(F.cross_entropy(net(X), Y))[:0])


class Trainer:
    def __init__(self):
        self.net = NETS[0]

    def model(self):
        F.cross_entropy(self.net(X), Y)

    def __call__(self):
        self.model()


def network(returns):
    """A classifier as torch users write it, on the data."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 1))
    return Net(lambda net, x, y: returns(F.mse_loss(net.net(x)[:, 0], y)), net=net), X, Y.float()


def function():
    effect = pyro.deterministic("effect", 2 * gates())
    return F.mse_loss(X @ effect, Y.float())


LOST = {
    "global": (with_a_global,),
    "nonlocal": (with_a_nonlocal(),),
    "method": (Trainer().model,),
    "object": (Trainer(),),
    "partial": (partial(with_a_global),),
    "handler": (poutine.block(with_a_global, hide=["other"]),),
    "module": (Net(lambda net: with_a_global(), net=NETS[0]),),
    "returned tensor": network(lambda x: x),
    "returned tuple": network(lambda x: (x, None)),
    "returned dict": network(lambda x: {"loss": x}),
    "returned nothing": network(lambda x: None),
    "returned object": network(lambda x: SimpleNamespace(loss=x)),
    "function": (function,),
}


@pytest.mark.parametrize("name", LOST)
def test_a_loss_that_is_dropped_or_returned(name):
    """There is no likelihood, and only the price of gates would be trained; networks in use tell it from a prior."""
    model, *data = LOST[name]
    message = "has parameters to train"
    if data:
        message = "no observed site and no factor.*pyro_l0.infer.factor"
    elif model is function:
        message = r"returns a tensor of shape \(\)"
    elbo = L0_ELBO("l0", lam=0.1)
    for call in (elbo.differentiable_loss, elbo.loss_and_grads, elbo.loss) if data else (elbo.differentiable_loss,):
        with pytest.raises(ValueError, match=f"Expected a likelihood.*{message}"):
            call(model, AutoGate(model), *data)


def test_a_prior_alone():
    """Draws that are returned are no loss."""
    assert L0_ELBO("l0", lam=1.0).differentiable_loss(gates, AutoGate(gates)).requires_grad


def test_a_cost_that_was_read_before_the_guide():
    """Gates without a name go by their path in the network; after the guide's call by those of its sites."""

    def forward(net, x):
        factor("y", -net.net(x).square().sum())

    model = Net(forward, net=nn.Sequential(nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 1)))
    before, guide = NetworkCost(model.net, X).group_sizes, AutoGate(model)
    guide(X)
    with pytest.raises(ValueError, match=r"\['gate0'\], but got '2'; call the guide before NetworkCost"):
        L0_ELBO("l0", lam=0.1, group_size=before)(model, guide)(X)
    L0_ELBO("l0", lam=0.1, group_size=NetworkCost(model.net, X).group_sizes)(model, guide)(X)


def test_a_prior_from_a_tensor_around_it():
    rates = torch.full((3,), 0.3)

    def model():
        with pyro.plate("gates", 3):
            pyro.sample("z", HardConcrete.from_active_prob(rates))

    guide = AutoGate(model, init_active_prob=0.3, init_jitter=0.0)
    assert L0_ELBO("free_energy").differentiable_loss(model, guide).item() == pytest.approx(0.0, abs=1e-6)


def test_a_likelihood_that_is_masked_for_now():
    """A distribution's mask of False makes no deterministic value of an observation."""

    def model():
        z = gates()
        pyro.deterministic("twice", 2 * z)
        pyro.sample("y", dist.Normal(z, 1.0).to_event(1).mask(False), obs=torch.zeros(3))

    assert L0_ELBO("l0").differentiable_loss(model, AutoGate(model)).item() == 0.0
    reparameterised = poutine.reparam(model, {"z": RectifyReparam()})
    assert sorted(complete_samples(reparameterised, {"z_base": torch.zeros(2, 3)})) == ["twice", "z", "z_base"]


@pytest.mark.parametrize("several", [False, True])
def test_nan_in_the_first_step_of_a_guide(several):
    """Its first call runs the model: the term and the step are named."""

    def model(x, y):
        logits = NETS[0](x)
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0)) if several else 1.0
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(logits[:, 0], scale), obs=y)

    if several:
        guide = AutoGuideList(model)
        guide.append(AutoGate(poutine.block(model, hide=["scale"])))
        guide.append(AutoNormal(poutine.block(model, expose=["scale"])))
    else:
        guide = AutoGate(model)
    x = X.clone()
    x[2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"found invalid values[^$]*likelihood \(nll\) of the model failed at step 0"):
        L0_ELBO("l0").differentiable_loss(model, guide, x, Y.float())


def test_a_temperature_that_a_gate_sets_is_not_inherited():
    """Gates below others: the guide's temperatures are no draw's."""

    def model():
        above = pyro.sample("above", HardConcrete(torch.zeros(3)).to_event(1))
        gate = HardConcrete.from_active_prob(0.1 + 0.5 * above, one_given_active=0.5 + 0.4 * above)
        pyro.sample("z", gate.to_event(1))
        factor("y", -above.sum())

    for seed in range(3):
        pyro.set_rng_seed(seed)
        guide = AutoGate(model)
        guide()
        assert guide.posterior()["z"].fixed_options["temperature"] == pytest.approx(2 / 3)


def test_tensors_that_are_there_before_are_inherited():
    """Of layers' priors, with a second run of the model and no more."""
    prior = HardConcrete.from_active_prob(0.2, one_given_active=torch.tensor([0.7, 0.8, 0.9]))
    layers, runs = [L0Gate(3, prior=prior), L0Gate(3, prior=prior)], []

    def model():
        runs.append(1)
        factor("y", -nn.Sequential(*layers)(X).sum())

    guide = AutoGate(model)
    guide()
    assert len(runs) == 2
    assert all(torch.equal(gate.temperature, prior.temperature) for gate in guide.posterior().values())


def in_plate(name, fn, obs=None, **options):
    with pyro.plate("units", 3):
        return pyro.sample(name, fn, obs=obs, **options)


GATES = HardConcrete(torch.zeros(3))
SHAPES = {
    "y": (lambda: pyro.sample("y", dist.Normal(torch.zeros(3, 1), 1.0), obs=torch.zeros(3)), gates),
    "y, by its value": (lambda: pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.zeros(3)), gates),
    "y, in a plate": (lambda: in_plate("y", dist.Normal(torch.zeros(3, 1), 1.0), torch.zeros(3)), gates),
    "y, in an event": (lambda: pyro.sample("y", dist.Normal(torch.zeros(2, 3), 1.0).to_event(1), obs=X[:2]), gates),
    "w": (
        lambda: in_plate("w", dist.Normal(torch.zeros(3), 1.0)),
        lambda: [gates(), pyro.sample("w", dist.Normal(torch.zeros(3), 1.0))],
    ),
    "w, auxiliary": (
        lambda: in_plate("w", dist.Normal(torch.zeros(3), 1.0)),
        lambda: [
            gates(),
            pyro.sample("w, auxiliary", dist.Normal(torch.zeros(3), 1.0), infer={"is_auxiliary": True}),
            in_plate("w", dist.Normal(torch.zeros(3), 0.1)),
        ],
    ),
    "v": (lambda: in_plate("v", GATES), lambda: [gates(), pyro.sample("v", GATES)]),
    "v, of the model": (
        lambda: pyro.sample("v, of the model", GATES),
        lambda: [gates(), in_plate("v, of the model", GATES)],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_outside_of_plates(name):
    """Of data, latents and gates, in model and guide: as Pyro's own ELBOs refuse it."""
    rest, guide = SHAPES[name]
    site = name if name in ("w, auxiliary", "v, of the model") else name[0]
    with pytest.raises(ValueError, match=f'at site "{site}", invalid log_prob shape'):
        L0_ELBO("l0").loss(lambda: [gates(), rest()], guide)


OPEN = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    ("around", "gated", "count"),
    [
        (poutine.mask(mask=OPEN), lambda: in_plate("z", GATES), 2),
        (poutine.scale(scale=0.5), lambda: in_plate("z", GATES), 1.5),
        (poutine.scale(scale=torch.tensor(0.5)), lambda: in_plate("z", GATES), 1.5),
        (poutine.scale(scale=0.5), gates, 1.5),
        (poutine.scale(scale=torch.tensor(0.5)), gates, 1.5),
        (poutine.mask(mask=True), lambda: in_plate("z", GATES, torch.ones(3), obs_mask=~OPEN), 2),
    ],
    ids=["mask", "scale", "tensor", "scale of an event", "tensor of an event", "obs_mask"],
)
def test_scales_and_masks_of_a_model(around, gated, count):
    """An AutoGate takes those around a gate, as it takes the plates."""

    def model():
        with around:
            gated()
        pyro.sample("v", HardConcrete(0.0))

    guide = AutoGate(model, init_active_prob=0.3, init_jitter=0.0)
    found = L0_ELBO("free_energy", lam=2.0).terms(model, guide)
    kl = torch.distributions.kl_divergence(guide.posterior()["v"], HardConcrete(0.0)).item()
    assert found["l0"].item() == pytest.approx(2.0 * 0.3 * (1 + count))
    assert found["kl_gate"].item() == pytest.approx(kl * (1 + count))


def test_a_discrete_latent():
    """Enumerated or not: summing it out is said to be the way."""

    def model():
        gates()
        pyro.sample("k", dist.Categorical(torch.ones(3)), infer={"enumerate": "parallel"})

    guide = AutoGate(poutine.block(model, hide=["k"]))
    with pytest.raises(ValueError, match=r"site 'k' of the model has no posterior .*sum it out in the model"):
        L0_ELBO("l0").loss(model, guide)
    with pytest.raises(ValueError, match=r"posterior at latent site 'k'.*sum it out in the model"):
        L0_ELBO("l0").loss(model, lambda: [gates(), pyro.sample("k", dist.Categorical(torch.ones(3)))])
    with pytest.raises(ValueError, match=r"site 'k' to have a continuous prior.* Sum it out in the model"):
        AutoGate(model)()


# ------------------------------------------------------------ log probabilities that a model adds


LOG_FACTOR = torch.tensor([-1.5, 0.25, -3.0])


def scalar_model(add):
    add("y", LOG_FACTOR.sum())


def plate_model(add):
    with pyro.plate("data", 12, subsample=torch.arange(3)):
        add("y", LOG_FACTOR)


def scaled_model(add):
    with poutine.scale(scale=4.0):
        add("y", LOG_FACTOR.sum())


def masked_model(add):
    with pyro.plate("data", 3), poutine.mask(mask=torch.tensor([True, False, True])):
        add("y", LOG_FACTOR)


@pytest.mark.parametrize(
    ("model", "expected"), [(scalar_model, 4.25), (plate_model, 17.0), (scaled_model, 17.0), (masked_model, 4.5)]
)
def test_loss_is_that_of_pyros_factor(model, expected):
    """In this library's loss and in one of Pyro's, with plates, scales and masks around it."""
    for loss in (L0_ELBO("l0"), Trace_ELBO()):
        for add in (factor, pyro.factor):
            assert loss.loss(model, lambda _: None, add) == expected


def test_gradients_and_terms():
    """The gradient reaches what the log probability was made of, and the value counts as likelihood."""
    weight = torch.tensor(0.7, requires_grad=True)

    def model():
        factor("y", -(weight**2) * torch.ones(2, 3))
        factor("x", weight)

    elbo = L0_ELBO("l0")
    elbo.differentiable_loss(model, lambda: None).backward()
    assert weight.grad.item() == pytest.approx(6 * 2 * 0.7 - 1)
    assert elbo.terms(model, lambda: None)["nll"].item() == pytest.approx(6 * 0.49 - 0.7)


def test_nothing_is_checked():
    """Not a number passes, as a check would make the host wait; the loss shows it."""
    elbo, value = L0_ELBO("l0"), torch.tensor(torch.nan)
    with pyro.validation_enabled(True):
        assert torch.isnan(elbo.differentiable_loss(lambda: factor("y", value), lambda: None))


def test_a_name_is_used_once():
    """Beside another factor, a sample and a gate of the library."""
    value, gate = torch.tensor(0.0), HardConcrete(0.0)
    samples = (lambda name, _: pyro.sample(name, dist.Normal(0.0, 1.0), obs=value), lambda name, _: sample(name, gate))
    for first in (factor, *samples):

        def model(first=first):
            first("y", value)
            factor("y", value)

        with pytest.raises(RuntimeError, match="Multiple sample sites named 'y'"):
            L0_ELBO("l0").loss(model, lambda: pyro.sample("y", gate))


def test_a_trace_has_it():
    """Handlers of Pyro's see an observed site."""
    site = poutine.trace(factor).get_trace("y", LOG_FACTOR).nodes["y"]
    assert site["is_observed"]
    assert site["fn"].log_prob(site["value"]).tolist() == LOG_FACTOR.tolist()


def test_generators_are_as_before_where_a_run_raises():
    """NumPy's, torch's and Python's; a diagnosis measures losses that may fail."""

    def states():
        return np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist(), random.getstate()  # noqa: NPY002

    def fails():
        with forked_generators():
            np.random.rand(), torch.rand(3), random.random()  # noqa: NPY002
            raise RuntimeError("in the middle")

    before = states()
    with pytest.raises(RuntimeError, match="in the middle"):
        fails()
    assert states() == before
