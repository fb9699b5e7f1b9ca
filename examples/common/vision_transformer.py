"""A small vision transformer whose branches and hidden units have gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import Images
from pyro_l0.nn import Gate

__all__ = ["BLOCKS", "HEADS", "HIDDEN", "WIDTH", "VisionTransformer"]

WIDTH, HEADS, HIDDEN, BLOCKS = 32, 8, 64, 3
DROPOUT = 0.1


class Attention(nn.Module):
    """Softmax attention; the input of ``output`` holds the heads side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.head_size = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention over tokens, from shape ``(batch, tokens, WIDTH)`` to the same."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        heads = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return projected


class Branch(nn.Module):
    """A branch of the residual stream, and a gate for it as a whole."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner
        self.dropout = nn.Dropout(DROPOUT)
        self.gate = Gate(1)

    def forward(self, x: Tensor) -> Tensor:
        """Add the gated branch."""
        branch: Tensor = self.gate(self.inner(self.norm(x)).unsqueeze(-1))
        return x + self.dropout(branch.squeeze(-1))


class VisionTransformer(nn.Module):
    """Patches of an image as tokens, attention and dense layers, and the mean over the tokens.

    Args:
        images: the data, for the shape of an image.
    """

    def __init__(self, images: Images) -> None:
        super().__init__()
        channels, height, width = images.image_shape
        patch = height // 4
        self.images = nn.Unflatten(1, images.image_shape)
        self.patches = nn.Conv2d(channels, WIDTH, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((height // patch) * (width // patch), WIDTH))
        self.attention = nn.ModuleList([Branch(Attention()) for _ in range(BLOCKS)])
        self.dense = nn.ModuleList(
            [
                Branch(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), Gate(HIDDEN), nn.Linear(HIDDEN, WIDTH)))
                for _ in range(BLOCKS)
            ]
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes of flat images, shape ``(batch, 10)``."""
        x = self.patches(self.images(x)).flatten(2).mT + self.places
        for attention, dense in zip(self.attention, self.dense, strict=True):
            x = dense(attention(x))
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits
