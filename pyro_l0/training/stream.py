"""Loaders without a length, and the state of a loader: its random numbers, and its position in a pass."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Generator

__all__ = ["Stream", "generators", "random_state", "set_random_state", "some_batches"]

_KEPT = 20  # batches of an iterator that can't be begun anew


class Stream:
    """Epochs of so many batches: each continues where the last one ended, and at the end the loader begins anew.

    The loader needs no length, and may be an iterator, which can't be begun anew.
    """

    def __init__(self, loader: Iterable[object], length: int) -> None:
        self.loader, self._length = loader, length
        self._pass: Iterator[object] | None = None
        self._begun: dict[str, Any] = {}  # the random numbers when the pass began
        self._taken = 0  # batches of the pass
        self._first: list[object] = []  # of an iterator, seen before the training
        self._last: deque[object] = deque(maxlen=_KEPT)  # of an iterator

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[object]:
        for _ in range(self._length):
            yield self._next()

    def _next(self) -> object:
        batch = self._first.pop() if self._first else self._read()
        self._taken += 1
        if isinstance(self.loader, Iterator):
            self._last.append(batch)
        return batch

    def _read(self) -> object:
        if self._pass is None:
            self._begin()
        assert self._pass is not None
        for batch in self._pass:
            return batch
        taken = self._taken
        if taken and not isinstance(self.loader, Iterator):
            self._begin()
            return self._read()
        raise ValueError(
            f"Expected a loader that gives batches again and again, but it ended after {taken}; give one that can be "
            "begun anew, such as a DataLoader or a list of batches."
        )

    def _begin(self) -> None:
        self._begun, self._taken, self._pass = random_state(self.loader), 0, iter(self.loader)

    def some(self) -> Iterator[object]:
        """Batches for something else than the training: another pass, or of an iterator the last ones, or the next."""
        if not isinstance(self.loader, Iterator):
            return iter(self.loader)
        if not self._last and not self._first:
            self._first.append(self._read())
        return iter(list(self._last or self._first))

    def state_dict(self) -> dict[str, Any]:
        """The position in the pass."""
        return {"taken": self._taken, "begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from :meth:`state_dict`, past the batches that were taken; this changes the random numbers."""
        if state["taken"]:
            set_random_state(state["begun"], self.loader, device)
            self._begin()
        for _ in range(state["taken"]):
            self._next()


def some_batches(loader: Iterable[object]) -> Iterator[object]:
    """Batches for something else than the training."""
    return loader.some() if isinstance(loader, Stream) else iter(loader)


# ------------------------------------------------------------ random numbers


def generators(loader: Iterable[object]) -> list[Generator]:
    """The loader's own generators."""
    if isinstance(loader, Stream):
        loader = loader.loader
    holders = [loader, getattr(loader, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return [generator for generator in found if isinstance(generator, Generator)]


def random_state(loader: Iterable[object]) -> dict[str, Any]:
    """The states of all random number generators, the loader's own among them, and a stream's position."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  # what augmentations may use
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "loader": [generator.get_state() for generator in generators(loader)],
        "stream": loader.state_dict() if isinstance(loader, Stream) else None,
    }


def set_random_state(state: Mapping[str, Any], loader: Iterable[object], device: torch.device) -> None:
    """Go back to a :func:`random_state`."""
    if isinstance(loader, Stream):
        loader.load_state_dict(state["stream"], device)
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    for generator, own in zip(generators(loader), state["loader"], strict=True):
        generator.set_state(own)
