"""Random gated networks with everything that compaction must get right."""

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_l0.compaction import Shrinker
from pyro_l0.infer import AutoGate
from pyro_l0.nn import Gate, fix_gates
from pyro_l0.nn.gate import gate_names, name_gates


class Net(nn.Module):
    """Layers by name and a function of them."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


class Model(nn.Module):
    """A network under an attribute, as in a Pyro model; labels are observed where there are any."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y=None):
        logits = self.net(x)
        if y is not None:
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Categorical(logits=logits), obs=y)
        return logits


def started(net, x, optimiser=torch.optim.Adam, **options):
    """A model of a network, its guide, an optimiser of both, and a shrinker that waits for one call."""
    model = Model(net)
    guide = AutoGate(model)
    guide(x)
    trained = optimiser([*model.parameters(), *guide.parameters()], 0.1)
    return model, guide, trained, Shrinker(net, guide, x, trained, patience=1, **options)


def set_gates(guide, site, units, value):
    """Open some gates for certain, or close them."""
    with torch.no_grad():
        guide.sites[site.replace(".", "/")]["log_alpha"][list(units)] = value


class Residual(nn.Module):
    """x, or a branch of it, plus another branch, with a gate behind the sum or not."""

    def __init__(self, one, other, gate):
        super().__init__()
        self.one, self.other, self.gate = one, other, gate

    def forward(self, x):
        return self.gate(self.one(x) + self.other(x))


class FlattenBy(nn.Module):
    """The ways that people flatten."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "view":
            return x.view(x.size(0), -1)
        if self.how == "reshape":
            return x.reshape(x.shape[0], -1)
        if self.how == "torch":
            return torch.flatten(x, 1)
        if self.how == "method":
            return x.flatten(start_dim=1)
        return x.mean((2, 3))


def randomise(net, generator):
    """Weights of order one, BatchNorm statistics and biases that are not their starting values."""
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                fan_in = module.weight[0].numel()
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) / fan_in**0.5)
                if module.bias is not None:
                    module.bias.copy_(torch.randn(module.bias.shape, generator=generator))
            elif isinstance(module, nn.BatchNorm2d):
                module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=generator))
                module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
                if module.affine:
                    module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
                    module.bias.copy_(torch.randn(module.bias.shape, generator=generator))


def draw_gates(net, generator):
    """By site: zeros, ones, values in between, sometimes all closed."""
    gates = {}
    for name, gate in name_gates(net).items():
        kind = torch.randint(6, (), generator=generator)
        value = torch.rand(gate.size, generator=generator)
        choice = torch.rand(gate.size, generator=generator)
        gates[name] = torch.where(choice < 0.5, 0.0, torch.where(choice < 0.75, 1.0, 0.1 + 0.9 * value))
        if kind == 0:
            gates[name] = torch.zeros(gate.size)
    return gates


class Drawer:
    """Draws a network from a function that picks one of a number of possibilities."""

    def __init__(self, pick):
        self.pick = pick

    def choose(self, *options):
        return options[self.pick(len(options))]

    def conv(self, a, b, stride=1):
        kernel = self.choose(1, 3)
        padding = kernel // 2
        mode = self.choose("zeros", "zeros", "zeros", "replicate") if padding else "zeros"
        return nn.Conv2d(a, b, kernel, stride, padding, bias=self.choose(True, False), padding_mode=mode)

    def unitwise(self, size):
        kind = self.pick(8)
        if kind < 2:
            return nn.BatchNorm2d(size, affine=kind == 0)
        if kind < 5:
            return Gate(size, dim=1)
        return (nn.ReLU(), nn.Tanh(), nn.AvgPool2d(3, 1, 1))[kind - 5]

    def chain(self, size, depth):
        return [self.unitwise(size) for _ in range(self.pick(depth + 1))]

    def branch(self, size):
        middle = self.choose(2, 3)
        return nn.Sequential(
            *self.chain(size, 2), self.conv(size, middle), *self.chain(middle, 3), self.conv(middle, size)
        )

    def block(self, size):
        kind = self.pick(4)
        if kind == 0:
            one = nn.Identity()
        elif kind == 1:
            one = nn.Sequential(*self.chain(size, 2), self.conv(size, size))
        elif kind == 2:
            one = Gate(size, dim=1)
        else:
            one = self.branch(size)
        return Residual(one, self.branch(size), Gate(size, dim=1) if self.pick(2) else nn.Identity())

    def network(self):
        """Images of 2 x 6 x 6 to 3 outputs."""
        size = self.choose(3, 4)
        layers = [*self.chain(2, 2), self.conv(2, size), *self.chain(size, 3)]
        for _ in range(self.pick(3)):
            layers += [self.block(size), *self.chain(size, 2)]
        if self.pick(2):
            new = self.choose(2, 4)
            layers += [self.conv(size, new, self.choose(1, 2)), nn.ReLU(), *self.chain(new, 2)]
            size = new
        layers.append(self.choose(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Identity()))
        how = self.choose("view", "reshape", "torch", "method", "mean")
        layers.append(FlattenBy(how))
        net = nn.Sequential(*layers)
        with torch.no_grad():
            features = _without_gates(net)(torch.zeros(2, 2, 6, 6)).shape[1]
        tail = [Gate(features)] if self.pick(2) else []
        tail += [nn.Linear(features, 5, bias=self.choose(True, False)), nn.ReLU()]
        tail += [Gate(5)] if self.pick(2) else []
        tail += [nn.Linear(5, 3)]
        tail += [Gate(3)] if self.pick(5) == 0 else []
        return nn.Sequential(*layers, *tail)


def _without_gates(net):
    return fix_gates(net, {name: torch.ones(gate.size) for name, gate in gate_names(net).items()}).eval()
