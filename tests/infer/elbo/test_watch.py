"""Trainings that go wrong stop or warn, with the term, the site and the step."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, factor
from pyro_l0.infer import runs as watch
from tests.infer.regressions import train

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0].clone()


def model(x, y):
    z = pyro.sample("z", HardConcrete(torch.zeros(3)).to_event(1))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x * (z * w)).sum(-1), 1.0), obs=y)  # also of particles in front


def bernoulli(x, y):
    z = pyro.sample("z", BernoulliGate(logits=torch.zeros(3)).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ z, 1.0), obs=y)


def spike_slab(**options):
    slab = {"w": "z"}
    return L0_ELBO("spike_slab", slab=slab, **options), model, AutoSpikeSlab(model, slab=slab)


def estimated(name, **options):
    return L0_ELBO(estimator=name, **options), bernoulli, AutoGate(bernoulli, family=BernoulliGate)


OBJECTIVES = {
    "plain": spike_slab,
    "particles": lambda: spike_slab(num_particles=3),
    "vectorised": lambda: spike_slab(num_particles=3, vectorize_particles=True, max_plate_nesting=1),
    "leave_one_out": lambda: estimated("leave_one_out", num_particles=2),
    "mapped": lambda: estimated("leave_one_out", num_particles=2, vectorize_particles=True),
    "score_function": lambda: estimated("score_function"),
    "rebar": lambda: estimated("rebar"),
}


def started(objective):
    elbo, program, guide = objective
    svi = SVI(program, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
    for _ in range(2):
        svi.step(X, Y)
    return svi


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("where", ["x", "y"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_nan_in_the_data_stops_the_step(name, where, validated):
    """With the term, the step, and the site or what torch's validation says; mapped runs have no sites."""
    data = {"x": X.clone(), "y": Y.clone()}
    data[where][4] = math.nan
    with pyro.validation_enabled(validated):
        svi = started(OBJECTIVES[name]())
        with pytest.raises(ValueError, match="nll") as caught:
            svi.step(**data)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "step 2" in text
    assert "site 'y'" in text or "found invalid values" in text or name == "mapped"


def simple(guide_logits=0.0, prior_logits=0.0):
    """A model and a guide of one Bernoulli gate."""
    prior = BernoulliGate(logits=torch.tensor(prior_logits), validate_args=False)
    posterior = BernoulliGate(logits=torch.tensor(guide_logits, requires_grad=True), validate_args=False)

    def model():
        z = pyro.sample("z", prior)
        factor("y", -((z - 1.0) ** 2))

    return model, lambda: pyro.sample("z", posterior)


@pytest.mark.parametrize(
    ("options", "logits", "message"),
    [
        ({"kl_scale": lambda step: math.nan if step == 1 else 1.0}, (), r"kl_scale\(1\) to be finite.*got nan"),
        ({"kl_scale": lambda step: torch.tensor(math.inf * step)}, (), r"kl_scale\(\d\) to be finite"),
        ({"kl_scale": lambda step: None}, (), r"kl_scale\(0\) to be a number or a tensor, but got .*NoneType"),
        ({}, (math.inf, 0.0), r"The loss is nan at step 0: nll is nan"),
        ({}, (0.0, math.inf), r"The loss is inf at step 0: kl_gate of site 'z' is inf"),
    ],
)
def test_other_terms_that_are_not_finite(options, logits, message):
    """Named by the option, or by term and site; an estimate of a gradient is a part of the nll."""
    model, guide = simple(*logits)
    elbo = L0_ELBO(estimator="score_function", **options)

    def two_steps():
        for _ in range(2):
            elbo.differentiable_loss(model, guide)

    with pytest.raises((TypeError, ValueError), match=message):
        two_steps()


def test_a_price_that_is_changed_to_nan():
    """A tensor of prices belongs to the user, who may change it during a training."""
    lam = torch.ones(3)
    elbo, guide = L0_ELBO("l0", lam=lam), AutoGate(model_of_gates)
    elbo.differentiable_loss(model_of_gates, guide)
    lam[1] = math.nan
    with pytest.raises(ValueError, match=r"at step 1: l0 of site 'z' is nan"):
        elbo.differentiable_loss(model_of_gates, guide)


def model_of_gates():
    z = pyro.sample("z", HardConcrete(torch.zeros(3)).to_event(1))
    factor("y", -z.sum())


def test_a_device_is_checked_every_hundredth_step(monkeypatch):
    """In between the host does not wait: the terms are kept, and the first bad one is named with its step."""
    checked = []
    monkeypatch.setattr(torch, "stack", lambda xs, _stack=torch.stack: checked.append(len(xs)) or _stack(xs))
    seen = watch.Watch()

    class Elsewhere:
        """A loss whose device is not the host's."""

        device = torch.device("cuda")

    parts = {"nll": torch.tensor(1.0), "kl_gate": torch.tensor(2.0)}
    for step in range(130):
        seen.loss(step, Elsewhere(), parts, lambda: "")
    assert checked == [2 * watch.EVERY]
    seen.loss(130, Elsewhere(), parts | {"nll": torch.tensor(math.nan)}, lambda: "")
    bad = {name: part * math.nan for name, part in parts.items()}
    for step in range(131, 199):
        seen.loss(step, Elsewhere(), bad, lambda: "")
    with pytest.raises(ValueError, match="nll is nan at step 130; when checked at step 199: what is bad now"):
        seen.loss(199, Elsewhere(), bad, lambda: "what is bad now")


def test_all_gates_closed_is_one_warning_for_a_site():
    """For each site once, and none for a site with a gate that is open."""

    def two_sites():
        a = pyro.sample("a", HardConcrete(torch.zeros(2)).to_event(1))
        b = pyro.sample("b", HardConcrete(torch.zeros(2)).to_event(1))
        factor("y", a.sum() + b.sum())

    guide = AutoGate(two_sites)
    guide()
    elbo = L0_ELBO("l0", lam={"a": 100.0})
    optimiser = torch.optim.Adam(guide.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(lambda: elbo.differentiable_loss(two_sites, guide), optimiser, 401)
    assert len(caught) == 1
    assert "All gates of site 'a' are closed at step" in str(caught[0].message)
    assert caught[0].category is UserWarning


@pytest.mark.parametrize("kind", ["plate", "subsample", "mean", "sum"])
def test_an_empty_minibatch(kind):
    """Refused, also where its loss would be 0 or not a number."""

    def program(index, x, y):
        z = pyro.sample("z", HardConcrete(torch.zeros(3)).to_event(1))
        if kind in ("mean", "sum"):
            factor("y", -20 * F.mse_loss(x @ z, y, reduction=kind))
        else:
            with pyro.plate("data", 20, subsample=index) if kind == "subsample" else pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(x @ z, 1.0), obs=y)

    def of_batch(batch):
        program(**batch)

    batch = {"index": torch.arange(0), "x": X[:0], "y": Y[:0]}
    message = r"at least one example, but .* empty tensors of shapes \[\(0,\), \(0, 3\), \(0,\)\]"
    for model, data in ((of_batch, [batch]), (program, batch.values())):
        with pytest.raises(ValueError, match=message):
            L0_ELBO("l0").differentiable_loss(model, AutoGate(model), *data)


def test_nothing_is_read_on_meta():
    def program(x):
        z = pyro.sample("z", HardConcrete(torch.zeros(3, device="meta"), validate_args=False).to_event(1))
        factor("y", -(x @ z).sum())

    log_alpha = torch.zeros(3, device="meta", requires_grad=True)
    posterior = HardConcrete(log_alpha, validate_args=False).to_event(1)
    elbo = L0_ELBO("l0", lam=0.1)
    for _ in range(watch.EVERY + 1):
        elbo.differentiable_loss(
            program, lambda x: pyro.sample("z", posterior), torch.zeros(2, 3, device="meta")
        ).backward()
    assert log_alpha.grad.device.type == "meta"
