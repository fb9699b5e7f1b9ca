"""Gates of large designs with the slabs integrated out: sampled, or as a collapsed mean field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Beta

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import find_gate
from pyro_l0.infer.guides.correlated import CorrelatedPosterior
from pyro_l0.infer.guides.expansion import StructuredSlabs, gate_vectors
from pyro_l0.infer.guides.mean_field import Layout
from pyro_l0.infer.guides.summaries import JointDraws
from pyro_l0.infer.record import Site
from pyro_l0.infer.runs import seeded
from pyro_l0.infer.slabs import Alignment, GateSite
from pyro_l0.infer.target import ConjugateRate, InferenceTarget, Point
from pyro_l0.maths.collapsed import CollapsedQuadratic
from pyro_l0.maths.monte_carlo import Trust, doubts
from pyro_l0.maths.second_order import DenseQuadratic, LogLikelihood
from pyro_l0.maths.tempered_gibbs import BetaBinomialGates, collapsed_mean_field, gibbs_by_expansion, tempered_gibbs

__all__ = ["Method", "RefinedPosterior", "refined"]


class SiteGates:
    """The prior of the gates of several sites: independent, or with a Beta rate in common that is summed out.

    The log odds have shape ``(chains, G)`` or ``(1, G)``; those of gates with a rate are ignored. ``tilt``, of the same
    shape, is added to all of them.
    """

    def __init__(self, logits: Tensor, rates: Sequence[tuple[Tensor, BetaBinomialGates]], tilt: Tensor) -> None:
        self._logits, self._rates, self._tilt = logits, rates, tilt
        self.active_prob = torch.sigmoid(logits).mean(0)
        for positions, rate in rates:
            self.active_prob[positions] = rate.active_prob.to(logits)

    def logits(self, z: Tensor) -> Tensor:
        """Log odds that a gate is open, given the others, shape of z."""
        odds = self._logits.expand(z.shape)
        for positions, rate in self._rates:
            odds = odds.index_copy(1, positions, rate.logits(z[:, positions]))
        return odds + self._tilt

    def log_prob(self, z: Tensor) -> Tensor:
        """Log probability of each vector, shape ``(S,)``."""
        each = torch.where(z > 0, 1.0, -1.0) * self._logits.expand(z.shape)
        each = torch.nn.functional.logsigmoid(each)
        for positions, _ in self._rates:
            each = each.index_fill(1, positions, 0.0)
        rates = [rate.log_prob(z[:, positions]) for positions, rate in self._rates]
        return torch.stack([each.sum(1), (z * self._tilt).sum(1), *rates]).sum(0)


class Collapsed(NamedTuple):
    """What a sampler of gates needs, for some values of the other latents: ``others`` has those of the first chain.

    The quadratic's coefficients are measured from the means of the slabs' priors, ``loc``, where slabs have no gate. A
    slab of mean m and deviation s behind a gate is one of mean 0 whose likelihood is multiplied by exp(w m / s^2), the
    ``tilt`` of its linear term, and the prior of its gate by exp(-m^2 / (2 s^2)).
    """

    quadratic: CollapsedQuadratic
    prior: SiteGates
    gates: Layout
    slabs: Layout
    rates: Sequence[ConjugateRate]
    others: Mapping[str, Tensor]
    loc: Tensor
    tilt: Tensor
    gated: Tensor

    @property
    def offset(self) -> Tensor:
        """From where the coefficients of slabs are measured, shape ``(p,)``."""
        return self.loc.masked_fill(self.gated, 0)

    def placed(self, gates: Tensor, slabs: Tensor) -> Tensor:
        """Slabs of the quadratic as the model has them: around the means of their priors where these are apart."""
        is_tilted = self.quadratic.on(gates) & self.gated
        return slabs + self.loc.masked_fill(is_tilted, 0)

    def points(self, values: Mapping[str, Tensor]) -> list[Point]:
        """Generic values of gates, rates and slabs, beside those of the other latents."""
        gates = gate_vectors(self.quadratic.gates, self.loc)
        with seeded(0):
            slabs = self.placed(gates, self.quadratic.draw_slabs(gates))
        return [
            {
                **values,
                **self.gates.apart(z),
                **self.slabs.apart(w),
                **{x.name: torch.full_like(values[x.name], float(r)) for x in self.rates},
            }
            for z, w, r in zip(gates, slabs, torch.linspace(0.2, 0.8, len(gates)), strict=True)
        ]

    def log_joint(self, log_likelihood: LogLikelihood, points: Sequence[Point]) -> Tensor:
        """The log density of gates, rates and slabs that is sampled, up to a constant, shape ``(n,)``."""
        values = {name: torch.stack([point[name] for point in points]) for name in points[0]}
        gates, slabs = self.gates.together(values), self.slabs.together(values)
        on = self.quadratic.on(gates)
        coefficients = (slabs - self.offset) * on
        normal = torch.distributions.Normal(self.loc.masked_fill(on & self.gated, 0), self.quadratic.scale)
        rates = [Beta(*x.parameters(values)).log_prob(values[x.name].reshape(-1, 1)).sum(1) for x in self.rates]
        parts = [log_likelihood(coefficients), self.prior.log_prob(gates), normal.log_prob(slabs).sum(1), *rates]
        return torch.stack([part.double() for part in parts]).sum(0)


@torch.no_grad()
def collapse(joint: CorrelatedPosterior, target: InferenceTarget, hyper: Tensor) -> Collapsed:
    """Integrate the slabs out of a model whose posterior has structured slabs.

    The other latents have values ``hyper`` on the real line, shape ``(chains, d)``, or one row for all chains.
    """
    slabs = joint.slab_posterior
    assert isinstance(slabs, StructuredSlabs)
    shift = hyper - joint.hyper_start
    curvature, linear = slabs.quadratic()
    odds, loc, scale = _priors(joint, target, hyper)
    gate_of = slabs.gate_of.reshape(len(curvature), -1)
    gated = (gate_of >= 0).any(1)
    tilt = (loc / scale.square()).masked_fill(~gated, 0)
    ratio = slabs.multiplied(hyper.new_ones(1, joint.gates.size), shift)
    linear = linear + shift @ slabs.shifts.mT - (ratio * loc.masked_fill(gated, 0)) @ curvature
    factor = slabs.likelihood_factor(shift)
    if len(hyper) == 1:
        curvature, linear = (x if factor is None else factor.reshape(()) * x for x in (curvature, linear[0]))
        curvature = ratio.mT * curvature * ratio
        factor, linear, scale = None, ratio[0] * linear + tilt[0], scale[0]
    else:  # of the coefficients times what multiplies them in each chain
        linear, scale = linear + tilt / ratio / (1 if factor is None else factor), scale * ratio
    has_own_gate = torch.equal(slabs.gate_of, torch.arange(joint.gates.size, device=slabs.gate_of.device))
    quadratic = CollapsedQuadratic(
        DenseQuadratic(curvature, linear if linear.dim() == 1 else linear.mean(0)),
        scale,
        gate_of=None if has_own_gate else slabs.gate_of,
        factor=None if factor is None else factor.reshape(-1),
        linear=linear if linear.dim() == 2 else None,
    )
    of_gates = (-0.5 * loc * tilt) @ torch.nn.functional.one_hot(gate_of.amax(1) + 1, joint.gates.size + 1).to(tilt)
    prior = _gates(joint, odds, of_gates[:, 1:])
    return Collapsed(
        quadratic, prior, joint.gates, joint.slabs, joint.rates, joint.hyper.apart(hyper[0]), loc[0], tilt[0], gated
    )


def _priors(joint: CorrelatedPosterior, target: InferenceTarget, hyper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log odds of the gates, and means and deviations of the slabs, for rows of the other latents."""
    rates = {rate.name: rate.open.new_full(rate.shape, 0.5).to(hyper) for rate in joint.rates}  # ignored

    def at(row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sites = target.at({**rates, **joint.hyper.apart(row), **joint.gates.apart(row.new_ones(joint.gates.size))})
        found = [_log_odds(name, sites[name]).expand(shape) for name, shape in joint.gates.shapes.items()]
        normals = [joint.slabs.normal(name, sites[name]["fn"]) for name in joint.slabs.shapes]
        loc, scale = map(torch.cat, zip(*normals, strict=True))
        return torch.cat([x.reshape(-1) for x in found]), loc, scale

    odds, loc, scale = map(torch.stack, zip(*map(at, hyper), strict=True))
    return odds, loc, scale


def _gates(joint: CorrelatedPosterior, odds: Tensor, tilt: Tensor) -> SiteGates:
    positions, rates = joint.gates.positions(odds.device), []
    for rate in joint.rates:
        weights = None if bool((rate.weights - 1).abs().max() < 1e-4) else rate.weights
        prior = BetaBinomialGates(float(rate.open), float(rate.closed), weights)
        rates.append((torch.cat([positions[name] for name in rate.gates]), prior))
    return SiteGates(odds, rates, tilt)


def _log_odds(name: str, site: Site) -> Tensor:
    gate = find_gate(site["fn"])
    if not isinstance(gate, BernoulliGate):
        raise ValueError(
            f"Expected binary gates at site {name!r}, but got {gate}. Use a BernoulliGate in the model, or "
            "sample_posterior."
        )
    return gate.logits


Method = Literal["tempered", "mean_field"]

_POINTS = 4  # at which a log likelihood is compared with its expansion
_CLOSE = 1e-3  # nats by which they may differ for 1 nat of change, or in all
_MOVES, _FEW, _TAKEN = 20, 3, 0.95  # of slabs; few where this share of the first proposals is taken
_NARROW, _TOGETHER = 1e-6, 1024  # a slice that is given up; slabs whose log likelihoods are found together


@dataclass(frozen=True)
class RefinedPosterior(Trust, JointDraws):
    """Gates and slabs with the other latents held fixed, from :meth:`~pyro_l0.infer.AutoSpikeSlab.refine`.

    Attributes:
        error: largest standard error of ``active_probs``, by how much chains differ; NaN for one chain or a mean field.
        problems: that the error is too large or unknown, and what to do.
        slab: the gate site of each slab site.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_l0 import BernoulliGate
        >>> from pyro_l0.infer import AutoSpikeSlab
        >>> x = torch.eye(50) * 3
        >>> def model(y):
        ...     with pyro.plate("features", 50):
        ...         z = pyro.sample("z", BernoulliGate(probs=0.1))
        ...         w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x @ (z * w), 0.5).to_event(1), obs=y)
        >>> guide, y = AutoSpikeSlab(model, slab={"w": "z"}), x[7]
        >>> _ = guide(y)
        >>> int(guide.refine(y, seed=0, flips=200).active_probs()["z"].argmax())
        7
    """

    _collapsed: Collapsed
    _probs: Tensor
    _draw: Callable[[int], tuple[Tensor, Tensor]]
    error: float
    problems: tuple[str, ...]
    slab: dict[str, GateSite]
    _alignments: Mapping[str, Alignment]
    _fixed: Mapping[str, Tensor] = field(default_factory=dict)

    def active_probs(self) -> dict[str, Tensor]:
        """Marginal P(z != 0) of every gate, by site and in its shape."""
        return self._collapsed.gates.apart(self._probs)

    @torch.no_grad()
    def draws(self, n: int) -> dict[str, Tensor]:
        """n joint draws by site, shape ``(n, *shape of the site)``; the other latents are the same in all."""
        gates, slabs = self._draw(n)
        slabs = self._collapsed.placed(gates, slabs)
        found = {name: x.expand(n, *x.shape) for name, x in self._collapsed.others.items()}
        found |= self._collapsed.gates.apart(gates) | self._collapsed.slabs.apart(slabs)
        for rate in self._collapsed.rates:
            found[rate.name] = Beta(*rate.parameters(found)).sample().reshape(n, *rate.shape)
        return found

    def _is_gate(self, name: str) -> bool:
        return name in self._collapsed.gates.shapes


@torch.no_grad()
def refined(
    collapsed: Collapsed,
    log_likelihood: LogLikelihood,
    method: Method,
    generator: torch.Generator | None,
    chains: int,
    flips: int,
) -> tuple[Collapsed, Tensor, Callable[[int], tuple[Tensor, Tensor]], float, tuple[str, ...]]:
    """Sample the gates, or fit a collapsed mean field to them; arguments as of :meth:`AutoSpikeSlab.refine`.

    The result is the model as it was expanded last, P(z != 0), what draws gates and slabs, the error and problems.
    """
    if method not in ("tempered", "mean_field"):
        raise ValueError(f"Expected method 'tempered' or 'mean_field', but got {method!r}.")
    quadratic, prior = collapsed.quadratic, collapsed.prior
    is_exact = is_quadratic(collapsed, log_likelihood)

    def with_slabs(gates: Tensor) -> tuple[Tensor, Tensor]:
        gates = gates.to(quadratic.scale)
        slabs = quadratic.draw_slabs(gates)
        return gates, slabs if is_exact else moved_slabs(log_likelihood, quadratic, gates, slabs)

    if method == "mean_field":
        probs = torch.sigmoid(collapsed_mean_field(quadratic, prior, generator=generator))
        unknown = doubts(math.nan, "a collapsed mean field takes gates as independent. Compare method='tempered'.")
        return collapsed, probs, lambda n: with_slabs(torch.bernoulli(probs.expand(n, -1))), math.nan, unknown
    if is_exact:
        run = tempered_gibbs(quadratic, prior, chains=chains, flips=flips, generator=generator)
    else:
        run, quadratic = gibbs_by_expansion(
            log_likelihood,
            quadratic.scale,
            prior,
            start=torch.zeros_like(quadratic.quadratic.linear),
            gate_of=quadratic.gate_of,
            chains=chains,
            flips=flips,
            generator=generator,
        )
    error, collapsed = float(run.standard_error().max()), collapsed._replace(quadratic=quadratic)
    problems = doubts(error, "use more flips." if chains > 1 else "use several chains.")
    return collapsed, run.active_probs, lambda n: with_slabs(run.draws(n)), error, problems


def moved_slabs(log_likelihood: LogLikelihood, collapsed: CollapsedQuadratic, gates: Tensor, slabs: Tensor) -> Tensor:
    """Draws of an expansion, moved towards the posterior given their gates, shape ``(S, p)``.

    Each is a chain of elliptical slices (Murray, Adams and MacKay 2010, arXiv:1001.0175), by turns around the
    expansion's normal distribution and around the prior. They leave the posterior invariant, and few of them suffice
    where the expansion is close, so that their first proposals are taken.
    """
    quadratic, on = collapsed.quadratic, collapsed.on(gates)
    matrix = quadratic.rows(torch.arange(on.shape[1], device=on.device)[None])[0]
    mean = collapsed.mean(gates)
    is_open, first = on.any(1), 0.0
    for move in range(_MOVES):
        around_prior = bool(move % 2)
        centre = torch.zeros_like(mean) if around_prior else mean
        auxiliary = (collapsed.scale * torch.randn_like(mean) if around_prior else collapsed.draw_slabs(gates)) - centre

        def value_at(slabs: Tensor, around_prior: bool = around_prior) -> Tensor:
            """The log likelihood, less its expansion."""
            beta = slabs * on
            log_likelihoods = torch.cat([log_likelihood(part) for part in beta.split(_TOGETHER)])
            return (
                log_likelihoods
                if around_prior
                else log_likelihoods - beta @ quadratic.linear + 0.5 * ((beta @ matrix) * beta).sum(1)
            )

        level = value_at(slabs) + torch.rand_like(mean[:, 0]).log()
        here, left = slabs - centre, torch.ones_like(level, dtype=torch.bool)
        upper = 2 * math.pi * torch.rand_like(level)
        angle, lower = upper, upper - 2 * math.pi
        while bool(left.any()):
            there = centre + here * angle.cos()[:, None] + auxiliary * angle.sin()[:, None]
            taken = left & (value_at(there) >= level)
            first = first or float(taken[is_open].double().mean())
            slabs = torch.where(taken[:, None], there, slabs)
            left = left & ~taken & (upper - lower > _NARROW)
            lower, upper = torch.where(angle < 0, angle, lower), torch.where(angle < 0, upper, angle)
            angle = lower + (upper - lower) * torch.rand_like(angle)
        if move == _FEW and first > _TAKEN:
            break
    return slabs


def is_quadratic(collapsed: Collapsed, log_likelihood: LogLikelihood) -> bool:
    """Whether a log likelihood is its own expansion, at random coefficients of the size that the prior has."""
    quadratic = collapsed.quadratic.quadratic
    beta = torch.randn(_POINTS, len(quadratic.linear)).to(quadratic.linear) * collapsed.quadratic.scale
    index = torch.arange(len(quadratic.linear), device=beta.device)
    rows = quadratic.rows(index[None]).squeeze(0)
    own = beta @ quadratic.linear - 0.5 * ((beta @ rows) * beta).sum(1)
    difference = log_likelihood(beta) - own
    change = difference - difference.mean()
    return bool((change.abs() <= _CLOSE * (1 + (own - own.mean()).abs())).all())
