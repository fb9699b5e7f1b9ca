"""Data files that unfold, announce or reserve more than they should are refused before memory is taken for them."""

import gzip
import pickle
import struct
import tracemalloc

import numpy as np
import pytest

from common import cifar, data

ZEROS = gzip.compress(bytes(1 << 24))  # 16 MB of them
MOST = 80_000_000  # bytes that may be taken


@pytest.fixture(autouse=True)
def memory():
    """No case takes more than a file of MNIST does."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST


def bomb(start):
    """A gzip file of 2 MB that goes on for 2 GB behind its first bytes."""
    return gzip.compress(start) + 128 * ZEROS


def header(count, height=28, width=28):
    return struct.pack(">4I", 0x803, count, height, width)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bomb(header(3)), "has trailing bytes: expected 2368 bytes for 3 items, got 2369 or more"),
        (bomb(header(2**32 - 1)), "expected 1 to 60000 items, got 4294967295"),
        (bomb(header(1, 2**31, 2**31)), r"expected items of shape \(28, 28\), got \(2147483648, 2147483648\)"),
        (bomb(b""), "expected the IDX magic number"),
        (header(2**32 - 1), "expected 1 to 60000 items, got 4294967295"),
        (header(60_000) + b"12", "is truncated: expected 47040016 bytes for 60000 items, got 18"),
    ],
    ids=["bomb", "count", "shape", "start", "plain count", "truncated"],
)
def test_idx_files_that_unfold_or_announce_too_much(content, message, tmp_path):
    """No more is read than the items that MNIST may have."""
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 1) + b"0")
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte.* ?{message}"):
        data.load_mnist(tmp_path)


class Call:
    """What unpickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def batch(images=None, labels=(1, 2)):
    images = np.zeros((2, 3072), np.uint8) if images is None else images
    return pickle.dumps({b"data": images, b"labels": list(labels)}, protocol=4)


reconstruct = np.zeros(0).__reduce__()[0]
HOSTILE = {
    "8 TB": batch(Call(reconstruct, np.ndarray, (10**12,), b"d")),
    "uninitialised memory": batch(Call(reconstruct, np.ndarray, (2, 3072), b"B")),
    "an array by its shape": batch(Call(np.ndarray, (2, 3072), "u1")),
    "a shape beyond its bytes": batch().replace(struct.pack("<BH", 0x4D, 3072), struct.pack("<BH", 0x4D, 65000)),
    "items of 8 TB": batch(Call(np.dtype, "V8000000000000")),
    "objects": batch(np.array([None, 2])),
    "a codec": batch(Call(__import__("_codecs").encode, b"a" * 100, "zlib")),
    "a table of 1 GB": b"\x80\x04Nr" + struct.pack("<I", 1 << 26) + b".",
    "a text that is not there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "a dict": batch({}),
    "lists of lists": batch(labels=[[1, 2], [3]]),
    "texts as classes": batch(labels=["1", "2"]),
    "fractions as classes": batch(labels=[1.5, float("nan")]),
    "no images": batch(np.zeros((0, 3072), np.uint8), ()),
    "floats": batch(np.zeros((2, 3072), np.float32)),
    "too few classes": batch(labels=[1]),
    "nothing": b"",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_batches_that_reserve_memory_or_are_of_another_kind(case):
    """By the file's name, without a byte that the file does not hold."""
    with pytest.raises(ValueError, match=r"^train_1: expected "):
        cifar.read_batch(HOSTILE[case], "train_1")


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_of_pickle_is_read(protocol):
    """Bytes and classes as they were, in both orders, and classes that are an array."""
    images = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8)
    for x, y in ((images, [3, 9]), (np.asfortranarray(images), np.array([3, 9], ">i4"))):
        found, classes = cifar.read_batch(pickle.dumps({b"data": x, b"labels": y}, protocol=protocol), "here")
        np.testing.assert_array_equal(found.flatten(1).numpy(), images)
        assert classes.tolist() == [3, 9]


def test_batches_of_other_classes_or_sizes(tmp_path, monkeypatch):
    """Refused by the file's name; the size before a byte is read."""
    names = [file for part in cifar.FILES["cifar10"] for file in part]
    for k, name in enumerate(names):
        (tmp_path / name).write_bytes(batch(labels=[k, 9 - k]))
    found = cifar.load_cifar(tmp_path)
    assert found.train_y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert found.test_y.tolist() == [5, 4]
    (tmp_path / "data_batch_3").write_bytes(batch(labels=[1, 10]))
    with pytest.raises(ValueError, match=r"data_batch_3: expected classes from 0 to 9, but got 1 to 10"):
        cifar.load_cifar(tmp_path)
    monkeypatch.setattr(cifar, "LARGEST_BATCH", 5000)
    with pytest.raises(ValueError, match=r"data_batch_1: expected a batch of at most 5000 bytes"):
        cifar.load_cifar(tmp_path)
