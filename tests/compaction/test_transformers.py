"""Transformers: compacted, saved, loaded in a fresh process, exported and run elsewhere."""

import json
import warnings
from importlib import import_module

import pytest
import torch
from torch import nn

from pyro_l0.compaction import compact, load_compacted
from pyro_l0.nn import Gate, fix_gates
from pyro_l0.nn.gate import gate_names
from tests.compaction.test_in_place import Transformer
from tests.processes import python

GATES = {"attention.gate": torch.tensor([1.0, 0.0, 0.7, 0.0]), "gate": (torch.arange(16) % 4 > 1) * 0.9}


def network(seed=0):
    torch.manual_seed(seed)
    return Transformer().eval()


def test_heads_and_units_leave_exactly():
    """Rows of queries, keys and values, columns of the output; the number of heads is found."""
    net, x = network().double(), torch.randn(5, 8).double()
    gates = {name: gate.double() for name, gate in GATES.items()}
    result = compact(net, gates, x)
    assert result.certificate < 1e-12
    assert result.network.attention.heads == 2
    assert result.network.attention.qkv.weight.shape == (12, 8)
    assert result.network.attention.out.weight.shape == (8, 4)
    assert (result.network.up.out_features, result.network.down.in_features) == (8, 8)
    for rows in (1, 7):
        x = torch.randn(rows, 8).double()
        torch.testing.assert_close(result.network(x), fix_gates(net, gates).eval()(x), rtol=1e-12, atol=1e-12)


LOAD = """
import sys, torch
from pyro_l0.compaction import load_compacted
from tests.compaction.test_transformers import network
print(load_compacted(network(7), sys.argv[1]).network(torch.linspace(-1, 1, 24).reshape(3, 8)).tolist())
"""


@pytest.mark.slow
def test_a_file_is_read_by_a_fresh_process(tmp_path):
    """Into an instance of the class with other weights; nothing is recorded there."""
    pytest.importorskip("safetensors")
    result = compact(network(), GATES, torch.randn(2, 8))
    result.save(tmp_path / "small")
    printed = python(LOAD, str(tmp_path / "small"))
    expected = result.network(torch.linspace(-1, 1, 24).reshape(3, 8))
    assert torch.equal(torch.tensor(json.loads(printed)), expected.detach())


def test_files_are_as_large_as_what_is_left(tmp_path):
    pytest.importorskip("safetensors")
    sizes, numbers = [], []
    for closed in (0, 12):
        gates = {name: torch.ones(gate.size) for name, gate in gate_names(network()).items()}
        gates["gate"][:closed] = 0.0
        result = compact(network(), gates, torch.randn(2, 8))
        result.save(tmp_path / str(closed))
        sizes.append((tmp_path / f"{closed}.safetensors").stat().st_size)
        numbers.append(sum(p.numel() for p in result.network.parameters()))
        loaded = load_compacted(network(3), tmp_path / str(closed))
        assert all(
            torch.equal(x, y) for x, y in zip(loaded.network.parameters(), result.network.parameters(), strict=True)
        )
    assert sizes[0] - sizes[1] > 3 * (numbers[0] - numbers[1])  # four bytes each, and the plan


def maps():
    """LeNet-5, with a third of its gates open."""
    net = import_module("common.networks").lenet5()  # of the examples, which a fresh process does not find
    generator = torch.Generator().manual_seed(6)
    gates = {name: (torch.rand(gate.size, generator=generator) < 0.3).float() for name, gate in gate_names(net).items()}
    return net, gates, torch.rand(4, 784, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: (network(), GATES, torch.randn(4, 8)), maps], ids=["Transformer", "LeNet-5"])
def test_exports_compute_the_same(make, tmp_path):
    """torch.export, and ONNX in onnxruntime; a hook, a selection and zeros in between."""
    net, gates, x = make()
    small = compact(net, gates, x).network
    exported = torch.export.export(small, (x,)).module()
    torch.testing.assert_close(exported(x), small(x))
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX is tested with the export extra")
    pytest.importorskip("onnxscript", reason="ONNX is tested with the export extra")
    with warnings.catch_warnings():  # the exporter's own deprecations
        warnings.simplefilter("ignore")
        torch.onnx.export(small, (x,), tmp_path / "small.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "small.onnx"), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), small(x).detach(), rtol=1e-4, atol=1e-5)  # float32 kernels


def test_norms_over_gated_units(tmp_path):
    """A gate in front of a norm and behind it: the norm counts what left as zeros; exported and loaded."""

    class Normed(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.a, self.g, self.norm, self.b = nn.Linear(4, 6), Gate(6), norm(6), nn.Linear(6, 2)

        def forward(self, x):
            return self.b(self.g(self.norm(self.g(torch.relu(self.a(x))))))

    pytest.importorskip("safetensors")
    for norm in (nn.LayerNorm, nn.RMSNorm):
        torch.manual_seed(4)
        net, x = Normed(norm).double(), torch.randn(5, 4).double()
        result = compact(net, {"g": torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0]).double()}, x)
        assert result.certificate < 1e-12
        assert result.network.a.out_features == 4
        assert result.network.norm.size == 6
        result.save(tmp_path / "normed")
        assert torch.equal(load_compacted(Normed(norm).double(), tmp_path / "normed").network(x), result.network(x))
        torch.testing.assert_close(torch.export.export(result.network, (x,)).module()(x), result.network(x))
