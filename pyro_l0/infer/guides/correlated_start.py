"""Makes a correlated posterior for a model: how its sites depend on each other, and where it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.distributions import Beta, Normal
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import find_gate, innermost
from pyro_l0.fast.record import Site, is_deterministic
from pyro_l0.infer.elbo.runs import Args, Kwargs, log_prob, sample_sites
from pyro_l0.infer.elbo.slabs import Switch, alignment_of, gate_site
from pyro_l0.infer.guides.autoregressive import GateChain, HyperPosterior
from pyro_l0.infer.guides.correlated import ConjugateRate, CorrelatedPosterior
from pyro_l0.infer.guides.expansion import OpenModel, RunAt, expand, run_at
from pyro_l0.infer.guides.layout import MEAN_FIELD, Layout
from pyro_l0.infer.guides.lone_latents import middle, transform_to_support
from pyro_l0.infer.guides.structured_slabs import IndependentSlabs, StructuredSlabs

_RATES = (0.3, 0.6)  # at which a rate is tried
_MOVE = 0.5  # on the real line


class Structure(NamedTuple):
    """What a user asks of a correlated posterior."""

    coupled: bool  # gates depend on the gates before them
    structured: bool  # slabs are one Gaussian given their gates
    chain: bool  # gates are binary


def structure_of(
    gates: str, slabs: str, hyper: Sequence[str] | None, options: dict[str, Any]
) -> tuple[Structure | None, dict[str, Any]]:
    """What a user's words ask for, None for a mean field; and a guide's options with the defaults that suit it."""
    for name, value, known in (
        ("gates", gates, ("mean_field", "autoregressive")),
        ("slabs", slabs, ("independent", "structured")),
    ):
        if value not in known:
            raise ValueError(f"Expected {name} to be one of {known}, but got {value!r}.")
    if isinstance(hyper, str):
        raise TypeError(f"Expected hyper to be a sequence of names, but got the string {hyper!r}; write ({hyper!r},).")
    if gates == "mean_field" and slabs == "independent" and not hyper:
        return None, options
    options = {"family": BernoulliGate, "init_active_prob": 0.5, "init_jitter": 0.1, **options}
    is_chain = options["family"] is BernoulliGate
    if gates == "autoregressive" and not is_chain:
        raise ValueError(
            f"Expected family=BernoulliGate for gates='autoregressive', but got {options['family'].__name__}."
        )
    return Structure(gates == "autoregressive", slabs == "structured", is_chain), options


def model_runs(model: Callable[..., object], args: Args, kwargs: Kwargs) -> tuple[dict[str, Site], RunAt]:
    """The sites of a model in one run, and what runs it at values of its latent sites."""
    program = partial(model, *args, **kwargs)
    sites = sample_sites(poutine.trace(program).get_trace())
    found = {name: site for name, site in sites.items() if not is_deterministic(site)}
    return found, lambda values: run_at(program, values)


def correlated_posterior(
    sites: Mapping[str, Site],
    run_at: RunAt,
    structure: Structure,
    slab: Mapping[str, Switch],
    hyper_names: Sequence[str] | None,
) -> CorrelatedPosterior:
    """The posterior that a guide learns from, for a model with these sites in one run.

    ``hyper_names`` are the sites of the other latents; None for all of them, normal ones drawn with the slabs where
    they can be. Refuses subsampled sites, priors and supports of another kind, and a model in which gates do anything
    else than to switch slabs, alone or as products of gates.
    """
    gate_names = [name for name, site in sites.items() if find_gate(site["fn"]) is not None]
    slab_names = [name for name in sites if name in slab]
    latent = [name for name, site in sites.items() if not site["is_observed"]]
    others = [name for name in latent if name not in (*gate_names, *slab_names)]
    if hyper_names is None:
        slab_names += [name for name in others if _is_effect(name, sites, run_at)]
        hyper_names = [name for name in others if name not in slab_names]
    for name in (*gate_names, *slab_names, *hyper_names):
        _check_whole(name, sites[name])
    gates = Layout({name: sites[name] for name in gate_names})
    rates = [rate for name in hyper_names if (rate := _conjugate_rate(name, sites, run_at, gate_names)) is not None]
    learned = [name for name in hyper_names if name not in {rate.name for rate in rates}]
    found = {name: transform_to_support(name, sites[name]["fn"], is_slab=False) for name in learned}
    transforms = {name: transform for name, transform in found.items() if transform is not None}
    hyper = Layout({name: sites[name] for name in learned}, transforms)
    slabs = Layout({name: sites[name] for name in slab_names})
    like = sites[gate_names[0]]["value"]
    medians = {name: middle(sites[name]["fn"], transforms.get(name)).to(like) for name in learned}
    start = hyper.together(medians) if learned else like.new_zeros(0)
    values = {name: sites[name]["value"] for name in latent}
    values |= {x.name: sites[x.name]["fn"].mean.detach().expand_as(values[x.name]) for x in rates}
    model = OpenModel(run_at, values, slabs, gates, hyper)
    gate_of = model.switches(model.slab_prior(start)[1].detach(), start, _gates_of(sites, slab, slab_names, gates))
    held = _held(hyper, start, lambda at: run_at({**values, **hyper.apart(at)}))
    expansion = expand(model, start, held)
    kind = StructuredSlabs if structure.structured else IndependentSlabs
    posterior = kind(expansion, gate_of)
    chain = GateChain(gates.size, hyper.size, structure.coupled, like) if structure.chain else None
    return CorrelatedPosterior(gates, hyper, slabs, rates, chain, HyperPosterior(expansion.hyper), posterior)


def _is_effect(name: str, sites: Mapping[str, Site], run_at: RunAt) -> bool:
    """Whether a latent is like a slab without a gate: normal, and no other latent's prior depends on it."""
    if not isinstance(innermost(sites[name]["fn"]), Normal):
        return False
    latent = {key: site["value"] for key, site in sites.items() if not site["is_observed"]}
    moved = run_at({**latent, name: latent[name] + 1})
    others = [key for key in latent if key != name]
    return all(key in moved and torch.equal(log_prob(moved[key]), log_prob(sites[key])) for key in others)


def _held(hyper: Layout, start: Tensor, run: Callable[[Tensor], dict[str, Site]]) -> Tensor:
    """Which entries have no useful mode: those on which the priors of more entries depend, as a scale of many latents.

    The joint density of a scale and its latents is without bound where all of them go to 0.
    """
    held = []
    before = {name: log_prob(site) for name, site in run(start).items() if name in hyper.shapes}
    for name, own in hyper.positions(start.device).items():
        moved = run(start.index_add(0, own, torch.full_like(start[own], _MOVE)))
        below = [hyper.shapes[x].numel() for x in before if x != name and not _same(log_prob(moved[x]), before[x])]
        held.append(torch.full_like(own, sum(below) > len(own), dtype=torch.bool))
    return torch.cat(held) if held else start.bool()


def _check_whole(name: str, site: Site) -> None:
    """Refuse a site in a minibatch: its posterior would depend on sites that are not drawn."""
    small = [frame.name for frame in site["cond_indep_stack"] if frame.vectorized and frame.full_size != frame.size]
    if small:
        raise ValueError(
            f"Expected site {name!r} in plates of their full size, but {', '.join(map(repr, small))} is subsampled; "
            f"{MEAN_FIELD}."
        )


def _conjugate_rate(
    name: str, sites: Mapping[str, Site], run_at: RunAt, gate_names: Sequence[str]
) -> ConjugateRate | None:
    """A Beta variable that is itself the prior probability of all gates of some sites; None for any other."""
    prior = innermost(sites[name]["fn"])
    if not isinstance(prior, Beta) or sites[name]["value"].numel() != 1:
        return None
    moved: dict[str, list[bool]] = {gate: [] for gate in gate_names}
    latent = {key: site["value"] for key, site in sites.items() if not site["is_observed"]}
    before = {gate: _odds(sites[gate]) for gate in gate_names}
    for rate in _RATES:
        value = torch.full_like(sites[name]["value"], rate)
        run = run_at({**latent, name: value})
        for gate in gate_names:
            odds = _odds(run[gate])
            is_rate = odds is not None and torch.allclose(odds, torch.logit(value).to(odds), atol=1e-4)
            moved[gate].append(is_rate)
            if not is_rate and not _same(odds, before[gate]):
                return None  # it sets something else about these gates
    own = tuple(gate for gate, found in moved.items() if all(found))
    if not own:
        return None
    first, second = (x.detach().reshape(()) for x in (prior.concentration1, prior.concentration0))
    return ConjugateRate(name, own, first, second, sites[name]["value"].shape)


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    return x is not None and y is not None and torch.equal(x, y)


def _odds(site: Site) -> Tensor | None:
    gate = find_gate(site["fn"])
    return gate.logits.detach() if isinstance(gate, BernoulliGate) else None


def _gates_of(sites: Mapping[str, Site], slab: Mapping[str, Switch], names: Sequence[str], gates: Layout) -> Tensor:
    """Which gate switches each element of the slabs, as the user says, shape ``(p,)``; -1 for none."""
    positions, found = gates.positions(), []
    for name in names:
        shape, own = sites[name]["value"].shape, torch.tensor(-1)
        if name in slab:
            gate = gate_site(slab[name])
            own = alignment_of(name, slab[name], sites).of(positions[gate].reshape(gates.shapes[gate]))
        found.append(own.expand(shape).reshape(-1))
    return torch.cat(found).to(sites[names[0]]["value"].device)
