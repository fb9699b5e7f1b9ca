"""The trainings of bench_gpu.py: WRN-28-10 on CIFAR-10 at two prices beside dropout, in pieces that resume."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkpoint
from cifar import Cifar, load_cifar
from cifar_wrn import STEPS, Options, Run
from processes import random_states, set_random_state
from pyro_l0.nn import Gate
from wide_resnet import wide_resnet

__all__ = ["cifar_units"]

RUNS: dict[str, float | None] = {"λ = 0.001": 0.001, "λ = 0.002": 0.002, "dropout 0.3": None}


class Training(Protocol):
    """What a run of epochs needs."""

    def train_epoch(self) -> float:
        """One pass over the training images."""

    def measure(self) -> dict[str, Any]:
        """Test error and more."""

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from it."""


class DropoutRun:
    """The network with dropout in the place of its gates; data, schedule and weight decay as with gates."""

    def __init__(self, images: Cifar, options: Options) -> None:
        self.data = Run(images, options)  # for its images and batches
        self.options = options
        torch.manual_seed(options.seed)
        self.net = wide_resnet(options.depth, options.width).to(options.device)
        for module in list(self.net.modules()):
            for name, child in module.named_children():
                if isinstance(child, Gate):
                    setattr(module, name, nn.Dropout(0.3))
        self.optimiser = torch.optim.SGD(
            self.net.parameters(), options.learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        milestones = [round(share * options.epochs) for share in STEPS]
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimiser, milestones, gamma=0.2)

    def train_epoch(self) -> float:
        """One pass over the training images; the mean loss."""
        self.net.train()
        device = self.data.device
        total = torch.zeros((), device=device)
        batches = torch.randperm(len(self.data.train_x)).to(device).split(self.options.batch_size)
        batches = batches[: self.options.max_steps]
        for index in batches:
            self.optimiser.zero_grad()
            x, y = self.data._batch(index, augment=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.options.amp):
                loss = F.cross_entropy(self.net(x), y)
            loss.backward()
            self.optimiser.step()
            total += loss.detach()
        self.schedule.step()
        return float(total) / len(batches)

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Test error."""
        self.net.eval()
        x, y = self.data.test_x, self.data.test_y
        found: list[Tensor] = [self.net(self.data._normalised(part)).argmax(-1) for part in x.split(500)]
        wrong = float((torch.cat(found) != y).float().mean())
        return {"test_error_percent": 100 * wrong, "macs_left": self.data.cost.total_macs}

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        parts = {"net": self.net, "optimiser": self.optimiser, "schedule": self.schedule}
        return {**{name: part.state_dict() for name, part in parts.items()}, "random": random_states(self.data.device)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.net.load_state_dict(state["net"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])
        set_random_state(state["random"], self.data.device)


def cifar_units(
    options: argparse.Namespace, found: dict[str, Any], deadline: float
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One unit per training, which gives None where it has to go on in another piece.

    Args:
        options: the command line.
        found: what was measured; holds the number of epochs once it is known.
        deadline: of ``time.monotonic``.
    """
    if options.tiny:
        x, y = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8), torch.arange(64) % 10
        images = Cifar(x, y, x[:500], y[:500], 10)
    else:
        images = load_cifar("cifar10", options.data_dir)

    def make(name: str, epochs: int) -> Training:
        lam = RUNS[name]
        settings = Options(
            depth=10 if options.tiny else 28,
            width=1 if options.tiny else 10,
            epochs=epochs,
            device=options.device,
            amp=not options.tiny,
            lam=0.001 if lam is None else lam,
            batch_size=32 if options.tiny else 128,
        )
        return DropoutRun(images, settings) if lam is None else Run(images, settings)

    def count() -> int:
        """Epochs that all trainings together have time for, by the second epoch of one."""
        run = make("λ = 0.001", 200)
        run.train_epoch()
        start = time.perf_counter()
        run.train_epoch()
        seconds = time.perf_counter() - start
        return 2 if options.tiny else max(10, int(60 * options.training_minutes / len(RUNS) / seconds))

    yield "epochs", count

    for name in RUNS:
        yield name, lambda name=name: _train(make(name, found["epochs"]), name, found["epochs"], options.out, deadline)


def _train(run: Training, name: str, epochs: int, out: Path, deadline: float) -> dict[str, Any] | None:
    """Train to the end or to the deadline, with a checkpoint after every epoch."""
    path = out / f"{name.replace(' ', '')}.pt"
    mark = {"name": name, "epochs": epochs, "run": asdict(run.options) if isinstance(run, DropoutRun) else name}
    mark = {key: str(value) for key, value in mark.items()}
    history: list[dict[str, Any]] = []
    if path.is_file():
        state = checkpoint.load(path, mark)
        run.load_state(state["run"])
        history = state["history"]
    while len(history) < epochs:
        start = time.perf_counter()
        loss = run.train_epoch()
        seconds = time.perf_counter() - start
        measured = run.measure()
        history.append({"loss": loss, "seconds": seconds, **measured})
        checkpoint.save(path, {"fingerprint": mark, "run": run.state(), "history": history})
        print(f"{name}: epoch {len(history)} of {epochs}, error {measured['test_error_percent']:.2f} %", flush=True)
        if len(history) < epochs and time.monotonic() > deadline:
            return None
    last = history[-1]
    seconds = sum(entry["seconds"] for entry in history) / epochs
    return {"epochs": epochs, "error": last["test_error_percent"], "macs": last["macs_left"], "seconds": seconds}
