"""Figures with curves or bars, which most examples draw, and their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from numpy.typing import ArrayLike

from pyro_l0.plots import COLOURS, Array, as_array, series

__all__ = ["figure_axes", "plot_bars", "plot_curves", "save_figure", "scale"]

_DOTS_PER_INCH = 110
_HATCHES = ("", "///", "...", "xxx", "\\\\\\")


def figure_axes(rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """Axes in a new figure with space for their labels; options are those of ``subplots``, such as ``figsize``."""
    return plt.subplots(rows, columns, layout="constrained", **options)[1]


def save_figure(drawn: Axes | Figure | SubFigure | Sequence[Axes], path: Path | str) -> None:
    """Write a figure, or that of some axes, to a file, whose ending chooses the format; close the figure."""
    first: Any = np.ravel(np.asarray(drawn, dtype=object))[0]
    figure = first if hasattr(first, "savefig") else first.figure
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    plt.close(figure)


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


def plot_curves(
    curves: Mapping[str, ArrayLike],
    x: ArrayLike | None = None,
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    spreads: Mapping[str, ArrayLike] | None = None,
    lines: Mapping[str, float] | None = None,
    xscale: Literal["linear", "log"] = "linear",
    yscale: Literal["linear", "log"] = "linear",
    axes: Axes | None = None,
) -> Axes:
    """Draw curves by name, each with a colour, a marker and a line of its own.

    A curve is numbers of shape ``(n,)`` over ``x``, or x and y of shape ``(2, n)``; one with an empty name gets no
    legend. ``spreads`` has half the length of error bars by the name of their curve, ``lines`` levels to compare with.
    """
    axes = figure_axes(figsize=(5.5, 3.6)) if axes is None else axes
    for index, (name, values) in enumerate(curves.items()):
        at, y = _points(values, x)
        style = series(index) | {"markevery": max(1, len(y) // 10), "label": name or None}
        if spreads is not None and name in spreads:
            axes.errorbar(at, y, as_array(spreads[name]), capsize=3, **style)
        else:
            axes.plot(at, y, **style)
    for name, level in (lines or {}).items():
        axes.axhline(level, color="0.4", linewidth=1, linestyle=(0, (4, 3)), label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    scale(axes, xscale, yscale)
    axes.grid(alpha=0.3)
    if lines or any(curves):
        axes.legend(fontsize="small")
    return axes


def plot_bars(
    groups: Mapping[str, ArrayLike],
    names: Sequence[str],
    *,
    ylabel: str,
    title: str = "",
    spreads: Mapping[str, ArrayLike] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw bars side by side, hatched so that greyscale tells them apart.

    ``groups`` has by name the heights, one for each of ``names``; ``spreads`` half the length of their error bars.
    """
    axes = figure_axes(figsize=(0.6 * len(names) + 2.5, 3.4)) if axes is None else axes
    width = 0.8 / max(1, len(groups))
    for index, (name, values) in enumerate(groups.items()):
        heights = as_array(values)
        if heights.shape != (len(names),):
            raise ValueError(f"Expected {len(names)} heights of {name!r}, one a name, but got shape {heights.shape}.")
        at = np.arange(len(names)) + width * (index - (len(groups) - 1) / 2)
        error = None if spreads is None or name not in spreads else as_array(spreads[name])
        colour, hatch = COLOURS[index % len(COLOURS)], _HATCHES[index % len(_HATCHES)]
        style: dict[str, Any] = {"color": colour, "alpha": 0.75, "hatch": hatch}
        axes.bar(at, heights, 0.92 * width, yerr=error, capsize=3, label=name, edgecolor="white", **style)
    axes.axhline(0, color="0.2", linewidth=0.8)
    axes.set_xticks(np.arange(len(names)), names)
    axes.set(ylabel=ylabel, title=title)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")
    return axes


def _points(values: ArrayLike, x: ArrayLike | None) -> tuple[Array, Array]:
    """x and y of a curve."""
    found = as_array(values)
    if found.ndim == 2:
        return found[0], found[1]
    return np.arange(1.0, 1.0 + found.size) if x is None else as_array(x), found
