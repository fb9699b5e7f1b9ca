"""Whether a smaller network computes the same as the one that it was made from, and has the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
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
from pyro_l0.nn.engine.record import held, keep_state, set_mode
from pyro_l0.nn.gate import gate_names

__all__ = ["Certificate", "certify", "difference", "refuse_another", "tolerance_of"]

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
        """The largest relative difference as a plain number, 0 where all is equal; NaN and infinity are not."""
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
    tolerance: float = 1e-10,
    outputs_only: bool = False,
    in_float64: bool = True,
) -> Certificate:
    """Compare a smaller network with the one that it was made from, by default both in float64 if they accept it.

    The gates of ``reference`` are held, and what ``small`` raises is passed on. By name of a parameter, ``indices``
    are what is left of it; by name of a weight, ``scales`` are the gates of its inputs (dimension 1) that went into it.
    Gradients that differ by more than a tolerance are also compared beside the example. Both networks are in evaluation
    mode, and are changed.
    """
    pair = _without_dropout(reference), _without_dropout(small)
    compare = _Comparison(*pair, indices, scales, tolerance)
    expect = partial(compare.expected, outputs_only=outputs_only)
    calls, expected = _of_calls(expect, calls, pair if in_float64 else ())
    if outputs_only:
        found = compare.outputs([with_another_row(random_calls(call)[0]) for call in calls]) or compare.outputs(calls)
        return Certificate(_relative(found))
    others = [*map(with_another_row, calls), *(other for call in calls for other in random_calls(call))]
    outputs, gradients = compare.on(calls, expected, others)
    for network in pair:
        set_mode(network, True)
        for gate in gate_names(network).values():
            gate.eval()  # so that nothing is drawn
    calls = list(map(with_another_row, calls))
    try:
        expected = list(map(compare.expected, calls))
    except Exception:
        return Certificate(outputs, gradients)
    in_training = compare.on(calls, expected)
    if not _worst(in_training[0], in_training[1] or 0.0) <= _RANDOM and compare.draws(calls):
        return Certificate(outputs, gradients)
    return Certificate(outputs, gradients, *in_training)


def refuse_another(
    network: nn.Module, other: nn.Module, calls: Sequence[Arguments], tolerance: float | None, in_float64: bool = True
) -> None:
    """Refuse a network, made from copies of a user's, that calls its modules or has other outputs, with open gates.

    The ValueError names the module that is called, or the first one whose output differs.
    """
    with held(network, {}) as own, held(other, {}) as new:
        found = certify(own, new, calls, {}, {}, outputs_only=True, in_float64=in_float64)
    with held(network, {}) as own, held(other, {}) as new:
        expected, got = (_of_modules(each, with_another_row(calls[0])) for each in (own, new))
    paths, others = {module: path for path, module in network.named_modules()}, dict(other.named_modules())
    shared = [paths[module] for module in got if module in paths]
    like = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.get_default_dtype())
    if found <= (tolerance_of(like) if tolerance is None else tolerance) and not shared:
        return
    same = {module: got.get(others[path], []) for module, path in paths.items() if path in others}
    apart = [paths[x] for x in expected if x in same and difference(expected[x], same[x])[0] not in (0.0, math.inf)]
    what = f"differ by {found:.1e} of its largest output, first behind {[*apart, ''][0]!r}"
    what = f"call {shared[0]!r} of the original" if shared else what
    raise ValueError(
        f"Expected a network that can be copied, but copies {what}; let its code reach all that it uses by attributes "
        "that copy.deepcopy copies."
    )


def _of_modules(network: nn.Module, call: Arguments) -> dict[nn.Module, list[Tensor]]:
    """What every module that a call reaches returns at first, the inner ones before those around them."""
    found: dict[nn.Module, list[Tensor]] = {}

    def note(module: nn.Module, args: object, result: object) -> None:
        found.setdefault(module, [x.detach().clone() for x in tensors(result)])

    handle = module_hooks.register_module_forward_hook(note)
    try:
        run(network, call)
    finally:
        handle.remove()
    return found


_Expected = tuple[list[Tensor], tuple[dict[str, Tensor], float] | None]
"""Outputs, and gradients of what is left of each parameter with the largest of the whole; None without gradients."""


class _Comparison:
    """Outputs and gradients of two networks on the same calls.

    Gradients are those of a linear function r'f of the outputs f, with the same normal numbers r for both: where the
    derivatives of f differ, those of r'f do with probability one. By names, a gradient of the first network is cut to
    what is left of the parameter, and that of a weight whose inputs took gates is multiplied by these, as it is the
    derivative by weight times gate. Differences are relative to the first network's largest output of a call, and to
    its largest gradient.
    """

    def __init__(
        self, reference: nn.Module, small: nn.Module, indices: Indices, scales: Mapping[str, Tensor], tolerance: float
    ) -> None:
        self.reference, self.small = reference, small
        self.indices, self.scales, self.tolerance = indices, scales, tolerance

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

    def expected(self, call: Arguments, outputs_only: bool = False) -> _Expected:
        """What the first network makes of a call; code for inference has no gradients."""
        if outputs_only:
            return run(self.reference, call), None
        try:
            outputs, gradients = _outputs_and_gradients(self.reference, call)
        except RuntimeError:
            return run(self.reference, call), None
        scale = max(map(largest, gradients.values()), default=0.0)
        for name in sorted(gradients.keys() & self.indices.keys(), key=lambda name: gradients[name].numel()):
            gradients[name] = cut(gradients[name], self.indices[name])  # the largest last, as they take memory
        return outputs, (gradients, scale)

    def on(
        self, calls: Sequence[Arguments], expected: list[_Expected], others: Sequence[Arguments] = ()
    ) -> tuple[float, float | None]:
        """The largest differences of outputs, and of gradients on the calls, of which the first network's are known.

        What is known is used up. Outputs are also compared on other calls that the first network accepts.
        """
        found: list[tuple[float, float]] = []
        gradients: float | None = 0.0
        for call in calls:
            apart, here = self._compare(call, expected.pop(0))
            found.append(apart)
            if here is not None and not here <= self.tolerance:
                here = self._off_ties(call, here)
            gradients = None if here is None or gradients is None else _worst(gradients, here)
        return _relative([*found, *self.outputs(others)]), gradients

    def draws(self, calls: Sequence[Arguments]) -> bool:
        """Whether the first network draws random numbers itself, perhaps in the shapes of units that were removed."""
        return any(difference(run(self.reference, call), run(self.reference, call, seed=1))[0] for call in calls)

    def _off_ties(self, call: Arguments, found: float) -> float:
        """The difference of gradients beside an example, where that is smaller.

        Where entries of a pooling window are equal, as behind an example of zeros, rounding chooses which of them the
        gradient goes to; a little noise on the example tells them apart.
        """
        try:
            call = with_noise(call)
            _, beside = self._compare(call, self.expected(call))
        except Exception:  # the network accepts no such numbers
            return found
        return found if beside is None or not beside < found else beside

    def _compare(self, call: Arguments, expected: _Expected) -> tuple[tuple[float, float], float | None]:
        """The difference and the largest of outputs; the relative difference of gradients, None if there are none."""
        outputs, gradients = expected
        if gradients is None:
            return difference(outputs, run(self.small, call)), None
        found, got = _outputs_and_gradients(self.small, call)
        return difference(outputs, found), self._gradient_difference(*gradients, got)

    def _gradient_difference(self, expected: Mapping[str, Tensor], scale: float, got: Mapping[str, Tensor]) -> float:
        """The largest difference over the largest gradient; infinite where shapes differ, or that gradient is 0."""
        worst = 0.0
        for name, gradient in expected.items():
            other = got[name] if name in got else torch.zeros_like(gradient)
            if other.shape != gradient.shape:
                return math.inf
            if name in self.scales:
                other = other * self.scales[name].to(other).view(1, -1, *[1] * (other.dim() - 2))
            worst = _worst(worst, largest(other - gradient))
        return worst / scale if worst and scale else math.inf if worst else 0.0


def _of_calls(
    function: Callable[[Arguments], _Expected], calls: Sequence[Arguments], networks: Sequence[nn.Module]
) -> tuple[Sequence[Arguments], list[_Expected]]:
    """Calls and what a function makes of each, with them and networks in float64.

    They stay as they are where code of a network asks for their own type, and where there are no networks.
    """
    if networks:
        types = [{name: x.dtype for name, x in named_tensors(network)} for network in networks]
        inputs = [tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, call) for call in calls]
        for network in networks:
            network.double()
        try:
            return inputs, list(map(function, inputs))
        except Exception:
            for network, before in zip(networks, types, strict=True):
                for name, x in named_tensors(network):
                    x.data = x.data.to(before[name])
    return calls, list(map(function, calls))


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
