"""The names at the front door, and those that have left it."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import pyro_l0
import pyro_l0.plots
from pyro_l0.retired import renamed_arguments, retired_names

ROOMS = {
    "distributions": {
        "BernoulliGate",
        "ExponentialGate",
        "ExponentialUniformGate",
        "HardConcrete",
        "HardKumaraswamy",
        "PowerLawGate",
        "Rectified",
        "RectifiedNormal",
    },
    "infer": {
        "L0_ELBO",
        "AutoGate",
        "AutoSpikeSlab",
        "SparsityTarget",
        "check_fit",
        "factor",
        "fit",
        "sample_posterior",
    },
    "nn": {
        "Gate",
        "L0Gate",
        "NetworkCost",
        "NetworkGates",
        "fix_gates",
        "gate_heads",
        "gate_weights",
        "insert_gates",
        "penalty",
        "suggest_gates",
    },
    "compaction": {"Shrinker", "compact", "load_compacted"},
    "diagnostics": {"diagnose", "to_arviz"},
    "pruning": {"prune"},
    "training": {"Checkpoint", "epochs", "process_group"},
    "selection": {
        "NeuralFeatureSelector",
        "SpikeSlabClassifier",
        "SpikeSlabPoissonRegressor",
        "SpikeSlabRegressor",
        "credible_sets",
    },
}


@pytest.mark.parametrize("room", ROOMS)
def test_names_of_a_room(room):
    module = importlib.import_module(f"pyro_l0.{room}")
    assert set(module.__all__) == ROOMS[room]
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_front_door_has_at_most_forty_names():
    assert len(set(pyro_l0.__all__).union(*ROOMS.values())) <= 40


@pytest.mark.parametrize("room", ROOMS)
def test_names_that_have_left_still_work(room):
    module = importlib.import_module(f"pyro_l0.{room}")
    if not hasattr(module, "__getattr__"):
        return
    for name, home in inspect.getclosurevars(module.__getattr__).nonlocals["names"].items():
        with pytest.warns(FutureWarning, match=f"pyro_l0.{room}.{name} is deprecated. Use {home}"):
            assert getattr(module, name) is not None


@renamed_arguments(example_input="example")
def shape(example, times=1):
    """A function whose argument had another name."""
    return example, times


def test_an_old_argument_warns_and_works():
    with pytest.warns(FutureWarning, match=r"example_input of shape is deprecated. Use example\."):
        assert shape(example_input=3, times=2) == (3, 2)


def test_an_argument_under_both_names_is_refused():
    with pytest.raises(TypeError, match="Expected example once, but shape got example_input"):
        shape(example=3, example_input=3)


def test_an_old_name_warns_and_works():
    find = retired_names("somewhere", {"old": "math.pi"})
    with pytest.warns(FutureWarning, match=r"somewhere.old is deprecated. Use math.pi\."):
        assert find("old") == 3.141592653589793
    with pytest.raises(AttributeError, match="module 'somewhere' has no attribute 'other'"):
        find("other")


def test_every_name_has_an_entry_in_the_docs():
    """Of the front door, of the pictures, and of the homes of names that have left it."""
    entries = set()
    for page in (Path(pyro_l0.__file__).parents[1] / "docs" / "api").glob("*.md"):
        for room, lines in re.findall(r"^```{api} ([\w.]+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            entries |= {f"{room}.{line.split(':')[0]}" for line in lines.splitlines()}
    names = {f"pyro_l0.{room}.{name}" for room in ROOMS for name in ROOMS[room]} - {"pyro_l0.pruning.prune"}
    names |= {f"pyro_l0.plots.{name}" for name in pyro_l0.plots.__all__}
    for room in ROOMS:
        module = importlib.import_module(f"pyro_l0.{room}")
        if hasattr(module, "__getattr__"):
            names |= set(inspect.getclosurevars(module.__getattr__).nonlocals["names"].values())
    assert sorted(names - entries) == []
