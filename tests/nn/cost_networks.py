"""Networks of several kinds with gates, for the tests of what they cost."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import Gate


class Attention(nn.Module):
    """A transformer of one layer, with gates on its heads and on its feed-forward units."""

    def __init__(self, is_fused=False):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(9, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.heads, self.up, self.units, self.down = Gate(4, dim=1), nn.Linear(8, 6), Gate(6), nn.Linear(6, 8)
        self.last, self.is_fused = nn.Linear(8, 3), is_fused

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.first(x)
        q, k, v = (m(y).unflatten(-1, (4, 2)).transpose(1, 2) for m in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v) if self.is_fused else (q @ k.mT / 2**0.5).softmax(-1) @ v
        x = x + self.out(self.heads(mixed).transpose(1, 2).flatten(2))
        x = x + self.down(self.units(F.gelu(self.up(self.second(x)))))
        return self.last(x[:, 0])


class SwiGLU(nn.Module):
    """A gated linear unit in a residual stream behind an RMSNorm."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(5), Gate(7)
        self.a, self.b, self.out = nn.Linear(5, 7, bias=False), nn.Linear(5, 7, bias=False), nn.Linear(7, 5)

    def forward(self, x):
        y = self.norm(x)
        return x + self.out(F.silu(self.gate(self.a(y))) * self.b(y))


class UNet(nn.Module):
    """A path down and up again with a concatenation, and a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.left, self.down = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.up, self.right = nn.ConvTranspose2d(4, 3, 2, 2), nn.Conv2d(6, 2, 1)
        self.norm, self.gates = nn.BatchNorm2d(4), nn.ModuleList([Gate(3, dim=1), Gate(4, dim=1), Gate(3, dim=1)])

    def forward(self, x):
        left = self.gates[0](F.relu(self.left(x)))
        below = self.gates[1](F.relu(self.norm(self.down(F.max_pool2d(left, 2)))))
        return self.right(torch.cat([left, self.gates[2](F.relu(self.up(below)))], 1))


class Stream(nn.Module):
    """A residual stream with a gate on what enters and on every branch."""

    def __init__(self):
        super().__init__()
        self.enter, self.start = nn.Linear(4, 6), Gate(6)
        self.layers, self.gates = (
            nn.ModuleList(nn.Linear(6, 6) for _ in range(3)),
            nn.ModuleList(Gate(6) for _ in "abc"),
        )
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        x = self.start(F.relu(self.enter(x)))
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = x + gate(F.relu(layer(x)))
        return self.last(x)


class Repeated(nn.Module):
    """One gate that acts several times on a residual stream."""

    def __init__(self):
        super().__init__()
        self.enter, self.layers = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.gate, self.last = Gate(6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.gate(F.relu(self.enter(x)))
        for layer in self.layers:
            x = self.gate(x + torch.tanh(layer(x)))
        return self.last(x)


class WholeBlock(nn.Module):
    """One gate on a whole branch, with gates on its units inside."""

    def __init__(self):
        super().__init__()
        self.enter, self.up, self.down, self.last = (nn.Linear(*s) for s in ((4, 5), (5, 6), (6, 5), (5, 2)))
        self.units, self.block = Gate(6), Gate(1)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        branch = self.down(self.units(F.relu(self.up(x))))
        return self.last(x + self.block(branch.unsqueeze(-1)).squeeze(-1))


class Depthwise(nn.Module):
    """Gates around a depthwise and in front of a grouped convolution, and squeezing and exciting."""

    def __init__(self):
        super().__init__()
        self.enter, self.depth, self.group = (
            nn.Conv2d(2, 4, 1),
            nn.Conv2d(4, 4, 3, groups=4),
            nn.Conv2d(4, 6, 1, groups=2),
        )
        self.squeeze, self.excite, self.last = nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(6, 2)
        self.gates = nn.ModuleList([Gate(4, dim=1), Gate(4, dim=1), Gate(3), Gate(6, dim=1)])

    def forward(self, x):
        x = self.gates[1](F.relu(self.depth(self.gates[0](F.relu(self.enter(x))))))
        scale = torch.sigmoid(self.excite(self.gates[2](F.relu(self.squeeze(x.mean((2, 3)))))))
        x = self.gates[3](F.relu(self.group(x * scale[:, :, None, None])))
        return self.last(x.mean((2, 3)))


class Maps(nn.Module):
    """LeNet's pattern: gates on maps, and on their flattened features, with a constant behind BatchNorm."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)
        self.gates = nn.ModuleList([Gate(3, dim=1), Gate(4, dim=1), Gate(16), Gate(5)])
        self.c, self.d = nn.Linear(16, 5), nn.Linear(5, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.gates[0](F.relu(self.a(x)))))
        x = self.gates[2](self.gates[1](F.relu(self.b(x))).flatten(1))
        return self.d(self.gates[3](F.relu(self.c(x))))


def mlp():
    """A network of dense layers, gates on its inputs too."""
    return nn.Sequential(
        Gate(7),
        nn.Linear(7, 6),
        nn.ReLU(),
        Gate(6),
        nn.Linear(6, 5),
        nn.Sigmoid(),
        nn.Linear(5, 4),
        Gate(4),
        nn.Linear(4, 3),
    )


def grouped_norm():
    """Whole groups of channels, and channels by themselves."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.GroupNorm(3, 6),
        nn.ReLU(),
        Gate(6, dim=1),
        nn.Conv2d(6, 4, 3),
        Gate(4, dim=1),
        nn.Flatten(),
    )


IMAGE, VECTOR, TOKENS = (
    torch.randn(2, 2, 6, 6, dtype=torch.float64),
    torch.randn(3, 4).double(),
    torch.tensor([[1, 5, 2]]),
)


def shuffled():
    """Channels shuffled among groups, and maps that become pixels."""
    return nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1), nn.ReLU(), Gate(12, 1), nn.ChannelShuffle(3),
        nn.Conv2d(12, 8, 1), nn.ReLU(), Gate(8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 3, 1),
    )  # fmt: skip


NETWORKS = {
    "mlp": (mlp, torch.randn(3, 7, dtype=torch.float64)),
    "attention": (Attention, TOKENS),
    "fused attention": (lambda: Attention(is_fused=True), TOKENS),
    "SwiGLU": (SwiGLU, torch.randn(2, 3, 5, dtype=torch.float64)),
    "U-Net": (UNet, IMAGE),
    "stream": (Stream, VECTOR),
    "repeated": (Repeated, VECTOR),
    "whole block": (WholeBlock, VECTOR),
    "depthwise": (Depthwise, IMAGE),
    "maps": (Maps, IMAGE),
    "group norm": (grouped_norm, IMAGE),
    "shuffled": (shuffled, IMAGE),
}
