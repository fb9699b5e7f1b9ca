"""Scores of edges as the evaluation of the Mechanistic Interpretability Benchmark reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["graph"]


def graph(edges: Sequence[tuple[str, str]], scores: Tensor, gates: Tensor, width: int) -> dict[str, Any]:
    """What the benchmark's file holds.

    Args:
        edges: names of writer and reader.
        scores: of the edges, shape ``(edges,)``.
        gates: of the edges, which are in the circuit where these are not 0; likewise.
        width: of the residual stream.

    Raises:
        ValueError: there are other readers or writers than heads and a feed-forward block in each layer.
    """
    found = dict[str, dict[str, Any]]()
    for (writer, reader), score, gate in zip(edges, scores.tolist(), gates.tolist(), strict=True):
        for name in _names(writer, reader):
            edge = found.setdefault(name, {"score": 0.0, "in_graph": False})
            edge["score"] += score
            edge["in_graph"] |= gate != 0
    numbers = [[int(x) for name in found for x in re.findall(of, name)] for of in (r"[am](\d+)", r"h(\d+)")]
    layers, heads = (1 + max(x, default=-1) for x in numbers)
    is_parallel = "a0.h0->m0" not in found
    written = [1 + k * (heads + 1) for k in range(layers + 1)]  # nodes in front of each layer, and of the logits
    known = sum((3 * heads + 1) * n + (0 if is_parallel else heads) for n in written[:-1]) + written[-1]
    if len(found) != known:
        raise ValueError(
            f"Expected layers of heads and a feed-forward block each, {known} edges, but got {len(found)}; use "
            "to_frame() instead."
        )
    nodes = ["input", *(f"a{k}.h{h}" for k in range(layers) for h in range(heads))]
    nodes += [f"m{k}" for k in range(layers)]
    opened = [re.split("->|<", name) for name, edge in found.items() if edge["in_graph"]]
    in_circuit = {writer for writer, *_ in opened} & {"input", *(reader for _, reader, *_ in opened)}
    sizes = {"n_layers": layers, "n_heads": heads, "d_model": width}
    return {
        "cfg": sizes | {"parallel_attn_mlp": is_parallel},
        "nodes": {x: {"in_graph": x in in_circuit} for x in nodes} | {"logits": {"in_graph": True}},
        "edges": found,
    }


def _names(writer: str, reader: str) -> list[str]:
    """The edges of the benchmark's graph that an edge is."""
    is_block = re.fullmatch(r"a\d+\.h\d+|m\d+", writer)
    heads = re.fullmatch(r"(a\d+\.h)(\d+)(?:-(\d+))?(<[qkv]>)", reader)
    is_other = not heads and not re.fullmatch(r"m\d+|output", reader)
    if is_other or (not is_block and re.fullmatch(r"a\d+.*|m\d+.*|.*#\d+", writer)):
        raise ValueError(
            f"Expected edges between heads, feed-forward blocks and the output, but there is one from {writer!r} to "
            f"{reader!r}, which the benchmark does not know; use to_frame() instead."
        )
    source = writer if is_block else "input"
    if not heads:
        return [f"{source}->{'logits' if reader == 'output' else reader}"]
    front, first, last, letter = heads.groups()
    return [f"{source}->{front}{h}{letter}" for h in range(int(first), int(last or first) + 1)]
