"""Guides that are copied, pickled and loaded, before their first call and after it."""

import copy
import io
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_l0 import HardConcrete, RectifiedNormal
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab


def model(size=4):
    with pyro.plate("features", size):
        z = pyro.sample("a.z", HardConcrete.from_active_prob(0.2))
        w = pyro.sample("w", dist.HalfNormal(1.0))
    pyro.sample("y", dist.Normal((z * w).sum(), 0.5), obs=torch.tensor(1.0))


def new(program=model, **options):
    return AutoSpikeSlab(program, slab={"w": "a.z"}, **options)


def trained(guide=None, steps=3):
    guide = guide or new(init_jitter=1.0)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), L0_ELBO("l0", lam=1.0))
    for _ in range(steps):
        svi.step()
    return guide


def through_torch(guide):
    file = io.BytesIO()
    torch.save(guide, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "torch": through_torch}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_pickling_a_guide(copied):
    """A trained guide is whole, can be called and trained; the original still has its model."""
    guide = trained()
    other = copied(guide)
    assert guide.model is model
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in guide.state_dict().items())
    assert {name: x.shape for name, x in other().items()} == {"a.z": (4,), "w": (4,)}
    before = {name: x.clone() for name, x in other.state_dict().items()}
    trained(other, 1)
    assert all(not torch.equal(x, before[name]) for name, x in other.state_dict().items())


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_pickling_a_guide_before_its_first_call(copied):
    """Says what to do, at the copy's first call."""
    guide = new()
    with pytest.raises(ValueError, match=r"this one was copied or loaded\. Call a guide once"):
        copied(guide)()
    assert sorted(guide()) == ["a.z", "w"]


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_into_a_fresh_guide(assign):
    """The values are there, stay at the first call, and are the parameters that an optimiser has seen in between."""
    state = {name: x.clone() for name, x in trained().state_dict().items()}
    guide = new()
    assert guide.load_state_dict(state, assign=assign) == nn.modules.module._IncompatibleKeys([], [])
    early = list(guide.parameters())
    guide()
    assert [id(x) for x in early] == [id(x) for x in guide.parameters()]
    assert all(torch.equal(x, guide.state_dict()[name]) for name, x in state.items())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        guide.load_state_dict({**state, "sites.b.loc": torch.zeros(4)})
    with pytest.raises(RuntimeError, match="Missing key"):
        guide.load_state_dict({})


def test_a_state_of_another_type_goes_to_the_models():
    """A state in float64 does not make the guide one."""
    guide = new()
    guide.load_state_dict({name: x.double() for name, x in trained().state_dict().items()}, assign=True)
    assert {x.dtype for x in guide().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (lambda: model(5), {}, r"'w.log_scale': \(5,\).*but got .*'w.log_scale': \(4,\)"),
        (model, {"family": RectifiedNormal}, r"'a/z.loc': \(4,\).*but got .*'a/z.log_alpha': \(4,\)"),
    ],
)
def test_a_state_of_another_model(program, options, message):
    """Is refused at the first call, as often as that is tried."""
    guide = new(program, **options)
    guide.load_state_dict(trained().state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            guide()


def test_other_keys_are_unexpected_before_the_first_call_too():
    for key in ("other", "sites.a.b.c"):
        with pytest.raises(RuntimeError, match="Unexpected key"):
            new().load_state_dict({key: torch.zeros(4)})


def test_a_first_call_that_fails_leaves_a_fresh_guide():
    """A wrong option is refused again, and the right call works afterwards."""
    guide = AutoSpikeSlab(model, slab={"v": "a.z"})
    for _ in range(2):
        with pytest.raises(ValueError, match="'v' is none"):
            guide()
    guide = AutoGate(lambda size: model(size))
    with pytest.raises(TypeError):
        guide("no number")
    assert guide(4)["a.z"].shape == (4,)


def test_a_state_with_nan_is_refused():
    """Its gates would read as surely closed."""
    state = trained().state_dict()
    name = next(name for name in state if name.endswith("log_alpha"))
    state[name][0] = float("nan")
    with pytest.raises(ValueError, match=f"{name!r} has NaN"):
        new().load_state_dict(state)
