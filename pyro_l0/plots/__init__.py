"""Pictures of trainings, gates, posteriors and gradients with matplotlib (``pip install 'pyro-l0[plots]'``).

Every function takes arrays or tensors, draws into given axes or a new figure, and returns the axes; axes of another
type raise a TypeError. Colour-blind readers can tell the colours apart, and markers, lines and hatches survive a
greyscale print.
"""

from pyro_l0.plots.curves import plot_bars, plot_curves, plot_frontier, plot_training
from pyro_l0.plots.gates import plot_density, plot_edges, plot_gates
from pyro_l0.plots.gradients import plot_estimates, plot_gradients
from pyro_l0.plots.images import plot_images
from pyro_l0.plots.posteriors import plot_calibration, plot_credible_sets, plot_inclusion
from pyro_l0.plots.style import figure_axes, save_figure, short_names

__all__ = [
    "figure_axes",
    "plot_bars",
    "plot_calibration",
    "plot_credible_sets",
    "plot_curves",
    "plot_density",
    "plot_edges",
    "plot_estimates",
    "plot_frontier",
    "plot_gates",
    "plot_gradients",
    "plot_images",
    "plot_inclusion",
    "plot_training",
    "save_figure",
    "short_names",
]
