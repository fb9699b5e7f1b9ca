"""The options of a training run on digits or MNIST: what they are, what they mean if not given, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import networks
import ranges
from networks import KEEP_RATES, FamilyName, NetworkName
from pyro_l0.infer.elbo.estimators import EstimatorName

__all__ = ["Options", "check", "describe"]


@dataclass(frozen=True)
class Options:
    """Command line of ``mnist.py``, and what :class:`run.Run` takes.

    Attributes:
        data: embedded digits, or MNIST.
        data_dir: folder with MNIST's four files; downloaded with a hash check if not given.
        network: mlp (hidden layers of 300 and 100 units), or lenet5 (20-50-800-500, MNIST alone).
        objective: Eq. 22 (l0), Eq. 21 (free_energy) or Eq. 20 (spike_slab) of the L0 paper.
        family: family of the posterior gates.
        beta: sharpness of the mixture gates; 30, 25 and 40 (the paper's) for the three of them if not given.
        epsilon: uniform share of exponential_uniform; 0.1 if not given.
        estimator: gradient estimator of family bernoulli; arm if not given.
        lam: price of one open weight in nats; one for all gate sites or one per site. Without a target 0.1 on MNIST
            and 0.05 on the digits if not given; spike_slab takes none.
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
            epochs are only 3,000 steps, if not given. With a target it follows from the number of steps, and another
            one is a choice for experts.
        weight_decay: coefficient w of the gated weights' expected squared norm, as w / 2 on the mean loss (Eq. 15, 17);
            with a target, of the squares of all weights and biases as they are.
        target: largest fraction of the full network that the deterministic one may have at the end. 0.1 on the digits
            for l0 and hard_concrete if neither it nor lam is given, and none otherwise. Nothing else needs to be
            chosen: the gates start open, wait for a quarter of the epochs, close as the budget falls to the target, and
            keep to it in the last seventh; lam is then 0 if not given.
        target_of: what the target counts: multiply-adds, weights, or parameters, which are weights and biases.
        shrink: take units whose gates are closed for good out of the network after each epoch, so that later epochs
            cost less.
        retrain: passes over the training images in which the compacted network, without gates, is trained further; a
            third of epochs with a target, and none without, if not given.
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
    target_of: Literal["macs", "weights", "parameters"] = "macs"
    shrink: bool = False
    retrain: int | None = None
    retrain_noise: float = 0.0

    @property
    def budget(self) -> float | None:
        """``target``, or its default."""
        is_plain = (self.data, self.objective, self.family, self.lam) == ("digits", "l0", "hard_concrete", ())
        return 0.1 if self.target is None and is_plain else self.target

    @property
    def prices(self) -> tuple[float, ...]:
        """``lam``, or its default."""
        free = self.objective == "spike_slab" or self.budget is not None
        return self.lam or ((0.0,) if free else (0.05,) if self.data == "digits" else (0.1,))

    @property
    def gate_step(self) -> float:
        """``gate_learning_rate``, or its default without a target."""
        if self.gate_learning_rate is not None:
            return self.gate_learning_rate
        return 1e-2 if self.data == "digits" else 1e-3

    @property
    def retraining(self) -> int:
        """``retrain``, or its default."""
        if self.retrain is not None:
            return self.retrain
        return 0 if self.budget is None else max(1, round(self.epochs / 3))

    @property
    def family_options(self) -> dict[str, float]:
        """Keywords of the family's ``from_active_prob``."""
        return networks.family_options(self.family, self.beta, self.epsilon)


def check(options: Options) -> None:
    """Refuse options that no run should start with.

    Raises:
        ValueError: an option is outside its range or does not go with another.
        FileNotFoundError: ``data_dir`` is no folder.
    """
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
    if options.budget is None and options.target_of != Options.target_of:
        raise ValueError(f"Expected target_of with target only, but got {options.target_of!r} without.")
    if options.retrain_noise and not options.retraining:
        raise ValueError(
            f"Expected retrain_noise of at least 0, and 0 without retrain, but got {options.retrain_noise} and "
            f"retrain={options.retraining}."
        )
    networks.estimator_options(options.family, options.estimator)
    networks.init_active_prob(KEEP_RATES[options.network], options.family, options.family_options)


def describe(options: Options) -> dict[str, Any]:
    """The options that decide what a run finds, as plain JSON values."""
    elsewhere = ("data_dir", "device", "out", "resume", "checkpoint")
    values = {key: value for key, value in asdict(options).items() if key not in elsewhere}
    described: dict[str, Any] = json.loads(json.dumps(values))
    return described
