"""The terms of the objectives, each written once over a group of sites, and which objective has which."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from pyro.distributions import Delta, TorchDistribution
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import (
    GateDistribution,
    JointDraw,
    active_prob,
    concatenate,
    find_gate,
    inside_events,
    sum_open,
)
from pyro_l0.expect import expect
from pyro_l0.infer.elbo.coefficients import BySite, Coefficient, Options, by_site, check_names, check_shapes, is_zero
from pyro_l0.infer.elbo.pairs import (
    check_auxiliary,
    check_draws,
    check_pair,
    check_shape,
    check_slabs,
    own_densities,
    slab_entries,
)
from pyro_l0.infer.guides.mean_field import SUM_OUT
from pyro_l0.infer.record import Site, is_drawn
from pyro_l0.infer.runs import is_scaled, without_scales
from pyro_l0.infer.slabs import Conditional, GateSite, check_used, gate_site, with_latent_gates

Kind = Literal["observed", "slab", "other", "gates"]


class Run(NamedTuple):
    """The recorded sites of one run of a model and its guide, by name."""

    model: dict[str, Site]
    guide: Mapping[str, Site]
    joint_draws: Mapping[str, object]  # that sites of the guide are from
    at_draws: bool = False  # whether the log ratio of binary gates is taken at their draws, not its mean


def as_in_model(model: Mapping[str, Site], guide: Mapping[str, Site]) -> Mapping[str, Site]:
    """A guide's sites, with the scales and masks of the model's where the guide leaves these to the model."""
    left = {x: site for x, site in guide.items() if x in model and site["infer"].get("as_in_model")}
    return {**guide, **{x: {**site, "scale": model[x]["scale"], "mask": model[x]["mask"]} for x, site in left.items()}}


def in_log_joint(model: Mapping[str, Site], guide: Mapping[str, Site], slabs: Collection[str]) -> dict[str, Site]:
    """A model's sites, where gates and slabs that only the model scales or masks have the priors that this makes."""
    found = dict(model)
    for name, site in model.items():
        if name in guide and is_drawn(site) and is_scaled(site) and not is_scaled(guide[name]):
            found |= without_scales({name: site}, slabs)
    return found


class SiteGroup:
    """Sites that a :class:`~pyro_l0.infer.Term` takes at once: one, or gates of several drawn jointly.

    Args:
        kind: what the sites are: ``"gates"``, ``"slab"``, ``"observed"`` or ``"other"``.
        names: the sites.
        run: the run that they come from; a term may look up its other sites.
        joint: the gates' joint draw, outside of plates and masks; None for a single site.
    """

    def __init__(self, kind: Kind, names: Sequence[str], run: Run, joint: JointDraw | None = None) -> None:
        self.kind = kind
        self.names = names
        self.run = run
        self.joint = joint

    @property
    def name(self) -> str:
        """The first of its sites' names, by which it goes."""
        return self.names[0]

    @property
    def prior(self) -> Site:
        """The recorded site of the model; of several, the first."""
        return self.run.model[self.names[0]]

    @property
    def posterior(self) -> Site:
        """The recorded site of the guide; of several, the first."""
        return self.run.guide[self.names[0]]

    @cached_property
    def apart(self) -> list[SiteGroup]:
        """A group for each of its sites, as terms that look at single sites need it."""
        return [SiteGroup(self.kind, (name,), self.run) for name in self.names]

    @cached_property
    def active_prob(self) -> Tensor:
        """P(z != 0) and 0 where masked, in the shape of one site, or of several side by side, shape ``(n,)``."""
        return active_prob(self.posterior["fn"]) if self.joint is None else self.joint.active_prob

    @cached_property
    def pair(self) -> tuple[TorchDistribution, TorchDistribution] | None:
        """Posterior and prior, each one gate for all sites; None if the priors do not combine to one."""
        if self.joint is None:
            q = self.posterior["fn"]
            return q.base_dist if isinstance(q, Conditional) else q, self.prior["fn"]
        priors = [inside_events(self.run.model[name]["fn"]) for name in self.names]
        prior = concatenate(priors) if all(isinstance(fn, GateDistribution) for fn in priors) else None
        posterior = concatenate(self.joint.gates)
        return None if prior is None or type(prior) is not type(posterior) else (posterior, prior)

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of the sites' gates, in order, in which a joint vector is cut."""
        return [self.active_prob.shape] if self.joint is None else [draw.shape for draw in self.joint.draws]

    def open_gates(self, weights: Sequence[float | Tensor], norms: Tensor | None = None) -> Tensor:
        """Sum of P(z != 0) times a weight per site and, if given, times a number per gate; under scale and mask."""
        active = self.active_prob
        if self.joint is None:
            site = self.posterior
            value = weights[0] * (active if norms is None else norms * active)
            if site["mask"] is not None or isinstance(site["scale"], Tensor):
                value = sum_rightmost(value, site["fn"].event_dim)
            return self.total(value)
        each = active if norms is None else norms.to(active.dtype) * active
        return sum_open(each, weights, [shape.numel() for shape in self.shapes])

    def total(self, value: Tensor) -> Tensor:
        """Sum of a number per entry of the batch under scale and mask; a joint draw has scale 1 and no mask."""
        total: Tensor = scale_and_mask(value, self.posterior["scale"], self.posterior["mask"]).sum()
        return total


def site_groups(run: Run, options: Options) -> Iterator[SiteGroup]:
    """The groups of a run: sites of other kinds as they come, then the gates; refuses what does not fit."""
    model, joint_draws, slab = run.model, run.joint_draws, with_latent_gates(options.slab, run.model)
    guide = own_densities(slab, model, run.guide)
    run = run._replace(guide=guide)
    latent = {x: site for x, site in model.items() if is_drawn(site) and not site["is_observed"]}
    pairs = {name: check_pair(name, site, guide.get(name)) for name, site in latent.items()}
    gates = {name: gate for name, gate in pairs.items() if gate is not None}
    if options.estimator is None:
        for name, gate in gates.items():
            check_draws(name, gate)
    check_names(options, gates)
    check_slabs(slab, gates, model)
    for name, site in model.items():
        if is_drawn(site) and name not in gates:
            kind: Kind = "observed" if name not in latent else "slab" if name in slab else "other"
            yield SiteGroup(kind, (name,), run)
    for name, site in guide.items():
        if is_drawn(site) and name not in model:
            check_auxiliary(name, site)
            yield SiteGroup("other", (name,), run)
    check_used(slab, {name: gate.batch_shape for name, gate in gates.items()})
    groups: dict[int | str, list[str]] = {}
    for name in guide:
        if name in gates:
            groups.setdefault(id(joint_draws[name]) if name in joint_draws else name, []).append(name)
    for names in groups.values():
        joint = joint_draws.get(names[0])
        yield SiteGroup("gates", names, run, joint if isinstance(joint, JointDraw) else None)


_Objective = Any  # the Options; a user's function may ask for an L0_ELBO


class Term(NamedTuple):
    """One term of an objective.

    Attributes:
        name: its name in :meth:`L0_ELBO.terms <pyro_l0.infer.L0_ELBO.terms>`.
        value: a function of a :class:`~pyro_l0.infer.SiteGroup` and the objective that returns what these
            sites add to the loss, in nats, shape ``()``; None for nothing. The loss adds up the values of all groups
            and particles, of which a group may hold several (``vectorize_particles``): a sum over gates is right
            everywhere, and a function of the number of all open gates is not.
        kind: the kind of sites that it is evaluated over: ``"gates"``, ``"slab"``, ``"observed"`` or ``"other"``.
        is_kl: whether ``kl_scale`` scales it.
        uses_draws: whether it depends on what was drawn, so that its gradient needs an estimator for binary gates.
        takes: whether it takes a group of several sites at once; by default it gets them one by one.

    Example:
        >>> import pyro
        >>> from pyro_l0 import HardConcrete
        >>> from pyro_l0.infer import L0_ELBO, AutoGate
        >>> def variance(group, elbo):
        ...     return (group.active_prob * (1 - group.active_prob)).sum()
        >>> sure = Term("sure", variance, "gates")
        >>> gates = HardConcrete(torch.zeros(3)).to_event(1)
        >>> guide = AutoGate(lambda: pyro.sample("z", gates), init_jitter=0.0)
        >>> elbo = L0_ELBO("l0", extra_terms=[sure])
        >>> round(elbo.loss(guide.model, guide), 2)  # 3 * 0.9 * 0.1
        0.27
    """

    name: str
    value: Callable[[SiteGroup, _Objective], Tensor | None]
    kind: Kind = "gates"
    is_kl: bool = False
    uses_draws: bool = False
    takes: Callable[[SiteGroup, _Objective], bool] = lambda group, options: False


# ------------------------------------------------------------ gates


def _coefficients(value: BySite, group: SiteGroup, options: Options) -> list[float | Tensor]:
    """By site of the group, the coefficient as it broadcasts against the gates; an empty list where all are 0."""
    found = [by_site(value, name) for name in group.names]
    if all(map(is_zero, found)):
        return []
    if group.joint is None:
        check_shapes(options, group.name, group.active_prob)
    return found


def _penalty(group: SiteGroup, options: Options) -> Tensor | None:
    lams = _coefficients(options.lam, group, options)
    if not lams:
        return None
    sizes = [by_site(options.group_size, name, 1.0) for name in group.names]
    return group.open_gates([lam * size for lam, size in zip(lams, sizes, strict=True)])


def _decay(group: SiteGroup, options: Options) -> Tensor | None:
    decays = _coefficients(options.weight_decay, group, options)
    if not decays:
        return None
    return group.open_gates([0.5 * decay for decay in decays], _square_norms(group, decays, options))


def _are_numbers(group: SiteGroup, options: Options) -> bool:
    """Whether no coefficient of the group is a tensor, so that all sites can be priced as one vector."""
    values = (options.lam, options.group_size, options.weight_decay)
    return not any(isinstance(by_site(value, name), Tensor) for value in values for name in group.names)


def _square_norms(group: SiteGroup, decays: Sequence[float | Tensor], options: Options) -> Tensor:
    """Squared norms of the weights of a group's gates; 0 for sites without a decay."""
    norms = options.square_norm
    if group.joint is None:
        return _square_norm(group.name, group.shapes[0], options)
    together: Callable[[Sequence[str]], Tensor | None] | None = getattr(norms, "together", None)
    if together is not None and all(decays) and norms.keys() >= set(group.names):
        found = together(group.names)
        if found is not None:
            return found
    sites = zip(group.names, group.shapes, decays, strict=True)
    each = [_square_norm(name, x, options) if decay else group.active_prob.new_zeros(x) for name, x, decay in sites]
    return torch.cat([norm.flatten() for norm in each])


def _square_norm(name: str, shape: torch.Size, options: Options) -> Tensor:
    if name not in options.square_norm:
        raise ValueError(
            f"Expected a square_norm for gate site {name!r}, which has a weight_decay; "
            f"got some for {sorted(options.square_norm)}."
        )
    norm = options.square_norm[name]()
    if norm.shape != shape:
        raise ValueError(
            f"Expected a square_norm of shape {tuple(shape)} for gate site {name!r}, but got {tuple(norm.shape)}."
        )
    return norm


def _gate_kl(group: SiteGroup, options: Options) -> Tensor:
    at_draws = group.run.at_draws or not options.at_draws.isdisjoint(group.names)
    if at_draws and isinstance(find_gate(group.posterior["fn"]), BernoulliGate):
        # The leave-one-out gradient has its share of the posterior's log probability, whose own has mean 0.
        ratios = [_log_prob_sum(one.posterior).detach() - _log_prob_sum(one.prior) for one in group.apart]
        return torch.stack(ratios).sum()
    assert group.pair is not None
    posterior, prior = group.pair
    kl = kl_divergence(posterior, prior)
    if kl.shape != posterior.batch_shape:
        raise ValueError(
            f"Expected a KL of shape {tuple(posterior.batch_shape)} at gate site {group.name!r}, but got "
            f"{tuple(kl.shape)}."
        )
    return group.total(kl)


# ------------------------------------------------------------ other sites


def _nll(group: SiteGroup, options: Options) -> Tensor:
    try:
        return _log_prob_sum(group.prior, -1.0)
    except ValueError as error:
        raise ValueError(f"The nll of site {group.name!r} failed at step {options.step}: {error}") from error


def _other_kl(group: SiteGroup, options: Options) -> Tensor:
    """KL of a latent variable that is neither gate nor slab; the log density of a site that only the guide has."""
    if group.name not in group.run.model:
        return _log_prob_sum(group.posterior)
    q = group.posterior["fn"]
    _check_pathwise(group.name, q)
    # The KL registered for a Delta leaves out its log density, which carries the Jacobian of an AutoContinuous guide.
    at_draws = (
        group.name in options.at_draws
        or isinstance(inside_events(q), Delta)
        or (is_scaled(group.prior) and not is_scaled(group.posterior))
    )
    kl = None if at_draws else _registered_kl(q, group.prior["fn"])
    return _log_ratio(group) if kl is None else group.total(kl)


def _slab_kl(group: SiteGroup, options: Options) -> Tensor:
    r"""The term :math:`\sum P(z \neq 0)\, KL(q(w) \| p(w))` of Eq. 20.

    Batch dimensions of gates and slab belong together. A gate without event dimensions switches a whole event: its KL
    is summed over the event first. Gates with event dimensions switch elements along the event's last dimensions, as
    torch broadcasts ``z * w``; one of size 1 is shared.
    """
    name, posterior = group.name, group.posterior
    if isinstance(posterior["fn"], Conditional):  # given its gates, and its prior where they are closed
        return _log_ratio(group)
    gate = options.slab[name]
    q, p, aligned = slab_entries(name, gate, group.run.model, group.run.guide)
    kl = _registered_kl(q, p)
    if kl is None:  # unbiased at the draw that the likelihood sees too, as both densities are smooth, unlike a gate's
        _check_pathwise(name, q)
        kl = q.log_prob(posterior["value"]) - p.log_prob(posterior["value"])
    active = aligned.of(active_prob(group.run.guide[gate_site(gate)]["fn"]))
    return group.total(sum_rightmost(kl * active, posterior["fn"].event_dim - q.event_dim))


def _log_prob_sum(site: Site, sign: float = 1.0) -> Tensor:
    """The log probability of a site's value, or its negative, under the site's scale and mask."""
    log_prob = site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    check_shape(site, log_prob.shape)
    scale, mask = site["scale"], site["mask"]
    if mask is None and not isinstance(scale, Tensor):
        # One number, not one per row; and no sum over one number.
        total: Tensor = (log_prob.sum() if log_prob.dim() else log_prob) * (sign * scale)
        return total
    return sign * scale_and_mask(log_prob, scale, mask).sum()  # type: ignore[no-any-return]


def _log_ratio(group: SiteGroup) -> Tensor:
    """log q - log p at the draw, summed over the site's entries, shape ``()``."""
    return _log_prob_sum(group.posterior) - _log_prob_sum(group.prior)


def _registered_kl(q: Distribution, p: Distribution) -> Tensor | None:
    """KL(q || p), in their batch shape; None if no closed form is registered for the pair."""
    try:
        return kl_divergence(q, p)
    except NotImplementedError:
        return None


def _check_pathwise(name: str, q: Distribution) -> None:
    """Refuse a posterior whose draws have no pathwise gradient."""
    if not q.has_rsample:
        raise ValueError(
            f"Expected a reparameterised posterior at latent site {name!r}, whose gradient goes through its sample, "
            f"but got {q}{f'; {SUM_OUT}' if q.has_enumerate_support else '.'}"
        )


NLL = Term("nll", _nll, "observed", uses_draws=True)
PENALTY = Term("l0", _penalty, takes=_are_numbers)
DECAY = Term("l2", _decay, takes=_are_numbers)
GATE_KL = Term("kl_gate", _gate_kl, is_kl=True, takes=lambda group, options: group.pair is not None)
SLAB_KL = Term("kl_slab", _slab_kl, "slab", is_kl=True, uses_draws=True)
OTHER_KL = Term("kl_other", _other_kl, "other", is_kl=True, uses_draws=True)

TERMS = (NLL, PENALTY, DECAY, GATE_KL, SLAB_KL, OTHER_KL)
#: The terms of each objective, whose order is that of their sum.
OBJECTIVES: dict[str, tuple[Term, ...]] = {
    "l0": (NLL, OTHER_KL, PENALTY, DECAY),
    "free_energy": (NLL, OTHER_KL, PENALTY, DECAY, GATE_KL),
    "spike_slab": (NLL, OTHER_KL, SLAB_KL, GATE_KL),
}


# ------------------------------------------------------------ checks


def check_slab(objective: str, slab: Mapping[str, GateSite] | None, **penalties: Coefficient) -> None:
    """Refuse slabs or penalties for an objective without such terms, and no slabs for one that needs them."""
    terms = OBJECTIVES[objective]
    if bool(slab) != (SLAB_KL in terms):
        raise ValueError(
            f"Expected slab={{'w': 'z', ...}} for objective='spike_slab' and no other, but got {slab!r} for "
            f"{objective!r}."
        )
    for name, value in penalties.items() if PENALTY not in terms else ():
        if isinstance(value, Tensor | Mapping) or value != 0:
            raise ValueError(
                f"Expected no {name} for objective={objective!r}, whose slab KL is the price of a weight, "
                f"but got {value!r}."
            )


def terms_of(objective: str, extra_terms: Sequence[Term]) -> tuple[Term, ...]:
    """An objective's row, and a user's own terms, whose values are checked."""
    if objective not in OBJECTIVES:
        *others, last = map(repr, OBJECTIVES)
        raise ValueError(f"Expected objective {', '.join(others)} or {last}, but got {objective!r}.")
    names = list(dict.fromkeys(term.name for term in (*TERMS, *OBJECTIVES[objective])))
    for term in extra_terms:
        expect(Term, "a pyro_l0.infer.elbo.terms.Term", **{"each of extra_terms": term})
        if term.kind not in get_args(Kind):
            raise ValueError(
                f"Expected the kind of extra term {term.name!r} in {get_args(Kind)}, but got {term.kind!r}."
            )
        if term.name in names:
            raise ValueError(f"Expected extra terms with names other than {names}, but got {term.name!r}.")
        names.append(term.name)
    return (*OBJECTIVES[objective], *(term._replace(value=partial(_scalar, term)) for term in extra_terms))


def _scalar(term: Term, group: SiteGroup, options: Options) -> Tensor | None:
    value = term.value(group, options)
    shape = None if value is None else tuple(torch.as_tensor(value).shape)
    if shape:
        raise ValueError(
            f"Expected extra term {term.name!r} to be a tensor of shape () at site {group.name!r}, but got shape "
            f"{shape}. Sum it over the gates."
        )
    return value
