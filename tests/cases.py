"""The gate families that the shared tests run on: one line per family, at the end.

A family brings its class, its slow twin, representative parameters, extreme parameters and its
mirror image (the parameters of ``1 - z``). Every test that takes a ``family`` or a ``gate`` then
runs on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from pyro_l0.distributions import GateDistribution, HardConcrete, RectifiedNormal
from tests.reference import GateReference, HardConcreteReference, RectifiedNormalReference

__all__ = ["FAMILIES", "GATES", "Case", "Family", "build", "columns", "stack"]

Parameters = dict[str, float]


@dataclass(frozen=True)
class Family:
    """What the shared tests need to know about one gate family."""

    gate: type[GateDistribution]
    reference: type[GateReference]
    parameters: tuple[Parameters, ...]
    extremes: tuple[Parameters, ...]
    mirror: Callable[[Parameters], Parameters]


@dataclass(frozen=True)
class Case:
    """One family at one of its representative parameters."""

    family: Family
    parameters: Parameters

    def gate(self, dtype=torch.float64, batch_shape=()):
        """The library's gate."""
        return build(self.family, self.parameters, dtype, batch_shape)

    def reference(self):
        """Its slow twin."""
        return self.family.reference(**self.parameters)

    def __repr__(self):
        values = ",".join(f"{value:.3g}" for value in self.parameters.values())
        return f"{self.family.gate.__name__}({values})"


def build(family, parameters, dtype=torch.float64, batch_shape=()):
    """Gate of a family with every parameter a tensor of one dtype and shape."""
    tensors = {k: torch.full(batch_shape, v, dtype=dtype) for k, v in parameters.items()}
    return family.gate(**tensors)


def columns(sets, dtype=torch.float64, requires_grad=False):
    """Parameter sets turned into one tensor for each parameter."""
    return {name: torch.tensor([p[name] for p in sets], dtype=dtype, requires_grad=requires_grad) for name in sets[0]}


def stack(family, sets, dtype=torch.float64):
    """One gate whose batch holds all the given parameter sets."""
    return family.gate(**columns(sets, dtype))


def hard_concrete(log_alpha, temperature=2 / 3, gamma=-0.1, zeta=1.1):
    """Parameters of a hard concrete."""
    return dict(log_alpha=log_alpha, temperature=temperature, gamma=gamma, zeta=zeta)


def rectified_normal(loc, scale):
    """Parameters of a rectified normal."""
    return dict(loc=loc, scale=scale)


def mirror_hc(parameters):
    """1 - z is a hard concrete of the opposite location and the mirrored stretch."""
    gamma, zeta = 1 - parameters["zeta"], 1 - parameters["gamma"]
    return hard_concrete(-parameters["log_alpha"], parameters["temperature"], gamma, zeta)


def mirror_rn(parameters):
    """1 - z is a rectified normal around the mirrored location."""
    return rectified_normal(1 - parameters["loc"], parameters["scale"])


HC = (
    hard_concrete(0.0),
    hard_concrete(-2.0),
    hard_concrete(3.0, 0.3),
    hard_concrete(0.7, 1.6),
    hard_concrete(-0.5, 0.9, -0.2, 1.3),
    hard_concrete(1.0, 0.5, -0.01, 1.02),
)
HC_EXTREMES = tuple(
    hard_concrete(log_alpha, temperature)
    for log_alpha, temperature in product((-90.0, -30.0, 30.0, 90.0), (0.1, 2 / 3, 2.0))
)
RN = (
    rectified_normal(0.5, 0.5),
    rectified_normal(-0.3, 0.4),
    rectified_normal(1.2, 0.6),
    rectified_normal(0.4, 0.15),
    rectified_normal(0.2, 2.0),
)
RN_EXTREMES = tuple(rectified_normal(loc, scale) for loc, scale in product((-10.0, -2.0, 3.0, 11.0), (0.2, 1.0)))

FAMILIES = (
    Family(HardConcrete, HardConcreteReference, HC, HC_EXTREMES, mirror_hc),
    Family(RectifiedNormal, RectifiedNormalReference, RN, RN_EXTREMES, mirror_rn),
)
GATES = tuple(Case(family, parameters) for family in FAMILIES for parameters in family.parameters)
