"""Puts gates into networks that were written without them, by forward hooks that keep every path and key."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from itertools import chain, count
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from pyro_l0.expect import expect
from pyro_l0.nn.calls import follow_calls, refuse_idle
from pyro_l0.nn.engine.record import Example, ModuleCall, Value, copied, example_of
from pyro_l0.nn.gate import GateHolder, GateLayer, check_given, name_gates

_HOLDER = "l0_gates"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # run or count all that they hold


class GateHook:
    """A gate that acts at a module.

    Pickles contain the handles, so that after loading torch gives their numbers to no other hook.
    """

    suffix: ClassVar[str]  # of its site: the last name, behind the module's path

    def __init__(self, gate: nn.Module) -> None:
        self.gate = gate
        self.handles: list[RemovableHandle] = []

    def resize(self, size: int) -> None:
        """Adapt to another number of units at the gate."""

    def remove(self) -> None:
        """Take the hooks off their modules; the gate stays as it is."""
        for handle in self.handles:
            handle.remove()


def module_at(
    network: nn.Module, path: str, what: str, can_be: Callable[[nn.Module], bool] = lambda module: True
) -> nn.Module:
    """The module at a path inside of a network; an error names others, of which ``can_be`` says whether they fit."""
    if path:
        with suppress(AttributeError):
            return network.get_submodule(path)
    modules: dict[str, nn.Module] = dict(network.named_modules(remove_duplicate=False))
    others = [name for name, module in modules.items() if name and can_be(module)]
    close = get_close_matches(path, others, n=3) or [name for name in others if "." not in name] or others
    raise ValueError(
        f"Expected paths of {what} inside of the network, but got {path!r}; there are "
        f"{', '.join(map(repr, close)) or 'none'}."
    )


def has_hook(module: nn.Module, kind: type[GateHook]) -> bool:
    """Whether a module has a hook of a class, in front of it or behind it."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(isinstance(hook, kind) for hook in hooks)


def hooks_of(module: nn.Module, path: str = "", seen: set[nn.Module] | None = None) -> Iterator[tuple[str, GateHook]]:
    """The hooks of a network's modules, with the module's path; those inside a module before the one behind it."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, GateHook):
            yield path, hook
    for name, child in module._modules.items():
        if child is not None:
            yield from hooks_of(child, f"{path}.{name}" if path else name, seen)
    for behind in module._forward_hooks.values():
        if isinstance(behind, GateHook):
            yield path, behind


def arrange(network: nn.Module) -> None:
    """Register the gates of a network's hooks under one holder, at their sites, and name all gates, in place."""
    holders = {path: module for path, module in network.named_modules() if isinstance(module, GateHolder)}
    own = next((path for path, module in holders.items() if not _above(path, module)), None)
    elsewhere = {inner for path, holder in holders.items() if path != own for inner in holder.modules()}
    if own is not None:
        _take_out(network, own)
    found = [(path, hook) for path, hook in hooks_of(network) if hook.gate not in elsewhere]
    taken = {path for path, module in network.named_modules() if isinstance(module, GateLayer)}
    sites: dict[nn.Module, str] = {}
    for path, hook in found:
        others = {*taken, *sites.values(), *(other for other, _ in found)}
        sites.setdefault(hook.gate, _free_site(path, hook.suffix, others))
    at = _path_of_holder(network)
    holder = GateHolder(len(at.split(".")) if at else 0)
    for gate, site in sites.items():
        parent: nn.Module = holder
        *names, last = site.split(".")
        for name in names:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(last, gate)
    holder.train(network.training)
    if sites:
        network.get_submodule(at).add_module(_HOLDER, holder)
    name_gates(network)


def _free_site(path: str, suffix: str, others: Collection[str]) -> str:
    """A site below a module's path that is none of other paths, nor above or below one that is a gate's."""
    names = chain([suffix], (f"{'' if suffix.isdigit() else suffix}{k}" for k in count(2)))
    sites = (f"{path}.{name}" for name in names)
    return next(site for site in sites if not any(x == site or x.startswith(f"{site}.") for x in others))


def _above(path: str, holder: GateHolder) -> str:
    """The path of the module that a holder belongs to, ``levels`` above where the holder is."""
    names = path.split(".")[:-1]
    return ".".join(names[: len(names) - holder.levels])


def _path_of_holder(network: nn.Module) -> str:
    """Where a holder can be: the network, or, if that is a container, a layer inside, if possible with parameters."""
    layers = {path: module for path, module in network.named_modules() if not isinstance(module, _CONTAINERS)}
    trained = [path for path, module in layers.items() if not path or any(True for _ in module.parameters(False))]
    first: str = [*trained, *layers][0]
    return first


def replace_gates(network: nn.Module, new: Mapping[nn.Module, tuple[nn.Module, int]]) -> None:
    """Replace gates, in place, by other modules that get so many units; an Identity takes the hook away."""
    gone = set[nn.Module]()
    for hook in [hook for _, hook in hooks_of(network) if hook.gate in new]:
        old = hook.gate
        hook.gate, size = new[old]
        hook.resize(size)
        if isinstance(hook.gate, nn.Identity):
            hook.remove()
            gone.add(old)
    for path, module in [x for x in network.named_modules(remove_duplicate=False) if x[1] in new]:
        if module in gone:
            _take_out(network, path)
        else:
            parent, _, name = path.rpartition(".")
            network.get_submodule(parent)._modules[name] = new[module][0]


def _take_out(network: nn.Module, path: str) -> None:
    """Remove a module from a holder, and what is empty then."""
    parent, _, name = path.rpartition(".")
    module = network.get_submodule(parent)._modules.pop(name)
    if not isinstance(module, GateHolder) and not network.get_submodule(parent)._modules:
        _take_out(network, parent)


def insert_gates(network: nn.Module, gates: Mapping[str, GateLayer], example: Example | None = None) -> nn.Module:
    """Copy a network, and put copies of gates behind named modules.

    Behind ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` goes ``L0Gate(hidden_size)``. It multiplies hidden units of one number,
    in all layers and directions, wherever they are read: in the recurrent weights and those between layers, in the
    output and in the last hidden state. So nothing else depends on a closed unit, and the layer runs as one operation.

    The gates act by forward hooks: every module, parameter and attribute keeps its path, and a new module ``l0_gates``
    holds the gates. The site of the gate behind ``path`` is named ``path.1``. A module that is called several times has
    one gate, which is drawn once and has the same value each time.

    Args:
        network: the network; it is not changed, and weights are not shared.
        gates: by module path, the gate for the module's output, such as the result of
            :func:`~pyro_l0.nn.suggest_gates`. What is one gate at several paths is one in the copy, as on a residual
            stream. One gated module may contain another.
        example: what the network is called with, as :class:`~pyro_l0.nn.NetworkCost` takes it; give it to refuse
            modules that are never called, gates of another size than their outputs, and gates that change no output.

    Raises:
        ValueError: a path is not a module of the network, or no gate can act behind the module: it is never called, the
            module that holds it bypasses it, it returns more than a tensor, or it has a gate already.
        TypeError: ``network`` is not a module, ``gates`` is not a mapping, or a value is not a gate.

    Example:
        >>> from pyro_l0.nn import L0Gate
        >>> from pyro_l0.nn.gate import gate_names
        >>> gate_names(
        ...     insert_gates(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), {"1": L0Gate(3)})
        ... )
        {'1.1': L0Gate(3, dim=-1, HardConcrete)}
    """
    check_given(network, gates, "gates by module path, such as {'1': L0Gate(3)}")
    _check_gates(network, gates, example)
    new = copied(network)
    for path, gate in copy.deepcopy(dict(gates)).items():
        module = new.get_submodule(path)
        (_RecurrentHook if isinstance(module, nn.RNNBase) else _OutputHook)(module, gate)
    arrange(new)
    if example is not None:
        refuse_idle(new, example_of(example, network))
    return new


def _check_gates(network: nn.Module, gates: Mapping[str, GateLayer], example: Example | None) -> None:
    """Refuse all but gates, and paths of modules behind which one can act."""
    modules = dict(network.named_modules(remove_duplicate=False))
    followed = None if example is None else follow_calls(network, example)
    for path, gate in gates.items():
        module_at(network, path, "modules")
        expect(GateLayer, "an L0Gate", **{f"gates[{path!r}]": gate})
        calls = None if followed is None else followed.of_one(modules[path])
        _check_insertion_point(
            modules, path, gate, calls, [other for other in gates if modules.get(other) is modules[path]]
        )
        for call in calls or []:
            _check_size(path, gate, call.output)
        outputs = [(call.output, gate.dim) for call in calls or [] if call.output is not None and gate.size > 1]
        if followed is not None and not followed.are_same_units(outputs):
            found = " and at ".join(f"{path!r} behind {call.behind}" for call in calls or [])
            raise ValueError(
                f"Expected {path!r} to be called on the same units each time, which share a gate, but it is called at "
                f"{found}; make a module for each call, or write the L0Gate into the network's forward."
            )


class _OutputHook(GateHook):
    """Multiplies what a module returns by a gate, whose site is that of the module with ``.1`` if that is free."""

    suffix = "1"

    def __init__(self, module: nn.Module, gate: GateLayer) -> None:
        super().__init__(gate)
        self.handles.append(module.register_forward_hook(self))

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        """The module's output times the gates; of an LSTM's cell, the first one."""
        if isinstance(module, nn.LSTMCell):
            return self.gate(output[0]), output[1]
        return self.gate(output)


class _RecurrentHook(_OutputHook):
    """A gate on the hidden units of a recurrent layer, wherever they are read."""

    def __init__(self, module: nn.Module, gate: GateLayer) -> None:
        super().__init__(module, gate)
        self.handles.append(module.register_forward_pre_hook(self.gate_weights))
        module._forward_hooks_always_called[self.handles[0].id] = True

    def gate_weights(self, module: Any, args: object) -> None:
        """Multiply the weights that read hidden units, of the same layer or the one in front, for one call."""
        module._update_flat_weights()  # which the call would do, where weights were replaced
        for i, name in enumerate(module._flat_weights_names):
            if name.startswith("weight_") and not name.startswith("weight_ih_l0"):
                module._flat_weights[i] = self._gated(module, module._flat_weights[i])

    def __call__(self, module: Any, args: object, output: Any) -> Any:
        """Put the weights back, and multiply the output and the last state."""
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        if output is None:
            return None  # the call failed
        sequence, state = output
        is_packed = isinstance(sequence, PackedSequence)
        gated = self._gated(module, sequence.data if is_packed else sequence)
        return (
            sequence._replace(data=gated) if is_packed else gated,
            (self.gate(state[0]), state[1]) if isinstance(module, nn.LSTM) else self.gate(state),
        )

    def _gated(self, module: Any, x: Tensor) -> Tensor:
        """The product with the units of each direction, which are side by side."""
        gated: Tensor = self.gate(x.unflatten(-1, (-1, module.hidden_size)))
        return gated.flatten(-2)


def has_gate_behind(module: nn.Module) -> bool:
    """Whether :func:`insert_gates` has put a gate behind a module."""
    return has_hook(module, _OutputHook)


def _check_size(path: str, gate: GateLayer, output: Value | None) -> None:
    """Refuse a gate that has not as many units as the module's output."""
    if output is None:
        raise ValueError(
            f"Expected modules that return a tensor, but {path!r} returns something else, or what no operation made; "
            "put the gate behind a module inside of it, or write it into the network's forward."
        )
    if gate.size == 1:
        return
    if not -output.rank <= gate.dim < output.rank or output.shape[gate.dim] != gate.size:
        raise ValueError(
            f"Expected a gate for the output of {path!r}, of shape {output.shape}, the batch first, but got {gate!r}."
        )


def _check_insertion_point(
    modules: Mapping[str, nn.Module], path: str, gate: GateLayer, calls: list[ModuleCall] | None, given: list[str]
) -> None:
    """Refuse a module behind which a gate would not act, or not alone."""
    module, parent = modules[path], modules[path.rpartition(".")[0]]
    if isinstance(parent, nn.MultiheadAttention):
        raise ValueError(
            f"Expected modules that are called, but nn.MultiheadAttention reads the weights of {path!r} and does not "
            "call it; put the gate behind the attention, on the first entry of what it returns."
        )
    if isinstance(module, nn.RNNBase) and (module.proj_size or (gate.size, gate.dim) != (module.hidden_size, -1)):
        found = f"proj_size={module.proj_size}" if module.proj_size else repr(gate)
        raise ValueError(
            f"Expected L0Gate({module.hidden_size}) for the hidden units of {path!r}, a recurrent layer without "
            f"proj_size, but got {found}."
        )
    if calls == [] or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"Expected {path!r} to be called, so that a gate behind it acts, but it is never called; put the gate "
            "behind a module that is, or write it into the network's forward."
        )
    if len(given) > 1:
        raise ValueError(
            f"Expected one gate for a module, but {' and '.join(map(repr, given))} are one module; give one of them."
        )
    if has_gate_behind(module):
        raise ValueError(f"Expected modules without a gate behind them, but {path!r} has one already.")
