"""Tempered chains of a problem's gates and scales, what is taken from the states that they visit, and the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.tempered_gibbs import GibbsRun, ScaleWalk, sampled_target
from pyro_l0.selection.problem import Problem

__all__ = ["Effort", "chain_evidence", "resampled", "rescaled", "sampled_walk"]

_WARM_UP = 0.3
# Open gates that a chain starts with on average, at most.
_START = 5.0
_BRIDGE, _ROUNDS = 1000, 100  # draws that the evidence is estimated from, and rounds of the estimate


class Effort(NamedTuple):
    """Number and length of chains."""

    chains: int  # side by side
    flips: int  # of each chain, the warm-up included
    every: int  # flips from one proposal of a scale to the next

    @staticmethod
    def of(p: int) -> Effort:
        """For p features; beyond some hundred, a flip takes time in proportion to p."""
        if p <= 50:
            return Effort(64, 600, 2)
        return Effort(24, 600, 3) if p <= 2000 else Effort(12, 1000, 3)


def sampled_walk(walk: ScaleWalk, gates: int, flips: int, generator: torch.Generator) -> GibbsRun:
    """Chains that start from gates of the prior, but few open ones."""
    chains = len(walk.hyper)
    probs = walk.prior.active_prob.expand(gates)
    probs = probs * (_START / probs.sum()).clamp(max=1.0)
    z = torch.bernoulli(probs.expand(chains, -1), generator=generator)
    return sampled_target(walk, z, probs, flips=flips, warm_up=int(_WARM_UP * flips), generator=generator)


def rescaled(
    problem: Problem, active_probs: Tensor, share: Tensor, moments: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Moments ``(p, K)`` over draws in which each gate is open for a share, made those for its active probability."""
    change = problem.switched(active_probs / share.clamp(min=torch.finfo(share.dtype).tiny))[:, None]
    return moments[0] * change, moments[1] * change


def resampled(weights: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Indices of draws by weight, at equal distances along the chains, in random order."""
    offset = torch.rand(1, generator=generator, dtype=weights.dtype)
    below = weights.cumsum(0)
    at = (torch.arange(number, dtype=weights.dtype) + offset) / number * below[-1]
    found = torch.searchsorted(below, at).clamp(max=len(weights) - 1)
    return found[torch.randperm(number, generator=generator)]


def chain_evidence(
    log_marginal: Callable[[Tensor], Tensor], walk: ScaleWalk, run: GibbsRun, generator: torch.Generator
) -> float:
    """log p(y), by a bridge from where one half of the chains would go next to where the other half has been.

    The bridge (Meng and Wong 1996, eq. 4.1) leads to a distribution that is known and close: a mixture with a part for
    each draw of one half, in which every gate is independently what it would be given the others of that draw.
    ``log_marginal`` is log p(y, z) of gates, shape ``(S, p)`` to ``(S,)``.
    """
    first = run.chain < len(run.chain_active_probs) // 2
    drawn, centres = (resampled(torch.where(half, run.weights, 0.0), _BRIDGE, generator) for half in (first, ~first))
    logits = torch.cat(
        [
            walk.collapsed(run.hyper[part]).gibbs_logits(z, walk.prior.logits(z))
            for part in centres.split(64)
            for z in [run.states[part].double()]
        ]
    )
    z = run.states[drawn]
    part = torch.randint(len(logits), (len(z),), generator=generator)
    proposed = torch.rand(z.shape, generator=generator, dtype=logits.dtype) < torch.sigmoid(logits[part])
    both = torch.cat([z, proposed])
    # log p(y, z) / q(z), of draws and of proposals.
    log_ratio = log_marginal(both) - _log_mixture(both, logits)
    from_posterior, from_mixture = log_ratio.split(len(z))
    log_evidence = float(from_mixture.logsumexp(0)) - math.log(len(z))
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
