"""Refusals that name the module or the place that is at fault, and not the one where it shows."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pyro_l0.compaction import compact, load_compacted
from pyro_l0.nn import Gate, fix_gates
from pyro_l0.nn.gate import gate_names


class Gated(nn.Module):
    """A weight times gates."""

    def __init__(self):
        super().__init__()
        self.gate = Gate(3)

    def forward(self, weight):
        return self.gate(weight)


def test_gate_in_a_weight_parametrisation_acts_on_weights():
    """Whatever leaves, the outputs stay."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    parametrize.register_parametrization(net[0], "weight", Gated())
    gates = {site: torch.tensor([1.0, 0.0, 0.5]) for site in gate_names(net)}
    x = torch.randn(2, 3)
    expected = fix_gates(net, gates).eval()(x)
    torch.testing.assert_close(compact(net, gates, x).network(x), expected)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_gate_behind_a_recurrent_layer_is_named(layer):
    """Not the dense layer behind it, which can't take a tuple either."""
    net = nn.Sequential(layer(3, 4), Gate(4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"module '1' \(Gate\).* a tensor at gate 1, but got a tuple; .*nn\.LSTM"):
        compact(net, {"1": torch.ones(4)}, torch.ones(2, 5, 3))


def test_place_of_a_file_is_named_once(tmp_path):
    """A folder in the file's place when reading; no folder to write to, rather than a temporary file's name."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Gate(4), nn.Linear(4, 2))
    small = compact(net, {"2": torch.tensor([1.0, 0.0, 0.5, 0.0])}, torch.ones(2, 3))
    (tmp_path / "small.safetensors").mkdir()
    with pytest.raises(ValueError, match="it is a folder") as refusal:
        load_compacted(net, tmp_path / "small")
    assert str(refusal.value).count("Expected") == 1
    with pytest.raises(FileNotFoundError, match=r"Expected a folder to save in.*missing'$"):
        small.save(tmp_path / "missing" / "small")
