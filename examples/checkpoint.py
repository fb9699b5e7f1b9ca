"""Checkpoints that survive a crash, and that are refused when damaged or of another run."""

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["CheckpointError", "check_same", "load", "previous_path", "save"]


class CheckpointError(ValueError):
    """A checkpoint is damaged, is no checkpoint, or belongs to another run."""


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
        CheckpointError: ``state`` has no fingerprint, or ``load`` could not read it back. What
            stood at ``path`` still does.
    """
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    _read(fresh)
    if _is_whole(path):
        # A copy, because a rename would leave a moment without any file at path.
        kept = path.with_name(path.name + ".previous.tmp")
        shutil.copyfile(path, kept)
        kept.replace(previous_path(path))
    fresh.replace(path)


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
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a checkpoint, found no file. {_advice(path)}")
    try:
        state = _read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_advice(path)}") from error
    check_same(path, state["fingerprint"], expected_fingerprint)
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


def _read(path: Path) -> dict[str, Any]:
    """Read a whole checkpoint, whatever its fingerprint."""
    content = io.BytesIO(path.read_bytes())
    # A damaged archive can break either reader in many ways, so every exception means damage;
    # the disk's own errors have passed through above.
    try:
        # torch checks no checksums: a flipped byte in a tensor would load without a word.
        with zipfile.ZipFile(content) as archive:
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
    return state


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
