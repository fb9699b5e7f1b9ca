"""Whole training runs with shrinking beside the dense network: python tests/bench/bench_training.py --data-dir MNIST

The runs take their epochs in turn in one process: same loader, same batch size, same optimiser, averaged weights, one
thread. Without gates the dense network has the plain loss. Prints the seconds of both and their ratio, so far and of
the last epoch; after the first five epochs also the ratio of a third run, which has the gates and does not shrink, and
of a fourth, which has no weight decay either. ``--epochs 200`` and the options of examples/mnist.py give a recipe.
"""

from __future__ import annotations

import argparse
import copy
import statistics
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

UNSHRUNK_EPOCHS = 5


class DenseRun:
    """The network without gates, trained as :class:`training.Run` trains."""

    def __init__(self, images: Images, network: str, batch_size: int, learning_rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        gated = build("mlp" if network == "mlp" else "lenet5", 784)
        name_gates(gated)
        fixed = fix_gates(gated, {site: torch.ones(gate.size) for site, gate in gate_names(gated).items()})
        self.net = nn.Sequential(*(layer for layer in fixed if type(layer).__name__ != "FixedGate"))
        self.images = images
        self.batch_size = batch_size
        self.optimiser = torch.optim.Adam(self.net.parameters(), learning_rate, fused=True)
        self.average = Average(copy.deepcopy(self.net), self.net)

    def train_epoch(self) -> None:
        """One pass over the training images."""
        total = torch.zeros(())
        for index in torch.randperm(len(self.images.train_x)).split(self.batch_size):
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
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--gate-learning-rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = load_mnist(options.data_dir)

    def gated(weight_decay: float, shrink: bool) -> Run:
        return Run(
            images,
            options.network,
            lam=tuple(options.lam),
            weight_decay=weight_decay,
            learning_rate=options.learning_rate,
            gate_learning_rate=options.gate_learning_rate,
            batch_size=options.batch_size,
            shrink=shrink,
            seed=1,
        )

    shrinking = gated(options.weight_decay, shrink=True)
    runs: dict[str, Run | DenseRun] = {
        "dense": DenseRun(images, options.network, options.batch_size, options.learning_rate, 1),
        "shrinking": shrinking,
        "gated": gated(options.weight_decay, shrink=False),
        "gated, no weight decay": gated(0.0, shrink=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for epoch in range(options.epochs):
        for name, run in runs.items():
            start = time.perf_counter()
            run.train_epoch()
            seconds[name].append(time.perf_counter() - start)
        dense, shrunk = seconds["dense"], seconds["shrinking"]
        if epoch in (0, 4, 9, 19) or (epoch + 1) % 50 == 0 or epoch + 1 == options.epochs:
            measured = shrinking.measure()
            print(
                f"epoch {epoch + 1:4d}: dense {sum(dense):8.1f} s, shrinking {sum(shrunk):8.1f} s, ratio "
                f"{sum(shrunk) / sum(dense):5.2f}, this epoch {shrunk[-1] / dense[-1]:5.2f}; open "
                f"{'-'.join(map(str, measured['architecture']))}, error {measured['test_error_percent']:.2f} %",
                flush=True,
            )
        if epoch == min(UNSHRUNK_EPOCHS, options.epochs) - 1:
            for name in ("gated", "gated, no weight decay"):
                ratio = statistics.median(x / y for x, y in zip(seconds[name], dense, strict=True))
                print(f"{name}, without shrinking: {ratio:.2f} of a dense epoch (median of {epoch + 1})", flush=True)
                del runs[name]


if __name__ == "__main__":
    main()
