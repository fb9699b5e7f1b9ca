r"""Chains on the Laplace evidence itself, whose proposals are informed by an expansion.

Where an expansion is far from the likelihood, a few of its states have all the weight. These chains flip one gate at a
time instead. With t_j the expansion's odds of the other value of gate j, a flip is proposed in proportion to
g(t_j) = t_j / (1 + t_j), which has g(t) = t g(1 / t) (Zanella 2020, arXiv:1711.07424, section 2), and accepted with

.. math:: \frac{\pi(z')}{\pi(z)\, t_j(z)} \frac{\sum_i g(t_i(z))}{\sum_i g(t_i(z'))},

so that acceptance corrects only where the expansion misjudges a flip.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.maths.tempered_gibbs import ScaleWalk
from pyro_l0.selection.gate_vectors.axis import log_half_normal
from pyro_l0.selection.gate_vectors.laplace_states import laplace
from pyro_l0.selection.problem import Problem

__all__ = ["LaplaceChains", "laplace_chains"]

_EVERY = 3  # rounds from one proposal of the slab scale to the next
_STEP = 0.4  # of its logarithm


class LaplaceChains(NamedTuple):
    """States of chains."""

    states: Tensor  # gates, bool, shape (rounds, chains, G)
    log_slab: Tensor  # log slab scales, shape (rounds, chains)

    def standard_error(self) -> Tensor:
        """Of the mean gates, shape ``(G,)``: by how much chains differ, and halves of all of them."""
        by_chain = self.states.double().mean(0)
        halves = torch.stack([half.double().mean((0, 1)) for half in self.states.chunk(2)])
        return (by_chain.var(0) / len(by_chain) + halves.var(0) / 2).sqrt()


class _Point(NamedTuple):
    """Where the chains are: log density, the log odds of each gate's other value, and the log of the sum of g."""

    log_density: Tensor
    against: Tensor
    log_total: Tensor

    def where(self, taken: Tensor, other: _Point) -> _Point:
        """The other one for some chains."""
        return _Point(
            torch.where(taken, other.log_density, self.log_density),
            torch.where(taken[:, None], other.against, self.against),
            torch.where(taken, other.log_total, self.log_total),
        )


def laplace_chains(
    problem: Problem, walk: ScaleWalk, z: Tensor, log_slab: Tensor, rounds: int, generator: torch.Generator
) -> LaplaceChains:
    """Run chains side by side, from gates of shape ``(chains, G)`` and log slab scales, with a walk on an expansion."""
    prior = problem.prior

    def at(z: Tensor, log_slab: Tensor) -> _Point:
        theta = torch.stack([torch.zeros_like(log_slab), log_slab], 1)
        logits = walk.collapsed(theta).gibbs_logits(z.double(), walk.prior.logits(z.double()))
        against = torch.where(z, -logits, logits)
        density = laplace(problem, z, log_slab.exp()).log_evidence + walk.prior.log_prob(z)
        return _Point(
            density + log_half_normal(log_slab, prior.slab_unit), against, torch.sigmoid(against).sum(1).log()
        )

    def accepted(log_ratio: Tensor) -> Tensor:
        return torch.rand(len(z), generator=generator, dtype=log_ratio.dtype).log() < log_ratio

    point = at(z, log_slab)
    states, slabs = [], []
    for turn in range(rounds):
        flip = torch.multinomial(torch.sigmoid(point.against), 1, generator=generator)
        new = z.scatter(1, flip, ~z.gather(1, flip))
        there = at(new, log_slab)
        odds = point.against.gather(1, flip)[:, 0]
        taken = accepted(there.log_density - point.log_density - odds + point.log_total - there.log_total)
        z, point = torch.where(taken[:, None], new, z), point.where(taken, there)
        if prior.slab_scale is None and turn % _EVERY == 0:
            moved = log_slab + _STEP * torch.randn(len(z), generator=generator, dtype=log_slab.dtype)
            there = at(z, moved)
            taken = accepted(there.log_density - point.log_density)
            log_slab, point = torch.where(taken, moved, log_slab), point.where(taken, there)
        states.append(z)
        slabs.append(log_slab)
    return LaplaceChains(torch.stack(states), torch.stack(slabs))
