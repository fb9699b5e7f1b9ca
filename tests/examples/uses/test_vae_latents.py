"""Latents of a variational autoencoder: bounds of every kind, and what the table is made of."""

import math

import pytest
import torch

from vae_latents import KINDS, Options, Vae, evaluate, fit, main


def images(number=400):
    """Binary images of four pixels that are the same, and of four others."""
    torch.manual_seed(2)
    return (torch.rand(number, 2) < 0.5).float().repeat_interleave(4, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_lie_below_the_entropy_of_the_data(kind):
    x = images()
    torch.manual_seed(3)
    vae = Vae(x.mean(0), KINDS[kind])
    before = evaluate(vae, x, 20)
    fit(vae, x, 150, seed=4)
    after = evaluate(vae, x, 20)
    entropy = 2 * math.log(2)
    assert before.elbo < before.iwae < -entropy + 0.3
    assert after.elbo > before.elbo + 0.5
    assert after.iwae < -entropy + 0.3


@pytest.mark.slow
def test_the_loss_is_the_negative_bound():
    x = images(100)
    for kind in KINDS.values():
        torch.manual_seed(5)
        vae = Vae(x.mean(0), kind)
        losses = torch.stack([vae(x).detach() for _ in range(200)])
        elbo = evaluate(vae, x, 500).elbo
        assert abs(losses.mean() + elbo) < 4 * losses.std() / math.sqrt(len(losses)) + 0.01


@pytest.mark.slow
def test_the_program_prints_every_kind(tmp_path, capsys):
    results = main(Options(steps=2, draws=2, seeds=(1,), out=tmp_path))
    assert list(results) == list(KINDS)
    printed = capsys.readouterr().out
    assert all(name in printed for name in KINDS)
    assert (tmp_path / "vae_latents.png").exists()
