"""Gates that act by forward hooks, so that every module, parameter and attribute of a network keeps its path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import ClassVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from pyro_l0.nn.gate import Gate
from pyro_l0.nn.gate_layer import GateHolder, GateLayer

__all__ = ["GateHook", "arrange", "has_hook", "hooks_of", "module_at", "replace_gate"]

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
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def module_at(
    network: nn.Module, path: str, what: str, can_be: Callable[[nn.Module], bool] = lambda module: True
) -> nn.Module:
    """The module at a path inside of a network; an error names others, of which ``can_be`` says whether they fit."""
    modules: dict[str, nn.Module] = dict(network.named_modules(remove_duplicate=False))
    if path and path in modules:
        return modules[path]
    others = [name for name, module in modules.items() if name and can_be(module)]
    close = get_close_matches(path, others, n=3) or [name for name in others if "." not in name] or others
    raise ValueError(
        f"Expected paths of {what} inside of the network, but got {path!r}; there are "
        f"{', '.join(map(repr, close)) or 'none'}."
    )


def has_hook(module: nn.Module, kind: type[GateHook]) -> bool:
    """Whether a module has a hook of a kind."""
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
    """Register the gates of a network's hooks under one holder, at their sites, in place."""
    holders = {path: module for path, module in network.named_modules() if isinstance(module, GateHolder)}
    own = next((path for path, module in holders.items() if not _above(path, module)), None)
    elsewhere = {inner for path, holder in holders.items() if path != own for inner in holder.modules()}
    if own is not None:
        _take_out(network, own)
    found = [(path, hook) for path, hook in hooks_of(network) if hook.gate not in elsewhere]
    taken = {path for path, module in network.named_modules() if isinstance(module, GateLayer)}
    sites: dict[nn.Module, str] = {}
    for path, hook in found:
        site = f"{path}.{hook.suffix}"
        while site in taken:
            site += ".1"
        sites.setdefault(hook.gate, site)
    if not sites:
        return
    at = _place_of_holder(network)
    holder = GateHolder(len(at.split(".")) if at else 0)
    for gate, site in sites.items():
        parent: nn.Module = holder
        *names, last = site.split(".")
        for name in names:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(last, gate)
        if isinstance(gate, Gate):
            gate.place = site
    holder.train(network.training)
    network.get_submodule(at).add_module(_HOLDER, holder)


def _above(path: str, holder: GateHolder) -> str:
    """The path of the network whose holder is at a path."""
    names = path.split(".")[:-1]
    return ".".join(names[: len(names) - holder.levels])


def _place_of_holder(network: nn.Module) -> str:
    """Where a holder can be: the network, or, if that is a container, a layer inside, if possible with parameters."""
    layers = {path: module for path, module in network.named_modules() if not isinstance(module, _CONTAINERS)}
    trained = [path for path, module in layers.items() if not path or any(True for _ in module.parameters(False))]
    first: str = [*trained, *layers][0]
    return first


def replace_gate(network: nn.Module, old: nn.Module, new: nn.Module, size: int) -> None:
    """Replace a gate, in place, by another module that gets so many units; an Identity takes the hook away."""
    hooks = [hook for _, hook in hooks_of(network) if hook.gate is old]
    is_gone = bool(hooks) and isinstance(new, nn.Identity)
    for hook in hooks:
        hook.gate = new
        hook.resize(size)
        if is_gone:
            hook.remove()
    for path, module in list(network.named_modules(remove_duplicate=False)):
        if module is old and is_gone:
            _take_out(network, path)
        elif module is old:
            parent, _, name = path.rpartition(".")
            network.get_submodule(parent)._modules[name] = new


def _take_out(network: nn.Module, path: str) -> None:
    """Remove a module from a holder, and what is empty then."""
    parent, _, name = path.rpartition(".")
    module = network.get_submodule(parent)._modules.pop(name)
    if not isinstance(module, GateHolder) and not network.get_submodule(parent)._modules:
        _take_out(network, parent)
