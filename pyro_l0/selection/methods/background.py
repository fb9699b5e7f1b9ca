"""Posteriors with small effects of all features: those given the ratio of variances, mixed by their evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pyro_l0.selection.design.background import Background
from pyro_l0.selection.families.family import Array
from pyro_l0.selection.methods.gaussian_evidence import GaussianEvidence
from pyro_l0.selection.problem import RATIOS, BackgroundEffects, Draws, Problem, SelectionPosterior

__all__ = ["mixed_posterior", "probability_of_background"]

_NEGLIGIBLE = 1e-3  # probability of a ratio from which on its problems are those of the mixture
_LOG_EVIDENCE = 0.1  # standard error of that of chains, in nats, as seeds differ on 500 observations of 120 features


def mixed_posterior(
    problem: Problem, method: Callable[..., SelectionPosterior], *, draws: int, seed: int
) -> SelectionPosterior:
    """The posterior of a Gaussian regression with a background, by a method for regressions without one.

    With r_k the ratios, p(. | y) = sum_k p(r_k | y) p(. | y, r_k), and p(r_k | y) is in proportion to p(r_k) times the
    evidence at r_k (``probs``). The variance is the mean of squares less the squared mean, and the error of a gate has
    two parts: those of the posteriors, and an error of each log evidence, by which its weight moves p_k (a_k - a).
    Chains that move between the ratios would rarely do so where few large effects explain y as well as many small ones
    do; how probable each is, they would have from their starts.
    """
    assert problem.background is not None
    posteriors, log_evidence = [], np.zeros(len(RATIOS))
    for k in range(len(RATIOS)):
        given, log_weight = problem.background.given(problem, k)
        posteriors.append(method(given, draws=draws, seed=seed + k))
        log_evidence[k] = log_weight + posteriors[k].log_evidence
    probs = np.exp(log_evidence - np.logaddexp.reduce(log_evidence))

    def averaged(values: list[Array]) -> Array:
        return np.tensordot(probs, values, 1)

    active = np.stack([posterior.active_probs for posterior in posteriors])
    sampled = np.stack([posterior.error for posterior in posteriors])
    # An evidence that is estimated is off by as much as seeds differ.
    of_evidence = _LOG_EVIDENCE * (sampled.any(axis=1, keepdims=True) * probs[:, None] * (active - probs @ active))
    error = np.sqrt((probs[:, None] ** 2 * sampled**2 + of_evidence**2).sum(0))
    mean = averaged([posterior.mean for posterior in posteriors])
    square = averaged([posterior.sd**2 + posterior.mean**2 for posterior in posteriors])
    effects = probs @ problem.background.mean(RATIOS, np.stack([posterior.mean[:, 0] for posterior in posteriors]))
    number = np.random.default_rng([seed, 1]).choice(len(RATIOS), draws, p=probs)
    drawn = Draws.joined([posterior.draws for posterior in posteriors], number * draws + np.arange(draws))
    return SelectionPosterior(
        probs @ active,
        mean,
        np.sqrt((square - mean**2).clip(min=0)),
        averaged([posterior.intercept for posterior in posteriors]),
        float(np.logaddexp.reduce(log_evidence)),
        drawn._replace(ratio=RATIOS[number]),
        error,
        tuple(
            {
                text: None
                for posterior, p in zip(posteriors, probs, strict=True)
                if p > _NEGLIGIBLE
                for text in posterior.problems
            }
        ),
        BackgroundEffects(RATIOS, probs, effects),
    )


_SCREENED = 200  # draws


@torch.no_grad()
def probability_of_background(problem: Problem, background: Background, draws: Draws) -> float:
    """P(r > 0 | y), roughly, from draws of the posterior without a background; too low where these are far from others.

    The evidence of a ratio over that of r = 0 is the mean of the ratio of the evidences of draws from the latter.
    """
    coefficients = draws.coefficients[:_SCREENED]
    seen = np.unique(coefficients.indices)  # all others are out of each draw
    on = torch.from_numpy(coefficients[:, seen].toarray() != 0)
    logs = []
    for k in range(len(RATIOS)):
        given, log_weight = background.given(problem, k, seen)
        # The prior of the gates is the same for all ratios.
        some = replace(given, gate_of=None, prior=replace(problem.prior, rate=0.5))
        logs.append(GaussianEvidence(some).log_marginal(on) + log_weight)
    log_evidence = (torch.stack(logs) - logs[0]).logsumexp(1)
    return 1 - float(log_evidence.softmax(0)[0])
