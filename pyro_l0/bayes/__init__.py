"""Bayesian networks whose weights can be exactly zero: the spike-and-slab bound (Eq. 20) for any network."""

from pyro_l0.bayes.network import BayesianLayer, SpikeSlabPrior, bayesian, kl, plain_network
from pyro_l0.bayes.paths import OpenUnits, WeightGates, active_weights

__all__ = [
    "BayesianLayer",
    "OpenUnits",
    "SpikeSlabPrior",
    "WeightGates",
    "active_weights",
    "bayesian",
    "kl",
    "plain_network",
]
