"""Whether a smaller network computes the same as the one that it was made from, and has the same gradients."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_l0.compaction.slice import Kept, cut
from pyro_l0.nn.engine.record import keep_buffers

__all__ = [
    "Arguments",
    "Certificate",
    "NoDropout",
    "another_size",
    "certify",
    "difference",
    "is_constant",
    "run",
    "tensors",
    "tolerance_of",
]

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Positional arguments and keywords of one call of a network."""

_SEED = 0
_ROWS = 4  # of random inputs
_TIE = 1e-10  # a difference of gradients that is looked at beside the example, too
_NOISE = 1e-2  # of the example's largest number
_RANDOM = 1e-6  # a difference that rounding does not make
# What rounding explains, relative to the output. Half precisions round every product with a gate.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Certificate:
    """Largest differences between two networks, each relative to the largest absolute entry of its kind.

    Attributes:
        outputs: on all examples, on another number of rows and on random inputs, in evaluation mode.
        gradients: of a random function of the outputs with respect to every parameter and input that is left; None
            where parameters that are left also made constants, which were folded into biases, or where the network
            changes in place what its gradients need.
        training_outputs: in training mode without dropout, under one seed; None where the modes of the network can't
            be compared: it can't be called so, draws random numbers of the shapes of units that left, or normalises
            closed units by statistics that are not what training would make of them.
        training_gradients: as above.
    """

    outputs: float
    gradients: float | None
    training_outputs: float | None
    training_gradients: float | None

    @property
    def largest(self) -> float:
        """The largest of all; not a number if one is not."""
        found = (self.outputs, self.gradients, self.training_outputs, self.training_gradients)
        worst = 0.0
        for value in found:
            worst = worst if value is None else _worst(worst, value)
        return worst


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference between two networks of one type that rounding explains."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.get_default_dtype()])


def certify(
    reference: nn.Module, small: nn.Module, calls: Sequence[Arguments], kept: Kept, scales: Mapping[str, Tensor]
) -> Certificate:
    """Compare a smaller network with the one that it was made from, both in float64 if they take it.

    Args:
        reference: its gates are fixed; not changed.
        small: not changed.
        calls: all examples.
        kept: by name of the reference's parameters, what is left of them.
        scales: by name of a weight, the gates of its inputs (dimension 1) that went into it.

    Raises:
        Exception: whatever the smaller network raises.
    """
    pair, calls = _doubled(reference, small, calls)
    compare = _Comparison(*pair, kept, scales)
    batches = [*calls, *(_with_another_row(call) for call in calls), *(call for x in calls for call in random_calls(x))]
    outputs, gradients = compare.on(batches, calls, training=False)
    try:
        in_training = compare.on([], [_with_another_row(call) for call in calls], training=True)
    except _NotComparableError:
        return Certificate(outputs, gradients, None, None)
    return Certificate(outputs, gradients, *in_training)


class _NotComparableError(Exception):
    """The network itself can't be called so, or draws other random numbers."""


class _Comparison:
    """Outputs and gradients of two networks on the same calls."""

    def __init__(self, reference: nn.Module, small: nn.Module, kept: Kept, scales: Mapping[str, Tensor]) -> None:
        self.reference, self.small = reference, small
        self.kept, self.scales = kept, scales

    def on(
        self, batches: Sequence[Arguments], examples: Sequence[Arguments], training: bool
    ) -> tuple[float, float | None]:
        """The largest differences of outputs, and of gradients on the examples; of what the first network takes."""
        self.reference.train(training)
        self.small.train(training)
        scales: list[float] = []
        differences: list[float] = []
        gradients: float | None = 0.0
        for call in (*batches, *examples):
            is_example = any(call is example for example in examples)
            try:
                expected = run(self.reference, call)
            except Exception as error:
                if training:
                    raise _NotComparableError from error
                if is_example:
                    raise
                continue  # random inputs and another number of rows may be none that it takes
            got = run(self.small, call)
            apart, scale = difference(expected, got)
            if not is_example and not math.isfinite(scale):
                continue
            scales.append(scale)
            differences.append(apart)
            if is_example:
                found = self._gradient_difference(call)
                if found is not None and not found <= _TIE:
                    found = self._off_ties(call, found)
                gradients = None if found is None or gradients is None else _worst(gradients, found)
        outputs = _relative(differences, scales)
        if training and not _worst(outputs, gradients or 0.0) <= _RANDOM and self._draws(examples):
            raise _NotComparableError
        return outputs, gradients

    def _draws(self, calls: Sequence[Arguments]) -> bool:
        """Whether the first network draws random numbers itself, whose shapes may be those of units that left."""
        return any(difference(run(self.reference, call), run(self.reference, call, _SEED + 1))[0] for call in calls)

    def _off_ties(self, call: Arguments, found: float) -> float:
        """The difference of gradients beside an example, where that is smaller.

        Where entries of a pooling window are equal, as behind an example of zeros, rounding chooses which of them the
        gradient goes to; a little noise on the example tells them apart.
        """
        try:
            beside = self._gradient_difference(_with_noise(call))
        except Exception:  # the network takes no such numbers
            return found
        return found if beside is None or not beside < found else beside

    def _gradient_difference(self, call: Arguments) -> float | None:
        """Relative to the largest gradient; None if the network that was given has none, as code for inference may."""
        try:
            expected = _gradients(self.reference, call)
        except RuntimeError:
            return None
        got = _gradients(self.small, call)
        largest = max((_largest(x) for x in expected.values()), default=0.0)
        worst = 0.0
        for name, gradient in expected.items():
            other = got.get(name)
            if name in self.kept:
                gradient = cut(gradient, self.kept[name])
            if other is None:
                other = torch.zeros_like(gradient)
            if other.shape != gradient.shape:
                return math.inf
            if name in self.scales:
                other = other * self.scales[name].to(other).view(1, -1, *[1] * (other.dim() - 2))
            worst = _worst(worst, _largest(other - gradient))
        return worst / largest if worst and largest else math.inf if worst else 0.0


def run(network: nn.Module, call: Arguments, seed: int = _SEED) -> list[Tensor]:
    """The outputs that are tensors, under a seed and without dropout; inputs and buffers may be changed in place."""
    with keep_buffers(network):
        return _run(network, call, seed)


def _run(network: nn.Module, call: Arguments, seed: int = _SEED) -> list[Tensor]:
    """:func:`run`, after which buffers are what the network made of them."""
    args, kwargs = tree_map_only(Tensor, lambda x: x.clone(), call)
    devices = [x.device for x in tensors(call) if x.is_cuda][:1]
    with torch.random.fork_rng(devices), NoDropout():
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        return tensors(network(*args, **kwargs))


def tensors(result: object) -> list[Tensor]:
    """The tensors in arguments or results."""
    if hasattr(result, "to_tuple"):  # of Hugging Face's models
        result = result.to_tuple()
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = [getattr(result, field.name) for field in dataclasses.fields(result)]
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def random_calls(call: Arguments) -> list[Arguments]:
    """Calls with random numbers of the same shapes; of integers and booleans, the rows in another order."""
    generator = torch.Generator().manual_seed(_SEED)

    def noise(scale: float) -> Arguments:
        def draw(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x.flip(0) if x.dim() else x
            return scale * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)

        return cast(Arguments, tree_map_only(Tensor, draw, call))

    return [noise(1.0), noise(3.0)]


def _with_noise(call: Arguments) -> Arguments:
    """A call whose floating-point numbers are each a little different."""
    generator = torch.Generator().manual_seed(_SEED)

    def shift(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        scale = _NOISE * (_largest(x) or 1.0)
        return x + scale * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)

    return cast(Arguments, tree_map_only(Tensor, shift, call))


def another_size(call: Arguments) -> Arguments | None:
    """A call with images of one more place in every dimension; None without images."""

    def grow(x: Tensor) -> Tensor:
        return F.pad(x, [0, 1] * (x.dim() - 2), mode="replicate") if _is_image(x) else x

    if not any(_is_image(x) for x in tensors(call)):
        return None
    return cast(Arguments, tree_map_only(Tensor, grow, call))


def is_constant(network: nn.Module, calls: Sequence[Arguments]) -> bool:
    """Whether a network in evaluation mode gives the same for every example."""
    network.eval()
    generator = torch.Generator().manual_seed(_SEED)

    def draw(x: Tensor) -> Tensor:
        shape = (_ROWS, *x.shape[1:]) if x.dim() else x.shape
        if x.is_floating_point():
            return torch.randn(shape, generator=generator, dtype=x.dtype).to(x.device)
        return x.flatten()[torch.randint(x.numel(), shape, generator=generator).to(x.device)]

    for call in calls:
        try:
            outputs = run(network, tree_map_only(Tensor, draw, call))
        except Exception:  # rows that do not belong together
            outputs = run(network, call)
        if any(not x.dim() or not torch.equal(x, x[:1].expand_as(x)) for x in outputs):
            return False
    return True


def _is_image(x: Tensor) -> bool:
    return x.is_floating_point() and x.dim() in (3, 4, 5)


def _with_another_row(call: Arguments) -> Arguments:
    """The same call with its first row once more."""
    rows = [x.shape[0] for x in tensors(call) if x.dim()]
    number = max(set(rows), key=rows.count, default=0)

    def add(x: Tensor) -> Tensor:
        return torch.cat([x, x[:1]]) if x.dim() and x.shape[0] == number else x

    return cast(Arguments, tree_map_only(Tensor, add, call))


def _doubled(
    reference: nn.Module, small: nn.Module, calls: Sequence[Arguments]
) -> tuple[tuple[nn.Module, nn.Module], list[Arguments]]:
    """Both networks and the calls in float64, or as they are where code of the network asks for their own type."""
    doubled = _without_dropout(reference).double(), _without_dropout(small).double()
    inputs = [tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, call) for call in calls]
    try:
        for call in inputs:
            run(doubled[0].eval(), call)
    except Exception:
        return (_without_dropout(reference), _without_dropout(small)), list(calls)
    return doubled, inputs


def _without_dropout(network: nn.Module) -> nn.Module:
    """A copy whose layers that call dropout inside of torch's code do not."""
    new = copy.deepcopy(network)
    for module in new.modules():
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0
    return new


def _gradients(network: nn.Module, call: Arguments) -> dict[str, Tensor]:
    """Of a random linear function of the outputs, by name of a parameter or place of an input."""
    inputs = {f"input {i}": x.detach().clone() for i, x in enumerate(tensors(call)) if x.is_floating_point()}
    order = iter(x.requires_grad_() for x in inputs.values())
    call = tree_map_only(Tensor, lambda x: next(order) if x.is_floating_point() else x, call)
    wanted = {**inputs, **{name: p for name, p in network.named_parameters() if p.requires_grad}}
    with keep_buffers(network), torch.enable_grad():
        outputs = [y for y in _run(network, call) if y.requires_grad]
        generator = torch.Generator().manual_seed(_SEED)
        weights = [torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device) for y in outputs]
        if not outputs or not wanted:
            return {}
        found = torch.autograd.grad(outputs, list(wanted.values()), weights, allow_unused=True)
    return {name: x for name, x in zip(wanted, found, strict=True) if x is not None}


class NoDropout(TorchFunctionMode):
    """Every dropout of torch's hands on its input."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_DROPOUTS: set[object] = {
    *(getattr(F, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")),
    *(getattr(torch, name) for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")),
    F.alpha_dropout,
    F.feature_alpha_dropout,
}


def difference(expected: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, float]:
    """The largest difference of outputs, and the largest output; not numbers if one is not finite."""
    if [x.shape for x in expected] != [x.shape for x in got]:
        return math.inf, max(map(_largest, expected), default=0.0)
    largest = apart = 0.0
    for x, y in zip(expected, got, strict=True):
        largest = _worst(largest, _largest(x))
        apart = _worst(apart, _largest(y - x) if x.is_floating_point() else float(not torch.equal(x, y)))
    return apart, largest


def _relative(differences: Sequence[float], scales: Sequence[float]) -> float:
    """The largest difference over its batch's largest output, or over the largest of all where that is 0."""
    worst, overall = 0.0, max(scales, default=0.0)
    for apart, own in zip(differences, scales, strict=True):
        if not math.isfinite(apart) or not math.isfinite(own):
            return math.nan if math.isnan(apart) or not math.isfinite(own) else math.inf
        if apart:
            worst = max(worst, apart / (own or overall) if own or overall else math.inf)
    return worst


def _worst(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
