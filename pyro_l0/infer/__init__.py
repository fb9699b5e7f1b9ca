"""Objectives, guides and reparameterisation for models with gates."""

from pyro_l0.infer.elbo.elbo import L0_ELBO
from pyro_l0.infer.factor import factor
from pyro_l0.infer.guides.auto_gate import AutoGate
from pyro_l0.infer.guides.auto_spike_slab import AutoSpikeSlab
from pyro_l0.infer.posterior.check_fit import check_fit
from pyro_l0.infer.posterior.fit import fit
from pyro_l0.infer.posterior.mcmc import sample_posterior
from pyro_l0.infer.target.sparsity_target import SparsityTarget
from pyro_l0.retired import retired_names

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

__getattr__ = retired_names(
    __name__,
    {
        "Block": "pyro_l0.infer.elbo.blocks.Block",
        "Estimators": "pyro_l0.infer.elbo.estimators.Estimators",
        "OBJECTIVES": "pyro_l0.infer.elbo.terms.OBJECTIVES",
        "Term": "pyro_l0.infer.elbo.terms.Term",
        "ActiveRate": "pyro_l0.infer.guides.protocol.ActiveRate",
        "GateGuide": "pyro_l0.infer.guides.protocol.GateGuide",
        "FitCheck": "pyro_l0.infer.posterior.check_fit.FitCheck",
        "Evidence": "pyro_l0.infer.posterior.evidence.Evidence",
        "Fit": "pyro_l0.infer.posterior.fit.Fit",
        "PosteriorSamples": "pyro_l0.infer.posterior.mcmc.PosteriorSamples",
        "RefinedPosterior": "pyro_l0.infer.posterior.refine.RefinedPosterior",
        "Summary": "pyro_l0.infer.posterior.summaries.Summary",
        "RectifyReparam": "pyro_l0.infer.reparam.RectifyReparam",
        "complete_samples": "pyro_l0.infer.reparam.complete_samples",
        "TargetReport": "pyro_l0.infer.target.report.TargetReport",
    },
)
