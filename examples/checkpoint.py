"""Checkpoints that survive a crash, and that are refused when damaged, incomplete or of another run."""

import hashlib
import io
import json
import math
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pyro_l0.compaction.files import replace_file

__all__ = [
    "CheckpointError",
    "check_history",
    "check_moments",
    "check_same",
    "fitting",
    "load",
    "previous_path",
    "read_result",
    "require",
    "save",
    "write_json",
]


class CheckpointError(ValueError):
    """A checkpoint is damaged, is no checkpoint, lacks something, or belongs to another run."""


def previous_path(path: Path) -> Path:
    """Return where ``save`` keeps the checkpoint that it replaces."""
    return path.with_name(path.name + ".previous")


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; at every moment there is a whole one at ``path``, the old or the new.

    Args:
        path: the file; the one it replaces is kept at ``previous_path(path)``.
        state: tensors and plain Python values. ``state["fingerprint"]`` is a dict of plain values
            that says which run this is (network, data, objective, sizes, ...).

    Raises:
        CheckpointError: ``state`` has no fingerprint, or ``load`` could not read it back.
        FloatingPointError: a value is not finite.
        OSError: the file can't be written. What stood at ``path`` still does, as in the other cases.
    """
    place = _not_finite(state)
    if place is not None:
        raise FloatingPointError(f"Expected finite values in a checkpoint, but got others at {place}. {path} stays.")
    content = io.BytesIO()
    torch.save({**state, "sha256": _digest(state)}, content)
    try:
        _parse(path, content)
        replace_file(path, content.getbuffer(), previous_path(path) if _is_whole(path) else None)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, value: Any) -> None:
    """Write a result in one piece, so that one that is there is whole.

    Raises:
        ValueError: a number is not finite.
    """
    replace_file(path, json.dumps(value, indent=1, allow_nan=False).encode())


def read_result(path: Path, options: dict[str, Any], entries: Sequence[str]) -> dict[str, Any]:
    """Read what a finished run left as JSON.

    Args:
        path: the file.
        options: what its entry ``"options"`` must say.
        entries: what else it must have.

    Raises:
        CheckpointError: it is damaged, lacks an entry, or is of another run.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
        found = {name: result[name] for name in ("options", *entries)}["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected the result of a run with the entries options, {', '.join(entries)}, but it is damaged "
            f"or of another program ({type(error).__name__}: {error}); remove it to run anew"
        ) from error
    check_same(path, found, options)
    return result


def require(path: Path) -> None:
    """Refuse to go on without a checkpoint.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a checkpoint, found no file. {_advice(path)}")


def load(path: Path, expected_fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint of this run; it can hold data only, so a foreign file runs no code.

    Args:
        path: the file.
        expected_fingerprint: what ``state["fingerprint"]`` must equal.

    Returns:
        The state, with its tensors on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, or its fingerprint is another.
    """
    require(path)
    try:
        state = _read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_advice(path)}") from error
    check_same(path, state["fingerprint"], expected_fingerprint)
    place = _not_finite(state)
    if place is not None:
        raise CheckpointError(f"{path}: expected finite values, but got others at {place}")
    return state


def check_same(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse what another run left at a path.

    Args:
        path: for the message.
        found: what the file says of its run.
        expected: what it must say.

    Raises:
        CheckpointError: they differ; names each difference.
    """
    differences = [
        f"{key}: expected {expected.get(key)!r}, got {found.get(key)!r}"
        for key in expected | found
        if expected.get(key) != found.get(key)
    ]
    if differences:
        raise CheckpointError(f"{path} is of another run: {'; '.join(differences)}")


def check_history(path: Path, history: Any, epochs: int, entries: Sequence[str]) -> None:
    """Refuse a history that is not that of the first epochs of a run.

    Args:
        path: for the message.
        history: what the checkpoint says of each epoch, with its number as ``"epoch"``.
        epochs: how many the run shall have in all.
        entries: what each epoch must say.

    Raises:
        CheckpointError: an epoch is missing or lacks an entry, or there are more than the run shall have.
    """
    numbers = [entry["epoch"] for entry in history]
    if numbers != list(range(1, len(numbers) + 1)):
        raise CheckpointError(f"{path}: expected the epochs from 1 on, one after the other, but got {numbers}")
    for entry in history:
        missing = [name for name in entries if name not in entry]
        if missing:
            raise CheckpointError(
                f"{path}: expected {', '.join(missing)} of epoch {entry['epoch']}, found no such entry"
            )
    if len(history) > epochs:
        raise CheckpointError(f"Expected epochs of at least {len(history)}, as many as {path} has, but got {epochs}.")


def check_moments(
    optimiser: torch.optim.Optimizer, entries: Sequence[str], without: Sequence[torch.nn.Parameter] = ()
) -> None:
    """Refuse an optimiser's loaded state that lacks a parameter's, which would start anew without a word.

    Args:
        optimiser: after ``load_state_dict``.
        entries: what it keeps of each parameter, such as ``"exp_avg"``; none before its first step.
        without: parameters of which it keeps nothing yet, because they had no gradient so far.

    Raises:
        ValueError: a parameter lacks an entry, or has one of another shape.
    """
    waiting = {id(parameter) for parameter in without}
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            moments = optimiser.state.get(parameter, {})
            missing = [name for name in entries if name not in moments and id(parameter) not in waiting]
            shapes = {tuple(x.shape) for x in moments.values() if isinstance(x, torch.Tensor) and x.dim()}
            if missing or not shapes <= {tuple(parameter.shape)}:
                raise ValueError(
                    f"the optimiser's state of a parameter of shape {tuple(parameter.shape)} without "
                    f"{', '.join(missing) or 'that shape'}"
                )


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Around what takes a loaded state up: whatever it finds missing or of another kind is the checkpoint's fault.

    Raises:
        CheckpointError: the state does not fit.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        what = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{path}: expected the whole state of this run, but found {what}. {_advice(path)}"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    """Read a whole checkpoint, whatever its fingerprint."""
    return _parse(path, io.BytesIO(path.read_bytes()))


def _parse(path: Path, content: io.BytesIO) -> dict[str, Any]:
    """What the bytes of a checkpoint hold, checked."""
    content.seek(0)
    # A damaged archive can break either reader in many ways, so every exception means damage;
    # the disk's own errors have passed through above.
    try:
        with zipfile.ZipFile(content) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise zipfile.BadZipFile("a part is compressed, which torch.save never does")
            # torch checks no checksums: a flipped byte in a tensor would load without a word.
            wrong = archive.testzip()
        if wrong is not None:
            raise zipfile.BadZipFile(f"the checksum of its part {wrong} is wrong")
        content.seek(0)
        state = torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: expected tensors and plain values, got something else ({error})") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or no checkpoint: expected a whole archive written by torch.save, "
            f"got {len(content.getbuffer())} bytes that break inside ({error})"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("fingerprint"), dict):
        raise CheckpointError(f"{path}: expected a dict with the dict 'fingerprint', got no such")
    digest = state.pop("sha256", None)
    if digest != _digest(state):
        raise CheckpointError(f"{path} is damaged or changed: expected the SHA-256 of its values, but got {digest!r}")
    return state


def _leaves(value: Any, name: str = "state") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values with their places, and every container's kind and length."""
    if isinstance(value, dict):
        yield name, f"dict of {len(value)}"
        for key, entry in value.items():
            yield from _leaves(entry, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        yield name, f"{type(value).__name__} of {len(value)}"
        for i, entry in enumerate(value):
            yield from _leaves(entry, f"{name}[{i}]")
    else:
        yield name, value


def _not_finite(state: dict[str, Any]) -> str | None:
    """Where the first value is that is not finite, if one is."""
    for name, leaf in _leaves(state):
        if isinstance(leaf, torch.Tensor):
            if not leaf.isfinite().all():
                return name
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            return name
    return None


def _digest(state: dict[str, Any]) -> str:
    """SHA-256 of all values and their places."""
    found = hashlib.sha256()
    for name, leaf in _leaves(state):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{name}: {leaf.dtype} {tuple(leaf.shape)}\n".encode())
            # One element that stands for many, as expand makes them, may stand for more than there is memory.
            if leaf.nbytes > leaf.untyped_storage().nbytes():
                raise CheckpointError(f"Expected tensors with all their values, but {name} repeats some; clone it.")
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            found.update(f"{name}: {leaf!r}\n".encode())
    return found.hexdigest()


def _is_whole(path: Path) -> bool:
    try:
        _read(path)
    except (CheckpointError, FileNotFoundError):
        return False
    return True


def _advice(path: Path) -> str:
    previous = previous_path(path)
    if _is_whole(previous):
        return f"The checkpoint before it, {previous}, can be used: --resume --checkpoint {previous}"
    return "There is no usable checkpoint before it: start again without --resume"
