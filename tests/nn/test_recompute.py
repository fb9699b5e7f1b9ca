"""Gates that a network draws once a call, also in blocks whose activations are recomputed for the gradient."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate, factor
from pyro_l0.nn import L0Gate, NetworkGates, fix_gates
from pyro_l0.nn.gate import name_gates
from tests.networks import Dense, Net

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def plain(block, *inputs, use_reentrant):
    return block(*inputs)


def reentrant(block, *inputs, use_reentrant):
    return checkpoint(block, *inputs, use_reentrant=True)


class Blocks(nn.Module):
    """A convolutional and two dense blocks with a gate that acts twice, gates in a row, dropout and BatchNorm."""

    def __init__(self, run, mode):
        super().__init__()
        self.run, self.mode = run, mode
        maps = L0Gate(3, dim=1, init_active_prob=0.5)
        self.maps = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), maps, nn.Conv2d(3, 2, 1))
        self.stream = L0Gate(8, init_active_prob=0.5)
        self.edges = L0Gate(8, 3, init_active_prob=0.5)
        self.dense = nn.Sequential(L0Gate(8, family="exponential"), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
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
        return h + self.dense(self.stream(h)) * self.stream(h) * self.edges().sum(1)


def gradients(run, mode="plain", batches=1, in_turn=False, around=plain, at_once=False):
    """Of the loss, by name, with one seed; RNG streams of dropout included; perhaps ``at_once`` behind each call."""
    torch.manual_seed(3)
    net = Blocks(run, mode).double()
    NetworkGates(net)
    data = [(torch.randn(4, 1, 4, 4).double().requires_grad_(), torch.randint(3, (4,))) for _ in range(batches)]
    torch.manual_seed(7)
    losses = []
    for x, y in data:
        losses.append(F.cross_entropy(around(net, x, use_reentrant=False), y))
        if at_once:
            losses.pop().backward()
    for each in reversed(losses) if in_turn or at_once else [sum(losses)]:
        each.backward()
    inputs = {f"x{i}": x.grad for i, (x, _) in enumerate(data)}
    return inputs | {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="blocks"),
        pytest.param({"mode": "nested"}, id="nested"),
        pytest.param({"around": checkpoint}, id="all"),
        pytest.param({"around": checkpoint, "batches": 3, "in_turn": True}, id="all, three calls in turn"),
        pytest.param({"around": checkpoint, "mode": "nested"}, id="all, nested"),
        pytest.param({"around": checkpoint, "batches": 3, "mode": "nested"}, id="all, three calls, nested"),
        pytest.param({"around": reentrant}, id="reentrant"),
        pytest.param({"around": reentrant, "batches": 3, "mode": "nested"}, id="three, reentrant"),
    ],
)
def test_checkpointed_blocks_have_the_plain_gradients(options):
    """Every recomputation takes the values of its own first run."""
    expected = gradients(plain, **options)
    assert all((grad != 0).any() for name, grad in expected.items() if "log_alpha" in name)
    torch.testing.assert_close(gradients(checkpoint, **options), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{"mode": "nested"}, {"in_turn": True}], ids=str)
def test_blocks_of_a_network_that_was_called_since_are_refused(options):
    """Before a gradient leaves the block; what the message advises has the gradients of the sum."""
    with pytest.raises(RuntimeError, match=r"a checkpointed block .* been called since.*Go backward after each"):
        gradients(checkpoint, batches=3, **options)
    mode = options.get("mode", "plain")
    found, expected = (gradients(run, mode, batches=3, at_once=True) for run in (checkpoint, plain))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_reentrant_blocks_draw_by_themselves():
    """Their first run has no graph; the second one draws alike, so that the gradient is that of the loss."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), L0Gate(5, init_active_prob=0.5), nn.Linear(5, 1)).double()
    NetworkGates(net)
    first, gate, last = net
    x, drawn = torch.randn(7, 5).double().requires_grad_(), []
    gate.register_forward_hook(lambda module, args, out: drawn.append((out / args[0]).detach()[0]))
    net.forward = lambda x: last(checkpoint(gate, first(x), use_reentrant=True))
    net(x).sum().backward()
    torch.testing.assert_close(*drawn)
    with torch.no_grad():
        expected = drawn[0] * last.weight
    torch.testing.assert_close(x.grad, (expected @ first.weight).expand_as(x))


def test_checkpointed_sequence_and_two_backward_passes():
    """Segments; a graph that is kept is gone through twice."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), L0Gate(5)) for _ in range(4))).double()
    NetworkGates(net)
    x, found = torch.randn(6, 5).double().requires_grad_(), []
    for run in (type(net).forward, lambda net, x: checkpoint_sequential(list(net), 2, x, use_reentrant=False)):
        net.forward = lambda x, run=run: run(net, x)
        torch.manual_seed(1)
        loss = net(x).square().sum()
        leaves = [x, *net.parameters()]
        found += [torch.autograd.grad(loss, leaves, retain_graph=keep) for keep in (True, False)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-12)


def test_a_call_of_the_network_draws_its_gates_once():
    """Of a network that is copied or loaded, too; parts called on their own draw by themselves."""
    torch.manual_seed(0)
    net = Dense(twice, first=(6, 4), gate=L0Gate(4, init_active_prob=0.5), last=(4, 1))
    _, one, other = net(torch.ones(2, 6))
    assert not torch.equal(one, other)
    gates = NetworkGates(net)
    NetworkGates(net)
    assert len(net._forward_pre_hooks) == 1
    loaded = pickle.loads(pickle.dumps(net))
    loaded.register_forward_pre_hook(lambda module, args: None)
    for each in (net, copy.deepcopy(net), loaded):
        _, one, other = each(torch.ones(2, 6))
        assert torch.equal(one, other)
        assert one.requires_grad
        assert not torch.equal(one, each(torch.ones(2, 6))[1])
        assert not torch.equal(each.gate(), each.gate())
    assert not torch.equal(gates()["gate"], gates()["gate"])
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        net(torch.ones(2, 5))
    assert not torch.equal(net.gate(), net.gate())  # the call has ended
    handle = net.last.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        net(torch.ones(2, 6))
    handle.remove()
    left = net.gate.drawn.value  # such errors call no hook
    assert not torch.equal(net(torch.ones(2, 6))[1], left)
    net.eval()
    assert torch.equal(net(torch.ones(2, 6))[1], net.gate.test_gate)


def twice(net, x):
    return net.last(net.gate(torch.relu(net.first(x)))), net.gate(), net.gate()


def stop(module, args):
    raise KeyboardInterrupt


def test_networks_without_gates_have_no_hook_of_theirs():
    class Chain(nn.Sequential):
        """Of which a part is a network of its own."""

    net = Chain(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), L0Gate(4)), nn.Linear(4, 1))
    gates = NetworkGates(net).test_gates()
    NetworkGates(net[0])
    for other in (fix_gates(net, gates), compact(net, {"0.2": torch.tensor([1.0, 0, 1, 1])}, torch.ones(2, 6)).network):
        assert not any(module._forward_hooks for module in other.modules())
    assert net._forward_hooks


def preserving_nothing(block, x, use_reentrant):
    return checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=False)


def test_a_block_with_another_random_state():
    """It has the gates of its network's call; one that draws by itself is refused, even if nothing trains the gates."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), L0Gate(5, init_active_prob=0.5), nn.Linear(5, 1)).double()
    x, forward = torch.randn(7, 5).double(), net.forward
    for is_trained in (True, False):
        net[1].requires_grad_(is_trained)
        out = preserving_nothing(net, x, use_reentrant=False)
        torch.rand(3)
        with pytest.raises(RuntimeError, match=r"gate L0Gate\(5.*random state is another.*preserve_rng_state=True"):
            out.sum().backward()
    NetworkGates(net)
    found = []
    for run in (plain, preserving_nothing):
        net.forward = lambda x, run=run: run(forward, x, use_reentrant=False)
        torch.manual_seed(1)
        out = net(x).sum()
        torch.rand(3)
        found.append(torch.autograd.grad(out, [net[0].weight, net[2].weight]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def models(run):
    """A classifier of three blocks, of which one gate acts in two, as a model, and its guide."""
    torch.manual_seed(0)
    layers = {f"layer{i}": nn.Linear(5, 5) for i in range(3)} | {"gate": L0Gate(5), "other": L0Gate(5)}

    def forward(net, x):
        def block(h, layer, gate):
            return gate(torch.tanh(layer(h)))

        for layer, gate in ((net.layer0, net.gate), (net.layer1, net.gate), (net.layer2, net.other)):
            x = run(block, x, layer, gate, use_reentrant=False)
        factor("y", -x.square().sum())

    model = Net(forward, **layers).double()
    name_gates(model)
    guide, x = AutoGate(model, init_active_prob=0.6), torch.randn(7, 5).double().requires_grad_()
    guide(x)
    return model, guide, x


def test_models_have_the_plain_gradients():
    found = []
    for run in (plain, checkpoint):
        model, guide, x = models(run)
        torch.manual_seed(1)
        L0_ELBO("l0", lam=0.1).differentiable_loss(model, guide, x).backward()
        found.append([x.grad, *(p.grad for p in (*model.parameters(), *guide.parameters()))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_models_that_are_refused_in_blocks():
    """Several runs before one backward pass, and blocks that keep no graph."""
    model, guide, x = models(checkpoint)
    with pytest.raises(RuntimeError, match=r"gate .* that it had at first, but its network has been called since"):
        L0_ELBO("l0", num_particles=3).differentiable_loss(model, guide, x).backward()
    model, guide, x = models(reentrant)
    with pytest.raises(RuntimeError, match=r"'other' in a run .*\. Give torch.utils.checkpoint use_reentrant=False"):
        L0_ELBO("l0").differentiable_loss(model, guide, x).backward()


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
    gate, layer, z = L0Gate(8), nn.Linear(8, 3).double(), torch.rand(8, dtype=torch.float64, requires_grad=True)
    gate.site_name = "gate"
    x, leaves = torch.randn(20, 8).double(), [z, *layer.parameters()]
    with poutine.condition(data={"gate": z}):
        out = checkpoint(block(layer), gate(x), use_reentrant=False)
    ours = torch.autograd.grad(out.square().sum(), leaves)
    expected = torch.autograd.grad(block(layer)(x * z).square().sum(), leaves)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_pass_inside_of_the_call(use_reentrant):
    """A block that runs again has the gates of its own first run, though the network's call has others."""

    def forward(net, x):
        y = checkpoint(net.gate, x, use_reentrant=use_reentrant).square().sum()
        y.backward()
        return y.detach()

    network = Net(forward, gate=L0Gate(3, init_active_prob=0.5))
    NetworkGates(network)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.ones(1, 3, requires_grad=True)
        y = network(x)
        torch.testing.assert_close(x.grad.sum() / 2, y)  # the derivative of (z x)^2 at x = 1
