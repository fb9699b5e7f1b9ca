"""Time of compacted networks beside the dense ones: python tests/bench/steps/bench_inference.py --mlp RUN --lenet5 RUN

RUN is the folder of a run of examples/mnist.py, whose pruned network is read. Both networks are called in turn, one
thread, without gradients; the ratio is that of the medians.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common.networks import NetworkName, build
from pyro_l0.compaction import load_compacted
from pyro_l0.nn import L0Gate
from pyro_l0.nn.gate import name_gates
from tests.bench.timing import medians, options_of, seconds_in_turn

BATCHES: dict[NetworkName, tuple[int, ...]] = {"mlp": (1, 1000), "lenet5": (1, 256)}


def main() -> None:
    parser = options_of(__doc__)
    for name in BATCHES:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {options.rounds} rounds in turn")
    for name, batches in BATCHES.items():
        folder = getattr(options, name)
        if folder is None:
            continue
        network = build(name, 784)
        dense = nn.Sequential(*(layer for layer in network if not isinstance(layer, L0Gate))).eval()
        name_gates(network, prefix="net.")
        small = load_compacted(network, folder / "pruned").network
        weights = sum(p.numel() for p in small.parameters() if p.dim() > 1)
        for batch in batches:
            x = torch.rand(batch, 784)
            calls = {"dense": partial(dense, x), "small": partial(small, x)}
            with torch.no_grad():
                seconds = medians(seconds_in_turn(calls, options.rounds, max(1, 2000 // batch)))
            print(
                f"{name:8s}{weights:8,d} weights, batch {batch:5d}: dense {1e3 * seconds['dense']:8.3f} ms, compacted "
                f"{1e3 * seconds['small']:8.3f} ms, {seconds['dense'] / seconds['small']:6.2f} times faster"
            )


if __name__ == "__main__":
    main()
