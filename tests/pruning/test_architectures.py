"""A few lines of a user's prune networks of many kinds, and the result is a plain network of the user's own class."""

import copy
import importlib
import io

import pyro
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from pyro_l0 import prune
from pyro_l0.nn import L0Gate, NetworkGates
from pyro_l0.pruning.insertion_points import _with_gates
from tests.networks import Net
from tests.pruning.networks import DepthwiseCnn, Mlp, ResidualCnn, VisionTransformer, digit_batches, digits, same, train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network


def multiply_adds(network, *args, **kwargs):
    """Those of one example, counted by torch, which passes over its fused attention."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        network(*args, **kwargs)
    return counter.get_total_flops() / 2


def check_saved(network, *args, **kwargs):
    """A network goes into a file and out of it whole; the weights go into another of their sizes."""
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        own, other = network(*args, **kwargs), loaded(*args, **kwargs)
    own, other = (x if isinstance(x, torch.Tensor) else x.logits for x in (own, other))
    assert torch.equal(own, other)
    assert own.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "target"), [(Mlp, 0.6), (DepthwiseCnn, 0.3), (VisionTransformer, 0.5), (ResidualCnn, 0.2)]
)
def test_a_few_lines_prune_a_network(kind, target):
    """The class and the names of the given one, the multiply-adds within the budget and as torch counts them.

    The residual network has a gate for its stream.
    """
    network = kind()
    network.train(target < 0.5)
    given, mode = copy.deepcopy(network), [module.training for module in network.modules()]
    pyro.param("mine", torch.ones(2))
    x, _ = digits()
    result = prune(network, F.cross_entropy, digit_batches(), x[:2], target, epochs=3)

    assert type(result.network) is kind
    assert list(result.network.state_dict()) == list(network.state_dict())
    assert not any(module.training for module in result.network.modules())
    assert same(network, given)
    assert [module.training for module in network.modules()] == mode
    assert all(p.grad is None and p.device.type == "cpu" for p in network.parameters())
    full, left = multiply_adds(network.eval(), x[:1]), multiply_adds(result.network, x[:1])
    assert left <= target * full
    assert result.report.left["macs"] == (left, full)
    numbers = [sum(p.numel() for p in net.parameters()) for net in (result.network, network)]
    assert result.report.left["parameters"] == tuple(numbers)
    assert result.report.target.of_budget == pytest.approx(left / full / target)
    assert result.certificate < 1e-4
    assert "Plan(" not in repr(result)
    check_saved(result.network, x[:5])
    assert list(pyro.get_param_store().keys()) == ["mine"]


@pytest.mark.slow  # a layer of torch is replaced
def test_torch_s_own_transformer():
    """Heads of nn.MultiheadAttention leave; its substitute, which can hold fewer, goes into a file, too."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    network = nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (4, 16)), nn.Flatten(1, 2), encoder, nn.Flatten(1))
    network.append(nn.Linear(64, 10))
    x, _ = digits()
    result = prune(network, F.cross_entropy, digit_batches(), x[:2], 0.5, epochs=3)
    left, full = result.report.left["macs"]
    assert 0.35 * full < left <= 0.5 * full
    check_saved(result.network, x[:5])


def test_places_of_a_stream_that_get_a_gate_each_learn_apart():
    """suggest_gates has one gate for a stream; where prune puts one at each place, none has another's parameter."""
    network, stream = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), L0Gate(8)
    apart = NetworkGates(_with_gates(network, [(("0",), stream), (("2",), stream)]))
    together = NetworkGates(_with_gates(network, [(("0", "2"), stream)]))
    assert len({*apart.locations()}) == len(apart.locations()) == 2
    assert len({*together.locations()}) == len(together.locations()) == 1


def test_a_gate_given_at_several_paths_is_one():
    """As the residual stream's has to be, whose units leave only together."""
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    loader = [(x[i : i + 16], x[i : i + 16, :2]) for i in range(0, 64, 16)]

    def residual(net, x):
        x = net.first(x)
        return net.last(x + net.inner(x).relu())

    network = Net(residual, first=nn.Linear(6, 8), inner=nn.Linear(8, 8), last=nn.Linear(8, 2))
    gates = dict.fromkeys(("first", "inner"), L0Gate(8))
    result = prune(network, F.mse_loss, loader, x[:2], 0.4, epochs=20, gates=gates)
    assert len(result.report.target.open) == 1
    assert result.network.first.out_features == result.network.inner.in_features == result.network.last.in_features < 8


EDGES = torch.randint(12, (2, 40), generator=torch.Generator().manual_seed(0))


class Convolution(nn.Module):
    """Sums over the edges of a graph."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin, self.bias = nn.Linear(inputs, outputs, bias=False), nn.Parameter(torch.zeros(outputs))

    def forward(self, x, edges):
        h = self.lin(x)
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) + self.bias


class GraphAttention(Convolution):
    """The same with coefficients of heads that stand side by side."""

    def __init__(self, inputs, outputs, heads):
        super().__init__(inputs, heads * outputs)
        self.source, self.target = nn.Parameter(torch.randn(heads, outputs)), nn.Parameter(torch.randn(heads, outputs))

    def forward(self, x, edges):
        h = self.lin(x).view(-1, *self.source.shape)
        a = (h * self.source).sum(-1)[edges[0]] + (h * self.target).sum(-1)[edges[1]]
        mixed = torch.zeros_like(h).index_add(0, edges[1], a.sigmoid().unsqueeze(-1) * h[edges[0]])
        return mixed.flatten(1) + self.bias


@pytest.mark.parametrize(
    "layers",
    [lambda: (GraphAttention(16, 8, 4), GraphAttention(32, 3, 1)), lambda: (Convolution(16, 16), Convolution(16, 3))],
)
def test_graphs_are_pruned_and_keep_their_classes(layers):
    """By gates that reach the budget together, behind units that leave only together too."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 16), torch.randint(3, (12,))
    first, second = layers()
    network = Net(lambda net, x, edges: net.second(F.elu(net.first(x, edges)), edges), first=first, second=second)
    result = prune(network, F.cross_entropy, [(x, EDGES, y)] * 20, (x, EDGES), 0.4, epochs=3)
    left, full = result.report.left["macs"]
    assert left <= 0.4 * full
    assert result.network(x, EDGES).shape == (12, 3)
    assert result.network.second.lin.out_features == 3
    assert result.report.skipped["second.lin"].startswith("it makes the network's output")


class Auxiliary(Mlp):
    """With a head that only its training calls, and units that leave only in pairs."""

    def __init__(self):
        super().__init__(second=48)
        self.last, self.auxiliary = nn.Linear(24, 10), nn.Linear(32, 10)

    def forward(self, images):
        h = F.relu(self.first(images.flatten(1)))
        a, b = self.second(h).chunk(2, -1)
        out = self.last(F.gelu(a) * b)
        return out + 0.3 * self.auxiliary(h) if self.training else out


def test_the_report_counts_units_that_leave_and_names_what_only_trains():
    torch.manual_seed(0)
    x, _ = digits()
    report = prune(Auxiliary(), F.cross_entropy, digit_batches(), x[:2], 0.4, epochs=3).report
    assert report.skipped["auxiliary"] == "only the training uses it, and it is not counted"
    left, of = report.units["second.1"]
    assert (left % 2, of) == (0, 48)
    assert left < report.target.open["second.1"][0]
    assert f"{left} of 48 units stay" in str(report)


def test_the_loss_is_called_before_the_analysis(monkeypatch):
    monkeypatch.setattr(importlib.import_module("pyro_l0.pruning.prune"), "put_gates", None)
    x, _ = digits()
    with pytest.raises(ZeroDivisionError):
        prune(Mlp(), lambda outputs, targets: 1 / 0, digit_batches(), x[:2], 0.4, epochs=3)


def sequences(number, seed, length=16):
    """Four features, and which of them has the highest peak of a leaky sum."""
    x = torch.randn(number, length, 4, generator=torch.Generator().manual_seed(seed))
    total, peak = torch.zeros(number, 4), torch.full((number, 4), -torch.inf)
    for step in x.unbind(1):
        total = 0.7 * total + step
        peak = torch.maximum(peak, total)
    return x, peak.argmax(1)


def batches(number, size, length=16):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(*sequences(number, 0, length)), size, shuffle=True, generator=generator)


class Classifier(nn.Module):
    """Reads the last step of a recurrent layer, or of a cell in a loop."""

    def __init__(self, kind, size, **options):
        super().__init__()
        self.layer, self.last = kind(4, size, **options), nn.Linear(size, 4)

    def forward(self, x):
        if isinstance(self.layer, nn.RNNBase):
            return self.last(self.layer(x)[0][:, -1])
        state = None
        for step in x.unbind(1):
            state = self.layer(step, state)
        return self.last(state[0] if isinstance(state, tuple) else state)


def accuracy(network, x, classes):
    with torch.no_grad():
        return (network.eval()(x).argmax(1) == classes).double().mean().item()


@pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTMCell])
def test_a_small_one_in_few_steps(kind):
    torch.manual_seed(0)
    network = Classifier(kind, 8, **({"batch_first": True} if kind is nn.GRU else {}))
    result = prune(network, F.cross_entropy, batches(100, 20, 5), torch.randn(2, 5, 4), 0.5, epochs=5)
    left, full = result.report.left["macs"]
    assert left <= 0.5 * full
    assert result.certificate < 1e-5
    assert type(result.network.layer) is kind
    assert result.network.layer.hidden_size == result.network.last.in_features < 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_three_tenths_of_the_multiply_adds(kind):
    """Exact, a plain layer, and far from chance as the trained one that it was, on longer sequences too."""
    torch.manual_seed(0)
    data, test, longer = batches(4000, 100), sequences(2000, 1), sequences(2000, 2, 24)
    network = train(Classifier(kind, 48, batch_first=True), data, 15)
    result = prune(network, F.cross_entropy, data, test[0][:2], 0.3, epochs=15)
    left, full = result.report.left["macs"]
    assert left <= 0.3 * full
    assert result.certificate < 1e-5
    assert [type(module) for module in result.network.modules()] == [Classifier, kind, nn.Linear]
    for x, classes in (test, longer):
        assert min(accuracy(net, x, classes) for net in (result.network, network)) > 0.5  # by chance a quarter
