"""Random Pyro models of up to eight gates, each method against sums over all gates: fuzz_models.py --cases 500

A model has gates and normal slabs in one plate, in groups or as single sites, and at random: scales of the gates, the
slabs, the likelihood and the whole; masks of gates and of rows; factors; a part of the rows; a prior mean; an
intercept; a Beta rate with other children or a factor; an observed gate. Some draw what is no site, draw their rows
anew, mask a slab, or have gates that do more than to switch slabs. Slabs and intercept are integrated out here by
Gaussian algebra in NumPy, a rate by quadrature, which share no code with the library. A method is right, or refuses in
words what is listed in ``MAY_REFUSE``; anything else is printed, and the exit status is 1. Half an hour on one core.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from pyro import poutine

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0 import BernoulliGate
from pyro_l0.infer import AutoSpikeSlab, check_fit, fit, sample_posterior
from pyro_l0.infer.posterior.log_joint import LogJoint
from pyro_l0.infer.target import InferenceTarget
from pyro_l0.maths.monte_carlo import MOST_ERROR
from tests.bench.timing import options_of

Array = NDArray[np.float64]
SCALES = (0.5, 2.0, 3.0)
WIDTH, INTERCEPT, BETA = 0.8, 2.0, (2.0, 3.0)
CHILDREN = (1.0, 1.0, 0.0, 1.0)
RATES = (np.arange(4000) + 0.5) / 4000
#: What each method may refuse; all else it has to take.
MAY_REFUSE = {
    "refine": {"random", "draws rows", "slab mask", "gate factor"},
    "collapsed": {"random", "draws rows", "slab mask", "gate factor"},
    "check_fit": {"random", "draws rows", "slab mask", "gate factor"},
    "fit": {"random", "draws rows", "slab mask", "gate factor"},  # by a guide of structured slabs
    "mean field": {"random", "slab mask"},
    "log joint": {"random", "draws rows"},
    "sample_posterior": {"random", "draws rows", "slab mask"},
}


class Case:
    """A random model with what is known of it; ``features`` says what it has."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.dtype = [torch.float32, torch.float64][int(random.integers(2))]
        self.kind = str(random.choice(["plate", "groups", "sites", "events"]))
        self.size = int(random.integers(1, 9 if self.kind != "sites" else 5))
        self.index = np.arange(self.size)
        if self.kind == "groups":
            self.index = np.sort(np.concatenate([self.index, random.integers(0, self.size, size=2)]))
        names = ("gate scale", "slab scale", "likelihood scale", "whole scale", "gate mask", "row mask", "ridge")
        names += ("part of rows", "mean", "intercept", "rate", "random", "draws rows", "slab mask", "gate factor")
        rare = {"random", "draws rows", "slab mask", "gate factor"}
        self.features = {name for name in names if random.random() < (0.04 if name in rare else 0.3)}
        self.features -= {"part of rows"} if "draws rows" in self.features else set()
        self.features -= {"gate mask", "slab mask"} if self.kind in ("sites", "events") else set()
        if "rate" in self.features:
            self.features |= {str(random.choice(["rate alone", "children", "rate factor"]))}
        if self.kind == "sites" and self.size > 1 and random.random() < 0.5:
            self.features.add("observed gate")
        scales = ("gate scale", "slab scale", "likelihood scale", "whole scale")
        self.scale = {x: float(random.choice(SCALES)) if x in self.features else 1.0 for x in scales}
        rows = int(random.integers(12, 40))
        self.x = random.normal(size=(rows, len(self.index)))
        if len(self.index) > 1 and random.random() < 0.5:
            self.x[:, 1] = self.x[:, 0] + 0.3 * self.x[:, 1]
        effects = random.normal(size=len(self.index)) * (random.random(len(self.index)) < 0.4)
        self.y = self.x @ effects + random.normal(size=rows)
        self.probs = random.uniform(0.1, 0.7, size=self.size)
        self.gate_mask = random.random(self.size) < (0.6 if "gate mask" in self.features else 2)
        self.row_mask = random.random(rows) < (0.7 if "row mask" in self.features else 2)
        self.rows = np.sort(random.choice(rows, rows // 2, replace=False)) if "part of rows" in self.features else None
        self.mean = 0.6 if "mean" in self.features else 0.0
        self.ridge = 0.7 if "ridge" in self.features else 0.0
        self.observed = float(random.integers(2))
        self.masked_by_handler = bool(random.integers(2))

    @property
    def slab(self) -> dict[str, Any]:
        """The gate of each slab."""
        if self.kind == "sites":
            return {f"w{i}": f"z{i}" for i in range(self.size)}
        return {"w": ("z", torch.tensor(self.index)) if self.kind == "groups" else "z"}

    def tensor(self, x: Any) -> torch.Tensor:
        """A constant of the model."""
        return torch.as_tensor(x, dtype=self.dtype)

    def __call__(self) -> None:
        """The model, with its observed gate."""
        observed = {"z0": self.tensor(self.observed)} if "observed gate" in self.features else {}
        with poutine.scale(scale=self.scale["whole scale"]):
            poutine.condition(self._model, observed)()

    def _model(self) -> None:
        probs = self.tensor(self.probs)
        if "rate" in self.features:
            rate = pyro.sample("rate", dist.Beta(*map(self.tensor, BETA)))
            probs = rate.expand(self.size) if self.kind in ("sites", "events") else rate
            if "children" in self.features:
                with pyro.plate("children", len(CHILDREN)):
                    pyro.sample("s", dist.Bernoulli(rate), obs=self.tensor(CHILDREN))
            if "rate factor" in self.features:
                pyro.factor("f", 1.5 * rate.log() + 0.5 * (-rate).log1p())
        coefficients, gates = self._coefficients(probs)
        mean = (coefficients.unsqueeze(-2) * self.tensor(self.x)).sum(-1)
        if "intercept" in self.features:
            mean = mean + pyro.sample("b", dist.Normal(self.tensor(0.0), INTERCEPT)).unsqueeze(-1)
        if self.ridge:
            pyro.factor("ridge", -0.5 * self.ridge * coefficients.square().sum(-1))
        if "gate factor" in self.features:
            pyro.factor("more", 0.7 * gates.sum(-1))
        if "random" in self.features:
            mean = mean + torch.randn(mean.shape[-1:], dtype=self.dtype)
        options: dict[str, Any] = {} if self.rows is None else {"subsample": torch.tensor(self.rows)}
        if "draws rows" in self.features:
            options = {"subsample_size": len(self.y) // 2}
        with pyro.plate("data", len(self.y), **options) as rows:
            mask = torch.tensor(self.row_mask)[rows]
            scale = self.scale["likelihood scale"]
            with poutine.scale(scale=scale), poutine.mask(mask=mask) if not mask.all() else nullcontext():
                pyro.sample("y", dist.Normal(mean[..., rows], 1.0), obs=self.tensor(self.y)[rows])

    def _coefficients(self, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zero, gate_scale = self.tensor(self.mean), poutine.scale(scale=self.scale["gate scale"])
        slab_scale = poutine.scale(scale=self.scale["slab scale"])
        if self.kind == "sites":
            found = []
            for i in range(self.size):
                with gate_scale:
                    z = pyro.sample(f"z{i}", BernoulliGate(probs=probs[i]))
                with slab_scale:
                    found.append((z, pyro.sample(f"w{i}", dist.Normal(zero, WIDTH))))
            gates, slabs = (torch.stack(x, -1) for x in zip(*found, strict=True))
            return gates * slabs, gates
        if self.kind == "events":
            with gate_scale:
                z = pyro.sample("z", BernoulliGate(probs=probs).to_event(1))
            with slab_scale:
                w = pyro.sample("w", dist.Normal(zero, WIDTH).expand([self.size]).to_event(1))
            return z * w, z
        mask, fn = torch.tensor(self.gate_mask), BernoulliGate(probs=probs)
        fn = fn if "gate mask" not in self.features or self.masked_by_handler else fn.expand([self.size]).mask(mask)
        by_handler = "gate mask" in self.features and self.masked_by_handler
        with pyro.plate("gates", self.size), gate_scale, poutine.mask(mask=mask) if by_handler else nullcontext():
            z = pyro.sample("z", fn)
        mask = torch.arange(len(self.index)) > 0
        masked = poutine.mask(mask=mask) if "slab mask" in self.features else nullcontext()
        with pyro.plate("weights", len(self.index)), slab_scale, masked:
            w = pyro.sample("w", dist.Normal(zero, WIDTH))
        return z[..., self.index] * w, z

    # ------------------------------------------------------------ what is right

    def log_gates(self, gates: Array, rates: Array) -> Array:
        """Log density of the gates and a rate at some rates, shape ``rates.shape``."""
        whole, r = self.scale["whole scale"], rates[:, None] if "rate" in self.features else self.probs[None]
        each = np.where(gates > 0, np.log(r), np.log1p(-r)) * self.gate_mask * self.scale["gate scale"]
        found = each.sum(1) + 0.7 * gates.sum() * ("gate factor" in self.features)
        if "rate" in self.features:
            a, b = BETA
            constant = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
            found = found + (a - 1) * np.log(rates) + (b - 1) * np.log1p(-rates) + constant
        if "children" in self.features:
            found = found + np.log(rates) * sum(CHILDREN) + np.log1p(-rates) * (len(CHILDREN) - sum(CHILDREN))
        if "rate factor" in self.features:
            found = found + 1.5 * np.log(rates) + 0.5 * np.log1p(-rates)
        return np.asarray(whole * found)

    def gaussian(self, gates: Array) -> tuple[Array, Array, float]:
        """P, h and c of the log density c + h u - u P u / 2 of slabs and intercept u given the gates."""
        whole, on = self.scale["whole scale"], gates[self.index]
        width, row = len(self.index), self.scale["likelihood scale"] * self.row_mask
        if self.rows is not None:
            row = row * np.isin(np.arange(len(self.y)), self.rows) * len(self.y) / len(self.rows)
        columns = np.column_stack([self.x * on, np.ones(len(self.y))])
        scale = np.append(np.full(width, self.scale["slab scale"]), 1.0)
        scale[0] *= "slab mask" not in self.features
        deviation, mean = np.append(np.full(width, WIDTH), INTERCEPT), np.append(np.full(width, self.mean), 0.0)
        if "intercept" not in self.features:
            columns[:, -1] = 0
        prior = scale / deviation**2
        precision = np.diag(prior + self.ridge * np.append(on, 0)) + columns.T @ (row[:, None] * columns)
        linear = prior * mean + columns.T @ (row * self.y)
        constant = -0.5 * (prior * mean**2 + scale * np.log(2 * np.pi * deviation**2)).sum()
        constant -= 0.5 * (row * (self.y**2 + math.log(2 * math.pi))).sum()
        if "intercept" not in self.features:  # integrates to one
            constant += 0.5 * math.log(2 * np.pi * INTERCEPT**2)
            constant += 0.5 * math.log(whole * prior[-1] / (2 * np.pi)) / whole
        return whole * precision, whole * linear, whole * float(constant)

    def exact(self) -> tuple[Array, Array]:
        """All vectors of latent gates, and their log evidences."""
        vectors, found = np.array(list(itertools.product([0.0, 1.0], repeat=self.size))), []
        if "observed gate" in self.features:
            vectors = vectors[vectors[:, 0] == self.observed]
        for gates in vectors:
            precision, linear, constant = self.gaussian(gates)
            value = constant + 0.5 * linear @ np.linalg.solve(precision, linear)
            value -= 0.5 * np.linalg.slogdet(precision / (2 * np.pi))[1]
            prior = self.log_gates(gates, RATES if "rate" in self.features else np.ones(1))
            found.append(value + np.logaddexp.reduce(prior) - (math.log(len(RATES)) if "rate" in self.features else 0))
        return vectors, np.array(found)

    def probs_by_site(self) -> dict[str, Array]:
        """P(z = 1 | y) of every latent gate, by site."""
        vectors, log = self.exact()
        weights = np.exp(log - np.logaddexp.reduce(log))
        return self.by_site(weights @ vectors)

    def by_site(self, gates: Array) -> dict[str, Array]:
        """The latent gates of each site."""
        if self.kind != "sites":
            return {"z": gates}
        first = int("observed gate" in self.features)
        return {f"z{i}": gates[i] for i in range(first, self.size)}


# ------------------------------------------------------------ the methods

Check = Callable[[Case], float]  # how far a method is off, 1 where just tolerable


def _apart(found: dict[str, torch.Tensor], case: Case, tolerance: float) -> float:
    right = case.probs_by_site()
    assert set(found) == set(right), (set(found), set(right))
    return max(float(np.abs(found[x].double().numpy() - right[x]).max()) for x in right) / tolerance


def by_refine(case: Case) -> float:
    """Chains, to within .05."""
    guide = AutoSpikeSlab(case, case.slab, slabs="structured")
    found = guide.refine(seed=0, chains=8, flips=600)
    summary = found.summary(50)
    assert summary.to_frame().shape[0] >= len(case.index)
    return _apart(found.active_probs(), case, 0.05)


def by_collapsed(case: Case) -> float:
    """A sum over the gates of a collapsed model: log evidences to .01 nats."""
    guide = AutoSpikeSlab(case, case.slab)
    guide()
    collapsed = guide.collapsed()
    vectors, right = case.exact()
    order = list(collapsed.gates.shapes)
    gates = torch.stack(
        [torch.cat([torch.as_tensor(case.by_site(v)[x]).reshape(-1) for x in order]) for v in vectors]
    ).to(case.dtype)
    found = (collapsed.quadratic.log_evidence(gates) + collapsed.prior.log_prob(gates)).double().numpy()
    change = found - found.mean() - (right - right.mean())
    return float(np.abs(change).max()) / (0.01 + 1e-3 * np.abs(right - right.mean()).max())


def by_fit(case: Case) -> float:
    """The importance-weighted estimate of log p(y), to five standard errors."""
    guide = AutoSpikeSlab(case, case.slab, gates="autoregressive", slabs="structured")
    found = fit(case, guide, seed=0, steps=40, num_particles=32).evidence
    error = math.sqrt((1 / found.effective - 1) / 8000) + 0.01
    return abs(found.importance_weighted - np.logaddexp.reduce(case.exact()[1])) / (5 * error)


def by_mean_field(case: Case) -> float:
    """The bound of a mean field, which is none if it is above log p(y) by more than five standard errors."""
    guide = AutoSpikeSlab(case, case.slab)
    found = fit(case, guide, seed=0, steps=40, num_particles=32).evidence
    guide.summary(50)
    return (found.elbo - np.logaddexp.reduce(case.exact()[1])) / (5 * found.standard_error + 0.01)


def by_check_fit(case: Case) -> float:
    """The chains of a check, to within .06; where it calls gates unchecked, to three of its errors, at most .3."""
    guide = AutoSpikeSlab(case, case.slab, gates="autoregressive", slabs="structured")
    fit(case, guide, seed=0, steps=60, num_particles=32)
    check = check_fit(case, guide, seed=0)
    return _apart(check.active_probs, case, min(3 * check.error, 0.3) if check.error > MOST_ERROR / 2 else 0.06)


def by_log_joint(case: Case) -> float:
    """The density that NUTS sees, at some points, to .01 nats and four digits."""
    joint = LogJoint(InferenceTarget(case))
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(6, joint.latent.size, generator=generator).to(joint.start)
    codes = joint.codes[torch.randint(len(joint.codes), (6,), generator=generator)]
    found, values = joint.many(vectors, codes)
    right = []
    for i in range(6):
        at = {name: x[i].double().numpy() for name, x in values.items()}
        if case.kind == "sites":
            gates = np.array([at[f"z{j}"] for j in range(case.size)])
            slabs = np.array([at[f"w{j}"] for j in range(case.size)])
        else:
            gates, slabs = at["z"], at["w"]
        precision, linear, constant = case.gaussian(gates)
        u = np.append(slabs, at.get("b", 0.0))
        rate = np.atleast_1d(at.get("rate", 0.5))
        log = constant + linear @ u - 0.5 * u @ precision @ u + case.log_gates(gates, rate)[0]
        if "rate" in case.features:  # to the real line
            log += math.log(rate[0]) + math.log1p(-rate[0])
        right.append(log)
    change = found.double().numpy() - found.double().mean().item() - (np.array(right) - np.mean(right))
    return float(np.abs(change).max()) / (0.01 + 1e-4 * np.abs(right).max())


def by_sample_posterior(case: Case) -> float:
    """Short chains, to within .12; where they warn that they disagree, which is in words, to within .3."""
    options = {"num_samples": 150, "warmup_steps": 80, "num_chains": 2}
    found = sample_posterior(case, slab=case.slab, seed=0, **options)  # type: ignore[arg-type]
    probs = {name: x for name, x in found.active_probs().items() if name in case.probs_by_site()}
    return _apart(probs, case, 0.12 if found.ok else 0.3)


METHODS: dict[str, Check] = {
    "refine": by_refine,
    "collapsed": by_collapsed,
    "log joint": by_log_joint,
    "fit": by_fit,
    "mean field": by_mean_field,
    "check_fit": by_check_fit,
    "sample_posterior": by_sample_posterior,
}


def tried(case: Case, method: str) -> tuple[str, str]:
    """What became of a method: ``"right"``, ``"refused"`` or ``"WRONG"``, and details."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyro.set_rng_seed(0)
        try:
            off = METHODS[method](case)
        except ValueError as error:
            text = str(error)
            allowed = text.startswith("Expected") and MAY_REFUSE[method] & case.features
            return "refused" if allowed else "WRONG", text
    if MAY_REFUSE[method] & case.features - {"gate factor"}:
        return "WRONG", "neither refused nor known"
    return "right" if off <= 1 else "WRONG", f"off by {off:.2f} of what is tolerable"


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones follow")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: the first four, others by turns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: Counter[tuple[str, str]] = Counter()
    cheap, dear = list(METHODS)[:3], list(METHODS)[3:]
    for seed in range(options.seed, options.seed + options.cases):
        case = Case(seed)
        for method in options.method or [*cheap, dear[seed % len(dear)]]:
            outcome, details = tried(case, method)
            outcomes[method, outcome] += 1
            if outcome == "WRONG":
                print(f"seed {seed}, {method}, {case.kind}, {sorted(case.features)}: {details}", flush=True)
    for (method, outcome), count in sorted(outcomes.items()):
        print(f"{method:18}{outcome:10}{count:5d}")
    print(f"seeds {options.seed} to {options.seed + options.cases - 1}")
    return int(any(outcome == "WRONG" for _, outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
