"""A compacted network and its file: tensors, plans and a checksum in one, replaced whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from pyro_l0.compaction.apply import apply_in_place
from pyro_l0.compaction.certificate import Certificate
from pyro_l0.compaction.plan import Plan
from pyro_l0.expect import expect
from pyro_l0.nn.engine.record import copied

__all__ = ["Compacted", "hold", "load_compacted", "replace_file"]


def replace_file(target: Path, data: bytes | memoryview, previous: Path | None = None) -> None:
    """Put a new file in the place of another, whole or not at all, as :meth:`Compacted.save` says.

    The file is written beside its place, brought to the disk and renamed. With ``previous`` the old file goes there,
    and at every moment there is a file at ``target``.
    """
    old: int | None = None
    with contextlib.suppress(FileNotFoundError):
        old = target.lstat().st_mode
    mode = stat.S_IMODE(old) if old is not None and stat.S_ISREG(old) else None
    # Names that nobody can foresee, made anew: no link that waits there is written through.
    fresh, backup = (target.with_name(f".pyro_l0-{secrets.token_hex(8)}.tmp") for _ in range(2))

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
                    os.link(target, backup)
                except OSError:  # not every file system has links
                    shutil.copy2(target, backup)
                backup.replace(previous)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
        backup.unlink(missing_ok=True)
    # Not every system can do this for a folder; the file is whole without it.
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def hold(target: Path) -> Iterator[None]:
    """A context in which no other run holds a file; the lock is ``target.lock`` beside it, which stays."""
    folder = target.parent.resolve(strict=True)  # FileLock would make one that is not there
    lock = FileLock(folder / f"{target.name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"Expected {str(target)!r} to be a file that no other run writes, but one holds it; wait until that run "
            "has ended, or choose another file."
        ) from None
    try:
        yield
    finally:
        lock.release()


# What the file's header says beside the tensors.
_PLANS, _SHA256 = "pyro_l0", "sha256"


@dataclass(frozen=True)
class Compacted:
    """What :func:`~pyro_l0.compaction.compact` returns: a small plain network and how it was made.

    Attributes:
        network: of the same class, without gates; it computes what the network with fixed gates computes.
        plan: which parts of the network remain.
        certificate: the largest relative difference between the two, a number; the differences of outputs and
            gradients, in evaluation and in training mode, are its attributes.
        before: the plans by which the network had shrunk before, if it did.
        reasons: by gate site, the closed units that stay, and why; empty for a network that was loaded.
        removed: by gate site, the units that left behind the gate; empty for a network that was loaded.
    """

    network: nn.Module
    plan: Plan = field(repr=False)
    certificate: Certificate
    before: tuple[Plan, ...] = field(default=(), repr=False)
    reasons: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    removed: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def needs_pyro_l0(self) -> bool:
        """Whether a pickle of the network holds code of this library, which it needs wherever it is loaded."""
        parts = [(x, *x._forward_pre_hooks.values(), *x._forward_hooks.values()) for x in self.network.modules()]
        return any(part.__module__.partition(".")[0] == "pyro_l0" for own in parts for part in own)

    def save(self, path: str | Path) -> None:
        """Write ``path.safetensors``: the tensors, the plans, and a SHA-256 of both; no pickle is involved.

        The file is replaced atomically: even after a crash there is the whole old file or the whole new one, and if two
        processes save at the same time, one wins. A symbolic link is replaced and not followed. The new file gets the
        permissions of the old one. A killed process may leave a file ``.pyro_l0-*.tmp``, which can be deleted.

        Args:
            path: the file without its ending ``.safetensors``.

        Raises:
            ValueError: a tensor or the certificate is not finite; nothing is written.
            OSError: the file cannot be written, or is a folder; the old file is unchanged.
            ImportError: safetensors is not installed (``pip install safetensors``).
        """
        from safetensors.torch import save

        state = {name: value.detach().cpu().contiguous() for name, value in _distinct(self.network).items()}
        wrong = _not_finite(self.network, state, self.certificate)
        if wrong is not None:
            raise ValueError(f"Expected a network of finite numbers to save at {str(path)!r}, but {wrong}.")
        plans = [json.loads(plan.to_json()) for plan in (*self.before, self.plan)]
        text = json.dumps({"certificate": float(self.certificate), "plans": plans})
        replace_file(_file_at(path), save(state, {_PLANS: text, _SHA256: _digest(text, state)}))


def load_compacted(network: nn.Module, path: str | Path) -> Compacted:
    """Read a file of :meth:`Compacted.save <pyro_l0.compaction.Compacted.save>`, and check it.

    The SHA-256 in the file reveals damage and careless changes. Someone who changes the file on purpose can recompute
    it; the file then holds wrong numbers, but no code.

    Args:
        network: the network that was compacted, as it was before any shrinking, with any weights, and of the type
            (float32, ...) that was saved; it is not changed.
        path: as given to ``save``.

    Returns:
        The small network, with its plan and the largest difference of its certificate.

    Raises:
        TypeError: ``network`` is not a module.
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read, is damaged, was changed, is of another program, another network or another
            type of numbers, or holds NaN or infinity; the message says which.
        ImportError: safetensors is not installed (``pip install safetensors``).

    Example:
        >>> import tempfile
        >>> from pyro_l0.compaction import compact
        >>> from pyro_l0.nn import L0Gate
        >>> network = nn.Sequential(nn.Linear(2, 3), L0Gate(3), nn.Linear(3, 1))
        >>> small = compact(network, {"1": torch.tensor([1.0, 0.0, 1.0])}, torch.ones(1, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     small.save(f"{folder}/small")
        ...     again = load_compacted(network, f"{folder}/small")
        >>> again.network[0].out_features
        2
    """
    expect(nn.Module, "the module that was compacted", network=network)
    state, plans, certificate = _read(path)
    *before, plan = plans
    try:
        small = copied(network).eval()
        for one in plans:
            apply_in_place(small, one, None)
        expected = _distinct(small)
        for name, value in expected.items():
            got = state.get(name, value).dtype
            if got != value.dtype:
                raise ValueError(
                    f"its tensor {name!r} is {got}, the network's {value.dtype}; load it into network.to({got})"
                )
        if expected.keys() != state.keys():
            raise ValueError(f"its tensors are others at {sorted(expected.keys() ^ state.keys())}")
        small.load_state_dict(state, strict=False)  # tied ones by their first name
    except Exception as error:  # a plan of another network breaks the rewriting in many ways
        raise ValueError(
            f"Expected the file '{path}.safetensors' to be of this network, but it does not fit: {error}"
        ) from error
    wrong = _not_finite(small, state, certificate)
    if wrong is not None:
        raise _refusal(_file_at(path), wrong)
    return Compacted(small, plan, certificate, tuple(before))


def _distinct(network: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network, a tied one under its first name alone."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in network.state_dict(keep_vars=True).items():
        found.setdefault(id(value), (name, value))
    return dict(found.values())


def _not_finite(network: nn.Module, state: Mapping[str, Tensor], certificate: float) -> str | None:
    """What is no finite number, as half a sentence; buffers may be infinite, as masks are."""
    if not math.isfinite(certificate):
        return f"its certificate is {certificate}"
    buffers = {name for name, _ in network.named_buffers(remove_duplicate=False)}
    for name, value in state.items():
        if not bool(value.isfinite().all()) and (name not in buffers or bool(value.isnan().any())):
            return f"its tensor {name!r} holds NaN or infinity"
    return None


def _read(path: str | Path) -> tuple[dict[str, Tensor], list[Plan], Certificate]:
    file = _file_at(path)
    metadata, state = _open(file)
    if metadata is None or _PLANS not in metadata:
        raise _refusal(file, "it is a safetensors file of another program: no compaction plan is in it")
    text = metadata[_PLANS]
    if metadata.get(_SHA256) != _digest(text, state):
        raise _refusal(file, "its SHA-256 is another one than it was when saved: it is damaged or was changed")
    try:
        values = json.loads(text)
        plans = [Plan.from_json(json.dumps(plan)) for plan in values["plans"]]
        if not plans:
            raise ValueError("there is none")
        return state, plans, Certificate(float(values["certificate"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refusal(file, f"its plan can't be read: {error}") from error


def _open(file: Path) -> tuple[dict[str, str] | None, dict[str, Tensor]]:
    from safetensors import safe_open

    try:
        if stat.S_ISREG(file.stat().st_mode):
            file.open("rb").close()  # safetensors calls a file that it may not open one that is not there
            with safe_open(str(file), "pt") as stored:
                return stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (FileNotFoundError, MemoryError):
        raise
    except OSError as error:
        raise _refusal(file, f"it can't be read: {error}") from error
    except Exception as error:  # damage breaks the reader in many ways
        raise _refusal(file, f"it is damaged or no safetensors file: {error}") from error
    raise _refusal(file, "it is a folder or another thing than a file")


def _refusal(file: Path, reason: str) -> ValueError:
    return ValueError(f"Expected the file of a compacted network at {str(file)!r}, but {reason}.")


def _file_at(path: str | Path) -> Path:
    return Path(f"{path}.safetensors")


def _digest(text: str, state: Mapping[str, Tensor]) -> str:
    """SHA-256 of the plans, and of every tensor's name, type, shape and bytes."""
    tensors = [(name, str(value.dtype), list(value.shape)) for name, value in sorted(state.items())]
    digest = hashlib.sha256(json.dumps([text, tensors]).encode())
    for _, value in sorted(state.items()):
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
