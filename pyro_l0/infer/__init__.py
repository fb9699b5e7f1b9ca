"""Objectives, guides and reparameterisation for models with gates."""

from pyro_l0.infer.autoguide import ActiveRate, AutoGate
from pyro_l0.infer.constraint import SparsityTarget
from pyro_l0.infer.elbo import L0_ELBO
from pyro_l0.infer.estimators import Estimators
from pyro_l0.infer.factor import factor
from pyro_l0.infer.reparam import RectifyReparam, complete_samples
from pyro_l0.infer.spike_slab import AutoSpikeSlab

__all__ = [
    "L0_ELBO",
    "ActiveRate",
    "AutoGate",
    "AutoSpikeSlab",
    "Estimators",
    "RectifyReparam",
    "SparsityTarget",
    "complete_samples",
    "factor",
]
