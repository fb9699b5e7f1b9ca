"""Gates that torch's fused layers would pass by, and places where a gate can't act or would act elsewhere too."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.nn import L0Gate, fix_gates, insert_gates
from pyro_l0.nn.gate import name_gates
from tests.networks import Dense

# torch says so of the packed batches that it makes.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


class OwnGate(L0Gate):
    """A user's."""


def layer(gate=None, **options):
    torch.manual_seed(0)
    new = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    if gate is not None:
        new.dropout1 = gate(8)
    return new


def encoder(one):
    return nn.TransformerEncoder(one, 2)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["plain", "padded"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: insert_gates(encoder(layer(**options)), {"layers.0.linear1": L0Gate(16)}),
        lambda **options: encoder(layer(OwnGate, **options)),
        lambda **options: pickle.loads(pickle.dumps(encoder(layer(L0Gate, **options)))),
    ],
    ids=["insert", "subclass", "pickle"],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_gates_in_fused_transformer_layers_act_in_eval(make, norm_first, padding, context):
    """Given by a handler, or fixed: as in a network that computes every operation by itself."""
    torch.manual_seed(1)
    network, x = make(norm_first=norm_first).eval(), torch.randn(2, 5, 8)
    gates = name_gates(network)
    options = {} if padding is None else {"src_key_padding_mask": padding}
    outputs = []
    for value in (0.0, 0.5, 1.0):
        values = {name: torch.full((gate.size,), value) for name, gate in gates.items()}
        with context(), poutine.condition(data=values):
            outputs.append(network(x, **options))
        fixed = fix_gates(network, values).eval()
        with context():
            torch.testing.assert_close(fixed(x, **options), outputs[-1])
        slow = fixed(x.clone().requires_grad_(), **options)  # gradients take the plain path
        shown = slice(None) if padding is None else ~padding
        torch.testing.assert_close(outputs[-1][shown], slow.detach()[shown], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


@pytest.mark.filterwarnings("ignore:Gates are closed, but nothing is smaller")
def test_attributes_of_a_module_with_a_gate_are_read():
    """Its sizes, and its weights: the operations say what follows from that."""

    torch.manual_seed(0)

    def forward(net, x):
        assert net.a.out_features == 4
        return net.b(F.linear(x.to(net.a.weight.dtype), net.a.weight) + 0 * net.a(x))

    network = Dense(forward, a=(3, 4), b=(4, 2))
    gated, x = insert_gates(network.double(), {"a": L0Gate(4)}), torch.randn(2, 3).double()
    gates = {"a.1": torch.tensor([1.0, 0.0, 1.0, 0.0]).double()}
    found = compact(gated, gates, x)
    assert found.network.a.out_features == 4  # what is read past the gate stays
    assert found.certificate < 1e-10
