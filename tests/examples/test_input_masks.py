"""examples/input_masks.py: the curves of a quick run, and that the masks open the inputs that are needed."""

import pytest
import torch

import input_masks
from input_masks import Options


def test_quick_run():
    """What is removed and what is put back add up; a network that learned nothing finds nothing."""
    torch.manual_seed(0)
    _, result = input_masks._run(input_masks._tokens(), 20)
    assert 0 < result.kept <= 12
    for score, (deletion, insertion) in result.curves.items():
        assert len(deletion) == len(insertion) == 13
        torch.testing.assert_close(deletion[[0, -1]], insertion[[-1, 0]])
        assert 0 <= result.found[score][0] < 0.5


@pytest.mark.slow
def test_masks_open_what_is_needed(tmp_path, capsys):
    """On tokens nearly always, and without these the prediction is gone; a table and a picture."""
    results = input_masks.main(Options(seeds=(0,), out=tmp_path))
    (tokens,), (digits,) = results.values()
    assert tokens.accuracy > 0.8
    assert not any(digits.found.values())
    assert tokens.found["L0 masks"][0] > 0.7
    for task in (tokens, digits):
        (deletion, insertion), random = task.curves["L0 masks"].mean(1), task.curves["random"].mean(1)
        assert deletion < random[0] - 0.1
        assert insertion > random[1] + 0.1
    assert tokens.curves["L0 masks"][1].mean() > tokens.curves["gradient x input"][1].mean() + 0.1
    assert (tmp_path / "input_masks.png").stat().st_size > 1000
    assert len(capsys.readouterr().out.splitlines()) == 9
