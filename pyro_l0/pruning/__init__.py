"""Pruning in one call: a network in, a smaller one of the same class out."""

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
