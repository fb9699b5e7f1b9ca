"""Reads off the operations of a network without its data, and says in plain words where that is not possible."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import Gate, check_tensor
from pyro_l0.nn.pieces import Constant, Expand, Select, Shift, Sized

__all__ = ["operation", "place", "trace"]

_TORCH = str(Path(torch.__file__).parent)
# By a part of what Python or torch says: what the code does in plain words, and what to write instead.
_CAUSES = {
    "_Mode": ("hands self.training to a function of torch's core", "use F.dropout or a module such as nn.Dropout"),
    "iterated": ("iterates over a tensor or unpacks one", "take its parts by index, such as x[:, 0] or x.shape[0]"),
    "control flow": (
        "branches on the values of a tensor (if, while, assert, and, or)",
        "use torch.where, or decide before the network is called",
    ),
    "'len' is not supported": ("takes len() of a tensor", "write x.shape[0]"),
    "not installed as a submodule": (
        "calls a module that is none of its submodules",
        "keep modules in attributes, nn.ModuleList or nn.ModuleDict instead of lists and dicts",
    ),
    "Proxy": (
        "hands a tensor or its size to code that is not torch's (int, float, range, math, NumPy, assignment to "
        "entries)",
        "use operations of torch on whole tensors",
    ),
}


class _Passed(nn.Module):
    """What stands for a gate while a network is read."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        return check_tensor(x, self.path)


_LEAVES = (_Passed, FixedGate, Select, Shift, Sized, Expand, Constant)


class _Mode(int):
    """The ``training`` of a module while it is traced: False, and it notes whose code decides by it."""

    path: str
    asked: dict[str, None]

    def __new__(cls, path: str, asked: dict[str, None]) -> _Mode:
        mode = super().__new__(cls, 0)
        mode.path, mode.asked = path, asked
        return mode

    def __bool__(self) -> bool:
        self.asked[self.path] = None
        return False


class _Tracer(fx.Tracer):
    """Keeps gates and pieces whole, and knows in which module it stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.within: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _LEAVES) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        self.within.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.within.pop()
        return result


class _Shapes(fx.Interpreter):
    """Notes the shapes of tensors, and the values of what is none, such as sizes."""

    node: fx.Node

    def run_node(self, n: fx.Node) -> object:
        self.node = n
        result: object = super().run_node(n)
        shape, value = (result.shape, None) if isinstance(result, Tensor) else (None, result)
        n.meta.update(shape=shape, value=value)
        return result


def trace(network: nn.Module, example_input: Tensor) -> tuple[fx.Graph, tuple[str, ...]]:
    """The operations of a network in evaluation mode, and what of its code they leave out.

    A node's ``meta`` has its ``"shape"`` if it is a tensor and its ``"value"`` if it is none, its ``"place"`` in the
    network in words, and for dropout whose argument is the ``training`` of a module that module's path as ``"mode"``.

    Raises:
        ValueError: the operations depend on the data, or the network does not take the example.
        TypeError: ``network`` is no module or ``example_input`` no tensor.
    """
    _check(network, example_input)
    modules = dict(network.named_modules(remove_duplicate=False))
    # On a copy, which the code may change. Its gates pass their input on, instead of asking Pyro for a sample.
    gates = {id(module): _Passed(path) for path, module in modules.items() if isinstance(module, Gate)}
    try:
        shadow = copy.deepcopy(network, gates)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"Expected a network that copy.deepcopy can copy, but it can't copy {type(network).__name__}: "
            f"{_first_line(error)} Take torch.nn.utils.parametrizations.weight_norm in the place of "
            "torch.nn.utils.weight_norm, and keep no results of earlier calls in attributes."
        ) from error
    asked: dict[str, None] = {}
    for path, module in shadow.named_modules():
        module.training = _Mode(path, asked)
    before = {name: (id(buffer), buffer._version) for name, buffer in shadow.named_buffers()}
    tracer = _Tracer()
    try:
        graph = tracer.trace(shadow)
    except Exception as error:
        within = tracer.within[-1] if tracer.within else ""
        raise ValueError(_why(error, _place(within, modules.get(within, network)))) from error
    changed = [name for name, buffer in shadow.named_buffers() if before.get(name) != (id(buffer), buffer._version)]
    shadow.eval()
    for node in graph.nodes:
        stack = [*(node.meta.get("nn_module_stack") or {"": ("", type(network))}).values()]
        node.meta["place"] = _place(stack[-1][0], modules.get(stack[-1][0], network))
        _note_mode(node, asked)
    _run(fx.GraphModule(shadow, graph), example_input, next(network.parameters(), None))
    left_out = [f"what depends on `self.training` {_place(path, modules[path])}" for path in asked]
    return graph, (*left_out, *(f"updates of buffer {name!r}" for name in changed))


def operation(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """The name of what a node does: a module's class, a function or a method."""
    if node.op == "call_module":
        return type(modules[str(node.target)]).__name__
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def place(node: fx.Node) -> str:
    """Where in the network a node stands, in words."""
    return str(node.meta["place"])


def _place(path: str, module: nn.Module) -> str:
    return f"in module {path!r} ({type(module).__name__})" if path else f"in forward of {type(module).__name__}"


def _check(network: nn.Module, example_input: Tensor) -> None:
    if not isinstance(network, nn.Module):
        raise TypeError(f"Expected network to be a torch module, but got {type(network).__name__}.")
    if isinstance(network, Gate):
        raise ValueError("Expected a network with Gate layers in it, but got a Gate; put it into nn.Sequential.")
    lazy = [name for name, parameter in network.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"Expected parameters of known shapes, but {lazy[0]!r} is lazy; call the network once before.")
    parameters = inspect.signature(network.forward).parameters.values()
    if [p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters] != [True]:
        taken = ", ".join(map(str, parameters))
        raise ValueError(
            f"Expected a network of one input, but forward of {type(network).__name__} takes ({taken}); "
            "wrap it in a module whose forward takes one tensor and fills in the others."
        )
    if not isinstance(example_input, Tensor):
        raise TypeError(f"Expected example_input to be one tensor, but got {type(example_input).__name__}.")
    like = next(network.parameters(), example_input)
    if like.device != example_input.device:
        raise ValueError(
            f"Expected example_input on {like.device}, where the network's parameters are, but got one on "
            f"{example_input.device}; move it by .to({str(like.device)!r})."
        )


def _note_mode(node: fx.Node, asked: dict[str, None]) -> None:
    """Put False in the place of a module's mode among the arguments of a node."""
    paths = [arg.path for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, _Mode)]
    if not paths:
        return
    if node.kwargs.get("training") is not None and "dropout" in str(getattr(node.target, "__name__", "")):
        node.meta["mode"] = paths[0]
    else:
        asked.update(dict.fromkeys(paths))
    node.args = tuple(False if isinstance(arg, _Mode) else arg for arg in node.args)
    node.kwargs = {key: False if isinstance(arg, _Mode) else arg for key, arg in node.kwargs.items()}


def _run(network: fx.GraphModule, example_input: Tensor, like: Tensor | None) -> None:
    """Note the shapes of a traced network's nodes."""
    shapes = _Shapes(network)
    try:
        with torch.no_grad():
            shapes.run(example_input.clone())
    except Exception as error:
        of, remedy = "", ""
        if like is not None and like.dtype != example_input.dtype:
            of = f" of dtype {like.dtype}, as the network's parameters,"
            remedy = f"; convert it by .to({like.dtype})"
        raise ValueError(
            f"Expected an example_input that the network takes,{of} but got one of shape {tuple(example_input.shape)} "
            f"and dtype {example_input.dtype}, at which {shapes.node.name!r} {place(shapes.node)} fails: "
            f"{_first_line(error)}{remedy}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _why(error: Exception, where: str) -> str:
    """Why and where a trace stopped, in plain words."""
    said = f"{type(error).__name__}: {_first_line(error)}"
    known = next((cause for part, cause in _CAUSES.items() if part in said), None)
    cause, remedy = known or (f"raises {said}", "use operations of torch that need no values")
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TORCH)]
    frame, line = users[-1], ""
    if frame.filename != __file__:
        line = f" (line {frame.lineno} of {Path(frame.filename).name}: {(frame.line or '')[:80]})"
    return (
        f"Expected a network whose operations can be read off without data, but code {where}{line} {cause}. "
        f"Instead, {remedy}; or leave this part out of the network, and call it before or behind it."
    )
