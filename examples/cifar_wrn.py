"""Prune a wide residual network on CIFAR-10 or CIFAR-100 while it trains (section 4.2 of the L0 paper).

A gate per hidden feature map of every residual block; SGD with Nesterov momentum, 200 epochs, steps at 60, 120 and 160,
crops and flips, batches of 128, weight decay 5e-4, divided by 0.7 on the convolutions that read gated maps.

Gates have a learning rate of their own: at the weights' rate of 0.1 they hardly move. Rates of 1 and 10 close nothing
in the first hundred steps of a WRN-10-1, 50 closes a third of the maps before the network has learned.

Writes to ``--out``: ``metrics.json``, ``training.png`` (error, open maps and expected multiply-adds over the epochs,
Figure 4 of the paper), the compacted network and ``checkpoint.pt``, from which ``--resume`` continues.
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch, whose import takes seconds
    import command

    command.answer_signals()

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

import checkpoint
import command
import ranges
from cifar import Cifar, load_cifar
from gated_run import MEASURES, GatedRun, check_finite
from networks import FAMILIES, Classifier, FamilyName, estimator_options, family_options, init_active_prob
from plots import plot_training
from processes import parallel, process_group, shuffled
from progress import Progress
from pyro_l0 import HardConcrete
from pyro_l0.compaction import Shrinker, compact
from pyro_l0.compaction.storage import Compacted
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.infer.elbo.estimators import EstimatorName
from pyro_l0.nn import NetworkCost, fix_gates, square_norms
from pyro_l0.nn.gate import name_gates
from wide_resnet import wide_resnet

__all__ = ["Options", "Run", "fingerprint", "main"]

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
STEPS = (0.3, 0.6, 0.8)  # of the epochs: 60, 120 and 160 of 200
KEEP_RATE = 0.7  # of the hidden maps at the start: log alpha = logit(0.7), P(z != 0) = 0.917 for the hard concrete
SHARPNESS: dict[FamilyName, float] = {"exponential": 6.0, "exponential_uniform": 8.0, "power_law": 2.0}


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        data: which images.
        data_dir: folder with the batches; downloaded with a hash check if not given.
        depth: layers of the network.
        width: factor on its maps.
        lam: price of one open weight in nats; the paper's are 0.001 and 0.002.
        epochs: passes over the training images.
        batch_size: images per step, over all processes.
        learning_rate: SGD's step for the weights, on the mean loss.
        gate_learning_rate: SGD's step for the gates, on the mean loss.
        family: family of the posterior gates.
        beta: sharpness of the mixture gates; 6, 8 and 2 (the paper's) for exponential, exponential_uniform and
            power_law if not given.
        epsilon: uniform share of exponential_uniform; 0.1 if not given.
        estimator: gradient estimator of family bernoulli; arm if not given.
        seed: seed of everything random.
        device: where to train; the images lie there too.
        amp: bfloat16 where autocast takes it.
        compile: compile the network.
        shrink: take maps whose gates are closed for good out of the network after each epoch; not with ``compile``.
        max_steps: stop an epoch early, to try things out.
        out: folder for what this run writes.
        resume: continue from the checkpoint.
    """

    data: Literal["cifar10", "cifar100"] = "cifar10"
    data_dir: Path | None = None
    depth: int = 28
    width: int = 10
    lam: float = 0.001
    epochs: int = 200
    batch_size: int = 128
    learning_rate: float = 0.1
    gate_learning_rate: float = 30.0
    family: FamilyName = "hard_concrete"
    beta: float | None = None
    epsilon: float | None = None
    estimator: EstimatorName | None = None
    seed: int = 1
    device: str = "cpu"
    amp: bool = False
    compile: bool = False
    shrink: bool = False
    max_steps: int | None = None
    out: Path = field(default=Path("runs/cifar"))
    resume: bool = False


class Run(GatedRun):
    """One training run.

    Args:
        images: the data, moved to the device as bytes.
        options: see :class:`Options`.
    """

    def __init__(self, images: Cifar, options: Options) -> None:
        super().__init__(images, options.batch_size, options.seed, options.device)
        self.options = options
        # One copy padded once; every epoch cuts its crops out of it.
        self.padded = F.pad(self.train_x, (4, 4, 4, 4))
        self.mean, self.std = (255 * torch.tensor(x, device=self.device).view(3, 1, 1) for x in (MEAN, STD))
        prior = HardConcrete.from_active_prob(0.5)
        net = wide_resnet(options.depth, options.width, images.num_classes, prior).to(self.device)
        example = torch.zeros(1, 3, 32, 32, device=self.device)
        self.model = Classifier(net, len(self.train_x))
        self.sites = list(name_gates(self.model))
        self.cost = NetworkCost(net, example)
        # Eq. 15: the gated weights' decay is expected, and divided by 0.7; the others' is the optimiser's.
        decay = 5e-4 / 0.7 * len(self.train_x)
        self.elbo = L0_ELBO(
            "l0",
            lam=dict.fromkeys(self.sites, options.lam),
            group_size=dict(self.cost.filter_sizes),
            weight_decay=decay,
            square_norm=square_norms(net, example),
            **estimator_options(options.family, options.estimator),
        )
        keywords = _family_options(options)
        (start,) = init_active_prob((KEEP_RATE,), options.family, keywords)
        self.guide = AutoGate(
            self.model, FAMILIES[options.family], init_active_prob=start, family_options=keywords or None
        )
        self.loss = self.elbo(self.model, self.guide)
        self.loss(*self._batch(torch.arange(2, device=self.device), augment=False))
        gated = {id(block.conv2.weight) for block in net if hasattr(block, "conv2")}
        plain = [p for p in net.parameters() if id(p) not in gated]
        self.optimiser = torch.optim.SGD(
            [
                {"params": plain, "lr": options.learning_rate, "weight_decay": 5e-4},
                {"params": [p for p in net.parameters() if id(p) in gated], "lr": options.learning_rate},
                {"params": list(self.guide.parameters()), "lr": options.gate_learning_rate},
            ],
            momentum=0.9,
            nesterov=True,
        )
        milestones = [round(share * options.epochs) for share in STEPS]
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimiser, milestones, gamma=0.2)
        if options.shrink:
            self.shrinker = Shrinker(
                net, self.guide, example, self.optimiser, self.elbo, on_shrink=self.after_shrinking
            )
        self.plain = net
        if options.compile:
            self.model.net = torch.compile(net)
        if distributed.is_initialized():
            torch.manual_seed(options.seed + self.process)
        self.parallel = parallel(self.loss)

    @property
    def net(self) -> nn.Module:
        """The network, not compiled."""
        return self.plain

    def _batch(self, index: Tensor, augment: bool) -> tuple[Tensor, Tensor]:
        """Normalised images and classes; with random crops and flips."""
        if not augment:
            return self._normalised(self.train_x[index]), self.train_y[index]
        n = len(index)
        offset = torch.randint(0, 9, (2, n), device=self.device)
        steps = torch.arange(32, device=self.device)
        flip = torch.rand(n, device=self.device) < 0.5
        columns = torch.where(flip[:, None], 31 - steps, steps) + offset[1, :, None]
        rows = steps + offset[0, :, None]
        x = self.padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return self._normalised(x), self.train_y[index]

    def _normalised(self, x: Tensor) -> Tensor:
        return (x.float() - self.mean) / self.std

    def train_epoch(self) -> float:
        """One pass over the training images; the mean loss per image, in nats.

        Raises:
            FloatingPointError: the loss or a parameter is not finite any more.
        """
        self.net.train()
        total = torch.zeros((), device=self.device)
        batches = shuffled(len(self.train_x), self.device).split(self.options.batch_size)[: self.options.max_steps]
        for index in batches:
            self.optimiser.zero_grad()
            batch = self._batch(index[self.process :: self.processes], augment=True)
            with torch.autocast(self.device.type, torch.bfloat16) if self.options.amp else nullcontext():
                loss = self.parallel(*batch) / len(self.train_x)
            loss.backward()
            self.optimiser.step()
            total += loss.detach()
        self.schedule.step()
        mean = float(total) / len(batches)
        check_finite(mean, self.net, self.guide)
        self.shrink()
        return mean

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Test error under the test gates, and what is left of the network."""
        gates = self.guide.test_gates()
        fixed = fix_gates(self.net, gates).eval()
        wrong = torch.zeros((), device=self.device)
        for x, y in zip(self.test_x.split(500), self.test_y.split(500), strict=True):
            wrong += (fixed(self._normalised(x)).argmax(-1) != y).sum()
        left = self.left(gates, self.active_prob(self.guide))
        return {"test_error_percent": 100 * float(wrong) / len(self.test_y), **left}

    def compacted(self) -> Compacted:
        """The network under its test gates as a smaller plain network."""
        # A deep residual network in float32 adds up rounding errors of many layers.
        images = self._normalised(self.test_x[:16])
        return compact(self.net, self.guide.test_gates(), images, tolerance=1e-4, before=self.plans)

    def parts(self) -> dict[str, Any]:
        """What has a ``state_dict``, by its name in a checkpoint."""
        return {
            "shrinker": self.shrinker,
            "model": self.net,
            "guide": self.guide,
            "optimiser": self.optimiser,
            "schedule": self.schedule,
            "objective": self.elbo,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned; raises as :class:`GatedRun` does."""
        super().load_state(state)
        checkpoint.check_moments(self.optimiser, ("momentum_buffer",) if self.schedule.last_epoch else ())


def main(options: Options) -> dict[str, Any]:
    """Train, write the files, print a table; returns the metrics, and raises what :func:`mnist.main` does."""
    _check(options)
    with command.folder(options.out), process_group(options.device) as first:
        return _run(load_cifar(options.data, options.data_dir), options, first)


def _check(options: Options) -> None:
    """Refuse options before anything is loaded or written."""
    ranges.check(options)
    if options.shrink and options.compile:
        raise ValueError("Expected shrink without compile, which would compile anew after each shrinking.")
    if options.depth % 6 != 4:
        raise ValueError(f"Expected depth of 10, 16, 22, 28, ..., but got {options.depth}.")
    if options.resume:
        checkpoint.require(options.out / "checkpoint.pt")
        command.advise(f"{options.out / 'checkpoint.pt'} is as it was, and the same command goes on from there")
    estimator_options(options.family, options.estimator)
    init_active_prob((KEEP_RATE,), options.family, _family_options(options))


def _family_options(options: Options) -> dict[str, float]:
    beta = SHARPNESS.get(options.family) if options.beta is None else options.beta
    return family_options(options.family, beta, options.epsilon)


def fingerprint(options: Options) -> dict[str, Any]:
    """What a checkpoint and the run that resumes it must agree in."""
    left_out = ("data_dir", "device", "compile", "out", "resume")
    values = {name: value for name, value in asdict(options).items() if name not in left_out}
    return {**values, "device": torch.device(options.device).type}


def _run(images: Cifar, options: Options, first: bool) -> dict[str, Any]:
    run = Run(images, options)
    path = options.out / "checkpoint.pt"

    def show(entry: dict[str, Any]) -> str:
        share = entry["expected_macs"] / run.cost.total_macs
        return f"error {entry['test_error_percent']:.2f} %, expected MACs {100 * share:.1f} %"

    progress = Progress(run, path, fingerprint(options), first)
    entries = ("loss", "seconds", *MEASURES)
    for entry in progress.epochs(options.epochs, entries, show, path if options.resume else None):
        start = time.perf_counter()
        entry["loss"] = run.train_epoch()
        entry["seconds"] = time.perf_counter() - start
        entry.update(run.measure())
    history = progress.history
    small = run.compacted()
    metrics = {
        **{key: value for key, value in history[-1].items() if key != "epoch"},
        "best_test_error_percent": min(entry["test_error_percent"] for entry in history),
        "weights": run.cost.total_weights,
        "macs": run.cost.total_macs,
        "certificate": small.certificate,
        "history": history,
    }
    if first:
        small.save(options.out / "pruned")
        plot_training(history, run.cost.total_macs, run.sites, options.out / "training.png")
        checkpoint.write_json(options.out / "metrics.json", metrics)
        print(f"test error, final epoch   {metrics['test_error_percent']:.2f} %")
        print(f"hidden maps left          {'-'.join(map(str, metrics['architecture']))}")
        print(f"weights left              {metrics['weights_left']:,} of {metrics['weights']:,}")
        print(f"multiply-adds left        {metrics['macs_left']:,} of {metrics['macs']:,}")
        print(f"compacted, differs by     {metrics['certificate']:.1e}")
        print(f"seconds, last epoch       {metrics['seconds']:.0f}")
    return metrics


if __name__ == "__main__":
    command.run(main, Options, __doc__)
