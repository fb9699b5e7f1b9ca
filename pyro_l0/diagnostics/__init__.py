"""Checks of trainings with gates, bias and variance of their gradients, and posteriors for arviz."""

from pyro_l0.diagnostics.doctor import diagnose
from pyro_l0.diagnostics.inference_data import to_arviz
from pyro_l0.retired import retired_names

__all__ = [
    "diagnose",
    "to_arviz",
]

__getattr__ = retired_names(
    __name__,
    {
        "Diagnosis": "pyro_l0.diagnostics.findings.Diagnosis",
        "Finding": "pyro_l0.diagnostics.findings.Finding",
        "Unchecked": "pyro_l0.diagnostics.findings.Unchecked",
        "GradientReport": "pyro_l0.diagnostics.gradients.GradientReport",
        "exact_gradient": "pyro_l0.diagnostics.gradients.exact_gradient",
        "measure_gradient": "pyro_l0.diagnostics.gradients.measure_gradient",
        "pathwise_noise": "pyro_l0.diagnostics.gradients.pathwise_noise",
        "plot_gradients": "pyro_l0.plots.plot_gradients",
        "plot_calibration": "pyro_l0.plots.plot_calibration",
        "plot_credible_sets": "pyro_l0.plots.plot_credible_sets",
        "plot_inclusion": "pyro_l0.plots.plot_inclusion",
    },
)
