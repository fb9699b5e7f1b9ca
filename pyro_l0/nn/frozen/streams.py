"""The residual streams of a recorded network: what is added to them, and what reads them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_l0.nn.engine.analysis import analyse
from pyro_l0.nn.engine.readers import weights_of
from pyro_l0.nn.engine.record import WRITE, Operation, Recording, Value

__all__ = ["Dense", "Reading", "Step", "Streams", "Tensors", "Write", "is_close", "repeat"]

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
Tensors = Callable[[Value], Tensor]
_Readers = list[tuple[str, Tensor | None]]  # names, and entries of an operation's output


@dataclass(frozen=True, eq=False)
class Dense:
    """A product with a matrix: each entry of the last dimension of the output is a weighted sum over that of ``x``."""

    operation: Operation
    x: Value
    weight: Value
    dim: int  # of the weight, with the entries of the output

    def parts(self, tensor: Tensors) -> tuple[Tensor, Tensor]:
        """The weights, shape ``(entries of the output, entries of x)``, and the bias."""
        matrix = tensor(self.weight).movedim(self.dim, 0)
        zero = matrix.new_zeros(1, matrix.shape[1])
        (y,) = repeat(self.operation, lambda value: zero if value is self.x else tensor(value))
        assert isinstance(y, Tensor)
        return matrix, y[0]


@dataclass(frozen=True, eq=False)
class Write:
    """A tensor that is added to a stream, by one writer or by the heads of an attention."""

    value: Value
    writers: tuple[str, ...]
    projection: Dense | None = None  # from the heads, side by side, to the stream; None if there is one writer
    entries: tuple[Tensor, ...] = ()  # of the projection's input, for each head
    behind: tuple[Operation, ...] = ()  # between the projection and the tensor

    @property
    def source(self) -> Value:
        """The tensor that contributions are linear in: the input of their projection, or else the summand itself."""
        return self.value if self.projection is None else self.projection.x

    @property
    def others(self) -> list[Value]:
        """What contributions are computed from beside their source."""
        return [] if self.projection is None else _taken((self.projection.operation, *self.behind), self.source)

    def contributions(self, x: Tensor, tensor: Tensors) -> Tensor:
        """What each writer adds by its source, shape ``(writers, *shape)``; the bias of a projection is no head's."""
        if self.projection is None:
            return x[None]
        matrix, _ = self.projection.parts(tensor)
        heads = torch.stack([x[..., entries] @ matrix[:, entries].mT for entries in self.entries])
        return _run(self.behind, self.projection.operation.output, heads, self.value, tensor)


@dataclass(frozen=True, eq=False)
class Reading:
    """An operation that reads a stream, the first behind its norm, by one reader or several."""

    stream: Value  # the sum that is read
    writes: tuple[Write, ...]  # whose sum that is
    operations: tuple[Operation, ...]  # from the stream to the one that reads; none if the stream is an output
    dense: Dense | None  # the one that reads, if it is one and several readers have entries of its output
    entries: tuple[Tensor, ...]  # which those are; none if there is one reader
    edges: Tensor  # their numbers, shape ``(readers, writers)``

    @cached_property
    def inputs(self) -> list[Value]:
        """What it needs: the stream, and what its operations take from elsewhere."""
        others = [x for write in self.writes for x in write.others]
        return list(dict.fromkeys([self.stream, *_taken(self.operations, self.stream), *others]))

    def results(self, sums: Tensor, tensor: Tensors) -> Sequence[object]:
        """What the operation makes of the sums that its readers see, shape ``(readers, *shape)``."""
        if not self.operations:
            return [sums[0]]
        *front, last = self.operations
        if not self.entries:
            made = _repeat_all(self.operations, self.stream, _laid_out(sums, self.stream)[0], tensor)
            return [None if x is None else made[x] for x in last.outputs]
        if self.dense is None:
            y = _run(self.operations, self.stream, sums, last.output, tensor)
            parts = [each[..., entries] for each, entries in zip(y, self.entries, strict=True)]
        else:  # each reader's part of the product alone
            x, (matrix, bias) = _run(front, self.stream, sums, self.dense.x, tensor), self.dense.parts(tensor)
            parts = [F.linear(each, matrix[own], bias[own]) for each, own in zip(x, self.entries, strict=True)]
        return [torch.cat(parts, -1)[..., torch.cat(self.entries).argsort()]]


@dataclass(frozen=True)
class Step:
    """An operation of a run, what it reads of a stream, and the values that no later one needs."""

    operation: Operation
    reading: Reading | None
    last: list[Value]


def repeat(operation: Operation, tensor: Tensors) -> Sequence[object]:
    """Run an operation again on other tensors; its results in a list."""
    if operation.name == WRITE:
        return [tensor(value) for value in operation.inputs[: len(operation.outputs)]]
    args, kwargs = tree_map_only(Value, tensor, (operation.args, operation.kwargs))
    made = operation.function(*args, **kwargs)
    return made if isinstance(made, (tuple, list)) else [made]


def _run(operations: Sequence[Operation], start: Value, x: Tensor, end: Value, tensor: Tensors) -> Tensor:
    """What operations make of tensors in place of ``start``, which are stacked in front; shape ``(n, *shape)``."""

    def each(x: Tensor) -> Tensor:
        return _repeat_all(operations, start, x, tensor)[end]

    return torch.vmap(each)(_laid_out(x, start)) if operations else x


def _repeat_all(operations: Iterable[Operation], start: Value, x: Tensor, tensor: Tensors) -> dict[Value, Tensor]:
    """By value, what operations make in their order if ``start`` is x and all else is as ``tensor`` has it."""
    made = {start: x}
    for operation in operations:
        results = repeat(operation, lambda value: made[value] if value in made else tensor(value))
        pairs = zip(operation.outputs, results, strict=True)
        made.update({y: x for y, x in pairs if y is not None and isinstance(x, Tensor)})
    return made


def _laid_out(x: Tensor, value: Value) -> Tensor:
    """Stacked tensors, each with its dimensions in the order in memory that recorded views rely on."""
    strides = value.tensor.stride()
    order = [0, *(1 + dim for dim in sorted(range(value.rank), key=lambda dim: -strides[dim]))]
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


def _taken(operations: Sequence[Operation], start: Value) -> list[Value]:
    """What operations take from elsewhere than from ``start`` and from one another."""
    inside = {start, *(x for operation in operations for x in operation.made)}
    return [x for operation in operations for x in operation.inputs if x not in inside]


@dataclass(frozen=True, eq=False)
class Attention:
    """Where values are averaged by the agreement of queries and keys."""

    read: tuple[Value, ...]  # queries, keys, values
    output: Value


class Streams:
    """The streams of a network, their writers, and what reads them.

    A sum is one of a stream if a summand is computed by a product with weights from another summand, or from a sum of
    some. All sums of one tensor after the other are one stream. A norm behind a sum that the next sum starts with, as
    in BERT, reads the one stream and is a writer of the next.

    Attributes:
        readings: by operation, or by output of the network that is a sum of a stream.
        writes: what is added to the streams, in the order of the operations.
        edges: names of writer and reader, in the order of the readings.
        modules: by name of a writer or reader, the path of a module.
        steps: the operations that a run needs, without what the readings do themselves.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        analysis = analyse(recording, {})
        self._running, self._weights = set(analysis.solution.running), weights_of(analysis.maps)
        self._products = {product.operation: product for product in analysis.maps.products}
        self.makers = {value: x for x in recording.operations for value in x.made}
        self._sums = self._find_sums()
        self._members = set(self._sums).union(*self._sums.values())
        # What an operation is computed from, back to streams, and to products and outputs as well.
        self._far, self._near = dict[Operation, set[Value]](), dict[Operation, set[Value]]()
        for operation in recording.operations:
            for found, is_end in ((self._far, self._members.__contains__), (self._near, self._ends)):
                passed = [self.makers[x] for x in operation.inputs if x in self.makers and not is_end(x)]
                found[operation] = set(operation.inputs).union(*(found[maker] for maker in passed))
        self._attentions = list(self._find_attentions())
        self.edges = list[tuple[str, str]]()
        self.modules = dict[str, str]()
        self._bases = dict[Value, str]()  # by summand, the name of its writer, or of its attention
        made = [x for operation in recording.operations for x in operation.made]
        members = [*(self._members - self.makers.keys()), *(x for x in made if x in self._members)]
        self.writes = {value: self._write(value) for value in members if value not in self._sums}
        self.readings = dict[Operation | Value, Reading]()
        self._first = dict[tuple[str, Value], int]()  # the first edge of a reader
        self._read()
        self.steps = self._find_steps()
        self.width = next(iter(self._sums)).shape[-1]

    # ------------------------------------------------------------ the graph of operations

    def _ends(self, value: Value) -> bool:
        """Whether a value is that of a stream, an output, or made by a product."""
        return value in self._members or value.is_output or self.makers.get(value) in self._products

    def _last_products(self, value: Value) -> list[Operation]:
        """The products that a value is computed by, with no other behind them."""
        maker = self.makers.get(value)
        if maker is None or maker in self._products:
            return [] if maker is None else [maker]
        ends = [x for x in self._near[maker] - self._members if self._ends(x)]
        return list({product for x in ends for product in self._last_products(x)})

    def _between(self, start: Value, operation: Operation) -> tuple[Operation, ...]:
        """The operations by which another one depends on a value, without products, and that one."""
        front = {self.makers[x] for x in self._near[operation] if x in self.makers and not self._ends(x)}
        return (*(x for x in self._near if x in front and start in self._near[x]), operation)

    def _from(self, start: Value, end: Value) -> tuple[Operation, ...]:
        """The operations by which one value depends on another, without products between them."""
        return () if start is end else self._between(start, self.makers[end])

    # ------------------------------------------------------------ streams

    def _find_sums(self) -> dict[Value, list[Value]]:
        """The sums of streams, with their summands."""
        sums, parts = dict[Value, list[Value]](), dict[Value, set[Value]]()  # parts: summands, and sums of some
        operations = {x.output: x for x in self.recording.operations if _is_sum(x)}
        for total, operation in operations.items():
            sums[total] = [leaf for x in operation.inputs for leaf in sums.get(x, [x])]
            parts[total] = set(operation.inputs).union(*(parts.get(x, ()) for x in operation.inputs))
        candidates = set[Value]().union(*parts.values())
        plain, deep = defaultdict[Value, set[Value]](set), defaultdict[Value, set[Value]](set)
        for operation in self.recording.operations:
            read = candidates.intersection(operation.inputs).union(*(plain[x] for x in operation.inputs))
            by_weights = read if self._weights.get(operation) else set[Value]()
            far = by_weights.union(*(deep[x] for x in operation.inputs))
            # A mask that is added to the scores of each layer is read by products without weights, and no stream.
            is_bare = operation in self._products and not self._weights.get(operation)
            for x in operation.made:
                plain[x], deep[x] = set() if is_bare else read, far
        streams = [x for x, leaves in sums.items() if any(parts[x].intersection(deep[leaf]) for leaf in leaves)]
        if not streams:
            raise ValueError(
                f"Expected a network with a residual stream, x + block(x), but no sum in "
                f"{type(self.recording.network).__name__} has a summand that is computed from the other; gate its "
                "units by insert_gates."
            )
        inside = set(streams).union(*(parts[x] for x in streams))
        found = {total: leaves for total, leaves in sums.items() if total in inside}
        for total, leaves in found.items():
            path = operations[total].path or "the network"
            if operations[total].function is _ADD_IN_PLACE:
                raise ValueError(
                    f"Expected sums that make a new tensor, but {path!r} adds to its residual stream in place; write "
                    "x = x + y instead of x += y."
                )
            if len(set(leaves)) < len(leaves):
                raise ValueError(
                    f"Expected sums of different tensors, but one in {path!r} has a tensor twice; multiply it by 2 "
                    "before it is added."
                )
        return found

    def _find_attentions(self) -> Iterator[Attention]:
        for operation, product in self._products.items():
            if self._weights.get(operation):
                continue
            if product.is_attention:
                yield Attention(tuple(map(operation.value, ("query", "key", "value"))), operation.output)
                continue
            for weights, value in zip(product.factors, product.factors[::-1], strict=True):
                found = self._last_products(weights)
                if len(found) == 1 and not self._weights.get(found[0]):
                    yield Attention((*self._products[found[0]].factors, value), operation.output)

    # ------------------------------------------------------------ writers

    def _write(self, value: Value) -> Write:
        """What a summand is, with a name; the heads of an attention are writers if the summand is their sum."""
        maker = self.makers.get(value)
        front = {value} if maker is None else {value, *self._far[maker]}
        attentions = [k for k, x in enumerate(self._attentions) if x.output in front]
        path = maker.path if maker is not None else ".".join(value.names[:1])
        read = front.intersection(self._members) - {value}
        if attentions:
            base = f"a{attentions[-1]}"
        elif read and any(self._weights.get(self.makers[x]) for x in front - read if x in self.makers):
            base = f"m{sum(x.startswith('m') and x[1:].isdigit() for x in self._bases.values())}"
        else:
            base = path or "input"
        same = [x for x in self._bases.values() if x.partition("#")[0] == base]
        self._bases[value] = base = f"{base}#{len(same) + 1}" if same else base
        write = self._heads(value, base, self._attentions[attentions[-1]]) if attentions else None
        write = write or Write(value, (base,))
        self.modules |= dict.fromkeys(write.writers, path)
        return write

    def _heads(self, value: Value, base: str, attention: Attention) -> Write | None:
        """The heads as writers, if a summand is a sum over them by an output projection, and what no head changes."""
        products, output = self._last_products(value), attention.output
        dense = self._dense(products[0]) if len(products) == 1 else None
        if dense is None or self._last_products(dense.x) != [self.makers[output]]:
            return None
        noise, of_head = _noise(output), self._by_head(output)
        others = torch.stack([noise, *(noise.where(of_head != h, 0.0) for h in of_head.unique())])
        whole, *without = _run(self._from(output, dense.x), output, others, dense.x, _recorded)
        changed = torch.stack([(x != whole).flatten(0, -2).any(0) for x in without])
        if not bool((changed.sum(0) == 1).all()):
            return None
        entries = tuple(x.nonzero()[:, 0] for x in changed)
        y = dense.operation.output
        write = Write(value, tuple(f"{base}.h{h}" for h in range(len(entries))), dense, entries, self._from(y, value))
        constant = _run(write.behind, y, dense.parts(_recorded)[1].expand(1, *y.shape), value, _recorded)[0]
        total = write.contributions(_recorded(dense.x), _recorded).sum(0) + constant
        return write if is_close(total, _recorded(value)) else None

    def _by_head(self, value: Value) -> Tensor:
        """The head of each entry, of shape ``(batch, heads, tokens, n)`` or ``(batch * heads, tokens, n)``."""
        front = value.shape[:-2]
        batch = front[0] if len(front) > 1 else self.recording.calls[0].inputs[0].shape[0]
        heads = math.prod(front) // batch or 1
        return (torch.arange(math.prod(front), device=value.tensor.device) % heads).reshape(*front, 1, 1)

    def _dense(self, operation: Operation) -> Dense | None:
        """The operation as a product of one tensor with a matrix; None if it makes something else of other inputs."""
        weights = [*self._weights.get(operation, {})]
        others = [x for x in self._products[operation].factors if x not in weights]
        if len(weights) != 1 or len(others) != 1 or weights[0].rank != 2 or not others[0].rank:
            return None
        (weight,), (x,), noise = weights, others, _noise(others[0])
        (y,) = repeat(operation, lambda value: noise if value is x else _recorded(value))
        for dim in (0, 1):
            if (weight.shape[dim], weight.shape[1 - dim]) == (operation.output.shape[-1], x.shape[-1]):
                dense = Dense(operation, x, weight, dim)
                if isinstance(y, Tensor) and is_close(F.linear(noise, *dense.parts(_recorded)), y):
                    return dense
        return None

    # ------------------------------------------------------------ readers

    def _read(self) -> None:
        """Find what reads a sum, or a tensor that a stream starts with."""
        for operation in self._near:
            is_end = any(map(self._ends, operation.made)) and self._sums.keys().isdisjoint(operation.made)
            streams = self._members & self._near[operation] if is_end and operation in self._running else set()
            if len(streams) > 1:
                raise ValueError(
                    f"Expected operations that read one sum of a residual stream, but {operation.location} reads two; "
                    "leave what joins them out of the network that you gate."
                )
            for stream in streams:
                self.readings[operation] = self._reading(stream, operation, self._readers(operation))
        for output in self.recording.calls[0].outputs:
            if output in self._members:
                self.readings[output] = self._reading(output, None, [("output", None)])

    def _reading(self, stream: Value, operation: Operation | None, readers: _Readers) -> Reading:
        writes = tuple(self.writes[x] for x in self._sums.get(stream, [stream]))
        writers, rows = [x for write in writes for x in write.writers], []
        for name, _ in readers:
            taken = {x for x, of in self._first if of is not stream}
            name = f"{name}#{1 + sum(x.partition('#')[0] == name for x in taken)}" if name in taken else name
            if (name, stream) not in self._first:
                self._first[name, stream] = len(self.edges)
                self.edges += [(writer, name) for writer in writers]
                self.modules.setdefault(name, operation.path if operation is not None else "")
            rows.append(self._first[name, stream] + torch.arange(len(writers)))
        operations = () if operation is None else self._between(stream, operation)
        entries = tuple(x for _, x in readers if x is not None)
        dense = self._dense(operation) if operation is not None and entries else None
        return Reading(stream, writes, operations, dense, entries, torch.stack(rows))

    def _readers(self, operation: Operation) -> _Readers:
        """The names of an operation's readers, and the entries of its output that are theirs, or None for all."""
        found = dict[tuple[int, ...], list[tuple[str, int, str]]]()
        for k, attention in enumerate(self._attentions) if self._weights.get(operation) else ():
            for letter, slot in zip("qkv", attention.read, strict=True):
                queries, number = (len(self._by_head(x).unique()) for x in (attention.read[0], slot))
                for h, entries in enumerate(self._entries(operation, slot)):
                    shared = range(h * queries // number, (h + 1) * queries // number)
                    uses = [(f"a{k}", head, letter) for head in shared]
                    found.setdefault(entries, []).extend(uses)
        every = [x for entries in found for x in entries]
        if len(every) > len(set(every)):
            raise ValueError(
                f"Expected queries, keys and values of each head to have entries of their own, but heads share some of "
                f"{operation.location}; gate the heads by gate_heads instead."
            )
        readers: _Readers = []
        for entries, uses in found.items():
            heads = sorted({head for _, head, _ in uses})
            span = f"{heads[0]}-{heads[-1]}" if len(heads) > 1 else f"{heads[0]}"
            letters = "".join(dict.fromkeys(letter for *_, letter in uses))
            readers.append((f"{uses[0][0]}.h{span}<{letters}>", torch.tensor(entries)))
        rest = sorted(set(range(operation.output.shape[-1])) - set(every))
        return readers + ([(self._block(operation.output), torch.tensor(rest) if found else None)] if rest else [])

    def _entries(self, operation: Operation, slot: Value) -> list[tuple[int, ...]]:
        """By head of an attention, the entries of a projection's output of which its queries (or others) are made."""
        y, maker = operation.output, self.makers.get(slot)
        if slot is not y and (maker is None or y not in self._near[maker]):
            return []
        with torch.enable_grad():
            x = _noise(y).requires_grad_()
            made = _run(self._from(y, slot), y, x[None], slot, _recorded)[0]
            each = [_noise(slot) * (self._by_head(slot) == h) for h in self._by_head(slot).unique()]
            slopes = [torch.autograd.grad(made, x, one, retain_graph=True)[0] for one in each]
        return [tuple(slope.flatten(0, -2).any(0).nonzero()[:, 0].tolist()) for slope in slopes]

    def _block(self, y: Value) -> str:
        """The name of a block by what it writes: itself, or behind it the first summand of a stream or an output."""
        written = (x for x in self._bases if x in self.makers)
        return next((self._bases[x] for x in written if x is y or y in self._far[self.makers[x]]), "output")

    # ------------------------------------------------------------ what has to run

    def _find_steps(self) -> list[Step]:
        """What a run consists of; an error if an operation reads a stream without a reading."""
        outputs = self.recording.calls[0].outputs
        needed = {*outputs, *(x for y in outputs if y in self.readings for x in self.readings[y].inputs)}
        steps = list[Step]()
        for operation in reversed(self.recording.operations):
            if operation.made and needed.isdisjoint(operation.made):
                continue
            reading = self.readings.get(operation)
            inputs = {*(operation.inputs if reading is None else reading.inputs)}
            is_read = reading is not None or any(x in self._sums for x in operation.made)
            if not is_read and not self._members.isdisjoint(operation.inputs):
                raise ValueError(
                    f"Expected a network whose residual stream is read by products with weights, but "
                    f"{operation.location} reads it, and its result is used elsewhere or chooses between branches; "
                    "leave that out of the network that you gate."
                )
            steps.append(Step(operation, reading, [x for x in inputs - needed if x in self.makers]))
            needed |= inputs
        return steps[::-1]


def _is_sum(operation: Operation) -> bool:
    """Whether an operation adds two tensors, as they are."""
    is_add = operation.function in (_ADD, _ADD_IN_PLACE) and len(set(operation.inputs)) == 2
    return is_add and operation.arguments.get("alpha", 1) == 1 and operation.output.dtype.is_floating_point


def _noise(value: Value) -> Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.tensor)


def _recorded(value: Value) -> Tensor:
    return value.tensor.detach()


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal but for rounding."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()), equal_nan=True)
