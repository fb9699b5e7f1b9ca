"""Fits of spike and slab beside known posteriors: python tests/bench/posteriors/bench_posteriors.py --line LINE

LINE says which designs: 1 Gaussian regressions (five, and three of 15 features with new data for each seed), 2
logistic, Poisson, Student-t and negative binomial ones, 3 unknown noise, slab scale and rate, 6 whether ``check_fit``
flags the fits of three guides that are wrong and no other. Each design is fitted once per seed by ``AutoSpikeSlab`` and
``fit`` as they come; a row appears when its design is done. Columns: the largest error of an inclusion probability
(worst and median over the seeds), the log evidence minus the ELBO, processor seconds of a fit on one core, how many
fits ``check_fit`` calls wrong, and the largest error of a posterior mean of a coefficient and of each hyperparameter
(which has a limit) and its logarithm (which has none). Of the exact pair the range of both members' probabilities,
which should be .5 ± .03, is shown too. A limit that is missed is marked with an exclamation mark, and then the command
ends with 1. ``--quick`` takes one seed and 300 steps. ``--design`` takes the designs whose names contain the text.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyro
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0 import BernoulliGate
from pyro_l0.infer import AutoSpikeSlab, check_fit, fit
from tests.bench.timing import options_of, table_head, table_row
from tests.posterior_references import reference
from tests.reference_posteriors import Posterior
from tests.spike_slab_designs import (
    Design,
    gaussian_designs,
    generalised_linear_designs,
    heavy_tailed_designs,
    unknown_hyperparameters,
    wide_designs,
)

DRAWS = 10_000
PAIR = 0.03  # how far the two of the exact pair, of which either will do, may be from one half
GUIDES = (("mean_field", "independent"), ("mean_field", "structured"), ("autoregressive", "structured"))
MISLED = ("diabetes", "near-duplicates", "exact pair")  # where independent gates are wrong


@dataclass(frozen=True)
class Limits:
    """The most that a run may show; infinite where nothing is asked."""

    error: float
    gap: float = float("inf")
    seconds: float = float("inf")
    hyper: float = float("inf")


@dataclass(frozen=True)
class Part:
    """Designs, given the seed, and their limits."""

    designs: Callable[[int], list[Design]]
    limits: Limits


@dataclass(frozen=True)
class Run:
    """What one fit showed."""

    error: float
    gap: float
    seconds: float
    moved: float
    is_flagged: bool
    mean: float
    inclusion: torch.Tensor
    hyper: dict[str, float] = field(default_factory=dict)


LINES: dict[int, tuple[Part, ...]] = {
    1: (
        Part(lambda _: gaussian_designs(), Limits(0.03, 0.05, 5.0)),
        Part(wide_designs, Limits(0.04, 0.12)),
    ),
    2: (
        Part(lambda _: generalised_linear_designs(), Limits(0.03, 0.06, 8.0)),
        Part(lambda _: heavy_tailed_designs(), Limits(0.05)),
    ),
    3: (Part(lambda _: unknown_hyperparameters(), Limits(0.06, 0.13, 10.0, 0.02)),),
}


def run(design: Design, known: Posterior, seed: int, options: argparse.Namespace) -> Run:
    pyro.clear_param_store()
    kinds = {"family": BernoulliGate, "gates": options.gates, "slabs": options.slabs, "hyper": design.hyper}
    guide = AutoSpikeSlab(design.model, slab={"w": "z"}, **kinds)
    start = time.process_time()
    result = fit(design.model, guide, design.x, design.y, seed=seed, **options.fit)
    seconds = time.process_time() - start
    check = check_fit(design.model, guide, design.x, design.y)
    inclusion = guide.active_probs()["z"].detach().double()
    draws = guide.draws(DRAWS)
    mean = (draws["z"] * draws["w"]).double().mean(0)
    return Run(
        error=float((inclusion - known.inclusion).abs().max()),
        gap=known.log_evidence - result.evidence.elbo,
        seconds=seconds,
        moved=float((check.active_probs["z"] - check.sites["z"].guide).abs().max()),
        is_flagged=not check.ok,
        mean=float((mean - known.mean).abs().max()),
        inclusion=inclusion,
        hyper={name: abs(_mean(name, draws) - value) for name, value in known.hyper.items()},
    )


def _mean(name: str, draws: dict[str, torch.Tensor]) -> float:
    values = draws[name.removeprefix("log ")].double()
    return float((values.log() if name.startswith("log ") else values).mean())


def runs_by_design(part: Part, options: argparse.Namespace) -> Iterable[tuple[Design, list[Run]]]:
    """Every design's runs over all seeds, when they are done."""
    designs = [part.designs(seed) for seed in range(options.seeds)]
    for same in zip(*designs, strict=True):
        if options.design in same[0].name:
            yield same[0], [run(design, reference(design), seed, options) for seed, design in enumerate(same)]


def cell(value: float, limit: float = float("inf")) -> str:
    """A number, marked where it is beyond its limit."""
    return f"{value:.3f}{'!' if value > limit else ''}"


def limit_cell(limit: float) -> str:
    """A limit, or a dash where there is none."""
    return f"{limit:g}" if math.isfinite(limit) else "–"


def accuracy(line: int, options: argparse.Namespace) -> bool:
    """Print the table of lines 1 to 3; returns whether every limit is kept."""
    kept = True
    names = ["sigma", "log sigma", "tau", "log tau", "rate"] if line == 3 else []
    head = ["design", "error: worst", "median", "limit", "gap: worst", "median", "limit", "seconds: worst", "limit"]
    table_head(*head, "flagged", "moved: worst", "mean of zw", *names)
    for part in LINES[line]:
        for design, runs in runs_by_design(part, options):
            limits, cells = part.limits, [design.name]
            for name in ("error", "gap"):
                values, limit = [getattr(r, name) for r in runs], getattr(limits, name)
                cells += [cell(max(values), limit), cell(statistics.median(values)), limit_cell(limit)]
            cells += [cell(max(r.seconds for r in runs), limits.seconds), limit_cell(limits.seconds)]
            cells += [f"{sum(r.is_flagged for r in runs)} of {len(runs)}", cell(max(r.moved for r in runs))]
            cells += [cell(max(r.mean for r in runs))]
            for name in names:
                values = [r.hyper[name] for r in runs]
                cells.append(cell(max(values), float("inf") if name.startswith("log ") else limits.hyper))
            if design.name == "exact pair":
                pair = torch.stack([r.inclusion[:2] for r in runs])
                off = float((pair - 0.5).abs().max())
                cells[0] += f" ({pair.min():.3f} to {pair.max():.3f}{'!' if off > PAIR else ''})"
            kept &= not any("!" in c for c in cells)
            table_row(*cells)
    return kept


def verdicts(options: argparse.Namespace) -> bool:
    """Print the table of line 6; returns whether each verdict is the one that is wanted."""
    kept = True
    table_head("design", "gates", "slabs", "flagged", "wanted", "error: least", "most", "moved: least", "most")
    for gates, slabs in GUIDES:
        guide = argparse.Namespace(**{**vars(options), "gates": gates, "slabs": slabs})
        is_wrong = gates == "mean_field"
        part = Part(lambda _, w=is_wrong: [d for d in gaussian_designs() if not w or d.name in MISLED], Limits(0.03))
        for design, runs in runs_by_design(part, guide):
            flagged, wanted = sum(r.is_flagged for r in runs), len(runs) if is_wrong else 0
            kept &= flagged == wanted
            errors, moves = [r.error for r in runs], [r.moved for r in runs]
            marked = f"{flagged} of {len(runs)}{'' if flagged == wanted else '!'}"
            spans = [cell(f(values)) for values in (errors, moves) for f in (min, max)]
            table_row(design.name, gates, slabs, marked, wanted, *spans)
    return kept


def main() -> None:
    """Print the tables that are asked for."""
    parser = options_of(__doc__)
    parser.add_argument("--line", type=int, choices=(*LINES, 6), action="append", required=True)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--design", default="", help="part of a name")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.gates, options.slabs = GUIDES[-1]
    options.fit = {"steps": 300} if options.quick else {}
    options.seeds = 1 if options.quick else options.seeds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, seeds 0 to {options.seeds - 1}")
    kept = [verdicts(options) if line == 6 else accuracy(line, options) for line in options.line]
    sys.exit(not all(kept))


if __name__ == "__main__":
    main()
