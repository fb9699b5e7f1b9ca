"""Prune a wide residual network on CIFAR-10 while it trains (section 4.2 of the L0 paper).

A gate per hidden feature map of every residual block; SGD with Nesterov momentum, 200 epochs, steps at 60, 120 and 160,
crops and flips, batches of 128, weight decay 5e-4, divided by 0.7 on the convolutions that read gated maps.
``--family`` and ``--beta`` are those of the paper on mixtures, and ``--network`` has the rows without gates of both
papers' tables: docs/papers.md has the commands.

Gates have a learning rate of their own: at the weights' rate of 0.1 they hardly move. The defaults are for the paper's
WRN-28-10. In narrow networks a map has fewer weights to pay for and more noise at its gate: for a width of 1 take
``--lam 0.3 --gate-learning-rate 1``; at 30 noise closes half of the maps in the first epoch, see
docs/lab/results_tables.md.

Writes to ``--out``: ``metrics.json``, ``training.png`` (error on test and training images, open maps and expected
multiply-adds over the epochs, Figure 4 of the paper), the compacted network and ``checkpoint.pt``, from which
``--resume`` continues.
"""

from __future__ import annotations

from common import command

if __name__ == "__main__":  # before torch, whose import takes seconds
    command.answer_signals()

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.cifar import NUM_CLASSES, Name, load_cifar
from common.data import Images
from common.gated_run import GatedRun, train
from common.networks import FAMILIES, Classifier, FamilyName, family_options, init_active_prob
from common.plots import plot_history
from common.residual import ResidualNetwork, wide_resnet
from common.sweep import write_json
from pyro_l0 import HardConcrete
from pyro_l0.compaction import Compacted, Shrinker, compact
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import NetworkCost, name_gates, square_norms
from pyro_l0.training import average_gradients, process_group
from pyro_l0.training.processes import processes, rank

__all__ = ["Options", "PlainRun", "Run", "main"]

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
STEPS = (0.3, 0.6, 0.8)  # of the epochs: 60, 120 and 160 of 200
# P(z != 0) up to which a map leaves. The slope of a price falls with it, and with SGD closed gates stay above 0.01.
THRESHOLD = 0.05
KEEP_RATE = 0.7  # of the hidden maps at the start: log alpha = logit(0.7), P(z != 0) = 0.917 for the hard concrete


@dataclass(frozen=True)
class Options:
    """Command line of this example.

    Attributes:
        data: which of the two sets.
        data_dir: folder with the batches; downloaded with a hash check if not given.
        network: a wide residual network with gates, with dropout of 0.3 or nothing instead; or a residual network (He
            et al. 2016), which has no width.
        depth: layers of the network.
        width: factor on its maps.
        family: family of the posterior gates.
        beta: the hard concrete's temperature or the mixtures' sharpness; the family's default if not given.
        lam: price of one open weight in nats; the paper's are 0.001 and 0.002.
        prior_active_prob: P(z != 0) under the gates' prior, whose KL joins the price (Eq. 21); none if not given.
        epochs: passes over the training images.
        batch_size: images per step, over all processes.
        learning_rate: SGD's step for the weights, on the mean loss.
        gate_learning_rate: SGD's step for the gates, on the mean loss.
        seed: seed of everything random.
        device: where to train; the images lie there too.
        amp: bfloat16 where autocast takes it; CPUs without AVX-512 emulate it, many times slower than float32.
        shrink: take maps whose gates are closed for good out of the network after each epoch.
        max_steps: stop an epoch early, to try things out.
        hold_out: set so many training images aside and report on them instead of the test images.
        out: folder for what this run writes.
        resume: continue from the checkpoint.
    """

    data: Name = "cifar10"
    data_dir: Path | None = None
    network: Literal["gated", "dropout", "dense", "residual"] = "gated"
    depth: int = 28
    width: int = 10
    family: FamilyName = "hard_concrete"
    beta: float | None = None
    lam: float = 0.001
    prior_active_prob: float | None = None
    epochs: int = 200
    batch_size: int = 128
    learning_rate: float = 0.1
    gate_learning_rate: float = 30.0
    seed: int = 1
    device: str = "cpu"
    amp: bool = False
    shrink: bool = False
    max_steps: int | None = None
    hold_out: int = 0
    out: Path = field(default=Path("runs/cifar"))
    resume: bool = False


class CifarRun(GatedRun):
    """One training run; the images lie on the device as bytes."""

    model: Classifier
    loss: nn.Module
    schedule: torch.optim.lr_scheduler.MultiStepLR
    moments = ("momentum_buffer",)
    test_batch = 500

    def __init__(self, images: Images, options: Options) -> None:
        super().__init__(images, options)
        # One copy padded once; every epoch cuts its crops out of it.
        self.padded = F.pad(self.train_x, (4, 4, 4, 4))
        self.pixel_mean, self.std = (255 * torch.tensor(x, device=self.device).view(3, 1, 1) for x in (MEAN, STD))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images with random crops and flips, and their classes."""
        offset = torch.randint(0, 9, (2, len(index)), device=self.device)
        steps = torch.arange(32, device=self.device)
        flip = torch.rand(len(index), device=self.device) < 0.5
        columns = torch.where(flip[:, None], 31 - steps, steps) + offset[1, :, None]
        rows = steps + offset[0, :, None]
        x = self.padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return self.inputs(x), self.train_y[index]

    def inputs(self, x: Tensor) -> Tensor:
        """Normalised images."""
        return (x.float() - self.pixel_mean) / self.std

    def train_epoch(self) -> float:
        """One pass over the training images; the mean loss per image, in nats."""
        self.net.train()
        total, wrong = torch.zeros(2, device=self.device)
        batches = self.shuffled()[: self.options.max_steps]
        for index in batches:
            self.optimiser.zero_grad()
            batch = self.batch(index)
            with torch.autocast(self.device.type, torch.bfloat16) if self.options.amp else nullcontext():
                loss = self.loss(*batch) / len(self.train_x)
            loss.backward()
            average_gradients(self.loss.parameters())
            self.update()
            total += loss.detach()
            wrong += (self.model.logits.argmax(-1) != batch[1]).sum()
        self.schedule.step()
        self.steps += len(batches)
        self.train_error = 100 * self.mean(wrong, sum(map(len, batches)))
        return self.mean(total, len(batches))

    def update(self) -> None:
        """Move weights and gates along their gradients."""
        self.optimiser.step()

    def measure(self) -> dict[str, Any]:
        """Errors on test images and, with crops, flips and noise, on those of the epoch; and what is left."""
        return {**super().measure(), "train_error_percent": self.train_error}


class Run(CifarRun):
    """A wide residual network with gates."""

    entries = (*GatedRun.entries, "train_error_percent")

    def __init__(self, images: Images, options: Options) -> None:
        super().__init__(images, options)
        prior = HardConcrete.from_active_prob(options.prior_active_prob or 0.5)
        self.net = net = wide_resnet(options.depth, options.width, prior, NUM_CLASSES[options.data]).to(self.device)
        example = torch.zeros(1, 3, 32, 32, device=self.device)
        self.model = Classifier(net, len(self.train_x))
        sites = list(name_gates(self.model))
        self.cost = NetworkCost(net, example)
        self.group_sizes = dict(self.cost.filter_sizes)
        self.elbo = L0_ELBO(
            "l0" if options.prior_active_prob is None else "free_energy",
            lam=dict.fromkeys(sites, options.lam),
            group_size=self.group_sizes,
            # Eq. 15: the gated weights' decay is expected, and divided by 0.7; the others' is the optimiser's.
            weight_decay=5e-4 / 0.7 * len(self.train_x),
            square_norm=square_norms(net, example),
            estimator="arm" if options.family == "bernoulli" else None,
        )
        (start,) = init_active_prob((KEEP_RATE,), options.family, options.beta)
        fixed = family_options(options.family, options.beta)
        self.guide = AutoGate(self.model, FAMILIES[options.family], start, family_options=fixed)
        self.loss = self.elbo(self.model, self.guide)
        self.loss(self.inputs(self.train_x[:2]), self.train_y[:2])  # makes the guide's parameters
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
        self.schedule = falling(self.optimiser, options.epochs)
        if options.shrink:
            self.shrinker = Shrinker(net, self.guide, example, self.optimiser, self.elbo, threshold=THRESHOLD)

    def compacted(self) -> Compacted:
        """The network under its test gates as a smaller plain network."""
        images = self.inputs(self.test_x[:16])
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


class PlainRun(CifarRun):
    """A network without gates, with the same data, schedule and weight decay."""

    entries = ("loss", "test_error_percent", "train_error_percent", "macs_left", "expected_macs")

    def __init__(self, images: Images, options: Options) -> None:
        super().__init__(images, options)
        classes = NUM_CLASSES[options.data]
        if options.network == "residual":
            blocks = (options.depth - 2) // 6
            if options.depth != 6 * blocks + 2:
                raise ValueError(f"Expected depth of 14, 20, ..., 110 for a residual network, but got {options.depth}.")
            net: nn.Module = ResidualNetwork(3, [16] * blocks + [32] * blocks + [64] * blocks, classes=classes)
        else:
            net = wide_resnet(options.depth, options.width, None, classes)
            for block in (module for module in net if hasattr(module, "gate")):
                block.gate = nn.Dropout(1 - KEEP_RATE if options.network == "dropout" else 0.0)
        self.net = net.to(self.device)
        self.model = Classifier(self.net, len(self.train_x))
        self.loss = L0_ELBO("l0")(self.model, lambda *batch: None)  # no gates: the likelihood alone
        self.cost = NetworkCost(self.net, torch.zeros(1, 3, 32, 32, device=self.device))
        self.group_sizes = {}
        self.optimiser = torch.optim.SGD(
            self.net.parameters(), options.learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.schedule = falling(self.optimiser, options.epochs)

    def measure(self) -> dict[str, Any]:
        """Errors, and the costs of the whole network."""
        errors = {"test_error_percent": self.error(self.net), "train_error_percent": self.train_error}
        macs = self.cost.total_macs
        return {**errors, "weights_left": self.cost.total_weights, "macs_left": macs, "expected_macs": macs}

    def parts(self) -> dict[str, Any]:
        """What has a ``state_dict``, by its name in a checkpoint."""
        return {"net": self.net, "optimiser": self.optimiser, "schedule": self.schedule}


def falling(optimiser: torch.optim.Optimizer, epochs: int) -> torch.optim.lr_scheduler.MultiStepLR:
    """The papers' steps of the learning rates, for so many epochs."""
    milestones = [round(share * epochs) for share in STEPS]
    return torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones, gamma=0.2)


def main(options: Options) -> dict[str, Any]:
    """Train, write the files, print a table; returns the metrics."""
    command.check(options)
    family_options(options.family, options.beta)
    of_gates = ("family", "beta", "lam", "prior_active_prob", "gate_learning_rate", "shrink")
    given = [name for name in of_gates if getattr(options, name) != getattr(Options, name)]
    if options.network != "gated" and given:
        raise ValueError(f"Expected no {given[0]} with network={options.network!r}, which has no gates.")
    path = options.out / "checkpoint.pt"
    if options.resume:
        command.require_checkpoint(path)
    with command.folder(options.out), process_group(options.device) as first:
        images = load_cifar(options.data_dir, options.data)
        make = Run if options.network == "gated" else PlainRun
        run = make(images.hold_out(options.hold_out) if options.hold_out else images, options)
        if processes() > 1:
            torch.manual_seed(options.seed + rank())
        left_out = ("data_dir", "out", "resume")
        fingerprint = {name: value for name, value in asdict(options).items() if name not in left_out}
        fingerprint["device"] = run.device.type
        train(run, path, fingerprint, options.resume, first)
        metrics = {
            **{key: value for key, value in run.history[-1].items() if key != "epoch"},
            "best_test_error_percent": min(entry["test_error_percent"] for entry in run.history),
            "weights": run.cost.total_weights,
            "macs": run.cost.total_macs,
            "history": run.history,
        }
        small = run.compacted() if isinstance(run, Run) else None
        if small is not None:
            metrics["certificate"] = small.certificate
        if not first:
            return metrics
        print(f"test error, final epoch   {metrics['test_error_percent']:.2f} %")
        print(f"training error            {metrics['train_error_percent']:.2f} %")
        print(f"weights left              {metrics['weights_left']:,} of {metrics['weights']:,}")
        print(f"multiply-adds left        {metrics['macs_left']:,} of {metrics['macs']:,}")
        if small is not None:
            small.save(options.out / "pruned")
            print(f"hidden maps left          {'-'.join(map(str, metrics['architecture']))}")
            print(f"compacted, differs by     {metrics['certificate']:.1e}")
        plot_history(run.history, run.cost.total_macs, list(run.group_sizes), options.out / "training.png")
        write_json(options.out / "metrics.json", metrics)
        return metrics


if __name__ == "__main__":
    command.run(main, Options, __doc__)
