"""Pictures of trainings, gates and posteriors with matplotlib (``pip install 'pyro-l0[plots]'``).

Every function takes arrays or tensors, draws into given axes or a new figure, and returns the axes; axes of another
type raise a TypeError. Colour-blind readers can tell the colours apart, and markers, lines and hatches survive a
greyscale print.
"""

from pyro_l0.plots.pictures import (
    figure_axes,
    plot_bars,
    plot_credible_sets,
    plot_curves,
    plot_density,
    plot_gates,
    plot_inclusion,
    save_figure,
    short_names,
)

__all__ = [
    "figure_axes",
    "plot_bars",
    "plot_credible_sets",
    "plot_curves",
    "plot_density",
    "plot_gates",
    "plot_inclusion",
    "save_figure",
    "short_names",
]
