"""Gates of any twice differentiable log likelihood: tempered Gibbs on an expansion, re-weighted by Laplace evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from pyro_l0.maths.spike_slab.collapsed import CollapsedQuadratic
from pyro_l0.maths.spike_slab.gate_priors import GatePrior
from pyro_l0.maths.spike_slab.laplace import LogLikelihood, expanded, laplace_evidence
from pyro_l0.maths.spike_slab.tempered_gibbs import GibbsRun, tempered_gibbs

TargetT = TypeVar("TargetT")


def sampled_on_expansions(
    expand: Callable[[Tensor], TargetT],
    point: Tensor,
    sample: Callable[[TargetT, float], GibbsRun],
    mean: Callable[[TargetT, GibbsRun], Tensor],
) -> tuple[TargetT, GibbsRun]:
    """Chains on the expansion of a log likelihood, which is taken twice more at the mean that shorter chains find.

    ``expand`` makes a target at a point, ``sample`` runs chains on it for a share of their flips, and ``mean`` is the
    point that a run has as its mean.
    """
    target = expand(point)
    for _ in range(2):
        target = expand(mean(target, sample(target, 1 / 3)))
    return target, sample(target, 1.0)


def gibbs_by_expansion(
    log_likelihood: LogLikelihood,
    scale: float | Tensor,
    prior: GatePrior,
    *,
    start: Tensor,
    gate_of: Tensor | None = None,
    chains: int = 16,
    flips: int = 600,
    generator: torch.Generator | None = None,
) -> tuple[GibbsRun, CollapsedQuadratic]:
    """Sample gates of a likelihood that need not be quadratic, with dense matrices: for up to a hundred or so elements.

    It is expanded at the mode with all gates open, then again at the posterior mean of the coefficients. The states
    that the last run visits are re-weighted by their Laplace evidence over that of the expansion; both are returned, as
    slabs can be drawn from the expansion. The log likelihood must be finite at ``start``, shape ``(p,)``.
    """
    scale = torch.as_tensor(scale, dtype=start.dtype, device=start.device)
    point = laplace_evidence(log_likelihood, torch.ones_like(start)[None], scale, start).mode[0]

    def sample(collapsed: CollapsedQuadratic, share: float) -> GibbsRun:
        return tempered_gibbs(collapsed, prior, chains=chains, flips=int(flips * share), generator=generator)

    def mean(collapsed: CollapsedQuadratic, run: GibbsRun) -> Tensor:
        states, weights = run.distinct()
        return weights @ collapsed.mean(states)

    collapsed, run = sampled_on_expansions(
        lambda at: CollapsedQuadratic(expanded(log_likelihood, at), scale, gate_of=gate_of), point, sample, mean
    )
    return reweighted(run, log_likelihood, collapsed), collapsed


def reweighted(run: GibbsRun, log_likelihood: LogLikelihood, collapsed: CollapsedQuadratic) -> GibbsRun:
    """A run on an expansion, its states re-weighted by their Laplace evidence under the log likelihood itself.

    All chains of the run share one scale and one factor.
    """
    scale = collapsed.scale

    def log_ratio(states: Tensor) -> Tensor:
        elements = collapsed.on(states).to(scale)
        start = collapsed.mean(states)
        return laplace_evidence(log_likelihood, elements, scale, start).log_evidence - collapsed.log_evidence(states)

    return run.reweighted(log_ratio)
