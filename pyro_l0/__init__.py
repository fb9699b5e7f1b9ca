"""Random variables that can be exactly zero: gates for Pyro, from the distribution to a pruned network."""

from pyro_l0.distributions import (
    BernoulliGate,
    ExponentialGate,
    ExponentialUniformGate,
    GateDistribution,
    HardConcrete,
    HardKumaraswamy,
    PowerLawGate,
    RectifiedNormal,
)

__all__ = [
    "BernoulliGate",
    "ExponentialGate",
    "ExponentialUniformGate",
    "GateDistribution",
    "HardConcrete",
    "HardKumaraswamy",
    "PowerLawGate",
    "RectifiedNormal",
]
