"""Processor seconds of the engine: ``python tests/bench/pruning/bench_engine.py``, about three minutes.

A row for each network: of `suggest_gates`; of `NetworkCost` with the gates that it suggests; of the first weights and
multiply-adds; of `compact` with every other gate closed, and its peak memory beyond what was there, in MiB, beside
that of the network; and of a forward and backward pass in float64. Each network has a process of its own, and each
process a small network first. Below are the exponents of the growth of residual MLPs with depth and with width, by
least squares. ``--only`` names some of the networks. Those of timm and torchvision need the extra ``zoo``; a row
without its library says so.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from pyro_l0.compaction import compact
from pyro_l0.nn import NetworkCost, insert_gates, suggest_gates
from pyro_l0.nn.gate import gate_names
from tests.engine.zoo.libraries import timm, torchvision

_Result = TypeVar("_Result")
Case = Callable[[], tuple[nn.Module, Tensor]]


class Residual(nn.Module):
    """A block of a ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Identity() if stride == 1 else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )  # fmt: skip
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.branch(x) + self.shortcut(x))


def small_resnet(width: int) -> tuple[nn.Module, Tensor]:
    """A ResNet-18 for CIFAR."""
    blocks = [
        Residual(width << max(stage - (block == 0), 0), width << stage, 2 if stage and block == 0 else 1)
        for stage in range(4)
        for block in range(2)
    ]
    stem = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    tail = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)
    return nn.Sequential(*stem, *blocks, *tail), torch.randn(2, 3, 32, 32)


class ResidualUnits(nn.Module):
    """A block of a residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.act = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.act(self.inner(self.norm(x))))


def residual_mlp(width: int, depth: int) -> tuple[nn.Module, Tensor]:
    blocks = [ResidualUnits(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(20, width), *blocks, nn.Linear(width, 3)), torch.randn(4, 20)


def of_timm(name: str, **given: object) -> tuple[nn.Module, Tensor]:
    network, inputs = timm(name, 64, **given)
    return network, inputs(2)


def of_torchvision(name: str) -> tuple[nn.Module, Tensor]:
    network, inputs = torchvision(name, "classification")
    return network, inputs(2)


DEPTHS, WIDTHS = (2, 4, 8, 16), (64, 128, 256, 512)
_vit = partial(of_timm, "vit_tiny_patch16_224", img_size=64)
CASES: dict[str, Case] = {
    **{f"ResNet-18, width {width}": partial(small_resnet, width) for width in (16, 64)},
    "convnext_atto": partial(of_timm, "convnext_atto"),
    **{f"vit_tiny, {depth} blocks": partial(_vit, depth=depth) for depth in (4, 12)},
    **{f"MLP, width {width}": partial(residual_mlp, width, 4) for width in WIDTHS},
    **{f"MLP, {depth} blocks": partial(residual_mlp, 64, depth) for depth in DEPTHS},
    **{name: partial(of_torchvision, name) for name in ("alexnet", "googlenet", "convnext_tiny")},
}
COLUMNS = ("suggest", "cost", "counts", "compact", "MiB", "network", "pass")


def measure(name: str) -> dict[str, float | str]:
    """The columns of a network, or why there are none."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _columns(*residual_mlp(4, 1))
    try:
        network, example = CASES[name]()
    except ImportError as error:
        return {"suggest": f"needs {error.name}"}
    return _columns(network.eval(), example)


def _columns(network: nn.Module, example: Tensor) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    suggestions = _timed(found, "suggest", lambda: suggest_gates(network, example))
    gated = insert_gates(network, suggestions)
    closed = {site: (torch.arange(gate.size) % 2).float() for site, gate in gate_names(gated).items()}
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts here
    _timed(found, "compact", lambda: compact(gated, closed, example, tolerance=1e-5))
    found["MiB"] = _memory("VmHWM") - before
    cost = _timed(found, "cost", lambda: NetworkCost(gated, example))
    _timed(found, "counts", lambda: (cost.weights(closed), cost.macs(closed)))
    doubled = copy.deepcopy(network).double()
    _timed(found, "pass", lambda: _sum(doubled(example.double())).backward())
    found["network"] = sum(x.numel() * x.element_size() for x in network.parameters()) / 2**20
    return found


def _timed(found: dict[str, float | str], name: str, function: Callable[[], _Result]) -> _Result:
    start = time.process_time()
    result = function()
    found[name] = time.process_time() - start
    return result


def _memory(name: str) -> float:
    """Of this process in MiB: ``VmRSS`` now, or ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def _sum(output: Tensor) -> Tensor:
    return output.sum()


def exponents(rows: Mapping[str, Mapping[str, float | str]]) -> None:
    """The slopes of log seconds over the logarithm of depth or of width."""
    for what, names, sizes in (
        ("depth", [f"MLP, {x} blocks" for x in DEPTHS], DEPTHS),
        ("width", [f"MLP, width {x}" for x in WIDTHS], WIDTHS),
    ):
        if rows.keys() >= {*names}:
            slopes = {
                column: np.polyfit(np.log(sizes), np.log([float(rows[name][column]) for name in names]), 1)[0]
                for column in ("suggest", "cost", "counts", "compact")
            }
            print(f"exponent in {what:11}" + "".join(f"{slope:10.2f}" for slope in slopes.values()))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="NETWORK")
    options = parser.parse_args()
    rows = {}
    print(f"{'network':22}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name in options.only:  # each in a fresh process, for its memory
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows[name] = pool.submit(measure, name).result()
        cells = [rows[name].get(column, "") for column in COLUMNS]
        texts = [x if isinstance(x, str) else f"{x:.0f}" if x >= 100 else f"{x:.2f}" for x in cells]
        print(f"{name:22}" + "".join(f"{text:>10}" for text in texts), flush=True)
    exponents(rows)


if __name__ == "__main__":
    main()
