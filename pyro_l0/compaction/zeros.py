"""Removes units whose weights are zero already, as pruning or an L1 penalty left them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import prune

from pyro_l0.compaction.certificate import refuse_another
from pyro_l0.compaction.compact import CompactionError, RoundingError, refusal, search
from pyro_l0.compaction.storage import Compacted
from pyro_l0.nn.engine import Example, calls_of
from pyro_l0.nn.engine.record import copied, example_of
from pyro_l0.nn.gate import check_given
from pyro_l0.nn.heads import gate_heads

__all__ = ["compact_zeros"]


def compact_zeros(
    network: nn.Module, example: Example, tolerance: float | None = None, in_float64: bool = True
) -> Compacted:
    """Turn a network without gates, some of whose weights are zero, into a smaller one that computes the same.

    The zeros may come from torch.nn.utils.prune, whose masks are first made permanent, from an L1 penalty or from
    another tool. A unit leaves

    - if it is the same for every example, since the weights that make it are zero, or the weight of the normalisation
      behind them. What is left of it, such as the activation of its bias, goes into the biases of the layers that read
      it. In front of a convolution that pads, these get a map, and the network accepts only inputs of this size;
    - if all weights that read it are zero.

    A unit that several layers write or read, as in a residual stream, leaves if this holds for all of them. A head of
    attention is zero if all its values are, biases too, or all weights that read them. A
    :class:`torch.nn.MultiheadAttention` with zero heads becomes what :func:`~pyro_l0.nn.gate_heads` makes of it.

    Args:
        network: any module without gates; not changed. The result is in evaluation mode.
        example: what the network is called with, as :func:`~pyro_l0.compaction.compact` takes it.
        tolerance: largest accepted difference, as there.
        in_float64: whether both networks are compared in float64, as there.

    Returns:
        What :func:`~pyro_l0.compaction.compact` returns. Its certificate has no difference of gradients where they
        differ, since a weight of zeros that stays has others without the units that it multiplied.

    Raises:
        TypeError: the network is not a module, or the example is of another kind.
        ValueError: the network has gates, or does not accept the example.
        CompactionError: a difference is above the tolerance.

    Warns:
        UserWarning: nothing is smaller, as after unstructured pruning; or the network's code does not run without the
            zeros of some parameters, which stay.

    Example:
        >>> import torch
        >>> from torch.nn.utils import prune
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> _ = prune.ln_structured(net[0], "weight", amount=0.5, n=1, dim=0)
        >>> compact_zeros(net, torch.ones(1, 2)).network[0]
        Linear(in_features=2, out_features=2, bias=True)
    """
    permanent, example = _made_permanent(network), example_of(example, network)
    found_heads = {path: _zero_heads(module) for path, module in permanent.named_modules() if path}
    heads = {path: zero for path, zero in found_heads.items() if zero is not None}
    gated = gate_heads(permanent, {f"{path}.out_proj": len(zero) for path, zero in heads.items()})
    gates = {f"{path}.out_proj.gate": (~zero).double() for path, zero in heads.items()}
    names = [name for name, x in gated.named_parameters(remove_duplicate=False) if bool((x == 0).any())]
    task: dict[str, Any] = dict(zip(("network", "gates", "example"), (gated, gates, example), strict=True))
    task |= {"tolerance": tolerance, "in_float64": in_float64}
    try:
        found = search(**task, zeros=frozenset(names))
    except RoundingError:
        raise
    except CompactionError as error:
        left = _removable(lambda zeros: refusal(**task, zeros=frozenset(zeros), is_trial=False) is None, names, [])
        found = search(**task, zeros=frozenset(left))
        stays = ", ".join(name for name in names if name not in left)
        warnings.warn(f"The zeros of {stays} stay. {error}", stacklevel=2)
    refuse_another(network, found.network, calls_of(example), tolerance, in_float64)
    if not found.plan.remaining:
        warnings.warn(
            "Expected units whose weights are all zero, but none that can leave has only those, as after unstructured "
            "pruning, so that nothing is smaller. Prune whole units, as prune.ln_structured does with dim=0.",
            stacklevel=2,
        )
    return found


def _made_permanent(network: nn.Module) -> nn.Module:
    """A copy of a network, with the masks of torch.nn.utils.prune in its weights."""
    check_given(network)
    new = copied(network)
    for module in new.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, prune.BasePruningMethod):
                prune.remove(module, hook._tensor_name)
    return new


def _zero_heads(module: nn.Module) -> Tensor | None:
    """Which heads of a torch.nn.MultiheadAttention have no values or are not read; None if none is."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    weight = module.v_proj_weight if module.in_proj_weight is None else module.in_proj_weight.chunk(3)[2]
    values = weight.any(1)
    if module.in_proj_bias is not None:
        values |= module.in_proj_bias.chunk(3)[2] != 0
    zero = ~(values & module.out_proj.weight.any(0)).unflatten(0, (module.num_heads, -1)).any(1)
    return zero if bool(zero.any()) else None


def _removable(works: Callable[[Sequence[str]], bool], names: Sequence[str], good: list[str]) -> list[str]:
    """Those of some names, found by halves, that work together with what is good already."""
    if works([*good, *names]):
        return [*good, *names]
    half = len(names) // 2
    return _removable(works, names[half:], _removable(works, names[:half], good)) if half else good
