"""Whether chains agree: values of ArviZ 0.23 (method="rank" and "bulk"), and chains that never move."""

import math

import torch

from pyro_l0.maths.chains import bulk_ess, r_hat


def chains(n):
    """Four chains of four variables: good, one chain apart, one wide, one binary."""
    # Irregular, and the same on every processor, unlike torch's powers of this size.
    noise = [math.sin(12.9898 * t**1.5) * 43758.5453 % 1 for t in range(4 * n)]
    noise = torch.tensor(noise, dtype=torch.float64).reshape(4, n)
    x = torch.stack([noise] * 4, -1)
    x[0, :, 1] += 0.5
    x[0, :, 2] *= 3
    x[:, :, 3] = (noise > 0.8).double()
    return x


def test_values_of_arviz():
    """ArviZ leaves out the last pair of lags where no sum is negative, as for the two chains that disagree."""
    x = chains(200)
    slow = torch.zeros(4, 200, dtype=torch.float64)
    for k in range(1, 200):
        slow[:, k] = 0.8 * slow[:, k - 1] + x[:, k, 0] - 0.5
    draws = torch.cat((x, slow.unsqueeze(-1)), -1)
    expected = torch.tensor([0.9978874801627915, 1.2292785043539136, 1.2000271497918888, 0.9976523757240952])
    torch.testing.assert_close(r_hat(draws)[:4].float(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(r_hat(slow).item(), 1.023742561362267, rtol=1e-9, atol=0)
    expected = torch.tensor([852.727750104287, 13.205940546219857, 19.14183334147707, 736.8070301583131])
    torch.testing.assert_close(bulk_ess(draws)[[0, 3]].float(), expected[[0, 3]], rtol=1e-6, atol=0)
    torch.testing.assert_close(bulk_ess(draws)[[1, 2]].float(), expected[[1, 2]], rtol=0.03, atol=0)
    torch.testing.assert_close(bulk_ess(slow).item(), 108.86840831274637, rtol=1e-9, atol=0)


def test_chains_that_do_not_move():
    """Gates that are always closed agree; gates that are open in one chain and closed in others do not."""
    closed, stuck = torch.zeros(4, 20), torch.zeros(4, 20)
    stuck[1] = 1
    half = torch.tensor([0.0, 1.0]).repeat(4, 10)  # the distance from the median is always the same
    assert r_hat(closed).item() == 1
    assert bulk_ess(closed).item() == 80
    assert r_hat(stuck).item() > 1e3
    assert r_hat(half).item() < 1.01
    assert math.isfinite(bulk_ess(half).item())


def test_any_shape_and_type():
    """Every entry by itself."""
    x = torch.randn(3, 50, 2, 4)
    assert r_hat(x).shape == bulk_ess(x).shape == (2, 4)
    torch.testing.assert_close(r_hat(x)[1, 2], r_hat(x[..., 1, 2].double()))
    assert r_hat((x > 0).long()).dtype == torch.float64
