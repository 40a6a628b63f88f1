"""Attention as message passing, for PyTorch and PyTorch Geometric.

`gattn.attend(query, key, value, graph, score=..., distribution=...)` computes attention over any graph; `gattn.weigh`
and `gattn.aggregate` are its two halves. Its choices are independent of each other:

- *graph*, who attends to whom: a `CompleteGraph` (a sequence), a `SparseGraph` or a bare `edge_index`, a `TypedGraph`;
- *score*, how two nodes compare: `DotScore`, `AdditiveScore`, `GATScore`, `CosineScore`, or a `Score` of your own;
- *distribution*, how scores become weights: `Softmax`, `Sparsemax`, `Entmax15`, `TopK`, `Hard`, `LocalGaussian`,
  `WithinTypes`, the gates `Sigmoid`, `Tanh` and `Identity`, or a `Distribution` of your own.

A bias is a tensor, or one that needs no tensor of all pairs (`SparseBias`, `BucketBias`, `PairBias`, or your own), and
`merge` joins attention over several graphs.

The rest of the package:

- `gattn.nn`: layers with the arguments and parameters of PyG's and `torch.nn`'s, attention in recurrent networks,
  pooling, and positional encodings;
- `gattn.models`: whole networks, such as `GAT`, `Seq2Seq` and `TransformerLM`;
- `gattn.datasets`: data sets by name, and `gattn.transforms`, which reorders their nodes for the cache;
- `record_attention` collects the weights of a whole model, `gattn.visualize` draws them, and `gattn.explain` provides
  attention as an algorithm for PyG's explainers;
- `backend` chooses the backend that computes, `explain_call` says which one does, and `check_finite` looks for NaN in
  inputs;
- `gattn.features`: feature maps, with which attention takes linear time;
- `gattn.convert`: checkpoints of authors' programs, for these layers and models;
- `gattn.lora`: low-rank adapters for all of them, by `peft`;
- `gattn.distributed`: graphs that are split among processes;
- `gattn.testing`: comparisons and invariance checks for tests.

Example:
    >>> import torch, gattn
    >>> query, key, value = torch.randn(3, 4, 2, 8).unbind()  # 4 nodes, 2 heads, 8 channels
    >>> gattn.attend(query, key, value, torch.tensor([[0, 1, 2], [1, 2, 3]])).shape  # over three edges
    torch.Size([4, 2, 8])
    >>> gattn.attend(query, key, value, gattn.CompleteGraph(4, causal=True)).shape  # over everything earlier
    torch.Size([4, 2, 8])
"""

from importlib import import_module
from types import ModuleType

from gattn import datasets, models, nn
from gattn.attention import Attention, aggregate, attend, merge, weigh
from gattn.bias import Bias, BucketBias, SparseBias
from gattn.calls import explain_call
from gattn.distributions import (
    Distribution,
    Entmax15,
    Gate,
    Hard,
    Identity,
    LocalGaussian,
    Sigmoid,
    Softmax,
    Sparsemax,
    Tanh,
    TopK,
    WithinTypes,
    softmax,
)
from gattn.edges import Projected, Typed
from gattn.graphs import CompleteGraph, SparseGraph, TypedGraph
from gattn.nn.shared.dropout import dropout
from gattn.ops.choose import backend
from gattn.pair_bias import LinearPairBias, PairBias
from gattn.recording import record_attention
from gattn.scores import AdditiveScore, CosineScore, DotScore, GATScore, Score
from gattn.settings import check_finite

__version__ = "0.2.0"

__all__ = [
    "AdditiveScore",
    "Attention",
    "Bias",
    "BucketBias",
    "CompleteGraph",
    "CosineScore",
    "Distribution",
    "DotScore",
    "Entmax15",
    "GATScore",
    "Gate",
    "Hard",
    "Identity",
    "LinearPairBias",
    "LocalGaussian",
    "PairBias",
    "Projected",
    "Score",
    "Sigmoid",
    "Softmax",
    "SparseBias",
    "SparseGraph",
    "Sparsemax",
    "Tanh",
    "TopK",
    "Typed",
    "TypedGraph",
    "WithinTypes",
    "aggregate",
    "attend",
    "backend",
    "check_finite",
    "datasets",
    "dropout",
    "explain_call",
    "merge",
    "models",
    "nn",
    "record_attention",
    "softmax",
    "weigh",
]


#: Modules that are imported when they are first used, since they need what nothing else does, such as matplotlib.
_LATE = ("convert", "distributed", "explain", "features", "lora", "testing", "transforms", "visualize")


def __getattr__(name: str) -> ModuleType:
    if name in _LATE:
        return import_module(f"gattn.{name}")
    raise AttributeError(f"module 'gattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
