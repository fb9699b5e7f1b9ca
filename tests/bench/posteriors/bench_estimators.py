"""Estimators of labels and counts beside long chains: python tests/bench/posteriors/bench_estimators.py

A row a design: processor seconds of one fit on one core as it comes, the largest standard error that the fit gives, the
largest difference of an inclusion probability from the long chain of ``estimator_references.json``, with that chain's
own standard error, and the features with an inclusion probability above .5. Beside it the seconds of abess, which
chooses one subset, if it is installed. --design takes those whose names contain the text; --seeds several fits.

--grid FILE compares the ways of sampling instead: the weights of an expansion's chains, augmentation and jumps, at
several numbers of observations and features and correlations of neighbouring features (``GRID``). A row a design: the
processor seconds of a whole fit to a standard error of .02 and, in brackets, the largest difference of an inclusion
probability then from the chains with the least standard error, which stands last. Chains run to .012, or for some
seconds (``SECONDS``). The weights stop where they are; their standard error stands before their difference. Rows are
appended to FILE, and those that it has are not run again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabPoissonRegressor
from pyro_l0.selection.methods import sampling
from pyro_l0.selection.methods.exact_chains import (
    AugmentedChains,
    ExactChains,
    JumpingChains,
    is_augmented,
    standard_error,
)
from tests.bench.posteriors.estimator_references import FILE, NAMES, Array, design
from tests.bench.timing import options_of, table_head, table_row


def abess(name: str, x: Array, y: Array) -> str:
    """Seconds and the number of features that abess chooses."""
    try:
        from abess.linear import LogisticRegression, MultinomialRegression, PoissonRegression
    except ImportError:
        return "not installed"
    kind = PoissonRegression if name.startswith("Poisson") else LogisticRegression
    kind = MultinomialRegression if name == "wine" else kind
    start = time.process_time()
    coef = np.atleast_2d(kind().fit(x, y).coef_)
    chosen = int((coef if coef.shape[1] == x.shape[1] else coef.T).any(0).sum())
    return f"{time.process_time() - start:.1f} s, {chosen} features"


# Families, observations, features and correlations of neighbours; the most telling first.
GRID = [
    *itertools.product(["logistic"], [100, 500, 2000], [10, 30, 100], [0.95, 0.0]),
    *itertools.product(["Poisson"], [100, 500, 2000], [10, 30, 100], [0.95]),
    *itertools.product(["logistic", "Poisson"], [20_000], [10, 30, 100], [0.95]),
    *itertools.product(["logistic"], [100, 500, 2000], [10, 30, 100], [0.5]),
]
EFFECTS = (1.0, -0.8, 0.6, -0.4, 0.2)
WAYS = ("weights", "augmentation", "jumps")
GOAL, LONG, SECONDS = 0.02, 0.012, 60.0


def drawn(family: str, n: int, p: int, correlation: float) -> tuple[Array, Array]:
    """Features of a first-order autoregression, five of which matter, at equal distances, and observations."""
    rng = np.random.default_rng([n, p, int(100 * correlation)])
    x = rng.normal(size=(n, p))
    for j in range(1, p):
        x[:, j] = correlation * x[:, j - 1] + np.sqrt(1 - correlation**2) * x[:, j]
    eta = x[:, :: p // len(EFFECTS)] @ np.array(EFFECTS)
    if family == "Poisson":
        return x, rng.poisson(np.exp(0.5 + 0.5 * eta)).astype(float)
    return x, (eta + rng.logistic(size=n) > 0).astype(float)


class Stage(NamedTuple):
    """What a way has found after some processor seconds of the whole fit."""

    seconds: float
    error: float
    pip: list[float]


def chains_stages(chains: ExactChains, before: float) -> list[Stage]:
    """One after each round from the fourth on; the fit took some seconds before."""
    found: list[Stage] = []
    record: list[torch.Tensor] = []
    start, error = time.process_time() - before, np.inf
    while error > LONG and time.process_time() - start < before + SECONDS:
        record += [chains._sweep()[0] for _ in range(chains.sweeps)]
        used = torch.stack(record[int(chains.warm_up * len(record)) :])
        if len(record) > 3 * chains.sweeps:
            error = float(standard_error(used).max())
            found.append(Stage(time.process_time() - start, error, used.mean((0, 1)).tolist()))
    return found


def all_stages(model: Any, x: Array, y: Array) -> dict[str, list[Stage]]:
    """By way; both kinds of chains start from the same gates."""
    start = time.process_time()
    with mock.patch.multiple(sampling, _PRECISE=np.inf, MOST_ERROR=np.inf):
        model.fit(x, y)
    found = {"weights": [Stage(time.process_time() - start, model._standard_error.max(), model.pip_.tolist())]}

    def posterior(jumping: JumpingChains, *_: object) -> None:
        before, problem = time.process_time() - start, jumping._problem
        first = jumping.z, jumping.log_slab
        found["jumps"] = chains_stages(jumping, before)
        if is_augmented(problem):
            found["augmentation"] = chains_stages(AugmentedChains(problem, *first, jumping._generator), before)
        raise StopIteration

    start = time.process_time()
    with (
        mock.patch.multiple(sampling, _PRECISE=0.0, MOST_ERROR=0.0),
        mock.patch.object(sampling, "is_augmented", return_value=False),
        mock.patch.object(JumpingChains, "posterior", posterior),
        contextlib.suppress(StopIteration),
    ):
        model.fit(x, y)
    return found


def run_grid(path: Path) -> None:
    """Print the table, with rows that the file lacks appended to it."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {tuple(row["design"]): row["stages"] for row in map(json.loads, lines)}
    table_head("family", "n", "p", "correlation", *WAYS, "longest")
    for chosen in GRID:
        if chosen not in rows:
            kind = SpikeSlabPoissonRegressor if chosen[0] == "Poisson" else SpikeSlabClassifier
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows[chosen] = all_stages(kind(method="tempered", random_state=0), *drawn(*chosen))
            with path.open("a") as file:
                file.write(json.dumps({"design": chosen, "stages": rows[chosen]}) + "\n")
        table_row(*chosen, *_cells(rows[chosen]))


def _cells(stages: dict[str, list[Any]]) -> list[str]:
    """Of a row: seconds and differences of the ways, and the standard error of what they are compared with."""
    of_way = {way: [Stage(*stage) for stage in found] for way, found in stages.items()}
    ends = [stage for way in WAYS[1:] for stage in of_way.get(way, [])[-1:]] or of_way["weights"]
    longest = min(ends, key=lambda stage: stage.error)
    cells = []
    for way in WAYS:
        reached = [stage for stage in of_way.get(way, []) if stage.error <= GOAL or way == "weights"]
        if reached:
            difference = f"{np.abs(np.subtract(reached[0].pip, longest.pip)).max():.3f}"
            own = f"{reached[0].error:.3f}, " if way == "weights" else ""
            cells.append(f"{reached[0].seconds:.1f} ({own}{difference})")
        else:
            cells.append(f"> {SECONDS:.0f}" if way in of_way else "")
    return [*cells, f"{longest.error:.3f}"]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--design", default="", help="part of a name")
    parser.add_argument("--grid", type=Path, help="file of rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.grid:
        run_grid(options.grid)
        return
    references = json.loads(FILE.read_text())
    table_head("design", "seed", "seconds", "standard error", "difference", "long chain's error", "PIP > .5", "abess")
    for name in NAMES:
        if options.design not in name:
            continue
        x, y = design(name)
        known = references[name]
        for seed in range(options.seeds):
            kind = SpikeSlabPoissonRegressor if name.startswith("Poisson") else SpikeSlabClassifier
            start = time.process_time()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = kind(random_state=seed).fit(x, y)
            seconds = f"{time.process_time() - start:.1f}{' (warns)' if caught else ''}"
            difference = np.abs(model.pip_ - known["pip"]).max()
            cells = [f"{value:.4f}" for value in (model._standard_error.max(), difference, known["standard_error"])]
            table_row(name, seed, seconds, *cells, int((model.pip_ > 0.5).sum()), abess(name, x, y))


if __name__ == "__main__":
    main()
