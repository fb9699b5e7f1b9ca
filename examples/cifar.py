"""CIFAR-10 and CIFAR-100 from their pickled batches, read without running what a pickle may hold."""

from __future__ import annotations

import io
import pickle
import tarfile
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
# What an array is made of in a pickle, under the names that numpy 1 and 2 write.
ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
}


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


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that makes arrays, lists, dicts, bytes and numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


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
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        images, classes = np.asarray(batch[b"data"]), np.asarray(batch[labels.encode()])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{where}: expected a pickled batch of CIFAR, which is arrays and lists, but {error}"
        ) from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3072 or classes.shape != (len(images),):
        raise ValueError(
            f"{where}: expected bytes of shape (images, 3072) and as many classes, but got {images.dtype} of shape "
            f"{images.shape} and {classes.shape}"
        )
    return torch.from_numpy(images.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(classes.astype(np.int64))


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
    archive, known_hash = ARCHIVES[name]
    if data_dir is None:
        cache = Path(pooch.os_cache("pyro_l0")) / "cifar"
        pooch.retrieve(URL + archive, known_hash=known_hash, fname=archive, path=cache)
        data_dir = cache
    labels = "labels" if name == "cifar10" else "fine_labels"
    parts = []
    for files in FILES[name]:
        batches = [read_batch(_read(data_dir, name, file), f"{data_dir}/{file}", labels) for file in files]
        parts += [torch.cat([images for images, _ in batches]), torch.cat([classes for _, classes in batches])]
    classes = 10 if name == "cifar10" else 100
    for y in (parts[1], parts[3]):
        if not 0 <= int(y.min()) <= int(y.max()) < classes:
            raise ValueError(f"{data_dir}: expected classes from 0 to {classes - 1}, but got up to {int(y.max())}")
    return Cifar(parts[0], parts[1], parts[2], parts[3], classes)


def _read(data_dir: Path, name: Name, file: str) -> bytes:
    for folder in (data_dir, data_dir / FOLDERS[name]):
        if (folder / file).is_file():
            return (folder / file).read_bytes()
    archive = data_dir / ARCHIVES[name][0]
    if archive.is_file():
        with tarfile.open(archive) as tar:
            member = tar.extractfile(f"{FOLDERS[name]}/{file}")
            assert member is not None
            return member.read()
    if not data_dir.is_dir():
        raise FileNotFoundError(f"{data_dir}: expected a folder, found none")
    raise FileNotFoundError(f"{data_dir}: expected {FOLDERS[name]}/{file} or {archive.name} there, found neither")
