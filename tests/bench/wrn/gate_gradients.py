"""Noise at the gates of a wide residual network beside the price: python tests/bench/wrn/gate_gradients.py --width 1

Trains a network of ``--depth`` and ``--width`` on CIFAR-10 for some steps with gates that stay where they start, and
looks at the gradients of log alpha, on the mean loss, over as many steps again. Prints per gate site: the weights of a
map's filter, the gradients' mean and standard deviation over the steps (root mean squares over the gates), the slope
of a price of 1 nat per weight, and in how many steps a price of ``--lam`` goes as far as the noise does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from cifar_wrn import Options, Run
from common.cifar import load_cifar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lam", type=float, default=0.3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    # A price of 0, and gates that hardly move.
    options = Options(depth=given.depth, width=given.width, amp=True, lam=0.0, gate_learning_rate=1e-3)
    run = Run(load_cifar(given.data_dir), options)
    found: list[list[torch.Tensor]] = []
    run.net.train()
    for index in run.shuffled()[: 2 * given.steps]:
        run.optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(*run.batch(index)) / len(run.train_x)
        loss.backward()
        found.append([location.grad.clone() for location in run.guide.locations()])
        run.optimiser.step()
    print("| gate site | weights of a filter | mean | deviation | slope of 1 nat per weight | steps |\n|" + "---|" * 6)
    for i, (site, posterior) in enumerate(run.guide.posterior().items()):
        gradients = torch.stack([step[i] for step in found[given.steps :]])
        mean, noise = (float(x.square().mean().sqrt()) for x in (gradients.mean(0), gradients.std(0)))
        location = run.guide.locations()[i]
        (slope,) = torch.autograd.grad(posterior.active_prob.mean(), location)
        price = run.group_sizes[site] * float(slope.sum()) / len(run.train_x)
        steps = (noise / (given.lam * price)) ** 2
        print(f"| {site} | {run.group_sizes[site]:.0f} | {mean:.1e} | {noise:.1e} | {price:.1e} | {steps:,.0f} |")


if __name__ == "__main__":
    main()
