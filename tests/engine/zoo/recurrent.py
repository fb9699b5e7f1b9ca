"""Recurrent networks: torch's layers, which stay whole, and cells written out."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import Gate
from tests.engine.zoo.entry import Entry


class Tagger(nn.Module):
    """Words, an LSTM in both directions, a label for each word."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.word_gate = Gate(8)
        self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.gate = Gate(12)
        self.hidden = nn.Linear(12, 10)
        self.hidden_gate = Gate(10)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens):
        states, _ = self.lstm(self.word_gate(self.words(tokens)))
        return self.head(self.hidden_gate(F.relu(self.hidden(self.gate(states)))))


class LastState(nn.Module):
    """The last state of one layer, the inputs of a second one gated in between."""

    def __init__(self):
        super().__init__()
        self.first = nn.GRU(4, 8, batch_first=True)
        self.between = Gate(8)
        self.second = nn.LSTM(8, 6, batch_first=True)
        self.gate = Gate(6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        states, _ = self.first(x)
        _, (last, _) = self.second(self.between(states))
        return self.head(self.gate(last[0]))


class HandwrittenCell(nn.Module):
    """A recurrence in a Python loop; the gate of the state is called at every step."""

    def __init__(self, size=10):
        super().__init__()
        self.read = nn.Linear(4, size)
        self.state = nn.Linear(size, size, bias=False)
        self.gate = Gate(size)
        self.head = nn.Linear(size, 2)

    def forward(self, x):
        state = x.new_zeros(len(x), self.state.in_features)
        for step in x.unbind(1):
            state = self.gate(torch.tanh(self.read(step) + self.state(state)))
        return self.head(state)


def _tokens(batch):
    return torch.randint(0, 20, (batch, 5))


def _steps(batch):
    return torch.randn(batch, 5, 4)


ENTRIES = {
    "tagger": Entry(
        Tagger, _tokens, shapes={"lstm.weight_hh_l0": (24, 6), "words.weight": (20, 4), "hidden.weight": (5, 6)},
    ),
    "last_state": Entry(
        LastState, _steps, shapes={"first.weight_ih_l0": (24, 4), "head.weight": (2, 3)},
        stays={"between": (4, "both sides are recurrent layers")},
    ),
    "handwritten_cell": Entry(HandwrittenCell, _steps, shapes={"read.weight": (5, 4), "state.weight": (5, 5)}),
}  # fmt: skip
