"""The programs of docs/howto that need an extra or a group of processes, and do not run with the docs."""

import re
from pathlib import Path

import pytest

from tests.processes import python

PAGES = Path(__file__).parents[2] / "docs" / "howto"
SETUP = re.search(
    r"^```{code-cell} ipython3\n(.*?)^```$", (PAGES / "l0_gate.md").read_text(), re.DOTALL | re.MULTILINE
).group(1)
PROGRAMS = [
    program
    for name in ("lightning.md", "transformers.md", "distributed.md")
    for program in re.findall(r"^```python\n(.*?)^```$", (PAGES / name).read_text(), re.DOTALL | re.MULTILINE)
]
NEEDS = ("lightning", "accelerate", None)
BUDGETS = (0.1, 0.8, 0.1)


def test_every_program_is_run():
    assert len(PROGRAMS) == len(NEEDS)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "needs", "budget"), list(zip(PROGRAMS, NEEDS, BUDGETS, strict=False)))
def test_program_runs_as_it_stands(program, needs, budget, tmp_path, monkeypatch):
    if needs is not None:
        pytest.importorskip(needs)
    monkeypatch.chdir(tmp_path)
    if needs is None:
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
            monkeypatch.setenv(name, str(value))
    printed = python(f"{SETUP}\n{program}")
    (fraction,) = re.findall(r"cost: ([\d.]+) of the full network", printed)
    assert 0.9 * budget < float(fraction) <= budget
