"""From features and observations in their own units to a problem, and from its posterior back to their units."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pyro_l0.maths.second_order import SparseColumns
from pyro_l0.selection.design.background import Background
from pyro_l0.selection.design.draft import LEAST, MOST, Draft, Step
from pyro_l0.selection.design.noise import IntegrateOut, Weigh, Whiten
from pyro_l0.selection.design.units import Centre, Offset, Scale
from pyro_l0.selection.families.family import Array
from pyro_l0.selection.problem import Prior, Problem, SelectionPosterior

__all__ = ["STEPS", "Design", "check_slab_scale", "default_rate", "rate_of"]

# In the order of their application.
STEPS: tuple[type[Step], ...] = (Offset, Centre, Scale, Weigh, Whiten, IntegrateOut)

# Of the deviation of y: less noise is hidden by the rounding of sums of squares, and the determinant of wider slabs
# overflows.
_LEAST_NOISE, _MOST_SLAB = 1e-7, 1e10
_MANY = 2000  # rows and features beyond which their spectrum takes long
_INTERCEPT = 10.0  # deviation of the intercept's prior, of the size of y or of logits and log means


class Design:
    """The problem of a regression with spike-and-slab coefficients, by steps that its posterior undoes."""

    def __init__(self, draft: Draft) -> None:
        self._steps = [step() for step in STEPS]
        for step in self._steps:
            step.apply(draft)
        self.problem, self._draft = _problem(draft), draft
        self.gates = np.unique(draft.gate_of[: draft.gated])  # which of all the problem has
        self.constant = draft.constant

    def small_effects(self) -> Background | None:
        """Those that a background has, of dense features that are not too many; None else."""
        x = self._draft.x
        if isinstance(x, SparseColumns) or not self._draft.gated or min(x.shape) > _MANY:
            return None
        return Background(self._draft)

    def posterior(self, found: SelectionPosterior, seed: int) -> SelectionPosterior:
        """A posterior of the problem in the units of the data; what was integrated out is drawn given the rest."""
        rng = np.random.default_rng(seed)
        background = self.problem.background
        found = found if background is None else background.undo(found, rng)
        for step in reversed(self._steps):
            found = step.undo(found, rng)
        return found


def _problem(draft: Draft) -> Problem:
    """The problem of a regression from a draft to which all steps were applied, with priors in the draft's units."""
    family, gated, is_sparse = draft.family, draft.gated, isinstance(draft.x, SparseColumns)
    is_normal, deviation = family.has_closed_form, draft.deviation[:gated]
    noise_unit, unit = _units(draft)
    width = math.sqrt(float(np.mean(deviation**2))) if gated else 1.0
    gates, number_of = np.unique(draft.gate_of[:gated], return_inverse=True)
    prior = Prior(
        rate_of(draft, gates),
        draft.slab_scale,
        draft.noise_scale,
        slab_unit=family.slab_unit * unit / width,
        noise_unit=noise_unit,
        intercept_scale=_INTERCEPT * noise_unit,
        always_scale=draft.always_in_scale or _INTERCEPT * noise_unit,
    )
    _check_scale("noise_scale", prior.noise_scale, _LEAST_NOISE * noise_unit, MOST * noise_unit)
    check_slab_scale(prior.slab_scale, unit / (float(deviation.max(initial=0)) or 1.0))
    return Problem(
        family,
        torch.empty(len(draft.y), gated, device="meta") if is_sparse else torch.from_numpy(draft.x),
        torch.from_numpy(draft.y),
        prior,
        intercept=draft.fit_intercept and family.has_intercept and not is_normal,
        always=draft.always,
        gate_of=None if np.array_equal(number_of, np.arange(gated)) else torch.from_numpy(number_of),
        weight=None if draft.weight is None or is_normal else torch.from_numpy(draft.weight),
        offset=None if draft.offset is None else torch.from_numpy(draft.offset),
        observations=draft.number - draft.taken if is_normal else None,
        sparse=draft.x if is_sparse else None,
        background=Background(draft) if draft.background and gated else None,
    )


def _units(draft: Draft) -> tuple[float, float]:
    """The sizes of noise and of y, which differ where the noise has a covariance: of whitened y, and of y itself."""
    size: Any = 1.0
    if draft.family.has_closed_form:
        size = np.linalg.norm(draft.y) / math.sqrt(draft.number)
    elif draft.family.is_location:
        size = draft.family.unit(draft.y, draft.rows)
    size = float(size) or 1.0
    if draft.root is None:
        return size, size
    y = draft.root @ draft.y
    return size, math.sqrt(float(np.mean((y - y.mean() * draft.fit_intercept) ** 2))) or 1.0


def default_rate(features: int) -> tuple[float, float]:
    """Parameters of the Beta prior of an unknown rate: 1 and the square root of the number of features.

    The number of open gates is then about geometric with a mean of sqrt(p). A flat prior would give thousands of open
    gates with tiny slabs as much weight as a few.
    """
    return 1.0, math.sqrt(features)


def rate_of(draft: Draft, gates: NDArray[np.intp]) -> float | tuple[float, float] | Array:
    """Of some gates; an array leaves them all to be learned, or none."""
    rate, expected_size, p = draft.rate, draft.expected_size, len(gates)
    if isinstance(rate, np.ndarray) and np.isnan(rate).any():
        if not np.isnan(rate[gates]).all():
            raise ValueError(
                "Expected a rate for each feature, or none but rates of 1, but some are missing; add them, or leave "
                "out those below 1."
            )
        rate = None
    if rate is not None and expected_size is not None:
        raise ValueError(f"Expected a rate or an expected_size, but got both: {rate} and {expected_size}.")
    if isinstance(rate, np.ndarray):
        return rate[gates]
    if isinstance(rate, Real) and rate == 1:
        return np.ones(0)  # as no gate is left
    if expected_size is not None:
        rate = expected_size / max(p, 1)
    if isinstance(rate, Real) and not 0 < rate < 1:
        raise ValueError(
            f"Expected a rate between 0 and 1, or an expected_size between 0 and the number of features, {p}, but got "
            f"{rate if expected_size is None else expected_size}; groups count as one feature each, and constant "
            "features not at all."
        )
    return default_rate(max(p, 1)) if rate is None else rate


def check_slab_scale(scale: float | None, unit: float) -> None:
    """Refuse one that is numerically 0 or infinite beside the unit of effects."""
    _check_scale("slab_scale", scale, LEAST * unit, _MOST_SLAB * unit)


def _check_scale(name: str, scale: float | None, least: float, most: float) -> None:
    """Raise a ValueError if a scale that is given is numerically 0 or infinite beside y; None is learned."""
    if scale is not None and not least <= scale <= most:
        raise ValueError(
            f"Expected {name} to lie between {least:g} and {most:g}, in view of the size of y, but got {scale:g}; None "
            "learns it."
        )
