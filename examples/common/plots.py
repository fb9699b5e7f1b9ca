"""The figures of the main example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from torch import Tensor

__all__ = ["plot_inputs", "plot_training"]


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
