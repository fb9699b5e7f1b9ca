"""A sparse factor model of two views, numbers and counts with missing entries, and which of its factors to trust.

Each factor has a score x in every row and a loading in every column, a gate times a weight:

    rate_k ~ Beta(1, 4);   z_kj ~ Bernoulli(rate_k);   w_kj ~ Normal(0, 1);   x_ik ~ Normal(0, 1)
    number_ij ~ Normal(eta_ij, noise_j),  count_ij ~ Poisson(exp(eta_ij)),  eta = x (z w) + offset

Entries that are missing are masked. The data have four factors, each with a loading in three of ten columns, and the
model six: surplus factors should lose all of their loadings. The guide is AutoSpikeSlab's mean field, and the gradient
of the gates is ReinMax's.

A single training often ends where two found factors each mix the same two true ones, or with a splinter of a factor.
Its loss alone does not say so; two checks do: mixed factors share most of their loadings, and no other training finds a
splinter. So the best of six trainings by the bound counts, or of up to eight while its factors share loadings.
The table has the F1 score of each true factor's loadings, by the factor found that is next to it, and the mean absolute
error at missing entries, beside the model whose gates are all open.

``python examples/factor_model.py`` takes about half a minute on one core.
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_sample
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_l0 import BernoulliGate
from pyro_l0.infer import L0_ELBO, AutoSpikeSlab

__all__ = ["Data", "Options", "Run", "main", "make_data", "make_model", "overlap", "train", "verdicts"]

ROWS, COLUMNS, FACTORS, TRUE = 100, 30, 6, 4  # columns of each view, factors of the model and of the data
RUNS, MOST = 6, 8  # trainings: at least, and while factors are mixed
RATE, DRAWS = 0.1, 100  # of learning; from the posterior predictive
SAME, MIXED, FEWEST = 0.8, 0.55, 3  # F1 of one factor in two trainings, and of mixed ones; loadings of a factor


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        steps: of every training.
        seeds: each a data set.
    """

    steps: int = 600
    seeds: tuple[int, ...] = (1,)


class Data(NamedTuple):
    """Both views, ``(ROWS, COLUMNS)`` each; columns of numbers come first where they are side by side."""

    numbers: Tensor
    counts: Tensor
    seen: Tensor  # which entries are not missing, (ROWS, 2 COLUMNS)
    support: Tensor  # true loadings that are not zero, (TRUE, 2 COLUMNS)


class Run(NamedTuple):
    """A training."""

    loss: float  # mean of the last tenth of the steps, in nats
    support: Tensor  # loadings more probably open than not, (FACTORS, 2 COLUMNS)
    error: Tensor  # mean absolute error at missing numbers and counts


def main(options: Options) -> dict[int, list[Run]]:
    """Print the table; returns the trainings of each seed, the best first, and the full model's at the end."""
    command.check(options)
    results = {}
    command.plan(len(options.seeds) * (MOST + 1) * options.steps)  # at most
    for seed in options.seeds:
        data, runs = make_data(seed), list[Run]()
        while len(runs) < RUNS or (len(runs) < MOST and bool((shared(runs[0].support) > MIXED).any())):
            runs.append(train(data, 100 * seed + len(runs), options.steps))
            runs.sort(key=lambda run: run.loss)
        results[seed] = [*runs, train(data, 100 * seed, options.steps, is_full=True)]
        print(f"seed {seed}           loss    F1 of the true factors       numbers  counts")
        names = ["best", *(f"training {k}" for k in range(2, len(runs) + 1)), "all open"]
        for name, run in zip(names, results[seed], strict=True):
            scores = "".join(f"{x:6.2f}" for x in best_overlaps(run.support, data.support))
            fit = " " * 34 if name == "all open" else f"{run.loss:9.0f} {scores}"
            print(f"  {name:12s}{fit}     {run.error[0]:10.3f}{run.error[1]:8.3f}")
        best, *others = runs
        for k, verdict in enumerate(verdicts(best, others)):
            print(f"  factor {k}: {verdict}", flush=True)
    return results


def make_data(seed: int) -> Data:
    """Numbers and counts from known factors; a tenth of the entries is missing."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(3, TRUE, 2 * COLUMNS, generator=generator)
    support = uniform[0] < 0.3
    loadings = support * (0.6 + 0.6 * uniform[1]) * torch.where(uniform[2] < 0.5, -1.0, 1.0)
    eta = torch.randn(ROWS, TRUE, generator=generator) @ loadings
    numbers = eta[:, :COLUMNS] + 0.7 * torch.randn(ROWS, COLUMNS, generator=generator)
    counts = torch.poisson((1 + 0.6 * eta[:, COLUMNS:]).exp(), generator=generator)
    return Data(numbers, counts, torch.rand(ROWS, 2 * COLUMNS, generator=generator) < 0.9, support)


def make_model(seen: Tensor) -> Callable[..., None]:
    """The model; without data it draws them."""

    def model(numbers: Tensor | None = None, counts: Tensor | None = None) -> None:
        with pyro.plate("factors", FACTORS, dim=-2):
            rate = pyro.sample("rate", dist.Beta(1.0, 4.0).expand([FACTORS, 1]))
            with pyro.plate("loadings", 2 * COLUMNS, dim=-1):
                z = pyro.sample("z", BernoulliGate(probs=rate.clamp(1e-4, 1 - 1e-4)))
                w = pyro.sample("w", dist.Normal(0.0, 1.0))
        noise = pyro.sample("noise", dist.HalfNormal(1.0).expand([COLUMNS]).to_event(1))
        offset = pyro.sample("offset", dist.Normal(0.0, 2.0).expand([2 * COLUMNS]).to_event(1))
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([ROWS, FACTORS]).to_event(2))
        eta = x @ (z * w) + offset
        with pyro.plate("rows", ROWS, dim=-2), pyro.plate("columns", COLUMNS, dim=-1):
            with poutine.mask(mask=seen[:, :COLUMNS]):
                pyro.sample("numbers", dist.Normal(eta[..., :COLUMNS], noise), obs=numbers)
            with poutine.mask(mask=seen[:, COLUMNS:]):
                pyro.sample("counts", dist.Poisson(eta[..., COLUMNS:].clamp(max=8.0).exp()), obs=counts)

    return model


def train(data: Data, seed: int, steps: int, is_full: bool = False) -> Run:
    """Train a guide from a random start; with all gates open for the full model."""
    pyro.set_rng_seed(seed)
    pyro.clear_param_store()  # where Pyro's guides would find the last one's parameters
    model = make_model(data.seen)
    if is_full:
        model = poutine.condition(model, {"z": torch.ones(FACTORS, 2 * COLUMNS)})
        guide, elbo = AutoNormal(model, init_loc_fn=init_to_sample), Trace_ELBO()
    else:
        start = {"x": torch.randn(ROWS, FACTORS), "w": 0.3 * torch.randn(FACTORS, 2 * COLUMNS)}
        guide = AutoSpikeSlab(model, slab={"w": "z"}, init_loc=start)
        elbo = L0_ELBO("spike_slab", slab={"w": "z"}, estimator="reinmax")
    guide(data.numbers, data.counts)
    loss_of = elbo(model, guide)
    optimiser = torch.optim.Adam(guide.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    losses = torch.zeros(steps)
    for step in range(steps):
        optimiser.zero_grad()
        loss = loss_of(data.numbers, data.counts)
        loss.backward()
        optimiser.step()
        schedule.step()
        losses[step] = loss.detach()
        command.advance()
    drawn = Predictive(model, guide=guide, num_samples=DRAWS, return_sites=("numbers", "counts"))()
    means = [drawn[name].mean(0).reshape(ROWS, COLUMNS) for name in ("numbers", "counts")]
    errors = (torch.stack(means, 1) - torch.stack([data.numbers, data.counts], 1)).abs()
    is_missing = ~data.seen.view(ROWS, 2, COLUMNS)
    error = (errors * is_missing).sum((0, 2)) / is_missing.sum((0, 2))
    open_gates = torch.ones(FACTORS, 2 * COLUMNS) if is_full else guide.active_probs()["z"]
    return Run(float(losses[-(steps // 10 + 1) :].mean()), open_gates > 0.5, error)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """F1 score of each factor's loadings in one set for each in another, shape ``(len(a), len(b))``."""
    return 2 * (a.float() @ b.float().T) / (a.sum(1)[:, None] + b.sum(1)).clamp(min=1)


def best_overlaps(found: Tensor, truth: Tensor) -> list[float]:
    """F1 score of each true factor, each with a found one of its own."""
    scores = overlap(found, truth)
    return [float(x) for x in scores.T[linear_sum_assignment(-scores.T.numpy())]]


def shared(support: Tensor) -> Tensor:
    """F1 score of each factor's loadings for those of the other one next to it."""
    return overlap(support, support).fill_diagonal_(0.0).amax(1)


def verdicts(run: Run, others: list[Run]) -> list[str]:
    """What is to be thought of each factor of a training."""
    found = []
    for row, most in zip(run.support, shared(run.support).tolist(), strict=True):
        number = sum(bool(overlap(row[None], other.support).max() > SAME) for other in others)
        doubt = ": shares most loadings with another, both may mix the same two" if most > MIXED else ""
        doubt = doubt or ("" if number else ": not to be trusted, it may be a part of another")
        says = f"{int(row.sum())} loadings, found by {number} of {len(others)} other trainings{doubt}"
        found.append(says if row.sum() >= FEWEST else "closed")
    return found


if __name__ == "__main__":
    command.run(main, Options, __doc__)
