"""Recurrent networks: torch's layers and cells, with gates behind them and elsewhere, and cells written out."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pyro_l0.nn import L0Gate, insert_gates
from tests.engine.zoo.entry import Entry


class Tagger(nn.Module):
    """Words, an LSTM in both directions, a label for each word."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.word_gate = L0Gate(8)
        self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.gate = L0Gate(12)
        self.hidden = nn.Linear(12, 10)
        self.hidden_gate = L0Gate(10)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens):
        states, _ = self.lstm(self.word_gate(self.words(tokens)))
        return self.head(self.hidden_gate(F.relu(self.hidden(self.gate(states)))))


class PackedLayers(nn.Module):
    """Two layers in both directions on sequences of two lengths, whose last state is the first one of others."""

    def __init__(self):
        super().__init__()
        self.first = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.second, self.head = nn.LSTM(12, 6, 2, bidirectional=True, bias=False), nn.Linear(12, 2)

    def forward(self, x):
        lengths = torch.tensor([3] + [x.shape[1]] * (len(x) - 1))
        states, last = self.first(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        states, _ = pad_packed_sequence(states)
        return self.head(torch.relu(self.second(states, last)[0][-1]))


class Cells(nn.Module):
    """Cells in a loop, of which the states of one are the inputs of the next."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(4, 8), nn.GRUCell(8, 6, bias=False), nn.RNNCell(6, 10)
        self.size, self.head = 6, nn.Linear(10, 2)

    def forward(self, x):
        first, second, third = None, x.new_zeros(len(x), self.size), None
        for step in x.unbind(1):
            first = self.lstm(step, first)
            second = self.gru(first[0], second)
            third = self.rnn(second, third)
        return self.head(third)


def _tokens(batch):
    return torch.randint(0, 20, (batch, 5))


def _steps(batch):
    return torch.randn(batch, 5, 4)


ENTRIES = {
    "tagger": Entry(
        Tagger, _tokens, shapes={"lstm.weight_hh_l0": (24, 6), "words.weight": (20, 4), "hidden.weight": (5, 6)},
    ),
    "packed_layers": Entry(
        lambda: insert_gates(PackedLayers(), {"first": L0Gate(6), "second": L0Gate(6)}), _steps,
        shapes={"first.weight_hh_l1": (12, 3), "second.weight_ih_l0_reverse": (12, 6), "head.weight": (2, 6)},
    ),
    "cells": Entry(
        lambda: insert_gates(Cells(), {"lstm": L0Gate(8), "gru": L0Gate(6), "rnn": L0Gate(10)}), _steps,
        shapes={"lstm.weight_ih": (16, 4), "gru.weight_hh": (9, 3), "rnn.weight_ih": (5, 3)},
    ),
}  # fmt: skip
