"""The names at the front door."""

import importlib
import re
from pathlib import Path

import pytest

import pyro_l0
import pyro_l0.plots

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


def test_every_name_has_an_entry_in_the_docs():
    """Of the front door, and of the pictures."""
    entries = set()
    for page in (Path(pyro_l0.__file__).parents[1] / "docs" / "api").glob("*.md"):
        for part in re.split(r"^\.\. (?:auto|current)module:: ", page.read_text(), flags=re.MULTILINE)[1:]:
            package, *lines = part.splitlines()
            entries |= {f"{package}.{line.strip()}" for line in lines}
    names = {f"pyro_l0.{package}.{name}" for package in NAMES for name in NAMES[package]} - {"pyro_l0.pruning.prune"}
    names |= {f"pyro_l0.plots.{name}" for name in pyro_l0.plots.__all__}
    assert sorted(names - entries) == []
