"""Checks that a model and its guide fit together: shapes, draws, slabs, and what depends on what."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import pyro
import torch
from pyro.distributions import Delta, Normal, Unit
from pyro.infer.util import is_validation_enabled
from pyro.poutine.util import site_is_subsample
from pyro.util import check_site_shape
from torch import Tensor
from torch.distributions import Transform

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution, find_gate, innermost, inside_events
from pyro_l0.infer.elbo.estimators import EstimatorName
from pyro_l0.infer.guides.mean_field import SUM_OUT, carried, transform_to_support
from pyro_l0.infer.record import Record, Site
from pyro_l0.infer.runs import forked_generators, is_scaled
from pyro_l0.infer.slabs import Alignment, Conditional, GateSite, alignment_of, gate_site


def check_pair(name: str, site: Site, posterior: Site | None) -> GateDistribution | None:
    """The posterior gate of a latent site, None for another latent; raises where model and guide disagree."""
    prior_gate = find_gate(site["fn"])
    kind = "Gate" if prior_gate is not None else "Latent"
    if posterior is None or posterior["type"] != "sample":
        discrete = prior_gate is None and site["fn"].has_enumerate_support
        how = f" It is discrete: {SUM_OUT}" if discrete else ""
        raise ValueError(f"{kind} site {name!r} of the model has no posterior in the guide.{how}")
    q, p = posterior["fn"], site["fn"]
    gate = find_gate(q)
    if (gate is None) != (prior_gate is None):
        raise ValueError(
            f"Site {name!r} is {_kind(p, prior_gate)} in the model but {_kind(q, gate)} in the guide; its KL "
            "would have to be sampled, which gives a biased gradient."
        )
    if (q.batch_shape, q.event_shape) != (p.batch_shape, p.event_shape):
        raise ValueError(
            f"Shapes of model and guide differ at site {name!r}: batch {tuple(p.batch_shape)} and event "
            f"{tuple(p.event_shape)} in the model, batch {tuple(q.batch_shape)} and event {tuple(q.event_shape)} "
            "in the guide."
        )
    for what in ("scale", "mask") if is_scaled(posterior) or (gate is not None and is_scaled(site)) else ():
        if not _agree(site[what], posterior[what]):
            raise ValueError(
                f"The {what} of model and guide differ at site {name!r}: {site[what]} and {posterior[what]}."
            )
    for one in (site, posterior):
        check_shape(one, q.batch_shape)
    return gate


def check_shape(site: Site, shape: torch.Size) -> None:
    """Refuse a log probability whose shape is not that of the site's plates: too many terms would be summed.

    A factor outside of plates is one term, which is given in parts.
    """
    is_batch = bool(shape) and not isinstance(site["fn"], Unit)
    if (is_batch or site["cond_indep_stack"]) and is_validation_enabled():
        shaped: Site = {**site, "log_prob": SimpleNamespace(shape=shape)}
        check_site_shape(shaped, sys.maxsize)


def _kind(fn: object, gate: GateDistribution | None) -> str:
    return f"{'no gate' if gate is None else 'a gate'} ({fn})"


def _agree(x: object, y: object) -> bool:
    """Whether two scales or masks are the same; values on a device are not read."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x is y or x.device.type != "cpu" or y.device.type != "cpu" or not is_validation_enabled():
            return True
        return x.shape == y.shape and torch.equal(x, y)
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return x is not None and y is not None and not isinstance(x, bool) and not isinstance(y, bool)
    return bool(x == y)


def check_draws(name: str, gate: GateDistribution) -> None:
    """Refuse a posterior gate whose draws have no derivative, where one is needed."""
    if not gate.has_rsample and torch.is_grad_enabled():
        instead = (
            f"choose an estimator of L0_ELBO, one of {get_args(EstimatorName)}"
            if isinstance(gate, BernoulliGate)
            else "only a BernoulliGate can do without them"
        )
        raise ValueError(
            f"The posterior at gate site {name!r}, a {type(gate).__name__}, has no pathwise draws; {instead}."
        )


def check_slabs(
    slabs: Mapping[str, GateSite], gates: Mapping[str, GateDistribution], model: Mapping[str, Site]
) -> None:
    """Refuse slabs that are not latent weights of the model, and slabs whose gates are not gates."""
    for slab, switch in slabs.items():
        is_latent = slab in model and _is_latent(model[slab]) and slab not in gates
        if not is_latent or gate_site(switch) not in gates:
            raise ValueError(
                f"Expected slab to give the gate site, one of {sorted(gates)}, of latent weights of the model, but got "
                f"{gate_site(switch)!r} of {slab!r}."
            )


def check_auxiliary(name: str, site: Site) -> None:
    """Refuse a site of the guide alone, unless it is marked; gates are refused in any case."""
    is_gate = find_gate(site["fn"]) is not None
    if is_gate or not (site["infer"].get("is_auxiliary") or site["is_observed"]):
        raise ValueError(
            f"{'Gate site' if is_gate else 'Site'} {name!r} of the guide is not in the model. Mark what is no gate by "
            "infer={'is_auxiliary': True}, if that is meant."
        )


#: Guides whose slabs have a density for each entry.
FACTORISED = "Take AutoNormal, AutoDiagonalNormal, independent normals of your own, or AutoSpikeSlab"

_Sites = Mapping[str, Site]
_Run = Callable[[Record], None]  # of a guide or a model under a handler


class _Link(NamedTuple):
    """The entries of an auxiliary site from which a site follows, one by one."""

    source: str
    start: int
    stop: int
    shape: torch.Size
    transform: Transform | None

    def part(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1)[..., self.start : self.stop].reshape(self.shape)

    def is_right(self, guide: _Sites, value: Tensor) -> bool:
        part = self.part(guide[self.source]["value"])
        return torch.equal(part if self.transform is None else self.transform(part), value)

    def density(self, guide: _Sites, event_dim: int) -> Any:
        normal = inside_events(guide[self.source]["fn"])
        fn = carried(self.part(normal.loc), self.part(normal.scale), self.transform)
        return fn.to_event(event_dim - fn.event_dim)


def _links(model: _Sites, guide: _Sites) -> dict[str, _Link]:
    """The entries of auxiliary normals from which a ``Delta`` after them may follow, in the order of Pyro's guides."""
    found: dict[str, _Link] = {}
    source, start = "", 0
    for name, site in guide.items():
        base = inside_events(site["fn"])
        if name not in model and site["infer"].get("is_auxiliary"):
            source, start = name if type(base) is Normal else "", 0
        elif source and name in model and isinstance(base, Delta):
            transform = transform_to_support(name, model[name]["fn"], is_slab=False)
            shape = site["value"].shape if transform is None else transform.inverse_shape(site["value"].shape)
            stop = start + shape.numel() // guide[source]["value"].shape[:-1].numel()
            found[name], start = _Link(source, start, stop, shape, transform), stop
    widths = {link.source: (1, *guide[link.source]["value"].shape)[-1] for link in found.values()}
    used_up = {link.source for link in found.values() if link.stop == widths[link.source]}
    return {name: x for name, x in found.items() if x.source in used_up and x.stop <= widths[x.source]}


def own_densities(slab: Collection[str], model: _Sites, guide: _Sites) -> _Sites:
    """A guide's sites, where slabs that follow from auxiliary draws have the density of their own values instead.

    An automatic guide of Pyro's draws u and a ``Delta`` of T(u): only log q(u) - log |det T'(u)| together with
    -log p(T(u)) is a KL of a slab, which a gate can weigh.
    """
    if not any(isinstance(inside_events(guide[name]["fn"]), Delta) for name in slab if name in guide):
        return guide
    links = _links(model, guide)
    sources = {links[name].source for name in slab if name in links}
    own = {
        name: {**guide[name], "fn": link.density(guide, guide[name]["fn"].event_dim)}
        for name, link in links.items()
        if link.source in sources
    }
    return {name: own.get(name, site) for name, site in guide.items() if name not in sources}


def slab_entries(name: str, gate: GateSite, model: _Sites, guide: _Sites) -> tuple[Any, Any, Alignment]:
    """Posterior and prior of a slab's entries that have densities of their own, and how the gates align with these."""
    # Elements have them where both sides are products of them.
    q, p = inside_events(guide[name]["fn"]), inside_events(model[name]["fn"])
    if q.event_dim != p.event_dim:
        q, p = guide[name]["fn"], model[name]["fn"]
    aligned = alignment_of(name, gate, model, guide)
    split = len(aligned.shape) - q.event_dim
    if any(size > 1 for size in aligned.shape[split:]):
        raise ValueError(
            f"Expected one gate at site {gate_site(gate)!r} for every event of slab site {name!r}, as {q} has no KL "
            f"for each entry of {tuple(guide[name]['fn'].event_shape)}, but got gates of shape {aligned.shape}. "
            f"{FACTORISED}."
        )
    return q, p, aligned._replace(shape=aligned.shape[:split])


def _parents(run: _Run, sites: _Sites, names: Collection[str]) -> dict[str, set[str]]:
    """For each latent site of a run at the values of some sites, on which of the names its distribution depends.

    Either a derivative shows it, even one that is 0 for now, or a change of the distribution at another draw.
    """
    values = {name: {**site, "value": site["value"].detach()} for name, site in sites.items()}
    leaves = {name: values[name]["value"].clone().requires_grad_() for name in names}

    def densities(drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        record = Record({**values, **{name: {**values[name], "value": value} for name, value in drawn.items()}})
        with forked_generators(), pyro.validation_enabled(False):
            run(record)
            return {name: _density(site, values) for name, site in record.sites.items() if _is_latent(site)}

    with torch.enable_grad():
        first = densities(leaves)
        found: dict[str, set[str]] = {name: set() for name in first}
        for name, x in first.items() if leaves else ():
            inputs = list(leaves.values()) if x.requires_grad else []
            slopes = torch.autograd.grad(x.sum(), inputs, retain_graph=True, allow_unused=True) if inputs else ()
            found[name] |= {leaf for leaf, slope in zip(leaves, slopes, strict=False) if slope is not None}

    def changed(drawn: Mapping[str, Tensor]) -> set[str]:
        again = densities(drawn)
        return {name for name, x in first.items() if not torch.allclose(x, again[name], equal_nan=True)}

    with torch.no_grad(), forked_generators():
        others = {name: _another(sites[name]) for name in leaves}
        for leaf, other in others.items() if changed(others) else ():
            for name in changed({leaf: other}):
                found[name].add(leaf)
    return found


def _density(site: Site, values: _Sites) -> Tensor:
    """What shows a change of a site's distribution: its density at one value."""
    fn, value = innermost(site["fn"]), values.get(site["name"], site)["value"]
    if isinstance(fn, Conditional):  # its joint draw has terms of its own
        return torch.zeros(())
    density: Tensor = fn.v if isinstance(fn, Delta) else site["fn"].log_prob(value)
    return density


def _another(site: Site) -> Tensor:
    """Another value of a site; gates open where they are closed, and close where they are open."""
    value: Tensor = site["value"]
    return (value == 0).to(value.dtype) if find_gate(site["fn"]) is not None else site["fn"].sample()


def _is_latent(site: Site) -> bool:
    return not site["is_observed"] and not site_is_subsample(site)


def _descendants(parents: Mapping[str, set[str]], name: str) -> set[str]:
    found, new = set[str](), {name}
    while new:
        new = {child for child, of in parents.items() if of & new} - found
        found |= new
    return found


def check_dependence(
    model: _Sites, guide: _Sites, slab: Mapping[str, GateSite], run_model: _Run, run_guide: _Run, at_draws: bool
) -> set[str]:
    """The sites whose KL has to be taken at their draws; raises for slabs and for gates whose KL would be biased.

    That is a site whose prior depends on a site that, in the guide, depends on it. ``at_draws`` says whether the KL of
    binary gates may be taken so.
    """
    latent = {name: site for name, site in guide.items() if _is_latent(site)}
    positions = {name: i for i, name in enumerate(name for name in latent if name in model)}
    order = [name for name in model if name in positions]
    if not slab and order == list(positions):
        return set()
    # What is computed from other draws, a Delta, is computed anew.
    drawn = {name: x for name, x in guide.items() if name not in latent or not isinstance(innermost(x["fn"]), Delta)}
    parents = _parents(run_guide, drawn, [x for x in latent if x in drawn and drawn[x]["value"].is_floating_point()])
    jointly = [name for name, site in latent.items() if isinstance(site["fn"], Conditional)]
    for i, name in enumerate(jointly):
        parents[name] |= set(jointly[:i])
    for name, switch in slab.items():
        if not isinstance(guide[name]["fn"], Conditional):
            _check_slab(name, gate_site(switch), _links(model, guide), guide, parents)
    after = {name: {x for x in _descendants(parents, name) if x in positions} for name in positions}
    turned = {(v, z) for i, z in enumerate(order) for v in order[:i] if positions[v] > positions[z] and v in after[z]}
    if not turned:
        return set()
    of_prior = _parents(run_model, guide, {v for v, _ in turned})
    found = {z: v for v, z in turned if v in of_prior[z]}
    for name, other in found.items():
        gate = find_gate(guide[name]["fn"])
        if gate is not None and not (at_draws and isinstance(gate, BernoulliGate)):
            raise ValueError(
                f"Expected the prior of gate site {name!r} to depend on no site that the guide draws given {name!r}, "
                f"but it depends on {other!r}, and their KL is no sum of KLs. Draw them in the model's order, or take "
                "a BernoulliGate and estimator='leave_one_out'."
            )
    return set(found)


def _check_slab(
    name: str, gate: str, links: Mapping[str, _Link], guide: _Sites, parents: Mapping[str, set[str]]
) -> None:
    """Refuse a slab whose KL is not one by entry that P(z != 0) weighs."""
    source = links[name].source if name in links else name
    together = {name} | {other for other, link in links.items() if link.source == source}
    if name in _descendants(parents, gate):
        raise ValueError(
            f"Expected slab site {name!r} not to depend on its gates {gate!r} in the guide, whose P(z != 0) weighs its "
            "KL, but it does. Draw it without them, or take AutoSpikeSlab with slabs='structured'."
        )
    is_computed = isinstance(innermost(guide[name]["fn"]), Delta) and parents[name]
    if is_computed and not all(x in links and links[x].is_right(guide, guide[x]["value"]) for x in together):
        of = ", ".join(f"{x!r}, {innermost(guide[x]['fn'])}" for x in sorted(parents[name]))
        raise ValueError(
            f"Expected slab site {name!r} to have a density for each of its gates, but the guide computes it from "
            f"{of}. {FACTORISED}."
        )
    if dependent := _descendants(parents, source) - together:
        raise ValueError(
            f"Expected no site of the guide to depend on slab site {name!r}, which has its prior where its gate is "
            f"closed, but {sorted(dependent)} do. Draw them without it."
        )
