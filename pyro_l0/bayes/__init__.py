"""Bayesian networks whose weights can be exactly zero: the spike-and-slab bound (Eq. 20) for any network."""

from pyro_l0.bayes.bits import Precision, bit_precision, load_quantised, quantise, save_quantised
from pyro_l0.bayes.layer import BayesianLayer, SpikeSlabPrior
from pyro_l0.bayes.network import bayesian, kl, plain_network
from pyro_l0.bayes.paths import InputSkipMLP, OpenUnits, WeightGates, active_weights
from pyro_l0.bayes.scores import Reliability, Scores, auroc, predictive, reliability, scores

__all__ = [
    "BayesianLayer",
    "InputSkipMLP",
    "OpenUnits",
    "Precision",
    "Reliability",
    "Scores",
    "SpikeSlabPrior",
    "WeightGates",
    "active_weights",
    "auroc",
    "bayesian",
    "bit_precision",
    "kl",
    "load_quantised",
    "plain_network",
    "predictive",
    "quantise",
    "reliability",
    "save_quantised",
    "scores",
]
