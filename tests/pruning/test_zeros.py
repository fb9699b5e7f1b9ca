"""Units whose weights are zero leave, whichever tool made them so, and the outputs stay as they were."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from pyro_l0.compaction import compact_zeros, load_compacted
from pyro_l0.nn import L0Gate, fix_gates
from tests.engine.zoo import ZOO, call, sites
from tests.networks import Net

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(3, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def drawn(network):
    """In float64 and with statistics, scales and biases that differ between units."""
    torch.manual_seed(0)
    for name, x in [*network.double().named_parameters(), *network.named_buffers()]:
        if x.is_floating_point():
            x.uniform_(0.5, 1.5) if "var" in name else x.normal_()
    return network.eval()


def zero(x, *entries, dim=0):
    """Set slices of a tensor to zero."""
    with torch.no_grad():
        x.index_fill_(dim, torch.tensor(entries, dtype=torch.long), 0.0)


def compacted(network, example):
    """The smaller network, which computes the same; the one that was given is as before."""
    before = copy.deepcopy(network.state_dict())
    expected = call(network, example)
    found = compact_zeros(network, example)
    for one, other in zip(call(found.network, example), expected, strict=True):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    assert len(before) == len(network.state_dict())
    return found.network


def shapes(network):
    return {name: tuple(x.shape) for name, x in network.named_parameters() if x.dim() > 1}


def mlp():
    layers = nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2, bias=False)
    return drawn(nn.Sequential(*layers))


def test_a_constant_goes_into_the_next_bias_and_what_nothing_reads_leaves():
    """Of rows 1 and 4 the bias is left; unit 2 of the second layer is read by zeros alone, though it varies."""
    network = mlp()
    zero(network[0].weight, 1, 4)
    zero(network[4].weight, 2, dim=1)
    small = compacted(network, X)
    assert shapes(small) == {"0.weight": (4, 4), "2.weight": (4, 4), "4.weight": (2, 4)}
    constants = network[0].bias[[1, 4]].sigmoid()
    rows = [0, 1, 3, 4]
    expected = network[2].bias + network[2].weight[:, [1, 4]] @ constants
    assert torch.allclose(small[2].bias, expected[rows], rtol=1e-12)


def test_a_layer_without_bias_gets_one():
    network = mlp()
    zero(network[2].weight, 0)
    with torch.no_grad():
        network[2].bias[0] = 2.0
    small = compacted(network, X)
    assert torch.allclose(small[4].bias, 2 * network[4].weight[:, 0], rtol=1e-12)


def test_masks_of_torch_that_are_still_on(tmp_path):
    """The given network keeps its masks; the smaller one has none, and its file fits a network without any."""
    network, plain = mlp(), mlp()
    prune.ln_structured(network[0], "weight", amount=3, n=2, dim=0)
    prune.ln_structured(network[2], "weight", amount=2, n=1, dim=1)
    prune.random_unstructured(network[4], "weight", amount=1)
    call(network, X)
    small = compacted(network, X)
    assert prune.is_pruned(network)
    assert not prune.is_pruned(small)
    assert small[0].weight.shape[0] <= 3
    compact_zeros(network, X).save(tmp_path / "small")
    loaded = load_compacted(plain, tmp_path / "small").network
    assert torch.equal(loaded(X), small(X))


def test_single_zeros_change_nothing_and_warn():
    network = mlp()
    prune.global_unstructured([(network[k], "weight") for k in (0, 2, 4)], prune.L1Unstructured, amount=6)
    with pytest.warns(UserWarning, match="nothing is smaller. Prune whole units, as prune.ln_structured"):
        small = compacted(network, X)
    assert shapes(small) == shapes(mlp())


def test_zero_filters_and_zero_scales_of_batch_norm():
    """Filters 0 and 3 become what the norm and ReLU make of zeros; the scale of channel 5 is zero."""
    body = nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
    network = drawn(nn.Sequential(*body, nn.ReLU(), nn.Flatten(2), nn.Linear(4, 1)))
    zero(network[0].weight, 0, 3)
    zero(network[1].weight, 5)
    small = compacted(network, IMAGES)
    assert shapes(small) == {"0.weight": (3, 2, 3, 3), "3.weight": (4, 3, 3, 3), "7.weight": (1, 4)}
    assert small(torch.cat([IMAGES, IMAGES], -1)[..., :6]).shape == (3, 4, 1)


@pytest.mark.parametrize("shift", [1.0, 0.0])
def test_constants_in_front_of_padding(shift):
    """They become a map for images of this size; behind a bias of zero there is none, and any size goes."""
    network = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    zero(drawn(network)[0].weight, 1)
    with torch.no_grad():
        network[0].bias[1] = shift
    small, larger = compacted(network, IMAGES), torch.cat([IMAGES, IMAGES], -1)
    assert small[0].out_channels == 3
    if shift == 0:
        assert torch.allclose(small(larger), network(larger), rtol=1e-12)
    else:
        with pytest.raises(ValueError, match="Expected inputs of size"):
            small(larger)


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_of_a_convolution(groups):
    """A depthwise filter of zeros leaves with its channel, as does a whole group."""
    network = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, groups=groups), nn.ReLU(), nn.Conv2d(4, 2, 1))
    zero(drawn(network)[1].weight, *range(4 // groups))
    zero(network[1].bias, *range(4 // groups))
    small = compacted(network, IMAGES)
    left = 4 - 4 // groups
    assert small[1].groups == groups - 1
    assert (small[0].out_channels, small[3].in_channels) == (left, left)


def residual(net, x):
    """Two layers write a stream that a norm and a layer read."""
    x = net.first(x)
    return net.last(net.norm(x + net.down(net.up(x).relu())))


@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(8), nn.RMSNorm(8)])
def test_a_stream_loses_units_that_no_layer_writes_or_no_layer_reads(norm):
    """Units 2 and 5 are zero in one writer alone; unit 0 in both, and unit 7 is not read."""
    layers = {"first": nn.Linear(4, 8), "up": nn.Linear(8, 6), "down": nn.Linear(6, 8), "last": nn.Linear(8, 2)}
    network = drawn(Net(residual, norm=copy.deepcopy(norm), **layers))
    for x in (network.first.weight, network.first.bias):
        zero(x, 0, 2)
    for x in (network.down.weight, network.down.bias):
        zero(x, 0, 5)
    zero(network.last.weight, 0, 7, dim=1)
    zero(network.up.weight, 7, dim=1)
    small = compacted(network, X)
    left = 6 if isinstance(norm, nn.Identity) else 7  # a norm reads unit 7
    assert shapes(small) == {
        "first.weight": (left, 4), "up.weight": (6, left), "down.weight": (left, 6), "last.weight": (2, left)
    }  # fmt: skip


def test_zero_heads_of_torch_attention_and_of_an_encoder():
    """Head 1 has no values, head 3 is not read; of head 0 the values are biases alone, and it stays."""
    network = drawn(nn.TransformerEncoderLayer(8, 4, 12, batch_first=True))
    attention = network.self_attn
    zero(attention.in_proj_weight, 16, 17, 18, 19)
    zero(attention.in_proj_bias, 18, 19)
    zero(attention.out_proj.weight, 6, 7, dim=1)
    zero(network.linear1.weight, 4)
    small = compacted(network, TOKENS)
    assert small.self_attn.v_proj.out_features == small.self_attn.q_proj.out_features == 4
    assert small.linear1.out_features == 11


def attention(net, x):
    """Four heads of two features."""
    q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (net.query, net.key, net.value))
    return net.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_zero_heads_of_written_attention():
    network = drawn(Net(attention, **{name: nn.Linear(8, 8) for name in ("query", "key", "value", "out")}))
    for layer, rows in ((network.value, (2, 3)), (network.query, (0, 1))):  # a head, and the queries of another
        zero(layer.weight, *rows)
        zero(layer.bias, *rows)
    small = compacted(network, TOKENS)
    assert shapes(small) == {name: (8, 6) if name == "out.weight" else (6, 8) for name in shapes(network)}


def test_zeros_that_the_code_does_not_run_without_stay():
    """It has the number of units of the first layer written in it, but not that of the second."""

    layers = {"first": nn.Linear(4, 6), "second": nn.Linear(6, 5), "last": nn.Linear(5, 2)}
    network = drawn(Net(lambda net, x: net.last(net.second(net.first(x).view(-1, 6)).relu()), **layers))
    zero(network.first.weight, 1)
    zero(network.second.weight, 1)
    with pytest.warns(UserWarning, match="The zeros of first.weight stay. Expected the network to run"):
        small = compacted(network, X)
    assert shapes(small) == {"first.weight": (6, 4), "second.weight": (4, 6), "last.weight": (2, 4)}


def test_a_scale_of_zeros_has_other_gradients_which_the_certificate_leaves_out():
    """The branch ends in zeros; what the gradient of its scale is depends on the branch, which left."""

    def scaled(net, x):
        x = net.first(x)
        return x + net.scale * net.down(net.up(x).relu())

    layers = {"first": nn.Linear(4, 8), "up": nn.Linear(8, 6), "down": nn.Linear(6, 8)}
    network = drawn(Net(scaled, scale=nn.Parameter(torch.zeros(8)), **layers))
    zero(network.scale, *range(8))
    found = compact_zeros(network, X)
    assert torch.equal(found.network(X), network(X))
    assert found.network.up.out_features == 1
    assert found.certificate.gradients is None
    assert found.certificate == found.certificate.outputs <= 1e-10


def test_a_network_with_gates_is_refused():
    with pytest.raises(ValueError, match="Expected one value per gate"):
        compact_zeros(nn.Sequential(nn.Linear(4, 3), L0Gate(3), nn.Linear(3, 1)), torch.ones(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_zeros_of_every_network_of_the_zoo(name):
    """Slices of half of all parameters; their certificates are exact, too."""
    entry = ZOO[name]
    example = entry.example(4)
    network = entry.network()
    plain = fix_gates(network, {s: torch.ones(n, dtype=torch.float64) for s, n in sites(network).items()}).eval()
    random = torch.Generator().manual_seed(0)
    for parameter in plain.parameters():
        for dim, size in enumerate(parameter.shape):
            if torch.rand((), generator=random) < 0.4:
                zero(parameter, *torch.randperm(size, generator=random)[: size // 2].tolist(), dim=dim)
    compacted(plain, example)
