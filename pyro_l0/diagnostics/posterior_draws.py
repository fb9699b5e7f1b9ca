"""Joint draws of a posterior: a guide, a refined posterior or a sampler's chains."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_l0.diagnostics.at_draws import is_observation, refuse_subsample
from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.wrappers import active_prob, find_gate
from pyro_l0.expect import expect_count
from pyro_l0.fast.record import Site, is_deterministic
from pyro_l0.infer.elbo.runs import Args, Kwargs, record_run
from pyro_l0.infer.elbo.slabs import Switch, alignment_of, gate_site, product_name
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.posterior.mcmc import PosteriorSamples
from pyro_l0.infer.posterior.refine import RefinedPosterior

__all__ = ["PosteriorDraws", "completed", "draws_of", "is_posterior"]


class PosteriorDraws(NamedTuple):
    """Draws by chain, and what is known of their gates."""

    values: dict[str, Tensor]  # of every latent site, shape ``(chains, draws, *shape of the site)``
    derived: dict[str, Tensor]  # of what follows from those, products of slabs with their gates too
    active_probs: dict[str, Tensor]  # of gate sites; where missing, estimated from the draws
    switches: Collection[str]  # the sites of binary gates


def is_posterior(given: object) -> bool:
    """Whether something is a posterior by its type, as functions are not."""
    return isinstance(given, PosteriorSamples | RefinedPosterior | MCMC | AutoGuide) or hasattr(given, "to_arviz")


@torch.no_grad()
def draws_of(posterior: object, number: int, args: Args, kwargs: Kwargs) -> PosteriorDraws:
    """Draws of a posterior: of a guide, called with some arguments, as many as asked for; of a sampler, all."""
    if isinstance(posterior, PosteriorSamples):
        return _of_samples(posterior)
    if isinstance(posterior, MCMC):
        return PosteriorDraws(dict(posterior.get_samples(group_by_chain=True)), {}, {}, ())
    expect_count(1, draws=number)
    if isinstance(posterior, AutoSpikeSlab | RefinedPosterior):
        return _of_joint_draws(posterior, number)
    if callable(posterior):
        return _of_guide(posterior, number, args, kwargs)
    raise TypeError(
        "Expected a guide, a RefinedPosterior, PosteriorSamples, pyro.infer.MCMC or an object with a method to_arviz, "
        f"but got {type(posterior).__name__}. The result of fit is no posterior: give its guide."
    )


def completed(
    drawn: PosteriorDraws, fixed: Mapping[str, Tensor], sites: Mapping[str, Site], slab: Mapping[str, Switch]
) -> PosteriorDraws:
    """Draws with the model's deterministic values, the products of slabs with their gates, and the gates' rates."""
    values, products = {**drawn.values, **fixed}, {}
    for name, switch in slab.items():
        gate = gate_site(switch)
        for site in (name, gate):
            if site not in values:
                raise ValueError(f"Expected slab to name sites of {sorted(values)}, but {site!r} is none.")
        products[product_name(gate, name)] = alignment_of(name, switch, sites).of(values[gate], 2) * values[name]
    gates = [name for name, site in sites.items() if name in values and _is_gate(name, site, values)]
    probs = {name: (values[name] != 0).double().mean((0, 1)) for name in gates} | drawn.active_probs
    switches = {name for name in gates if isinstance(find_gate(sites[name]["fn"]), BernoulliGate)}
    return PosteriorDraws(values, {**drawn.derived, **products}, probs, {*drawn.switches, *switches})


def _is_gate(name: str, site: Site, values: Mapping[str, Tensor]) -> bool:
    """Whether a site is a gate, or was one before RectifyReparam."""
    rectified = is_deterministic(site) and f"{name}_base" in values
    if rectified:
        return bool(((values[name] >= 0) & (values[name] <= 1)).all())
    return find_gate(site["fn"]) is not None


def _of_samples(posterior: PosteriorSamples) -> PosteriorDraws:
    probs = posterior.active_probs()
    products = {name: x for name, x in posterior.samples.items() if " * " in name}
    bases = {f"{gate}_base" for gate in probs if f"{gate}_base" in posterior.samples}  # of gates with a density
    derived = {name: x for name, x in posterior.samples.items() if name in bases} | products
    values = {name: x for name, x in posterior.samples.items() if name not in derived}
    return PosteriorDraws(values, derived, probs, [gate for gate in probs if f"{gate}_base" not in bases])


def _of_joint_draws(posterior: AutoSpikeSlab | RefinedPosterior, number: int) -> PosteriorDraws:
    values, probs = posterior.draws(number), posterior.active_probs()
    products = {
        product_name(gate_site(posterior.slab[name]), name): x for name, x in posterior.products(values).items()
    }
    is_binary = isinstance(posterior, RefinedPosterior) or posterior.family is BernoulliGate
    return PosteriorDraws(_one_chain(values), _one_chain(products), probs, list(probs) if is_binary else ())


def _of_guide(guide: object, number: int, args: Args, kwargs: Kwargs) -> PosteriorDraws:
    """Draws of a guide of any kind, run after run."""
    assert callable(guide)
    found: dict[str, list[Tensor]] = {}
    probs: dict[str, list[Tensor]] = {}
    switches: set[str] = set()
    for _ in range(number):
        for name, site in record_run(guide, args, kwargs, 0).sites.items():
            refuse_subsample(name, site)
            if is_observation(site):
                raise ValueError(f"Expected a guide, but got a model with data at site {name!r}; give the model first.")
            if site["is_observed"] or site["infer"].get("is_auxiliary") or site_is_subsample(site):
                continue
            found.setdefault(name, []).append(site["value"])
            gate = find_gate(site["fn"])
            if gate is not None:
                probs.setdefault(name, []).append(active_prob(site["fn"]).expand(site["value"].shape))
            if isinstance(gate, BernoulliGate):
                switches.add(name)
    values = {name: torch.stack(x) for name, x in found.items()}
    return PosteriorDraws(_one_chain(values), {}, {n: torch.stack(x).mean(0) for n, x in probs.items()}, switches)


def _one_chain(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Draws that do not depend on each other, as a single chain."""
    return {name: x.unsqueeze(0) for name, x in draws.items()}
