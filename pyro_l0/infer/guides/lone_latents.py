"""The posterior of slabs and other latents that depend on nothing: normals, transformed to the prior's support."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from pyro.distributions import LogNormal, Normal, TransformedDistribution
from torch import Tensor, nn
from torch.distributions import Distribution, Transform, biject_to, constraints
from torch.distributions.transforms import ExpTransform

from pyro_l0.fast.record import Site
from pyro_l0.infer.guides.mean_field import SitePosterior, plates_and_shape

Slab: TypeAlias = Normal | LogNormal | TransformedDistribution

_DRAWS = 31  # whose median is within 0.3 quartile deviations of a Cauchy's centre in two of three cases


@dataclass(frozen=True)
class LoneLatents(SitePosterior):
    """Normals, transformed to the prior's support (None for the real line)."""

    transform: Transform | None

    @property
    def parameters_event_dim(self) -> int:
        """That of the normals."""
        if self.transform is None:
            return self.event_dim
        return self.event_dim + self.transform.domain.event_dim - self.transform.codomain.event_dim

    def distribution(self, parameters: Mapping[str, Tensor]) -> Slab:
        """The distribution that these parameters give."""
        return carried(parameters["loc"], parameters["log_scale"].exp(), self.transform)


def carried(loc: Tensor, scale: Tensor, transform: Transform | None) -> Slab:
    """Normals that a transform carries to another support; None for the real line."""
    family = LogNormal if isinstance(transform, ExpTransform) else Normal
    slab: Slab = family(loc, scale, validate_args=False)
    if family is Normal and transform is not None:
        slab = TransformedDistribution(slab, [transform], validate_args=False)
    return slab


def first_latents(
    name: str, site: Site, is_slab: bool, init_loc: Tensor | None = None, init_scale: float = 0.1
) -> LoneLatents:
    """A site's normals at the start: at medians that are given, or at the prior's mean."""
    fn, loc = site["fn"], init_loc
    plates, shape = plates_and_shape(site)
    transform = transform_to_support(name, fn, is_slab)
    shape = shape if transform is None else transform.inverse_shape(shape)
    if loc is None:
        loc = _first_loc(fn, transform, site["value"].detach())
        loc = loc if loc.shape == shape else loc.mean() + torch.zeros(shape).to(loc)
    elif transform is not None:
        loc = transform.inv(loc)
    if loc.shape != shape:
        raise ValueError(f"Expected init_loc[{name!r}] of shape {tuple(shape)}, but got {tuple(loc.shape)}.")
    if not bool(torch.isfinite(loc).all()):
        raise ValueError(
            f"Expected {'slab' if is_slab else 'latent'} site {name!r} to start at finite numbers inside the support "
            f"of its prior {fn}, but got {loc if init_loc is None else init_loc}; set init_loc[{name!r}]."
        )
    log_scale = torch.full_like(loc, math.log(init_scale))
    parameters = {"loc": nn.Parameter(loc.clone()), "log_scale": nn.Parameter(log_scale)}
    return LoneLatents(fn.event_dim, plates, parameters, transform)


def transform_to_support(name: str, fn: Distribution, is_slab: bool) -> Transform | None:
    """The map from the real line to a prior's support; None for the real line itself.

    Refuses discrete priors and supports that no map reaches; of slabs also those of numbers that are not independent.
    """
    support: Any = "unknown"
    try:
        support = fn.support
        while isinstance(support, constraints.independent | constraints.MixtureSameFamilyConstraint):
            support = support.base_constraint
        if isinstance(support, type(constraints.real)):
            return None
        above = isinstance(support, constraints.greater_than | constraints.greater_than_eq)
        if above and isinstance(support.lower_bound, float | int) and support.lower_bound == 0:
            return ExpTransform()  # torch's own for positive numbers adds 0, which makes another distribution of it
        transform: Transform = biject_to(support)
        if transform.bijective and not support.is_discrete and not (is_slab and transform.domain.event_dim):
            return transform
    except NotImplementedError:
        pass
    if is_slab:
        raise ValueError(
            f"Expected slab site {name!r} to have a prior of real, positive or bounded numbers, but got {fn} with "
            f"support {support}. Sample such numbers and transform them in the model."
        )
    raise ValueError(
        f"Expected latent site {name!r} to be a gate or continuous, with a support to which the real line can be "
        f"transformed, but got {fn} with support {support}. Sum it out in the model, use a BernoulliGate if it takes 0 "
        f"and 1, or hide it by poutine.block(model, hide=[{name!r}]) and give it a guide of its own."
    )


def middle(fn: Any, transform: Transform | None) -> Tensor:
    """The median of some draws of a prior; where its numbers are not independent, that on the real line."""
    draws: Tensor = fn.sample((_DRAWS,)).detach()
    if transform is None or not transform.domain.event_dim:
        return draws.median(0).values
    carried: Tensor = transform(transform.inv(draws).median(0).values)
    return carried


def _first_loc(fn: Distribution, transform: Transform | None, like: Tensor) -> Tensor:
    """Where a site's normals start: at the prior's mean, with a hundredth of its standard deviation as noise.

    Where the prior has no finite mean or standard deviation, the median and half the quartile distance of some draws
    replace them. ``like`` is a value of the site.
    """
    if transform is not None and transform.domain.event_dim:
        real: Tensor = transform.inv(middle(fn, transform))
        return real + 0.01 * torch.randn_like(real)
    try:
        centre, spread = fn.mean, fn.stddev
    except NotImplementedError:
        centre = spread = torch.full_like(like, torch.nan)
    if not bool((torch.isfinite(centre) & torch.isfinite(spread)).all()):
        low, median, high = fn.sample((_DRAWS,)).sort(0).values[[_DRAWS // 4, _DRAWS // 2, 3 * _DRAWS // 4]]
        centre = torch.where(torch.isfinite(centre), centre, median)
        spread = torch.where(torch.isfinite(spread), spread, (high - low) / 2)
    if transform is not None:
        centre, spread = transform.inv(centre), torch.ones_like(spread)
    return (centre + 0.01 * spread * torch.randn_like(like)).detach()
