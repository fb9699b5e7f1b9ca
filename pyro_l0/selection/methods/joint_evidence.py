r"""Gate vectors of several Gaussian regressions that share gates and the scale of the slabs.

Given the scale of the slabs, the regressions are independent, each with a noise scale of its own. With a(r) and d(r) of
``gaussian_evidence``, the log joint density of y and of the logarithm s of a noise scale is

.. math:: -n s - \frac{y'y - a(r)}{2 e^{2 s}} - \tfrac12 d(r) - \tfrac n2 \log(2 \pi) + \log p(s), \quad
    r = (\text{slab_scale} / e^s)^2.

It is summed over nodes of s at each node of the slab scale, and the sums of all regressions are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array, hstack
from torch import Tensor

from pyro_l0.maths.second_order import BATCH, open_positions
from pyro_l0.selection.families.normal import smallest_noise
from pyro_l0.selection.methods.gaussian_evidence import Spectra, noise_widths, search_rounds
from pyro_l0.selection.methods.grid import (
    NODES,
    Batch,
    Grid,
    batches_of,
    distinct_vectors,
    draws_of,
    nodes_around_mode,
    spaced,
    sparse_rows,
)
from pyro_l0.selection.problem import Draws, JointProblem, Problem

__all__ = ["JointEvidence"]

_AT_ONCE = 128  # gate vectors whose nodes are held together
_STEP = 0.9  # deviations of a log noise scale, of about (2 n)^-1/2, from one node to the next
_WIDE = 12.0  # log ratio of scales at which slabs shrink nothing


class _Noise(NamedTuple):
    """M nodes of the log noise scale of a regression at each of R slab scales of m gate vectors."""

    nodes: Tensor  # shape (m, R, M)
    log_joint: Tensor  # log p(y, node | slab scale, z), in the same shape
    log_sum: Tensor  # log p(y | slab scale, z), shape (m, R)


class _Regression:
    """One of the regressions, and what its noise scale is given gates and the scale of the slabs."""

    def __init__(self, problem: Problem, gates: Tensor) -> None:
        self.problem, self._gates, self._n = problem, gates, problem.size
        self._square_y = float(problem.y @ problem.y)
        self._least = self._n * smallest_noise(self._n, self._square_y) ** 2
        self._step = _STEP / math.sqrt(2 * self._n)

    def on(self, z: Tensor) -> Tensor:
        """Which features are open, from gates of shape ``(m, G)``."""
        return self.problem.switched(z[:, self._gates])

    def spectra(self, z: Tensor) -> tuple[Spectra, Tensor]:
        """Of gate vectors, shape ``(m, G)``, padded to the longest, and which open features are no padding."""
        on, rows = self.on(z), torch.arange(len(z))
        index, valid = open_positions(on) if on.shape[1] else (rows.new_zeros(len(z), 0), on)
        return Spectra.of(self.problem.quadratic, rows, index, valid), valid

    def noise(self, spectra: Spectra, log_slab: Tensor) -> _Noise:
        """At log slab scales of shape ``(m, R)``."""
        log_joint, ends = self._density(spectra, log_slab)
        number = 2 + int(float((ends[:, 1] - ends[:, 0]).max()) / self._step)
        if number <= NODES:
            nodes = spaced(ends, number)
        else:
            nodes, _ = nodes_around_mode(log_joint, ends, search_rounds(self._n))
        grid = Grid.of_one(nodes, log_joint(nodes))
        shape = (*log_slab.shape, -1)
        return _Noise(nodes.view(shape), grid.log_joint.view(shape), grid.log_marginal().view(log_slab.shape))

    def given_noise(self, spectra: Spectra, log_noise: Tensor, log_slab: Tensor) -> Tensor:
        """log p(y | scales, z), up to what the slab scale does not change, at log slab scales of shape ``(m, R)``."""
        explained, log_det = spectra.sums(log_slab - log_noise[:, None])
        return 0.5 * (explained * (-2 * log_noise).exp()[:, None] - log_det)

    def _density(self, spectra: Spectra, log_slab: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Of the log noise scale, from nodes of shape ``(m R, M)``, and between which ends it is."""
        below, above = noise_widths(self._n)
        most, _ = spectra.sums(torch.full_like(log_slab[:, :1], _WIDE))
        lowest = 0.5 * ((self._square_y - most).clamp(min=self._least) / self._n).log() - below
        highest = torch.full_like(lowest, 0.5 * math.log(self._square_y / self._n) + above)

        def log_joint(nodes: Tensor) -> Tensor:
            s = nodes.view(len(log_slab), -1)
            explained, log_det = spectra.sums(log_slab.repeat_interleave(nodes.shape[1], 1) - s)
            residual = (self._square_y - explained).clamp(min=self._least)
            log_density = -self._n * (s + 0.5 * math.log(2 * math.pi)) - 0.5 * (residual * (-2 * s).exp() + log_det)
            return (log_density + self.problem.prior.log_noise(s)).view_as(nodes)

        return log_joint, torch.cat([lowest, highest], 1).repeat_interleave(log_slab.shape[1], 0)


class JointEvidence:
    """Gate vectors of a joint problem with everything else integrated out."""

    def __init__(self, problem: JointProblem) -> None:
        self.problem = problem
        self._regressions = [_Regression(*part) for part in zip(problem.parts, problem.gates_of, strict=True)]

    def log_marginal(self, z: Tensor) -> Tensor:
        """log p(y, z) for gates of shape ``(S, G)``."""
        z = self.problem.checked(z)
        each = [self._slab(self._spectra(part))[0].log_marginal() for part in z.split(_AT_ONCE)]
        return self.problem.prior.gates().log_prob(z) + torch.cat(each)

    def moments(self, z: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Means of the coefficients and of their squares over gate vectors of weights that sum to one, ``(P, 1)``."""
        found = [torch.zeros(2, part.width, dtype=torch.float64) for part in self.problem.parts]
        parts = zip(self.problem.checked(z).split(_AT_ONCE), weights.split(_AT_ONCE), strict=True)
        for vectors, weight in parts:
            spectra = self._spectra(vectors)
            slab, noises = self._slab(spectra)
            for (own, valid), noise, total in zip(spectra, noises, found, strict=True):
                for moment, values in zip(total, _moments(own, slab, noise), strict=True):
                    moment.index_add_(0, own.open.flatten(), (weight[:, None] * values * valid).flatten())
        first, second = torch.cat(found, 1)[:, :, None]
        return first, second

    def draws(self, z: Tensor, generator: torch.Generator) -> Draws:
        """One draw of the coefficients and of what is unknown for each gate vector."""
        z = self.problem.checked(z)
        log_scales = self.drawn_scales(z, generator)
        log_slab, every = log_scales[:, -1], []
        for regression, log_noise in zip(self._regressions, log_scales.T[:-1], strict=True):
            parts = []
            for rows, features in batches_of(regression.on(z), lambda k: BATCH // (1 + k * k)):
                spectra = Spectra.of(regression.problem.quadratic, rows, features)
                beta = spectra.draw(log_slab[rows] - log_noise[rows], log_noise[rows], generator)
                parts.append((Batch(rows, features), beta[:, :, None]))
            every.append(sparse_rows(parts, len(z), regression.problem.width, 1))
        return Draws(
            csr_array(hstack(every)),
            np.zeros((len(z), len(every))),
            log_slab.exp().numpy(),
            log_scales[:, :-1].exp().numpy(),
            self.problem.prior.draw_rate(z, generator),
        )

    def moved_scales(self, z: Tensor, theta: Tensor, generator: torch.Generator | None) -> Tensor:
        """A move of the logarithms of the K noise scales and the slab scale, shape ``(S, K + 1)``, given gates.

        Noise scales are drawn given the slab scale, it given them, and they given it: forwards and backwards alike.
        """
        spectra = self._spectra(z > 0)
        log_noise = self._drawn_noise(spectra, theta[:, -1], generator)

        def log_joint(log_slab: Tensor) -> Tensor:
            total = self.problem.prior.log_slab(log_slab)
            for regression, (own, _), s in zip(self._regressions, spectra, log_noise.T, strict=True):
                total = total + regression.given_noise(own, s, log_slab)
            return total

        nodes, _ = nodes_around_mode(log_joint, self._ends(len(z)))
        log_slab, _ = Grid.of_one(nodes, log_joint(nodes)).draw(torch.arange(len(z)), generator)
        return torch.cat([self._drawn_noise(spectra, log_slab, generator), log_slab[:, None]], 1)

    def drawn_scales(self, z: Tensor, generator: torch.Generator) -> Tensor:
        """Logarithms of K noise scales and the slab scale, drawn given each gate vector, shape ``(S, K + 1)``."""
        distinct, vector = distinct_vectors(z)
        found = torch.empty(len(z), len(self._regressions) + 1, dtype=torch.float64)
        for part in torch.arange(len(distinct)).split(_AT_ONCE):
            rows, which = draws_of(part, vector)
            spectra = self._spectra(distinct[part])
            log_slab, _ = self._slab(spectra)[0].draw(which, generator)
            drawn = [(own.at(which), valid) for own, valid in spectra]
            found[rows] = torch.cat([self._drawn_noise(drawn, log_slab, generator), log_slab[:, None]], 1)
        return found

    def _drawn_noise(
        self, spectra: list[tuple[Spectra, Tensor]], log_slab: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Of log noise scales given the slab scale of each gate vector, shape ``(m, K)``."""
        found, every = [], torch.arange(len(log_slab))
        for regression, (own, _) in zip(self._regressions, spectra, strict=True):
            noise = regression.noise(own, log_slab[:, None])
            found.append(Grid.of_one(noise.nodes[:, 0], noise.log_joint[:, 0]).draw(every, generator)[0])
        return torch.stack(found, 1)

    def _spectra(self, z: Tensor) -> list[tuple[Spectra, Tensor]]:
        return [regression.spectra(z) for regression in self._regressions]

    def _slab(self, spectra: list[tuple[Spectra, Tensor]]) -> tuple[Grid, list[_Noise]]:
        """The grid of the slab scale of each gate vector, and of all noise scales at its nodes."""
        prior, m = self.problem.prior, len(spectra[0][0].rows)
        pairs = [(regression, own) for regression, (own, _) in zip(self._regressions, spectra, strict=True)]

        def noises(log_slab: Tensor) -> list[_Noise]:
            return [regression.noise(own, log_slab) for regression, own in pairs]

        def log_joint(log_slab: Tensor, each: list[_Noise]) -> Tensor:
            return torch.stack([noise.log_sum for noise in each]).sum(0) + prior.log_slab(log_slab)

        nodes, _ = nodes_around_mode(lambda log_slab: log_joint(log_slab, noises(log_slab)), self._ends(m))
        found = noises(nodes)
        return Grid.of_one(nodes, log_joint(nodes, found)), found

    def _ends(self, m: int) -> Tensor:
        """Between which the logarithm of the slab scale is."""
        return torch.tensor([self.problem.prior.slab_range()], dtype=torch.float64).expand(m, 2)


def _moments(spectra: Spectra, slab: Grid, noise: _Noise) -> tuple[Tensor, Tensor]:
    """Means of the open coefficients and of their squares, each of shape ``(m, k)``."""
    probs = (slab.probs() * noise.log_joint.softmax(2)).flatten(1)[:, None, :]
    gains = spectra.gains((slab.log_ratio[:, :, None] - noise.nodes).flatten(1))
    weighted = gains * probs
    scaled = spectra.vectors * spectra.projected[:, None, :]
    square = ((scaled @ (weighted @ gains.mT)) * scaled).sum(2)
    spread = spectra.vectors.square() @ (weighted * (2 * noise.nodes).exp().flatten(1)[:, None, :]).sum(2, keepdim=True)
    return (scaled * weighted.sum(2)[:, None, :]).sum(2), square + spread[:, :, 0]
