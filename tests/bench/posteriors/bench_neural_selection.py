"""What the selector of a network's inputs finds: python tests/bench/posteriors/bench_neural_selection.py --part PART

PART stg is the design of Yamada et al. (2020): 1,000 observations of 20 features from 5 U(0, 1) and y = sin(x1)
cos(x2)^3 without noise; 1,000 more are the test. Columns: how many seeds selected exactly features 1 and 2, test mean
squared error (mean, median and worst over the seeds), processor seconds of a fit on one core. Wanted are 19 of 20 and
.0112; what is missed is marked with an exclamation mark, and then the command ends with 1.

PART real compares accuracies by the number of features on breast cancer and wine (scikit-learn), by 5-fold
cross-validation, every method selecting anew in each fold: the selector, an L1 logistic regression whose penalty leaves
that many features, and a forest on those that a forest finds most important.

PART stable is the mean overlap (Jaccard) of the features that are selected on breast cancer with different seeds, and
the smallest absolute correlation of a feature that one seed selects with its next relative among those of another: 1
where seeds differ only in which of two duplicates they take.

``--seeds`` says how many, ``--first`` from which on, ``--steps`` how many steps a fit takes.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from itertools import combinations
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.selection import NeuralFeatureSelector

WANTED, LIMIT = 0.95, 0.0112
SIZES = {"breast cancer": (1, 2, 3, 5, 8, 12), "wine": (1, 2, 3, 5, 8)}
LOAD = {"breast cancer": load_breast_cancer, "wine": load_wine}


def stg_design(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """1,000 observations to train on, and 1,000 for the test."""
    x = 5 * np.random.default_rng(seed).random((2000, 20))
    return x, np.sin(x[:, 0]) * np.cos(x[:, 1]) ** 3


def stg(seeds: range, steps: int) -> bool:
    print("n_features   exact   MSE: mean   median    worst   seconds")
    missed = False
    for size in (2, None):
        exact, errors, seconds = [], [], []
        for seed in seeds:
            x, y = stg_design(seed)
            start = time.process_time()
            found = NeuralFeatureSelector(n_features=size, max_steps=steps, random_state=seed).fit(x[:1000], y[:1000])
            seconds.append(time.process_time() - start)
            exact.append(found.get_support(indices=True).tolist() == [0, 1])
            errors.append(float(((found.predict(x[1000:]) - y[1000:]) ** 2).mean()))
        few, large = np.mean(exact) < WANTED, np.mean(errors) > LIMIT
        missed |= bool(few or large)
        print(
            f"{size!s:10}{sum(exact):5} / {len(seeds)}{'!' if few else ' '}"
            f"{np.mean(errors):10.5f}{'!' if large else ' '}"
            f"{np.median(errors):9.5f}{np.max(errors):9.5f}{np.mean(seconds):10.1f}",
            flush=True,
        )
    return missed


def neural(x: np.ndarray, y: np.ndarray, test: np.ndarray, size: int, steps: int, seed: int) -> np.ndarray:
    return NeuralFeatureSelector(n_features=size, max_steps=steps, random_state=seed).fit(x, y).predict(test)


def l1(x: np.ndarray, y: np.ndarray, test: np.ndarray, size: int, steps: int, seed: int) -> np.ndarray:
    """The weakest penalty of a grid that leaves at most so many features; predictions of the penalised fit."""
    del steps
    best = None
    for c in np.geomspace(1e-3, 10, 25):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(l1_ratio=1, solver="saga", C=c, max_iter=300, random_state=seed).fit(x, y)
        if (model.coef_ != 0).any(0).sum() > size:
            break
        best = model
    assert best is not None
    return best.predict(test)


def forest(x: np.ndarray, y: np.ndarray, test: np.ndarray, size: int, steps: int, seed: int) -> np.ndarray:
    del steps
    kept = np.argsort(-RandomForestClassifier(random_state=seed).fit(x, y).feature_importances_)[:size]
    return RandomForestClassifier(random_state=seed).fit(x[:, kept], y).predict(test[:, kept])


def real(seeds: range, steps: int) -> None:
    print("data           features  selector        L1    forest")
    for name, sizes in SIZES.items():
        x, y = LOAD[name](return_X_y=True)
        for size in sizes:
            right: list[list[float]] = [[], [], []]
            for seed in seeds:
                for train, test in StratifiedKFold(5, shuffle=True, random_state=seed).split(x, y):
                    scaler = StandardScaler().fit(x[train])
                    parts = scaler.transform(x[train]), y[train], scaler.transform(x[test])
                    for column, method in zip(right, (neural, l1, forest), strict=True):
                        column.append(float((method(*parts, size, steps, seed) == y[test]).mean()))
            print(f"{name:15}{size:8}" + "".join(f"{np.mean(column):10.3f}" for column in right), flush=True)


def stable(seeds: range, steps: int) -> None:
    print("features   overlap   least correlation with the next")
    x, y = load_breast_cancer(return_X_y=True)
    correlation = np.abs(np.corrcoef(x.T))
    for size in (3, 5, 8):
        found = [
            NeuralFeatureSelector(n_features=size, max_steps=steps, random_state=seed)
            .fit(x, y)
            .get_support(indices=True)
            for seed in seeds
        ]
        pairs = list(combinations(found, 2))
        overlap = np.mean([len(np.intersect1d(a, b)) / len(np.union1d(a, b)) for a, b in pairs])
        relatives = [min(correlation[a][:, b].max(1).min(), correlation[a][:, b].max(0).min()) for a, b in pairs]
        print(f"{size:8}{overlap:10.2f}{np.mean(relatives):10.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("stg", "real", "stable"), required=True)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args()
    count = options.seeds or {"stg": 20, "real": 1, "stable": 5}[options.part]
    seeds = range(options.first, options.first + count)
    if options.part == "stg":
        return int(stg(seeds, options.steps))
    if options.part == "real":
        real(seeds, options.steps)
    else:
        stable(seeds, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
