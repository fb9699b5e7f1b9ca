"""What ArviZ says of chains, and chains that never move."""

import torch

from pyro_l0.infer.posterior.mcmc import chain_statistics


def test_chains_that_do_not_move():
    """Gates that are always closed agree; gates that are open in one chain and closed in others do not."""
    closed, stuck = torch.zeros(4, 20), torch.zeros(4, 20)
    stuck[1] = 1
    half = torch.tensor([0.0, 1.0]).repeat(4, 10)  # the distance from the median is always the same
    r_hat, ess, error = chain_statistics({"closed": closed, "stuck": stuck, "half": half})
    assert (r_hat["closed"].item(), ess["closed"].item(), error["closed"].item()) == (1, 80, 0)
    assert error["stuck"].item() > 0.15  # one of four chains: sqrt(1/4 * 3/4 / 4) = .22 of four that are alone
    assert r_hat["stuck"].item() > 1e3
    assert r_hat["half"].item() < 1.01
    assert torch.isfinite(ess["half"])


def test_each_entry_by_itself():
    torch.manual_seed(0)
    x = torch.randn(3, 50, 2, 4)
    x[0, :, 1, 2] += 2
    r_hat, ess, _ = chain_statistics({"x": x, "binary": (x > 0).long()})
    assert r_hat["x"].shape == ess["x"].shape == (2, 4)
    assert (r_hat["x"] > 1.2).nonzero().tolist() == [[1, 2]]
    assert r_hat["x"][1, 2] == chain_statistics({"y": x[..., 1, 2]})[0]["y"]
    assert r_hat["binary"].dtype == torch.float64
