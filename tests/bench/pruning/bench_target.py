"""Whether budgets are met with nothing tuned: python tests/bench/pruning/bench_target.py --data-dir FOLDER

FOLDER has MNIST's four files. ``prune`` takes an MLP with gates on its inputs, a convolutional network with BatchNorm
and a small vision transformer to .5, .3, .1 and .05 of their multiply-adds, in 300, 1,000 and 3,000 steps, pretrained
and from scratch, for three seeds. A row per run: what the network used of its budget when the gates were done, before
anything was taken out, the largest share of the budget that one unit takes, gates that are neither open nor closed,
and the test error as cut and at the end. A row that is outside of its limits is marked: .95 to 1 of the budget, or .85
to 1 where a unit takes more than a twentieth of it, and a twentieth of the gates undecided. Then the
command ends with 1. ``--network``, ``--target``, ``--steps``, ``--seed`` and ``--pretrained`` choose runs;
``--of macs parameters`` bounds the same part of both, of which the fuller budget is shown.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from itertools import product
from pathlib import Path

import pyro
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from common.data import load_images
from pyro_l0.nn import L0Gate
from pyro_l0.pruning import Training, prune
from tests.bench.pruning import bench_pruning
from tests.pruning.networks import VisionTransformer

TRAINING_IMAGES, TEST_IMAGES, BATCH = 20_000, 5_000, 32
PRETRAINING_STEPS = 1_000


def mlp() -> nn.Module:
    """With gates on the pixels, too."""
    dense = (nn.Linear(784, 300), nn.Linear(300, 100), nn.Linear(100, 10))
    return nn.Sequential(L0Gate(784), dense[0], nn.ReLU(), L0Gate(300), dense[1], nn.ReLU(), L0Gate(100), dense[2])


def cnn() -> nn.Module:
    return nn.Sequential(nn.Unflatten(-1, (1, 28, 28)), *bench_pruning.cnn())


def vit() -> nn.Module:
    return nn.Sequential(nn.Unflatten(-1, (1, 28, 28)), VisionTransformer(48, 8, patch=14))


NETWORKS = {"mlp": mlp, "cnn": cnn, "vit": vit}


def pretrain(network: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> None:
    """Train with all gates open."""
    gates = [module for module in network.modules() if isinstance(module, L0Gate)]
    plain = {id(gate): nn.Identity() for gate in gates}
    layers = [plain.get(id(module), module) for module in network] if isinstance(network, nn.Sequential) else []
    trained = nn.Sequential(*layers) if gates else network
    bench_pruning.train(trained, loader, PRETRAINING_STEPS)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--target", nargs="+", type=float, default=[0.5, 0.3, 0.1, 0.05])
    parser.add_argument("--steps", nargs="+", type=int, default=[300, 1000, 3000])
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pretrained", nargs="+", type=int, choices=(0, 1), default=[1, 0])
    parser.add_argument("--of", nargs="+", choices=("macs", "parameters"), default=["macs"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    images = load_images("mnist", options.data_dir, 0)
    x, y = images.train_x[:TRAINING_IMAGES], images.train_y[:TRAINING_IMAGES]
    test_x, test_y = images.test_x[:TEST_IMAGES], images.test_y[:TEST_IMAGES]

    def error(network: nn.Module) -> float:
        return 100 * float((network(test_x).argmax(1) != test_y).float().mean())

    print("| network | steps | pretrained | target | seed | of budget | largest unit | undecided | cut % | end % | s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    missed = 0
    for seed, name, pretrained in product(options.seed, options.network, options.pretrained):
        pyro.set_rng_seed(seed)
        network = NETWORKS[name]()
        loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True, drop_last=True)
        if pretrained:
            pretrain(network, loader)
        for steps, target in product(options.steps, options.target):
            pyro.set_rng_seed(seed)
            start = time.process_time()
            few = TensorDataset(x[: BATCH * 100], y[: BATCH * 100]) if steps < len(loader) else loader.dataset
            batches = DataLoader(few, BATCH, shuffle=True, drop_last=True)
            result = prune(
                network,
                F.cross_entropy,
                batches,
                x[:2],
                dict.fromkeys(options.of, target),
                epochs=max(1, round(steps / len(batches))),
                pretrained=bool(pretrained),
                training=Training(evaluate=error),
            )
            report = result.report
            used, undecided = report.target.of_budget, report.target.undecided
            least = 0.95 if report.largest_unit <= 0.05 else 0.85
            bad = not (least <= used <= 1 + 1e-6 and undecided <= 0.05)
            missed += bad
            print(
                f"| {name} | {steps} | {pretrained} | {target} | {seed} | {used:.3f} | {report.largest_unit:.3f} | "
                f"{undecided:.3f} | {report.cut:.2f} | {report.end:.2f} | {time.process_time() - start:.0f} |"
                f"{' !' if bad else ''}",
                flush=True,
            )
    print(f"{missed} outside of their limits")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
