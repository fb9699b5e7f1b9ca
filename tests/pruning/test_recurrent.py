"""Recurrent classifiers of generated sequences are pruned by one call."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_l0 import prune
from tests.pruning.networks import train


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
