"""Variable selection with spike-and-slab regressions, by the conventions of scikit-learn."""

from pyro_l0.selection.neural import NeuralFeatureSelector
from pyro_l0.selection.posterior import Draws, SelectionPosterior
from pyro_l0.selection.problem import Prior, Problem

__all__ = ["Draws", "NeuralFeatureSelector", "Prior", "Problem", "SelectionPosterior"]
