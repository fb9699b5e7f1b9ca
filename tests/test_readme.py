"""README.md's programs: each runs by itself, in a fresh process and folder, and ends where the text says."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def finds_the_two_features(printed: str) -> None:
    inclusion, mean, deviation = (
        [float(number) for number in re.findall(r"-?\d+\.\d*", line)] for line in printed.splitlines()
    )
    assert len(inclusion) == len(mean) == len(deviation) == 10
    assert min(inclusion[0], inclusion[3]) > 0.99
    # The exact posterior of this draw of the data has 0.06 at most for the others, and 0.036 and 0.034.
    assert max(p for i, p in enumerate(inclusion) if i not in (0, 3)) < 0.15
    assert 0.03 < deviation[0] < 0.054
    assert 0.03 < deviation[3] < 0.05
    # The truth is 2 and -1; the posterior's means are within three deviations.
    assert abs(mean[0] - 2) < 0.11
    assert abs(mean[3] + 1) < 0.11


def prunes_half_of_the_weights(printed: str) -> None:
    found = re.fullmatch(r"test error ([\d.]+)%, weights left ([\d.]+)%, outputs differ by (\S+) at most\n", printed)
    assert found is not None, printed
    error, left, certificate = map(float, found.groups())
    assert error < 6  # five seeds had 1.9 to 3.1
    assert left < 50  # five seeds had 19.1 to 21.4
    assert certificate < 1e-5


CHECKS: tuple[Callable[[str], None], ...] = (finds_the_two_features, prunes_half_of_the_weights)


def test_every_program_has_its_check() -> None:
    assert len(PROGRAMS) == len(CHECKS)
    for i, program in enumerate(PROGRAMS):
        compile(program, f"README.md, program {i + 1}", "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("program", "check"), list(zip(PROGRAMS, CHECKS, strict=False)), ids=["regression", "network"])
def test_program_runs_as_it_stands(program: str, check: Callable[[str], None], tmp_path: Path) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    check(finished.stdout)
    assert not list(tmp_path.iterdir())
