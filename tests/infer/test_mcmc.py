"""Posteriors with gates by NUTS: right against sums over all gates, or a warning."""

import functools
import itertools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import HMC

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.infer import sample_posterior
from pyro_l0.infer._log_joint import LogJoint
from pyro_l0.infer._recorded import recorded
from pyro_l0.infer._swaps import moved_by_swaps

N = 30


def data(columns=3, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, columns, generator=generator)
    return x, 0.5 * x[:, 0] + torch.randn(N, generator=generator)


def regression(x, y, gate=lambda: BernoulliGate(probs=0.3)):
    with pyro.plate("features", x.shape[1]):
        z = pyro.sample("z", gate())
        w = pyro.sample("w", dist.Normal(0.0, 0.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ (z * w), 1.0), obs=y)


def exact(x, y, rate=0.3, scale=0.5, noise=1.0):
    """P(z = 1 | y) and E[z w | y] by a sum over all gates, weights integrated out."""
    x, y = x.double() / noise, y.double() / noise
    codes = torch.tensor(list(itertools.product((0.0, 1.0), repeat=x.shape[1])), dtype=torch.float64)
    scores, means = [], []
    for z in codes:
        active = x * z * scale
        inner = torch.eye(len(z)).double() + active.T @ active
        mean = torch.linalg.solve(inner, active.T @ y)
        scores.append((active.T @ y) @ mean / 2 - inner.logdet() / 2 + z.sum() * math.log(rate / (1 - rate)))
        means.append(scale * z * mean)
    weights = torch.stack(scores).softmax(0)
    return weights @ codes, weights @ torch.stack(means)


def test_gates_that_are_summed_out():
    """Probabilities, products and draws against enumeration; the same draws for the same seed."""
    x, y = data()
    state = torch.get_rng_state()
    result = sample_posterior(
        regression, x, y, slab={"w": "z"}, num_samples=150, warmup_steps=100, num_chains=3, seed=1
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert result.ok
    probability, mean = exact(x, y)
    torch.testing.assert_close(result.active_probs()["z"], probability, rtol=0, atol=0.04)
    draws = result.draws()
    torch.testing.assert_close(draws["z"].double().mean(0), probability, rtol=0, atol=0.08)
    torch.testing.assert_close(draws["z * w"].double().mean(0), mean, rtol=0, atol=0.04)
    assert torch.equal(draws["z * w"], draws["z"] * draws["w"])
    assert {name: tuple(v.shape) for name, v in result.samples.items()} == dict.fromkeys(("z", "w", "z * w"), (3, 150, 3))
