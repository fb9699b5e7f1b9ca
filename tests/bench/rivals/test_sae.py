"""The rivals of sparse autoencoders against values by hand, and rows that are not run again."""

import json
import math
import sys

import pytest
import torch

from tests.bench.rivals import bench_sae
from tests.bench.rivals.bench_sae import BANDWIDTH, Autoencoder, Features, JumpReLU


def test_derivatives_of_thresholds():
    """Those of arXiv:2407.14435 with a rectangle as kernel, for what is within half a bandwidth of its threshold."""
    before = torch.tensor([[0.5, 0.5 + BANDWIDTH / 4, 2.0], [0.5 - BANDWIDTH / 4, 0.1, 0.0]], requires_grad=True)
    threshold = torch.full((3,), 0.5, requires_grad=True)
    units, is_active = JumpReLU.apply(before, threshold)
    assert is_active.tolist() == [[0, 1, 1], [0, 0, 0]]
    torch.testing.assert_close(units, before * is_active)
    (3 * units.sum() + 7 * is_active.sum()).backward()
    of_one = -(0.5 * 3 + 7) / BANDWIDTH
    assert threshold.grad.tolist() == pytest.approx([2 * of_one, of_one, 0])
    assert before.grad.tolist() == [[0, 3, 3], [0, 0, 0]]


def test_examples_have_the_features():
    """Their number has the mean 20, whose standard error is .07, and their squares that of sizes from .5 to 1.5."""
    features = Features(400, 3)
    x = features.draw(4000)
    torch.testing.assert_close(features.directions.norm(dim=0), torch.ones(400))
    assert x.square().sum(1).mean().item() == pytest.approx(20 * (1 + 1 / 12), rel=0.1)
    network = Autoencoder("top-k", 400)
    assert (network(x)[1].sum(1) == bench_sae.ACTIVE).all()


def test_cells_are_run_once(tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = ["bench_sae.py", "--out", str(out), "--features", "64", "--seeds", "0", "--steps", "10"]
    monkeypatch.setattr(sys, "argv", arguments)
    bench_sae.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in rows] == list(bench_sae.METHODS)
    assert all(math.isfinite(row["unexplained"]) and 0 < row["active"] <= 64 for row in rows)
    printed = capsys.readouterr().out
    assert printed.count("±") == 5 * len(rows)
    bench_sae.main()
    assert len(out.read_text().splitlines()) == len(rows)
    assert capsys.readouterr().out == printed
