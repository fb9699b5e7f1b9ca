"""What pictures of examples show, by their data: trainings, frontiers, graphs, bars and small images."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from common.figures import figure_axes, plot_bars, plot_curves, save_figure
from common.plots import plot_edges, plot_frontier, plot_images, plot_training, short_names


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def test_training_has_a_panel_for_each_quantity():
    panels = {"error, %": {"": [4.0, 2.0]}, "open units": {"net.0.gate": [30, 12], "net.2.gate": [10, 6]}}
    error, units = plot_training(panels, [5, 10], lines={"open units": {"dense": 30}}, log=["error, %"])
    assert error.lines[0].get_xydata().tolist() == [[5.0, 4.0], [10.0, 2.0]]
    assert (error.get_yscale(), error.get_xlabel(), error.get_ylabel()) == ("log", "epoch", "error, %")
    assert error.get_legend() is None
    assert [line.get_label() for line in units.lines] == ["net.0", "net.2", "dense"]
    assert units.get_ylim()[0] == 0


def test_a_curve_has_its_own_x_and_spread():
    axes = plot_curves({"a": torch.tensor([[3.0, 4.0], [1.0, 2.0]])}, spreads={"a": [0.5, 0.1]}, xlabel="x", ylabel="y")
    points, _, (bars,) = axes.containers[0]
    assert points.get_xydata().tolist() == [[3.0, 1.0], [4.0, 2.0]]
    assert bars.get_segments()[0][:, 1].tolist() == [0.5, 1.5]


def test_frontier_has_published_points_in_the_colour_of_their_method():
    axes = plot_frontier(
        {"gates": [[2e4, 5e3], [1.6, 1.9]]}, {"gates": [[1e4], [1.8]], "other": [[1e4], [2.5]]}, dense=1.5
    )
    ours, dense, theirs, other = axes.lines
    assert ours.get_xydata().tolist() == [[5e3, 1.9], [2e4, 1.6]]
    assert dense.get_ydata()[0] == 1.5
    assert theirs.get_xydata().tolist() == [[1e4, 1.8]]
    assert theirs.get_color() == ours.get_color() != other.get_color()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_edges_that_are_not_known_are_dashed():
    axes = plot_edges([("a", "b"), ("b", "c")], {"a": (0, 0), "b": (1, 0), "c": (2, 1)}, known=[("a", "b")])
    arrows = [text.arrow_patch for text in axes.texts if text.get_text() == ""]
    assert [arrow.get_linestyle() for arrow in arrows] in (["-", "--"], ["solid", "dashed"])


def test_bars():
    axes = plot_bars({"a": [1.0, 2.0], "b": [3.0, 4.0]}, ["x", "y"], ylabel="loss, nats", spreads={"a": [0.1, 0.2]})
    assert [bar.get_height() for bar in axes.patches] == [1.0, 2.0, 3.0, 4.0]


def test_images_share_their_colours():
    images = torch.linspace(-1, 1, 12 * 6).view(12, 2, 3)
    axes = plot_images(images, titles=[f"unit {k}" for k in range(12)], label="weight", limit=0.5)
    assert [panel.get_title() for panel in axes] == [f"unit {k}" for k in range(12)]
    assert {panel.images[0].get_clim() for panel in axes} == {(-0.5, 0.5)}
    np.testing.assert_allclose(axes[11].images[0].get_array(), images[11])
    assert len(axes[0].figure.axes) == 13  # with the bar of colours


def test_a_figure_is_written_and_closed(tmp_path):
    save_figure(figure_axes(1, 2), tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 1000
    assert not plt.get_fignums()


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["net.layer.0.gate", "net.layer.1.gate"], ["layer.0", "layer.1"]),
        (["encoder.z", "decoder.z"], ["encoder", "decoder"]),
        (["z"], ["z"]),
        (["0", "3"], ["0", "3"]),
        (["a.z", "a.b.z"], ["z", "b.z"]),
        (["", "a"], ["", "a"]),
        ([], []),
    ],
)
def test_names_lose_what_they_share(names, short):
    assert short_names(names) == short


def test_bars_without_a_height_are_refused():
    with pytest.raises(ValueError, match="Expected 2 heights of 'a'"):
        plot_bars({"a": [1.0]}, ["x", "y"], ylabel="y")
