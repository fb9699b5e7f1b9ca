"""Families and objectives in the main job, and the comparisons over them."""

import json
from dataclasses import replace

import pytest

import compare_families
import compare_objectives
import mnist
from common.networks import FAMILIES, KEEP_RATES, init_active_prob


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
