"""Calls of a network: how one is run to be compared, and other calls like it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_l0.fast.products import multiply_along
from pyro_l0.nn.engine.record import keep_state
from pyro_l0.nn.gate import GateLayer, check_units, gate_names

__all__ = [
    "Arguments",
    "NoDropout",
    "SharedModuleError",
    "another_size",
    "apart_from",
    "held",
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


@contextmanager
def held(network: nn.Module, gates: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """A network itself in evaluation mode, with gates at given values, or open, and with copies of its tensors.

    Afterwards it is as it was: its tensors are the same, and so is what modules, hooks and closures hold.
    """
    with keep_state(network) as holders:
        memo: dict[int, Any] = {}
        with torch.no_grad():
            own = (*network.parameters(), *network.buffers())
            new = {id(x): copy.deepcopy(x if x.is_leaf else x.detach(), memo) for x in own}

        def swapped(x: Any) -> Any:
            return tree_map_only(Tensor, lambda y: new.get(id(y), y), x) if isinstance(x, (Tensor, tuple)) else x

        for holder, before in holders:
            if isinstance(holder, dict):
                holder.update({name: swapped(x) for name, x in before.items() if isinstance(x, (Tensor, tuple))})
            elif isinstance(holder, list):
                holder[:] = map(swapped, before)
            elif isinstance(holder, CellType):
                holder.cell_contents = swapped(before)
        for site, gate in gate_names(network).items():
            vars(gate)["forward"] = partial(_multiply, gate, site, gates.get(site, torch.ones(gate.size)))
        yield network.eval()


def _multiply(gate: GateLayer, site: str, value: Tensor, x: Tensor | None = None, dim: int | None = None) -> Tensor:
    if x is None:
        return value
    dim = gate.dim if dim is None else dim
    check_units(x, gate.size, dim, site)
    return multiply_along(x, value.to(x.device), dim)


class SharedModuleError(ValueError):
    """A network calls a module of the one that it is a copy of."""


@contextmanager
def apart_from(network: nn.Module) -> Iterator[None]:
    """A context in which nobody may call the modules of a network."""
    paths = {module: path for path, module in network.named_modules()}

    def refuse(module: nn.Module, args: object) -> None:
        if module in paths:
            raise SharedModuleError(
                f"Expected a network whose copies call modules of their own, but {paths[module]!r} of the original is "
                "called; reach it by an attribute of the module that calls it."
            )

    handle = module_hooks.register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def tensors(result: object) -> list[Tensor]:
    """The tensors in arguments or results."""
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
