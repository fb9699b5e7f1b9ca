"""Bayesian networks whose weights can be exactly zero, trained by the spike-and-slab ELBO (Louizos et al., Eq. 20)."""

from pyro_l0.bayes.network import BayesianLayer, SpikeSlabPrior, bayesian, kl, plain_network

__all__ = [
    "BayesianLayer",
    "SpikeSlabPrior",
    "bayesian",
    "kl",
    "plain_network",
]
