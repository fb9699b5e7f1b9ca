"""The estimators beside posteriors that are known: python tests/bench/posteriors/bench_estimators.py [--method METHOD]

Five Gaussian designs of ten features (the exact pair: eight), and three of fifteen with new data for each seed, go
through ``SpikeSlabRegressor(standardize=False, fit_intercept=False)`` with noise, slab scale and rate known, once per
method and seed. Columns: the largest error of an inclusion probability, worst and median over the seeds, the distance
of the log evidence from the known one, of a posterior mean of a coefficient and of its standard deviation, and
processor seconds on one core. A number beyond its limit is marked with an exclamation mark, and then the command ends
with 1. ``--quick`` takes one seed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.selection import SpikeSlabRegressor
from tests.bench.posteriors.bench_posteriors import cell
from tests.bench.posteriors.posterior_references import reference
from tests.bench.timing import options_of, table_head, table_row
from tests.reference_posteriors import Posterior
from tests.spike_slab_designs import Design, gaussian_designs, wide_designs

METHODS = ("enumerate", "tempered")
# Largest error of an inclusion probability, of the log evidence, and seconds, by the number of features.
LIMITS = {10: (0.03, 0.05, 5.0), 15: (0.04, 0.12, float("inf"))}


class Run(NamedTuple):
    """What one fit showed."""

    error: float
    gap: float
    mean: float
    sd: float
    seconds: float


def run(design: Design, known: Posterior, method: str, seed: int) -> Run:
    scales = {"rate": design.rate, "slab_scale": design.tau, "noise_scale": design.sigma}
    model = SpikeSlabRegressor(standardize=False, fit_intercept=False, method=method, random_state=seed, **scales)
    start = time.process_time()
    model.fit(design.x.numpy(), design.y.numpy())
    return Run(
        error=float(np.abs(model.pip_ - known.inclusion.numpy()).max()),
        gap=abs(model.log_evidence_ - known.log_evidence),
        mean=float(np.abs(model.coef_ - known.mean.numpy()).max()),
        sd=float(np.abs(model.coef_sd_ - known.sd.numpy()).max()),
        seconds=time.process_time() - start,
    )


def rows(method: str, options: argparse.Namespace) -> bool:
    """Print a method's rows; returns whether every limit is kept."""
    kept = True
    for make in (lambda _: gaussian_designs(), wide_designs):
        for same in zip(*(make(seed) for seed in range(options.seeds)), strict=True):
            if options.design not in same[0].name:
                continue
            limits = LIMITS[15 if same[0].x.shape[1] == 15 else 10]
            runs = [run(design, reference(design), method, seed) for seed, design in enumerate(same)]
            by_name = {name: [getattr(r, name) for r in runs] for name in Run._fields}
            cells = [method, same[0].name]
            for name, limit in zip(("error", "gap"), limits, strict=False):
                cells += [cell(max(by_name[name]), limit), cell(statistics.median(by_name[name]))]
            cells += [cell(max(by_name["mean"])), cell(max(by_name["sd"])), cell(max(by_name["seconds"]), limits[2])]
            kept &= not any("!" in c for c in cells)
            table_row(*cells)
    return kept


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--design", default="", help="part of a name")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.seeds = 1 if options.quick else options.seeds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, seeds 0 to {options.seeds - 1}")
    heads = ["PIP error: worst", "median", "evidence: worst", "median", "mean: worst", "sd: worst", "seconds: worst"]
    table_head("method", "design", *heads)
    kept = [rows(method, options) for method in options.method or METHODS]
    sys.exit(not all(kept))


if __name__ == "__main__":
    main()
