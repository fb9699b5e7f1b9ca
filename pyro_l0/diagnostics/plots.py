"""Names that have moved to pyro_l0.plots."""

from pyro_l0.retired import retired_names

_NAMES = ("plot_calibration", "plot_credible_sets", "plot_gradients", "plot_inclusion")

__getattr__ = retired_names(__name__, {name: f"pyro_l0.plots.{name}" for name in _NAMES})
