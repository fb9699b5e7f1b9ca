"""Networks of convolutions: feature maps that are flattened, concatenated, split, shuffled, squeezed and excited."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.entry import Entry, normal, second_half
from tests.networks import Net


def lenet():
    """Maps become features: a closed map takes its share of the columns of the dense layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), L0Gate(4, dim=1),
        nn.Conv2d(4, 6, 3), nn.ReLU(), L0Gate(6, dim=1),
        nn.Flatten(), nn.Linear(6 * 4, 10), nn.ReLU(), L0Gate(10), nn.Linear(10, 3),
    )  # fmt: skip


def padded_constants():
    """A constant behind each gate meets the zeros of the padding, so that what it adds depends on the place."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), L0Gate(6, dim=1), nn.BatchNorm2d(6),
        nn.Conv2d(6, 4, 3, padding=1), nn.Sigmoid(), L0Gate(4, dim=1), nn.BatchNorm2d(4), nn.Tanh(),
        nn.Conv2d(4, 2, 3, stride=2, padding=1),
    )  # fmt: skip


class InvertedResidual(nn.Module):
    """MobileNetV3: expand, filter each map by itself, squeeze and excite, project.

    ``gate_first`` puts the gate in front of the squeeze, where a closed map is 0 for all that follows. Behind it the
    map's mean still goes into the other maps' excitation.
    """

    def __init__(self, read, middle, write, stride=1, gate_first=True):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(read, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.Hardswish())
        depthwise = nn.Conv2d(middle, middle, 3, stride, padding=1, groups=middle, bias=False)
        self.filter = nn.Sequential(depthwise, nn.BatchNorm2d(middle), nn.Hardswish())
        self.squeeze = nn.Conv2d(middle, 4, 1)
        self.excite = nn.Conv2d(4, middle, 1)
        self.project = nn.Sequential(nn.Conv2d(middle, write, 1, bias=False), nn.BatchNorm2d(write))
        self.gate = L0Gate(middle, dim=1)
        self.gate_first = gate_first
        self.is_residual = read == write and stride == 1

    def forward(self, x):
        h = self.filter(self.expand(x))
        if self.gate_first:
            h = self.gate(h)
        h = h * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(h, 1)))))
        if not self.gate_first:
            h = self.gate(h)
        h = self.project(h)
        return x + h if self.is_residual else h


def mobile_net(gate_first=True):
    sizes = [(8, 16, 8, 1), (8, 24, 12, 2), (12, 24, 12, 1)]
    return Net(
        lambda net, x: net.head(net.blocks(net.stem(x)).mean([2, 3])),
        stem=nn.Conv2d(3, 8, 3, stride=2, padding=1),
        blocks=nn.Sequential(*(InvertedResidual(*size, gate_first) for size in sizes)),
        head=nn.Linear(12, 5),
    )


def shuffle_unit(half=6):
    """ShuffleNetV2: half of the maps pass, the others go through a branch; then the halves are dealt out."""

    def dense():
        return nn.Sequential(nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU())

    def forward(net, x):
        passed, branch = x.chunk(2, 1)
        maps = torch.cat([passed, net.wide(net.filter(net.gate(net.narrow(branch))))], 1)
        batch, size, height, width = maps.shape
        return maps.view(batch, 2, size // 2, height, width).transpose(1, 2).reshape(batch, size, height, width)

    filters = nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False)
    return Net(forward, narrow=dense(), gate=L0Gate(half, dim=1), filter=filters, wide=dense())


def shufflenet():
    units = [shuffle_unit(), shuffle_unit(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), *units, nn.Linear(12, 4))


def grouped():
    """ResNeXt's grouped convolution between gates: a whole group of closed maps leaves with its filters."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), L0Gate(8, dim=1), nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False),
        nn.ReLU(), L0Gate(8, dim=1), nn.Conv2d(8, 5, 1),
    )  # fmt: skip


def wave_block(maps, dilation):
    """WaveNet: a dilated causal convolution whose halves are a signal and its sigmoid, a residual sum and a skip."""

    def forward(net, x):
        padded = F.pad(x, (dilation, 0))
        h = net.gate(torch.tanh(net.signal(padded)) * torch.sigmoid(net.sigmoid(padded)))
        return x + net.residual(h), net.skip(h)

    layers = {name: nn.Conv1d(maps, 6, 2, dilation=dilation) for name in ("signal", "sigmoid")}
    return Net(forward, gate=L0Gate(6, dim=1), residual=nn.Conv1d(6, maps, 1), skip=nn.Conv1d(6, 4, 1), **layers)


def wavenet():
    def forward(net, x):
        x = net.stem(x)
        skips = 0
        for block in net.blocks:
            x, skip = block(x)
            skips = skips + skip
        return net.head(net.gate(F.relu(skips)))

    blocks = nn.ModuleList([wave_block(8, 2**k) for k in range(3)])
    return Net(forward, stem=nn.Conv1d(1, 8, 1), blocks=blocks, gate=L0Gate(4, dim=1), head=nn.Conv1d(4, 5, 1))


def split_maps(half=5):
    """YOLO's: halves as large as an attribute says, the second one through more convolutions."""

    def forward(net, x):
        parts = list(net.gate(F.silu(net.first(x))).split((net.half, net.half), 1))
        return net.last(torch.cat([*parts, net.middle(parts[-1])], 1))

    layers = {"first": nn.Conv2d(3, 2 * half, 1), "last": nn.Conv2d(3 * half, 2, 1)}
    return Net(forward, half=half, gate=L0Gate(2 * half, dim=1), middle=nn.Conv2d(half, half, 3, padding=1), **layers)


def halving(channels=8):
    """An autoencoder's, which checks the width of what it is given."""

    def forward(net, x):
        assert x.shape[1] == net.channels
        return net.conv(x)

    return Net(forward, channels=channels, conv=nn.Conv2d(channels, channels, 3, 2))


ENTRIES = {
    # Of the halves' units 3 and 2 are open; a zero is the third.
    "split_maps": Entry(
        split_maps, normal(3, 8, 8), shapes={"first.weight": (5, 3, 1, 1), "middle.weight": (5, 3, 3, 3)},
    ),
    "checked_width": Entry(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), L0Gate(8, dim=1), halving(), L0Gate(8, dim=1), nn.Conv2d(8, 2, 1)),
        normal(3, 8, 8), shapes={"2.conv.weight": (4, 4, 3, 3), "4.weight": (2, 4, 1, 1)},
    ),
    "lenet": Entry(lenet, normal(1, 10, 10), shapes={"4.weight": (3, 2, 3, 3), "8.weight": (5, 12)}),
    "padded_constants": Entry(padded_constants, normal(3, 8, 8), shapes={"0.weight": (3, 3, 3, 3)}),
    "mobilenet": Entry(
        mobile_net, normal(3, 12, 12),
        shapes={"blocks.0.filter.0.weight": (8, 1, 3, 3), "blocks.0.squeeze.weight": (4, 8, 1, 1)},
    ),
    "mobilenet_gate_behind": Entry(
        lambda: mobile_net(gate_first=False), normal(3, 12, 12),
        shapes={"blocks.0.filter.0.weight": (16, 1, 3, 3), "blocks.0.project.0.weight": (8, 8, 1, 1)},
    ),
    "shufflenet": Entry(
        shufflenet, normal(3, 6, 6), shapes={"1.filter.weight": (3, 1, 3, 3), "2.wide.0.weight": (6, 3, 1, 1)},
    ),
    "grouped": Entry(
        grouped, normal(3, 8, 8), second_half,
        shapes={"0.weight": (4, 3, 1, 1), "3.weight": (4, 2, 3, 3), "6.weight": (5, 4, 1, 1)},
    ),
    "wavenet": Entry(
        wavenet, normal(1, 16),
        shapes={"blocks.1.signal.weight": (3, 8, 2), "blocks.1.sigmoid.weight": (3, 8, 2), "head.weight": (5, 2, 1)},
    ),
}  # fmt: skip
