"""Gates on edges in training, tables and files, networks of other kinds, and what is refused."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import L0Gate, NetworkGates
from pyro_l0.nn.engine import record
from pyro_l0.nn.frozen import gate_edges
from pyro_l0.plots import plot_circuit


class Block(nn.Module):
    """Attention over two heads, and a feed-forward block, in front of which is a norm each."""

    def __init__(self, in_place=False, dropout=0.0):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=dropout)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.in_place = in_place

    def forward(self, x):
        normed = self.norm(x)
        attended = self.attention(normed, normed, normed, need_weights=self.in_place)[0]
        if self.in_place:
            x += attended
        else:
            x = x + attended
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Network(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


@pytest.fixture
def ids():
    return torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Network().double().requires_grad_(False)


def test_edges_of_torchs_attention(network, ids):
    """nn.MultiheadAttention computes its products itself."""
    edges = gate_edges(network, ids)
    assert {x for x, _ in edges.edges} == {"embedding", "a0.h0", "a0.h1", "m0", "a1.h0", "a1.h1", "m1"}
    assert len(edges.edges) == 6 * 1 + 3 + 6 * 4 + 6 + 7
    network.eval()
    torch.testing.assert_close(edges.at(torch.ones(46), ids), network(ids), rtol=1e-12, atol=1e-12)


def test_gates_of_each_example(network, ids):
    """A row of gates is that of one example."""
    edges = gate_edges(network, ids, ids.flip(0))
    z = torch.rand(3, 46, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    together = edges.at(z, ids)
    for k in range(3):
        edges.corrupt(ids.flip(0)[k : k + 1])
        torch.testing.assert_close(edges.at(z[k], ids[k : k + 1]), together[k : k + 1], rtol=1e-12, atol=1e-12)


def test_closed_edges_pass_means(network, ids):
    """All closed, each text and position has the outputs of the mean contributions; open ones are the network."""
    edges = gate_edges(network, ids)
    edges.corrupt_to_mean(ids)
    whole = network.eval()(ids)
    torch.testing.assert_close(edges.at(torch.ones(46), ids[:2, :3]), network(ids[:2, :3]), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        closed = edges.at(torch.tensor([float(reader != "output") for _, reader in edges.edges]), ids)
        streams = list[torch.Tensor]()
        hook = network.norm.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
        network(ids)
        hook.remove()
        expected = network.out(network.norm(streams[0].mean((0, 1))))
    torch.testing.assert_close(closed, expected.expand_as(whole), rtol=1e-10, atol=1e-10)


def test_positions_without_examples(ids):
    """A summand may have fewer dimensions than the stream, also where there are as many readers as examples."""

    class Placed(Network):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(4, 8))

        def forward(self, ids):
            x = self.embedding(ids) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.out(self.norm(x))

    network = Placed().double().eval()
    edges = gate_edges(network, ids)
    z = torch.tensor([float(writer != "positions") for writer, _ in edges.edges])
    closed = edges.at(z, ids), edges.at(z.expand(3, -1), ids)
    network.positions.data.zero_()
    for found in closed:
        torch.testing.assert_close(found, network(ids), rtol=1e-10, atol=1e-10)


def test_gradients_by_gates(network, ids):
    """Those of differences; the network's own weights may train, too."""
    edges = gate_edges(network, ids, ids.flip(0))
    network.out.weight.requires_grad_()
    z = torch.rand(46, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: edges.at(z, ids)[:1, :2], z, fast_mode=True)
    edges.at(z, ids).sum().backward()
    assert network.out.weight.grad.abs().min() > 0


def test_changes_in_place_are_not_read_again():
    """What a reading takes from elsewhere may not change before its backward pass."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.scale, self.block, self.head = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            scale, hidden = self.scale(x), self.first(x)
            hidden = hidden + self.block(hidden * scale)
            return self.head(hidden) * scale.add_(1.0)

    x = torch.ones(2, 4)
    edges = gate_edges(Scaled().requires_grad_(False), x)
    outputs = edges.at(torch.ones(len(edges.edges), requires_grad=True), x)
    with pytest.raises(RuntimeError, match="has been changed in place since"):
        outputs.sum().backward()


def test_budgets_in_one_run(network, ids):
    """Two budgets are met in one run, each with its circuit; the file has them."""
    torch.manual_seed(0)
    edges = gate_edges(network, ids, ids.flip(0))
    gates, found = NetworkGates(edges), {}
    target = SparsityTarget(
        gates, [0.5, 0.25], steps=60, cost=lambda z: z["edges"].sum(), pretrained=True, on_budget=found.__setitem__
    )
    optimiser = torch.optim.Adam(gates.locations(), **target.optimiser_options)
    whole = network.eval()(ids)
    for _ in range(60):
        optimiser.zero_grad()
        (edges(ids) - whole).square().mean().backward()
        target.add_gradient()
        optimiser.step()
        target.ascend()
    assert {budget: int((z["edges"] != 0).sum()) for budget, z in found.items()} == {0.5: 23, 0.25: 11}
    edges.eval()
    torch.testing.assert_close(edges(ids), edges.at(edges.gate.test_gate, ids))


def test_table_and_picture(network, ids):
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib").use("Agg")
    edges = gate_edges(network, ids)
    with torch.no_grad():
        edges.gate.location[1:] = -20.0
    frame = edges.to_frame()
    assert list(frame.columns) == ["writer", "reader", "writer_module", "reader_module", "gate", "active_prob"]
    assert (frame.gate != 0).sum() == 1
    assert tuple(frame.iloc[-1][:4]) == ("m1", "output", "blocks.1.down", "out")
    axes = plot_circuit(frame)
    assert {text.get_text() for text in axes.texts if text.get_text()} == {"embedding", "a0.h0"}
    assert axes.get_title() == "1 of 46 edges"


def test_benchmarks_file(network, ids, tmp_path):
    """Names, cfg and scores as the benchmark's graph has them."""
    edges = gate_edges(network, ids)
    edges.save_scores(tmp_path / "scores.json", torch.arange(46.0))
    content = json.loads((tmp_path / "scores.json").read_text())
    assert content["cfg"] == {"n_layers": 2, "n_heads": 2, "d_model": 8, "parallel_attn_mlp": False}
    assert list(content["nodes"]) == ["input", "a0.h0", "a0.h1", "a1.h0", "a1.h1", "m0", "m1", "logits"]
    names = [f"{x}->{y}".replace("embedding", "input").replace("output", "logits") for x, y in edges.edges]
    assert {name: edge["score"] for name, edge in content["edges"].items()} == dict(zip(names, range(46), strict=True))
    assert all(edge["in_graph"] for edge in content["edges"].values())
    with pytest.raises(ValueError, match="Expected 46 scores, but got a tensor of shape"):
        edges.save_scores(tmp_path / "scores.json", torch.ones(3))

    class Uneven(Network):
        def forward(self, ids):
            x = self.blocks[0](self.embedding(ids))
            return self.out(x + self.blocks[1].attention(x, x, x, need_weights=False)[0])

    with pytest.raises(ValueError, match="a feed-forward block each, 46 edges, but got 39"):
        gate_edges(Uneven(), ids).save_scores(tmp_path / "scores.json")


def test_branches_on_its_input(ids):
    """Code that chooses by a number of the input is recorded anew where it chooses otherwise."""

    class Branching(Network):
        def forward(self, ids):
            return 2 * super().forward(ids) if bool((ids == 0).all()) else super().forward(ids)

    network = Branching().eval()
    edges = gate_edges(network, ids)
    for given in (ids, torch.zeros_like(ids), ids):
        torch.testing.assert_close(edges.at(torch.ones(46), given), network(given))


def test_a_convolutional_network():
    """A stream may be a map of features; what reads it is then a block."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3, 2)
            self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = x + F.relu(block(x))
            return self.head(x.mean((2, 3)))

    network, x = Residual().double().eval(), torch.randn(2, 1, 5, 5, dtype=torch.float64)
    edges = gate_edges(network, x)
    assert edges.edges == [
        ("first", "m0"),
        ("first", "m1"),
        ("m0", "m1"),
        *((y, "output") for y in ("first", "m0", "m1")),
    ]
    h = network.first(x)
    y = F.relu(network.blocks[0](h))
    z = F.relu(network.blocks[1](h))  # which does not see y
    expected = network.head((h + y + z).mean((2, 3)))
    torch.testing.assert_close(edges.at(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]), x), expected)


def test_sums_as_outputs(ids):
    """A network may return its stream itself."""

    class Bare(Network):
        def forward(self, ids):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return x, self.out(x)

    network = Bare().double().requires_grad_(False).eval()
    edges = gate_edges(network, ids)
    assert [writer for writer, reader in edges.edges if reader == "output"] == [
        *("embedding", "a0.h0", "a0.h1", "m0", "a1.h0", "a1.h1", "m1")
    ]
    z = torch.tensor([float(edge != ("m1", "output")) for edge in edges.edges])
    stream, logits = edges.at(z, ids)
    x = network.blocks[0](network.embedding(ids))
    middle = x + network.blocks[1].attention(*[network.blocks[1].norm(x)] * 3)[0]
    torch.testing.assert_close(stream, middle, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(logits, network.out(middle), rtol=1e-10, atol=1e-10)


def test_activations_in_place():
    """A stream may begin anew by an activation in place of a sum, as in ResNet."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 2)

        def forward(self, x):
            for block in self.blocks:
                x = F.relu(x + F.relu(block(x), inplace=True), inplace=True)
            return self.head(x)

    network, x = Residual().double(), torch.randn(3, 4, dtype=torch.float64)
    edges = gate_edges(network, x)
    z = torch.ones(len(edges.edges))
    torch.testing.assert_close(edges.at(z, x), network(x))
    closed = [k for k, (writer, _) in enumerate(edges.edges) if writer == "m0"]
    assert len(closed) == 1
    z[closed] = 0.0
    hidden = F.relu(x)  # without the first block
    expected = network.head(F.relu(hidden + F.relu(network.blocks[1](hidden))))
    torch.testing.assert_close(edges.at(z, x), expected)


def test_copies_and_states(network, ids):
    """A copy has gates and a network of its own, and records it when it is called."""
    edges = gate_edges(network, ids, ids.flip(0))
    new = copy.deepcopy(edges)
    z = torch.rand(46, dtype=torch.float64)
    torch.testing.assert_close(new.at(z, ids), edges.at(z, ids))
    assert new.network is not network
    new.load_state_dict(edges.state_dict())


def test_arguments_and_keywords(network, ids):
    class Two(Network):
        def forward(self, ids, scale=1.0):
            return super().forward(ids) * scale

    network = Two().eval()
    edges = gate_edges(network, {"ids": ids})
    torch.testing.assert_close(edges.at(torch.ones(46), ids, scale=torch.tensor(3.0)), network(ids, 3.0))


def _plain():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(2, 4)


def _in_place():
    return Network(in_place=True), torch.zeros(1, 3, dtype=torch.long)


def _gated():
    return nn.Sequential(Network(), L0Gate(3)), torch.zeros(1, 3, dtype=torch.long)


class _Random(Network):
    def forward(self, ids):
        return super().forward(ids) + torch.rand(3)


class _Branching(Network):
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
            x = x if float(x.detach().sum()) > 0 else block(x)
        return self.out(self.norm(x))


class _Twice(Network):
    def forward(self, ids):
        x = self.embedding(ids)
        return self.out(x + F.relu(self.blocks[0].up(x))[..., :8] + x)


class _Shared(Network):
    """Both heads read the same entries of one projection."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 4)

    def forward(self, ids):
        x = self.embedding(ids)
        q = self.mix(x)[:, None].expand(-1, 2, -1, -1) * torch.tensor([1.0, 2.0])[:, None, None]
        k = torch.stack([q[:, 0].roll(1, -1), q[:, 1, ..., :2].repeat(1, 1, 2)], 1)
        y = F.scaled_dot_product_attention(q, k, q).transpose(1, 2).flatten(2)
        return self.out(self.norm(x + y))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_plain, "Expected a network with a residual stream"),
        (_in_place, "'blocks.0' adds to its residual stream in place; write x = x \\+ y"),
        (_gated, "Expected a network without gates, but it has '1'"),
        (lambda: (_Random(), torch.zeros(1, 3, dtype=torch.long)), "what draws random numbers"),
        (lambda: (_Branching(), torch.zeros(1, 3, dtype=torch.long)), "chooses between branches"),
        (lambda: (_Twice(), torch.zeros(1, 3, dtype=torch.long)), "has a tensor twice; multiply it by 2"),
        (lambda: (_Shared(), torch.zeros(1, 3, dtype=torch.long)), "but heads share some of linear in mix"),
        (lambda: (Network(), [torch.zeros(1, 3, dtype=torch.long)] * 2), "Expected an example of one call, but got 2"),
    ],
)
def test_refusals(make, message):
    torch.manual_seed(0)
    network, example = make()
    with pytest.raises(ValueError, match=message):
        gate_edges(network, example)


def test_refusals_later(network, ids):
    edges = gate_edges(network, ids, ids[:2])
    with pytest.raises(ValueError, match=r"Expected gates of shape \(46,\) or \(batch, 46\), but got \(3,\)"):
        edges.at(torch.ones(3), ids)
    with pytest.raises(
        ValueError, match=r"Expected a call of the corrupted input's shapes, \[\(2, 4\)\], but got \[\(3, 4\)\]"
    ):
        edges.at(torch.ones(46), ids)
    network.norm = nn.LayerNorm(8).double()
    with pytest.raises(ValueError, match="'norm' has changed since"):
        edges.corrupt(ids)


def test_a_recording_stands_for_an_example(network, ids):
    recording = record(network, ids)
    edges = gate_edges(network, recording)
    assert len(edges.edges) == 46
    assert recording.operations[-1].output.tensor.shape == (3, 4, 3)
