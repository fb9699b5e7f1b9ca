"""The Bayesian perceptron's table on breast cancer, in a few steps and whole."""

import pytest

from bayesian_mlp import Options, main


def test_every_method_has_a_row(tmp_path):
    options = Options(data="digits", hidden=(8,), steps=30, draws=2, seeds=(1,), out=tmp_path)
    rows = main(options)
    assert list(rows) == ["median", "draws", "deterministic", "ensemble of 5", "dropout"]
    assert (tmp_path / "reliability.png").exists()


@pytest.mark.slow
def test_few_weights_tell_breast_cancer(tmp_path):
    """A handful of a thousand weights; the more frequent class alone errs in 37 of 100."""
    options = Options(
        data="cancer", hidden=(20, 20), steps=1500, prior_active_prob=0.02, rivals=False, seeds=(1,), out=tmp_path
    )
    (row,) = main(options)["draws"]
    assert row["error"] < 18
    assert 1 <= row["weights"] <= 50
