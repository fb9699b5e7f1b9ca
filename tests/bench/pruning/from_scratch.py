"""Pruned networks, trained from scratch: python tests/bench/pruning/from_scratch.py RUN [RUN ...] --data-dir MNIST

RUN is the folder of a finished run of examples/mnist.py. Its pruned network is trained again from a random start,
without gates, as ``--retrain`` trains (Adam, a step that falls to 0, averaged weights, noise on the pixels if asked
for). What it reaches tells whether the architecture limits a run's error, or what pruning left in the weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from common.averages import retrain
from common.data import load_mnist
from common.mnist_run import Options, Run
from common.networks import build
from pyro_l0.compaction import load_compacted
from pyro_l0.nn.gate import name_gates


def main() -> None:
    """Print a line per run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = load_mnist(options.data_dir)
    for folder in options.runs:
        metrics = json.loads((folder / "metrics.json").read_text())
        base = Options(data="mnist", **{name: metrics["options"][name] for name in ("network", "batch_size")})
        gated = build(base.network, images.train_x.shape[1])
        name_gates(gated, prefix="net.")
        pruned = load_compacted(gated, folder / "pruned").network
        errors = []
        for seed in options.seeds:
            run = Run(images, replace(base, seed=seed))
            fresh = copy.deepcopy(pruned)
            for module in fresh.modules():
                if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
                    module.reset_parameters()
            retrain(fresh, run.train_x, run.train_y, options.epochs, base.batch_size, options.noise)
            errors.append(run.error(fresh))
        spread = f" +- {statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
        retrained = metrics.get("retrained_error_percent")
        print(
            f"{folder.name:12s}{'-'.join(map(str, metrics['architecture'])):16s}pruned "
            f"{metrics['test_error_percent']:.2f} %, "
            + ("" if retrained is None else f"retrained {retrained:.2f} %, ")
            + f"from scratch {statistics.mean(errors):.2f}{spread} % ({', '.join(f'{x:.2f}' for x in errors)})",
            flush=True,
        )


if __name__ == "__main__":
    main()
