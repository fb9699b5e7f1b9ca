"""What the code of a network may do, and networks, examples and gates that can't be taken, refused by name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pyro_l0.compaction import Shrinker, compact
from pyro_l0.compaction.compact import CompactionError
from pyro_l0.infer import AutoGate
from pyro_l0.nn import L0Gate, fix_gates
from pyro_l0.nn.engine.operations import ENTRIES, Entry
from pyro_l0.nn.gate import gate_names, name_gates
from tests import networks
from tests.compaction.networks import cut

VECTORS, SEQUENCES, IMAGES = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 6), (2, 7, 6), (2, 3, 8, 8))
)
GATE = torch.tensor([1.0, 0.0, 0.5, 0.9])


def Net(function, **layers):  # noqa: N802
    """A function of two dense layers and a gate, or of others by name."""
    return networks.Net(function, **{"a": nn.Linear(6, 4), "gate": L0Gate(4), "b": nn.Linear(4, 2), **layers})


def dense(**layers):
    return Net(lambda net, x: net.b(net.gate(net.a(x))), **layers)


def images(function):
    return Net(function, a=nn.Conv2d(3, 4, 3), gate=L0Gate(4, dim=1))


# ------------------------------------------------------------ what is taken is right


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def assign(x):
    y = x.clone()
    y[:, 0] = 0.0
    return y


def shared(net, x):
    return net.b(net.gate(net.relu(net.mid(net.relu(net.a(x))))))


def unpacked(net, x):
    rows, _, _, _ = x.shape
    return net.b(net.gate(net.a(x)).mean((2, 3)).view(rows, -1))


def wrapped(function):
    """A function in front of the gate."""
    return Net(lambda net, x: net.b(net.gate(function(net.a(x)))))


@pytest.mark.filterwarnings("ignore:Expected an example that uses the whole")  # one leaves a layer out
@pytest.mark.parametrize(
    ("net", "x"),
    [
        (wrapped(branch), VECTORS),
        (wrapped(lambda x: torch.stack([row * 2 for row in x])), VECTORS),
        (wrapped(lambda x: x.view(*x.shape)), VECTORS),
        (wrapped(lambda x: x.view(int(x.shape[0]), -1)), VECTORS),
        (wrapped(lambda x: sum(x for _ in range(len(x)))), VECTORS),
        (wrapped(lambda x: torch.from_numpy(x.detach().numpy())), VECTORS),
        (wrapped(assign), VECTORS),
        (Net(shared, relu=nn.ReLU(), mid=nn.Linear(4, 4)), VECTORS),
        (images(unpacked), IMAGES),
        (images(lambda net, x: net.gate(net.a(x)).mean(1)), IMAGES),
        (dense(a=nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))), VECTORS),
        (dense(a=nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))), VECTORS),
        (dense(), SEQUENCES),
        (dense(a=nn.Embedding(9, 4)), torch.tensor([[0, 3], [8, 2]])),
        (Net(lambda net, x: net.b(net.gate(torch.cat([net.a(x)[:, :2]] * 2, 1)))), VECTORS),
        (Net(lambda net, x: net.b(net.gate(net.a(x) * net.s)), s=nn.Parameter(torch.ones(4))), VECTORS),
        (Net(lambda net, x: net.b(net.gate(net.a(x / 255)))), (255 * VECTORS.sigmoid()).byte()),
    ],
)
def test_code_of_any_kind_is_taken_and_the_network_left_alone(net, x):
    """For batches of any number of rows; and something is cut."""
    before, site = copy.deepcopy(net.state_dict()), next(iter(gate_names(net)))
    small = cut(net, {site: GATE}, *(x[:1].expand(rows, *x.shape[1:]) for rows in (1, 4)), example=x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())
    assert type(small) is type(net)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())


class Own(nn.Conv2d):
    """A convolution that inherits its forward."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3, padding=1)


class Doubled(Own):
    """A convolution with a forward of its own, to which no map can be added."""

    def forward(self, x):
        return 2 * super().forward(x)


class Scaled(Own):
    """A convolution that inherits its forward, and not all that it calls."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 2 * weight, bias)


class OwnNorm(nn.LayerNorm):
    """A norm that inherits its forward."""


@pytest.mark.parametrize("kind", [Own, Doubled, Scaled, nn.LayerNorm, OwnNorm])
def test_subclasses_are_taken_as_what_they_inherit(kind):
    """A constant meets padding, in a layer that reads it; a norm with an inherited forward counts what has left."""
    if issubclass(kind, nn.LayerNorm):
        net, x = Net(lambda net, x: net.b(net.gate(net.norm(net.gate(net.a(x))))), norm=kind(4)), VECTORS.double()
    else:
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), L0Gate(4, dim=1), nn.Sigmoid(), kind(4, 2)
        net, x = nn.Sequential(*layers), IMAGES.double()
    (site,) = gate_names(net)
    result = compact(net.double(), {site: GATE.double()}, x)
    assert result.certificate <= 1e-12
    torch.testing.assert_close(result.network(x), fix_gates(net, {site: GATE.double()}).eval()(x), rtol=0, atol=1e-12)
    if kind is not Doubled:
        assert len(result.reasons[site]) == (kind is Scaled)
        assert result.plan.changes


@pytest.mark.parametrize("error", [AssertionError("rank"), KeyError("z")])
def test_what_the_analysis_raises_is_a_refusal(error, monkeypatch):
    """Whatever a rule does, so that callers that go on without a cut can."""

    def fail(maps, operation):
        raise error

    monkeypatch.setitem(ENTRIES, "aten::relu", Entry(fail))
    net = nn.Sequential(nn.Linear(6, 4), L0Gate(4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(CompactionError, match=f"raises {type(error).__name__}"):
        compact(net, {"1": GATE}, VECTORS)


def guide_of(net, *args):
    guide = AutoGate(net)
    guide(*args)
    return guide


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"example": torch.ones(2, 7)}, RuntimeError, "shapes cannot be multiplied"),
        ({"guide": None}, TypeError, r"a guide with posterior\(\) and keep\(\)"),
        ({"guide": guide_of(L0Gate(3), torch.ones(1, 3))}, ValueError, r"it has none for \['1'\]"),
        ({"guide": AutoGate(dense())}, ValueError, "call it once"),
        ({"threshold": 0.0}, ValueError, "threshold strictly between 0 and 1, but got 0.0"),
        ({"threshold": 1.0}, ValueError, "threshold strictly between 0 and 1, but got 1.0"),
        ({"threshold": "low"}, TypeError, "threshold to be a number"),
        ({"patience": 0}, ValueError, "patience of at least 1, but got 0"),
    ],
)
def test_what_no_shrinker_takes(options, error, message):
    """When it is made, before anything is trained."""
    net = nn.Sequential(nn.Linear(6, 4), L0Gate(4), nn.Linear(4, 2))
    name_gates(net)
    guide = guide_of(net, VECTORS)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(error, match=message):
        Shrinker(net, **{"guide": guide, "example": VECTORS, "optimiser": optimiser} | options)


def test_results_with_a_graph_are_copied():
    kept = dense()
    kept.last = kept.a(VECTORS)
    assert compact(kept, {"gate": GATE}, VECTORS).network.last.grad_fn is None


# ------------------------------------------------------------ causes, and not where they show


def test_gate_in_a_weight_parametrisation_acts_on_weights():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    parametrize.register_parametrization(net[0], "weight", networks.Dense(lambda net, weight: net.gate(weight), gate=3))
    cut(net, {site: torch.tensor([1.0, 0.0, 0.5]) for site in gate_names(net)}, torch.randn(2, 3))


def test_closed_gates_that_cut_nothing_are_told():
    """Half of a state that goes around in a loop, whose other readers need all of it."""

    def loop(net, x):
        h = x.new_zeros(x.shape[1], 6)
        for one in x:
            h = torch.tanh(net.enter(one) + net.again(h))
        return h.sum() + net.last(torch.cat([net.gate(h[:, :3]) + h[:, :3], h[:, 3:]], -1))

    network = networks.Dense(loop, enter=(3, 6), again=(6, 6), last=(6, 2), gate=3)
    with pytest.warns(UserWarning, match="closed, but nothing is smaller.*'gate'"):
        small = compact(network, {"gate": torch.tensor([1.0, 0.0, 0.0])}, torch.randn(4, 2, 3))
    assert small.plan.remaining == {}
