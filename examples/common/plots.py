"""Pictures that several examples share: trainings, frontiers, graphs, small images, and those of two examples."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from common.figures import figure_axes, plot_curves, save_figure, scale
from pyro_l0.plots import COLOURS, Array, as_array, series

__all__ = [
    "plot_edges",
    "plot_frontier",
    "plot_gate_shares",
    "plot_history",
    "plot_images",
    "plot_training",
    "short_names",
]


def plot_history(
    history: list[dict[str, Any]], total_macs: int, sites: list[str], path: Path, dropout_macs: float | None = None
) -> None:
    """Error, open units and expected multiply-adds over the epochs (Figures 3 and 4 of the L0 paper)."""
    trained = "train_error_percent" in history[0]
    error, units, macs = "error, %" if trained else "test error, %", "open units", "multiply-adds an image"
    panels = {
        error: {"test" if trained else "": [entry["test_error_percent"] for entry in history]},
        units: {name: [entry["architecture"][i] for entry in history] for i, name in enumerate(sites)},
        macs: {
            "expected": [entry["expected_macs"] for entry in history],
            "test gates": [entry["macs_left"] for entry in history],
        },
    }
    if trained:
        panels[error]["training"] = [entry["train_error_percent"] for entry in history]
    if dropout_macs is not None:
        panels[macs]["expected under dropout"] = [dropout_macs] * len(history)
    epochs = [entry["epoch"] for entry in history]
    save_figure(plot_training(panels, epochs, lines={macs: {"dense": total_macs}}, log=[error]), path)


def plot_gate_shares(history: list[dict[str, Any]], path: Path) -> None:
    """Histograms of gates while they train, by site (Appendix C of the paper on mixtures)."""
    chosen = [entry for entry in history if "gate_shares" in entry]
    sites = list(chosen[0]["gate_shares"])
    panels = np.atleast_1d(figure_axes(1, len(sites), figsize=(4 * len(sites), 3.2), sharey=True))
    for panel, site, name in zip(panels, sites, short_names(sites), strict=True):
        for index, entry in enumerate(chosen):
            style = {key: series(index)[key] for key in ("color", "linestyle")}
            panel.stairs(entry["gate_shares"][site], np.linspace(0, 1, 21), label=f"epoch {entry['epoch']}", **style)
        panel.set(xlabel="gate", ylabel="share of draws", title=name, yscale="log")
    panels[0].legend(fontsize="small")
    save_figure(list(panels), path)


def plot_training(
    panels: Mapping[str, Mapping[str, ArrayLike]],
    x: ArrayLike | None = None,
    *,
    xlabel: str = "epoch",
    lines: Mapping[str, Mapping[str, float]] | None = None,
    log: Collection[str] = (),
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Draw how a training went, a panel for each quantity; ``lines`` has levels to compare with, by quantity."""
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


def short_names(names: Sequence[str]) -> list[str]:
    """Names of sites without the parts that all share; the last shared one stays if only a number would follow it."""
    parts = [str(name).split(".") for name in names]
    if len(set(map(tuple, parts))) < 2:
        return [str(name) for name in names]
    shortest = min(map(len, parts))
    front = next((i for i in range(shortest) if len({part[i] for part in parts}) > 1), shortest - 1)
    if front and any(part[front].isdigit() for part in parts):
        front -= 1
    back = next((i for i in range(shortest - front) if len({part[-1 - i] for part in parts}) > 1), 0)
    return [".".join(part[front : len(part) - back]) for part in parts]


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

    By method, sizes and errors, shape ``(2, n)``, or ``(3, n)`` with the spread of the errors. A published method with
    the name of a measured one has its colour.
    """
    found = {name: _frontier_points(name, points) for name, points in measured.items()}
    theirs = {name: _frontier_points(name, points) for name, points in (published or {}).items()}
    curves = {name: points[:2] for name, points in found.items()}
    spreads = {name: points[2] for name, points in found.items() if len(points) == 3}
    options: dict[str, Any] = {"xlabel": size, "ylabel": error, "xscale": "log", "yscale": "log"}
    across = None if dense is None else {"dense": dense}
    axes = plot_curves(curves, spreads=spreads, lines=across, axes=axes, **options)
    indices = {name: index for index, name in enumerate([*found, *(name for name in theirs if name not in found)])}
    for name, points in theirs.items():
        style = series(indices[name]) | {"linestyle": "none", "markersize": 7, "markerfacecolor": "none"}
        axes.plot(points[0], points[1], label=f"{name}, published", **style)
    scale(axes, "log", "log")
    axes.legend(fontsize="small")
    return axes


def _frontier_points(name: str, values: ArrayLike) -> Array:
    """Sizes, errors and perhaps spreads, by size."""
    found = as_array(values)
    return found[:, found[0].argsort()]


def plot_edges(
    edges: Collection[tuple[Hashable, Hashable]],
    positions: Mapping[Hashable, tuple[float, float]],
    *,
    known: Collection[tuple[Hashable, Hashable]] | None = None,
    title: str = "",
    names: bool = True,
    axes: Axes | None = None,
) -> Axes:
    """Draw a directed graph; edges that are not among the known ones are dashed, in another colour."""
    axes = figure_axes(figsize=(5, 4)) if axes is None else axes
    for name, (x, y) in positions.items():
        if names:
            axes.text(x, y, str(name), ha="center", va="center", bbox={"boxstyle": "round", "fc": "white"}, zorder=3)
    if not names:
        across, up = np.transpose([*positions.values()])
        axes.scatter(across, up, s=12, color="0.3")
    for source, target in edges:
        right = known is None or (source, target) in known
        arrow = {
            "arrowstyle": "->",
            "color": COLOURS[0] if right else COLOURS[4],
            "linestyle": "-" if right else "--",
            "shrinkA": 14 if names else 4,
            "shrinkB": 14 if names else 4,
        }
        axes.annotate("", positions[target], positions[source], arrowprops=arrow)
    across, up = zip(*positions.values(), strict=True)
    axes.set_xlim(min(across) - 0.5, max(across) + 0.5)
    axes.set_ylim(min(up) - 0.5, max(up) + 0.5)
    axes.set_title(title)
    axes.axis("off")
    return axes


def plot_images(
    images: Sequence[ArrayLike],
    *,
    titles: Sequence[str],
    label: str,
    limit: float,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Draw pictures of signed numbers, such as changes of pixels, in rows of ten; colours end at ``limit``."""
    shown = [as_array(image) for image in images]
    if axes is None:
        rows, columns = -(-len(shown) // 10), min(len(shown), 10)
        grid = np.atleast_1d(figure_axes(rows, columns, figsize=(columns + 1, 1.15 * rows))).ravel().tolist()
        for unused in grid[len(shown) :]:
            unused.remove()
        axes = grid[: len(shown)]
    for panel, image, title in zip(axes, shown, titles, strict=True):
        drawn = panel.imshow(image, cmap="RdBu_r", vmin=-limit, vmax=limit)
        panel.set(xticks=[], yticks=[])
        panel.set_title(title, fontsize="x-small")
    axes[0].figure.colorbar(drawn, ax=list(axes), label=label)
    return axes
