"""Inclusion probabilities of many gates: collapsed mean field, weighted tempered Gibbs sampling, priors and scales."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.collapsed import CollapsedQuadratic, CollapsedSum, JointQuadratic
from pyro_l0.maths.second_order import DesignQuadratic, LogLikelihood, Quadratic, laplace, quadratic_at

_SHOWN: ContextVar[bool] = ContextVar("shown", default=False)


@contextmanager
def progress(shown: bool) -> Iterator[None]:
    """Whether the loops of :func:`counted` show a bar while this is open."""
    token = _SHOWN.set(shown)
    try:
        yield
    finally:
        _SHOWN.reset(token)


def counted(number: int, unit: str, delay: float = 0.0) -> Any:
    """Count to a number: a bar of tqdm, which appears after some seconds where progress is shown."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(range(number), desc=unit, delay=delay, disable=not _SHOWN.get())


class GatePrior(Protocol):
    """Prior of gate vectors z of zeros and ones, shape ``(S, G)``."""

    active_prob: Tensor  # P(z = 1) of each gate alone, shape (G,) or one for all of them

    def logits(self, z: Tensor) -> Tensor:
        """Log odds that a gate is open, given the others; broadcasts against z."""
        ...

    def log_prob(self, z: Tensor) -> Tensor:
        """Log probability of each vector, shape ``(S,)``."""
        ...


class IndependentGates:
    """Gates that are open independently of one another, with log odds of shape ``(G,)`` or one for all."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.active_prob = torch.sigmoid(logits)

    def logits(self, z: Tensor, gates: Tensor | None = None) -> Tensor:
        """See :class:`GatePrior`; of some gates of each vector, shape ``(S, w)``, if they are given."""
        return self._logits if gates is None else self._logits.expand(z.shape[1])[gates]

    def log_prob(self, z: Tensor) -> Tensor:
        """Sum of log P(z_j) over the gates of each vector, shape ``(S,)``."""
        # Chosen rather than multiplied: a gate that is always open has infinite log odds.
        return torch.where(z > 0, F.logsigmoid(self._logits), F.logsigmoid(-self._logits)).sum(-1)


class BetaBinomialGates:
    """Gates that are open with a common probability, which is Beta(alpha, beta) and summed out.

    With ``weights``, shape ``(G,)``, each gate counts so often: its density given the probability is to that power.
    """

    def __init__(self, alpha: float, beta: float, weights: Tensor | None = None) -> None:
        if not (0 < alpha < math.inf and 0 < beta < math.inf):
            raise ValueError(f"Expected alpha and beta to be positive and finite, but got {alpha} and {beta}.")
        self.alpha, self.beta, self._weights = alpha, beta, weights
        self.active_prob = torch.tensor(alpha / (alpha + beta), dtype=torch.float64)

    def logits(self, z: Tensor, gates: Tensor | None = None) -> Tensor:
        """See :class:`GatePrior`; of some gates of each vector, shape ``(S, w)``, if they are given."""
        if self._weights is not None:
            weights = self._weights.to(z)
            others = (z @ weights).unsqueeze(-1) - z * weights
            closed, grown = self.beta + weights.sum() - weights - others, self.alpha + others + weights
            opened = torch.lgamma(grown) - torch.lgamma(self.alpha + others)
            return opened - torch.lgamma(closed + weights) + torch.lgamma(closed)
        # Beside a closed gate, and beside an open one: two logarithms a vector, in place of two a gate.
        others = _numbers(z.sum(-1, keepdim=True))
        others = others - others.new_tensor([0.0, 1.0])
        odds = torch.log(self.alpha + others) - torch.log(self.beta + (z.shape[-1] - 1 - others))
        return torch.where((z if gates is None else z.gather(-1, gates)) > 0, odds[..., 1:], odds[..., :1])

    def log_prob(self, z: Tensor) -> Tensor:
        """log B(alpha + k, beta + G - k) - log B(alpha, beta) with k open gates, weighed, shape ``(S,)``."""
        count = open_counts(z) if self._weights is None else z @ self._weights.to(z)
        most = z.shape[-1] if self._weights is None else float(self._weights.sum())
        total = torch.lgamma(self.alpha + count) + torch.lgamma(self.beta + (most - count))
        constant = math.lgamma(self.alpha) + math.lgamma(self.beta) - math.lgamma(self.alpha + self.beta)
        return total - math.lgamma(self.alpha + self.beta + most) - constant


def open_counts(z: Tensor) -> Tensor:
    """How many gates are open in each vector, as numbers; some at a time, as torch sums bool ones as a wider copy."""
    return torch.cat([_numbers(part.sum(-1)) for part in z.split(_COUNTED)])


def _numbers(z: Tensor) -> Tensor:
    """Gates or counts that may be bool or whole, as numbers whose log gamma is accurate."""
    return z if z.is_floating_point() else z.double()


_COUNTED = 64  # gate vectors whose open gates are counted at once
# Most gates that are open at the start, on average: a vague prior of the rate opens hundreds, and a step closes one.
_START = 10.0
# What is added to the running probabilities: gates that hardly ever open are tried for about two of a dozen flips. With
# few gates that many tries are too many: at ten of them an exact pair's error doubles.
_EXPLORED, _EXPLORED_MOST = 5.0, 0.1
# Bound of the log odds in a draw of the mean field: a surer gate, 6e-6, says no more.
_SURE = 12.0


@dataclass(frozen=True)
class GibbsRun:
    """What weighted tempered Gibbs chains visited, with averages."""

    active_probs: Tensor  # P(z = 1) of each gate, Rao-Blackwellised, shape (G,)
    chain_active_probs: Tensor  # by chain, shape (chains, G); their spread shows how well the chains mix
    gates: Tensor  # visited after the warm-up, bool, shape (N, G)
    weights: Tensor  # of these gate vectors, summing to one
    chain: Tensor  # which chain visited each, shape (N,)
    hyper: Tensor  # hyperparameters beside each, shape (N, d); none where they are fixed

    def standard_error(self) -> Tensor:
        """Of the active probabilities, shape ``(G,)``, by how much the chains differ; NaN for one chain."""
        chains = len(self.chain_active_probs)
        share = self.weights.new_zeros(chains).index_add(0, self.chain, self.weights)
        apart = (self.chain_active_probs - share @ self.chain_active_probs).square()
        return (share.square() @ apart * (chains / (chains - 1 or math.nan))).sqrt()

    def error_of_moves(self) -> Tensor:
        """As :meth:`standard_error`, also where the chains did not start from draws of their common distribution.

        It is larger by sqrt((1 + r) / (1 - r)), as a mean over time is in a series of correlation r: here that of the
        chains' averages of the gate in the halves of the run. Chains that stay agree as well as their starts did. NaN
        for a single flip.
        """
        chains, gates = self.chain_active_probs.shape
        error, weights = self.standard_error(), self.weights.reshape(-1, chains)
        if len(weights) < 2:
            return error * math.nan
        tiny = torch.finfo(weights.dtype).tiny
        share = weights.sum(0) / weights.sum()
        halves = [
            torch.einsum("sc,scg->cg", part / part.sum(0).clamp(min=tiny), at.to(part))
            for part, at in zip(weights.chunk(2), self.gates.reshape(-1, chains, gates).chunk(2), strict=True)
        ]
        before, after = (half - share @ half for half in halves)
        both, spread = share @ (before * after), ((share @ before.square()) * (share @ after.square())).sqrt()
        r = (both / (spread + torch.finfo(spread.dtype).eps)).clamp(min=0.0)
        return error * ((1 + r) / (1 - r)).sqrt()

    def distinct(self) -> tuple[Tensor, Tensor]:
        """Each gate vector once, bool of shape ``(M, G)``, with its weight; the largest weight first."""
        first, group = distinct_rows(self.gates)
        weights = self.weights.new_zeros(len(first)).index_add(0, group, self.weights)
        order = weights.argsort(descending=True)
        return self.gates[first[order]], weights[order]

    def reweighted(self, log_ratio: Callable[[Tensor], Tensor]) -> GibbsRun:
        """The run for another distribution of the gates, from the log ratio of both at distinct ones, ``(M, G)``."""
        first, group = distinct_rows(self.gates)
        weights = torch.softmax(self.weights.log() + log_ratio(self.gates[first])[group].to(self.weights), 0)
        # What the weights change is added to the Rao-Blackwell averages, which have less noise than the gates.
        change = self._averages(weights) - self._averages(self.weights)
        share = self.weights.new_zeros(len(change)).index_add(0, self.chain, weights)
        by_chain = self.chain_active_probs + change
        active_probs = (share @ by_chain).clamp(0, 1)
        return replace(self, active_probs=active_probs, chain_active_probs=by_chain.clamp(0, 1), weights=weights)

    def draws(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of the gate vectors by their weights, bool, shape ``(n, G)``."""
        return self.gates[torch.multinomial(self.weights, n, replacement=True, generator=generator)]

    def _averages(self, weights: Tensor) -> Tensor:
        """The weighted mean of each chain's gates, shape ``(chains, G)``."""
        chains = torch.arange(len(self.chain_active_probs), device=weights.device)
        by_chain = torch.where(self.chain == chains[:, None], weights, 0.0)
        # A chain may have no weight left at all.
        by_chain = by_chain / by_chain.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return by_chain @ self.gates.to(weights)


def distinct_rows(gates: Tensor) -> tuple[Tensor, Tensor]:
    """Where each distinct row of gates, bool, is first seen, and which of these every row is."""
    if not gates.shape[1]:  # rows without columns are all the same
        return torch.zeros(1, dtype=torch.long), torch.zeros(len(gates), dtype=torch.long)
    # As bytes, eight gates each: rows of many bools take seconds to sort.
    packed = np.packbits(gates.cpu().numpy(), axis=1)
    _, first, group = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    return torch.from_numpy(first).to(gates.device), torch.from_numpy(group.reshape(-1)).to(gates.device)


@torch.no_grad()
def collapsed_mean_field(
    collapsed: CollapsedQuadratic,
    prior: GatePrior,
    *,
    steps: int = 200,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Log odds of independent gates, by natural gradients of the collapsed evidence bound; shape ``(G,)``.

    Of the bound E_q[log p(y, z) - log q(z)] with q of log odds l the natural gradient is E_q[g(z)] - l, with g the log
    odds of each gate given the others (``gibbs``), which coordinate ascent would set l to (Hoffman and others 2013,
    arXiv:1206.7051). A step goes a falling share of that way, with the mean over draws of q in place of E_q. It starts
    from the prior: coordinate ascent's solution, which fixes the slabs' means too, is a worse mode.
    """
    logits = torch.logit(_start_probs(collapsed, prior))
    draws = collapsed.chains or 16
    for step in range(steps):
        z = torch.bernoulli(torch.sigmoid(logits).expand(draws, -1), generator=generator)
        gibbs = collapsed.gibbs_logits(z, prior.logits(z)).clamp(-_SURE, _SURE)
        logits = logits.lerp(gibbs.mean(0), 0.3 / (1 + step / 20) ** 0.7)
    return logits


@torch.no_grad()
def tempered_gibbs(
    collapsed: CollapsedQuadratic,
    prior: GatePrior,
    *,
    chains: int = 16,
    flips: int = 1200,
    warm_up: float = 0.3,
    start: Tensor | None = None,
    running: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> GibbsRun:
    """Weighted tempered Gibbs sampling of gates.

    Each step flips one gate j, chosen in proportion to v_j = (eta_j + c) / (2 P(z_j | others)) with eta_j its
    running active probability and c a little. So an improbable gate vector is left at once, by a gate that matters, and
    has a weight of 1 / sum v: the flips are reversible for the posterior times sum v, as v_j of a gate vector times its
    probability is the same as after the flip of j. Zanella and Roberts (2019), arXiv:1805.00541; "Sampled gates" in
    docs/lab/derivations.md.

    Chains with scales or factors of their own each sample their own posterior, and the averages give every chain the
    same weight. They ``start`` from gates of shape ``(chains, G)``, by default draws from the prior. The share
    ``warm_up`` of their flips only adapts the running probabilities; those given as ``running``, shape ``(G,)``, stay
    as they are.
    """
    chains = collapsed.chains or chains
    probs = _start_probs(collapsed, prior)
    z = torch.bernoulli(probs.expand(chains, -1), generator=generator) if start is None else start.to(probs, copy=True)
    target = _Fixed(collapsed, prior, z.new_empty(len(z), 0))
    return sampled_target(
        target,
        z,
        probs if running is None else running.to(probs),
        flips=flips,
        warm_up=int(warm_up * flips),
        adapts=running is None,
        same_target=collapsed.chains is None,
        generator=generator,
    )


@torch.no_grad()
def sampled_target(
    target: Target,
    start: Tensor,
    running: Tensor,
    *,
    flips: int,
    warm_up: int,
    adapts: bool = True,
    same_target: bool = True,
    error: float = 0.0,
    generator: torch.Generator | None = None,
) -> GibbsRun:
    """Weighted tempered Gibbs sampling of gates and of hyperparameters beside them.

    The gates ``start``, shape ``(chains, G)``, move in place. During the first ``warm_up`` flips, which are left out,
    the ``running`` active probabilities, shape ``(G,)``, follow the chains if ``adapts``. Averages give each chain the
    same weight where they do not sample the ``same_target``. After each quarter as many flips as in the warm-up they
    are looked at, and end if at two looks no active probability had a larger standard ``error``; else after ``flips``.

    With thousands of gates each chain may flip, at a time, those of a random part of them, the probable ones, or
    anchors, and those that are open: the subset sampler of Jankowiak (2023, arXiv:2208.01180) with open gates in
    every subset. It samples gates, scales and the part b in proportion to p(z, theta | y) Z(z, theta, b) with
    Z = sum_j v_j U(b | j, z), where U is 1 at the part of a closed gate that is no anchor, and 1 / T at each of the T
    parts for all others. After the flip of j the next part is drawn from U(b | j, z). So b is uniform under the weights
    1 / Z, and an average over the steps at which a gate was in the subset is that of the posterior.
    """
    z = start
    explored = min(_EXPLORED / z.shape[1], _EXPLORED_MOST)
    steps = _Steps(flips - warm_up, z, target.hyper)
    everyone = torch.arange(len(z), device=z.device)
    bar, look, was_sure = counted(flips, "flips"), max(warm_up // 4, 1), False
    for step in bar:
        if error and step > warm_up and (step - warm_up) % look == 0:
            run = steps.run(step - warm_up, same_target)
            is_sure = float(run.standard_error().max()) <= error
            if is_sure and was_sure:
                bar.total = step
                return run
            was_sure = is_sure
        if adapts and 0 < step <= warm_up and step % max(warm_up // 10, 1) == 0:
            target.set_anchors(running)
        logits = target.logits(z)
        columns = target.columns
        if adapts and step < warm_up:
            running = running.lerp(_seen_mean(running, torch.sigmoid(logits), columns), 0.05)
        tried = 0.5 * (running + explored)
        if columns is not None:
            tried = tried[columns.gates] * columns.times
        logits, rates = target.moved(z, logits, tried, generator)
        if step >= warm_up:
            steps.add(step - warm_up, z, target.hyper, (-rates.log_total).exp(), torch.sigmoid(logits), columns)
        flipped = _chosen(rates.relative, generator)
        if columns is not None:
            flipped = columns.gates[everyone, flipped]
        z[everyone, flipped] = 1 - z[everyone, flipped]
        target.after_flip(z, flipped, generator)
    return steps.run(flips - warm_up, same_target)


class Rates(NamedTuple):
    """v of every gate; chains sample the target times the sum of these."""

    relative: Tensor  # up to a factor of each chain, shape (S, G)
    log_total: Tensor  # log of the sum of v, shape (S,)

    @staticmethod
    def of(tried: Tensor, z: Tensor, logits: Tensor) -> Rates:
        """From half of how often each gate is tried.

        With a the log odds ``against`` a gate's value, 1 / P(z_j | others) is 1 + e^a, so v is ``tried`` times that.
        Both terms are divided by e^m, with m = max(0, a) over a chain's gates (``most``), which the log total has back.
        Log odds of hundreds must not be cut off: the scales move while such a gate is closed, too, by the sum of v.
        """
        # Log odds of the other value; gates that are always open have infinite ones.
        against = torch.where(z > 0, -logits, logits).masked_fill_(tried <= 0, -math.inf)
        most = against.amax(1, keepdim=True).clamp(0, torch.finfo(against.dtype).max)
        relative = (against - most).clamp_(max=0).exp_().add_((-most).exp()).mul_(tried)
        return Rates(relative, relative.sum(1).log() + most[:, 0])


_Generator = torch.Generator | None
_LogitsAndRates = tuple[Tensor, Rates]


class Columns(NamedTuple):
    """The gates that may flip at a step, where these are not all; shape ``(S, w)`` each."""

    gates: Tensor  # which these are
    open: Tensor
    times: Tensor  # T for a gate that flips in one of T parts only, 1 for others, 0 for padding
    seen: Tensor  # which are in the subset whether they are open or not
    part: Tensor  # of each chain, shape (S,)
    part_of: Tensor  # the part of each gate, T for an anchor, shape (G,)


class Target(ABC):
    """A distribution of gates z, and of the hyperparameters that a chain has beside them, shape ``(chains, d)``."""

    hyper: Tensor
    columns: Columns | None = None  # which gates ``logits`` has seen; all of them by default

    @abstractmethod
    def logits(self, z: Tensor) -> Tensor:
        """Log odds of every gate given the others and the hyperparameters; shape ``(chains, G)`` or of the columns."""

    @abstractmethod
    def moved(self, z: Tensor, logits: Tensor, tried: Tensor, generator: _Generator) -> _LogitsAndRates:
        """Move the hyperparameters, if it is their turn; returns the log odds and rates after that.

        The move must leave the target times the sum of the rates invariant.
        """

    def set_anchors(self, running: Tensor) -> None:  # noqa: B027
        """Choose which gates are in every subset, by their running active probabilities."""

    def after_flip(self, z: Tensor, flipped: Tensor, generator: _Generator) -> None:  # noqa: B027
        """Draw the next subset of each chain, given which gate flipped, shape ``(chains,)``."""


class _Fixed(Target):
    """Gates at scales that are known, so that no hyperparameter moves."""

    def __init__(self, collapsed: CollapsedQuadratic, prior: GatePrior, hyper: Tensor) -> None:
        self._collapsed, self._prior, self.hyper = collapsed, prior, hyper

    def logits(self, z: Tensor) -> Tensor:
        return self._collapsed.gibbs_logits(z, self._prior.logits(z))

    def moved(self, z: Tensor, logits: Tensor, tried: Tensor, generator: _Generator) -> _LogitsAndRates:
        return logits, Rates.of(tried, z, logits)


def _seen_mean(running: Tensor, active: Tensor, columns: Columns | None) -> Tensor:
    """Active probabilities of the gates, averaged over the chains that saw them; the running ones where none did."""
    if columns is None:
        return active.mean(0)
    gates, seen = columns.gates.flatten(), columns.seen.to(active)
    total = torch.zeros_like(running).index_add(0, gates, (active * seen).flatten())
    count = torch.zeros_like(running).index_add(0, gates, seen.flatten())
    return torch.where(count > 0, total / count.clamp(min=1), running)


class _Steps:
    """Collects gate vectors and weights in memory that is allocated once: wide ones need much of it."""

    def __init__(self, steps: int, z: Tensor, hyper: Tensor) -> None:
        self.gates = torch.empty((steps, *z.shape), dtype=torch.bool, device=z.device)
        self.hyper = hyper.new_empty(steps, *hyper.shape)
        self.weights = z.new_empty(steps, len(z))
        self.active = torch.zeros_like(z)
        self.seen: Tensor | None = None  # weight of the steps at which each chain saw each part

    def add(self, step: int, z: Tensor, hyper: Tensor, weight: Tensor, active: Tensor, columns: Columns | None) -> None:
        self.gates[step] = z.bool()
        self.hyper[step] = hyper
        self.weights[step] = weight
        if columns is None:
            self.active.addcmul_(weight[:, None], active)
            return
        self.active.scatter_add_(1, columns.gates, weight[:, None] * active * columns.seen)
        if self.seen is None:
            self.part_of = columns.part_of
            self.seen = self.active.new_zeros(len(z), int(columns.part_of.max()) + 1)
        self.seen.scatter_add_(1, columns.part[:, None], weight[:, None])
        self.seen[:, -1] += weight

    def run(self, steps: int, same_target: bool) -> GibbsRun:
        """What the first steps say, which are all so far."""
        weights = self.weights[:steps]
        total = weights.sum(0)
        # Weights of chains compare only where the chains sample one distribution, with one unknown constant.
        share = total / total.sum() if same_target else torch.full_like(total, 1 / len(total))
        if self.seen is None:
            by_chain = self.active / total[:, None]
            active_probs = share @ by_chain
        else:
            seen = self.seen[:, self.part_of]
            active_probs = self.active.sum(0) / seen.sum(0)
            by_chain = torch.where(seen > 0, self.active / seen, active_probs)
        # Sums of weights round, to above one where a gate is always open.
        active_probs, by_chain = active_probs.clamp(max=1), by_chain.clamp(max=1)
        chain = torch.arange(len(total), device=total.device).repeat(steps)
        weights = (weights / total * share).flatten()
        gates, hyper = self.gates[:steps].flatten(0, 1), self.hyper[:steps].flatten(0, 1)
        return GibbsRun(active_probs, by_chain, gates, weights, chain, hyper)


def _chosen(rates: Tensor, generator: torch.Generator | None) -> Tensor:
    """A gate of each chain in proportion to its rate; torch.multinomial takes as long as the log odds."""
    below = rates.cumsum(1)
    where = torch.rand(len(rates), 1, generator=generator, dtype=rates.dtype, device=rates.device) * below[:, -1:]
    # Rounding may put the point on the very end.
    return torch.searchsorted(below, where)[:, 0].clamp(max=rates.shape[1] - 1)


def _start_probs(collapsed: CollapsedQuadratic, prior: GatePrior) -> Tensor:
    probs = prior.active_prob.to(collapsed.quadratic.linear).expand(collapsed.gates)
    return probs * (_START / probs.sum()).clamp(max=1.0)


# Moves of the logarithms of noise and slab scales, shape ``(S, K + 1)``, given gates of zeros and ones, ``(S, G)``.
MoveScales = Callable[[Tensor, Tensor, _Generator], Tensor]
_EVERY = 12  # flips from one draw of the scales to the next


class GatesAndScales(Target):
    """Gates with the scales of a quadratic log likelihood at noise of scale one: a target of ``sampled_target``.

    The chains sample p(z, theta | y) Z(z, theta) with theta, which is ``hyper``, the logarithms of the scales of noise
    and slabs, shape ``(chains, 2)``, and Z the sum of the rates at which gates are tried. Every few flips
    ``move_scales`` proposes another theta by a move that is reversible under p(theta | y, z), such as a draw from it,
    and the ratio of Z accepts it; without it, both are known.
    Of K quadratics with shared gates each has a noise of its own, and ``hyper`` the shape ``(chains, K + 1)``.
    """

    def __init__(
        self,
        quadratic: Quadratic | JointQuadratic,
        prior: IndependentGates | BetaBinomialGates,
        start: Tensor,
        move_scales: MoveScales | None = None,
        *,
        gate_of: Tensor | None = None,
    ) -> None:
        self._quadratic, self.prior, self._move_scales, self._gate_of = quadratic, prior, move_scales, gate_of
        self._flips = 0
        self.hyper = start
        self._here = self._conditional(start)
        self._design: DesignQuadratic | None = None
        if isinstance(quadratic, DesignQuadratic) and gate_of is None and quadratic.parts > 1:
            self._design = quadratic
            self._part = torch.arange(len(start), device=start.device) % quadratic.parts

    def collapsed(self, theta: Tensor) -> CollapsedQuadratic:
        """The likelihood and the slabs at scales of each chain, shape ``(S, 2)``."""
        assert not isinstance(self._quadratic, JointQuadratic)
        noise, slab = theta.exp().T
        return CollapsedQuadratic(self._quadratic, slab[:, None], gate_of=self._gate_of, factor=noise**-2)

    def _conditional(self, theta: Tensor) -> CollapsedQuadratic | CollapsedSum:
        """As ``collapsed``; of K quadratics their sum, at scales of shape ``(S, K + 1)``."""
        if isinstance(self._quadratic, JointQuadratic):
            return self._quadratic.collapsed(theta[:, :-1].exp(), theta[:, -1:].exp())
        return self.collapsed(theta)

    def logits(self, z: Tensor) -> Tensor:
        """See :class:`~pyro_l0.maths.tempered_gibbs.Target`."""
        return self._at(self._here, z)

    def set_anchors(self, running: Tensor) -> None:
        """Choose the anchors of the design by running active probabilities, shape ``(G,)``; without parts, nothing."""
        if self._design is not None:
            self._design.set_anchors(running)

    def after_flip(self, z: Tensor, flipped: Tensor, generator: _Generator) -> None:
        """The next part of each chain, drawn from U(b | j, z) of ``sampled_target``; without parts, nothing."""
        if self._design is not None:
            part_of_flipped = self._design.part_of[flipped]
            anywhere = torch.randint(
                self._design.parts, part_of_flipped.shape, generator=generator, device=part_of_flipped.device
            )
            closed = z.gather(1, flipped[:, None])[:, 0] == 0
            self._part = torch.where(closed & (part_of_flipped < self._design.parts), part_of_flipped, anywhere)

    def moved(self, z: Tensor, logits: Tensor, tried: Tensor, generator: _Generator) -> _LogitsAndRates:
        """See ``Target``; moves the chains that ``logits`` saw last."""
        values = z if self.columns is None else self.columns.open.to(z)
        rates = self._rates(tried, values, logits)
        self._flips += 1
        if self._move_scales is None or self._flips % _EVERY:
            return logits, rates
        theta = self._move_scales(z, self.hyper, generator)
        new_logits = self._at(self._conditional(theta), z)
        new_rates = self._rates(tried, values, new_logits)
        accept = torch.rand(len(z), generator=generator).to(z).log() < new_rates.log_total - rates.log_total
        # A gate that is always open has just closed: what the scales are given that is no part of the posterior.
        accept &= rates.log_total < torch.finfo(z.dtype).max / 2
        self.hyper = torch.where(accept[:, None], theta, self.hyper)
        self._here = self._conditional(self.hyper)
        relative = torch.where(accept[:, None], new_rates.relative, rates.relative)
        rates = Rates(relative, torch.where(accept, new_rates.log_total, rates.log_total))
        return torch.where(accept[:, None], new_logits, logits), rates

    def _rates(self, tried: Tensor, z: Tensor, logits: Tensor) -> Rates:
        """With subsets, a gate is also tried by its probability given the others, as by Zanella and Roberts (2019).

        That does not depend on the gate itself, so flips stay reversible. It closes an open gate as often if its
        running probability is low: near-copies share theirs, and exchange when one of them closes.
        """
        if self.columns is not None:
            tried = tried + 0.5 * self.columns.times * torch.sigmoid(logits)
        return Rates.of(tried, z, logits)

    def _at(self, collapsed: CollapsedQuadratic | CollapsedSum, z: Tensor) -> Tensor:
        """Log odds of the gates at the scales of ``collapsed``; with parts, of those that a chain may flip now."""
        design = self._design
        if design is None or isinstance(collapsed, CollapsedSum):
            return collapsed.gibbs_logits(z, self.prior.logits(z))
        anchors = torch.full_like(self._part, design.parts)
        conditionals = collapsed.of_parts(z, torch.stack([self._part, anchors], 1))
        is_everywhere = conditionals.open | (design.part_of[conditionals.gates] == design.parts)
        times = torch.where(is_everywhere, 1.0, float(design.parts)) * conditionals.valid
        seen = conditionals.valid.clone()
        seen[:, 2 * design.members.shape[1] :] = False
        self.columns = Columns(conditionals.gates, conditionals.open, times.to(z), seen, self._part, design.part_of)
        return conditionals.factors + self.prior.logits(z, conditionals.gates)

    @property
    def anchors(self) -> Tensor:
        """The gates that are in every subset, shape ``(w,)``."""
        everything = torch.arange(self._here.gates, device=self.hyper.device)
        return everything if self._design is None else self._design.members[-1]

    def anchor_logits(self, theta: Tensor, z: Tensor) -> Tensor:
        """Log odds of the anchors given all other gates, at scales of each vector; shape ``(S, w)``."""
        collapsed = self._conditional(theta)
        if self._design is None or isinstance(collapsed, CollapsedSum):
            return collapsed.gibbs_logits(z, self.prior.logits(z))
        conditionals = collapsed.of_parts(z, torch.full((len(z), 1), self._design.parts, device=z.device))
        width = self._design.members.shape[1]
        return (conditionals.factors + self.prior.logits(z, conditionals.gates))[:, :width]


TargetT = TypeVar("TargetT")


def sampled_on_expansions(
    expand: Callable[[Tensor], TargetT],
    point: Tensor,
    sample: Callable[[TargetT, float], GibbsRun],
    mean: Callable[[TargetT, GibbsRun], Tensor],
) -> tuple[TargetT, GibbsRun]:
    """Chains on the expansion of a log likelihood, which is taken twice more at the mean that shorter chains find.

    ``expand`` makes a target at a point, ``sample`` runs chains on it for a share of their flips, and ``mean`` is the
    point that a run has as its mean.
    """
    target = expand(point)
    for _ in range(2):
        target = expand(mean(target, sample(target, 1 / 3)))
    return target, sample(target, 1.0)


def gibbs_by_expansion(
    log_likelihood: LogLikelihood,
    scale: float | Tensor,
    prior: GatePrior,
    *,
    start: Tensor,
    gate_of: Tensor | None = None,
    chains: int = 16,
    flips: int = 600,
    generator: torch.Generator | None = None,
) -> tuple[GibbsRun, CollapsedQuadratic]:
    """Sample gates of a likelihood that need not be quadratic, with dense matrices: for up to a hundred or so elements.

    It is expanded at the mode with all gates open, then again at the posterior mean of the coefficients. The gate
    vectors of the last run are re-weighted by their Laplace evidence over that of the expansion; both are returned, as
    slabs can be drawn from the expansion. The log likelihood must be finite at ``start``, shape ``(p,)``.
    """
    scale = torch.as_tensor(scale, dtype=start.dtype, device=start.device)
    point = laplace(log_likelihood, torch.ones_like(start)[None], scale, start).mode[0]

    def expand(at: Tensor) -> CollapsedQuadratic:
        quadratic = quadratic_at(lambda beta: log_likelihood(beta[None])[0], at)
        return CollapsedQuadratic(quadratic, scale, gate_of=gate_of)

    def sample(collapsed: CollapsedQuadratic, share: float) -> GibbsRun:
        return tempered_gibbs(collapsed, prior, chains=chains, flips=int(flips * share), generator=generator)

    def mean(collapsed: CollapsedQuadratic, run: GibbsRun) -> Tensor:
        z, weights = run.distinct()
        return weights @ collapsed.mean(z)

    collapsed, run = sampled_on_expansions(expand, point, sample, mean)
    return reweighted(run, log_likelihood, collapsed), collapsed


def reweighted(run: GibbsRun, log_likelihood: LogLikelihood, collapsed: CollapsedQuadratic) -> GibbsRun:
    """A run on an expansion, its gate vectors re-weighted by their Laplace evidence under the log likelihood itself.

    All chains of the run share one scale and one factor.
    """
    scale = collapsed.scale

    def log_ratio(z: Tensor) -> Tensor:
        elements = collapsed.on(z).to(scale)
        start = collapsed.mean(z)
        return laplace(log_likelihood, elements, scale, start).log_evidence - collapsed.log_evidence(z)

    return run.reweighted(log_ratio)
