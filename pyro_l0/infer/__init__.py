"""Objectives, guides and reparameterisation for models with gates."""

from pyro_l0.infer.auto_gate import AutoGate
from pyro_l0.infer.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.blocks import Block
from pyro_l0.infer.elbo import L0_ELBO
from pyro_l0.infer.estimators import Estimators
from pyro_l0.infer.evidence import Evidence
from pyro_l0.infer.factor import factor
from pyro_l0.infer.fit_check import FitCheck, check_fit
from pyro_l0.infer.fitting import Fit, fit
from pyro_l0.infer.guide import ActiveRate, GateGuide
from pyro_l0.infer.mcmc import PosteriorSamples, sample_posterior
from pyro_l0.infer.refine import RefinedPosterior
from pyro_l0.infer.reparam import RectifyReparam, complete_samples
from pyro_l0.infer.sparsity_target import SparsityTarget
from pyro_l0.infer.summaries import Summary
from pyro_l0.infer.target_report import TargetReport
from pyro_l0.infer.terms import OBJECTIVES, Term

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
