"""Random numbers that leave those of the rest of a program as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyro
import torch

__all__ = ["generators_kept", "seeded"]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave all global random number generators as they were before."""
    state = pyro.util.get_rng_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        yield
    pyro.util.set_rng_state(state)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from a seed, and leave the generators as they were; None draws from these."""
    if seed is None:
        yield
        return
    with generators_kept():
        torch.manual_seed(seed)
        yield
