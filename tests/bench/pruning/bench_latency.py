"""Whether budgets of latency are met: python tests/bench/pruning/bench_latency.py --data-dir FOLDER

FOLDER has MNIST's four files. ``prune(cost="latency")`` takes LeNet-5 and a vision transformer of two layers to parts
of the time that a call takes, on one thread, in 400 steps from scratch on 5,000 images. A row per run: the part that
was asked for, the part that was measured on the pruned network, how far apart these are, the part of the multiply-adds,
both networks' times and the test error. Ends with 1 if a part is off by more than a tenth. Takes six minutes on one
core. What other processes do to caches is measured as well, so run nothing else.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from itertools import product
from pathlib import Path

import pyro
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common.data import load_images
from pyro_l0 import prune
from tests.pruning.networks import VisionTransformer

IMAGES, BATCH, EPOCHS, CALLED_WITH = 5_000, 50, 4, 16
FAR = 0.1


def lenet() -> nn.Module:
    """LeNet-5 of the L0 paper, 20-50-800-500, without gates."""
    layers: list[nn.Module] = [nn.Unflatten(-1, (1, 28, 28))]
    for before, maps in ((1, 20), (20, 50)):
        layers += [nn.Conv2d(before, maps, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


def vit() -> nn.Module:
    """Patches of 4 x 4 pixels, of which there are 49, and 64 features."""
    network = VisionTransformer(64, 8, patch=14)
    network.embed, network.places = nn.Conv2d(1, 64, 4, stride=4), nn.Parameter(0.02 * torch.randn(1, 49, 64))
    return nn.Sequential(nn.Unflatten(-1, (1, 28, 28)), network)


NETWORKS = {"lenet": (lenet, (0.5, 0.3)), "vit": (vit, (0.7, 0.5))}


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    images = load_images("mnist", options.data_dir, 0)
    data = TensorDataset(images.train_x[:IMAGES], images.train_y[:IMAGES])
    print("| network | asked | reached | off by | multiply-adds | microseconds | seed | test error, % |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    missed = 0
    for name, seed in product(options.network, options.seed):
        make, budgets = NETWORKS[name]
        for budget in budgets:
            pyro.set_rng_seed(seed)
            loader = DataLoader(data, BATCH, shuffle=True)
            example = images.train_x[:CALLED_WITH]
            result = prune(
                make(), F.cross_entropy, loader, example, budget, cost="latency", epochs=EPOCHS, pretrained=False
            )
            (ours, theirs), (macs, of) = result.report.left["latency"], result.report.left["macs"]
            off = ours / theirs / budget - 1
            missed += abs(off) > FAR
            with torch.no_grad():
                error = 100 * float((result.network(images.test_x).argmax(1) != images.test_y).float().mean())
            times = f"{ours:.0f} of {theirs:.0f}"
            row = f"{ours / theirs:.3f} | {off:+.1%} | {macs / of:.3f} | {times} | {seed} | {error:.2f}"
            print(f"| {name} | {budget} | {row} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
