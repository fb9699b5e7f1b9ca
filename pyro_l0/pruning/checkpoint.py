"""A pruning run in a file, so that a killed one goes on bit for bit."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, distributed, nn

from pyro_l0.compaction.files import hold, replace_file
from pyro_l0.pruning.batches import Loader, is_first, processes
from pyro_l0.pruning.stream import generators, random_state, set_random_state

__all__ = ["Checkpoint", "checksum", "numbers", "told"]

_FORMAT = 2
_NEW = ("loss", "optimiser's numbers")  # what files of format 1 don't say of their run


class Checkpoint:
    """A file that is replaced whole after every epoch; of several processes the first one writes.

    It carries a SHA-256 of all that is in it; files of earlier versions have none and are read as they are. The one
    before it stays beside it, as ``.previous``.

    Args:
        path: the file.
        described: what a run and the file that it goes on from must agree in.
        loader: whose random numbers are kept, too.
    """

    def __init__(self, path: str | Path, described: Mapping[str, Any], loader: Loader) -> None:
        self.path, self._described, self._loader = Path(path), dict(described), loader

    @staticmethod
    @contextmanager
    def held(path: str | Path | None, resume: bool) -> Iterator[None]:
        """A context in which no other run holds the file.

        Raises:
            FileExistsError: there is a file, and the run is not to go on from it.
            FileNotFoundError: its folder does not exist.
            ValueError: another run holds it.
        """
        with ExitStack() as stack:
            refusals: list[Exception | None] = [None]
            if path is not None and is_first():
                try:
                    _enter(stack, Path(path), resume)
                except (OSError, ValueError) as error:
                    refusals[0] = error
            if processes() > 1:
                distributed.broadcast_object_list(refusals)
            if refusals[0] is not None:
                raise refusals[0]
            yield

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
        file = io.BytesIO()
        torch.save({**content, "sha256": checksum(content)}, file)
        replace_file(self.path, file.getbuffer(), self._previous)

    def load(self, device: torch.device, take_up: Callable[[Mapping[str, Any]], None]) -> None:
        """Hand out the state to go on from, after the random numbers were set; nothing if there is no file yet.

        Raises:
            ValueError: the file is damaged, was changed, lacks something, or is of another run.
        """
        if not self.path.exists():
            return
        try:
            content = _read(self.path)
            described, randoms, state = content["described"], content["random"], content["state"]
            new = _NEW if content["format"] == 1 else ()
            other = [key for key in self._described if key not in new and described.get(key) != self._described[key]]
            if content["format"] not in (1, _FORMAT):
                other.append("its format")
            if len(randoms) != processes():
                other.append("the number of processes")
            elif len(randoms[0]["loader"]) != len(generators(self._loader)):
                other.append("loader's generators")
            if not other:
                rank = distributed.get_rank() if processes() > 1 else 0
                set_random_state(randoms[rank], self._loader, device)
                take_up(state)
        except Exception as error:
            raise ValueError(
                f"Expected the whole checkpoint of a pruning run at {str(self.path)!r}, but it can't be read; "
                f"{self._advice()}. {type(error).__name__}: {error}"
            ) from error
        if other:
            raise ValueError(
                f"Expected a checkpoint of this run at {str(self.path)!r}, but it differs in {', '.join(other)}; give "
                "the same arguments, or delete it."
            )

    @property
    def _previous(self) -> Path:
        return self.path.with_name(f"{self.path.name}.previous")

    def _advice(self) -> str:
        with suppress(Exception):
            _read(self._previous)
            return f"rename {str(self._previous)!r}, the one before it, to go on from there, or delete it to begin anew"
        return "delete it to begin anew"


def _enter(stack: ExitStack, path: Path, resume: bool) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"Expected a folder for the checkpoint at {str(path)!r}, but there is none.")
    stack.enter_context(hold(path))
    if path.exists() and not resume:
        raise FileExistsError(
            f"Expected no file at {str(path)!r}, which would be overwritten; give resume=True to go on from it, or "
            "delete it."
        )


def _read(path: Path) -> dict[str, Any]:
    """What a file holds, checked."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    found = content.pop("sha256", None)
    if (found is not None or content["format"] != 1) and found != checksum(content):
        raise ValueError("its SHA-256 is another one than it was when saved: it is damaged or was changed")
    return content


def checksum(content: Mapping[str, Any]) -> str:
    """A number that tells contents apart, by all their tensors and plain values; a network's is that of its state."""
    digest = hashlib.sha256()
    for name, value in content.items():
        _add(digest, str(name), value)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, value: object) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (Mapping, list, tuple)):
        entries = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        digest.update(f"{name} of {len(entries)}".encode())
        for key, entry in entries:
            _add(digest, f"{name}[{key!r}]", entry)
    else:
        digest.update(f"{name} {sorted(map(repr, value)) if isinstance(value, set) else repr(value)}".encode())


def told(value: object) -> str:
    """A text that tells a user's function from others: its name, and the names and numbers in its code and around it.

    A module goes by its own text, its numbers and its tensors, any other object by its class.
    """
    if isinstance(value, partial):
        return f"{told(value.func)} of {numbers([value.args, value.keywords])}"
    if isinstance(value, nn.Module):
        return f"{value} {numbers(vars(value))} {checksum(value.state_dict())}"
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if not isinstance(value, FunctionType):
        return str(name)
    around = []
    for cell in value.__closure__ or ():
        with suppress(ValueError):  # it is empty
            around.append(cell.cell_contents)
    code = value.__code__
    names = () if value.__module__.startswith("torch.") else code.co_names  # which change from version to version
    return f"{name} {names} {numbers([code.co_consts, value.__defaults__, value.__kwdefaults__, around])}"


def numbers(value: object, name: str = "") -> list[str]:
    """The numbers and tensors in nested containers, with their places; flags and all else are left out."""
    if isinstance(value, (Mapping, list, tuple)):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [x for key, entry in entries for x in numbers(entry, f"{name}.{key}")]
    if isinstance(value, Tensor):
        return [f"{name} {checksum({'': value})}"]
    return [f"{name} {value}"] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
