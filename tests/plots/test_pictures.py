"""What pictures of gates and posteriors show, by their data."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from pyro_l0 import HardConcrete
from pyro_l0.plots import COLOURS, plot_credible_sets, plot_density, plot_gates, plot_inclusion, series

CORRELATION = np.array([[1.0, 0.9, -0.2, 0.1], [0.9, 1.0, 0.3, 0.0], [-0.2, 0.3, 1.0, 0.95], [0.1, 0.0, 0.95, 1.0]])


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def test_series_differ_in_greyscale():
    """Neighbours differ in lightness, and every one in marker and line."""
    lightness = [float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114))) for colour in COLOURS]
    assert min(abs(a - b) for a, b in itertools.pairwise(lightness)) > 0.1
    for part in ("marker", "linestyle", "color"):
        assert len({str(series(k)[part]) for k in range(len(COLOURS))}) == len(COLOURS)


def test_gates_sorted_and_as_pixels():
    gates = torch.tensor([0.0, 1.0, 0.4, 0.0], requires_grad=True)
    axes = plot_gates(gates, name="layer.0")
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], [1, 0.4, 0, 0], atol=1e-6)
    assert axes.get_title() == "layer.0: 2 of 4 open"
    np.testing.assert_allclose(plot_gates(gates, shape=(2, 2)).images[0].get_array(), [[0, 1], [0.4, 0]], atol=1e-6)
    marks = plot_gates(gates, image=torch.ones(2, 2)).lines[0]
    assert marks.get_xydata().tolist() == [[1, 0], [0, 1]]


def test_density_and_atoms():
    gate = HardConcrete(torch.tensor(0.0))
    axes = plot_density(gate)
    atoms = [float(gate.log_prob_zero.exp()), float(gate.log_prob_one.exp())]
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], atoms)
    curve = axes.lines[0].get_xydata()
    np.testing.assert_allclose(curve[:, 1], gate.log_prob(torch.tensor(curve[:, 0]).float()).exp(), rtol=1e-4)


def test_inclusion_beside_intervals():
    """Bars as long as the probabilities, lines from end to end, the first feature on top."""
    left, right = plot_inclusion([0.9, 0.25], [-1.0, 0.0], [2.0, 0.5], mean=[0.5, 0.1], names=["age", "bmi"])
    assert [bar.get_width() for bar in left.patches] == [0.9, 0.25]
    assert [bar.get_y() + bar.get_height() / 2 for bar in left.patches] == [0.0, 1.0]
    assert [label.get_text() for label in left.get_yticklabels()] == ["age", "bmi"]
    assert left.get_ylim() == (1.5, -0.5)
    ends = [segment.tolist() for segment in right.collections[0].get_segments()]
    assert ends == [[[-1.0, 0.0], [2.0, 0.0]], [[0.0, 1.0], [0.5, 1.0]]]
    assert right.lines[0].get_xydata().tolist() == [[0.5, 0.0], [0.1, 1.0]]


def test_inclusion_beside_other_methods():
    _, right = plot_inclusion([0.9, 0.25], [-1.0, 0.0], [2.0, 0.5], mean=[0.5, 0.1], others={"LASSO": [0.4, 0.0]})
    means, lasso = right.lines[:2]
    assert lasso.get_xydata().tolist() == [[0.4, 0.0], [0.0, 1.0]]
    assert means.get_color() != lasso.get_color()
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["posterior mean", "LASSO"]


def test_inclusion_on_axes_of_ones_own():
    _, axes = plt.subplots(1, 2)
    assert plot_inclusion([1.0], [0.0], [1.0], axes=axes) is axes
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["0"]
    assert len(axes[1].lines) == 1  # that of 0


def test_credible_sets_over_correlations():
    """The matrix in the order of the sets, a frame around each."""
    axes = plot_credible_sets([[3, 2], [0]], CORRELATION, names=list("abcd"))
    np.testing.assert_array_equal(axes.images[0].get_array(), CORRELATION[[3, 2, 0]][:, [3, 2, 0]])
    assert axes.images[0].get_clim() == (-1, 1)
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in labels] == ["d", "c", "a"]
    frames = [(line.get_xdata().min(), line.get_xdata().max()) for line in axes.lines]
    assert frames == [(-0.5, 1.5), (1.5, 2.5)]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_gates([1.5], name="z"), r"in \[0, 1\], but z has"),
        (lambda: plot_inclusion([0.5], [0.0, 1.0], [1.0]), r"lower of the shape of active_probs, .*got \(2,\)"),
        (lambda: plot_inclusion([1.5], [0.0], [1.0]), r"active_probs in \[0, 1\]"),
        (lambda: plot_credible_sets([[0, 4]], CORRELATION), "from 0 to 3"),
        (
            lambda: plot_credible_sets([[0]], CORRELATION, names=list("abcde")),
            "a name for each of 4 features, but got 5",
        ),
    ],
)
def test_what_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
