"""Exact chains whose gates are closed at first."""

import torch

from pyro_l0.selection.methods.exact_chains import AugmentedChains, JumpingChains
from tests.maths.spike_and_slab import seeded


def closed(kind, problem, size=64, seed=1):
    """Some chains of a kind, at the slab scale that is known, or at 1."""
    z = torch.zeros(size, problem.gates, dtype=torch.bool)
    log_slab = torch.full((size,), problem.prior.slab_scale or 1.0, dtype=torch.float64).log()
    if kind is AugmentedChains:
        return AugmentedChains(problem, z, log_slab, seeded(seed))
    beta = torch.zeros(size, (problem.x.shape[1] + problem.intercept) * problem.outputs, dtype=torch.float64)
    often = torch.ones(problem.gates, dtype=torch.float64)
    return JumpingChains(problem, z, log_slab, beta, often, seeded(seed))
