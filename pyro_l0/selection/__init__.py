"""Variable selection with spike-and-slab regressions, by the conventions of scikit-learn."""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError(
        "Expected scikit-learn, whose conventions pyro_l0.selection follows, but it is not installed; "
        "do: pip install scikit-learn tqdm"
    )

from pyro_l0.selection.credible_sets import credible_sets
from pyro_l0.selection.neural import NeuralFeatureSelector
from pyro_l0.selection.regressions import SpikeSlabClassifier, SpikeSlabPoissonRegressor, SpikeSlabRegressor
from pyro_l0.selection.responses import (
    SpikeSlabBinomialRegressor,
    SpikeSlabCox,
    SpikeSlabGLM,
    SpikeSlabMultiTaskRegressor,
    SpikeSlabNegativeBinomial,
    SpikeSlabOrdinal,
    SpikeSlabRobust,
)

__all__ = [
    "NeuralFeatureSelector",
    "SpikeSlabBinomialRegressor",
    "SpikeSlabClassifier",
    "SpikeSlabCox",
    "SpikeSlabGLM",
    "SpikeSlabMultiTaskRegressor",
    "SpikeSlabNegativeBinomial",
    "SpikeSlabOrdinal",
    "SpikeSlabPoissonRegressor",
    "SpikeSlabRegressor",
    "SpikeSlabRobust",
    "credible_sets",
]
