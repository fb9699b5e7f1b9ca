"""Small pictures side by side, with one scale of colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pyro_l0.plots.style import as_array, check_axes, figure_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # an extra

__all__ = ["plot_images"]

_COLUMNS = 10


def plot_images(
    images: Sequence[ArrayLike],
    *,
    titles: Sequence[str],
    label: str,
    limit: float,
    axes: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Draw pictures of signed numbers, such as weights or changes of pixels, in rows of ten.

    Args:
        images: each of shape ``(rows, columns)``.
        titles: one title per picture.
        label: what the numbers are, with their unit.
        limit: the positive number at which colours end; zero is white.
        axes: one of matplotlib's axes for each picture; a new figure if not given.

    Returns:
        The axes.

    Raises:
        ValueError: there is no picture, one does not have two dimensions, or the number of titles differs.

    Example:
        >>> axes = plot_images([[[0.1, -0.2]], [[0.0, 0.3]]], titles=["first", "second"], label="change", limit=0.5)
        >>> [place.get_title() for place in axes]
        ['first', 'second']
    """
    shown = [as_array(image) for image in images]
    if not shown or any(image.ndim != 2 for image in shown) or len(titles) != len(shown):
        shapes = [image.shape for image in shown]
        raise ValueError(
            f"Expected pictures (rows, columns) with a title each, but got {shapes} and {len(titles)} titles."
        )
    if axes is None:
        rows, columns = -(-len(shown) // _COLUMNS), min(len(shown), _COLUMNS)
        grid = np.atleast_1d(figure_axes(rows, columns, figsize=(columns + 1, 1.15 * rows))).ravel().tolist()
        for place in grid[len(shown) :]:
            place.remove()
        axes = grid[: len(shown)]
    check_axes(*axes)
    for place, image, title in zip(axes, shown, titles, strict=True):
        drawn = place.imshow(image, cmap="RdBu_r", vmin=-limit, vmax=limit)
        place.set(xticks=[], yticks=[])
        place.set_title(title, fontsize="x-small")
    axes[0].figure.colorbar(drawn, ax=list(axes), label=label)
    return axes
