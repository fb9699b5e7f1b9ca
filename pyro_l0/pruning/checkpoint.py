"""A pruning run in a file, so that a killed one goes on bit for bit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from pyro_l0.pruning.batches import Loader, processes
from pyro_l0.pruning.stream import generators, random_state, set_random_state

__all__ = ["Checkpoint", "checksum"]

_FORMAT = 1


class Checkpoint:
    """A file that is replaced whole after every epoch; of several processes the first one writes.

    Args:
        path: the file.
        described: what a run and the file that it goes on from must agree in.
        loader: whose random numbers are kept, too.
        resume: whether the run goes on from the file.

    Raises:
        FileExistsError: there is a file, and the run is not to go on from it.
        FileNotFoundError: its folder does not exist.
    """

    def __init__(self, path: str | Path, described: Mapping[str, Any], loader: Loader, resume: bool) -> None:
        self.path, self._described, self._loader = Path(path), dict(described), loader
        if self.path.exists() and not resume:
            raise FileExistsError(
                f"Expected no file at {str(self.path)!r}, which would be overwritten; give resume=True to go on from "
                "it, or delete it."
            )
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"Expected a folder for the checkpoint at {str(self.path)!r}, but there is none.")

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a run's state and the random numbers' of every process."""
        randoms = [random_state(self._loader)]
        if processes() > 1:
            gathered: list[Any] = [None] * processes()
            distributed.all_gather_object(gathered, randoms[0])
            randoms = gathered
            if distributed.get_rank():
                return
        content = {"format": _FORMAT, "described": self._described, "random": randoms, "state": dict(state)}
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        torch.save(content, temporary)
        os.replace(temporary, self.path)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The state to go on from, after the random numbers were set; None if there is no file yet.

        Raises:
            ValueError: the file is of another run.
        """
        if not self.path.exists():
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            described, randoms, state = content["described"], content["random"], content["state"]
        except Exception as error:
            raise ValueError(
                f"Expected a checkpoint of a pruning run at {str(self.path)!r}, but it can't be read; delete it to "
                f"begin anew. {type(error).__name__}: {error}"
            ) from error
        other = [key for key in self._described if described.get(key) != self._described[key]]
        if content.get("format") != _FORMAT:
            other.append("its format")
        if len(randoms) != processes():
            other.append("the number of processes")
        elif len(randoms[0]["loader"]) != len(generators(self._loader)):
            other.append("loader's generators")
        if other:
            raise ValueError(
                f"Expected a checkpoint of this run at {str(self.path)!r}, but it differs in {', '.join(other)}; give "
                "the same arguments, or delete it."
            )
        rank = distributed.get_rank() if processes() > 1 else 0
        set_random_state(randoms[rank], self._loader, device)
        found: dict[str, Any] = state
        return found


def checksum(network: nn.Module) -> str:
    """A number that tells networks apart, by all their tensors."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
