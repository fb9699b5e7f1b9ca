"""One call of a network, written down as a list of operations."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial, update_wrapper
from itertools import product
from operator import is_
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_l0.fast.products import multiply_along
from pyro_l0.nn.engine.operations import WHOLE, find_entry
from pyro_l0.nn.engine.sizes import KNOWN, Comparison, Dimension, Held, Notes, follow_integers, note_sizes
from pyro_l0.nn.gate import GateLayer, check_units, gate_names

__all__ = [
    "WRITE",
    "Call",
    "Example",
    "ModuleCall",
    "Operation",
    "Recording",
    "Value",
    "calls_of",
    "containing",
    "copied",
    "example_of",
    "held",
    "keep_state",
    "record",
    "set_mode",
    "tensors",
]


WRITE = "write in place"  # the operation that stands for what a write does to the other views of its memory


@dataclass(eq=False)
class Value:
    """A tensor at one moment of a recorded call; what changes in place becomes another value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor  # whose entries later operations may have changed in place
    names: tuple[str, ...] = ()  # of the parameter or buffer that it is, several for a tied one
    is_input: bool = False  # of the network
    is_output: bool = False  # of the network
    is_given: bool = False  # nothing recorded made it, and it is neither input, parameter nor buffer

    @property
    def rank(self) -> int:
        """The number of dimensions; 0 of a number."""
        return len(self.shape)


@dataclass(eq=False)
class Operation:
    """One operation of a recorded call.

    Attributes:
        name: its name without overload, such as ``"aten::addmm"`` or ``"gate"``.
        function: what was called.
        args: its positional arguments, with values in place of tensors.
        kwargs: its keyword arguments, likewise.
        arguments: all arguments by the names in its signature, defaults included.
        outputs: the values that it made; None for anything that is not a tensor.
        path: path of the module that called it.
    """

    name: str
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    arguments: dict[str, object]
    outputs: tuple[Value | None, ...]
    path: str

    @property
    def output(self) -> Value:
        """The first tensor that it made; there has to be one."""
        return self.made[0]

    @cached_property
    def inputs(self) -> list[Value]:
        """The tensors among its arguments, nested ones too, in order and as often as they are there."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Value)]

    @cached_property
    def made(self) -> list[Value]:
        """The tensors that it made; results of other kinds are left out."""
        return [value for value in self.outputs if value is not None]

    def value(self, name: str) -> Value:
        """The argument of this name, which has to be a tensor."""
        found = self.arguments[name]
        assert isinstance(found, Value), f"{name} of {self.name} is {found!r}"
        return found

    def maybe(self, name: str) -> Value | None:
        """The argument of this name if it is a tensor, or else None."""
        found = self.arguments.get(name)
        return found if isinstance(found, Value) else None

    @property
    def location(self) -> str:
        """Its name and the module that it runs in, for messages."""
        return f"{self.name.removeprefix('aten::')} in {self.path or 'the network'}"

    @property
    def is_view(self) -> bool:
        """Whether what it made is its input's memory, as torch says."""
        return bool(getattr(self.function, "is_view", False))

    def integer(self, name: str) -> int:
        """The argument of this name as an integer; numbers that were sizes lose what they are made of."""
        return int(cast(int, self.arguments[name]))

    def integers(self, name: str) -> list[int]:
        """The argument of this name as a list of integers; a single one, or None, becomes a list."""
        found = self.arguments.get(name)
        if found is None:
            return []
        return [found] if isinstance(found, int) else [int(x) for x in cast(Sequence[int], found)]


@dataclass(frozen=True)
class Call:
    """The tensors that went into one recorded call of the network and that came out of it."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class ModuleCall:
    """What went into one call of a module and came out, while the network was recorded."""

    behind: str  # in words, the module that made its first tensor
    input: Value | None  # its first tensor; None if there is none, or no operation uses it
    output: Value | None  # what it returns, of a recurrent layer its last state; None if that is not a tensor
    number: int  # of the network's call


@dataclass(frozen=True, eq=False)
class Recording:
    """What a network did in one call or several.

    Wherever this library takes an example of a network's calls, a recording of that network stands for it, and is not
    made again. It holds while the network trains, and until modules, tensors, hooks, functions or settings of it are
    replaced; settings are numbers, texts and tuples of these that no call changes. It does not see another order in a
    list, or what is in a dict or an object. It holds the values of the calls in memory.
    """

    network: nn.Module
    example: Example  # what it was called with
    operations: tuple[Operation, ...]  # in the order of their running
    calls: tuple[Call, ...]  # one for each example
    named: dict[str, Value]  # parameters and buffers that were used, by every name
    modules: dict[nn.Module, list[ModuleCall]]  # the calls of its modules, in order
    layout: Mapping[str, _Layout]  # of the network
    comparisons: tuple[Comparison, ...] = ()  # of sizes and of integers of the users' modules
    dimensions: Mapping[Dimension, tuple[Value, int]] = field(default_factory=dict)  # what these are sizes of

    def check(self, network: nn.Module) -> None:
        """Refuse another network than the recorded one, or one in which something was replaced since.

        Raises:
            ValueError: it is another network, a module has changed (the message names the first), or calls in training
                mode were recorded, too.
        """
        now = _layout(network) if network is self.network else {}
        changed = [path for path in {**now, **self.layout} if now.get(path) != self.layout.get(path)]
        if network is not self.network:
            wrong = f"of the network itself, but got one of another {type(self.network).__name__}"
        elif changed:
            wrong = f"of the network as it is now, but {changed[0] or 'the network'!r} has changed since"
        elif len(self.calls) > len(calls_of(self.example)):
            wrong = "of the network as it evaluates, but got one with its training"
        else:
            return
        raise ValueError(f"Expected a recording {wrong}; record this network anew, or give an example of its calls.")


class _Layout:
    """What of a module a recording relies on: its tensors and hooks, and those attributes that are settings.

    Settings are numbers, texts, tuples of these, and functions. Lists and dicts are none, as training may fill them.
    ``moving`` ones change in a call, as a counter does.
    """

    moving: Set[str] = frozenset()

    def __init__(self, module: nn.Module) -> None:
        own = {name: x for name, x in vars(module).items() if name not in _TORCHS}
        own = {name: int.__int__(x) if isinstance(x, Held) else x for name, x in own.items()}  # in a call
        tensors = [(name, x) for name, x in [*module._parameters.items(), *module._buffers.items()] if x is not None]
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        hooks = [
            x for x in hooks if not str(getattr(x, "__module__", "")).startswith("pyro_l0.")
        ]  # gates are modules, too
        if isinstance(module, GateLayer):  # a recording shows no values of gates
            tensors, own = [], {name: own.get(name) for name in ("size", "dim", "site_name")}
        functions = [(name, x) for name, x in own.items() if isinstance(x, _FUNCTIONS)]
        self.objects = [module, *hooks, *(x for _, x in (*tensors, *functions))]
        sizes = [(name, x.shape, x.dtype, x.device) for name, x in tensors]
        self.settings = {
            name: x for name, x in own.items() if x is not None and _is_plain(x)
        }  # None may become a cache
        self.facts = type(module), sizes, [name for name, _ in functions], len(hooks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Layout) or len(self.objects) != len(other.objects):
            return False
        moving = self.moving | other.moving
        one, two = ({name: x for name, x in y.settings.items() if name not in moving} for y in (self, other))
        return self.facts == other.facts and one == two and all(map(is_, self.objects, other.objects))

    __hash__ = None  # type: ignore[assignment]


def _is_plain(x: object) -> bool:
    return type(x) in _PLAIN or (type(x) is tuple and all(map(_is_plain, x)))


def _layout(network: nn.Module, in_call: Mapping[str, _Layout] | None = None) -> dict[str, _Layout]:
    """The layout of each module, by path; settings that were others in a call are said to move."""
    found = {}
    for path, module in network.named_modules(remove_duplicate=False):
        found[path] = own = _Layout(module)
        then = own.settings if in_call is None or path not in in_call else in_call[path].settings
        own.moving = {name for name in {**own.settings, **then} if own.settings.get(name) != then.get(name)}
    return found


Example = Tensor | tuple[object, ...] | Mapping[str, object] | list[Any] | Recording
# What torch keeps in modules, as a mark of their hooks.
_TORCHS = {*vars(nn.Module()), *dir(nn.Module)} - {"forward"}
_FUNCTIONS = (FunctionType, BuiltinMethodType, MethodType, partial)
_Function = Callable[..., object]
_Arguments = tuple[tuple[object, ...], dict[str, object]]
_Signature = list[tuple[str, object]]


def record(network: nn.Module, example: Example, with_training: bool = False) -> Recording:
    """Run a network in eval mode and record its operations on tensors.

    Each gate is recorded as one operation, which leaves its input as it is. The network, its buffers, its training
    flags and the random state are as before.

    Args:
        network: any module.
        example: what it is called with: a tensor, a tuple of positional arguments, a dict of keywords, or a list of
            such calls if a network branches on its inputs. A small batch is enough. A recording of the network is
            returned as it is.
        with_training: whether to make every call twice, the second time with the users' own modules in training mode.

    Returns:
        The operations and their values, for :func:`analyse` and for whatever takes an example of the network's calls.

    Raises:
        TypeError: the example is none of these.
        ValueError: the network returns no tensor, two gates have one name, or the example is a recording of another
            network or of one that has changed since.

    Example:
        >>> recording = record(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2))
        >>> [operation.name for operation in recording.operations]
        ['aten::linear', 'aten::relu']
    """
    if isinstance(example, Recording) and not with_training:
        example.check(network)
        return example
    example = example_of(example, network)
    with _as_recorded(network):
        recorder = _Recorder(network)
        try:
            with keep_state(network):
                calls = _record(network, example, with_training, recorder)
                in_call = _layout(network)
        finally:
            recorder.notes.is_open = False
            for gate, dim in recorder.dims.items():
                gate.dim = dim
    operations = tuple(_without_saved(recorder.operations))
    return Recording(
        network,
        example,
        operations,
        calls,
        recorder.named,
        recorder.module_calls(operations),
        _layout(network, in_call),
        tuple(recorder.notes),
        recorder.compared_dimensions(),
    )


def _record(network: nn.Module, example: Example, with_training: bool, recorder: _Recorder) -> tuple[Call, ...]:
    calls = []
    own_modules = [x for x in network.modules() if not type(x).__module__.startswith("torch.nn.")]
    follow_integers(network, recorder.notes)
    with _undisturbed(network), recorder.follow_modules(), recorder.replace_gates():
        for training, (args, kwargs) in product((False, True) if with_training else (False,), calls_of(example)):
            for module in own_modules:
                module.training = training
            args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
            inputs = [recorder.keep(x, is_input=True) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            with recorder, _WholeCalls(recorder):
                result = network(*args, **kwargs)
            outputs = [recorder.value_of(x) for x in tensors(result)]
            if not outputs:
                raise ValueError(
                    "Expected a network that returns a tensor, or a tuple, dict or dataclass of tensors, but got a "
                    f"{type(result).__name__}; wrap it in a module that returns its tensors."
                )
            for value in outputs:
                value.is_output = True
            calls.append(Call(tuple(inputs), tuple(outputs)))
    return tuple(calls)


def example_of(example: Example, network: nn.Module) -> Example:
    """What a network is called with: an example as it is, or that of a recording, which has to be of this network."""
    if not isinstance(example, Recording):
        return example
    example.check(network)
    return example.example


def calls_of(example: Example) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """The positional arguments and keywords of each call of an example, which :func:`record` describes."""
    if isinstance(example, list):
        return [call for one in example for call in calls_of(one)]
    if isinstance(example, Tensor):
        return [((example,), {})]
    if isinstance(example, tuple):
        return [(example, {})]
    if isinstance(example, Mapping):
        return [((), dict(example))]
    raise TypeError(
        "Expected an example that is a tensor, a tuple of positional arguments, a dict of keywords, or a list of such "
        f"calls, but got a {type(example).__name__}."
    )


def containing(path: str) -> list[str]:
    """A module's path and those of the modules that contain it, the network apart."""
    names = path.split(".") if path else []
    return [".".join(names[:length]) for length in range(len(names), 0, -1)]


class _Recorder(TorchDispatchMode):
    """Records every operation that reaches the dispatcher."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.network = network
        self.operations: list[Operation] = []
        self.named: dict[str, Value] = {}
        self.dims: dict[GateLayer, int] = {}  # of gates, as their calls give them
        self.notes = Notes()
        self.is_paused = False
        self._gate: dict[str, object] | None = None
        self._paths: list[str] = [""]
        self._module_calls: list[tuple[nn.Module, str, Tensor | None, object, int]] = []
        self._makers: dict[int, str] = {}  # by the id of a tensor, the module that returned it last
        self._begun = 0  # calls of the whole network
        self._values: dict[int, Value] = {}
        self._in_memory: dict[int, dict[int, Tensor]] = {}  # by address, the tensors that were seen there
        self._asked: list[Tensor] = []  # for their shapes; an id has to stay theirs
        self._known = {path for path, x in network.named_modules() if type(x).__module__.startswith(KNOWN)}
        self._names: dict[int, list[str]] = {}
        for name, tensor in [
            *network.named_parameters(remove_duplicate=False),
            *network.named_buffers(remove_duplicate=False),
        ]:
            self._names.setdefault(id(tensor), []).append(name)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        given = tree_map_only(Tensor, self.value_of, (args, kwargs))
        result = func(*args, **kwargs)
        schema = func._schema
        if self._gate is None:
            arguments = _bind([(x.name, x.default_value) for x in schema.arguments], *given)
            self._write(schema.name, func, given, arguments, result)
        else:
            self._write("gate", func, given, {"input": given[0][0], **self._gate}, result)
        names = [x.name for x in schema.arguments]
        written = [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        if written:
            called = {**dict(zip(names, args, strict=False)), **kwargs}
            self._spread_write(tree_leaves([called.get(name) for name in written]), result)
        return result

    def call_whole(self, name: str, function: _Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a function and record it as one operation, whatever operations it is made of; its result."""
        given = tree_map_only(Tensor, self.value_of, (args, kwargs))
        self.is_paused = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.is_paused = False
        self._write(name, function, given, _bind([(x, None) for x in find_entry(name).arguments], *given), result)
        return result

    def shape_of(self, tensor: Tensor) -> torch.Size:
        """The shape of a tensor, which is followed if users' code asks for it."""
        path = self._paths[-1]
        if path in self._known:
            return tensor.shape
        self._asked.append(tensor)
        text = f"of a tensor in {path or 'the network'}"
        keys = [Dimension(id(tensor), dim) for dim in range(tensor.dim())]
        sizes = zip(keys, tensor.shape, strict=True)
        return torch.Size([Held.of(size, self.notes, f"shape[{key.dim}] {text}", key) for key, size in sizes])

    def compared_dimensions(self) -> dict[Dimension, tuple[Value, int]]:
        """By tensor and dimension whose size was compared, where in the recording that is."""
        keys = {key for comparison in self.notes for key in comparison.sources if isinstance(key, Dimension)}
        return {key: (self._values[key.tensor], key.dim) for key in keys if key.tensor in self._values}

    def value_of(self, tensor: Tensor) -> Value:
        """The value that stands for a tensor as it is now: a new one if it was not seen yet, such as a parameter."""
        value = self._values.get(id(tensor))
        if value is None:
            names = tuple(self._names.get(id(tensor), ()))
            others = [x for x in self._beside(tensor) if x is not tensor]
            value = self.keep(tensor, names=names, is_given=not names)
            self.named.update(dict.fromkeys(names, value))
            if others and not names:  # a view that no operation was seen to make
                value.is_given = False
                self._write_spread([self._values[id(x)] for x in others], [value])
        return value

    def keep(
        self, tensor: Tensor, names: tuple[str, ...] = (), is_input: bool = False, is_given: bool = False
    ) -> Value:
        """Let a new value stand for a tensor, and for its memory, from now on."""
        value = Value(tuple(tensor.shape), tensor.dtype, tensor, names, is_input, is_given=is_given)
        self._values[id(tensor)] = value
        address = _address(tensor)
        if address:
            self._in_memory.setdefault(address, {})[id(tensor)] = tensor
        return value

    def _beside(self, tensor: Tensor) -> list[Tensor]:
        """The tensors that were seen in the memory of a tensor."""
        return list(self._in_memory.get(_address(tensor), {}).values())

    def _write(
        self, name: str, function: _Function, given: _Arguments, arguments: dict[str, object], result: object
    ) -> None:
        results = result if isinstance(result, (tuple, list)) else [result]
        outputs = tuple(self.keep(x) if isinstance(x, Tensor) else None for x in results)
        args, kwargs = given
        self.operations.append(Operation(name, function, args, kwargs, arguments, outputs, self._paths[-1]))

    def _spread_write(self, written: Sequence[object], result: object) -> None:
        """Give new values to the tensors whose memory an operation wrote to, other than those it returned."""
        returned = {id(x) for x in tree_leaves(result)}
        changed = {id(x): x for t in written if isinstance(t, Tensor) for x in [t, *self._beside(t)]}
        tensors = [x for x in changed.values() if id(x) not in returned]
        if tensors:
            before = [self._values[id(x)] for x in tensors] + [self._values[id(x)] for x in tree_leaves(result)]
            self._write_spread(before, [self.keep(x) for x in tensors])

    def _write_spread(self, before: Sequence[Value], outputs: Sequence[Value]) -> None:
        operation = Operation(WRITE, _no_function, tuple(before), {}, {}, tuple(outputs), self._paths[-1])
        self.operations.append(operation)

    @contextmanager
    def follow_modules(self) -> Iterator[None]:
        """Keep the path of the module that is running, and note the calls of modules."""
        paths = {module: path for path, module in self.network.named_modules()}

        def enter(module: nn.Module, inputs: object) -> None:
            self._begun += module is self.network
            self._paths.append(paths.get(module, self._paths[-1]))

        def leave(module: nn.Module, inputs: object, result: object) -> None:
            self._paths.pop()

        def note(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
            given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            result, behind = _hidden(module, result), self._makers.get(id(given), "the network's input")
            self._module_calls.append((module, behind, given, result, self._begun))
            if isinstance(result, Tensor):
                self._makers[id(result)] = repr(paths[module])

        handles = [
            module_hooks.register_module_forward_pre_hook(enter),
            module_hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            # Behind hooks of the modules' own, which may return something else.
            handles += [module.register_forward_hook(note, with_kwargs=True) for module, path in paths.items() if path]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def module_calls(self, operations: Sequence[Operation]) -> dict[nn.Module, list[ModuleCall]]:
        """The calls of modules, with the values that the network's operations have of their tensors."""
        paths = {module: path for path, module in self.network.named_modules()}
        values = {id(x.tensor): x for operation in operations for x in (*operation.inputs, *operation.made)}
        # What a module made itself, though a later one changed it in place.
        made = {
            (path, id(x.tensor)): x
            for operation in operations
            for path in containing(operation.path)
            for x in operation.made
        }
        calls: dict[nn.Module, list[ModuleCall]] = {}
        for module, behind, given, result, number in self._module_calls:
            output = made.get((paths[module], id(result)), values.get(id(result)))
            call = ModuleCall(behind, values.get(id(given)), output, number)
            calls.setdefault(module, []).append(call)
        return calls

    @contextmanager
    def replace_gates(self) -> Iterator[None]:
        """A context in which each gate is recorded as one operation, and nothing is drawn."""
        gates = gate_names(self.network)
        before = [(gate, gate.__dict__.get("forward")) for gate in gates.values()]
        for site, gate in gates.items():
            gate.__dict__["forward"] = self._gate_forward(site, gate)
        try:
            yield
        finally:
            for gate, forward in before:
                del gate.__dict__["forward"]
                if forward is not None:
                    gate.__dict__["forward"] = forward

    def _gate_forward(self, site: str, gate: GateLayer) -> Callable[..., Tensor]:
        dims: set[int] = set()

        def forward(x: Tensor | None = None, dim: int | None = None) -> Tensor:
            if x is None:
                raise ValueError(
                    f"Expected gate {site!r} to multiply units, gate(x, dim), but the network takes its values by "
                    "gate(), whose use can't be followed. Write gate(x) where the units are, and gate(h) at each step "
                    "of a loop; only for costs, a cost of its active_probs of your own will do."
                )
            dims.add(gate.dim if dim is None else dim)
            if len(dims) > 1:
                raise ValueError(
                    f"Expected gate {site!r} to multiply the same dimension at every call, but got {sorted(dims)}. "
                    "Make a gate for each."
                )
            (gate.dim,) = dims
            self.dims[gate] = gate.dim
            check_units(x, gate.size, gate.dim, site)
            if x.shape[gate.dim] == gate.size:
                return self._write_gate(x, site, gate.dim, takes_dim=dim is not None)
            return self._write_gate(x.unsqueeze(-1), site, -1, dim is not None, is_whole=True).squeeze(-1)

        return forward

    def _write_gate(self, x: Tensor, site: str, dim: int, takes_dim: bool, is_whole: bool = False) -> Tensor:
        self._gate = {"site": site, "dim": dim, "takes_dim": takes_dim, "is_whole": is_whole}
        try:
            return x.clone()  # the recorder sees the clone, and records the gate
        finally:
            self._gate = None


class _WholeCalls(TorchFunctionMode):
    """Passes functions with a rule of their own to the recorder, before they become several operations."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs, before = kwargs or {}, len(self.recorder.operations)
        if func in WHOLE and not self.recorder.is_paused:
            result = self.recorder.call_whole(WHOLE[func], func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if self.recorder.is_paused:
            return result
        if func in _SHAPES:
            shape = self.recorder.shape_of(args[0])
            return shape if isinstance(result, torch.Size) else shape[args[1] if len(args) > 1 else kwargs["dim"]]
        note_sizes(self.recorder.notes, func, (args, kwargs), result, self.recorder.operations[before:])
        return result


def _hidden(module: nn.Module, result: Any) -> object:
    """What a module returns; of a recurrent layer or cell, the tensor of its hidden units, or None."""
    for kind, place in ((nn.RNNBase, 1), (nn.LSTM | nn.LSTMCell, 0)):
        if isinstance(module, kind):
            result = result[place] if isinstance(result, tuple) and len(result) > place else None
    return result


_SHAPES = {Tensor.shape.__get__, Tensor.size}  # type: ignore[attr-defined]


def _bind(signature: _Signature, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """Arguments by name; without a signature, nothing."""
    names = [name for name, _ in signature]
    return {**dict(signature), **dict(zip(names, args, strict=False)), **kwargs} if names else {}


def _without_saved(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Leave out what autograd saves for itself: detached tensors that nobody reads."""
    read = {value for operation in operations for value in operation.inputs}
    for operation in operations:
        is_same = operation.is_view and [x.shape for x in operation.made] == [operation.inputs[0].shape]
        if not is_same or any(x in read or x.is_output for x in operation.made):
            yield operation


def _no_function(*args: object) -> object:
    raise RuntimeError("Expected no write to other views of a tensor to run again.")


def _address(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def tensors(result: object) -> list[Tensor]:
    """The tensors that a network returned, nested ones too, in order; results of other kinds are left out."""
    if hasattr(result, "to_tuple"):
        result = result.to_tuple()
    if isinstance(result, Tensor):
        return [result]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = [getattr(result, x.name) for x in dataclasses.fields(result)]
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [tensor for x in result for tensor in tensors(x)]
    return []


@contextmanager
def _as_recorded(network: nn.Module) -> Iterator[None]:
    """A context in which modules are of the class ``recorded_as``, if theirs has one, which is a single operation."""
    own = {module: type(module) for module in network.modules() if hasattr(type(module), "recorded_as")}
    for module, kind in own.items():
        module.__class__ = cast(Any, kind).recorded_as
    try:
        yield
    finally:
        for module, kind in own.items():
            module.__class__ = kind


@contextmanager
def _undisturbed(network: nn.Module) -> Iterator[None]:
    """Eval mode with gradients; afterwards everything outside of the network is as before."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    devices = {x.device for x in network.parameters() if x.device.type == "cuda"}
    try:
        for module in network.modules():
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)  # it computes a whole layer as one operation
        with torch.enable_grad(), torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def keep_state(network: nn.Module) -> Iterator[list[tuple[Any, Any]]]:
    """Afterwards a network holds what it held, such as an empty cache, and buffers the numbers that they held.

    Yields what holds something, such as a dict, each with what it holds.
    """
    held, buffers = _held(network), [(x, x.clone()) for x in network.buffers()]
    try:
        yield held
    finally:
        try:
            _give_back(held)
        except BaseException:  # an interrupt
            _give_back(held)
            raise
        with torch.no_grad():
            for buffer, before in buffers:
                if not buffer.is_meta and not torch.equal(buffer, before):
                    buffer.copy_(before)


# ------------------------------------------------------------ what a network holds, and copies of it


_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_TABLES = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)}
_HOOKS = sorted(name for name in _TABLES if "hooks" in name)


def _parts(x: Any) -> Iterable[Any]:
    """What an object holds, as far as copies of it hold it too; of modules without empty tables, such as of hooks."""
    if isinstance(x, nn.Module):
        kept = _kept(x)
        return [v for name, v in vars(x).items() if (v if name in _TABLES else kept is None or kept.get(name) is v)]
    if isinstance(x, (Tensor, type, ModuleType)):
        return ()
    if isinstance(x, dict):
        return [*x, *x.values()]
    if isinstance(x, (list, tuple, set, frozenset, deque)):
        return x
    if isinstance(x, CellType):
        with suppress(ValueError):  # it is empty
            return [x.cell_contents]
        return ()
    if isinstance(x, FunctionType):
        return [*(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values()]
    if isinstance(x, (MethodType, BuiltinMethodType)):
        return [x.__self__, getattr(x, "__func__", None)]
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, weakref.ref):
        return [x()]
    return vars(x).values() if _is_plain_instance(x) else [getattr(x, "__wrapped__", None)]


def _kept(module: nn.Module) -> dict[str, Any] | None:
    """The attributes that a module says its copies have; None if it does not say."""
    if type(module).__getstate__ is not object.__getstate__:
        with suppress(Exception):  # a parametrised module refuses
            state = module.__getstate__()
            return state if isinstance(state, dict) else None
    return None


def _is_plain_instance(x: Any) -> bool:
    """Whether an object is a module, or is copied with all of its attributes."""
    if isinstance(x, nn.Module):
        return True
    if isinstance(x, (type, Tensor, FunctionType, ModuleType)):
        return False
    kind: Any = type(x)
    is_plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return is_plain and hasattr(x, "__dict__") and not hasattr(kind, "__deepcopy__")


def _walk(
    todo: Iterable[Any], stop: Container[int] = (), enter: Callable[[FunctionType], bool] = lambda function: True
) -> dict[int, Any]:
    """All that some objects hold, with them, by identity; not what those hold to ``stop`` at or not to ``enter``."""
    found: dict[int, Any] = {}
    left = list(todo)
    while left:
        x = left.pop()
        if type(x) not in _PLAIN and id(x) not in found:
            found[id(x)] = x
            if id(x) not in stop and (not isinstance(x, FunctionType) or enter(x)):
                left += _parts(x)
    return found


def _held(network: nn.Module) -> list[tuple[Any, Any]]:
    """The attributes of what a network holds, and the containers and cells in it, each with what it holds."""
    found: list[tuple[Any, Any]] = []

    def is_foreign(function: FunctionType) -> bool:  # our own hooks note what a call shows
        return not str(function.__module__).startswith("pyro_l0.")

    for x in _walk([network], enter=is_foreign).values():
        if isinstance(x, CellType):
            found += [(x, content) for content in _parts(x)]
        elif isinstance(x, (dict, list, set)):
            kind = dict if isinstance(x, dict) else list if isinstance(x, list) else set
            found.append((x, kind(x)))
        elif _is_plain_instance(x):
            found.append((vars(x), dict(vars(x))))
    return found


def _give_back(held: Iterable[tuple[Any, Any]]) -> None:
    """Let containers hold what they held."""
    for holder, before in held:
        if isinstance(holder, CellType):
            holder.cell_contents = before
            continue
        if isinstance(holder, dict):
            for name in holder.keys() - before.keys():
                del holder[name]
            before = {name: x for name, x in before.items() if name not in holder or holder[name] is not x}
        else:
            holder.clear()
        if before:  # some containers refuse every change
            (holder.extend if isinstance(holder, list) else holder.update)(before)


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
        set_mode(network, False)
        yield network


def set_mode(network: nn.Module, is_training: bool) -> None:
    """Put a network into training or evaluation mode by its own method, or where that refuses, as torch.export's."""
    try:
        network.train(is_training)
    except NotImplementedError:
        for module in network.modules():
            module.training = is_training


def _multiply(gate: GateLayer, site: str, value: Tensor, x: Tensor | None = None, dim: int | None = None) -> Tensor:
    if x is None:
        return value
    dim = gate.dim if dim is None else dim
    check_units(x, gate.size, dim, site)
    return multiply_along(x, value.to(x.device), dim)


class _Detached(TorchFunctionMode):
    """Copies of computed tensors are their numbers, without their graph."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is Tensor.__deepcopy__ and args[0].grad_fn is not None:
            return args[1].setdefault(id(args[0]), args[0].detach().clone())
        return func(*args, **(kwargs or {}))


def copied(network: nn.Module, memo: Mapping[int, object] | None = None) -> nn.Module:
    """A deep copy that shares no module, parameter or buffer with a network, and has all of its hooks.

    Functions that hold parts of the network in their closures are copied with them, and what modules that copy or
    pickle themselves leave out is added. What was computed and is kept, as in a cache, stays as numbers, without its
    graph. ``memo`` has, by identity of an object, what takes its place.

    Raises:
        ValueError: something in the copy would go on using a module of the network; the message names it.
    """
    replaced = dict(memo or {})
    of_copy: dict[int, Any] = dict(replaced)
    functions, parts = _functions(network)
    for function in functions:
        cells = tuple(CellType() for _ in function.__closure__ or ())
        of_copy[id(function)] = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    with _Detached():
        new: nn.Module = copy.deepcopy(network, of_copy)
        pairs: dict[nn.Module, nn.Module] = {}
        _complete(network, new, of_copy, replaced.keys(), pairs)
        for path, module in network.named_modules():
            other = pairs.get(module, module)  # itself where ``memo`` replaces it
            missing = vars(module).keys() - vars(other).keys() if hasattr(module, "__deepcopy__") else ()
            for name in missing:
                if not callable(vars(module)[name]):
                    vars(other)[name] = copy.deepcopy(vars(module)[name], of_copy)
            if name := _difference(module, other):
                raise ValueError(
                    f"Expected a network that can be copied, but copies of {path!r}, a {type(module).__name__}, have "
                    f"another {name!r}; let its __deepcopy__ or its __getstate__ and __setstate__ keep it."
                )
            if any(vars(module)[name].keys() != vars(other)[name].keys() for name in _HOOKS):
                vars(other).update({name: copy.deepcopy(vars(module)[name], of_copy) for name in _HOOKS})
            other.training = module.training
        for function in functions:
            _fill(function, of_copy, parts)
    _refuse_shared(network, new)
    return new


def _functions(network: nn.Module) -> tuple[list[FunctionType], set[int]]:
    """The functions of a network that hold parts of it in their closures, directly or by others; and these parts.

    Parts are the modules, tensors, containers and further objects that it holds outside of functions, by identity.
    """
    found = _walk([network], enter=lambda function: False)
    todo = [x for x in found.values() if isinstance(x, FunctionType)]
    kinds = (dict, list, set, deque, Tensor)
    parts = {key for key, x in found.items() if isinstance(x, kinds) or _is_plain_instance(x)}
    holds = dict[FunctionType, bool]()
    for function in todo:  # which grows
        inside = _walk(_parts(function), stop=parts)
        todo += [x for x in inside.values() if isinstance(x, FunctionType) and x not in holds and x is not function]
        holds[function] = not parts.isdisjoint(inside)
    return [function for function in holds if holds[function]], parts


def _fill(function: FunctionType, memo: dict[int, Any], parts: Set[int]) -> None:
    """Give the copy of a function what its closure holds: copies of the network's parts, and all else itself."""

    def new_of(x: Any) -> Any:
        return x if parts.isdisjoint(_walk([x], stop=parts)) else copy.deepcopy(x, memo)

    new: FunctionType = memo[id(function)]
    for cell, other in zip(function.__closure__ or (), new.__closure__ or (), strict=True):
        for content in _parts(cell):
            other.cell_contents = new_of(content)
    update_wrapper(new, function, updated=())
    vars(new).clear()  # of the mark of a wrapper
    new.__defaults__, new.__kwdefaults__ = new_of(function.__defaults__), new_of(function.__kwdefaults__)
    vars(new).update({name: new_of(x) for name, x in vars(function).items()})


def _complete(
    module: nn.Module, other: nn.Module, memo: dict[int, Any], kept: Set[int], pairs: dict[nn.Module, nn.Module]
) -> None:
    """Add to a module's copy what its own copying left out, and note the pair; for those ``kept`` ``memo`` is right."""
    memo[id(module)] = pairs[module] = other
    for table in ("_parameters", "_buffers", "_modules"):
        theirs = vars(other)[table]
        for name, x in vars(module)[table].items():
            y = theirs.get(name)
            if x is None:
                continue
            if y is None or y is x or id(x) in memo:
                theirs[name] = y = copy.deepcopy(x, memo)
            elif isinstance(x, Tensor) and y.shape == x.shape:
                memo[id(x)] = y
                y.data.copy_(x.data)
                y.requires_grad_(x.requires_grad)
            if isinstance(x, nn.Module) and x not in pairs and id(x) not in kept:
                _complete(x, y, memo, kept, pairs)


def _difference(module: nn.Module, other: nn.Module) -> str | None:
    """The first number, text or shape of a tensor in which a module's copy differs."""
    attributes = [(name, x, vars(other).get(name)) for name, x in vars(module).items() if type(x) in (int, float, str)]
    tensors = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    shapes = [(name, x.shape, getattr(other, name).shape) for table in tensors for name, x in table]
    return next((name for name, x, y in (*attributes, *shapes) if y is not x and y != x), None)


def _refuse_shared(network: nn.Module, new: nn.Module) -> None:
    """Refuse a copy in which something holds a module or tensor of the original."""
    names = {
        id(x): name for name, x in (*network.named_parameters(), *network.named_buffers(), *network.named_modules())
    }
    if names.keys().isdisjoint(_walk([new])):
        return
    modules = {id(module) for module in new.modules()}
    for path, module in new.named_modules():
        shared = names.keys() & _walk(_parts(module), stop=modules)
        if shared:
            raise ValueError(
                f"Expected a network that can be copied, but something that {path or 'the network'!r} holds goes on "
                f"using {names[shared.pop()] or 'the network'!r} of the original; write what uses it as a method."
            )
