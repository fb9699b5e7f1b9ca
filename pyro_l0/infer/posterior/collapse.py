"""A model for samplers of its gates: a quadratic log likelihood, slabs integrated out, and the gates' prior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import find_gate
from pyro_l0.fast.record import Site
from pyro_l0.infer.guides.correlated import ConjugateRate, CorrelatedPosterior
from pyro_l0.infer.guides.expansion import RunAt, gate_vectors
from pyro_l0.infer.guides.layout import Layout
from pyro_l0.infer.guides.structured_slabs import StructuredSlabs
from pyro_l0.maths.collapsed import CollapsedQuadratic
from pyro_l0.maths.second_order import DenseQuadratic
from pyro_l0.maths.tempered_gibbs import BetaBinomialGates


class SiteGates:
    """The prior of the gates of several sites: independent, or with a Beta rate in common that is summed out.

    The log odds have shape ``(chains, G)`` or ``(1, G)``; those of gates with a rate are ignored.
    """

    def __init__(self, logits: Tensor, rates: Sequence[tuple[Tensor, BetaBinomialGates]]) -> None:
        self._logits, self._rates = logits, rates
        self.active_prob = torch.sigmoid(logits).mean(0)
        for positions, rate in rates:
            self.active_prob[positions] = rate.active_prob.to(logits)

    def logits(self, z: Tensor) -> Tensor:
        """Log odds that a gate is open, given the others, shape of z."""
        odds = self._logits.expand(z.shape)
        for positions, rate in self._rates:
            odds = odds.index_copy(1, positions, rate.logits(z[:, positions]))
        return odds

    def log_prob(self, z: Tensor) -> Tensor:
        """Log probability of each vector, shape ``(S,)``."""
        each = torch.where(z > 0, 1.0, -1.0) * self._logits.expand(z.shape)
        each = torch.nn.functional.logsigmoid(each)
        for positions, _ in self._rates:
            each = each.index_fill(1, positions, 0.0)
        rates = [rate.log_prob(z[:, positions]) for positions, rate in self._rates]
        return torch.stack([each.sum(1), *rates]).sum(0)


class Collapsed(NamedTuple):
    """What a sampler of gates needs, for some values of the other latents: ``others`` has those of the first chain.

    The quadratic's coefficients are measured from ``offset``, the means of the slabs' priors: 0 for those with a gate.
    """

    quadratic: CollapsedQuadratic
    prior: SiteGates
    gates: Layout
    slabs: Layout
    rates: Sequence[ConjugateRate]
    others: Mapping[str, Tensor]
    offset: Tensor


@torch.no_grad()
def collapse(joint: CorrelatedPosterior, run_at: RunAt, hyper: Tensor) -> Collapsed:
    """Integrate the slabs out of a model whose posterior has structured slabs.

    The other latents have values ``hyper`` on the real line, shape ``(chains, d)``, or one row for all chains.
    """
    slabs = joint.slab_posterior
    assert isinstance(slabs, StructuredSlabs)
    _check_slabs(joint)
    shift = hyper - joint.hyper_start
    curvature, linear = slabs.quadratic()
    loc = slabs.prior_loc(shift)
    linear = linear + shift @ slabs.shifts.mT - loc @ curvature
    factor = slabs.likelihood_factor(shift)
    scale = slabs.prior_scale(shift)
    if len(hyper) == 1:
        curvature, linear = (x if factor is None else factor.reshape(()) * x for x in (curvature, linear[0]))
        factor, scale = None, scale.reshape(-1)
    has_own_gate = torch.equal(slabs.gate_of, torch.arange(joint.gates.size, device=slabs.gate_of.device))
    quadratic = CollapsedQuadratic(
        DenseQuadratic(curvature, linear if linear.dim() == 1 else linear.mean(0)),
        scale,
        gate_of=None if has_own_gate else slabs.gate_of,
        factor=None if factor is None else factor.reshape(-1),
        linear=linear if linear.dim() == 2 else None,
    )
    prior, others = _prior(joint, run_at, hyper), joint.hyper.apart(hyper[0])
    offset = loc if loc.dim() == 1 else loc[0]
    return Collapsed(quadratic, prior, joint.gates, joint.slabs, joint.rates, others, offset)


def _check_slabs(joint: CorrelatedPosterior) -> None:
    """Refuse slabs with gates and a prior mean, and gates without slabs."""
    slabs = joint.slab_posterior
    gate_of = slabs.gate_of.reshape(len(slabs.loc), -1)
    gated = (gate_of >= 0).any(1)
    if bool(slabs.loc[gated].any() or slabs.loc_shifts[gated].any()):
        raise ValueError(
            f"Expected slabs {', '.join(map(repr, joint.slabs.shapes))} with a prior mean of 0, but got means of up to "
            f"{float(slabs.loc[gated].abs().max()):.3g}."
        )
    alone = (torch.bincount(gate_of[gate_of >= 0], minlength=joint.gates.size) == 0).nonzero().flatten()
    if len(alone):
        raise ValueError(
            f"Expected gates that enter the model as products with their slabs, but got no slab of gate site "
            f"{_site_at(joint.gates, alone[0])!r}. Use sample_posterior."
        )


def _prior(joint: CorrelatedPosterior, run_at: RunAt, hyper: Tensor) -> SiteGates:
    """The gates' prior at values of the other latents."""
    rates = {rate.name: rate.open.new_full(rate.shape, 0.5) for rate in joint.rates}  # ignored

    def odds(row: Tensor, gates: Tensor) -> Tensor:
        sites = run_at({**rates, **joint.hyper.apart(row), **joint.gates.apart(gates)})
        found = [_log_odds(name, sites[name]).expand(shape) for name, shape in joint.gates.shapes.items()]
        return torch.cat([x.reshape(-1) for x in found])

    rows = [odds(row, hyper.new_ones(joint.gates.size)) for row in hyper]
    others = torch.stack([odds(hyper[0], gates) for gates in gate_vectors(joint.gates.size, hyper)])
    moved = (rows[0] != others).any(0).nonzero().flatten()
    if len(moved):
        raise ValueError(
            f"Expected gates that are independent given the other latents, but the prior of gate site "
            f"{_site_at(joint.gates, moved[0])!r} changes with the gates before. Use sample_posterior."
        )
    positions = joint.gates.positions(hyper.device)
    shared = [
        (torch.cat([positions[name] for name in rate.gates]), BetaBinomialGates(float(rate.open), float(rate.closed)))
        for rate in joint.rates
    ]
    return SiteGates(torch.stack(rows), shared)


def _site_at(gates: Layout, position: Tensor) -> str:
    """The site of the gate at a position."""
    own = gates.positions(position.device)
    return next(name for name, positions in own.items() if bool((positions == position).any()))


def _log_odds(name: str, site: Site) -> Tensor:
    gate = find_gate(site["fn"])
    if not isinstance(gate, BernoulliGate):
        raise ValueError(
            f"Expected binary gates at site {name!r}, but got {gate}. Use a BernoulliGate in the model, or "
            "sample_posterior."
        )
    return gate.logits
