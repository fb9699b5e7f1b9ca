"""The CIFAR reader: what it returns, and each batch that it refuses before a call or memory that a pickle asks for."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from common import cifar

pytestmark = pytest.mark.usefixtures("little_memory")


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


def test_a_pickle_can_run_nothing(tmp_path, monkeypatch):
    """Anything but arrays and plain values is refused by name and not run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^train_1: .* it asks for (posix|nt)\.system"):
        cifar.read_batch(batch(Call(os.system, "touch evil")), "train_1")
    assert not Path("evil").exists()


def test_batches_of_other_classes_or_sizes(tmp_path, monkeypatch):
    """From the folder or the one around it; refused by the file's name, the size before a byte is read."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for k, name in enumerate(file for part in cifar.FILES["cifar10"] for file in part):
        (folder / name).write_bytes(batch(labels=[k, 9 - k]))
    for path in (tmp_path, folder):
        found = cifar.load_cifar(path)
        assert found.train_y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
        assert found.test_y.tolist() == [5, 4]
    assert found.train_x.shape == (10, 3, 32, 32)
    assert found.train_x.dtype == torch.uint8
    (folder / "data_batch_3").write_bytes(batch(labels=[1, 10]))
    with pytest.raises(ValueError, match=r"data_batch_3: expected classes from 0 to 9, but got 1 to 10"):
        cifar.load_cifar(tmp_path)
    monkeypatch.setattr(cifar, "LARGEST_BATCH", 5000)
    with pytest.raises(ValueError, match=r"data_batch_1: expected a batch of at most 5000 bytes"):
        cifar.load_cifar(tmp_path)


def test_fine_classes_of_cifar_100(tmp_path):
    """Asked for by name; one that is none is refused."""
    images = np.zeros((2, 3072), np.uint8)
    for name, first in (("train", 99), ("test", 99), ("test", 100)):
        content = {b"data": images, b"coarse_labels": [0, 1], b"fine_labels": [first, 3]}
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=4))
        if first == 99 and name == "test":
            assert cifar.load_cifar(tmp_path, "cifar100").test_y.tolist() == [99, 3]
    with pytest.raises(ValueError, match="test: expected classes from 0 to 99, but got 3 to 100"):
        cifar.load_cifar(tmp_path, "cifar100")
