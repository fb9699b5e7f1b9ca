"""Pruning in one call: a network in, a smaller one of the same class out."""

from pyro_l0.pruning.prune import prune
from pyro_l0.pruning.result import Pruned, PruningReport

__all__ = ["Pruned", "PruningReport", "prune"]
