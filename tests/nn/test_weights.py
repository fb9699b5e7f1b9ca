"""Gates on single weights: the product, the price and the count, and zeros in plain layers."""

import pytest
import torch
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.infer.runs import factor
from pyro_l0.nn import L0Gate, fix_gates, gate_weights
from pyro_l0.nn.gate import gate_names, name_gates
from pyro_l0.nn.weights import fix_weights

LAYERS = {
    "dense": (lambda: nn.Linear(4, 3), lambda: torch.randn(2, 4)),
    "dense without bias": (lambda: nn.Linear(4, 3, bias=False), lambda: torch.randn(2, 5, 4)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), lambda: torch.randn(2, 2, 5, 5)),
    "grouped": (lambda: nn.Conv1d(4, 4, 3, groups=2), lambda: torch.randn(2, 4, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), lambda: torch.randn(2, 2, 3, 3)),
    "embedding": (lambda: nn.Embedding(6, 4), lambda: torch.randint(0, 6, (2, 3))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_gate_multiplies_one_weight(name):
    """Against the layer whose weight was multiplied by hand; the network itself stays as it was."""
    torch.manual_seed(1)
    make, inputs = LAYERS[name]
    net, x = nn.Sequential(make()), inputs()
    gated = gate_weights(net, "0")
    number = net[0].weight.numel()
    assert {site: gate.size for site, gate in gate_names(gated).items()} == {"0.gate": number}
    values = torch.rand(number) * (torch.rand(number) < 0.5)
    before = net(x)
    outputs = fix_gates(gated, {"0.gate": values})(x)
    plain = fix_weights(gated, {"0.gate": values})
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)
    with torch.no_grad():
        net[0].weight *= values.view(net[0].weight.shape)
    torch.testing.assert_close(outputs, net(x))
    torch.testing.assert_close(plain(x), net(x))
    assert type(plain[0]) is type(net[0])
    assert plain.state_dict().keys() == net.state_dict().keys()
    assert int(plain[0].weight.count_nonzero()) == int(values.count_nonzero())


def test_price_and_count_are_of_single_weights():
    """Eq. 22 with groups of one weight, from the posterior's probabilities; unit gates beside them have their own."""
    net = gate_weights(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), L0Gate(2), nn.Linear(2, 1)), "0", "3")
    assert {site: gate.size for site, gate in name_gates(net).items()} == {"0.gate": 6, "2": 2, "3.gate": 2}

    def model(x):
        factor("y", -net(x).square().sum())

    guide = AutoGate(model, init_active_prob={"0.gate": 0.3, "2": 0.5, "3.gate": 0.8}, init_jitter=0.0)
    x = torch.ones(4, 3)
    guide(x)
    posterior = guide.posterior()
    assert float(posterior["0.gate"].active_prob.sum().detach()) == pytest.approx(6 * 0.3, rel=1e-5)
    parts = L0_ELBO("l0", lam=2.0, group_size={"2": 3.0}).terms(model, guide, x)
    assert float(parts["l0"]) == pytest.approx(2.0 * (6 * 0.3 + 3.0 * 2 * 0.5 + 2 * 0.8), rel=1e-5)


def test_units_beside_gated_weights_compact():
    """The zeros of what is left stay zeros, and the outputs are the same."""
    torch.manual_seed(0)
    net = gate_weights(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 2)), "0", "3").double()
    gates = {site: (torch.rand(gate.size) < 0.5).double() for site, gate in name_gates(net).items()}
    gates["2"] = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)
    small = compact(fix_weights(net, gates), {"2": gates["2"]}, x).network
    torch.testing.assert_close(small(x), fix_gates(net, gates)(x), rtol=1e-12, atol=1e-12)
    assert small[3].weight.shape == (2, 2)
    kept = gates["3.gate"].view(2, 4)[:, [0, 2]]
    assert torch.equal(small[3].weight != 0, kept != 0)
