"""Objectives, guides and reparameterisation for models with gates."""

from pyro_l0.infer.control.sparsity_target import SparsityTarget
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.guides.auto_gate import AutoGate
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.posterior.check_fit import check_fit
from pyro_l0.infer.posterior.fit import fit
from pyro_l0.infer.posterior.mcmc import sample_posterior
from pyro_l0.infer.runs import factor

__all__ = [
    "L0_ELBO",
    "AutoGate",
    "AutoSpikeSlab",
    "SparsityTarget",
    "check_fit",
    "factor",
    "fit",
    "sample_posterior",
]
