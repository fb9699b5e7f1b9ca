"""Losses, gradients and certificates with the faster ways and without them, to rounding; SVI takes them, too."""

import contextlib
from contextlib import nullcontext

import pyro
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI
from torch import nn
from torch.overrides import TorchFunctionMode

from common.networks import Classifier, build
from common.residual import wide_resnet
from pyro_l0 import BernoulliGate, HardConcrete, fast
from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab, SparsityTarget, factor
from pyro_l0.infer.record import Record, sample, sole_record
from pyro_l0.nn import L0Gate, NetworkCost, fix_gates
from pyro_l0.nn.gate import name_gates
from pyro_l0.nn.square_norms import square_norms
from tests.cases import ATOMIC, FAMILIES

NUM_DATA = 1000
SETTINGS = {
    "weight decay": ({"objective": "l0", "weight_decay": 0.5}, False),
    "free energy": ({"objective": "free_energy", "kl_scale": 0.7}, False),
    "target": ({"objective": "l0"}, True),
}


def run(kind, setting, steps=3):
    """Losses of some steps, the last gradients, and the compacted network's outputs, with plan and certificate."""
    torch.manual_seed(0)
    pyro.clear_param_store()
    # A network of the examples in float64, and a batch of more rows than its last layer has outputs.
    if kind == "residual":
        net, x = wide_resnet(10, 1).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    else:
        net, x = build(kind, 784).double(), torch.rand(24, 784, dtype=torch.float64)
    y = torch.arange(len(x)) % 10
    options, has_target = SETTINGS[setting]
    norms = {"square_norm": square_norms(net, x[:1])} if "weight_decay" in options else {}
    cost = NetworkCost(net, x[:1])
    model = Classifier(net, NUM_DATA)
    name_gates(net)
    guide = AutoGate(model, init_active_prob=0.5, init_jitter=2.0)
    loss = L0_ELBO(lam=0.3, group_size=cost.group_sizes, **options, **norms)(model, guide)
    loss(x[:2], y[:2])
    target = SparsityTarget(guide, 0.3, cost.macs, steps=10) if has_target else None
    gates = guide.locations() if has_target else []  # which a target wants Adam to move
    moved = set(map(id, gates))
    optimisers = [torch.optim.SGD([p for p in loss.parameters() if id(p) not in moved], 1e-2)]
    if target is not None:
        optimisers.append(torch.optim.Adam(gates, **target.optimiser_options))
    values = []
    for _ in range(steps):
        loss.zero_grad()
        value = loss(x, y) / NUM_DATA
        value.backward()
        if target is not None:
            target.add_gradient()
        for optimiser in optimisers:
            optimiser.step()
        if target is not None:
            target.ascend()
        values.append(value.detach())
    gradients = {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}
    small = compact(net, guide.test_gates(), x)
    with torch.no_grad():
        small_outputs, outputs = small.network(x), fix_gates(net, guide.test_gates()).eval()(x)
    return {"losses": values, "gradients": gradients, "outputs": [small_outputs, outputs]}, small


@pytest.mark.parametrize(
    ("kind", "setting"),
    [*(("mlp", setting) for setting in SETTINGS), ("lenet5", "weight decay"), ("residual", "target")],
)
def test_training_and_compaction(kind, setting):
    """Three steps and the compacted network; the seeds are the same, and so are uniform draws site by site."""
    ours, small = run(kind, setting)
    with fast.disabled():
        theirs, plain = run(kind, setting)
    assert any(gradient.abs().sum() > 0 for gradient in ours["gradients"].values())
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    assert small.plan.to_json() == plain.plan.to_json()
    for one in (small, plain):
        assert one.certificate < 1e-10


class SameNoise(TorchFunctionMode):
    """Every random number is one constant, in whatever order and shape it is drawn."""

    VALUES = {torch.rand: 0.3, torch.rand_like: 0.3, torch.randn: 0.4, torch.randn_like: 0.4}  # noqa: RUF012

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.VALUES:
            return func(*args, **kwargs).fill_(self.VALUES[func])
        if func in (torch.Tensor.exponential_, torch.Tensor.normal_):
            return args[0].fill_(0.7)
        if func is torch.bernoulli:
            return (args[0] > 0.45).to(args[0])
        return func(*args, **kwargs)


def gated(sizes=(12, 9, 5)):
    """A small network with three layers of gates, and a batch."""
    layers = []
    for i, size in enumerate(sizes):
        layers += [L0Gate(size), nn.Linear(size, (*sizes[1:], 3)[i]), nn.Tanh()]
    net = nn.Sequential(*layers[:-1]).double()
    name_gates(net)
    return net, torch.randn(24, sizes[0], dtype=torch.float64)


def loss_and_gradients(net, x, guide, elbo):
    """With constant noise; a row's class is its index."""

    def model():
        factor("y", -50 * F.cross_entropy(net(x), torch.arange(len(x)) % 3))

    with SameNoise():
        torch.manual_seed(1)  # for multinomial draws
        value = elbo.differentiable_loss(model, guide)
        value.backward()
    parameters = {**dict(net.named_parameters()), **dict(guide.named_parameters())}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for p in parameters.values():
        p.grad = None
    return {"loss": value.detach(), **gradients}


@pytest.mark.parametrize("family", [f.gate for f in (*FAMILIES, *ATOMIC)], ids=lambda family: family.__name__)
def test_families(family):
    """Every family by the free energy, at the same noise: normal draws and those of mixtures come in another order."""
    torch.manual_seed(0)
    net, x = gated()
    guide = AutoGate(lambda: net(x), family, init_jitter=0.5)
    guide()
    estimator = "arm" if family is BernoulliGate else None
    elbo = L0_ELBO("free_energy", lam=0.2, kl_scale=0.8, estimator=estimator)
    ours = loss_and_gradients(net, x, guide, elbo)
    with fast.disabled():
        theirs = loss_and_gradients(net, x, guide, elbo)
    assert len(ours) > 6
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_spike_and_slab():
    torch.manual_seed(0)

    def model():
        w = sample("w", pyro.distributions.Normal(torch.zeros(5, dtype=torch.float64), 1.0).to_event(1))
        z = sample("z", HardConcrete(torch.zeros(5, dtype=torch.float64)).to_event(1))
        factor("y", -((w * z).sum() - 2.0).square())

    guide = AutoSpikeSlab(model, slab={"w": "z"})
    guide()
    elbo = L0_ELBO("spike_slab", slab={"w": "z"}, num_particles=2)
    found = []
    for closed in ((), ("record",), ("joint_draws", "kl")):
        with SameNoise(), fast.disabled(*closed) if closed else nullcontext():
            value = elbo.differentiable_loss(model, guide)
        found.append([value, *torch.autograd.grad(value, list(guide.parameters()))])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------ the switch


def nodes(value):
    """Names of the nodes of a graph."""
    found, frontier = set(), [value.grad_fn]
    while frontier:
        node = frontier.pop()
        if node is not None and node not in found:
            found.add(node)
            frontier += [parent for parent, _ in node.next_functions]
    return {node.name() for node in found}


@pytest.mark.parametrize(
    ("flag", "gone"),
    [
        ("record", {"_HardConcreteDrawBackward"}),
        ("joint_draws", {"_HardConcreteDrawBackward"}),
        ("kl", {"_SameTemperatureBackward"}),
        ("gated_weights", set()),
        (None, {"_HardConcreteDrawBackward", "_SameTemperatureBackward"}),
    ],
)
def test_each_flag_switches_its_own_way(flag, gone, monkeypatch):
    """The nodes of the faster way are in the graph with its flag on, and not with it off."""
    net, x = gated()
    elbo = L0_ELBO("free_energy", weight_decay=0.1, square_norm=square_norms(net, x[:1]))
    short = []
    observe = Record.observe
    monkeypatch.setattr(Record, "observe", lambda self, *args: short.append(args) or observe(self, *args))

    def model():
        factor("y", -net(x).square().sum())

    guide = AutoGate(model)
    guide()
    inputs = []
    net[1].register_forward_pre_hook(lambda layer, args: inputs.append(type(args[0])))
    nodes_on = nodes(elbo.differentiable_loss(model, guide))
    assert short
    assert torch.Tensor not in inputs  # they know their factors
    short.clear()
    inputs.clear()
    with fast.disabled(*([] if flag is None else [flag])):
        nodes_off = nodes(elbo.differentiable_loss(model, guide))
    assert (short == []) is (flag in ("record", None))
    assert (torch.Tensor in inputs) is (flag in ("gated_weights", None))
    if flag in ("joint_draws", "kl"):
        assert gone <= nodes_on
    assert not gone & nodes_off


def test_flags_nest_and_end():
    """An inner context switches more off, never on; an error ends it; a misspelt flag is refused."""

    def fail():
        with fast.disabled("record"):
            assert [fast.is_on(flag) for flag in ("kl", "record", "joint_draws")] == [False, False, True]
            raise ZeroDivisionError

    with fast.disabled("kl"):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert fast.is_on("record")
        assert not fast.is_on("kl")
        with fast.disabled():
            assert not fast.is_on("joint_draws")
    assert fast.is_on("kl")
    with pytest.raises(ValueError, match=r"Expected flags among .*'record'.* but got \['norms'\]"):
        fast.disabled("norms").__enter__()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
def test_disabled_around_compiled_networks():
    """A network that is compiled as one graph runs with fast off, too."""
    net, x = gated()
    fixed = fix_gates(net, {name: torch.full((gate.size,), 0.5) for name, gate in name_gates(net).items()})
    compiled = torch.compile(fixed, fullgraph=True, backend="eager")
    asks = torch.compile(lambda a: fast.is_on("kl") * a, fullgraph=True, backend="eager")
    with fast.disabled():
        torch.testing.assert_close(compiled(x), fixed(x))
        torch.testing.assert_close(asks(x), x)


def pair(objective):
    """A gated network, its guide and its loss, with one seed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    net = nn.Sequential(L0Gate(6), nn.Linear(6, 5), nn.ReLU(), L0Gate(5), nn.Linear(5, 3)).double()
    name_gates(net)
    x, y = torch.randn(20, 6).double(), torch.arange(20) % 3

    def model():
        pyro.module("net", net)
        factor("y", -F.cross_entropy(net(x), y, reduction="sum"))

    guide = AutoGate(model)
    guide()
    return net, guide, model, L0_ELBO(objective, lam=0.1)


def by_svi(objective):
    """Losses of three steps, the parameters in the end, and the names that SVI steps."""
    net, guide, model, elbo = pair(objective)
    stepped = []
    adam = pyro.optim.Adam(lambda name: stepped.append(name) or {"lr": 0.01})
    svi = SVI(model, guide, adam, elbo)
    pyro.set_rng_seed(1)
    losses = [svi.step() for _ in range(3)]
    return losses, [x.detach().clone() for x in [*net.parameters(), *guide.parameters()]], stepped


def by_module(objective):
    """The same steps of a torch optimiser."""
    net, guide, model, elbo = pair(objective)
    parameters = [*net.parameters(), *guide.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=0.01)
    pyro.set_rng_seed(1)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = elbo.differentiable_loss(model, guide)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, [x.detach().clone() for x in parameters]


@pytest.mark.parametrize("objective", ["l0", "free_energy"])
def test_the_same_steps_by_svi_as_by_a_torch_optimiser(objective):
    """Bit for bit; and to rounding with the fast ways off, where sites are priced one by one."""
    losses, parameters, _ = by_svi(objective)
    expected, of_module = by_module(objective)
    assert losses == expected
    assert all(torch.equal(one, other) for one, other in zip(parameters, of_module, strict=True))
    with fast.disabled():
        slow, of_slow, _ = by_svi(objective)
    torch.testing.assert_close(losses, slow, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(parameters, of_slow, rtol=1e-8, atol=1e-10)


def test_the_short_way_to_a_site_is_bit_equal():
    """That alone, with products, joint draws and closed forms computed plainly on both sides."""
    with fast.disabled("joint_draws", "kl", "gated_weights"):
        losses, parameters, _ = by_svi("free_energy")
    with fast.disabled():
        slow, of_slow, _ = by_svi("free_energy")
    assert losses == slow
    assert all(torch.equal(one, other) for one, other in zip(parameters, of_slow, strict=True))


def test_svi_takes_joint_draws_and_steps_every_parameter():
    net, guide, model, elbo = pair("l0")
    with poutine.trace(param_only=True) as trace:
        run = elbo._get_trace(model, guide, (), {})
    assert run.joint_draws
    found = {id(site["value"].unconstrained()) for site in trace.trace.nodes.values()}
    assert found == {id(x) for x in [*net.parameters(), *guide.parameters()]}
    assert len(by_svi("l0")[2]) == len(found)


class Subclass(poutine.trace_messenger.TraceMessenger):
    """May do more than collect parameters."""


@pytest.mark.parametrize(
    ("handler", "is_short"),
    [
        (contextlib.nullcontext, True),
        (lambda: poutine.trace(param_only=True), True),
        (poutine.trace, False),
        (lambda: Subclass(param_only=True), False),
        (lambda: poutine.scale(scale=2.0), False),
        (lambda: poutine.block(hide=["z"]), False),
    ],
)
def test_which_handlers_leave_the_short_way(handler, is_short):
    fn = HardConcrete(torch.zeros(3)).to_event(1)
    with handler(), Record() as record:
        assert (sole_record() is record) == is_short
        z = sample("z", fn)
        with poutine.mask(mask=False):
            sample("masked", fn)
    assert record.sites["z"]["value"] is z
    assert (record.sites["z"]["mask"], record.sites["masked"]["mask"]) == (None, False)
    with Record(record.sites) as again:
        assert sample("z", fn) is z
    assert again.sites["z"]["value"] is z
    with Record(), poutine.trace(param_only=True):  # it would take the sites of the record inside
        assert sole_record() is None
