"""The loop over the epochs of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from pyro_l0.training.checkpoint import Checkpoint

__all__ = ["Trainable", "check_finite", "epochs"]


class Trainable(Protocol):
    """A run that :func:`~pyro_l0.training.epochs` trains has these members."""

    history: list[dict[str, Any]]  # an entry for every epoch so far; a part of the state

    @property
    def is_done(self) -> bool:
        """Whether all epochs are over."""

    def advance(self) -> dict[str, Any]:
        """Train for an epoch and return its history entry, values by name."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, except random states."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""


def epochs(run: Trainable, checkpoint: Checkpoint | None = None) -> Iterator[dict[str, Any]]:
    """Train a run to its end, and write a checkpoint after every epoch.

    If the caller stops at an epoch's entry, that epoch is not written, and a resumed run repeats it.

    Args:
        run: the run. To resume, first call ``checkpoint.load(run.load_state_dict)``.
        checkpoint: the file; None for none.

    Yields:
        The history entry of each epoch, for instance to print it.

    Example:
        >>> class Halving:
        ...     def __init__(self):
        ...         self.x, self.history = 1.0, []
        ...
        ...     is_done = property(lambda self: len(self.history) == 2)
        ...
        ...     def advance(self):
        ...         self.x /= 2
        ...         return {"x": self.x}
        >>> list(epochs(Halving()))
        [{'x': 0.5}, {'x': 0.25}]
    """
    while not run.is_done:
        entry = run.advance()
        run.history.append(entry)
        yield entry
        if checkpoint is not None:
            checkpoint.save(run.state_dict())


def check_finite(epoch: int, loss: float, *modules: nn.Module) -> None:
    """Stop a training that has diverged, before its state replaces a good checkpoint."""
    broken = [name for x in modules for name, p in x.named_parameters() if not bool(p.isfinite().all())]
    if math.isfinite(loss) and not broken:
        return
    what = f"weights are not after epoch {epoch}: {', '.join(broken[:3])}"
    if not math.isfinite(loss):
        what = f"the mean loss of epoch {epoch} is {loss}"
    raise FloatingPointError(
        f"Expected the training to stay finite, but {what}. Take a smaller learning rate, or look for a gradient that "
        "is not finite; a checkpoint holds the epoch before."
    )
