"""Posteriors: inclusion probabilities with intervals, credible sets, calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pyro_l0.plots.style import COLOURS, Array, as_array, check_axes, figure_axes, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # an extra

__all__ = ["plot_credible_sets", "plot_inclusion"]


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
        >>> left, right = plot_inclusion([0.9, 0.2], [0.4, 0.0], [1.1, 0.3], mean=[0.8, 0.1], names=["age", "bmi"])
        >>> [float(bar.get_width()) for bar in left.patches]
        [0.9, 0.2]
    """
    probs = _probabilities(active_probs)
    low, high = _like(probs, lower=lower, upper=upper)
    labels = [str(i) for i in range(len(probs))] if names is None else [str(name) for name in names]
    if len(labels) != len(probs):
        raise ValueError(f"Expected a name for each of {len(probs)} features, but got {len(labels)}.")
    axes = figure_axes(1, 2, figsize=(9, 0.28 * len(probs) + 1.2), sharey=True) if axes is None else axes
    check_axes(*axes)
    left, right = axes
    rows = np.arange(len(probs))
    left.barh(rows, probs, color=COLOURS[0])
    left.set(xlim=(0, 1), xlabel="inclusion probability")
    left.set_yticks(rows, labels)
    left.set_ylim(len(probs) - 0.5, -0.5)
    right.hlines(rows, low, high, color=COLOURS[0])
    points = ({} if mean is None else {"posterior mean": mean}) | dict(others or {})
    for place, (name, values) in enumerate(points.items(), start=mean is None):
        right.plot(*_like(probs, **{name: values}), rows, **series(place) | {"linestyle": "none", "label": name})
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
        ValueError: there is no set, a set is empty or names a feature that does not exist, or the matrix is not square.

    Example:
        >>> axes = plot_credible_sets(
        ...     [[0, 1]], [[1.0, 0.9, 0.1], [0.9, 1.0, 0.0], [0.1, 0.0, 1.0]], names=["a", "b", "c"]
        ... )
        >>> [label.get_text() for label in axes.get_xticklabels()]
        ['a', 'b']
    """
    matrix = as_array(correlation)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"Expected correlations of shape (p, p), but got {matrix.shape}; np.corrcoef(X, rowvar=False) makes them."
        )
    members = [np.asarray(features) for features in sets]
    if not members or any(not len(features) for features in members):
        raise ValueError(f"Expected at least one credible set, of a feature or more, but got {len(members)} sets.")
    if names is not None and len(names) != len(matrix):
        raise ValueError(f"Expected a name for each of {len(matrix)} features, but got {len(names)}.")
    shown = np.concatenate(members).astype(int)
    if shown.min() < 0 or shown.max() >= len(matrix):
        raise ValueError(f"Expected numbers of features from 0 to {len(matrix) - 1}, but got {shown.tolist()}.")
    side = 0.3 * len(shown) + 2
    axes = figure_axes(1, 1, figsize=(side + 1, side)) if axes is None else axes
    check_axes(axes)
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


def _probabilities(values: ArrayLike) -> Array:
    found = as_array(values)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"Expected active_probs of shape (p,), but got {found.shape}.")
    if not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"Expected active_probs in [0, 1], but got values from {found.min()} to {found.max()}.")
    return found


def _like(probs: Array, **others: ArrayLike) -> list[Array]:
    """Arrays of the shape of the probabilities."""
    found = {name: as_array(x) for name, x in others.items()}
    for name, x in found.items():
        if x.shape != probs.shape:
            raise ValueError(f"Expected {name} of the shape of active_probs, {probs.shape}, but got {x.shape}.")
    return list(found.values())
