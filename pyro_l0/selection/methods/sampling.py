"""Posteriors of many features by weighted tempered Gibbs chains: normal responses, and others by an expansion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_l0.maths.collapsed import JointQuadratic, Share, opened
from pyro_l0.maths.monte_carlo import MOST_ERROR
from pyro_l0.maths.second_order import open_positions
from pyro_l0.maths.tempered_gibbs import (
    GatesAndScales,
    GibbsRun,
    IndependentGates,
    sampled_on_expansions,
    sampled_target,
)
from pyro_l0.selection.methods.exact_chains import (
    AugmentedChains,
    ExactChains,
    JumpingChains,
    chains_of,
    continued,
    is_augmented,
)
from pyro_l0.selection.methods.gaussian_evidence import GaussianEvidence, Spectra
from pyro_l0.selection.methods.grid import Grid, nodes_around_mode
from pyro_l0.selection.methods.joint_evidence import JointEvidence
from pyro_l0.selection.methods.laplace_evidence import FEWEST, LaplaceEvidence, find_mode
from pyro_l0.selection.problem import JointProblem, Prior, Problem, SelectionPosterior

_WARM_UP = 0.4
# Open gates that a chain starts with on average, at most.
_START = 5.0
_RARE = 1e-12  # least probability of a gate in the distribution that the evidence is bridged to
_MANY = 20_000  # features beyond which chains are fewer and shorter
_CLOSE = 500  # features beyond which gates of near-copies are exchanged in some draws
_EXCHANGED = 2000  # as many as an estimator keeps
_BRIDGE, _ROUNDS = 1000, 100  # draws that the evidence is estimated from, and rounds of the estimate


class Effort(NamedTuple):
    """Number and length of chains."""

    chains: int  # side by side
    flips: int  # of each chain, the warm-up included, at most

    @staticmethod
    def of(p: int) -> Effort:
        """For p features; beyond some hundred, a flip takes time in proportion to p."""
        if p <= 2000:
            return Effort(96 if p <= 500 else 48, 400)
        return Effort(20, 1200) if p <= _MANY else Effort(12, 1000)


def sampled_walk(
    walk: GatesAndScales, gates: int, flips: int, generator: torch.Generator, error: float = 0.0
) -> GibbsRun:
    """Chains that start from gates of the prior, but few open ones."""
    chains = len(walk.hyper)
    probs = walk.prior.active_prob.expand(gates)
    probs = probs * (_START / probs.sum()).clamp(max=1.0)
    z = torch.bernoulli(probs.expand(chains, -1), generator=generator)
    warm_up = int(_WARM_UP * flips)
    return sampled_target(walk, z, probs, flips=flips, warm_up=warm_up, error=error, generator=generator)


def exchanged(walk: GatesAndScales, run: GibbsRun, generator: torch.Generator) -> GibbsRun:
    """Draws of a run in which each open anchor, in turn, is exchanged for one of those that are closed, or for itself.

    Which one is drawn given all other gates, so the draws remain those of the posterior. Among many features a chain is
    too short to exchange near-copies as often: a credible set, which takes those that are open most often in the draws,
    then holds the effect more rarely than these say. Inclusion probabilities change by those of the exchanges.
    """
    picked = resampled(run.weights, _EXCHANGED, generator).sort().values
    z, hyper, chain, anchors = run.gates[picked], run.hyper[picked], run.chain[picked], walk.anchors
    change = torch.zeros_like(run.chain_active_probs[:, anchors])
    for part in torch.arange(len(z)).split(max(16, _ENTRIES // (4 * len(anchors)))):
        index, valid = open_positions(z[part][:, anchors])
        for at, is_open in zip(index.T, valid.T, strict=True):
            row, at = part[is_open], at[is_open]
            z[row, anchors[at]] = False
            logits = walk.anchor_logits(hyper[row], z[row].double()).masked_fill(z[row][:, anchors], -math.inf)
            probs = logits.softmax(1)
            change.index_put_((chain[row], at), change.new_tensor(-1.0), accumulate=True)
            change.index_add_(0, chain[row], probs)
            z[row, anchors[probs.multinomial(1, generator=generator)[:, 0]]] = True
    counts = chain.bincount(minlength=len(change)).clamp(min=1)[:, None]
    by_chain = run.chain_active_probs.index_add(1, anchors, change / counts).clamp(0, 1)
    active_probs = run.active_probs.index_add(0, anchors, change.sum(0) / len(z)).clamp(0, 1)
    return GibbsRun(active_probs, by_chain, z, torch.full((len(z),), 1 / len(z)).to(run.weights), chain, hyper)


def rescaled(
    problem: Problem | JointProblem, active_probs: Tensor, share: Tensor, moments: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Moments ``(p, K)`` over draws in which each gate is open for a share, made those for its active probability."""
    change = problem.switched(active_probs / share.clamp(min=torch.finfo(share.dtype).tiny))[:, None]
    return moments[0] * change, moments[1] * change


def resampled(weights: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Indices of draws by weight, at equal distances along the chains, in random order."""
    offset = torch.rand(1, generator=generator, dtype=weights.dtype)
    below = weights.cumsum(0)
    at = (torch.arange(number, dtype=weights.dtype) + offset) / number * below[-1]
    found = torch.searchsorted(below, at).clamp(max=len(weights) - 1)
    return found[torch.randperm(number, generator=generator)]


def chain_evidence(
    log_marginal: Callable[[Tensor], Tensor], walk: GatesAndScales, run: GibbsRun, generator: torch.Generator
) -> float:
    """log p(y), by a bridge from where one half of the chains would go next to where the other half has been.

    The bridge (Meng and Wong 1996, eq. 4.1) leads to a distribution that is known and close: a mixture with a part for
    each draw of one half, in which every gate is independently what it would be given the others of that draw. Of
    thousands of gates, only the anchors depend on that draw. ``log_marginal`` is log p(y, z) of gates, shape ``(S, p)``
    to ``(S,)``.
    """
    first = run.chain < len(run.chain_active_probs) // 2
    drawn, centres = (resampled(torch.where(half, run.weights, 0.0), _BRIDGE, generator) for half in (first, ~first))
    parts = (walk.anchor_logits(run.hyper[part], run.gates[part].double()) for part in centres.split(64))
    logits = torch.cat(list(parts))
    z = run.gates[drawn]
    part = torch.randint(len(logits), (len(z),), generator=generator)
    far = run.active_probs.clamp(_RARE, 1 - _RARE).index_fill(0, walk.anchors, 0.0)
    proposed = torch.cat([torch.rand(x.shape, generator=generator) < far for x in z.split(64)])
    proposed[:, walk.anchors] = torch.rand(logits.shape, generator=generator).to(logits) < torch.sigmoid(logits[part])
    both = torch.cat([z, proposed])
    # log p(y, z) / q(z), of draws and of proposals.
    log_ratio = log_marginal(both) - _log_mixture(both, logits, walk.anchors, far)
    from_posterior, from_mixture = log_ratio.split(len(z))
    log_evidence = float(from_mixture.logsumexp(0)) - math.log(len(z))
    for _ in range(_ROUNDS):
        before = log_evidence
        numerator = F.logsigmoid(from_mixture - log_evidence).logsumexp(0)
        denominator = F.logsigmoid(log_evidence - from_posterior).logsumexp(0)
        log_evidence = before + float(numerator - denominator)
        if abs(log_evidence - before) < 1e-6:
            break
    return log_evidence


def _log_mixture(z: Tensor, logits: Tensor, anchors: Tensor, far: Tensor) -> Tensor:
    """Log probability of gates, shape ``(S,)``: the anchors by parts of equal weight, all others by ``far``."""
    closed = F.logsigmoid(-logits).sum(1)
    near = torch.cat([(part.to(logits) @ logits.T + closed).logsumexp(1) for part in z[:, anchors].split(256)])
    others = far.nonzero()[:, 0]
    prior = IndependentGates(torch.logit(far[others]))
    return near + torch.cat([prior.log_prob(part[:, others]) for part in z.split(64)]) - math.log(len(logits))


def null_predictor(problem: Problem) -> Tensor:
    """Linear predictors of the model without features, shape ``(n, K)``, with half an observation more per outcome.

    Beside an offset, and with features that are always in, they are those of the mode instead.
    """
    y, columns = problem.y, problem.ungated
    zero = y.new_zeros(len(y), problem.outputs)
    if not columns.shape[1]:
        return zero
    known = problem.family.null_predictor(y, y.new_ones(len(y)) if problem.weight is None else problem.weight)
    if problem.always or problem.offset is not None or known is None:
        start = zero.new_zeros(1, columns.shape[1], problem.outputs)
        mode = find_mode(problem.likelihood, columns.T[None], problem.ungated_precision[None], start)
        return columns @ mode.normals.mean[0]
    return zero + known


def gate_of(problem: Problem) -> Tensor | None:
    """Which gate switches each coefficient, shape ``(p K,)``; None where each has its own."""
    if problem.outputs == 1:
        return problem.gate_of
    every = torch.arange(problem.gates) if problem.gate_of is None else problem.gate_of
    return every.repeat_interleave(problem.outputs)


_MEAN = 500  # draws that the mean linear predictor is taken from
# Draws of gates and slab scale that are re-weighted: fewer, between these, the more observations there are, as the
# expansion is better then; so many linear predictors where that counts.
_LEAST_DRAWS, _DRAWS, _PREDICTORS = 1000, 4000, 2**24
_PRECISE = 0.012  # standard error above which augmented chains follow, and up to which they run
_FEW = 10  # gates of which chains that follow anyway start from the prior
_BRIEF = 0.5  # share of flips before chains that follow anyway
_APART = 0.24  # nodes of the slab scale's logarithm, from a factor e below all that chains found to one above


def expanded_posterior(problem: Problem, effort: Effort, draws: int, generator: torch.Generator) -> SelectionPosterior:
    """The posterior of a regression that is not Gaussian.

    The log likelihood is expanded at the model without features, and twice more at the mean linear predictor that the
    chains find, which run for a third of the effort. Draws of the last chains are re-weighted by the Laplace evidence
    of their gates and slab scales. Where that leaves a standard error above ``_PRECISE``, augmented chains continue a
    logistic regression; where it is above ``MOST_ERROR``, or importance weights say that Laplace's approximation is too
    far off, jumping chains continue. Families with parameters of their own have exact chains at once, which start from
    the prior where there are at most ``_FEW`` gates.
    """

    def mean_predictor(walk: _Walk, run: GibbsRun) -> Tensor:
        picked = resampled(run.weights, _MEAN, generator)
        beta, intercept = walk.means(run.gates[picked], run.hyper[picked, 1])
        return intercept.mean(0) + problem.x @ beta.mean(0)

    chains = chains_of(problem)
    size = (problem.x.shape[1] + problem.intercept) * problem.outputs  # of coefficients and intercepts

    def jumped(z: Tensor, log_slab: Tensor, beta: Tensor, probs: Tensor, log_evidence: float) -> SelectionPosterior:
        chains: ExactChains  # augmented ones flip gates
        if problem.gates and is_augmented(problem):
            chains = AugmentedChains(problem, z, log_slab, generator)
            chains.sweeps = JumpingChains.sweeps
        else:
            chains = JumpingChains(problem, z, log_slab, beta[:, :size], probs, generator)
        return chains.posterior(log_evidence, draws, _SURE, of_means=bool(problem.always))

    is_start = problem.is_sampled  # all that is asked of the expansion

    def sampled(walk: _Walk, share: float) -> GibbsRun:
        flips = int(effort.flips * share * (_BRIEF if is_start else 1))
        return sampled_walk(walk, problem.gates, flips, generator)

    if not problem.gates:
        z = torch.zeros(chains, 0, dtype=torch.bool)
        scale = problem.prior.slab_scale or problem.prior.slab_unit
        log_slab = torch.full((chains,), math.log(scale), dtype=torch.float64)
        beta = torch.zeros(chains, size, dtype=torch.float64)
        return jumped(z, log_slab, beta, log_slab[:0], math.nan)
    if is_start and problem.gates <= _FEW:
        walk = _Walk(problem, null_predictor(problem), effort)
        probs = problem.prior.gates().active_prob.expand(problem.gates)
        z = torch.rand(chains, problem.gates, generator=generator, dtype=torch.float64) < probs
        log_slab = torch.full((chains,), math.log(problem.prior.slab_scale or problem.prior.slab_unit)).double()
        beta, intercept = walk.means(z, log_slab)
        beta = torch.cat([beta.flatten(1), intercept], 1)
        return jumped(z, log_slab, beta, torch.full_like(probs, 0.5), math.nan)
    walk, run = sampled_on_expansions(
        lambda eta: _Walk(problem, eta, effort), null_predictor(problem), sampled, mean_predictor
    )
    if is_start:
        picked = resampled(run.weights, chains, generator)
        z, log_slab = run.gates[picked], run.hyper[picked, 1]
        beta, intercept = walk.means(z, log_slab)
        return jumped(z, log_slab, torch.cat([beta.flatten(1), intercept], 1), run.active_probs, math.nan)
    number = max(_LEAST_DRAWS, min(_DRAWS, _PREDICTORS // (len(problem.x) * problem.outputs)))
    picked = resampled(run.weights, number, generator)
    z, slab = run.gates[picked], run.hyper[picked, 1].exp()
    evidence = LaplaceEvidence(problem)
    fit = evidence.fit(z, slab, walk.means)
    log_ratio = fit.log_evidence - walk.collapsed(run.hyper[picked]).log_evidence(z)
    weights = torch.softmax(log_ratio, 0)
    # What the weights change is added to the Rao-Blackwell averages, which have less noise than the gates.
    change = weights - 1 / number
    active_probs = (run.active_probs + change @ z.double()).clamp(0, 1)
    of_weights = change.square() @ (z.double() - active_probs).square()
    error = (run.standard_error().square() + of_weights).sqrt()
    log_evidence = chain_evidence(_log_marginal(walk, problem.prior, run), walk, run, generator)
    log_evidence += float(log_ratio.logsumexp(0)) - math.log(number)
    which = resampled(weights, max(draws, FEWEST), generator)
    found = evidence.draws_of(fit, which, generator)
    is_near = found.correction is None
    if is_near and error.max() > _PRECISE and is_augmented(problem):
        start = which[:chains]
        augmented = AugmentedChains(problem, z[start], slab[start].log(), generator)
        return augmented.posterior(log_evidence, draws, _PRECISE)
    if not is_near or error.max() > MOST_ERROR:
        log_evidence += found.correction or 0.0
        # From those of the expansion: of draws that are this uncertain, few have all the weight.
        found = evidence.draws_of(fit, torch.arange(chains), generator)
        return continued(problem, z[:chains], found, active_probs, log_evidence, draws, generator)
    moments = fit.moments(weights, problem.x.shape[1])
    return SelectionPosterior.of(
        active_probs,
        rescaled(problem, active_probs, weights @ z.double(), moments),
        log_evidence,
        found.rows(np.arange(draws)),
        error,
    )


class _Walk(GatesAndScales):
    """Gates and an unknown slab scale on an expansion of a problem's log likelihood at some linear predictors."""

    def __init__(self, problem: Problem, eta: Tensor, effort: Effort) -> None:
        prior = problem.prior
        self._outputs, self._always = problem.outputs, problem.always
        likelihood, precision = problem.likelihood, problem.ungated_precision
        self._expansion, self._ungated = likelihood.expanded(problem.gated, problem.ungated, precision, eta)
        slab = prior.slab_unit if prior.slab_scale is None else prior.slab_scale
        super().__init__(
            self._expansion,
            prior.gates(),
            torch.tensor([0.0, math.log(slab)], dtype=torch.float64).expand(effort.chains, 2),
            self._drawn_slab if prior.slab_scale is None else None,
            gate_of=gate_of(problem),
        )
        self._scales = prior

    def _drawn_slab(self, z: Tensor, theta: Tensor, generator: torch.Generator | None) -> Tensor:
        """The logarithm of the slab scale drawn anew given each gate vector, and that of a noise of one, ``(S, 2)``."""
        elements = z.bool() if self._gate_of is None else opened(z.bool(), self._gate_of).bool()
        spectra = Spectra.of(self._expansion, torch.arange(len(z)), *open_positions(elements))

        def log_joint(log_slab: Tensor) -> Tensor:
            explained, log_det = spectra.sums(log_slab)
            return 0.5 * (explained - log_det) + self._scales.log_slab(log_slab)

        ends = torch.tensor(self._scales.slab_range(), dtype=torch.float64).expand(len(z), 2)
        nodes, _ = nodes_around_mode(log_joint, ends)
        log_slab, log_noise = Grid.of_one(nodes, log_joint(nodes)).draw(spectra.rows, generator)
        return torch.stack([log_noise, log_slab], 1)

    def means(self, z: Tensor, log_slab: Tensor) -> tuple[Tensor, Tensor]:
        """Of coefficients and intercepts given the gates and log slab scales, shapes ``(S, p, K)`` and ``(S, K)``."""
        beta = self.collapsed(torch.stack([torch.zeros_like(log_slab), log_slab], 1)).mean(z)
        ungated = self._ungated(beta)
        features = torch.cat([beta.view(len(z), -1, self._outputs), ungated[:, : self._always]], 1)
        return features, ungated[:, self._always :].sum(1)  # none are zero


def _log_marginal(walk: GatesAndScales, prior: Prior, run: GibbsRun) -> Callable[[Tensor], Tensor]:
    """log p(y, z) of an expansion up to a constant, with an unknown slab scale integrated out."""
    low, high = (float(end) for end in run.hyper[:, 1].aminmax())
    if prior.slab_scale is None:
        log_slabs = torch.arange(low - 1.0, high + 1.0, _APART, dtype=torch.float64)
        log_weights = prior.log_slab(log_slabs) + math.log(_APART)
    else:
        log_slabs, log_weights = torch.tensor([low], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    nodes = torch.stack([torch.zeros_like(log_slabs), log_slabs], 1)

    def log_marginal(z: Tensor) -> Tensor:
        each = torch.stack([walk.collapsed(node[None]).log_evidence(z) for node in nodes], 1)
        return (each + log_weights).logsumexp(1) + walk.prior.log_prob(z)

    return log_marginal


# Gate vectors that moments are averaged over: as many as there is time for, between these; so many with groups.
_FEWEST, _MOST, _OF_GROUPS = 500, 2000, 2000
_SURE = 0.01  # standard error of the inclusion probabilities at which chains end
_ENTRIES = 2**22  # numbers in all of these, and in the largest array of a step


@torch.no_grad()
def tempered_posterior(problem: Problem | JointProblem, *, draws: int = 4000, seed: int = 0) -> SelectionPosterior:
    """The posterior of a problem by weighted tempered Gibbs sampling (Zanella and Roberts 2019).

    The coefficients and the rate are integrated out; unknown scales of the noise and of the slabs are sampled beside
    the gates. Inclusion probabilities and moments are averages of what each gate and its slab are given the others.
    """
    generator = torch.Generator().manual_seed(seed)
    effort = Effort.of(problem.width)
    evidence: GaussianEvidence | JointEvidence
    if isinstance(problem, JointProblem):
        evidence = JointEvidence(problem)
        walk = _joint_walk(problem, evidence, effort)
    elif not problem.family.has_closed_form:
        return expanded_posterior(problem, effort, draws, generator)
    else:
        evidence = GaussianEvidence(problem)
        walk = _walk(problem, evidence, effort)
    run = sampled_walk(walk, problem.gates, effort.flips, generator, _SURE)
    if isinstance(problem, Problem) and problem.gate_of is None:
        if problem.gates > _CLOSE:
            run = exchanged(walk, run, generator)
        moments = _moments(walk, run, generator)
    else:
        z = run.gates[resampled(run.weights, _OF_GROUPS, generator)]
        moments = evidence.moments(z, torch.full((len(z),), 1 / len(z), dtype=torch.float64))
        moments = rescaled(problem, run.active_probs, z.double().mean(0), moments)
    log_evidence = chain_evidence(evidence.log_marginal, walk, run, generator)
    found = evidence.draws(run.gates[resampled(run.weights, draws, generator)], generator)
    return SelectionPosterior.of(run.active_probs, moments, log_evidence, found, run.standard_error())


def _walk(problem: Problem, evidence: GaussianEvidence, effort: Effort) -> GatesAndScales:
    prior = problem.prior
    noise = math.sqrt(float(problem.y @ problem.y) / problem.size) if prior.noise_scale is None else prior.noise_scale
    slab = prior.slab_unit if prior.slab_scale is None else prior.slab_scale
    return GatesAndScales(
        problem.quadratic,
        prior.gates(),
        torch.tensor([math.log(noise), math.log(slab)], dtype=torch.float64).expand(effort.chains, 2),
        None if prior.noise_scale and prior.slab_scale else evidence.drawn_scales,
        gate_of=problem.gate_of,
    )


def _joint_walk(problem: JointProblem, evidence: JointEvidence, effort: Effort) -> GatesAndScales:
    shares = (
        Share(part.quadratic, part.gate_of, own) for part, own in zip(problem.parts, problem.gates_of, strict=True)
    )
    slab = problem.prior.slab_unit if problem.prior.slab_scale is None else problem.prior.slab_scale
    start = torch.tensor([0.0] * len(problem.parts) + [math.log(slab)], dtype=torch.float64)
    return GatesAndScales(
        JointQuadratic(tuple(shares), problem.gates),
        problem.prior.gates(),
        start.expand(effort.chains, -1),
        evidence.moved_scales,
    )


def _moments(walk: GatesAndScales, run: GibbsRun, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means of the coefficients and of their squares, ``(p, 1)``, averaged over what each is given all other gates."""
    p = run.gates.shape[1]
    active, first, second = torch.zeros(3, p, dtype=torch.float64)
    picked = resampled(run.weights, min(_MOST, max(_FEWEST, _ENTRIES // p)), generator)
    for part in picked.split(max(16, _ENTRIES // (64 * p))):
        z = run.gates[part].double()
        factors, mean, variance = walk.collapsed(run.hyper[part]).slab_moments(z)
        probs = torch.sigmoid(factors + walk.prior.logits(z))
        active += probs.sum(0)
        first += (probs * mean).sum(0)
        second += (probs * (mean.square() + variance)).sum(0)
    # The probabilities of the whole run are surer than those of the gate vectors that are picked.
    share = run.active_probs / active.clamp(min=torch.finfo(active.dtype).tiny)
    return (first * share)[:, None], (second * share)[:, None]
