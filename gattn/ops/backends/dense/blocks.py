"""Dot products on graphs of blocks, by the CPU kernels for tiles of pairs, which visit the listed tiles alone."""

from __future__ import annotations

from typing import cast

import torch

from gattn.autocast import is_autocast
from gattn.errors import InputError
from gattn.graphs.block_lists import BlockGraph
from gattn.ops.backends.dense import tiles
from gattn.ops.backends.dense.dot_products import is_for_tiles, rule_of, with_one_batch
from gattn.ops.backends.dense.tile_rules import elements_for_tiles
from gattn.ops.call import Call, Result
from gattn.ops.operator import sink_of
from gattn.torch_private import is_traced

__all__ = ["attend", "refuses"]


def refuses(call: Call) -> str | None:
    """Why `attend` cannot be called, as the end of a sentence."""
    graph = cast(BlockGraph, call.graph)
    if any(x is not None for x in (call.edge, call.edge_value, call.bias, call.mask)):
        return "edge, edge_value, bias and mask have one entry per edge"
    if call.weights:
        return "weights are returned for each edge"
    if is_traced():
        return "compiled code has no tiles of blocks"
    if call.value.device.type != "cpu" or call.query is None or not is_for_tiles(call) or is_autocast(call.value):
        return "it computes dot products with a softmax or a gate on CPUs"
    if graph.has_heads and graph.tiles.size(-3) not in (1, call.heads):
        raise InputError(f"{graph} has blocks of {graph.tiles.size(-3)} heads; the call has {call.heads}.")
    law = call.law
    assert law is not None
    return tiles.refuses((call.query, call.key, call.value, None, None, sink_of(law.sink, call)), law)


def attend(call: Call, front: torch.Size) -> Result:
    """The output and the log-sum-exp, of a call with one batch dimension, whose score is folded.

    Args:
        call: The call.
        front: The batch dimensions that it had.
    """
    graph, query, key, law = cast(BlockGraph, call.graph), call.query, call.key, call.law
    assert query is not None
    assert law is not None
    sizes = key.size(0), query.size(1), key.size(1), query.size(2)
    elements, _ = elements_for_tiles(None, None, sizes, graph.offset)
    rule = rule_of(call, None, 0 if graph.causal else None)._replace(elements=elements, block=graph.block)
    of_blocks = with_one_batch(graph.tiles, front)
    out, log_sum, _ = tiles.attend(
        query, key, call.value, None, of_blocks, sink_of(law.sink, call), rule, holes=graph.holes
    )
    return Result(out, None, log_sum if call.log_sum else None)
