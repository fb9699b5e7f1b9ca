"""The file of a compacted network: whole at every moment, and refused by name when it is anything else."""

import errno
import json
import math
import os
import random
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from pyro_l0.compaction import compact, load_compacted, storage
from pyro_l0.compaction.plan import Plan
from pyro_l0.compaction.storage import Compacted
from pyro_l0.nn import L0Gate
from tests.networks import Dense, Net
from tests.processes import python

safetensors = pytest.importorskip("safetensors.torch")

X = torch.linspace(-1, 1, 72).reshape(2, 1, 6, 6)


def network(seed=0):
    """Convolutions with a residual sum, gated maps and gated features."""
    torch.manual_seed(seed)

    def forward(s, x):
        y = s.maps(s.norm(s.stem(x)).relu())
        return s.head(s.features((y + s.branch(y).tanh()).flatten(1)))

    layers = dict(stem=nn.Conv2d(1, 4, 3, padding=1), norm=nn.BatchNorm2d(4), branch=nn.Conv2d(4, 4, 3, padding=1))
    return Net(forward, maps=L0Gate(4, dim=1), features=L0Gate(144), head=nn.Linear(144, 5), **layers).eval()


def compacted(seed=0):
    """A compacted network; with another seed one of the same shapes and other numbers."""
    features = (torch.arange(144) % 3 > 0).float()
    return compact(network(seed), {"maps": torch.tensor([1.0, 0.0, 0.5, 1.0]), "features": features}, X)


def outputs(path):
    return load_compacted(network(), path).network(X)


def file_at(path):
    return Path(f"{path}.safetensors")


def refused(path, message, content=None):
    """Loading says by name what is wrong with the file."""
    if content is not None:
        file_at(path).write_bytes(content)
    with pytest.raises(ValueError, match=rf"file of a compacted network at '.*net\.safetensors', but {message}"):
        outputs(path)


@pytest.fixture
def saved(tmp_path):
    """A saved network: where, its bytes, and its outputs."""
    result = compacted()
    result.save(tmp_path / "net")
    return tmp_path / "net", file_at(tmp_path / "net").read_bytes(), result.network(X)


def test_no_flipped_byte_loads_with_other_outputs(saved):
    """Anywhere in the header, and at 200 places of the tensors; the message names the file."""
    path, content, expected = saved
    header = 8 + int.from_bytes(content[:8], "little")
    generator = random.Random(0)
    places = [*range(0, header, 5), *(generator.randrange(header, len(content)) for _ in range(200))]
    net, messages = network(), []
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= generator.randrange(1, 256)
        file_at(path).write_bytes(damaged)
        try:
            assert torch.equal(load_compacted(net, path).network(X), expected)  # another white space
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) >= len(places) - 8
    assert all(f"file of a compacted network at '{path}.safetensors', but it" in message for message in messages)


def test_files_that_are_cut_longer_or_put_together_are_refused(saved):
    """An empty one among them; tensors of one save under the header of another, and an edited plan."""
    path, content, _ = saved
    for wrong in (b"", content[:7], content[:200], content[:-1], content[1:], content + b"\0", content * 2, b"weights"):
        refused(path, "it is damaged or no safetensors file", wrong)
    header = 8 + int.from_bytes(content[:8], "little")
    compacted(1).save(path)
    other = file_at(path).read_bytes()
    assert other[:8] == content[:8]
    for wrong in (content[:header] + other[header:], content.replace(b"0.5", b"0.6", 1)):
        assert wrong != content
        refused(path, "its SHA-256 is another one than it was when saved", wrong)


def test_what_is_no_file_of_ours_is_refused_by_what_it_is(tmp_path):
    """Another program's, a folder, one that is not there, one that can't be read."""
    path, file = tmp_path / "net", tmp_path / "net.safetensors"
    with pytest.raises(FileNotFoundError, match=r"net\.safetensors"):
        outputs(path)
    file.mkdir()
    refused(path, "it is a folder")
    with pytest.raises(OSError, match=r"net\.safetensors"):
        compacted().save(path)
    assert len(list(tmp_path.iterdir())) == 1
    file.rmdir()
    for metadata in (None, {"format": "pt"}):
        safetensors.save_file(network().state_dict(), file, metadata)
        refused(path, "it is a safetensors file of another program")
    file.unlink()
    file.symlink_to(file)
    refused(path, "it can't be read: .*symbolic links")
    with pytest.raises(FileNotFoundError, match="missing"):
        compacted().save(tmp_path / "missing" / "small")


def test_numbers_of_another_type_are_refused(saved):
    path, _, expected = saved
    with pytest.raises(ValueError, match=r"is torch.float32, the network's torch.float64; .*to\(torch.float32\)"):
        load_compacted(network().double(), path)
    with pytest.raises(ValueError, match="to be of this network"):
        load_compacted(nn.Sequential(nn.Linear(2, 3), L0Gate(3)), path)
    assert torch.equal(outputs(path), expected)


def test_numbers_that_are_not_finite_are_neither_saved_nor_loaded(saved, monkeypatch):
    """The tensor is named, and the old file stays."""
    path, content, _ = saved
    result = compacted(1)
    with torch.no_grad():
        result.network.get_submodule("head").weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"at '.*net', but its tensor 'head.weight' holds NaN or infinity"):
        result.save(path)
    with pytest.raises(ValueError, match="but its certificate is nan"):
        Compacted(compacted(1).network, result.plan, float("nan")).save(path)
    assert file_at(path).read_bytes() == content
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_not_finite", lambda *given: None)
        result.save(path)
    refused(path, "its tensor 'head.weight' holds NaN or infinity")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_alone(saved, monkeypatch, step):
    path, content, _ = saved

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="No space left"):
            compacted(1).save(path)
    assert [file.name for file in path.parent.iterdir()] == ["net.safetensors"]
    assert file_at(path).read_bytes() == content


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace

    def kind(descriptor):
        return "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"

    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(kind(descriptor)), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("rename"), replace(*names)))
    compacted().save(tmp_path / "net")
    assert calls == ["file", "rename", "folder"]


def test_links_are_replaced_and_not_followed(tmp_path):
    """What a link points to stays as it is, a folder too."""
    file = file_at(tmp_path / "net")
    (tmp_path / "precious").write_text("mine")
    for target in ("precious", "missing", "."):
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        compacted().save(tmp_path / "net")
        assert not file.is_symlink()
        assert {file.name for file in tmp_path.iterdir()} == {"precious", "net.safetensors"}
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_new_file_has_the_permissions_of_the_old_one(tmp_path):
    """And those that the umask leaves where there is none."""
    file, before = file_at(tmp_path / "net"), os.umask(0o027)
    try:
        compacted().save(tmp_path / "net")
        assert file.stat().st_mode & 0o777 == 0o640
        file.chmod(0o604)
        compacted(1).save(tmp_path / "net")
        assert file.stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("field", "value"),
    [("random", math.nan), ("random", []), ("random", 1), ("out", 2.0), ("units", ["0"]), ("fixed", [math.inf])],
)
def test_fields_of_another_type_are_refused(field, value):
    """In what a gate becomes; and, beside it, an index that is true, and no plan at all."""
    with pytest.raises(ValueError, match=r"Expected the JSON of a compaction plan, but got '\{\}'"):
        Plan.from_json("{}")
    plan = json.loads(compacted().plan.to_json())
    path = next(iter(plan["changes"]))
    assert Plan.from_json(json.dumps(plan)).changes[path].random is False
    plan["changes"][path][field] = value
    with pytest.raises(ValueError, match=f"Expected the JSON of a compaction plan.*{field} is no"):
        Plan.from_json(json.dumps(plan))
    plan["changes"], plan["remaining"]["x"] = {}, [[True]]
    with pytest.raises(ValueError, match="remaining is no"):
        Plan.from_json(json.dumps(plan))


def test_plans_that_can_not_be_read_are_refused(saved):
    path, _, _ = saved
    tensors = safetensors.load_file(f"{path}.safetensors")
    for text in ("{", "[" * 100_000, '{"plans": [], "certificate": 0.0}', '{"plans": [{}], "certificate": 0.0}'):
        metadata = {"pyro_l0": text, "sha256": storage._digest(text, tensors)}
        safetensors.save_file(tensors, f"{path}.safetensors", metadata)
        refused(path, "its plan can't be read")


LOAD = """
import sys
from tests.compaction.test_storage import X, load_compacted, network
print(load_compacted(network(7), sys.argv[1]).network(X).tolist())
"""


@pytest.mark.slow
def test_a_file_is_read_by_a_fresh_process(saved):
    """Into an instance of the class with other weights; nothing is recorded there."""
    path, _, expected = saved
    assert torch.equal(torch.tensor(json.loads(python(LOAD, str(path)))), expected.detach())


def test_files_are_as_large_as_what_is_left(tmp_path):
    sizes, numbers = [], []
    for closed in (0, 100):
        features = (torch.arange(144) >= closed).float()
        result = compact(network(), {"maps": torch.ones(4), "features": features}, X)
        result.save(tmp_path / "net")
        sizes.append(file_at(tmp_path / "net").stat().st_size)
        numbers.append(sum(p.numel() for p in result.network.parameters()))
    assert sizes[0] - sizes[1] > 3 * (numbers[0] - numbers[1])  # four bytes each, and the plan


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    """And a mask of infinities is no damage."""

    def forward(s, x):
        return s.head(s.down(s.gate(s.up(s.embed(x)).relu()))) + s.mask.exp()

    def tied():
        mask = nn.Buffer(torch.full((9,), -torch.inf).index_fill(0, torch.tensor([0, 1]), 0.0))
        layers = dict(embed=nn.Embedding(9, 6), up=(6, 8), gate=8, down=(8, 6), head=nn.Linear(6, 9, bias=False))
        net = Dense(forward, **layers, mask=mask)
        net.head.weight = net.embed.weight
        return net

    x = torch.tensor([[1, 2], [3, 4]])
    result = compact(tied(), {"gate": (torch.arange(8) % 2).float()}, x)
    result.save(tmp_path / "tied")
    assert "head.weight" not in safetensors.load_file(tmp_path / "tied.safetensors")
    loaded = load_compacted(tied(), tmp_path / "tied").network
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded(x), result.network(x))
