"""The value of a gate in a block that runs again for its gradient (``torch.utils.checkpoint``).

The second run is part of the backward pass, where no guide gives the gates their values. torch restores its random
state, so that the state at a gate identifies its draw of the first run, which the first run's graph keeps.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from types import FrameType
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from pyro_l0.fast.products import has_top_hooks

__all__ = ["Draw", "draw_in_block", "keep_with", "refuse_reentrant"]

_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)
_KEY = "draw of a gate in a checkpointed block"


class Draw:
    """A gate's value, and the random state behind its draw."""

    def __init__(self, value: Tensor, behind: Tensor) -> None:
        self.value, self.behind = value, behind
        self.is_ambiguous = False  # whether another value was drawn at the same random state


_draws: WeakKeyDictionary[nn.Module, WeakValueDictionary[bytes, Draw]] = WeakKeyDictionary()
_last: WeakKeyDictionary[nn.Module, Draw] = WeakKeyDictionary()  # for gates in front of all gradients


def draw_in_block(
    gate: nn.Module, name: str, device: torch.device, draw: Callable[[], Tensor]
) -> tuple[Tensor, Draw | None]:
    """The value of the gate at a site, and, if it is a new draw, what its graph must keep."""
    refuse_reentrant(name)
    draws, before = _draws.setdefault(gate, WeakValueDictionary()), _random_state(device)
    place = hashlib.blake2b(before.numpy().tobytes()).digest()
    kept = draws.get(place)
    if torch._C._current_graph_task_id() == -1 or not has_top_hooks():  # not in the backward pass, or in a hook there
        with saved_tensors_hooks(lambda x: x, lambda x: x):  # what the draw saves is not made again
            new = draw()
        other, kept = kept, Draw(new.detach().requires_grad_(new.requires_grad), _random_state(device))
        if other is not None and not torch.equal(other.value, kept.value):
            other.is_ambiguous = kept.is_ambiguous = True
        draws[place] = _last[gate] = kept
        return new, kept
    if kept is None or kept.is_ambiguous:
        why = "no value was kept" if kept is None else "it had several values at one random state"
        raise RuntimeError(
            f"Expected gate {name!r} to be called in the first run of its checkpointed block, whose value it takes "
            f"when the block runs again for the gradient, but {why}; use torch.utils.checkpoint.checkpoint with "
            "use_reentrant=False and preserve_rng_state=True on a block that makes the same calls twice."
        )
    _set_random_state(device, kept.behind)  # for what is drawn behind the gate, by a dropout say
    return kept.value, None


def keep_with(out: Tensor, draw: Draw) -> None:
    """Let the graph behind a gate keep its draw."""
    if out.grad_fn is not None:
        kept: dict[object, object] = out.grad_fn.metadata  # type: ignore[assignment]  # which torch types as a method
        kept[_KEY] = draw


def refuse_reentrant(name: str) -> None:
    """Refuse a reentrant checkpoint, which gives the gate at a site no gradient."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _REENTRANT:
            raise RuntimeError(
                f"Expected gate {name!r} outside of torch.utils.checkpoint with use_reentrant=True, which gives a "
                "gradient to the arguments of a block alone and not to its gates; pass use_reentrant=False."
            )
        frame = frame.f_back


def _random_state(device: torch.device) -> Tensor:
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type in ("cpu", "meta"):
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
