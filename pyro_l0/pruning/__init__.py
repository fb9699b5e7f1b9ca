"""Pruning in one call: turns a network into a smaller one of the same class."""

from pyro_l0.pruning.prune import prune
from pyro_l0.retired import retired_names

__all__ = [
    "prune",
]

__getattr__ = retired_names(
    __name__,
    {
        "Pruned": "pyro_l0.pruning.result.Pruned",
        "PruningReport": "pyro_l0.pruning.result.PruningReport",
    },
)
