"""Prune a multilayer perceptron on handwritten digits while it trains.

By default on scikit-learn's 1,797 digits of 8 x 8 pixels, which need no download: an error near 2 % and a
tenth of the weights left, which is the target. The whole command takes about 8 seconds on two cores of an AMD EPYC
(Zen 5), of which the training with gates takes four. With ``--data mnist`` it is the L0 paper's first experiment
(MLP 784-300-100, Adam, batches of 100, averaged weights, 200 epochs, about 7 minutes on one core):
``python examples/mnist.py --data mnist --objective l0 --lam 0.1`` ends at 1.4 to 1.6 % with some 230-216-100 units.

``torchrun --nproc-per-node 2 examples/mnist.py ...`` trains in two processes, each with its share of every batch.

Writes to ``--out``: ``metrics.json``, ``training.png`` (error, open units and expected multiply-adds over the epochs,
Figure 3 of the paper), ``gates.png`` (histograms of gates while they train), ``inputs.png`` (which pixels stayed
open), ``pruned.safetensors`` (the compacted network, for
``pyro_l0.compaction.load_compacted``) and ``checkpoint.pt``. ``--resume`` goes on from there after an interrupt, with
the same options; only the retraining and, without a target, ``--epochs`` may be others.

``--target 0.1`` leaves a tenth of the multiply-adds (``--target-of weights`` or ``parameters``: of these) and needs no
other option. The network that counts has the test gates of the last step, and is trained further after its units were
taken out: ``--target 0.05 --shrink`` ends near 3 % with a twentieth of the digits' weights.
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

import time
from typing import Any

import torch

from common.averages import retrain
from common.data import load_images
from common.figures import save_figure
from common.gated_run import train
from common.mnist_run import Options, Run, check, describe
from common.plots import plot_gate_shares, plot_history
from common.sweep import write_json
from pyro_l0.plots import plot_gates
from pyro_l0.training import process_group

__all__ = ["Options", "Run", "describe", "main"]


def main(options: Options) -> dict[str, Any]:
    """Train, write the files, print a table; returns the metrics."""
    start = command.began()
    check(options)
    path = options.out / "checkpoint.pt"
    if options.resume:
        command.require_checkpoint(path)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with command.folder(options.out), process_group(options.device) as first:
        images = load_images(options.data, options.data_dir, options.hold_out)
        run = Run(images, options)
        before = time.perf_counter()
        # A pass over the small network takes about a quarter of one with gates.
        train(run, path, run.fingerprint(images), options.resume, first, options.retraining / 4)
        epochs_seconds = time.perf_counter() - before
        small = run.compacted()
        metrics = {**_metrics(run), "epochs_seconds": epochs_seconds, "certificate": small.certificate}
        if run.target is not None:
            report = run.target.report()
            ((fraction, budget),) = zip(report.fraction.values(), report.budget.values(), strict=True)
            metrics["target"] = {"fraction": fraction, "budget": budget, "undecided": report.undecided}
            metrics["target"]["at_minimum"] = list(report.at_minimum)
        if not first:
            return metrics
        metrics["findings"] = [str(finding) for finding in run.diagnose().findings]
        if options.retraining:
            passes = options.retraining, options.batch_size, options.retrain_noise
            retrain(small.network, run.train_x, run.train_y, *passes)
            metrics["retrained_error_percent"] = run.error(small.network)
        small.save(options.out / "pruned")
        picture = options.out / "training.png"
        plot_history(run.history, run.cost.total_macs, list(run.group_sizes), picture, run.dropout_macs())
        plot_gate_shares(run.history, options.out / "gates.png")
        gate = next(iter(run.full(run.gates.test_gates()).values()))
        if gate.numel() == images.train_x.shape[1]:
            save_figure(plot_gates(gate, shape=images.image_shape[-2:], name="pixels"), options.out / "inputs.png")
        metrics["seconds"] = time.perf_counter() - start
        write_json(options.out / "metrics.json", metrics)  # last: who finds it finds the others too
        _print_table(metrics, options)
        return metrics


def _metrics(run: Run) -> dict[str, Any]:
    options, history = run.options, run.history
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
        "training_seconds": sum(entry["seconds"] for entry in history),
        "history": history,
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
        ("seconds, of which training with gates", f"{metrics['seconds']:.0f}, {metrics['training_seconds']:.0f}"),
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
