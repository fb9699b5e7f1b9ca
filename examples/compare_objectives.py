"""Eq. 20, 21 and 22 of the L0 paper on the same data and network, and what a prior's rate does.

First a sweep: each objective with its own knob (λ for Eq. 22 and 21, the prior's rate for Eq. 20), the test error of
the final epoch against the weights that are left. Then the rates: prior rates of 0.5, 0.2, 0.1 and 0.05 under the free
energy with λ = 0, without data, where the posterior returns to the prior, and with data.

``python examples/compare_objectives.py`` takes a minute on two cores. With ``--epochs 100`` expect Eq. 22 near 3 %
with a quarter of the weights, Eq. 21 a little worse and smaller at the same λ, Eq. 20 above 5 % (the bound prefers to
underfit), the posterior's rate within 0.001 of the prior's without data, and far above it with data.

Writes ``comparison.json`` and ``comparison.png`` to ``--out``.
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyro
import torch

from common.data import Images, load_digits
from common.figures import figure_axes, plot_curves, save_figure
from common.mnist_run import Options as RunOptions
from common.mnist_run import Run
from common.sweep import write_json
from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate

__all__ = ["Options", "main", "rate_without_data"]

RATES = (0.5, 0.2, 0.1, 0.05)
SWEEP: tuple[dict[str, Any], ...] = (
    *({"objective": "l0", "lam": (lam,)} for lam in (0.02, 0.05, 0.15)),
    *({"objective": "free_energy", "lam": (lam,)} for lam in (0.005, 0.02, 0.05)),
    *({"objective": "spike_slab", "prior_active_prob": rate} for rate in (0.5, 0.1, 0.01)),
)


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        epochs: passes over the training images per run.
        seed: seed of everything random.
        device: where to train.
        out: folder for what this run writes.
        rates_only: leave the sweep out.
    """

    epochs: int = 40
    seed: int = 1
    device: str = "cpu"
    out: Path = field(default=Path("runs/comparison"))
    rates_only: bool = False


def main(options: Options) -> dict[str, Any]:
    """Run the comparison, write the files, print two tables; returns what is written as JSON."""
    command.check(options)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with command.folder(options.out):
        images = load_digits()
        command.plan((len(RATES) + len(SWEEP) * (not options.rates_only)) * options.epochs, "epoch")
        sweep = [] if options.rates_only else [_train(images, options, knob["objective"], knob) for knob in SWEEP]
        rates = []
        for rate in RATES:
            knob = {"objective": "free_energy", "lam": (0.0,), "prior_active_prob": rate}
            trained = _train(images, options, f"rate {rate}", knob)
            rates.append({"prior": rate, "without_data": rate_without_data(rate, options.seed), **trained})
        comparison = {"sweep": sweep, "rates": rates}
        _plot(comparison, options.out / "comparison.png")
        write_json(options.out / "comparison.json", comparison)
        _print(comparison)
        return comparison


def _train(images: Images, options: Options, name: str, knob: dict[str, Any]) -> dict[str, Any]:
    base = RunOptions(seed=options.seed, device=options.device, gate_learning_rate=2e-2)
    run = Run(images, replace(base, **knob))
    for _ in range(options.epochs):
        run.train_epoch()
        command.advance()
    measured = run.measure()
    rates = zip(measured["active_rate"].values(), run.units, strict=True)
    overall = sum(rate * units for rate, units in rates) / sum(run.units)
    text = ", ".join(f"{key} {value[0] if isinstance(value, tuple) else value}" for key, value in knob.items())
    return {"name": name, "knob": text, "weights": run.cost.total_weights, "overall_rate": overall, **measured}


def rate_without_data(prior_active_prob: float, seed: int) -> float:
    """The posterior's realised rate when nothing is observed."""

    def model() -> None:
        pyro.sample("z", HardConcrete.from_active_prob(prior_active_prob).expand([20]).to_event(1))

    torch.manual_seed(seed)
    guide = AutoGate(model, init_active_prob=0.8)
    guide()
    loss = L0_ELBO("free_energy")(model, guide)
    optimiser = torch.optim.Adam(guide.parameters(), lr=0.05)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 1500)
    for _ in range(1500):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
        decay.step()
    return float(torch.cat([probs.flatten() for probs in guide.active_probs().values()]).mean())


def _plot(comparison: dict[str, Any], path: Path) -> None:
    left, right = figure_axes(1, 2, figsize=(10, 3.6))
    points: dict[str, tuple[list[float], list[float]]] = {}
    for entry in comparison["sweep"]:
        shares, errors = points.setdefault(entry["name"], ([], []))
        shares.append(100 * entry["weights_left"] / entry["weights"])
        errors.append(entry["test_error_percent"])
    if points:
        plot_curves(
            points, xlabel="weights left, %", ylabel="test error, %", title="Final epoch, test gates", axes=left
        )
    rates = {"without data": "without_data", "with data": "overall_rate"}
    realised = {name: [entry[key] for entry in comparison["rates"]] for name, key in rates.items()}
    prior, title = [entry["prior"] for entry in comparison["rates"]], "Free energy, λ = 0"
    plot_curves(realised, prior, xlabel="prior rate", ylabel="realised rate", title=title, axes=right)
    right.set_ylim(0, 1)
    save_figure((left, right), path)


def _print(comparison: dict[str, Any]) -> None:
    if comparison["sweep"]:
        print(f"{'objective and knob':58s}{'error %':>8s}{'units left':>14s}{'weights left':>14s}")
    for entry in comparison["sweep"]:
        units = "-".join(map(str, entry["architecture"]))
        share = f"{entry['weights_left']:,} ({100 * entry['weights_left'] / entry['weights']:.0f} %)"
        print(f"{entry['knob']:58s}{entry['test_error_percent']:8.2f}{units:>14s}{share:>16s}")
    print(f"\n{'prior':>6s}{'without data':>14s}{'with data':>11s}   by site{'':17s}{'error %':>8s}  weights left")
    for entry in comparison["rates"]:
        sites = " ".join(f"{rate:.3f}" for rate in entry["active_rate"].values())
        rates = f"{entry['prior']:6.2f}{entry['without_data']:14.4f}{entry['overall_rate']:11.3f}"
        print(f"{rates}   {sites:24s}{entry['test_error_percent']:8.2f}{entry['weights_left']:14,d}")


if __name__ == "__main__":
    command.run(main, Options, __doc__)
