"""Objectives, guides and reparameterisation for models with gates."""

from pyro_l0.infer.control.sparsity_target import ActiveTarget as ActiveTarget
from pyro_l0.infer.control.sparsity_target import SparsityTarget
from pyro_l0.infer.control.sparsity_target import TargetReport as TargetReport
from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.elbo.estimators import Estimators as Estimators
from pyro_l0.infer.elbo.terms import OBJECTIVES as OBJECTIVES
from pyro_l0.infer.elbo.terms import SiteGroup as SiteGroup
from pyro_l0.infer.elbo.terms import Term as Term
from pyro_l0.infer.guides.auto_gate import AutoGate
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.guides.parameters import GateGuide as GateGuide
from pyro_l0.infer.guides.refine import RefinedPosterior as RefinedPosterior
from pyro_l0.infer.guides.summaries import Summary as Summary
from pyro_l0.infer.posterior.check_fit import Evidence as Evidence
from pyro_l0.infer.posterior.check_fit import FitCheck as FitCheck
from pyro_l0.infer.posterior.check_fit import SiteCheck as SiteCheck
from pyro_l0.infer.posterior.check_fit import check_fit
from pyro_l0.infer.posterior.fit import Fit as Fit
from pyro_l0.infer.posterior.fit import fit
from pyro_l0.infer.posterior.mcmc import PosteriorSamples as PosteriorSamples
from pyro_l0.infer.posterior.mcmc import sample_posterior
from pyro_l0.infer.reparam import RectifyReparam as RectifyReparam
from pyro_l0.infer.reparam import complete_samples as complete_samples
from pyro_l0.infer.runs import factor

# What a star brings; what is imported "as" itself is public, too.
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
