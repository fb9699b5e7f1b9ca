"""Which guide is right where, beside the exact posterior: python tests/bench/posteriors/guides_table.py

Three guides of AutoSpikeSlab, trained by ``fit`` as it comes, on four regressions of ten features (the exact pair:
eight) with known noise. A cell is the worst of all seeds: the log evidence minus the ELBO in nats, the largest error of
an inclusion probability, and the processor seconds of a fit on one core; then how many fits ``check_fit`` calls wrong.
About seven minutes on one core; ``--quick`` takes one seed and 300 steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.posteriors.bench_posteriors import Run, print_row, run, table_head
from tests.bench.posteriors.posterior_references import reference
from tests.spike_slab_designs import gaussian_designs

GUIDES = (("mean_field", "independent"), ("mean_field", "structured"), ("autoregressive", "structured"))
DESIGNS = ("diabetes", "AR(1)", "near-duplicates", "exact pair")


def cell(runs: list[Run]) -> str:
    """The worst of some fits."""
    gap, error, seconds = (max(getattr(r, name) for r in runs) for name in ("gap", "error", "seconds"))
    return f"{gap:.3f} / {error:.3f} / {seconds:.1f} s; {sum(r.is_flagged for r in runs)} of {len(runs)}"


def main() -> None:
    """Print the table, a row when it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(1 if options.quick else options.seeds)
    designs = [design for design in gaussian_designs() if design.name in DESIGNS]
    known = [reference(design) for design in designs]
    table_head(["gates", "slabs", *(design.name for design in designs)])
    for gates, slabs in GUIDES:
        how = argparse.Namespace(gates=gates, slabs=slabs, fit={"steps": 300} if options.quick else {})
        pairs = zip(designs, known, strict=True)
        print_row([gates, slabs, *(cell([run(design, exact, seed, how) for seed in seeds]) for design, exact in pairs)])


if __name__ == "__main__":
    main()
