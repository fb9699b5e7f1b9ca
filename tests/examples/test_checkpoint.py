"""examples/checkpoint.py: nothing is lost in a crash, and no damaged or foreign file is read."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint

FINGERPRINT = {"network": "mlp", "data": "digits", "objective": "l0", "sizes": (64, 30, 10)}


def state_at(epoch: int, **fingerprint: Any) -> dict[str, Any]:
    return {
        "fingerprint": FINGERPRINT | fingerprint,
        "epoch": epoch,
        "weights": {"w": torch.full((40, 50), float(epoch))},
        "generator": torch.get_rng_state(),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of epoch 2, with that of epoch 1 before it."""
    path = tmp_path / "last.pt"
    checkpoint.save(path, state_at(1))
    checkpoint.save(path, state_at(2))
    return path


def epoch_of(path: Path) -> int:
    state = checkpoint.load(path, FINGERPRINT)
    assert (state["weights"]["w"] == state["epoch"]).all()
    return state["epoch"]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    saved = state_at(3)
    checkpoint.save(path, saved)
    loaded = checkpoint.load(path, FINGERPRINT)
    assert loaded.keys() == saved.keys()
    assert loaded["fingerprint"] == FINGERPRINT
    assert torch.equal(loaded["weights"]["w"], saved["weights"]["w"])
    assert torch.equal(loaded["generator"], saved["generator"])
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_previous_is_kept(path: Path) -> None:
    assert epoch_of(path) == 2
    assert epoch_of(checkpoint.previous_path(path)) == 1
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == ["last.pt", "last.pt.previous"]


def test_crash_while_writing_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_a_write(state: object, file: Any) -> None:
        del state
        file.write(b"PK\x03\x04")
        raise KeyboardInterrupt

    with monkeypatch.context() as crash:
        crash.setattr(torch, "save", half_a_write)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(path, state_at(3))
    assert epoch_of(path) == 2
    checkpoint.save(path, state_at(3))
    assert epoch_of(path) == 3
    assert epoch_of(checkpoint.previous_path(path)) == 2


@pytest.mark.parametrize("last_rename", [0, 1], ids=["before any", "between the two"])
def test_crash_around_the_renames_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, last_rename: int) -> None:
    renames = []
    rename = os.replace

    def replace(self: Path, target: Path) -> Path:  # until the crash
        if len(renames) == last_rename:
            raise KeyboardInterrupt
        renames.append(target)
        rename(self, target)
        return target

    with monkeypatch.context() as crash:
        crash.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(path, state_at(3))
    assert epoch_of(path) == 2
    assert epoch_of(checkpoint.previous_path(path)) == 1 + last_rename
    checkpoint.save(path, state_at(3))
    assert epoch_of(path) == 3
    assert epoch_of(checkpoint.previous_path(path)) == 2
    assert len(list(path.parent.iterdir())) == 2


def test_damaged_file_does_not_replace_the_previous(path: Path) -> None:
    path.write_bytes(b"damaged")
    checkpoint.save(path, state_at(3))
    assert epoch_of(path) == 3
    assert epoch_of(checkpoint.previous_path(path)) == 1


def test_state_that_could_not_be_read_back_is_not_written(path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="expected tensors and plain values"):
        checkpoint.save(path, state_at(3) | {"path": path})
    with pytest.raises(checkpoint.CheckpointError, match="the dict 'fingerprint'"):
        checkpoint.save(path, {"epoch": 3})
    assert epoch_of(path) == 2


def damaged_contents(whole: bytes) -> dict[str, bytes]:
    middle = len(whole) // 2  # inside the largest tensor
    return {
        "empty": b"",
        "truncated": whole[:middle],
        "last byte missing": whole[:-1],
        "random bytes": torch.randint(256, (500,), dtype=torch.uint8).numpy().tobytes(),
        "flipped byte": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
    }


@pytest.mark.parametrize("damage", damaged_contents(b"PK"))
def test_damaged_file_is_refused_and_the_previous_offered(path: Path, damage: str) -> None:
    path.write_bytes(damaged_contents(path.read_bytes())[damage])
    previous = checkpoint.previous_path(path)
    with pytest.raises(checkpoint.CheckpointError, match=r"last\.pt is damaged") as refusal:
        checkpoint.load(path, FINGERPRINT)
    assert f"{previous}, can be used: --resume --checkpoint {previous}" in str(refusal.value)
    assert epoch_of(previous) == 1


def test_no_flipped_byte_changes_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"fingerprint": FINGERPRINT, "w": torch.arange(5.0)})
    whole = path.read_bytes()
    for position in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[position] ^= 0x40
        path.write_bytes(flipped)
        try:
            state = checkpoint.load(path, FINGERPRINT)
        except checkpoint.CheckpointError:
            continue
        # The byte was padding, or a field that nobody reads.
        assert torch.equal(state["w"], torch.arange(5.0)), position


def test_previous_is_offered_only_when_whole(path: Path) -> None:
    path.write_bytes(b"damaged")
    checkpoint.previous_path(path).write_bytes(b"damaged too")
    with pytest.raises(checkpoint.CheckpointError, match="no usable checkpoint before it"):
        checkpoint.load(path, FINGERPRINT)


def test_missing_file(path: Path) -> None:
    path.unlink()
    previous = re.escape(str(checkpoint.previous_path(path)))
    with pytest.raises(FileNotFoundError, match=f"found no file.*--resume --checkpoint {previous}"):
        checkpoint.load(path, FINGERPRINT)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_code_in_a_file_does_not_run(tmp_path: Path, kind: str) -> None:
    path, trace = tmp_path / "last.pt", tmp_path / "ran"
    foreign = {"fingerprint": FINGERPRINT, "bomb": Bomb(trace)}
    if kind == "torch":
        torch.save(foreign, path)
    else:
        path.write_bytes(pickle.dumps(foreign))
    with pytest.raises(checkpoint.CheckpointError, match=r"last\.pt"):
        checkpoint.load(path, FINGERPRINT)
    assert not trace.exists()


@pytest.mark.parametrize("foreign", [[1, 2], {"epoch": 1}, {"fingerprint": "mlp"}])
def test_file_of_another_program_is_refused(tmp_path: Path, foreign: object) -> None:
    path = tmp_path / "last.pt"
    torch.save(foreign, path)
    with pytest.raises(checkpoint.CheckpointError, match="the dict 'fingerprint'"):
        checkpoint.load(path, FINGERPRINT)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"network": "lenet"}, "network: expected 'mlp', got 'lenet'"),
        ({"sizes": (64, 31, 10)}, "sizes: expected (64, 30, 10), got (64, 31, 10)"),
        ({"lam": 0.1}, "lam: expected None, got 0.1"),
        (
            {"data": "mnist", "objective": "free_energy"},
            "data: expected 'digits', got 'mnist'; obj",
        ),
    ],
)
def test_checkpoint_of_another_run_is_refused(tmp_path: Path, difference: dict[str, Any], message: str) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, state_at(1, **difference))
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(message)) as refusal:
        checkpoint.load(path, FINGERPRINT)
    assert f"{path} is of another run" in str(refusal.value)


def test_fingerprint_with_a_key_missing_is_refused(path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=r"seed: expected 1, got None"):
        checkpoint.load(path, FINGERPRINT | {"seed": 1})
