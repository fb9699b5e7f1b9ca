"""The benchmark for a GPU, tried out on a CPU, so that it works on the day that it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "bench" / "bench_gpu.py"


@pytest.mark.slow
def test_every_piece_runs_and_goes_on_where_it_stopped(tmp_path):
    """A short run and a long one; the report has every table."""
    options = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]

    def run(*arguments):
        return subprocess.run(
            [sys.executable, str(SCRIPT), *arguments, *options], capture_output=True, text=True, check=True
        ).stdout

    assert "stopped before 'λ = 0.001'" in run("cifar", "--minutes", "0.001")
    printed = run("equality", "speed", "cifar", "report", "--minutes", "9")
    assert "cifar: epochs:" not in printed  # that was found before
    assert "Equality in float64" in printed
    for row in ("| MLP, float32, eager |", "| WRN-28-10, bfloat16, compile |", "| dropout 0.3 |"):
        assert row in printed
