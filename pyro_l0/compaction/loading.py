"""Reads a compacted network into the user's own class."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from pyro_l0.compaction.rewrite import rewrite
from pyro_l0.compaction.storage import Compacted, read

__all__ = ["load_compacted"]


def load_compacted(network: nn.Module, path: str | Path) -> Compacted:
    """Read what :meth:`Compacted.save` wrote, and check it.

    The SHA-256 in the file finds damage and changes; whoever changes a file on purpose can compute it anew, and then
    it holds wrong numbers, but no code. A pair ``path.safetensors`` and ``path.json`` of an earlier version is read as
    well, with a warning, because it has no checksum; saving it again makes it one file.

    Args:
        network: the network that was compacted, as it was before any shrinking, with any weights, and of the type
            (float32, ...) that was saved; it is not changed.
        path: as given to ``save``.

    Raises:
        TypeError: ``network`` is no module.
        FileNotFoundError: there is no such file.
        ValueError: the file can't be read, is damaged, was changed, is of another program, of another network or
            another type of numbers, or holds NaN or infinity; the message says which.
        ImportError: safetensors is not installed (``pip install 'pyro-l0[export]'``).
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"Expected network to be the module that was compacted, but got {network!r}.")
    content = read(path)
    *before, found = content.plans
    try:
        for earlier in before:
            network = rewrite(network, earlier, keep_gates=True)
        small = rewrite(network, found)
        for name, value in small.state_dict().items():
            got = content.state.get(name, value).dtype
            if got != value.dtype:
                raise ValueError(
                    f"its tensor {name!r} is {got}, the network's {value.dtype}; load it into network.to({got})"
                )
        small.load_state_dict(dict(content.state))
    except Exception as error:  # a plan of another network breaks the rewriting in many ways
        raise ValueError(
            f"Expected the file '{path}.safetensors' to be of this network, but it does not fit: {error}"
        ) from error
    return Compacted(small, found, content.certificate, tuple(before))
