"""What training with gates does: bias and noise of their gradients."""

from pyro_l0.diagnostics.gradients import (
    GradientReport,
    exact_gradient,
    measure_gradient,
    pathwise_noise,
    plot_gradients,
)

__all__ = ["GradientReport", "exact_gradient", "measure_gradient", "pathwise_noise", "plot_gradients"]
