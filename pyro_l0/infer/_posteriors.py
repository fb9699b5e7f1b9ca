"""The posterior of one site of a guide: its parameters, where they start and the distribution that they make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions import constraints, transform_to

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.fast.record import Site
from pyro_l0.infer.slabs import fits

_NO_SITES = nn.ModuleDict()


@dataclass(frozen=True)
class SitePosterior(ABC):
    """A site's event dimensions and plates, and its parameters: a module's own dict, whose access costs far less."""

    event_dim: int
    plates: tuple[str, ...]
    parameters: dict[str, nn.Parameter]

    @abstractmethod
    def distribution(self, parameters: Mapping[str, Tensor]) -> TorchDistributionMixin:
        """The posterior without event dimensions, from all of the parameters or from rows of them."""

    def in_events(self, distribution: TorchDistributionMixin) -> TorchDistributionMixin:
        """The distribution as the site has it."""
        return distribution.to_event(self.event_dim) if self.event_dim else distribution


@dataclass(frozen=True)
class GatesPosterior(SitePosterior):
    """Gates that share with a template, of shape ``()``, what is not learned."""

    template: GateDistribution

    def distribution(self, parameters: Mapping[str, Tensor]) -> GateDistribution:
        values = {
            key: parameters[key] if constraint is constraints.real else transform_to(constraint)(parameters[key])
            for key, constraint in self.template.learned.items()
        }
        return self.template.with_learned(**values)

    def cut(self, index: Tensor) -> GatesPosterior:
        """With some of the gates alone in the template, if it has parameters of each; the learned ones stay."""
        shape = next(iter(self.parameters.values())).shape
        template = self.template.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == shape else x)
        return replace(self, template=template)

    def close(self, places: Tensor) -> None:
        """Close the gates at some places of the flattened site."""
        closed = self.template.closed(**self.template.fixed_options)
        for key, value in _unconstrained(closed).items():
            parameter = self.parameters[key]
            here = places.to(parameter.device)
            parameter.view(-1)[here] = value.to(parameter).expand_as(parameter).reshape(-1)[here]


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
    learned = {key: value.expand(shape).clone() for key, value in _unconstrained(template).items()}
    if jitter > 0:
        location = next(iter(learned.values()))
        location += jitter * torch.randn_like(location)
    parameters = {key: nn.Parameter(value) for key, value in learned.items()}
    return GatesPosterior(site["fn"].event_dim, plates, parameters, template)


def _unconstrained(gate: GateDistribution) -> dict[str, Tensor]:
    """The learned parameters of a gate on the real line."""
    return {key: transform_to(constraint).inv(getattr(gate, key)) for key, constraint in gate.learned.items()}


def take_over(modules: nn.ModuleDict, made: Mapping[str, SitePosterior]) -> dict[str, SitePosterior]:
    """Put the parameters of posteriors into a guide's modules; those of a state loaded before keep their values.

    Raises:
        ValueError: what was loaded has other names or shapes.
    """
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
    return {name: replace(x, parameters=parameters_of(modules[site_key(name)])) for name, x in made.items()}


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own dict of its parameters."""
    parameters: dict[str, nn.Parameter] = vars(module)["_parameters"]
    return parameters


def site_key(name: str) -> str:
    """A site's name as a key of a module dict, which may hold no dots and no names of its own attributes."""
    key = name.replace("/", "//").replace(".", "/")
    return f"/{key}" if hasattr(_NO_SITES, key) else key


def plates_and_shape(site: Site) -> tuple[tuple[str, ...], torch.Size]:
    """Names of the plates that a site has dimensions for, and its shape with every plate at its full size."""
    frames = [frame for frame in site["cond_indep_stack"] if frame.vectorized]
    shape = list(site["value"].shape)
    for frame in frames:
        shape[frame.dim - site["fn"].event_dim] = frame.full_size or frame.size
    return tuple(frame.name for frame in frames), torch.Size(shape)
