"""Posteriors with small effects of all features: those given the ratio of variances, mixed by their evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.sparse import csr_array, vstack

from pyro_l0.selection.design.background import RATIOS
from pyro_l0.selection.families.family import Array
from pyro_l0.selection.problem import BackgroundEffects, Draws, Problem, SelectionPosterior

_NEGLIGIBLE = 0.01  # share of draws from which on a ratio's problems are those of the mixture


def mixed_posterior(
    problem: Problem, method: Callable[..., SelectionPosterior], *, draws: int, seed: int
) -> SelectionPosterior:
    """The posterior of a Gaussian regression with a background, by a method for regressions without one."""
    assert problem.background is not None
    log_evidence, found = problem.background.log_prior.copy(), []
    for k, ratio in enumerate(RATIOS):
        given, log_volume = problem.background.problem(problem, ratio)
        found.append(method(given, draws=draws, seed=seed))
        log_evidence[k] += found[k].log_evidence + log_volume
    probs = np.exp(log_evidence - np.logaddexp.reduce(log_evidence))

    def averaged(name: str) -> Array:
        return np.tensordot(probs, [getattr(each, name) for each in found], 1)

    mean = averaged("mean")
    square = np.tensordot(probs, [each.sd**2 + each.mean**2 for each in found], 1)
    each_mean = np.stack([each.mean[:, 0] for each in found])
    effects = probs @ problem.background.mean(RATIOS[:, None], each_mean)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(draws, probs)
    drawn = [each.draws.rows(np.arange(count)) for each, count in zip(found, counts, strict=True)]
    return SelectionPosterior(
        averaged("active_probs"),
        mean,
        np.sqrt((square - mean**2).clip(min=0)),
        averaged("intercept"),
        float(np.logaddexp.reduce(log_evidence)),
        _joined(drawn, np.repeat(RATIOS, counts), rng),
        np.sqrt(np.tensordot(probs**2, [each.error**2 for each in found], 1)),
        tuple({text: None for each, p in zip(found, probs, strict=True) if p > _NEGLIGIBLE for text in each.problems}),
        BackgroundEffects(RATIOS, probs, effects),
    )


def _joined(parts: Sequence[Draws], ratio: Array, rng: np.random.Generator) -> Draws:
    """Draws given each ratio, in random order."""
    names = "intercept", "slab_scale", "noise_scale", "rate"
    found = Draws(
        csr_array(vstack([part.coefficients for part in parts])),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
        ratio=ratio,
    )
    return found.rows(rng.permutation(len(ratio)))
