"""Estimators beside long chains: python tests/bench/posteriors/bench_estimators.py

A row a design: processor seconds of one fit on one core as it comes, the largest standard error that the fit gives, the
largest difference of an inclusion probability from the long chain of ``estimator_references.json``, with that chain's
own standard error, and the features with an inclusion probability above .5. Beside it the seconds of abess, which
chooses one subset, if it is installed. --design takes those whose names contain the text; --seeds several fits.
--units gives times in units of 100,000 additions of two tensors of 100 numbers, which compare between machines.

The chains share no code with the library. Logistic designs of up to 20,000 rows: Polya-Gamma augmentation. Wine:
reversible jumps of one feature at a time. Other designs have so many observations that Laplace's approximation is
exact: the sum over all gate vectors that a chain of single flips proposes, beside what half of it finds. Of linear
designs, of which some have neighbours that correlate by .9, the largest standard error is all there is. The script,
``estimator_references.py`` in this folder, is at commit 8da48bea.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabPoissonRegressor, SpikeSlabRegressor
from tests.bench.timing import options_of, table_head, table_row

Array = NDArray[np.float64]
FILE = Path(__file__).with_name("estimator_references.json")
KINDS = {
    "breast cancer": SpikeSlabClassifier,
    "wine": SpikeSlabClassifier,
    "logistic 20,000": SpikeSlabClassifier,
    "logistic 200,000": SpikeSlabClassifier,
    "Poisson 20,000": SpikeSlabPoissonRegressor,
    "linear 200 x 100": SpikeSlabRegressor,
    "linear 500 x 150, neighbours": SpikeSlabRegressor,
}


def design(name: str) -> tuple[Array, Array]:
    """Features and observations."""
    if name in ("breast cancer", "wine"):
        from sklearn.datasets import load_breast_cancer, load_wine

        x, y = (load_wine if name == "wine" else load_breast_cancer)(return_X_y=True)
        return x, y.astype(float)
    rng = np.random.default_rng(0)
    if name.startswith("linear"):
        x = rng.normal(size=(500, 150) if "neighbours" in name else (200, 100))
        for j in range(1, x.shape[1] if "neighbours" in name else 0):
            x[:, j] = 0.9 * x[:, j - 1] + np.sqrt(1 - 0.9**2) * x[:, j]
        return x, x[:, ::30][:, :4] @ np.array([1.0, -0.7, 0.5, 0.3]) + rng.normal(size=len(x))
    x = rng.normal(size=(int(name.split()[1].replace(",", "")), 50))
    eta = x[:, :8] @ np.array([1, -0.8, 0.6, -0.5, 0.4, -0.3, 0.2, -0.1])
    if name.startswith("Poisson"):
        return x, rng.poisson(np.exp(0.5 + 0.5 * eta)).astype(float)
    return x, (eta + rng.logistic(size=len(x)) > 0).astype(float)


def abess(name: str, x: Array, y: Array) -> str:
    """Seconds and the number of features that abess chooses."""
    try:
        from abess.linear import LinearRegression, LogisticRegression, MultinomialRegression, PoissonRegression
    except ImportError:
        return "not installed"
    own = {"Poisson": PoissonRegression, "linear": LinearRegression, "wine": MultinomialRegression}
    kind = own.get(name.split()[0], LogisticRegression)
    start = time.process_time()
    coef = np.atleast_2d(kind().fit(x, y).coef_)
    chosen = int((coef if coef.shape[1] == x.shape[1] else coef.T).any(0).sum())
    return f"{time.process_time() - start:.1f} s, {chosen} features"


def additions() -> float:
    """Seconds of 100,000 additions of two tensors of 100 numbers: the unit."""
    one, other = torch.ones(2, 100, dtype=torch.float64)
    start = time.process_time()
    for _ in range(100_000):
        one + other
    return time.process_time() - start


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--design", default="", help="part of a name")
    parser.add_argument("--units", action="store_true", help="times in units, not seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    references = json.loads(FILE.read_text())
    unit = min(additions() for _ in range(3)) if options.units else 1.0
    if options.units:
        print(f"A unit is {unit:.3f} s.\n")
    table_head("design", "seed", "time", "standard error", "difference", "long chain's error", "PIP > .5", "abess")
    for name, kind in KINDS.items():
        if options.design not in name:
            continue
        x, y = design(name)
        known = references.get(name)
        for seed in range(options.seeds):
            start = time.process_time()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = kind(random_state=seed).fit(x, y)
            seconds = f"{(time.process_time() - start) / unit:.1f}{' (warns)' if caught else ''}"
            cells = [f"{model.error_.max():.4f}", "-", "-"]
            if known is not None:
                difference = np.abs(model.pip_ - known["pip"]).max()
                cells[1:] = [f"{difference:.4f}", f"{known['standard_error']:.4f}"]
            table_row(name, seed, seconds, *cells, int((model.pip_ > 0.5).sum()), abess(name, x, y))


if __name__ == "__main__":
    main()
