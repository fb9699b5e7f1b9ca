"""Networks from functions."""

from torch import nn


class Net(nn.Module):
    """Layers by name and a function of them."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)
