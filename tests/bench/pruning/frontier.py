"""Error against weights of the MLP on MNIST, beside published points: python tests/bench/pruning/frontier.py

Draws ``frontier.csv``, in which the recipes' figures stand again, with those that papers print. A row's weights are
those left of 266,200; its error is the test error in percent: of the final epoch where it was measured here, and of
the best epoch where it was published. Writes ``docs/images/frontier.png``.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from common.figures import figure_axes, save_figure
from common.plots import plot_frontier

ROWS = Path(__file__).with_suffix(".csv")
PICTURE = Path(__file__).parents[3] / "docs" / "images" / "frontier.png"


def points(published: str) -> dict[str, list[list[float]]]:
    """By method, weights and errors, and what was measured also with the spread over seeds."""
    columns = ("weights", "error") if published == "yes" else ("weights", "error", "spread")
    found: dict[str, list[list[float]]] = {}
    with ROWS.open() as file:
        for row in csv.DictReader(file):
            if row["published"] == published:
                of_method = found.setdefault(row["method"], [[] for _ in columns])
                for values, column in zip(of_method, columns, strict=True):
                    values.append(float(row[column]))
    return found


def main() -> None:
    axes = figure_axes(figsize=(7, 4.2))
    plot_frontier(points("no"), points("yes"), size="weights left of 266,200", axes=axes)
    save_figure(axes, PICTURE)


if __name__ == "__main__":
    main()
