"""gattn: all attention is message passing."""

from importlib import import_module
from types import ModuleType

from gattn import datasets, models, nn
from gattn.attention import Attention, attend
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
from gattn.graphs import CompleteGraph, SparseGraph, TypedGraph
from gattn.recording import record_attention
from gattn.scores import AdditiveScore, CosineScore, DotScore, GATScore, Score
from gattn.settings import backend, check_finite

__version__ = "0.1.0"

__all__ = [
    "AdditiveScore",
    "Attention",
    "CompleteGraph",
    "CosineScore",
    "Distribution",
    "DotScore",
    "Entmax15",
    "GATScore",
    "Gate",
    "Hard",
    "Identity",
    "LocalGaussian",
    "Score",
    "Sigmoid",
    "Softmax",
    "SparseGraph",
    "Sparsemax",
    "Tanh",
    "TopK",
    "TypedGraph",
    "WithinTypes",
    "attend",
    "backend",
    "check_finite",
    "datasets",
    "models",
    "nn",
    "record_attention",
    "softmax",
]


def __getattr__(name: str) -> ModuleType:
    if name in ("distributed", "explain", "visualize"):  # which need what nobody else does, such as matplotlib
        return import_module(f"gattn.{name}")
    raise AttributeError(f"module 'gattn' has no attribute {name!r}")
