"""Code that users write and no other test has: state that changes with every call, heads for training alone."""

import pytest
import torch
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.compaction.compact import CompactionError
from pyro_l0.nn import L0Gate, fix_gates, insert_gates, suggest_gates
from tests.networks import Net

CLOSED = (torch.arange(6) % 2 == 0).double()


def example(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Gated(nn.Module):
    """Two layers with a gate in between."""

    def __init__(self):
        super().__init__()
        self.enter, self.gate, self.leave = nn.Linear(4, 6), L0Gate(6), nn.Linear(6, 2)

    def hidden(self, x):
        return self.gate(torch.relu(self.enter(x)))


class Averaged(Gated):
    """Scales by an average over all calls, evaluation among them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.full((6,), 0.3))

    def forward(self, x):
        h = self.hidden(x)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return self.leave(torch.tanh(h) * self.average)


def overwritten():
    """Changes in place what its gradients need, as code for inference may."""

    def forward(net, x):
        h = net.enter(x)
        h.mul_(net.leave(net.gate(torch.relu(net.inner(h)))))
        return h

    return Net(forward, enter=nn.Linear(4, 4), inner=nn.Linear(4, 6), gate=L0Gate(6), leave=nn.Linear(6, 4))


def test_state_that_changes_with_every_call():
    """The smaller network begins with the same state as the whole one, which is left as it was."""
    torch.manual_seed(0)
    network, x = Averaged().double(), example(3, 4)
    small = compact(network, {"gate": CLOSED}, x).network
    torch.testing.assert_close(network.average, torch.full((6,), 0.3).double())
    torch.testing.assert_close(small.average, torch.full((3,), 0.3).double())
    whole = fix_gates(network, {"gate": CLOSED}).eval()
    for _ in range(3):
        torch.testing.assert_close(small(x), whole(x), rtol=1e-12, atol=1e-12)


def test_networks_without_gradients():
    """Where the network that was given has no gradients, outputs alone are certified."""
    torch.manual_seed(0)
    network, x = overwritten().double(), example(3, 4)
    result = compact(network, {"gate": CLOSED}, x)
    assert result.certificate.gradients is None
    assert result.certificate.outputs < 1e-12
    assert result.network.inner.out_features == 3


class Auxiliary(Gated):
    """A second head in training mode, which evaluation never calls."""

    def __init__(self):
        super().__init__()
        self.drop, self.second = nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x):
        h = self.drop(self.hidden(x))
        return (self.leave(h), self.second(h)) if self.training else self.leave(h)


def test_heads_for_training_alone():
    torch.manual_seed(0)
    network, x = Auxiliary().double(), example(3, 4)
    result = compact(network, {"gate": CLOSED}, x)
    assert (result.network.leave.in_features, result.network.second.in_features) == (3, 3)
    assert result.certificate.training_outputs < 1e-12
    whole, small = fix_gates(network, {"gate": CLOSED}), result.network.train()
    for one in (whole, small):
        one.drop.p = 0.0
    for expected, found in zip(whole.train()(x), small(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Branching(Gated):
    """Continues with one of two layers, as its units or its caller say."""

    def __init__(self, asks_units=True):
        super().__init__()
        self.other, self.asks_units = nn.Linear(6, 2), asks_units

    def forward(self, x, other=False):
        use_other = bool(x.sum() < 0) if self.asks_units else other
        return (self.other if use_other else self.leave)(self.hidden(x))


def test_ways_that_the_example_does_not_take():
    """An example that leaves out a part of the network is told what to add; with it everything is cut."""
    torch.manual_seed(0)
    network, x = Branching().double(), example(3, 4).abs()
    with pytest.raises(CompactionError, match=r"self\.other if use_other.*list of calls that together use"):
        compact(network, {"gate": CLOSED}, x)
    assert compact(network, {"gate": CLOSED}, [x, -x]).network.other.in_features == 3


def test_parts_that_stay_whole_are_warned_of():
    """A part that no call used and that could read units that left."""
    torch.manual_seed(0)
    network, x = Branching(asks_units=False).double(), example(3, 4)
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


def codebook():
    """Replaces what it is given by the nearest of its vectors, whose distances it takes itself."""

    def forward(net, x):
        h = torch.relu(net.enter(x))
        near = net.book(torch.cdist(h.detach(), net.book.weight).argmin(1))
        return net.leave(h + (near - h).detach())

    return Net(forward, enter=nn.Linear(4, 6), book=nn.Embedding(5, 6), leave=nn.Linear(6, 2))


def test_no_suggestion_where_code_reads_the_weights():
    """A gate behind such a module would not act on what is read."""
    torch.manual_seed(0)
    found = suggest_gates(codebook().double(), example(3, 4))
    assert found.refused["book"] == "code outside of it reads its parameters"
    assert "book" not in found
