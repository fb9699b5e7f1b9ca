"""Seconds to record and to analyse large networks: python tests/bench/pruning/bench_engine.py

A BERT of base size (12 layers, 768 units, 12 heads; a gate on every head and hidden unit) and a ResNet-50 (a gate
behind every activation in its blocks), written out here, with half of the gates closed. Columns: operations, seconds to
record a call (median of three; the network's own call is a part of it), seconds of that call alone, seconds of the
analysis, units removed of those closed, and multiply-adds before and after.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from pyro_l0.nn import Gate
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.gate import gate_names

_Result = TypeVar("_Result")


class Layer(nn.Module):
    """A layer of BERT: attention and dense units, each with a residual sum and a norm behind it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.head_gate = heads, Gate(heads, dim=1)
        self.inner, self.unit_gate = nn.Linear(width, 4 * width), Gate(4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
        x = self.norm(x + self.out(self.head_gate(weights @ v).transpose(1, 2).flatten(-2)))
        return self.last(x + self.outer(self.unit_gate(nn.functional.gelu(self.inner(x)))))


def bert() -> tuple[nn.Module, Tensor]:
    layers = [Layer(768, 12) for _ in range(12)]
    network = nn.Sequential(nn.Embedding(30_522, 768), nn.LayerNorm(768), *layers, nn.Linear(768, 2))
    return network, torch.arange(8)[None]


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *self.part(inputs, inner, 1, 1), nn.ReLU(), Gate(inner, dim=1),
            *self.part(inner, inner, 3, stride), nn.ReLU(), Gate(inner, dim=1),
            *self.part(inner, 4 * inner, 1, 1),
        )  # fmt: skip
        is_same = inputs == 4 * inner
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*self.part(inputs, 4 * inner, 1, stride))

    @staticmethod
    def part(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


def resnet() -> tuple[nn.Module, Tensor]:
    blocks, inputs = [], 64
    for number, inner in zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True):
        for i in range(number):
            blocks.append(Bottleneck(inputs, inner, 2 if i == 0 and inner > 64 else 1))
            inputs = 4 * inner
    stem = nn.Sequential(*Bottleneck.part(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return nn.Sequential(stem, *blocks, tail), torch.randn(1, 3, 224, 224)


def timed(function: Callable[[], _Result]) -> tuple[float, _Result]:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("network    operations  record    call  analysis  removed of closed    multiply-adds")
    for name, make in (("BERT-base", bert), ("ResNet-50", resnet)):
        network, example = make()
        network.eval()
        closed = {site: torch.arange(gate.size) % 2 == 1 for site, gate in gate_names(network).items()}
        recording_seconds, recording = timed(lambda network=network, example=example: record(network, example))
        with torch.no_grad():
            call_seconds, _ = timed(lambda network=network, example=example: network(example))
        seconds, analysis = timed(lambda recording=recording, closed=closed: analyse(recording, closed))
        removed = sum(len(units) for units in analysis.removed.values())
        print(
            f"{name:10}{len(recording.operations):11}{recording_seconds:8.2f}{call_seconds:8.2f}{seconds:10.2f}"
            f"{removed:9} of {sum(int(mask.sum()) for mask in closed.values()):6}"
            f"{analysis.multiply_adds(remaining=False):17,} to {analysis.multiply_adds():,}"
        )


if __name__ == "__main__":
    main()
