"""The benchmarks of posteriors, tried out with few steps, so that they work on the day that they are needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"


def run(script, *arguments):
    """What a script prints, whether or not its limits are kept."""
    found = subprocess.run([sys.executable, str(BENCH / script), *arguments], capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr
    assert "Traceback" not in found.stderr, found.stderr
    return found.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("line", "design"), [("1", "exact pair"), ("3", "near-duplicates"), ("6", "exact pair")])
def test_fits_are_compared(line, design):
    """One row for each design and guide."""
    printed = run("bench_posteriors.py", "--line", line, "--quick", "--design", design)
    assert f"| {design}" in printed


@pytest.mark.slow
def test_enumeration_is_calibrated():
    """Twenty replicates of the exact posterior; the ranks of both quantities."""
    printed = run("simulation_based_calibration.py", "--quick", "--exact-only", "--setting", "known")
    assert "AR(.8), unknown: 20 replicates" in printed
    assert printed.count("ranks p = ") == 14
