"""Joint draws of a posterior in the form that arviz summarises, compares and draws."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pyro.distributions import Unit
from pyro.distributions.util import scale_and_mask
from pyro.infer import MCMC
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_l0.distributions.bernoulli import BernoulliGate
from pyro_l0.distributions.gate import active_prob, find_gate, inside_events
from pyro_l0.expect import expect, expect_count
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.guides.refine import RefinedPosterior
from pyro_l0.infer.guides.summaries import import_arviz
from pyro_l0.infer.posterior.mcmc import PosteriorSamples
from pyro_l0.infer.record import Site, is_deterministic, is_likelihood
from pyro_l0.infer.runs import Args, Kwargs, Program, of_rows, record_run, seeded
from pyro_l0.infer.slabs import GateSite, alignment_of, gate_site, product_name, slab_to_gate
from pyro_l0.infer.target import InferenceTarget

if TYPE_CHECKING:
    from arviz import InferenceData  # takes seconds to import


_AT_ONCE = 250  # runs of the model under one torch.vmap

_Found = dict[str, dict[str, Tensor]]


@torch.no_grad()
def sites_of(target: InferenceTarget) -> dict[str, Site]:
    """The sample sites of a run of a model; refuses a part of the data and observations that are scaled."""
    sites = target.stated_at({})
    for name, site in sites.items():
        refuse_subsample(name, site)
        if is_observation(site) and bool((torch.as_tensor(site["scale"]) != 1).any()):
            raise ValueError(
                f"Expected observations that count once, but site {name!r} has a scale of {site['scale']}, which "
                "changes the posterior; leave out poutine.scale."
            )
    return {name: site for name, site in sites.items() if not site_is_subsample(site)}


def refuse_subsample(name: str, site: Site) -> None:
    """Raise a ValueError if a site is in a plate that takes a part of the data."""
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
def at_draws(target: InferenceTarget, sites: Mapping[str, Site], values: Mapping[str, Tensor]) -> _Found:
    """Run a model at draws of its latent sites, by ``torch.vmap`` where that can map it.

    Values have shape ``(chains, draws, *shape of the site)``; those of deterministic sites are computed again. Returns
    by site, with chains and draws in front, ``"log_likelihood"`` of every observation in nats,
    ``"posterior_predictive"`` draws of what was observed, and values of ``"deterministic"`` sites.
    """
    _check_values(sites, values)

    def at_one(row: dict[str, Tensor]) -> _Found:
        run = target.stated_at(row)
        with _Predicting():
            again = target.stated_at(row)
        seen = [name for name, site in run.items() if is_observation(site)]
        return {
            "log_likelihood": {name: pointwise(run[name]) for name in seen},
            "posterior_predictive": {name: again[name]["value"] for name in seen},
            "deterministic": {name: site["value"] for name, site in run.items() if is_deterministic(site)},
        }

    rows = {name: x.flatten(0, 1) for name, x in values.items() if not is_deterministic(sites[name])}
    at_one({name: x[0] for name, x in rows.items()})  # with all checks of values
    lead = next(iter(values.values())).shape[:2]
    with warnings.catch_warnings():  # torch warns that Gamma and Binomial take longer here
        slow = "There is a performance drop|An output with one or more elements was resized"
        warnings.filterwarnings("ignore", slow, UserWarning)
        found = of_rows(at_one, rows, at_once=_AT_ONCE)
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
    """Draws observed sites from their distributions, given whatever else the trace has."""

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


class PosteriorDraws(NamedTuple):
    """Draws of all latent sites by chain, and P(z != 0) of their gates, as ``to_arviz`` shows them."""

    values: dict[str, Tensor]  # of every latent site, shape ``(chains, draws, *shape of the site)``
    derived: dict[str, Tensor]  # of what follows from those, products of slabs with their gates too
    active_probs: dict[str, Tensor]  # of gate sites; where missing, estimated from the draws
    binary: Collection[str]  # the sites of binary gates


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
    drawn: PosteriorDraws, fixed: Mapping[str, Tensor], sites: Mapping[str, Site], slab: Mapping[str, GateSite]
) -> PosteriorDraws:
    """Draws with the model's deterministic values, the products of slabs with their gates, and the gates' rates."""
    values, products = {**drawn.values, **fixed}, {}
    for name, of_slab in slab.items():
        gate = gate_site(of_slab)
        products[product_name(gate, name)] = alignment_of(name, of_slab, sites).of(values[gate], 2) * values[name]
    gates = [name for name, site in sites.items() if name in values and _is_gate(name, site, values)]
    probs = {name: (values[name] != 0).double().mean((0, 1)) for name in gates} | drawn.active_probs
    binary = {name for name in gates if isinstance(find_gate(sites[name]["fn"]), BernoulliGate)}
    return PosteriorDraws(values, {**drawn.derived, **products}, probs, {*drawn.binary, *binary})


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
    binary: set[str] = set()
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
                binary.add(name)
    values = {name: torch.stack(x) for name, x in found.items()}
    return PosteriorDraws(_one_chain(values), {}, {n: torch.stack(x).mean(0) for n, x in probs.items()}, binary)


def _one_chain(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Draws that do not depend on each other, as a single chain."""
    return {name: x.unsqueeze(0) for name, x in draws.items()}


Arrays = dict[str, dict[str, Any]]
"""Arrays or tensors by group and name."""


def to_arviz(
    model: object,
    posterior: object = None,
    *args: object,
    slab: Mapping[str, GateSite] | None = None,
    draws: int = 1000,
    seed: int | None = None,
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    **kwargs: object,
) -> InferenceData:
    """Convert a posterior with gates to arviz's InferenceData, for ``az.summary``, ``az.plot_forest``, ``az.loo``.

    The group ``posterior`` has every latent variable, with binary gates as int8, products of slabs with their gates
    under names such as ``"z * w"``, and deterministic sites of the model. ``constant_data`` has the inclusion
    probabilities, under names such as ``"P(z != 0)"``, which may have less noise than the draws. With a model there are
    ``log_likelihood`` (of every observation, in nats), ``posterior_predictive`` and ``observed_data`` of every observed
    site. Chains are those of a sampler; draws of a guide are independent and make up one chain.

    An observation is one event of an observed site. If the whole site is a single event of independent elements, as
    with ``to_event`` in place of a plate, each element is one. Masked observations have a log likelihood of 0. Factors
    are left out.

    Args:
        model: the model, as it was sampled. For the draws alone, give the posterior as the only argument.
        posterior: a trained guide (:class:`~pyro_l0.infer.AutoSpikeSlab`, :class:`~pyro_l0.infer.AutoGate`, one of
            Pyro's, or your own), the result of ``guide.refine`` or :func:`~pyro_l0.infer.sample_posterior`, a
            ``pyro.infer.MCMC`` that has run, or, without a model, an object with a method ``to_arviz``.
        *args: arguments of model and guide, with all of the data.
        slab: the gate site of each slab site; for ``MCMC`` and guides other than ``AutoSpikeSlab``.
        draws: number of draws of a guide.
        seed: seed of the random numbers; the global generator then keeps its state.
        coords: labels along dimensions, by the dimensions' names.
        dims: names of the dimensions of each site; products get the slab's, inclusion probabilities the gates'.
        **kwargs: keyword arguments of model and guide.

    Raises:
        TypeError: the posterior cannot be drawn from, or an object with a method ``to_arviz`` comes with a model.
        ValueError: the model has latent variables without draws, or gets only a part of its data, the guide observes
            data, or ``slab`` names sites that the draws lack.
        ImportError: arviz is not installed.

    Example:
        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro_l0 import BernoulliGate
        >>> from pyro_l0.infer import AutoSpikeSlab, fit
        >>> def regression(x, y):
        ...     with pyro.plate("features", 2):
        ...         z = pyro.sample("z", BernoulliGate(probs=0.2))
        ...         w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(x @ (z * w), 1.0), obs=y)
        >>> x = torch.stack((torch.linspace(-1, 1, 50), torch.linspace(1, -1, 50) ** 2), 1)
        >>> y = 2 * x[:, 0]
        >>> guide = AutoSpikeSlab(regression, slab={"w": "z"})
        >>> result = fit(regression, guide, x, y, seed=0)
        >>> found = to_arviz(regression, guide, x, y, draws=100, seed=1)
        >>> sorted(found["posterior"]), found["log_likelihood"]["y"].shape
        (['w', 'z', 'z * w'], (1, 100, 50))
        >>> [f"{p:.1f}" for p in found["constant_data"]["P(z != 0)"].values]
        ['1.0', '0.1']
    """
    expect(Mapping | None, "a dict of lists by name", coords=coords, dims=dims)
    program, posterior = (None, model) if posterior is None else (cast(Program | None, model), posterior)
    own = getattr(posterior, "to_arviz", None)
    if own is not None:
        if program is not None or args or kwargs:
            raise TypeError(
                f"Expected a {type(posterior).__name__} alone, which has its own model and data, but got a model or "
                "arguments of one too."
            )
        result: InferenceData = own()
        return result
    if program is None and slab:
        raise ValueError("Expected the model with slab, as it tells how slabs and gates belong together.")
    groups: Arrays = {}
    with seeded(seed):
        drawn = draws_of(posterior, draws, args, kwargs)
        if program is not None:
            target = InferenceTarget(program, args, kwargs)
            sites = sites_of(target)
            groups = at_draws(target, sites, drawn.values)
            groups["observed_data"] = {name: site["value"] for name, site in sites.items() if is_observation(site)}
            drawn = completed(drawn, groups.pop("deterministic"), sites, slab_to_gate(slab))
    values = {**drawn.values, **drawn.derived}
    groups["posterior"] = {name: x.bool() if name in drawn.binary else x for name, x in values.items()}
    groups["constant_data"] = {inclusion_name(name): x for name, x in drawn.active_probs.items()}
    return inference_data(groups, coords, _all_dims(dims or {}, drawn))


def _all_dims(dims: Mapping[str, Sequence[str]], drawn: PosteriorDraws) -> dict[str, Sequence[str]]:
    """Dimensions by site, and those of what follows from a site: products have the slab's."""
    of_products = {name: name.rpartition(" * ")[2] for name in drawn.derived}
    of_probs = {inclusion_name(name): name for name in drawn.active_probs}
    return {**{name: dims[site] for name, site in {**of_products, **of_probs}.items() if site in dims}, **dims}


def inclusion_name(gate: str) -> str:
    """The name under which the inclusion probabilities of a gate are kept, such as ``"P(z != 0)"``."""
    return f"P({gate} != 0)"


def inference_data(
    groups: Arrays,
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> InferenceData:
    """Arrays by group and name as arviz's InferenceData, or as its DataTree where arviz is of version 1.

    Booleans are stored as int8, since netCDF has no such type, and a slash in a name as a dot. Empty groups are left
    out. Arrays have shape ``(chains, draws, *shape)``, without chains and draws in ``observed_data`` and
    ``constant_data``; chains and draws are those of every variable.
    """
    legal = {group: _legal(arrays) for group, arrays in groups.items() if arrays}
    labels: dict[str, Any] = {"coords": coords, "dims": _legal_names(dims or {})}
    arviz = import_arviz()
    is_new = int(arviz.__version__.split(".")[0]) >= 1
    found: InferenceData = arviz.from_dict(legal, **labels) if is_new else arviz.from_dict(**legal, **labels)
    return found


def _legal(arrays: Mapping[str, ArrayLike | Tensor]) -> dict[str, NDArray[Any]]:
    values = {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in _legal_names(arrays).items()}
    found = {name: np.asarray(x) for name, x in values.items()}
    return {name: x.astype(np.int8) if x.dtype == bool else x for name, x in found.items()}


def _legal_names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("/", "."): value for name, value in values.items()}
