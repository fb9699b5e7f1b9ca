"""Calls of a network: how one is run to be compared, and other calls like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_l0.nn.engine.record import keep_state

__all__ = [
    "Arguments",
    "NoDropout",
    "another_size",
    "is_constant",
    "largest",
    "normal_numbers",
    "random_calls",
    "run",
    "run_in_place",
    "tensors",
    "with_another_row",
    "with_noise",
]

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Positional arguments and keywords of one call of a network."""

_SEED = 0
_ROWS = 4  # of random inputs
_NOISE = 1e-2  # of the example's largest number


def run(network: nn.Module, call: Arguments, seed: int = _SEED) -> list[Tensor]:
    """The outputs that are tensors, under a seed and without dropout; inputs and buffers stay as they are."""
    with keep_state(network):
        return run_in_place(network, call, seed)


def run_in_place(network: nn.Module, call: Arguments, seed: int = _SEED) -> list[Tensor]:
    """:func:`run`, after which buffers are what the network made of them."""
    args, kwargs = _map(torch.clone, call)
    devices = [x.device for x in tensors(call) if x.is_cuda][:1]
    with torch.random.fork_rng(devices), NoDropout():
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        return tensors(network(*args, **kwargs))


def tensors(result: object) -> list[Tensor]:
    """All tensors in nested arguments or results, in order; of dataclasses and Hugging Face's outputs, too."""
    if hasattr(result, "to_tuple"):  # of Hugging Face's models
        result = result.to_tuple()
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = [getattr(result, field.name) for field in dataclasses.fields(result)]
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def largest(x: Tensor) -> float:
    """The largest absolute entry; 0 if there is none, as on the meta device."""
    if not x.numel() or x.is_meta:
        return 0.0
    low, high = (x.detach().abs() if x.is_complex() else x.detach()).aminmax()  # without a copy
    return max(abs(float(low)), abs(float(high)))


def normal_numbers() -> Callable[[Tensor], Tensor]:
    """A function that draws normal numbers in the shape of a tensor, from the start of a fixed sequence."""
    generator = torch.Generator().manual_seed(_SEED)
    return lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)


def random_calls(call: Arguments) -> list[Arguments]:
    """Calls with random numbers of the same shapes; of integers and booleans, the rows in another order."""
    draw = normal_numbers()

    def scaled(scale: float) -> Arguments:
        return _map(lambda x: scale * draw(x) if x.is_floating_point() else x.flip(0) if x.dim() else x, call)

    return [scaled(1.0), scaled(3.0)]


def with_noise(call: Arguments) -> Arguments:
    """A call whose floating-point numbers are each a little different."""
    draw = normal_numbers()
    return _map(lambda x: x + _NOISE * (largest(x) or 1.0) * draw(x) if x.is_floating_point() else x, call)


def with_another_row(call: Arguments) -> Arguments:
    """The same call with its first row once more."""
    rows = [x.shape[0] for x in tensors(call) if x.dim()]
    number = max(set(rows), key=rows.count, default=0)
    return _map(lambda x: torch.cat([x, x[:1]]) if x.dim() and x.shape[0] == number else x, call)


def another_size(call: Arguments) -> Arguments | None:
    """A call with images that are larger by one in every dimension; None without images."""

    def is_image(x: Tensor) -> bool:
        return x.is_floating_point() and x.dim() in (3, 4, 5)

    if not any(map(is_image, tensors(call))):
        return None
    return _map(lambda x: F.pad(x, [0, 1] * (x.dim() - 2), mode="replicate") if is_image(x) else x, call)


def is_constant(network: nn.Module, calls: Sequence[Arguments]) -> bool:
    """Whether a network in evaluation mode gives the same for every example."""
    network.eval()
    generator = torch.Generator().manual_seed(_SEED)

    def draw(x: Tensor) -> Tensor:
        shape = (_ROWS, *x.shape[1:]) if x.dim() else x.shape
        if x.is_floating_point():
            return torch.randn(shape, generator=generator, dtype=x.dtype).to(x.device)
        return x.flatten()[torch.randint(x.numel(), shape, generator=generator).to(x.device)]

    for call in calls:
        try:
            outputs = run(network, _map(draw, call))
        except Exception:  # rows that do not belong together
            outputs = run(network, call)
        if any(not x.dim() or not torch.equal(x, x[:1].expand_as(x)) for x in outputs):
            return False
    return True


def _map(function: Callable[[Tensor], Tensor], call: Arguments) -> Arguments:
    return cast(Arguments, tree_map_only(Tensor, function, call))


class NoDropout(TorchFunctionMode):
    """All of torch's dropout functions return their input."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_DROPOUTS: set[object] = {
    *(getattr(F, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")),
    *(getattr(torch, name) for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")),
    F.alpha_dropout,
    F.feature_alpha_dropout,
}
