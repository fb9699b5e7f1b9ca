"""The benchmarks, tried out with few steps and without a GPU, so that they work on the day that they are needed."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"
pytestmark = pytest.mark.slow


def run(script, *arguments):
    """What a script prints, whether or not its limits are kept."""
    found = subprocess.run([sys.executable, str(BENCH / script), *arguments], capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr
    assert "Traceback" not in found.stderr, found.stderr
    return found.stdout


@pytest.mark.parametrize(("line", "design"), [("1", "exact pair"), ("3", "near-duplicates"), ("6", "exact pair")])
def test_fits_are_compared(line, design):
    printed = run("posteriors/bench_posteriors.py", "--line", line, "--quick", "--design", design)
    assert f"| {design}" in printed


def test_enumeration_is_calibrated():
    """Twenty replicates of the exact posterior; the ranks of both quantities."""
    printed = run("posteriors/simulation_based_calibration.py", "--quick", "--exact-only", "--setting", "known")
    assert "AR(.8), unknown: 20 replicates" in printed
    assert printed.count("ranks p = ") == 14


def test_the_whole_command_is_timed():
    """And what its epochs cost beside their training."""
    printed = run("steps/bench_epochs.py", "--epochs", "2", "3")
    assert [line.split()[1] for line in printed.splitlines()[2:]] == ["2", "3"]


def test_every_part_for_a_gpu_runs_and_continues_where_it_stopped(tmp_path):
    """A short run and a long one; the report has every table."""
    script, options = "steps/bench_gpu.py", ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    stopped = run(script, "equality", "--minutes", "0.001", *options)
    assert "equality stopped before" in stopped
    printed = run(script, "equality", "speed", "report", "--minutes", "9", *options)
    assert not set(stopped.splitlines()[:-1]) & set(printed.splitlines())  # those were found before
    assert "Equality in float64" in printed
    for row in ("| MLP, float32, eager |", "| WRN-28-10, bfloat16, compile |"):
        assert row in printed
