"""examples/circuit_edges.py: its table and picture, its texts, and the known circuit."""

import pytest
import torch

import circuit_edges
from circuit_edges import Options
from common.data import repeated_texts


def test_small_run(tmp_path, capsys, monkeypatch):
    """A line for each method and number of edges, and a picture."""
    monkeypatch.setattr(circuit_edges, "TEST", 8)
    monkeypatch.setattr(circuit_edges, "POINTS", 1)
    monkeypatch.setattr(circuit_edges, "GATED_BATCH", 2)
    monkeypatch.setattr(circuit_edges, "BATCH", 2)
    results = circuit_edges.main(Options(edges=(16,), steps=20, seeds=(1, 2), out=tmp_path))
    assert {method: list(by_edges) for method, by_edges in results.items()} == {
        method: [16] for method in ("gates", "patching", "integrated")
    }
    assert all(kl > 0 for kl, _ in results["gates"][16])
    assert all(known[-2:] in ("/7", "/8") for _, known in results["gates"][16])
    assert len(capsys.readouterr().out.splitlines()) == 2 + 1 + 3
    assert (tmp_path / "circuit_edges.png").stat().st_size > 1000


def test_texts_repeat():
    """Where a text repeats, the token that follows has followed the same token before."""
    torch.manual_seed(0)
    text, answer, repeats = repeated_texts(20, 32, 24)
    for row, following, repeat in zip(text.tolist(), answer.tolist(), repeats.tolist(), strict=True):
        for t in range(24):
            assert repeat[t] == (row[t] in row[:t])
            assert not repeat[t] or following[t] == row[row.index(row[t]) + 1]


@pytest.mark.slow
def test_known_edges_stay(tmp_path):
    """At twice their number, with less KL than by attribution patching."""
    results = circuit_edges.main(Options(out=tmp_path))
    ((kl, known),) = results["gates"][16]
    assert known in ("7/7", "8/8")
    assert kl < results["patching"][16][0][0]
