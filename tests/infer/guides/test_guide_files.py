"""Guides that are copied, pickled and loaded, beside others of one process and in Pyro's parameter store."""

import copy
import io
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.nn import PyroModule
from torch import nn

from pyro_l0 import BernoulliGate, HardConcrete, RectifiedNormal
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab
from tests.infer.regressions import regression, train


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


# ------------------------------------------------------------ several guides of one process, and Pyro's parameter store


STEPS = 12


def slabs_of(size):
    """A model of a given number of features and its data."""
    x = torch.randn(30, size, generator=torch.Generator().manual_seed(size))
    return lambda: regression(x, 2 * x[:, 0], HardConcrete.from_active_prob(0.2), dist.Normal(0.0, 1.0), 0.5)


def gates_alone(size):
    """As ``slabs_of``, with weights of one, and no plate: the gates are drawn jointly."""
    x = torch.randn(30, size, generator=torch.Generator().manual_seed(size))

    def model():
        z = pyro.sample("z", HardConcrete.from_active_prob(0.2).expand([size]).to_event(1))
        pyro.sample("y", dist.Normal(x @ z, 0.5).to_event(1), obs=x[:, 0])

    return model


def of_slabs(size):
    return AutoSpikeSlab(slabs_of(size), slab={"w": "z"}, init_active_prob=0.5)


def by_correlated(seed):
    pyro.set_rng_seed(seed)
    x, binary = torch.randn(30, 3), BernoulliGate(probs=torch.tensor(0.3))
    model = lambda: regression(x, 2 * x[:, 0], binary, dist.Normal(0.0, 1.0))  # noqa: E731
    guide = AutoSpikeSlab(model, slab={"w": "z"}, gates="autoregressive", slabs="structured")
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    return [svi.step() for _ in range(6)], fitted(guide)


def svi_of(guide, wrapped=None, optimiser=None):
    elbo = L0_ELBO("spike_slab", slab={"w": "z"})
    return SVI(guide.model, wrapped or guide, optimiser or pyro.optim.Adam({"lr": 0.05}), elbo)


def svi_of_gates(model, guide, lr=0.05):
    return SVI(model, guide, pyro.optim.Adam({"lr": lr}), L0_ELBO("free_energy"))


def by_svi(size, seed, wrap=None):
    pyro.set_rng_seed(seed)
    guide = of_slabs(size)
    svi = svi_of(guide, wrap and wrap(guide))
    return [svi.step() for _ in range(STEPS)], fitted(guide)


def by_torch(size, seed):
    pyro.set_rng_seed(seed)
    guide = AutoGate(gates_alone(size), init_active_prob=0.5)
    guide()
    losses = train(L0_ELBO("free_energy")(guide.model, guide), torch.optim.Adam(guide.parameters(), lr=0.05), STEPS)
    return [x.item() for x in losses], fitted(guide)


def in_a_module(guide):
    class Wrapper(PyroModule):
        def __init__(self):
            super().__init__("wrapper")
            self.inner = guide

        def forward(self):
            return self.inner()

    return Wrapper()


def in_a_list(guide):
    guides = AutoGuideList(guide.model)
    guides.append(guide)
    return guides


def fitted(guide):
    return {name: x.detach().clone() for name, x in guide.state_dict().items()}


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(x, other[1][name]) for name, x in one[1].items())


RUNS = {
    "svi": lambda: by_svi(4, 1),
    "svi, other seed": lambda: by_svi(4, 2),
    "svi, other shape": lambda: by_svi(3, 1),
    "torch": lambda: by_torch(4, 1),
    "list": lambda: by_svi(4, 1, in_a_list),
    "module": lambda: by_svi(4, 1, in_a_module),
    "correlated": lambda: by_correlated(1),
}


@pytest.mark.parametrize("local", [False, True])
def test_second_guide_in_one_process_is_trained_as_alone(local):
    """Losses and fits, one after the other in both orders, are those of an empty store; to the bit."""
    with pyro.settings.context(module_local_params=local):
        alone = {}
        for name, run in RUNS.items():
            pyro.clear_param_store()
            alone[name] = run()
            moved = alone[name][1]["sites.z.logits" if name == "correlated" else "sites.z.log_alpha"]
            assert (moved - moved.mean()).abs().max() > 0.1
        pyro.clear_param_store()
        for name in [*RUNS, *reversed(RUNS)]:
            assert_same(RUNS[name](), alone[name])


def test_two_guides_trained_in_turn():
    """Each is stepped by its own optimiser, and each optimiser saves the states of its own parameters by name."""
    starts, runs = [], []
    for size in (3, 3, 5):
        guide, optimiser = of_slabs(size), pyro.optim.Adam({"lr": 0.05})
        runs.append((guide, svi_of(guide, optimiser=optimiser), optimiser))
    for step in range(6):
        for guide, svi, _ in runs:
            svi.step()
            if step == 0:
                starts.append(fitted(guide))
    for (guide, _, optimiser), start in zip(runs, starts, strict=True):
        assert all((x - start[name]).abs().max() > 0.1 for name, x in fitted(guide).items())
        state = optimiser.get_state()
        assert sorted(state) == [f"AutoSpikeSlab.sites$$${x}" for x in ("w.loc", "w.log_scale", "z.log_alpha")]
        assert all(entry["state"][0]["step"] == 6 for entry in state.values())


def test_same_guide_with_a_new_svi():
    """A notebook's cell that makes the SVI and its optimiser anew goes on with the guide."""
    guide, before = of_slabs(4), []
    for _ in range(2):
        svi = svi_of(guide)
        for _ in range(3):
            svi.step()
        before.append(fitted(guide)["sites.z.log_alpha"])
    assert (before[1] - before[0]).abs().max() > 0.05


def test_beside_another_guide_of_a_list():
    """AutoNormal goes on from the store, as is Pyro's way; the gates start anew and are trained."""

    def model():
        bias = pyro.sample("bias", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", HardConcrete.from_active_prob(0.2).expand([3]).to_event(1))
        pyro.sample("y", dist.Normal(z + bias, 0.2).to_event(1), obs=torch.tensor([1.0, 0.0, 0.0]))

    for _ in range(2):
        guide = AutoGuideList(model)
        guide.append(AutoGate(pyro.poutine.block(model, hide=["bias"]), init_active_prob=0.5, init_jitter=0.0))
        guide.append(AutoNormal(pyro.poutine.block(model, expose=["bias"])))
        guide()
        assert guide[0].posterior()["z"].active_prob.tolist() == pytest.approx([0.5] * 3)
        svi = svi_of_gates(model, guide, 0.1)
        for _ in range(30):
            svi.step()
        active = guide[0].posterior()["z"].active_prob
        assert active[0] > active[1:].max() + 0.1


def of_a_network(net, **options):
    """A model that states its network, whose inputs have gates."""
    x = torch.randn(20, 3)

    def model():
        pyro.module("net", net, **options)
        z = pyro.sample("z", HardConcrete.from_active_prob(0.5).expand([3]).to_event(1))
        pyro.sample("y", dist.Normal(net(x * z)[:, 0], 0.5).to_event(1), obs=x[:, 0])

    return model


def test_a_network_of_pyro_module_goes_on():
    """With a new guide and optimiser the network in the model is still trained."""
    net = nn.Linear(3, 1)
    model = of_a_network(net)
    seen = [net.weight.detach().clone()]
    for _ in range(2):
        svi = svi_of_gates(model, AutoGate(model))
        losses = [svi.step() for _ in range(10)]
        assert losses[-1] < losses[0]
        seen.append(net.weight.detach().clone())
        assert (seen[-1] - seen[-2]).abs().max() > 0.05


def test_a_network_of_pyro_module_that_is_made_anew():
    """SVI trains what the store has; one warning names the parameter and the remedies, which work."""

    def run(trained, calls=0, **options):
        net = nn.Linear(3, 1)
        before, model = net.weight.detach().clone(), of_a_network(net, **options)
        guide = AutoGate(model)
        for _ in range(calls):
            guide()
        svi = svi_of_gates(model, guide)
        for _ in range(5):
            svi.step()
        assert torch.equal(net.weight, before) is not trained
        return model

    run(True)
    for calls in (0, 2):  # before the first step
        with pytest.warns(UserWarning, match=r"SVI does not train 'net\$\$\$weight' of the model, nor 1 other") as seen:
            model = run(False, calls)
        assert len(seen) == 1
    run(True, update_module_params=True)
    guide = AutoGate(model)  # which is trained by its own parameters' optimiser
    guide()
    train(L0_ELBO("free_energy")(model, guide), torch.optim.Adam(guide.parameters()), 3)
    pyro.clear_param_store()
    run(True)


@pytest.mark.parametrize("use", ["svi", "elbo", "median"])
def test_stored_parameters_are_loaded(tmp_path, use):
    """Pyro's way: the store is saved, cleared as in a new process, loaded, and a new guide has the trained values."""
    _, trained = by_svi(4, 1)
    store, path = pyro.get_param_store(), str(tmp_path / "store")
    store.save(path)
    store.clear()
    store.load(path)
    guide = of_slabs(4)
    if use == "median":
        guide.median()
    elif use == "svi":
        svi_of(guide, optimiser=pyro.optim.Adam({"lr": 0.0})).step()
    else:
        L0_ELBO("spike_slab", slab={"w": "z"})(guide.model, guide)()
    assert_same(([], fitted(guide)), ([], trained))
    # A guide that has been called takes over what is loaded later, and one of another model refuses it.
    store.load(path)
    with torch.no_grad():
        guide.sites["w"]["loc"].add_(1.0)
    guide()
    assert_same(([], fitted(guide)), ([], trained))
    store.load(path)
    with pytest.raises(
        ValueError, match=r"sites\$\$\$z.log_alpha' in the parameter store of shape \(3,\), but got \(4,\)"
    ):
        of_slabs(3)()


def test_optimiser_arguments_by_name_and_optimisers_in_files(tmp_path):
    """Names as pyro.module makes them; the moments of a loaded optimiser reach their parameters."""
    names = set()

    def arguments(name):
        names.add(name)
        return {"lr": 0.0 if name.endswith("log_scale") else 0.05}

    path = str(tmp_path / "optimiser")
    for i in range(2):
        guide, optimiser = of_slabs(4), pyro.optim.Adam(arguments)
        if i:
            optimiser.load(path)
        svi = svi_of(guide, optimiser=optimiser)
        for _ in range(3):
            svi.step()
        optimiser.save(path)
    assert names == {f"AutoSpikeSlab.sites.{x}" for x in ("w.loc", "w.log_scale", "z.log_alpha")}
    assert torch.equal(guide.slabs()["w"].scale, torch.tensor([0.1]).log().exp().expand(4))
    assert {entry["state"][0]["step"].item() for entry in optimiser.get_state().values()} == {6}
    modules = set()
    by_module = pyro.optim.Adam(lambda module, name: modules.add((module, name)) or {"lr": 0.1})
    svi_of(guide, optimiser=by_module).step()
    assert ("AutoSpikeSlab.sites", "z.log_alpha") in modules
