"""Whether inclusion probabilities can be trusted: one error, and one threshold, of all results."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MOST_ERROR", "Trust", "doubts", "standard_error"]

MOST_ERROR = 0.05  # largest Monte Carlo standard error of an inclusion probability in a result that is ok


class Trust:
    """What a result says of its own inclusion probabilities.

    Attributes:
        error: their largest Monte Carlo standard error, or each; 0 of a sum over all gates, NaN where it is unknown.
        problems: what is wrong or unknown, in sentences; empty if nothing was found.
    """

    error: float | NDArray[np.float64]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the error is at most .05, and nothing else was found to be wrong."""
        return bool(np.all(self.error <= MOST_ERROR)) and not self.problems


def doubts(error: float, remedy: str) -> tuple[str, ...]:
    """A sentence on an error that is unknown or too large, with what to do; none if it is small."""
    if error <= MOST_ERROR:
        return ()
    said = "is unknown" if math.isnan(error) else f"is {error:.2f}, where at most {MOST_ERROR} is accepted"
    return (f"The standard error of an inclusion probability {said}: {remedy}",)


def standard_error(record: Tensor) -> Tensor:
    """Of the mean of gates or of their probabilities, shape ``(rounds, chains, G)``: by how much chains differ.

    It is larger where all of them drift: where halves differ more, over all gates, than chains explain.
    """
    of_chains = record.mean(0).var(0) / record.shape[1]
    of_halves = torch.stack([half.mean((0, 1)) for half in record.chunk(2)]).var(0) / 2
    drift = of_halves.sum() / of_chains.sum().clamp(min=torch.finfo(record.dtype).tiny)
    return (of_chains * drift.clamp(min=1.0)).sqrt()
