"""The calls of a network's modules, as it runs on an example."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pyro_l0.nn.engine.analysis import analyse
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.record import Example
from pyro_l0.nn.engine.tape import Value
from pyro_l0.nn.gate import check_given
from pyro_l0.nn.read_called import record_example

__all__ = ["Followed", "ModuleCall", "follow_calls", "refuse_computed"]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, in a call of the network.

    Attributes:
        behind: in words, the module that made its first tensor.
        input: the first tensor that it is called with; None if there is none, or no operation uses it.
        output: what it returns; None if that is no tensor.
        number: of the network's call.
    """

    behind: str
    input: Value | None
    output: Value | None
    number: int


@dataclass(frozen=True)
class Followed:
    """A network's calls, and what the engine says of them.

    Attributes:
        calls: by module, in order.
        maps: the maps of the recording.
    """

    calls: dict[nn.Module, list[ModuleCall]]
    maps: Maps

    def of_one(self, module: nn.Module) -> list[ModuleCall]:
        """The calls of a module in the first call of the network that calls it most often."""
        by_number: dict[int, list[ModuleCall]] = {}
        for call in self.calls.get(module, []):
            by_number.setdefault(call.number, []).append(call)
        return max(by_number.values(), key=len, default=[])


def follow_calls(network: nn.Module, example: Example) -> Followed:
    """Record a network and the calls of its modules.

    Raises:
        ValueError: the network does not take the example.
    """
    check_given(network)
    seen: list[tuple[nn.Module, Tensor | None, object, str, int]] = []
    begun: list[object] = []  # calls of the whole network
    makers: dict[int, str] = {}
    paths = {module: path for path, module in network.named_modules() if path}

    def note(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        seen.append((module, given, result, makers.get(id(given), "what comes in"), len(begun)))
        if isinstance(result, Tensor):
            makers[id(result)] = repr(paths[module])

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in paths]
    handles.append(network.register_forward_pre_hook(lambda module, args: begun.append(module)))
    try:
        recording = record_example(network, example)
    finally:
        for handle in handles:
            handle.remove()
    refuse_computed(network)
    values = {
        id(value.tensor): value
        for operation in recording.operations
        for value in (*operation.inputs, *operation.outputs)
        if value is not None
    }
    calls: dict[nn.Module, list[ModuleCall]] = {}
    for module, given, result, behind, number in seen:
        call = ModuleCall(behind, values.get(id(given)), values.get(id(result)), number)
        calls.setdefault(module, []).append(call)
    return Followed(calls, analyse(recording, {}).maps)


def refuse_computed(network: nn.Module) -> None:
    """Refuse modules that hold a tensor which they have computed with a gradient, and which torch can't copy.

    Raises:
        ValueError: there is one, such as a weight by ``torch.nn.utils.spectral_norm``.
    """
    for path, module in network.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise ValueError(
                    f"Expected modules that hold parameters and buffers, but {name!r} of {path!r} was computed, as by "
                    "torch.nn.utils.spectral_norm; remove that first, by remove_spectral_norm or remove_weight_norm."
                )
