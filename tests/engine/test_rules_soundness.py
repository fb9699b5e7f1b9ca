"""What rules say of closed units against what operations make of them: kinds, needs and what can be taken out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.engine import analyse, record
from tests.networks import Dense

SHAPE = (3, 6, 4, 4)
DIMS = (1, 3)


def along(function):
    """The function along each dimension but the batch's."""
    return [lambda x, dim=dim: function(x, dim) for dim in DIMS]


OPERATIONS = {
    "softmax": along(F.softmax),
    "log_softmax": along(F.log_softmax),
    "batch_norm": [lambda x: F.batch_norm(x, None, None, training=True)],
    "batch_norm_of_weight": [lambda x: F.batch_norm(x.flatten(0, 1)[None].flatten(2), None, None, training=True)],
    "instance_norm": [F.instance_norm],
    "group_norm": [lambda x, n=n: F.group_norm(x, x.shape[1] // n) for n in (1, 2)],
    "layer_norm": [lambda x, n=n: F.layer_norm(x, x.shape[n:]) for n in (1, 3)],
    "rms_norm": [lambda x, n=n: F.rms_norm(x, x.shape[n:]) for n in (1, 3)],
    "normalize": along(lambda x, dim: F.normalize(x, dim=dim)),
    "norm": along(lambda x, dim: x.norm(dim=dim)),
    "local_response": [lambda x: F.local_response_norm(x, 3)],
    "cumsum": along(torch.cumsum),
    "cumprod": along(torch.cumprod),
    "logcumsumexp": along(torch.logcumsumexp),
    "cummax": along(torch.cummax),
    "sort": along(torch.sort),
    "topk": along(lambda x, dim: x.topk(2, dim)),
    "kthvalue": along(lambda x, dim: x.kthvalue(2, dim)),
    "kthvalue, kept": along(lambda x, dim: x.kthvalue(2, dim, keepdim=True)),
    "median": [torch.median, *along(torch.median)],
    "mode": along(torch.mode),
    "max": along(torch.max),
    "aminmax": along(lambda x, dim: x.aminmax(dim=dim)),
    "argmax": along(torch.argmax),
    "mean": along(torch.mean),
    "var": [torch.var_mean, *along(torch.std)],
    "prod": along(torch.prod),
    "logsumexp": along(torch.logsumexp),
    "quantile": along(lambda x, dim: x.quantile(0.3, dim)),
    "fourier": along(lambda x, dim: torch.fft.fft(x, dim=dim).real),
    "roll": along(lambda x, dim: x.roll(1, dim)),
    "flip": along(lambda x, dim: x.flip(dim)),
    "tril": [torch.tril],
    "resized": [lambda x, mode=mode: F.interpolate(x, (6, 6), mode=mode) for mode in ("nearest", "bicubic", "area")],
    "pooled": [lambda x: F.avg_pool2d(x, 2), lambda x: F.max_pool2d(x, 2), lambda x: F.lp_pool2d(x, 2.0, 2)],
    "unfolded": [lambda x: F.unfold(x, 2), lambda x: x.unfold(2, 2, 1)],
    "unshuffled": [lambda x: F.pixel_unshuffle(x, 2)],
    "shuffled": [lambda x: F.channel_shuffle(x, 2)],
    "padded": [lambda x, mode=mode: F.pad(x, (1, 1, 1, 1), mode) for mode in ("constant", "reflect", "circular")],
    "differences": along(lambda x, dim: x.diff(dim=dim)),
    "similarity": along(lambda x, dim: F.cosine_similarity(x, x.flip(0), dim)),
    "distance": [lambda x: torch.cdist(x, x + 1)],
    "attention": [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4).tril().log().to(x.dtype), scale=0.5),
        lambda x: F.scaled_dot_product_attention(x, x.narrow(1, 0, 3), x.narrow(1, 0, 3), enable_gqa=True),
        lambda x: torch.baddbmm(x.new_zeros(1), x.flatten(0, 1), x.flatten(0, 1).mT, beta=0),
    ],
}  # fmt: skip


def first(result):
    """Its first tensor, such as the values of a sort, as a float."""
    return (result if isinstance(result, torch.Tensor) else result[0]).double()


class Around(nn.Module):
    """An operation between two gates, each on a dimension."""

    def __init__(self, operation, dim, behind=None):
        super().__init__()
        self.gate, self.operation = L0Gate(SHAPE[dim], dim=dim), operation
        if behind is not None:
            self.last = L0Gate(first(operation(torch.ones(SHAPE))).shape[behind], dim=behind)

    def forward(self, x):
        y = self.operation(self.gate(x))
        return self.last(first(y)) if hasattr(self, "last") else y


def closing(x, dim, closed):
    return x * (~closed).to(x).view([-1 if d == dim else 1 for d in range(x.dim())])


def numbers(seed):
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_called_zero_or_constant_is_so(name):
    """Whatever units are closed, and along every dimension of what comes out."""
    for operation in OPERATIONS[name]:
        for dim in DIMS:
            closed = torch.arange(SHAPE[dim]) % 2 == 1
            recording = record(Around(operation, dim), numbers(0))
            maps = analyse(recording, {"gate": closed}, {"gate": (~closed).double()}).maps
            results = [operation(closing(numbers(seed), dim, closed)) for seed in (1, 2)]
            one, other = ([x] if isinstance(x, torch.Tensor) else list(x) for x in results)
            for value, x, y in zip(recording.calls[0].outputs, one, other, strict=True):
                for d in range(value.rank):
                    kinds = torch.from_numpy(maps.kinds(value, d))
                    x_slices, y_slices = x.movedim(d, 0).flatten(1), y.movedim(d, 0).flatten(1)
                    assert bool((x_slices[kinds == 0] == 0).all()), (dim, d)
                    assert torch.equal(x_slices[kinds == 1], y_slices[kinds == 1]), (dim, d)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("share", ["every second", "all but one"])
def test_an_operation_on_what_stays_makes_what_stays(name, share):
    """Units leave in front and behind, of every pair of dimensions; open units behind are as before."""

    def close(size):
        units = torch.arange(size)
        return units % 2 == 1 if share == "every second" else units > 0

    for operation in OPERATIONS[name]:
        for dim in DIMS:
            for behind in range(1, first(operation(numbers(0))).dim()):
                network = Around(operation, dim, behind)
                recording = record(network, numbers(0))
                closed = {"gate": close(network.gate.size), "last": close(network.last.size)}
                analysis = analyse(recording, closed, {site: (~mask).double() for site, mask in closed.items()})
                one, last = (x for x in recording.operations if x.name == "gate")
                x = closing(numbers(1), dim, closed["gate"])
                whole, part = first(operation(x)), x
                for d, axis in enumerate(analysis.maps.axes[one.output]):
                    part = part.index_select(d, torch.from_numpy(analysis.solution.remaining(axis)))
                small = first(operation(part))
                for d, axis in enumerate(analysis.maps.axes[last.value("input")]):
                    kept = torch.from_numpy(analysis.solution.remaining(axis))
                    assert small.shape[d] == len(kept), (dim, behind)
                    if d == behind:
                        small = small.index_select(d, torch.arange(len(kept))[~closed["last"][kept]])
                        kept = kept[~closed["last"][kept]]
                    whole = whole.index_select(d, kept)
                torch.testing.assert_close(small, whole, rtol=1e-12, atol=1e-12)


def test_the_price_of_a_computed_weight_in_groups():
    """A gated style makes the weights of a convolution whose input is the same for every example."""

    def forward(net, x):
        weight = net.weight * net.gate(net.style(x))[:, None, :, None, None]
        maps = F.conv2d(net.start.repeat(1, len(x), 1, 1), weight.flatten(0, 1), groups=len(x))
        return net.head(maps.unflatten(1, (len(x), -1))[0])

    start, weight = nn.Parameter(torch.ones(1, 4, 3, 3)), nn.Parameter(torch.ones(5, 4, 1, 1))
    network = Dense(forward, start=start, weight=weight, style=(2, 4), gate=4, head=nn.Conv2d(5, 2, 1))
    cost = NetworkCost(network, torch.ones(2, 2))
    assert cost.weights({"gate": torch.ones(4)}) == cost.total_weights
    assert cost.weights({"gate": torch.zeros(4)}) == 0
