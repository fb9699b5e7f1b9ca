"""An objective's coefficients, which are numbers, tensors or both by gate site: checks, and values by site."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

from pyro_l0.expect import expect
from pyro_l0.infer.elbo.estimators import Estimators
from pyro_l0.infer.slabs import GateSite, fits

NAMES = ("lam", "group_size", "weight_decay")
Coefficient = float | Tensor | Mapping[str, float | Tensor]
BySite = float | Tensor | dict[str, float | Tensor]


class Options(Protocol):
    """What groups of sites and terms read of an objective; :class:`~pyro_l0.infer.L0_ELBO` has it."""

    lam: BySite
    group_size: BySite
    weight_decay: BySite
    square_norm: dict[str, Callable[[], Tensor]]
    slab: dict[str, GateSite]
    estimator: Estimators | None
    step: int
    at_draws: set[str]


def as_dict(value: Coefficient) -> BySite:
    """A coefficient, whose mapping becomes a dict: isinstance is slow for abstract mappings."""
    return dict(value) if isinstance(value, Mapping) else value


def by_site(value: BySite, name: str, default: float = 0.0) -> float | Tensor:
    """A coefficient at a site: the default where a dict has none for it, else the one for all."""
    return value.get(name, default) if isinstance(value, dict) else value


def is_zero(value: float | Tensor) -> bool:
    """Whether a coefficient is known to be zero without reading a device."""
    return isinstance(value, float | int) and value == 0


def check_numbers(kl_scale: float | Callable[[int], float], **coefficients: Coefficient) -> None:
    """Refuse coefficients that are negative or not finite."""
    numbers = coefficients if callable(kl_scale) else {**coefficients, "kl_scale": kl_scale}
    for name, value in numbers.items():
        for key, entry in value.items() if isinstance(value, Mapping) else [("", value)]:
            check_number(f"{name}[{key!r}]" if key else name, entry)


def check_number(where: str, value: float | Tensor) -> None:
    """Refuse a coefficient that is negative or not finite."""
    expect(Real | Tensor, "a number or a tensor", **{where: value})
    x = torch.as_tensor(value)
    if not torch.all((x >= 0) & (x < math.inf)):
        raise ValueError(f"Expected {where} to be finite and not negative, but got {value}.")


def check_shapes(options: Options, name: str, gates: Tensor) -> None:
    """Refuse coefficients that do not broadcast to the gates' shape."""
    for option in NAMES:
        value = by_site(getattr(options, option), name)
        if isinstance(value, Tensor) and not fits(value.shape, gates.shape):
            raise ValueError(
                f"Expected {option} to broadcast against gate site {name!r} of shape {tuple(gates.shape)}, but got "
                f"shape {tuple(value.shape)}; give a dict by site if it is meant for another one."
            )


def check_names(options: Options, gates: Collection[str]) -> None:
    """Refuse coefficients for sites that are not gates."""
    for option in (*NAMES, "square_norm"):
        value = getattr(options, option)
        unknown = [name for name in value if name not in gates] if isinstance(value, dict) else []
        if unknown:
            got = ", ".join(map(repr, unknown))
            hint = "; call the guide before NetworkCost, which then has these names" if option == "group_size" else ""
            raise ValueError(f"Expected {option} by gate site, one of {sorted(gates)}, but got {got}{hint}.")
