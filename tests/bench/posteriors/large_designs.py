"""Inclusion probabilities of a thousand features: python tests/bench/posteriors/large_designs.py [--quick]

Ten of p = 1,000 features have an effect of size .25 to .75, the noise is 1, and neighbouring features have correlation
rho. The model knows the noise, the rate (1 %) and the slabs' scale (.5). The reference are two long tempered runs from
other seeds; the line "long runs" says how far these two are apart, so how well the reference is known. Every line: the
sum and the largest of |PIP - reference|; what is selected at a Bayesian false discovery rate of 5 %, as the share of
the ten effects that is found and the share of the selected that is false; seconds on one core. A quarter of an hour in
all, with --quick two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_l0 import BernoulliGate
from pyro_l0.infer import AutoSpikeSlab
from pyro_l0.maths.collapsed import CollapsedQuadratic
from pyro_l0.maths.second_order import DenseQuadratic, DesignQuadratic
from pyro_l0.maths.tempered_gibbs import IndependentGates, collapsed_mean_field, tempered_gibbs

NOISE, RATE, SCALE = 1.0, 0.01, 0.5
PRIOR = IndependentGates(torch.tensor(math.log(RATE) - math.log1p(-RATE), dtype=torch.float64))


@dataclass(frozen=True)
class Design:
    """Centred features, shape ``(n, p)``, centred outcome, and the effects that made it."""

    x: Tensor
    y: Tensor
    effects: Tensor

    @staticmethod
    def drawn(n: int, rho: float, seed: int, p: int = 1000) -> Design:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, p))
        for j in range(1, p):
            x[:, j] = rho * x[:, j - 1] + math.sqrt(1 - rho**2) * x[:, j]
        effects = np.zeros(p)
        where = rng.choice(p, 10, replace=False)
        effects[where] = 0.5 * rng.choice([-1, 1], 10) * rng.uniform(0.5, 1.5, 10)
        y = x @ effects + NOISE * rng.normal(size=n)
        return Design(*map(torch.from_numpy, (x - x.mean(0), y - y.mean(), effects)))

    def wide(self) -> CollapsedQuadratic:
        """From the features, without p x p numbers."""
        return CollapsedQuadratic(DesignQuadratic(self.x.T / NOISE, self.x.T @ self.y / NOISE**2), SCALE)

    def dense(self) -> CollapsedQuadratic:
        """From the p x p matrix of the features."""
        return CollapsedQuadratic(DenseQuadratic(self.x.T @ self.x / NOISE**2, self.x.T @ self.y / NOISE**2), SCALE)


def coordinate_ascent(design: Design, sweeps: int = 100) -> Tensor:
    """Mean-field gates with independent slabs, feature by feature, as in the literature (Carbonetto, Stephens 2012)."""
    x, y = design.x.numpy(), design.y.numpy()
    size, correlation = (x**2).sum(0), x.T @ y
    variance = 1 / (size / NOISE**2 + 1 / SCALE**2)
    probs, means = np.full(x.shape[1], RATE), np.zeros(x.shape[1])
    fitted = x @ (probs * means)
    constant = PRIOR.logits(design.y).item() + 0.5 * np.log(variance / SCALE**2)
    for _ in range(sweeps):
        before = probs.copy()
        for j in range(x.shape[1]):
            fitted -= x[:, j] * (probs[j] * means[j])
            means[j] = variance[j] / NOISE**2 * (correlation[j] - x[:, j] @ fitted)
            odds = constant[j] + 0.5 * means[j] ** 2 / variance[j]
            probs[j] = 1 / (1 + math.exp(-max(min(odds, 500.0), -500.0)))
            fitted += x[:, j] * (probs[j] * means[j])
        if abs(probs - before).max() < 1e-6:
            break
    return torch.from_numpy(probs)


def mean_field(design: Design) -> Tensor:
    return torch.sigmoid(collapsed_mean_field(design.dense(), PRIOR, generator=seeded(1)))


def tempered(design: Design) -> Tensor:
    return tempered_gibbs(design.dense(), PRIOR, generator=seeded(1)).active_probs


def tempered_wide(design: Design) -> Tensor:
    return tempered_gibbs(design.wide(), PRIOR, generator=seeded(2)).active_probs


def refined(design: Design) -> Tensor:
    """A user's way: a Pyro model and a guide, whose set-up with the model's Hessian is in the time."""

    def model(x: Tensor, y: Tensor) -> None:
        with pyro.plate("features", x.shape[1]):
            z = pyro.sample("z", BernoulliGate(probs=x.new_tensor(RATE)))
            w = pyro.sample("w", dist.Normal(x.new_zeros(()), SCALE))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ (z * w), NOISE), obs=y)

    guide = AutoSpikeSlab(model, slab={"w": "z"}, slabs="structured")
    return guide.refine(design.x, design.y, seed=1).active_probs()["z"]


METHODS: dict[str, Callable[[Design], Tensor]] = {
    "coordinate ascent": coordinate_ascent,
    "collapsed mean field": mean_field,
    "tempered Gibbs": tempered,
    "tempered Gibbs, no A": tempered_wide,
    "AutoSpikeSlab.refine": refined,
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def selected(probs: Tensor, rate: float = 0.05) -> Tensor:
    """The largest set of gates, by falling probability, whose mean probability of being closed is at most the rate."""
    order = probs.argsort(descending=True)
    false = (1 - probs[order]).cumsum(0) / torch.arange(1, len(probs) + 1)
    chosen = torch.zeros(len(probs), dtype=torch.bool)
    chosen[order[: int((false <= rate).sum())]] = True
    return chosen


def line(name: str, probs: Tensor, reference: Tensor, design: Design, seconds: float) -> str:
    chosen, real = selected(probs), design.effects != 0
    found = int((chosen & real).sum())
    false = 1 - found / max(int(chosen.sum()), 1) if bool(chosen.any()) else 0.0
    apart = (probs - reference).abs()
    return (
        f"  {name:22s}{float(apart.sum()):9.2f}{float(apart.max()):9.3f}{found / int(real.sum()):8.2f}{false:7.2f}"
        f"{seconds:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one data set of each kind, shorter reference runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chains, flips = (32, 1200) if options.quick else (64, 4000)
    for n, rho, seed in itertools.product((200, 1000), (0.0, 0.9), range(1 if options.quick else 2)):
        design = Design.drawn(n, rho, seed)
        start = time.perf_counter()
        runs = [
            tempered_gibbs(design.dense(), PRIOR, chains=chains, flips=flips, generator=seeded(100 + i)).active_probs
            for i in range(2)
        ]
        reference = (runs[0] + runs[1]) / 2
        print(f"n = {n}, rho = {rho}, data set {seed}")
        print(f"  {'':22s}{'sum':>9s}{'largest':>9s}{'found':>8s}{'false':>7s}{'seconds':>9s}")
        print(line("long runs", runs[0], runs[1], design, time.perf_counter() - start))
        for name, method in METHODS.items():
            start = time.perf_counter()
            probs = method(design)
            print(line(name, probs, reference, design, time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
