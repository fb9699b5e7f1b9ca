"""examples/lora_rank.py: ranks and merged weights of a quick run."""

import sys

import pytest

import lora_rank
from lora_rank import Options


@pytest.fixture
def libraries():
    """Beside peft, transformers, which peft needs."""
    pytest.importorskip("peft", reason="the example runs where peft is installed (pip install peft transformers)")


@pytest.mark.slow
def test_quick_run(tmp_path, capsys, libraries):
    """One rank of each layer is left, merging changes nothing, and there is a line of each task and choice."""
    results = lora_rank.main(Options(steps=20, seeds=(0,), out=tmp_path))
    for (_, kind), (result,) in results.items():
        assert sum(result.ranks.values()) == (104 if kind == "all ranks" else 13)
        assert len(result.ranks) == 13
        assert result.merging < 1e-3  # of outputs near ten, in float32
        assert 0 < result.error <= 100
    assert (tmp_path / "lora_rank.png").stat().st_size > 1000
    assert len(capsys.readouterr().out.splitlines()) == 14


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="but peft is not installed; run pip install peft transformers"):
        lora_rank.main(Options(out=tmp_path))
