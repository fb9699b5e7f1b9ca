"""From several responses, each with observations of its own, to a joint problem, and back."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import torch
from scipy.sparse import csr_array

from pyro_l0.selection.design.design import Design, check_slab_scale, rate_of
from pyro_l0.selection.design.draft import Draft
from pyro_l0.selection.families import Gaussian
from pyro_l0.selection.families.family import Array
from pyro_l0.selection.problem import Draws, JointProblem, SelectionPosterior

__all__ = ["JointDesign", "design_of"]


def design_of(draft: Draft) -> Design | JointDesign:
    """The design of a regression, or of as many as there are responses, with a warning of constant features."""
    names = draft.names
    design = JointDesign(draft) if draft.family.is_joint else Design(draft)
    constant = [repr(names[j]) for j in sorted(design.constant)]
    if constant:
        more = f" and {len(constant) - 5} more" if len(constant) > 5 else ""
        warnings.warn(
            "Constant features have no effect that could be found: the inclusion probability and the coefficient of "
            f"{', '.join(constant[:5])}{more} are 0. Leave them out.",
            stacklevel=4,
        )
    return design


class JointDesign:
    """The joint problem of the regressions of K responses, each over its size, by a design of each.

    A response that is NaN in a row was not observed there.
    """

    def __init__(self, draft: Draft) -> None:
        self._gates = int(draft.gate_of.max()) + 1
        self._designs = [Design(_of_response(draft, k)) for k in range(draft.y.shape[1])]
        self._units = [design.problem.prior.noise_unit for design in self._designs]
        for k, design in enumerate(self._designs):
            y = np.nanmax(np.abs(draft.y[:, k]))
            if float(design.problem.y.abs().max()) <= 10 * np.finfo(np.float64).eps * y:
                raise ValueError(
                    "Expected each response to vary, and not with what is always in alone, but number "
                    f"{k} does not; leave it out."
                )
        self.constant = set.intersection(*(design.constant for design in self._designs))
        own = [design.gates for design in self._designs]
        self._open = np.unique(np.concatenate(own))
        widths = [unit / design.problem.prior.slab_unit for unit, design in self._pairs() if len(design.gates)]
        width = math.sqrt(float(np.mean(np.square(widths or [1.0]))))
        prior = replace(
            self._designs[0].problem.prior,
            rate=rate_of(draft, self._open),
            slab_unit=1 / width,
            slab_scale=draft.slab_scale,
            noise_unit=1.0,
        )
        check_slab_scale(draft.slab_scale, 1 / width)
        parts = (replace(design.problem, y=design.problem.y / unit, prior=prior) for unit, design in self._pairs())
        places = (torch.from_numpy(np.searchsorted(self._open, gates)) for gates in own)
        self.problem = JointProblem(draft.family, tuple(parts), tuple(places), prior, len(self._open))

    def _pairs(self) -> list[tuple[float, Design]]:
        return list(zip(self._units, self._designs, strict=True))

    def posterior(self, found: SelectionPosterior, seed: int) -> SelectionPosterior:
        """A posterior of the problem in the units of the data; what was integrated out is drawn given the rest."""
        ends = np.cumsum([part.width for part in self.problem.parts])
        columns = [slice(end - part.width, end) for end, part in zip(ends, self.problem.parts, strict=True)]
        each = []
        for k, (unit, design) in enumerate(self._pairs()):
            draws, own = found.draws, self.problem.gates_of[k].numpy()
            scaled = Draws(
                draws.coefficients[:, columns[k]] * unit,
                np.zeros((len(draws.rate), 1)),
                draws.slab_scale,
                draws.noise_scale[:, k] * unit,
                draws.rate,
            )
            part = SelectionPosterior(
                found.active_probs[own],
                found.mean[columns[k]] * unit,
                found.sd[columns[k]] * unit,
                np.zeros(1),
                -self.problem.parts[k].size * math.log(unit),
                scaled,
                found.error[own],
            )
            each.append(design.posterior(part, seed + k))
        return self._joined(found, each)

    def _joined(self, found: SelectionPosterior, each: list[SelectionPosterior]) -> SelectionPosterior:
        probs, error = np.max([part.active_probs for part in each], 0), np.zeros(self._gates)
        probs[self._open], error[self._open] = found.active_probs, found.error
        draws = found.draws._replace(
            coefficients=_side_by_side([part.draws.coefficients for part in each]),
            intercept=np.hstack([part.draws.intercept for part in each]),
            noise_scale=np.stack([part.draws.noise_scale for part in each], 1),
        )
        return replace(
            found,
            active_probs=probs,
            mean=np.hstack([part.mean for part in each]),
            sd=np.hstack([part.sd for part in each]),
            intercept=np.concatenate([part.intercept for part in each]),
            log_evidence=found.log_evidence + sum(part.log_evidence for part in each),
            draws=draws,
            error=error,
        )


def _of_response(draft: Draft, k: int) -> Draft:
    """The regression of one response on the rows in which it was observed."""
    rows = np.flatnonzero(~np.isnan(draft.y[:, k]))
    if not len(rows):
        raise ValueError(f"Expected observations of a weight in each data set, but number {k} has none; leave it out.")
    return replace(
        draft,
        family=Gaussian(),
        x=draft.x[rows],
        y=draft.y[rows, k],
        weight=None if draft.weight is None else draft.weight[rows],
        offset=None if draft.offset is None else draft.offset[rows, k : k + 1],
        expected_size=None,  # these two are of all parts
        slab_scale=None,
    )


def _side_by_side(each: list[csr_array]) -> csr_array:
    """Coefficients of shape ``(N, p)`` for each of K responses, those of a feature side by side: ``(N, p K)``."""
    outputs, shape = len(each), each[0].shape
    parts = [part.tocoo() for part in each]
    rows = np.concatenate([part.row for part in parts])
    columns = np.concatenate([part.col * outputs + k for k, part in enumerate(parts)])
    values: Array = np.concatenate([part.data for part in parts])
    return csr_array((values, (rows, columns)), shape=(shape[0], shape[1] * outputs))
