"""gattn: all attention is message passing."""

from importlib import import_module
from types import ModuleType

from gattn import datasets, models, nn
from gattn.attention import Attention, attend
from gattn.distributions import Distribution, Gate, Hard, Identity, LocalGaussian, Sigmoid, Softmax, Tanh, softmax
from gattn.graphs import CompleteGraph, SparseGraph
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
    "GATScore",
    "Gate",
    "Hard",
    "Identity",
    "LocalGaussian",
    "Score",
    "Sigmoid",
    "Softmax",
    "SparseGraph",
    "Tanh",
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
    if name == "visualize":  # needs matplotlib, which nobody else does
        return import_module("gattn.visualize")
    raise AttributeError(f"module 'gattn' has no attribute {name!r}")
