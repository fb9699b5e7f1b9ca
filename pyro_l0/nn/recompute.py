"""The value of a gate in a block that runs again for its gradient (``torch.utils.checkpoint``).

The second run is part of the backward pass, where no guide hands on the gates' values. So the first run keeps them with
the block. torch does not tell which block is running, but its frames on the call stack hold it; they are looked for
only where a block may be running.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["draw_in_block", "refuse_reentrant"]

_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)


@dataclass(frozen=True)
class _Draw:
    """A gate's value, and the random state before and behind its draw."""

    value: Tensor
    before: Tensor
    behind: Tensor


class _Block:
    """The draws of a block's first run, gate by gate and in order."""

    def __init__(self) -> None:
        self.draws: dict[nn.Module, list[_Draw]] = {}
        self._repeated: Counter[tuple[nn.Module, int]] = Counter()

    def repeat(self, gate: nn.Module, backward: int) -> _Draw | None:
        """The draw for the gate's next call in a run for a backward pass; None if the first run had none."""
        place = self._repeated[gate, backward]
        self._repeated[gate, backward] += 1
        draws = self.draws.get(gate, [])
        return draws[place] if place < len(draws) else None


_blocks: WeakKeyDictionary[object, _Block] = WeakKeyDictionary()  # by torch's object, which lives as long as the graph


def draw_in_block(gate: nn.Module, name: str, device: torch.device, draw: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """The value on a device of the gate at a site, and whether it is a new draw.

    Raises:
        RuntimeError: a block runs again, and the value of its first run is not known or would get no gradient.
    """
    refuse_reentrant(name)
    inner, again = _running_blocks()
    new: Tensor | None = None
    if again is not None:
        outer, backward = again
        kept = outer.repeat(gate, backward)
        if kept is None:
            raise RuntimeError(
                f"Expected gate {name!r} to be called in the first run of its checkpointed block, whose value it takes "
                "when the block runs again for the gradient, but no value was kept; use "
                "torch.utils.checkpoint.checkpoint with use_reentrant=False on a block that makes the same calls twice."
            )
        if torch.equal(_random_state(device), kept.before):  # for what is drawn behind the gate, by a dropout say
            _set_random_state(device, kept.behind)
    elif not inner:
        return draw(), True
    else:
        before = _random_state(device)
        with saved_tensors_hooks(lambda x: x, lambda x: x):  # what the draw saves is not made again
            new = draw()
        kept = _Draw(new.detach().requires_grad_(new.requires_grad), before, _random_state(device))
    for block in inner:
        block.draws.setdefault(gate, []).append(kept)
    return (kept.value, False) if new is None else (new, True)


def refuse_reentrant(name: str) -> None:
    """Refuse a reentrant checkpoint, which gives the gate at a site no gradient."""
    if any(frame.f_code in _REENTRANT for frame in _frames_of_checkpoints()):
        raise RuntimeError(
            f"Expected gate {name!r} outside of torch.utils.checkpoint with use_reentrant=True, which gives a gradient "
            "to the arguments of a block alone and not to its gates; pass use_reentrant=False."
        )


def _running_blocks() -> tuple[list[_Block], tuple[_Block, int] | None]:
    """The blocks in their first run inside of one that runs again; and that one with its backward pass."""
    inner: list[_Block] = []
    for frame in _frames_of_checkpoints():
        kept = frame.f_locals
        if frame.f_code.co_name == "unpack_hook":
            return inner, (_blocks.setdefault(kept["frame"], _Block()), kept["gid"])
        if frame.f_code.co_name == "checkpoint":
            inner.append(_blocks.setdefault(kept["gen"].gi_frame.f_locals["new_frame"], _Block()))
    return inner, None


def _frames_of_checkpoints() -> Iterator[FrameType]:
    """torch's frames on the call stack that run a block, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            yield frame
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
