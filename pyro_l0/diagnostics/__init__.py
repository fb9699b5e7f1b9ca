"""Checks of trainings with gates, bias and variance of their gradients, and posteriors for arviz."""

from pyro_l0.diagnostics.doctor import Diagnosis as Diagnosis
from pyro_l0.diagnostics.doctor import Finding as Finding
from pyro_l0.diagnostics.doctor import Unchecked as Unchecked
from pyro_l0.diagnostics.doctor import diagnose
from pyro_l0.diagnostics.gradients import GradientReport as GradientReport
from pyro_l0.diagnostics.gradients import measure_gradient as measure_gradient
from pyro_l0.diagnostics.inference_data import to_arviz

# What a star brings; what is imported "as" itself is public, too.
__all__ = [
    "diagnose",
    "to_arviz",
]
