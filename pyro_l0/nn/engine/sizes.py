"""Integers of a network's modules and sizes of its tensors, followed through its code into the sizes that they give."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyro_l0.nn.engine.operations import find_entry, is_pointwise
from pyro_l0.nn.gate import GateLayer

if TYPE_CHECKING:
    from pyro_l0.nn.engine.record import Operation

__all__ = [
    "KNOWN",
    "OF_WEIGHT",
    "Comparison",
    "Dimension",
    "Held",
    "Holder",
    "Notes",
    "Source",
    "are_inner_sizes",
    "are_numbers",
    "are_parts",
    "are_repeats",
    "are_sizes",
    "follow_integers",
    "note_sizes",
]

_LONGEST = 500  # letters of a formula that is followed
KNOWN = ("torch.", "pyro_l0.")  # whose integers a table has, or nobody cuts
Arithmetic = Mapping[Callable[..., Any], Callable[..., Any]]


class Holder(NamedTuple):
    """Where an integer is held: path of the module, name of the attribute, and position in it if that has several."""

    path: str
    name: str
    position: int | None = None

    def __str__(self) -> str:
        position = "" if self.position is None else f"[{self.position}]"
        return f"{self.path}.{self.name}{position}".removeprefix(".")


class Dimension(NamedTuple):
    """One dimension of a tensor, by the tensor's id while a network is recorded."""

    tensor: int
    dim: int


Source = Holder | Dimension


class Notes(list["Comparison"]):
    """What a recording notes of integers; a closed one notes nothing, and its integers are plain."""

    is_open = True

    def compare(self, function: Callable[..., bool], left: Held, right: int, is_even: bool = False) -> bool:
        """Compare, and note the comparison with its result, while a network is recorded."""
        result = function(int(left), int(right))
        if self.is_open:
            self.append(Comparison(function, left, right, result, is_even))
        return result


class Held(int):
    """An integer that a module holds or that is a size of a tensor, or a sum, product, quotient, ... of such."""

    notes: Notes
    parts: tuple[Any, ...]  # its source; or a function and two integers
    text: str

    @classmethod
    def of(cls, value: int, notes: Notes, text: str, *parts: Any) -> Held:
        """An integer that knows how it reads in code, and the function and integers, or the size, that it came from."""
        self = cls(value)
        self.notes, self.text, self.parts = notes, text, parts
        return self

    def is_number(self) -> None:
        """Note that code computes with the value."""
        self.notes.compare(operator.eq, self, int(self))

    def __hash__(self) -> int:
        if not isinstance(self.parts[0], Holder):  # a cache may give it back at another call
            self.notes = Notes()
            self.notes.is_open = False
        return hash(int(self))

    def __neg__(self) -> Any:
        return 0 - self

    def __bool__(self) -> bool:
        return self.notes.compare(operator.ne, self, 0)

    def __float__(self) -> float:
        self.is_number()
        return float(int(self))

    def __truediv__(self, other: Any) -> Any:
        return float(self) / other

    def __pow__(self, *others: Any) -> Any:
        self.is_number()
        return pow(int(self), *others)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # what a network keeps of it is plain


def _arithmetic(function: Callable[..., int], sign: str, is_reflected: bool) -> Callable[[Held, object], Any]:
    def method(one: Held, other: object) -> Any:
        if isinstance(other, float):
            one.is_number()
        if not isinstance(other, int):
            return NotImplemented
        both = (other, one) if is_reflected else (one, other)
        value = function(*map(int, both))
        text = f" {sign} ".join(x.text if isinstance(x, Held) else str(x) for x in both)
        is_followed = one.notes.is_open and len(text) < _LONGEST
        return Held.of(value, one.notes, text, function, *both) if is_followed else value

    return method


def _comparison(function: Callable[..., bool]) -> Callable[[Held, object], Any]:
    return lambda one, other: one.notes.compare(function, one, other) if isinstance(other, int) else NotImplemented


for _name, _sign in {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}.items():
    setattr(Held, f"__{_name}__", _arithmetic(getattr(operator, _name), _sign, is_reflected=False))
    setattr(Held, f"__r{_name}__", _arithmetic(getattr(operator, _name), _sign, is_reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Held, f"__{_name}__", _comparison(getattr(operator, _name)))


class Comparison(NamedTuple):
    """A comparison whose result has to stay what it is: the network's code made it, or a size was given by it."""

    function: Callable[..., bool]
    left: Held
    right: int
    result: bool
    is_even: bool  # whether units may stay for it, as they do for parts of one size

    @property
    def is_equation(self) -> bool:
        """Whether it says that two integers are equal."""
        return self.function is (operator.eq if self.result else operator.ne)

    @property
    def text(self) -> str:
        """The reason that is shown for units which stay for it."""
        if isinstance(self.right, Held) and self.is_equation:
            return f"{self.left.text}, which is the size of other units, too"
        return f"{self.left.text}, which the code computes with"

    @property
    def sources(self) -> dict[Source, int]:
        """The sizes and modules' integers on both sides, with their values in the recorded call."""
        return _sources(self.left) | _sources(self.right)

    def sides(self, known: Mapping[Source, Any], arithmetic: Arithmetic | None = None) -> tuple[Any, Any]:
        """Both sides for other values of what they are made of, perhaps by other functions."""
        return _evaluate(self.left, known, arithmetic or {}), _evaluate(self.right, known, arithmetic or {})


def _sources(integer: int) -> dict[Source, int]:
    if not isinstance(integer, Held):
        return {}
    first, *both = integer.parts
    return {key: value for part in both for key, value in _sources(part).items()} if both else {first: int(integer)}


def _evaluate(integer: int, known: Mapping[Source, Any], arithmetic: Arithmetic) -> Any:
    if not isinstance(integer, Held):
        return integer
    first, *both = integer.parts
    if not both:
        return known.get(first, int(integer))
    return arithmetic.get(first, first)(*(_evaluate(part, known, arithmetic) for part in both))


def follow_integers(network: nn.Module, notes: Notes) -> None:
    """Let integers that users' modules hold, and sizes that torch's layers do, be :class:`Held`."""
    for path, module in network.named_modules():
        if isinstance(module, GateLayer):
            continue
        if type(module).__module__.startswith(KNOWN):
            vars(module).update(_of_weight(path, module, notes))
            continue
        for name, value in dict(vars(module)).items():
            if type(value) is int:
                vars(module)[name] = _held(value, notes, Holder(path, name))
            elif type(value) in (tuple, list) and all(type(x) is int for x in value):
                held = [_held(x, notes, Holder(path, name, position)) for position, x in enumerate(value)]
                vars(module)[name] = type(value)(held)


def _held(value: int, notes: Notes, holder: Holder) -> Held:
    return Held.of(value, notes, str(holder), holder)


def _of_weight(path: str, module: nn.Module, notes: Notes) -> dict[str, Held]:
    """By name, the attributes of a module of torch that are sizes of its weight, such as ``in_features``."""
    weight = module._parameters.get("weight")
    if weight is None or getattr(module, "transposed", False):
        return {}
    names = next((names for kind, names in OF_WEIGHT.items() if isinstance(module, kind)), ())
    values = {name: (vars(module).get(name), dim) for dim, name in enumerate(names)}
    return {
        name: Held.of(value, notes, f"{path}.{name}", Dimension(id(weight), dim))
        for name, (value, dim) in values.items()
        if type(value) is int and value == weight.shape[dim]
    }


OF_WEIGHT: dict[type[nn.Module], tuple[str, ...]] = {  # the attributes that are the sizes of a weight, in order
    nn.Linear: ("out_features", "in_features"),
    nn.Bilinear: ("out_features", "in1_features", "in2_features"),
    nn.Embedding: ("num_embeddings", "embedding_dim"),
    nn.EmbeddingBag: ("num_embeddings", "embedding_dim"),
    nn.PReLU: ("num_parameters",),
    nn.modules.conv._ConvNd: ("out_channels", "in_channels"),
}


def note_sizes(
    notes: Notes, function: Any, arguments: tuple[Any, dict[str, Any]], results: Any, operations: Sequence[Operation]
) -> None:
    """Note what integers among a function's arguments do, by its entry, or by the operations that it ran."""
    name, schema = getattr(function, "__name__", ""), getattr(function, "_schema", None)
    noting = find_entry(f"aten::{name.strip('_')}" if schema is None else schema.name).integers
    if name == "__getitem__":
        _note_slices(notes, arguments[0][0], arguments[0][1], results)
    elif noting is not None:
        noting(notes, arguments, results)
    elif followed := [x for x in _integers(arguments) if isinstance(x, Held)]:
        computing = [x for x in operations if is_pointwise(x) or find_entry(x.name).integers is are_numbers]
        used = {int(x) for operation in computing for x in _integers((operation.args, operation.kwargs))}
        for integer in followed:
            if int(integer) in used:
                integer.is_number()


def _integers(arguments: Any) -> list[int]:
    leaves = [y for x in tree_leaves(arguments) for y in (x if isinstance(x, torch.Size) else [x])]
    return [x for x in leaves if isinstance(x, int) and not isinstance(x, bool)]


def are_numbers(notes: Notes, arguments: tuple[Any, dict[str, Any]], results: Any) -> None:
    """Integers are computed with, so that they stay."""
    for integer in _integers(arguments):
        if isinstance(integer, Held):
            integer.is_number()


def are_sizes(notes: Notes, arguments: tuple[Any, dict[str, Any]], results: Any) -> None:
    """Note that integers among the arguments are sizes of the results, as those of ``torch.zeros``."""
    for tensor in (x for x in tree_leaves(results) if isinstance(x, Tensor)):
        _note_shape(notes, _integers(arguments), tensor, 0)


def are_inner_sizes(notes: Notes, arguments: tuple[Any, dict[str, Any]], results: Any) -> None:
    """The first integer is a dimension, and the others are sizes from there on."""
    first, *integers = _integers(arguments)
    _note_shape(notes, integers, results, int(first))


def are_repeats(notes: Notes, arguments: tuple[Any, dict[str, Any]], results: Any) -> None:
    """The first integer is how often each entry of a dimension, the second one, is repeated."""
    repeats, *dims = _integers(arguments) or [0]
    if dims and isinstance(repeats, Held):
        x, dim = arguments[0][0], int(dims[0])
        notes.compare(operator.eq, repeats * _size(notes, x, dim), _size(notes, results, dim))  # type: ignore[arg-type]


def _note_shape(notes: Notes, sizes: Sequence[int], tensor: Tensor, start: int) -> None:
    """Sizes are those of dimensions in order, from one on; or each is that of the only one that has it."""
    shape = list(tensor.shape)
    start += 0 if start >= 0 else len(shape) - len(sizes) + 1
    fits = [int(x) in (-1, n) for x, n in zip(sizes, shape[start:], strict=False)]
    in_order = all(fits) and len(sizes) == len(fits) and (start > 0 or len(sizes) == len(shape))
    for number, size in enumerate(sizes):
        dims = [start + number] if in_order else [dim for dim, n in enumerate(shape) if n == int(size)]
        if isinstance(size, Held) and len(dims) == 1:
            notes.compare(operator.eq, size, _size(notes, tensor, dims[0]))


def _size(notes: Notes, tensor: Tensor, dim: int) -> Held:
    return Held.of(tensor.shape[dim], notes, f"shape[{dim}] of a tensor", Dimension(id(tensor), dim % tensor.dim()))


def _note_slices(notes: Notes, x: Tensor, index: Any, result: Tensor) -> None:
    """A slice has as many entries as there are between its ends."""
    source = target = 0
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts if all(x is None or x is ... or type(x) in (int, Held, slice) for x in parts) else ():
        if isinstance(part, slice) and part != slice(None):
            whole: Any = _size(notes, x, source)
            start, stop = (whole + end if end is not None and end < 0 else end for end in (part.start, part.stop))
            size = whole // part.step if part.step else (whole if stop is None else stop) - (start or 0)
            if int(size) == result.shape[target]:
                notes.compare(operator.eq, _size(notes, result, target), size)
        skipped = x.dim() - sum(isinstance(x, (int, slice)) for x in parts) if part is ... else 1
        source += skipped * (part is not None)
        target += skipped * (isinstance(part, slice) or part is None or part is ...)


def are_parts(notes: Notes, arguments: tuple[Any, dict[str, Any]], parts: Sequence[Tensor]) -> None:
    """Integers are sizes of parts. Those that one integer gives may lose different units, but the same number."""
    args, kwargs = arguments
    given = [*args[1:], *(value for name, value in kwargs.items() if name.startswith("split"))][0]
    dim = int(kwargs.get("dim", args[2] if len(args) > 2 else 0)) % parts[0].dim()
    first: dict[int, Held] = {}
    for size, part in zip([given] * len(parts) if isinstance(given, int) else given, parts, strict=True):
        of = _size(notes, part, dim)
        if not isinstance(size, Held):
            of.is_number()
        elif int(size) == int(of):  # the last may have less
            notes.compare(operator.eq, first.get(id(size), size), of, is_even=id(size) in first)
            first.setdefault(id(size), of)
