"""Posteriors by a mean field: independent gates, and the scales and coefficients that go with draws of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.spike_slab.collapsed import CollapsedQuadratic
from pyro_l0.maths.spike_slab.tempered_gibbs import collapsed_mean_field
from pyro_l0.selection.gate_vectors.states import States, gate_prior
from pyro_l0.selection.methods.enumeration import states_of
from pyro_l0.selection.methods.expansion import expanded, gate_of, null_predictor
from pyro_l0.selection.posterior import SelectionPosterior
from pyro_l0.selection.problem import Problem

__all__ = ["mean_field_posterior"]

_ROUNDS = 4  # fits of the gates, each with scales that go with the gates before
_STEPS = 200  # of a fit
_SCALES = 32  # draws of the scales in a fit
_BOUND = 500  # draws that the evidence is bounded with


@torch.no_grad()
def mean_field_posterior(problem: Problem, *, draws: int = 4000, seed: int = 0) -> SelectionPosterior:
    """The posterior of a problem with gates that are independent of one another; fast, and right where features are.

    Gates are fitted with the slabs integrated out (``collapsed_mean_field``), at
    draws of the unknown scales; these are drawn given gates of the fit before. For families other than the Gaussian the
    likelihood is taken to second order, at the mean linear predictor of the fit before. Coefficients and unknowns are
    then what they are given draws of the gates. Of features that are nearly the same, the mean field may take one for
    certain where either might be it.

    Args:
        problem: a regression of any family.
        draws: how many joint draws.
        seed: of all random numbers.

    Returns:
        The posterior. Its log evidence is a lower bound, the mean of log p(y, z) - log q(z) over draws of the gates.

    Raises:
        ValueError: no draws are asked for.
    """
    if draws < 1:
        raise ValueError(f"Expected at least one draw, but got {draws}.")
    generator = torch.Generator().manual_seed(seed)
    states = states_of(problem)
    logits = _fitted_gates(problem, states, generator)
    z = _drawn(logits, draws, generator)
    distinct, count = z.unique(dim=0, return_counts=True)
    mean, square = states.moments(distinct, count.double() / draws)
    return SelectionPosterior(
        torch.sigmoid(logits).numpy(),
        mean.numpy(),
        (square - mean.square()).clamp(min=0).sqrt().numpy(),
        _lower_bound(states, logits, generator),
        states.draws(z, generator),
    )


def _fitted_gates(problem: Problem, states: States, generator: torch.Generator) -> Tensor:
    """Log odds of the gates, shape ``(p,)``."""
    prior, gates = problem.prior, gate_prior(problem.prior)
    gaussian = problem.family == "gaussian"
    first_noise = prior.noise_scale or (float(problem.y.square().mean().sqrt()) if gaussian else 1.0)
    noise = torch.full((_SCALES,), first_noise, dtype=torch.float64)
    slab = torch.full((_SCALES,), prior.slab_scale or prior.slab_unit, dtype=torch.float64)
    expansion = expanded(problem, null_predictor(problem))
    for _ in range(_ROUNDS):
        collapsed = CollapsedQuadratic(expansion.quadratic, slab[:, None], gate_of=gate_of(problem), factor=noise**-2)
        logits = collapsed_mean_field(collapsed, gates, steps=_STEPS, generator=generator)
        z = _drawn(logits, _SCALES, generator)
        found = states.draws(z, generator)
        slab = torch.from_numpy(found.slab_scale)
        if gaussian:
            noise = torch.from_numpy(found.noise_scale)
        else:
            expansion = expanded(problem, expansion.predictor(collapsed.mean(z).mean(0)))
    return logits


def _drawn(logits: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draws of independent gates, bool, shape ``(number, p)``."""
    points = torch.rand(number, len(logits), generator=generator, dtype=torch.float64)
    return points < torch.sigmoid(logits)


def _lower_bound(states: States, logits: Tensor, generator: torch.Generator) -> float:
    """Mean of log p(y, z) - log q(z) over draws of q."""
    z = _drawn(logits, _BOUND, generator)
    log_q = torch.where(z, F.logsigmoid(logits), F.logsigmoid(-logits)).sum(1)
    return float((states.log_marginal(z) - log_q).mean())
