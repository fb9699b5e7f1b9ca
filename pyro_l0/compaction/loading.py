"""Reads a compacted network into the user's own class."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from pyro_l0.compaction.plan import Plan
from pyro_l0.compaction.rewrite import rewrite
from pyro_l0.compaction.storage import Compacted

__all__ = ["load_compacted"]


def load_compacted(network: nn.Module, path: str | Path) -> Compacted:
    """Read what :meth:`Compacted.save` wrote.

    Args:
        network: the network that was compacted, as it was before any shrinking, with any weights; it is not changed.
        path: as given to ``save``.

    Raises:
        TypeError: ``network`` is no module.
        ValueError: the files are of another network, or are damaged.
        ImportError: safetensors is not installed (``pip install pyro-l0[export]``).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not isinstance(network, nn.Module):
        raise TypeError(f"Expected network to be the module that was compacted, but got {network!r}.")
    try:
        values = json.loads(Path(str(path) + ".json").read_text())
        certificate = float(values["certificate"])
        *before, found = [Plan.from_json(json.dumps(text)) for text in values["plans"]]
        state = load_file(str(path) + ".safetensors")
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"Expected the files of a compacted network at {str(path)!r}, but got: {error}") from error
    try:
        for earlier in before:
            network = rewrite(network, earlier, keep_gates=True)
        small = rewrite(network, found)
        small.load_state_dict(state)
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"Expected the files at {str(path)!r} to be of this network, but they do not fit: {error}"
        ) from error
    return Compacted(small, found, certificate, tuple(before))
