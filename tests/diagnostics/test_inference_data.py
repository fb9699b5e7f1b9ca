"""Arrays as arviz's InferenceData."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pyro_l0.diagnostics.inference_data import inference_data
from pyro_l0.infer.guides.summaries import import_arviz

az = import_arviz()

DRAWN = {"z": np.arange(12).reshape(2, 6) % 2 == 0, "scope/w": np.linspace(0, 1, 36).reshape(2, 6, 3)}


def test_groups_hold_what_they_were_given():
    """Values, dimensions and labels; what is true or false is int8, a slash a dot, an empty group left out."""
    groups = {
        "posterior": DRAWN,
        "log_likelihood": {"y": np.ones((2, 6, 4))},
        "posterior_predictive": {},
        "observed_data": {"y": torch.arange(4.0)},
        "constant_data": {"P(z != 0)": 0.5},
    }
    found = inference_data(groups, {"feature": ["a", "b", "c"]}, {"scope/w": ["feature"]})
    assert sorted(found.groups()) == ["constant_data", "log_likelihood", "observed_data", "posterior"]
    z, w = found["posterior"]["z"], found["posterior"]["scope.w"]
    assert z.dtype == np.int8
    np.testing.assert_array_equal(z, DRAWN["z"])
    assert w.dims == ("chain", "draw", "feature")
    np.testing.assert_array_equal(w.sel(feature="b"), DRAWN["scope/w"][..., 1])
    assert found["log_likelihood"]["y"].shape == (2, 6, 4)
    assert float(found["constant_data"]["P(z != 0)"].squeeze()) == 0.5


def test_version_1_takes_one_nested_dict(monkeypatch):
    """Of arviz 1 there is only the signature of from_dict here."""
    seen = []
    monkeypatch.setattr(az, "__version__", "1.2.0")
    monkeypatch.setattr(az, "from_dict", lambda data, *, coords, dims: seen.append((data, coords, dims)))
    inference_data({"posterior": DRAWN, "observed_data": {"y": [1.0]}}, dims={"scope/w": ["feature"]})
    (data, coords, dims) = seen[0]
    assert {group: sorted(arrays) for group, arrays in data.items()} == {
        "posterior": ["scope.w", "z"],
        "observed_data": ["y"],
    }
    assert coords is None
    assert dims == {"scope.w": ["feature"]}


@pytest.mark.slow
def test_first_import_of_a_day_is_silent(tmp_path):
    """arviz warns once a day that it will change; warnings may be errors, and arviz's other warnings stay."""
    program = (
        "import numpy as np\n"
        "from pyro_l0.diagnostics.inference_data import inference_data\n"
        "print(inference_data({'posterior': {'w': np.zeros((1, 20))}})['posterior']['w'].shape)"
    )
    assert in_an_empty_cache(program, tmp_path) == "(1, 20)\n"
    assert list(tmp_path.rglob("daily_warning"))  # it has warned


@pytest.mark.slow
def test_two_processes_may_import_arviz_at_the_same_moment(tmp_path):
    """The first that writes the day of the warning takes the file from under the second, which is this process."""
    program = (
        "import pathlib\n"
        "from pyro_l0.infer.guides.summaries import import_arviz\n"
        "replace, replaced = pathlib.Path.replace, []\n"
        "def replace_for_both(path, target):\n"
        "    replaced.append(replace(path, target).name)\n"
        "    return replace(path, target)\n"
        "pathlib.Path.replace = replace_for_both\n"
        "print(import_arviz().__name__, replaced)"
    )
    assert in_an_empty_cache(program, tmp_path) == "arviz ['daily_warning']\n"


def in_an_empty_cache(program: str, cache: Path) -> str:
    """What a program prints where warnings are errors and arviz has never been imported."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", program],
        env={"XDG_CACHE_HOME": str(cache), "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
