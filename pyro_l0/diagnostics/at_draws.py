"""A model at draws of its latent variables: log likelihoods, predictions and deterministic values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import pyro
import torch
from pyro.distributions import Unit
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_l0.distributions.wrappers import inside_events
from pyro_l0.fast.record import Site, is_deterministic, is_likelihood
from pyro_l0.infer.elbo.runs import Args, Kwargs, Program
from pyro_l0.infer.guides.expansion import run_at

__all__ = ["at_draws", "is_observation", "refuse_subsample", "sites_of"]

_AT_ONCE = 250  # runs of the model under one torch.vmap

_Found = dict[str, dict[str, Tensor]]


@torch.no_grad()
def sites_of(model: Program, args: Args, kwargs: Kwargs) -> dict[str, Site]:
    """The sample sites of a run of a model; refuses a part of the data and observations that are scaled."""
    sites = run_at(lambda: model(*args, **kwargs), {})
    for name, site in sites.items():
        refuse_subsample(name, site)
        if is_observation(site) and bool((torch.as_tensor(site["scale"]) != 1).any()):
            raise ValueError(
                f"Expected observations that count once, but site {name!r} has a scale of {site['scale']}, which "
                "changes the posterior; leave out poutine.scale."
            )
    return {name: site for name, site in sites.items() if not site_is_subsample(site)}


def refuse_subsample(name: str, site: Site) -> None:
    """Refuse a site of a minibatch."""
    for frame in site["cond_indep_stack"]:
        if frame.full_size is not None and frame.full_size != frame.size:
            raise ValueError(
                f"Expected all of the data, but site {name!r} is in plate {frame.name!r}, which takes {frame.size} "
                f"of {frame.full_size}. Leave out subsample and subsample_size and call with all the data."
            )


def is_observation(site: Site) -> bool:
    """Whether a site is observed: not a factor, which scores without data."""
    return is_likelihood(site) and not isinstance(site["fn"], Unit)


@torch.no_grad()
def at_draws(
    model: Program, args: Args, kwargs: Kwargs, sites: Mapping[str, Site], values: Mapping[str, Tensor]
) -> _Found:
    """Run a model at draws of its latent sites, by ``torch.vmap`` where that can map it.

    Values have shape ``(chains, draws, *shape of the site)``; those of deterministic sites are computed again. Returns
    by site, with chains and draws in front, ``"log_likelihood"`` of every observation in nats,
    ``"posterior_predictive"`` draws of what was observed, and values of ``"deterministic"`` sites.
    """
    _check_values(sites, values)

    def program() -> object:
        return model(*args, **kwargs)

    def at_one(row: dict[str, Tensor]) -> _Found:
        run = run_at(program, row)
        with _Predicting():
            again = run_at(program, row)
        seen = [name for name, site in run.items() if is_observation(site)]
        return {
            "log_likelihood": {name: pointwise(run[name]) for name in seen},
            "posterior_predictive": {name: again[name]["value"] for name in seen},
            "deterministic": {name: site["value"] for name, site in run.items() if is_deterministic(site)},
        }

    rows = {name: x.flatten(0, 1) for name, x in values.items() if not is_deterministic(sites[name])}
    at_one({name: x[0] for name, x in rows.items()})  # with all checks of values
    lead = next(iter(values.values())).shape[:2]
    found = _at_each(at_one, rows)
    return {kind: {name: x.unflatten(0, lead) for name, x in of.items()} for kind, of in found.items()}


def pointwise(site: Site) -> Tensor:
    """Log probability of every observation of a site in nats; 0 for those that are masked.

    Where the whole site is one event of independent elements, as by ``to_event``, each element is an observation.
    """
    fn = site["fn"] if site["fn"].batch_shape else inside_events(site["fn"])
    log_prob = fn.log_prob(site["value"], *site["args"], **site["kwargs"])
    masked: Tensor = scale_and_mask(log_prob, 1.0, site["mask"])
    return masked


class _Predicting(Messenger):
    """Draw what is observed."""

    def _pyro_sample(self, msg: Site) -> None:
        if is_observation(msg):
            shape = msg["value"].shape
            batch = torch.broadcast_shapes(msg["fn"].batch_shape, shape[: len(shape) - msg["fn"].event_dim])
            msg.update(is_observed=False, value=None, fn=msg["fn"].expand(batch))


def _check_values(sites: Mapping[str, Site], values: Mapping[str, Tensor]) -> None:
    missing = [name for name, site in sites.items() if not site["is_observed"] and name not in values]
    unknown = [name for name in values if name not in sites]
    if missing or unknown:
        raise ValueError(
            f"Expected draws of every latent site of the model and of no others, but got {sorted(values)}: {missing} "
            f"are missing and {unknown} are not in the model. Give the model that the posterior is of, with its "
            "reparameterisation, and a guide of all its latent sites."
        )
    for name, x in values.items():
        shape = sites[name]["value"].shape
        if x.shape[2:] != shape:
            raise ValueError(
                f"Expected draws of site {name!r} of shape {tuple(shape)}, which it has in the model with these "
                f"arguments, but got {tuple(x.shape[2:])}."
            )


def _at_each(function: Callable[[dict[str, Tensor]], _Found], rows: dict[str, Tensor]) -> _Found:
    """What a function that can be run says of each row, stacked."""
    try:
        # Checks of values branch on what is mapped. torch warns that Gamma and Binomial take longer here.
        with pyro.validation_enabled(False), warnings.catch_warnings():
            slow = "There is a performance drop|An output with one or more elements was resized"
            warnings.filterwarnings("ignore", slow, UserWarning)
            mapped: _Found = torch.vmap(function, randomness="different", chunk_size=_AT_ONCE)(rows)
        return mapped
    except RuntimeError:  # it can't be mapped: it branches on values, or draws from what torch.vmap does not know
        number = len(next(iter(rows.values())))
        found = [function({name: x[i] for name, x in rows.items()}) for i in range(number)]
    stacked: _Found = tree_map(lambda *x: torch.stack(x), *found)
    return stacked
