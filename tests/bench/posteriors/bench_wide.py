"""Ten thousand and a hundred thousand features: python tests/bench/posteriors/bench_wide.py --out wide.jsonl

Ten of the features have an effect of size .3 to 1, and noise of deviation 2.5 hides some of them; n = 1,000. Features
are independent, or correlate by .98 within blocks of 5 or of 50, as genetic markers do; no two effects share a block.
``SpikeSlabRegressor`` runs as it comes. For a design: F1 and the false share of what it selects at a false discovery
rate of .1; of the features whose inclusion probability lies in a bin, how many have an effect, beside the sum of the
probabilities; of the credible sets of level .95 the share that holds an effect, their size and purity, and the share
of the effects that a set holds; how many fits warned that their chains disagree; seconds of processor time, and peak
memory.

Designs take turns, data set by data set, those of 10,000 features first, and every fit appends a line to the file, from
which the next call goes on. --seeds N data sets of each design (50), of which those of 100,000 features have ten;
--seconds ends the runs after so many; --show prints the tables of what is there; --quick takes one data set of each
design of 10,000 features.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.selection import SpikeSlabRegressor
from tests.bench.timing import options_of, table_head, table_row

N, EFFECTS, NOISE, CORRELATION = 1000, 10, 2.5, 0.98
BINS = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)


@dataclass(frozen=True)
class Wide:
    """Features in blocks; those of one feature are independent."""

    p: int
    block: int
    seeds: int

    @property
    def name(self) -> str:
        kind = f"blocks of {self.block}" if self.block > 1 else "independent"
        return f"{kind}, p = {self.p:,}"

    def fitted(self, seed: int) -> dict[str, Any]:
        """Draw a data set, fit it, and count."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(N, self.p))
        if self.block > 1:
            shared = rng.normal(size=(N, self.p // self.block))
            x *= math.sqrt(1 - CORRELATION)
            x += math.sqrt(CORRELATION) * np.repeat(shared, self.block, axis=1)
        blocks = rng.choice(self.p // self.block, EFFECTS, replace=False)
        active = blocks * self.block + rng.integers(self.block, size=EFFECTS)
        beta = rng.uniform(0.3, 1, EFFECTS) * rng.choice([-1, 1], EFFECTS)
        y = x[:, active] @ beta + NOISE * rng.normal(size=N)
        start = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = SpikeSlabRegressor(random_state=seed).fit(x, y)
        sets = model.credible_sets_
        seconds = time.process_time() - start
        truth = np.isin(np.arange(self.p), active)
        bins = np.clip(np.digitize(model.pip_, BINS) - 1, 0, len(BINS) - 2)
        return {
            "design": self.name,
            "seed": seed,
            "warned": bool(caught),
            "seconds": seconds,
            "gibibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "chosen": len(model.select(0.1)),
            "right": int(truth[model.select(0.1)].sum()),
            "bins": np.bincount(bins, minlength=len(BINS) - 1).tolist(),
            "expected": np.bincount(bins, model.pip_, len(BINS) - 1).tolist(),
            "variance": np.bincount(bins, model.pip_ * (1 - model.pip_), len(BINS) - 1).tolist(),
            "found": np.bincount(bins, truth, len(BINS) - 1).tolist(),
            "held": int(sum(any(j in s.features for s in sets) for j in active)),
            "sets": [[len(s.features), s.purity, s.probability, int(truth[list(s.features)].sum())] for s in sets],
        }


TEN_THOUSAND = [Wide(10_000, 5, 50), Wide(10_000, 50, 50)]
HUNDRED_THOUSAND = [Wide(100_000, 1, 10), Wide(100_000, 5, 10), Wide(100_000, 50, 10)]


def show(records: list[dict[str, Any]]) -> None:
    """The two tables."""
    heads = ("F1", "false", "sets", "hold an effect", "size", "purity", "effects held", "warned", "s", "GiB")
    table_head("design", "data sets", *heads)
    for name in dict.fromkeys(r["design"] for r in records):
        own = [r for r in records if r["design"] == name]
        f1 = np.mean([2 * r["right"] / (r["chosen"] + EFFECTS) for r in own])
        false = np.mean([(r["chosen"] - r["right"]) / max(r["chosen"], 1) for r in own])
        sets = np.array([s for r in own for s in r["sets"]])
        size = f"{np.median(sets[:, 0]):.0f}, at most {sets[:, 0].max():.0f}"
        purity = f"{np.median(sets[:, 1]):.2f}, at least {sets[:, 1].min():.2f}"
        hold = f"{(sets[:, 3] > 0).mean():.3f} (they say {sets[:, 2].mean():.3f})"
        held = sum(r["held"] for r in own) / (EFFECTS * len(own))
        seconds, memory = np.mean([r["seconds"] for r in own]), max(r["gibibytes"] for r in own)
        warned = sum(r["warned"] for r in own)
        cells = [f"{f1:.3f}", f"{false:.3f}", len(sets), hold, size, purity, f"{held:.3f}", warned]
        table_row(name, len(own), *cells, f"{seconds:.0f}", f"{memory:.1f}")
    print()
    table_head("design", "PIP", "features", "effects expected", "effects found", "standard error")
    for name in dict.fromkeys(r["design"] for r in records):
        own = [r for r in records if r["design"] == name]
        sums = [np.sum([r[key] for r in own], axis=0) for key in ("bins", "expected", "found", "variance")]
        for i, (count, expected, found, variance) in enumerate(zip(*sums, strict=True)):
            where = f"{BINS[i]:.2f} to {BINS[i + 1]:.2f}"
            table_row(name, where, f"{count:,.0f}", f"{expected:.1f}", f"{found:.0f}", f"{math.sqrt(variance):.1f}")


def work(quick: bool, seeds: int) -> Iterator[tuple[Wide, int]]:
    """Designs and seeds in the order in which they run."""
    if quick:
        yield from ((design, 0) for design in TEN_THOUSAND)
        return
    for designs in (TEN_THOUSAND, HUNDRED_THOUSAND):
        for seed in range(seeds):
            yield from ((design, seed) for design in designs if seed < design.seeds)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    records = [json.loads(line) for line in lines]
    done = {(r["design"], r["seed"]) for r in records}
    start = time.monotonic()
    for design, seed in [] if options.show else work(options.quick, options.seeds):
        if (design.name, seed) in done or time.monotonic() - start > options.seconds:
            continue
        records.append(design.fitted(seed))
        with options.out.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
    show(records)


if __name__ == "__main__":
    main()
