"""examples/sparse_autoencoder.py: its table, what it counts, and features that are recovered."""

import pytest
import torch

import sparse_autoencoder
from sparse_autoencoder import Autoencoder, Data, Options


def test_quick_run(tmp_path, capsys):
    """A row per data set and method, printed; top-k has its number of units, the others theirs of a few steps."""
    rows = sparse_autoencoder.main(Options(steps=2, seeds=(0,), out=tmp_path))
    assert list(rows) == [(name, m) for name in ("superposition", "activations") for m in ("L0", "top-k", "L1")]
    assert rows["superposition", "top-k"][0].active <= 3
    assert rows["activations", "top-k"][0].active <= 8
    assert all(row.unexplained > 0 and len(row.cosines) in (0, 64) for (row,) in rows.values())
    # The decoder starts apart from the true directions: random ones in 24 dimensions.
    assert rows["superposition", "L0"][0].cosines.max() < 0.9
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:7]] == [list(key) for key in rows]
    assert (tmp_path / "sparse_autoencoder.png").stat().st_size > 1000


def autoencoder(method):
    torch.manual_seed(0)
    x = torch.randn(50, 6)
    return Autoencoder(method, Data(x, x, 2, 12, torch.zeros(6, 0))), x


def test_units_and_their_price():
    """Top-k keeps the largest; L1 pays for the sum; gates close units, and what is counted is what is decoded."""
    network, x = autoencoder("top-k")
    active = network(x)[1]
    units = network.encoder(x).relu()
    assert (active.sum(1) <= 2).all()
    torch.testing.assert_close((units * active).sum(), units.topk(2).values.sum())
    network, x = autoencoder("L1")
    torch.testing.assert_close(network(x)[2], network.encoder(x).relu().sum(1).mean())
    network, x = autoencoder("L0")
    with torch.no_grad():
        network.decoder.weight.fill_(1.0)
        reconstruction, active, _, gate = network.eval()(x)
    assert 0 < active.sum() == (gate.test_gate != 0).sum() < 600
    assert ((reconstruction[:, 0] != network.decoder.bias[0]) == active.any(1)).all()


@pytest.mark.slow
def test_features_are_recovered():
    """Gates find most of the 64 directions and leave less unexplained than L1 with about as many units."""
    torch.manual_seed(0)
    data = sparse_autoencoder.superposition()
    gates, l1 = (sparse_autoencoder.measure(sparse_autoencoder.train(m, data, 2000), data) for m in ("L0", "L1"))
    assert (gates.cosines > 0.9).sum() > 32
    assert gates.unexplained < l1.unexplained
    assert abs(gates.active - 3) < 1
    assert abs(l1.active - 3) < 1
