"""Tempered chains of a problem's gates and scales, and what is taken from the states that they visit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.maths.spike_slab.scale_walk import ScaleWalk
from pyro_l0.maths.spike_slab.tempered_gibbs import GibbsRun, sampled_target
from pyro_l0.selection.methods.bridge import bridged_evidence
from pyro_l0.selection.problem import Problem

__all__ = ["Effort", "at_inclusion", "chain_evidence", "resampled", "sampled_walk"]

_WARM_UP = 0.3
# Open gates that a chain starts with on average, at most.
_START = 5.0
_BRIDGE = 1000  # draws that the evidence is estimated from


class Effort(NamedTuple):
    """How long chains run.

    Attributes:
        chains: side by side.
        flips: of each chain, the warm-up included.
        every: flips from one proposal of a scale to the next.
    """

    chains: int
    flips: int
    every: int

    @staticmethod
    def of(p: int) -> Effort:
        """For so many features: a flip of a chain takes time in proportion, beyond some hundred."""
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


def at_inclusion(
    problem: Problem, inclusion: Tensor, share: Tensor, moments: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Moments ``(p, K)`` over draws in which each gate is open for a certain share, for what its probability is."""
    change = problem.switched(inclusion / share.clamp(min=torch.finfo(share.dtype).tiny))[:, None]
    return moments[0] * change, moments[1] * change


def resampled(weights: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Indices of so many draws by weight, at equal distances along the chains, in random order."""
    offset = torch.rand(1, generator=generator, dtype=weights.dtype)
    below = weights.cumsum(0)
    at = (torch.arange(number, dtype=weights.dtype) + offset) / number * below[-1]
    found = torch.searchsorted(below, at).clamp(max=len(weights) - 1)
    return found[torch.randperm(number, generator=generator)]


def chain_evidence(
    log_marginal: Callable[[Tensor], Tensor], walk: ScaleWalk, run: GibbsRun, generator: torch.Generator
) -> float:
    """log p(y), by a bridge from where one half of the chains would go next to where the other half has been.

    Args:
        log_marginal: log p(y, z) of gates, bool, shape ``(S, p)`` to ``(S,)``.
        walk: what was sampled.
        run: of two chains at least.
        generator: of the random numbers.
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
    return bridged_evidence(log_marginal, run.states[drawn], logits, generator)
