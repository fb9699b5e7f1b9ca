"""A mean-field guide over gates and slabs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from pyro.distributions import LogNormal, Normal, TransformedDistribution
from pyro.infer.autoguide.guides import prototype_hide_fn
from torch import Tensor, nn
from torch.distributions import Distribution, Transform, biject_to, constraints
from torch.distributions.transforms import ExpTransform

from pyro_l0.distributions.wrappers import find_gate
from pyro_l0.fast.record import Site
from pyro_l0.infer._mean_field import SitePosterior, plates_and_shape
from pyro_l0.infer.auto_gate import AutoGate

__all__ = ["AutoSpikeSlab"]

Slab: TypeAlias = Normal | LogNormal | TransformedDistribution

_DRAWS = 31  # whose median is within 0.3 quartile deviations of a Cauchy's centre in two of three cases


class AutoSpikeSlab(AutoGate):
    """Gates and slabs in one mean-field guide, made for ``L0_ELBO("spike_slab", slab=...)``.

    The posterior of a slab is normal where its prior lives on the real line, log-normal where it lives on the positive
    numbers, and a normal carried there by torch's ``biject_to`` where it lives on an interval. The entries of a slab
    are independent, those of a multivariate normal prior too.

    Args:
        model: a Pyro model.
        slab: the gate site of each slab site, as given to the ELBO.
        init_scale: standard deviation at the start, of the slabs or of the normals that are carried over.
        init_loc: median of each slab at the start, by site; where not given, the prior's mean (the median of some draws
            where it has none) plus a hundredth of its standard deviation times normal noise.
        **options: those of :class:`AutoGate`.

    Raises:
        ValueError: ``slab`` names a site that the model does not have or whose support is neither real numbers nor an
            interval of them, ``init_loc`` has another shape or lies outside of the support, or ``init_scale`` is not
            positive.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro_l0 import HardConcrete
        >>> def model():
        ...     with pyro.plate("weights", 2):
        ...         z = pyro.sample("z", HardConcrete.from_active_prob(0.1))
        ...         return z * pyro.sample("w", dist.Normal(0.0, 1.0))
        >>> guide = AutoSpikeSlab(model, slab={"w": "z"})
        >>> sorted(guide())
        ['w', 'z']
        >>> guide.slabs()["w"].scale.detach()
        tensor([0.1000, 0.1000])
    """

    def __init__(
        self,
        model: Callable[..., object],
        slab: Mapping[str, str],
        init_scale: float = 0.1,
        init_loc: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        if not 0 < init_scale < math.inf:
            raise ValueError(f"Expected init_scale to be finite and positive, but got {init_scale}.")
        super().__init__(model, **options)
        self.slab = dict(slab)
        self.init_scale = init_scale
        self.init_loc = dict(init_loc or {})

    def _prototype_hide_fn(self, msg: Site) -> bool:  # type: ignore[override]
        return bool(prototype_hide_fn(msg)) or (find_gate(msg["fn"]) is None and msg["name"] not in self.slab)

    def _check_sites(self, sites: Mapping[str, Site]) -> None:
        super()._check_sites(sites)
        for slab, gate in self.slab.items():
            for name in (slab, gate):
                if name not in sites:
                    raise ValueError(f"Expected slab to name latent sites of the model, but {name!r} is none.")

    def _first(self, name: str, site: Site, inherited: Mapping[str, object]) -> SitePosterior:
        if find_gate(site["fn"]) is not None:
            return super()._first(name, site, inherited)
        fn, loc = site["fn"], self.init_loc.get(name)
        plates, shape = plates_and_shape(site)
        transform = _transform_to_support(name, fn)
        if loc is None:
            loc = _first_loc(fn, transform, site["value"].detach())
            loc = loc if loc.shape == shape else loc.mean() + torch.zeros(shape).to(loc)
        elif transform is not None:
            loc = transform.inv(loc)
        if loc.shape != shape:
            raise ValueError(f"Expected init_loc[{name!r}] of shape {tuple(shape)}, but got {tuple(loc.shape)}.")
        if not bool(torch.isfinite(loc).all()):
            raise ValueError(
                f"Expected slab site {name!r} to start at finite numbers inside the support of its prior {fn}, "
                f"but got {self.init_loc.get(name, loc)}; set init_loc[{name!r}]."
            )
        log_scale = torch.full_like(loc, math.log(self.init_scale))
        parameters = {"loc": nn.Parameter(loc.clone()), "log_scale": nn.Parameter(log_scale)}
        return _SlabPosterior(fn.event_dim, plates, parameters, transform)

    def slabs(self) -> dict[str, Slab]:
        """The posterior slabs by site; live and differentiable, as :meth:`posterior`."""
        return {name: slab.distribution(slab.parameters) for name, slab in self._of_kind(_SlabPosterior).items()}

    @torch.no_grad()
    def median(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Posterior median of every gate and slab, by site; a copy. Takes the model's arguments."""
        medians = super().median(*args, **kwargs)
        for name, slab in self._of_kind(_SlabPosterior).items():
            loc = slab.parameters["loc"]
            medians[name] = loc.detach().clone() if slab.transform is None else slab.transform(loc)
        return medians


@dataclass(frozen=True)
class _SlabPosterior(SitePosterior):
    """Slabs: normals, carried to the prior's support by a transform (None for the real line)."""

    transform: Transform | None

    def distribution(self, parameters: Mapping[str, Tensor]) -> Slab:
        family = LogNormal if isinstance(self.transform, ExpTransform) else Normal
        slab: Slab = family(parameters["loc"], parameters["log_scale"].exp(), validate_args=False)
        if family is Normal and self.transform is not None:
            slab = TransformedDistribution(slab, [self.transform], validate_args=False)
        return slab


def _transform_to_support(name: str, fn: Distribution) -> Transform | None:
    """The map from the real line to a prior's support; None for the real line itself.

    Raises:
        ValueError: the prior is discrete, or its support is not that of independent numbers.
    """
    try:
        support: Any = fn.support
        while isinstance(support, constraints.independent | constraints.MixtureSameFamilyConstraint):
            support = support.base_constraint
        if isinstance(support, type(constraints.real)):
            return None
        above = isinstance(support, constraints.greater_than | constraints.greater_than_eq)
        if above and isinstance(support.lower_bound, float | int) and support.lower_bound == 0:
            return ExpTransform()  # torch's own for positive numbers adds 0, which makes another distribution of it
        transform: Transform = biject_to(support)
        if transform.domain.event_dim == 0 and not support.is_discrete:
            return transform
    except NotImplementedError:
        support = "unknown"
    raise ValueError(
        f"Expected slab site {name!r} to have a prior of real, positive or bounded numbers, but got {fn} with support "
        f"{support}; sample such numbers and transform them in the model."
    )


def _first_loc(fn: Distribution, transform: Transform | None, like: Tensor) -> Tensor:
    """Where a slab's normals start: at the prior's mean, with a hundredth of its standard deviation as noise.

    Where the prior has no finite mean or standard deviation, the median and half the quartile distance of some draws
    take their places. ``like`` is a value of the site.
    """
    try:
        centre, spread = fn.mean, fn.stddev
    except NotImplementedError:
        centre = spread = torch.full_like(like, torch.nan)
    if not bool((torch.isfinite(centre) & torch.isfinite(spread)).all()):
        low, middle, high = fn.sample((_DRAWS,)).sort(0).values[[_DRAWS // 4, _DRAWS // 2, 3 * _DRAWS // 4]]
        centre = torch.where(torch.isfinite(centre), centre, middle)
        spread = torch.where(torch.isfinite(spread), spread, (high - low) / 2)
    if transform is not None:
        centre, spread = transform.inv(centre), torch.ones_like(spread)
    return (centre + 0.01 * spread * torch.randn_like(like)).detach()
