"""Rules on gated features: what of four closed units (of eight) leaves through each operation, exactly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.exactness import between, examine
from tests.networks import Dense

pytestmark = pytest.mark.filterwarnings("ignore:Gates are closed, but nothing is smaller")


def swiglu(h, up):
    one, other = up(h).chunk(2, -1)
    return F.silu(one) * other


ACTIVATIONS = (torch.relu, F.gelu, torch.tanh, F.silu, F.elu, F.selu, F.mish, F.softsign, F.hardswish, torch.abs)
PASSING = {
    **{function.__name__: function for function in (*ACTIVATIONS, torch.log1p)},
    "leaky": lambda h: F.leaky_relu(h, 0.1),
    "square": lambda h: h**2,
    "self product": lambda h: h * h,
    "scaled": lambda h: 2 * h / 3,
    "clamped": lambda h: h.clamp(-1, 1),
    "in place": lambda h: h.clone().mul_(2.0).relu_(),
    "dropout": lambda h: F.dropout(h, 0.5, False),
    "where zero": lambda h: torch.where(h > 0, h, 0.0),
    "filled with zero": lambda h: h.masked_fill(h < 0, 0.0),
    "flip": lambda h: h.flip(-1),
    "flatten": lambda h: h[:, None, :].flatten(1),
    "matrix": lambda h: h.t().contiguous().t(),
    "numpy transpose": lambda h: h.T.T,
    "squeeze": lambda h: h.unsqueeze(1).squeeze(1),
    "permute": lambda h: h[None].permute(1, 0, 2).flatten(1),
    "movedim": lambda h: h.movedim(0, 1).movedim(1, 0),
    "expand": lambda h: h[:, None].expand(-1, 3, -1),
    "stack": lambda h: torch.stack([h, h], 1),
    "unbind": lambda h: torch.stack([h, 2 * h], 1).unbind(1)[1],
    "repeated rows": lambda h: h[:, None].repeat(1, 3, 1),
    "repeated": lambda h: h.repeat(1, 3),
    "interleaved": lambda h: h.repeat_interleave(3, -1),
    "cat": lambda h: torch.cat([h, 2 * h], -1),
    "padded rows": lambda h: F.pad(h[:, None], (0, 0, 1, 2)).flatten(0, 1),
    "padded": lambda h: F.pad(h, (2, 1)),
    "halves": lambda h: torch.cat(h.chunk(2, -1)[::-1], -1),
    "pairs": lambda h: (lambda p: torch.stack([p[:, 1::2], p[:, ::2]], -1).flatten(1)[:, ::2])(
        h.repeat_interleave(2, 1)
    ),
    "narrow": lambda h: h[:, None].expand(-1, 3, -1).narrow(1, 1, 2),
    "sum over rows": lambda h: h[:, None].expand(-1, 3, -1).sum(1),
    "mean over rows": lambda h: h[:, None].expand(-1, 3, -1).mean(1),
    "max over rows": lambda h: torch.stack([h, -h], 1).amax(1),
    "dim max": lambda h: torch.stack([h, -h], 1).max(1)[0],
    "row index": lambda h: h[[1, 0]],
    "maxout": lambda h: torch.max(h, 2 * h),
    "absolute in place": lambda h: (2 * h).abs_(),
    "compared": lambda h: h * h.clone().ge_(0.0),
    "complex": lambda h: torch.view_as_real(torch.view_as_complex(torch.stack([h, h], -1))).flatten(1),
    "spectrum of rows": lambda h: torch.fft.fft(h, dim=0).real + torch.fft.rfft(h, dim=0).abs().sum(0),
    "log sigmoid": lambda h: h * F.logsigmoid(h),
    "and": lambda h: h * ((h > 0) & (h < 1)),
    "row mask": lambda h: h[torch.tensor([True, False])],
    "mask behind": lambda h: h[:, None].expand(-1, 2, -1)[:, torch.tensor([False, True])],
    "added rows": lambda h: torch.zeros_like(h).index_add(0, torch.tensor([1, 0]), h),
    "copied rows": lambda h: torch.zeros_like(h).index_copy(0, torch.tensor([1, 0]), h),
    "scattered": lambda h: torch.zeros_like(h).scatter_add(0, torch.ones(2, 1, dtype=torch.long).expand_as(h), h),
    "row mask of ints": lambda h: h.index_select(0, torch.tensor([1, 0])),
    "normalised": lambda h: F.normalize(h, dim=-1),
    "einsum": lambda h: torch.einsum("bi,bi->bi", h, h),
    "einsum dots": lambda h: torch.einsum("...i,...j->...ij", h, h.new_ones(2, 2)).flatten(1),
    "outer": lambda h: (h[:, :, None] * torch.ones(3)).flatten(1),
    "matmul": lambda h: (h[:, :, None] @ torch.ones(1, 2, dtype=h.dtype)).transpose(1, 2),
    "cumulated rows": lambda h: h.cumsum(0),
    "rolled rows": lambda h: h.roll(1, 0),
    "triangle": lambda h: h[:, None, None].expand(-1, 2, 2, -1).permute(0, 3, 1, 2).tril().permute(0, 2, 3, 1),
    "addcmul": lambda h: torch.addcmul(h, h, h),
    "other sizes": lambda h: h + torch.zeros_like(h),
    "ones": lambda h: h * torch.ones_like(h),
    "lerp": lambda h: torch.lerp(h, 2 * h, 0.3),
}
SIZE_OF_OTHERS = "shape[1] of a tensor, which is the size of other units, too"
SCALE = torch.ones(8)
STAYING = {
    "constant": (lambda h: h + 1.0, "linear in out"),
    "sigmoid": (torch.sigmoid, "linear in out"),
    "constant tensor": (lambda h: h * SCALE, "a tensor that is no parameter or buffer, at mul in the network"),
    "softplus": (F.softplus, "linear in out"),
    "exp": (torch.exp, "linear in out"),
    "filled": (lambda h: h.masked_fill(torch.arange(8) % 2 == 0, -1.0), "arange in the network"),
    "mean": (lambda h: h.mean(-1, keepdim=True), "mean in the network"),
    "max": (lambda h: h.amax(-1, keepdim=True), "amax in the network"),
    "variance": (lambda h: h.var(-1, keepdim=True), "var in the network"),
    "softmax": (lambda h: h.softmax(-1), "_softmax in the network"),
    "cumsum": (lambda h: h.cumsum(-1), "cumsum in the network"),
    "sort": (lambda h: h.sort(-1)[0], "sort in the network"),
    "topk": (lambda h: h.topk(3, -1)[0], "topk in the network"),
    "roll": (lambda h: h.roll(3, -1), "roll in the network"),
    "select": (lambda h: h[:, 2:3] + h[:, :1] + h.select(1, 4)[:, None], "select in the network"),
    "index": (lambda h: h[:, [0, 3, 5]], "index in the network"),
    "slices": (lambda h: torch.cat([h[:, 4:], h[:, :4]], -1), SIZE_OF_OTHERS),
    "every other": (lambda h: h[:, ::2], SIZE_OF_OTHERS),
    "index select": (lambda h: h.index_select(1, torch.tensor([0, 3, 5])), "index_select in the network"),
    "gather": (lambda h: h.gather(1, torch.zeros(len(h), 8, dtype=torch.long)), "gather in the network"),
    "reflected": (lambda h: F.pad(h[:, None], (2, 1), mode="reflect")[:, 0], "pad in the network"),
    "unknown": (lambda h: torch.linalg.pinv(h).T, "linalg_pinv in the network"),
}


@pytest.mark.parametrize("name", PASSING)
def test_closed_units_pass_and_leave(name):
    analysis = examine(between(PASSING[name]), torch.randn(2, 6, dtype=torch.float64))
    assert len(analysis.removed["gate"]) == 4
    assert analysis.gates["gate"].front.tolist() == analysis.gates["gate"].behind.tolist()
    assert not analysis.reasons["gate"]
    assert not analysis.barriers
    assert analysis.remaining["one.weight"][0].tolist() == analysis.gates["gate"].behind.tolist()


@pytest.mark.parametrize("name", STAYING)
def test_closed_units_stay_and_why(name):
    operation, reason = STAYING[name]
    analysis = examine(between(operation), torch.randn(2, 6, dtype=torch.float64))
    assert set(analysis.reasons["gate"].values()) == {reason}
    assert not len(analysis.removed["gate"])
    assert name != "unknown" or any(barrier.endswith("in the network") for barrier in analysis.barriers)
    assert len(analysis.gates["gate"].front) == 4  # the zeros begin behind the gate


@pytest.mark.parametrize("name", ["constant", "sigmoid", "softplus", "exp"])
def test_constants_leave_into_the_bias(name):
    analysis = examine(between(STAYING[name][0]), torch.randn(2, 6, dtype=torch.float64), folds=True)
    assert len(analysis.removed["gate"]) == 4
    (fold,) = analysis.folds
    assert (fold.path, fold.weight, fold.bias, fold.dim) == ("out", "out.weight", "out.bias", 1)
    zero = torch.zeros(1, dtype=torch.float64)
    assert torch.equal(fold.constant, STAYING[name][0](zero).expand(4))


@pytest.mark.parametrize(
    ("network", "removed"),
    [
        (between(lambda h, one: h * one, second=True), 4),
        (between(lambda h, one: h + one, second=True), 0),
        (between(lambda h, one: torch.cat([h, one], -1), second=True), 4),
        (between(lambda h, one: h / (1 + one**2), second=True), 4),
        (between(lambda h, one: one / (1 + h**2), second=True), 0),
        (between(lambda h, one: torch.where(one > 0, h, h * 2), second=True), 4),
        (between(lambda h, one: torch.einsum("bi,bj->bij", h, one).flatten(1), second=True), 4),
        (between(lambda h, one: torch.einsum("bi,bi->b", h, one)[:, None], second=True), 4),
        (between(lambda h, one: (h * one).sum(-1, keepdim=True), second=True), 4),
        (between(lambda h, one: h @ one.t()[:, :1], second=True), 4),
        (between(lambda h, prelu: prelu(h), nn.PReLU(8)), 4),
        (between(lambda h, prelu: prelu(h), nn.PReLU()), 4),
        (between(lambda h, norm: norm(h), nn.BatchNorm1d(8)), 0),
        (between(lambda h, norm: norm(h), nn.LayerNorm(8)), 0),
        (between(lambda h, norm: norm(h), nn.RMSNorm(8)), 4),
        (between(lambda h, norm: norm(h), nn.GroupNorm(4, 8)), 0),
        (between(swiglu, nn.Linear(8, 10)), 4),
        (between(lambda h: F.glu(torch.cat([h, h + 1], -1), -1)), 4),
        (between(lambda h: F.glu(torch.cat([h + 1, h], -1), -1)), 0),
        (between(lambda h, layer: layer(h, h), nn.Bilinear(8, 8, 4)), 4),
        (between(lambda h, layer: layer(h), nn.Linear(8, 4, bias=False)), 4),
        (between(lambda h, layer: layer(h), nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))), 0),
    ],
)
def test_two_operands_and_layers(network, removed):
    analysis = examine(network, torch.randn(2, 6, dtype=torch.float64))
    assert len(analysis.removed["gate"]) == removed


def test_attention_over_constants_varies():
    """Constant values that differ from token to token are weighted by what the queries ask for."""

    def forward(net, x):
        q = net.query(x)[:, None]
        v = (net.gate(net.query(x))[:, None, :3] + net.values) * 1.0
        return net.out(F.scaled_dot_product_attention(q, q[:, :, :3], v)[:, 0])

    network = Dense(forward, query=(6, 4), gate=4, out=(4, 2), values=nn.Parameter(torch.randn(1, 1, 3, 4)))
    analysis = examine(network, torch.randn(2, 5, 6, dtype=torch.float64), folds=True)
    assert not analysis.folds
    assert len(analysis.gates["gate"].behind) == 4
