"""Variable selection with spike-and-slab regressions, by the conventions of scikit-learn."""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError(
        "Expected scikit-learn, whose conventions pyro_l0.selection follows, but it is not installed; "
        "do: pip install scikit-learn tqdm"
    )

from pyro_l0.selection.credible_sets import CredibleSet as CredibleSet
from pyro_l0.selection.credible_sets import credible_sets
from pyro_l0.selection.families import Family as Family
from pyro_l0.selection.methods.enumeration import exact_posterior as exact_posterior
from pyro_l0.selection.neural import NeuralFeatureSelector
from pyro_l0.selection.problem import Draws as Draws
from pyro_l0.selection.problem import Prior as Prior
from pyro_l0.selection.problem import Problem as Problem
from pyro_l0.selection.problem import SelectionPosterior as SelectionPosterior
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

# What a star brings; what is imported "as" itself is public, too.
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
