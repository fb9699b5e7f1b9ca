"""Posteriors with small effects of all features: those given the ratio of variances, mixed by their evidence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pyro_l0.selection.families.family import Array
from pyro_l0.selection.problem import RATIOS, BackgroundEffects, Draws, Problem, SelectionPosterior


def mixed_posterior(
    problem: Problem, method: Callable[..., SelectionPosterior], *, draws: int, seed: int
) -> SelectionPosterior:
    """The posterior of a Gaussian regression with a background, from exact ones given each ratio."""
    assert problem.background is not None
    given, log_weights = problem.given_ratios
    found = [method(each, draws=draws, seed=seed) for each in given]
    log_evidence = log_weights.numpy() + [each.log_evidence for each in found]
    probs = np.exp(log_evidence - np.logaddexp.reduce(log_evidence))

    def averaged(values: list[Array]) -> Array:
        return np.tensordot(probs, values, 1)

    mean = averaged([each.mean for each in found])
    square = averaged([each.sd**2 + each.mean**2 for each in found])
    effects = probs @ problem.background.mean(RATIOS[:, None], np.stack([each.mean[:, 0] for each in found]))
    number = np.random.default_rng(seed).choice(len(RATIOS), draws, p=probs)
    parts = [each.draws.rows(np.arange((number == k).sum())) for k, each in enumerate(found)]
    drawn = Draws.joined(parts, np.argsort(number, kind="stable"))
    return SelectionPosterior(
        averaged([each.active_probs for each in found]),
        mean,
        np.sqrt((square - mean**2).clip(min=0)),
        averaged([each.intercept for each in found]),
        float(np.logaddexp.reduce(log_evidence)),
        drawn._replace(ratio=RATIOS[number]),
        np.zeros(problem.gates),
        background=BackgroundEffects(RATIOS, probs, effects),
    )
