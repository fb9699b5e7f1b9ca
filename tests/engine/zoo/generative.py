"""Networks that make images or signals: up-sampling, transposed convolutions, skips, latent variables."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.entry import Entry, normal
from tests.networks import Dense, Net


def _stage(read, write):
    return nn.Sequential(nn.Conv2d(read, write, 3, padding=1), nn.BatchNorm2d(write), nn.ReLU(), L0Gate(write, dim=1))


def unet():
    """Down and up again, with the maps of the way down beside those of the way up."""

    def forward(net, x):
        fine = net.down(x)
        coarse = net.low(F.max_pool2d(fine, 2))
        h = net.up_gate(F.relu(net.up(net.bottom(F.max_pool2d(coarse, 2)))))
        h = F.interpolate(net.merge(torch.cat([h, coarse], 1)), scale_factor=2, mode="bilinear")
        return net.head(net.last(torch.cat([h, fine], 1)))

    sizes = {"down": (3, 6), "low": (6, 8), "bottom": (8, 12), "merge": (16, 8), "last": (14, 6)}
    stages = {name: _stage(*size) for name, size in sizes.items()}
    up = nn.ConvTranspose2d(12, 8, 2, stride=2)
    return Net(forward, up=up, up_gate=L0Gate(8, dim=1), head=nn.Conv2d(6, 2, 1), **stages)


def super_resolution():
    """Sub-pixel: nine maps become one of three times the height and width."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), L0Gate(8, dim=1),
        nn.Conv2d(8, 36, 3, padding=1), nn.PixelShuffle(3), nn.ReLU(), L0Gate(4, dim=1), nn.Conv2d(4, 1, 3, padding=1),
    )  # fmt: skip


def style_network(maps=8):
    """Up-sampling, noise and a style that scales instance-normalised maps."""

    def forward(net, latent):
        scale = net.scale(net.style(latent))[:, :, None, None]
        h = F.interpolate(net.start.expand(len(latent), -1, -1, -1), scale_factor=2, mode="nearest")
        return net.head(net.gate(F.leaky_relu(net.norm(net.filters(h)) * scale, 0.2)))

    return Dense(
        forward, start=nn.Parameter(torch.randn(1, maps, 3, 3)), scale=(6, maps), norm=nn.InstanceNorm2d(maps),
        style=nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.2), L0Gate(6)), gate=L0Gate(maps, dim=1),
        filters=nn.Conv2d(maps, maps, 3, padding=1), head=nn.Conv2d(maps, 3, 1),
    )  # fmt: skip


def modulated_convolution(inputs, outputs, is_transposed):
    """StyleGAN2's convolution: a style scales the inputs of each example's filters, which have length one then."""

    def forward(net, x, style):
        weight = net.weight * net.style(style)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        flat = x.flatten(0, 1)[None]
        if is_transposed:
            out = F.conv_transpose2d(flat, weight.transpose(1, 2).flatten(0, 1), stride=2, groups=len(x))
        else:
            out = F.conv2d(flat, weight.flatten(0, 1), padding=1, groups=len(x))
        return out.unflatten(1, (len(x), -1))[0]

    return Dense(forward, weight=nn.Parameter(torch.randn(outputs, inputs, 3, 3)), style=(5, inputs))


def modulated(is_transposed):
    gates = {"gate": L0Gate(8, dim=1), "last": L0Gate(6, dim=1)}
    return Net(
        lambda net, x, style: net.head(net.last(F.relu(net.blend(net.gate(F.relu(net.stem(x))), style)))),
        stem=nn.Conv2d(3, 8, 1), blend=modulated_convolution(8, 6, is_transposed), head=nn.Conv2d(6, 3, 1), **gates,
    )  # fmt: skip


def times(size=8):
    """Diffusion's: sines and cosines of times, as many as an attribute says."""

    def forward(net, t):
        half = net.size // 2
        angles = t * torch.exp(-torch.arange(half, dtype=t.dtype) / half)
        return net.head(F.silu(net.dense(net.gate(torch.cat([angles.sin(), angles.cos()], -1)))))

    return Net(forward, size=size, gate=L0Gate(size), dense=nn.Linear(size, 6), head=nn.Linear(6, 2))


ENTRIES = {
    "times": Entry(times, normal(1), shapes={"dense.weight": (6, 4)}),
    "unet": Entry(
        unet, normal(3, 8, 8),
        shapes={"up.weight": (6, 4, 2, 2), "merge.0.weight": (4, 8, 3, 3), "last.0.weight": (3, 7, 3, 3)},
    ),
    "super_resolution": Entry(
        super_resolution, normal(1, 5, 5), shapes={"3.weight": (18, 4, 3, 3), "7.weight": (1, 2, 3, 3)},
    ),
    "style_network": Entry(style_network, normal(5), shapes={"scale.weight": (4, 3), "head.weight": (3, 4, 1, 1)}),
    **{
        name: Entry(
            make,
            lambda batch: (torch.randn(batch, 3, 4, 4), torch.randn(batch, 5)),
            shapes={"stem.weight": (4, 3, 1, 1), "blend.weight": (3, 8, 3, 3), "head.weight": (3, 3, 1, 1)},
        )
        for name, make in {"modulated": lambda: modulated(False), "up_modulated": lambda: modulated(True)}.items()
    },
}  # fmt: skip
