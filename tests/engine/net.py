"""A network in few lines: its layers by name, and what is done with them."""

from torch import nn


class Net(nn.Module):
    """Calls ``function(net, *inputs)``, with layers and numbers as attributes of ``net``."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)
