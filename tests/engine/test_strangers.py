"""Code that users write and no other test has: state that changes with every call, heads for training alone."""

import pytest
import torch
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.compaction.compact import CompactionError
from pyro_l0.nn import L0Gate, fix_gates, insert_gates, suggest_gates
from tests.networks import Dense

CLOSED = (torch.arange(6) % 2 == 0).double()


def example(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gated(forward, **layers):
    """Two layers with a gate in between."""
    torch.manual_seed(0)
    return Dense(forward, enter=(4, 6), gate=6, leave=(6, 2), **layers).double()


def hidden(net, x):
    return net.gate(torch.relu(net.enter(x)))


def averaged(net, x):
    """Scales by an average over all calls, evaluation among them."""
    h = hidden(net, x)
    net.average = 0.9 * net.average + 0.1 * h.detach().mean(0)
    return net.leave(torch.tanh(h) * net.average)


def overwritten(net, x):
    """Changes in place what its gradients need, as code for inference may."""
    h = net.enter(x)
    h.mul_(net.leave(net.gate(torch.relu(net.inner(h)))))
    return h


def test_state_that_changes_with_every_call():
    """The smaller network begins with the same state as the whole one, which is left as it was."""
    network, x = gated(averaged, average=nn.Buffer(torch.full((6,), 0.3))), example(3, 4)
    small = compact(network, {"gate": CLOSED}, x).network
    torch.testing.assert_close(network.average, torch.full((6,), 0.3).double())
    torch.testing.assert_close(small.average, torch.full((3,), 0.3).double())
    whole = fix_gates(network, {"gate": CLOSED}).eval()
    for _ in range(3):
        torch.testing.assert_close(small(x), whole(x), rtol=1e-12, atol=1e-12)


def test_networks_without_gradients():
    """Where the network that was given has no gradients, outputs alone are certified."""
    torch.manual_seed(0)
    network = Dense(overwritten, enter=(4, 4), inner=(4, 6), gate=6, leave=(6, 4)).double()
    result = compact(network, {"gate": CLOSED}, example(3, 4))
    assert result.certificate.gradients is None
    assert result.certificate.outputs < 1e-12
    assert result.network.inner.out_features == 3


def auxiliary(net, x):
    """A second head in training mode, which evaluation never calls."""
    h = net.drop(hidden(net, x))
    return (net.leave(h), net.second(h)) if net.training else net.leave(h)


def test_heads_for_training_alone():
    network, x = gated(auxiliary, drop=nn.Dropout(0.5), second=(6, 3)), example(3, 4)
    result = compact(network, {"gate": CLOSED}, x)
    assert (result.network.leave.in_features, result.network.second.in_features) == (3, 3)
    assert result.certificate.training_outputs < 1e-12
    whole, small = fix_gates(network, {"gate": CLOSED}), result.network.train()
    for one in (whole, small):
        one.drop.p = 0.0
    for expected, found in zip(whole.train()(x), small(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def by_units(net, x):
    """Continues with one of two layers, as its units say."""
    return (net.other if bool(x.sum() < 0) else net.leave)(hidden(net, x))


def by_caller(net, x, other=False):
    return (net.other if other else net.leave)(hidden(net, x))


def test_ways_that_the_example_does_not_take():
    """An example that leaves out a part of the network is told what to add; with it everything is cut."""
    network, x = gated(by_units, other=(6, 2)), example(3, 4).abs()
    with pytest.raises(CompactionError, match=r"net\.other if bool.*list of calls that together use"):
        compact(network, {"gate": CLOSED}, x)
    assert compact(network, {"gate": CLOSED}, [x, -x]).network.other.in_features == 3


def test_parts_that_stay_whole_are_warned_of():
    """A part that no call used and that could read units that left."""
    network, x = gated(by_caller, other=(6, 2)), example(3, 4)
    with pytest.warns(UserWarning, match="no call of it uses 'other'") as warned:
        compact(network, {"gate": CLOSED}, x)
    assert [warning.filename for warning in warned] == [__file__]
    assert compact(network, {"gate": CLOSED}, [x, (x, True)]).network.other.in_features == 3


def test_lists_of_calls():
    """A module that every call of an example calls once is called at one place."""
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double(), example(3, 4)
    ways = [x, {"input": x[:2]}]
    assert list(suggest_gates(network, ways)) == ["1"]
    insert_gates(network, {"1": L0Gate(6)}, ways)
    nothing_left = str(suggest_gates(insert_gates(network, {"1": L0Gate(6)}), ways))
    assert nothing_left.startswith("no module without a gate behind which one would cut something")
    with pytest.raises(ValueError, match=r"output of '1', of shape \(3, 6\)"):
        insert_gates(network, {"1": L0Gate(5)}, ways)


def test_no_suggestion_where_code_reads_the_weights():
    """A gate behind such a module would not act on what is read: a codebook, whose distances the code takes itself."""

    def forward(net, x):
        h = torch.relu(net.enter(x))
        near = net.book(torch.cdist(h.detach(), net.book.weight).argmin(1))
        return net.leave(h + (near - h).detach())

    codebook = Dense(forward, enter=(4, 6), book=nn.Embedding(5, 6), leave=(6, 2))
    found = suggest_gates(codebook.double(), example(3, 4))
    assert found.refused["book"] == "code outside of it reads its parameters"
    assert "book" not in found
