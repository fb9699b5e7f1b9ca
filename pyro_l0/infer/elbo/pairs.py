"""Checks that a model and its guide fit together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import get_args

import torch
from pyro.distributions import Unit
from pyro.infer.util import is_validation_enabled
from pyro.util import check_site_shape
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution, find_gate
from pyro_l0.fast.record import Site
from pyro_l0.infer.elbo.estimators import EstimatorName
from pyro_l0.infer.elbo.slabs import Switch, check_used, gate_site

#: What to do about a discrete latent that is no gate, even one that is enumerated elsewhere.
SUM_OUT = (
    "sum it out in the model, by MixtureSameFamily or by a factor of torch.logsumexp over its values, or take a "
    "BernoulliGate for 0 and 1."
)


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
    for what in ("scale", "mask"):
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


def check_slabs(slabs: Mapping[str, Switch], gates: Mapping[str, GateDistribution], model: Mapping[str, Site]) -> None:
    """Refuse slabs that are not latent weights of the model, and slabs whose gates are not gates."""
    for slab, switch in slabs.items():
        gate = gate_site(switch)
        if slab not in model or model[slab]["is_observed"] or model[slab]["type"] != "sample" or slab in gates:
            raise ValueError(f"Expected slab to name latent weights of the model, but got {slab!r}.")
        if gate not in gates:
            raise ValueError(
                f"Expected slab site {slab!r} to name its gate site, one of {sorted(gates)}, but got {gate!r}."
            )
    check_used(slabs, {name: gate.batch_shape for name, gate in gates.items()})


def check_auxiliary(name: str, site: Site) -> None:
    """Refuse a site of the guide alone, unless it is marked."""
    if find_gate(site["fn"]) is not None:
        raise ValueError(f"Gate site {name!r} of the guide is not in the model.")
    if not (site["infer"].get("is_auxiliary") or site["is_observed"]):
        raise ValueError(
            f"Site {name!r} of the guide is not in the model; mark it infer={{'is_auxiliary': True}} if that is meant."
        )
