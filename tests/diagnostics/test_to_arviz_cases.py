"""Models that to_arviz runs in another way, those that it refuses, and arrays as arviz's InferenceData."""

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_l0 import BernoulliGate
from pyro_l0.diagnostics import to_arviz
from pyro_l0.diagnostics.inference_data import inference_data
from pyro_l0.infer import factor
from pyro_l0.infer.guides.summaries import import_arviz

X = torch.tensor([-1.0, 0.5, 1.0, 2.0])


def guide(*args, **kwargs):
    """Two latent variables, of which one is a gate."""
    pyro.sample("z", BernoulliGate(probs=torch.tensor(0.5)))
    pyro.sample("w", dist.Normal(1.0, 0.5))


def latents():
    z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.2)))
    return z * pyro.sample("w", dist.Normal(0.0, 1.0))


def model(y):
    effect = latents()
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(effect * X, 1.0), obs=y)


def effects(found):
    return (found["posterior"]["z"] * found["posterior"]["w"]).values.astype(float)[..., None] * X.numpy()


def test_an_event_of_independent_elements_is_as_many_observations():
    """to_event in the place of a plate changes nothing."""

    def as_event(y):
        pyro.sample("y", dist.Normal(latents() * X, 1.0).to_event(1), obs=y)

    first, second = (to_arviz(m, guide, X, draws=20, seed=1) for m in (model, as_event))
    assert second["log_likelihood"]["y"].shape == (1, 20, 4)
    for group in ("log_likelihood", "posterior_predictive"):
        np.testing.assert_allclose(second[group]["y"], first[group]["y"], rtol=1e-6)


def test_events_of_a_batch_are_observations():
    """A joint density of two numbers for each of three people; data that broadcast are predicted in full."""
    y = torch.arange(6.0).reshape(3, 2)

    def people(y):
        pyro.sample("y", dist.MultivariateNormal(latents() * torch.ones(2), torch.eye(2)), obs=y)

    found = to_arviz(people, guide, y, draws=15, seed=1)
    assert found["posterior_predictive"]["y"].shape == (1, 15, 3, 2)
    mean = effects(found)[..., 2, None]  # at x = 1
    expected = -0.5 * ((y.numpy() - mean[..., None]) ** 2).sum(-1) - np.log(2 * np.pi)
    np.testing.assert_allclose(found["log_likelihood"]["y"], expected, rtol=1e-5)


@pytest.mark.parametrize("family", ["poisson", "bernoulli", "binomial", "gamma", "categorical", "branch"])
def test_families_and_models_that_cannot_be_mapped(family):
    """Each draws by its own means, and some not under torch.vmap; a branch on a gate has to be run draw by draw."""
    families = {
        "poisson": lambda effect: dist.Poisson(torch.exp(effect * X)),
        "bernoulli": lambda effect: dist.Bernoulli(logits=effect * X),
        "binomial": lambda effect: dist.Binomial(3, logits=effect * X),
        "gamma": lambda effect: dist.Gamma(2.0, torch.exp(effect * X)),
        "categorical": lambda effect: dist.Categorical(logits=torch.stack((effect * X, 0 * X), -1)),
        "branch": lambda effect: dist.Normal(effect * X if effect != 0 else 0 * X, 1.0),
    }
    y = torch.tensor([1.0, 1.0, 1.0, 1.0])

    def of_family(y):
        effect = latents()
        with pyro.plate("data", 4):
            pyro.sample("y", families[family](effect), obs=y)

    found = to_arviz(of_family, guide, y, draws=30, seed=1)
    effect = torch.from_numpy(found["posterior"]["z"].values * found["posterior"]["w"].values)
    by_hand = torch.stack([families[family](e).log_prob(y) for e in effect[0]])
    np.testing.assert_allclose(found["log_likelihood"]["y"][0], by_hand, rtol=1e-4, atol=1e-6)
    predicted = found["posterior_predictive"]["y"].values
    assert predicted.shape == (1, 30, 4)
    assert len(np.unique(predicted)) > 1  # not the data


def test_masks_and_factors():
    """What is masked says nothing, and a factor is no observation."""
    mask = torch.tensor([True, False, True, True])

    def masked(y):
        effect = latents()
        factor("penalty", -(effect**2))
        with pyro.plate("data", len(y)), poutine.mask(mask=mask):
            pyro.sample("y", dist.Normal(effect * X, 1.0), obs=y)

    found = to_arviz(masked, guide, X, draws=20, seed=1)
    assert list(found["log_likelihood"]) == list(found["observed_data"]) == ["y"]
    whole = to_arviz(model, guide, X, draws=20, seed=1)["log_likelihood"]["y"]
    np.testing.assert_allclose(found["log_likelihood"]["y"], whole.values * mask.numpy(), rtol=1e-6)


def test_dims_of_sites_are_those_of_what_follows():
    def two(y):
        with pyro.plate("features", 2):
            z = pyro.sample("z", BernoulliGate(probs=torch.tensor(0.5)))
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal((z * w).sum(), 1.0), obs=y)

    def of_two(y):
        with pyro.plate("features", 2):
            pyro.sample("z", BernoulliGate(probs=torch.tensor(0.5)))
            pyro.sample("w", dist.Normal(0.0, 1.0))

    dims, coords = {"z": ["feature"], "w": ["feature"]}, {"feature": ["age", "bmi"]}
    found = to_arviz(two, of_two, torch.tensor(1.0), slab={"w": "z"}, draws=9, dims=dims, coords=coords)
    assert found["posterior"]["z * w"].dims == ("chain", "draw", "feature")
    assert found["constant_data"]["P(z != 0)"].sel(feature="bmi") == 0.5


def test_seeds():
    """The same draws twice, and the global generator where it was."""
    before = torch.random.get_rng_state()
    first, second, third = (to_arviz(model, guide, X, draws=20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for group, name in (("posterior", "w"), ("posterior_predictive", "y")):
        np.testing.assert_array_equal(first[group][name], second[group][name])
        assert not np.array_equal(first[group][name], third[group][name])


OWN = types.SimpleNamespace(to_arviz=lambda: "its own")


def test_what_says_it_itself():
    assert to_arviz(OWN) == "its own"


def minibatch(y, **options):
    effect = latents()
    with pyro.plate("data", len(y), **options) as index:
        pyro.sample("y", dist.Normal(effect * X[index], 1.0), obs=y[index])


def scaled(y):
    with poutine.scale(scale=0.5):
        model(y)


def one_more(y):
    pyro.sample("more", dist.Normal(0.0, 1.0))
    model(y)


def other_shape(y):
    with pyro.plate("features", 2):
        effect = latents()
    pyro.sample("y", dist.Normal(effect.sum(), 1.0), obs=y[0])


def of_a_slab(y):
    pyro.sample("y", dist.Normal(pyro.sample("w", dist.Normal(0.0, 1.0)), 1.0), obs=y)


def guide_of_a_minibatch(y):
    with pyro.plate("data", 4, subsample_size=2):
        pyro.sample("z", BernoulliGate(probs=torch.tensor(0.5)))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((minibatch, guide, X), {"subsample_size": 2}, ValueError, "site 'y' is in plate 'data', which takes 2 of 4"),
        ((minibatch, guide, X), {"subsample": torch.tensor([1, 3, 0])}, ValueError, "which takes 3 of 4"),
        ((scaled, guide, X), {}, ValueError, "site 'y' has a scale of 0.5"),
        ((one_more, guide, X), {}, ValueError, r"\['more'\] are missing"),
        ((of_a_slab, guide, X), {}, ValueError, r"\['z'\] are not"),
        ((other_shape, guide, X), {}, ValueError, r"site 'z' of shape \(2,\).*but got \(\)"),
        ((model, guide, X), {"draws": 0}, ValueError, "draws of at least 1"),
        ((None, guide_of_a_minibatch, X), {}, ValueError, "site 'z' is in plate 'data', which takes 2 of 4"),
        ((guide, minibatch, X), {}, ValueError, "got a model with data at site 'y'; give the model first"),
        ((guide,), {"slab": {"w": "z"}}, ValueError, "Expected the model with slab"),
        (([1.0],), {}, TypeError, "but got list.*give its guide"),
        ((model, OWN), {}, TypeError, "Expected a SimpleNamespace alone"),
    ],
)
def test_refusals(arguments, options, error, message):
    with pytest.raises(error, match=message):
        to_arviz(*arguments, **{"draws": 3, **options})


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
