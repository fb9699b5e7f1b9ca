"""Pruning in one call: turns a network into a smaller one of the same class."""

from pyro_l0.pruning.latency import Latency as Latency
from pyro_l0.pruning.phases import Distillation as Distillation
from pyro_l0.pruning.phases import Training
from pyro_l0.pruning.prune import prune
from pyro_l0.pruning.result import Pruned as Pruned
from pyro_l0.pruning.result import PruningReport as PruningReport

# What a star brings; what is imported "as" itself is public, too.
__all__ = ["Training", "prune"]
