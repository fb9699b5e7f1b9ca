"""What every method finds: inclusion probabilities, moments, the evidence and joint draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

__all__ = ["MOST_ERROR", "Draws", "SelectionPosterior"]

# Standard error of an inclusion probability, beyond which it is of no use.
MOST_ERROR = 0.05


class Draws(NamedTuple):
    """Joint draws of a posterior, in the units of the problem.

    Attributes:
        coefficients: beta, shape ``(N, p K)`` with the K coefficients of a feature side by side. A closed gate's are
            not stored, so that what is stored tells the gates.
        intercept: shape ``(N, K)``; 0 where the problem has none.
        slab_scale: shape ``(N,)``, also where it is known.
        noise_scale: shape ``(N,)``, also where it is known; NaN for a family that has none.
        rate: P(z = 1), shape ``(N,)``, also where it is known.
    """

    coefficients: csr_array
    intercept: NDArray[np.float64]
    slab_scale: NDArray[np.float64]
    noise_scale: NDArray[np.float64]
    rate: NDArray[np.float64]


@dataclass(frozen=True)
class SelectionPosterior:
    """The posterior of a regression with spike-and-slab coefficients, in the units of the problem.

    Attributes:
        inclusion: P(z = 1 | y) of every feature, shape ``(p,)``.
        mean: of the coefficients, shape ``(p, K)``.
        sd: their standard deviations, shape ``(p, K)``.
        log_evidence: log p(y), or its estimate.
        draws: joint draws.
        standard_error: of the inclusion probabilities, from the differences of chains and from the weights that their
            draws are given, shape ``(p,)``; None where there are no chains.
    """

    inclusion: NDArray[np.float64]
    mean: NDArray[np.float64]
    sd: NDArray[np.float64]
    log_evidence: float
    draws: Draws
    standard_error: NDArray[np.float64] | None = None
