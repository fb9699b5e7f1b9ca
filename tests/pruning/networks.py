"""Small networks without gates, as users write them, and the digits they are pruned on."""

from dataclasses import fields

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_l0.pruning import Training, prune
from tests.networks import Attention


def digits(number=640):
    """Images of shape (number, 1, 8, 8) with values in [0, 1], and their classes."""
    data = load_digits()
    images = torch.tensor(data.images[:number], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target[:number])


X, Y = digits(320)
BATCHES = [(X[i : i + 40], Y[i : i + 40]) for i in range(0, 320, 40)]


def digit_batches(number=640, size=64, **options):
    """A loader that shuffles them."""
    return DataLoader(TensorDataset(*digits(number)), size, shuffle=True, **options)


class Mlp(nn.Module):
    """Two hidden layers."""

    def __init__(self, first=32, second=24, dropout=0.0):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, first), nn.Linear(first, second), nn.Linear(second, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images):
        h = self.dropout(F.relu(self.first(images.flatten(1))))
        return self.last(F.relu(self.second(h)))


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()  # called twice

    def forward(self, x):
        return self.relu(x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class ResidualCnn(nn.Module):
    """A stem, two blocks, the mean over the image."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.blocks(F.relu(self.stem(images))).mean((2, 3)))


class DepthwiseCnn(nn.Module):
    """An inverted bottleneck whose inner units are convolved one by one."""

    def __init__(self, width=8, inner=24):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU6())
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6())
        self.each = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()
        )
        self.project = nn.Conv2d(inner, width, 1)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.stem(images)
        return self.head((x + self.project(self.each(self.expand(x)))).mean((2, 3)))


class Layer(nn.Module):
    """A transformer's layer."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.units = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.units(self.norm2(x))


class VisionTransformer(nn.Module):
    """Four square patches, two layers, the mean over tokens."""

    def __init__(self, width=16, heads=4, patch=4):
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 4, width))
        self.layers = nn.Sequential(Layer(width, heads), Layer(width, heads))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(x)).mean(1))


def train(network, batches, epochs=1, loss=F.cross_entropy, rate=3e-3):
    """A network that has learned from its batches by Adam."""
    optimiser = torch.optim.Adam(network.parameters(), rate)
    for _ in range(epochs):
        for x, y in batches:
            optimiser.zero_grad()
            loss(network(x), y).backward()
            optimiser.step()
    return network


def prune_with(*args, **options):
    """Call ``prune`` with the settings of its ``Training`` among its own."""
    settings = {field.name: options.pop(field.name) for field in fields(Training) if field.name in options}
    return prune(*args, training=Training(**settings), **options)


class StoppedError(Exception):
    """What a callback stops a run with."""


def stopping(epoch):
    """A callback that ends a run before the end of an epoch is reached."""

    def callback(entry):
        if entry["epoch"] == epoch:
            raise StoppedError

    return callback


def same(first, second):
    """Whether two networks have the same tensors under the same names, bit for bit."""
    one, other = first.state_dict(), second.state_dict()
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
