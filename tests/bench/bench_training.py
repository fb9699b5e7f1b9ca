"""Whole training runs with shrinking beside the dense network: python tests/bench/bench_training.py --data-dir MNIST

Both runs take their epochs in turn in one process: same loader, same batches, same optimiser, averaged weights, one
thread. Without gates the dense network has the plain loss. Prints the seconds of both, the ratio, and the ratio of the
first epoch, when nothing has left yet. ``--epochs 200`` and the options of examples/mnist.py give a recipe.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from data import Images, load_mnist
from networks import build
from pyro_l0.nn import fix_gates, gate_names, name_gates
from training import Average, Run


class DenseRun:
    """The network without gates, trained as :class:`training.Run` trains."""

    def __init__(self, images: Images, network: str, seed: int) -> None:
        torch.manual_seed(seed)
        gated = build("mlp" if network == "mlp" else "lenet5", 784)
        name_gates(gated)
        fixed = fix_gates(gated, {site: torch.ones(gate.size) for site, gate in gate_names(gated).items()})
        self.net = nn.Sequential(*(layer for layer in fixed if type(layer).__name__ != "FixedGate"))
        self.images = images
        self.optimiser = torch.optim.Adam(self.net.parameters(), 1e-3, fused=True)
        self.average = Average(copy.deepcopy(self.net), self.net)

    def train_epoch(self) -> None:
        """One pass over the training images."""
        total = torch.zeros(())
        for index in torch.randperm(len(self.images.train_x)).split(100):
            self.optimiser.zero_grad()
            loss = F.cross_entropy(self.net(self.images.train_x[index]), self.images.train_y[index])
            loss.backward()
            self.optimiser.step()
            self.average.update()
            total += loss.detach()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--network", choices=["mlp", "lenet5"], default="mlp")
    parser.add_argument("--lam", type=float, nargs="+", default=[0.1])
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--gate-learning-rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = load_mnist(options.data_dir)
    gated = Run(
        images,
        options.network,
        lam=tuple(options.lam),
        weight_decay=options.weight_decay,
        gate_learning_rate=options.gate_learning_rate,
        shrink=True,
        seed=1,
    )
    runs = {"dense": DenseRun(images, options.network, 1), "shrinking": gated}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for epoch in range(options.epochs):
        for name, run in runs.items():
            start = time.perf_counter()
            run.train_epoch()
            seconds[name].append(time.perf_counter() - start)
        if epoch in (0, 4, 9, 19) or (epoch + 1) % 50 == 0 or epoch + 1 == options.epochs:
            dense, shrinking = (sum(values) for values in seconds.values())
            measured = gated.measure()
            last = seconds["shrinking"][-1] / seconds["dense"][-1]
            print(
                f"epoch {epoch + 1:4d}: dense {dense:8.1f} s, shrinking {shrinking:8.1f} s, ratio "
                f"{shrinking / dense:5.2f}, this epoch {last:5.2f}; open "
                f"{'-'.join(map(str, measured['architecture']))}, error {measured['test_error_percent']:.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
