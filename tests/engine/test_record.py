"""What a recorded call holds, and that recording changes nothing."""

import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyro_l0.compaction import compact
from pyro_l0.nn import L0Gate, NetworkCost, fix_gates, suggest_gates
from pyro_l0.nn.engine import calls_of, record
from tests.networks import Dense, Net


def names(recording):
    return [operation.name.removeprefix("aten::") for operation in recording.operations]


class Noisy(nn.Module):
    """Everything that a network may change when it is called."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.gate = nn.Linear(4, 3), nn.BatchNorm1d(3), L0Gate(3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x):
        self.count += 1
        self.last = x.sum()
        x = F.dropout(self.norm(self.layer(x)), 0.5, True)
        return self.gate(x + torch.rand(3))


def test_recording_changes_nothing():
    network = Noisy().train()
    network.norm.eval()
    example = torch.ones(2, 4)
    hooked, calls = [], iter(range(9))  # a list is part of the network's state; an iterator shows that the hook ran
    network.layer.register_forward_hook(lambda *_: hooked.append(next(calls)))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    buffers, gate, state = dict(network.named_buffers()), dict(network.gate.__dict__), torch.get_rng_state()
    with torch.no_grad():
        record(network, example)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in (network, network.layer, network.norm, network.gate)] == [1, 1, 0, 1]
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in before.items())
    assert dict(network.named_buffers()) == buffers
    assert network.last is None
    assert network.gate.__dict__ == gate
    assert torch.equal(example, torch.ones(2, 4))
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert (hooked, next(calls)) == ([], 1)


class Keeping(nn.Module):
    """Heads with biases that it looks up once and keeps: in a dict, an attribute, or a list in a dict."""

    def __init__(self, how, resets=False):
        super().__init__()
        self.qkv, self.out, self.gate = nn.Linear(6, 24), nn.Linear(8, 3), L0Gate(4, dim=1)
        self.biases, self.how, self.kept, self.resets = nn.Parameter(torch.randn(4, 5)), how, {}, resets
        self.heads = 4
        self.register_buffer("index", torch.arange(9).reshape(3, 3) % 5)

    def train(self, mode=True):
        if mode and self.resets:
            self.kept = {}
        return super().train(mode)

    def bias(self):
        if self.how == "attribute":
            if not hasattr(self, "bias_kept"):
                self.bias_kept = self.biases[:, self.index]
            return self.bias_kept
        if self.how == "dict" and "cpu" not in self.kept:
            self.kept["cpu"] = self.biases[:, self.index]
        elif self.how == "list" and not self.kept.setdefault("all", []):
            self.kept["all"].append(self.biases[:, self.index])
        return self.kept["cpu"] if self.how == "dict" else self.kept["all"][0]

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(2, 3) + (self.biases[:, self.index] if self.training else self.bias())
        return self.out(self.gate(scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore:Expected an example that uses the whole network")  # the parameter behind the kept
@pytest.mark.parametrize("how", ["dict", "attribute", "list"])
@pytest.mark.parametrize("before", ["never called", "called", "called without gradients", "called, resets"])
def test_what_a_module_computes_and_keeps(how, before):
    """The network's own is left as it is, and the compact one has none of other sizes; without a reset heads stay."""

    def kept():
        of_lists = network.kept.get("all", [])
        return [id(x) for x in (vars(network).get("bias_kept"), *network.kept.values(), *of_lists)]

    torch.manual_seed(0)
    network, x = Keeping(how, before == "called, resets").double().eval(), torch.randn(2, 3, 6, dtype=torch.float64)
    if before != "never called":
        with torch.set_grad_enabled(before != "called without gradients"):
            network.bias()
    values, own = torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=torch.float64), kept()
    NetworkCost(network, x)
    suggest_gates(network, x)
    small = compact(network, {"gate": values}, x).network
    assert kept() == own
    assert len(small.biases) == (2 if before == "never called" or (small.resets and how != "attribute") else 4)
    fixed = fix_gates(network, {"gate": values})
    expected = fixed(x)
    for _ in range(2):
        torch.testing.assert_close(small(x), expected, rtol=0, atol=1e-12)
    assert (small.train()(x) - fixed.train()(x)).abs().max() <= 1e-12


@pytest.mark.parametrize("place", range(0, 200, 8))
def test_an_interrupt_at_any_call_leaves_every_module_as_it_was(place):
    """Within what is ours, the functions that give everything back included."""
    network = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), L0Gate(3), nn.BatchNorm1d(3)).train()
    network[3].eval()
    before = [dict(vars(module)) for module in network.modules()]
    calls = iter(range(10**6))

    def trace(frame, event, argument):
        if frame.f_code.co_filename == record.__code__.co_filename and next(calls) == place:
            raise KeyboardInterrupt

    before_tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        record(network, torch.ones(2, 2))
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before_tracing)
    assert [dict(vars(module)) for module in network.modules()] == before


@dataclass
class Answer:
    one: torch.Tensor
    many: dict

    def loss(self):
        return self.one


def several(net, x, *, y=None, kind="tuple"):
    """Several inputs, keywords, flags, and outputs of every kind."""
    h = net.layer(x) if y is None else net.layer(x) + y
    outputs = {"tuple": (h, [h * 2]), "dict": {"one": h, "two": {"three": h + 1}, "none": None}}
    return outputs.get(kind, Answer(h, {"x": h.exp()}))


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_inputs_and_outputs_of_every_kind(kind):
    network = Dense(several, layer=(4, 4))
    call = record(network, {"x": torch.ones(2, 4), "y": torch.ones(4), "kind": kind}).calls[0]
    assert [value.shape for value in call.inputs] == [(2, 4), (4,)]
    assert [value.shape for value in call.outputs] == [(2, 4), (2, 4)]
    assert calls_of((torch.ones(1), 2))[0][0][1] == 2


def test_changes_in_place_make_new_values():
    def forward(net, x):
        h = x * 2
        h.add_(1.0)
        part = h[:, :2]
        part.mul_(3.0)
        return h

    recording = record(Net(forward), torch.ones(2, 4))
    assert names(recording) == ["mul", "add_", "slice", "mul_", "write in place"]
    mul, add, part, scaled, written = recording.operations
    assert add.inputs == [mul.output]
    assert add.output is not mul.output
    assert part.inputs == [add.output]
    assert written.inputs[0] is add.output
    assert scaled.output in written.inputs
    assert recording.calls[0].outputs[0] in written.outputs


def test_checkpointed_blocks_frozen_networks_and_autocast():
    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(net.block, x, use_reentrant=False)

    net = Net(forward, block=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    network = net.requires_grad_(False)
    recording = record(network, torch.ones(2, 3, 8))
    assert "_transformer_encoder_layer_fwd" not in names(recording)
    assert {operation.path for operation in recording.operations} >= {"block.linear1", "block.norm2"}
    assert torch.backends.mha.get_fastpath_enabled()


class Frozen(dict):
    """As diffusers' configurations."""

    def update(self, *args):
        raise TypeError


def test_a_container_that_refuses_changes_is_left_alone():
    """As long as the network does not change it, either."""
    network = nn.Linear(2, 2)
    network.config = Frozen(width=2)
    record(network, torch.ones(1, 2))
    assert network.config == {"width": 2}
