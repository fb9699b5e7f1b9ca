"""Checks that a model and its guide fit together, and that they have arguments and a likelihood."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import get_args

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor, nn

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.distributions.wrappers import find_gate
from pyro_l0.fast.record import Site
from pyro_l0.infer.elbo.estimators import EstimatorName
from pyro_l0.infer.elbo.slabs import Switch, check_used, gate_site
from pyro_l0.infer.elbo.watch import number_of_bad

Program = Callable[..., object]
Args = tuple[object, ...]
Kwargs = Mapping[str, object]


def check_pair(name: str, site: Site, posterior: Site | None) -> GateDistribution | None:
    """The posterior gate of a latent site, None for another latent; raises where model and guide disagree."""
    prior_gate = find_gate(site["fn"])
    kind = "Gate" if prior_gate is not None else "Latent"
    if posterior is None or posterior["type"] != "sample":
        raise ValueError(f"{kind} site {name!r} of the model has no posterior in the guide.")
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
    return gate


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


def refuse_without_likelihood(
    model: Program, sites: Mapping[str, Site], returned: object, args: Args, kwargs: Kwargs
) -> None:
    """Refuse a model without a likelihood that seems meant to have one: its loss would be the price of its gates alone.

    A model that takes no data, has no network and returns no more than its draws may be meant as a prior.
    """
    found = None
    for _, x in _leaves("", returned):
        if x is not None and not any(x is site["value"] for site in sites.values()):
            what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            found = f"returns {what}; what a model returns is no part of the loss"
    if found is None and any(_tensors("", [args, kwargs])):
        found = "is given data"
    if found is None and any(p.requires_grad for module in _modules(model) for p in module.parameters()):
        found = "has parameters to train"
    if found is not None:
        raise ValueError(
            f"Expected a likelihood, but the model has no observed site and no factor, and {found}. The gates' price "
            "alone would be trained, which closes them all. State a likelihood by pyro.sample('y', distribution, "
            "obs=y), or a loss in nats, summed over the data, by pyro_l0.infer.factor('y', -loss) or pyro.factor."
        )


def _modules(model: object) -> Iterator[nn.Module]:
    """A model that is a module, or the modules that a function uses: its object's, its closure's and its globals."""
    if isinstance(model, nn.Module):
        yield model
    elif isinstance(model, partial):  # also what Pyro's handlers make of a model
        for x in (model.func, *model.args):
            yield from _modules(x)
    elif inspect.isfunction(model) or inspect.ismethod(model):
        around = inspect.getclosurevars(model)
        owner = getattr(getattr(model, "__self__", None), "__dict__", {})
        yield from (x for _, x in _leaves("", [around.nonlocals, around.globals, owner]) if isinstance(x, nn.Module))
    elif inspect.ismethod(call := getattr(model, "__call__", None)):  # noqa: B004
        yield from _modules(call)


def check_arguments(program: Program, args: Args, kwargs: Kwargs) -> None:
    """Refuse a minibatch without examples: every tensor among the arguments is empty."""
    empty = False
    for _, x in _tensors("", [args, kwargs]):
        if x.numel():
            return
        empty = True
    if empty:
        raise ValueError(f"Expected at least one example, but {'; '.join(odd_arguments(program, args, kwargs))}.")


def odd_arguments(program: Program, args: Args, kwargs: Kwargs) -> list[str]:
    """Arguments of a program that are empty or not finite, by name; reads them."""
    found = []
    function = program.forward if isinstance(program, nn.Module) else program
    try:
        by_name: dict[str, object] = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        by_name = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
    for name, x in _tensors("", by_name):
        bad = number_of_bad(x)
        if not x.numel():
            found.append(f"argument {name!r} is empty, of shape {tuple(x.shape)}")
        elif bad:
            found.append(f"argument {name!r} holds {bad} of {x.numel()} values that are not finite")
    return found


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested lists, tuples and dicts, with their paths."""
    return ((path, x) for path, x in _leaves(name, value) if isinstance(x, Tensor))


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(f"{name}[{key!r}]" if name else str(key), entry)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            yield from _leaves(f"{name}[{i}]", entry)
    else:
        yield name, value
