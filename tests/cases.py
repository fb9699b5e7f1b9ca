"""The gate families that the shared tests run on: one line per family, at the end.

A family brings its class, its slow twin, representative and extreme parameters. Every test that takes a ``family`` or a
``gate`` then runs on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from pyro_l0.distributions import (
    BernoulliGate,
    ExponentialGate,
    ExponentialUniformGate,
    HardConcrete,
    HardKumaraswamy,
    PowerLawGate,
    RectifiedNormal,
)
from pyro_l0.distributions.gate import GateDistribution
from tests.reference import (
    BernoulliReference,
    ExponentialReference,
    ExponentialUniformReference,
    GateReference,
    HardConcreteReference,
    HardKumaraswamyReference,
    PowerLawReference,
    RectifiedNormalReference,
)

__all__ = [
    *("ATOMIC", "FAMILIES", "GATES", "SMOOTH", "STATISTICS"),
    *("Case", "Family", "build", "columns", "double", "first_by_default", "new_compiler", "stack"),
]

Parameters = dict[str, float]
# What a gate computes of itself: with derivatives everywhere, and in all.
SMOOTH = ("mean", "variance", "log_prob_zero", "log_prob_one", "log_interior_prob", "log_active_prob", "active_prob")
STATISTICS = (*SMOOTH, "median", "test_gate")


@dataclass(frozen=True)
class Family:
    """What the shared tests need to know about one gate family.

    ``random`` makes moderate parameters of two numbers in [0, 1] and stretch limits. ``interior`` tells that there is a
    density and a pathwise draw between the atoms.
    """

    gate: type[GateDistribution]
    reference: type[GateReference]
    parameters: tuple[Parameters, ...]
    extremes: tuple[Parameters, ...]
    random: Callable[[float, float, tuple[float, float]], Parameters]
    interior: bool = True


@dataclass(frozen=True)
class Case:
    """One family at one of its representative parameters."""

    family: Family
    parameters: Parameters

    def gate(self, dtype=torch.float64, batch_shape=()):
        return build(self.family, self.parameters, dtype, batch_shape)

    def reference(self):
        return self.family.reference(**self.parameters)

    def __repr__(self):
        values = ",".join(f"{value:.3g}" for value in self.parameters.values())
        return f"{self.family.gate.__name__}({values})"


def double(value, requires_grad=False):
    """A float64 scalar."""
    return torch.tensor(value, dtype=torch.float64, requires_grad=requires_grad)


# Which of a gate's expressions an older compiler takes differs from version to version.
new_compiler = pytest.mark.skipif(torch.__version__ < (2, 12), reason="needs a newer torch.compile")


def first_by_default(values):
    """Values to parametrise a test over, of which all but the first are left to the slow tests."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


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
    return dict(log_alpha=log_alpha, temperature=temperature, gamma=gamma, zeta=zeta)


def rectified_normal(loc, scale):
    return dict(loc=loc, scale=scale)


def hard_kumaraswamy(concentration1, concentration0, gamma=-0.1, zeta=1.1):
    """Parameters of a hard Kumaraswamy gate."""
    return dict(concentration1=concentration1, concentration0=concentration0, gamma=gamma, zeta=zeta)


def mixture(logits, beta, gamma=-0.1, zeta=1.1):
    return dict(logits=logits, beta=beta, gamma=gamma, zeta=zeta)


def mixture_with_uniform(logits, beta, epsilon, gamma=-0.1, zeta=1.1):
    """Parameters of a mixture gate with a uniform share."""
    return dict(logits=logits, beta=beta, epsilon=epsilon, gamma=gamma, zeta=zeta)


def bernoulli(logits):
    return dict(logits=logits)


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

HK = (
    hard_kumaraswamy(0.5, 0.5),
    hard_kumaraswamy(0.3, 1.5),
    hard_kumaraswamy(2.0, 3.0),
    hard_kumaraswamy(1.2, 0.4, -0.2, 1.3),
    hard_kumaraswamy(0.7, 0.9, -0.01, 1.02),
)
HK_EXTREMES = tuple(hard_kumaraswamy(a, b) for a, b in product((0.01, 1.0, 30.0), (0.01, 1.0, 30.0)))
EXP = (
    mixture(0.0, 6.0),
    mixture(-1.5, 6.0),
    mixture(2.0, 12.0),
    mixture(0.5, 10.0, -0.2, 1.3),
    mixture(-0.3, 3.0, -0.01, 1.02),
)
EXP_EXTREMES = tuple(mixture(logits, beta) for logits, beta in product((-90.0, -30.0, 30.0, 90.0), (0.5, 6.0, 40.0)))
EXP_UNI = (
    mixture_with_uniform(0.0, 8.0, 0.1),
    mixture_with_uniform(-2.0, 25.0, 0.1),
    mixture_with_uniform(1.0, 25.0, 0.3),
    mixture_with_uniform(0.5, 40.0, 0.02, -0.2, 1.3),
    mixture_with_uniform(-0.3, 6.0, 0.5, -0.01, 1.02),
)
EXP_UNI_EXTREMES = tuple(
    mixture_with_uniform(logits, beta, epsilon)
    for logits, beta, epsilon in product((-90.0, -30.0, 30.0, 90.0), (6.0, 40.0), (0.001, 0.5))
)
POWER = (
    mixture(0.0, 2.0),
    mixture(-1.0, 5.0),
    mixture(2.0, 40.0),
    mixture(0.5, 1.4, -0.2, 1.3),
    mixture(-0.3, 10.0, -0.01, 1.02),
)
POWER_EXTREMES = tuple(mixture(logits, beta) for logits, beta in product((-90.0, -30.0, 30.0, 90.0), (1.1, 6.0, 40.0)))


BERNOULLI = tuple(bernoulli(logits) for logits in (0.2, -2.0, 1.5, 4.0))
BERNOULLI_EXTREMES = tuple(bernoulli(logits) for logits in (-90.0, -30.0, 30.0, 90.0))


def random_bernoulli(x, *_):
    return bernoulli(16 * x - 8)


def random_hc(x, y, stretch):
    return hard_concrete(16 * x - 8, 0.1 * 20**y, *stretch)


def random_rn(x, y, _):
    """A rectified normal, which has no stretch."""
    return rectified_normal(3 * x - 1, 0.15 * 10**y)


def random_hk(x, y, stretch):
    return hard_kumaraswamy(0.2 * 30**x, 0.2 * 30**y, *stretch)


def random_mixture(x, y, stretch):
    return mixture(16 * x - 8, 1.1 * 35**y, *stretch)


def random_mixture_with_uniform(x, y, stretch):
    """A mixture gate with a uniform share."""
    return mixture_with_uniform(16 * x - 8, 1.1 * 35**y, 0.02 + 0.5 * x * y, *stretch)


FAMILIES = (
    Family(HardConcrete, HardConcreteReference, HC, HC_EXTREMES, random_hc),
    Family(RectifiedNormal, RectifiedNormalReference, RN, RN_EXTREMES, random_rn),
    Family(HardKumaraswamy, HardKumaraswamyReference, HK, HK_EXTREMES, random_hk),
    Family(ExponentialGate, ExponentialReference, EXP, EXP_EXTREMES, random_mixture),
    Family(ExponentialUniformGate, ExponentialUniformReference, EXP_UNI, EXP_UNI_EXTREMES, random_mixture_with_uniform),
    Family(PowerLawGate, PowerLawReference, POWER, POWER_EXTREMES, random_mixture),
)
# Atoms alone: what the contract says of densities and pathwise draws does not concern them.
ATOMIC = (Family(BernoulliGate, BernoulliReference, BERNOULLI, BERNOULLI_EXTREMES, random_bernoulli, interior=False),)
GATES = tuple(Case(family, parameters) for family in FAMILIES for parameters in family.parameters)
