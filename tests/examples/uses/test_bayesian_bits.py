"""The file of a pruned network, rounded by its posterior's spread."""

import pytest

import bayesian_bits
import mnist

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    mnist.main(mnist.Options(epochs=20, out=folder))
    return folder


def test_rounding_keeps_the_weights_and_packs_them(run, tmp_path):
    rows = bayesian_bits.main(bayesian_bits.Options(run=run, steps=200, out=tmp_path))
    assert rows["rounded"]["bytes"] == (tmp_path / "rounded.npz.xz").stat().st_size
    assert rows["rounded"]["weights"] == rows["median"]["weights"] == rows["pruned"]["weights"]
    assert rows["rounded"]["rate"] > 2 * rows["pruned"]["rate of weights"]
    assert rows["rounded"]["error, %"] < rows["pruned"]["error, %"] + 20  # of 90 by chance


def test_gates_leave_fewer_weights(run, tmp_path):
    rows = bayesian_bits.main(bayesian_bits.Options(run=run, steps=600, prior_active_prob=0.1, out=tmp_path))
    assert rows["median"]["weights"] < rows["pruned"]["weights"]
    assert rows["rounded"]["rate of weights"] == rows["median"]["rate of weights"]
