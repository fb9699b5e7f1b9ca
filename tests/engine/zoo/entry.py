"""What a network of the zoo says of itself: how it is built and called, and what must leave when gates close."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pyro_l0.nn.gate import gate_names, name_gates

Example = Tensor | tuple | dict


def every_other(size: int) -> Tensor:
    """Closes units 1, 3, 5, ..."""
    return torch.arange(size) % 2 == 1


def second_half(size: int) -> Tensor:
    """Closes the upper half of the units: whole groups, where units come in groups."""
    return torch.arange(size) >= size - size // 2


def normal(*shape: int) -> Callable[[int], Tensor]:
    """Normal numbers of a shape behind the batch's size."""
    return lambda batch: torch.randn(batch, *shape)


@dataclass(frozen=True)
class Entry:
    """A network with gates.

    Args:
        make: builds it.
        inputs: from the size of a batch, one call: a tensor, a tuple of positional arguments or a dict of keywords.
        closed: from the number of a site's units, those that the tests close.
        shapes: of some parameters, once the closed units have left.
        stays: by site, how many closed units can't leave on either side of their gate, and why.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Example]
    closed: Callable[[int], Tensor] = every_other
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stays: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def network(self, seed: int = 0) -> nn.Module:
        """The network in float64 and eval mode, its gates named, no statistic or scale at its starting value."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = self.make().double().eval()
            with torch.no_grad():
                for module in network.modules():
                    _away_from_start(module)
        name_gates(network)
        return network

    def example(self, batch: int = 3, seed: int = 1) -> Example:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return torch.utils._pytree.tree_map_only(Tensor, _double, self.inputs(batch))

    def gates(self, network: nn.Module, seed: int = 2) -> dict[str, Tensor]:
        """Values by site: 0 for the closed units, the others 1 or between 0.3 and 1."""
        generator = torch.Generator().manual_seed(seed)
        values = {}
        for site, size in sites(network).items():
            uniform = 0.3 + 0.7 * torch.rand(size, generator=generator, dtype=torch.float64)
            values[site] = torch.where(torch.arange(size) % 4 == 0, 1.0, uniform).masked_fill(self.closed(size), 0.0)
        return values

    def leaving(self, network: nn.Module) -> dict[str, int]:
        """By site, how many units must leave."""
        return {
            site: int(self.closed(size).sum()) - self.stays.get(site, (0, ""))[0]
            for site, size in sites(network).items()
        }


def sites(network: nn.Module) -> dict[str, int]:
    """The number of units by gate site."""
    return {site: gate.size for site, gate in gate_names(network).items()}


def call(network: nn.Module, example: Example) -> list[Tensor]:
    """The tensors that a network returns for one call, in order; None and numbers are left out."""
    if isinstance(example, dict):
        output = network(**example)
    else:
        output = network(*(example if isinstance(example, tuple) else (example,)))
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _away_from_start(module: nn.Module) -> None:
    """Draw what starts at 0 or 1, where a mistake would not show: biases, scales, running statistics."""
    for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if name == "running_var":
            value.uniform_(0.5, 2.0)
        elif name in ("running_mean", "bias"):
            value.normal_(std=0.5)
        elif name == "weight" and value.dim() == 1:
            value.uniform_(0.5, 1.5)
