"""How every picture looks: colours that colour-blind readers tell apart, and markers that survive greyscale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # an extra
    from matplotlib.figure import Figure, SubFigure

__all__ = ["COLOURS", "Array", "as_array", "check_axes", "figure_axes", "save_figure", "scale", "series", "short_names"]

Array = NDArray[np.float64]
# Okabe and Ito's palette; neighbours differ in lightness.
COLOURS = ("#0072B2", "#E69F00", "#000000", "#56B4E9", "#D55E00", "#CC79A7", "#009E73")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
_DOTS_PER_INCH = 110


def series(place: int) -> dict[str, Any]:
    """Colour, marker and line of the series with this number, as options of matplotlib's ``plot``."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "linestyle": _LINES[place % len(_LINES)],
        "markersize": 4.5,
    }


def as_array(values: ArrayLike) -> Array:
    """An array of numbers, or of a tensor on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values, dtype=float)


def figure_axes(rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """Make axes in a new figure with room for their labels.

    Args:
        rows: number of rows of axes.
        columns: number of columns of axes.
        options: further arguments of ``matplotlib.pyplot.subplots``, such as ``figsize`` in inches.

    Returns:
        One of matplotlib's axes, or an array of them.

    Example:
        >>> left, right = figure_axes(1, 2, figsize=(9, 3))
    """
    import matplotlib.pyplot as plt  # an extra

    return plt.subplots(rows, columns, layout="constrained", **options)[1]


def save_figure(drawn: Axes | Figure | SubFigure | Sequence[Axes], path: Path | str) -> None:
    """Write the figure of some axes to a file, and close it.

    Args:
        drawn: a figure, or the axes that a function of this module returned.
        path: the file; its ending chooses the format.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_figure(figure_axes(1, 2), f"{folder}/two.png")
    """
    import matplotlib.pyplot as plt  # an extra

    first: Any = np.ravel(np.asarray(drawn, dtype=object))[0]
    figure = first if hasattr(first, "savefig") else first.figure
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    plt.close(figure)


def check_axes(*axes: object) -> None:
    """Check what the caller gave as axes.

    Raises:
        TypeError: one is no axes of matplotlib.
    """
    for each in axes:
        if not hasattr(each, "plot"):
            raise TypeError(f"Expected axes of matplotlib, but got {each!r}.")


def scale(axes: Axes, x: Literal["linear", "log"] = "linear", y: Literal["linear", "log"] = "linear") -> None:
    """Set the scales; logarithmic ones have plain numbers at their ticks."""
    axes.set(xscale=x, yscale=y)
    for axis, wanted, limits in ((axes.xaxis, x, axes.get_xlim()), (axes.yaxis, y, axes.get_ylim())):
        if wanted == "log":
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_formatter(_between(limits[1] / limits[0]))


def _between(width: float) -> Callable[[float, float], str]:
    """Numbers at the ticks between powers of ten: within a decade there may be no such power, and all don't fit."""
    digits = "123456789" if width < 4 else "235" if width < 10 else ""
    return lambda value, _: f"{value:,g}" if f"{value:e}"[0] in digits else ""


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten names of sites by the parts that all share, so that they fit beside a picture.

    The last shared part stays if only a number would follow it.

    Args:
        names: names of sites, with dots between their parts.

    Returns:
        The names to show, one for each, and different if the given ones are.

    Example:
        >>> short_names(["net.layer.0.gate", "net.layer.1.gate"])
        ['layer.0', 'layer.1']
    """
    parts = [str(name).split(".") for name in names]
    if len(set(map(tuple, parts))) < 2:
        return [str(name) for name in names]
    shortest = min(map(len, parts))
    front = next((i for i in range(shortest) if len({part[i] for part in parts}) > 1), shortest - 1)
    if front and any(part[front].isdigit() for part in parts):
        front -= 1
    back = next((i for i in range(shortest - front) if len({part[-1 - i] for part in parts}) > 1), 0)
    return [".".join(part[front : len(part) - back]) for part in parts]
