"""Recurrent layers and cells lose hidden units, and are what they were but for their size."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pyro_l0.compaction import Shrinker, compact
from pyro_l0.nn import L0Gate, NetworkCost, fix_gates, insert_gates
from pyro_l0.nn.l0_gate import NetworkGates
from tests.compaction.networks import cut
from tests.networks import Dense

X, LONGER = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(4, 9, 4, dtype=torch.float64)
GATES = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.7, 1.0, 1.0, 0.0], dtype=torch.float64)


class Classifier(nn.Module):
    """Reads the output's last step, the last state, or packed sequences' last states."""

    def __init__(self, kind, layers=1, both=False, reads="output"):
        super().__init__()
        self.layer = kind(4, 8, layers, batch_first=True, bidirectional=both, dropout=0.1 * (layers > 1))
        self.last, self.reads = nn.Linear(16 if both else 8, 2), reads

    def forward(self, x):
        if self.reads == "packed":
            lengths = torch.tensor([2] + [x.shape[1]] * (len(x) - 1))
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.last(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0][:, -1])
        output, state = self.layer(x)
        if self.reads == "output":
            return self.last(output[:, -1])
        state = state[0] if isinstance(state, tuple) else state
        return self.last(torch.cat([state[-2], state[-1]], 1) if self.layer.bidirectional else state[-1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("layers", "both", "reads"), [(1, True, "state"), (2, True, "packed")])
def test_a_layer_becomes_a_smaller_one(kind, layers, both, reads):
    """On sequences of another length too, with gates between 0 and 1 in its weights; the cost counts what is left."""
    torch.manual_seed(0)
    network = insert_gates(Classifier(kind, layers, both, reads).double().eval(), {"layer": L0Gate(8)}, X)
    compacted = compact(network, {"layer.1": GATES}, X)
    small = compacted.network
    assert max(compacted.certificate, compact(network, {"layer.1": GATES}, [X, LONGER]).certificate) < 1e-13
    torch.testing.assert_close(small(LONGER), fix_gates(network, {"layer.1": GATES})(LONGER))
    assert (small.layer.hidden_size, small.layer.input_size, small.layer.weight_hh_l0.shape[1]) == (5, 4, 5)
    assert [type(module) for module in small.modules()] == [Classifier, kind, nn.Linear]
    assert not small.layer._forward_hooks
    assert not small.layer._forward_pre_hooks
    cost, active = NetworkCost(network, X), {"layer.1": (GATES > 0).double()}
    assert cost.parameters(active) == sum(p.numel() for p in small.parameters())
    weights = sum(p.numel() for p in small.layer.parameters() if p.dim() > 1)
    steps = 2 + 5 + 5 if reads == "packed" else 3 * 5
    assert cost.macs(active) * 3 == pytest.approx(weights * steps + small.last.weight.numel() * 3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_small_layer_is_trained_saved_and_scripted():
    """Its list of flat weights has its own parameters, and its integers fit."""
    torch.manual_seed(1)
    network = insert_gates(Classifier(nn.LSTM).double(), {"layer": L0Gate(8)})
    small = compact(network, {"layer.1": GATES}, X).network
    small.layer.flatten_parameters()
    before = small(X).detach()
    small.train()(X).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    torch.optim.SGD(small.parameters(), 0.1).step()
    assert not torch.allclose(small(X), before)
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    scripted = torch.jit.script(nn.Sequential(small.layer))
    for layer in (torch.load(file, weights_only=False).layer, copy.deepcopy(small.layer), scripted):
        torch.testing.assert_close(layer(X)[0], small.layer(X)[0])


def test_a_layer_shrinks_while_it_trains():
    """By its own parameters, which stay the objects that they were."""
    torch.manual_seed(2)
    network = insert_gates(Classifier(nn.GRU, 2), {"layer": L0Gate(8)})
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    gates, x = NetworkGates(network), X.float()
    with torch.no_grad():
        network.l0_gates.layer.get_submodule("1").location[::2] = -20.0
    weights = list(network.layer.parameters())
    shrinker = Shrinker(network, gates, x, optimiser, patience=1)
    before = network.eval()(x)
    assert shrinker.step()
    assert network.layer.hidden_size == 4
    assert all(one is other for one, other in zip(weights, network.layer.parameters(), strict=True))
    torch.testing.assert_close(network.eval()(x), before)


def test_a_call_that_fails_leaves_the_weights():
    network = insert_gates(Classifier(nn.RNN), {"layer": L0Gate(8)})
    with pytest.raises(RuntimeError, match=r"input\.size"):
        network(torch.randn(2, 3, 7))
    assert all(one is other for one, other in zip(network.layer._flat_weights, network.layer.parameters(), strict=True))


def test_an_initial_state_that_is_given_keeps_its_units():
    """An input of the network has its size; a closed unit is as exact as before."""
    torch.manual_seed(3)
    given = Dense(lambda net, x, state: net.last(net.layer(x, state)[0]), layer=nn.GRU(4, 8), last=(8, 2))
    network = insert_gates(given.double().eval(), {"layer": L0Gate(8)})
    with pytest.warns(UserWarning, match="'layer.1': network input"):
        small = cut(network, {"layer.1": GATES}, (X, torch.randn(1, 5, 8, dtype=torch.float64)))
    assert small.layer.hidden_size == 8


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_weights_of_the_caller_are_gated_too(kind):
    """``torch.func.functional_call`` gives others for one call, before and after which the module has its own."""
    torch.manual_seed(5)
    network = fix_gates(insert_gates(Classifier(kind).double(), {"layer": L0Gate(8)}), {"layer.1": GATES}).eval()
    other = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    before = network(X)
    given = {name: x.clone() for name, x in other.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(network, given, (X,)), other(X))
    torch.testing.assert_close(network(X), before)
    network.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(network(X), other(X))
