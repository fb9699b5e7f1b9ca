"""Random networks of convolutions, attention, norms, sums and concatenations with gates anywhere, for Hypothesis."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from pyro_l0.nn import L0Gate
from pyro_l0.nn.gate import name_gates
from tests.engine.zoo.attention import Attention
from tests.engine.zoo.entry import _away_from_start
from tests.networks import Net

SIZES = (4, 8)  # of units; each has groups of two and of four, and two heads


@dataclass(frozen=True)
class Case:
    """A network in float64 and eval mode, values of its gates, and the seed of its inputs."""

    network: nn.Module
    values: dict[str, Tensor]
    seed: int

    def example(self, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + batch)
        return torch.randn(batch, 2, 4, 4, generator=generator, dtype=torch.float64)


def added(one, other):
    """The input, or a branch of it, plus a branch."""
    return Net(lambda net, x: net.one(x) + net.other(x), one=one, other=other)


class _Pieces:
    """Draws pieces from a number of units to a number of units, along a dimension."""

    def __init__(self, draw, dim):
        self.draw = draw
        self.dim = dim

    def one_of(self, *options):
        return self.draw(st.sampled_from(options))

    def chain(self, size, longest):
        """Layers that leave the number of units as it is, at least one."""
        return nn.Sequential(*(self.unitwise(size) for _ in range(self.draw(st.integers(1, longest)))))

    def unitwise(self, size):
        if self.draw(st.booleans()):
            return L0Gate(size, dim=self.dim)
        return self.one_of(*self.norms(size), nn.ReLU(), nn.GELU(), nn.Sigmoid())

    def branch(self, read, write):
        """A layer, what belongs to its units, and another layer."""
        middle = self.one_of(*SIZES)
        return nn.Sequential(self.layer(read, middle), *self.chain(middle, 3), self.layer(middle, write))

    def block(self, size):
        """A piece and the number of units that it returns."""
        kind = self.one_of("own", "own", "branch", "sum", "two", "product", "beside", "repeated")
        if kind == "branch":
            new = self.one_of(*SIZES)
            return self.branch(size, new), new
        if kind == "sum":
            return added(nn.Identity(), self.branch(size, size)), size
        if kind == "two":
            return added(self.chain(size, 2), self.branch(size, size)), size
        if kind == "product":
            hidden = self.one_of(*SIZES)
            layers = {name: self.layer(size, hidden) for name in ("one", "other")}
            product = Net(lambda net, x: F.silu(net.one(x)) * net.other(x), **layers)
            return nn.Sequential(product, L0Gate(hidden, dim=self.dim), self.layer(hidden, size)), size
        if kind == "beside":
            branches, dim = {"one": self.branch(size, 4), "other": self.chain(size, 2)}, self.dim
            return Net(lambda net, x: torch.cat([net.one(x), net.other(x)], dim), **branches), size + 4
        if kind == "repeated":
            layers = added(nn.Identity(), self.branch(size, size))
            return Net(lambda net, x: net.layers(net.layers(x)), layers=layers), size
        return added(nn.Identity(), self.own(size)), size

    def stage(self, size, longest):
        """Blocks with layers in between, and the number of units behind them."""
        pieces = []
        for _ in range(self.one_of(*range(longest + 1), longest)):
            piece, size = self.block(size)
            pieces += [piece, *self.chain(size, 2)]
        return pieces, size


class _Maps(_Pieces):
    """Pieces of images, of shape ``(batch, maps, height, width)``."""

    def __init__(self, draw):
        super().__init__(draw, dim=1)

    def layer(self, read, write):
        kernel = self.one_of(1, 3)
        groups = self.one_of(1, 1, 2)
        return nn.Conv2d(read, write, kernel, padding=kernel // 2, groups=groups, bias=self.draw(st.booleans()))

    def norms(self, size):
        norms = nn.BatchNorm2d(size), nn.GroupNorm(2, size), nn.InstanceNorm2d(size, affine=True)
        of_pixels = Net(lambda net, x: net.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(size))
        return *norms, of_pixels, nn.PReLU(size)

    def own(self, size):
        """Each map filtered by itself, as in MobileNet."""
        filters = nn.Conv2d(size, size, 3, padding=1, groups=size)
        return nn.Sequential(*self.chain(size, 2), filters, *self.chain(size, 2), nn.Conv2d(size, size, 1))


class _Features(_Pieces):
    """Pieces of sequences, of shape ``(batch, tokens, features)``."""

    def __init__(self, draw):
        super().__init__(draw, dim=-1)

    def layer(self, read, write):
        return nn.Linear(read, write, bias=self.draw(st.booleans()))

    def norms(self, size):
        return nn.LayerNorm(size), nn.RMSNorm(size), nn.LayerNorm(size, elementwise_affine=False)

    def own(self, size):
        attention = Attention(size, self.one_of(2, 4), fused=self.draw(st.booleans()))
        return nn.Sequential(*self.chain(size, 1), attention)


@st.composite
def cases(draw):
    """Networks of images through maps and tokens to three outputs, with values for all of their gates."""
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    maps, features = _Maps(draw), _Features(draw)
    size = maps.one_of(*SIZES)
    layers = [maps.layer(2, size), L0Gate(size, dim=1), *maps.chain(size, 2)]
    more, size = maps.stage(size, 2)
    layers += [*more, Net(lambda net, x: x.flatten(2).transpose(1, 2))]  # tokens
    more, size = features.stage(size, 2)
    head = Net(lambda net, x: net.layer(x.mean(1)), layer=nn.Linear(size, 3))
    network = nn.Sequential(*layers, *more, head).double().eval()
    with torch.no_grad():
        for module in network.modules():
            _away_from_start(module)
    return Case(network, {site: _values(draw, gate.size) for site, gate in name_gates(network).items()}, seed)


def _values(draw, size):
    """Zeros, ones and values in between; now and then zeros alone."""
    if draw(st.integers(0, 9)) == 9:
        return torch.zeros(size, dtype=torch.float64)
    entries = st.sampled_from((0.0, 0.0, 0.0, 1.0, 1.0, 0.7, 0.4))
    return torch.tensor(draw(st.lists(entries, min_size=size, max_size=size)), dtype=torch.float64)
