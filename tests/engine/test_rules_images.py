"""Rules on gated feature maps: what of four closed channels (of eight) leaves through each operation, exactly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.engine.maps import VARIES
from tests.engine.exactness import examine
from tests.networks import Dense, Net


def between(*layers):
    """Layers between eight gated channels and a convolution that reads what they make."""

    def forward(net, x):
        return net.out(net.layers(net.gate(net.one(x)))).mean((2, 3))

    parts = dict(one=nn.Conv2d(3, 8, 3), gate=L0Gate(8, dim=1), layers=nn.Sequential(*layers), out=nn.LazyConv2d(2, 1))
    network = Dense(forward, **parts)
    network(torch.ones(2, 3, 8, 8))
    return network


def images(size=8):
    return torch.randn(2, 3, size, size, dtype=torch.float64)


LAYERS = {
    "transposed": (lambda: between(nn.ConvTranspose2d(8, 6, 2, 2)), 4),
    "depthwise": (lambda: between(nn.Conv2d(8, 8, 3, groups=8, bias=False)), 4),
    "depthwise, bias": (lambda: between(nn.Conv2d(8, 8, 3, groups=8)), 0),
    "depthwise, double": (lambda: between(nn.Conv2d(8, 16, 3, groups=8, bias=False)), 4),
    "circular": (lambda: between(nn.Conv2d(8, 6, 3, padding=1, padding_mode="circular")), 4),
    "reflecting": (lambda: between(nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect")), 4),
    "same": (lambda: between(nn.Conv2d(8, 6, 3, padding="same")), 4),
    "pixel shuffle after": (lambda: between(nn.Conv2d(8, 12, 1), nn.PixelShuffle(2)), 4),
    "pixel unshuffle": (lambda: between(nn.PixelUnshuffle(2)), 4),
    "upsampling": (lambda: between(nn.Upsample(scale_factor=2, mode="bilinear")), 4),
    "nearest": (lambda: between(nn.Upsample(scale_factor=2)), 4),
    "max pool": (lambda: between(nn.MaxPool2d(2)), 4),
    "average pool": (lambda: between(nn.AvgPool2d(2, padding=1)), 4),
    "adaptive pools": (lambda: between(nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(1)), 4),
    "instance norm": (lambda: between(nn.InstanceNorm2d(8)), 4),
    "instance norm, affine": (lambda: between(nn.InstanceNorm2d(8, affine=True)), 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_closed_channels_through_layers(name):
    make, removed = LAYERS[name]
    analysis = examine(make(), images())
    assert len(analysis.removed["gate"]) == removed
    assert len(analysis.gates["gate"].front) == 4
    assert not analysis.barriers


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_grouped_convolutions(kind):
    """Whole groups leave, or the same channels of every group; other channels stay."""
    for units, leaves in (([0, 3], []), ([0, 1, 2, 3], [0, 1, 2, 3]), ([1, 5, 2, 6], [1, 2, 5, 6]), ([0], [])):
        closed = {"gate": torch.isin(torch.arange(8), torch.tensor(units))}
        analysis = examine(between(kind(8, 6, 3, groups=2, bias=False)), images(), closed)
        assert analysis.removed["gate"].tolist() == leaves
        if leaves == [0, 1, 2, 3]:
            assert analysis.remaining["out.weight"][1].tolist() == [3, 4, 5]


def test_a_shared_layer_takes_in_constants_that_are_the_same_at_all_calls():
    def shared(second):
        def forward(net, x):
            h = net.gate(net.one(x))
            return net.out(h + 1.0).mean((2, 3)) + net.out(net.second(h)).mean((2, 3))

        return Net(forward, one=nn.Conv2d(3, 8, 1), gate=L0Gate(8, dim=1), out=nn.Conv2d(8, 2, 1), second=second)

    for second, count in (
        (lambda h: 2 * h + 1, 4),
        (lambda h: h + 2, 0),
        (lambda h: h, 0),
        (lambda h: h[:, :, 1:] + 1, 4),
    ):
        analysis = examine(shared(second), images(), folds=True)
        assert len(analysis.removed["gate"]) == count
        assert len(analysis.folds) == bool(count)


@pytest.mark.parametrize("norm", [True, False])
def test_weights_that_depend_on_the_input(norm):
    """What a varying weight, scale or shift makes of constants is no constant."""

    def forward(net, x, condition):
        h = net.gate(net.one(x))
        if norm:
            return net.out(F.batch_norm(h, h.new_zeros(8), h.new_ones(8), None, net.shift(condition)))
        return F.conv2d(h + 1.0, net.shift(condition).view(1, 8, 1, 1))

    network = Dense(forward, one=nn.Conv2d(3, 8, 1), gate=L0Gate(8, dim=1), shift=(4, 8), out=nn.Conv2d(8, 2, 1))
    closed = {"gate": torch.tensor([True, False] * 4)}
    recording = record(network.double(), (images(), torch.randn(4, dtype=torch.float64)))
    analysis = analyse(recording, closed, {"gate": (~closed["gate"]).double()})
    assert not analysis.folds
    assert not len(analysis.removed["gate"])
    everything = analyse(recording, {"gate": torch.ones(8, dtype=torch.bool)})
    assert everything.maps.kind(recording.calls[0].outputs[0]) == VARIES
