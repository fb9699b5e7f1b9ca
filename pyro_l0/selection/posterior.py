"""The posterior of a regression: active probabilities, moments, the evidence and joint draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

__all__ = ["MOST_ERROR", "Draws", "SelectionPosterior"]

# Largest useful standard error of an active probability.
MOST_ERROR = 0.05


class Draws(NamedTuple):
    """N joint draws of a posterior, in the units of its problem.

    Attributes:
        coefficients: sparse, shape ``(N, p K)``, with the K coefficients of a feature side by side. Those of closed
            gates are not stored, so the stored entries show the gates.
        intercept: shape ``(N, K)``; 0 if the problem has none.
        slab_scale: shape ``(N,)``, also if it is known.
        noise_scale: shape ``(N,)``, also if it is known; NaN for a family without noise.
        rate: P(z = 1), shape ``(N,)``, also if it is known.
    """

    coefficients: csr_array
    intercept: NDArray[np.float64]
    slab_scale: NDArray[np.float64]
    noise_scale: NDArray[np.float64]
    rate: NDArray[np.float64]


@dataclass(frozen=True)
class SelectionPosterior:
    """The posterior of a regression with spike-and-slab coefficients, in the units of its problem.

    Attributes:
        active_probs: P(z = 1 | y) of every gate, shape ``(G,)``.
        mean: means of the coefficients, shape ``(p, K)``.
        sd: standard deviations of the coefficients, shape ``(p, K)``.
        log_evidence: log p(y) in nats, or its estimate.
        draws: joint draws.
        standard_error: standard errors of ``active_probs``, from the differences of chains and the weights of their
            draws, shape ``(G,)``; None without chains.
    """

    active_probs: NDArray[np.float64]
    mean: NDArray[np.float64]
    sd: NDArray[np.float64]
    log_evidence: float
    draws: Draws
    standard_error: NDArray[np.float64] | None = None

    @staticmethod
    def of(
        active_probs: Tensor,
        moments: tuple[Tensor, Tensor],
        log_evidence: float,
        draws: Draws,
        standard_error: Tensor | None = None,
    ) -> SelectionPosterior:
        """From tensors, and means of the coefficients and of their squares."""
        mean, square = moments
        sd = (square - mean.square()).clamp(min=0).sqrt()
        error = None if standard_error is None else standard_error.numpy()
        return SelectionPosterior(active_probs.numpy(), mean.numpy(), sd.numpy(), log_evidence, draws, error)
