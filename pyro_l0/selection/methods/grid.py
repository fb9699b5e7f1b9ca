"""A grid of the unknown scales, placed where the posterior of gate vectors is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from pyro_l0.maths.tempered_gibbs import BetaBinomialGates, GatePrior, IndependentGates, distinct_rows
from pyro_l0.selection.problem import Prior

COARSE, _MOST = 24, 128  # nodes: few for the rounds in which a grid is laid


class Axis(NamedTuple):
    """A range of the logarithm of a scale; of length 0 where the scale is known."""

    low: float
    high: float
    curvature: float  # about the largest of minus a log posterior at its maximum, along the axis
    error: float  # of integrals, relative

    @property
    def known(self) -> bool:
        """Whether there is a single value."""
        return self.high <= self.low

    def nodes(self, size: int) -> Tensor:
        """Equally spaced nodes, or the known value."""
        return torch.linspace(self.low, self.high, 1 if self.known else size, dtype=torch.float64)

    def fine_nodes(self, times: int = 1) -> Tensor:
        """The nodes that the trapezoidal rule needs, or ``times`` as many.

        Steps of h err by 2 exp(-2 pi^2 / h^2) for a standard normal density, and by about exp(-pi^2 / (2 h)) for the
        density of the logarithm of a half-normal scale.
        """
        return self.nodes(times * self._fine)

    @property
    def _fine(self) -> int:
        digits = math.log(1 / self.error)
        step = math.pi * min(math.pi / (2 * digits), math.sqrt(2 / (self.curvature * (digits + math.log(2)))))
        return min(max(math.ceil(self.length / step) + 1, 3), _MOST)

    @property
    def settled(self) -> bool:
        """Whether integrals need no more nodes than there are coarse ones."""
        return self.known or self._fine <= COARSE

    def deficit(self) -> float:
        """How much higher a log posterior may be between two coarse nodes than at the better one.

        The worst is c (e^-2t - 1 + 2 t) / 4 at half a step t below the maximum, for a curvature c.
        """
        step = 0.0 if self.known else self.length / (COARSE - 1)
        return self.curvature / 4 * (math.expm1(step) - step)

    def zoomed(self, log_weights: Tensor, deficit: float) -> Axis:
        """The part on which nodes at equal distances have weight, but for a deficit, and one step beyond."""
        if self.known:
            return self
        step = self.length / (len(log_weights) - 1)
        kept = torch.nonzero(log_weights > log_weights.max() + math.log(self.error) - deficit)[:, 0]
        low, high = self.low + step * (int(kept[0]) - 1), self.low + step * (int(kept[-1]) + 1)
        return self._replace(low=max(low, self.low), high=min(high, self.high))

    @property
    def length(self) -> float:
        """Of the range."""
        return self.high - self.low


def step_of(nodes: Tensor) -> float:
    """Distance of nodes; 1 for a known value, which has a mass and no density."""
    return float(nodes[1] - nodes[0]) if len(nodes) > 1 else 1.0


def draw_nodes(probs: Tensor, state: Tensor, generator: torch.Generator) -> Tensor:
    """A node for each draw, shape ``(N,)``, from its state and the nodes' probabilities given each, ``(s, nodes)``."""
    below = probs.cumsum(1)
    # The distribution functions of all states one above the other: one search finds the nodes of all draws.
    ladder = below / below[:, -1:] + torch.arange(len(probs))[:, None]
    point = torch.rand(len(state), generator=generator, dtype=torch.float64)
    node = torch.searchsorted(ladder.flatten(), state + point) - state * probs.shape[1]
    return node.clamp(0, probs.shape[1] - 1)


def log_half_normal(log_scale: Tensor, unit: float) -> Tensor:
    """Log density of log_scale where the scale is half-normal."""
    t = log_scale - math.log(unit)
    return 0.5 * math.log(2 / math.pi) + t - 0.5 * (2 * t).exp()


def log_half_cauchy(log_scale: Tensor, unit: float) -> Tensor:
    """Log density of log_scale where the scale is half-Cauchy."""
    t = log_scale - math.log(unit)
    return math.log(2 / math.pi) - torch.logaddexp(t, -t)


class Group(NamedTuple):
    """States with the same number of open features."""

    rows: Tensor  # which states, shape (m,)
    open: Tensor  # their open features, shape (m, k)
    known: tuple[Tensor, ...] = ()  # what has been computed once of each state

    def where(self, kept: Tensor) -> Group:
        """Some of the states."""
        if bool(kept.all()):
            return self
        return Group(self.rows[kept], self.open[kept], tuple(x[kept] for x in self.known))

    def split(self, size: int) -> Iterator[Group]:
        """Groups of at most ``size`` states."""
        parts = zip(*(x.split(size) for x in (self.rows, self.open, *self.known)), strict=True)
        return (Group(rows, opened, tuple(known)) for rows, opened, *known in parts if len(rows))


def groups_of(on: Tensor) -> list[Group]:
    """States grouped by how many features are open, from which are, bool, shape ``(S, p)``."""
    count = on.sum(1)
    found = []
    for k in count.unique().tolist():
        rows = torch.nonzero(count == k)[:, 0]
        found.append(Group(rows, torch.nonzero(on[rows])[:, 1].reshape(len(rows), k)))
    return found


def distinct_states(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each of some gate vectors once, which of these every one is, and how often they occur."""
    first, state = distinct_rows(z)
    return z[first], state, state.bincount()


def draws_of(rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Which draws have one of some states, and which of these each has."""
    place = torch.full((int(state.max()) + 1,), -1)
    place[rows] = torch.arange(len(rows))
    drawn = torch.nonzero(place[state] >= 0)[:, 0]
    return drawn, place[state[drawn]]


def gate_prior(prior: Prior) -> GatePrior:
    """The prior of the gates, with an unknown rate integrated out."""
    if isinstance(prior.rate, tuple):
        return BetaBinomialGates(*prior.rate)
    return IndependentGates(torch.tensor(math.log(prior.rate) - math.log1p(-prior.rate), dtype=torch.float64))


def draw_rate(prior: Prior, z: Tensor, generator: torch.Generator) -> NDArray[np.float64]:
    """P(z = 1) given gates of shape ``(N, G)``, shape ``(N,)``."""
    if not isinstance(prior.rate, tuple):
        return np.full(len(z), prior.rate)
    opened = z.sum(1).numpy()
    # By numpy, as torch draws Beta variables from its global generator alone.
    rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
    return rng.beta(prior.rate[0] + opened, prior.rate[1] + z.shape[1] - opened)


def sparse_rows(parts: list[tuple[Group, Tensor]], rows: int, p: int, outputs: int) -> csr_array:
    """Coefficients of the open features, shape ``(m, k, outputs)`` for each group, as the rows of a sparse matrix."""
    at, columns, values = [], [], []
    for group, beta in parts:
        place = group.open[:, :, None] * outputs + torch.arange(outputs)
        at.append(group.rows[:, None, None].expand_as(place).flatten())
        columns.append(place.flatten())
        values.append(beta.flatten())
    where = (torch.cat(at).numpy(), torch.cat(columns).numpy())
    return csr_array((torch.cat(values).numpy(), where), shape=(rows, p * outputs))


_SMALLEST_NOISE = 1e-5
_NEGLIGIBLE = 20.0  # nats below the largest density, where the ranges begin
# Relative errors of integrals; without noise, less than that of Laplace's approximation.
_ERROR, _ERROR_WITHOUT_NOISE = 1e-8, 1e-4
# Nats of the half-normal prior below and above its unit, between which the slab scale lies.
_BELOW, _ABOVE = 11.0, 2.0

_LIGHT = 32.0  # nats below the heaviest state, beyond which a state does not shape the grid
_ROUNDS = 8  # at most
_ENOUGH = 512  # states


class Grid(NamedTuple):
    """R nodes of the log of slab scale / noise scale, and M nodes of the log noise scale for each of them."""

    log_ratio: Tensor  # shape (R,)
    log_noise: Tensor  # shape (R, M)
    log_prior: Tensor  # log prior density of the unknown scales times the area of a cell, shape (R, M)
    steps: tuple[float, ...]  # sizes of a cell; 0 where there is one node
    log_slab: float | None  # of a slab scale that is known, from which the noise scale follows

    def draw(self, probs: Tensor, state: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws of log ratio and log noise scale, shape ``(N,)`` each, spread over their cells; see ``draw_nodes``."""
        node = draw_nodes(probs.flatten(1), state, generator)
        row = node // self.log_noise.shape[1]
        spread = torch.rand(len(self.steps), len(node), generator=generator, dtype=torch.float64) - 0.5
        log_ratio = self.log_ratio[row] + self.steps[0] * spread[0]
        if self.log_slab is not None:
            return log_ratio, self.log_slab - log_ratio
        log_noise = self.log_noise.flatten()[node]
        return log_ratio, log_noise if len(self.steps) == 1 else log_noise + self.steps[1] * spread[1]


@dataclass(frozen=True)
class GridAxes:
    """The ranges of a grid.

    A known noise scale is the one node of the axis ``noise``. Where the slab scale is known and the noise scale is not,
    the ratio tells the noise scale, and ``noise`` has one node that is not used.
    """

    prior: Prior
    ratio: Axis  # range of the log of slab scale / noise scale
    noise: Axis | None  # range of the log noise scale; None for a family without noise

    @staticmethod
    def gaussian(
        prior: Prior, n: float, most_open: int, square_y: float, least_residual: Callable[[float], float]
    ) -> GridAxes:
        """All scales that the posterior of a Gaussian regression may have.

        ``least_residual`` is the smallest y'y - a(r) of all states at a log ratio, which falls with the ratio.
        """
        slab, noise = prior.slab_scale, prior.noise_scale
        unit = math.log(prior.slab_unit if slab is None else slab)
        slab_range = (unit - _NEGLIGIBLE, unit + 2.0) if slab is None else (unit, unit)
        if noise is None:
            smallest = math.log(smallest_noise(n, square_y))
            low, high = _noise_range(prior, n, square_y, least_residual(slab_range[1] - smallest), smallest)
        else:
            low = high = math.log(noise)
        derived = slab is not None and noise is None
        ratio = Axis(slab_range[0] - high, slab_range[1] - low, 2.0 * (most_open + 1 + (n if derived else 0)), _ERROR)
        return GridAxes(prior, ratio, Axis(low, low if derived else high, 2.0 * max(n, 1.0), _ERROR))

    @staticmethod
    def without_noise(prior: Prior, most_open: int) -> GridAxes:
        """All slab scales that states with at most ``most_open`` open coefficients may have."""
        middle = math.log(prior.slab_unit if prior.slab_scale is None else prior.slab_scale)
        below, above = (_BELOW, _ABOVE) if prior.slab_scale is None else (0.0, 0.0)
        return GridAxes(prior, Axis(middle - below, middle + above, 2.0 * (most_open + 1), _ERROR_WITHOUT_NOISE), None)

    @property
    def _axes(self) -> tuple[Axis, ...]:
        return (self.ratio,) if self.noise is None else (self.ratio, self.noise)

    @property
    def size(self) -> float:
        """Product of the lengths of the axes that are unknown."""
        return math.prod(axis.length or 1.0 for axis in self._axes)

    @property
    def settled(self) -> bool:
        """See :meth:`Axis.settled`."""
        return all(axis.settled for axis in self._axes)

    @property
    def deficit(self) -> float:
        """See :meth:`Axis.deficit`, of the coarse grid."""
        return sum(axis.deficit() for axis in self._axes)

    def coarse(self) -> Grid:
        """The grid of :meth:`zoomed`."""
        return self._grid([axis.nodes(COARSE) for axis in self._axes])

    def fine(self, times: int = 1) -> Grid:
        """The grid that integrals are taken on, or one with ``times`` as many nodes on each axis."""
        return self._grid([axis.fine_nodes(times) for axis in self._axes])

    def zoomed(self, log_weights: Tensor) -> GridAxes:
        """The part where the nodes of the coarse grid have weight, from their log weights of shape ``(R, M)``."""
        ratio = self.ratio.zoomed(log_weights.logsumexp(1), self.deficit)
        noise = None if self.noise is None else self.noise.zoomed(log_weights.logsumexp(0), self.deficit)
        return replace(self, ratio=ratio, noise=noise)

    def _grid(self, nodes: list[Tensor]) -> Grid:
        prior, log_slab = self.prior, None
        log_ratio, noise = nodes[0], nodes[1] if len(nodes) > 1 else nodes[0].new_zeros(1)
        log_noise = noise.expand(len(log_ratio), -1)
        learns_noise = self.noise is not None and prior.noise_scale is None
        if prior.slab_scale is not None and learns_noise:
            log_slab = math.log(prior.slab_scale)
            log_noise = (log_slab - log_ratio)[:, None]
        log_prior = torch.full_like(log_noise, sum(math.log(step_of(x)) for x in nodes))
        if learns_noise:
            log_prior = log_prior + log_half_cauchy(log_noise, prior.noise_unit)
        if prior.slab_scale is None:
            log_prior = log_prior + log_half_normal(log_noise + log_ratio[:, None], prior.slab_unit)
        steps = tuple(step_of(x) if len(x) > 1 else 0.0 for x in nodes)
        return Grid(log_ratio, log_noise, log_prior, steps, log_slab)


def smallest_noise(n: float, square_y: float) -> float:
    """The lower end of an unknown noise scale: 1e-5 times the root mean square of y."""
    return _SMALLEST_NOISE * math.sqrt(square_y / n)


def _noise_range(
    prior: Prior, n: float, square_y: float, least_residual: float, smallest: float
) -> tuple[float, float]:
    """Of the log noise scale.

    The likelihood's logarithm is -n (t + (e^-2t - 1) / 2) at a distance t from its maximum, and the prior's slope lies
    between 1, below its unit, and -1.
    """
    below = min(2.0, 2 * math.sqrt(_NEGLIGIBLE / n))
    above = min(_NEGLIGIBLE / max(n, 1.0) + 0.5, 2 * math.sqrt(_NEGLIGIBLE / n))
    middle = 0.5 * math.log(square_y / n)
    top = max(middle, math.log(prior.noise_unit)) if n < 20 else middle
    low = smallest if least_residual <= 0 else max(0.5 * math.log(least_residual / n) - below, smallest)
    return low, top + above


# Of a group of states and a grid: rows of some of the states with their log p(y, node | z), shape ``(s, R, M)``.
LogJoint = Callable[[Group, Grid], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Laid:
    """Where a grid has been laid."""

    axes: GridAxes
    groups: list[Group]  # the states that are heavy enough for the fine grid
    log_marginal: Tensor  # log p(y, z) of all states on the coarse grid, shape (S,)
    log_gates: Tensor  # log priors of all states, shape (S,)
    log_joint: LogJoint

    def integrated(self) -> Tensor:
        """log p(y, z) of every state, shape ``(S,)``: on the fine grid, or on the coarse one for light states."""
        log_marginal = self.log_marginal.clone()
        _weigh(self.groups, self.axes.fine(), self.log_gates, self.log_joint, log_marginal)
        return log_marginal


def lay(axes: GridAxes, groups: list[Group], log_gates: Tensor, log_joint: LogJoint) -> Laid:
    """Shrink the ranges of a grid in rounds to where the weight is, while light states drop out."""
    log_marginal = torch.full_like(log_gates, -math.inf)
    for _ in range(_ROUNDS):
        if axes.settled:
            break
        weights = _weigh(groups, axes.coarse(), log_gates, log_joint, log_marginal)
        bound = log_marginal.max() - _LIGHT - axes.deficit
        groups = [group.where(log_marginal[group.rows] > bound) for group in groups]
        before, axes = axes.size, axes.zoomed(weights)
        if axes.size > 0.7 * before:
            break
    return Laid(axes, groups, log_marginal, log_gates, log_joint)


def heaviest(z: Tensor, weights: Tensor) -> Tensor:
    """The heaviest states, which decide where the grid lies."""
    return z[weights.topk(min(_ENOUGH, len(z))).indices]


def _weigh(groups: list[Group], grid: Grid, log_gates: Tensor, log_joint: LogJoint, log_marginal: Tensor) -> Tensor:
    """Fill in the log marginals of the groups' states, and give the log weights of the nodes."""
    nodes: Tensor | None = None
    for group in groups:
        for rows, values in log_joint(group, grid):
            flat = values.flatten(1)
            most = flat.amax(1)
            joint = (flat - most[:, None]).exp_()
            most = most + log_gates[rows]
            log_marginal[rows] = most + joint.sum(1).log()
            added = (((most - most.max()).exp() @ joint).log() + most.max()).view(values.shape[1:])
            nodes = added if nodes is None else torch.logaddexp(nodes, added)
    assert nodes is not None
    return nodes
