"""Networks from functions, and attention."""

import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate


class Net(nn.Module):
    """Layers by name and a function of them."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Dense(Net):
    """A function of layers by their sizes: a pair makes a dense layer, a number its gates; modules are given."""

    def __init__(self, function, **layers):
        kinds = {int: L0Gate, tuple: lambda sizes: nn.Linear(*sizes)}
        super().__init__(function, **{name: kinds.get(type(x), lambda x: x)(x) for name, x in layers.items()})


class Attention(nn.Module):
    """Self-attention over tokens."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
