"""Networks that make images or signals: up-sampling, transposed convolutions, skips, latent variables."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.convolutional import images
from tests.engine.zoo.entry import Entry
from tests.networks import Net


def _stage(read, write):
    return nn.Sequential(nn.Conv2d(read, write, 3, padding=1), nn.BatchNorm2d(write), nn.ReLU(), L0Gate(write, dim=1))


class UNet(nn.Module):
    """Down and up again, with the maps of the way down beside those of the way up."""

    def __init__(self):
        super().__init__()
        self.down, self.low, self.bottom = _stage(3, 6), _stage(6, 8), _stage(8, 12)
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.up_gate = L0Gate(8, dim=1)
        self.merge, self.last = _stage(16, 8), _stage(14, 6)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        fine = self.down(x)
        coarse = self.low(F.max_pool2d(fine, 2))
        h = self.up_gate(F.relu(self.up(self.bottom(F.max_pool2d(coarse, 2)))))
        h = self.merge(torch.cat([h, coarse], 1))
        h = F.interpolate(h, scale_factor=2, mode="bilinear")
        return self.head(self.last(torch.cat([h, fine], 1)))


def super_resolution():
    """Sub-pixel: nine maps become one of three times the height and width."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), L0Gate(8, dim=1),
        nn.Conv2d(8, 36, 3, padding=1), nn.PixelShuffle(3), nn.ReLU(), L0Gate(4, dim=1), nn.Conv2d(4, 1, 3, padding=1),
    )  # fmt: skip


class StyleNetwork(nn.Module):
    """Up-sampling, noise and a style that scales instance-normalised maps."""

    def __init__(self, maps=8):
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, maps, 3, 3))
        self.style = nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.2), L0Gate(6))
        self.scale = nn.Linear(6, maps)
        self.filters = nn.Conv2d(maps, maps, 3, padding=1)
        self.norm = nn.InstanceNorm2d(maps)
        self.gate = L0Gate(maps, dim=1)
        self.head = nn.Conv2d(maps, 3, 1)

    def forward(self, latent):
        scale = self.scale(self.style(latent))[:, :, None, None]
        h = F.interpolate(self.start.expand(len(latent), -1, -1, -1), scale_factor=2, mode="nearest")
        return self.head(self.gate(F.leaky_relu(self.norm(self.filters(h)) * scale, 0.2)))


class Modulated(nn.Module):
    """StyleGAN2's convolution: a style scales the inputs of each example's filters, which have length one then."""

    def __init__(self, inputs, outputs, is_transposed):
        super().__init__()
        self.weight, self.style = nn.Parameter(torch.randn(outputs, inputs, 3, 3)), nn.Linear(5, inputs)
        self.is_transposed = is_transposed

    def forward(self, x, style):
        weight = self.weight * self.style(style)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        flat = x.flatten(0, 1)[None]
        if self.is_transposed:
            out = F.conv_transpose2d(flat, weight.transpose(1, 2).flatten(0, 1), stride=2, groups=len(x))
        else:
            out = F.conv2d(flat, weight.flatten(0, 1), padding=1, groups=len(x))
        return out.unflatten(1, (len(x), -1))[0]


def modulated(is_transposed):
    return Net(
        lambda net, x, style: net.head(net.last(F.relu(net.blend(net.gate(F.relu(net.stem(x))), style)))),
        stem=nn.Conv2d(3, 8, 1),
        gate=L0Gate(8, dim=1),
        blend=Modulated(8, 6, is_transposed),
        last=L0Gate(6, dim=1),
        head=nn.Conv2d(6, 3, 1),
    )


class Times(nn.Module):
    """Diffusion's: sines and cosines of times, as many as an attribute says."""

    def __init__(self, size=8):
        super().__init__()
        self.size, self.gate, self.dense, self.head = size, L0Gate(size), nn.Linear(size, 6), nn.Linear(6, 2)

    def forward(self, t):
        half = self.size // 2
        angles = t * torch.exp(-torch.arange(half, dtype=t.dtype) / half)
        return self.head(F.silu(self.dense(self.gate(torch.cat([angles.sin(), angles.cos()], -1)))))


ENTRIES = {
    "times": Entry(Times, lambda batch: torch.randn(batch, 1), shapes={"dense.weight": (6, 4)}),
    "unet": Entry(
        UNet, images(),
        shapes={"up.weight": (6, 4, 2, 2), "merge.0.weight": (4, 8, 3, 3), "last.0.weight": (3, 7, 3, 3)},
    ),
    "super_resolution": Entry(
        super_resolution, images(5, 1), shapes={"3.weight": (18, 4, 3, 3), "7.weight": (1, 2, 3, 3)},
    ),
    "style_network": Entry(
        StyleNetwork, lambda batch: torch.randn(batch, 5),
        shapes={"scale.weight": (4, 3), "head.weight": (3, 4, 1, 1)},
    ),
    **{
        name: Entry(
            make,
            lambda batch: (torch.randn(batch, 3, 4, 4), torch.randn(batch, 5)),
            shapes={"stem.weight": (4, 3, 1, 1), "blend.weight": (3, 8, 3, 3), "head.weight": (3, 3, 1, 1)},
        )
        for name, make in {"modulated": lambda: modulated(False), "up_modulated": lambda: modulated(True)}.items()
    },
}  # fmt: skip
