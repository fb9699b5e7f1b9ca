"""The figures of the main example and of circuits."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from torch import Tensor

__all__ = ["plot_circuit", "plot_inputs", "plot_training"]


def plot_training(history: list[dict[str, Any]], total_macs: int, sites: list[str], path: Path) -> None:
    """Error, open units and expected multiply-adds over the epochs (Figure 3 of the L0 paper)."""
    epochs = [entry["epoch"] for entry in history]
    figure, (error, units, macs) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    error.plot(epochs, [entry["test_error_percent"] for entry in history], color="C3")
    error.set(title="Test error (averaged weights, test gates)", ylabel="%", yscale="log")
    for i, name in enumerate(sites):
        units.plot(epochs, [entry["architecture"][i] for entry in history], label=name)
    units.set(title="Open units", ylim=(0, None))
    units.legend(title="gate")
    macs.plot(epochs, [entry["expected_macs"] for entry in history], label="expected", color="C0")
    macs.plot(epochs, [entry["macs_left"] for entry in history], label="test gates", color="C0", ls=":")
    macs.axhline(total_macs, color="0.5", lw=0.8, label="dense")
    macs.set(title="Multiply-adds per image", ylim=(0, None))
    macs.legend()
    for axes in (error, units, macs):
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_inputs(gate: Tensor, image_shape: tuple[int, ...], path: Path) -> None:
    """Which pixels stayed open, and how far."""
    figure, axes = plt.subplots(figsize=(3.4, 3.2), layout="constrained")
    shown = axes.imshow(gate.reshape(image_shape[-2:]).numpy(), vmin=0, vmax=1, cmap="viridis")
    axes.set(title=f"{int((gate != 0).sum())} of {gate.numel()} pixels open", xticks=[], yticks=[])
    figure.colorbar(shown, label="test gate")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_circuit(
    kept: Collection[tuple[str, str]],
    known: Collection[tuple[str, str]],
    levels: list[list[str]],
    results: Mapping[str, Mapping[int, list[tuple[float, str]]]],
    path: Path,
) -> None:
    """The edges of a circuit between nodes on levels, its known ones in red, and by method KL against edges."""
    figure, (graph, plot) = plt.subplots(1, 2, figsize=(13, 5), width_ratios=(3, 2), layout="constrained")
    at = {name: (i - (len(row) - 1) / 2, level) for level, row in enumerate(levels) for i, name in enumerate(row)}
    for name, place in at.items():
        graph.text(*place, name, ha="center", va="center", bbox={"boxstyle": "round", "fc": "white"}, zorder=3)
    for source, target in kept:
        node, _, letter = target.rpartition(".") if target not in at else (target, "", "")
        (x, y), (u, v) = at[source], at[node]
        u += 0.18 * "qkv".index(letter) - 0.18 if letter else 0.0
        color = "C3" if (source, target) in known else "0.6"
        graph.annotate("", (u, v - 0.16), (x, y + 0.12), arrowprops={"arrowstyle": "->", "color": color, "lw": 1.5})
        if letter:
            graph.text(u, v - 0.26, letter, ha="center", va="center", color=color)
    graph.set(title=f"{len(kept)} edges that the gates keep; red: known", ylim=(-0.4, len(levels) - 0.6))
    graph.set_xlim(-2.6, 2.6)
    graph.axis("off")
    for method, by_edges in results.items():
        edges = sorted(by_edges)
        kls = [[kl for kl, _ in by_edges[n]] for n in edges]
        spreads = [statistics.stdev(x) if len(x) > 1 else 0.0 for x in kls]
        plot.errorbar(edges, [statistics.mean(x) for x in kls], spreads, marker="o", capsize=3, label=method)
    plot.set(title="KL to the transformer", xlabel="edges kept", ylabel="nats per token", xscale="log", yscale="log")
    plot.set_xticks(edges, map(str, edges))
    plot.xaxis.minorticks_off()
    plot.legend()
    plot.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
