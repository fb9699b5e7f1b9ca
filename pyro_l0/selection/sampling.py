"""Posteriors of up to ten thousand features by weighted tempered Gibbs sampling, with unknown scales sampled beside."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.maths.quadratic import DenseQuadratic, DesignQuadratic, Quadratic
from pyro_l0.maths.scale_walk import ScaleWalk
from pyro_l0.maths.tempered_gibbs import GibbsRun, sampled_target
from pyro_l0.selection.bridge import bridged_evidence
from pyro_l0.selection.gaussian_grid import smallest_noise
from pyro_l0.selection.gaussian_states import GaussianStates
from pyro_l0.selection.hyper_axis import log_half_cauchy, log_half_normal
from pyro_l0.selection.posterior import SelectionPosterior
from pyro_l0.selection.problem import Prior, Problem
from pyro_l0.selection.states import gate_prior

__all__ = ["tempered_posterior"]

_DENSE = 2000  # features up to which X'X is formed at once
# Open gates that a chain starts with on average, at most.
_START = 5.0
_MOMENTS = 20_000  # states that moments are averaged over, a tenth of it with many features
_AT_ONCE = 2**24
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
        """For so many features."""
        if p <= 50:
            return Effort(64, 1000, 2)
        return Effort(24, 1000, 2) if p <= 2000 else Effort(12, 1000, 3)


@torch.no_grad()
def tempered_posterior(
    problem: Problem, *, draws: int = 4000, seed: int = 0, effort: Effort | None = None
) -> SelectionPosterior:
    """The posterior of a problem by weighted tempered Gibbs sampling.

    Args:
        problem: a regression.
        draws: how many joint draws.
        seed: of all random numbers.
        effort: how long chains run; by default what suits the number of features.
    """
    generator = torch.Generator().manual_seed(seed)
    states = GaussianStates(problem)
    walk, run = _sampled(problem, effort or Effort.of(problem.x.shape[1]), generator)
    mean, square = _moments(walk, run, generator)
    joint = states.draws(run.states[_resampled(run.weights, draws, generator)], generator)
    log_evidence = _log_evidence(states, walk, run, generator)
    sd = (square - mean.square()).clamp(min=0).sqrt()
    return SelectionPosterior(
        run.active_probs.numpy(), mean[:, None].numpy(), sd[:, None].numpy(), log_evidence, joint
    )


def _sampled(problem: Problem, effort: Effort, generator: torch.Generator) -> tuple[ScaleWalk, GibbsRun]:
    x, y, prior = problem.x, problem.y, problem.prior
    p = x.shape[1]
    linear = x.T @ y
    quadratic: Quadratic = DenseQuadratic(x.T @ x, linear) if p <= _DENSE else DesignQuadratic(x, linear)
    gates = gate_prior(prior)
    noise = math.sqrt(float(y @ y) / len(y)) if prior.noise_scale is None else prior.noise_scale
    slab = prior.slab_unit if prior.slab_scale is None else prior.slab_scale
    start = torch.tensor([noise, slab], dtype=torch.float64).log().expand(effort.chains, 2)
    walk = ScaleWalk(
        quadratic, gates, _log_density(problem), start, unknown=_unknown(prior), every=effort.every
    )
    probs = gates.active_prob.expand(p)
    probs = probs * (_START / probs.sum()).clamp(max=1.0)
    z = torch.bernoulli(probs.expand(effort.chains, -1), generator=generator)
    run = sampled_target(
        walk, z, probs, flips=effort.flips, warm_up=int(0.3 * effort.flips), generator=generator
    )
    return walk, run


def _unknown(prior: Prior) -> list[int]:
    return [i for i, known in enumerate((prior.noise_scale, prior.slab_scale)) if known is None]


class _log_density(NamedTuple):
    """Of the scales' logarithms, with the part of the log likelihood that gates do not change."""

    problem: Problem

    def __call__(self, theta: Tensor) -> Tensor:
        prior, y = self.problem.prior, self.problem.y
        n, square = len(y), float(y @ y)
        noise, slab = theta.T
        total = -n * (noise + 0.5 * math.log(2 * math.pi)) - 0.5 * square * (-2 * noise).exp()
        if prior.noise_scale is None:
            total = total + log_half_cauchy(noise, prior.noise_unit)
            total = torch.where(noise >= math.log(smallest_noise(n, square)), total, -math.inf)
        return total if prior.slab_scale is not None else total + log_half_normal(slab, prior.slab_unit)


def _log_evidence(states: GaussianStates, walk: ScaleWalk, run: GibbsRun, generator: torch.Generator) -> float:
    """By a bridge from where one half of the chains would go next to where the other half has been."""
    first = run.chain < len(run.chain_active_probs) // 2
    picked, centres = (
        _resampled(torch.where(half, run.weights, 0.0), _BRIDGE, generator) for half in (first, ~first)
    )
    z = run.states[centres].double()
    size = max(16, _AT_ONCE // (100 * z.shape[1]))
    parts = zip(z.split(size), run.hyper[centres].split(size), strict=True)
    logits = torch.cat([walk.collapsed(theta).gibbs_logits(z, walk.prior.logits(z)) for z, theta in parts])
    return bridged_evidence(states, run.states[picked], logits, generator)


def _resampled(weights: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Indices of so many draws by weight, at equal distances along the chains, in random order."""
    offset = torch.rand(1, generator=generator, dtype=weights.dtype)
    below = weights.cumsum(0)
    at = (torch.arange(number, dtype=weights.dtype) + offset) / number * below[-1]
    found = torch.searchsorted(below, at).clamp(max=len(weights) - 1)
    return found[torch.randperm(number, generator=generator)]


def _moments(walk: ScaleWalk, run: GibbsRun, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means of the coefficients and of their squares, averaged over what each is given all other gates."""
    p = run.states.shape[1]
    active, first, second = torch.zeros(3, p, dtype=torch.float64)
    picked = _resampled(run.weights, min(_MOMENTS, max(_MOMENTS // 10, _AT_ONCE // p)), generator)
    for part in picked.split(max(16, _AT_ONCE // (100 * p))):
        z, theta = run.states[part].double(), run.hyper[part]
        factors, mean, variance = walk.collapsed(theta).slab_moments(z)
        probs = torch.sigmoid(factors + walk.prior.logits(z))
        active += probs.sum(0)
        first += (probs * mean).sum(0)
        second += (probs * (mean.square() + variance)).sum(0)
    # The probabilities of the whole run are surer than those of the states that are picked.
    share = run.active_probs / active.clamp(min=torch.finfo(active.dtype).tiny)
    return first * share, second * share
