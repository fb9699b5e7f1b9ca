"""Gates in blocks whose activations are recomputed for the gradient."""

import contextlib

import pyro
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate, factor
from pyro_l0.infer.reparam import RectifyReparam
from pyro_l0.nn import Gate
from pyro_l0.nn.gate import name_gates

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def plain(block, *inputs, **options):
    return block(*inputs)


class Blocks(nn.Module):
    """A convolutional and two dense blocks with a gate that acts twice, gates in a row, dropout and BatchNorm."""

    def __init__(self, run, mode):
        super().__init__()
        self.run, self.mode = run, mode
        self.maps = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), Gate(3, dim=1), nn.Conv2d(3, 2, 1))
        self.stream = Gate(8)
        self.dense = nn.Sequential(Gate(8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        h = self.run(self.maps, x, use_reentrant=False).flatten(1)
        if self.mode == "nested":
            return self.run(self.outer, h, use_reentrant=False)
        return self.last(self.inner(self.inner(h)))

    def outer(self, h):
        return self.last(self.inner(self.run(self.inner, self.stream(h), use_reentrant=False)))

    def inner(self, h):
        return self.run(self.residual, h, use_reentrant=False)

    def residual(self, h):
        return h + self.dense(self.stream(h)) * self.stream(h)


class Model(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        name_gates(self)

    def forward(self, x, y):
        factor("y", -F.cross_entropy(self.net(x), y, reduction="sum"))


def gradients(run, mode="plain", particles=1, batches=1, in_turn=False):
    """Of the loss, by name, with one seed; RNG streams of dropout included."""
    torch.manual_seed(3)
    pyro.clear_param_store()
    model = Model(Blocks(run, mode).double())
    data = [(torch.randn(4, 1, 4, 4).double().requires_grad_(), torch.randint(3, (4,))) for _ in range(batches)]
    guide = AutoGate(model)
    guide(*data[0])
    guide.double()
    loss = L0_ELBO("l0", lam=0.01, num_particles=particles)(model, guide)
    torch.manual_seed(7)
    losses = [loss(*batch) for batch in data]
    for each in reversed(losses) if in_turn else [sum(losses)]:
        each.backward()
    inputs = {f"x{i}": x.grad for i, (x, _) in enumerate(data)}
    return inputs | {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "nested"},
        {"particles": 3},
        {"batches": 3, "mode": "nested"},
        {"batches": 3, "in_turn": True},
        {"particles": 2, "batches": 2, "in_turn": True},
    ],
    ids=str,
)
def test_checkpointed_blocks_have_the_plain_gradients(options):
    """Every recomputation takes the values of its own first run, whichever order the backward passes have."""
    expected = gradients(plain, **options)
    assert any("log_alpha" in name and (grad != 0).any() for name, grad in expected.items())
    torch.testing.assert_close(gradients(checkpoint, **options), expected, rtol=1e-10, atol=1e-12)


def test_checkpointed_sequence_and_two_backward_passes():
    """Segments; a graph that is kept is gone through twice; gates with constant values, which need no gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Gate(5)) for _ in range(4))).double()
    sites = list(name_gates(net))
    x = torch.randn(6, 5).double().requires_grad_()
    for needs_gradient in (True, False):
        values = {name: torch.rand(5).double().requires_grad_(needs_gradient) for name in sites}
        leaves = [x, *net.parameters(), *(values.values() if needs_gradient else [])]
        with poutine.condition(data=values):
            ours = checkpoint_sequential(net, 2, x, use_reentrant=False).square().sum()
            expected = net(x).square().sum()
        for keep in (True, False):
            found = torch.autograd.grad(ours, leaves, retain_graph=keep)
            torch.testing.assert_close(
                found, torch.autograd.grad(expected, leaves, retain_graph=True), rtol=1e-10, atol=1e-12
            )


@pytest.mark.parametrize(
    "block",
    [
        lambda layer: layer,
        lambda layer: lambda h: layer(h) + h.sum(),
        lambda layer: lambda h: checkpoint(layer, h, use_reentrant=False),
    ],
    ids=["a layer", "another use behind it", "a block inside"],
)
def test_a_gate_in_front_of_a_checkpointed_block(block):
    """Its product, which may wait for the layer, is one tensor in both runs."""
    torch.manual_seed(0)
    gate, layer, z = Gate(8), nn.Linear(8, 3).double(), torch.rand(8, dtype=torch.float64, requires_grad=True)
    gate.site_name = "gate"
    x, leaves = torch.randn(20, 8).double(), [z, *layer.parameters()]
    with poutine.condition(data={"gate": z}):
        out = checkpoint(block(layer), gate(x), use_reentrant=False)
    ours = torch.autograd.grad(out.square().sum(), leaves)
    expected = torch.autograd.grad(block(layer)(x * z).square().sum(), leaves)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


LOG_ALPHA, BASE = torch.zeros(5, requires_grad=True), torch.randn(5, requires_grad=True)


@pytest.mark.parametrize("kind", ["learned prior", "reparametrised"])
def test_draws_inside_of_a_block(kind):
    """Of a prior that is learned, or of a base that a handler samples; a dropout behind them is drawn again alike."""
    torch.manual_seed(0)
    gate = Gate(5, prior=HardConcrete(LOG_ALPHA if kind == "learned prior" else torch.zeros(5)))
    net, x = nn.Sequential(nn.Linear(5, 5), gate, nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(7, 5)
    name_gates(net)
    found = []
    for run in (plain, checkpoint):
        torch.manual_seed(1)
        with contextlib.ExitStack() as stack:
            if kind == "learned prior":
                stack.enter_context(poutine.trace())
            else:
                stack.enter_context(poutine.condition(data={"1_base": BASE}))
                stack.enter_context(poutine.reparam(config={"1": RectifyReparam()}))
            out = run(net, x, use_reentrant=False).square().sum()
        torch.rand(3)
        leaf = LOG_ALPHA if kind == "learned prior" else BASE
        found.append(torch.autograd.grad(out, [leaf, *net.parameters()]))
    assert (found[0][0] != 0).any()
    torch.testing.assert_close(*found)


def reentrant(block, *inputs, use_reentrant):
    return checkpoint(block, *inputs, use_reentrant=True)


def twice(block, *inputs, use_reentrant):
    return checkpoint(lambda *args: checkpoint(block, *args, use_reentrant=False), *inputs, use_reentrant=True)


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_reentrant_checkpoints_are_refused(needs_gradient):
    """When the block runs, or, for values without a gradient, when it runs again; by the gate's name and the remedy."""
    net, x = nn.Sequential(nn.Linear(5, 5), Gate(5), nn.Linear(5, 1)), torch.randn(7, 5, requires_grad=True)
    name_gates(net)

    def run():
        with poutine.condition(data={"1": torch.rand(5, requires_grad=needs_gradient)}):
            out = checkpoint(net, x, use_reentrant=True)
        assert not needs_gradient
        out.sum().backward()

    with pytest.raises(RuntimeError, match=r"gate '1' outside of torch.utils.checkpoint.*pass use_reentrant=False"):
        run()


@pytest.mark.parametrize("run", [twice, reentrant])
def test_reentrant_checkpoints_of_a_loss_are_refused(run):
    """Also in front, where torch would give no gradient at all, and around another checkpoint."""
    with pytest.raises(RuntimeError, match=r"gate 'net.maps.3' outside of torch.utils.checkpoint"):
        gradients(run)


def test_a_block_that_makes_other_calls_when_it_runs_again():
    gate, calls = Gate(5), []
    gate.site_name = "gate"

    def block(x):
        calls.append(None)
        return (gate(x) if len(calls) > 1 else x).sin()

    out = checkpoint(block, torch.randn(2, 5, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="gate 'gate' to be called in the first run of its checkpointed block"):
        out.sum().backward()


def test_a_network_that_is_called_in_a_backward_pass_without_checkpoints():
    gate, drawn = Gate(5), []
    x = torch.ones(2, 5, requires_grad=True)
    y = 2 * x
    with poutine.trace() as trace:
        y.register_hook(lambda grad: drawn.append(gate(torch.ones(2, 5))))
        y.sum().backward()
    torch.testing.assert_close(drawn[0][0], trace.trace.nodes["gate"]["value"])
