"""examples/transformer_heads.py: the table of its quick run, and what is refused."""

import pytest

import transformer_heads
from transformer_heads import Options

WEIGHTS = 32 * 4 + 32 + 16 * 32 + 3 * (4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32) + 2 * 32 + 10 * 32 + 10


@pytest.mark.slow
def test_quick_run(capsys):
    """A row without λ, and one in which a price that nothing is worth closes all heads; each line is printed."""
    rows = transformer_heads.main(Options(epochs=8, lams=(1000.0,)))
    assert [row.lam for row in rows] == [None, 1000.0]
    assert rows[0].heads == (0, 24)
    assert rows[0].units == (0, 192)
    assert rows[0].branches == (0, 6)
    assert rows[0].weights == WEIGHTS
    assert rows[1].heads[0] > 0
    assert rows[1].weights < WEIGHTS
    assert all(0 < accuracy <= 100 for row in rows for accuracy in (row.accuracy, row.trained_on))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "0 of 24" in lines[1]
