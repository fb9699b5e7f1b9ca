"""Random designs with names, rates, groups, weights, offsets and categories, against answers that share no code.

``python -m tests.bench.posteriors.fuzz_designs --cases 500 --seed 0`` prints the seed and every difference. Posteriors
of known scales are sums over gate vectors: closed forms for normal observations, importance sampling in NumPy for
others, half of whose draws are from the prior, so that no tail is missed. Predictions are computed from coefficients.
Families with parameters of their own are compared with repeated rows and permuted columns.
"""

import argparse
import itertools
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, special, stats

from pyro_l0.selection import (
    SpikeSlabBinomialRegressor,
    SpikeSlabClassifier,
    SpikeSlabCox,
    SpikeSlabMultiTaskRegressor,
    SpikeSlabNegativeBinomial,
    SpikeSlabOrdinal,
    SpikeSlabPoissonRegressor,
    SpikeSlabRegressor,
    SpikeSlabRobust,
)

SUMMED = [SpikeSlabRegressor, SpikeSlabClassifier, SpikeSlabPoissonRegressor, SpikeSlabCox, SpikeSlabBinomialRegressor]
SAMPLED = [SpikeSlabNegativeBinomial, SpikeSlabOrdinal, SpikeSlabRobust, SpikeSlabMultiTaskRegressor]
NOISE, INTERCEPT, DRAWS = 0.8, 10.0, 20_000


@dataclass
class Case:
    """A design, and what it is in numbers: rates and groups by column, weights and an offset for each row."""

    kind: Any
    frame: Any
    x: np.ndarray
    y: Any
    options: dict[str, Any]
    rates: np.ndarray  # of gates
    gate_of: np.ndarray  # of columns
    weight: np.ndarray | None
    offset: np.ndarray | None
    more: dict[str, Any] = field(default_factory=dict)

    def fitted(self):
        known = {} if self.offset is None else {"offset": self.offset}
        return self.kind(**self.options).fit(self.frame, self.y, self.weight, **known, **self.more)


def random_case(rng, kind):
    """Two or three features, as an array or with names of many kinds, in any order."""
    n, p = int(rng.integers(8, 40)), int(rng.integers(1, 4))
    x = rng.normal(size=(n, p)) + rng.normal(size=p)
    if rng.random() < 0.3:
        x[:, 0] = rng.random(n) < 0.4
        x[:2, 0] = 0, 1
    names = [
        None,
        [f"f{j}" for j in rng.permutation(p)],
        rng.permutation(p).tolist(),
        (10 * rng.permutation(p) + 5).tolist(),
        (rng.permutation(p) + 0.5).tolist(),
        [("a", int(j)) for j in rng.permutation(p)],
    ][rng.integers(6)]
    frame = x if names is None else pd.DataFrame(x, columns=pd.Index(names, tupleize_cols=False))
    labels = [f"x{j}" for j in range(p)] if names is None else names
    gate_of, options = np.arange(p), {"random_state": 0, "standardize": bool(rng.random() < 0.5)}
    if p > 1 and rng.random() < 0.3:
        gate_of = np.unique(rng.integers(0, 2, size=p), return_inverse=True)[1]
        options["groups"] = given(rng, gate_of, labels)
    gates = int(gate_of.max()) + 1
    rates = np.round(rng.uniform(0.2, 0.8, size=gates), 2)
    rates[rng.random(gates) < 0.25] = 1.0
    options["rate"] = given(rng, rates, list(range(gates)) if "groups" in options else labels)
    if kind not in SAMPLED or rng.random() < 0.5:
        options["slab_scale"] = float(rng.choice([0.5, 1.0, 3.0]))
    if (rates == 1).any():
        options["always_in_scale"] = float(rng.choice([0.7, 2.0, 10.0]))
    weight = rng.integers(0, 4, size=n).astype(float) if rng.random() < 0.4 else None
    if weight is not None:
        weight[:4] = 1.0, 2.0, 1.0, 3.0
    offset = rng.normal(size=n) if rng.random() < 0.3 and kind not in (SpikeSlabMultiTaskRegressor,) else None
    eta = rng.choice([0.0, 0.7, 3.0]) * (x[:, 0] - x[:, 0].mean()) + (0.0 if offset is None else offset)
    more: dict[str, Any] = {}
    if kind is SpikeSlabRegressor:
        options["noise_scale"] = NOISE
        y = eta + NOISE * rng.normal(size=n)
    elif kind is SpikeSlabClassifier:
        y = (rng.random(n) < special.expit(eta)).astype(int)
        y[:2] = 0, 1
        y = np.where(y, "yes", "no")
    elif kind is SpikeSlabBinomialRegressor:
        more["trials"] = rng.integers(1, 5, size=n)
        y = rng.binomial(more["trials"], special.expit(eta))
    elif kind is SpikeSlabCox:
        options["ties"] = str(rng.choice(["efron", "breslow"]))
        time = np.ceil(10 * rng.exponential(np.exp(-np.clip(eta, -5, 5))))
        happened = rng.random(n) < 0.8
        happened[:4] = True
        y = np.rec.fromarrays([happened, time], names="event,time")
    elif kind is SpikeSlabOrdinal:
        y = np.digitize(eta + rng.logistic(size=n), [-1.0, 1.0])
        y[:3] = 0, 1, 2
    elif kind is SpikeSlabRobust:
        y = eta + rng.standard_t(3, size=n)
    elif kind is SpikeSlabMultiTaskRegressor:
        y = eta[:, None] * [1.0, -0.5] + rng.normal(size=(n, 2))
    else:
        y = rng.poisson(np.exp(np.clip(eta, -5, 2.5))).astype(float)
    return Case(kind, frame, x, y, options, rates, gate_of, weight, offset, more)


def given(rng, values, labels):
    """An array, or a dict or series by names in another order."""
    way = rng.integers(3)
    if way == 0:
        return values
    order = rng.permutation(len(labels))
    by_name = {labels[j]: values[j] for j in order}
    if way == 1:
        return by_name
    return pd.Series([values[j] for j in order], index=pd.Index([labels[j] for j in order], tupleize_cols=False))


def log_likelihood(case, eta):
    """Of rows at linear predictors of shape (S, n); rows of a partial likelihood are repeated before."""
    y = case.y
    if case.kind is SpikeSlabClassifier:
        return log_binomial(eta, (y == "yes").astype(float), np.ones(len(y)))
    if case.kind is SpikeSlabBinomialRegressor:
        return log_binomial(eta, y, case.more["trials"])
    return y * eta - np.exp(np.minimum(eta, 500)) - special.gammaln(y + 1)


def log_binomial(eta, successes, trials):
    choices = special.gammaln(trials + 1) - special.gammaln(successes + 1) - special.gammaln(trials - successes + 1)
    return successes * eta - trials * np.logaddexp(0, eta) + choices


def log_partial(case, eta, times):
    """Cox's, with ties by Breslow or Efron, an event after the other."""
    happened, time = case.y["event"].repeat(times), case.y["time"].repeat(times)
    eta, total = eta.repeat(times, 1), np.zeros(len(eta))
    for at in np.unique(time[happened]):
        tied = happened & (time == at)
        risk, own = special.logsumexp(eta[:, time >= at], axis=1), special.logsumexp(eta[:, tied], axis=1)
        for rank in range(tied.sum()):
            share = rank / tied.sum() if case.options["ties"] == "efron" else 0.0
            total -= risk + np.log1p(-share * np.exp(own - risk))
        total += eta[:, tied].sum(1)
    return total


def answer(case, rng):
    """P(z = 1), means, deviations, quantiles of coefficients; mean intercept, and the least effective size."""
    n, p = case.x.shape
    rows = np.ones(n) if case.weight is None else case.weight
    offset = np.zeros(n) if case.offset is None else case.offset
    times = rows * case.more.get("trials", 1)  # a row for each trial
    centre = times @ case.x / times.sum()
    x = case.x - centre
    unit = np.sqrt(times @ x**2 / times.sum()) if case.options["standardize"] else np.ones(p)
    x = x / unit
    gaussian, cox = case.kind is SpikeSlabRegressor, case.kind is SpikeSlabCox
    level = times @ offset / times.sum()
    wide = case.options.get("always_in_scale", 0.0) * (NOISE if gaussian else 1.0)
    parts, logs, sizes = [], [], []
    for z in itertools.product([0, 1], repeat=len(case.rates)):
        if any(rate == 1 and not k for rate, k in zip(case.rates, z, strict=True)):
            continue
        on = np.array(z, dtype=bool)[case.gate_of]
        scale = np.where(case.rates[case.gate_of] == 1, wide, case.options["slab_scale"])[on]
        prior = sum(np.log(rate if k else 1 - rate) for rate, k in zip(case.rates, z, strict=True) if rate < 1)
        coefs = np.zeros((DRAWS, p + 1))
        if gaussian:
            y = case.y - offset
            y = y - rows @ y / rows.sum()
            some = x[:, on]
            precision = some.T @ (rows[:, None] * some) / NOISE**2 + np.diag(scale**-2.0)
            covariance = np.linalg.inv(precision)
            mean = covariance @ some.T @ (rows * y) / NOISE**2
            log = 0.5 * mean @ precision @ mean - 0.5 * np.linalg.slogdet(precision)[1] - np.log(scale).sum()
            white = rng.normal(size=(DRAWS, on.sum()))
            coefs[:, np.append(on, False)] = mean + white @ np.linalg.cholesky(covariance).T
            share, exact = np.full(DRAWS, 1 / DRAWS), np.zeros((2, p + 1))
            exact[:, np.append(on, False)] = mean, mean**2 + covariance.diagonal()
        else:
            columns = x[:, on] if cox else np.hstack([x[:, on], np.ones((n, 1))])
            scale = scale if cox else np.append(scale, INTERCEPT)

            def joint(beta, columns=columns, scale=scale):
                eta = beta @ columns.T + offset - (0.0 if cox else level)
                fit = log_partial(case, eta, rows.astype(int)) if cox else log_likelihood(case, eta) @ rows
                return fit + stats.norm.logpdf(beta, scale=scale).sum(1)

            beta, weight = weighted_draws(joint, scale, rng)
            log = special.logsumexp(weight) - np.log(len(beta))
            share, exact = special.softmax(weight), None
            sizes.append((1 / (share**2).sum(), log + prior))
            coefs[:, np.append(on, not cox)] = beta
        coefs[:, p] += 0.0 if gaussian or cox else -level
        parts.append(
            (np.array(z), coefs, share, np.stack([share @ coefs, share @ coefs**2]) if exact is None else exact)
        )
        logs.append(log + prior)
    probs = special.softmax(logs)
    coefs = np.concatenate([part[1] for part in parts])[:, :p] / unit
    share = np.concatenate([prob * part[2] for prob, part in zip(probs, parts, strict=True)])
    mean, square = np.tensordot(probs, np.stack([part[3] for part in parts]), 1)
    sd = np.sqrt(np.maximum(square - mean**2, 0))[:p] / unit
    intercept = mean[p] - mean[:p] / unit @ centre
    if gaussian:
        intercept += rows @ (case.y - offset) / rows.sum()
    least = min((size for size, log in sizes if log > max(logs) - 5), default=np.inf)
    return probs @ [part[0] for part in parts], mean[:p] / unit, sd, coefs, share, intercept, least


def weighted_draws(joint, scale, rng):
    """Draws and their log weights: one half from the prior, the other from a wide t around the mode."""
    d = len(scale)
    if not d:
        return np.zeros((DRAWS, 0)), np.full(DRAWS, joint(np.zeros((1, 0)))[0])
    mode = optimize.minimize(lambda beta: -joint(beta[None])[0], np.zeros(d)).x
    step = 1e-3 * np.eye(d)
    moves = np.array([[mode + a + b for b in step] for a in step])
    back = np.array([[mode + a - b for b in step] for a in step])
    values = [joint(part.reshape(-1, d)).reshape(d, d) for part in (moves, back, 2 * mode - back, 2 * mode - moves)]
    hessian = -(values[0] - values[1] - values[2] + values[3]) / 4e-6
    around = stats.multivariate_t(mode, 1.5 * np.linalg.inv(hessian), df=4, seed=rng)
    beta = np.concatenate([scale * rng.normal(size=(DRAWS // 2, d)), around.rvs(DRAWS // 2).reshape(-1, d)])
    log_q = np.logaddexp(stats.norm.logpdf(beta, scale=scale).sum(1), around.logpdf(beta)) - np.log(2)
    return beta, joint(beta) - log_q


def differences(case, rng):
    """What differs from the independent answer, in words."""
    model = case.fitted()
    p, found = case.x.shape[1], []
    labels = [f"x{j}" for j in range(p)] if case.frame is case.x else list(case.frame.columns)
    if case.kind in SUMMED:
        pip, mean, sd, coefs, share, intercept, size = answer(case, rng)
        if size < 300:
            return None
        # An approximation may change means by .1 of a deviation, and gates by .05; the answer has an error, too.
        exact = case.kind is SpikeSlabRegressor
        near, of_gates = (1e-6, 1e-6) if exact else (0.15 + 5 / np.sqrt(size), 0.07)
        coef, deviation = np.ravel(model.coef_), np.ravel(model.coef_sd_)
        if (np.abs(model.pip_ - pip) > of_gates).any():
            found.append(f"inclusion probabilities {model.pip_.round(3)} for {pip.round(3)}")
        if (np.abs(coef - mean) > near * sd + 1e-9).any():
            found.append(f"means {coef.round(3)} for {mean.round(3)}, deviations {sd.round(3)}")
        # Those of what is always in are partly draws' in a linear regression.
        if (np.abs(deviation - sd) > (0.06 if exact else 0.25 + near) * sd + 1e-6).any():
            found.append(f"deviations {deviation.round(3)} for {sd.round(3)}")
        # The probability below each end of an interval, of which Laplace's may be off by .025 and 2,000 draws by .025.
        ends = model.interval(0.9).reshape(p, 2)
        for j, (lower, upper) in enumerate(ends):
            below, above = share[coefs[:, j] < lower].sum(), share[coefs[:, j] > upper].sum()
            if max(below, above) > 0.1:
                found.append(f"an interval of {labels[j]!r} that leaves {below:.3f} and {above:.3f} out")
        if case.kind is not SpikeSlabCox:
            own = np.ravel(model.intercept_)[0]
            apart = model.sample(2000)["intercept"].std()
            if abs(own - intercept) > (1e-6 if exact else (near + 0.12) * apart + 1e-6):  # draws' mean: 5 errors
                found.append(f"an intercept of {own:.3f} for {intercept:.3f}")
    else:
        found += of_copies(case, model, rng)
    found += of_predictions(case, model)
    if not isinstance(case.frame, np.ndarray):
        if list(model.summary().index.get_level_values(0).unique()) != labels:
            found.append(f"names {list(model.summary().index)} for {labels}")
        if p > 1:
            try:
                model.predict(case.frame[case.frame.columns[::-1]])
                found.append("predictions of columns in another order")
            except ValueError:
                pass
    return found


def of_copies(case, model, rng):
    """Chains on repeated rows, and on columns in another order: the same posterior, up to their errors."""
    order = rng.permutation(case.x.shape[1])
    rows = np.arange(len(case.x)) if case.weight is None else np.arange(len(case.x)).repeat(case.weight.astype(int))
    place = {int(gate): i for i, gate in enumerate(dict.fromkeys(case.gate_of[order]))}
    options = {**case.options, "rate": case.rates[list(place)], "random_state": 1}
    if "groups" in options:
        options["groups"] = np.array([place[int(gate)] for gate in case.gate_of[order]])
    known = {} if case.offset is None else {"offset": case.offset[rows]}
    other = case.kind(**options).fit(case.x[rows][:, order], case.y[rows], **known)
    pip = other.pip_[[place[g] for g in range(len(place))]]
    back = np.argsort(order)
    coef, sd = (np.atleast_2d(part)[:, back] for part in (other.coef_, other.coef_sd_))
    found = []
    if (np.abs(model.pip_ - pip) > 0.12).any():  # two runs, of standard errors up to .015 each
        found.append(f"inclusion probabilities {model.pip_.round(3)} and {pip.round(3)} of copies")
    if (np.abs(np.atleast_2d(model.coef_) - coef) > 0.35 * sd + 1e-9).any():
        found.append(f"means {model.coef_.round(3)} and {coef.round(3)} of copies, deviations {sd.round(3)}")
    return found


def of_predictions(case, model):
    """By hand, from draws of coefficients and intercepts."""
    draws = model.sample(2000)
    offset = np.zeros(len(case.x)) if case.offset is None else case.offset
    known = {} if case.offset is None else {"offset": offset}
    if case.kind is SpikeSlabMultiTaskRegressor:
        right = case.x @ model.coef_.T + model.intercept_
    else:
        coef = draws["coef"].reshape(2000, -1)
        eta = coef @ case.x.T + draws["intercept"].reshape(2000, 1) + offset
        if case.kind in (SpikeSlabPoissonRegressor, SpikeSlabNegativeBinomial):
            right = np.exp(eta).mean(0)
        elif case.kind is SpikeSlabBinomialRegressor:
            right = special.expit(eta).mean(0)
        elif case.kind is SpikeSlabClassifier:
            right = np.where(special.expit(eta).mean(0) > 0.5, "yes", "no")
        elif case.kind is SpikeSlabOrdinal:
            below = special.expit(draws["thresholds"][:, None] - eta[:, :, None]).mean(0)
            right = np.diff(below, axis=1, prepend=0.0, append=1.0).argmax(1)
        else:
            right = case.x @ model.coef_ + model.intercept_ + offset
    predicted = model.predict(case.frame, **known)
    if right.dtype.kind == "f":
        same = np.allclose(predicted, right, rtol=1e-6, atol=1e-8)
    else:
        same = (predicted == right).mean() > 0.99  # ties by rounding
    return [] if same else [f"predictions {predicted[:3]} for {right[:3]}"]


def of_categories(rng):
    """A categorical column is its dummies in one group, where nothing is standardised."""
    n = int(rng.integers(20, 60))
    levels = [3, 1, 2] if rng.random() < 0.5 else ["b", "c", "a"]
    column = pd.Categorical(rng.choice(levels, n), categories=levels)
    z = rng.normal(size=n)
    names = [7, 2] if rng.random() < 0.5 else ["city", "z"]
    frame = pd.DataFrame({names[0]: column, names[1]: z})
    dummies = np.column_stack(
        [*(np.array(column) == level for level in column.remove_unused_categories().categories), z]
    )
    groups = np.array([0] * (dummies.shape[1] - 1) + [1])
    y = z + (np.array(column) == levels[0]) + rng.normal(size=n)
    known = {"slab_scale": 1.0, "noise_scale": 1.0, "standardize": False, "random_state": 0}
    one = SpikeSlabRegressor(rate={names[1]: 0.3, names[0]: 0.6}, **known).fit(frame, y)
    other = SpikeSlabRegressor(rate=[0.6, 0.3], groups=groups, **known).fit(dummies, y)
    same = np.allclose(one.pip_, other.pip_, atol=1e-9) and np.allclose(one.coef_, other.coef_, atol=1e-9)
    return [] if same else [f"categories {one.pip_} {one.coef_} for {other.pip_} {other.coef_}"]


def run(number, seed, report=print):
    """How many cases differ, and of how many the answer is too uncertain to say."""
    wrong = unsure = 0
    for i in range(number):
        kind, found = of_case(seed, i)
        unsure += found is None
        if found:
            wrong += 1
            report(f"case {i} of seed {seed}, {kind}: " + "; ".join(found))
    return wrong, unsure


def of_case(seed, i):
    """What a case is of, and how it differs; None if its answer is too uncertain to say."""
    rng = np.random.default_rng([seed, i])
    # Chains take a second each; the others a tenth.
    kind = SAMPLED[i // 15 % 4] if i % 15 == 0 else None if i % 15 == 7 else SUMMED[i % 5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind is None:
            return "categories", of_categories(rng)
        return kind.__name__, differences(random_case(rng, kind), rng)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    wrong, unsure = run(arguments.cases, arguments.seed)
    print(f"seed {arguments.seed}: {wrong} of {arguments.cases} cases differ, {unsure} have no sure answer")
    sys.exit(bool(wrong))
