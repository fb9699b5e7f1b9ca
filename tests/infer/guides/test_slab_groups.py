"""Slabs whose gates an index names, as factors with dummies have: 6 gates and 14 weights, against enumeration."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0 import BernoulliGate
from pyro_l0.diagnostics import to_arviz
from pyro_l0.infer import L0_ELBO, AutoSpikeSlab, check_fit, fit
from tests.infer.regressions import correlated_guide, enumerated

GROUP = torch.tensor([0, 1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 5, 5, 5])
SLAB = {"w": ("z", GROUP)}
GATES, WEIGHTS, N, RATE, WIDTH = 6, 14, 60, 0.3, 0.5


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, WEIGHTS, generator=generator, dtype=torch.float64)
    x[:, 12] = x[:, 0] + 0.3 * x[:, 12]  # of another group
    x[:, 1] = x[:, 4] + 0.2 * x[:, 1]
    y = x @ torch.tensor([0.45, 0.3, -0.3, 0, 0, 0, 0, 0.25, 0, -0.3, 0, 0, 0, 0]).double()
    return x, y + torch.randn(N, generator=generator, dtype=torch.float64)


X, Y = data()


def model(group=GROUP, gates=GATES):
    one = torch.ones((), dtype=torch.float64)
    with pyro.plate("gates", gates):
        z = pyro.sample("z", BernoulliGate(probs=RATE * one))
    with pyro.plate("weights", WEIGHTS):
        w = pyro.sample("w", dist.Normal(0 * one, WIDTH * one))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal((z[..., group] * w) @ X.mT, one), obs=Y)


def exact():
    return enumerated(X, Y, GROUP, RATE, WIDTH)


@pytest.mark.slow
def test_a_fit_is_right():
    """Within .02 of the enumeration, from the guide, the check and a refined posterior; in the weights' shape."""
    probs, evidence = exact()
    guide = correlated_guide(model, SLAB)
    result = fit(model, guide, steps=100, num_particles=64, seed=0)
    torch.testing.assert_close(guide.active_probs()["z"], probs, rtol=0, atol=0.02)
    assert evidence - 0.05 < result.evidence.elbo < result.evidence.importance_weighted + 0.01
    assert result.evidence.importance_weighted == pytest.approx(evidence, abs=0.02)
    check = check_fit(model, guide, chains=64)
    assert check.ok
    torch.testing.assert_close(check.active_probs["z"], probs, rtol=0, atol=0.02)
    summary = guide.summary()["w"]
    assert torch.equal(summary.active_probs, summary.active_probs[torch.tensor([0, *range(1, 14)])])
    torch.testing.assert_close(summary.active_probs, probs[GROUP], rtol=0, atol=0.02)
    draws = guide.draws(50)
    assert torch.equal(guide.products(draws)["w"], draws["z"][:, GROUP] * draws["w"])
    found = to_arviz(model, guide, draws=20, seed=0)["posterior"]
    assert found["z * w"].shape == (1, 20, WEIGHTS)
    refined = guide.refine(seed=0, flips=600)
    torch.testing.assert_close(refined.active_probs()["z"], probs, rtol=0, atol=0.02)


@pytest.mark.filterwarnings("ignore:The loss was still falling:UserWarning")
@pytest.mark.parametrize("options", [{}, {"slabs": "structured"}, {"gates": "autoregressive"}])
def test_other_kinds_of_guides(options):
    """They train, and the chains of the check mend them."""
    guide = AutoSpikeSlab(model, SLAB, **options)
    fit(model, guide, steps=60, num_particles=32, seed=0)
    check = check_fit(model, guide, chains=64)
    torch.testing.assert_close(check.active_probs["z"], exact()[0], rtol=0, atol=0.03)


def test_the_loss_counts_each_weight_by_its_gate():
    """Eq. 20: P(z != 0) of its gate times the KL of each weight"""
    probs, scales = torch.linspace(0.1, 0.6, GATES).double(), torch.linspace(0.2, 1.5, WEIGHTS).double()

    def guide():
        with pyro.plate("gates", GATES):
            pyro.sample("z", BernoulliGate(probs=probs))
        with pyro.plate("weights", WEIGHTS):
            pyro.sample("w", dist.Normal(torch.zeros_like(scales), scales))

    terms = L0_ELBO("spike_slab", slab={"w": ("z", GROUP.tolist())}, estimator="score_function").terms(model, guide)
    ratio = (scales / WIDTH) ** 2
    expected = (probs[GROUP] * 0.5 * (ratio - 1 - ratio.log())).sum()
    torch.testing.assert_close(terms["kl_slab"], expected)


@pytest.mark.parametrize("index", [GROUP.double(), GROUP > 2, torch.tensor(3)])
def test_an_index_that_is_none(index):
    """Numbers that are no integers, and one number alone."""
    for of_slab in (lambda slab: AutoSpikeSlab(model, slab), lambda slab: L0_ELBO("spike_slab", slab=slab)):
        with pytest.raises(TypeError, match=r"Expected slab\['w'\] to be .* index of integers"):
            of_slab({"w": ("z", index)})


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (GROUP + 1, "to index the last dimension of gate site 'z', .* numbers from 1 to 6"),
        (GROUP - 1, "numbers from -1 to 4"),
        (GROUP[:5], r"broadcast against slab site 'w' of shape \(14,\), but got \(5,\)"),
        (GROUP.clamp(max=4), r"each of the 6 gates of site 'z', but \[5\] switch no element"),
    ],
)
def test_an_index_that_does_not_fit(index, message):
    """Out of range, of another shape, without a gate; by guides and by the objective."""
    slab = {"w": ("z", index)}
    with pytest.raises(ValueError, match=message):
        AutoSpikeSlab(model, slab)()
    known = AutoSpikeSlab(model, SLAB)
    known()
    with pytest.raises(ValueError, match=message):
        L0_ELBO("spike_slab", slab=slab, estimator="score_function").loss(model, known)


def test_an_index_that_is_not_the_models():
    """A correlated guide finds that a weight follows another gate than the index says."""
    other = GROUP.clone()
    other[[0, 1]] = other[[1, 0]]
    with pytest.raises(ValueError, match="Expected slabs 'w' to enter the model as products with their gates"):
        AutoSpikeSlab(model, {"w": ("z", other)}, slabs="structured")()


def test_gates_in_a_part_of_their_plate():
    """The index has no meaning there."""

    def program():
        with pyro.plate("gates", 12, subsample_size=GATES):
            z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.3)))
        with pyro.plate("weights", WEIGHTS):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal((z[..., GROUP] * w).sum(), 1.0), obs=torch.tensor(0.0))

    with pytest.raises(ValueError, match="in plates of their full size, but 'gates' is subsampled"):
        AutoSpikeSlab(program, SLAB)()
