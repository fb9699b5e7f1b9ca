"""Integers that modules keep beside their tensors: torch's by their tensors, users' by their uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.utils import parametrize

from pyro_l0.nn.engine import Analysis
from pyro_l0.nn.engine.shared_sizes import find_integers

__all__ = ["Attributes", "Size", "followed_sizes", "set_attributes", "torch_sizes"]

Size = int | tuple[int, ...]
Attributes = dict[str, dict[str, Size]]
"""By module path, the attributes that change and their new values."""

_Shapes = Mapping[str, tuple[int, ...]]
_OF_WEIGHT: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("out_features", "in_features"),
    nn.Bilinear: ("out_features", "in1_features", "in2_features"),
    nn.Embedding: ("num_embeddings", "embedding_dim"),
    nn.EmbeddingBag: ("num_embeddings", "embedding_dim"),
    nn.PReLU: ("num_parameters",),
}
"""The attributes that are the sizes of a weight."""


def torch_sizes(
    module: nn.Module, kept: Mapping[str, Sequence[Tensor | None]], shrunk: Mapping[int, int]
) -> dict[str, Size]:
    """New values of the integers of one module of torch, whose tensors are yet to be cut.

    By name of its own tensors, ``kept`` are the indices that stay along each dimension; ``shrunk`` has the sizes that
    shrank while the module ran, for modules without tensors.
    """
    if parametrize.is_parametrized(module):
        return {}  # its weights are computed from others
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    shapes = {
        name: tuple(
            size if index is None else len(index)
            for size, index in zip(tensor.shape, kept.get(name, (None,) * tensor.dim()), strict=True)
        )
        for name, tensor in own.items()
    }
    new = _torch_sizes(module, shapes, kept["weight"][0] if "weight" in kept else None, shrunk)
    return {name: value for name, value in new.items() if getattr(module, name) != value}


def _torch_sizes(
    module: nn.Module, shapes: _Shapes, index: Tensor | None, shrunk: Mapping[int, int]
) -> Mapping[str, Size]:
    """The integers of a module with tensors of these shapes; the index says which rows of its weight stay."""
    for kind, names in _OF_WEIGHT.items():
        if isinstance(module, kind):
            return dict(zip(names, shapes["weight"], strict=False))
    if isinstance(module, nn.modules.conv._ConvNd):
        groups = module.groups
        if groups > 1:
            groups = _groups_left(groups, module.weight.shape[0], index)
        rows, columns = shapes["weight"][0], shapes["weight"][1] * groups
        inputs, outputs = (rows, columns) if module.transposed else (columns, rows)
        return {"in_channels": inputs, "out_channels": outputs, "groups": groups}
    if isinstance(module, nn.modules.batchnorm._NormBase):  # instance normalisation among them
        size = module.num_features
        (left,) = shapes.get("running_mean") or shapes.get("weight") or (shrunk.get(size, size),)
        return {"num_features": left}
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        end = "_l0" if isinstance(module, nn.RNNBase) else ""
        return {"input_size": shapes[f"weight_ih{end}"][1], "hidden_size": shapes[f"weight_hh{end}"][1]}
    if isinstance(module, nn.GroupNorm):
        size, groups = module.num_channels, module.num_groups
        if "weight" not in shapes:
            left = shrunk.get(size, size)
            return {"num_channels": left, "num_groups": groups * left // size}
        return {"num_channels": shapes["weight"][0], "num_groups": _groups_left(groups, size, index)}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        # Without a weight, the norms of the analysis say whether units leave; another dimension may have their size.
        return {"normalized_shape": shapes["weight"]} if "weight" in shapes else {}
    if isinstance(module, nn.ChannelShuffle):
        return {"groups": shrunk.get(module.groups, module.groups)}
    if isinstance(module, nn.Unflatten):
        return {"unflattened_size": tuple(shrunk.get(size, size) for size in module.unflattened_size)}
    return {}


def _groups_left(groups: int, size: int, index: Tensor | None) -> int:
    """How many of equally large groups have an index that stays."""
    return groups if index is None else len((index // (size // groups)).unique())


def followed_sizes(network: nn.Module, analysis: Analysis) -> Attributes:
    """The integers of users' modules that code takes sizes from and that change with the units that stay."""
    attributes: Attributes = {}
    for holder, value in find_integers(analysis.maps, analysis.solution).items():
        before = getattr(network.get_submodule(holder.path), holder.name)
        own = attributes.get(holder.path, {}).get(holder.name, before)
        new = value if isinstance(own, int) else tuple(value if i == holder.place else x for i, x in enumerate(own))
        if new != own:
            attributes.setdefault(holder.path, {})[holder.name] = new
    return attributes


def set_attributes(network: nn.Module, attributes: Mapping[str, Mapping[str, Size]]) -> None:
    """Give attributes their new values; a list stays a list."""
    for path, values in attributes.items():
        module = network.get_submodule(path)
        for name, value in values.items():
            is_list = isinstance(getattr(module, name), list)
            setattr(module, name, list(value) if is_list and isinstance(value, tuple) else value)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
