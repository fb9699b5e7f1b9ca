"""Times of steps that take turns in one process, so that load which comes and goes falls on all of them."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Step = Callable[[], Any]


def options_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the text at the head of a script."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def seconds_in_turn(
    steps: Mapping[str, Step],
    rounds: int,
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    device: str = "cpu",
) -> dict[str, list[float]]:
    """Seconds of each step, by round, after a round that warms up; each round starts with another step."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            wait()
            start = clock()
            for _ in range(repeats):
                steps[name]()
            wait()
            found[name].append((clock() - start) / repeats)
    return {name: values[1:] for name, values in found.items()}


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def table_head(*names: str) -> None:
    """The first two lines of a table in Markdown."""
    table_row(*names)
    table_row(*["---"] * len(names))


def table_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
