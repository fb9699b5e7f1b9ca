"""examples/factor_model.py: missing entries, how factors are compared, and what is printed."""

import pyro
import pytest
import torch
from pyro import poutine

import factor_model
from factor_model import Options, Run, best_overlaps, main, make_data, make_model, overlap, verdicts


def support(*rows):
    return torch.tensor(rows).bool()


def test_missing_entries_do_not_matter():
    """A tenth of both views; what stands there changes no probability of the model."""
    data = make_data(0)
    assert (~data.seen).float().mean().item() == pytest.approx(0.1, abs=0.02)
    pyro.set_rng_seed(0)
    trace = poutine.trace(make_model(data.seen)).get_trace(data.numbers, data.counts)
    numbers_seen, counts_seen = data.seen.chunk(2, 1)
    changed = torch.where(numbers_seen, data.numbers, 7.0), torch.where(counts_seen, data.counts, 7.0)
    model = poutine.replay(make_model(data.seen), trace)
    torch.testing.assert_close(poutine.trace(model).get_trace(*changed).log_prob_sum(), trace.log_prob_sum())
    shifted = poutine.trace(model).get_trace(data.numbers + 1, data.counts)
    assert abs(shifted.log_prob_sum() - trace.log_prob_sum()) > 1


def test_overlaps():
    """F1 of each pair; each true factor has a found one of its own, in whatever order."""
    truth = support([1, 1, 0, 0], [0, 0, 1, 1])
    found = support([0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0])
    torch.testing.assert_close(overlap(found, truth), torch.tensor([[0, 1], [2 / 3, 0], [0, 0]]))
    assert best_overlaps(found, truth) == pytest.approx([2 / 3, 1])


def test_verdicts():
    """A factor is trusted if another training has it; not a splinter, and none that shares most of its loadings."""
    other = Run(1.0, support([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]), torch.zeros(2))
    apart = Run(0.0, support([1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1]), torch.zeros(2))
    right, splinter, closed = verdicts(apart, [other])
    assert right == "3 loadings, found by 1 of 1 other trainings"
    assert splinter.startswith("3 loadings, found by 0 of 1")
    assert "part of another" in splinter
    assert closed == "closed"
    mixed = Run(0.0, support([1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]), torch.zeros(2))
    assert all("may mix the same two" in says for says in verdicts(mixed, [other]))


def test_quick_run(capsys, monkeypatch):
    for name, value in {"ROWS": 12, "COLUMNS": 4, "FACTORS": 2, "TRUE": 2, "RUNS": 2, "MOST": 3, "DRAWS": 3}.items():
        monkeypatch.setattr(factor_model, name, value)
    results = main(Options(steps=4, seeds=(3,)))
    best, *others, full = results[3]
    assert 1 <= len(others) <= 2
    assert all(best.loss <= other.loss for other in others)
    assert full.support.all()
    assert all(run.error.isfinite().all() for run in results[3])
    printed = capsys.readouterr().out
    assert printed.count("training") >= 1
    assert printed.count("factor ") == 2


@pytest.mark.slow
def test_the_best_of_several_trainings_finds_the_factors():
    """And fills missing entries better than the model whose gates are all open."""
    best, *_, full = main(Options())[1]
    assert min(best_overlaps(best.support, make_data(1).support)) > 0.9
    assert (best.error < full.error).all()
