"""Slices of a network's own tensors: parameters, buffers, gradients and the optimiser's state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Kept", "check_state", "cut", "move", "named_tensors", "set_value", "slice_tensors"]

Kept = Mapping[str, Sequence[Tensor | None]]
"""By name of a parameter or buffer, the places that stay along each dimension; None for all."""


def named_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under every name that they have."""
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


def cut(tensor: Tensor, places: Sequence[Tensor | None]) -> Tensor:
    """Some places of a tensor along each dimension, as a tensor of its own."""
    small = tensor
    for dim, index in enumerate(places):
        if index is not None and len(index) < small.shape[dim]:
            small = small.index_select(dim, index.to(small.device))
    return small.clone() if small is tensor else small


def set_value(tensor: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer another value, of another shape perhaps; it stays the same object.

    A node of autograd that accumulates its gradient and is alive, as data parallelism holds them, refuses another
    shape, but not with another type in between.
    """
    gradient, tensor.grad = tensor.grad, None
    between = torch.float32 if tensor.dtype == torch.float16 else torch.float16
    if tensor.shape != value.shape and tensor.requires_grad:
        tensor.data = torch.empty(0, dtype=between, device=tensor.device)
    tensor.data = value
    if gradient is not None and gradient.shape == value.shape:
        tensor.grad = gradient


@torch.no_grad()
def slice_tensors(network: nn.Module, kept: Kept, optimiser: torch.optim.Optimizer | None = None) -> None:
    """Cut parameters and buffers in place, with their gradients and what an optimiser keeps about them.

    Every parameter stays the object that it was, so that hooks on it, lists of it and the optimiser's groups hold.

    Args:
        network: whose tensors.
        kept: what stays; tensors that it does not name stay whole.
        optimiser: of a state that :func:`check_state` takes.
    """
    done: set[int] = set()
    for name, tensor in named_tensors(network):
        places = kept.get(name)
        if places is None or id(tensor) in done:
            continue
        done.add(id(tensor))
        shape = tensor.shape
        if all(index is None or len(index) == size for index, size in zip(places, shape, strict=True)):
            continue
        state = {} if optimiser is None else optimiser.state.get(tensor, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape:
                state[key] = cut(value, places)
        gradient = None if tensor.grad is None else cut(tensor.grad, places)
        set_value(tensor, cut(tensor.detach(), places))
        tensor.grad = gradient


def check_state(optimiser: torch.optim.Optimizer, parameters: Collection[Tensor]) -> None:
    """Refuse an optimiser whose state of some parameters can't be cut with them.

    Raises:
        ValueError: an entry has neither the parameter's shape nor a single number, as factored second moments have.
    """
    for parameter in parameters:
        for key, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"Expected an optimiser whose state has the shapes of the parameters, but {key!r} of "
                    f"{type(optimiser).__name__} has {tuple(value.shape)} for {tuple(parameter.shape)}; train with "
                    "Adam, AdamW or SGD, or without Shrinker and compact at the end."
                )


def move(optimiser: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, tuple[nn.Parameter | None, Tensor]]) -> None:
    """Let an optimiser go on with parameters in the place of others, and the parts of its state that belong to them.

    Args:
        optimiser: whatever trains the parameters.
        replaced: for each old parameter the new one, None if there is none, and its places along dimension 0.
    """
    for group in optimiser.param_groups:
        params: list[nn.Parameter] = []
        for old in group["params"]:
            new, places = replaced.get(old, (old, None))
            state = optimiser.state.pop(old, None) if new is not old else None
            if new is None:
                continue
            params.append(new)
            if state is not None:
                optimiser.state[new] = {
                    key: cut(value, (places,)) if isinstance(value, Tensor) and value.shape == old.shape else value
                    for key, value in state.items()
                }
        group["params"] = params
