"""Copies of networks keep hooks, closures and what modules leave out of their copies; or a module is named.

What is expected is computed by the network that was given, with masks that are multiplied by hand.
"""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune as masks

from pyro_l0 import prune
from pyro_l0.compaction import compact, compact_zeros
from pyro_l0.compaction.compact import CompactionError
from pyro_l0.nn import L0Gate, NetworkGates, fix_gates, insert_gates, suggest_gates
from pyro_l0.nn.engine.record import copied
from pyro_l0.pruning.phases import Training
from tests.bench import fuzz_copies
from tests.bench.fuzz_copies import Keeping, Network, by_hand
from tests.networks import Dense, Net

Z = torch.tensor([0.0, 1.0] * 4)


def test_a_whole_graph_module():
    """It drops what its graph does not call when it is copied: the holder of its gates."""
    torch.manual_seed(0)
    network, x = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))), torch.randn(4, 3)
    gated = insert_gates(network, {"1": L0Gate(8)}, x)
    right = by_hand(network, {"1": Z}, x)
    torch.testing.assert_close(fix_gates(gated, {"1.1": Z}).eval()(x), right)
    assert not list(fix_gates(gated, {"1.1": Z})._forward_hooks)
    torch.testing.assert_close(compact(gated, {"1.1": Z}, x).network(x), right)


class Lacking(nn.Linear):
    """Its copy has no scale, weights of its own, and none of its hooks."""

    def __deepcopy__(self, memo):
        return Lacking(self.in_features, self.out_features)

    def forward(self, x):
        return self.scale * super().forward(x)


def exported(network):
    return torch.export.export(network, (torch.randn(4, 3),), dynamic_shapes=({0: torch.export.Dim("rows")},)).module()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about its tree specs
@pytest.mark.parametrize("kind", [exported, lambda layer: scaled(Lacking, 3), torch.fx.symbolic_trace])
def test_gates_behind_modules_that_copy_themselves(kind):
    """What they leave out is in all copies."""
    torch.manual_seed(0)
    inner = kind(nn.Sequential(nn.Linear(3, 8), nn.ReLU()))
    network, x = nn.Sequential(inner, nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 3)
    right = network[2](torch.tanh(inner(x) * Z))
    gated = insert_gates(network, {"0": L0Gate(8)}, x)
    torch.testing.assert_close(fix_gates(gated, {"0.1": Z})(x), right)
    torch.testing.assert_close(compact(gated, {"0.1": Z}, x).network(x), right)


def test_modules_of_einops():
    layers = pytest.importorskip("einops.layers.torch")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), layers.Reduce("b s d -> b d", "mean"), nn.Linear(8, 2))
    x = torch.randn(4, 5, 3)
    gated = insert_gates(network, {"2": L0Gate(8)}, x)
    torch.testing.assert_close(compact(gated, {"2.1": Z}, x).network(x), by_hand(network, {"2": Z}, x))


def holding(gate):
    """Three layers and a gate, of which a function that is an attribute calls two."""
    network = Dense(lambda net, x: net.c(net.block(torch.relu(net.a(x)))), a=(5, 8), b=(8, 8), c=(8, 2), gate=gate)
    network.block = lambda x: network.gate(torch.relu(network.b(x)))
    return network


def test_a_function_that_holds_modules():
    """Its copy holds those of the copy, which is cut; and gates are suggested behind them."""
    torch.manual_seed(0)
    x, network = torch.randn(64, 5), holding(L0Gate(8))
    right = network.c(torch.relu(network.b(torch.relu(network.a(x)))) * Z)
    small = compact(network, {"gate": Z}, x[:2]).network
    torch.testing.assert_close(small(x), right)
    assert small.b.out_features == 4
    assert list(suggest_gates(holding(nn.Identity()), x[:2])) == ["a", "gate"]


def test_what_a_function_holds_beside_the_network_is_shared():
    """A list of the user's is filled by the hooks of copies, too."""
    seen, teacher = [], nn.Linear(5, 8)
    network = holding(nn.Identity())
    network.a.register_forward_hook(lambda module, args, output: seen.append(network.a.weight is not module.weight))
    network.a.register_forward_hook(lambda module, args, output: output + teacher(args[0]))
    new = copied(network)
    new(torch.randn(2, 5))
    assert seen == [False]
    held = [cell.cell_contents for hook in new.a._forward_hooks.values() for cell in hook.__closure__]
    assert teacher.weight in held[-1].parameters()


@pytest.mark.filterwarnings("ignore::UserWarning")  # few steps
def test_a_tensor_of_the_last_call_stops_nothing():
    """On a data class, a namespace, a distribution or in a tuple: copies have its numbers, and runs go on."""
    torch.manual_seed(0)
    network = Network([Keeping, Keeping])
    x = torch.randn(16, 5)
    network(x)
    new = copied(network)
    assert torch.equal(new.blocks[0].last.features, network.blocks[0].last.features)
    assert new.blocks[0].last.features.grad_fn is None
    assert network.blocks[0].last.features.grad_fn is not None
    loader = [(x, x[:, :3])] * 4
    result = prune(network, F.mse_loss, loader, x[:2], 0.7, epochs=5, pretrained=False)
    assert result.report.left["parameters"][0] == sum(p.numel() for p in result.network.parameters())


class Weak(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.reference = weakref.ref(self.inner)

    def forward(self, x):
        return self.reference()(x)


class Method(Weak):
    """What the message advises."""

    def __init__(self):
        super().__init__()
        self.reference = self.reach

    def reach(self):
        return self.inner


class Smaller(nn.Linear):
    def __deepcopy__(self, memo):
        return type(self)(self.in_features, self.out_features + 1)


class Scaled(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = 1.0

    def __deepcopy__(self, memo):
        return type(self)(self.in_features, self.out_features)


class Kept(Scaled):
    """What the message advises."""

    def __deepcopy__(self, memo):
        new = super().__deepcopy__(memo)
        new.scale = self.scale
        return new


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Weak, r"something that '0' holds goes on using '0\.inner' of the original; write what uses it as a method"),
        (lambda: Smaller(5, 8), r"copies of '0', a Smaller, have another 'out_features'; let its __deepcopy__"),
        (lambda: scaled(Scaled), r"copies of '0', a Scaled, have another 'scale'"),
    ],
)
def test_what_cannot_be_copied_is_named(make, words):
    network, x = nn.Sequential(make(), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 5)
    loader = [(torch.randn(4, 5), torch.randn(4, 2))] * 4
    for call in (
        lambda: insert_gates(network, {"1": L0Gate(8)}),
        lambda: compact_zeros(network, x),
        lambda: prune(network, F.mse_loss, loader, x, 0.5, epochs=5),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def scaled(kind, inputs=5):
    layer = kind(inputs, 8)
    layer.scale = 2.0
    return layer


@pytest.mark.parametrize("make", [Method, lambda: scaled(Kept)])
def test_the_advice_on_copies(make):
    network, x = nn.Sequential(make(), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 5)
    gated = insert_gates(network, {"1": L0Gate(8)}, x)
    torch.testing.assert_close(compact(gated, {"1.1": Z}, x).network(x), by_hand(network, {"1": Z}, x))


LAYER = nn.Linear(5, 8)  # of a network below, whose code reaches it by this name


def test_code_that_calls_a_module_by_a_global_name():
    by_name = Net(lambda net, x: LAYER(x), layer=LAYER)
    network, x = nn.Sequential(by_name, nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 5)
    with torch.no_grad():
        network[2].weight[:, :3] = 0
    loader = [(torch.randn(4, 5), torch.randn(4, 2))] * 4
    for call in (
        lambda: compact_zeros(network, x),
        lambda: prune(network, F.mse_loss, loader, x, 0.5, epochs=5),
    ):
        with pytest.raises((ValueError, CompactionError), match=r"'0\.layer'"):
            call()


HEADS = {
    "convolution": lambda: nn.Sequential(nn.Conv2d(8, 5, 1), nn.Flatten(), nn.Linear(5 * 36, 4)),
    "pooled": lambda: nn.Sequential(
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 7), nn.ReLU(), nn.Linear(7, 4)
    ),
    "normed": lambda: nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 4, 6), nn.Flatten()),
}


@pytest.mark.filterwarnings("ignore:The zeros of")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm2d(8)])
def test_zeros_that_a_head_of_training_reads(head, norm):
    """What can leave leaves, and both modes compute what they did; googlenet has such heads."""

    def forward(net, x):
        h = torch.relu(net.norm(net.a(x)))
        y = net.out(torch.relu(net.b(h)).mean((2, 3)))
        return (y, net.head(h)) if net.training else y

    torch.manual_seed(0)
    layers = dict(a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 6, 3, padding=1), norm=norm(), out=(6, 4))
    network, x = Dense(forward, **layers, head=HEADS[head]()).double(), torch.randn(3, 3, 6, 6).double()
    with torch.no_grad():
        for layer in (network.a, network.b):
            layer.weight[::2] = 0.0
            layer.bias[::2] = 0.0
    small = compact_zeros(network, x).network
    assert small.b.out_channels == 3
    other = torch.randn(3, 3, 6, 6).double()
    torch.testing.assert_close(small(other), network.eval()(other))
    for got, right in zip(small.train()(other), network.train()(other), strict=True):
        torch.testing.assert_close(got, right)


class Frozen(nn.Module):
    """A backbone whose BatchNorms its ``train`` holds in evaluation mode, and one norm that trains."""

    def __init__(self, held):
        super().__init__()
        self.held = held
        self.layers = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()
        )
        self.out = nn.Linear(16, 2)
        for norm in (self.layers[1], self.layers[4]):
            norm.running_mean.fill_(0.25)

    def train(self, mode=True):
        super().train(mode)
        for number in self.held:
            self.layers[number].eval()
        return self

    def forward(self, x):
        return self.out(self.layers(x))


@pytest.mark.filterwarnings("ignore::UserWarning")  # few steps
@pytest.mark.parametrize("held", [(1, 4), (1,), (4,), ()])
def test_statistics_that_train_holds(held):
    """They are left alone, and the report says how many; others are renewed."""
    torch.manual_seed(0)
    network, x = Frozen(held), torch.randn(32, 5)
    result = prune(network, F.mse_loss, [(x, x[:, :2])] * 5, x[:2], 0.5, epochs=4, training=Training(finetune=0.0))
    for number in (1, 4):
        is_same = bool((result.network.layers[number].running_mean == 0.25).all())
        assert is_same == (number in held)
    told = " ".join(note for note in result.report.notes if "keep their statistics" in note)
    assert told.startswith(f"{len(held)} BatchNorm layers keep" if held else "")
    assert bool(told) == bool(held)


UNREAD = {"zero": lambda y, h: y + 0 * h, "difference": lambda y, h: y + h - h, "unused": lambda y, h: y}
READ = {"compared": lambda y, h: y * (h.sum(-1, keepdim=True) > 1.0), "dead": lambda y, h: y + h}


def branches(join):
    """Its first branch changes no output: multiplied by 0, subtracted from itself, or not used; or it does."""

    def forward(net, x):
        return net.out(join(net.b(x), net.act(net.a(x))))

    return Dense(forward, a=(5, 4), act=nn.ReLU(), b=(5, 4), out=(4, 2))


@pytest.mark.parametrize("how", UNREAD)
def test_gates_that_change_no_output(how):
    network, x = branches(UNREAD[how]).double(), torch.randn(6, 5).double()
    with pytest.raises(ValueError, match=r"closing gate 'act\.1' changes no output; take it out"):
        insert_gates(network, {"act": L0Gate(4)}, x)
    assert not {"a", "act"} & set(suggest_gates(network, x))
    loader = [(x, torch.randn(6, 2).double())] * 5
    message = r"gate 'act\.1' changes no output|behind a gate|units can be taken out|budget"
    with pytest.raises(ValueError, match=message):
        prune(network, F.mse_loss, loader, x, 0.5, epochs=4, gates={"act": L0Gate(4)})


@pytest.mark.parametrize("how", READ)
def test_gates_of_dead_units_and_of_units_that_are_compared_act(how):
    """A unit that is dead at the example and the weights of today is none that changes nothing."""
    network, x = branches(READ[how]), torch.randn(6, 5)
    with torch.no_grad():
        network.a.bias.fill_(-100.0 if how == "dead" else 0.1)
    insert_gates(network, {"act": L0Gate(4)}, x)


def test_network_gates_that_no_call_reaches():
    """The first training call says so, and the way out that it names works."""
    network = Dense(lambda net, x: net.last(net.gate(net.first(x))), first=(3, 4), gate=4, last=(4, 2), spare=4)
    NetworkGates(network)
    with torch.no_grad():
        network(torch.ones(1, 3))  # trains nothing
    message = r"first training call did not reach 'spare'; take the gate out, or before that"
    with pytest.raises(ValueError, match=message):
        network(torch.ones(1, 3))

    def ways(net, x, is_one=True):
        return net.layer((net.one if is_one else net.other)(x))

    network = Dense(ways, one=3, other=3, layer=(3, 1))
    NetworkGates(network)
    network.eval()(torch.ones(1, 3), is_one=False)
    network.train()(torch.ones(1, 3))


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (torch.compile, r"got a OptimizedModule around it; give network\._orig_mod"),
        (nn.DataParallel, r"got a DataParallel around it; give network\.module"),
        (torch.jit.script, r"of Python code, but got a RecursiveScriptModule; give the module that was scripted"),
        (lambda net: torch.jit.trace(net, torch.ones(2, 5)), r"got a TopLevelTracedModule; give the module that was"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_to_give_instead_of_a_wrapper(wrap, words):
    wrapped = wrap(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)))
    for call in (
        lambda: suggest_gates(wrapped, torch.ones(2, 5)),
        lambda: prune(wrapped, F.mse_loss, [torch.ones(2, 5)] * 9, torch.ones(2, 5), epochs=4),
    ):
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: masks.l1_unstructured(layer, "weight", 0.5),
        lambda layer: masks.random_structured(layer, "weight", 0.5, dim=1),
        lambda layer: masks.identity(layer, "bias"),
        nn.utils.spectral_norm,
    ],
)
def test_the_way_out_of_weights_that_hooks_compute(change):
    """The call that the message names does it."""
    network, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 5)
    change(network[0])
    with pytest.raises(ValueError, match=r"of '0' was computed by a hook; call torch\.nn\.utils\.") as caught:
        suggest_gates(network, x)
    exec(str(caught.value).split("call ")[1].removesuffix(" first."), {"torch": torch, "network": network})
    assert list(suggest_gates(network, x)) == ["1"]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.filterwarnings("ignore")
def test_random_networks(seed):
    """Thirty cases of the bench, which has the rest."""
    _, wrong = fuzz_copies.check(seed)
    assert wrong is None
