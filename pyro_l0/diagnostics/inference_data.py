"""Draws of a posterior in the form that arviz summarises, compares and draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pyro_l0.diagnostics.at_draws import at_draws, is_observation, sites_of
from pyro_l0.diagnostics.posterior_draws import PosteriorDraws, completed, draws_of
from pyro_l0.expect import expect
from pyro_l0.infer.elbo.runs import Program
from pyro_l0.infer.elbo.slabs import Switch, switches_of
from pyro_l0.infer.generators import seeded
from pyro_l0.infer.posterior.summaries import import_arviz

if TYPE_CHECKING:
    from arviz import InferenceData  # takes seconds to import

__all__ = ["inclusion_name", "inference_data", "to_arviz"]

Arrays = dict[str, dict[str, Any]]
"""Arrays or tensors by group and name."""


def to_arviz(
    model: object,
    posterior: object = None,
    *args: object,
    slab: Mapping[str, Switch] | None = None,
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
    program, posterior = _in_order(model, posterior)
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
            sites = sites_of(program, args, kwargs)
            groups = at_draws(program, args, kwargs, sites, drawn.values)
            groups["observed_data"] = {name: site["value"] for name, site in sites.items() if is_observation(site)}
            drawn = completed(drawn, groups.pop("deterministic"), sites, switches_of(slab))
    values = {**drawn.values, **drawn.derived}
    groups["posterior"] = {name: x.bool() if name in drawn.switches else x for name, x in values.items()}
    groups["constant_data"] = {inclusion_name(name): x for name, x in drawn.active_probs.items()}
    return inference_data(groups, coords, _all_dims(dims or {}, drawn))


def _in_order(model: object, posterior: object) -> tuple[Program | None, object]:
    """Model and posterior; a posterior may come alone."""
    if posterior is None:
        return None, model
    if model is not None and not callable(model):
        raise TypeError(f"Expected a model, a function, but got {type(model).__name__}; give the model first.")
    return model, posterior


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
    drawn = {group: arrays for group, arrays in legal.items() if group not in ("observed_data", "constant_data")}
    _check_draws({f"{group}[{name!r}]": x.shape[:2] for group, arrays in drawn.items() for name, x in arrays.items()})
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


def _check_draws(leads: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse variables whose first two dimensions are not the same chains and draws."""
    if len(set(leads.values())) != 1 or any(len(lead) != 2 for lead in leads.values()):
        raise ValueError(
            "Expected arrays of shape (chains, draws, *shape) with the same chains and draws of every variable, but "
            f"got {', '.join(f'{lead} at {name}' for name, lead in leads.items())}."
        )
