"""examples/factor_model.py: missing entries, how factors are compared, and what is printed."""

import pyro
import pytest
import torch
from pyro import poutine

import factor_model
from factor_model import Options, Run, best_overlaps, found_elsewhere, main, make_data, make_model, overlap


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


def test_a_mixture_of_factors_is_found_nowhere_else():
    best = Run(0.0, support([1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]), torch.zeros(2))
    same = Run(1.0, support([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]), torch.zeros(2))
    other = Run(2.0, support([0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]), torch.zeros(2))
    assert found_elsewhere(best, [same, other]) == [1, 1]
    assert found_elsewhere(best, [other]) == [0, 0]


def test_quick_run(capsys, monkeypatch):
    for name, value in {"ROWS": 12, "COLUMNS": 4, "FACTORS": 2, "TRUE": 2, "RUNS": 2, "DRAWS": 3}.items():
        monkeypatch.setattr(factor_model, name, value)
    results = main(Options(steps=4, seeds=(3,)))
    best, other, full = results[3]
    assert best.loss <= other.loss
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
