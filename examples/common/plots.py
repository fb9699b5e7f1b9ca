"""The figures of the main example and of circuits."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pyro_l0.plots import figure_axes, plot_curves, plot_edges, plot_training, save_figure

__all__ = ["plot_circuit", "plot_history"]


def plot_history(history: list[dict[str, Any]], total_macs: int, sites: list[str], path: Path) -> None:
    """Error, open units and expected multiply-adds over the epochs (Figure 3 of the L0 paper)."""
    error, units, macs = "test error, %", "open units", "multiply-adds an image"
    panels = {
        error: {"": [entry["test_error_percent"] for entry in history]},
        units: {name: [entry["architecture"][i] for entry in history] for i, name in enumerate(sites)},
        macs: {
            "expected": [entry["expected_macs"] for entry in history],
            "test gates": [entry["macs_left"] for entry in history],
        },
    }
    epochs = [entry["epoch"] for entry in history]
    save_figure(plot_training(panels, epochs, lines={macs: {"dense": total_macs}}, log=[error]), path)


def plot_circuit(
    kept: Collection[tuple[str, str]],
    known: Collection[tuple[str, str]],
    levels: list[list[str]],
    results: Mapping[str, Mapping[int, list[tuple[float, str]]]],
    path: Path,
) -> None:
    """The edges of a circuit between nodes on levels, unknown ones dashed, and by method KL against edges."""
    graph, plot = figure_axes(1, 2, figsize=(13, 5), width_ratios=(3, 2))
    places = {name: (i - (len(row) - 1) / 2, level) for level, row in enumerate(levels) for i, name in enumerate(row)}
    for _, target in kept:
        if target not in places:  # a query, key or value stands below its head
            node, _, letter = target.rpartition(".")
            x, y = places[node]
            places[target] = x + 0.24 * ("qkv".index(letter) - 1), y - 0.3
    plot_edges(kept, places, known=known, title=f"{len(kept)} edges that the gates keep; dashed: not known", axes=graph)
    edges = {method: sorted(found) for method, found in results.items()}
    kls = {method: [[kl for kl, _ in results[method][n]] for n in edges[method]] for method in results}
    curves = {method: [edges[method], [statistics.mean(x) for x in kls[method]]] for method in results}
    spreads = {method: [statistics.stdev(x) if len(x) > 1 else 0.0 for x in kls[method]] for method in results}
    labels = {"xlabel": "edges kept", "ylabel": "KL to the transformer, nats a token"}
    plot_curves(curves, spreads=spreads, xscale="log", yscale="log", axes=plot, **labels)
    save_figure((graph, plot), path)
