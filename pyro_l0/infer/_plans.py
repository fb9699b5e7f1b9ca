"""What a mean-field guide knows of each site after it has seen the model, and the parameters that it starts from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions import constraints, transform_to

from pyro_l0.distributions.gate import GateDistribution
from pyro_l0.fast.record import Site


@dataclass(frozen=True)
class Plan(ABC):
    """The event dimensions and the plates of a site, and how its parameters make its posterior."""

    event_dim: int
    plates: tuple[str, ...]

    @abstractmethod
    def posterior(self, parameters: Mapping[str, Tensor]) -> TorchDistributionMixin:
        """The posterior without event dimensions."""

    def in_events(self, posterior: TorchDistributionMixin) -> TorchDistributionMixin:
        """The posterior as the site has it."""
        return posterior.to_event(self.event_dim) if self.event_dim else posterior


@dataclass(frozen=True)
class GatePlan(Plan):
    """A site of gates. The template, of shape ``()``, has the parameters that are not learned."""

    template: GateDistribution

    def posterior(self, parameters: Mapping[str, Tensor]) -> GateDistribution:
        values = {
            key: parameters[key] if constraint is constraints.real else transform_to(constraint)(parameters[key])
            for key, constraint in self.template.learned.items()
        }
        return self.template.with_learned(**values)

    def cut(self, size: int, index: Tensor) -> GatePlan:
        """The plan of some of ``size`` gates."""
        template = self.template.apply_to_tensors(lambda x: x[index.to(x.device)] if x.shape == (size,) else x)
        return replace(self, template=template)


def plates_of(site: Site) -> tuple[str, ...]:
    """Names of the plates that a site has dimensions for."""
    return tuple(frame.name for frame in site["cond_indep_stack"] if frame.vectorized)


def full_shape(site: Site) -> torch.Size:
    """Shape of a site's value with every subsampled plate at its full size."""
    shape = list(site["value"].shape)
    for frame in site["cond_indep_stack"]:
        if frame.vectorized:
            shape[frame.dim - site["fn"].event_dim] = frame.full_size or frame.size
    return torch.Size(shape)


def expands(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a shape broadcasts to another."""
    try:
        return bool(torch.broadcast_shapes(shape, to) == to)
    except RuntimeError:
        return False


def unconstrained(gate: GateDistribution) -> dict[str, Tensor]:
    """The learned parameters of a gate on the real line."""
    return {key: transform_to(constraint).inv(getattr(gate, key)) for key, constraint in gate.learned.items()}


def first_parameters(template: GateDistribution, shape: torch.Size, jitter: float) -> dict[str, nn.Parameter]:
    """The learned parameters of a site's gates, with normal noise on the location."""
    learned = {key: value.expand(shape).clone() for key, value in unconstrained(template).items()}
    if jitter > 0:
        location = next(iter(learned.values()))
        location += jitter * torch.randn_like(location)
    return {key: nn.Parameter(value) for key, value in learned.items()}


def take_over(modules: nn.ModuleDict, made: Mapping[str, dict[str, nn.Parameter]]) -> None:
    """Put parameters into a guide's modules; those of a state that was loaded before keep their values.

    Raises:
        ValueError: what was loaded has other names or shapes.
    """
    new: dict[str, nn.Module] = {key: nn.ParameterDict(learned) for key, learned in made.items()}
    loaded, expected = dict(modules.named_parameters()), dict(nn.ModuleDict(new).named_parameters())
    if not loaded:
        modules.update(new)
    elif _shapes(loaded) != _shapes(expected):
        raise ValueError(
            f"Expected the state that was loaded before the first call to have the parameters {_shapes(expected)}, "
            f"but got {_shapes(loaded)}."
        )
    for name, parameter in loaded.items():
        parameter.data = parameter.data.to(expected[name])  # where the model is


def _shapes(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in parameters.items()}


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own dict of its parameters, whose access costs far less per step than the module's."""
    parameters: dict[str, nn.Parameter] = vars(module)["_parameters"]
    return parameters


@lru_cache(maxsize=1024)
def site_key(name: str) -> str:
    """A site's name as a key of a module dict, which may hold no dots and no names of its own attributes."""
    key = name.replace("/", "//").replace(".", "/")
    return f"/{key}" if hasattr(_NO_SITES, key) else key


_NO_SITES = nn.ModuleDict()
