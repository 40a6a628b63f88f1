"""Attention on distributed tensors that are split by heads, on two ranks: what one process computes."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import gattn
from gattn import CompleteGraph, DotScore, Identity
from gattn.ops.backends.triton import Triton
from gattn.testing import random_edge_index
from tests.cases import SCORES, make_call
from tests.layers import tensors

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo here")

RANKS = 2


def compare(mesh, score, backend, heads=4, key_heads=None, plain=("edge_value",), **more):
    """Outputs, weights and gradients, of tensors that are split by heads and of some that are on all ranks."""
    torch.manual_seed(0)
    options = {"heads": heads, "channels": 3, "value_channels": 5, "terms": ("edge", "bias", "edge_value"), **more}
    if key_heads is not None:
        options["key_heads"] = key_heads
    call = make_call(score, random_edge_index(7, 6, 30, hub=0.4), 7, 6, **options)
    found = []
    for is_split in (False, True):
        leaves = {}
        for name, tensor in call.tensors.items():
            if is_split and name not in plain:
                tensor = distribute_tensor(tensor, mesh, [Shard(0 if name == "vector" else 1)])
            leaves[name] = tensor.detach().requires_grad_()
        results = [x for x in call.attend(leaves, backend) if x is not None]
        if is_split:
            assert all(isinstance(x, DTensor) and x.placements[0].is_shard() for x in results)
        grads = torch.autograd.grad([x.square().sum() for x in results], list(leaves.values()))
        found.append([x.full_tensor() if isinstance(x, DTensor) else x for x in (*results, *grads)])
    torch.testing.assert_close(*found)


#: Graphs of seven nodes without a list of edges, and options of calls.
COMPLETE = (
    (CompleteGraph(7), {}),
    (CompleteGraph(7, causal=True), {"return_lse": True}),
    (CompleteGraph(7, window=2), {"return_weights": True}),
    (CompleteGraph(7, source_lengths=torch.tensor([2, 5])), {}),
    (CompleteGraph(7), {"mask": torch.arange(49).view(7, 7) % 3 > 0, "distribution": gattn.Sparsemax()}),
    (CompleteGraph(40, causal=True), {"score": DotScore(1.0), "distribution": Identity()}),
    (CompleteGraph(7), {"key_heads": 2}),
)


def compare_complete(mesh, graph, options):
    """Outputs, weights and gradients of training on complete graphs."""
    heads = options.get("key_heads", 4)
    options = {name: option for name, option in options.items() if name != "key_heads"}
    inputs = [torch.randn(2, graph.num_targets, number, 3) for number in (4, heads, heads)]
    found = []
    for is_split in (False, True):
        leaves = [distribute_tensor(x, mesh, [Shard(2)]) if is_split else x for x in inputs]
        leaves = [x.detach().requires_grad_() for x in leaves]
        results = tensors(gattn.attend(*leaves, graph, **options))
        grads = torch.autograd.grad([x.square().sum() for x in results], leaves)
        found.append([x.full_tensor() if is_split else x for x in (*results, *grads)])
    torch.testing.assert_close(*found)


def work(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        for score in SCORES:
            compare(mesh, score, "cpu")
        compare(mesh, "dot", "cpu", heads=3)  # one rank has two heads
        compare(mesh, "dot", "cpu", key_heads=2)
        compare(mesh, "leaky_relu", "cpu", terms=(), weights=False)
        compare(mesh, "leaky_relu", "cpu", terms=("edge",), projected=2)
        compare(mesh, "dot", "cpu", terms=("edge",), projected=2, plain=("edge", "query"))
        if Triton().serves(torch.device("cpu")):
            compare(mesh, "dot", "triton")
        x = torch.randn(7, 4, 3)
        edges = random_edge_index(7, 7, 20)
        whole = gattn.attend(*[distribute_tensor(x, mesh, [Replicate()])] * 3, edges)
        torch.testing.assert_close(whole.full_tensor(), gattn.attend(x, x, x, edges))
        by_nodes = distribute_tensor(x, mesh, [Shard(0)])
        with pytest.raises(ValueError, match="attention on distributed tensors is computed by heads"):
            gattn.attend(by_nodes, by_nodes, by_nodes, edges)
        one = distribute_tensor(x[:, :1], mesh, [Shard(1)])
        for graph in (edges, CompleteGraph(7)):
            with pytest.raises(ValueError, match="each rank needs a head"):
                gattn.attend(one, one, one, graph)
        query, key = (distribute_tensor(torch.randn(7, number, 3), mesh, [Shard(1)]) for number in (6, 3))
        with pytest.raises(ValueError, match="6 heads share 3 heads of keys and values, which 2 ranks cannot"):
            gattn.attend(query, key, key, edges)
        for case in COMPLETE:
            compare_complete(mesh, *case)
        for options in ({"bias": torch.zeros(7, 7)}, {"score": gattn.AdditiveScore(torch.zeros(6, 3))}):
            with pytest.raises(ValueError, match="on complete graphs, distributed tensors are split by heads without"):
                gattn.attend(query, query, query, CompleteGraph(7), **options)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_by_heads(tmp_path):
    mp.spawn(work, args=(tmp_path / "store",), nprocs=RANKS)
