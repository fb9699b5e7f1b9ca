"""A grid of the unknown scales for each gate vector, around the mode of what they are given it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from pyro_l0.maths.tempered_gibbs import BetaBinomialGates, GatePrior, IndependentGates, distinct_rows
from pyro_l0.selection.problem import Prior

# Nodes of an axis: to find the mode, and to integrate. The trapezoidal rule errs by 2 exp(-2 pi^2 / h^2) at steps of h
# standard deviations, and by about exp(-pi^2 / (2 h)) for the log of a half-normal scale, which takes the most.
COARSE, NODES = 18, 30
NEGLIGIBLE = 9.0  # nats below the mode, where integrals end: 4.2 deviations of a normal density
LIGHT = 20.0  # nats below the state of most weight, beyond which a rough integral is enough
_SMALLEST_NOISE = 1e-5


def smallest_noise(n: float, square_y: float) -> float:
    """The lower end of an unknown noise scale: 1e-5 times the root mean square of y."""
    return _SMALLEST_NOISE * math.sqrt(square_y / n)


def slab_range(prior: Prior) -> tuple[float, float]:
    """Log slab scales beyond which the prior has a mass of 2e-5: the known value twice, if it is known."""
    if prior.slab_scale is not None:
        return math.log(prior.slab_scale), math.log(prior.slab_scale)
    return math.log(prior.slab_unit) - 10.5, math.log(prior.slab_unit) + 1.6


def spaced(ends: Tensor, number: int) -> Tensor:
    """Nodes at equal distances from ends of shape ``(s, 2)``, shape ``(s, number)``."""
    return ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * torch.linspace(0, 1, number, dtype=ends.dtype)


def spacing(nodes: Tensor) -> Tensor:
    """Distance of nodes along the last axis; 1 for a known value, which has a mass and no density."""
    return nodes[..., 1] - nodes[..., 0] if nodes.shape[-1] > 1 else torch.ones_like(nodes[..., 0])


def nodes_around_mode(log_density: Callable[[Tensor], Tensor], ends: Tensor, rounds: int = 1) -> tuple[Tensor, Tensor]:
    """Nodes where a density of each state is not negligible, between ends of shape ``(s, 2)``: shape ``(s, NODES)``.

    That is from the first to the last coarse node within ``NEGLIGIBLE`` nats of the highest, and one more on either
    side. Further rounds search there again, for a density that is much narrower than a coarse step. A known value,
    whose ends are equal, is one node. The logarithm of the integral over the last coarse nodes is the second result,
    shape ``(s,)``.
    """
    if bool((ends[:, 0] == ends[:, 1]).all()):
        return ends[:, :1], log_density(ends[:, :1])[:, 0]
    for _ in range(rounds):
        nodes = spaced(ends, COARSE)
        found = log_density(nodes)
        kept = (found >= found.amax(1, keepdim=True) - NEGLIGIBLE).int()
        around = torch.stack([kept.argmax(1) - 1, COARSE - kept.flip(1).argmax(1)], 1)
        ends = nodes.gather(1, around.clamp(0, COARSE - 1))
    return spaced(ends, NODES), found.logsumexp(1) + spacing(nodes).log()


class Grid(NamedTuple):
    """R nodes of the log of slab scale / noise scale for each of s states, and M log noise scales for each of these."""

    log_ratio: Tensor  # shape (s, R)
    log_noise: Tensor  # shape (s, R, M)
    log_joint: Tensor  # log p(y, node | z), a density by the unknown scales' logarithms, shape (s, R, M)

    def log_by_ratio(self) -> Tensor:
        """log p(y, log ratio | z), shape ``(s, R)``."""
        return self.log_joint.logsumexp(2) + spacing(self.log_noise).log()

    def log_marginal(self) -> Tensor:
        """log p(y | z), shape ``(s,)``."""
        return self.log_by_ratio().logsumexp(1) + spacing(self.log_ratio).log()

    def probs(self) -> Tensor:
        """Probabilities of the nodes given each state, shape ``(s, R, M)``."""
        return self.log_joint.flatten(1).softmax(1).view_as(self.log_joint)

    def draw(self, state: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A log ratio and log noise scale for each draw of some state, shape ``(N,)``, spread over their cells."""
        node = draw_nodes(self.probs().flatten(1), state, generator)
        row = node // self.log_noise.shape[2]
        drawn = self.log_ratio[state, row], self.log_noise.flatten(1)[state, node]
        spread = torch.rand(2, len(node), generator=generator, dtype=torch.float64) - 0.5
        log_ratio, log_noise = (
            x + (spacing(nodes)[state] * u if nodes.shape[1] > 1 else 0.0)
            for x, u, nodes in zip(drawn, spread, (self.log_ratio, self.log_noise[:, 0]), strict=True)
        )
        return log_ratio, log_noise


# Some states: their rows, their rough log p(y | z), and the grid of those at some indices.
Part = tuple[Tensor, Tensor, Callable[[Tensor], Grid]]


def log_marginals(log_gates: Tensor, parts: Iterable[Part]) -> Tensor:
    """log p(y, z) of all states, shape ``(S,)``: rough where it is ``LIGHT`` nats below that of another state."""
    found = torch.full_like(log_gates, -math.inf)
    for rows, rough, grid in parts:
        found[rows] = log_gates[rows] + rough
        likely = torch.nonzero(found[rows] > found.max() - LIGHT)[:, 0]
        if len(likely):
            found[rows[likely]] = log_gates[rows[likely]] + grid(likely).log_marginal()
    return found


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

    def at(self, index: Tensor) -> Group:
        """Some of the states."""
        return Group(self.rows[index], self.open[index])

    def split(self, size: int) -> Iterator[Group]:
        """Groups of at most ``size`` states."""
        return map(Group, self.rows.split(size), self.open.split(size))


def groups_of(on: Tensor) -> list[Group]:
    """States grouped by how many features are open, from which are, bool, shape ``(S, p)``."""
    count = on.sum(1)
    found = []
    for k in count.unique().tolist():
        rows = torch.nonzero(count == k)[:, 0]
        found.append(Group(rows, torch.nonzero(on[rows])[:, 1].reshape(len(rows), k)))
    return found


def distinct_states(z: Tensor) -> tuple[Tensor, Tensor]:
    """Each of some gate vectors once, and which of these every one is."""
    first, state = distinct_rows(z)
    return z[first], state


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
