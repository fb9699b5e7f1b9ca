"""The comparison of the objectives, in a tiny setting."""

import json

import pytest

import compare_objectives
from compare_objectives import RATES, Options


@pytest.mark.slow
def test_the_comparison_runs(tmp_path, capsys):
    """One epoch each: tables, files, and rates that return to the prior without data."""
    comparison = compare_objectives.main(Options(epochs=1, out=tmp_path))
    assert json.loads((tmp_path / "comparison.json").read_text()) == comparison
    assert (tmp_path / "comparison.png").stat().st_size > 0
    assert {entry["name"] for entry in comparison["sweep"]} == {"l0", "free_energy", "spike_slab"}
    for rate, entry in zip(RATES, comparison["rates"], strict=True):
        assert entry["without_data"] == pytest.approx(rate, abs=1e-3)
    assert "without data" in capsys.readouterr().out
