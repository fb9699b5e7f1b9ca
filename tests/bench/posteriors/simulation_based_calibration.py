"""Is a posterior calibrated? python tests/bench/posteriors/simulation_based_calibration.py [--replicates 300]

Coefficients, and unknown hyperparameters, are drawn from the prior and data from the model; a right posterior is then
right on average over replicates, whatever the prior (Talts et al., 2018, arXiv:1804.06788). Four settings: features
independent or AR(.8), noise, slab scale and rate known or unknown. Three questions:

- of the gates whose inclusion probability lies in a bin, is that share open? The difference, in standard errors, which
  the posterior itself gives: gates of one replicate depend on one another;
- do true values rank uniformly among posterior draws? A chi-square p value over ten bins, for a coefficient (another
  one in each replicate), the linear predictor at a new point and every unknown; equal values share ranks by lot;
- do central 90 % intervals cover 90 %? All coefficients and ten new points of each replicate, and all unknowns
  together: of one alone, 300 replicates tell the share to 1.7 % only. Where a coefficient is 0 the end of an interval
  may lie in the atom, which is then part of it by lot.

``exact`` shows the same replicates under enumeration. It is calibrated, so what it shows is chance, and what a guide
shows beyond that is the guide's. There are so many limits that chance alone breaks one of them in most sets of 300
replicates; the first seed is the first multiple of 300 from which enumeration keeps all. About 3 seconds a replicate
and guide; ``--quick`` takes 20 replicates. A mark "!" stands where a number leaves what is asked: 2 standard errors,
p > .01, 87 to 93 %.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from scipy import stats
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.posterior_references import exact_posterior
from tests.spike_slab_designs import Design

__all__ = ["Calibration", "replicate", "settings"]

# One stream of random numbers for the truth, one for the fit and one for lots: with one seed they would be the same.
FIT, LOTS = 1_000_000, 2_000_000
N, P, POINTS, DRAWS = 60, 8, 10, 999  # 999 draws leave 1,000 ranks, which ten bins divide evenly
BINS = (0.0, 0.1, 0.3, 0.6, 0.9, 1.0)
Draws = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """How replicates are made: the correlation of neighbouring features, and a design whose data are replaced."""

    name: str
    correlation: float
    design: Design


def settings() -> list[Setting]:
    nothing = torch.zeros(0, P, dtype=torch.float64)
    known = Design("known", nothing, nothing[:, 0], sigma=1.0, tau=0.5, rate=0.25)
    one = torch.ones((), dtype=torch.float64)
    priors = {
        "sigma": dist.LogNormal(0 * one, 0.5 * one),
        "tau": dist.LogNormal(-0.7 * one, 0.5 * one),
        "rate": dist.Beta(2 * one, 6 * one),
    }
    found = []
    for design in (known, replace(known, name="unknown", **priors)):
        for name, correlation in (("independent", 0.0), ("AR(.8)", 0.8)):
            found.append(Setting(f"{name}, {design.name}", correlation, design))
    return found


def replicate(setting: Setting, seed: int) -> tuple[Design, Draws]:
    """Features, a draw of everything from the prior, and the data of the design that this makes."""
    rng = np.random.default_rng(seed)
    covariance = setting.correlation ** np.abs(np.subtract.outer(range(P), range(P)))
    x = torch.as_tensor(rng.normal(size=(N, P)) @ np.linalg.cholesky(covariance).T)
    pyro.set_rng_seed(seed)
    trace = poutine.trace(setting.design.model).get_trace(x)
    truth = {name: site["value"] for name, site in trace.nodes.items() if site["type"] == "sample"}
    y = truth.pop("y")
    return replace(setting.design, x=x, y=y), {name: truth[name] for name in ("z", "w", *setting.design.hyper)}


def quantities(sites: Draws, design: Design, seed: int) -> dict[str, Tensor]:
    """What is ranked: coefficients, linear predictors at new points and unknowns, each ``(draws, how many)``."""
    beta = sites["z"] * sites["w"]
    points = torch.as_tensor(np.random.default_rng(10_000 + seed).normal(size=(POINTS, P)))
    one_by_one = {name: sites[name].reshape(-1, 1) for name in design.hyper}
    return {"coefficients": beta, "new points": beta @ points.T, **one_by_one}


class Calibration:
    """What is counted over replicates for one way to find posteriors."""

    def __init__(self) -> None:
        self.inclusion: list[Tensor] = []
        self.gates: list[Tensor] = []
        self.covariances: list[Tensor] = []
        self.ranks: dict[str, list[Tensor]] = {}

    def add(self, seed: int, design: Design, truth: Draws, inclusion: Tensor, draws: Draws) -> None:
        """One replicate: the true values, inclusion probabilities ``(p,)`` and ``DRAWS`` draws of every site."""
        inclusion = inclusion.detach().double()
        self.inclusion.append(inclusion)
        self.gates.append(truth["z"])
        covariance = draws["z"].detach().double().T.cov()
        self.covariances.append(covariance.diagonal_scatter(inclusion * (1 - inclusion)))
        generator = torch.Generator().manual_seed(LOTS + seed)
        true = quantities({name: value[None] for name, value in truth.items()}, design, seed)
        found = quantities({name: value.detach().double() for name, value in draws.items()}, design, seed)
        for name, values in found.items():
            below, equal = (values < true[name]).sum(0), (values == true[name]).sum(0)
            # The true value takes one of the places among those that are equal to it.
            lot = torch.rand(below.shape, generator=generator, dtype=torch.float64)
            self.ranks.setdefault(name, []).append(below + (lot * (equal + 1)).floor())

    def bins(self) -> list[tuple[int, float, float, float]]:
        """Gates in each bin, their mean inclusion probability, share of open ones, difference over its error."""
        inclusion, gates, covariances = (torch.stack(a) for a in (self.inclusion, self.gates, self.covariances))
        found = []
        for low, high in itertools.pairwise(BINS):
            inside = ((inclusion >= low) & ((inclusion < high) | (high == 1.0))).double()
            count = float(inside.sum())
            excess = (inside * (gates - inclusion)).sum(1)
            error = float(torch.einsum("ri,rij,rj->", inside, covariances, inside).clamp(min=0.0).sqrt())
            score = float(excess.sum()) / error if error > 0 else 0.0
            mean = float((inside * inclusion).sum()) / max(count, 1.0)
            found.append((int(count), mean, float((inside * gates).sum()) / max(count, 1.0), score))
        return found

    def uniformity(self) -> dict[str, float]:
        """The p value of the ranks of each quantity, one of each replicate."""
        found = {}
        for name, ranks in self.ranks.items():
            one_each = torch.stack([r[i % len(r)] for i, r in enumerate(ranks)])
            counts = torch.bincount((one_each * 10 / (DRAWS + 1)).long(), minlength=10)
            found[name] = float(stats.chisquare(counts.numpy()).pvalue)
        return found

    def coverage(self) -> dict[str, float]:
        """The share of true values in central 90 % intervals."""
        tail = 0.05 * (DRAWS + 1)
        ranks = {name: torch.cat(values) for name, values in self.ranks.items()}
        unknown = [r for name, r in ranks.items() if name not in ("coefficients", "new points")]
        ranks |= {"unknowns": torch.cat(unknown)} if unknown else {}
        return {name: float(((r >= tail) & (r < DRAWS + 1 - tail)).double().mean()) for name, r in ranks.items()}


def fit_guide(design: Design, seed: int, steps: int | None) -> tuple[Tensor, Draws]:
    """Inclusion probabilities and draws of a guide of the library."""
    from pyro_l0.infer import AutoSpikeSlab, fit

    pyro.clear_param_store()
    guide = AutoSpikeSlab(design.model, slab={"w": "z"}, gates="autoregressive", slabs="structured", hyper=design.hyper)
    fit(design.model, guide, design.x, design.y, seed=FIT + seed, **({} if steps is None else {"steps": steps}))
    return guide.active_probs()["z"], guide.draws(DRAWS)


def enumerate_exactly(design: Design, seed: int) -> tuple[Tensor, Draws]:
    """The same from the exact posterior."""
    posterior = exact_posterior(design)
    torch.manual_seed(FIT + seed)
    return posterior.weights.sum(1) @ posterior.gates, posterior.draws(DRAWS)


def report(name: str, calibration: Calibration) -> bool:
    """Print what was counted; returns whether all of it is as asked."""
    print(f"  {name}")
    kept = True
    for (count, mean, share, score), low, high in zip(calibration.bins(), BINS, BINS[1:], strict=False):
        mark = "!" if abs(score) > 2 else ""
        kept &= not mark
        counted = f"{count:5d} gates, mean {mean:.3f}, open {share:.3f}"
        print(f"    PIP {low:.2f}–{high:.2f}: {counted}, {score:+.2f} s.e.{mark}")
    p_values = calibration.uniformity()
    for quantity, share in calibration.coverage().items():
        ranks = ""
        if quantity in p_values:
            ranks = f"ranks p = {p_values[quantity]:.3f}{'!' if p_values[quantity] <= 0.01 else ''}, "
        has_limit = quantity in ("coefficients", "new points", "unknowns")
        mark = "!" if has_limit and not 0.87 <= share <= 0.93 else ""
        kept &= "!" not in ranks + mark
        print(f"    {quantity:13s} {ranks}coverage {100 * share:.1f} %{mark}")
    sys.stdout.flush()
    return kept


def main() -> None:
    """Count and print, setting by setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicates", type=int, default=300)
    parser.add_argument("--setting", default="", help="part of a setting's name")
    parser.add_argument("--steps", type=int, help="of a fit, in the place of the library's")
    parser.add_argument("--first-seed", type=int, default=300)
    parser.add_argument("--exact-only", action="store_true", help="leave the guide out")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count, kept = 20 if options.quick else options.replicates, True
    for setting in settings():
        if options.setting not in setting.name:
            continue
        start, exact, guide = time.process_time(), Calibration(), Calibration()
        for seed in range(options.first_seed, options.first_seed + count):
            design, truth = replicate(setting, seed)
            exact.add(seed, design, truth, *enumerate_exactly(design, seed))
            if not options.exact_only:
                guide.add(seed, design, truth, *fit_guide(design, seed, options.steps))
            if seed % 20 == 19:
                seconds = time.process_time() - start
                print(f"  {setting.name}: {seed + 1} replicates, {seconds:.0f} s", file=sys.stderr, flush=True)
        print(f"{setting.name}: {count} replicates", flush=True)
        report("exact", exact)
        kept &= options.exact_only or report("guide", guide)
    sys.exit(not kept)


if __name__ == "__main__":
    main()
