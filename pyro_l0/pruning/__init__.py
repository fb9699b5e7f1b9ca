"""Pruning in one call: turns a network into a smaller one of the same class."""

from pyro_l0.pruning.phases import Training
from pyro_l0.pruning.prune import prune

__all__ = ["Training", "prune"]
