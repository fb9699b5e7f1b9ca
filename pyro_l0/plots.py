"""Pictures of gates and posteriors with matplotlib (``pip install matplotlib``).

Every function takes arrays or tensors, draws into given axes or a new figure, and returns the axes. Colour-blind
readers can tell the colours apart, and markers and lines survive a greyscale print.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import pandas as pd  # an extra
    from matplotlib.axes import Axes  # an extra

    from pyro_l0.distributions.gate import GateDistribution

__all__ = ["plot_circuit", "plot_credible_sets", "plot_density", "plot_gates", "plot_inclusion"]

Array = NDArray[np.float64]
# Okabe and Ito's palette; neighbours differ in lightness.
COLOURS = ("#0072B2", "#E69F00", "#000000", "#56B4E9", "#D55E00", "#CC79A7", "#009E73")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))


def series(index: int) -> dict[str, Any]:
    """Colour, marker and line of the series with this number, as options of matplotlib's ``plot``."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index % len(_LINES)],
        "markersize": 4.5,
    }


def as_array(values: ArrayLike) -> Array:
    """An array of numbers, or of a tensor on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values, dtype=float)


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
        ValueError: there is no gate, or one is outside of [0, 1].

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
    axes = _new_axes(figsize=(3.4, 3.2) if shape else (4.5, 3)) if axes is None else axes
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


def plot_circuit(
    edges: pd.DataFrame, *, known: Collection[tuple[str, str]] | None = None, axes: Axes | None = None
) -> Axes:
    """Draw the open edges of a network, from what writes first, at the bottom, to its output.

    Args:
        edges: :meth:`NetworkEdges.to_frame() <pyro_l0.nn.NetworkEdges.to_frame>`, or its columns ``"writer"``,
            ``"reader"`` and ``"gate"``. Rows whose gate is 0 are not drawn.
        known: writers and readers of edges that are drawn in another colour, such as those of a known circuit.
        axes: one of matplotlib's axes; a new figure if not given.

    Returns:
        The axes, whose title counts the open edges. A query, key or value stands below its head.
    """
    level_of = dict[str, int]()  # of writers, the heads of an attention on one, in the order of their readers
    rows = [(str(w), str(r), bool(z)) for w, r, z in zip(edges.writer, edges.reader, edges.gate, strict=True)]
    drawn = [(writer, reader) for writer, reader, is_open in rows if is_open]
    nodes = dict.fromkeys([*(x for x, *_ in rows), *(x.partition("<")[0] for _, x, _ in rows)])
    for name in nodes:
        level_of.setdefault(name.partition(".h")[0], len(level_of))
    levels = {name: level_of[name.partition(".h")[0]] for name in nodes}
    used = {x.partition("<")[0] for edge in drawn for x in edge}
    axes = _new_axes(figsize=(7, 6)) if axes is None else axes
    places = dict[str, tuple[float, float]]()
    for level in sorted({levels[x] for x in used}):
        beside = [x for x in nodes if levels[x] == level and x in used]
        places |= {x: (k - (len(beside) - 1) / 2, float(level)) for k, x in enumerate(beside)}
    for name, (across, up) in places.items():
        axes.text(across, up, name, ha="center", va="center", bbox={"boxstyle": "round", "fc": "white"}, zorder=3)
    for writer, reader in drawn:
        head, _, letters = reader.partition("<")
        across, up = places[head]
        across += 0.24 * ("qkv".index(letters[0]) - 1) if letters else 0.0
        colour = COLOURS[0] if known is None or (writer, reader) in known else COLOURS[4]
        arrow = {"arrowstyle": "->", "color": colour, "shrinkA": 12, "shrinkB": 12}
        axes.annotate("", (across, up), places[writer], arrowprops=arrow)
    sides = [across for across, _ in places.values()] or [0.0]
    axes.set(xlim=(min(sides) - 0.7, max(sides) + 0.7), ylim=(-0.5, len(level_of) - 0.5))
    axes.set_title(f"{len(drawn)} of {len(rows)} edges")
    axes.axis("off")
    return axes


def plot_density(gate: GateDistribution, *, title: str = "", axes: Axes | None = None) -> Axes:
    """Draw the density of one gate between 0 and 1, and its atoms as bars.

    Args:
        gate: a single gate, of ``batch_shape`` ``()``.
        title: title of the picture.
        axes: one of matplotlib's axes; a new figure if not given.

    Returns:
        The axes.

    Example:
        >>> import torch
        >>> from pyro_l0 import HardConcrete
        >>> axes = plot_density(HardConcrete(torch.tensor(0.0)))
        >>> [round(float(bar.get_height()), 3) for bar in axes.patches]
        [0.168, 0.168]
    """
    axes = _new_axes(figsize=(4.5, 3)) if axes is None else axes
    z = gate.log_prob_zero.new_tensor(np.linspace(0.002, 0.998, 400))
    axes.plot(z.numpy(), as_array(gate.log_prob(z).exp()), color=COLOURS[0], label="density")
    atoms = as_array(gate.log_prob_zero.exp()), as_array(gate.log_prob_one.exp())
    axes.bar([0, 1], [float(atom) for atom in atoms], width=0.04, color=COLOURS[1], label="atom, probability")
    axes.set(xlabel="z", title=title, ylim=(0, 3))
    axes.legend(fontsize="small")
    return axes


def plot_inclusion(
    active_probs: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    *,
    mean: ArrayLike | None = None,
    others: Mapping[str, ArrayLike] | None = None,
    names: Sequence[str] | None = None,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Draw inclusion probabilities as bars beside the coefficients' intervals, the first feature on top.

    Args:
        active_probs: inclusion probabilities, shape ``(p,)``.
        lower: lower ends of the coefficients' intervals, shape ``(p,)``.
        upper: upper ends of the intervals, shape ``(p,)``.
        mean: posterior means, shape ``(p,)``, drawn as dots.
        others: by method, coefficients of other methods, shape ``(p,)``, drawn beside the means.
        names: names of the features; by default their numbers.
        axes: two of matplotlib's axes; a new figure if not given.

    Returns:
        The axes.

    Raises:
        ValueError: shapes differ, or a probability is outside of [0, 1].

    Example:
        >>> probs, lower, upper = [0.9, 0.2], [0.4, 0.0], [1.1, 0.3]
        >>> left, _ = plot_inclusion(probs, lower, upper, mean=[0.8, 0.1], names=["age", "bmi"])
        >>> [float(bar.get_width()) for bar in left.patches]
        [0.9, 0.2]
    """
    probs = as_array(active_probs)
    if not ((probs >= 0) & (probs <= 1)).all():
        raise ValueError(f"Expected active_probs in [0, 1], but got values from {probs.min()} to {probs.max()}.")
    low, high = _like(probs, lower=lower, upper=upper)
    labels = [str(i) for i in range(len(probs))] if names is None else [str(name) for name in names]
    axes = _new_axes(1, 2, figsize=(9, 0.28 * len(probs) + 1.2), sharey=True) if axes is None else axes
    left, right = axes
    rows = np.arange(len(probs))
    left.barh(rows, probs, color=COLOURS[0])
    left.set(xlim=(0, 1), xlabel="inclusion probability")
    left.set_yticks(rows, labels)
    left.set_ylim(len(probs) - 0.5, -0.5)
    right.hlines(rows, low, high, color=COLOURS[0])
    points = ({} if mean is None else {"posterior mean": mean}) | dict(others or {})
    for index, (name, values) in enumerate(points.items(), start=mean is None):
        right.plot(*_like(probs, **{name: values}), rows, **series(index) | {"linestyle": "none", "label": name})
    if others:
        right.legend(fontsize="small")
    right.axvline(0, color="grey", linewidth=0.8)
    right.set(xlabel="coefficient")
    return axes


def plot_credible_sets(
    sets: Sequence[ArrayLike], correlation: ArrayLike, *, names: Sequence[str] | None = None, axes: Axes | None = None
) -> Axes:
    """Draw the correlations of the features in credible sets, with a frame around each set.

    Args:
        sets: the indices of each set's features, from 0.
        correlation: correlations of all features, shape ``(p, p)``, such as ``np.corrcoef(X, rowvar=False)``.
        names: names of all features; by default their numbers.
        axes: one of matplotlib's axes; a new figure if not given.

    Returns:
        The axes.

    Raises:
        ValueError: a set names a feature that does not exist, or there are more or fewer names than features.

    Example:
        >>> correlation = [[1.0, 0.9, 0.1], [0.9, 1.0, 0.0], [0.1, 0.0, 1.0]]
        >>> axes = plot_credible_sets([[0, 1]], correlation, names=["a", "b", "c"])
        >>> [label.get_text() for label in axes.get_xticklabels()]
        ['a', 'b']
    """
    matrix = as_array(correlation)
    members = [np.asarray(features) for features in sets]
    if names is not None and len(names) != len(matrix):
        raise ValueError(f"Expected a name for each of {len(matrix)} features, but got {len(names)}.")
    shown = np.concatenate(members).astype(int)
    if shown.min() < 0 or shown.max() >= len(matrix):
        raise ValueError(f"Expected numbers of features from 0 to {len(matrix) - 1}, but got {shown.tolist()}.")
    side = 0.3 * len(shown) + 2
    axes = _new_axes(1, 1, figsize=(side + 1, side)) if axes is None else axes
    image = axes.imshow(matrix[np.ix_(shown, shown)], vmin=-1, vmax=1, cmap="PuOr_r")
    axes.figure.colorbar(image, ax=axes, label="correlation")
    labels = [str(i) if names is None else str(names[i]) for i in shown]
    axes.set_xticks(range(len(shown)), labels, rotation=90)
    axes.set_yticks(range(len(shown)), labels)
    start = 0
    for features in members:
        _frame(axes, start, len(features))
        start += len(features)
    return axes


def _frame(axes: Axes, start: int, size: int) -> None:
    """A square around some rows and columns of an image."""
    first, last = start - 0.5, start + size - 0.5
    axes.plot([first, last, last, first, first], [first, first, last, last, first], color="black", clip_on=False)


def _like(probs: Array, **others: ArrayLike) -> list[Array]:
    """Arrays of the shape of the probabilities; a ValueError names one of another shape."""
    found = {name: as_array(x) for name, x in others.items()}
    for name, x in found.items():
        if x.shape != probs.shape:
            raise ValueError(f"Expected {name} of the shape of active_probs, {probs.shape}, but got {x.shape}.")
    return list(found.values())


def _new_axes(rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """Axes in a new figure with space for their labels; options are those of matplotlib's ``subplots``."""
    import matplotlib.pyplot as plt  # an extra

    return plt.subplots(rows, columns, layout="constrained", **options)[1]
