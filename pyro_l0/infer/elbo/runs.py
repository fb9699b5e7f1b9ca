"""One recorded run of a guide or a model: its arguments, its likelihood, and errors that say what failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_l0.fast.record import Record, Site, is_likelihood
from pyro_l0.infer.elbo.watch import number_of_bad

Program = Callable[..., object]
Args = tuple[object, ...]
Kwargs = Mapping[str, object]


def log_prob(site: Site) -> Tensor:
    """Log probability of a recorded site's value under its scale and mask, in the shape of its batch."""
    log_prob = site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"])
    scaled: Tensor = scale_and_mask(log_prob, site["scale"], site["mask"])
    return scaled


def sample_sites(trace: Trace) -> dict[str, Site]:
    """The sample sites of a run, but for those of plates."""
    nodes: dict[str, Site] = trace.nodes
    return {name: site for name, site in nodes.items() if site["type"] == "sample" and not site_is_subsample(site)}


def record_run(
    program: Program, args: Args, kwargs: Kwargs, step: int, values: Mapping[str, Site] | None = None
) -> Record:
    """Record a guide, or a model with the guide's sites as values; the step of the training is for messages."""
    record = Record(values)
    try:
        with record:
            returned = program(*args, **kwargs)
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        seen = Trace()
        for name, site in record.sites.items():
            seen.add_node(name, **site)
        error.add_note(seen.format_shapes())
        # A guide of Pyro's runs the model at its first call, and takes the model's arguments.
        model = program.model if isinstance(program, AutoGuide) else program
        first = isinstance(program, AutoGuide) and program.prototype_trace is None
        odd = "; ".join(odd_arguments(model, args, kwargs))
        if not odd and "found invalid values" not in str(error):  # of torch's validation, which names no site
            raise
        what = "guide" if values is None and not first else "likelihood (nll) of the model"
        where = f", where {odd}" if odd else ""
        raise ValueError(f"The {what} failed at step {step}{where}: {error}") from error
    if values is not None and not any(map(is_likelihood, record.sites.values())):
        refuse_without_likelihood(program, record.sites, returned, args, kwargs)
    return record


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
            f"Expected a likelihood, but the model has no observed site and no factor, and {found}: training would "
            "only close gates. State a likelihood by pyro.sample('y', distribution, obs=y), or a loss in nats, summed "
            "over the data, by pyro_l0.infer.factor('y', -loss) or pyro.factor."
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
