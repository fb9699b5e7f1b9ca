"""Prune a multilayer perceptron on handwritten digits while it trains.

By default on scikit-learn's 1,797 digits of 8 x 8 pixels, which need no download: about 15 seconds, an error near
2 % and a tenth of the weights left, which is the target. With ``--data mnist`` it is the L0 paper's first experiment
(MLP 784-300-100, Adam, batches of 100, averaged weights, 200 epochs, about 7 minutes on one core):
``python examples/mnist.py --data mnist --objective l0 --lam 0.1`` ends at 1.4 to 1.6 % with some 230-216-100 units.

``torchrun --nproc-per-node 2 examples/mnist.py ...`` trains in two processes, each with its share of every batch.

Writes to ``--out``: ``metrics.json``, ``training.png`` (error, open units and expected multiply-adds over the epochs,
Figure 3 of the paper), ``inputs.png`` (which pixels stayed open), ``pruned.safetensors`` (the
compacted network, for ``pyro_l0.compaction.load_compacted``) and ``checkpoint.pt``, from which ``--resume`` continues
after an interrupt, with the same options; only ``--out``, the retraining and, without a target, ``--epochs`` may be
others.

``--target 0.1`` leaves a tenth of the multiply-adds (``--target-of weights`` or ``parameters``: of these) and needs no
other option: the gates' learning rate, their prices and the fall of the budget follow from the number of steps. The
network that counts has the test gates of the last step, and is trained further after its units were taken out:
``python examples/mnist.py --target 0.05 --shrink`` ends near 3 % with a twentieth of the digits' weights.
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch, whose import takes seconds
    import command

    command.answer_signals()

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import checkpoint
import command
from averages import AVERAGE_POWER
from data import Images, load_images
from gated_run import MEASURES
from options import Options, check, describe
from plots import plot_inputs, plot_training
from processes import process_group
from progress import Progress
from pyro_l0.infer.target.report import TargetReport
from run import Run

__all__ = ["Options", "describe", "main"]


def main(options: Options) -> dict[str, Any]:
    """Train, write the files, print a table; returns the metrics.

    Raises:
        ValueError: an option is outside its range or does not go with another, a file is damaged or of another run, or
            another run uses ``out``.
        FileNotFoundError: there are no such data, or no checkpoint to go on from.
        FloatingPointError: the training diverged; the last checkpoint stays.
    """
    check(options)
    if options.checkpoint is not None and not options.resume:
        raise ValueError("Expected checkpoint with resume only; a run that starts anew reads none.")
    if options.resume:
        checkpoint.require(_checkpoint(options))
        command.advise(f"{_checkpoint(options)} is as it was, and the same command goes on from there")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with command.folder(options.out), process_group(options.device) as first:
        return _run(options, first)


def _checkpoint(options: Options) -> Path:
    """The file to go on from."""
    return options.checkpoint or options.out / "checkpoint.pt"


def _run(options: Options, first: bool) -> dict[str, Any]:
    images = load_images(options.data, options.data_dir, options.hold_out)
    run = Run(images, options)
    progress = Progress(run, options.out / "checkpoint.pt", _fingerprint(run, images), first, {"seconds": 0.0})
    resume = _checkpoint(options) if options.resume else None
    for entry in progress.epochs(options.epochs, ("loss", *MEASURES), _show, resume):
        start = time.perf_counter()
        entry.update(loss=run.train_epoch(), **run.measure())
        progress.totals["seconds"] += time.perf_counter() - start
    history = progress.history
    small = run.compacted()
    metrics = {**_metrics(run, history, progress.totals["seconds"]), "certificate": small.certificate}
    if run.target is not None:
        metrics["target"] = _target(run.target.report())
    if not first:
        return metrics
    metrics["findings"] = [str(finding) for finding in run.diagnose().findings]
    if options.retraining:
        metrics["retrained_error_percent"] = run.retrain(small.network, options.retraining, options.retrain_noise)
    small.save(options.out / "pruned")
    plot_training(history, run.cost.total_macs, list(run.group_sizes), options.out / "training.png")
    gate = next(iter(run.full(run.gates.test_gates()).values()))
    if gate.numel() == images.train_x.shape[1]:
        plot_inputs(gate.cpu(), images.image_shape, options.out / "inputs.png")
    checkpoint.write_json(options.out / "metrics.json", metrics)  # last: who finds it finds the others too
    _print_table(metrics, options)
    return metrics


def _show(entry: dict[str, Any]) -> str:
    """An epoch behind the bar."""
    return (
        f"error {entry['test_error_percent']:.2f} %, open {'-'.join(map(str, entry['architecture']))}, "
        f"expected MACs {entry['expected_macs']:,.0f}"
    )


def _fingerprint(run: Run, images: Images) -> dict[str, Any]:
    """What a checkpoint and the run that resumes it must agree in."""
    options = run.options
    same = "data", "network", "objective", "seed", "hold_out", "weight_decay", "shrink", "prior_active_prob"
    return {
        **{name: value for name, value in asdict(options).items() if name in (*same, "batch_size")},
        "units": run.units,
        "family": [options.family, options.family_options, options.estimator],
        "target": None if run.target is None else [options.budget, options.target_of, f"{run.target.steps} steps"],
        "averages": AVERAGE_POWER,
        "lam": list(options.prices),
        "learning_rates": [group["lr"] for group in run.optimiser.param_groups],
        "device": run.device.type,
        "images": images.checksum(),
    }


def _metrics(run: Run, history: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    options = run.options
    last = history[-1]
    # Before a budget is met, the network is a larger one.
    budget = getattr(run.cost, f"total_{options.target_of}") * (options.budget or 1.0)
    counted = [entry for entry in history if entry[f"{options.target_of}_left"] <= budget] or [last]
    return {
        "options": describe(options),
        "test_error_percent": last["test_error_percent"],
        "best_test_error_percent": min(entry["test_error_percent"] for entry in counted),
        "architecture": last["architecture"],
        "units": run.units,
        "weights": run.cost.total_weights,
        "weights_left": last["weights_left"],
        "macs": run.cost.total_macs,
        "macs_left": last["macs_left"],
        "parameters": run.cost.total_parameters,
        "parameters_left": last["parameters_left"],
        "expected_l0": last["expected_l0"],
        "active_rate": last["active_rate"],
        "seconds": seconds,
        "history": history,
    }


def _target(report: TargetReport) -> dict[str, Any]:
    """How far the budget was used, and how many of the gates did not decide."""
    ((fraction, budget),) = zip(report.fraction.values(), report.budget.values(), strict=True)
    return {
        "fraction": fraction,
        "budget": budget,
        "undecided": report.undecided,
        "at_minimum": list(report.at_minimum),
    }


def _print_table(metrics: dict[str, Any], options: Options) -> None:
    error = "held-out error" if options.hold_out else "test error"
    left = metrics["weights_left"] / metrics["weights"]
    rows = [
        (f"{error}, final epoch", f"{metrics['test_error_percent']:.2f} %"),
        (f"{error}, best epoch", f"{metrics['best_test_error_percent']:.2f} %"),
        ("units left", f"{'-'.join(map(str, metrics['architecture']))} of {'-'.join(map(str, metrics['units']))}"),
        ("weights left", f"{metrics['weights_left']:,} of {metrics['weights']:,} ({100 * left:.1f} %)"),
        ("multiply-adds left", f"{metrics['macs_left']:,} of {metrics['macs']:,}"),
        ("largest difference of the compacted network", f"{metrics['certificate']:.1e}"),
        ("seconds", f"{metrics['seconds']:.0f}"),
    ]
    if "target" in metrics:
        target = metrics["target"]
        met = f"{target['fraction']:.4f} of the {options.target_of}, {target['undecided']:.1%} of the gates undecided"
        rows.insert(-2, (f"budget of {target['budget']:.4g}", met))
    if "retrained_error_percent" in metrics:
        rows.insert(2, (f"{error}, compacted and retrained", f"{metrics['retrained_error_percent']:.2f} %"))
    for name, value in rows:
        print(f"{name:46s}{value}")
    for finding in metrics["findings"]:
        print(finding)
    print(f"files in {options.out}: {', '.join(sorted(path.name for path in options.out.glob('[!.]*')))}")


if __name__ == "__main__":
    command.run(main, Options, __doc__)
