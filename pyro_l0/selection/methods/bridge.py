"""The evidence from draws of gates, by bridge sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["bridged_evidence"]

_ROUNDS = 100


def bridged_evidence(
    log_marginal: Callable[[Tensor], Tensor], drawn: Tensor, logits: Tensor, generator: torch.Generator
) -> float:
    """log p(y) from draws of the gates and where each would go next.

    The bridge (Meng and Wong 1996, eq. 4.1) leads to a distribution that is known and close: a mixture with a part for
    each draw, in which every gate is independently what it would be given the others of that draw.

    Args:
        log_marginal: log p(y, z) of gates, bool, shape ``(S, p)`` to ``(S,)``.
        drawn: from the posterior, bool, shape ``(N, p)``; those of the mixture have to be others.
        logits: log odds of each gate given the others in M draws, shape ``(M, p)``.
        generator: of the random numbers.
    """
    part = torch.randint(len(logits), (len(drawn),), generator=generator)
    proposed = torch.rand(drawn.shape, generator=generator, dtype=logits.dtype) < torch.sigmoid(logits[part])
    both = torch.cat([drawn, proposed])
    # log p(y, z) / q(z), of draws and of proposals.
    log_ratio = log_marginal(both) - _log_mixture(both, logits)
    from_posterior, from_mixture = log_ratio.split(len(drawn))
    log_evidence = float(from_mixture.logsumexp(0)) - math.log(len(drawn))
    for _ in range(_ROUNDS):
        before = log_evidence
        numerator = F.logsigmoid(from_mixture - log_evidence).logsumexp(0)
        denominator = F.logsigmoid(log_evidence - from_posterior).logsumexp(0)
        log_evidence = before + float(numerator - denominator)
        if abs(log_evidence - before) < 1e-6:
            break
    return log_evidence


def _log_mixture(z: Tensor, logits: Tensor) -> Tensor:
    """Log probability of gates, shape ``(S,)``, by parts of equal weight."""
    closed = F.logsigmoid(-logits).sum(1)
    each = [(part.to(logits) @ logits.T + closed).logsumexp(1) for part in z.split(256)]
    return torch.cat(each) - math.log(len(logits))
