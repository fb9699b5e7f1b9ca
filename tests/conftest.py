"""What every test starts from: one thread, a fixed seed, an empty parameter store, float32; which of them take long."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# For scripts that a test starts, and read once by the libraries: so before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # In the user's folder torch.compile finds what another ATEN_CPU_CAPABILITY made, which writes past the ends.
    _COMPILED = tempfile.TemporaryDirectory(prefix="torchinductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _COMPILED.name

import pyro
import pytest
import torch

from pyro_l0.training import Checkpoint

# Several processes that each take every core slow one another down.
torch.set_num_threads(1)

# A source distribution has no benches, laboratory or tools, and runs no test that reads them.
_HERE = Path(__file__).parent
if not (_HERE / "bench").is_dir():
    _READ = ("from tests.bench", "results_tables.md", "import release")
    collect_ignore = [
        str(path)
        for path in _HERE.rglob("test_*.py")
        if any(text in path.read_text(encoding="utf-8") for text in _READ)
    ]

# Seconds of processor time on a quiet machine that a test may take by default, its child processes included.
LONGEST = 2.0
_PROPERTY = "processor seconds"


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Seed every generator and empty Pyro's parameter store; give float32 back afterwards."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    # The first torch.compile of a process switches validation off for good.
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.fixture(autouse=True, scope="session")
def a_file_after_every_epoch() -> Iterator[None]:
    """Whatever the clock says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[Checkpoint.__module__], "_SPARING", 0.0)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note how long a test took that is not marked as slow."""
    before = os.times()
    yield
    seconds = sum(after - start for after, start in zip(os.times()[:4], before[:4], strict=True))
    if seconds > LONGEST and not item.get_closest_marker("slow"):
        item.user_properties.append((_PROPERTY, seconds))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that take long and are not marked as slow."""
    found = {
        report.nodeid: seconds
        for report in terminalreporter.stats.get("passed", [])
        for name, seconds in report.user_properties
        if name == _PROPERTY
    }
    if found:
        terminalreporter.section(f"more than {LONGEST:.0f} seconds of processor time; make cheaper or mark as slow")
        for test, seconds in sorted(found.items(), key=lambda pair: -pair[1]):
            terminalreporter.line(f"{seconds:.1f} s  {test}")
