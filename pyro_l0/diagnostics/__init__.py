"""What training with gates does, and posteriors as arviz takes them: gradients, InferenceData, pictures."""

from pyro_l0.diagnostics.doctor import diagnose
from pyro_l0.diagnostics.findings import Diagnosis, Finding, Unchecked
from pyro_l0.diagnostics.gradients import (
    GradientReport,
    exact_gradient,
    measure_gradient,
    pathwise_noise,
    plot_gradients,
)
from pyro_l0.diagnostics.inference_data import to_arviz
from pyro_l0.diagnostics.pictures import plot_calibration, plot_credible_sets, plot_inclusion

__all__ = [
    "Diagnosis",
    "Finding",
    "GradientReport",
    "Unchecked",
    "diagnose",
    "exact_gradient",
    "measure_gradient",
    "pathwise_noise",
    "plot_calibration",
    "plot_credible_sets",
    "plot_gradients",
    "plot_inclusion",
    "to_arviz",
]
