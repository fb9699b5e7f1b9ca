"""Places for gates in networks without any."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0 import prune
from pyro_l0.compaction import compact
from pyro_l0.nn import L0Gate, NetworkCost, insert_gates, suggest_gates
from pyro_l0.nn.gate import gate_names
from tests.compaction.networks import cut
from tests.networks import Dense, Net


def residual():
    """Convolutions with BatchNorm, an activation in place, and a residual sum."""

    def forward(net, x):
        x = net.act(net.norm(net.enter(x)))
        x = x + net.outer(net.relu(net.inner(x)))
        return net.last(x.mean((2, 3)))

    layers = dict(enter=nn.Conv2d(2, 6, 3, padding=1), norm=nn.BatchNorm2d(6), act=nn.ReLU(inplace=True))
    layers |= dict(inner=nn.Conv2d(6, 5, 3, padding=1), relu=nn.ReLU(), outer=nn.Conv2d(5, 6, 3, padding=1))
    return Dense(forward, **layers, last=(6, 3), unused=(2, 2))


def attention():
    """Attention by hand, tokens in a residual stream, one activation that is called twice, and a recurrent layer."""

    def forward(net, tokens):
        x = net.embed(tokens)
        y = net.norm(x)
        q, k, v = (m(y).unflatten(-1, (-1, 2)).transpose(1, 2) for m in (net.query, net.key, net.value))
        x = x + net.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + net.down(net.act(net.more(net.act(net.up(x)))))
        return net.last(net.rnn(x)[0])

    heads = dict.fromkeys(("query", "key", "value", "out"), (8, 8))
    layers = dict(up=(8, 6), more=(6, 6), down=(6, 8), act=nn.GELU(), rnn=nn.LSTM(8, 5, batch_first=True, proj_size=4))
    return Dense(forward, embed=nn.Embedding(9, 8), norm=nn.LayerNorm(8), **heads, **layers, last=(4, 2))


IMAGE = torch.randn(2, 2, 4, 4)


def test_a_gate_is_suggested_behind_each_activation_and_branch():
    """Behind the last of the modules that hand a unit on; with what one unit saves, counted by hand."""
    found = suggest_gates(residual(), IMAGE)
    assert {path: (gate.size, gate.dim) for path, gate in found.items()} == {
        "act": (6, 1),
        "relu": (5, 1),
        "outer": (6, 1),
    }
    places = {place.path: place for place in found.locations}
    # A map of the branch: 6 kernels that write it and 6 that read it, at 16 places.
    assert (places["relu"].weights, places["relu"].macs) == (9 * 12, 9 * 12 * 16)
    assert places["relu"].parameters == ("inner.bias", "inner.weight", "outer.weight")
    assert (places["act"].coupled, places["outer"].coupled, places["relu"].coupled) == (("outer",), ("act",), ())
    assert places["outer"].weights == 9 * 5  # what is written; the sum keeps its units for the other summand
    assert found.refused == {"last": "it makes the network's output"}


def test_places_of_a_residual_stream_share_a_gate():
    """In what is inserted, too: a unit of the stream leaves by one gate, and with it what a count by hand says."""
    found = suggest_gates(residual(), IMAGE)
    assert found["act"] is found["outer"]
    assert found["relu"] is not found["act"]
    gated = insert_gates(residual(), found, IMAGE)
    assert {site: gate.size for site, gate in gate_names(gated).items()} == {"act.1": 6, "relu.1": 5}
    cost = NetworkCost(gated, IMAGE)
    for stream, inner in ((6, 5), (4, 5), (1, 2)):
        gates = {"act.1": (torch.arange(6) < stream).float(), "relu.1": (torch.arange(5) < inner).float()}
        expected = 9 * (2 * stream + 2 * stream * inner) + 3 * stream
        assert cost.weights(gates) == expected
        small = compact(gated, gates, IMAGE).network
        assert sum(p.numel() for p in small.parameters() if p.dim() > 1) == expected + small.unused.weight.numel()
    again = insert_gates(residual(), found)
    assert gate_names(again)["act.1"] is not gate_names(gated)["act.1"]  # each network has gates of its own


def test_coupled_places_have_the_number_of_their_group():
    rows = {line.split()[0]: line for line in str(suggest_gates(residual(), IMAGE)).splitlines()}
    assert {path: "group 1" in rows[path] for path in ("act", "outer", "relu")} == {
        "act": True,
        "outer": True,
        "relu": False,
    }


def basic_block():
    """As in torchvision's ResNets: one activation in place for both calls, and a sum in place."""

    def forward(net, x):
        y = net.bn2(net.conv2(net.relu(net.bn1(net.conv1(x)))))
        y += x
        return net.relu(y)

    layers = dict(conv1=nn.Conv2d(4, 5, 3, padding=1), bn1=nn.BatchNorm2d(5), conv2=nn.Conv2d(5, 4, 3, padding=1))
    return Dense(forward, **layers, bn2=nn.BatchNorm2d(4), relu=nn.ReLU(inplace=True))


def test_gates_stand_behind_norms_whose_outputs_change_in_place():
    """Not in front of them: in training a BatchNorm undoes what a gate above 0 multiplies by."""
    network = nn.Sequential(nn.Conv2d(2, 4, 3), basic_block(), nn.Flatten(), nn.Linear(16, 3))
    found = suggest_gates(network, IMAGE)
    assert {"1.bn1", "1.bn2"} <= set(found)
    assert not {"1.conv1", "1.conv2"} & set(found)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.Dropout2d(0.1)])
def test_a_unit_that_is_pooled_has_one_place(pool):
    """Behind the pool, though a maximum is handed on with its index; not coupled with the activation in front."""
    network = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), nn.LazyLinear(3))
    network(IMAGE)
    found = suggest_gates(network, IMAGE)
    pooled = "1" if isinstance(pool, nn.Dropout2d) else "2"  # a dropout does nothing when it is recorded
    assert set(found) == {pooled, "3"}
    assert next(place for place in found.locations if place.path == pooled).coupled == ()


@pytest.mark.parametrize(
    "head",
    [
        nn.Sigmoid(),
        nn.Sequential(nn.Unflatten(-1, (2, 3)), nn.Softmax(-1)),
        nn.LayerNorm(6),
    ],
)
def test_units_that_become_the_outputs_have_no_place(head):
    """The classes in front of a softmax, say: none of them is to close. Tokens in front of them do not matter."""
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), head)
    for example in (torch.randn(2, 4), torch.randn(2, 3, 4)):
        found = suggest_gates(network, example)
        assert set(found) == {"1"}
        assert found.refused["2"] == "it makes the network's output"


def two(inputs, outputs, layer=nn.Linear, **options):
    return nn.Sequential(layer(inputs, 8, **options), nn.ReLU(), layer(8, outputs, **options))


def convs(inputs, outputs):
    return two(inputs, outputs, nn.Conv2d, kernel_size=3, padding=1)


def weight(*shape):
    return nn.Parameter(torch.rand(shape))


EDGES = torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 4, 3])
OUTPUTS = {
    "residual": (Net(lambda net, x: x + net.f(x), f=two(6, 6)), (2, 6)),
    "denoiser": (Net(lambda net, x: x + net.f(x), f=convs(3, 3)), (2, 3, 6, 6)),
    "forecast": (Net(lambda net, x: x[:, -1:] + net.f(x.flatten(1)).view(-1, 4, 3), f=two(9, 12)), (2, 3, 3)),
    "mask": (Net(lambda net, x: x * net.f(x).sigmoid(), f=convs(3, 3)), (2, 3, 6, 6)),
    "several": (Net(lambda net, x: {"sum": x + net.f(x), "parts": (x * net.g(x),)}, f=two(6, 6), g=two(6, 6)), (2, 6)),
    "turned": (Net(lambda net, x: (x + net.f(x.mT).mT).reshape(2, -1), f=two(6, 6)), (2, 6, 4)),
    "some of its units": (
        Net(lambda net, x: (lambda h: (h[:, :3] + x, h[:, 3:].sum(1)))(net.f(x)), f=two(3, 6)), (2, 3),
    ),
    "read by a coefficient": (
        Net(lambda net, x: net.f(x) * (net.f(x) * net.s).sum(-1, keepdim=True) + 1, f=two(6, 3), s=weight(3)), (2, 6),
    ),
    "classes of nodes": (Net(lambda net, x: net.a @ net.f(x), f=two(6, 3), a=weight(5, 5)), (5, 6)),
    "sums over edges": (
        Net(lambda net, x: torch.zeros(5, 3).index_add(0, EDGES[0], net.f(x)[EDGES[1]]), f=two(6, 3)), (5, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_units_that_only_sums_take_to_the_output_have_no_place(name):
    """Of an image that is corrected, say, every colour is an output: nothing else reads what the layer makes of it."""
    network, shape = OUTPUTS[name]
    found = suggest_gates(network, torch.randn(shape))
    lasts = [f"{path}.2" for path, _ in network.named_children()]
    assert set(found) == {f"{path}.1" for path, _ in network.named_children()}
    assert all(found.refused[path].startswith("it makes the network's output") for path in lasts)


def test_a_branch_that_a_layer_reads_is_no_output_though_it_reaches_one():
    """A gate closes units of the first correction, which the second corrects."""
    network = Net(lambda net, x: (lambda h: h + net.g(h))(x + net.f(x)), f=two(6, 6), g=two(6, 6))
    assert set(suggest_gates(network, torch.randn(2, 6))) == {"f.1", "f.2", "g.1"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pruning_corrects_every_output():
    """The units inside leave, none of the outputs; the report says where there is no gate."""
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    network = Net(lambda net, x: x + net.f(x), f=nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6)))
    result = prune(
        network, F.mse_loss, [(x[i : i + 16], x[i : i + 16].flip(1)) for i in range(0, 64, 16)], x[:2], 0.2, epochs=20
    )
    assert (result.network.f[0].out_features, result.network.f[2].out_features) == (6, 6)
    assert "it makes the network's output" in result.report.skipped["f.2"]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_attention_and_places_that_are_refused():
    """Heads by gate_heads; what is called twice or makes no tensor is named."""
    found = suggest_gates(attention(), torch.tensor([[1, 4, 2]]))
    assert found.heads == {"out": 4}
    assert found.refused["act"] == "it is called 2 times, on different units"
    assert found.refused["rnn"] == "proj_size projects its hidden units"
    assert {"query", "key", "value"} <= {*found, *found.in_the_way}  # two features a head, says its code
    assert found["query"].size == 8
    assert "last" not in found
    text = str(found)
    assert "out reads 4 heads: gate_heads(network, {'out': 4})" in text
    assert "no gate behind act: it is called 2 times, on different units" in text
    assert " ".join(text.splitlines()[0].split()) == "behind gate weights/unit macs/unit coupled parameters"


def test_a_network_where_no_gate_cuts_anything():
    found = suggest_gates(nn.Sequential(nn.Linear(3, 2)), torch.ones(1, 3))
    assert len(found) == 0
    assert found.refused == {"0": "it makes the network's output"}


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), nn.ReLU()])
def test_a_module_that_is_called_with_units_in_two_dimensions(drop):
    """As features and as maps; where one number from the front or the end has them both times, a gate acts there."""

    def forward(net, x):
        maps = net.first(x)
        rows = maps.flatten(2).transpose(1, 2)
        rows = rows + net.drop(2 * net.a(rows))
        back = net.b(rows).unflatten(1, (4, 4)).permute(0, 3, 1, 2)
        return net.out(maps + net.drop(back))

    torch.manual_seed(0)
    layers = dict(first=nn.Conv2d(3, 8, 1), a=(8, 8), b=(8, 8), out=nn.Conv2d(8, 2, 1))
    network, x = Dense(forward, drop=drop, **layers).double().eval(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    suggestions = suggest_gates(network, x)
    assert "drop" not in suggestions
    assert suggestions.refused["drop"] == "it is called 2 times, with its units in several dimensions"

    def pooled(net, x):
        return net.out(net.drop(net.drop(2 * net.first(x)).mean((2, 3))))

    both = Dense(pooled, drop=drop, first=nn.Conv2d(3, 8, 1), out=(8, 2)).double().eval()
    suggested = suggest_gates(both, x)
    assert suggested["drop"].dim == 1
    for net, found in ((network, suggestions), (both, suggested)):
        gated = insert_gates(net, found, x)
        values = {site: (torch.arange(gate.size) % 2).double() for site, gate in gate_names(gated).items()}
        small = cut(gated, values, x, rtol=0, atol=1e-12)
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())


def test_gates_that_are_there_already_stay():
    """What is in front of them needs no other."""
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    assert set(suggest_gates(network, torch.ones(1, 3))) == {"4"}


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("called", [True, False])
def test_a_weight_that_is_computed_of_all_its_units_is_named(norm, called):
    """With what to do; without it there are all places."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.ReLU(), norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 2)
    network, x = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), *layers), torch.randn(3, 4)
    if called:
        network(x)
    if norm is nn.utils.spectral_norm:
        for call in (lambda: suggest_gates(network, x), lambda: prune(network, F.mse_loss, [x] * 20, x, epochs=1)):
            with pytest.raises(ValueError, match=r"'weight' of '3' was computed.*remove_spectral_norm"):
                call()
        nn.utils.remove_spectral_norm(network[3])
    else:
        report = str(NetworkCost(insert_gates(network, {"2": L0Gate(6)}), x).report())
        assert "behind the gate (mv in 3.parametrizations.weight.0; remove it first: torch.nn.utils.par" in report
        assert "4" in suggest_gates(network, x)
        nn.utils.parametrize.remove_parametrizations(network[3], "weight")
    assert list(suggest_gates(network, x)) == ["0", "2", "4"]


def recurrent(behind, added=False):
    """A recurrent layer and what is behind it; with ``added``, a residual stream goes past it."""

    def forward(net, x):
        entered = net.enter(x)
        states = net.layer(entered)[0]
        return net.last(net.behind(states + entered if added else states)[:, -1])

    return Dense(forward, enter=(4, 8), layer=nn.GRU(8, 8, batch_first=True), behind=behind, last=(8, 2))


@pytest.mark.parametrize("behind", [nn.ReLU(), nn.Dropout(0.1)])
def test_recurrent_units_have_their_gate_behind_the_layer(behind):
    """Which closes them in the recurrence, as one behind the activation does not."""
    found = suggest_gates(recurrent(behind), torch.randn(2, 5, 4))
    assert set(found) == {"enter", "layer"}
    assert found.refused["behind"] == "its units are those of layer"
    at = found.locations[1]
    assert (at.gate.size, at.coupled, at.weights) == (8, (), 3 * (8 + 8 + 8 - 1) + 2)  # a recurrent unit reads itself


def test_recurrent_units_that_are_others_too_are_coupled():
    """A norm makes another number of a zero, a stream adds one to it, and a decoder starts from an encoder's state."""
    x = torch.randn(2, 5, 4)
    found = [suggest_gates(recurrent(nn.LayerNorm(8)), x), suggest_gates(recurrent(nn.ReLU(), True), x)]
    coupled = [{at.path: at.coupled for at in one.locations}["layer"] for one in found]
    assert coupled == [("behind",), ("enter", "behind")]
    translation = Dense(
        lambda net, one, other: net.last(net.decoder(other, net.encoder(one)[1])[0]),
        **dict(encoder=nn.LSTM(4, 8), decoder=nn.LSTM(3, 8), last=(8, 2)),
    )
    assert set(suggest_gates(translation, (x, torch.randn(3, 5, 3)))) == {"encoder", "decoder"}


# --- every gate that is suggested can be cut ------------------------------------------------------


def pick(x):
    if x.stride(-2) not in (12, 16):  # a width that is not followed
        raise RuntimeError("another width")
    return x


def test_sites_of_one_kind_are_tried_together(monkeypatch):
    """The first of eight layers that can't be cut is tried alone; what can be is still suggested."""
    trials, search = [], importlib.import_module("pyro_l0.compaction.compact")
    tried = search.refusal
    monkeypatch.setattr(search, "refusal", lambda *args: trials.append(1) or tried(*args))
    checks = Net(lambda net, x: net.down(pick(net.up(x).relu())), up=nn.Linear(6, 12), down=nn.Linear(12, 6))
    blocks = (copy.deepcopy(checks) for _ in range(8))
    network = nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))
    suggested = suggest_gates(network, torch.randn(3, 4))
    assert set(suggested.in_the_way) == {f"{i}.up" for i in range(1, 9)}
    assert "10" in suggested
    assert len(trials) <= 8


def test_a_network_without_numbers_has_the_suggestions_of_one_with_them():
    """On the meta device the sizes tell where gates cut something, and what a unit saves."""
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5), nn.GELU()
    )
    network.extend([nn.LayerNorm(5), nn.Dropout(), nn.Linear(5, 2)])
    images = torch.ones(2, 3, 8, 8)
    found = suggest_gates(network, images)
    assert len(found) > 1
    assert str(suggest_gates(network.to("meta"), images.to("meta"))) == str(found)


def test_heads_that_cannot_be_cut_are_refused():
    """torch's attention with a bias for its keys has no plain twin."""
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
    network = Net(lambda net, x: net.out(net.attention(x, x, x)[0]), attention=attention, out=nn.Linear(8, 2))
    suggested = suggest_gates(network, torch.randn(2, 3, 8))
    assert suggested.heads == {}
    assert "without add_bias_kv" in suggested.refused["attention.out_proj"]


def into_flatten(*behind):
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *behind).double().eval()


FLATTENED = {
    "flatten": lambda: into_flatten(nn.Flatten(), nn.Linear(64, 3)),
    "pool": lambda: into_flatten(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)),
    "pixel shuffle": lambda: into_flatten(nn.Conv2d(4, 8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 3, 1)),
    "flatten from the middle": lambda: into_flatten(nn.Flatten(2), nn.Flatten(), nn.Linear(64, 3)),
}


@pytest.mark.parametrize("name", FLATTENED)
def test_the_parameters_of_a_location_are_those_that_shrink(name):
    """Against the shapes of the network that one closed unit of it leaves."""
    torch.manual_seed(0)
    network, x = FLATTENED[name](), torch.randn(2, 2, 6, 6, dtype=torch.float64)
    suggestions = suggest_gates(network, x)
    gated = insert_gates(network, suggestions)
    whole = {key: value.shape for key, value in network.state_dict().items()}
    assert suggestions.locations
    for at in suggestions.locations:
        gates = {site: torch.ones(gate.size).double() for site, gate in gate_names(gated).items()}
        gates[f"{at.path}.1"][1] = 0
        small = compact(gated, gates, x).network.state_dict()
        assert set(at.parameters) == {key for key, shape in whole.items() if small[key].shape != shape}
