"""A mean-field guide over gates and slabs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.distributions import LogNormal, Normal, TransformedDistribution
from pyro.infer.autoguide.guides import prototype_hide_fn
from torch import Tensor, nn
from torch.distributions import Transform, biject_to, constraints
from torch.distributions.transforms import ExpTransform

from pyro_l0.distributions.wrappers import find_gate
from pyro_l0.infer._plans import Parameters, Plan, site_key
from pyro_l0.infer.auto_gate import AutoGate

__all__ = ["AutoSpikeSlab"]

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
        model: Callable[..., Any],
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

    def _prototype_hide_fn(self, msg: dict[str, Any]) -> bool:  # type: ignore[override]
        return bool(prototype_hide_fn(msg)) or (find_gate(msg["fn"]) is None and msg["name"] not in self.slab)

    def _check_sites(self, prototype: Any) -> None:
        super()._check_sites(prototype)
        sites = [name for name, _ in prototype.iter_stochastic_nodes()]
        for slab, gate in self.slab.items():
            for name in (slab, gate):
                if name not in sites:
                    raise ValueError(f"Expected slab to name latent sites of the model, but {name!r} is none.")

    def _transform(self, name: str, site: dict[str, Any]) -> Transform | None:
        return _transform_to_support(name, site["fn"])

    def _init_other(self, name: str, site: dict[str, Any], shape: torch.Size, plan: Plan) -> dict[str, nn.Parameter]:
        loc = self.init_loc.get(name)
        if loc is None:
            loc = _start(site["fn"], plan.transform, site["value"].detach())
            loc = loc if loc.shape == shape else loc.mean() + torch.zeros(shape).to(loc)
        elif plan.transform is not None:
            loc = plan.transform.inv(loc)
        if loc.shape != shape:
            raise ValueError(f"Expected init_loc[{name!r}] of shape {tuple(shape)}, but got {tuple(loc.shape)}.")
        if not bool(torch.isfinite(loc).all()):
            raise ValueError(
                f"Expected slab site {name!r} to start at finite numbers inside the support of its prior {site['fn']}, "
                f"but got {self.init_loc.get(name, loc)}; set init_loc[{name!r}]."
            )
        log_scale = torch.full_like(loc, math.log(self.init_scale))
        return {"loc": nn.Parameter(loc.clone()), "log_scale": nn.Parameter(log_scale)}

    def _distribution(self, plan: Plan, parameters: Parameters) -> Any:
        return _posterior(parameters, plan.transform) if plan.template is None else self._gate(plan, parameters)

    def _gate_plans(self) -> dict[str, Plan]:
        return {name: plan for name, plan in super()._gate_plans().items() if name not in self.slab}

    def slabs(self) -> dict[str, Any]:
        """The posterior slabs by site; live and differentiable, as :meth:`posterior`."""
        sites: Any = self.sites
        plans = super()._gate_plans()
        return {
            name: _posterior(sites[site_key(name)], plan.transform) for name, plan in plans.items() if name in self.slab
        }

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior median of every gate and slab, by site; a copy. Takes the model's arguments."""
        medians = super().median(*args, **kwargs)
        sites: Any = self.sites
        for name in self.slabs():
            loc, transform = sites[site_key(name)]["loc"], self._plans[name].transform
            medians[name] = loc.detach().clone() if transform is None else transform(loc)
        return medians


def _transform_to_support(name: str, fn: Any) -> Transform | None:
    """The map from the real line to a prior's support; None for the real line itself.

    Args:
        name: the slab's site.
        fn: its prior.

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


def _posterior(parameters: Mapping[str, Tensor], transform: Transform | None) -> Any:
    """The posterior: normal, log-normal for a support of positive numbers, else a transformed normal.

    Args:
        parameters: ``loc`` and ``log_scale``.
        transform: as :func:`_transform_to_support` says.
    """
    loc, scale = parameters["loc"], parameters["log_scale"].exp()
    if transform is None:
        return Normal(loc, scale, validate_args=False)
    if isinstance(transform, ExpTransform):
        return LogNormal(loc, scale, validate_args=False)
    return TransformedDistribution(Normal(loc, scale, validate_args=False), [transform], validate_args=False)


def _start(fn: Any, transform: Transform | None, like: Tensor) -> Tensor:
    """Where a slab starts: the prior's mean, with a hundredth of its standard deviation as noise.

    Where the prior has no finite mean or standard deviation, the median and half the quartile distance of some draws
    take their places.

    Args:
        fn: the prior.
        transform: as :func:`_transform_to_support` says; the start is what it maps to the slab's median.
        like: a value of the site.
    """
    centre, spread = _moments(fn, like)
    finite = torch.isfinite(centre) & torch.isfinite(spread)
    if not bool(finite.all()):
        low, middle, high = fn.sample((_DRAWS,)).sort(0).values[[_DRAWS // 4, _DRAWS // 2, 3 * _DRAWS // 4]]
        centre = torch.where(torch.isfinite(centre), centre, middle)
        spread = torch.where(torch.isfinite(spread), spread, (high - low) / 2)
    if transform is not None:
        centre, spread = transform.inv(centre), torch.ones_like(spread)
    return (centre + 0.01 * spread * torch.randn_like(like)).detach()


def _moments(fn: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a prior, NaN where it has none."""
    try:
        return fn.mean, fn.stddev
    except NotImplementedError:
        nothing = torch.full_like(like, torch.nan)
        return nothing, nothing
