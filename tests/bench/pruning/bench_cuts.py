"""Random cuts of transformers' models and of the zoo: python tests/bench/pruning/bench_cuts.py [--cuts 50]

Prints of how many random choices of open gates a smaller network was certified. The gates are those that are suggested,
of heads and of units that leave alone, or those of the zoo's networks; they are open at three rates by turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.compaction.random_cuts import MODELS, gated, refusals
from tests.engine.zoo import ZOO


def main() -> None:
    """Cut and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=50, help="of each network")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    has = {name: importlib.util.find_spec(name) is not None for name in ("transformers",)}
    networks = [
        (f"{name}, {'heads and units' if with_heads else 'all places'}", lambda n=name, w=with_heads: gated(n, w))
        for name in MODELS
        for with_heads in (False, True)
        if name == "nn.TransformerEncoder" or has["transformers"]
    ]
    networks += [
        (f"zoo, {name}", lambda e=entry: (e.network(), e.example()))
        for name, entry in ZOO.items()
        if entry.needs is None or has.get(entry.needs, False)
    ]
    taken = total = 0
    for name, make in networks:
        network, example = make()
        start = time.process_time()
        found = list(refusals(network, example, options.cuts))
        seconds = (time.process_time() - start) / options.cuts
        taken, total = taken + options.cuts - len(found), total + options.cuts
        said = f"{options.cuts - len(found)} of {options.cuts}, {seconds:.2f} s each"
        print(f"{name:40s} {said}", *found[:1], flush=True)
    print(f"{taken} of {total} cuts taken")


if __name__ == "__main__":
    main()
