"""A run in a file, so that a killed one goes on bit for bit."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from pyro_l0.compaction.files import hold, replace_file
from pyro_l0.training.processes import processes, rank
from pyro_l0.training.stream import generators, random_state, set_random_state

__all__ = ["Checkpoint", "checksum"]

_FORMAT = 2
_LARGE = 1 << 30  # bytes of a tensor that holds fewer values than it has
_SHORT = 40  # characters of a value that a message shows


class Checkpoint:
    """The file of a run, replaced atomically after every epoch; with several processes the first one writes.

    The file has a SHA-256 of its contents, and the file before stays as ``.previous``. Reading runs no code: it holds
    tensors and plain values.

    Args:
        path: the file.
        described: plain values in which a run and the one that resumes it must agree, by name.
        loader: gives the batches; the states of its random number generators are kept, too.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Checkpoint(f"{folder}/run.pt", {"seed": 1}).save({"epoch": 3})
        ...     Checkpoint(f"{folder}/run.pt", {"seed": 1}).load(lambda state: print(state["epoch"]))
        3
    """

    def __init__(self, path: str | Path, described: Mapping[str, Any], loader: Iterable[object] = ()) -> None:
        self.path, self._described, self._loader = Path(path), dict(described), loader
        self._is_first = True  # to be saved by this process

    @staticmethod
    @contextmanager
    def held(path: str | Path | None, resume: bool) -> Iterator[None]:
        """A context in which no other run can use the file.

        Args:
            path: the file; None for none.
            resume: whether the run continues from a file that exists.

        Raises:
            FileExistsError: the file exists, and the run does not resume.
            FileNotFoundError: its folder does not exist.
            ValueError: another run holds it.
        """
        with ExitStack() as stack:
            refusals: list[Exception | None] = [None]
            if path is not None and rank() == 0:
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
        """Write a run's state and the random states of every process.

        Args:
            state: tensors and plain values by name.

        Raises:
            ValueError: the state holds something else; the file stays as it was.
            OSError: the file cannot be written; it stays as it was.
        """
        randoms = [random_state(self._loader)]
        if processes() > 1:
            gathered: list[Any] = [None] * processes()
            distributed.all_gather_object(gathered, randoms[0])
            randoms = gathered
            if rank():
                return
        content = {"format": _FORMAT, "described": self._described, "random": randoms, "state": dict(state)}
        file = io.BytesIO()
        torch.save({**content, "sha256": checksum(content)}, file)
        previous: Path | None = self._previous
        if self._is_first:
            _check_readable(file)
            previous = previous if _is_whole(self.path) else None
        try:
            replace_file(self.path, file.getbuffer(), previous)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._is_first = False

    def load(self, take_up: Callable[[Mapping[str, Any]], None], device: torch.device | str = "cpu") -> None:
        """Pass the saved state on and restore the random states; do nothing if there is no file yet.

        Args:
            take_up: gets the state, such as the run's ``load_state_dict``.
            device: the device where the run trains.

        Raises:
            ValueError: the file is damaged, was changed, is incomplete, or is of another run.
        """
        if not self.path.exists():
            return
        try:
            content = _read(self.path)
            described, randoms, state = content["described"], content["random"], content["state"]
            other = self._differences(content["format"], described, randoms)
            if not other:
                take_up(state)
                set_random_state(randoms[rank()], self._loader, torch.device(device))
        except Exception as error:
            raise ValueError(
                f"Expected the whole checkpoint of a run at {str(self.path)!r}, but it can't be read; "
                f"{self._advice()}. {type(error).__name__}: {error}"
            ) from error
        if other:
            short = [key for key in other if key in described and len(repr(described[key])) < _SHORT]
            has = ", ".join(f"{key}={described[key]!r}" for key in short)
            raise ValueError(
                f"Expected a checkpoint of this run at {str(self.path)!r}, but it differs in {', '.join(other)}; give "
                f"the same arguments, or delete it.{f' It has {has}.' if has else ''}"
            )

    def _differences(self, version: int, described: Mapping[str, Any], randoms: list[Any]) -> list[str]:
        other = [key for key in self._described if described.get(key) != self._described[key]]
        if version != _FORMAT:
            other.append("its format")
        if len(randoms) != processes():
            other.append("the number of processes")
        elif len(randoms[0]["loader"]) != len(generators(self._loader)):
            other.append("loader's generators")
        return other

    @property
    def _previous(self) -> Path:
        return self.path.with_name(f"{self.path.name}.previous")

    def _advice(self) -> str:
        if _is_whole(self._previous):
            return f"rename {str(self._previous)!r}, the one before it, to go on from there, or delete it to begin anew"
        return "delete it to begin anew"


def saved_entry(path: str | Path, name: str) -> Any:
    """An entry of the state in a file, before there is a run that takes it up; None without a whole file."""
    return _read(Path(path))["state"].get(name) if _is_whole(Path(path)) else None


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
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("a part of it is compressed, which torch.save never does")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if content.pop("sha256", None) != checksum(content):
        raise ValueError("its SHA-256 is another one than it was when saved: it is damaged or was changed")
    return content


def _is_whole(path: Path) -> bool:
    try:
        _read(path)
    except Exception:  # damage can break the reader in every way
        return False
    return True


def _check_readable(file: io.BytesIO) -> None:
    file.seek(0)
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"Expected a state of tensors and plain values, but it can't be read back: {error}") from error


def checksum(content: Mapping[str, Any]) -> str:
    """A number that tells contents apart, by all their tensors and plain values; a network's is that of its state."""
    digest = hashlib.sha256()
    for name, value in content.items():
        _add(digest, str(name), value)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, value: object) -> None:
    if isinstance(value, Tensor):
        # One element that stands for many, as expand makes them, may stand for more than there is memory.
        if value.nbytes > max(value.untyped_storage().nbytes(), _LARGE):
            raise ValueError(f"{name} repeats some of its values, {value.nbytes} bytes in all")
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (Mapping, list, tuple)):
        entries = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        digest.update(f"{name} of {len(entries)}".encode())
        for key, entry in entries:
            _add(digest, f"{name}[{key!r}]", entry)
    else:
        digest.update(f"{name} {sorted(map(repr, value)) if isinstance(value, set) else repr(value)}".encode())
