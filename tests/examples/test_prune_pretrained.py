"""The command of examples/prune_pretrained.py."""

import pytest
import torch
from torch import nn

import prune_pretrained
from prune_pretrained import Options


def test_the_command(tmp_path, capsys, monkeypatch):
    """A row per budget, within it; a second command must resume, and hands out the same rows."""
    monkeypatch.setattr(
        prune_pretrained,
        "ResidualNetwork",
        lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    options = Options(budgets=(0.5, 0.2), epochs=1, out=tmp_path)
    rows = prune_pretrained.main(options)
    assert [row.budget for row in rows] == [0.5, 0.2]
    assert all(0.8 < row.used <= 1 and 0 <= row.end <= 100 for row in rows)
    assert (tmp_path / "pruned.png").stat().st_size > 0
    assert (tmp_path / "pruned.md").read_text().strip() in capsys.readouterr().out
    network = torch.load(tmp_path / "0.2-network.pt", weights_only=False)
    assert network[1].out_features < 32
    with pytest.raises(FileExistsError, match="resume=True"):
        prune_pretrained.main(options)
    assert prune_pretrained.main(Options(budgets=(0.5, 0.2), epochs=1, out=tmp_path, resume=True)) == rows
