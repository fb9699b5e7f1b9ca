"""Selection side by side on six designs: python tests/bench/posteriors/bench_rivals.py [--design PART] [--seeds N]

Ours, abess, skscope and millipede; a tool that is not installed is left out (pip install -e '.[rivals]' has them
all). Each runs as it comes. Ours and millipede have inclusion probabilities, and select at a false discovery rate of
.1 by the same rule. abess chooses its size by its default, EBIC, and skscope by LinearSIC or EBIC out of 0 to 20.
millipede expects five effects, its default, and has a negative binomial for counts, which are Poisson here.

First table, means over the data sets: F1; the share of the selected that is false; the mean log score of 1,000 new
observations, by draws where a tool has some, else by its estimates and the residuals' deviation; seconds of processor
time of a fit on one core. In brackets what a tool has more than ours, with the standard error of that. Second table,
rate, slab and noise known to both tools that have probabilities: the largest error of an inclusion probability, in the
mean over the data sets, against sums over all subsets; of labels the marginal likelihoods are by importance sampling.
--seeds 5 data sets a design; p = 10,000 has two.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, gammaln, log_expit, logsumexp, softmax
from scipy.stats import multivariate_normal, multivariate_t

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
    """What a tool selects, and log densities of new observations at each draw, with log weights of the draws."""

    chosen: NDArray[np.intp]
    logs: Array
    log_weights: Array


@dataclass(frozen=True)
class Case:
    """A design: features in blocks of a correlation, of which the first features of the first blocks have effects."""

    name: str
    family: str
    n: int
    p: int
    effects: tuple[float, ...]
    block: int = 1
    correlation: float = 0.0
    seeds: int = 5

    @property
    def active(self) -> NDArray[np.intp]:
        return self.block * np.arange(len(self.effects))

    def drawn(self, seed: int) -> Data:
        rng = np.random.default_rng(seed)
        rows = self.n + NEW
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


KINDS: dict[str, Any] = {
    "gaussian": SpikeSlabRegressor,
    "binary": SpikeSlabClassifier,
    "counts": SpikeSlabPoissonRegressor,
}


def ours(case: Case, data: Data, seed: int) -> Found:
    model = KINDS[case.family](random_state=seed).fit(data.x, data.y)
    draws = model.sample()
    coef = draws["coef"].reshape(-1, case.p)
    eta = draws["intercept"].reshape(-1, 1) + coef @ data.new_x.T
    logs = log_density(case.family, data.new_y, eta, draws.get("noise_scale"))
    return Found(model.select(FDR), logs, np.zeros(len(coef)))


def abess(case: Case, data: Data, seed: int) -> Found:
    from abess.linear import LinearRegression, LogisticRegression, PoissonRegression

    kinds = {"gaussian": LinearRegression, "binary": LogisticRegression, "counts": PoissonRegression}
    model = kinds[case.family]().fit(data.x, data.y)
    return estimated(case, data, float(np.squeeze(model.intercept_)), np.ravel(model.coef_))


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


TOOLS: tuple[Callable[[Case, Data, int], Found], ...] = (ours, abess, skscope, millipede)


def measured(case: Case, seed: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """F1, false share, log score and seconds of every tool that is installed."""
    data = case.drawn(seed)
    for tool in TOOLS:
        start = time.process_time()
        try:
            found = tool(case, data, seed)
        except ImportError:
            continue
        seconds = time.process_time() - start
        right, chosen = int(np.isin(found.chosen, case.active).sum()), len(found.chosen)
        weights = found.log_weights - logsumexp(found.log_weights)
        score = float(logsumexp(found.logs + weights[:, None], axis=0).mean())
        f1 = 2 * right / (chosen + len(case.active))
        yield tool.__name__, (f1, (chosen - right) / max(chosen, 1), score, seconds)


RATE, SLAB, NOISE, INTERCEPT = 0.2, 1.0, 1.0, 10.0
SMALL = (
    Case("independent", "gaussian", 60, 16, (0.6, -0.4, 0.3)),
    Case("blocks, r = .98", "gaussian", 60, 16, (0.6, -0.4, 0.3), block=4, correlation=0.98),
    Case("binary", "binary", 100, 10, (0.8, -0.6, 0.4)),
)


def subsets(p: int) -> NDArray[np.bool_]:
    return np.arange(2**p)[:, None] >> np.arange(p) & 1 == 1


def log_evidence(x: Array, y: Array, rng: np.random.Generator) -> float:
    """Of labels by features with an intercept, by importance sampling with a Student t about the mode."""
    design = np.column_stack([np.ones(len(y)), x])
    precision = np.diag([INTERCEPT**-2] + [SLAB**-2] * x.shape[1])
    sign = 2 * y - 1

    def loss(beta: Array) -> tuple[float, Array]:
        eta = design @ beta
        gradient = precision @ beta - design.T @ (sign * expit(-sign * eta))
        return -float(log_expit(sign * eta).sum()) + 0.5 * beta @ precision @ beta, gradient

    mode = minimize(loss, np.zeros(design.shape[1]), jac=True).x
    weight = expit(design @ mode) * expit(-design @ mode)
    covariance = np.linalg.inv(design.T @ (weight[:, None] * design) + precision)
    proposal = multivariate_t(mode, covariance, df=8, seed=rng)
    beta = np.reshape(proposal.rvs(2000), (2000, -1))
    prior = multivariate_normal(np.zeros(len(mode)), np.linalg.inv(precision))
    logs = log_expit(sign * (beta @ design.T)).sum(1) + prior.logpdf(beta) - proposal.logpdf(beta)
    return float(logsumexp(logs)) - math.log(2000)


def exact(case: Case, data: Data) -> Array:
    """Inclusion probabilities by sums over all subsets, rate, slab and noise known."""
    masks = subsets(case.p)
    if case.family == "gaussian":
        x, y = (data.x - data.x.mean(0)) / NOISE, (data.y - data.y.mean()) / NOISE
        gram, moments = SLAB**2 * x.T @ x, SLAB * x.T @ y
        logs = np.empty(len(masks))
        for i in range(0, len(masks), 4096):
            m = masks[i : i + 4096].astype(float)
            matrix = np.eye(case.p) + m[:, :, None] * gram * m[:, None, :]
            b = m * moments
            fit = (b * np.linalg.solve(matrix, b[..., None])[..., 0]).sum(1)
            logs[i : i + 4096] = 0.5 * fit - 0.5 * np.linalg.slogdet(matrix)[1]
    else:
        rng = np.random.default_rng(0)
        logs = np.array([log_evidence(data.x[:, mask], data.y, rng) for mask in masks])
    return softmax(logs + masks.sum(1) * math.log(RATE / (1 - RATE))) @ masks


def probabilities(tool: str, case: Case, data: Data, seed: int) -> Array:
    """By a sampler that knows rate, slab and noise."""
    if tool == "ours":
        known = {"noise_scale": NOISE} if case.family == "gaussian" else {}
        kind = KINDS[case.family]
        model = kind(rate=RATE, slab_scale=SLAB, standardize=False, method="tempered", random_state=seed, **known)
        return np.asarray(model.fit(data.x, data.y).pip_)
    # A variance with so many degrees of freedom is known; its intercept is nearly flat, as ours.
    known = {"nu0": 1e8, "lambda0": NOISE**2} if case.family == "gaussian" else {"tau_intercept": INTERCEPT**-2}
    found = selector(case.family, data.x, data.y, S=RATE * case.p, tau=(NOISE / SLAB) ** 2, **known)
    found.run(seed=seed, verbosity=None)
    return np.asarray(found.pip)


def errors(case: Case, seed: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """The largest error of an inclusion probability, and seconds."""
    data = case.drawn(seed)
    reference = exact(case, data)
    for tool in ("ours", "millipede"):
        start = time.process_time()
        try:
            found = probabilities(tool, case, data, seed)
        except ImportError:
            continue
        yield tool, (float(np.abs(found - reference).max()), time.process_time() - start)


def table(cases: tuple[Case, ...], rows: Callable[[Case, int], Iterator[tuple[str, tuple[float, ...]]]]) -> None:
    for case in cases:
        found: dict[str, list[tuple[float, ...]]] = {}
        for seed in range(case.seeds):
            for tool, values in rows(case, seed):
                found.setdefault(tool, []).append(values)
        for tool, values in found.items():
            apart = np.array(values) - np.array(found["ours"])
            error = apart.std(0, ddof=1) / math.sqrt(len(apart)) if len(apart) > 1 else np.full(len(apart[0]), np.nan)
            columns = zip(np.mean(values, axis=0), apart.mean(0), error, strict=True)
            table_row(case.name, tool, *(f"{mean:.3f} ({apart:+.3f} ± {error:.3f})" for mean, apart, error in columns))


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--design", default="", help="part of a name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen, small = (
        tuple(replace(c, seeds=min(c.seeds, options.seeds)) for c in cases if options.design in c.name)
        for cases in (CASES, SMALL)
    )
    list(measured(replace(CASES[0], n=50, p=50), 0))  # what is imported and compiled on first use is not timed
    table_head("design", "tool", "F1", "false", "log score", "seconds")
    table(chosen, measured)
    print()
    table_head("design", "tool", "largest error of a PIP", "seconds")
    table(small, errors)


if __name__ == "__main__":
    main()
