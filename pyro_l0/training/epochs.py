"""The loop over the epochs of a run, its file, and its loader's state, so that a killed run goes on bit for bit."""

from __future__ import annotations

import hashlib
import io
import math
import random
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator, Tensor, nn

from pyro_l0.compaction.storage import hold, replace_file
from pyro_l0.training.processes import gather, in_first, processes, rank, share_value

_KEPT = 20  # batches of an iterator that can't be begun anew


class Stream:
    """Epochs of so many batches: each continues where the last one ended, and at the end the loader begins anew.

    The loader needs no length, and may be an iterator, which can't be begun anew.
    """

    def __init__(self, loader: Iterable[object], length: int) -> None:
        self.loader, self._length = loader, length
        self._pass: Iterator[object] | None = None
        self._begun: dict[str, Any] = {}  # the random numbers when the pass began
        self._taken = 0  # batches of the pass
        self._first: list[object] = []  # of an iterator, seen before the training
        self._last: deque[object] = deque(maxlen=_KEPT)  # of an iterator

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[object]:
        for _ in range(self._length):
            yield self._next()

    def _next(self) -> object:
        batch = self._first.pop() if self._first else self._read()
        self._taken += 1
        if isinstance(self.loader, Iterator):
            self._last.append(batch)
        return batch

    def _read(self) -> object:
        if self._pass is None:
            self._begin()
        assert self._pass is not None
        for batch in self._pass:
            return batch
        taken = self._taken
        if taken and not isinstance(self.loader, Iterator):
            self._begin()
            return self._read()
        raise ValueError(
            f"Expected a loader that gives batches again and again, but it ended after {taken}; give one that can be "
            "begun anew, such as a DataLoader or a list of batches."
        )

    def _begin(self) -> None:
        self._begun, self._taken, self._pass = random_state(self.loader), 0, iter(self.loader)

    def some(self) -> Iterator[object]:
        """Batches for something else than the training: another pass, or of an iterator the last ones, or the next."""
        if not isinstance(self.loader, Iterator):
            return iter(self.loader)
        if not self._last and not self._first:
            self._first.append(self._read())
        return iter(list(self._last or self._first))

    def state_dict(self) -> dict[str, Any]:
        """How many batches of the pass were taken, and the random state at its start."""
        return {"taken": self._taken, "begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from :meth:`state_dict`, past the batches that were taken; this changes the random numbers."""
        if state["taken"]:
            set_random_state(state["begun"], self.loader, device)
            self._begin()
        for _ in range(state["taken"]):
            self._next()


def some_batches(loader: Iterable[object]) -> Iterator[object]:
    """Batches for something else than the training."""
    return loader.some() if isinstance(loader, Stream) else iter(loader)


# ------------------------------------------------------------ random numbers


def generators(loader: Iterable[object]) -> list[Generator]:
    """The generators of a loader and of its sampler, where they have any of their own."""
    if isinstance(loader, Stream):
        loader = loader.loader
    holders = [loader, getattr(loader, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return [generator for generator in found if isinstance(generator, Generator)]


def random_state(loader: Iterable[object]) -> dict[str, Any]:
    """The states of all random number generators, the loader's own among them, and a stream's position."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  # what augmentations may use
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "loader": [generator.get_state() for generator in generators(loader)],
        "stream": loader.state_dict() if isinstance(loader, Stream) else None,
    }


def set_random_state(state: Mapping[str, Any], loader: Iterable[object], device: torch.device) -> None:
    """Set the random states of torch, NumPy, Python, the device and the loader to those of a :func:`random_state`."""
    if isinstance(loader, Stream):
        loader.load_state_dict(state["stream"], device)
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    for generator, own in zip(generators(loader), state["loader"], strict=True):
        generator.set_state(own)


_FORMAT = 4
_SHORT = 40  # characters of a value that a message shows
# Between two files of a run pass at least so many times the seconds that the last one took. What epochs cost beside
# their training is then a small part of it, however short they are, however slow the disk and long the history.
_SPARING = 100.0


class Checkpoint:
    """The file of a run, replaced atomically; with several processes the first one writes.

    The file ends with a SHA-256 of itself, and the file before stays as ``.previous``. Reading runs no code: it holds
    tensors and plain values.

    Args:
        path: the file.
        fingerprint: plain values in which a run and the one that resumes it must agree, by name.
        loader: gives the batches; the states of its random number generators are saved, too.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/run.pt"
        ...     Checkpoint(path, {"seed": 1}).save({"epoch": 3})
        ...     Checkpoint(path, {"seed": 1}).load(lambda state: print(state["epoch"]))
        3
    """

    def __init__(self, path: str | Path, fingerprint: Mapping[str, Any], loader: Iterable[object] = ()) -> None:
        self.path, self._fingerprint, self._loader = Path(path), dict(fingerprint), loader
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
            in_first(lambda: None if path is None else _enter(stack, Path(path), resume))
            yield

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a run's state and the random states of every process.

        Args:
            state: tensors and plain values by name.

        Raises:
            ValueError: the state holds something else; the file stays as it was.
            OSError: the file cannot be written; it stays as it was.
        """
        randoms = gather(random_state(self._loader))
        if rank():
            return
        content = {"format": _FORMAT, "fingerprint": self._fingerprint, "random": randoms, "state": dict(state)}
        file = io.BytesIO()
        torch.save(content, file)
        previous: Path | None = self._previous
        if self._is_first:
            _check_readable(file)
            previous = previous if _is_whole(self.path) else None
        replace_file(self.path, _sealed(file.getbuffer()), previous)
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
            fingerprint, randoms, state = content["fingerprint"], content["random"], content["state"]
            other = self._differences(content["format"], fingerprint, randoms)
            if not other:
                take_up(state)
                set_random_state(randoms[rank()], self._loader, torch.device(device))
        except Exception as error:
            raise ValueError(
                f"Expected the whole checkpoint of a run at {str(self.path)!r}, but it can't be read; "
                f"{self._advice()}. {type(error).__name__}: {error}"
            ) from error
        if other:
            short = [key for key in other if key in fingerprint and len(repr(fingerprint[key])) < _SHORT]
            has = ", ".join(f"{key}={fingerprint[key]!r}" for key in short)
            raise ValueError(
                f"Expected a checkpoint of this run at {str(self.path)!r}, but it differs in {', '.join(other)}; give "
                f"the same arguments, or delete it.{f' It has {has}.' if has else ''}"
            )

    def _differences(self, version: int, fingerprint: Mapping[str, Any], randoms: list[Any]) -> list[str]:
        other = [key for key in self._fingerprint if fingerprint.get(key) != self._fingerprint[key]]
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
    stack.enter_context(hold(path))
    if path.exists() and not resume:
        raise FileExistsError(
            f"Expected no file at {str(path)!r}, which would be overwritten; give resume=True to go on from it, or "
            "delete it."
        )


def _sealed(archive: bytes | memoryview) -> bytes:
    """An archive with its SHA-256, which takes the place of the empty comment at its end."""
    body = archive[:-2]
    digest = hashlib.sha256(body).digest()
    return b"".join((body, len(digest).to_bytes(2, "little"), digest))


def _read(path: Path) -> dict[str, Any]:
    """The entries of a checkpoint. A ValueError says that it is damaged or compressed."""
    data = path.read_bytes()
    if _sealed(memoryview(data)[:-32]) != data:
        raise ValueError("its SHA-256 is another one than it was when saved: it is damaged or was changed")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("a part of it is compressed, which torch.save never does")
    content: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
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
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (Mapping, list, tuple)):
        entries = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        digest.update(f"{name} of {len(entries)}".encode())
        for key, entry in entries:
            _add(digest, f"{name}[{key!r}]", entry)
    else:
        digest.update(f"{name} {sorted(map(repr, value)) if isinstance(value, set) else repr(value)}".encode())


class Trainable(Protocol):
    """A run that :func:`~pyro_l0.training.epochs` trains has these members.

    Attributes:
        history: an entry for every epoch so far, a part of the state; ``epochs`` adds to it.
    """

    history: list[dict[str, Any]]

    @property
    def is_done(self) -> bool:
        """Whether there is no epoch left to train."""

    def advance(self) -> dict[str, Any]:
        """Train for an epoch and return its history entry, values by name."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, except random states."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; ``history`` too."""


def epochs(run: Trainable, checkpoint: Checkpoint | None = None) -> Iterator[dict[str, Any]]:
    """Train a run to its end, and write checkpoints.

    They come after epochs, the first and the last among them, and take at most a hundredth of the time: short epochs
    share one. If the caller stops at an epoch's entry, that epoch is not written, and a resumed run repeats it.

    Args:
        run: the run. To resume, first call ``checkpoint.load(run.load_state_dict)``.
        checkpoint: the file; None for none.

    Yields:
        The history entry of each epoch, for instance to print it.

    Example:
        >>> class Halving:
        ...     def __init__(self):
        ...         self.x, self.history = 1.0, []
        ...
        ...     is_done = property(lambda self: len(self.history) == 2)
        ...
        ...     def advance(self):
        ...         self.x /= 2
        ...         return {"x": self.x}
        >>> list(epochs(Halving()))
        [{'x': 0.5}, {'x': 0.25}]
    """
    end, took = -math.inf, 0.0  # of the last file
    while not run.is_done:
        entry = run.advance()
        run.history.append(entry)
        yield entry
        start = time.perf_counter()
        if checkpoint is not None and share_value(run.is_done or start - end >= _SPARING * took):
            checkpoint.save(run.state_dict())
            end = time.perf_counter()
            took = end - start


def check_finite(epoch: int, loss: float, *modules: nn.Module) -> None:
    """Stop a training that has diverged, before its state replaces a good checkpoint."""
    broken = [name for x in modules for name, p in x.named_parameters() if not bool(p.isfinite().all())]
    if math.isfinite(loss) and not broken:
        return
    what = f"weights are not after epoch {epoch}: {', '.join(broken[:3])}"
    if not math.isfinite(loss):
        what = f"the mean loss of epoch {epoch} is {loss}"
    raise FloatingPointError(
        f"Expected the training to stay finite, but {what}. Take a smaller learning rate, or look for a gradient that "
        "is not finite; a checkpoint holds an epoch before."
    )
