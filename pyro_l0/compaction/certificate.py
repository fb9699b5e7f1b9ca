"""Whether a smaller network computes the same as the one that it was made from, and has the same gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_l0.compaction.apply import Indices, cut, named_tensors
from pyro_l0.compaction.calls import (
    Arguments,
    largest,
    normal_numbers,
    random_calls,
    run,
    run_in_place,
    tensors,
    with_another_row,
    with_noise,
)
from pyro_l0.nn.engine.record import copied, keep_state

__all__ = ["Certificate", "certify", "difference", "tolerance_of"]

_TIE = 1e-10  # a larger difference of gradients is also checked beside the example
_RANDOM = 1e-6  # a difference that rounding does not make
# What rounding explains, relative to the output. Half precisions round every product with a gate.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Certificate(float):
    """The largest difference between two networks as a number, with the single differences as attributes.

    Each is relative to the largest absolute entry of its kind. A file keeps only the largest: a certificate that was
    loaded has it as ``outputs``, and None elsewhere. :func:`~pyro_l0.compaction.compact` makes it.

    Attributes:
        outputs: difference of outputs in evaluation mode, on all examples, another number of rows and random inputs.
        gradients: difference of the gradients of a random function of the outputs, in every parameter and input that
            is left; None if such parameters also made constants that were folded into biases, or if the network changes
            in place what its gradients need.
        training_outputs: difference of outputs in training mode without dropout, under one seed; None if the network
            cannot be called so, draws random numbers in the shapes of removed units, or normalises closed units by
            statistics that training would change.
        training_gradients: difference of gradients in training mode, likewise.
    """

    outputs: float
    gradients: float | None
    training_outputs: float | None
    training_gradients: float | None

    def __new__(  # noqa: D102
        cls,
        outputs: float,
        gradients: float | None = None,
        training_outputs: float | None = None,
        training_gradients: float | None = None,
    ) -> Certificate:
        found = [x for x in (outputs, gradients, training_outputs, training_gradients) if x is not None]
        self = super().__new__(cls, math.nan if any(map(math.isnan, found)) else max(found))
        self.outputs, self.gradients = outputs, gradients
        self.training_outputs, self.training_gradients = training_outputs, training_gradients
        return self

    @property
    def largest(self) -> float:
        """The certificate as a plain number."""
        return float(self)


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference between two networks of one type that rounding explains."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.get_default_dtype()])


def certify(
    reference: nn.Module,
    small: nn.Module,
    calls: Sequence[Arguments],
    indices: Indices,
    scales: Mapping[str, Tensor],
    outputs_only: bool = False,
) -> Certificate:
    """Compare a smaller network with the one that it was made from, both in float64 if they accept it.

    The gates of ``reference`` are fixed, and what ``small`` raises is passed on. By name of a parameter, ``indices``
    are what is left of it; by name of a weight, ``scales`` are the gates of its inputs (dimension 1) that went into it.
    What a caller still needs is ``small`` alone, and not even that if ``outputs_only``.
    """
    pair, calls = _doubled(reference, small if outputs_only else copied(small), calls)
    compare = _Comparison(*pair, indices, scales)
    if outputs_only:
        found = compare.outputs([with_another_row(random_calls(call)[0]) for call in calls]) or compare.outputs(calls)
        return Certificate(_relative(found))
    batches = [*map(with_another_row, calls), *(other for call in calls for other in random_calls(call))]
    outputs, gradients = compare.on(batches, calls, training=False)
    try:
        return Certificate(outputs, gradients, *compare.on([], list(map(with_another_row, calls)), training=True))
    except _NotComparableError:
        return Certificate(outputs, gradients)


class _NotComparableError(Exception):
    """The network itself can't be called so, or draws other random numbers."""


class _Comparison:
    """Outputs and gradients of two networks on the same calls."""

    def __init__(self, reference: nn.Module, small: nn.Module, indices: Indices, scales: Mapping[str, Tensor]) -> None:
        self.reference, self.small = reference, small
        self.indices, self.scales = indices, scales

    def outputs(self, batches: Sequence[Arguments]) -> list[tuple[float, float]]:
        """The difference and the largest output of each batch that the first network accepts."""
        found = []
        for call in batches:
            try:
                expected = run(self.reference, call)
            except Exception:  # random inputs or another number of rows
                continue
            apart, scale = difference(expected, run(self.small, call))
            if math.isfinite(scale):
                found.append((apart, scale))
        return found

    def on(
        self, batches: Sequence[Arguments], examples: Sequence[Arguments], training: bool
    ) -> tuple[float, float | None]:
        """The largest differences of outputs, and of gradients on the examples; batches may be none that it accepts."""
        self.reference.train(training)
        self.small.train(training)
        found: list[tuple[float, float]] = []
        gradients: float | None = 0.0
        for call in examples:
            apart, here = self._compare(call, training)
            found.append(apart)
            if here is not None and not here <= _TIE:
                here = self._off_ties(call, here)
            gradients = None if here is None or gradients is None else _worst(gradients, here)
        outputs = _relative([*found, *self.outputs(batches)])
        if training and not _worst(outputs, gradients or 0.0) <= _RANDOM and self._draws(examples):
            raise _NotComparableError
        return outputs, gradients

    def _draws(self, calls: Sequence[Arguments]) -> bool:
        """Whether the first network draws random numbers itself, perhaps in the shapes of units that were removed."""
        return any(difference(run(self.reference, call), run(self.reference, call, seed=1))[0] for call in calls)

    def _off_ties(self, call: Arguments, found: float) -> float:
        """The difference of gradients beside an example, where that is smaller.

        Where entries of a pooling window are equal, as behind an example of zeros, rounding chooses which of them the
        gradient goes to; a little noise on the example tells them apart.
        """
        try:
            _, beside = self._compare(with_noise(call))
        except Exception:  # the network accepts no such numbers
            return found
        return found if beside is None or not beside < found else beside

    def _compare(self, call: Arguments, training: bool = False) -> tuple[tuple[float, float], float | None]:
        """The difference and the largest of outputs; the relative difference of gradients, None if there are none."""
        try:
            expected, wanted = self._expected(call)
        except Exception as error:
            if training:
                raise _NotComparableError from error
            raise
        if wanted is None:
            return difference(expected, run(self.small, call)), None
        outputs, got = _outputs_and_gradients(self.small, call)
        return difference(expected, outputs), self._gradient_difference(*wanted, got)

    def _expected(self, call: Arguments) -> tuple[list[Tensor], tuple[dict[str, Tensor], float] | None]:
        """Outputs of the first network, gradients as they are cut, and their largest; code for inference has none."""
        try:
            outputs, gradients = _outputs_and_gradients(self.reference, call)
        except RuntimeError:
            return run(self.reference, call), None
        scale = max(map(largest, gradients.values()), default=0.0)
        return outputs, ({name: cut(x, self.indices.get(name, ())) for name, x in gradients.items()}, scale)

    def _gradient_difference(self, expected: Mapping[str, Tensor], scale: float, got: Mapping[str, Tensor]) -> float:
        """Relative to the largest gradient."""
        worst = 0.0
        for name, gradient in expected.items():
            other = got.get(name, torch.zeros_like(gradient))
            if other.shape != gradient.shape:
                return math.inf
            if name in self.scales:
                other = other * self.scales[name].to(other).view(1, -1, *[1] * (other.dim() - 2))
            worst = _worst(worst, largest(other - gradient))
        return worst / scale if worst and scale else math.inf if worst else 0.0


def _doubled(
    reference: nn.Module, small: nn.Module, calls: Sequence[Arguments]
) -> tuple[tuple[nn.Module, nn.Module], Sequence[Arguments]]:
    """Both networks and the calls in float64, or as they are where code of the network asks for their own type."""
    pair = _without_dropout(reference).eval(), _without_dropout(small).eval()
    own = [x.dtype for x in (*reference.parameters(), *tensors(calls)) if x.is_floating_point()]
    if all(dtype == torch.float64 for dtype in own):
        return pair, calls
    types = [{name: x.dtype for name, x in named_tensors(network)} for network in pair]
    inputs = [tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, call) for call in calls]
    for network in pair:
        network.double()
    try:
        for call in inputs:
            run(reference, call)
    except Exception:
        for network, before in zip(pair, types, strict=True):
            for name, x in named_tensors(network):
                x.data = x.data.to(before[name])
        return pair, calls
    return pair, inputs


def _without_dropout(network: nn.Module) -> nn.Module:
    """A network whose layers that call dropout inside of torch's code do so no more."""
    for module in network.modules():
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0
    return network


def _outputs_and_gradients(network: nn.Module, call: Arguments) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and gradients of a random linear function of them, by name of a parameter or number of an input."""
    inputs = {f"input {i}": x.detach().clone() for i, x in enumerate(tensors(call)) if x.is_floating_point()}
    order = iter(x.requires_grad_() for x in inputs.values())
    call = tree_map_only(Tensor, lambda x: next(order) if x.is_floating_point() else x, call)
    wanted = {**inputs, **{name: p for name, p in network.named_parameters() if p.requires_grad}}
    with keep_state(network), torch.enable_grad():
        outputs = run_in_place(network, call)
        differentiable = [y for y in outputs if y.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if differentiable and wanted:
            weights = list(map(normal_numbers(), differentiable))
            found = torch.autograd.grad(differentiable, list(wanted.values()), weights, allow_unused=True)
    gradients = {name: x for name, x in zip(wanted, found, strict=True) if x is not None}
    return [y.detach() for y in outputs], gradients


def difference(expected: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, float]:
    """The largest difference of outputs, and the largest output; not numbers if one is not finite."""
    apart, scale = 0.0, reduce(_worst, map(largest, expected), 0.0)
    if [x.shape for x in expected] != [x.shape for x in got]:
        return math.inf, scale
    for x, y in zip(expected, got, strict=True):
        apart = _worst(apart, largest(y - x) if x.is_floating_point() else float(not torch.equal(x, y)))
    return apart, scale


def _relative(found: Sequence[tuple[float, float]]) -> float:
    """The largest difference over its batch's largest output, or over the largest of all where that is 0."""
    worst, overall = 0.0, max((scale for _, scale in found), default=0.0)
    for apart, own in found:
        if not math.isfinite(apart) or not math.isfinite(own):
            return math.nan if math.isnan(apart) or not math.isfinite(own) else math.inf
        if apart:
            worst = max(worst, apart / (own or overall) if own or overall else math.inf)
    return worst


def _worst(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
