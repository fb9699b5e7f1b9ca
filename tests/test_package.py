"""The front door: what ``import pyro_l0`` gives, and what the package asks to be installed."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pyro_l0

ROOT = Path(pyro_l0.__file__).parents[1]


def python(code):
    """What a fresh process prints, warnings and errors included."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.slow
def test_parts_work_after_a_bare_import():
    """They are imported when they are used, and not before; nothing is printed."""
    printed = python("""
import sys, pyro_l0
parts = ("compaction", "diagnostics", "infer", "nn")
assert not [name for name in sys.modules if name.startswith(tuple(f"pyro_l0.{part}" for part in parts))]
assert {*parts, *pyro_l0.__all__, "__version__"} <= set(dir(pyro_l0))
assert pyro_l0.nn.Gate(3).size == 3
assert callable(pyro_l0.infer.L0_ELBO) and callable(pyro_l0.diagnostics.gradients.measure_gradient)
assert pyro_l0.compaction is sys.modules["pyro_l0.compaction"]
assert not hasattr(pyro_l0, "compression")
""")
    assert printed == ""


def test_a_star_leaves_torchs_nn_alone():
    """``from pyro_l0 import *`` brings distributions and no modules."""
    names = {}
    exec("from pyro_l0 import *", names)
    assert set(names) - {"__builtins__"} == set(pyro_l0.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pyro_l0' has no attribute 'compression'"):
        _ = pyro_l0.compression


def test_the_version_is_the_installed_one():
    """It stands in the source, so that it needs no installation."""
    try:
        installed = importlib.metadata.version("pyro-l0")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed")
    assert pyro_l0.__version__ == installed


def imported(folder):
    """The distributions that the files of a folder import."""
    names = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    scripts = [*(ROOT / "examples").glob("*.py"), *(ROOT / "tests" / "bench").rglob("*.py")]
    own = {path.stem for path in scripts} | {"common", "pyro_l0", "tests"}
    known = {"sklearn": "scikit-learn", "pyro": "pyro-ppl", "torch_pruning": "torch-pruning"}
    return {known.get(name, name) for name in names - own - set(sys.stdlib_module_names)}


def listed(requirements):
    """The names in a list of requirements."""
    return {re.match(r"[\w.-]+", text).group() for text in requirements}


@pytest.mark.slow
def test_every_dependency_is_imported_and_every_import_is_a_dependency():
    """The package's own, those of its optional functions, the examples' and the tests'."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = listed(project["dependencies"])
    extras = {name: listed(texts) for name, texts in project["optional-dependencies"].items()}
    assert core <= imported("pyro_l0") <= core | extras["selection"] | {"safetensors"}
    # The examples save networks, and the drawings of diagnostics are theirs to show.
    assert extras["examples"] - {"safetensors"} <= imported("examples") <= core | extras["examples"]
    assert imported("tests") <= core.union(
        *(extras[name] for name in ("examples", "export", "selection", "bench", "test"))
    )
