"""Sparse autoencoders at equal L0 on known features: python tests/bench/rivals/bench_sae.py --out rows.jsonl

Each example sums 20 of the features in the mean, in 256 dimensions; active ones are .5 to 1.5, and have random
directions. All autoencoders have as many units as there are features, one encoder, a decoder with columns of norm 1
that starts as its transpose, the same examples (none twice), the same rates of Adam, and a target of 20 active units:

- L0: gates of each example, whose logits are 100 times what the encoder's output is above a unit's threshold, with
  ActiveTarget. Gates move only thresholds. At the target's price the loss has the KL of an even usage of the units to
  theirs, as in examples/sparse_autoencoder.py, which keeps units alive.
- top-k: Gao et al. (2024), arXiv:2406.04093, without the auxiliary loss for dead units.
- JumpReLU: Rajamanoharan et al. (2024), arXiv:2407.14435, with its straight-through derivatives of thresholds, of
  bandwidth .3. Its penalty is quadratic in what L0 differs from 20, as in Gemma Scope 2.
- L1: Bricken et al. (2023); the price follows the number of active units as ActiveTarget's multiplier does.

A row per finished cell goes to ``--out``, and cells that are there are not run again: what is unexplained of the
variance of 4,000 new examples, active units, features with a cosine above .9 with a column, units that are active in
none, and seconds of processor time for the training, without that of making examples.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_l0.infer.control.sparsity_target import ActiveTarget
from pyro_l0.nn import L0Gate

METHODS = ("L0", "top-k", "JumpReLU", "L1")
DIMENSIONS, ACTIVE, BATCH, RECOVERED = 256, 20, 256, 0.9
RATE, RATE_OF_THRESHOLDS, THRESHOLD, USAGE = 1e-2, 3e-3, 0.4, 0.3
SHARPNESS, BANDWIDTH, PENALTY, PRICE = 100.0, 0.3, 100.0, 0.01


class Features:
    """Known features, and examples of them."""

    def __init__(self, number: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.number = number
        self.directions = F.normalize(torch.randn(DIMENSIONS, number, generator=self.generator), dim=0)

    def draw(self, examples: int) -> Tensor:
        """Examples, a row each."""
        active, size = (torch.rand(examples, self.number, generator=self.generator) for _ in range(2))
        return ((active < ACTIVE / self.number) * (0.5 + size)) @ self.directions.T


class JumpReLU(torch.autograd.Function):
    """Units above their thresholds, and whether they are; thresholds have straight-through derivatives."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Units and zeros or ones."""
        ctx.save_for_backward(before, threshold)
        is_active = (before > threshold).to(before)
        return before * is_active, is_active

    @staticmethod
    def backward(ctx: Any, of_units: Tensor, of_active: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The derivatives of that paper, with a rectangle as kernel."""
        before, threshold = ctx.saved_tensors
        kernel = ((before - threshold).abs() < BANDWIDTH / 2).to(before) / BANDWIDTH
        return of_units * (before > threshold), -(kernel * (threshold * of_units + of_active)).sum(0)


class Autoencoder(nn.Module):
    """``forward`` gives the reconstruction, the active units and, beside it, gates or what a price is paid for."""

    def __init__(self, method: str, units: int) -> None:
        super().__init__()
        self.method = method
        self.encoder, self.decoder = nn.Linear(DIMENSIONS, units), nn.Linear(units, DIMENSIONS)
        directions = F.normalize(torch.randn(DIMENSIONS, units), dim=0)
        self.encoder.load_state_dict({"weight": directions.T, "bias": torch.zeros(units)})
        self.decoder.load_state_dict({"weight": directions, "bias": torch.zeros(DIMENSIONS)})
        self.log_threshold = nn.Parameter(torch.full((units,), math.log(THRESHOLD)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Any]:
        before = self.encoder(x - self.decoder.bias)
        units, beside = before.relu(), None
        if self.method == "top-k":
            top = units.topk(ACTIVE)
            units = torch.zeros_like(units).scatter(1, top.indices, top.values)
        elif self.method == "JumpReLU":
            units, is_active = JumpReLU.apply(units, self.log_threshold.exp())
            beside = PENALTY * (is_active.sum(1).mean() / ACTIVE - 1) ** 2
        elif self.method == "L1":
            beside = units.sum(1).mean()
        else:
            beside = L0Gate.from_logits(SHARPNESS * (before.detach() - self.log_threshold.exp())).train(self.training)
            return self.decoder(beside(units)), (units != 0) & (beside.test_gate != 0), beside
        return self.decoder(units), units != 0, beside


def train(method: str, features: Features, steps: int) -> tuple[Autoencoder, float]:
    """Train an autoencoder; returns it and the seconds that it took."""
    network = Autoencoder(method, features.number)
    groups = [
        {"params": [*network.encoder.parameters(), *network.decoder.parameters()], "lr": RATE},
        {"params": [network.log_threshold], "lr": RATE_OF_THRESHOLDS},
    ]
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (steps - step) / (0.3 * steps)))
    target, log_price, seconds = ActiveTarget(ACTIVE, steps=steps), math.log(PRICE), 0.0
    for _ in range(steps):
        x = features.draw(BATCH)
        begin = time.process_time()
        reconstruction, active, beside = network(x)
        loss = (reconstruction - x).square().sum(1).mean()
        if method == "L0":
            target.add_gradient(beside.distribution)
            # In logs, as the mean of a unit that is far below its threshold in all examples underflows.
            usage = (beside.distribution.log_active_prob.logsumexp(0) - math.log(len(x))).mean()
            loss = loss - target.multiplier * USAGE * ACTIVE * usage
        elif method == "L1":
            violation = 10 * math.log((active.sum().item() + 1) / len(x) / ACTIVE)
            log_price += 10 * max(-1.0, min(1.0, violation)) / (0.8 * steps)
            loss = loss + math.exp(log_price + max(-3.0, min(3.0, violation))) * beside
        elif method == "JumpReLU":
            loss = loss + beside
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if method == "L0":
            target.ascend()
        network.decoder.weight.data = F.normalize(network.decoder.weight.data, dim=0)
        seconds += time.process_time() - begin
    return network.eval(), seconds


@torch.no_grad()
def measure(network: Autoencoder, features: Features) -> dict[str, float]:
    """Count on new examples, with deterministic gates."""
    x = torch.cat([features.draw(500) for _ in range(8)])
    reconstruction, active, beside = network(x)
    expected = {"expected": beside.active_prob.sum(1).mean().item()} if network.method == "L0" else {}
    return expected | {
        "unexplained": 100 * ((reconstruction - x).square().sum() / (x - x.mean(0)).square().sum()).item(),
        "active": active.sum(1).float().mean().item(),
        "recovered": ((network.decoder.weight.T @ features.directions).amax(0) > RECOVERED).sum().item(),
        "dead": (~active.any(0)).sum().item(),
    }


def main() -> None:
    """Run the cells that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", nargs="+", type=int, default=[512, 1024, 4096])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    for seed, number, method in product(arguments.seeds, arguments.features, arguments.methods):
        cell = {"features": number, "method": method, "seed": seed, "steps": arguments.steps}
        if any(cell.items() <= row.items() for row in rows):
            continue
        torch.manual_seed(seed)
        features = Features(number, seed)
        network, seconds = train(method, features, arguments.steps)
        rows.append(cell | measure(network, features) | {"seconds": seconds})
        with arguments.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    columns = ("unexplained", "active", "recovered", "dead", "seconds")
    print("features  method    seeds", *(f"{name:>16s}" for name in columns))
    for number, method in product(arguments.features, arguments.methods):
        cell = {"features": number, "method": method, "steps": arguments.steps}
        found = [row for row in rows if cell.items() <= row.items()]
        means = [[row[name] for row in found] for name in columns]
        text = [f"{statistics.mean(x):9.2f} ± {statistics.stdev(x) if len(x) > 1 else 0.0:.2f}" for x in means if x]
        print(f"{number:8d}  {method:9s} {len(found):4d}", *(f"{x:>16s}" for x in text))


if __name__ == "__main__":
    main()
