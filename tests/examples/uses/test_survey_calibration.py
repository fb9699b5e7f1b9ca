"""examples/survey_calibration.py: its table of records, its targets, fitted weights, and what is refused."""

import pandas as pd
import pytest
import torch

import survey_calibration
from survey_calibration import Options, Survey, choose, fit, survey


@pytest.fixture
def small(monkeypatch):
    """Of 4,000 households, 400 answer, and ten are protected."""
    for name, value in {"POPULATION": 4000, "SURVEY": 400, "PROTECTED": 10, "ITERATIONS": 50}.items():
        monkeypatch.setattr(survey_calibration, name, value)


def test_the_table_is_all_that_is_needed(small, tmp_path, capsys):
    """Its records are within the budget, its weights positive, and its totals as far off as is printed."""
    results = survey_calibration.main(Options(records=60, steps=20, out=tmp_path))
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3
    (row,), (chance,), found = results["gates"], results["random"], survey(1)
    table = pd.read_csv(tmp_path / "records-1.csv")
    assert list(table) == ["record", "weight"]
    assert table["record"].is_unique
    assert len(table) == row.records == chance.records == 60
    assert (table["weight"] > 0).all()
    assert set(found.protected.nonzero().flatten().tolist()) <= set(table["record"])
    households = pd.DataFrame(found.shares.T.numpy())
    totals = households.iloc[table["record"]].mul(table["weight"].to_numpy(), axis=0).sum()
    assert 100 * abs(totals - 1).mean() == pytest.approx(row.mean_error, rel=1e-6)


def test_other_weights_are_exactly_zero(small):
    torch.manual_seed(0)
    weights = choose(found := survey(0), records=60, evenness=1.0, steps=20)
    assert int((weights != 0).sum()) == 60
    assert torch.equal(fit(found, weights) != 0, weights != 0)


def test_targets_are_totals_of_the_population(monkeypatch):
    """If all households answer, weights of 1 meet all 200 targets."""
    for name in ("POPULATION", "SURVEY"):
        monkeypatch.setattr(survey_calibration, name, 3000)
    shares = survey(0).shares
    torch.testing.assert_close(shares.sum(1), torch.ones(200).double(), rtol=1e-12, atol=0)


def test_fit(monkeypatch):
    """Two targets, each of one record that is left: weights 10 and 20."""
    monkeypatch.setattr(survey_calibration, "FINAL_EVENNESS", 0.0)
    shares = torch.tensor([[0.1, 0.0, 0.3], [0.0, 0.05, 0.2]]).double()
    weights = fit(Survey(shares, torch.zeros(3).bool()), torch.tensor([1.0, 1.0, 0.0]).double())
    torch.testing.assert_close(weights, torch.tensor([10.0, 20.0, 0.0]).double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("records", [100, 10_000])
def test_the_budget_is_between_the_protected_and_all(records, tmp_path):
    with pytest.raises(ValueError, match=r"more than the 100 protected ones and fewer than 10000, but got"):
        survey_calibration.main(Options(records=records, out=tmp_path))


@pytest.mark.slow
def test_gates_choose_better_than_chance(tmp_path):
    """Less than half of the error, on average and at worst, with as many records."""
    results = survey_calibration.main(Options(out=tmp_path))
    (gates,), (chance,) = results["gates"], results["random"]
    assert (gates.records, gates.protected) == (1000, 100)
    assert gates.mean_error < 0.5 * chance.mean_error
    assert gates.worst_error < 0.5 * chance.worst_error
