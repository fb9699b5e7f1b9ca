"""The data of the examples: scikit-learn's digits, MNIST, and texts that are generated."""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pooch
import torch
from sklearn import datasets
from sklearn.model_selection import train_test_split

__all__ = ["MNIST_SHA256", "MNIST_URLS", "Images", "load_digits", "load_images", "load_mnist", "repeated_texts"]

MNIST_URLS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": "7ff28fd295f802eefc6d40e461175dfe4b969b1842b2abc8c6dc8c20711cf79f",
    "train-labels-idx1-ubyte.gz": "81a978ae83d39ffdba0db3ce2fcaf80a8921e9629e874428996a2b03242d4b2a",
    "t10k-images-idx3-ubyte.gz": "197e111ae341b0770be9011ac5e622d0e6cd1c640b32eb0de5dc1dd26cc6e182",
    "t10k-labels-idx1-ubyte.gz": "b91679a0acfe4ba0e50a2437a903084cba1f5f92592b016a25a7dfd00455798b",
}
MNIST_SIDE = 28
MOST_ITEMS = 60_000  # in a file of MNIST
CLASSES = 10
DIGITS_SPLIT_SEED = 0


@dataclass(frozen=True, eq=False)
class Images:
    """Images of ten classes, cut into a training and a test part.

    Digits and MNIST are float32 in [0, 1] of shape ``(N, pixels)``, CIFAR is uint8 of shape ``(N, *image_shape)``.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    image_shape: tuple[int, int, int]  # channels, height, width

    def checksum(self) -> list[int]:
        """CRC-32 of each of the four tensors: which data a checkpoint was trained on."""
        return [zlib.crc32(x.numpy()) for x in (self.train_x, self.train_y, self.test_x, self.test_y)]

    def hold_out(self, number: int) -> "Images":
        """The last ``number`` training images in the place of the test images, to choose settings on."""
        if not 0 < number < len(self.train_x):
            raise ValueError(f"Expected to hold out between 1 and {len(self.train_x) - 1} images, but got {number}.")
        x, y = self.train_x, self.train_y
        return Images(x[:-number], y[:-number], x[-number:], y[-number:], self.image_shape)


def load_digits() -> Images:
    """Load scikit-learn's 1,797 digits of 8 x 8 pixels; every class keeps a fifth for the test."""
    digits = datasets.load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        (digits.data / 16).astype(np.float32),
        digits.target.astype(np.int64),
        test_size=0.2,
        random_state=DIGITS_SPLIT_SEED,
        stratify=digits.target,
    )
    train_x, train_y, test_x, test_y = map(torch.from_numpy, (train_x, train_y, test_x, test_y))
    return Images(train_x, train_y, test_x, test_y, image_shape=(1, 8, 8))


def load_images(data: Literal["digits", "mnist"], data_dir: Path | None = None, hold_out: int = 0) -> Images:
    """The data that an example's options name; with ``hold_out`` as :meth:`Images.hold_out` returns them."""
    images = load_digits() if data == "digits" else load_mnist(data_dir)
    return images.hold_out(hold_out) if hold_out else images


def load_mnist(
    data_dir: Path | None = None, *, base_urls: Sequence[str] = MNIST_URLS, cache_dir: Path | None = None
) -> Images:
    """Load MNIST from a folder with the four IDX files, gzipped or not.

    Without a folder they are downloaded, once, from the first mirror that delivers, and their SHA-256 is checked.

    Raises:
        FileNotFoundError: a file is missing, or no mirror delivered it.
        ValueError: a file is truncated, too long, damaged or not a part of MNIST.
    """
    if data_dir is None:
        data_dir = cache_dir or Path(pooch.os_cache("pyro_l0")) / "mnist"
        for name in MNIST_SHA256:
            _download(name, base_urls, data_dir)
    train_x, train_y = _read_part(data_dir, "train")
    test_x, test_y = _read_part(data_dir, "t10k")
    return Images(train_x, train_y, test_x, test_y, image_shape=(1, MNIST_SIDE, MNIST_SIDE))


def _read_idx(path: Path, item_shape: tuple[int, ...] = ()) -> npt.NDArray[np.uint8]:
    """An IDX file of 1 to 60,000 items of unsigned bytes; no more is read, whatever a gzip file unfolds to."""
    rank = 1 + len(item_shape)
    header = struct.Struct(f">{1 + rank}I")
    with _open(path) as file:
        start = _read(path, file, header.size)
        if len(start) < header.size:
            raise ValueError(f"{path}: expected an IDX header of {header.size} bytes, got {len(start)} bytes")
        magic, count, *found_shape = header.unpack(start)
        expected_magic = 0x0800 + rank  # 08 stands for unsigned bytes
        if magic != expected_magic:
            raise ValueError(f"{path}: expected the IDX magic number 0x{expected_magic:08x}, got 0x{magic:08x}")
        if tuple(found_shape) != item_shape:
            raise ValueError(f"{path}: expected items of shape {item_shape}, got {tuple(found_shape)}")
        if not 0 < count <= MOST_ITEMS:
            raise ValueError(f"{path}: expected 1 to {MOST_ITEMS} items, got {count}")
        size = count * math.prod(item_shape)
        content = _read(path, file, size + 1)  # the byte behind the last, which should not be there, ends a gzip file
    if len(content) != size:
        fault, more = ("is truncated", "") if len(content) < size else ("has trailing bytes", " or more")
        raise ValueError(
            f"{path} {fault}: expected {header.size + size} bytes for {count} items, "
            f"got {header.size + len(content)}{more} (counted without gzip)"
        )
    return np.frombuffer(content, np.uint8).reshape(count, *item_shape)


def _open(path: Path) -> BufferedIOBase:
    # The first bytes decide, not the name: browsers and copies rename. IDX begins with two zeros.
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if zipped else path.open("rb")


def _read(path: Path, file: BufferedIOBase, size: int) -> bytes:
    """So many bytes, or all that there are."""
    try:
        return file.read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: expected a whole gzip file, got {path.stat().st_size} bytes that end or break inside it ({error})"
        ) from error


def _read_part(data_dir: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    images_path = _find(data_dir, f"{part}-images-idx3-ubyte")
    labels_path = _find(data_dir, f"{part}-labels-idx1-ubyte")
    images = _read_idx(images_path, (MNIST_SIDE, MNIST_SIDE))
    labels = _read_idx(labels_path)
    if len(images) != len(labels):
        found = f"{len(images)} images in {images_path} and {len(labels)} labels in {labels_path}"
        raise ValueError(f"expected one label per image, got {found}")
    if labels.max() >= CLASSES:
        raise ValueError(f"{labels_path}: expected labels from 0 to {CLASSES - 1}, got {labels.max()}")
    pixels = images.reshape(len(images), -1).astype(np.float32) / 255
    return torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64))


def _find(data_dir: Path, name: str) -> Path:
    if not data_dir.is_dir():
        raise FileNotFoundError(f"{data_dir}: expected a folder with {name}, found no such folder")
    for path in (data_dir / name, data_dir / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{data_dir}: expected {name} or {name}.gz there, found neither")


def _download(name: str, base_urls: Sequence[str], folder: Path) -> None:
    failures = []
    for base_url in base_urls:
        url = f"{base_url.rstrip('/')}/{name}"
        try:
            pooch.retrieve(url, known_hash=MNIST_SHA256[name], fname=name, path=folder)
            return
        except (OSError, ValueError) as error:  # no answer, or another file than the known one
            failures.append(f"{url}: {error}")
    raise FileNotFoundError(
        f"expected {name} with SHA-256 {MNIST_SHA256[name]}, and no mirror delivered it; "
        "download the four files by hand and name their folder with --data-dir\n" + "\n".join(failures)
    )


def repeated_texts(number: int, vocabulary: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Texts that repeat a random sequence of different tokens, the tokens that follow, and where they repeat.

    The sequences have between a third and two thirds of the length; everything has shape ``(number, length)``.
    """
    period = torch.randint(length // 3, 2 * length // 3 + 1, (number, 1))
    text = torch.rand(number, vocabulary).argsort(1).gather(1, torch.arange(length + 1) % period)
    return text[:, :-1], text[:, 1:], torch.arange(length) >= period
