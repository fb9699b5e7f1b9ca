"""Media always in, controls selected: python tests/bench/posteriors/bench_media.py [--controls 24] [--seeds 50]

Data as in the simulation of pymc-marketing's case study of R2D2 priors (its pull requests 2810 and 2812): 130 weeks of
five correlated channels, adstocked and saturated, which make 15 % of the sales; a yearly wave and 24 autoregressive
controls whose effects fall, all independent of the channels; R2 of .75, a fifth of it by media. A model sees the first
controls and four waves. The effect is what the channels bring over what they cost: about 2. Here adstock and saturation
are known, so that all models are linear, and media have flat priors in each; the models differ in the prior of the
controls alone. *split R2D2* has the case study's: Beta(13.6, 8.4) on R2, a half-normal total scale, shares
Dirichlet(1), sampled by elliptical slices with all coefficients integrated out.

Rows: root mean squared error of the posterior mean with its standard error, coverage of the central 90 % interval, its
mean width, and processor time of a fit in units of 100,000 additions of two tensors of 100 numbers.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.special import betaincinv, log_ndtr, ndtr

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.selection import SpikeSlabRegressor
from tests.bench.posteriors.bench_estimators import additions
from tests.bench.timing import options_of, table_head, table_row

WEEKS, CHANNELS, LADDER, DRAWS = 130, 5, 25, 2000
Array = NDArray[np.float64]


def simulated(seed: int) -> tuple[Array, Array, Array, Array, float]:
    """Media, waves and controls, sales, what a unit of each channel's coefficient brings per cost, and the effect."""
    rng, week = np.random.default_rng(seed), np.arange(WEEKS)
    torch.manual_seed(seed)
    root = torch.distributions.LKJCholesky(CHANNELS, 10.0).sample().double().numpy()
    start, slope = rng.normal(size=(2, CHANNELS))
    shocks = rng.normal(size=(WEEKS, CHANNELS)) @ (rng.gamma(6, 0.5, CHANNELS)[:, None] * root).T
    spend = np.logaddexp(0, start + slope * week[:, None] / WEEKS + shocks)
    decays = rng.beta(1, 3, CHANNELS) ** np.arange(8)[:, None]
    stocks = [lfilter(w / w.sum(), 1, s / s.max()) for w, s in zip(decays.T, spend.T, strict=True)]
    media = np.tanh(rng.gamma(3, 1, CHANNELS) * np.stack(stocks, 1) / 2)
    true = 0.15 / 0.85 / CHANNELS / media.mean(0)
    angle = 2 * np.pi * 7 * (week[:, None] + 0.5) / 365.25 * np.array([1, 2])
    waves = np.hstack([np.sin(angle), np.cos(angle)])
    noise = rng.normal(size=(WEEKS + 100, LADDER - 1)) * math.sqrt(1 - 0.85**2)
    ladder = np.column_stack([waves[:, 0], lfilter([1], [1, -0.85], noise, axis=0)[100:]])
    ladder = (ladder - ladder.mean(0)) / ladder.std(0)
    others, variance = ladder @ (1 - np.arange(LADDER) / LADDER) ** 2, (media @ true).var()
    others *= math.sqrt(4 * variance) / others.std()
    y = 1 + media @ true + others + rng.normal(size=WEEKS) * math.sqrt(5 * variance / 3)
    per_cost = media.sum(0) / (0.075 * y.sum())
    return media, np.hstack([waves, ladder[:, 1:]]), y, per_cost, float(per_cost @ true)


def spike_slab(media: Array, others: Array, y: Array, seed: int) -> Array:
    model = SpikeSlabRegressor(rate=dict.fromkeys(range(CHANNELS), 1), random_state=seed)
    return np.asarray(model.fit(np.hstack([media, others]), y).sample(DRAWS)["coef"][:, :CHANNELS])


def least_squares(media: Array, others: Array, y: Array, seed: int) -> Array:
    """All coefficients flat."""
    x, rng = np.column_stack([media, others, np.ones(WEEKS)]), np.random.default_rng(seed)
    inverse = np.linalg.inv(x.T @ x)
    mean = inverse @ (x.T @ y)
    scale = np.sqrt(((y - x @ mean) ** 2).sum() / rng.chisquare(WEEKS - x.shape[1], (DRAWS, 1)))
    return (mean + scale * (rng.normal(size=(DRAWS, len(mean))) @ np.linalg.cholesky(inverse).T))[:, :CHANNELS]


def split_r2d2(media: Array, others: Array, y: Array, seed: int) -> Array:
    rng, flat, p = np.random.default_rng(seed), np.column_stack([media, np.ones(WEEKS)]), others.shape[1]
    inverse = np.linalg.inv(flat.T @ flat)
    x, rest = (part - flat @ (inverse @ (flat.T @ part)) for part in (others, y))
    gram, moments, total = x.T @ x, x.T @ rest, math.sqrt(y.var() * (1 - 0.3 * 0.7))

    def parts(z: Array) -> tuple[float, float, Array, Array]:
        """Log likelihood, noise scale, slabs over it, and a Cholesky factor, from standard normals."""
        r2, share = betaincinv(13.6, 8.4, ndtr(z[0])), -log_ndtr(-z[2:])
        slabs, noise = np.sqrt(r2 / (1 - r2) * share / share.sum()), math.sqrt(1 - r2) * total * abs(z[1])
        root = np.linalg.cholesky(np.eye(p) + slabs[:, None] * gram * slabs)
        fit = np.linalg.solve(root, slabs * moments)
        log = 0.5 * (fit @ fit - rest @ rest) / noise**2 - (WEEKS - flat.shape[1]) * math.log(noise)
        return float(log - np.log(root.diagonal()).sum()), noise, slabs, root

    z, spread, kept = rng.normal(size=p + 2), np.linalg.cholesky(inverse), []
    log, noise, slabs, root = parts(z)
    for step in range(2 * DRAWS + 1000):
        bar, other, angle = log + math.log(rng.random()), rng.normal(size=p + 2), 2 * math.pi * rng.random()
        low, high = angle - 2 * math.pi, angle
        while (new := parts(moved := z * math.cos(angle) + other * math.sin(angle)))[0] <= bar:
            low, high = (angle, high) if angle < 0 else (low, angle)
            angle = rng.uniform(low, high)
        z, (log, noise, slabs, root) = moved, new
        if step >= 1000 and step % 2:
            white = np.linalg.solve(root, slabs * moments) + noise * rng.normal(size=p)
            left = y - others @ (slabs * np.linalg.solve(root.T, white))
            kept.append(inverse @ (flat.T @ left) + noise * spread @ rng.normal(size=flat.shape[1]))
    return np.array(kept)[:, :CHANNELS]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--controls", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    unit = min(additions() for _ in range(3))
    table_head("controls by", "error", "coverage", "width", "units")
    for tool in (least_squares, spike_slab, split_r2d2):
        found, start = [], time.process_time()
        for seed in range(options.seeds):
            media, others, y, per_cost, effect = simulated(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # sets of which no member is selected
                drawn = tool(media, others[:, : 4 + options.controls], y, seed) @ per_cost
            low, high = np.quantile(drawn, [0.05, 0.95])
            found.append(((drawn.mean() - effect) ** 2, low <= effect <= high, high - low))
        square, covered, width = np.mean(found, axis=0)
        error = np.std([each[0] for each in found]) / math.sqrt(len(found)) / (2 * math.sqrt(square))
        units = (time.process_time() - start) / options.seeds / unit
        name = tool.__name__.replace("_", " ")
        table_row(name, f"{math.sqrt(square):.2f} ± {error:.2f}", f"{covered:.2f}", f"{width:.2f}", f"{units:.1f}")


if __name__ == "__main__":
    main()
