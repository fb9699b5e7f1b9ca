"""examples/lora_rank.py: ranks and merged weights of a quick run, and that gates choose better than equal ranks."""

import statistics

import pytest

import lora_rank
from lora_rank import Options


def test_quick_run(tmp_path, capsys):
    """Half of the ranks are left, merging changes nothing, and there is a line of each task and choice."""
    results = lora_rank.main(Options(steps=17, seeds=(0,), out=tmp_path))
    for (_, kind), (result,) in results.items():
        assert sum(result.ranks) == {"all ranks": 40, "half, uniform": 20, "half, gates": 20}[kind]
        assert result.merging < 1e-4
        assert 0 < result.error <= 100
    assert (tmp_path / "lora_rank.png").stat().st_size > 1000
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[2].split()[-5:] == ["4"] * 5


@pytest.mark.slow
def test_gates_lose_no_more_than_uniform_ranks(tmp_path):
    """On average over three seeds; and most ranks are where it is known that a change suffices."""
    results = lora_rank.main(Options(out=tmp_path))
    for task in ("rotated", "renamed"):
        gated, uniform = results[task, "half, gates"], results[task, "half, uniform"]
        assert statistics.mean(r.loss for r in gated) <= statistics.mean(r.loss for r in uniform)
        for result in gated:
            first, last = sum(result.ranks[:2]), sum(result.ranks[-2:])
            assert first > last if task == "rotated" else last > first
