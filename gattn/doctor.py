"""The doctor, `python -m gattn`: says what is installed, and compares every backend with plain PyTorch."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
import torch_geometric.nn
from torch import Tensor

import gattn
from gattn import features, products
from gattn.datasets.loading import data_root
from gattn.errors import BackendError
from gattn.ops.backends import BACKENDS, Backend
from gattn.ops.backends.cpu import native
from gattn.processor import processor
from gattn.testing import assert_as_exact_as, random_edge_index

__all__ = ["TESTED", "checks", "environment", "main", "speed"]

#: The versions that `.ci/run` tests, the oldest and the newest among them.
TESTED = {
    "Python": ("3.11", "3.13"),
    "PyTorch": ("2.11.0", "2.13.0", "2.14.1"),
    "torch-geometric": ("2.7", "2.8.1"),
    "triton": ("3.6.0", "3.7.1", "3.8.0"),  # in the order of PyTorch
}
_PACKAGES = ("torch-geometric", "triton", "torch-scatter", "torch-sparse", "pyg-lib", "numpy", "scipy")
_VARIABLES = ("OMP_NUM_THREADS", "GATTN_KERNELS", "GATTN_INSTRUCTION_SET", "GATTN_DATA", "GATTN_TORCH", "LD_PRELOAD")
_TARGETS, _EDGES, _HEADS, _CHANNELS, _TYPES = 40, 400, 2, 8, 3


def environment() -> list[tuple[str, str]]:
    """What is installed on this machine, as pairs of a name and a text."""
    found = [
        ("gattn", gattn.__version__),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("PyTorch", torch.__version__),
        *((name, _version(name)) for name in _PACKAGES),
        ("processor", f"{processor()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"),
    ]
    if error := native.load_error():
        kernels = f"none: {error}"
    else:
        kernels = f"{native.library().gattn_instruction_set().decode()}, {native.library()._name}"
    found.append(("CPU kernels", kernels))
    found.append(("products", products.rule()))
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found.append(("GPUs", ", ".join(devices) or "none"))
    found += [(name, os.environ[name]) for name in os.environ if name in _VARIABLES or name.startswith("MALLOC_")]
    found.append(("data", str(data_root())))
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


class Check(NamedTuple):
    """The results of one call on one backend."""

    backend: str
    device: str
    name: str
    dtype: torch.dtype
    error: str | None
    """What is wrong with them; `None` if nothing is."""


class _Case(NamedTuple):
    """A call of `gattn.attend` with inputs in double precision."""

    name: str
    graph: Any
    tensors: dict[str, Tensor]
    """What gets a gradient."""
    call: Callable[..., Tensor]
    """Takes the tensors and the graph; further arguments go to `gattn.attend`."""


def _cases() -> Iterator[_Case]:
    """Calls with all scores, distributions, terms and kinds of graphs, but not with all combinations of them."""
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.double)

    edges = random_edge_index(_TARGETS, num_edges=_EDGES, hub=0.3)
    listed = gattn.SparseGraph(edges, _TARGETS, _TARGETS)
    complete = gattn.CompleteGraph(_TARGETS)
    graphs = {
        "edges": listed,
        "all pairs": complete,
        "causal": gattn.CompleteGraph(_TARGETS, causal=True),
        "window": gattn.CompleteGraph(_TARGETS, window=(3, 2)),
        "packed": gattn.CompleteGraph.packed([25, 1, 14]),
        "a hub": gattn.SparseGraph(random_edge_index(_TARGETS, num_edges=50 * _EDGES, hub=0.5), _TARGETS, _TARGETS),
    }
    wide = dict.fromkeys(("query", "key", "value"), (_TARGETS, _HEADS, _CHANNELS))
    scalar: dict[str, tuple[int, ...]] = {**wide, "query": (_TARGETS, _HEADS), "key": (_TARGETS, _HEADS)}

    def attend(score: Any = None, **options: Any) -> Callable[..., Tensor]:
        def call(graph: Any, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
            made = score(more.pop("vector")) if "vector" in more else score
            out: Tensor = gattn.attend(query, key, value, graph, score=made, **options, **more)
            return out

        return call

    def case(name: str, graph: str, sizes: Mapping[str, tuple[int, ...]], call: Callable[..., Tensor]) -> _Case:
        return _Case(f"{name}, {graph}", graphs[graph], {key: randn(*size) for key, size in sizes.items()}, call)

    vector: dict[str, tuple[int, ...]] = {"vector": (_HEADS, _CHANNELS)}
    for graph in graphs:
        yield case("dot products", graph, wide, attend(gattn.DotScore()))
        yield case("GAT", graph, scalar, attend(gattn.GATScore()))
    for graph in ("edges", "a hub"):
        yield case("returned weights", graph, wide, _weights)
    sink = gattn.Softmax(sink=0.0)
    yield case("a sink", "a hub", wide, attend(gattn.DotScore(), distribution=sink))
    per_channel = _TARGETS, 32
    channels: dict[str, tuple[int, ...]] = {"query": per_channel, "key": per_channel, "value": (*per_channel, 1)}
    for law in ("softmax", "sigmoid"):
        yield case(f"{law} of channels", "edges", channels, attend(gattn.GATScore(), distribution=law))
    for graph in ("edges", "all pairs"):
        for activation in ("leaky_relu", "tanh", "relu", "elu", "gelu", "silu", "identity"):
            score = _additive(activation)
            yield case(f"additive with {activation}", graph, wide | vector, attend(score))
        yield case("cosines", graph, wide, attend(gattn.CosineScore(2.0)))
        for distribution in (
            sink,
            gattn.Softmax(softcap=3.0),
            "sigmoid",
            "tanh",
            "identity",
            "sparsemax",
            "entmax15",
            gattn.TopK(3),
        ):
            yield case(str(distribution), graph, wide, attend(gattn.DotScore(), distribution=distribution))
        yield case("linear attention", graph, wide, _linear)
    vectors = (_EDGES, _HEADS, _CHANNELS)
    terms: dict[str, tuple[tuple[int, ...], Any]] = {
        "edge vectors": (vectors, lambda term: {"edge": term, "edge_value": True}),
        "edge values": (vectors, lambda term: {"edge_value": term}),
        "biases": ((_EDGES, _HEADS), lambda term: {"bias": term}),
        "projected edges": (
            (_HEADS, _CHANNELS, 5),
            lambda term: {"edge": gattn.Projected(_fixed(_EDGES, 5).to(term), term)},
        ),
        "typed edges": (
            (_TYPES, _HEADS, _CHANNELS),
            lambda term: {"edge": gattn.Typed(term, (torch.arange(_EDGES) % _TYPES).to(term.device))},
        ),
        "masks": ((1,), lambda term: {"mask": (torch.arange(_EDGES) % 4 > 0).to(term.device)}),
        "gates of edges": (vectors, lambda term: {"edge": term, "score": gattn.DotScore(edge="multiply", clamp=2.0)}),
    }
    for name, (size, options) in terms.items():
        yield case(name, "edges", wide | {"term": size}, _with_term(options))


def _additive(activation: str) -> Callable[[Tensor], Any]:
    return lambda vector: gattn.AdditiveScore(vector, activation)


def _linear(graph: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    positive = features.elu1(query), features.elu1(key)
    law = gattn.Identity(normalize=True)
    out: Tensor = gattn.attend(*positive, value, graph, score=gattn.DotScore(1.0), distribution=law, **options)
    return out


def _weights(graph: gattn.SparseGraph, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    out, weights = gattn.attend(query, key, value, graph, return_weights=True, **options)
    assert isinstance(weights, Tensor)
    return torch.cat([out.flatten(), weights.flatten()])


def _with_term(options: Callable[[Tensor], dict[str, Any]]) -> Callable[..., Tensor]:
    def call(graph: Any, query: Tensor, key: Tensor, value: Tensor, term: Tensor, **more: Any) -> Tensor:
        out: Tensor = gattn.attend(query, key, value, graph, **options(term), **more)
        return out

    return call


def _fixed(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.double)


def _results(case: _Case, dtype: torch.dtype, device: str, backend: str) -> list[Tensor]:
    """The output and the gradients, on the CPU."""
    leaves = {name: x.to(device, dtype).requires_grad_() for name, x in case.tensors.items()}
    graph = case.graph.to(device) if isinstance(case.graph, gattn.SparseGraph) else case.graph
    out = case.call(graph, **leaves, backend=backend)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.double).view(out.shape).to(out)
    found = torch.autograd.grad((out * weights).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return [x.detach().cpu() for x in (out, *found)]


def _problem(case: _Case, dtype: torch.dtype, device: str, backend: Backend, exact: list[Tensor]) -> str | None:
    """What is wrong with a backend's results."""
    names = ["the output", *(f"the gradient of {name}" for name in case.tensors)]
    try:
        found = _results(case, dtype, device, backend.name)
        peers = exact if dtype == torch.double else _results(case, dtype, device, "reference")
        scale = 64 * max(float(right.abs().max()) for right in exact)  # sums may be ordered otherwise, or cancel
        for name, actual, peer, right in zip(names, found, peers, exact, strict=True):
            assert_as_exact_as(actual, peer, right, factor=8.0, scale=scale, name=name)
    except BackendError:
        raise
    except AssertionError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def checks(devices: Sequence[str]) -> Iterator[Check]:
    """Compares each backend that is there with plain PyTorch, output and gradients, in float64 and float32.

    Args:
        devices: `"cpu"`, `"cuda"` or both.
    """
    cases = list(_cases())
    exact = [_results(case, torch.double, "cpu", "reference") for case in cases]
    for device in devices:
        for backend in BACKENDS:
            if backend.missing() is not None or (backend.devices is not None and device not in backend.devices):
                continue
            for case, right in zip(cases, exact, strict=True):
                for dtype in (torch.double, torch.float):
                    try:
                        error = _problem(case, dtype, device, backend, right)
                    except BackendError:  # another one computes it
                        continue
                    yield Check(backend.name, device, case.name, dtype, error)


def speed(device: str) -> Iterator[tuple[str, float]]:
    """How many times as long PyG's layers take, forward and backward, on a random graph of 150 000 edges.

    Args:
        device: `"cpu"` or `"cuda"`.
    """
    nodes = 10_000
    edges = torch.randint(nodes, (2, 15 * nodes), generator=torch.Generator().manual_seed(0)).to(device)
    x = torch.randn(nodes, 64, device=device)
    for name in ("GATConv", "GATv2Conv", "TransformerConv"):
        ours, theirs = (getattr(where, name)(64, 16, heads=8).to(device) for where in (gattn.nn, torch_geometric.nn))
        ratios = []
        for number in range(7):
            mine, peer = (_seconds(layer, x, edges) for layer in (ours, theirs))
            if number >= 2:
                ratios.append(peer / mine)
        yield name, statistics.median(ratios)


def _seconds(layer: Any, x: Tensor, edges: Tensor) -> float:
    started = time.perf_counter()
    layer(x, edges).sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the report; the exit status is 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m gattn", description=__doc__)
    parser.add_argument("--speed", action="store_true", help="also compare the speed of three layers with PyG's")
    options = parser.parse_args(arguments)
    for name, text in environment():
        tested = f" (tested: {', '.join(TESTED[name])})" if name in TESTED else ""
        print(f"{name:16} {text}{tested}")
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    counts: dict[tuple[str, str], int] = {}
    wrong = []
    print("\nComparing each backend with plain PyTorch ...", flush=True)
    for check in checks(devices):
        place = check.backend, check.device
        counts[place] = counts.get(place, 0) + 1
        if check.error is not None:
            wrong.append(check)
    for (backend, device), count in counts.items():
        bad = sum((check.backend, check.device) == (backend, device) for check in wrong)
        print(f"{backend:16} on {device}: {count - bad} of {count} results are right")
    for check in wrong:
        print(f"WRONG: {check.backend} on {check.device}, {check.name}, {check.dtype}: {check.error}")
    if options.speed:
        print("\nForward and backward, PyG's time over gattn's:")
        for device in devices:
            for name, ratio in speed(device):
                print(f"{name:16} on {device}: {ratio:.1f}")
    if wrong:
        print("\nPlease report this, with all of the above, as an issue.")
        sys.exit(1)
