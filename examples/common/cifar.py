"""CIFAR-10 and CIFAR-100 from their pickled batches, read without running what a pickle may hold."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import pickletools
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pooch
import torch

__all__ = ["Cifar", "load_cifar", "read_batch"]

Name = Literal["cifar10", "cifar100"]
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
FILES = {"cifar10": ([f"data_batch_{k}" for k in range(1, 6)], ["test_batch"]), "cifar100": (["train"], ["test"])}
URL = "https://www.cs.toronto.edu/~kriz/"
ARCHIVES = {
    "cifar10": ("cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"),
    "cifar100": ("cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),
}
NUM_CLASSES = {"cifar10": 10, "cifar100": 100}
LARGEST_BATCH = 200_000_000  # bytes; CIFAR-100's training images are 155 million
LARGEST_ARCHIVE = 400_000_000  # bytes, unfolded; both are 186 million


@dataclass(frozen=True)
class Cifar:
    """Images of 3 x 32 x 32 and their classes.

    Args:
        train_x: uint8, shape ``(50000, 3, 32, 32)``.
        train_y: int64, shape ``(50000,)``.
        test_x: as ``train_x``.
        test_y: as ``train_y``.
        num_classes: 10 or 100.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    num_classes: int


def read_batch(content: bytes, where: str, labels: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and classes of one pickled batch.

    Args:
        content: the file's bytes.
        where: the file's name, for messages.
        labels: the key of the classes.

    Raises:
        ValueError: the file is damaged, is no batch, or holds anything but arrays, lists, dicts, bytes and numbers.
    """
    try:
        _check_opcodes(content)
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        images, classes = _values(batch[b"data"]), _values(batch[labels.encode()])
    except Exception as error:  # damage can break the reader in every way
        raise ValueError(
            f"{where}: expected a pickled batch of CIFAR, which is arrays and lists, but {error or type(error)}"
        ) from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3072 or classes.shape != (len(images),):
        raise ValueError(
            f"{where}: expected bytes of shape (images, 3072) and as many classes, but got {images.dtype} of shape "
            f"{images.shape} and {classes.shape}"
        )
    if not len(images) or classes.dtype.kind not in "iu":
        raise ValueError(f"{where}: expected images and whole numbers, but got {len(images)} and {classes.dtype}")
    return torch.from_numpy(images.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(classes.astype(np.int64))


def _values(found: Any) -> np.ndarray:
    """An array, or a list of numbers as one."""
    if isinstance(found, list) and all(isinstance(entry, (int, float)) for entry in found):
        return np.asarray(found)
    if not isinstance(found, _Array) or found.values is None:
        raise pickle.UnpicklingError(f"it has {type(found).__name__.strip('_')} without content or of another kind")
    return found.values


class _Array:
    """Stands for a numpy array while a pickle is read; it has values only once its bytes are there."""

    values: np.ndarray | None = None

    def __init__(self, *arguments: Any) -> None:
        """As numpy makes an array whose content follows."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, columns_first, content = state
        self.values = _array(content, dtype, shape, "F" if columns_first else "C")


class _Dtype:
    """Stands for a numpy dtype."""

    def __init__(self, name: Any, *arguments: Any) -> None:
        self.name = name if isinstance(name, str) else name.decode()
        self.order = "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if isinstance(state[1], str) else state[1].decode()


def _array(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """An array from its bytes, of which there must be as many as its shape says."""
    if not isinstance(dtype, _Dtype) or not re.fullmatch("[iuf][1248]", dtype.name):
        raise pickle.UnpicklingError("it has an array of something else than numbers")
    kind = np.dtype(dtype.name).newbyteorder(dtype.order)
    if not all(isinstance(n, int) for n in shape) or math.prod(shape) * kind.itemsize != len(content):
        raise pickle.UnpicklingError(f"it has an array of shape {shape} and {kind} with {len(content)} bytes")
    return np.frombuffer(content, kind).reshape(shape, order=order)


def _whole_array(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.values = _array(content, dtype, shape, order)
    return array


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r:.80}")
    return text.encode(encoding)


# What an array is made of in a pickle, under the names that numpy 1 and 2 write, and what is made instead: numpy's own
# would reserve whatever memory the pickle names, and leave in it what was there.
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _whole_array,
    ("numpy._core.numeric", "_frombuffer"): _whole_array,
    ("_codecs", "encode"): _encode,
}


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that makes arrays, lists, dicts, bytes and numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def _check_opcodes(content: bytes) -> None:
    """Refuse a pickle that ends early, or that numbers its objects so high that their table alone fills the memory."""
    for opcode, argument, _ in pickletools.genops(content):
        if "PUT" in opcode.name and int(argument) > len(content):
            raise pickle.UnpicklingError(f"it numbers an object {argument}")


def load_cifar(name: Name, data_dir: Path | None = None) -> Cifar:
    """Load CIFAR-10 or CIFAR-100.

    Args:
        name: which.
        data_dir: the folder with the batches, the folder around it, or around the archive. None downloads the archive,
            once, and checks its MD5.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file is damaged or no batch.
    """
    if data_dir is None:
        archive, known_hash = ARCHIVES[name]
        data_dir = Path(pooch.os_cache("pyro_l0")) / "cifar"
        pooch.retrieve(URL + archive, known_hash=known_hash, fname=archive, path=data_dir)
    labels = "labels" if name == "cifar10" else "fine_labels"
    contents = _read(data_dir, name)
    parts = []
    for files in FILES[name]:
        batches = []
        for file in files:
            x, y = read_batch(contents.pop(file), f"{data_dir}/{file}", labels)
            low, high = int(y.min()), int(y.max())
            if low < 0 or high >= NUM_CLASSES[name]:
                raise ValueError(
                    f"{data_dir}/{file}: expected classes from 0 to {NUM_CLASSES[name] - 1}, but got {low} to {high}"
                )
            batches.append((x, y))
        parts += [torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])]
    return Cifar(parts[0], parts[1], parts[2], parts[3], NUM_CLASSES[name])


def _read(data_dir: Path, name: Name) -> dict[str, bytes]:
    """The bytes of every batch by its file's name."""
    files = [file for part in FILES[name] for file in part]
    archive = data_dir / ARCHIVES[name][0]
    for folder in (data_dir, data_dir / FOLDERS[name]):
        if all((folder / file).is_file() for file in files):
            return {file: _limited(folder / file) for file in files}
    if archive.is_file():
        return _unpack(archive, {f"{FOLDERS[name]}/{file}": file for file in files})
    if not data_dir.is_dir():
        raise FileNotFoundError(f"{data_dir}: expected a folder, found none")
    for folder in (data_dir, data_dir / FOLDERS[name]):
        missing = [file for file in files if not (folder / file).is_file()]
        if len(missing) < len(files):
            raise FileNotFoundError(f"{folder}: expected {', '.join(missing)} beside the other batches, found none")
    raise FileNotFoundError(f"{data_dir}: expected {FOLDERS[name]}/{files[0]} or {archive.name} there, found neither")


def _limited(path: Path) -> bytes:
    size = path.stat().st_size
    if size > LARGEST_BATCH:
        raise ValueError(f"{path}: expected a batch of at most {LARGEST_BATCH} bytes, but got {size}")
    return path.read_bytes()


class _Limited:
    """A gzip file of which no more is read than an archive of CIFAR holds, so that none unfolds without end."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self.file = file
        self.left = LARGEST_ARCHIVE

    def read(self, size: int) -> bytes:
        """So many bytes, or all that there are."""
        content = self.file.read(min(size, self.left + 1))
        self.left -= len(content)
        if self.left < 0:
            raise ValueError(f"it unfolds to more than {LARGEST_ARCHIVE} bytes")
        return content


def _unpack(archive: Path, wanted: dict[str, str]) -> dict[str, bytes]:
    """The wanted members of an archive under their new names, read in one pass from its start to its end."""
    found = {}
    try:
        with gzip.open(archive) as file, tarfile.open(fileobj=_Limited(file), mode="r|") as tar:
            for member in tar:
                if member.name in wanted:
                    if not member.isfile() or member.size > LARGEST_BATCH:
                        raise ValueError(f"its {member.name} is no file of at most {LARGEST_BATCH} bytes")
                    content = tar.extractfile(member)
                    assert content is not None
                    found[wanted[member.name]] = content.read()
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise ValueError(f"{archive}: expected an archive of CIFAR, but {error}") from error
    missing = [member for member, file in wanted.items() if file not in found]
    if missing:
        raise ValueError(f"{archive}: expected {', '.join(missing)} in it, but found no such members")
    return found
