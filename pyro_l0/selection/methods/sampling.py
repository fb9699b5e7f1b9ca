"""Posteriors of up to ten thousand features by weighted tempered Gibbs sampling, unknown scales included."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_l0.maths.second_order import quadratic_of
from pyro_l0.maths.tempered_gibbs import GibbsRun, ScaleWalk
from pyro_l0.selection.gate_vectors.axis import log_half_cauchy, log_half_normal
from pyro_l0.selection.gate_vectors.gaussian_states import GaussianStates
from pyro_l0.selection.gate_vectors.grid import smallest_noise
from pyro_l0.selection.gate_vectors.states import gate_prior
from pyro_l0.selection.methods.chains import Effort, chain_evidence, resampled, rescaled, sampled_walk
from pyro_l0.selection.methods.expanded_sampling import expanded_posterior
from pyro_l0.selection.posterior import SelectionPosterior
from pyro_l0.selection.problem import Problem

__all__ = ["tempered_posterior"]

# States that moments are averaged over: as many as there is time for, between these.
_FEWEST, _MOST = 2000, 20_000
_ENTRIES = 2**22  # numbers in all these states, and in the largest array of a step


@torch.no_grad()
def tempered_posterior(problem: Problem, *, draws: int = 4000, seed: int = 0) -> SelectionPosterior:
    """The posterior of a problem by weighted tempered Gibbs sampling (Zanella and Roberts 2019).

    The coefficients and the rate are integrated out; unknown scales of the noise and of the slabs are sampled beside
    the gates. Inclusion probabilities and moments are averages of what each gate and its slab are given the others.
    """
    generator = torch.Generator().manual_seed(seed)
    effort = Effort.of(problem.x.shape[1])
    if problem.family != "gaussian":
        return expanded_posterior(problem, effort, draws, generator)
    states = GaussianStates(problem)
    walk = _walk(problem, effort)
    run = sampled_walk(walk, problem.gates, effort.flips, generator)
    if problem.gate_of is None:
        moments = _moments(walk, run, generator)
    else:
        z = run.states[resampled(run.weights, _FEWEST, generator)]
        moments = states.moments(z, torch.full((len(z),), 1 / len(z), dtype=torch.float64))
        moments = rescaled(problem, run.active_probs, z.double().mean(0), moments)
    log_evidence = chain_evidence(states.log_marginal, walk, run, generator)
    found = states.draws(run.states[resampled(run.weights, draws, generator)], generator)
    return SelectionPosterior.of(run.active_probs, moments, log_evidence, found, run.standard_error())


def _walk(problem: Problem, effort: Effort) -> ScaleWalk:
    x, y, prior = problem.x, problem.y, problem.prior
    n, square = problem.size, float(y @ y)

    def log_density(theta: Tensor) -> Tensor:
        """Of the logarithms of noise and slab scale, with the part of the log likelihood that has no gates."""
        noise, slab = theta.unbind(1)
        total = -n * noise - 0.5 * square * (-2 * noise).exp()
        if prior.noise_scale is None:
            total = total + log_half_cauchy(noise, prior.noise_unit)
            total = torch.where(noise >= math.log(smallest_noise(n, square)), total, -math.inf)
        return total if prior.slab_scale is not None else total + log_half_normal(slab, prior.slab_unit)

    first_noise = math.sqrt(square / n) if prior.noise_scale is None else prior.noise_scale
    first_slab = prior.slab_unit if prior.slab_scale is None else prior.slab_scale
    return ScaleWalk(
        quadratic_of(x, x.T @ y),
        gate_prior(prior),
        log_density,
        torch.tensor([math.log(first_noise), math.log(first_slab)], dtype=torch.float64).expand(effort.chains, 2),
        unknown=[i for i, known in enumerate((prior.noise_scale, prior.slab_scale)) if known is None],
        gate_of=problem.gate_of,
        every=effort.every,
    )


def _moments(walk: ScaleWalk, run: GibbsRun, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means of the coefficients and of their squares, ``(p, 1)``, averaged over what each is given all other gates."""
    p = run.states.shape[1]
    active, first, second = torch.zeros(3, p, dtype=torch.float64)
    picked = resampled(run.weights, min(_MOST, max(_FEWEST, _ENTRIES // p)), generator)
    for part in picked.split(max(16, _ENTRIES // (64 * p))):
        z = run.states[part].double()
        factors, mean, variance = walk.collapsed(run.hyper[part]).slab_moments(z)
        probs = torch.sigmoid(factors + walk.prior.logits(z))
        active += probs.sum(0)
        first += (probs * mean).sum(0)
        second += (probs * (mean.square() + variance)).sum(0)
    # The probabilities of the whole run are surer than those of the states that are picked.
    share = run.active_probs / active.clamp(min=torch.finfo(active.dtype).tiny)
    return (first * share)[:, None], (second * share)[:, None]
