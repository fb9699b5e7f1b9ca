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
from pyro_l0.nn.engine.maps import Link, Read
from pyro_l0.nn.engine.readers import weights_of
from pyro_l0.nn.engine.record import WRITE, Operation, Recording, Value

__all__ = ["Dense", "Reading", "Streams", "Tensors", "Write", "is_close", "repeat"]

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
Tensors = Callable[[Value], Tensor]
_Readers = list[tuple[str, Tensor | None]]  # names, and entries of an operation's output


@dataclass(frozen=True, eq=False)
class Dense:
    """A product with a matrix: each entry of the last dimension of ``y`` is a weighted sum over that of ``x``."""

    operation: Operation
    x: Value
    weight: Value
    dim: int  # of the weight, with the entries of y

    def matrix(self, tensor: Tensors) -> Tensor:
        """The weights, shape ``(entries of y, entries of x)``."""
        return tensor(self.weight).movedim(self.dim, 0)

    def bias(self, tensor: Tensors) -> Tensor:
        """What it adds, shape ``(entries of y,)``."""
        zero = tensor(self.weight).new_zeros(1, self.x.shape[-1])
        (y,) = repeat(self.operation, lambda value: zero if value is self.x else tensor(value))
        assert isinstance(y, Tensor)
        return y[0]


@dataclass(frozen=True, eq=False)
class Write:
    """A tensor that is added to a stream, by one writer or by the heads of an attention.

    Attributes:
        value: the tensor.
        writers: their names.
        projection: from the heads, side by side, to the stream; None if there is one writer.
        entries: of the projection's input, for each head.
        behind: operations between the projection and the tensor.
    """

    value: Value
    writers: tuple[str, ...]
    projection: Dense | None = None
    entries: tuple[Tensor, ...] = ()
    behind: tuple[Operation, ...] = ()

    @property
    def source(self) -> Value:
        """The tensor that contributions are linear in: the input of their projection, or else the summand itself."""
        return self.value if self.projection is None else self.projection.x

    @property
    def others(self) -> list[Value]:
        """What contributions are computed from beside their source."""
        made = {self.value} if self.projection is None else {self.projection.operation.output}
        made |= {x for operation in self.behind for x in operation.made}
        weights = [] if self.projection is None else [self.projection.weight]
        return weights + [x for operation in self.behind for x in operation.inputs if x not in made]

    def contributions(self, x: Tensor, tensor: Tensors) -> Tensor:
        """What each writer adds by its source, shape ``(writers, *shape)``; the bias of a projection is no head's."""
        if self.projection is None:
            return x[None]
        matrix = self.projection.matrix(tensor)
        heads = torch.stack([x[..., entries] @ matrix[:, entries].mT for entries in self.entries])
        return run(self.behind, self.projection.operation.output, heads, self.value, tensor)


@dataclass(frozen=True, eq=False)
class Reading:
    """An operation that reads a stream, the first behind its norm, by one reader or several.

    Attributes:
        stream: the sum that is read.
        writes: whose sum that is.
        front: operations between the stream and this one.
        operation: the one that reads; None if the stream is an output of the network.
        dense: the operation, if several readers have entries of its output; then ``entries`` has these.
        edges: numbers of the edges, shape ``(readers, writers)``.
    """

    stream: Value
    writes: tuple[Write, ...]
    front: tuple[Operation, ...]
    operation: Operation | None
    dense: Dense | None
    entries: tuple[Tensor, ...]
    edges: Tensor

    @cached_property
    def inputs(self) -> list[Value]:
        """What it needs: the stream, and what its operations take from elsewhere."""
        operations = (*self.front, *([] if self.operation is None else [self.operation]))
        inside = {x for operation in operations for x in operation.made}
        inputs = [x for operation in operations for x in operation.inputs if x not in inside]
        return list(dict.fromkeys([self.stream, *inputs, *(x for write in self.writes for x in write.others)]))

    def results(self, sums: Tensor, tensor: Tensors) -> Sequence[object]:
        """What the operation makes of the sums that its readers see, shape ``(readers, *shape)``."""
        if self.operation is None:
            return [sums[0]]
        if not self.entries:
            made = repeat_all((*self.front, self.operation), self.stream, _laid_out(sums, self.stream)[0], tensor)
            return [None if x is None else made[x] for x in self.operation.outputs]
        if self.dense is None:
            y = run((*self.front, self.operation), self.stream, sums, self.operation.output, tensor)
            parts = [each[..., entries] for each, entries in zip(y, self.entries, strict=True)]
        else:  # each reader's part of the product alone
            x = run(self.front, self.stream, sums, self.dense.x, tensor)
            matrix, bias = self.dense.matrix(tensor), self.dense.bias(tensor)
            parts = [F.linear(each, matrix[own], bias[own]) for each, own in zip(x, self.entries, strict=True)]
        return [torch.cat(parts, -1)[..., torch.cat(self.entries).argsort()]]


def repeat(operation: Operation, tensor: Tensors) -> Sequence[object]:
    """Run an operation again on other tensors; its results in a list."""
    if operation.name == WRITE:
        return [tensor(value) for value in operation.inputs[: len(operation.outputs)]]
    args, kwargs = tree_map_only(Value, tensor, (operation.args, operation.kwargs))
    made = operation.function(*args, **kwargs)
    return made if isinstance(made, (tuple, list)) else [made]


def run(operations: Sequence[Operation], start: Value, x: Tensor, end: Value, tensor: Tensors) -> Tensor:
    """What operations make of tensors in place of ``start``, which are stacked in front; shape ``(n, *shape)``."""

    def each(x: Tensor) -> Tensor:
        return repeat_all(operations, start, x, tensor)[end]

    return torch.vmap(each)(_laid_out(x, start)) if operations else x


def repeat_all(operations: Iterable[Operation], start: Value, x: Tensor, tensor: Tensors) -> dict[Value, Tensor]:
    """By value, what operations make in their order if ``start`` is x and all else is as ``tensor`` has it."""
    made = {start: x}

    def own(value: Value) -> Tensor:
        return made[value] if value in made else tensor(value)

    for operation in operations:
        results = zip(operation.outputs, repeat(operation, own), strict=True)
        made.update({y: x for y, x in results if y is not None and isinstance(x, Tensor)})
    return made


def _laid_out(x: Tensor, value: Value) -> Tensor:
    """Stacked tensors, each with its dimensions in the order in memory that recorded views rely on."""
    strides = value.tensor.stride()
    order = [0, *(1 + dim for dim in sorted(range(value.rank), key=lambda dim: -strides[dim]))]
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


@dataclass(frozen=True, eq=False)
class Attention:
    """Where values are averaged by the agreement of queries and keys."""

    read: tuple[Value, ...]  # queries, keys, values
    output: Value


class Streams:
    """The streams of a network, their writers, and what reads them.

    A sum is one of a stream if a summand is computed from an earlier part of it by a product with weights. All sums of
    one tensor after the other are one stream. A norm behind a sum that the next sum starts with, as in BERT, reads the
    one stream and is a writer of the next.

    Attributes:
        readings: by operation, or by output of the network that is a sum of a stream.
        writes: what is added to the streams, in the order of the operations.
        edges: names of writer and reader, in the order of the readings.
        operations: those that a run needs, without what the readings do themselves.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        analysis = analyse(recording, {})
        maps, self._running = analysis.maps, set(analysis.solution.running)
        self._maps, self._weights = maps, weights_of(maps)
        self._products = {product.operation: product for product in maps.products}
        self.makers = {value: x for x in recording.operations for value in x.made}
        self._order = {x: number for number, x in enumerate(recording.operations)}
        self._users = defaultdict[Value, list[Operation]](list)
        for operation in recording.operations:
            for value in dict.fromkeys(operation.inputs):
                self._users[value].append(operation)
        self._leaves = dict[Value, list[Value]]()  # of a stream's sums, by sum
        self._find_sums()
        self._members = set(self._leaves).union(*self._leaves.values())
        self._attentions = list(self._find_attentions())
        self.edges = list[tuple[str, str]]()
        self.modules = dict[str, str]()  # by name of a writer or reader, the path of a module
        self._bases = dict[Value, str]()
        self.writes = {value: self._write(value) for value in self._in_order(self._members - self._leaves.keys())}
        self.readings = dict[Operation | Value, Reading]()  # by operation, or output of the network
        self._first = dict[tuple[str, Value], int]()  # the first edge of a reader
        for value in self._in_order(self._members):
            self._read(value)
        self.operations = self._needed()
        self.width = next(iter(self._leaves)).shape[-1]

    # ------------------------------------------------------------ the graph of operations

    def _in_order(self, values: Iterable[Value]) -> list[Value]:
        return sorted(values, key=lambda x: self._order[self.makers[x]] if x in self.makers else -1)

    def _behind(self, value: Value, is_end: Callable[[Operation], bool]) -> Iterator[Operation]:
        """The operations that depend on a value, up to those that are an end, and to streams."""
        todo, seen = list(self._users[value]), set[Operation]()
        while todo:
            operation = todo.pop()
            if operation in seen or not self._leaves.keys().isdisjoint(operation.made):
                continue
            seen.add(operation)
            yield operation
            if not is_end(operation):
                todo += [user for x in operation.made if x not in self._members for user in self._users[x]]

    def _in_front(self, values: Iterable[Value], is_end: Callable[[Operation], bool]) -> Iterator[Operation]:
        """The operations that values depend on, back to those that are an end, and to streams."""
        todo, seen = [(x, True) for x in values], set[Operation]()
        while todo:
            x, is_first = todo.pop()
            operation = self.makers.get(x)
            if operation is None or operation in seen or (x in self._members and not is_first):
                continue
            seen.add(operation)
            yield operation
            if not is_end(operation):
                todo += [(y, False) for y in operation.inputs]

    def _between(self, start: Value, operation: Operation) -> tuple[Operation, ...]:
        """The operations by which another one depends on a value, without products."""
        inputs = [x for x in operation.inputs if x is not start and x not in self._members]
        front = set(self._in_front(inputs, self._is_product))
        found = front.intersection(self._behind(start, self._is_end))
        return tuple(sorted((x for x in found if not self._is_end(x)), key=self._order.__getitem__))

    def _from(self, start: Value, end: Value) -> tuple[Operation, ...]:
        """The operations by which one value depends on another, without products between them."""
        return () if start is end else (*self._between(start, self.makers[end]), self.makers[end])

    def _is_product(self, operation: Operation) -> bool:
        return operation in self._products

    # ------------------------------------------------------------ streams

    def _find_sums(self) -> None:
        """Find which sums belong to one stream, and the summands that no sum made."""
        leaves, group = dict[Value, list[Value]](), dict[Value, Value]()  # a group goes by its first sum
        sums = [x for x in self.recording.operations if _is_sum(x)]
        for operation in sums:
            terms = [leaves.get(x, [x]) for x in operation.inputs]
            leaves[operation.output] = [leaf for found in terms for leaf in found]
            first = [group[x] for x in operation.inputs if x in group]
            group[operation.output] = first[0] if first else operation.output
            for other in first[1:]:
                group |= {x: first[0] for x, y in group.items() if y is other}
        members = defaultdict[Value, set[Value]](set)  # the groups of a sum, or of a summand
        for total, found in leaves.items():
            for x in (total, *found):
                members[x].add(group[total])
        plain, deep = defaultdict[Value, set[Value]](set), defaultdict[Value, set[Value]](set)
        for operation in self.recording.operations:
            read = set().union(*(plain[x] | members[x] for x in operation.inputs))
            far = set().union(*(deep[x] for x in operation.inputs), read if self._weights.get(operation) else ())
            # A mask that is added to the scores of each layer is read by products without weights, and no stream.
            is_bare = self._is_product(operation) and not self._weights.get(operation)
            for x in operation.made:
                plain[x], deep[x] = set() if is_bare else read, far
        streams = {group[total] for total, found in leaves.items() if any(group[total] in deep[x] for x in found)}
        self._leaves = {total: found for total, found in leaves.items() if group[total] in streams}
        if not streams:
            raise ValueError(
                f"Expected a network with a residual stream, x + block(x), but no sum in {_name(self.recording)} has a "
                "summand that is computed from the other; gate its units by insert_gates."
            )
        for operation in sums:
            if operation.function is _ADD_IN_PLACE and operation.output in self._leaves:
                raise ValueError(
                    f"Expected sums that make a new tensor, but {operation.path or 'the network'!r} adds to its "
                    "residual stream in place; write x = x + y instead of x += y."
                )

    def _find_attentions(self) -> Iterator[Attention]:
        for operation in self.recording.operations:
            product = self._products.get(operation)
            if product is None or self._weights.get(operation):
                continue
            if product.is_attention:
                yield Attention(tuple(map(operation.value, ("query", "key", "value"))), operation.output)
                continue
            for weights, value in zip(product.factors, product.factors[::-1], strict=True):
                found = [x for x in self._in_front([weights], self._is_product) if self._is_product(x)]
                if len(found) == 1 and not self._weights.get(found[0]):
                    yield Attention((*self._products[found[0]].factors, value), operation.output)

    # ------------------------------------------------------------ writers

    def _write(self, value: Value) -> Write:
        """What a summand is, with a name; the heads of an attention are writers if the summand is their sum."""
        front = set(self._in_front([value], lambda x: False))
        attentions = [k for k, x in enumerate(self._attentions) if self.makers[x.output] in front]
        maker = self.makers.get(value)
        path = maker.path if maker is not None else ".".join(value.names[:1])
        if attentions:
            base = f"a{attentions[-1]}"
        elif any(map(self._weights.get, front)) and any(not self._members.isdisjoint(x.inputs) for x in front):
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
        products = [x for x in self._in_front([value], self._is_product) if self._is_product(x)]
        dense = self._dense(products[0]) if len(products) == 1 else None
        if dense is None:
            return None
        read = [x for x in self._in_front([dense.x], self._is_product) if self._is_product(x)]
        if read != [self.makers[attention.output]]:
            return None
        front, output = self._between(attention.output, dense.operation), attention.output
        noise, of_head = _noise(output), self._by_head(output)
        others = torch.stack([noise, *(noise.where(of_head != h, 0.0) for h in range(self._heads_of(output)))])
        whole, *without = run(front, output, others, dense.x, _recorded)
        changed = torch.stack([(x != whole).flatten(0, -2).any(0) for x in without])
        if not bool((changed.sum(0) == 1).all()):
            return None
        entries = tuple(x.nonzero()[:, 0] for x in changed)
        y = dense.operation.output
        write = Write(value, tuple(f"{base}.h{h}" for h in range(len(entries))), dense, entries, self._from(y, value))
        constant = run(write.behind, y, dense.bias(_recorded).expand(1, *y.shape), value, _recorded)[0]
        total = write.contributions(_recorded(dense.x), _recorded).sum(0) + constant
        return write if is_close(total, _recorded(value)) else None

    def _heads_of(self, value: Value) -> int:
        """The heads of a tensor of shape ``(batch, heads, tokens, n)`` or ``(batch * heads, tokens, n)``."""
        front = value.shape[:-2]
        return math.prod(front) // (front[0] if len(front) > 1 else self.recording.calls[0].inputs[0].shape[0]) or 1

    def _by_head(self, value: Value) -> Tensor:
        """The number of the head at each entry of a tensor's leading dimensions, shaped to broadcast against it."""
        front = value.shape[:-2]
        heads = torch.arange(math.prod(front), device=value.tensor.device) % self._heads_of(value)
        return heads.reshape(*front, 1, 1)

    def _dense(self, operation: Operation) -> Dense | None:
        """The operation as a product of a tensor with one weight matrix; None if it is another kind."""
        weights = list(self._weights.get(operation, ()))
        others = [x for x in self._products[operation].factors if x not in weights]
        if len(weights) != 1 or len(others) != 1 or weights[0].rank != 2 or not others[0].rank:
            return None
        axes = self._maps.axes
        (weight,), (x,), y = weights, others, axes[operation.output][-1]
        relations = self._maps.relations[operation]
        linked = [
            axes[weight].index(r.source)
            for r in relations
            if isinstance(r, Link) and r.target is y and r.source in axes[weight]
        ]
        summed = [r for r in relations if isinstance(r, Read) and axes[x][-1] in r.axes]
        return Dense(operation, x, weight, linked[0]) if len(linked) == 1 and summed else None

    # ------------------------------------------------------------ readers

    def _read(self, stream: Value) -> None:
        """Find what reads a sum, or a tensor that a stream starts with."""
        leaves = self._leaves.get(stream, [stream])
        if len(set(leaves)) < len(leaves):
            raise ValueError(
                f"Expected sums of different tensors, but one in {self.makers[stream].path or 'the network'!r} has a "
                "tensor twice; multiply it by 2 before it is added."
            )
        writes = tuple(self.writes[x] for x in leaves)
        if stream.is_output:
            self.readings[stream] = self._reading(stream, writes, None, [("output", None)])
        for operation in sorted(self._behind(stream, self._is_end), key=self._order.__getitem__):
            if not self._is_end(operation) or operation not in self._running:
                continue
            if operation in self.readings:
                raise ValueError(
                    f"Expected operations that read one sum of a residual stream, but {operation.location} reads two; "
                    "leave what joins them out of the network that you gate."
                )
            readers = self._readers(operation)
            self.readings[operation] = self._reading(stream, writes, operation, readers)

    def _is_end(self, operation: Operation) -> bool:
        """Whether an operation reads a stream: a product, or what makes an output or the start of another stream."""
        return self._is_product(operation) or any(x.is_output or x in self._members for x in operation.made)

    def _reading(
        self, stream: Value, writes: tuple[Write, ...], operation: Operation | None, readers: _Readers
    ) -> Reading:
        writers, rows = [x for write in writes for x in write.writers], []
        for name, _ in readers:
            taken = {x for x, of in self._first if of is not stream}
            name = f"{name}#{1 + sum(x.partition('#')[0] == name for x in taken)}" if name in taken else name
            if (name, stream) not in self._first:
                self._first[name, stream] = len(self.edges)
                self.edges += [(writer, name) for writer in writers]
                self.modules.setdefault(name, operation.path if operation is not None else "")
            rows.append(self._first[name, stream] + torch.arange(len(writers)))
        front = () if operation is None else self._between(stream, operation)
        entries = tuple(x for _, x in readers if x is not None)
        dense = self._dense(operation) if operation is not None and entries else None
        return Reading(stream, writes, front, operation, dense, entries, torch.stack(rows))

    def _readers(self, operation: Operation) -> _Readers:
        """The names of an operation's readers, and the entries of its output that are theirs, or None for all."""
        found = dict[tuple[int, ...], list[tuple[str, int, str]]]()
        for k, attention in enumerate(self._attentions) if self._weights.get(operation) else ():
            of_each = [self._entries(operation, slot) for slot in attention.read]
            shared = [self._heads_of(attention.read[0]) // self._heads_of(slot) for slot in attention.read]
            for letter, each, number in zip("qkv", of_each, shared, strict=True):
                for h, entries in enumerate(each):
                    uses = [(f"a{k}", head, letter) for head in range(h * number, (h + 1) * number)]
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
        return readers + ([(self._block(operation), torch.tensor(rest) if found else None)] if rest else [])

    def _entries(self, operation: Operation, slot: Value) -> list[tuple[int, ...]]:
        """By head of an attention, the entries of a projection's output of which its queries (or others) are made."""
        y = operation.output
        if slot is not y and self.makers.get(slot) not in set(self._behind(y, self._is_product)):
            return []
        with torch.enable_grad():
            x = _noise(y).requires_grad_()
            made = run(self._from(y, slot), y, x[None], slot, _recorded)[0]
            each = [_noise(slot) * (self._by_head(slot) == h) for h in range(self._heads_of(slot))]
            slopes = [torch.autograd.grad(made, x, one, retain_graph=True)[0] for one in each]
        return [tuple(slope.flatten(0, -2).any(0).nonzero()[:, 0].tolist()) for slope in slopes]

    def _block(self, operation: Operation) -> str:
        """The name of a block by what it writes: itself, or behind it the first summand of a stream or an output."""
        behind = sorted(self._behind(operation.output, lambda x: False), key=self._order.__getitem__)
        written = [x for o in (operation, *behind) for x in o.made if x in self._bases]
        return self._bases[written[0]] if written else "output"

    # ------------------------------------------------------------ what has to run

    def _needed(self) -> tuple[Operation, ...]:
        """The operations of a run; an error if one of them reads a stream without a reading."""
        needed = {x for call in self.recording.calls for x in call.outputs}
        kept = list[Operation]()
        for operation in reversed(self.recording.operations):
            if operation.made and needed.isdisjoint(operation.made):
                continue
            kept.append(operation)
            reading = self.readings.get(operation)
            needed |= {*(operation.inputs if reading is None else reading.inputs)}
            is_read = reading is not None or any(x in self._leaves for x in operation.made)
            if not is_read and not self._members.isdisjoint(operation.inputs):
                raise ValueError(
                    f"Expected a network whose residual stream is read by products with weights, but "
                    f"{operation.location} reads it, and its result is used elsewhere or chooses between branches; "
                    "leave that out of the network that you gate."
                )
        return tuple(reversed(kept))


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


def _name(recording: Recording) -> str:
    return type(recording.network).__name__
