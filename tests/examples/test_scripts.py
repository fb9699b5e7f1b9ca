"""Scripts that mask, prune and compare networks: their tables, pictures and files, in quick runs."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import compare_families
import compare_objectives
import input_masks
import mnist
import prune_pretrained
import transformer_heads
from common.networks import FAMILIES, KEEP_RATES, init_active_prob


def test_quick_run_of_masks():
    """What is removed and what is put back add up; a network that learned nothing finds nothing."""
    torch.manual_seed(0)
    _, result = input_masks._run(input_masks._tokens(), 20)
    assert 0 < result.kept <= 12
    for score, (deletion, insertion) in result.curves.items():
        assert len(deletion) == len(insertion) == 13
        torch.testing.assert_close(deletion[[0, -1]], insertion[[-1, 0]])
        assert 0 <= result.found[score][0] < 0.5


@pytest.mark.slow
def test_masks_open_what_is_needed(tmp_path, capsys):
    """On tokens nearly always, and without these the prediction is gone; a table and a picture."""
    results = input_masks.main(input_masks.Options(seeds=(0,), out=tmp_path))
    (tokens,), (digits,) = results.values()
    assert tokens.accuracy > 0.8
    assert not any(digits.found.values())
    assert tokens.found["L0 masks"][0] > 0.7
    for task in (tokens, digits):
        (deletion, insertion), random = task.curves["L0 masks"].mean(1), task.curves["random"].mean(1)
        assert deletion < random[0] - 0.1
        assert insertion > random[1] + 0.1
    assert tokens.curves["L0 masks"][1].mean() > tokens.curves["gradient x input"][1].mean() + 0.1
    assert (tmp_path / "input_masks.png").stat().st_size > 1000
    assert len(capsys.readouterr().out.splitlines()) == 9


WEIGHTS = 32 * 4 + 32 + 16 * 32 + 3 * (4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32) + 2 * 32 + 10 * 32 + 10


@pytest.mark.slow
def test_quick_run_of_heads(capsys):
    """A row without λ, and one in which a price that nothing is worth closes all heads; each line is printed."""
    rows = transformer_heads.main(transformer_heads.Options(epochs=8, lams=(1000.0,)))
    assert [row.lam for row in rows] == [None, 1000.0]
    assert rows[0].heads == (0, 24)
    assert rows[0].units == (0, 192)
    assert rows[0].branches == (0, 6)
    assert rows[0].weights == WEIGHTS
    assert rows[1].heads[0] > 0
    assert rows[1].weights < WEIGHTS
    assert all(0 < accuracy <= 100 for row in rows for accuracy in (row.accuracy, row.trained_on))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "0 of 24" in lines[1]


def test_pretrained_networks_by_one_command(tmp_path, capsys, monkeypatch):
    """A row per budget, within it; a second command must resume, and hands out the same rows."""
    monkeypatch.setattr(
        prune_pretrained,
        "ResidualNetwork",
        lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    options = prune_pretrained.Options(budgets=(0.5, 0.2), epochs=1, out=tmp_path)
    rows = prune_pretrained.main(options)
    assert [row.budget for row in rows] == [0.5, 0.2]
    assert all(0.8 < row.used <= 1 and 0 <= row.end <= 100 for row in rows)
    assert (tmp_path / "pruned.png").stat().st_size > 0
    assert (tmp_path / "pruned.md").read_text().strip() in capsys.readouterr().out
    network = torch.load(tmp_path / "0.2-network.pt", weights_only=False)
    assert network[1].out_features < 32
    with pytest.raises(FileExistsError, match="resume=True"):
        prune_pretrained.main(options)
    assert (
        prune_pretrained.main(prune_pretrained.Options(budgets=(0.5, 0.2), epochs=1, out=tmp_path, resume=True)) == rows
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shrink", [False, True])
def test_every_family_trains(family, shrink, tmp_path):
    """Two epochs of the main job: finite metrics, a certificate, and the papers' rates at the start."""
    metrics = mnist.main(mnist.Options(family=family, epochs=2, out=tmp_path, shrink=shrink))
    assert metrics["certificate"] < 1e-5
    assert all(0.4 < rate < 1 for rate in init_active_prob(KEEP_RATES["mlp"], family))


@pytest.mark.slow
def test_sweep(tmp_path):
    """A row per family and price; runs that are there are not repeated."""
    options = compare_families.Options(families=("hard_concrete", "power_law"), lams=(0.05,), epochs=1, out=tmp_path)
    rows = compare_families.main(options)
    assert [row["family"] for row in rows] == ["hard_concrete", "power_law"]
    path = tmp_path / "power_law-0.05-1" / "metrics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "test_error_percent": 42.0}))
    assert compare_families.main(options)[1]["errors"] == [42.0]
    assert "| power_law | 0.05 | 42.00 % |" in (tmp_path / "families.md").read_text()
    assert (tmp_path / "families.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"is of another run: .*hold_out: expected 100, got 0"):
        compare_families.main(replace(options, hold_out=100))
    held_out = compare_families.Options(families=("bernoulli",), lams=(0.05,), epochs=1, hold_out=100, out=tmp_path)
    compare_families.main(held_out)
    assert "held-out error" in (tmp_path / "families.md").read_text()


@pytest.mark.slow
def test_the_comparison_runs(tmp_path, capsys):
    """One epoch each: tables, files, and rates that return to the prior without data."""
    comparison = compare_objectives.main(compare_objectives.Options(epochs=1, out=tmp_path))
    assert json.loads((tmp_path / "comparison.json").read_text()) == comparison
    assert (tmp_path / "comparison.png").stat().st_size > 0
    assert {entry["name"] for entry in comparison["sweep"]} == {"l0", "free_energy", "spike_slab"}
    for rate, entry in zip(compare_objectives.RATES, comparison["rates"], strict=True):
        assert entry["without_data"] == pytest.approx(rate, abs=1e-3)
    assert "without data" in capsys.readouterr().out
