"""Random variables that can be exactly zero: gates for Pyro, from the distribution to a pruned network."""

import importlib
from typing import TYPE_CHECKING

from pyro_l0.distributions import (
    BernoulliGate,
    ExponentialGate,
    ExponentialUniformGate,
    HardConcrete,
    HardKumaraswamy,
    PowerLawGate,
    RectifiedNormal,
)

if TYPE_CHECKING:
    from pyro_l0 import bayes as bayes
    from pyro_l0 import callbacks as callbacks
    from pyro_l0 import compaction as compaction
    from pyro_l0 import diagnostics as diagnostics
    from pyro_l0 import fast as fast
    from pyro_l0 import infer as infer
    from pyro_l0 import nn as nn
    from pyro_l0 import plots as plots
    from pyro_l0 import pruning as pruning
    from pyro_l0 import selection as selection
    from pyro_l0 import training as training
    from pyro_l0.diagnostics import diagnose as diagnose
    from pyro_l0.pruning import prune as prune

__version__ = "0.1.0"

__all__ = [
    "BernoulliGate",
    "ExponentialGate",
    "ExponentialUniformGate",
    "HardConcrete",
    "HardKumaraswamy",
    "PowerLawGate",
    "RectifiedNormal",
]

# Parts that are imported when they are first used, so that ``import pyro_l0`` stays quick. They are not in ``__all__``,
# because a star would put this ``nn`` in the place of torch's.
_PARTS = (
    "bayes",
    "callbacks",
    "compaction",
    "diagnostics",
    "fast",
    "infer",
    "nn",
    "plots",
    "pruning",
    "selection",
    "training",
)
# Functions at the top that bring such a part along.
_FUNCTIONS = {"diagnose": "diagnostics", "prune": "pruning"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _PARTS:
            return importlib.import_module(f"{__name__}.{name}")
        if name in _FUNCTIONS:
            return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_PARTS, *_FUNCTIONS})
