"""What a type checker tells users of the public functions; `mypy` reads this file, pytest runs it."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

import gattn


def test_what_attend_returns() -> None:
    x, edge_index = torch.randn(4, 2, 3), torch.tensor([[0, 1], [1, 2]])
    assert_type(gattn.attend(x, x, x, edge_index), Tensor)
    out, weights = gattn.attend(x, x, x, edge_index, return_weights=True)
    assert_type(out, Tensor)
    assert_type(weights, Tensor | list[Tensor])
    assert_type(gattn.attend(x, x, x, gattn.CompleteGraph(4), return_weights=False), Tensor)
    _, dropped = gattn.attend(x, x, x, edge_index, dropout=0.5, training=True, return_weights="dropped")
    assert_type(dropped, Tensor | list[Tensor])


def test_what_graph_layers_return() -> None:
    x, edge_index = torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]])
    for layer in (gattn.nn.GATConv(3, 2), gattn.nn.GATv2Conv(3, 2), gattn.nn.TransformerConv(3, 2)):
        assert layer(x, edge_index).shape == (4, 2)
    assert_type(gattn.nn.GATConv(3, 2)(x, edge_index), Tensor)
    assert_type(gattn.nn.GATv2Conv(3, 2)(x, edge_index, return_attention_weights=True), tuple[Tensor, Any])
    assert_type(gattn.nn.TransformerConv(3, 2)(x, edge_index, return_attention_weights=False), Tensor)


def test_what_sequence_layers_return() -> None:
    x = torch.randn(2, 5, 4)
    layer = gattn.nn.MultiheadAttention(4, 2, batch_first=True)
    assert_type(layer.forward(x, x, x, need_weights=False)[0], Tensor)


def test_what_graphs_say() -> None:
    sparse, complete = gattn.SparseGraph(torch.tensor([[0], [1]]), 2, 2), gattn.CompleteGraph(3)
    assert_type(sparse.edge_index, Tensor)
    assert_type(complete.edge_index, Tensor)
    assert_type(complete.num_targets, int)
    assert_type(sparse.with_self_loops(), gattn.SparseGraph)
