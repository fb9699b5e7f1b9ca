"""Gradient noise: estimators beside one another, and draws about the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pyro_l0.plots.style import COLOURS, as_array, check_axes, figure_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # an extra
    from matplotlib.figure import Figure, SubFigure

    from pyro_l0.diagnostics.gradients import GradientReport

__all__ = ["plot_estimates", "plot_gradients"]

_SHOWN = 300  # draws of an estimator, more of which would only hide one another


def plot_gradients(reports: Sequence[GradientReport], axes: Sequence[Axes] | None = None) -> Figure | SubFigure:
    """Draw scaled variance, variance times seconds and, if known, bias in standard errors, by estimator.

    Args:
        reports: what to compare, each from :func:`~pyro_l0.diagnostics.gradients.measure_gradient`.
        axes: three of matplotlib's axes; a new figure if not given.

    Returns:
        The figure.

    Raises:
        ValueError: there is no report.

    Example:
        >>> import torch
        >>> from pyro_l0.diagnostics.gradients import GradientReport
        >>> one = torch.ones(3)
        >>> report = GradientReport("one particle", one, one, draws=100, seconds=0.01, slope=one, exact=None)
        >>> len(plot_gradients([report]).axes)
        3
    """
    if not reports:
        raise ValueError("Expected at least one report, but got none; measure_gradient makes them.")
    axes = figure_axes(1, 3, figsize=(12, 0.4 * len(reports) + 1.5), sharey=True) if axes is None else axes
    check_axes(*axes)
    places = range(len(reports))
    noise = [report.scaled_variance for report in reports], [report.variance_seconds for report in reports]
    labels = "variance of the gradient for E[z]", "variance × seconds a draw"
    for axis, values, label in zip(axes, noise, labels, strict=False):
        axis.boxplot([as_array(x).tolist() for x in values], orientation="horizontal", positions=[*places], widths=0.6)
        axis.set(xscale="log", xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(list(places), [report.name for report in reports])
    for place, report in zip(places, reports, strict=True):
        if report.exact is not None:
            deviations = (report.bias / report.standard_error.clamp(min=1e-300)).tolist()
            axes[2].plot(deviations, [place] * len(deviations), "o", color=COLOURS[0], alpha=0.5)
    axes[2].axvspan(-4, 4, alpha=0.15, color=COLOURS[3])
    axes[2].set(xlabel="bias, standard errors", xscale="symlog")
    return axes[0].figure


def plot_estimates(
    draws: Mapping[str, ArrayLike], truth: float | None = None, *, ylabel: str, axes: Axes | None = None
) -> Axes:
    """Draw a cloud of draws for each estimator of one number, its mean as a bar, and the truth as a line.

    Args:
        draws: by estimator, shape ``(n,)``; the first 300 are shown, the mean is of all.
        truth: the number that they estimate.
        ylabel: what that number is, with its unit.
        axes: one of matplotlib's axes; a new figure if not given.

    Returns:
        The axes.

    Raises:
        ValueError: an estimator has no draws.

    Example:
        >>> axes = plot_estimates({"one particle": [0.2, 0.4]}, 0.3, ylabel="gradient, nats")
        >>> axes.texts[0].get_text()
        '0.3000'
    """
    axes = figure_axes(figsize=(1.6 * len(draws) + 1, 3.6)) if axes is None else axes
    check_axes(axes)
    jitter = np.random.default_rng(0)
    for place, (name, values) in enumerate(draws.items()):
        found = as_array(values)
        if found.ndim != 1 or not found.size:
            raise ValueError(f"Expected draws of shape (n,), but {name!r} has {found.shape}.")
        shown = found[:_SHOWN]
        across = place + 0.25 * (jitter.random(len(shown)) - 0.5)
        axes.scatter(across, shown, s=4, alpha=0.4, color=COLOURS[0])
        axes.hlines(found.mean(), place - 0.3, place + 0.3, color="black", linewidth=2)
        axes.text(place + 0.32, float(found.mean()), f"{found.mean():.4f}", va="center", fontsize=8)
    if truth is not None:
        axes.axhline(truth, color=COLOURS[4], linewidth=1.2, linestyle="--", label=f"truth, {truth:.4f}")
        axes.legend(loc="upper right")
    axes.set(ylabel=ylabel, xlim=(-0.5, len(draws) - 0.2))
    axes.set_xticks(range(len(draws)), [*draws])
    return axes
