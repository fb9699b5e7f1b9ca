"""README.md's programs: each runs with the package as built, in a fresh process and folder, and ends where it says."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributions import MultivariateNormal

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import run_code

ROOT = Path(__file__).parents[1]

README = (ROOT / "README.md").read_text()
PROGRAMS = list(run_code.programs(ROOT / "README.md"))
SHOWN = re.findall(r"^```text\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def is_as_shown(printed: str) -> None:
    assert printed == SHOWN[0]


def prunes_to_a_tenth(printed: str) -> None:
    left = re.match(r"macs: [\d,]+ of 50,200 \(([\d.]+)%\)\n", printed)
    error = re.search(r"^at the end: ([\d.]+)$", printed, re.MULTILINE)
    assert left is not None, printed
    assert error is not None, printed
    assert 8.5 < float(left[1]) <= 10
    assert float(error[1]) < 6  # of the test images
    assert "Gate" not in printed.split("Sequential(")[1]


def leaves_units_out(printed: str) -> None:
    found = re.search(r"=10, out_features=(\d+),.*in_features=(\d+), out_features=1,", printed, re.DOTALL)
    assert found is not None, printed
    assert found[1] == found[2]
    assert 10 < int(found[1]) < 45


def is_the_exact_posterior(printed: str) -> None:
    found = torch.tensor([float(row.split()[1]) for row in printed.splitlines()[1:]], dtype=torch.float64)
    made: dict[str, torch.Tensor] = {}
    exec(PROGRAMS[3].code.split("def model")[0], made)
    x, y = made["x"].double(), made["y"].double()
    gates = torch.tensor(list(itertools.product((0.0, 1.0), repeat=x.shape[1])), dtype=torch.float64)
    covariances = torch.eye(len(x)) + torch.stack([x * row @ x.T for row in gates])
    evidence = MultivariateNormal(torch.zeros_like(y), covariances).log_prob(y)
    log_prior = torch.distributions.Bernoulli(torch.tensor(0.2, dtype=torch.float64)).log_prob(gates).sum(-1)
    exact = (evidence + log_prior).softmax(0) @ gates
    assert float((found - exact).abs().max()) < 0.03


CHECKS: tuple[Callable[[str], None], ...] = (is_as_shown, prunes_to_a_tenth, leaves_units_out, is_the_exact_posterior)
IDS = ["estimator", "one call", "layer", "model"]


def test_every_program_has_its_check() -> None:
    assert len(PROGRAMS) == len(CHECKS)
    for i, program in enumerate(PROGRAMS):
        compile(program.code, f"README.md, program {i + 1}", "exec")


def test_what_is_shown_passes_the_checks() -> None:
    is_the_exact_posterior(SHOWN[2])


def test_the_page_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_every_page_that_it_names_is_there() -> None:
    pages = re.findall(r"\]\((?!https?://)([^)]+)\)", README)
    assert pages
    assert all((ROOT / page).exists() for page in pages)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, which is built from the source distribution, and its dependencies.

    PYRO_L0_WHEEL names another one, which tools/release.py has built.
    """
    folder = tmp_path_factory.mktemp("wheel")

    def call(*command: str | Path) -> str:
        quiet = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [sys.executable, *command], cwd=folder, env=quiet, check=True, capture_output=True, text=True
        ).stdout

    if (wheel := os.environ.get("PYRO_L0_WHEEL")) is None:
        pytest.importorskip("build")
        call("-m", "build", "--outdir", folder, ROOT)
        assert len(list(folder.glob("*.tar.gz"))) == 1
        (wheel,) = map(str, folder.glob("*.whl"))
    call("-m", "venv", "--without-pip", folder / "venv")
    python = next((folder / "venv").glob("*/python"))
    call("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    # The dependencies are those of this environment, whose editable installations such a line does not take along.
    (site,) = (folder / "venv").glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    where = run_code.run(run_code.Program("", 0, "import pyro_l0; print(pyro_l0.__file__)", None), python)
    assert Path(where.stdout.strip()) == site / "pyro_l0" / "__init__.py", where.stderr
    return python


@pytest.mark.slow
@pytest.mark.parametrize(("program", "check"), list(zip(PROGRAMS, CHECKS, strict=False)), ids=IDS)
def test_program_runs_with_the_wheel(program: run_code.Program, check: Callable[[str], None], installed: Path) -> None:
    finished = run_code.run(program, installed)
    assert finished.returncode == 0, finished.stderr
    check(finished.stdout)
