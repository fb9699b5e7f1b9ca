"""The two pictures of README.md, from what its first two programs find: python docs/_ext/front_page.py"""

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from run_code import programs

DOCS = Path(__file__).resolve().parents[1]
ACTIVE, CLOSED, TEXT = "#e8710a", "#9aa0a6", "#80868b"  # readable on white and on black


def figure() -> tuple[plt.Figure, plt.Axes]:
    """Of 384 by 250 pixels on a page: two side by side, or one on a phone."""
    shown, axes = plt.subplots(figsize=(4, 2.6), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return shown, axes


def draw_inclusion(found: dict[str, Any]) -> plt.Figure:
    """The probability that each feature of the diabetes data has an effect."""
    pips = found["model"].summary()["PIP"].sort_values()
    shown, axes = figure()
    axes.barh(pips.index, pips, color=[ACTIVE if pip > 0.5 else CLOSED for pip in pips])
    axes.set(xlim=(0, 1), xlabel="probability of an effect")
    return shown


def widths(network: nn.Module) -> list[int]:
    """Inputs of each dense layer, and the outputs of the last."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    return [layer.in_features for layer in layers] + [layers[-1].out_features]


def draw_widths(found: dict[str, Any]) -> plt.Figure:
    """The units of each layer of the digits' network, before and after."""
    before, after = widths(found["net"]), widths(found["result"].network)
    shown, axes = figure()
    names = ["inputs", *(f"hidden {i + 1}" for i in range(len(before) - 2)), "outputs"][::-1]
    axes.barh(names, before[::-1], color=CLOSED, label="before")
    axes.barh(names, after[::-1], color=ACTIVE, label="after")
    for name, old, new in zip(names, before[::-1], after[::-1], strict=True):
        axes.text(old + 5, name, f"{old} → {new}", va="center")
    axes.set(xlim=(0, 1.35 * max(before)), xlabel="units")
    axes.legend(frameon=False, loc="lower right")
    return shown


def main() -> None:
    """Run the programs, draw, and save on a transparent ground."""
    keys = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    mpl.rcParams.update(dict.fromkeys(keys, TEXT) | {"font.size": 12, "svg.hashsalt": "pyro_l0"})
    select, prune, *_ = programs(DOCS.parent / "README.md")
    for program, draw, name in ((select, draw_inclusion, "inclusion"), (prune, draw_widths, "before_and_after")):
        found: dict[str, Any] = {}
        exec(program.code, found)
        draw(found).savefig(DOCS / "images" / f"{name}.svg", transparent=True)


if __name__ == "__main__":
    main()
