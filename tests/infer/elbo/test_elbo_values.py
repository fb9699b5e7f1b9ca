"""Values of the objectives against formulas by hand, and refusals by site."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch.distributions import kl_divergence

from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO

Q = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
P = torch.tensor(-1.0, dtype=torch.float64)
POSTERIOR, PRIOR = HardConcrete(Q), HardConcrete(P)
ACTIVE = POSTERIOR.active_prob


def plated(fn):
    with pyro.plate("units", 3):
        return pyro.sample("z", fn)


def model():
    plated(PRIOR)


def guide():
    plated(POSTERIOR)


def near(expected):
    number = float(torch.as_tensor(expected, dtype=torch.float64).detach())
    return pytest.approx(number, rel=1e-12)  # a few roundings in float64


@pytest.mark.parametrize(
    ("lam", "size", "expected"),
    [
        (0.5, None, 0.5 * ACTIVE.sum()),
        ({"z": 0.5}, {"z": 10.0}, 5 * ACTIVE.sum()),
        (torch.tensor([1.0, 2.0, 3.0]), 2, (2 * torch.tensor([1.0, 2.0, 3.0]) * ACTIVE).sum()),
        ({}, 7.0, 0.0),
    ],
)
def test_l0_penalty(lam, size, expected):
    """Eq. 22: lam * |g| * P(z != 0), by number, by site and by gate."""
    assert L0_ELBO("l0", lam=lam, group_size=size).loss(model, guide) == near(expected)


def test_expected_weight_decay():
    """Eq. 17: half of the coefficient times P(z != 0) times the squared norm of the gate's weights."""
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    elbo = L0_ELBO("l0", weight_decay=0.2, square_norm={"z": lambda: weight.square().sum(0)})
    loss = elbo.differentiable_loss(model, guide)
    assert loss.item() == near((0.1 * ACTIVE * weight.square().sum(0)).sum())
    loss.backward()
    torch.testing.assert_close(weight.grad, 0.2 * ACTIVE * weight.detach())
    assert elbo.terms(model, guide)["l2"].item() == near(loss.detach())


def with_data(scale=1.0):
    z = plated(PRIOR)
    with poutine.scale(scale=scale), pyro.plate("data", 4):
        pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=torch.arange(4.0).double())


def test_terms_add_up_and_leave_the_step():
    """The named parts are those of the loss at the same noise."""
    elbo = L0_ELBO("free_energy", lam=0.3, num_particles=2)
    pyro.set_rng_seed(3)
    terms = elbo.terms(with_data, guide)
    pyro.set_rng_seed(3)
    assert sum(terms.values()).item() == near(elbo.loss(with_data, guide))
    assert list(terms) == ["nll", "l0", "l2", "kl_gate", "kl_slab", "kl_other"]
    assert elbo.step == 0
    elbo.differentiable_loss(with_data, guide)
    elbo.loss_and_grads(with_data, guide)
    assert elbo.step == 2
    with torch.no_grad():  # a validation loss leaves an annealing schedule where it was
        elbo.differentiable_loss(with_data, guide)
    assert elbo.step == 2


def test_kl_scale_anneals_every_kl_and_nothing_else():
    """Eq. 21, with a number and with a schedule that sees the steps taken."""
    kl = kl_divergence(POSTERIOR, PRIOR).sum()
    assert L0_ELBO().loss(model, guide) == near(TraceMeanField_ELBO().loss(model, guide)) == near(kl)
    assert L0_ELBO(kl_scale=0.25).loss(model, guide) == near(0.25 * kl)
    elbo = L0_ELBO("free_energy", lam=0.5, kl_scale=lambda step: min(1.0, step / 2))
    losses = [elbo.differentiable_loss(model, guide).item() for _ in range(4)]
    penalty = 0.5 * ACTIVE.sum()
    assert losses == [near(penalty + s * kl) for s in (0.0, 0.5, 1.0, 1.0)]


@pytest.mark.parametrize("how", ["handler", "distribution", "to_event"])
def test_masks_and_scales(how):
    """What is masked costs nothing, what is scaled costs as often."""
    mask = torch.tensor([True, False, True])

    def sample(fn):
        if how == "handler":
            with poutine.scale(scale=3.0), poutine.mask(mask=mask):
                plated(fn)
        elif how == "distribution":
            with poutine.scale(scale=3.0):
                plated(fn.expand([3]).mask(mask))
        else:
            with poutine.scale(scale=torch.tensor(3.0)):
                pyro.sample("z", fn.expand([3]).mask(mask).to_event(1))

    terms = L0_ELBO(lam=1.0).terms(lambda: sample(PRIOR), lambda: sample(POSTERIOR))
    assert terms["l0"].item() == near(3 * (ACTIVE * mask).sum())
    if how == "handler":
        assert terms["kl_gate"].item() == near(3 * (kl_divergence(POSTERIOR, PRIOR) * mask).sum())


def gaussian():
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    with pyro.plate("two", 2):
        b = pyro.sample("b", dist.Exponential(1.0))
    pyro.sample("y", dist.Normal(a + b.sum(), 1.0), obs=torch.tensor(0.7))


@pytest.mark.parametrize("family", [AutoNormal, AutoMultivariateNormal, AutoDelta])
def test_other_latents_are_those_of_pyro(family):
    """Without gates, every objective is Pyro's ELBO, in mean over draws."""
    guide = family(gaussian)
    guide()
    draws, reference = (
        torch.tensor([elbo.loss(gaussian, guide) for _ in range(200)]) for elbo in (L0_ELBO("l0"), Trace_ELBO())
    )
    error = math.sqrt((draws.var() + reference.var()) / 200)
    assert abs(draws.mean() - reference.mean()) <= 5 * error + 1e-5  # an AutoDelta has no noise


def test_bias_of_a_sampled_kl_and_exactness_of_ours():
    """One gate, q: log alpha 0.3, p: -1: the gradient is +0.4069; a sampled KL gives +0.3441 with any particles."""
    draws = 40_000

    def gradients(elbo):
        leaf = torch.full((draws,), 0.3, requires_grad=True)

        def sample(fn):
            with pyro.plate("draws", draws):
                pyro.sample("z", fn)

        elbo.differentiable_loss(lambda: sample(HardConcrete(-1.0)), lambda: sample(HardConcrete(leaf))).backward()
        return leaf.grad

    truth = 0.40690
    assert gradients(L0_ELBO())[0].item() == pytest.approx(truth, abs=2e-5)  # four digits are given
    assert gradients(TraceMeanField_ELBO())[0].item() == pytest.approx(truth, abs=2e-5)
    for particles in (1, 10):
        grad = gradients(Trace_ELBO(num_particles=particles))
        error = grad.std().item() / math.sqrt(draws)
        assert abs(grad.mean().item() - 0.3441) < 5 * error + 5e-5
        assert abs(grad.mean().item() - truth) > 10 * error


def sampler(**sites):
    def run():
        for name, fn in sites.items():
            pyro.sample(name, fn)

    return run


NORMAL = dist.Normal(0.0, 1.0)
GATE = HardConcrete(torch.tensor(0.0))
NOTHING, GATED, GATED_NORMAL = sampler(), sampler(z=GATE), sampler(z=GATE, w=NORMAL)
TWO_NORMALS = sampler(w=NORMAL, v=NORMAL)
THREE_GATES_TWO_NORMALS = sampler(z=POSTERIOR.to_event(1), w=dist.Normal(torch.zeros(2), 1.0).to_event(1))


def slab(**sites):
    return {"objective": "spike_slab", "slab": sites}


def scaled(number):
    return poutine.scale(GATED, torch.tensor(number))


@pytest.mark.parametrize(
    ("model", "guide", "options", "message"),
    [
        (model, guide, {"lam": {"y": 1.0}}, r"lam by gate site, one of \['z'\], but got 'y'"),
        (model, guide, {"group_size": {"y": 1.0}}, "group_size by gate site"),
        (model, guide, {"weight_decay": 1.0}, "square_norm for gate site 'z'"),
        (model, guide, {"lam": torch.ones(2, 3)}, "broadcast against gate site 'z'"),
        (GATED, NOTHING, {}, "Gate site 'z' of the model has no posterior"),
        (sampler(w=NORMAL), NOTHING, {}, "Latent site 'w' of the model has no posterior"),
        (GATED, sampler(z=NORMAL), {}, "Site 'z' is a gate .* in the model but no gate .* biased"),
        (sampler(z=NORMAL), GATED, {}, "Site 'z' is no gate"),
        (NOTHING, GATED, {}, "Gate site 'z' of the guide is not in the model"),
        (NOTHING, sampler(w=NORMAL), {}, "Site 'w' of the guide is not in the model. Mark"),
        (GATED, sampler(z=POSTERIOR.to_event(1)), {}, "Shapes of model and guide differ at site 'z'"),
        (poutine.scale(GATED, 2.0), GATED, {}, "gate site 'z' under a scale or a mask to have a BernoulliGate"),
        (scaled(2.0), scaled(3.0), {}, "scale of model and guide differ"),
        (poutine.mask(GATED, torch.tensor(False)), GATED, {}, "gate site 'z' under a scale or a mask"),
        (sampler(k=dist.Poisson(2.0)), sampler(k=dist.Poisson(3.0)), {}, "reparameterised posterior at .* site 'k'"),
        (GATED_NORMAL, GATED_NORMAL, slab(v="z"), "latent weights of the model, but got 'z' of 'v'"),
        (GATED_NORMAL, GATED_NORMAL, slab(w="y"), r"gate site, one of \['z'\], .* got 'y' of 'w'"),
        (TWO_NORMALS, TWO_NORMALS, slab(w="v"), r"gate site, one of \[\], .* got 'v' of 'w'"),
        (
            *[THREE_GATES_TWO_NORMALS] * 2,
            slab(w="z"),
            r"gates at site 'z' that broadcast against slab site 'w' of shape \(2,\), but got \(3,\)",
        ),
    ],
)
def test_what_raises_names_the_site(model, guide, options, message):
    """Wherever a gate's KL would be sampled, or model and guide disagree."""
    with pytest.raises(ValueError, match=message):
        L0_ELBO(**options).loss(model, guide)
