"""Posterior samples of gates beside sums over all gates: python tests/bench/posteriors/bench_samplers.py

Three runs of sample_posterior, four chains each, one thread: Bernoulli gates on ten independent features, where they
have to be within .03 of the exact probabilities; Bernoulli gates on eight features of which two are equal; and sharp
hard concretes on those eight, where chains can't change modes and the run has to say so. Exits with 1 where a run is
wrong and does not warn. A few minutes on one core.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.infer import sample_posterior
from tests.bench.timing import options_of
from tests.reference_posteriors import GaussianPosterior

RATE, SCALE, CLOSE = 0.2, 0.5, 0.03

Gate = Callable[[], GateDistribution]
Design = Callable[[int], tuple[Tensor, Tensor]]


def bernoulli() -> GateDistribution:
    """A gate that is 0 or 1."""
    return BernoulliGate(probs=RATE)


def sharp() -> GateDistribution:
    """A gate that is 0 or 1 nearly always."""
    return HardConcrete.from_active_prob(torch.tensor(RATE), one_given_active=0.9)


def independent(seed: int) -> tuple[Tensor, Tensor]:
    """Ten features; effects .6, -.35 and .2."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(100, 10, generator=generator)
    return x, x[:, [0, 4, 7]] @ torch.tensor([0.6, -0.35, 0.2]) + torch.randn(100, generator=generator)


def exact_pair(seed: int) -> tuple[Tensor, Tensor]:
    """Eight features, the second equal to the first; effects .6 and -.35."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(100, 8, generator=generator)
    x[:, 1] = x[:, 0]
    return x, x[:, [0, 4]] @ torch.tensor([0.6, -0.35]) + torch.randn(100, generator=generator)


def model(x: Tensor, y: Tensor, gate: Gate) -> None:
    """Regression with noise of deviation 1."""
    with pyro.plate("features", x.shape[1]):
        z = pyro.sample("z", gate())
        w = pyro.sample("w", dist.Normal(0.0, SCALE))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ (z * w), 1.0), obs=y)


def report(name: str, design: Design, gate: Gate, samples: int, seed: int) -> bool:
    """Sample, print a row, and say whether the run is right or says that it is not."""
    x, y = design(0)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # printed below
        result = sample_posterior(model, x, y, gate, slab={"w": "z"}, num_samples=samples, seed=seed)
    seconds = time.perf_counter() - start
    probability = result.active_probs()["z"]
    known = GaussianPosterior(x.double(), y.double(), 1.0, SCALE, RATE).summary().inclusion
    error = float((probability - known).abs().max())
    worst = max(r.max().item() for r in result.r_hat.values())
    least = min(e.min().item() for e in result.ess.values())
    print(
        f"{name:24}{samples:5d} draws: largest error of P(z != 0) {error:.3f}, of the first two {probability[0]:.2f} "
        f"{probability[1]:.2f}, worst r-hat {worst:.3f}, least ess {least:.0f}, standard error "
        f"{result.error:.3f}, divergent {sum(result.divergences)}, {seconds:.0f} s"
    )
    for problem in result.problems:
        print(f"    {problem}")
    return not result.ok or error <= CLOSE


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, 4 chains")
    good = [
        report("independent, Bernoulli", independent, bernoulli, 500, options.seed),
        report("exact pair, Bernoulli", exact_pair, bernoulli, 500, options.seed),
        report("exact pair, sharp", exact_pair, sharp, 60, options.seed),
    ]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
