"""Random variables that can be exactly zero: gates for Pyro, from the distribution to a pruned network."""

from pyro_l0.distributions import GateDistribution, HardConcrete, RectifiedNormal

__all__ = ["GateDistribution", "HardConcrete", "RectifiedNormal"]
