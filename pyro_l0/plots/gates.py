"""Gates: those of a site, and their densities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pyro_l0.plots.style import COLOURS, as_array, check_axes, figure_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # an extra

    from pyro_l0.distributions.gate import GateDistribution

__all__ = ["plot_density", "plot_gates"]


def plot_gates(
    gates: ArrayLike,
    *,
    shape: tuple[int, int] | None = None,
    image: ArrayLike | None = None,
    name: str = "",
    label: str = "test gate",
    axes: Axes | None = None,
) -> Axes:
    """Draw the gates of a site in sorted order, or as pixels if each gates one.

    Args:
        gates: numbers in [0, 1], such as ``guide.test_gates()["z"]`` or ``guide.active_probs()["z"]``, of any shape.
        shape: rows and columns of the picture whose pixels they gate.
        image: a picture of that shape, drawn in grey with a frame around each pixel whose gate is open.
        name: name of the site, for the title.
        label: what the numbers are.
        axes: one of matplotlib's axes; a new figure if not given.

    Returns:
        The axes, whose title counts the gates that are not 0.

    Raises:
        ValueError: a gate is outside of [0, 1], or the shape has another number of gates.

    Example:
        >>> import torch
        >>> plot_gates(torch.tensor([0.0, 1.0, 0.4]), name="layer.0").get_title()
        'layer.0: 2 of 3 open'
    """
    values = as_array(gates).ravel()
    if not values.size or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"Expected gates in [0, 1], but {name or 'the site'} has others or none.")
    if image is not None and shape is None:
        shape = as_array(image).shape
    if shape is not None and (len(shape) != 2 or np.prod(shape) != values.size):
        raise ValueError(f"Expected a shape (rows, columns) of {values.size} gates, but got {tuple(shape)}.")
    axes = figure_axes(figsize=(3.4, 3.2) if shape else (4.5, 3)) if axes is None else axes
    check_axes(axes)
    opened = int((values != 0).sum())
    if shape is None:
        axes.bar(np.arange(1, values.size + 1), np.sort(values)[::-1], width=1.0, color=COLOURS[0])
        axes.set(xlabel="gates, largest first", ylabel=label, ylim=(0, 1.02))
    elif image is None:
        shown = axes.imshow(values.reshape(shape), vmin=0, vmax=1, cmap="cividis")
        axes.figure.colorbar(shown, ax=axes, label=label)
    else:
        axes.imshow(as_array(image).reshape(shape), cmap="gray_r")
        rows, columns = values.reshape(shape).nonzero()
        axes.plot(columns, rows, "s", color=COLOURS[4], fillstyle="none")
    if shape is not None:
        axes.set(xticks=[], yticks=[])
    axes.set_title(f"{name}: {opened} of {values.size} open" if name else f"{opened} of {values.size} open")
    return axes


def plot_density(gate: GateDistribution, *, title: str = "", axes: Axes | None = None) -> Axes:
    """Draw the density of one gate between 0 and 1, and its atoms as bars.

    Args:
        gate: a single gate, of ``batch_shape`` ``()``.
        title: title of the picture.
        axes: one of matplotlib's axes; a new figure if not given.

    Returns:
        The axes.

    Raises:
        ValueError: the gate has a batch shape.

    Example:
        >>> import torch
        >>> from pyro_l0 import HardConcrete
        >>> axes = plot_density(HardConcrete(torch.tensor(0.0)))
        >>> [round(float(bar.get_height()), 3) for bar in axes.patches]
        [0.168, 0.168]
    """
    if len(gate.batch_shape):
        raise ValueError(f"Expected a gate of batch shape (), but got {tuple(gate.batch_shape)}.")
    axes = figure_axes(figsize=(4.5, 3)) if axes is None else axes
    check_axes(axes)
    z = gate.log_prob_zero.new_tensor(np.linspace(0.002, 0.998, 400))
    axes.plot(z.numpy(), as_array(gate.log_prob(z).exp()), color=COLOURS[0], label="density")
    atoms = as_array(gate.log_prob_zero.exp()), as_array(gate.log_prob_one.exp())
    axes.bar([0, 1], [float(atom) for atom in atoms], width=0.04, color=COLOURS[1], label="atom, probability")
    axes.set(xlabel="z", title=title, ylim=(0, 3))
    axes.legend(fontsize="small")
    return axes
