"""Recurrent networks: torch's layers and cells, with gates behind them and elsewhere, and cells written out."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pyro_l0.nn import L0Gate, insert_gates
from tests.engine.zoo.entry import Entry, normal
from tests.networks import Dense, Net


def tagger():
    """Words, an LSTM in both directions, a label for each word."""

    def forward(net, tokens):
        states, _ = net.lstm(net.word_gate(net.words(tokens)))
        return net.head(net.hidden_gate(F.relu(net.hidden(net.gate(states)))))

    read = {"words": nn.Embedding(20, 8), "lstm": nn.LSTM(8, 6, batch_first=True, bidirectional=True)}
    return Dense(forward, word_gate=8, gate=12, hidden=(12, 10), hidden_gate=10, head=(10, 3), **read)


def packed_layers():
    """Two layers in both directions on sequences of two lengths, whose last state is the first one of others."""

    def forward(net, x):
        lengths = torch.tensor([3] + [x.shape[1]] * (len(x) - 1))
        states, last = net.first(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        states, _ = pad_packed_sequence(states)
        return net.head(torch.relu(net.second(states, last)[0][-1]))

    first = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True, dropout=0.2)
    network = Dense(forward, first=first, second=nn.LSTM(12, 6, 2, bidirectional=True, bias=False), head=(12, 2))
    return insert_gates(network, {"first": L0Gate(6), "second": L0Gate(6)})


def cells():
    """Cells in a loop, of which the states of one are the inputs of the next."""

    def forward(net, x):
        first, second, third = None, x.new_zeros(len(x), net.size), None
        for step in x.unbind(1):
            first = net.lstm(step, first)
            second = net.gru(first[0], second)
            third = net.rnn(second, third)
        return net.head(third)

    layers = {"lstm": nn.LSTMCell(4, 8), "gru": nn.GRUCell(8, 6, bias=False), "rnn": nn.RNNCell(6, 10)}
    network = Net(forward, size=6, head=nn.Linear(10, 2), **layers)
    return insert_gates(network, {"lstm": L0Gate(8), "gru": L0Gate(6), "rnn": L0Gate(10)})


def _tokens(batch):
    return torch.randint(0, 20, (batch, 5))


ENTRIES = {
    "tagger": Entry(
        tagger, _tokens, shapes={"lstm.weight_hh_l0": (24, 6), "words.weight": (20, 4), "hidden.weight": (5, 6)},
    ),
    "packed_layers": Entry(
        packed_layers, normal(5, 4),
        shapes={"first.weight_hh_l1": (12, 3), "second.weight_ih_l0_reverse": (12, 6), "head.weight": (2, 6)},
    ),
    "cells": Entry(
        cells, normal(5, 4), shapes={"lstm.weight_ih": (16, 4), "gru.weight_hh": (9, 3), "rnn.weight_ih": (5, 3)},
    ),
}  # fmt: skip
