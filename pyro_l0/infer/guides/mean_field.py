"""The sites of a mean-field guide: the posterior of each, how they are drawn, where they start, and their layout."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import pyro
import torch
from pyro.distributions import LogNormal, Normal, TransformedDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions import Distribution, Transform, biject_to, constraints
from torch.distributions.transforms import ExpTransform

from pyro_l0.distributions.gate import GateDistribution, concatenate, innermost
from pyro_l0.fast.switch import is_on
from pyro_l0.infer.record import Record, Site
from pyro_l0.infer.slabs import JointSample

#: What to do about a discrete latent that is no gate, even one that is enumerated elsewhere.
SUM_OUT = (
    "sum it out in the model, by MixtureSameFamily or by a factor of torch.logsumexp over its values, or take a "
    "BernoulliGate for 0 and 1."
)
MEAN_FIELD = "use gates='mean_field' and slabs='independent', without hyper"  # advice where sites can't be correlated


class Layout:
    """Where the entries of each site of a run are in a vector of numbers on the real line.

    Transforms carry the real line to a site's support.
    """

    def __init__(self, sites: Mapping[str, Site], transforms: Mapping[str, Transform] | None = None) -> None:
        self.shapes = {name: site["value"].shape for name, site in sites.items()}
        self.event_dims = {name: site["fn"].event_dim for name, site in sites.items()}
        self.transforms = dict(transforms or {})
        self.real_shapes = {  # on the real line
            name: self.transforms[name].inverse_shape(shape) if name in self.transforms else shape
            for name, shape in self.shapes.items()
        }
        self.size = sum(shape.numel() for shape in self.real_shapes.values())

    def pieces(self, flat: Tensor) -> dict[str, Tensor]:
        """The entries of each site, shape ``(..., n)`` each, of a vector ``(..., size)``."""
        sizes = [shape.numel() for shape in self.real_shapes.values()]
        return dict(zip(self.real_shapes, flat.split(sizes, -1), strict=True))

    def positions(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Where the entries of each site are in the vector."""
        return self.pieces(torch.arange(self.size, device=device))

    def reals(self, flat: Tensor) -> dict[str, Tensor]:
        """Each site's value on the real line, with any dimensions in front."""
        return {name: x.reshape(flat.shape[:-1] + self.real_shapes[name]) for name, x in self.pieces(flat).items()}

    def apart(self, flat: Tensor) -> dict[str, Tensor]:
        """Each site's value in its shape and support, with any dimensions in front."""
        return {
            name: self.transforms[name](x) if name in self.transforms else x for name, x in self.reals(flat).items()
        }

    def together(self, values: Mapping[str, Tensor]) -> Tensor:
        """The vector of values in their supports, with any dimensions in front."""
        flat = []
        for name, shape in self.real_shapes.items():
            x = self.transforms[name].inv(values[name]) if name in self.transforms else values[name]
            flat.append(x.reshape(*x.shape[: x.dim() - len(shape)], shape.numel()))
        return torch.cat(flat or [torch.zeros(0)], -1)

    def log_jacobian(self, flat: Tensor) -> Tensor:
        """Log of the derivative of the map from one vector to the sites' supports, shape ``()``."""
        found = flat.new_zeros(())
        for name, real in self.reals(flat).items():
            if name in self.transforms:
                found = found + self.transforms[name].log_abs_det_jacobian(real, self.transforms[name](real)).sum()
        return found

    def normal(self, name: str, prior: object) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each entry of a site under its normal prior, shapes ``(n,)``."""
        inside = innermost(prior)
        if not isinstance(inside, torch.distributions.Normal):
            raise ValueError(
                f"Expected a Normal prior of slab site {name!r}, as it depends on other sites in this guide, but got "
                f"{prior}; use sample_posterior, or, for a fit alone, {MEAN_FIELD}."
            )
        shape = self.shapes[name]
        return inside.loc.expand(shape).reshape(-1), inside.scale.expand(shape).reshape(-1)


_NO_SITES = nn.ModuleDict()


@dataclass(frozen=True)
class SitePosterior(ABC):
    """A site's event dimensions and plates, and its parameters: a module's own dict, which is read far faster."""

    event_dim: int
    plates: tuple[str, ...]
    parameters: dict[str, nn.Parameter]

    @abstractmethod
    def distribution(self, parameters: Mapping[str, Tensor]) -> TorchDistributionMixin:
        """The posterior without event dimensions, from all of the parameters or from rows of them."""

    @property
    def parameters_event_dim(self) -> int:
        """How many of the parameters' last dimensions are one event of the site."""
        return self.event_dim

    def in_events(self, distribution: TorchDistributionMixin) -> TorchDistributionMixin:
        """The distribution with as many event dimensions as the site has in the model."""
        missing = self.event_dim - distribution.event_dim if self.event_dim else 0
        return distribution.to_event(missing) if missing else distribution


@dataclass(frozen=True)
class GatesPosterior(SitePosterior):
    """Gates that share with a template, of shape ``()``, what is not learned."""

    template: GateDistribution

    def distribution(self, parameters: Mapping[str, Tensor]) -> GateDistribution:
        """The gates at parameters on the real line, by name as in ``learned``."""
        return self.template.from_real_line(parameters)

    def cut(self, index: Tensor) -> GatesPosterior:
        """With a template of some of the gates, if it has parameters of each; the learned ones stay."""
        shape = next(iter(self.parameters.values())).shape
        template = self.template.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == shape else x)
        return replace(self, template=template)

    def close(self, indices: Tensor) -> None:
        """Close the gates at some positions of the flattened site."""
        closed = self.template.closed(**self.template.fixed_options)
        for key, value in closed.on_real_line().items():
            parameter = self.parameters[key]
            here = indices.to(parameter.device)
            parameter.view(-1)[here] = value.to(parameter).expand_as(parameter).reshape(-1)[here]


class MeanField:
    """Draws sites that do not depend on one another; a loss may take them under the model's scales and masks."""

    def __init__(self, posteriors: Mapping[str, SitePosterior], as_in_model: bool = True) -> None:
        self._posteriors, self._infer = posteriors, {"as_in_model": as_in_model}
        self._cached: dict[str, tuple[GateDistribution, TorchDistributionMixin]] = {}
        self._groups: list[list[str]] = []  # sites that can be drawn jointly
        templates = {name: x.template for name, x in posteriors.items() if isinstance(x, GatesPosterior)}
        for name, template in templates.items():
            for group in self._groups:
                if concatenate([templates[group[0]], template]) is not None:
                    group.append(name)
                    break
            else:
                self._groups.append([name])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_cached": {}}

    def draw(self, plates: Mapping[str, pyro.plate]) -> dict[str, Tensor]:
        """Sample each site in its plates from its own posterior; the values by site."""
        values: dict[str, Tensor] = {}
        for name, posterior in self._posteriors.items():
            parameters: Mapping[str, Tensor] = posterior.parameters
            with ExitStack() as stack:
                for plate in posterior.plates:
                    stack.enter_context(plates[plate])
                if posterior.plates:  # each parameter is full-sized, and a subsampled plate picks its rows
                    dims = posterior.parameters_event_dim
                    parameters = {k: pyro.subsample(x, event_dim=dims) for k, x in parameters.items()}
                fn = posterior.in_events(posterior.distribution(parameters))
                values[name] = pyro.sample(name, fn, infer=dict(self._infer))  # type: ignore[arg-type]
        return values

    def draw_for(self, record: Record) -> dict[str, Tensor]:
        """Sample every site, outside of plates, for a loss that needs sites alone: gates of one kind in one draw."""
        values: dict[str, Tensor] = {}
        for names in self._groups if is_on("joint_draws") else []:
            gates, fns = zip(*map(self._gates, names), strict=True)
            joint = gates[0].draw_jointly(gates)
            for name, fn, draw in zip(names, fns, joint.draws, strict=True):
                values[name] = record.sample(name, fn, draw, joint=joint)
        for name, x in self._posteriors.items():
            if name not in values:
                is_gate = isinstance(x, GatesPosterior)
                fn = self._gates(name)[1] if is_gate else x.in_events(x.distribution(x.parameters))
                values[name] = record.sample(name, fn)
        return values

    def draw_together(self, n: int) -> dict[str, JointSample]:
        """n draws of each site, by site; they are independent of one another."""
        return {
            name: JointSample.of(x.distribution(x.parameters), n, x.event_dim) for name, x in self._posteriors.items()
        }

    def _gates(self, name: str) -> tuple[GateDistribution, TorchDistributionMixin]:
        """The gates of a site, and these in events; cached from step to step if they hold the parameters themselves."""
        posterior, cached = self._posteriors[name], self._cached.get(name)
        if cached is None or not _holds(cached[0], posterior.parameters):
            assert isinstance(posterior, GatesPosterior)
            gates = posterior.distribution(posterior.parameters)
            cached = gates, posterior.in_events(gates)
            if _holds(gates, posterior.parameters):
                self._cached[name] = cached
        return cached


def _holds(gates: GateDistribution, parameters: Mapping[str, Tensor]) -> bool:
    return all(getattr(gates, key) is x for key, x in parameters.items())


def first_gates(
    site: Site, family: type[GateDistribution], rate: float, options: Mapping[str, Any], jitter: float
) -> GatesPosterior:
    """Gates of one P(z != 0) for a site, with normal noise on the location; constants take no part in a graph."""
    fixed: dict[str, Any] = {
        k: x.detach() if isinstance(x, Tensor) and x.requires_grad else x for k, x in options.items()
    }
    start = torch.as_tensor(rate, dtype=site["value"].dtype, device=site["value"].device)
    template = family.from_active_prob(start, **fixed)
    plates, shape = plates_and_shape(site)
    learned = {key: value.expand(shape).clone() for key, value in template.on_real_line().items()}
    if jitter > 0:
        location = next(iter(learned.values()))
        location += jitter * torch.randn_like(location)
    parameters = {key: nn.Parameter(value) for key, value in learned.items()}
    return GatesPosterior(site["fn"].event_dim, plates, parameters, template)


def take_over(modules: nn.ModuleDict, made: Mapping[str, SitePosterior]) -> dict[str, SitePosterior]:
    """Put the parameters of posteriors into a guide's modules; those of a state loaded before keep their values."""
    new: dict[str, nn.Module] = {site_key(name): nn.ParameterDict(x.parameters) for name, x in made.items()}
    loaded, expected = dict(modules.named_parameters()), dict(nn.ModuleDict(new).named_parameters())
    got, wanted = ({name: tuple(x.shape) for name, x in found.items()} for found in (loaded, expected))
    if not loaded:
        modules.update(new)
    elif got != wanted:
        raise ValueError(
            f"Expected the state that was loaded before the first call to have the parameters {wanted}, but got {got}."
        )
    for name, parameter in loaded.items():
        parameter.data = parameter.data.to(expected[name])  # where the model is
    return {name: replace(x, parameters=vars(modules[site_key(name)])["_parameters"]) for name, x in made.items()}


def site_key(name: str) -> str:
    """A site's name as a key of a module dict, which takes no dots and no names of its own attributes."""
    key = name.replace("/", "//").replace(".", "/")
    return f"/{key}" if hasattr(_NO_SITES, key) else key


def plates_and_shape(site: Site) -> tuple[tuple[str, ...], torch.Size]:
    """Names of the plates that a site has dimensions for, and its shape with every plate at its full size."""
    frames = [frame for frame in site["cond_indep_stack"] if frame.vectorized]
    shape = list(site["value"].shape)
    for frame in frames:
        shape[frame.dim - site["fn"].event_dim] = frame.full_size or frame.size
    return tuple(frame.name for frame in frames), torch.Size(shape)


def in_full(site: Site) -> Site:
    """What an alignment of gates and slabs asks of a site, with every plate at its full size."""
    shape, dims = plates_and_shape(site)[1], site["fn"].event_dim
    sizes = SimpleNamespace(batch_shape=shape[: len(shape) - dims], event_shape=shape[len(shape) - dims :])
    return {**site, "fn": sizes}


Slab: TypeAlias = Normal | LogNormal | TransformedDistribution

_DRAWS = 31  # whose median is within 0.3 quartile deviations of a Cauchy's centre in two of three cases


@dataclass(frozen=True)
class IndependentLatents(SitePosterior):
    """Normals, transformed to the prior's support (None for the real line)."""

    transform: Transform | None

    @property
    def parameters_event_dim(self) -> int:
        """Event dimensions of the normals, on the real line, where a transform may change their number."""
        if self.transform is None:
            return self.event_dim
        return self.event_dim + self.transform.domain.event_dim - self.transform.codomain.event_dim

    def distribution(self, parameters: Mapping[str, Tensor]) -> Slab:
        """Independent normals of ``loc`` and ``log_scale``, carried to the site's support."""
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
) -> IndependentLatents:
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
    if loc.shape != shape or not bool(torch.isfinite(loc).all()):
        raise ValueError(
            f"Expected {'slab' if is_slab else 'latent'} site {name!r} to start at finite numbers of shape "
            f"{tuple(shape)} inside the support of its prior {fn}, but got {loc if init_loc is None else init_loc}. "
            f"Set init_loc[{name!r}]."
        )
    log_scale = torch.full_like(loc, math.log(init_scale))
    parameters = {"loc": nn.Parameter(loc.clone()), "log_scale": nn.Parameter(log_scale)}
    return IndependentLatents(fn.event_dim, plates, parameters, transform)


def transform_to_support(name: str, fn: Distribution, is_slab: bool) -> Transform | None:
    """The map from the real line to a prior's support; None for the real line itself."""
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
    wanted, advice = "a continuous prior", SUM_OUT
    if is_slab:
        wanted, advice = "a prior of real, positive or bounded numbers", "transform such numbers in the model."
    raise ValueError(
        f"Expected site {name!r} to have {wanted}, but got {fn} with support {support}. {advice[0].upper()}{advice[1:]}"
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
