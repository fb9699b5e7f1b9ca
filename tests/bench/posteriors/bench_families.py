"""Seconds of a fit by each of the nine estimators: python tests/bench/posteriors/bench_families.py

The same 50 features of standard normal numbers, of which three have an effect, and a response of each kind; process
seconds of one core, the largest standard error of a PIP, and the features that are selected.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
import torch
from numpy.random import Generator
from scipy.special import expit

from pyro_l0 import selection
from tests.bench.timing import options_of, table_head, table_row


def responses(eta: np.ndarray, random: Generator) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """By estimator: y given linear predictors, and what else ``fit`` takes."""
    n = len(eta)
    noisy = eta + random.logistic(size=n)
    times, censored = random.exponential(np.exp(-eta)), random.exponential(2.0, size=n)
    survival = np.rec.fromarrays([times <= censored, np.minimum(times, censored)], names="event,time")
    trials = np.full(n, 10)
    return {
        "Regressor": (eta + random.normal(size=n), {}),
        "Robust": (eta + random.standard_t(3, size=n), {}),
        "MultiTaskRegressor": (np.stack([eta, -eta], 1) + random.normal(size=(n, 2)), {}),
        "Classifier": (noisy > 0, {}),
        "Ordinal": (np.digitize(noisy, [-1, 1]), {}),
        "PoissonRegressor": (random.poisson(np.exp(eta)), {}),
        "NegativeBinomial": (random.poisson(np.exp(eta) * random.gamma(2.0, 0.5, size=n)), {}),
        "BinomialRegressor": (random.binomial(trials, expit(eta)), {"trials": trials}),
        "Cox": (survival, {}),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--features", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    x = random.normal(size=(options.n, options.features))
    table_head("estimator", "seconds", "standard error", "selected")
    for name, (y, known) in responses(x[:, 0] - 0.7 * x[:, 1] + 0.5 * x[:, 2], random).items():
        start = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = getattr(selection, f"SpikeSlab{name}")(random_state=0).fit(x, y, **known)
        seconds = f"{time.process_time() - start:.1f}{' (warns)' if caught else ''}"
        table_row(name, seconds, f"{model.error_.max():.3f}", *[str(model.select().tolist())])


if __name__ == "__main__":
    main()
