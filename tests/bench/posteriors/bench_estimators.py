"""Estimators beside long chains: python tests/bench/posteriors/bench_estimators.py

A row a design: processor seconds of one fit on one core as it comes, the largest standard error that the fit gives, the
largest difference of an inclusion probability from the long chain of ``estimator_references.json``, with that chain's
own standard error, and the features with an inclusion probability above .5. Beside it the seconds of abess, which
chooses one subset, by default and out of the sizes 0 to 20, if it is installed. --design takes those whose names
contain the text; --seeds several fits. --units gives times in units of 100,000 additions of two tensors of 100 numbers,
which compare between machines; they are measured before and after each fit, as a machine's speed changes while others
use it.

The chains share no code with the library. Logistic designs of up to 20,000 rows: Polya-Gamma augmentation. Wine:
reversible jumps of one feature at a time. Other designs have so many observations that Laplace's approximation is
exact: the sum over all gate vectors that a chain of single flips proposes, beside what half of it finds. Of linear
designs, of which some have neighbours that correlate by .9, the largest standard error is all there is, as of z-scores,
of ten labels, of 2,000 counts and of a search. Designs of three features: the sum over their eight gate vectors, with
quadrature of the scales and importance sampling of all else, as in ``tests/selection/methods/by_importance.py``; of
responses, which are conjugate given the scales, quadrature alone. The script of all others,
``estimator_references.py`` in this folder, is at commit 8da48bea.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import GridSearchCV

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0 import selection
from tests.bench.timing import options_of, table_head, table_row

Array = NDArray[np.float64]
FILE = Path(__file__).with_name("estimator_references.json")
KINDS: dict[str, Any] = {
    "breast cancer": selection.SpikeSlabClassifier,
    "wine": selection.SpikeSlabClassifier,
    "logistic 20,000": selection.SpikeSlabClassifier,
    "logistic 200,000": selection.SpikeSlabClassifier,
    "Poisson 20,000": selection.SpikeSlabPoissonRegressor,
    "linear 200 x 100": selection.SpikeSlabRegressor,
    "linear 500 x 150, neighbours": selection.SpikeSlabRegressor,
    "ordinal 80 x 3": selection.SpikeSlabOrdinal,
    "negative binomial 80 x 3": selection.SpikeSlabNegativeBinomial,
    "Student t 80 x 3": selection.SpikeSlabRobust,
    "3 responses, 80 x 3": selection.SpikeSlabMultiTaskRegressor,
    "50 responses, 60 x 3": selection.SpikeSlabMultiTaskRegressor,
    "negative binomial 2,000 x 30": selection.SpikeSlabNegativeBinomial,
    "labels 10 x 2,000": selection.SpikeSlabClassifier,
    "z-scores 2,000": selection.SpikeSlabRegressor,
    "search 200 x 100": selection.SpikeSlabRegressor,
}


def design(name: str) -> tuple[Array, Array]:
    """Features and observations."""
    if name in ("breast cancer", "wine"):
        from sklearn.datasets import load_breast_cancer, load_wine

        x, y = (load_wine if name == "wine" else load_breast_cancer)(return_X_y=True)
        return x, y.astype(float)
    rng = np.random.default_rng(0)
    if name in list(KINDS)[7:-1]:
        return further(name, rng)
    if name.startswith(("linear", "search")):
        x = rng.normal(size=(500, 150) if "neighbours" in name else (200, 100))
        for j in range(1, x.shape[1] if "neighbours" in name else 0):
            x[:, j] = 0.9 * x[:, j - 1] + np.sqrt(1 - 0.9**2) * x[:, j]
        return x, x[:, ::30][:, :4] @ np.array([1.0, -0.7, 0.5, 0.3]) + rng.normal(size=len(x))
    x = rng.normal(size=(int(name.split()[1].replace(",", "")), 50))
    eta = x[:, :8] @ np.array([1, -0.8, 0.6, -0.5, 0.4, -0.3, 0.2, -0.1])
    if name.startswith("Poisson"):
        return x, rng.poisson(np.exp(0.5 + 0.5 * eta)).astype(float)
    return x, (eta + rng.logistic(size=len(x)) > 0).astype(float)


def further(name: str, rng: np.random.Generator) -> tuple[Array, Array]:
    """Families whose parameters are sampled, and features that are more than observations; of z-scores, R and z."""
    sizes = {"labels": (10, 2000), "z-scores": (3000, 2000), "50": (60, 3)}
    n, p = (2000, 30) if "x 30" in name else sizes.get(name.split()[0], (80, 3))
    x = rng.normal(size=(n, p))
    for j in range(1, p if name.startswith("z") else 0):
        x[:, j] = 0.9 * x[:, j - 1] + np.sqrt(1 - 0.9**2) * x[:, j]
    effect = 0.3 * x[:, 0] + 0.15 * x[:, 1]
    if name.startswith("z"):
        y = effect + 0.3 * x[:, 1000] + rng.normal(size=n)
        r = np.corrcoef(x.T, y)
        return r[:-1, :-1], r[-1, :-1] * np.sqrt((n - 2) / (1 - r[-1, :-1] ** 2))
    if name.startswith("negative"):
        return x, rng.poisson(np.exp(1 + effect) * rng.gamma(2.0, 0.5, size=n)).astype(float)
    if "responses" in name:
        both = rng.normal(size=(2, int(name.split()[0])))
        return x, x[:, :2] @ ([[0.3], [0.15]] * both) + rng.normal(size=(n, both.shape[1]))
    if name.startswith("labels"):
        return x, (x[:, 0] > 0).astype(float)
    if name.startswith("ordinal"):
        return x, np.digitize(2 * effect + rng.logistic(size=n), [-1, 0, 1.5]).astype(float)
    return x, effect + rng.standard_t(3, size=n)


def fitted(name: str, x: Array, y: Array, seed: int) -> Any:
    """The fit of a design; of a search over five rates and five folds, that to all rows."""
    if name.startswith("z-scores"):
        return selection.SpikeSlabRegressor.from_z_scores(y, x, 3000, random_state=seed)
    model = KINDS[name](random_state=seed)
    if name.startswith("search"):
        return GridSearchCV(model, {"rate": [0.01, 0.02, 0.05, 0.1, 0.2]}).fit(x, y).best_estimator_
    return model.fit(x, y)


def abess(name: str, x: Array, y: Array) -> str:
    """Seconds and the number of features that abess chooses."""
    if name in list(KINDS)[7:]:
        return "-"
    try:
        from abess.linear import LinearRegression, LogisticRegression, MultinomialRegression, PoissonRegression
    except ImportError:
        return "not installed"
    own = {"Poisson": PoissonRegression, "linear": LinearRegression, "wine": MultinomialRegression}
    kind = own.get(name.split()[0], LogisticRegression)
    cells = []
    for sizes in (None, range(21)):
        start = time.process_time()
        coef = np.atleast_2d(kind(support_size=sizes).fit(x, y).coef_)
        chosen = int((coef if coef.shape[1] == x.shape[1] else coef.T).any(0).sum())
        cells.append(f"{time.process_time() - start:.1f} s, {chosen} features")
    return "; of 0 to 20: ".join(cells)


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
    unit = (lambda: min(additions() for _ in range(3))) if options.units else (lambda: 1.0)
    table_head(
        "design", "seed", "time", "unit", "standard error", "difference", "long chain's error", "PIP > .5", "abess"
    )
    for name in KINDS:
        if options.design not in name:
            continue
        x, y = design(name)
        known = references.get(name)
        for seed in range(options.seeds):
            before, start = unit(), time.process_time()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = fitted(name, x, y, seed)
            seconds = time.process_time() - start
            each = (before + unit()) / 2
            spent = f"{seconds / each:.1f}{' (warns)' if caught else ''}"
            cells = [f"{model.error_.max():.4f}", "-", "-"]
            if known is not None:
                difference = np.abs(model.pip_ - known["pip"]).max()
                cells[1:] = [f"{difference:.4f}", f"{known['standard_error']:.4f}"]
            table_row(name, seed, spent, f"{each:.3f} s", *cells, int((model.pip_ > 0.5).sum()), abess(name, x, y))


if __name__ == "__main__":
    main()
