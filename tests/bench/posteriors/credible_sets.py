"""Do credible sets and inclusion probabilities hold? python tests/bench/posteriors/credible_sets.py [--part PART]

``sets``: 200 data sets of 150 observations and 30 features, in blocks of five with the correlation rho within a block;
three features have an effect, normal with standard deviation .5, under noise of variance 1. ``SpikeSlabRegressor``
learns noise, slab scale and rate. Of its credible sets of level .95, which share holds a feature with an effect? It
should be .93 or more at each rho.

``calibration``: hyperparameters, gates, coefficients and observations are drawn from the priors that the estimators
learn with, and the regressor, with a background, too, and the classifier learn all of them again. Of the gates whose
inclusion probability lies in a bin, which share is open? Only data from these very priors can tell, since a posterior
promises its probabilities in the mean over its own prior. The estimators scale the priors by the deviation of y; so the
regressor's data are drawn again until that is within 2 % of the unit that they were drawn in, and labels until a fifth
or more is of each class: a choice by y leaves the posterior given y as it is. Standard errors are those that the
posterior gives itself: gates of one data set depend on one another.

``background``: both designs of susieR 2.0 with small effects of all features. Of 200 features, neighbours of which
correlate by .9, three have effects that explain half of a quarter of the variance of 1,000 observations, five or ten
further ones .35 or .15 of it, and all features the rest. Which share of the sets of a fit with ``background=True``
holds none of the five largest effects, and how many of these does a set hold? It is a study of hours and only runs
where it is asked for; every fit appends a line to the file ``--out``, from which the next call goes on.

A mark "!" stands where a number leaves what is asked: .93, or 3 standard errors, and then the command ends with 1; one
in a thousand gets there by chance with every bin. ``--quick`` takes 10 data sets.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabRegressor
from pyro_l0.selection.design.design import default_rate
from pyro_l0.selection.problem import RATIOS
from tests.bench.posteriors.simulation_based_calibration import BINS, Calibration

N, P, BLOCK, EFFECTS = 150, 30, 5, 3
LEAST, MOST = 0.93, 3.0
Array = NDArray[np.float64]


def features(kind: str, rho: float, rng: np.random.Generator, n: int, p: int) -> Array:
    """Standardised features, in blocks or as an autoregression."""
    if kind == "blocks":
        block = np.repeat(rng.normal(size=(n, -(-p // BLOCK))), BLOCK, axis=1)[:, :p]
        x = math.sqrt(rho) * block + math.sqrt(1 - rho) * rng.normal(size=(n, p))
    else:
        covariance = rho ** np.abs(np.subtract.outer(range(p), range(p)))
        x = rng.normal(size=(n, p)) @ np.linalg.cholesky(covariance).T
    return (x - x.mean(0)) / x.std(0)


def coverage(rho: float, options: argparse.Namespace) -> bool:
    """Print the row of a correlation; returns whether the sets keep their word."""
    right, sizes, claims, caught, seconds = [], [], [], 0, 0.0
    for seed in range(options.replicates):
        rng = np.random.default_rng(seed)
        x = features("blocks", rho, rng, N, P)
        beta = np.zeros(P)
        active = rng.choice(P, EFFECTS, replace=False)
        beta[active] = 0.5 * rng.normal(size=EFFECTS)
        y = x @ beta + rng.normal(size=N)
        start = time.process_time()
        found = SpikeSlabRegressor(random_state=seed).fit(x, y).credible_sets_
        seconds += time.process_time() - start
        right += [bool((beta[list(s.features)] != 0).any()) for s in found]
        sizes += [len(s.features) for s in found]
        claims += [s.probability for s in found]
        caught += sum(any(j in s.features for s in found) for j in active)
    share = float(np.mean(right))
    mark = "" if share >= LEAST else "!"
    print(
        f"rho {rho:.2f}: {len(right)} sets, coverage {share:.3f}{mark} (they say {np.mean(claims):.3f}), size "
        f"{np.median(sizes):.0f} in the median and {max(sizes)} at most, {caught} of {EFFECTS * options.replicates} "
        f"effects in a set; {seconds / options.replicates:.2f} s a data set",
        flush=True,
    )
    return not mark


def with_small_effects(some: int, share: float, options: argparse.Namespace) -> bool:
    """Print the counts of a design, whose fits are in a file or follow now; returns whether they are as asked."""
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    records = {r["number"]: r for r in map(json.loads, lines) if r["further"] == some}
    for number in range(1, options.replicates + 1):
        if number not in records:
            records[number] = {"further": some, "number": number, **with_small_effects_of(some, share, number)}
            with options.out.open("a") as file:
                file.write(json.dumps(records[number]) + "\n")
    own = [records[number] for number in range(1, options.replicates + 1)]
    sets, wrong, held = (sum(r[key] for r in own) for key in ("sets", "wrong", "held"))
    print(
        f"{some} further effects, {len(own)} data sets: {sets} sets, {wrong} of them wrong "
        f"({wrong / max(sets, 1):.3f}), {held} of {5 * len(own)} effects in a set ({held / (5 * len(own)):.3f})"
    )
    count, expected, found = (np.sum([r[key] for r in own], axis=0) for key in ("count", "expected", "found"))
    # Gates of one data set depend on one another, so the error is that of the differences of data sets.
    apart = np.array([r["found"] for r in own]) - np.array([r["expected"] for r in own])
    error = apart.std(0) * math.sqrt(len(own))
    for k in range(10):
        where = f"PIP {k / 10:.1f}–{(k + 1) / 10:.1f}: {count[k]:6.0f} features"
        print(
            f"  {where}, {expected[k]:6.1f} expected, {found[k]:4.0f} among the five (s.e. {error[k]:.1f})", flush=True
        )
    return bool(wrong <= 0.05 * sets)


def with_small_effects_of(some: int, share: float, number: int) -> dict[str, Any]:
    """Draw a data set, fit it, and count."""
    rng = np.random.default_rng([some, number])
    x = features("ar", 0.9, rng, 1000, 200)
    beta = np.zeros(200)
    order = rng.permutation(200)
    for chosen, part in ((order[:3], 0.5), (order[3 : 3 + some], share), (order, 0.5 - share)):
        own = np.zeros(200)
        own[chosen] = rng.normal(size=len(chosen))
        beta += own * math.sqrt(0.25 * part) / (x @ own).std()
    y = x @ beta + math.sqrt(0.75) * rng.normal(size=1000)
    largest = np.argsort(-np.abs(beta))[:5]
    model = SpikeSlabRegressor(background=True, random_state=number).fit(x, y)
    found = model.credible_sets_
    bins, truth = np.minimum(10 * model.pip_, 9).astype(int), np.isin(np.arange(200), largest)
    return {
        "sets": len(found),
        "wrong": sum(not truth[list(s.features)].any() for s in found),
        "held": sum(any(j in s.features for s in found) for j in largest),
        "count": np.bincount(bins, minlength=10).tolist(),
        "expected": np.bincount(bins, model.pip_, 10).tolist(),
        "found": np.bincount(bins, truth, 10).tolist(),
    }


class Hyperparameters(NamedTuple):
    """Of a regression with features of deviation 1."""

    rate: float
    slab: float
    noise: float
    intercept: float


def hyperparameters(rng: np.random.Generator, p: int, family: str) -> Hyperparameters:
    """Draws from the priors of the estimators, in units of the deviation of y."""
    rate = rng.beta(*default_rate(p))
    if family != "bernoulli":
        return Hyperparameters(rate, abs(rng.normal()), abs(rng.standard_cauchy()), 2.0)
    return Hyperparameters(rate, 2.0 * abs(rng.normal()), 0.0, 10.0 * rng.normal())


def draw_model(rng: np.random.Generator, n: int, p: int, family: str) -> tuple[Array, Array, Array]:
    """Features AR(.7), observations and gates, with hyperparameters from their priors."""
    x = features("ar", 0.7, rng, n, p)
    while True:
        hyper = hyperparameters(rng, p, family)
        z = rng.random(p) < hyper.rate
        predictor = hyper.intercept + x @ (z * rng.normal(size=p)) * hyper.slab
        if family != "bernoulli":
            y = predictor + hyper.noise * rng.normal(size=n)
            if family == "background":
                ratio = RATIOS[rng.integers(1, len(RATIOS))] if rng.random() < 0.5 else 0.0
                y += x @ rng.normal(size=p) * hyper.noise * math.sqrt(ratio / p)
            kept = abs(y.std() - 1) < 0.02
        else:
            y = (rng.random(n) < 1 / (1 + np.exp(-predictor))).astype(float)
            kept = 0.2 <= y.mean() <= 0.8
        if kept:
            return x, y, z


def calibration(family: str, n: int, p: int, options: argparse.Namespace) -> bool:
    """Print the bins of an estimator; returns whether they are open as often as they say."""
    counted, seconds = Calibration(), 0.0
    kind: Any = SpikeSlabClassifier if family == "bernoulli" else SpikeSlabRegressor
    own = {"background": True} if family == "background" else {}
    for seed in range(options.replicates):
        x, y, z = draw_model(np.random.default_rng(seed), n, p, family)
        start = time.process_time()
        model = kind(random_state=seed, **own).fit(x, y)
        seconds += time.process_time() - start
        inclusion = torch.as_tensor(model.pip_)
        counted.inclusion.append(inclusion)
        counted.gates.append(torch.as_tensor(z).double())
        covariance = torch.as_tensor(np.atleast_2d(np.cov(model.sample(2000)["gates"].T.astype(float))))
        counted.covariances.append(covariance.diagonal_scatter(inclusion * (1 - inclusion)))
    each = f"{seconds / options.replicates:.2f} s a data set"
    print(f"{kind.__name__}, {family}, n = {n}, p = {p}, method {model.method_}: {each}")
    kept = True
    for (count, mean, share, score), low, high in zip(counted.bins(), BINS, BINS[1:], strict=False):
        mark = "!" if abs(score) > MOST else ""
        kept &= not mark
        error = abs(share - mean) / abs(score) if score else 0.0
        where = f"PIP {low:.2f}–{high:.2f}: {count:5d} gates"
        print(f"  {where}, mean {mean:.3f}, open {share:.3f} (s.e. {error:.3f}), {score:+.2f} s.e.{mark}", flush=True)
    return kept


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("sets", "calibration", "background"), help="the first two by default")
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("small_effects.jsonl"), help="of the background's fits")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.replicates = 10 if options.quick else options.replicates
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {options.replicates} data sets each")
    kept = True
    if options.part == "background":
        kept = all([with_small_effects(5, 0.35, options), with_small_effects(10, 0.15, options)])
    if options.part in (None, "sets"):
        for rho in (0.5, 0.9, 0.99):
            kept &= coverage(rho, options)
    if options.part in (None, "calibration"):
        sizes = [("gaussian", 100, 10), ("gaussian", 150, 30), ("bernoulli", 200, 8), ("bernoulli", 200, 20)]
        sizes.append(("background", 100, 10))
        for size in sizes:
            kept &= calibration(*size, options)
    sys.exit(not kept)


if __name__ == "__main__":
    main()
