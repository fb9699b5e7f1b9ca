"""From features and observations in their own units to a problem, and from its posterior back to their units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from pyro_l0.selection.posterior import Draws, SelectionPosterior
from pyro_l0.selection.problem import Family, Prior, Problem

__all__ = ["Design", "default_rate", "make_design"]

# Slabs of logits and of log means that are unlikely to be wider, for features of unit deviation.
_SLAB_UNITS = {"bernoulli": 2.0, "categorical": 2.0, "poisson": 1.0}
_FAMILIES = ("gaussian", "bernoulli", "categorical", "poisson")


@dataclass(frozen=True)
class Design:
    """A problem and the way back to the units of the data.

    A coefficient in these units is that of the problem times ``factor``, and the intercept is that of the problem plus
    ``offset`` less ``centre`` . coefficients. Scales of slabs stay those of the problem's coefficients: with
    standardised features, of the change of the linear predictor for one standard deviation of a feature.

    Attributes:
        problem: what the methods take.
        factor: shape ``(p,)``; 0 for a constant feature that the problem cannot tell from the intercept. Its gate
            follows the prior.
        centre: what the features were less by, shape ``(p,)``.
        offset: mean of the observations of a Gaussian regression with an intercept, otherwise 0.
        observations: n, before the contrasts.
    """

    problem: Problem
    factor: NDArray[np.float64]
    centre: NDArray[np.float64]
    offset: float
    observations: int

    @property
    def contrasts(self) -> bool:
        """Whether a flat intercept has been integrated out, by taking the observations orthogonal to a constant."""
        return self.problem.family == "gaussian" and len(self.problem.y) < self.observations

    def posterior(self, found: SelectionPosterior, seed: int) -> SelectionPosterior:
        """A posterior of the problem in the units of the data.

        Args:
            found: in the units of the problem.
            seed: of the intercepts of a Gaussian regression, which are drawn given the rest.
        """
        factor = self.factor[:, None]
        draws = self._draws(found.draws, np.random.default_rng(seed))
        return SelectionPosterior(found.inclusion, found.mean * factor, found.sd * factor, found.log_evidence, draws)

    def _draws(self, draws: Draws, rng: np.random.Generator) -> Draws:
        outputs = self.problem.outputs
        beta = draws.coefficients
        data = beta.data * np.repeat(self.factor, outputs)[beta.indices]
        coefficients = csr_array((data, beta.indices, beta.indptr), shape=beta.shape)
        # One column for each output: the features' centres in the rows of its coefficients.
        centres = np.kron(self.centre[:, None], np.eye(outputs))
        intercept = draws.intercept + self.offset - coefficients @ centres
        if self.contrasts:
            noise = draws.noise_scale / math.sqrt(self.observations)
            intercept = intercept + noise[:, None] * rng.standard_normal(intercept.shape)
        return draws._replace(coefficients=coefficients, intercept=intercept)


def make_design(
    x: ArrayLike,
    y: ArrayLike,
    family: Family = "gaussian",
    *,
    rate: float | tuple[float, float] | None = None,
    expected_size: float | None = None,
    slab_scale: float | None = None,
    noise_scale: float | None = None,
    standardize: bool = True,
    fit_intercept: bool = True,
) -> Design:
    """The problem of a regression with spike-and-slab coefficients.

    Args:
        x: features, shape ``(n, p)``.
        y: observations, shape ``(n,)``: numbers, 0 or 1, numbers of classes from 0, or counts.
        family: distribution of the observations.
        rate: P(z = 1), or the parameters of its Beta prior; by default it is learned, with the prior of
            :func:`default_rate`.
        expected_size: instead of a rate, how many features are expected to be open: a rate of expected_size / p.
        slab_scale: standard deviation of the slabs; learned by default, with a half-normal prior whose unit is the
            deviation of y for a Gaussian regression, 2 for logits and 1 for counts.
        noise_scale: standard deviation of Gaussian noise; learned by default, with a half-Cauchy prior whose unit is
            the deviation of y.
        standardize: divide the features by their standard deviations, so that the slab scale is for features of
            deviation 1; without an intercept by their root mean squares, as they are not centred then. Otherwise the
            unit of an unknown slab scale is divided by the root mean square of the features' deviations.
        fit_intercept: whether the linear predictor has an intercept. For a Gaussian regression its prior is flat and
            it is integrated out, for others it is normal with a deviation of 10.

    Raises:
        ValueError: an argument is out of range, or data do not fit one another or the family.
    """
    features, observations = _checked(x, y, family, fit_intercept)
    gaussian = family == "gaussian"
    centre = features.mean(0) if fit_intercept else np.zeros(features.shape[1])
    offset = float(observations.mean()) if gaussian and fit_intercept else 0.0
    features, observations = features - centre, observations - offset
    deviation = _deviations(features, centre)
    divisor = np.where(deviation > 0, deviation, 1.0) if standardize else np.ones_like(deviation)
    features = np.where(deviation > 0, features, 0.0) / divisor
    told = (deviation > 0) | (not fit_intercept and not standardize)

    size = math.sqrt(float(np.mean(observations**2))) or 1.0
    width = 1.0 if standardize else math.sqrt(float(np.mean(deviation**2))) or 1.0
    unit = (size if gaussian else _SLAB_UNITS[family]) / width
    prior = Prior(
        _rate(rate, expected_size, len(centre)),
        _scale("slab_scale", slab_scale),
        _scale("noise_scale", noise_scale, exists=gaussian),
        slab_unit=unit,
        noise_unit=size,
    )
    outputs = int(observations.max()) + 1 if family == "categorical" else 1
    rows = _contrasts(np.column_stack([features, observations])) if gaussian and fit_intercept else None
    problem = Problem(
        family,
        torch.from_numpy(np.ascontiguousarray(features if rows is None else rows[:, :-1])),
        torch.from_numpy(np.ascontiguousarray(observations if rows is None else rows[:, -1])),
        prior,
        intercept=fit_intercept and not gaussian,
        outputs=outputs,
    )
    return Design(problem, np.where(told, 1 / divisor, 0.0), centre, offset, len(observations))


def default_rate(features: int) -> tuple[float, float]:
    """Parameters of the Beta prior of an unknown rate: 1 and the square root of the number of features.

    The number of open gates is then about geometric with a mean of sqrt(p). A flat prior would give thousands of open
    gates with tiny slabs as much weight as a few.
    """
    return 1.0, math.sqrt(features)


def _checked(
    x: ArrayLike, y: ArrayLike, family: Family, fit_intercept: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Features and observations in float64, if they are what the family takes."""
    if family not in _FAMILIES:
        raise ValueError(f"Expected a family of {_FAMILIES}, but got {family!r}.")
    features, observations = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if features.ndim != 2 or not features.size or observations.shape != features.shape[:1]:
        raise ValueError(
            "Expected X of shape (n, p) and y of shape (n,), neither of them empty, but got "
            f"{features.shape} and {observations.shape}."
        )
    for name, values in (("X", features), ("y", observations)):
        if not np.isfinite(values).all():
            raise ValueError(f"Expected {name} to be finite, but it holds NaN or infinity; impute or drop rows.")
    if family == "gaussian" and fit_intercept and len(features) < 2:
        raise ValueError("Expected at least 2 samples to learn from beside an intercept, but got n_samples = 1.")
    if family == "poisson" and (observations < 0).any():
        raise ValueError(
            f"Expected y of the family 'poisson' not to be negative, but its least is {observations.min():g}."
        )
    if family in ("bernoulli", "categorical") and not _counts(observations):
        raise ValueError(
            f"Expected y of the family {family!r} to hold whole numbers from 0, but got {observations[:5]}."
        )
    if family == "bernoulli" and observations.max() > 1:
        raise ValueError(f"Expected y of the family 'bernoulli' to hold 0 and 1, but got {observations.max()}.")
    if family == "categorical" and observations.max() < 1:
        raise ValueError("Expected y of the family 'categorical' to hold at least 2 classes, but all of it is 0.")
    return features, observations


def _counts(y: NDArray[np.float64]) -> bool:
    return bool(((y >= 0) & (y == np.floor(y))).all())


def _rate(rate: float | tuple[float, float] | None, expected_size: float | None, p: int) -> float | tuple[float, float]:
    """The rate, or the parameters of its prior."""
    if rate is not None and expected_size is not None:
        raise ValueError(f"Expected a rate or an expected_size, but got both: {rate} and {expected_size}.")
    if isinstance(rate, tuple):
        if len(rate) != 2 or not all(0 < value < math.inf for value in rate):
            raise ValueError(f"Expected the two positive parameters of a Beta prior as rate, but got {rate}.")
        return rate
    if rate is not None:
        if not 0 < rate < 1:
            raise ValueError(f"Expected rate to lie between 0 and 1, but got {rate}.")
        return float(rate)
    if expected_size is None:
        return default_rate(p)
    if not 0 < expected_size < p:
        raise ValueError(
            f"Expected expected_size to lie between 0 and the number of features, {p}, but got {expected_size}."
        )
    return expected_size / p


def _scale(name: str, value: float | None, exists: bool = True) -> float | None:
    """A scale that is given, if it may be."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"Expected {name} to be positive and finite, or None to learn it, but got {value}.")
    if value is not None and not exists:
        raise ValueError(f"Expected no {name} for a family other than the Gaussian, but got {value}; leave it out.")
    return value


def _deviations(features: NDArray[np.float64], centre: NDArray[np.float64]) -> NDArray[np.float64]:
    """Root mean squares of centred features; 0 where there is nothing but the rounding of a constant."""
    deviation = np.sqrt(np.mean(features**2, axis=0))
    rounding = 10 * np.finfo(np.float64).eps * np.abs(centre)
    return np.where(deviation > rounding, deviation, 0.0)


def _contrasts(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coordinates of columns orthogonal to a constant: n rows become n - 1.

    A Householder reflection takes the constant vector to the first axis, and the other axes are the contrasts.
    """
    n = len(columns)
    normal = np.full(n, 1 / math.sqrt(n))
    normal[0] += 1.0
    # |normal|^2 = 2 + 2 / sqrt(n).
    return (columns - np.outer(normal, normal @ columns) / (1 + 1 / math.sqrt(n)))[1:]
