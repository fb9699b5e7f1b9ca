"""Files that are replaced whole or not at all, and held by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import shutil
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

__all__ = ["hold", "replace_file"]

_held: set[Path] = set()  # by this process, which the kernel gives a lock twice, and takes both with the first to go


def replace_file(target: Path, data: bytes | memoryview, previous: Path | None = None) -> None:
    """Put a new file in the place of another, whole or not at all, with its permissions.

    The file is written beside its place, brought to the disk and renamed; if that fails, the old file is as it was. A
    symbolic link at that place is replaced and not followed. A process that is killed may leave a file
    ``.pyro_l0-*.tmp``, which can be deleted. With ``previous`` the old file goes there, and at every moment there is a
    file at ``target``.
    """
    old: int | None = None
    with contextlib.suppress(FileNotFoundError):
        old = target.lstat().st_mode
    if old is not None and stat.S_ISDIR(old):
        raise IsADirectoryError(errno.EISDIR, "Expected a place for a file, but got a folder", str(target))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "Expected a folder to save in, but there is none", str(target.parent))
    mode = stat.S_IMODE(old) if old is not None and stat.S_ISREG(old) else None
    # Names that nobody can foresee, made anew: no link that waits there is written through.
    fresh, kept = (target.with_name(f".pyro_l0-{secrets.token_hex(8)}.tmp") for _ in range(2))

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else 0o600)

    try:
        with open(fresh, "xb", opener=opener) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            fresh.chmod(mode)
            if previous is not None:
                try:
                    os.link(target, kept)
                except OSError:  # not every file system has links
                    shutil.copy2(target, kept)
                kept.replace(previous)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
        kept.unlink(missing_ok=True)
    # Not every system can do this for a folder; the file is whole without it.
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def hold(target: Path) -> Iterator[None]:
    """A context in which no other process holds a file; ``target.lock`` beside it says who does.

    The kernel holds the lock and lets go when the process ends, however it ends: a lock file that stays behind stops
    nobody. Workers that the process starts do not hold it.
    """
    if sys.platform == "win32":
        yield
        return
    place = target.parent.resolve() / f"{target.name}.lock"
    refusal = f"Expected {str(target)!r} to be a file that no other run writes, but %s holds it; wait until that run "
    refusal += "has ended, or choose another file."
    if place in _held:
        raise ValueError(refusal % "a run of this process")
    while True:
        # A link in its place is not followed.
        file = open(os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")  # noqa: SIM115
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            with file:
                raise ValueError(refusal % (file.read(200).strip() or "another process")) from None
        except OSError as error:
            text = f"{target}: its file system has no locks ({error.strerror}); let no second run write it."
            warnings.warn(text, stacklevel=3)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), place.stat()):
                break
        file.close()  # of a run that has ended meanwhile
    with file:
        _held.add(place)
        try:
            file.truncate(0)
            file.seek(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
            yield
        finally:
            _held.remove(place)
            place.unlink(missing_ok=True)
