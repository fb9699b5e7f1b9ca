"""Curves over steps, errors against sizes, and bars side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from pyro_l0.plots.style import COLOURS, Array, as_array, check_axes, figure_axes, scale, series, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # an extra

__all__ = ["plot_bars", "plot_curves", "plot_frontier", "plot_training"]

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


def plot_training(
    panels: Mapping[str, Mapping[str, ArrayLike]],
    x: ArrayLike | None = None,
    *,
    xlabel: str = "epoch",
    lines: Mapping[str, Mapping[str, float]] | None = None,
    log: Collection[str] = (),
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Draw how a training went, a panel for each quantity: errors, open units, costs.

    Args:
        panels: by quantity, with its unit, the curves by name; a curve has shape ``(n,)``. Names of sites lose the
            parts that all share.
        x: the epochs or steps of the curves, shape ``(n,)``; 1, 2, 3 and so on if not given.
        xlabel: what ``x`` counts.
        lines: by quantity, levels to compare with, such as the cost of the dense network.
        log: the quantities with a logarithmic scale; other scales begin at zero.
        axes: one of matplotlib's axes for each panel; a new figure if not given.

    Returns:
        The axes.

    Raises:
        ValueError: there is no panel, or a name of ``lines`` or ``log`` is no panel.

    Example:
        >>> error, units = plot_training(
        ...     {"test error, %": {"": [4.0, 2.0]}, "open units": {"net.0.gate": [300, 120], "net.2.gate": [100, 60]}},
        ...     log=["test error, %"],
        ... )
        >>> units.get_ylabel(), [line.get_label() for line in units.lines]
        ('open units', ['net.0', 'net.2'])
    """
    unknown = ({*log} | {*(lines or {})}) - {*panels}
    if not panels or unknown:
        raise ValueError(f"Expected panels, among them those of lines and log, but got {[*panels]} and {[*unknown]}.")
    if axes is None:
        axes = np.atleast_1d(figure_axes(1, len(panels), figsize=(4 * len(panels), 3.2))).tolist()
    for panel, (quantity, curves) in zip(axes, panels.items(), strict=True):
        named = dict(zip(short_names([*curves]), curves.values(), strict=True))
        across = (lines or {}).get(quantity)
        yscale: Literal["linear", "log"] = "log" if quantity in log else "linear"
        plot_curves(named, x, xlabel=xlabel, ylabel=quantity, lines=across, yscale=yscale, axes=panel)
        if quantity not in log:
            panel.set_ylim(0, None)
    return axes


def plot_frontier(
    measured: Mapping[str, ArrayLike],
    published: Mapping[str, ArrayLike] | None = None,
    *,
    size: str = "weights left",
    error: str = "test error, %",
    dense: float | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw error against size on logarithmic scales: measured points joined by lines, published ones hollow.

    A published method with the name of a measured one has its colour.

    Args:
        measured: by method, sizes and errors, shape ``(2, n)``, or ``(3, n)`` with the spread of the errors.
        published: by method, sizes and errors from papers, shape ``(2, n)``.
        size: what the sizes count, with its unit.
        error: what the errors are, with their unit.
        dense: the error of the full network.
        axes: one of matplotlib's axes; a new figure if not given.

    Returns:
        The axes.

    Raises:
        ValueError: there is no method, a shape does not fit, or a size or an error is not positive.

    Example:
        >>> axes = plot_frontier({"gates": [[5e3, 2e4], [1.9, 1.6]]}, {"gates": [[1e4], [1.8]]})
        >>> axes.get_legend_handles_labels()[1]
        ['gates', 'gates, published']
    """
    found = {name: _frontier_points(name, points) for name, points in measured.items()}
    theirs = {name: _frontier_points(name, points) for name, points in (published or {}).items()}
    curves = {name: points[:2] for name, points in found.items()}
    spreads = {name: points[2] for name, points in found.items() if len(points) == 3}
    options: dict[str, Any] = {"xlabel": size, "ylabel": error, "xscale": "log", "yscale": "log"}
    across = None if dense is None else {"dense": dense}
    axes = plot_curves(curves, spreads=spreads, lines=across, axes=axes, **options)
    places = {name: place for place, name in enumerate([*found, *(name for name in theirs if name not in found)])}
    for name, points in theirs.items():
        style = series(places[name]) | {"linestyle": "none", "markersize": 7, "markerfacecolor": "none"}
        axes.plot(points[0], points[1], label=f"{name}, published", **style)
    scale(axes, "log", "log")
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


def _frontier_points(name: str, values: ArrayLike) -> Array:
    """Sizes, errors and perhaps spreads, by size."""
    found = as_array(values)
    if found.ndim != 2 or len(found) not in (2, 3) or not found.size:
        raise ValueError(f"Expected sizes and errors of shape (2, n) or (3, n), but {name!r} has {found.shape}.")
    if not (found[:2] > 0).all():
        raise ValueError(f"Expected sizes and errors above 0 on logarithmic scales, but {name!r} has others.")
    return found[:, found[0].argsort()]
