"""Bits by posterior spread, rounded networks in files, and the program that rounds a pruned network."""

import pytest
import torch
from torch import nn

import bayesian_bits
import mnist
from common.bits import bit_precision, load_quantised, quantise, save_quantised
from pyro_l0.bayes import bayesian, plain_network


def trained(seed=0):
    torch.manual_seed(seed)
    net = bayesian(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    with torch.no_grad():
        for layer in (net[0], net[3]):
            layer.logits.normal_()
            layer.log_scale.add_(torch.randn_like(layer.log_scale))
    return net


def test_rounding_costs_the_nats_that_were_asked_for():
    """The mean over weights of half the curvature 1/s^2 times the variance of rounding, drawn."""
    net = trained()
    for path, (step, bits) in bit_precision(net, nats=0.03).items():
        layer = net.get_submodule(path)
        is_open = layer.logits > 0
        offsets = step * (torch.rand(200_000, int(is_open.sum())) - 0.5)
        cost = (0.5 * offsets.square() / layer.slab.scale[is_open].square()).mean()
        assert float(cost.detach()) == pytest.approx(0.03, rel=0.02)
        largest = float((layer.mean[is_open].abs().max() / step).round().detach())
        assert 2 ** (bits - 2) <= largest < 2 ** (bits - 1) or bits == 2


def test_a_rounded_network_comes_back_from_its_file(tmp_path):
    net = trained()
    precision = bit_precision(net)
    with pytest.raises(ValueError, match="quantise the network first"):
        save_quantised(plain_network(net), precision, tmp_path / "net.npz.xz")
    plain = quantise(plain_network(net), precision)
    size = save_quantised(plain, precision, tmp_path / "net.npz.xz")
    assert size == (tmp_path / "net.npz.xz").stat().st_size
    again = plain_network(trained(seed=1))
    again.load_state_dict(load_quantised(tmp_path / "net.npz.xz"))
    x = torch.randn(4, 6)
    torch.testing.assert_close(again(x), plain(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(again[0].weight == 0, plain[0].weight == 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    mnist.main(mnist.Options(epochs=20, out=folder))
    return folder


@pytest.mark.slow
def test_rounding_keeps_the_weights_and_packs_them(run, tmp_path):
    rows = bayesian_bits.main(bayesian_bits.Options(run=run, steps=200, out=tmp_path))
    assert rows["rounded"]["bytes"] == (tmp_path / "rounded.npz.xz").stat().st_size
    assert rows["rounded"]["weights"] == rows["median"]["weights"] == rows["pruned"]["weights"]
    assert rows["rounded"]["rate"] > 2 * rows["pruned"]["rate of weights"]
    assert rows["rounded"]["error, %"] < rows["pruned"]["error, %"] + 20  # of 90 by chance


@pytest.mark.slow
def test_gates_leave_fewer_weights(run, tmp_path):
    rows = bayesian_bits.main(bayesian_bits.Options(run=run, steps=600, prior_active_prob=0.1, out=tmp_path))
    assert rows["median"]["weights"] < rows["pruned"]["weights"]
    assert rows["rounded"]["rate of weights"] == rows["median"]["rate of weights"]
