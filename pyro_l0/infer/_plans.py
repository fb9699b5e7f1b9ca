"""What a mean-field guide knows of each site after it has seen the model, and the parameters that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Transform, transform_to

from pyro_l0.distributions.gate import GateDistribution, concatenate
from pyro_l0.fast.record import Site

__all__ = [
    "Parameters",
    "Plan",
    "expands",
    "find_groups",
    "first_parameters",
    "full_shape",
    "rows",
    "site_key",
    "take_over",
]

Parameters = Any  # a ParameterDict, or a mapping of subsampled tensors


class Plan(NamedTuple):
    """What the guide knows of one site after it has seen the model."""

    event_dim: int
    plates: tuple[str, ...]
    template: GateDistribution | None
    transform: Transform | None  # of a slab


def find_groups(plans: Mapping[str, Plan]) -> list[list[str]]:
    """Put the gates together that can be drawn jointly."""
    groups: list[list[str]] = []
    templates = {name: plan.template for name, plan in plans.items() if plan.template is not None}
    for name, template in templates.items():
        for group in groups:
            if concatenate([templates[group[0]], template]) is not None:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def first_parameters(template: GateDistribution, shape: torch.Size, jitter: float) -> dict[str, nn.Parameter]:
    """The learned parameters of a site's gates on the real line, with normal noise on the location."""
    learned = {}
    for i, (key, constraint) in enumerate(template.learned.items()):
        unconstrained = transform_to(constraint).inv(getattr(template, key)).expand(shape).clone()
        if i == 0 and jitter > 0:
            unconstrained += jitter * torch.randn_like(unconstrained)
        learned[key] = nn.Parameter(unconstrained)
    return learned


def take_over(modules: nn.ModuleDict, made: Mapping[str, dict[str, nn.Parameter]]) -> None:
    """Put parameters into a guide's modules; those of a state that was loaded before keep their values.

    Raises:
        ValueError: what was loaded has other names or shapes.
    """
    held: Any = modules
    loaded = {f"{key}.{name}": tuple(x.shape) for key, values in held.items() for name, x in values.items()}
    expected = {f"{key}.{name}": tuple(x.shape) for key, values in made.items() for name, x in values.items()}
    if loaded and loaded != expected:
        raise ValueError(
            f"Expected the state that was loaded before the first call to have the parameters {expected}, "
            f"but got {loaded}."
        )
    for key, learned in made.items():
        if not loaded:
            held[key] = nn.ParameterDict(learned)
        for name, parameter in learned.items() if loaded else ():
            held[key][name].data = held[key][name].data.to(parameter)  # where the model is


@lru_cache(maxsize=1024)
def site_key(name: str) -> str:
    """A site's name as a key of a module dict, which may hold no dots and no names of its own attributes."""
    key = name.replace("/", "//").replace(".", "/")
    return f"/{key}" if hasattr(_NO_SITES, key) else key


_NO_SITES = nn.ModuleDict()


def expands(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a shape broadcasts to another."""
    try:
        return bool(torch.broadcast_shapes(shape, to) == to)
    except RuntimeError:
        return False


def full_shape(site: Site) -> torch.Size:
    """Shape of a site's value with every subsampled plate at its full size."""
    shape = list(site["value"].shape)
    for frame in site["cond_indep_stack"]:
        if frame.vectorized:
            shape[frame.dim - site["fn"].event_dim] = frame.full_size or frame.size
    return torch.Size(shape)


def rows(size: int, index: Tensor, x: Tensor) -> Tensor:
    """Some entries of a parameter that has one for each of ``size`` gates; other parameters as they are."""
    return x[index.to(x.device)] if x.shape == (size,) else x
