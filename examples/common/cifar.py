"""CIFAR-10 and CIFAR-100 from their pickled batches, read without running what a pickle may hold."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pooch
import torch

from common.data import Images

__all__ = ["NUM_CLASSES", "Name", "load_cifar", "read_batch"]

Name = Literal["cifar10", "cifar100"]
NUM_CLASSES = {"cifar10": 10, "cifar100": 100}
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
FILES = {"cifar10": ([f"data_batch_{k}" for k in range(1, 6)], ["test_batch"]), "cifar100": (["train"], ["test"])}
URL = "https://www.cs.toronto.edu/~kriz/"
ARCHIVES = {
    "cifar10": ("cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"),
    "cifar100": ("cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),
}
LARGEST_BATCH = 200_000_000  # bytes; CIFAR-100's training images are 155 million


def read_batch(content: bytes, where: str, labels: bytes = b"labels") -> tuple[torch.Tensor, torch.Tensor]:
    """Images and classes of one pickled batch; ``where`` names it in messages.

    Raises:
        ValueError: it is damaged, is no batch, or holds anything but arrays, lists, dicts, bytes and numbers.
    """
    try:
        _check_opcodes(content)
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        images, classes = _values(batch[b"data"]), _values(batch[labels])
    except Exception as error:  # damage can break the reader in every way
        found = str(error) or type(error)
        raise ValueError(f"{where}: expected a pickled batch of CIFAR, of arrays and lists, but {found}") from error
    whole = classes.shape == (len(images),) and classes.dtype.kind in "iu" and len(images) > 0
    if not whole or images.dtype != np.uint8 or images.shape[1:] != (3072,):
        raise ValueError(
            f"{where}: expected bytes of shape (images, 3072) and as many whole numbers, but got {images.dtype} of "
            f"shape {images.shape} and {classes.dtype} of shape {classes.shape}"
        )
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

    def __init__(self, *arguments: Any) -> None:
        # numpy gives an array's content at once (_frombuffer), or a state with it later (_reconstruct).
        self.values = _array(*arguments) if len(arguments) == 4 else None

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
    ("numpy.core.numeric", "_frombuffer"): _Array,
    ("numpy._core.numeric", "_frombuffer"): _Array,
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


def load_cifar(data_dir: Path | None = None, name: Name = "cifar10") -> Images:
    """The training and the test batches, as bytes of shape ``(N, 3, 32, 32)``.

    Args:
        data_dir: the folder with the batches, or the folder around it. None downloads the archive, once, checks its MD5
            and unpacks it.
        name: which of the two; the fine classes of CIFAR-100.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file is damaged or no batch.
    """
    if data_dir is None:
        data_dir = Path(pooch.os_cache("pyro_l0")) / "cifar"
        file, md5 = ARCHIVES[name]
        pooch.retrieve(URL + file, md5, file, data_dir, processor=pooch.Untar(extract_dir="."))
    parts, labels, last = [], b"labels" if name == "cifar10" else b"fine_labels", NUM_CLASSES[name] - 1
    for files in FILES[name]:
        batches = [read_batch(_read(data_dir, file, name), f"{data_dir}/{file}", labels) for file in files]
        for file, (_, y) in zip(files, batches, strict=True):
            least, most = y.aminmax()
            if least < 0 or most > last:
                raise ValueError(f"{data_dir}/{file}: expected classes from 0 to {last}, but got {least} to {most}")
        parts += [torch.cat(part) for part in zip(*batches, strict=True)]
    return Images(*parts, image_shape=(3, 32, 32))


def _read(data_dir: Path, file: str, name: Name) -> bytes:
    """The bytes of a batch in a folder, or in the one below it that the archive makes."""
    for path in (data_dir / file, data_dir / FOLDERS[name] / file):
        if path.is_file():
            size = path.stat().st_size
            if size > LARGEST_BATCH:
                raise ValueError(f"{path}: expected a batch of at most {LARGEST_BATCH} bytes, but got {size}")
            return path.read_bytes()
    where = f"{FOLDERS[name]}/{file}"
    raise FileNotFoundError(f"{data_dir}: expected {where}, found no such file; unpack {ARCHIVES[name][0]} there.")
