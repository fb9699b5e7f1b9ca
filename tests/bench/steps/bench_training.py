"""Training runs with shrinking beside the dense network: python tests/bench/steps/bench_training.py --data-dir MNIST

The runs take their epochs in turn in one process: same loader, same batch size, same optimiser, averaged weights, one
thread. Without gates the dense network has the plain loss. Prints the seconds of both and their ratio, so far and of
the last epoch. The dense network's epochs all cost the same, so that ``--dense-every 10`` runs one of ten and counts it
ten times. Before them it prints what a step with gates costs that does not shrink, with weight decay and without,
as a ratio to a dense one: the median of rounds of ten steps of each in turn, so short that load which comes and goes
falls on all of them. ``--epochs 200`` and the options of examples/mnist.py give a recipe.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common.averages import Average
from common.data import Images, load_mnist
from common.mnist_run import Options, Run
from common.networks import build
from pyro_l0.nn import L0Gate
from tests.bench.timing import options_of, seconds_in_turn

ROUNDS, STEPS = 60, 10  # of the runs that do not shrink


class DenseRun:
    """The network without gates, trained as :class:`run.Run` trains."""

    def __init__(self, images: Images, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.net = nn.Sequential(*(x for x in build(options.network, 784) if not isinstance(x, L0Gate)))
        self.images = images
        self.batch_size = options.batch_size
        self.optimiser = torch.optim.Adam(self.net.parameters(), options.learning_rate, fused=True)
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
    parser = options_of(__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--network", choices=["mlp", "lenet5"], default="mlp")
    parser.add_argument("--lam", type=float, nargs="+", default=[0.1])
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--gate-learning-rate", type=float)
    parser.add_argument("--target", type=float, help="largest fraction of the multiply-adds, beside lam")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--dense-every", type=int, default=1, help="epochs of the dense network: one of so many")
    given = vars(parser.parse_args())
    dense_every = given.pop("dense_every")
    options = Options(data="mnist", **{**given, "lam": tuple(given["lam"])})
    torch.set_num_threads(1)
    images = load_mnist(options.data_dir)

    def gated(images: Images, weight_decay: float, shrink: bool) -> Run:
        return Run(images, dataclasses.replace(options, weight_decay=weight_decay, shrink=shrink))

    num = STEPS * options.batch_size
    few = dataclasses.replace(images, train_x=images.train_x[:num].clone(), train_y=images.train_y[:num].clone())
    unshrunk: dict[str, Run | DenseRun] = {
        "dense": DenseRun(few, options),
        "gated, no weight decay": gated(few, 0.0, shrink=False),
    }
    if options.weight_decay:
        unshrunk["gated"] = gated(few, options.weight_decay, shrink=False)
    seconds = seconds_in_turn({name: run.train_epoch for name, run in unshrunk.items()}, ROUNDS)
    of_dense = seconds.pop("dense")
    print(f"dense: {1e3 * statistics.median(of_dense) / STEPS:.2f} ms a step", flush=True)
    for name, values in seconds.items():
        low, median, high = statistics.quantiles((x / y for x, y in zip(values, of_dense, strict=True)), n=4)
        step = 1e3 * statistics.median(values) / STEPS
        quartiles = f"quartiles {low:.2f} and {high:.2f} of {ROUNDS} rounds"
        print(f"{name}, without shrinking: {step:.2f} ms a step, {median:.2f} of a dense one ({quartiles})", flush=True)

    shrinking, plain = gated(images, options.weight_decay, shrink=True), DenseRun(images, options)
    total, shrunk, last = 0.0, 0.0, 0.0
    for epoch in range(options.epochs):
        last_shrunk = time_epoch(shrinking)
        if epoch % dense_every == 0:
            last = time_epoch(plain)
        total, shrunk = total + last, shrunk + last_shrunk
        if epoch in (0, 4, 9, 19) or (epoch + 1) % 50 == 0 or epoch + 1 == options.epochs:
            measured = shrinking.measure()
            print(
                f"epoch {epoch + 1:4d}: dense {total:8.1f} s, shrinking {shrunk:8.1f} s, ratio "
                f"{shrunk / total:5.2f}, this epoch {last_shrunk / last:5.2f}; open "
                f"{'-'.join(map(str, measured['architecture']))}, error {measured['test_error_percent']:.2f} %",
                flush=True,
            )


def time_epoch(run: Run | DenseRun) -> float:
    """Seconds of the next epoch."""
    start = time.perf_counter()
    run.train_epoch()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
