"""Gates in networks that were written without them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import Gate, fix_gates, gate_dropout, insert_gates
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names


class User(nn.Module):
    """A network of somebody's, with functional activations and several kinds of Dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.drop_maps, self.drop, self.none = nn.Dropout(0.3), nn.Dropout(0.5), nn.Dropout(0.0)
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(16, 6), nn.ReLU()), nn.Linear(6, 2))

    def forward(self, x):
        x = self.drop_maps(torch.relu(self.conv(x)))
        x = self.none(self.drop(torch.flatten(x, 1)))
        return self.blocks(x)


X = torch.randn(3, 1, 4, 4)


def test_dropout_becomes_gates():
    """One per map behind a convolution, one per feature elsewhere, with the rates that stayed."""
    net = User().train()
    gated, rates = gate_dropout(net, X)
    assert {name: (gate.size, gate.dim) for name, gate in gate_names(gated).items()} == {
        "drop_maps": (4, 1),
        "drop": (16, -1),
    }
    assert rates == pytest.approx({"drop_maps": 0.7, "drop": 0.5})
    assert net.training
    assert isinstance(net.drop, nn.Dropout)
    ones = {name: torch.ones(gate.size) for name, gate in gate_names(gated).items()}
    torch.testing.assert_close(fix_gates(gated, ones).eval()(X), net.eval()(X))
    AutoGate(lambda x: gated(x), init_active_prob=rates)(X)


def test_gates_behind_named_modules():
    """Inner and outer ones; the network computes the same when they are open, and compacts."""
    net = User().eval()
    gated = insert_gates(net, {"conv": Gate(4, dim=1), "blocks.0": Gate(6), "blocks.0.0": Gate(6)})
    assert set(gate_names(gated)) == {"conv.1", "blocks.0.1", "blocks.0.0.0.1"}
    ones = {name: torch.ones(gate.size) for name, gate in gate_names(gated).items()}
    torch.testing.assert_close(fix_gates(gated, ones).eval()(X), net(X))
    gates = {name: (torch.arange(len(gate)) % 2).float() for name, gate in ones.items()}
    assert compact(gated, gates, X).certificate < 1e-5  # float32
    assert not any(isinstance(module, (Gate, FixedGate)) for module in net.modules())


def test_one_gate_at_several_places():
    """A gate on a residual stream is drawn once in a run, by a loss and by Pyro's own handlers."""

    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.inner, self.leave = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.gate = Gate(4)
            self.seen = []

        def forward(self, x):
            h = self.gate(self.enter(x))
            h = self.gate(h + self.inner(h))
            return self.leave(h)

    net = Stream()

    def model(x):
        logits = net(x)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=torch.zeros(len(x)))

    x = torch.randn(5, 3)
    trace = poutine.trace(model).get_trace(x)
    z = trace.nodes["gate"]["value"]
    h = net.enter(x) * z
    expected = net.leave((h + net.inner(h)) * z)
    torch.testing.assert_close(trace.nodes["y"]["fn"].logits, expected - expected.logsumexp(-1, keepdim=True))
    guide = AutoGate(model)
    loss = L0_ELBO("l0", lam=0.1)(model, guide)
    loss(x).backward()
    assert guide.sites["gate"]["log_alpha"].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: setattr(net.drop, "p", 1.0), "p below 1, but 'drop' has 1.0"),
        (lambda net: setattr(net, "more", nn.Dropout(0.1)), r"'more' to be called on one number of units, .* \[\]"),
        (lambda net: setattr(net, "drop_maps", net.drop), r"called on \[4, 16\]"),
    ],
)
def test_dropout_that_is_no_gate(change, message):
    """Refused by the layer's name."""
    net = User()
    change(net)
    with pytest.raises(ValueError, match=message):
        gate_dropout(net, X)


@pytest.mark.parametrize(
    ("layer", "shape", "dim", "size"),
    [
        (nn.Conv1d(2, 4, 3), (3, 2, 10), 1, 4),
        (nn.Linear(5, 7), (2, 3, 5), -1, 7),
        (nn.Linear(5, 7), (2, 3, 4, 5), -1, 7),
        (nn.Conv2d(2, 4, 3), (3, 2, 5, 5), 1, 4),
    ],
    ids=repr,
)
def test_dropout_becomes_gates_on_the_units_of_its_layer(layer, shape, dim, size):
    """Whatever the rank: feature maps behind a convolution, features behind a dense layer."""
    net, _ = gate_dropout(nn.Sequential(layer, nn.ReLU(), nn.Dropout(0.5)), torch.randn(shape))
    assert (net[2].dim, net[2].size) == (dim, size)
