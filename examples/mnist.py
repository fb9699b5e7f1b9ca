"""Prune a multilayer perceptron on handwritten digits while it trains.

By default on scikit-learn's 1,797 digits of 8 x 8 pixels, which need no download: about 15 seconds, an error near
2 % and a fifth of the weights left. With ``--data mnist`` it is the L0 paper's first experiment (MLP
784-300-100, Adam, batches of 100, averaged weights, 200 epochs, about 7 minutes on one core):
``python examples/mnist.py --data mnist --objective l0 --lam 0.1`` ends at 1.4 to 1.5 % with some 230-216-100 units.

``torchrun --nproc-per-node 2 examples/mnist.py ...`` trains in two processes, each with its share of every batch.

Writes to ``--out``: ``metrics.json``, ``training.png`` (error, open units and expected multiply-adds over the epochs,
Figure 3 of the paper), ``inputs.png`` (which pixels stayed open), ``pruned.safetensors`` (the
compacted network, for ``pyro_l0.compaction.load_compacted``) and ``checkpoint.pt``, from which ``--resume`` continues
after an interrupt, with the same options; only ``--epochs``, ``--out`` and the retraining may be others.
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch, whose import takes seconds
    import command

    command.answer_signals()

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

import checkpoint
import command
import ranges
from data import Images, load_digits, load_mnist
from networks import KEEP_RATES, FamilyName, NetworkName, estimator_options, family_options, init_active_prob
from plots import plot_inputs, plot_training
from processes import process_group
from pyro_l0.infer.estimators import EstimatorName
from training import AVERAGE_POWER, MEASURES, TARGET_WEIGHT, Run

__all__ = ["Options", "describe", "main"]


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        data: embedded digits, or MNIST.
        data_dir: folder with MNIST's four files; downloaded with a hash check if not given.
        network: mlp (hidden layers of 300 and 100 units), or lenet5 (20-50-800-500, MNIST alone).
        objective: Eq. 22 (l0), Eq. 21 (free_energy) or Eq. 20 (spike_slab) of the L0 paper.
        family: family of the posterior gates.
        beta: sharpness of the mixture gates; 30, 25 and 40 (the paper's) for the three of them if not given.
        epsilon: uniform share of exponential_uniform; 0.1 if not given.
        estimator: gradient estimator of family bernoulli; arm if not given.
        lam: price of one open weight in nats; one for all gate sites or one per site. 0.1 on MNIST and 0.05 on
            the digits if not given; spike_slab takes none.
        prior_active_prob: P(z != 0) under the gates' prior, for free_energy and spike_slab.
        epochs: passes over the training images; 200 if not given.
        seed: seed of everything random.
        device: where to train.
        out: folder for what this run writes.
        resume: continue from the checkpoint.
        checkpoint: the checkpoint's file, if not out/checkpoint.pt.
        batch_size: examples per step.
        learning_rate: Adam's step for the weights.
        gate_learning_rate: Adam's step for the gates; 0.001 on MNIST (the paper's) and 0.01 on the digits, whose 200
            epochs are only 3,000 steps, if not given.
        weight_decay: coefficient w of the gated weights' expected squared norm, as w / 2 on the mean loss (Eq. 15, 17).
        target: largest fraction of the multiply-adds or the weights that the deterministic network may have at the end;
            lam is then 0 if not given.
        target_of: what the target counts.
        target_epochs: epochs over which the budget falls to the target.
        shrink: take units whose gates are closed for good out of the network after each epoch, so that later epochs
            cost less.
        retrain: passes over the training images in which the compacted network, without gates, is trained further.
        retrain_noise: standard deviation of normal noise on the pixels in these passes.
        hold_out: set so many training images aside and report on them instead of the test images, to choose settings.
    """

    data: Literal["digits", "mnist"] = "digits"
    data_dir: Path | None = None
    network: NetworkName = "mlp"
    objective: Literal["l0", "free_energy", "spike_slab"] = "l0"
    family: FamilyName = "hard_concrete"
    beta: float | None = None
    epsilon: float | None = None
    estimator: EstimatorName | None = None
    lam: tuple[float, ...] = ()
    prior_active_prob: float = 0.1
    epochs: int = 200
    seed: int = 1
    device: str = "cpu"
    out: Path = field(default=Path("runs/mnist"))
    resume: bool = False
    checkpoint: Path | None = None
    batch_size: int = 100
    learning_rate: float = 1e-3
    gate_learning_rate: float | None = None
    hold_out: int = 0
    weight_decay: float = 0.0
    target: float | None = None
    target_of: Literal["macs", "weights"] = "macs"
    target_epochs: int = 50
    shrink: bool = False
    retrain: int = 0
    retrain_noise: float = 0.0


def main(options: Options) -> dict[str, Any]:
    """Train, write the files, print a table; returns the metrics.

    Raises:
        ValueError: an option is outside its range or does not go with another, a file is damaged or of another run, or
            another run uses ``out``.
        FileNotFoundError: there are no such data, or no checkpoint to go on from.
        FloatingPointError: the training diverged; the last checkpoint stays.
    """
    _check(options)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with command.folder(options.out), process_group(options.device) as first:
        return _run(options, first)


def _check(options: Options) -> None:
    """Refuse options before anything is loaded or written."""
    ranges.check(options)
    sites = len(KEEP_RATES[options.network])
    if len(options.lam) not in (0, 1, sites):
        raise ValueError(
            f"Expected lam with 1 or {sites} entries, one per gate site, but got {len(options.lam)}: {options.lam}."
        )
    slab = options.objective == "spike_slab"
    if slab and (any(options.lam) or options.weight_decay):
        raise ValueError(
            "Expected no lam and no weight_decay for objective='spike_slab', but got "
            f"{options.lam} and {options.weight_decay}."
        )
    if slab and (options.shrink or options.network == "lenet5"):
        raise ValueError("Expected network='mlp' and no shrink for objective='spike_slab'.")
    if options.data == "digits" and options.network == "lenet5":
        raise ValueError("Expected data='mnist' for network='lenet5', which takes images of 784 pixels.")
    of_target = options.target_of, options.target_epochs
    if options.target is None and of_target != (Options.target_of, Options.target_epochs):
        raise ValueError(f"Expected target_of and target_epochs with target only, but got {of_target} without.")
    if options.retrain_noise and not options.retrain:
        raise ValueError(
            f"Expected retrain_noise of at least 0, and 0 without retrain, but got {options.retrain_noise} and "
            f"retrain={options.retrain}."
        )
    if options.checkpoint is not None and not options.resume:
        raise ValueError("Expected checkpoint with resume only; a run that starts anew reads none.")
    if options.resume:
        checkpoint.require(_checkpoint(options))
        command.advise(f"{_checkpoint(options)} is as it was, and the same command goes on from there")
    estimator_options(options.family, options.estimator)
    keywords = family_options(options.family, options.beta, options.epsilon)
    init_active_prob(KEEP_RATES[options.network], options.family, keywords)


def _checkpoint(options: Options) -> Path:
    """The file to go on from."""
    return options.checkpoint or options.out / "checkpoint.pt"


def _run(options: Options, first: bool) -> dict[str, Any]:
    digits = options.data == "digits"
    images = load_digits() if digits else load_mnist(options.data_dir)
    if options.hold_out:
        images = images.hold_out(options.hold_out)
    free = options.objective == "spike_slab" or options.target is not None
    lam = options.lam or ((0.0,) if free else (0.05,) if digits else (0.1,))
    gate_learning_rate = options.gate_learning_rate
    if gate_learning_rate is None:
        gate_learning_rate = 1e-2 if digits else 1e-3
    keywords = family_options(options.family, options.beta, options.epsilon)
    run = Run(
        images,
        options.network,
        objective=options.objective,
        lam=lam,
        prior_active_prob=options.prior_active_prob,
        family=options.family,
        family_options=keywords,
        estimator=options.estimator,
        learning_rate=options.learning_rate,
        gate_learning_rate=gate_learning_rate,
        batch_size=options.batch_size,
        weight_decay=options.weight_decay,
        target=options.target,
        target_of=options.target_of,
        target_epochs=options.target_epochs,
        shrink=options.shrink,
        seed=options.seed,
        device=options.device,
    )
    fingerprint = {
        **{key: value for key, value in asdict(options).items() if key in ("data", "network", "objective", "seed")},
        "units": run.units,
        "family": [options.family, keywords, options.estimator],
        "hold_out": options.hold_out,
        "weight_decay": options.weight_decay,
        "target": [options.target, options.target_of, options.target_epochs],
        "shrink": options.shrink,
        "averages": [AVERAGE_POWER, TARGET_WEIGHT],
        "lam": list(lam),
        "prior_active_prob": options.prior_active_prob,
        "batch_size": options.batch_size,
        "learning_rates": [options.learning_rate, gate_learning_rate],
        "device": run.device.type,
        "images": images.checksum(),
    }
    path = options.out / "checkpoint.pt"
    history: list[dict[str, Any]] = []
    seconds = 0.0

    def save() -> None:
        state = {"fingerprint": fingerprint, "run": run.state(), "history": history, "seconds": seconds}
        if first:
            checkpoint.save(path, state)
            command.advise(f"{path} holds {len(history)} epochs, and the same command with --resume goes on from there")

    if options.resume:
        found = _checkpoint(options)
        state = checkpoint.load(found, fingerprint)
        with checkpoint.fitting(found):
            checkpoint.check_history(found, state["history"], options.epochs, ("loss", *MEASURES))
            run.load_state(state["run"])
            history, seconds = state["history"], float(state["seconds"])
    else:
        save()

    epochs = tqdm(
        range(len(history), options.epochs),
        initial=len(history),
        total=options.epochs,
        unit="epoch",
        disable=None if first else True,  # None: shown on a terminal alone
    )
    for epoch in epochs:
        start = time.perf_counter()
        loss = run.train_epoch()
        measured = run.measure()
        seconds += time.perf_counter() - start
        history.append({"epoch": epoch + 1, "loss": loss, **measured})
        epochs.set_postfix_str(
            f"error {measured['test_error_percent']:.2f} %, open {'-'.join(map(str, measured['architecture']))}, "
            f"expected MACs {measured['expected_macs']:,.0f}"
        )
        save()

    if options.target is not None:
        run.finish()
        history[-1].update(run.measure())
    small = run.compacted()
    metrics = {**_metrics(run, history, seconds, options), "certificate": small.certificate}
    if not first:
        return metrics
    if options.retrain:
        metrics["retrained_error_percent"] = run.retrain(small.network, options.retrain, options.retrain_noise)
    small.save(options.out / "pruned")
    plot_training(history, run.cost.total_macs, list(run.group_sizes), options.out / "training.png")
    gates = run.averaged[1].test_gates()
    gate = next(iter((gates if run.shrinker is None else run.shrinker.full(gates)).values()))
    if gate.numel() == images.train_x.shape[1]:
        plot_inputs(gate.cpu(), images.image_shape, options.out / "inputs.png")
    checkpoint.write_json(options.out / "metrics.json", metrics)  # last: who finds it finds the others too
    _print_table(metrics, images, options)
    return metrics


def describe(options: Options) -> dict[str, Any]:
    """The options that decide what a run finds, as plain JSON values."""
    elsewhere = ("data_dir", "device", "out", "resume", "checkpoint")
    values = {key: value for key, value in asdict(options).items() if key not in elsewhere}
    described: dict[str, Any] = json.loads(json.dumps(values))
    return described


def _metrics(run: Run, history: list[dict[str, Any]], seconds: float, options: Options) -> dict[str, Any]:
    last = history[-1]
    # Before a budget is met, the network is a larger one.
    total = run.cost.total_macs if options.target_of == "macs" else run.cost.total_weights
    budget = total * (1.0 if options.target is None else options.target)
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
        "expected_l0": last["expected_l0"],
        "active_rate": last["active_rate"],
        "seconds": seconds,
        "history": history,
    }


def _print_table(metrics: dict[str, Any], images: Images, options: Options) -> None:
    error = "held-out error" if options.hold_out else "test error"
    left = metrics["weights_left"] / metrics["weights"]
    rows = [
        (f"{error}, final epoch", f"{metrics['test_error_percent']:.2f} %"),
        (f"{error}, best epoch", f"{metrics['best_test_error_percent']:.2f} %"),
        *(
            [(f"{error}, compacted and retrained", f"{metrics['retrained_error_percent']:.2f} %")]
            if "retrained_error_percent" in metrics
            else []
        ),
        ("units left", f"{'-'.join(map(str, metrics['architecture']))} of {'-'.join(map(str, metrics['units']))}"),
        ("weights left", f"{metrics['weights_left']:,} of {metrics['weights']:,} ({100 * left:.1f} %)"),
        ("multiply-adds left", f"{metrics['macs_left']:,} of {metrics['macs']:,}"),
        ("largest difference of the compacted network", f"{metrics['certificate']:.1e}"),
        ("seconds", f"{metrics['seconds']:.0f}"),
    ]
    for name, value in rows:
        print(f"{name:46s}{value}")
    print(f"files in {options.out}: {', '.join(sorted(path.name for path in options.out.glob('[!.]*')))}")


if __name__ == "__main__":
    command.run(main, Options, __doc__)
