"""Chains of gates and scales against sums over all gates and a grid of both scales."""

import dataclasses
import math

import pytest
import torch

import pyro_l0.maths.second_order
from pyro_l0.maths.second_order import DesignQuadratic
from pyro_l0.maths.tempered_gibbs import GatesAndScales, IndependentGates, sampled_target
from tests.maths.spike_and_slab import Regression, prior, seeded, vectors

REGRESSION = Regression.drawn(20, 3, 8, rho=0.8)
SPARSE = prior(0.3)
CHAINS = 32
RANGES = ((-1.5, 1.5, 31), (-5.0, 3.5, 30))  # of the logarithms of noise and slabs, and how many nodes


def log_density(theta, regression=REGRESSION):
    """What no gate has a part in, with log-normal priors of the scales."""
    noise, slab = theta.unbind(1)
    rest = (regression.weights * regression.y.square()).sum()
    n = len(regression.y)
    return -n * noise - 0.5 * rest * (-2 * noise).exp() - 0.5 * noise.square() - 0.5 * (slab + 0.5).square()


def joint(nodes, regression=REGRESSION):
    """log p(y, theta | z) of all gate vectors at nodes of the scales, by formulas of the test's own regression."""
    every = vectors(regression.x.shape[1])
    z, theta = every.repeat_interleave(len(nodes), 0), nodes.repeat(len(every), 1)
    evidence = regression.log_evidence(z, theta[:, 1:].exp(), (-2 * theta[:, 0]).exp())
    return (evidence + log_density(theta, regression)).view(len(every), len(nodes))


def expected(nodes, regression=REGRESSION, rate=SPARSE):
    """Means of the gates and of the logarithms of the scales."""
    every = vectors(regression.x.shape[1])
    weights = torch.softmax((joint(nodes, regression) + rate.log_prob(every)[:, None]).flatten(), 0)
    return weights @ torch.cat([every.repeat_interleave(len(nodes), 0), nodes.repeat(len(every), 1)], 1)


def draws_of_scales(nodes, regression=REGRESSION):
    """Nodes given gate vectors, which count in binary."""
    probs = joint(nodes, regression).softmax(1)
    digits = 2.0 ** torch.arange(regression.x.shape[1] - 1, -1, -1).double()

    def draw(z, theta, generator):
        return nodes[probs[(z @ digits).long()].multinomial(1, generator=generator)[:, 0]]

    return draw


def sampled(nodes, start):
    walk = GatesAndScales(REGRESSION.dense(), SPARSE, start.expand(CHAINS, 2), draws_of_scales(nodes))
    z = torch.bernoulli(torch.full((CHAINS, 3), 0.3).double(), generator=seeded(1))
    return sampled_target(walk, z, torch.full((3,), 0.3).double(), flips=600, warm_up=100, generator=seeded(2))


@pytest.mark.parametrize("unknown", [(0, 1), (0,), (1,)])
def test_averages(unknown):
    """Within five standard errors, which the spread of the chains tells."""
    known = torch.tensor([-0.2, -0.7], dtype=torch.float64)
    axes = [torch.linspace(*RANGES[i]).double() if i in unknown else known[i : i + 1] for i in (0, 1)]
    nodes = torch.cartesian_prod(*axes)
    exact = expected(nodes)
    run = sampled(nodes, known)
    values = torch.cat([run.gates.double(), run.hyper], 1)
    found = run.weights @ values
    by_chain = torch.stack(
        [run.weights[run.chain == c] @ (values[run.chain == c] - exact) for c in range(CHAINS)]
    )  # of which each is its chain's part of the error of the weighted average
    error = math.sqrt(CHAINS) * by_chain.std(0) + 1e-9
    assert (error < torch.tensor([0.01, 0.01, 0.01, 0.01, 0.06])).all()  # of gates, noise and slabs
    assert ((found - exact).abs() < 5 * error).all()
    assert (run.active_probs - exact[:3]).abs().max() < 0.03


def test_an_effect_beyond_doubt():
    """The tempered chains close its gate every few flips: the scales must not follow, at any log odds."""
    strong = dataclasses.replace(REGRESSION, y=REGRESSION.y + 6 * REGRESSION.x[:, 0])
    start = torch.tensor([-0.2, -0.7], dtype=torch.float64).expand(CHAINS, 2)
    nodes = torch.cartesian_prod(*[torch.linspace(*axis).double() for axis in RANGES])
    walk = GatesAndScales(strong.dense(), SPARSE, start, draws_of_scales(nodes, strong))
    z = torch.ones(CHAINS, 3, dtype=torch.float64)
    logits = walk.logits(z)
    assert logits[:, 0].min() > 60
    run = sampled_target(walk, z, torch.full((3,), 0.3).double(), flips=600, warm_up=100, generator=seeded(4))
    exact = expected(nodes, strong)
    found = run.weights @ torch.cat([run.gates.double(), run.hyper], 1)
    assert ((found - exact).abs() < torch.tensor([1e-6, 0.02, 0.02, 0.02, 0.06])).all(), (found, exact)


def test_a_gate_that_is_always_open():
    """The chains close it now and then, and the scales given that are no part of the posterior."""
    strong = dataclasses.replace(REGRESSION, y=REGRESSION.y + 2 * REGRESSION.x[:, 0])
    rate = IndependentGates(torch.tensor([math.inf, -0.8, -0.8], dtype=torch.float64))
    nodes = torch.cartesian_prod(*[torch.linspace(*axis).double() for axis in RANGES])
    start = torch.zeros(CHAINS, 2, dtype=torch.float64)
    walk = GatesAndScales(strong.dense(), rate, start, draws_of_scales(nodes, strong))
    z = torch.ones(CHAINS, 3, dtype=torch.float64)
    run = sampled_target(walk, z, torch.full((3,), 0.3).double(), flips=600, warm_up=100, generator=seeded(6))
    found = run.weights @ torch.cat([run.gates.double(), run.hyper], 1)
    # Five standard errors of thirty-two chains, as above; the open gate's is rounding.
    assert ((found - expected(nodes, strong, rate)).abs() < torch.tensor([1e-9, 0.02, 0.02, 0.02, 0.06])).all()


def test_known_scales_stay():
    start = torch.tensor([-0.2, -0.7], dtype=torch.float64)
    walk = GatesAndScales(REGRESSION.dense(), SPARSE, start.expand(CHAINS, 2))
    z = torch.zeros(CHAINS, 3, dtype=torch.float64)
    run = sampled_target(walk, z, torch.full((3,), 0.3).double(), flips=30, warm_up=10, generator=seeded(2))
    assert torch.equal(run.hyper, start.expand_as(run.hyper))


def test_subsets_of_gates(monkeypatch):
    """Six gates of which four may flip at a time: a part of two, and two anchors, beside those that are open."""
    monkeypatch.setattr(pyro_l0.maths.second_order, "_PART", 2)
    regression, rate = Regression.drawn(20, 6, 2, rho=0.9), prior(0.2)
    start = torch.zeros(CHAINS, 2, dtype=torch.float64)
    nodes = torch.cartesian_prod(*[torch.linspace(low, high, 13).double() for low, high, _ in RANGES])
    walk = GatesAndScales(regression.wide(), rate, start, draws_of_scales(nodes, regression))
    z, running = torch.zeros(CHAINS, 6, dtype=torch.float64), torch.full((6,), 0.2, dtype=torch.float64)
    run = sampled_target(walk, z, running, flips=400, warm_up=100, generator=seeded(3))
    exact = expected(nodes, regression, rate)
    error = run.standard_error()
    assert error.max() < 0.02
    assert ((run.active_probs - exact[:6]).abs() < 5 * error).all()
    found = run.weights @ torch.cat([run.gates.double(), run.hyper], 1)
    assert ((found - exact).abs() < torch.tensor([0.03] * 7 + [0.1])).all()


def test_copies_in_subsets_of_gates(monkeypatch):
    """Forty copies of a feature with an effect are equally probable: chains exchange one for another."""
    monkeypatch.setattr(pyro_l0.maths.second_order, "_PART", 100)
    generator = seeded(5)
    x = torch.randn(50, 600, generator=generator, dtype=torch.float64)
    x[:, :40] = x[:, :1]
    y = x[:, 0] + 0.5 * torch.randn(50, generator=generator, dtype=torch.float64)
    z, running = torch.zeros(CHAINS, 600, dtype=torch.float64), torch.full((600,), 0.002, dtype=torch.float64)
    known = torch.zeros(CHAINS, 2, dtype=torch.float64)
    design = DesignQuadratic(x.T, x.T @ y)
    walk = GatesAndScales(design, prior(0.002), known)
    run = sampled_target(walk, z, running, flips=300, warm_up=100, adapts=False, generator=generator)
    copies = run.active_probs[:40]
    assert copies.sum() == pytest.approx(1.0, abs=0.1)
    # A quarter to a third, for three seeds; two thirds if gates are tried by their running probabilities alone.
    assert copies.std() < 0.45 * copies.mean()
