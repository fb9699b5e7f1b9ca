"""Transformers compiled by hand, as by Tracr (Lindner et al., 2023, arXiv:2301.05062), whose circuits are known.

Every quantity of a program has entries of the residual stream of its own, and there is no norm. Heads and feed-forward
blocks that the program does not need read and write noise, in entries that nothing else reads.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 5  # positions: one for the begin, and at most four letters
BEGIN, PAD, LETTERS = 0, 1, 3
WORDS = 2 + LETTERS
HEADS, HEAD = 2, 8  # heads a layer, and entries of each
NOISE = 6
HARD = 100.0  # the score of a key that is attended to, above others


class Stream:
    """Which entries of the stream a quantity has."""

    def __init__(self, **sizes: int) -> None:
        sizes["noise"] = NOISE
        starts = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
        self.of = {name: slice(a, b) for name, a, b in zip(sizes, starts, starts[1:], strict=False)}
        self.width = starts[-1]


class Layer(nn.Module):
    """Two heads and a feed-forward block, without norms."""

    def __init__(self, stream: Stream, hidden: int, causal: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(stream.width, HEADS * HEAD) for _ in range(3))
        self.o, self.up = nn.Linear(HEADS * HEAD, stream.width), nn.Linear(stream.width, hidden)
        self.down, self.causal = nn.Linear(hidden, stream.width), causal
        noise = stream.of["noise"]
        for layer in (self.q, self.k, self.v, self.up):
            layer.weight.data[:, : noise.start] = 0.0
        for layer in (self.o, self.down):
            layer.weight.data[: noise.start] = 0.0
            layer.bias.data[: noise.start] = 0.0
        self.clear(0)

    def clear(self, head: int) -> None:
        """Let a head read and write nothing."""
        own = slice(HEAD * head, HEAD * (head + 1))
        for layer in (self.q, self.k, self.v):
            layer.weight.data[own], layer.bias.data[own] = 0.0, 0.0
        self.o.weight.data[:, own] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=1.0)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Compiled(nn.Module):
    """A program; ``known`` are its edges, and ``counts`` says at which positions of a text its output is defined."""

    known: ClassVar[set[tuple[str, str]]]

    def __init__(self, stream: Stream, hidden: tuple[int, int], causal: bool, outputs: slice) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, stream.width) for n in (WORDS, LENGTH))
        for layer, name in ((self.tokens, "token"), (self.positions, "position")):
            layer.weight.data.zero_()
            layer.weight.data[:, stream.of[name]] = torch.eye(len(layer.weight))
            layer.weight.data[:, stream.of["noise"]] = torch.randn(len(layer.weight), NOISE)
        self.layers = nn.ModuleList(Layer(stream, n, causal) for n in hidden)
        self.out = nn.Linear(stream.width, outputs.stop - outputs.start, bias=False)
        self.out.weight.data.zero_()
        self.out.weight.data[:, outputs] = torch.eye(len(self.out.weight))

    def forward(self, ids: Tensor) -> Tensor:
        """The output's entries at each position, shape ``(batch, LENGTH, n)``."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Reversal(Compiled):
    """The sequence of letters between the begin and the padding, in reverse.

    The first head finds 1 / (length + 1) as the share of the begin among what is no padding; the block makes the
    position to read of it and the own position; and a head of the second layer reads the token there.
    """

    known: ClassVar = {
        ("tokens", "a0.h0<k>"),
        ("tokens", "a0.h0<v>"),
        ("a0.h0", "m0"),
        ("positions", "m0"),
        ("m0", "a1.h0<q>"),
        ("positions", "a1.h0<k>"),
        ("tokens", "a1.h0<v>"),
        ("a1.h0", "output"),
    }

    def __init__(self) -> None:
        stream = Stream(token=WORDS, position=LENGTH, share=1, target=LENGTH, output=WORDS)
        pairs = [(n, i) for n in range(1, LENGTH) for i in range(1, n + 1)]
        super().__init__(stream, (3 * len(pairs), 4), causal=False, outputs=stream.of["output"])
        token, position, share, target, output = (stream.of[x].start for x in stream.of if x != "noise")
        first, second = self.layers
        first.q.bias.data[0] = HARD
        first.k.weight.data[0, token : token + WORDS] = torch.tensor([1.0, 0.0, *[1.0] * LETTERS])
        first.v.weight.data[0, token + BEGIN] = 1.0
        first.o.weight.data[share, 0] = 1.0
        first.up.weight.data.zero_()
        first.down.weight.data.zero_()
        for row, (n, i) in enumerate(pairs):  # a hat of height 1 at the share of n, where the position is i
            width = 1 / (n + 1) - 1 / (n + 2)
            for k, (shift, height) in enumerate(((-1, 1.0), (0, -2.0), (1, 1.0))):
                unit = 3 * row + k
                first.up.weight.data[unit, share] = 1 / width
                first.up.weight.data[unit, position + i] = HARD
                first.up.bias.data[unit] = -(1 / (n + 1)) / width - shift - HARD
                first.down.weight.data[target + n + 1 - i, unit] = height
        second.q.weight.data[:LENGTH, target : target + LENGTH] = HARD * torch.eye(LENGTH)
        second.k.weight.data[:LENGTH, position : position + LENGTH] = torch.eye(LENGTH)
        second.v.weight.data[:WORDS, token : token + WORDS] = torch.eye(WORDS)
        second.o.weight.data[output : output + WORDS, :WORDS] = torch.eye(WORDS)

    @staticmethod
    def counts(ids: Tensor) -> Tensor:
        """Where there are letters."""
        return ids > PAD


class Share(Compiled):
    """The share of the first letter among the tokens so far.

    The block marks the letter, and a head of the second layer averages the marks.
    """

    known: ClassVar = {("tokens", "m0"), ("m0", "a1.h0<v>"), ("a1.h0", "output")}

    def __init__(self) -> None:
        stream = Stream(token=WORDS, position=LENGTH, mark=1, output=1)
        super().__init__(stream, (4, 4), causal=True, outputs=stream.of["output"])
        token, _, mark, output = (stream.of[x].start for x in stream.of if x != "noise")
        first, second = self.layers
        first.up.weight.data[0], first.up.bias.data[0] = 0.0, 0.0
        first.up.weight.data[0, token + PAD + 1] = 1.0
        first.down.weight.data[:, 0] = 0.0
        first.down.weight.data[mark, 0] = 1.0
        second.v.weight.data[0, mark] = 1.0
        second.o.weight.data[output, 0] = 1.0

    @staticmethod
    def counts(ids: Tensor) -> Tensor:
        """Everywhere."""
        return torch.ones_like(ids, dtype=torch.bool)


def texts(number: int) -> Tensor:
    """The begin, from one to four letters and padding, shape ``(number, LENGTH)``."""
    letters = torch.randint(PAD + 1, WORDS, (number, LENGTH))
    letters[:, 0] = BEGIN
    return letters.where(torch.arange(LENGTH) <= torch.randint(1, LENGTH, (number, 1)), PAD)
