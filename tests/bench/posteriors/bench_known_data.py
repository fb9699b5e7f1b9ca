"""Two data sets that users of R know: python tests/bench/posteriors/bench_known_data.py [--data PART] [--seeds N]

The data and the rivals are those of R's susieR and BMS (``apt-get install r-cran-susier r-cran-bms``), exported to a
temporary folder; without Rscript or a package the script says so and ends. Each tool runs as its own manual shows.

*genotypes*: ``N3finemapping``, 574 people x 1,001 variants, two simulated traits with three effects each. Credible sets
of level .95 by both tools, with the effects that they hold. *growth*: ``datafls``, 72 countries x 41 variables
(Fernandez, Ley and Steel 2001). Inclusion probabilities under the priors of both tools. BMS has g-priors, which give
the coefficients of correlated variables a correlated prior; ours are independent. g = n ("UIP") and g = max(n, p^2)
("BRIC") are, on uncorrelated standardised variables, slabs of deviation noise * sqrt(g / n), and a uniform prior on
models is a rate of one half: so run the last two columns. BMS's "random" rate is Beta(1, 1), ours Beta(1, sqrt(p)).

Variables count from 1, as in R. Times are processor time in units of 100,000 additions of two tensors of 100 numbers.
"""

from __future__ import annotations

import csv
import math
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.selection import SpikeSlabRegressor
from tests.bench.posteriors.bench_estimators import additions
from tests.bench.timing import options_of, table_head, table_row

Array = NDArray[np.float64]
CHECK = """
for (name in c("susieR", "BMS")) if (!requireNamespace(name, quietly = TRUE)) { cat(name); quit(status = 3) }
"""
GENOTYPES = """
suppressMessages(library(susieR)); data(N3finemapping)
with(N3finemapping, { writeBin(c(X), "x"); writeBin(c(Y), "y"); writeBin(c(true_coef), "effects") })
for (trait in 1:2) {
  start <- sum(proc.time()[1:2])
  fit <- suppressMessages(susie(N3finemapping$X, N3finemapping$Y[, trait], L = 10))
  seconds <- sum(proc.time()[1:2]) - start
  sets <- fit$sets$cs
  for (i in seq_along(sets)) cat(trait, seconds, fit$sets$coverage[i], sets[[i]], "\n")
}
"""
GROWTH = """
suppressMessages(library(BMS)); data(datafls); write.csv(datafls, "growth", row.names = FALSE)
for (g in c("UIP", "BRIC")) {
  set.seed(1); start <- sum(proc.time()[1:2])
  fit <- bms(datafls, burn = 50000, iter = 100000, g = g, mprior = ifelse(g == "UIP", "random", "uniform"),
             nmodel = 2000, mcmc = "bd", user.int = FALSE)
  cat(sum(proc.time()[1:2]) - start, coef(fit, order.by.pip = FALSE)[, "PIP"], "\n")
}
"""


def rows_of(script: str, folder: str) -> list[list[float]]:
    """What a script in R prints, as numbers; it reads and writes data in the folder."""
    done = subprocess.run(["Rscript", "-e", script], cwd=folder, capture_output=True, text=True, check=True)
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


def fitted(x: Array, y: Array, seed: int, **options: Any) -> tuple[SpikeSlabRegressor, float]:
    """The estimator, and seconds."""
    model = SpikeSlabRegressor(random_state=seed, **options)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a set of which no member is selected: sets are what is compared
        model.fit(x, y)
    return model, time.process_time() - start


def genotypes(folder: str, unit: float, seeds: int) -> None:
    sets: dict[tuple[int, str], list[tuple[float, list[int]]]] = {}
    seconds: dict[tuple[int, str], float] = {}
    for trait, spent, coverage, *features in rows_of(GENOTYPES, folder):
        sets.setdefault((int(trait), "susieR"), []).append((coverage, sorted(map(int, features))))
        seconds[int(trait), "susieR"] = spent
    x = np.fromfile(f"{folder}/x").reshape(1001, 574).T
    y, effects = np.fromfile(f"{folder}/y").reshape(2, 574), np.fromfile(f"{folder}/effects").reshape(2, 1001)
    for trait in (1, 2):
        for seed in range(seeds):
            model, seconds[trait, f"ours, seed {seed}"] = fitted(x, y[trait - 1], seed)
            sets[trait, f"ours, seed {seed}"] = [
                (each.probability, sorted(j + 1 for j in each.features)) for each in model.credible_sets_
            ]
    table_head("trait", "tool", "units", "set: probability, size, variables", "effects in the set")
    for (trait, tool), found in sorted(sets.items()):
        for probability, members in sorted(found, key=lambda each: each[1]):
            shown = ", ".join(map(str, members[:3])) + (f" ... {members[-1]}" if len(members) > 3 else "")
            held = ", ".join(f"{j}: {effects[trait - 1, j - 1]:+.2f}" for j in members if effects[trait - 1, j - 1])
            units = f"{seconds[trait, tool] / unit:.1f}"
            table_row(trait, tool, units, f"{probability:.3f}, {len(members)}, {shown}", held or "none")
        missed = set(np.flatnonzero(effects[trait - 1]) + 1) - {j for _, members in found for j in members}
        for j in missed:
            table_row(trait, tool, "", "none", f"{j}: {effects[trait - 1, j - 1]:+.2f}, missed")


def growth(folder: str, unit: float, seeds: int) -> None:
    rivals = rows_of(GROWTH, folder)
    with Path(folder, "growth").open() as file:
        names, *rows = csv.reader(file)
    y, x = np.split(np.array(rows, dtype=float), [1], axis=1)
    columns = {}
    for prior, (seconds, *pips) in zip(("UIP, random", "BRIC, uniform"), rivals, strict=True):
        columns[f"BMS: {prior}"] = (seconds, np.array(pips))
    for seed in range(seeds):
        model, seconds = fitted(x, y[:, 0], seed)
        columns[f"ours, seed {seed}"] = (seconds, model.pip_)
    for prior, g in (("UIP", len(y)), ("BRIC", max(len(y), x.shape[1] ** 2))):
        slab = model.noise_scale_ * math.sqrt(g / len(y))
        near, seconds = fitted(x, y[:, 0], 0, rate=0.5, slab_scale=slab)
        columns[f"ours: rate .5, slab of {prior}"] = (seconds, near.pip_)
    leading = np.argsort(-columns["ours, seed 0"][1])[:12]
    table_head("variable", *columns)
    for j in leading:
        table_row(names[1 + j], *(f"{pips[j]:.2f}" for _, pips in columns.values()))
    table_row("expected size", *(f"{pips.sum():.1f}" for _, pips in columns.values()))
    table_row("units", *(f"{seconds / unit:.0f}" for seconds, _ in columns.values()))


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--data", default="", help="part of a name")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if shutil.which("Rscript") is None:
        return print("Skipped: there is no Rscript. Install r-cran-susier and r-cran-bms, which bring it.")
    absent = subprocess.run(["Rscript", "-e", CHECK], capture_output=True, text=True)
    if absent.returncode == 3:
        return print(f"Skipped: R has no package {absent.stdout}. Install r-cran-{absent.stdout.lower()}.")
    unit = min(additions() for _ in range(3))
    print(f"A unit is {unit:.3f} s.\n")
    with tempfile.TemporaryDirectory() as folder:
        for part in (genotypes, growth):
            if options.data in part.__name__:
                part(folder, unit, options.seeds)
                print()


if __name__ == "__main__":
    main()
