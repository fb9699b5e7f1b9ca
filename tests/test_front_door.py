"""The front door: its names, what ``import pyro_l0`` gives, and what the package asks to be installed."""

import ast
import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

import pyro_l0
import pyro_l0.plots
from tests.processes import python

ROOT = Path(pyro_l0.__file__).parents[1]
PACKAGES = {
    "distributions": "BernoulliGate ExponentialGate ExponentialUniformGate HardConcrete HardKumaraswamy PowerLawGate "
    "Rectified RectifiedNormal",
    "infer": "L0_ELBO AutoGate AutoSpikeSlab SparsityTarget check_fit factor fit sample_posterior",
    "nn": "Gate L0Gate NetworkCost NetworkGates fix_gates gate_heads gate_weights insert_gates penalty suggest_gates",
    "compaction": "Shrinker compact compact_zeros load_compacted",
    "diagnostics": "diagnose to_arviz",
    "pruning": "Training prune",
    "training": "Checkpoint epochs process_group",
    "selection": "NeuralFeatureSelector SpikeSlabBinomialRegressor SpikeSlabClassifier SpikeSlabCox "
    "SpikeSlabGLM SpikeSlabMultiTaskRegressor "
    "SpikeSlabNegativeBinomial SpikeSlabOrdinal SpikeSlabPoissonRegressor SpikeSlabRegressor SpikeSlabRobust "
    "credible_sets",
}
NAMES = {package: set(names.split()) for package, names in PACKAGES.items()}


@pytest.mark.parametrize("package", NAMES)
def test_names_of_a_package(package):
    module = importlib.import_module(f"pyro_l0.{package}")
    assert set(module.__all__) == NAMES[package]
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_front_door_has_few_names():
    """Nine of them are estimators for the different responses of regressions, and one takes any other."""
    assert len(set(pyro_l0.__all__).union(*NAMES.values())) <= 49


def entries():
    """The names of the API pages, as (the module at the top of their part of a page, the path below it)."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for part in re.split(r"^\.\. (?:auto|current)module:: ", page.read_text(), flags=re.MULTILINE)[1:]:
            package, *lines = part.splitlines()
            yield from ((package, line.strip()) for line in lines if re.fullmatch(r"   ~?[\w.]+", line))


def test_every_name_has_an_entry_in_the_docs():
    """Of the front door, and of the pictures."""
    documented = {f"{package}.{path}" for package, path in entries()}
    names = {f"pyro_l0.{package}.{name}" for package in NAMES for name in NAMES[package]} - {"pyro_l0.pruning.prune"}
    names |= {f"pyro_l0.plots.{name}" for name in pyro_l0.plots.__all__}
    assert sorted(names - documented) == []


LIBRARIES = {"lightning", "transformers"}  # each with a module of its own in callbacks, the door of its extra


def test_every_name_of_the_docs_is_at_a_door():
    """What docs/stability.md promises: a documented name is one of the package at the top of its page."""
    found = list(entries())
    assert len(found) > 100
    for package, path in found:
        module, _, name = path.removeprefix("~").rpartition(".")
        if module in LIBRARIES:
            continue
        assert hasattr(importlib.import_module(package), name), (package, name)
        assert not module or name.isupper(), f"{package}: write {name}, not {path}"


def test_programs_of_the_docs_use_the_doors():
    """No page imports from a file inside a package; numerics for a family of gates are the one exception."""
    doors = {"pyro_l0", *(package for package, _ in entries()), "pyro_l0.maths"}
    doors |= {f"pyro_l0.callbacks.{library}" for library in LIBRARIES}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "lab" not in page.parts]
    for page in [ROOT / "README.md", *pages]:
        modules = re.findall(r"^ *(?:from|import) (pyro_l0[\w.]*)", page.read_text(), re.MULTILINE)
        assert {*modules} <= doors, page


@pytest.mark.slow
def test_parts_work_after_a_bare_import():
    """They are imported when they are used, and not before; nothing is printed."""
    printed = python(
        """
import sys, pyro_l0
parts = ("compaction", "diagnostics", "infer", "nn")
assert not [name for name in sys.modules if name.startswith(tuple(f"pyro_l0.{part}" for part in parts))]
assert "torch._dynamo" not in sys.modules  # which takes a second
assert {*parts, *pyro_l0.__all__, "__version__"} <= set(dir(pyro_l0))
assert pyro_l0.nn.L0Gate(3).size == 3
assert callable(pyro_l0.infer.L0_ELBO) and callable(pyro_l0.diagnostics.diagnose)
assert pyro_l0.compaction is sys.modules["pyro_l0.compaction"]
assert not hasattr(pyro_l0, "compression")
""",
        quiet=False,
    )
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
    folders = [ROOT / "examples", ROOT / "docs", ROOT / "tests" / "bench", ROOT / "tools"]
    scripts = [script for scripts in folders for script in scripts.rglob("*.py")]
    own = {path.stem for path in scripts} | {"common", "pyro_l0", "tests"}
    known = {
        "sklearn": "scikit-learn",
        "pyro": "pyro-ppl",
        "torch_pruning": "torch-pruning",
        "millipede": "millipede-regression",
        "PIL": "pillow",
    }
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
    tools = extras["hugging-face"] | extras["lightning"]
    assert core <= imported("pyro_l0") <= core | extras["selection"] | tools | {"safetensors"}
    # The examples save networks, and draw by pyro_l0.plots.
    for_examples = extras["examples"] - {"safetensors", "matplotlib"}
    assert for_examples <= imported("examples") <= core | extras["examples"] | tools
    of_no_index = {"notears", "susieinf"}  # rivals of which only their authors' repositories have a package
    names = "examples", "export", "selection", "hugging-face", "bench", "rivals", "test", "docs"
    assert imported("tests") - of_no_index <= core.union(*(extras[name] for name in names))


IN_DOUBLE_PRECISION = """
import torch
torch.set_default_dtype(torch.float64)
import pyro, pyro.distributions as dist
from torch import nn
from pyro_l0 import BernoulliGate, HardConcrete, prune
from pyro_l0.compaction import compact
from pyro_l0.diagnostics import to_arviz
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget, check_fit, factor, fit
from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabRegressor

pyro.set_rng_seed(0)
x = torch.randn(200, 4)
y = x @ torch.tensor([1.0, 0.0, -1.0, 0.0]) + torch.randn(200)

for dtype in (torch.float64, torch.float32):
    net = nn.Sequential(L0Gate(4), nn.Linear(4, 16), nn.Tanh(), L0Gate(16), nn.Linear(16, 1)).to(dtype)
    def model(x, y):
        factor("y", -(net(x)[:, 0] - y).square().sum())
    data = x.to(dtype), y.to(dtype)
    guide = AutoGate(model)
    guide(*data)
    cost = NetworkCost(net, data[0][:2])
    loss = L0_ELBO("l0", lam=0.01, group_size=cost.group_sizes)(model, guide)
    target = SparsityTarget(guide, 0.5, cost.macs, steps=60)
    weights = torch.optim.Adam(net.parameters(), 1e-2)
    gates = torch.optim.Adam(guide.locations(), **target.optimiser_options)
    for _ in range(60):
        weights.zero_grad(), gates.zero_grad()
        loss(*data).backward()
        target.add_gradient()
        weights.step(), gates.step()
        target.ascend()
    assert target.fraction()[0] <= 0.5
    assert compact(net, guide.test_gates(), data[0]).certificate < 1e-5
    plain = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)).to(dtype)
    batches = [tuple(part[i : i + 40] for part in data) for i in range(0, 200, 40)]
    found = prune(plain, nn.functional.mse_loss, batches, data[0][:2], 0.5, epochs=60, pretrained=False)
    assert next(found.network.parameters()).dtype == dtype

def regression(x, y):
    with pyro.plate("features", 4):
        z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.3)))
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ (z * w), 1.0), obs=y)

guide = AutoSpikeSlab(regression, slab={"w": "z"}, gates="autoregressive", slabs="structured")
fit(regression, guide, x, y, seed=0)
check_fit(regression, guide, x, y)
assert guide.active_probs()["z"].dtype == torch.float64
to_arviz(regression, guide, x, y, draws=10, seed=0)
assert SpikeSlabRegressor(random_state=0).fit(x.numpy(), y.numpy()).pip_[0] > 0.9
SpikeSlabClassifier(random_state=0).fit(x.numpy(), (y > 0).numpy())
assert HardConcrete.from_active_prob(0.5).active_prob.dtype == torch.float64
"""


@pytest.mark.slow
def test_everything_runs_under_a_default_of_double_precision():
    python(IN_DOUBLE_PRECISION)
