"""The trainings of bench_gpu.py: WRN-28-10 on CIFAR-10 at two prices beside dropout, in pieces that resume."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cifar_wrn import Options, Run
from common.cifar import load_cifar
from common.data import Images
from pyro_l0.training import Checkpoint
from tests.bench.wrn.runs import DropoutRun

__all__ = ["cifar_units"]

RUNS: dict[str, float | None] = {"λ = 0.001": 0.001, "λ = 0.002": 0.002, "dropout 0.3": None}


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
        images = Images(x, y, x[:500], y[:500], (3, 32, 32))
    else:
        images = load_cifar(options.data_dir)

    def make(name: str, epochs: int) -> Run:
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


def _train(run: Run, name: str, epochs: int, out: Path, deadline: float) -> dict[str, Any] | None:
    """Train to the end or to the deadline, with a checkpoint after every epoch."""
    described = {"name": name, "epochs": epochs, "run": str(asdict(run.options))}
    checkpoint = Checkpoint(out / f"{name.replace(' ', '')}.pt", described)
    checkpoint.load(run.load_state_dict, run.device)
    history = run.history
    while not run.is_done:
        history.append(run.advance())
        checkpoint.save(run.state_dict())
        print(f"{name}: epoch {len(history)} of {epochs}, error {history[-1]['test_error_percent']:.2f} %", flush=True)
        if not run.is_done and time.monotonic() > deadline:
            return None
    last = history[-1]
    seconds = sum(entry["seconds"] for entry in history) / epochs
    return {"epochs": epochs, "error": last["test_error_percent"], "macs": last["macs_left"], "seconds": seconds}
