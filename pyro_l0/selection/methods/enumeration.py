"""Posteriors by enumeration: every gate vector of a small problem."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.exceptions import ConvergenceWarning

from pyro_l0.maths.monte_carlo import doubts
from pyro_l0.selection.design.draft import Draft
from pyro_l0.selection.design.joint import design_of
from pyro_l0.selection.families import Family, family_of
from pyro_l0.selection.methods.exact_chains import continued
from pyro_l0.selection.methods.gaussian_evidence import GaussianEvidence
from pyro_l0.selection.methods.joint_evidence import JointEvidence
from pyro_l0.selection.methods.laplace_evidence import FEWEST, LaplaceEvidence
from pyro_l0.selection.problem import JointProblem, Problem, SelectionPosterior

__all__ = ["enumerate_posterior", "exact_posterior"]

_MOST_FEATURES = 20
# Weight of all gate vectors that are left out of the moments of the coefficients.
_LEFT_OUT = 1e-10


def exact_posterior(
    X: ArrayLike,
    y: ArrayLike,
    *,
    family: str | Family = "gaussian",
    rate: float | tuple[float, float] | None = None,
    expected_size: float | None = None,
    slab_scale: float | None = None,
    noise_scale: float | None = None,
    standardize: bool = True,
    fit_intercept: bool = True,
    draws: int = 1000,
    seed: int | np.random.RandomState | None = None,
) -> SelectionPosterior:
    """Compute the posterior of a spike-and-slab regression by a sum over every subset of the features.

    For a Gaussian regression it is exact up to about 1e-4: unknown scales are integrated on a grid, an unknown rate in
    closed form. For other families Laplace's approximation integrates the coefficients of each subset; where these are
    too far from normal, exact chains find the posterior.

    With ``standardize=False``, ``fit_intercept=False`` and rate, slab_scale and noise_scale given, the model is
    y ~ N(X beta, noise_scale^2), beta_j = z_j w_j, z_j ~ Bernoulli(rate), w_j ~ N(0, slab_scale^2).

    Args:
        X: features, shape ``(n, p)``, p at most 20.
        y: observations, shape ``(n,)``: numbers, 0 or 1, numbers of classes from 0, counts, or survival times, with a
            minus sign where they are censored.
        family: ``"gaussian"``, ``"bernoulli"``, ``"categorical"``, ``"poisson"``, and of survival times ``"breslow"``
            or ``"efron"``, or a :class:`~pyro_l0.selection.Family` without parameters of its own, which are
            sampled and not enumerated.
        rate: this and the next five are as for :class:`~pyro_l0.selection.SpikeSlabRegressor`; a pair of numbers
            gives the parameters of a Beta prior.
        expected_size: as there.
        slab_scale: as there.
        noise_scale: as there.
        standardize: as there.
        fit_intercept: as there.
        draws: number of joint draws.
        seed: seed of the draws, or a generator to take it from.

    Returns:
        The posterior in the units of the data; slab scales are for standardised features if these are standardised.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are more than 20 features, the family is sampled, or an argument is out of range.

    Warns:
        ConvergenceWarning: exact chains followed, and their result is not ``ok``.

    Example:
        >>> import numpy as np
        >>> X = np.eye(6)[:, :2]  # two features
        >>> y = 5.0 * X[:, 0]
        >>> exact = exact_posterior(X, y, rate=0.5, slab_scale=2.0, noise_scale=0.5, seed=0)
        >>> exact.active_probs.round(2)
        array([1.  , 0.09])
    """
    draft = Draft(
        family=family_of(family, y),
        x=X,
        y=y,
        rate=rate,
        expected_size=expected_size,
        slab_scale=slab_scale,
        noise_scale=noise_scale,
        standardize=standardize,
        fit_intercept=fit_intercept,
    )
    design = design_of(draft)
    number = _number(seed)
    found = design.posterior(enumerate_posterior(design.problem, draws=draws, seed=number), number)
    if problems := (*found.problems, *doubts(float(found.error.max(initial=0.0)), "average those of several seeds.")):
        warnings.warn(" ".join(problems), ConvergenceWarning, stacklevel=2)
    return found


@torch.no_grad()
def enumerate_posterior(problem: Problem | JointProblem, *, draws: int = 1000, seed: int = 0) -> SelectionPosterior:
    """The posterior of a problem with at most 20 gates by a sum over its gate vectors."""
    if problem.gates > _MOST_FEATURES:
        raise ValueError(
            f"Expected at most {_MOST_FEATURES} features or groups to enumerate, but got {problem.gates}; use another "
            "method."
        )
    if problem.is_sampled:
        raise ValueError(
            f"Expected method='auto' or 'tempered' for the family {problem.family!r}, whose own parameters are sampled "
            "with the coefficients, but got 'enumerate'; leave it out."
        )
    evidence = _evidence(problem)
    z = (torch.arange(2**problem.gates)[:, None] >> torch.arange(problem.gates)) % 2 == 1  # all of them
    log_marginal = evidence.log_marginal(z)
    weights = log_marginal.softmax(0)
    ascending = weights.argsort()
    matters = ascending[weights[ascending].cumsum(0) > _LEFT_OUT]
    moments = evidence.moments(z[matters], weights[matters] / weights[matters].sum())
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(weights, max(draws, FEWEST), replacement=True, generator=generator)
    probs = torch.tensor([float(weights[column].sum()) for column in z.T], dtype=torch.float64)
    log_evidence = float(log_marginal.logsumexp(0))
    found = evidence.draws(z[drawn], generator)
    if found.correction is not None and isinstance(problem, Problem):
        return continued(problem, z[drawn], found, probs, log_evidence + found.correction, draws, generator)
    return SelectionPosterior.of(probs, moments, log_evidence, found.rows(np.arange(draws)), 0 * probs)


def _evidence(problem: Problem | JointProblem) -> GaussianEvidence | JointEvidence | LaplaceEvidence:
    if isinstance(problem, JointProblem):
        return JointEvidence(problem)
    return GaussianEvidence(problem) if problem.family.has_closed_form else LaplaceEvidence(problem)


def _number(seed: int | np.random.RandomState | None) -> int:
    """A whole number from a ``random_state``: None draws one, a RandomState gives its next."""
    if seed is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    return int(seed.randint(2**31 - 1)) if isinstance(seed, np.random.RandomState) else int(seed)
