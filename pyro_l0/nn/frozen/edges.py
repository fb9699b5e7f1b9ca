"""Gates on the edges between what writes to a network's residual streams and what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from pyro_l0.nn.calls import record_example, refuse_wrapped
from pyro_l0.nn.engine.record import Example, Value, calls_of, example_of
from pyro_l0.nn.frozen.benchmark import graph
from pyro_l0.nn.frozen.streams import Reading, Streams, Tensors, Write, is_close, repeat
from pyro_l0.nn.gate import check_given, gate_names
from pyro_l0.nn.l0_gate import L0Gate

if TYPE_CHECKING:
    import pandas as pd  # an extra

__all__ = ["NetworkEdges", "gate_edges"]

_Args = tuple[object, ...]
_Kwargs = dict[str, Any]
_Made = TypeVar("_Made")


def gate_edges(network: nn.Module, example: Example, corrupted: Example | None = None) -> NetworkEdges:
    r"""Put a gate on each edge between what writes to a network's residual streams and what reads them.

    A writer is what is added to a stream: an embedding, a head of attention, another block. A reader is what reads it:
    queries, keys and values of a head, another block, the output. Reader r sees the stream x of what wrote before it as

    .. math:: x + \sum_w (z_{rw} - 1) (c_w - \tilde c_w),

    where c are the writers' contributions and :math:`\tilde c` those at a corrupted input, or 0. Norms in front of a
    reader act on what it sees. So open edges leave the network as it is, and closing one is path patching.

    Streams are found in what the network computes at the example, in evaluation mode and thus without dropout: a
    stream is a sum with a summand that products with weights compute from an earlier part of the sum. Writers and
    readers are named after layers and heads, ``"a0.h1"`` and ``"a0.h1<q>"``, feed-forward and other blocks ``"m0"``;
    what writes without reading, and norms between two streams (in BERT), after their modules. The output is
    ``"output"``. Heads that share keys or values have one reader of these, ``"a0.h0-1<k>"``. Where a norm is behind the
    sum over heads, as in Gemma 2, the attention is one writer. Biases of output projections always pass.

    All gates are one site, ``"edges"``: ``SparsityTarget(NetworkGates(edges), 0.1, lambda z: z["edges"].sum(),
    steps=1000, pretrained=True)`` leaves a tenth of the edges open, and several budgets are met in one run. Weights
    with gradients train as well; ``network.requires_grad_(False)`` saves that. Readings run again in the backward pass,
    so that a step needs about one and a half times the network's memory.

    In a network that saturates, such as one of hard attention, an edge can be needed although slopes by its gate are
    nearly always 0. There draw gates of 0 and 1 for each example, ``edges.gate.distribution.sample((n,)) != 0``, and
    minimise their log probabilities, each times the example's loss less the mean loss.

    Args:
        network: any network of batch-first tensors with a residual stream; it is neither changed nor copied.
        example: what it is called with, once, as for :func:`~pyro_l0.nn.insert_gates`. Calls of other sizes are
            recorded when they come, as are those for which the network's code takes another branch.
        corrupted: an input at which closed edges take contributions, until :meth:`NetworkEdges.corrupt` gives another.

    Returns:
        A module that is called as the network is, and returns its tensors.

    Raises:
        ValueError: the network has no residual stream, has gates, adds to a stream in place, branches on what it
            computes from one, or draws random numbers in evaluation mode; an operation reads two sums; heads share
            entries of a projection; or the example is of several calls.
        TypeError: ``network`` is not a module, or one of ``torch.compile`` or of data parallelism.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.inner = nn.Linear(2, 2)
        ...
        ...     def forward(self, x):
        ...         return x + self.inner(x).relu()
        >>> network = nn.Sequential(nn.Linear(3, 2), Block(), nn.Linear(2, 1))
        >>> gate_edges(network, torch.ones(1, 3)).edges
        [('0', 'm0'), ('0', 'output'), ('m0', 'output')]

    References:
        Bhaskar, Wettig, Friedman, Chen (2024), arXiv:2406.16778, section 3, with contributions at a corrupted input;
        Goldowsky-Dill et al. (2023), arXiv:2304.05969, for path patching.
    """
    check_given(network)
    refuse_wrapped(network)
    if gates := gate_names(network):
        raise ValueError(f"Expected a network without gates, but it has {next(iter(gates))!r}; gate its edges first.")
    calls = [calls_of(example_of(x, network)) for x in (example, corrupted) if x is not None]
    if any(len(call) != 1 for call in calls):
        raise ValueError(f"Expected an example of one call, but got {max(map(len, calls))}; give one of them.")
    edges = NetworkEdges(network, *calls[0][0])
    if corrupted is not None:
        args, kwargs = calls[1][0]
        edges.corrupt(*args, **kwargs)
    return edges


class NetworkEdges(nn.Module):
    """A network with a gate on each edge, as :func:`~pyro_l0.nn.gate_edges` makes it.

    Attributes:
        network: the network itself.
        gate: its gates, an :class:`~pyro_l0.nn.L0Gate` of the site ``"edges"``.
        edges: names of writer and reader, in the order of the gates.
        modules_of: by name of a writer or reader, the path of a module in it.
        width: the size of the stream's last dimension.
    """

    def __init__(self, network: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
        super().__init__()
        self.network = network
        self._plans = dict[str, _Plan]()
        self._plans[_key(args, kwargs)] = plan = self._plan(args, kwargs)
        streams = plan.streams
        self.edges = streams.edges
        self.modules_of = streams.modules
        self.width = streams.width
        device = next((x.device for x in network.parameters()), None)
        self.gate = L0Gate(len(self.edges), init_jitter=0.0).to(device)
        self.gate.site_name = "edges"
        self._corrupted: list[Tensor] | None = None
        self._shapes: list[tuple[int, ...]] | None = None  # of a corrupted input that is not averaged

    def forward(self, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        """The network's outputs with a draw of the gates, or in evaluation mode with the test gates."""
        return self.at(self.gate(), *args, **kwargs)

    def at(self, z: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        """The network's outputs with gates at given values, differentiable in these.

        Args:
            z: gates, shape ``(edges,)``, or ``(batch, edges)`` for gates of each example.
            args: what the network takes.
            kwargs: its keywords.

        Returns:
            The tensor that the network returns, or a tuple of all tensors in it, in their order.

        Raises:
            ValueError: ``z`` has another shape, the call has other edges than the example, or the corrupted input has
                other shapes.
        """
        if z.dim() not in (1, 2) or z.shape[-1] != len(self.edges):
            raise ValueError(
                f"Expected gates of shape ({len(self.edges)},) or (batch, {len(self.edges)}), but got {tuple(z.shape)}."
            )
        if self._shapes is not None and self._shapes != _shapes(args, kwargs):
            raise ValueError(
                f"Expected a call of the corrupted input's shapes, {self._shapes}, but got {_shapes(args, kwargs)}; "
                "call corrupt for inputs of these shapes first."
            )
        outputs, _ = self._run(z, args, kwargs, self._corrupted)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @torch.no_grad()
    def corrupt(self, *args: object, **kwargs: object) -> None:
        """Let closed edges pass what writers contribute at another input, of the shapes of later calls."""
        _, self._corrupted = self._run(torch.ones(len(self.edges)), args, kwargs, None)
        self._shapes = _shapes(args, kwargs)

    def corrupt_to_mean(self, *args: object, **kwargs: object) -> None:
        """Let closed edges pass the mean of what writers contribute at an input, over all dimensions but the last.

        For texts that is the mean over examples and positions; so an edge from embedded positions matters too. Later
        calls may have other shapes.
        """
        self.corrupt(*args, **kwargs)
        self._corrupted = [x.flatten(0, -2).mean(0) for x in self._corrupted or ()]
        self._shapes = None

    def _run(
        self, z: Tensor, args: _Args, kwargs: _Kwargs, corrupted: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs, and the sources of all writers; recorded anew for calls of other sizes, and for other branches."""
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        key = _key(args, kwargs)
        plan = self._plans.get(key)
        if plan is not None:
            plan.streams.recording.check(self.network)
            try:
                return plan.run(given, z, corrupted)
            except _OtherBranchError:
                pass
        plan = self._plans[key] = self._plan(args, kwargs)
        if plan.streams.edges != self.edges:
            raise ValueError(
                f"Expected calls with the {len(self.edges)} edges of the example, but this one has others; gate the "
                "edges by an example of such calls."
            )
        return plan.run(given, z, corrupted)

    def _plan(self, args: _Args, kwargs: _Kwargs) -> _Plan:
        """A plan for calls of the sizes of one, whose outputs with open edges are those of the network."""
        if args and kwargs:
            args, kwargs = (), {**dict(zip(signature(self.network.forward).parameters, args, strict=False)), **kwargs}
        return _Plan(Streams(record_example(self.network, args or kwargs)))

    def to_frame(self) -> pd.DataFrame:
        """A table with a row for each edge (needs pandas): writer and reader, their modules, gate and P(z != 0)."""
        import pandas as pd  # an extra

        names = {"writer": [x for x, _ in self.edges], "reader": [x for _, x in self.edges]}
        modules = {f"{of}_module": [self.modules_of[x] for x in column] for of, column in names.items()}
        gates = {"gate": self.gate.test_gate.tolist(), "active_prob": self.gate.active_prob.tolist()}
        return pd.DataFrame(names | modules | gates)

    def save_scores(self, path: str | Path, scores: Tensor | None = None) -> None:
        """Write scores of edges as the evaluation of the Mechanistic Interpretability Benchmark reads them, in JSON.

        What writes before the first layer is its one ``input``, with the sum of scores. An edge to keys or values that
        heads share is there for each of these heads. Edges whose test gate is not 0 are marked as in the circuit, and
        nodes that both read and write by such edges. ``Graph.from_json`` of EAP-IG at commit 795f5607 has read it.

        Args:
            path: the file, ending in ``.json``.
            scores: shape ``(edges,)``, higher for edges that are needed, such as minus the gradients of a loss by the
                gates; by default P(z != 0).

        Raises:
            ValueError: there are other readers or writers than heads and a feed-forward block in each layer, as in
                BERT, or another number of scores.

        References:
            Mueller et al. (2025), arXiv:2504.13151; the format is that of Hanna et al. (2024), arXiv:2403.17806.
        """
        scores = self.gate.active_prob if scores is None else scores
        if scores.shape != self.gate.shape:
            raise ValueError(f"Expected {len(self.edges)} scores, but got a tensor of shape {tuple(scores.shape)}.")
        Path(path).write_text(json.dumps(graph(self.edges, scores, self.gate.test_gate, self.width)))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plans": {}}  # which hold parameters and functions of torch


def _key(args: _Args, kwargs: _Kwargs) -> str:
    """What calls that run by one plan have in common."""
    return repr(tree_map(lambda x: (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x, (args, kwargs)))


def _shapes(args: _Args, kwargs: _Kwargs) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


class _OtherBranchError(Exception):
    """A number that the network's code asked for is another one than when it was recorded."""


class _Plan:
    """Runs the recorded operations of a network, in which readers see what the gates of their edges let pass."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._call = streams.recording.calls[0]
        self._sources = [write.source for write in streams.writes.values()]
        self._asked: list[object] | None = None  # what the network's code asked for
        given = [x.tensor.detach() for x in self._call.inputs]
        with torch.no_grad(), torch.random.fork_rng({x.device for x in given if x.is_cuda}):
            torch.manual_seed(torch.initial_seed() + 1)  # other random numbers than those of the recorded call
            outputs, _ = self.run(given, torch.ones(len(streams.edges)), None)
        for x, value in zip(outputs, self._call.outputs, strict=True):
            if not is_close(x, value.tensor.detach()):
                raise ValueError(
                    "Expected outputs that stay as they are while all edges are open, but they change by up to "
                    f"{float((x - value.tensor).detach().abs().max()):.1e}; leave out of the network what draws random "
                    "numbers in evaluation mode or changes its own tensors."
                )
        for value in streams.makers:  # of what was recorded only sizes and strides stay
            value.tensor = torch.empty_strided(value.shape, value.tensor.stride(), dtype=value.dtype, device="meta")

    def run(
        self, given: Sequence[Tensor], z: Tensor, corrupted: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs, and the sources of all writers less the corrupted ones."""
        values, sources, asked = dict[Value, Tensor](), dict[Value, Tensor](), list[object]()
        references = dict(zip(self._sources, corrupted or [torch.zeros(())] * len(self._sources), strict=True))

        def tensor(value: Value) -> Tensor:
            return values.get(value, value.tensor)

        def keep(made: Iterable[tuple[Value | None, Any]]) -> None:
            for value, x in made:
                if value is not None:
                    values[value] = x
                if value in references:  # a copy, as what is read may be changed in place behind it
                    sources[value] = x - references[value]

        keep((x, x.tensor) for x in self._sources if x not in self.streams.makers)
        keep(zip(self._call.inputs, given, strict=True))
        for step in self.streams.steps:
            operation, reading = step.operation, step.reading
            made = repeat(operation, tensor) if reading is None else self._read(reading, tensor, sources, z)
            if not operation.made:
                asked += made
            keep(zip(operation.outputs, made, strict=True))
            for value in step.last:
                del values[value]
        self._asked = asked if self._asked is None else self._asked
        if asked != self._asked:
            raise _OtherBranchError
        readings = [self.streams.readings.get(x) for x in self._call.outputs]
        ends = zip(self._call.outputs, readings, strict=True)
        outputs: Any = [tensor(x) if r is None else self._read(r, tensor, sources, z)[0] for x, r in ends]
        return outputs, [sources[value] for value in self._sources]

    def _read(self, reading: Reading, tensor: Tensors, sources: Mapping[Value, Tensor], z: Tensor) -> Sequence[object]:
        """What the operation of a reading makes of the sums that its readers see."""
        own = {x: tensor(x) for x in reading.inputs}
        given = [*own.values(), *(sources[x.source] for x in reading.writes)] if torch.is_grad_enabled() else []
        versions = [x._version for x in given]

        def compute() -> Sequence[object]:
            if versions != [x._version for x in given]:
                raise RuntimeError("Expected tensors as they were read, but one has been changed in place since.")
            sums, start = own[reading.stream][None], 0
            factors = (z[..., reading.edges] - 1).to(sums)
            for write in reading.writes:
                end = start + len(write.writers)
                weigh = partial(_weighted, write, sums.dim(), factors[..., start:end], sources[write.source], own)
                sums, start = sums + _again(weigh), end
            return reading.results(sums, own.__getitem__)

        return _again(compute)


def _again(compute: Callable[[], _Made]) -> _Made:
    """What a function computes, without keeping what its backward pass needs: it runs again there."""
    return cast(_Made, checkpoint(compute, use_reentrant=False, preserve_rng_state=False))


def _weighted(write: Write, rank: int, factors: Tensor, source: Tensor, others: Mapping[Value, Tensor]) -> Tensor:
    """What writers add, each with a factor, summed for each reader; shape ``(readers, *shape)``, of this rank.

    Factors have the shape ``(readers, writers)``, or with the examples in front.
    """
    x = write.contributions(source, others.__getitem__)
    x = x.reshape(len(x), *[1] * (rank - x.dim()), *x.shape[1:])
    if factors.dim() == 2:
        x = torch.tensordot(factors, x, 1)
    else:
        x = torch.einsum("brk,kb...->rb...", factors, x.expand(-1, len(factors), *x.shape[2:]))
    return x
