"""Objectives, guides and reparameterisation for models with gates."""

from pyro_l0.infer.elbo.blocks import Block
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.elbo.estimators import Estimators
from pyro_l0.infer.elbo.terms import OBJECTIVES, Term
from pyro_l0.infer.factor import factor
from pyro_l0.infer.guides.auto_gate import AutoGate
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.guides.protocol import ActiveRate, GateGuide
from pyro_l0.infer.posterior.check_fit import FitCheck, check_fit
from pyro_l0.infer.posterior.evidence import Evidence
from pyro_l0.infer.posterior.fit import Fit, fit
from pyro_l0.infer.posterior.mcmc import PosteriorSamples, sample_posterior
from pyro_l0.infer.posterior.refine import RefinedPosterior
from pyro_l0.infer.posterior.summaries import Summary
from pyro_l0.infer.reparam import RectifyReparam, complete_samples
from pyro_l0.infer.target.report import TargetReport
from pyro_l0.infer.target.sparsity_target import SparsityTarget

__all__ = [
    "L0_ELBO",
    "OBJECTIVES",
    "ActiveRate",
    "AutoGate",
    "AutoSpikeSlab",
    "Block",
    "Estimators",
    "Evidence",
    "Fit",
    "FitCheck",
    "GateGuide",
    "PosteriorSamples",
    "RectifyReparam",
    "RefinedPosterior",
    "SparsityTarget",
    "Summary",
    "TargetReport",
    "Term",
    "check_fit",
    "complete_samples",
    "factor",
    "fit",
    "sample_posterior",
]
