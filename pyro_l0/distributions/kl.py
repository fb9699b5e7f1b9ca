"""KL divergences between gates: closed forms, quadrature for every other pair, and refusals.

Importing this module registers them with ``torch.distributions.kl_divergence``, and looks each pair up once: torch
keeps what it finds, and ``torch.compile(fullgraph=True)`` cannot follow it while it searches ("Failed to trace builtin
operator"). A further ``register_kl`` makes torch forget; then evaluate a KL once before it is compiled.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import torch
from pyro.distributions import Bernoulli, Delta, Independent
from torch import Tensor
from torch.distributions import Distribution, kl_divergence, register_kl

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.distributions.hard_concrete import HardConcrete
from pyro_l0.distributions.hard_kumaraswamy import HardKumaraswamy
from pyro_l0.distributions.mixtures import ExponentialGate, ExponentialUniformGate, PowerLawGate
from pyro_l0.distributions.rectified import Rectified, RectifiedNormal
from pyro_l0.distributions.stretched import integrate
from pyro_l0.expect import expect
from pyro_l0.maths import backend, hard_concrete_kl, quadrature, rectified_normal, special
from pyro_l0.maths.quadrature import Nodes, Stretch
from pyro_l0.maths.special import Number

_FAMILIES = (
    BernoulliGate,
    ExponentialGate,
    ExponentialUniformGate,
    HardConcrete,
    HardKumaraswamy,
    PowerLawGate,
    Rectified,
    RectifiedNormal,
)
_WIDE = 10.0  # scales whose closed form loses four digits or more: its moments are differences between the atoms


@register_kl(HardConcrete, HardConcrete)
def _kl_hard_concrete(q: HardConcrete, p: HardConcrete) -> Tensor:
    if not (_same(q._gamma, p._gamma) and _same(q._zeta, p._zeta)):
        return kl_by_quadrature(q, p)
    dtype = torch.promote_types(q.log_alpha.dtype, p.log_alpha.dtype)
    # The closed form has the derivative with respect to a temperature that both share. Temperatures that are
    # merely equal may be moved one at a time, so either they are one tensor or neither is being learned.
    if _same(q._temperature, p._temperature) and not backend.learned(q._gamma, q._zeta):
        rule = quadrature.gauss_legendre(8 if dtype == torch.float64 else 5, dtype, q.log_alpha.device)
        return hard_concrete_kl.same_temperature(q.log_alpha, p.log_alpha, q._temperature, q.stretch, rule)
    return integrate(_kl_same_stretch, q, p)


def _kl_same_stretch(nodes: Nodes, stretch: Stretch, q: HardConcrete, p: HardConcrete) -> Tensor:
    return hard_concrete_kl.same_stretch(q.log_alpha, q._temperature, p.log_alpha, p._temperature, stretch, nodes)


def _same(x: Number, y: Number) -> bool:
    """Whether two parameters are one: the same object, equal numbers, or equal constants in main memory."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x is y:
            return True
        return backend.constant(x) and backend.constant(y) and torch.equal(x, y)
    return not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y


@register_kl(RectifiedNormal, RectifiedNormal)
def _kl_rectified_normal(q: RectifiedNormal, p: RectifiedNormal) -> Tensor:
    single = q.scale.dtype == p.scale.dtype == torch.float32
    if single and backend.readable(q.scale) and backend.largest(q.scale) > _WIDE:
        wide = (x.double() for x in (q.loc, q.scale, p.loc, p.scale))
        return rectified_normal.kl(*wide).float()
    return rectified_normal.kl(q.loc, q.scale, p.loc, p.scale)


@register_kl(BernoulliGate, GateDistribution)
def _kl_bernoulli(q: BernoulliGate, p: GateDistribution) -> Tensor:
    _check_atoms(q, p)
    # Not by klterm: the atoms of p need not have total mass one.
    log_zero, log_one = q.log_prob_zero, q.log_prob_one
    return torch.exp(log_zero) * (log_zero - p.log_prob_zero) + torch.exp(log_one) * (log_one - p.log_prob_one)


@register_kl(BernoulliGate, BernoulliGate)
def _kl_bernoulli_bernoulli(q: BernoulliGate, p: BernoulliGate) -> Tensor:
    return special.klterm(q.log_prob_zero, p.log_prob_zero) + special.klterm(q.log_prob_one, p.log_prob_one)


@register_kl(BernoulliGate, torch.distributions.Bernoulli)
@register_kl(torch.distributions.Bernoulli, BernoulliGate)
def _kl_of_plain(q: Distribution, p: Distribution) -> Tensor:
    return kl_divergence(*(Bernoulli(logits=x.logits) if isinstance(x, BernoulliGate) else x for x in (q, p)))


def kl_by_quadrature(q: GateDistribution, p: GateDistribution) -> Tensor:
    """KL(q || p) of any two gates with the same atoms, from log densities and log masses alone.

    ``torch.distributions.kl_divergence`` uses it where no closed form is registered. The cost is bounded for every
    parameter; ``docs/lab/derivations.md`` of the repository says where the nodes lie.

    Args:
        q: posterior gate.
        p: prior gate, broadcast against ``q``.

    Returns:
        The KL in nats, of the broadcast batch shape.

    Raises:
        TypeError: the atoms differ, a gate has no density, or an argument is not a gate.

    Example:
        >>> from pyro_l0 import HardConcrete, RectifiedNormal
        >>> kl_by_quadrature(HardConcrete(0.0), RectifiedNormal(0.5, 0.5))
        tensor(0.0351)
    """
    expect(GateDistribution, "a gate", q=q, p=p)
    _check_atoms(q, p)
    return integrate(_kl_between, q, p)


def _kl_between(nodes: Nodes, stretch: Stretch, q: GateDistribution, p: GateDistribution) -> Tensor:
    klterm = special.klterm
    zero, one = (q.log_prob_zero, p.log_prob_zero), (q.log_prob_one, p.log_prob_one)
    # The interior before the atoms: the order in which gradients are summed.
    between = klterm(q._log_density_in_t(nodes, stretch), p._log_density_in_t(nodes, stretch))
    interior = (between * nodes.weight).sum(-1)
    return klterm(*zero) + klterm(*one) + interior


def _check_atoms(q: GateDistribution, p: GateDistribution) -> None:
    if q.atoms != p.atoms:
        raise TypeError(
            f"KL({type(q).__name__} || {type(p).__name__}) needs the same atoms on both sides, "
            f"but got {q.atoms} and {p.atoms}."
        )


register_kl(GateDistribution, GateDistribution)(kl_by_quadrature)


def _refuse(first: type[Distribution], second: type[Distribution], why: str) -> None:
    @register_kl(first, second)
    def refusal(q: Distribution, p: Distribution) -> Tensor:
        raise TypeError(f"KL({type(q).__name__} || {type(p).__name__}) is refused: {why}.")


_WRAPPERS = "or hides behind a wrapper; give both sides the same wrappers"
_refuse(
    GateDistribution,
    BernoulliGate,
    "it is infinite, as a BernoulliGate has no mass between 0 and 1",
)
_refuse(GateDistribution, Distribution, f"a gate has point masses, which the other side lacks {_WRAPPERS}")
_refuse(Distribution, GateDistribution, f"the first is no gate {_WRAPPERS}")
_refuse(Delta, GateDistribution, "a point has no divergence from a gate; use a gate as the posterior")

_kinds: tuple[type, ...] = (*_FAMILIES, Independent)
for _q, _p in product(_kinds, repeat=2):
    # Without parameters a formula fails at once; what torch found for the two classes stays.
    with suppress(AttributeError, TypeError):
        kl_divergence(object.__new__(_q), object.__new__(_p))
