"""Curves over steps, and bars side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from pyro_l0.plots.style import COLOURS, Array, as_array, check_axes, figure_axes, scale, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # an extra

__all__ = ["plot_bars", "plot_curves"]

_HATCHES = ("", "///", "...", "xxx", "\\\\\\")


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

    Args:
        curves: by name, numbers of shape ``(n,)`` over ``x``, or x and y of shape ``(2, n)``. A curve with an empty
            name gets no legend.
        x: shape ``(n,)``; 1, 2, 3 and so on if not given.
        xlabel: what is on the x axis, with its unit.
        ylabel: what is on the y axis, with its unit.
        title: title of the picture.
        spreads: by name of a curve, half the length of its error bars, shape ``(n,)``, in the unit of y.
        lines: levels to compare with, by name, drawn across the picture.
        xscale: linear, or logarithmic with plain numbers at the ticks.
        yscale: the same for y.
        axes: one of matplotlib's axes; a new figure if not given.

    Returns:
        The axes.

    Raises:
        ValueError: there is no curve, or x and y have different shapes.

    Example:
        >>> axes = plot_curves({"train": [0.9, 0.4], "test": [1.0, 0.6]}, xlabel="epoch", ylabel="loss, nats")
        >>> [line.get_label() for line in axes.lines]
        ['train', 'test']
    """
    if not curves:
        raise ValueError("Expected at least one curve, but got none.")
    axes = figure_axes(figsize=(5.5, 3.6)) if axes is None else axes
    check_axes(axes)
    for place, (name, values) in enumerate(curves.items()):
        at, y = _points(name, values, x)
        style = series(place) | {"markevery": max(1, len(y) // 10), "label": name or None}
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

    Args:
        groups: by name, the heights, shape ``(n,)``.
        names: the n names below the bars.
        ylabel: what the heights are, with their unit.
        title: title of the picture.
        spreads: by name of a group, half the length of its error bars, shape ``(n,)``.
        axes: one of matplotlib's axes; a new figure if not given.

    Returns:
        The axes.

    Raises:
        ValueError: a group has another number of heights than there are names.

    Example:
        >>> axes = plot_bars({"exact": [0.9, 0.2], "guide": [0.8, 0.3]}, ["age", "bmi"], ylabel="inclusion probability")
        >>> [float(bar.get_height()) for bar in axes.patches]
        [0.9, 0.2, 0.8, 0.3]
    """
    axes = figure_axes(figsize=(0.6 * len(names) + 2.5, 3.4)) if axes is None else axes
    check_axes(axes)
    width = 0.8 / max(1, len(groups))
    for place, (name, values) in enumerate(groups.items()):
        heights = as_array(values)
        if heights.shape != (len(names),):
            raise ValueError(f"Expected {len(names)} heights of {name!r}, one a name, but got shape {heights.shape}.")
        at = np.arange(len(names)) + width * (place - (len(groups) - 1) / 2)
        error = None if spreads is None or name not in spreads else as_array(spreads[name])
        colour, hatch = COLOURS[place % len(COLOURS)], _HATCHES[place % len(_HATCHES)]
        style: dict[str, Any] = {"color": colour, "alpha": 0.75, "hatch": hatch}
        axes.bar(at, heights, 0.92 * width, yerr=error, capsize=3, label=name, edgecolor="white", **style)
    axes.axhline(0, color="0.2", linewidth=0.8)
    axes.set_xticks(np.arange(len(names)), names)
    axes.set(ylabel=ylabel, title=title)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")
    return axes


def _points(name: str, values: ArrayLike, x: ArrayLike | None) -> tuple[Array, Array]:
    """x and y of a curve."""
    found = as_array(values)
    if found.ndim == 2 and len(found) == 2:
        return found[0], found[1]
    at = np.arange(1.0, 1.0 + found.size) if x is None else as_array(x)
    if found.ndim != 1 or at.shape != found.shape:
        raise ValueError(
            f"Expected y of the shape of x, {at.shape}, or of shape (2, n), but {name!r} has {found.shape}."
        )
    return at, found
