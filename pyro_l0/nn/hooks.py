"""Gates that act by forward hooks, so that every module, parameter and attribute of a network keeps its path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import ClassVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pyro_l0.nn.gate import Gate
from pyro_l0.nn.gate_layer import GateHolder, GateLayer

__all__ = ["GateHook", "arrange", "has_hook", "hooks_of", "module_at", "new_name", "old_names", "replace_gate"]

_HOLDER = "l0_gates"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # run or count all that they hold


class GateHook:
    """A gate that acts at a module.

    Pickles contain the handles, so that after loading torch gives their numbers to no other hook.
    """

    inner: ClassVar[str]  # the module's name in the wrapper that earlier versions put around it
    outer: ClassVar[str]  # the gate's name there, which is the last one of its site

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
    """Register the gates of a network's hooks under one holder, at their sites, in place.

    Sites keep the names of earlier versions, which put each gated module and its gate into a wrapper.
    """
    holders = {path: module for path, module in network.named_modules() if isinstance(module, GateHolder)}
    own = next((path for path, module in holders.items() if not _above(path, module)), None)
    elsewhere = {inner for path, holder in holders.items() if path != own for inner in holder.modules()}
    if own is not None:
        _take_out(network, own)
    found = [(path, hook) for path, hook in hooks_of(network) if hook.gate not in elsewhere]
    marks = _marks(found)
    taken = {path for path, module in network.named_modules() if isinstance(module, GateLayer)}
    sites: dict[nn.Module, str] = {}
    for path, hook in found:
        before = marks[path][: marks[path].index(hook.inner)]
        site = ".".join([_wrapped(path, {**marks, path: before}), hook.outer])
        while site in taken:
            site += ".1"
        sites.setdefault(hook.gate, site)
    if not sites:
        return
    at = _place_of_holder(network)
    prefix = f"{at}.{_HOLDER}" if at else _HOLDER
    old = {_wrapped(path, marks): path for path in marks} | {site: f"{prefix}.{site}" for site in sites.values()}
    holder = GateHolder(len(at.split(".")) if at else 0, old)
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
    holder.handle = network.register_load_state_dict_pre_hook(_load_old)


def _marks(hooks: Iterable[tuple[str, GateHook]]) -> dict[str, list[str]]:
    """By module path, the names that it had in wrappers, from the outside in."""
    marks: dict[str, list[str]] = {}
    for path, hook in sorted(hooks, key=lambda one: ("0", "projection", "layer").index(one[1].inner)):
        marks.setdefault(path, []).append(hook.inner)
    return marks


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


def _wrapped(path: str, marks: Mapping[str, list[str]]) -> str:
    """A module's path in a network of wrappers."""
    names, wrapped = path.split("."), list[str]()
    for length, name in enumerate(names, 1):
        wrapped += [name, *marks.get(".".join(names[:length]), ())]
    return ".".join(wrapped)


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
    """Remove a module from a holder, and what is empty then; with a holder, its network's hook."""
    parent, _, name = path.rpartition(".")
    module = network.get_submodule(parent)._modules.pop(name)
    if isinstance(module, GateHolder):
        assert module.handle is not None
        module.handle.remove()
    elif not network.get_submodule(parent)._modules:
        _take_out(network, parent)


# ------------------------------------------------------------ names of earlier versions


def old_names(network: nn.Module) -> dict[str, str]:
    """By module path in earlier versions, the path now; paths below change with it."""
    found: dict[str, str] = {}
    for path, holder in network.named_modules():
        if isinstance(holder, GateHolder):
            above = _above(path, holder)
            prefix = f"{above}." if above else ""
            found.update({prefix + old: prefix + new for old, new in holder.old.items()})
    return found


def new_name(name: str, old: Mapping[str, str]) -> str:
    """The name now of a module or tensor of an earlier version, by :func:`old_names`."""
    end = len(name)
    while end > 0:
        if name[:end] in old:
            return old[name[:end]] + name[end:]
        end = name.rfind(".", 0, end)
    return name


def _load_old(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Before a state dict is loaded, give tensors of earlier versions their names of now."""
    own = {prefix + name for name in module.state_dict()}
    marks = _marks(hooks_of(module))  # pruning removed wrappers without a gate
    ways = []
    for old in ({}, old_names(module), old_names(module) | {_wrapped(path, marks): path for path in marks}):
        inner = {name: new_name(name.removeprefix(prefix), old) for name in state if name.startswith(prefix)}
        ways.append({name: prefix + new for name, new in inner.items()})
    best = max(ways, key=lambda way: len(own.intersection(way.values())))
    for name, value in [(name, state.pop(name)) for name in best]:
        state[best[name]] = value
