"""examples/causal_graph.py: likelihoods, cycles, distances, and small graphs that are found."""

import pytest
import torch

import causal_graph
from causal_graph import (
    Linear,
    Options,
    Perceptrons,
    acyclic,
    explained,
    find_graph,
    random_data,
    sorted_regressions,
    structural_distance,
)

CHAIN = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0, 0]]).bool()


def test_quick_run(tmp_path, capsys):
    """A printed row and a picture."""
    rows = causal_graph.main(Options(kinds=("linear",), nodes=(3,), steps=5, seeds=(0, 1), out=tmp_path))
    assert list(rows) == [("linear", 3)]
    assert rows["linear", 3].shape == (2, 4)  # edges, and distances of the gates and of both baselines
    assert "linear            3" in capsys.readouterr().out
    assert (tmp_path / "linear-3.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", ["linear", "perceptrons"])
def test_data_follow_the_graph(kind):
    """No cycles; a node without parents is standard normal noise around a constant."""
    torch.manual_seed(0)
    x, graph = random_data(kind, 8)
    assert torch.equal(graph, acyclic(graph.float(), torch.rand(8, 8)))
    roots = ~graph.any(0)
    assert ((x[:, roots].std(0) - 1).abs() < 0.2).all()


def test_likelihood_of_linear_models():
    """-log p(x) = n d / 2 log (squares) - n log |det(I - W)|, for each copy."""
    torch.manual_seed(0)
    x, gate = torch.randn(40, 3), torch.rand(2, 3, 3)
    model = Linear(x, 2)
    torch.nn.init.normal_(model.weight)
    for k in range(2):
        weight = (gate * model.weight)[k]
        squared = (x - x @ weight).square().sum() / 40
        expected = 40 * (1.5 * squared.log() - torch.det(torch.eye(3) - weight).abs().log())
        torch.testing.assert_close(model(gate)[k], expected)


def test_likelihood_of_perceptrons():
    """The volume is that of autograd's Jacobian."""
    torch.manual_seed(0)
    x, gate = torch.randn(20, 3), torch.rand(2, 3, 3)
    model = Perceptrons(x, 2).eval()
    torch.nn.init.normal_(model.second)
    torch.nn.init.normal_(model.bias)

    def residual(row, k):
        first = gate[k, :, :, None] * model.first[k]
        units = torch.tanh(torch.einsum("i,ijh->jh", row, first) + model.bias[k, 0])
        return row - (units * model.second[k, 0]).sum(-1)

    for k in range(2):
        each = torch.stack([residual(row, k) for row in x])
        squared = (each - each.mean(0)).square().mean()
        jacobians = torch.stack(
            [torch.autograd.functional.jacobian(lambda row, k=k: residual(row, k), row) for row in x]
        )
        volume = torch.linalg.slogdet(jacobians).logabsdet.mean()
        decay = 1e-2 * (model.first[k].square().sum() + model.second[k].square().sum())
        torch.testing.assert_close(model(gate)[k], 20 * (1.5 * squared.log() - volume) + decay)


def test_cycles_lose_their_least_probable_edge():
    gate = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.4], [1.0, 0.0, 0.0]])
    probability = torch.tensor([[0.1, 0.9, 0.2], [0.1, 0.1, 0.8], [0.7, 0.3, 0.1]])
    assert torch.equal(acyclic(gate, probability), CHAIN)


def test_distance_counts_a_turned_edge_once():
    assert structural_distance(CHAIN, CHAIN) == 0
    assert structural_distance(CHAIN.T, CHAIN) == 2
    assert structural_distance(torch.zeros(3, 3).bool(), CHAIN) == 2


def test_the_order_of_variances_gives_a_chain_away():
    """Until variables are standardised; and the R2 is that of a regression."""
    torch.manual_seed(0)
    x = torch.randn(2000, 3).double()
    x[:, 1] += 1.5 * x[:, 0]
    x[:, 2] += 1.5 * x[:, 1]
    assert torch.equal(sorted_regressions(x, x.var(0)), CHAIN)
    assert torch.equal(sorted_regressions(x, -x.var(0)), CHAIN.T)
    centred = x - x.mean(0)
    fit = torch.linalg.lstsq(centred[:, :2], centred[:, 2]).solution
    residual = centred[:, 2] - centred[:, :2] @ fit
    torch.testing.assert_close(explained(x)[2], 1 - residual.square().sum() / centred[:, 2].square().sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "function"), [("linear", lambda cause: 1.5 * cause), ("perceptrons", lambda cause: 3 * torch.tanh(cause))]
)
def test_a_chain_is_found(kind, function):
    """0 → 1 → 2, from its data."""
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    x[:, 1] += function(x[:, 0])
    x[:, 2] += function(x[:, 1])
    torch.manual_seed(0)
    assert torch.equal(find_graph(kind, x, 2000), CHAIN)
