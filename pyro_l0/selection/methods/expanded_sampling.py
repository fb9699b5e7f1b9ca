"""Posteriors of generalised linear regressions: tempered chains on an expansion, re-weighted by Laplace evidence."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_l0.maths.laplace import sampled_on_expansions
from pyro_l0.maths.tempered_gibbs import GibbsRun, ScaleWalk
from pyro_l0.selection.gate_vectors.axis import log_half_normal
from pyro_l0.selection.gate_vectors.laplace_states import laplace, laplace_draws
from pyro_l0.selection.gate_vectors.states import gate_prior
from pyro_l0.selection.methods.chains import Effort, chain_evidence, resampled, rescaled, sampled_walk
from pyro_l0.selection.methods.expansion import Expansion, expanded, gate_of, null_predictor
from pyro_l0.selection.methods.laplace_chains import LaplaceChains, laplace_chains
from pyro_l0.selection.posterior import MOST_ERROR, SelectionPosterior
from pyro_l0.selection.problem import Prior, Problem

__all__ = ["expanded_posterior"]

_MEAN = 500  # draws that the mean linear predictor is taken from
_DRAWS = 4000  # of gates and slab scale, which are re-weighted
_CHAINS = 64  # on the Laplace evidence
# Their proposals: of the warm-up and of the first run, which is doubled so often at most; fewer where a state has more
# numbers in its Hessians.
_ROUNDS, _FEWEST_ROUNDS, _DOUBLINGS, _WORK = 150, 20, 3, 2**24
_NODES = 50  # of the slab scale's logarithm, over e^10 below its unit to e^2 above


def expanded_posterior(problem: Problem, effort: Effort, draws: int, generator: torch.Generator) -> SelectionPosterior:
    """The posterior of a regression that is not Gaussian.

    The log likelihood is expanded at the model without features, and twice more at the mean linear predictor that the
    chains find, which run for a third of the effort. Draws of the last chains are re-weighted by the Laplace evidence
    of their gates and slab scales. Where that leaves a standard error above ``MOST_ERROR``, chains on the Laplace
    evidence itself continue from there.
    """

    def sampled(walk: _Walk, share: float) -> GibbsRun:
        return sampled_walk(walk, problem.gates, int(effort.flips * share), generator)

    def mean_predictor(walk: _Walk, run: GibbsRun) -> Tensor:
        picked = resampled(run.weights, _MEAN, generator)
        beta = walk.collapsed(run.hyper[picked]).mean(run.states[picked]).mean(0)
        return walk.expansion.predictor(beta)

    walk, run = sampled_on_expansions(
        lambda eta: _Walk(problem, expanded(problem, eta), effort), null_predictor(problem), sampled, mean_predictor
    )
    picked = resampled(run.weights, _DRAWS, generator)
    z, slab = run.states[picked], run.hyper[picked, 1].exp()
    fit = laplace(problem, z, slab)
    log_ratio = fit.log_evidence - walk.collapsed(run.hyper[picked]).log_evidence(z)
    weights = torch.softmax(log_ratio, 0)
    # What the weights change is added to the Rao-Blackwell averages, which have less noise than the states.
    change = weights - 1 / _DRAWS
    active_probs = (run.active_probs + change @ z.double()).clamp(0, 1)
    of_weights = change.square() @ (z.double() - active_probs).square()
    error = (run.standard_error().square() + of_weights).sqrt()
    which = resampled(weights, draws, generator)
    log_evidence = chain_evidence(_log_marginal(walk, problem.prior), walk, run, generator)
    if error.max() > MOST_ERROR:
        chains = _continued(problem, walk, z[:_CHAINS], slab[:_CHAINS].log(), generator)
        active_probs, error = chains.states.double().mean((0, 1)), chains.standard_error()
        some = torch.randperm(chains.log_slab.numel(), generator=generator)[:_DRAWS]
        z, slab = chains.states.flatten(0, 1)[some], chains.log_slab.flatten()[some].exp()
        fit, weights = laplace(problem, z, slab), torch.full_like(slab, 1 / len(slab))
        which = resampled(weights, draws, generator)
    moments = fit.moments(weights, problem.x.shape[1])
    return SelectionPosterior.of(
        active_probs,
        rescaled(problem, active_probs, weights @ z.double(), moments),
        log_evidence + float(log_ratio.logsumexp(0)) - math.log(_DRAWS),
        laplace_draws(problem, z[which], slab[which], generator),
        error,
    )


def _continued(
    problem: Problem, walk: ScaleWalk, z: Tensor, log_slab: Tensor, generator: torch.Generator
) -> LaplaceChains:
    """Chains on the Laplace evidence, run until their standard error is small enough, or ``_DOUBLINGS`` times."""
    entries = problem.size * (problem.outputs * (1 + float(problem.switched(z).sum(1).double().mean()))) ** 2
    rounds = max(_FEWEST_ROUNDS, min(_ROUNDS, int(_WORK / entries)))
    for doubling in range(_DOUBLINGS + 1):
        chains = laplace_chains(problem, walk, z, log_slab, rounds, generator)
        if doubling and chains.standard_error().max() <= MOST_ERROR:  # the first ones warm up
            break
        rounds *= 1 + bool(doubling)
        z, log_slab = chains.states[-1], chains.log_slab[-1]
    return chains


class _Walk(ScaleWalk):
    """Gates and an unknown slab scale on an expansion of a problem's log likelihood."""

    def __init__(self, problem: Problem, expansion: Expansion, effort: Effort) -> None:
        prior = problem.prior
        slab = prior.slab_unit if prior.slab_scale is None else prior.slab_scale
        super().__init__(
            expansion.quadratic,
            gate_prior(prior),
            lambda theta: log_half_normal(theta[:, 1], prior.slab_unit),
            torch.tensor([0.0, math.log(slab)], dtype=torch.float64).expand(effort.chains, 2),
            unknown=[1] if prior.slab_scale is None else [],
            gate_of=gate_of(problem),
            every=effort.every,
        )
        self.expansion = expansion


def _log_marginal(walk: ScaleWalk, prior: Prior) -> Callable[[Tensor], Tensor]:
    """log p(y, z) of an expansion up to a constant, with an unknown slab scale integrated out."""
    if prior.slab_scale is None:
        middle = math.log(prior.slab_unit)
        log_slabs = torch.linspace(middle - 10.0, middle + 2.0, _NODES, dtype=torch.float64)
        log_weights = log_half_normal(log_slabs, prior.slab_unit) + math.log(12.0 / (_NODES - 1))
    else:
        log_slabs = torch.tensor([math.log(prior.slab_scale)], dtype=torch.float64)
        log_weights = torch.zeros(1, dtype=torch.float64)
    nodes = torch.stack([torch.zeros_like(log_slabs), log_slabs], 1)

    def log_marginal(z: Tensor) -> Tensor:
        each = torch.stack([walk.collapsed(node[None]).log_evidence(z) for node in nodes], 1)
        return (each + log_weights).logsumexp(1) + walk.prior.log_prob(z)

    return log_marginal
