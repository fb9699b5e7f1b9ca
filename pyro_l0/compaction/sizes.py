"""Integers that modules keep beside their tensors: those of torch by a table, those of users by a search."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["Attributes", "Candidate", "candidates", "choices", "path_raised", "set_attributes", "table", "where_raised"]

Size = int | tuple[int, ...]
Attributes = dict[str, dict[str, Size]]
"""By module path, the attributes that change and their new values."""

_MOST_GROUPS = 8
_OTHERS = ("torch.nn.", "pyro_l0.")  # whose attributes are known
_CONVOLUTION = nn.modules.conv._ConvNd
_BATCH_NORM = nn.modules.batchnorm._NormBase  # instance normalisation among them


class Candidate(NamedTuple):
    """An attribute of a user's module that may be a size which shrank.

    Attributes:
        path: of the module.
        name: of the attribute.
        value: what it would become.
        is_sure: whether the module has no tensor of the old size any more.
    """

    path: str
    name: str
    value: Size
    is_sure: bool = True


# ------------------------------------------------------------ modules of torch


def table(module: nn.Module, kept: Mapping[str, Sequence[Tensor | None]], shrunk: Mapping[int, int]) -> dict[str, Size]:
    """New values of the attributes of one module of torch.

    Args:
        module: as it is before its tensors are cut.
        kept: by name of its own parameters and buffers, the places that stay along each dimension.
        shrunk: sizes of tensors that shrank while it ran, for modules without tensors.
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
    for kind, rule in _TABLE.items():
        if isinstance(module, kind):
            found = rule(module, shapes, kept, shrunk)
            return {name: value for name, value in found.items() if getattr(module, name) != value}
    return {}


Shapes = Mapping[str, tuple[int, ...]]
Places = Mapping[str, Sequence[Tensor | None]]
Rule = Callable[[nn.Module, Shapes, Places, Mapping[int, int]], dict[str, Size]]


def _first(shapes: Shapes, *names: str) -> tuple[int, ...] | None:
    return next((shapes[name] for name in names if name in shapes), None)


def _groups_left(groups: int, size: int, index: Tensor | None) -> int:
    """How many of equally large groups of places have one that stays."""
    return groups if index is None else len((index // (size // groups)).unique())


def _linear(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    rows, columns = shapes["weight"]
    return {"out_features": rows, "in_features": columns}


def _bilinear(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    rows, first, second = shapes["weight"]
    return {"out_features": rows, "in1_features": first, "in2_features": second}


def _convolution(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    assert isinstance(module, _CONVOLUTION)
    index = kept["weight"][0] if "weight" in kept else None
    groups = module.groups
    if groups > 1:
        groups = _groups_left(groups, module.weight.shape[0], index)
    rows, columns = shapes["weight"][0], shapes["weight"][1] * groups
    inputs, outputs = (rows, columns) if module.transposed else (columns, rows)
    return {"in_channels": inputs, "out_channels": outputs, "groups": groups}


def _batch_norm(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    shape = _first(shapes, "running_mean", "weight")
    size = int(module.num_features)  # type: ignore[arg-type]
    return {"num_features": shape[0] if shape else shrunk.get(size, size)}


def _group_norm(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    assert isinstance(module, nn.GroupNorm)
    if "weight" not in shapes:
        left = shrunk.get(module.num_channels, module.num_channels)
        return {"num_channels": left, "num_groups": module.num_groups * left // module.num_channels}
    index = kept["weight"][0] if "weight" in kept else None
    groups = _groups_left(module.num_groups, module.num_channels, index)
    return {"num_channels": shapes["weight"][0], "num_groups": groups}


def _layer_norm(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    assert isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    # Without a weight, the norms of the analysis say whether units left; another dimension may have had their size.
    return {"normalized_shape": shapes["weight"]} if "weight" in shapes else {}


def _embedding(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    rows, columns = shapes["weight"]
    return {"num_embeddings": rows, "embedding_dim": columns}


def _prelu(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    return {"num_parameters": shapes["weight"][0]}


def _shuffle(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    assert isinstance(module, nn.ChannelShuffle)
    return {"groups": shrunk.get(module.groups, module.groups)}


def _unflatten(module: nn.Module, shapes: Shapes, kept: Places, shrunk: Mapping[int, int]) -> dict[str, Size]:
    assert isinstance(module, nn.Unflatten)
    return {"unflattened_size": tuple(shrunk.get(size, size) for size in module.unflattened_size)}


_TABLE: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Bilinear: _bilinear,
    _CONVOLUTION: _convolution,
    _BATCH_NORM: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding,
    nn.PReLU: _prelu,
    nn.ChannelShuffle: _shuffle,
    nn.Unflatten: _unflatten,
}


# ------------------------------------------------------------ modules of users


def candidates(
    network: nn.Module,
    shrunk: Mapping[str, Mapping[int, int]],
    partly: Mapping[str, Collection[int]],
    known: Attributes,
) -> dict[tuple[str, str], list[Candidate]]:
    """Attributes of users' modules that are sizes which shrank while the module ran, by class and name.

    Attributes of one name in modules of one class change together or not at all.

    Args:
        network: the whole network.
        shrunk: by module path, old sizes and what became of them.
        partly: by module path, those of them that the module has still, too.
        known: attributes whose new values are known.
    """
    found: dict[tuple[str, str], list[Candidate]] = {}
    for path, module in network.named_modules():
        if type(module).__module__.startswith(_OTHERS):
            continue
        sizes = {old: new for old, new in shrunk.get(path, {}).items() if old > 1}
        for name, value in vars(module).items():
            is_known = name.startswith("_") or name in known.get(path, {})
            new = None if is_known else _shrink(value, sizes)
            if new is not None:
                sizes_here = {value} if isinstance(value, int) else set(value)
                is_sure = sizes_here.isdisjoint(partly.get(path, ()))
                found.setdefault((type(module).__qualname__, name), []).append(Candidate(path, name, new, is_sure))
    return found


def _shrink(value: object, sizes: Mapping[int, int]) -> Size | None:
    """An integer, or a tuple of integers, in which sizes are replaced; None if it holds none of them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return sizes.get(value)
    if isinstance(value, (tuple, list)) and all(type(entry) is int for entry in value):
        new = tuple(sizes.get(entry, entry) for entry in value)
        return new if new != tuple(value) else None
    return None


def choices(found: Mapping[tuple[str, str], list[Candidate]], known: Attributes) -> Iterator[Attributes]:
    """Which candidates to change beside what is known: none, one group, two groups, ...; of the first few groups.

    First with all of a group, then with those alone of which one can be sure.
    """
    sure = {key: [candidate for candidate in group if candidate.is_sure] for key, group in found.items()}
    for kept in (found, {key: group for key, group in sure.items() if group}) if sure != found else (found,):
        groups = list(kept.values())[:_MOST_GROUPS]
        for count in range(len(groups) + 1):
            for chosen in itertools.combinations(groups, count):
                attributes: Attributes = {path: dict(values) for path, values in known.items()}
                for candidate in itertools.chain(*chosen):
                    attributes.setdefault(candidate.path, {})[candidate.name] = candidate.value
                yield attributes


def set_attributes(network: nn.Module, attributes: Mapping[str, Mapping[str, Size]]) -> None:
    """Give attributes their new values; a list stays a list."""
    for path, values in attributes.items():
        module = network.get_submodule(path)
        for name, value in values.items():
            is_list = isinstance(getattr(module, name), list)
            setattr(module, name, list(value) if is_list and isinstance(value, tuple) else value)


def path_raised(network: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost module of a network, or of a copy, that raised an error; None if there is none."""
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    modules = [x for x in owners if isinstance(x, nn.Module)]
    root = next((x for x in modules if type(x) is type(network)), network)
    paths = {id(module): path for path, module in root.named_modules()}
    return next((paths[id(x)] for x in reversed(modules) if id(x) in paths), None)


def where_raised(network: nn.Module, error: BaseException) -> str:
    """The innermost module of a network in which an error was raised, and the line of code that led to it, in words."""
    path, line = path_raised(network, error), ""
    kind = type(network.get_submodule(path or "")).__name__
    module = "the network" if path is None else f"module {path!r} ({kind})" if path else f"the network ({kind})"
    for frame, number in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            text = linecache.getline(file, number).strip()
            line = f" (line {number} of {Path(file).name}: {text})" if text else ""
    return module + line


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
