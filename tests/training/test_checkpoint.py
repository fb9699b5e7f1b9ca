"""Checkpoints: nothing is lost in a crash, and no damaged or foreign file is read."""

import io
import math
import pickle
import random
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from pyro_l0.training import Checkpoint, epochs
from pyro_l0.training.epochs import _sealed, check_finite
from tests.processes import python

FINGERPRINT = {"network": "mlp", "sizes": (64, 30, 10)}


def state_at(epoch):
    return {"epoch": epoch, "weights": {"w": torch.full((40, 50), float(epoch))}}


def loaded(path, **others):
    """The state in a file."""
    states = []
    Checkpoint(path, FINGERPRINT | others).load(states.append)
    return states[0]


def epoch_of(path):
    state = loaded(path)
    assert (state["weights"]["w"] == state["epoch"]).all()
    return state["epoch"]


def previous(path):
    return path.with_name("last.pt.previous")


@pytest.fixture
def path(tmp_path):
    """A checkpoint of epoch 2, with that of epoch 1 before it."""
    checkpoint = Checkpoint(tmp_path / "last.pt", FINGERPRINT)
    for epoch in (1, 2):
        checkpoint.save(state_at(epoch))
    return checkpoint.path


def test_round_trip(path):
    """Values and random numbers; the file before stays, and nothing else."""
    after = torch.rand(3)  # what follows the saved state
    torch.rand(7)
    assert (epoch_of(path), epoch_of(previous(path))) == (2, 1)
    loaded(path)
    assert torch.equal(torch.rand(3), after)
    assert sorted(file.name for file in path.parent.iterdir()) == ["last.pt", "last.pt.previous"]


@pytest.mark.parametrize("renames", [None, 0, 1], ids=["while writing", "before any rename", "between the two"])
def test_a_crash_loses_nothing(path, monkeypatch, renames):
    done = []
    replace = Path.replace

    def crash(*args):
        if len(done) == (renames or 0):
            raise KeyboardInterrupt
        done.append(args)
        return replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch if renames is None else Path, "save" if renames is None else "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            Checkpoint(path, FINGERPRINT).save(state_at(3))
    assert (epoch_of(path), epoch_of(previous(path))) == (2, 1 + (renames or 0))
    Checkpoint(path, FINGERPRINT).save(state_at(3))
    assert (epoch_of(path), epoch_of(previous(path))) == (3, 2)
    assert len(list(path.parent.iterdir())) == 2


def test_what_is_not_written(path):
    """A state that could not be read back; and a damaged file does not replace the one before."""
    with pytest.raises(ValueError, match="a state of tensors and plain values"):
        Checkpoint(path, FINGERPRINT).save({"path": path})
    assert epoch_of(path) == 2
    path.write_bytes(b"damaged")
    Checkpoint(path, FINGERPRINT).save(state_at(3))
    assert (epoch_of(path), epoch_of(previous(path))) == (3, 1)


@pytest.mark.parametrize("damage", ["empty", "truncated", "last byte missing", "random bytes", "flipped byte"])
def test_a_damaged_file_is_refused_and_the_one_before_offered(path, damage):
    whole = path.read_bytes()
    middle = len(whole) // 2  # inside the largest tensor
    contents = {
        "empty": b"",
        "truncated": whole[:middle],
        "last byte missing": whole[:-1],
        "random bytes": torch.randint(256, (500,), dtype=torch.uint8).numpy().tobytes(),
        "flipped byte": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
    }
    path.write_bytes(contents[damage])
    with pytest.raises(ValueError, match=rf"last\.pt'.*can't be read; rename '{re.escape(str(previous(path)))}'"):
        loaded(path)
    assert epoch_of(previous(path)) == 1
    previous(path).write_bytes(b"damaged too")
    with pytest.raises(ValueError, match="can't be read; delete it to begin anew"):
        loaded(path)


def changed_value(content):
    """A file whose checksums are right and whose tensor is another."""
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(found, "w") as new:
        for entry in old.infolist():
            part = old.read(entry)
            if entry.filename.endswith("/data/1"):
                part = part[:8] + bytes([part[8] ^ 1]) + part[9:]
            new.writestr(entry, part)
    return found.getvalue()


def test_no_flip_loads_with_another_value(tmp_path):
    """200 flips of single bits, and of a value with the archive's checksums made right."""
    path, values = tmp_path / "last.pt", torch.arange(300.0)
    Checkpoint(path, FINGERPRINT).save({"w": values, "seconds": 1.5})
    whole, generator, refused = path.read_bytes(), random.Random(1), 0
    for _ in range(200):
        flipped = bytearray(whole)
        flipped[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        try:
            state = loaded(path)
        except ValueError:
            refused += 1
            continue
        assert torch.equal(state["w"], values)  # it was padding, or a field that nobody reads
        assert state["seconds"] == 1.5
    assert refused > 100
    path.write_bytes(changed_value(whole))
    with pytest.raises(ValueError, match="its SHA-256 is another one"):
        loaded(path)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (self.trace,))


def test_foreign_files(tmp_path):
    """No code in them runs, and each is refused by name."""
    path, trace = tmp_path / "last.pt", tmp_path / "ran"
    torch.save({"format": 2, "bomb": Bomb(trace)}, path)
    contents = [path.read_bytes(), pickle.dumps({"bomb": Bomb(trace)})]
    for foreign in ([1, 2], {"epoch": 1}, {"format": 1, "fingerprint": FINGERPRINT, "state": {}}):
        torch.save(foreign, path)
        contents.append(path.read_bytes())
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"last\.pt'.*can't be read"):
            loaded(path)
    assert not trace.exists()


def test_files_that_unfold(tmp_path):
    """Compressed archives, with a SHA-256 made right; and no value is looked at, where one stands for 4 TB."""
    path, packed = tmp_path / "last.pt", tmp_path / "packed.pt"
    Checkpoint(path, FINGERPRINT).save({"w": torch.zeros(1000)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    packed.write_bytes(_sealed(packed.read_bytes()))
    with pytest.raises(ValueError, match="a part of it is compressed"):
        loaded(packed)
    Checkpoint(path, FINGERPRINT).save({"w": torch.zeros(1).expand(10**12)})
    assert loaded(path)["w"].untyped_storage().nbytes() == 4


def test_a_file_of_another_run_is_refused(path):
    """By the names of what differs, with short values."""
    with pytest.raises(ValueError, match=r"differs in network, seed; give .* It has network='mlp'\."):
        loaded(path, network="lenet", seed=1)
    content = torch.load(path, weights_only=True)
    for key, value in (("format", 7), ("random", content["random"] * 2)):
        file = io.BytesIO()
        torch.save({**content, key: value}, file)
        path.write_bytes(_sealed(file.getvalue()))
        with pytest.raises(ValueError, match="its format" if key == "format" else "the number of processes"):
            loaded(path)


class Halving:
    """A run of three epochs."""

    def __init__(self):
        self.x, self.history = 1.0, []

    @property
    def is_done(self):
        return len(self.history) == 3

    def advance(self):
        self.x /= 2
        return {"x": self.x}

    def state_dict(self):
        return {"x": self.x, "history": self.history}

    def load_state_dict(self, state):
        self.x, self.history = state["x"], state["history"]


def test_epochs_go_on_from_a_checkpoint(tmp_path):
    """An epoch at whose entry the caller stops is repeated."""
    checkpoint, first, second = Checkpoint(tmp_path / "run.pt", {}), Halving(), Halving()
    checkpoint.load(first.load_state_dict)  # there is none yet
    for entry in epochs(first, checkpoint):
        if entry["x"] == 0.25:
            break
    checkpoint.load(second.load_state_dict)
    assert second.history == [{"x": 0.5}]
    assert [entry["x"] for entry in epochs(second, checkpoint)] == [0.25, 0.125]
    assert list(epochs(second)) == []


class Timed(Halving):
    """A run on a clock of its own: what an epoch takes, and a file, whose part with the history grows."""

    def __init__(self, epochs, train, write, write_entry):
        super().__init__()
        self.epochs, self.train, self.write, self.write_entry = epochs, train, write, write_entry
        self.now, self.written = 0.0, []

    is_done = property(lambda self: len(self.history) == self.epochs)

    def advance(self):
        self.now += self.train
        return {"x": 1.0}

    def save(self, state):
        self.now += self.write + self.write_entry * len(state["history"])
        self.written.append(len(state["history"]))


@pytest.mark.parametrize(
    ("train", "write", "write_entry"),
    [(1.0, 0.007, 0.0), (1.0, 0.5, 0.0), (0.01, 1.0, 0.0), (1.0, 0.007, 0.001)],
    ids=["long epochs", "a slow disk", "short epochs", "a history that grows"],
)
@pytest.mark.parametrize("number", [50, 200, 800])
def test_files_take_a_hundredth_of_the_time(train, write, write_entry, number, monkeypatch):
    """Beside the first and the last one; and each epoch has one where that is within it."""
    run = Timed(number, train, write, write_entry)
    module = sys.modules[Checkpoint.__module__]
    monkeypatch.setattr(module, "_SPARING", 100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: run.now)
    assert len(list(epochs(run, run))) == number
    assert (run.written[0], run.written[-1]) == (1, number)
    took = [write + write_entry * n for n in run.written]
    grown = 1 + 100 * write_entry / train  # meanwhile
    assert sum(took[:-1]) <= took[0] + grown * number * train / 100 + 1e-9
    if write_entry == 0:
        every = max(1, math.ceil(100 * write / train))
        assert run.written[:-1] == [*range(1, number, every)][: len(run.written) - 1]


def test_a_training_that_diverges():
    """By what is not finite."""
    net = torch.nn.Linear(1, 1)
    check_finite(1, 0.5, net)
    with pytest.raises(FloatingPointError, match="the mean loss of epoch 2 is nan"):
        check_finite(2, float("nan"), net)
    net.bias.data[0] = torch.inf
    with pytest.raises(FloatingPointError, match="weights are not after epoch 3: bias"):
        check_finite(3, 0.5, net)


KILLS = """
import os, random, signal, sys, time
import torch
from pyro_l0.training import Checkpoint
checkpoint, generator = Checkpoint(sys.argv[1], {}), random.Random(2)
def save(k):
    checkpoint.save({"k": k, "w": torch.full((200, 200), float(k))})
start = time.perf_counter()
save(0)
once = time.perf_counter() - start
last = kills = 0
while kills < 50 or not last:  # else all came before the first save
    kills += 1
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        k = last
        while True:
            k += 1
            os.write(writer, b".")
            save(k)
    os.read(reader, 1)
    time.sleep(generator.uniform(0, 4 * once))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writer)
    begun = last + 1 + len(os.read(reader, 10000))
    os.close(reader)
    states = []
    checkpoint.load(states.append)
    found = states[0]
    assert last <= found["k"] <= begun and (found["w"] == found["k"]).all(), (last, found["k"], begun)
    last = found["k"]
print(last)
"""


@pytest.mark.slow
def test_fifty_kills_while_saving(tmp_path):
    """The old or the new one is there each time."""
    assert int(python(KILLS, str(tmp_path / "last.pt"))) > 0
