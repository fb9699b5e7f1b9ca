"""The wide residual network and its training."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cifar_wrn
from cifar_wrn import Options, PlainRun, Run
from common.cifar import load_cifar
from common.residual import ResidualNetwork, wide_resnet
from pyro_l0.compaction import compact, load_compacted
from pyro_l0.distributions import PowerLawGate
from pyro_l0.nn import NetworkCost
from pyro_l0.nn.gate import gate_names, name_gates
from tests.examples.killing import stopped_and_resumed, without_seconds


def write_small_cifar(path):
    """A tiny CIFAR-10: class k is the brightness of the image."""
    generator, folder = np.random.default_rng(0), path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        count = 500 if name == "test_batch" else 26
        labels = generator.integers(0, 10, count)
        data = (25 * labels[:, None] + generator.integers(0, 20, (count, 3072))).astype(np.uint8)
        (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": labels.tolist()}, protocol=4))


@pytest.fixture
def folder(tmp_path):
    """The tiny CIFAR-10."""
    write_small_cifar(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_costs_of_wide_residual_networks():
    """WRN-28-10 has 5.24 billion multiply-adds; those of a pruned network are torch's count of the compacted one."""
    cost = NetworkCost(wide_resnet(28, 10), torch.zeros(1, 3, 32, 32))
    assert cost.total_macs == pytest.approx(5.24e9, rel=1e-3)
    net = wide_resnet(10, 1)
    generator = torch.Generator().manual_seed(1)
    gates = {name: (torch.rand(gate.size, generator=generator) < 0.5).float() for name, gate in gate_names(net).items()}
    gates["2.gate"] = torch.zeros(32)  # a whole block closed
    x = torch.randn(2, 3, 32, 32, generator=generator)
    result = compact(net, gates, x)
    assert result.certificate < 1e-5
    with FlopCounterMode(display=False) as counter:
        result.network(x[:1])
    one = 16 * 9 * 16 * 16 + 32 * 9 * 16 * 16  # multiply-adds of the one map that stays in the closed block
    assert NetworkCost(net, x).macs(gates).item() + one == counter.get_total_flops() / 2
    assert result.network[2].conv1.out_channels == 1
    with pytest.raises(ValueError, match="depth of 10, 16, 22, 28"):
        wide_resnet(12, 1)


@pytest.mark.slow
@pytest.mark.parametrize("shrink", [False, True])
def test_training_and_resuming(folder, shrink, monkeypatch):
    """All epochs at once, and the last one after the others, to the last bit; the files that are written."""
    options = {"data_dir": folder, "depth": 10, "width": 1, "epochs": 2, "batch_size": 26, "gate_learning_rate": 1.0}
    if shrink:  # a price at which some maps close at once, and leave after three epochs
        options |= {"epochs": 5, "lam": 0.3, "gate_learning_rate": 30.0, "shrink": True}
    straight = without_seconds(cifar_wrn.main(Options(**options, out=folder / "straight")))
    last = options.pop("epochs") - 1
    is_time = lambda run: len(run.history) == last and bool(run.plans) == shrink  # noqa: E731
    options = Options(**options, epochs=last + 1, out=folder / "resumed")
    resumed = stopped_and_resumed(cifar_wrn.main, options, cifar_wrn.CifarRun, is_time, monkeypatch)
    assert without_seconds(resumed) == straight
    written = {path.name for path in (folder / "straight").iterdir()}
    assert {"metrics.json", "training.png", "checkpoint.pt", "pruned.safetensors"} <= written
    assert json.loads((folder / "straight" / "metrics.json").read_text())["certificate"] < 1e-4
    net = wide_resnet(10, 1)
    name_gates(net, prefix="net.")
    load_compacted(net, folder / "straight" / "pruned")


def test_training_error(folder):
    """Of all images of the epoch, under a network that always says class 3 and does not learn."""
    images = load_cifar(folder)
    run = PlainRun(images, Options(network="dense", depth=10, width=1, batch_size=26, learning_rate=1e-30))
    with torch.no_grad():
        run.net[-1].weight.zero_()
        run.net[-1].bias[3] = 1.0
    run.train_epoch()
    assert run.measure()["train_error_percent"] == pytest.approx(100 * float((images.train_y != 3).double().mean()))


def test_networks_without_gates_take_no_options_of_gates(folder, tmp_path):
    """They would change nothing."""
    with pytest.raises(ValueError, match="Expected no shrink with network='dense', which has no gates"):
        cifar_wrn.main(Options(network="dense", shrink=True, data_dir=folder, out=tmp_path))
    with pytest.raises(ValueError, match=r"Expected depth of 14, 20, .* for a residual network, but got 28"):
        cifar_wrn.main(Options(network="residual", data_dir=folder, out=tmp_path))


def test_the_mixtures_of_the_paper(folder):
    """The family, its sharpness, and the paper's weight of 0.7 at the start."""
    run = Run(load_cifar(folder), Options(family="power_law", beta=2.0, depth=10, width=1, batch_size=26))
    for gate in run.guide.posterior().values():
        assert isinstance(gate, PowerLawGate)
        assert (gate.beta == 2).all()
        assert gate.weight.mean().item() == pytest.approx(0.7, abs=0.01)


def test_residual_networks_of_110_layers():
    """He et al. (2016, arXiv:1512.03385, Table 6) count 1.7 million parameters; the pre-activated one has as many."""
    counts = []
    for net in (ResidualNetwork(3, [16] * 18 + [32] * 18 + [64] * 18), wide_resnet(112, 1)):
        layers = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
        assert len(layers) == 109
        counts.append(sum(p.numel() for p in net.parameters()))
    assert counts == pytest.approx([1.73e6, 1.73e6], rel=0.01)


@pytest.mark.skipif("PYRO_L0_CIFAR" not in os.environ, reason="PYRO_L0_CIFAR names no folder with CIFAR-10")
def test_real_images(tmp_path):
    """A few steps on the real images."""
    folder = Path(os.environ["PYRO_L0_CIFAR"])
    metrics = cifar_wrn.main(
        Options(data_dir=folder, depth=10, width=1, epochs=1, max_steps=20, out=tmp_path, gate_learning_rate=30.0)
    )
    assert metrics["test_error_percent"] < 85
