"""The readers of examples/common/data.py: what they return, and each file that they refuse."""

import gzip
import hashlib
import os
import re
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from common import data

NAMES = [name.removesuffix(".gz") for name in data.MNIST_SHA256]
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES
TRAIN_SIZE, TEST_SIZE = 7, 3


def idx(array: np.ndarray) -> bytes:
    """Encode unsigned bytes as IDX, written from the format's description."""
    header = bytes([0, 0, 0x08, array.ndim])
    return header + b"".join(struct.pack(">I", size) for size in array.shape) + array.tobytes()


def small_mnist() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)

    def images(size: int) -> np.ndarray:
        return generator.integers(0, 256, (size, 28, 28), dtype=np.uint8)

    def labels(size: int) -> np.ndarray:
        return generator.integers(0, 10, size, dtype=np.uint8)

    arrays = images(TRAIN_SIZE), labels(TRAIN_SIZE), images(TEST_SIZE), labels(TEST_SIZE)
    return dict(zip(NAMES, arrays, strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The four files of a small MNIST, not gzipped."""
    path = tmp_path / "mnist"
    path.mkdir()
    for name, array in small_mnist().items():
        (path / name).write_bytes(idx(array))
    return path


def gzip_all(folder: Path) -> None:
    for name in NAMES:
        path = folder / name
        (folder / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


@pytest.mark.parametrize("compressed", [False, True])
def test_mnist_from_folder(folder: Path, compressed: bool) -> None:
    if compressed:
        gzip_all(folder)
    mnist = data.load_mnist(folder)
    arrays = small_mnist()
    assert mnist.image_shape == (1, 28, 28)
    assert mnist.train_x.dtype == torch.float32
    assert mnist.test_y.dtype == torch.int64
    for images, name in ((mnist.train_x, TRAIN_IMAGES), (mnist.test_x, TEST_IMAGES)):
        expected = arrays[name].reshape(len(images), 784).astype(np.float32) / np.float32(255)
        np.testing.assert_array_equal(images.numpy(), expected)
    for labels, name in ((mnist.train_y, TRAIN_LABELS), (mnist.test_y, TEST_LABELS)):
        np.testing.assert_array_equal(labels.numpy(), arrays[name])


@pytest.mark.parametrize("name", NAMES)
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"expected {name} or {name}\.gz there"):
        data.load_mnist(folder)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: expected a folder with train-images"):
        data.load_mnist(tmp_path / "nowhere")


def header(count: int, height: int = 28, width: int = 28) -> bytes:
    return struct.pack(">4I", 0x803, count, height, width)


ZEROS = gzip.compress(bytes(1 << 24))  # 16 MB of them


def bomb(start: bytes) -> bytes:
    """A gzip file of 2 MB that goes on for 2 GB behind its first bytes."""
    return gzip.compress(start) + 128 * ZEROS


IMAGE_BYTES = 16 + TRAIN_SIZE * 784
WHOLE = idx(np.zeros((TRAIN_SIZE, 28, 28), np.uint8))
REFUSED = {
    "empty": (TRAIN_IMAGES, b"", "expected an IDX header of 16 bytes, got 0 bytes"),
    "a web page": (TRAIN_IMAGES, b"<!DOCTYPE html><html>", "expected the IDX magic number 0x00000803, got 0x3c21444f"),
    "images as labels": (TRAIN_LABELS, WHOLE, "expected the IDX magic number 0x00000801, got 0x00000803"),
    "other dimensions": (TRAIN_IMAGES, idx(np.zeros((7, 32, 28), np.uint8)), "shape (28, 28), got (32, 28)"),
    "no items": (TEST_LABELS, idx(np.zeros(0, np.uint8)), "expected 1 to 60000 items, got 0"),
    "truncated": (TRAIN_IMAGES, WHOLE[:-1], f"is truncated: expected {IMAGE_BYTES} bytes for 7 items, got"),
    "trailing bytes": (TRAIN_IMAGES, WHOLE + b"0", f"has trailing bytes: expected {IMAGE_BYTES} bytes for 7 items"),
    "label 10": (TEST_LABELS, idx(np.array([0, 10, 9], np.uint8)), "expected labels from 0 to 9, got 10"),
    "truncated gzip": (TRAIN_IMAGES, gzip.compress(WHOLE)[:30], "expected a whole gzip file, got 30 bytes"),
    "gzip and more": (TRAIN_IMAGES, gzip.compress(WHOLE) + b"more", "expected a whole gzip file"),
    "gzip of noise": (TEST_IMAGES, bytes([0x1F, 0x8B, 8, *bytes(6), 3]) + b"\xff" * 50, "expected a whole gzip file"),
    "gzip with a wrong checksum": (TRAIN_IMAGES, gzip.compress(WHOLE)[:-8] + bytes(8), "expected a whole gzip file"),
    "not there": (TRAIN_IMAGES, header(60_000) + b"12", "expected 47040016 bytes for 60000 items, got 18"),
    "a count": (TRAIN_IMAGES, header(2**32 - 1), "expected 1 to 60000 items, got 4294967295"),
    "a bomb's count": (TRAIN_IMAGES, bomb(header(2**32 - 1)), "expected 1 to 60000 items, got 4294967295"),
    "a bomb's shape": (TRAIN_IMAGES, bomb(header(1, 2**31, 2**31)), "(28, 28), got (2147483648, 2147483648)"),
    "a bomb's start": (TRAIN_IMAGES, bomb(b""), "expected the IDX magic number"),
    "a bomb's end": (TRAIN_IMAGES, bomb(header(3)), "has trailing bytes: expected 2368 bytes for 3 items, got 2369 or"),
}


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("case", REFUSED)
def test_bad_file_is_refused_by_name(folder: Path, case: str) -> None:
    """No more is read than the items that MNIST may have."""
    name, content, message = REFUSED[case]
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        data.load_mnist(folder)
    assert str(folder / name) in str(refusal.value)


def test_labels_and_images_must_be_as_many(folder: Path) -> None:
    (folder / TRAIN_LABELS).write_bytes(idx(np.zeros(TRAIN_SIZE + 1, np.uint8)))
    with pytest.raises(ValueError, match="expected one label per image, got 7 images") as refusal:
        data.load_mnist(folder)
    assert f"8 labels in {folder / TRAIN_LABELS}" in str(refusal.value)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A loopback mirror of the small MNIST, whose hashes replace the real ones."""
    gzip_all(folder)
    hashes = {f"{name}.gz": hashlib.sha256((folder / f"{name}.gz").read_bytes()).hexdigest() for name in NAMES}
    monkeypatch.setattr(data, "MNIST_SHA256", hashes)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        # serve_forever looks for the shutdown only at each poll: 0.5 s by default.
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
        thread.join()


def test_download_once(server: str, folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    downloaded = data.load_mnist(base_urls=[server], cache_dir=cache)
    assert torch.equal(downloaded.test_x, data.load_mnist(folder).test_x)
    unreachable = f"{server}gone/"
    again = data.load_mnist(base_urls=[unreachable], cache_dir=cache)
    assert torch.equal(again.train_x, downloaded.train_x)


def test_damaged_download_is_fetched_again(server: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"{TRAIN_IMAGES}.gz").write_bytes(b"half a file")
    mnist = data.load_mnist(base_urls=[server], cache_dir=cache)
    assert mnist.train_x.shape == (TRAIN_SIZE, 784)


def test_download_of_another_file_is_refused(server: str, folder: Path, tmp_path: Path) -> None:
    (folder / f"{TEST_LABELS}.gz").write_bytes(b"something else")
    cache = tmp_path / "cache"
    with pytest.raises(FileNotFoundError, match=f"expected {TEST_LABELS}.gz with SHA-256") as error:
        data.load_mnist(base_urls=[server], cache_dir=cache)
    assert "does not match the known hash" in str(error.value)
    assert "--data-dir" in str(error.value)
    assert not (cache / f"{TEST_LABELS}.gz").exists()


def test_real_mnist() -> None:
    folder = os.environ.get("PYRO_L0_MNIST")
    if not folder:
        pytest.skip("PYRO_L0_MNIST does not name a folder with the four MNIST files")
    mnist = data.load_mnist(Path(folder))
    assert mnist.train_x.shape == (60_000, 784)
    assert mnist.test_x.shape == (10_000, 784)
    # Known counts of the digit 1, the most frequent one.
    assert (mnist.train_y == 1).sum() == 6742
    assert (mnist.test_y == 1).sum() == 1135
    assert mnist.train_x.mean().item() == pytest.approx(0.1307, abs=5e-5)
    for name, sha256 in data.MNIST_SHA256.items():
        path = Path(folder) / name
        if path.is_file():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
