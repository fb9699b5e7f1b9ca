"""The sites of a mean-field guide: the posterior of each, how they are drawn, and where they start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn

from pyro_l0.distributions.gate import GateDistribution, concatenate
from pyro_l0.fast.record import Record, Site
from pyro_l0.fast.switch import is_open
from pyro_l0.infer.elbo.slabs import fits
from pyro_l0.infer.guides.drawn import Part

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
        """Event dimensions of the parameters."""
        return self.event_dim

    def in_events(self, distribution: TorchDistributionMixin) -> TorchDistributionMixin:
        """The distribution as the site has it."""
        missing = self.event_dim - distribution.event_dim if self.event_dim else 0
        return distribution.to_event(missing) if missing else distribution


@dataclass(frozen=True)
class GatesPosterior(SitePosterior):
    """Gates that share with a template, of shape ``()``, what is not learned."""

    template: GateDistribution

    def distribution(self, parameters: Mapping[str, Tensor]) -> GateDistribution:
        """The distribution that these parameters give."""
        return self.template.from_real_line(parameters)

    def cut(self, index: Tensor) -> GatesPosterior:
        """With a template of some of the gates, if it has parameters of each; the learned ones stay."""
        shape = next(iter(self.parameters.values())).shape
        template = self.template.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == shape else x)
        return replace(self, template=template)

    def close(self, places: Tensor) -> None:
        """Close the gates at some positions of the flattened site."""
        closed = self.template.closed(**self.template.fixed_options)
        for key, value in closed.on_real_line().items():
            parameter = self.parameters[key]
            here = places.to(parameter.device)
            parameter.view(-1)[here] = value.to(parameter).expand_as(parameter).reshape(-1)[here]


class MeanField:
    """Draws sites that do not depend on one another."""

    def __init__(self, posteriors: Mapping[str, SitePosterior]) -> None:
        self._posteriors = posteriors
        self._kept: dict[str, tuple[GateDistribution, TorchDistributionMixin]] = {}
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
        return {**self.__dict__, "_kept": {}}

    def draw(self, plates: Mapping[str, pyro.plate]) -> dict[str, Tensor]:
        """Sample every site in its plates."""
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
                values[name] = pyro.sample(name, fn, infer={"as_in_model": True})  # type: ignore[arg-type]
        return values

    def draw_for(self, record: Record) -> dict[str, Tensor]:
        """Sample every site, outside of plates, for a loss that needs sites alone: gates of one kind in one draw."""
        values: dict[str, Tensor] = {}
        for names in self._groups if is_open("joint_draws") else []:
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

    def draw_together(self, n: int) -> dict[str, Part]:
        """Parts of n joint draws, by site."""
        return {name: Part.of(x.distribution(x.parameters), n, x.event_dim) for name, x in self._posteriors.items()}

    def _gates(self, name: str) -> tuple[GateDistribution, TorchDistributionMixin]:
        """The gates of a site, and these in events; kept from step to step if they hold the parameters themselves."""
        posterior, kept = self._posteriors[name], self._kept.get(name)
        if kept is None or not _holds(kept[0], posterior.parameters):
            assert isinstance(posterior, GatesPosterior)
            gates = posterior.distribution(posterior.parameters)
            kept = gates, posterior.in_events(gates)
            if _holds(gates, posterior.parameters):
                self._kept[name] = kept
        return kept


def _holds(gates: GateDistribution, parameters: Mapping[str, Tensor]) -> bool:
    return all(getattr(gates, key) is x for key, x in parameters.items())


def first_gates(
    site: Site, family: type[GateDistribution], rate: float, options: Mapping[str, object], jitter: float
) -> GatesPosterior:
    """Gates of one P(z != 0) for a site, with normal noise on the location; constants take no part in a graph."""
    fixed = {k: x.detach() if isinstance(x, Tensor) and x.requires_grad else x for k, x in options.items()}
    start = torch.as_tensor(rate, dtype=site["value"].dtype, device=site["value"].device)
    template = family.from_active_prob(start, **fixed)
    plates, shape = plates_and_shape(site)
    if not fits(template.batch_shape, shape):
        raise ValueError(
            f"Expected the parameters that {family.__name__} does not learn to broadcast to the shape "
            f"{tuple(shape)} of gate site {site['name']!r}, but got {tuple(template.batch_shape)}; set family_options."
        )
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
