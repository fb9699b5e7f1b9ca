"""Selection side by side on seven designs: python tests/bench/posteriors/bench_rivals.py [--design PART] [--seeds N]

Ours, abess, skscope and millipede (pip install -e '.[rivals]'), susieR (apt-get install r-cran-susier), its port
pysusie, and sparsevb (both by pip); a tool that is not installed is left out, and so is one from designs whose response
it does not take. Each runs as it comes. Tools with inclusion probabilities select at a false discovery rate of .1 by
the same rule. abess chooses its size by EBIC, its default, by GIC or by five folds, and skscope by LinearSIC or EBIC
out of 0 to 20. millipede expects five effects, its default, and has a negative binomial for counts, which are Poisson
here. The last design is three large effects on a background of small ones on all features, which no tool but
``background=True`` knows of.

First table, means over the data sets: F1; the share of the selected that is false; the mean log score of 1,000 new
observations, by draws where a tool has some, else by its estimates and the residuals' deviation; the share of credible
sets of level .95 that hold no (large) effect, and the effects in sets; seconds of processor time of a fit on one core.
In brackets what a tool has more than ours, with the standard error of that. Each of the first four is a win or a loss
of ours where it differs by more than .03, .05, .01 and .05, and by two standard errors, else a tie: second table.
Five data sets a design, two of p = 10,000, or --seeds of each.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit, gammaln, log_expit, logsumexp

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabPoissonRegressor, SpikeSlabRegressor
from tests.bench.timing import options_of, table_head, table_row

NEW, FDR, MOST = 1000, 0.1, 20
Array = NDArray[np.float64]


class Data(NamedTuple):
    """Observations, and new ones."""

    x: Array
    y: Array
    new_x: Array
    new_y: Array


class Found(NamedTuple):
    """What a tool selects, log densities of new observations at each draw with the draws' log weights, credible sets.

    ``seconds`` are those of another process.
    """

    chosen: NDArray[np.intp]
    logs: Array
    log_weights: Array
    sets: list[NDArray[np.intp]] | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Case:
    """A design: features in blocks of a correlation, of which the first features of the first blocks have effects.

    With a background neighbours correlate, and a quarter of the variance is that of small effects on all features.
    """

    name: str
    family: str
    n: int
    p: int
    effects: tuple[float, ...]
    block: int = 1
    correlation: float = 0.0
    seeds: int = 5
    background: bool = False

    @property
    def active(self) -> NDArray[np.intp]:
        return self.block * np.arange(len(self.effects))

    def drawn(self, seed: int) -> Data:
        rng = np.random.default_rng(seed)
        rows = self.n + NEW
        if self.background:
            x = rng.normal(size=(rows, self.p))
            for j in range(1, self.p):
                x[:, j] = self.correlation * x[:, j - 1] + math.sqrt(1 - self.correlation**2) * x[:, j]
            large, small = x[:, self.active] @ np.array(self.effects), x @ rng.normal(size=self.p)
            y = 0.5 * large / large.std() + 0.5 * small / small.std() + math.sqrt(0.5) * rng.normal(size=rows)
            return Data(x[: self.n], y[: self.n], x[self.n :], y[self.n :])
        shared = np.repeat(rng.normal(size=(rows, self.p // self.block)), self.block, axis=1)
        x = math.sqrt(self.correlation) * shared + math.sqrt(1 - self.correlation) * rng.normal(size=(rows, self.p))
        eta = x[:, self.active] @ np.array(self.effects)
        if self.family == "gaussian":
            y = eta + rng.normal(size=rows)
        elif self.family == "binary":
            y = (rng.random(rows) < expit(eta)).astype(float)
        else:
            y = rng.poisson(np.exp(0.5 + eta)).astype(float)
        return Data(x[: self.n], y[: self.n], x[self.n :], y[self.n :])


FIVE, TEN = (1.0, -0.8, 0.6, -0.4, 0.3), (1.0, -0.9, 0.8, -0.7, 0.6, -0.5, 0.45, -0.4, 0.35, -0.3)
CASES = (
    Case("independent", "gaussian", 200, 100, FIVE),
    Case("blocks", "gaussian", 200, 100, FIVE, block=5, correlation=0.9),
    Case("n < p", "gaussian", 100, 500, (3.0, -2.0, 1.5, -1.0, 0.5)),
    Case("binary", "binary", 300, 50, (1.5, -1.2, 1.0, -0.8, 0.5)),
    Case("counts", "counts", 300, 50, (0.5, -0.4, 0.3, -0.2, 0.15)),
    Case("p = 10,000", "gaussian", 500, 10_000, TEN, seeds=2),
    Case("background", "gaussian", 500, 120, (1.0, -1.0, 1.0), block=40, correlation=0.9, background=True),
)


def log_density(family: str, y: Array, eta: Array, extra: Array | None) -> Array:
    """Of observations at predictors ``(N, n)``; extra is a noise scale, or a negative binomial's concentration."""
    if family == "gaussian":
        assert extra is not None
        scale = extra[:, None]
        return -0.5 * ((y - eta) / scale) ** 2 - np.log(scale) - 0.5 * math.log(2 * math.pi)
    if family == "binary":
        return np.asarray(log_expit(np.where(y > 0, eta, -eta)))
    if extra is None:
        return np.asarray(y * eta - np.exp(eta) - gammaln(y + 1))
    nu = extra[:, None]
    zero = nu * log_expit(np.log(nu) - eta)
    return np.asarray(gammaln(y + nu) - gammaln(nu) - gammaln(y + 1) + zero + y * log_expit(eta - np.log(nu)))


def by_probabilities(pips: Array) -> NDArray[np.intp]:
    """The largest set of features above one half whose mean of 1 - PIP is at most the rate."""
    order = np.argsort(-pips, kind="stable")
    false = np.cumsum(1 - pips[order]) / np.arange(1, len(order) + 1)
    return order[: min(int((false <= FDR).sum()), int((pips > 0.5).sum()))]


def estimated(case: Case, data: Data, intercept: float, coef: Array) -> Found:
    """From one vector of coefficients."""
    chosen = np.flatnonzero(coef)
    residuals = data.y - intercept - data.x @ coef
    scale = math.sqrt((residuals**2).sum() / (case.n - len(chosen) - 1))
    eta = (intercept + data.new_x @ coef)[None]
    extra = np.array([scale]) if case.family == "gaussian" else None
    return Found(chosen, log_density(case.family, data.new_y, eta, extra), np.zeros(1))


def by_draws(
    case: Case, data: Data, pips: Array, coef: Array, intercept: Array, scale: Array | None, **others: Any
) -> Found:
    """From inclusion probabilities and draws of coefficients, shape ``(N, p)``."""
    logs = log_density(case.family, data.new_y, intercept.reshape(-1, 1) + coef @ data.new_x.T, scale)
    return Found(by_probabilities(pips), logs, np.zeros(len(coef)), **others)


KINDS: dict[str, Any] = {
    "gaussian": SpikeSlabRegressor,
    "binary": SpikeSlabClassifier,
    "counts": SpikeSlabPoissonRegressor,
}


def ours(case: Case, data: Data, seed: int, **options: Any) -> Found:
    model = KINDS[case.family](random_state=seed, **options).fit(data.x, data.y)
    draws = model.sample()
    # A mean for the small effects of a background, as `predict` has.
    coef = draws["coef"].reshape(-1, case.p) + getattr(model, "background_coef_", 0.0)
    sets = [np.array(each.features) for each in model.credible_sets_]
    found = by_draws(case, data, model.pip_, coef, draws["intercept"], draws.get("noise_scale"), sets=sets)
    return found._replace(chosen=model.select(FDR))


def ours_background(case: Case, data: Data, seed: int) -> Found | None:
    return ours(case, data, seed, background=True) if case.background else None


def susie_r(case: Case, data: Data, seed: int) -> Found | None:
    if case.family != "gaussian" or shutil.which("Rscript") is None:
        return None
    script = f"""
    if (!requireNamespace("susieR", quietly = TRUE)) quit(status = 3)
    suppressMessages(library(susieR)); set.seed({seed})
    x <- matrix(readBin("x", "double", {data.x.size}), {case.n}); y <- readBin("y", "double", {case.n})
    start <- sum(proc.time()[1:2]); fit <- suppressMessages(susie(x, y))
    cat(sum(proc.time()[1:2]) - start, sqrt(fit$sigma2), fit$pip, "\n")
    writeBin(c(susie_get_posterior_samples(fit, 1000)$b), "draws")
    for (each in fit$sets$cs) cat(each, "\n")
    """
    with tempfile.TemporaryDirectory() as folder:
        data.x.T.tofile(f"{folder}/x")
        data.y.tofile(f"{folder}/y")
        done = subprocess.run(["Rscript", "-e", script], cwd=folder, capture_output=True, text=True)
        if done.returncode == 3:
            return None
        first, *sets = [np.array(line.split(), dtype=float) for line in done.stdout.splitlines()]
        coef = np.fromfile(f"{folder}/draws").reshape(-1, case.p)
    return by_susie(case, data, first[2:], coef, first[1], [each.astype(int) - 1 for each in sets], seconds=first[0])


def by_susie(
    case: Case, data: Data, pips: Array, coef: Array, scale: float, sets: list[NDArray[np.intp]], **others: Any
) -> Found:
    intercept = data.y.mean() - coef @ data.x.mean(0)
    return by_draws(case, data, pips, coef, intercept, np.full(len(coef), scale), sets=sets, **others)


def pysusie(case: Case, data: Data, seed: int) -> Found | None:
    if case.family != "gaussian":
        return None
    import pysusie as tool

    fit = tool.susie(data.x, data.y)
    coef = tool.susie_get_posterior_samples(fit, 1000)["b"].T
    return by_susie(case, data, fit.pip, coef, math.sqrt(fit.sigma2), list(fit.sets["cs"] or []))


def sparsevb(case: Case, data: Data, seed: int) -> Found | None:
    if case.family == "counts":
        return None
    import sparsevb as tool

    fit = tool.svb_fit_linear if case.family == "gaussian" else tool.svb_fit_logit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from scikit-learn, which it starts with
        found = fit(data.x, data.y, intercept=True)
    rng = np.random.default_rng(seed)
    slabs = rng.normal(found["mu"], found["sigma"], (1000, case.p))
    coef = np.where(rng.random((1000, case.p)) < found["gamma"], slabs, 0.0)
    scale = np.full(1000, found["noise_sd"]) if case.family == "gaussian" else None
    return by_draws(case, data, found["gamma"], coef, np.array(found["intercept"]), scale)


def abess(case: Case, data: Data, seed: int, **options: Any) -> Found:
    from abess.linear import LinearRegression, LogisticRegression, PoissonRegression

    kinds = {"gaussian": LinearRegression, "binary": LogisticRegression, "counts": PoissonRegression}
    model = kinds[case.family](**options).fit(data.x, data.y)
    return estimated(case, data, float(np.squeeze(model.intercept_)), np.ravel(model.coef_))


def abess_gic(case: Case, data: Data, seed: int) -> Found:
    """By the criterion of its paper, the default in R."""
    return abess(case, data, seed, ic_type="gic")


def abess_cv(case: Case, data: Data, seed: int) -> Found:
    """By five folds, as its page advises for predictions."""
    return abess(case, data, seed, cv=5)


def skscope(case: Case, data: Data, seed: int) -> Found:
    import jax.numpy as jnp
    from skscope import ScopeSolver, utilities

    x, y = jnp.asarray(np.column_stack([np.ones(case.n), data.x])), jnp.asarray(data.y)

    def objective(beta: Any) -> Any:
        eta = x @ beta
        if case.family == "gaussian":
            return jnp.sum((y - eta) ** 2)
        return jnp.sum((jnp.logaddexp(0, eta) if case.family == "binary" else jnp.exp(eta)) - y * eta)

    criterion = utilities.LinearSIC if case.family == "gaussian" else utilities.EBIC
    sizes = range(1, MOST + 2)
    solver = ScopeSolver(case.p + 1, sizes, sample_size=case.n, preselect=[0], ic_method=criterion)
    beta = np.asarray(solver.solve(objective, jit=True))
    return estimated(case, data, float(beta[0]), beta[1:])


def selector(family: str, x: Array, y: Array, **options: Any) -> Any:
    """millipede's, of the features in a data frame."""
    import pandas as pd
    from millipede import (
        BernoulliLikelihoodVariableSelector,
        NegativeBinomialLikelihoodVariableSelector,
        NormalLikelihoodVariableSelector,
    )

    table = pd.DataFrame(x, columns=[f"x{j}" for j in range(x.shape[1])]).assign(y=y)
    if family == "counts":
        table["offset"] = math.log(y.mean())
        return NegativeBinomialLikelihoodVariableSelector(table, "y", "offset", **options)
    kind = NormalLikelihoodVariableSelector if family == "gaussian" else BernoulliLikelihoodVariableSelector
    return kind(table, "y", **options)


def millipede(case: Case, data: Data, seed: int) -> Found:
    found = selector(case.family, data.x, data.y)
    found.run(seed=seed, verbosity=None, streaming=False)
    draws = found.samples
    eta = draws.beta[:, : case.p] @ data.new_x.T + draws.beta[:, case.p :]
    extra = None
    if case.family == "gaussian":
        extra = draws.sigma
    elif case.family == "counts":
        eta, extra = eta + math.log(data.y.mean()), np.exp(draws.log_nu)
    logs = log_density(case.family, data.new_y, eta, extra)
    return Found(by_probabilities(found.pip.to_numpy()), logs, np.log(draws.weight))


TOOLS: tuple[Callable[[Case, Data, int], Found | None], ...] = (
    *(ours, ours_background, abess, abess_gic, abess_cv, skscope, millipede, susie_r, pysusie, sparsevb),
)
# Beyond which a measure is a win or a loss; negative where less is better.
MEASURES = {"F1": 0.03, "false": -0.05, "log score": 0.01, "wrong sets": -0.05, "in sets": None, "seconds": None}


def measured(case: Case, seed: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """The measures of every tool that is installed; NaN without sets."""
    data = case.drawn(seed)
    for tool in TOOLS:
        start = time.process_time()
        try:
            found = tool(case, data, seed)
        except ImportError:
            continue
        if found is None:
            continue
        seconds = time.process_time() - start if found.seconds is None else found.seconds
        hits = [np.isin(case.active, each) for each in found.sets or []]
        wrong = float(np.mean([not hit.any() for hit in hits])) if hits else 0.0
        held = float(np.any(hits, axis=0).sum()) if hits else 0.0
        sets = (math.nan, math.nan) if found.sets is None else (wrong, held)
        right, chosen = int(np.isin(found.chosen, case.active).sum()), len(found.chosen)
        weights = found.log_weights - logsumexp(found.log_weights)
        score = float(logsumexp(found.logs + weights[:, None], axis=0).mean())
        f1 = 2 * right / (chosen + len(case.active))
        yield tool.__name__, (f1, (chosen - right) / max(chosen, 1), score, *sets, seconds)


def verdict(margin: float, apart: float, error: float) -> str:
    """Of ours, from what a rival has more, and the standard error of that; of one data set a tie."""
    if not (abs(apart) > abs(margin) and abs(apart) > 2 * error):
        return "-" if math.isnan(apart) else "tie"
    return "lose" if apart * margin > 0 else "win"


def table(cases: list[Case]) -> Counter[tuple[str, str]]:
    """Print the rows of all designs; returns how often ours wins, ties and loses, by rival."""
    counts: Counter[tuple[str, str]] = Counter()
    for case in cases:
        found: dict[str, list[tuple[float, ...]]] = {}
        for seed in range(case.seeds):
            for tool, values in measured(case, seed):
                found.setdefault(tool, []).append(values)
        for tool, values in found.items():
            apart = np.array(values) - np.array(found["ours"])
            error = apart.std(0, ddof=1) / math.sqrt(len(apart)) if len(apart) > 1 else np.full(len(apart[0]), np.nan)
            columns = list(zip(np.mean(values, axis=0), apart.mean(0), error, MEASURES.values(), strict=True))
            said = [verdict(m, a, e) for _, a, e, m in columns if m is not None and tool != "ours"]
            counts.update((tool, word) for word in said)
            cells = (f"{mean:.3f} ({apart:+.3f} ± {error:.3f})" for mean, apart, error, _ in columns)
            table_row(case.name, tool, *cells, ", ".join(said))
    return counts


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, help="data sets of a design")
    parser.add_argument("--design", default="", help="part of a name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [replace(c, seeds=options.seeds or c.seeds) for c in CASES if options.design in c.name]
    list(measured(replace(CASES[0], n=50, p=50), 0))  # what is imported and compiled on first use is not timed
    table_head("design", "tool", *MEASURES, "ours: F1, false, log score, sets")
    counts = table(chosen)
    print()
    table_head("ours beside", "win", "tie", "lose")
    for tool in dict.fromkeys(tool for tool, _ in counts):
        table_row(tool, *(counts[tool, word] for word in ("win", "tie", "lose")))


if __name__ == "__main__":
    main()
