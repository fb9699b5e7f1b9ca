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

``background``: both designs of susieR 2.0 with small effects of all features, as its authors' scripts simulate them
(github.com/alexmccreight/susieR2.0-paper, Simulation_Studies), on 200 features, neighbours of which correlate by .9, in
place of genotypes. Three features have effects that explain half of a quarter of the variance of 1,000 observations,
five or ten further ones .35 or .15 of it, and all others the rest; those of the first two kinds are drawn until no two
correlate by more than .1, or .2 to .5 where that is rare. Effects that count are those that a test of the feature alone
would see with a probability of .8 after Bonferroni's correction. False discovery is the mean over data sets of the
share of sets without such an effect, power that of the share of these effects that are in a set. SuSiE-inf fits the
same data where its authors' package ``susieinf`` is installed, by its command's defaults. It is a study of hours and
only runs where it is asked for; every fit appends a line to the file ``--out``, from which the next call goes on.

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
from scipy.stats import chi2, ncx2

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


def with_small_effects(further: int, share: float, options: argparse.Namespace) -> bool:
    """Print the counts of a design, whose fits are in a file or follow now; returns whether they are as asked."""
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    records = {r["number"]: r for r in map(json.loads, lines) if r["further"] == further}
    for number in range(1, options.replicates + 1):
        if number not in records:
            x, y, causal = small_effects(further, share, number)
            fits = {"ours": ours_on(x, y, number), "SuSiE-inf": susie_inf_on(x, y)}
            records[number] = {"further": further, "number": number, "causal": causal, **fits}
            with options.out.open("a") as file:
                file.write(json.dumps(records[number]) + "\n")
    kept = True
    for name in ("ours", "SuSiE-inf"):
        known = [r for r in (records[n] for n in range(1, options.replicates + 1)) if r[name] is not None]
        if not known:
            print(f"{further} further effects, {name}: not installed")
            continue
        wrong = [[not set(r["causal"]) & set(features) for features in r[name]] for r in known]
        held = [[any(j in features for features in r[name]) for j in r["causal"]] for r in known if r["causal"]]
        false, power = ([float(np.mean(each)) if each else 0.0 for each in of] for of in (wrong, held))
        error = [float(np.std(of)) / math.sqrt(len(of)) for of in (false, power)]
        print(
            f"{further} further effects, {name}, {len(known)} data sets: false discovery {np.mean(false):.3f} ± "
            f"{error[0]:.3f}, power {np.mean(power):.3f} ± {error[1]:.3f}; {sum(map(sum, wrong))} of "
            f"{sum(map(len, wrong))} sets wrong, {sum(map(sum, held))} of {sum(map(len, held))} effects in a set",
            flush=True,
        )
        kept &= name != "ours" or float(np.mean(false)) <= 0.05
    return kept


def small_effects(further: int, share: float, number: int) -> tuple[Array, Array, list[int]]:
    """Features, observations, and the features whose effects count."""
    rng = np.random.default_rng([further, number])
    n, p, apart = 1000, 200, 3 + further
    x = features("ar", 0.9, rng, n, p)
    correlated = np.triu(np.abs(np.corrcoef(x.T)), 1)
    for most in np.repeat([0.1, 0.2, 0.3, 0.4, 0.5], 500):
        order = rng.permutation(p)
        if correlated[np.ix_(order[:apart], order[:apart])].max() < most:
            break
    beta = np.zeros(p)
    parts = (order[:3], 0.5, 1.0), (order[3:apart], share, rng.choice([0.05, 0.15], further, p=[0.75, 0.25]))
    for chosen, part, scale in (*parts, (order[apart:], 0.5 - share, 1.0)):
        own = np.zeros(p)
        own[chosen] = scale * rng.normal(size=len(chosen))
        beta += own * math.sqrt(0.25 * part) / (x @ own).std()
    noise = math.sqrt(0.75 / 0.25) * (x @ beta).std()
    y = x @ beta + noise * rng.normal(size=n)
    power = ncx2.sf(chi2.isf(0.05 / p, 1), 1, n * (beta / noise) ** 2)
    return x, y, np.flatnonzero(power >= 0.8).tolist()


def ours_on(x: Array, y: Array, seed: int) -> list[list[int]]:
    """The features of each credible set."""
    found = SpikeSlabRegressor(background=True, random_state=seed).fit(x, y).credible_sets_
    return [[int(j) for j in s.features] for s in found]


def susie_inf_on(x: Array, y: Array) -> list[list[int]] | None:
    """The same of SuSiE-inf; None where it is not installed."""
    try:
        from susieinf import cred, susie
    except ImportError:
        return None
    n, correlation = len(y), x.T @ x / len(y)
    y = (y - y.mean()) / y.std()
    fit = susie(x.T @ y / math.sqrt(n), 1.0, n, 10, LD=correlation, verbose=False)
    return [[int(j) for j in features] for features in cred(fit["PIP"], coverage=0.95, purity=0.5, LD=correlation)]


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
