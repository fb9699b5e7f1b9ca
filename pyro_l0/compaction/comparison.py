"""Whether a rewritten network computes the same as the one that it was made from, and trains alike."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pyro_l0.compaction.plan import plan_graph
from pyro_l0.compaction.rewrite import rewrite_graph
from pyro_l0.nn.fixed import fix_gates
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.reading import read_network

__all__ = ["certify", "check_hooks", "check_rewriting", "check_trainable", "check_values", "hooks", "tolerance_of"]

_SEED = 0
_OURS = f"{__name__.partition('.')[0]}."
_ROWS = 4  # BatchNorm in training needs more than one
_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
# What rounding explains, relative to the output. Half precisions round every product with a gate.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference between two networks of one type that rounding explains."""
    return _TOLERANCES[dtype if dtype.is_floating_point else torch.get_default_dtype()]


def check_values(network: nn.Module, gates: Mapping[str, Tensor], example_input: Tensor) -> None:
    """Refuse what outputs can't be compared on: parameters or gates without values, an example without entries."""
    if any(parameter.is_meta for parameter in network.parameters()):
        raise ValueError("Expected a network with values, but its parameters are on the device meta.")
    without = [site for site, value in gates.items() if getattr(value, "is_meta", False)]
    if without:
        raise ValueError(f"Expected gates[{without[0]!r}] with values, but it is on the device meta.")
    if not example_input.numel():
        raise ValueError(f"Expected an example_input with entries, but got shape {tuple(example_input.shape)}.")


@torch.no_grad()
def certify(reference: nn.Module, small: nn.Module, example_input: Tensor) -> float:
    """The largest difference of two networks' outputs, relative to the largest absolute output of the same batch.

    On the example and on random inputs of its size. Where all outputs of a batch are 0, it is relative to the
    largest of the other batches; if those are 0 as well, outputs that differ are infinitely far apart.

    Returns:
        The difference, not a number if an output is not finite.
    """
    noise = _noise(example_input.shape, example_input)
    batches = (example_input, noise, 3 * noise.flip(0))
    outputs = [(reference(x.clone()), small(x.clone())) for x in batches]
    scales = [_largest(expected) for expected, _ in outputs]
    worst = 0.0
    for (expected, got), own in zip(outputs, scales, strict=True):
        difference, scale = _largest(got - expected), own or max(scales)
        if not math.isfinite(difference) or not math.isfinite(scale):
            return math.nan
        if difference:
            worst = max(worst, difference / scale if scale else math.inf)
    return worst


def hooks(network: nn.Module) -> list[str]:
    """The hooks in a network that a rewriting loses, in words; the layers of this library have their own again."""
    found = []
    for path, module in network.named_modules():
        where = f"module {path!r} ({type(module).__name__})" if path else f"the network ({type(module).__name__})"
        for kind in _HOOKS:
            owners = (str(getattr(hook, "__module__", "")) for hook in getattr(module, f"_{kind}").values())
            if not all(owner.startswith(_OURS) for owner in owners):
                found.append(f"{kind.replace('_', ' ')} of {where}")
    for name, parameter in network.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            found.append(f"hooks of parameter {name!r}")
    return found


def check_trainable(network: nn.Module) -> None:
    """Refuse parameters that would lose their place: parametrised ones, and one that several layers share."""
    owners: dict[int, str] = {}
    for path, module in network.named_modules():
        if parametrize.is_parametrized(module):
            raise ValueError(f"Expected layers with weights of their own, but {path!r} is parametrised.")
        for parameter in module.parameters(recurse=False):
            if owners.setdefault(id(parameter), path) != path:
                raise ValueError(
                    f"Expected layers with weights of their own, but {path!r} and {owners[id(parameter)]!r} share some."
                )


def check_hooks(network: nn.Module) -> None:
    """Refuse hooks, which the rewritten network would not have."""
    found = hooks(network)
    if found:
        raise ValueError(
            f"Expected a network without hooks, which shrinking would lose, but it has {', '.join(found)}; take them "
            "off, put them on the module that holds the network, or train without Shrinker and compact at the end."
        )


def check_rewriting(network: nn.Module, example_input: Tensor) -> None:
    """Refuse a network that would train otherwise once it is rewritten from its operations."""
    graph = read_network(network, example_input)
    check_hooks(network)
    check_values(network, {}, example_input)
    lost: str | None = ", ".join(graph.left_out)
    if not lost:
        like = next(network.parameters(), example_input)
        gates = {site: torch.linspace(0.5, 1.0, gate.size).to(like) for site, gate in gate_names(network).items()}
        with torch.random.fork_rng([]):  # layers draw weights when they are made
            found = plan_graph(graph, gates, example_input.shape, keep_gates=True)
            small = rewrite_graph(graph, found, like, keep_gates=True)
        lost = _training_differs(fix_gates(network, gates), fix_gates(small, gates), example_input)
    if lost:
        raise ValueError(
            "Expected a network that is all in the operations on its input, because shrinking writes it anew from "
            f"these, but that would lose or change {lost}. Code under `if self.training`, no_grad blocks, custom "
            "backward functions and updates of buffers do not belong into it: leave the part out of the network and "
            "call it before or behind it, or train without Shrinker and compact at the end."
        )


def _training_differs(reference: nn.Module, rewritten: nn.Module, example_input: Tensor) -> str | None:
    """What differs between two networks in training mode, under one seed, in words; None if nothing does.

    Both are changed as by a training step. Gradients are those of a random linear function of the outputs, with
    respect to the input and every parameter that needs one.
    """
    x = _noise((_ROWS, *example_input.shape[1:]), example_input)
    x.requires_grad_(x.is_floating_point())
    devices = [x.device] if x.is_cuda else []
    results = []
    for network in (reference, rewritten):
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.manual_seed(_SEED)
            y = network.train()(x.clone())
            custom = _custom_function(y)
            if custom is not None:
                return f"the backward function of {custom!r}"
            inputs = {name: p for name, p in (*network.named_parameters(), ("its input", x)) if p.requires_grad}
            results.append((y.detach(), _gradients(y, inputs)))
    (expected, gradients), (got, others) = results
    tolerance = tolerance_of(got.dtype)
    if expected.shape != got.shape or not _largest(got - expected) <= tolerance * _largest(expected):
        return "its output in training mode"
    largest = max(map(_largest, gradients.values()), default=0.0)
    for name, gradient in gradients.items():
        other = others.get(name, torch.zeros_like(gradient))
        if not _largest(other - gradient) <= tolerance * largest:
            return f"the gradient of {name if name == 'its input' else repr(name)}"
    return None


def _noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Normal random numbers, or entries of a tensor of integers in random order."""
    generator = torch.Generator().manual_seed(_SEED)
    if like.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=like.dtype).to(like.device)
    return like.flatten()[torch.randint(like.numel(), shape, generator=generator).to(like.device)]


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _gradients(y: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a random linear function of ``y``; zeros where there is none."""
    if not y.requires_grad:
        return {name: torch.zeros_like(x) for name, x in inputs.items()}
    found = torch.autograd.grad(y, list(inputs.values()), _noise(y.shape, y), materialize_grads=True)
    return dict(zip(inputs, found, strict=True))


def _custom_function(y: Tensor) -> str | None:
    """A custom autograd function in a tensor's graph."""
    frontier, seen = [y.grad_fn], set()
    while frontier:
        node = frontier.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return type(node).__name__.removesuffix("Backward")
        seen.add(node)
        frontier += [before for before, _ in node.next_functions]
    return None
