"""Checks of trainings with gates, bias and variance of their gradients, and posteriors for arviz."""

from pyro_l0.diagnostics.doctor import diagnose
from pyro_l0.diagnostics.inference_data import to_arviz

__all__ = [
    "diagnose",
    "to_arviz",
]
