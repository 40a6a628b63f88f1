"""What the compiler makes of the GPU kernels, which needs no GPU: run by `test_triton_compile.py`, or by hand with
`TRITON_INTERPRET=0 python -m pytest tests/ops/compiled_triton.py`."""

import itertools
import re

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from benchmarks.kernel_compiled import PASSES, ROWS, Compilation, analyse, build, collected, disassembled, launches
from gattn import AdditiveScore, DotScore, GATScore, TopK, attend
from gattn.nn import GATv2Conv, TransformerConv
from gattn.ops.backends.dense import tiles
from gattn.ops.backends.dense.gpu_tiles import GPUCall
from gattn.ops.backends.triton import layout
from gattn.testing import random_edge_index
from tests.cases import KERNEL_SCORES, TERMS, make_call, mostly_slow
from tests.ops.test_tiles import Case

KERNELS = {*PASSES, "dot_rows", "combine", "add_partial"}
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What other versions left is not looked at."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "score", "dtype", "has_terms"),
    [
        (90, "dot", "bfloat16", True),
        pytest.param(80, "leaky_relu", "float32", True, marks=slow),
        pytest.param(90, "gat", "float32", True, marks=slow),
        pytest.param(80, "gat without query", "bfloat16", False, marks=slow),
        pytest.param(80, "dot", "float16", False, marks=slow),
        pytest.param(100, "leaky_relu", "bfloat16", False, marks=slow),
        pytest.param(90, "tanh", "float64", True, marks=slow),
        pytest.param(80, "tanh", "float16", False, marks=slow),
        pytest.param(90, "dot", "float64", False, marks=slow),
        *(pytest.param(80, score, "float32", True, marks=slow) for score in KERNEL_SCORES),
    ],
)
def test_all_kernels_compile(architecture, score, dtype, has_terms, monkeypatch):
    monkeypatch.setattr(layout, "LONG_ROW", 4)
    call = make_call(
        score,
        random_edge_index(9, 7, 60, hub=0.5),
        9,
        7,
        dtype=getattr(torch, dtype),
        heads=3,
        channels=24,
        value_channels=40,
        terms=TERMS if has_terms else (),
        mask=torch.rand(60, 3) < 0.8 if has_terms else None,
        batch=(2,) if has_terms else (),
        dropout=0.3 if has_terms else 0.0,
        weights=has_terms,
    )
    found = all_compiled(call, architecture)
    # Weights with gradients are summed by target, too.
    without = {"backward_by_target"} if score == "gat without query" and not has_terms else set()
    assert found == KERNELS - without


@pytest.mark.parametrize(
    ("architecture", "distribution", "kernel", "dtype"),
    [
        (90, "sparsemax", "subtract_threshold", "bfloat16"),
        (80, "top_k", "keep_largest", "float32"),
        pytest.param(100, "entmax15", "subtract_threshold", "float64", marks=slow),
        pytest.param(90, "top_k", "keep_largest", "float64", marks=slow),
    ],
)
def test_kernels_of_whole_rows_compile(architecture, distribution, kernel, dtype, monkeypatch):
    monkeypatch.setattr(layout, "LONG_ROW", 4)
    options = {"heads": 3, "channels": 24, "value_channels": 40, "terms": ("bias",), "distribution": distribution}
    call = make_call("dot", random_edge_index(9, 7, 60, hub=0.5), 9, 7, dtype=getattr(torch, dtype), **options)
    assert all_compiled(call, architecture) == {*KERNELS, kernel}


@pytest.mark.parametrize(
    ("architecture", "dtype", "cell"),
    mostly_slow(
        [
            (90, "bfloat16", ("softcap", "dot", (64, 64), (64, 64), "causal", "HNM", "NM", 2, 0.1, "dropped")),
            (80, "float32", ("sink of heads", "bounded", (64, 64), (64, 64), "window", "distances", None, 4)),
            (100, "float16", ("sigmoid", "dot", (64, 64), (64, 32), "causal", "listed", "BHNM", 2, 0.1)),
            (100, "bfloat16", ("normalized", "dot", (64, 64), (128, 128), "full", "buckets", None, 4)),
            (90, "float32", ("tanh", "dot", (64, 64), (24, 128), "lengths", "BM", None, 4, 0.0, True)),
        ],
        5,
    ),
)
def test_kernels_for_tiles_compile(architecture, dtype, cell, monkeypatch):
    """Without spilling more than a few registers."""
    monkeypatch.setitem(tiles.CALLS, "cpu", GPUCall)
    with collected() as found:
        Case(*cell).results(getattr(torch, dtype))
    has_weights = len(cell) > 9
    names = {"tiles_forward", "tiles_by_target", "tiles_by_source", *["tiles_weights"] * has_weights}
    assert {launch.kernel.__name__ for launch in found} == names
    for launch in found:
        binary = build(launch, architecture)
        assert f".target sm_{architecture}" in binary.asm["ptx"]
        usage, _ = disassembled(binary.asm["cubin"])
        assert int(re.findall(r"STACK:(\d+)", usage)[0]) <= 64, launch.kernel.__name__


def all_compiled(call, architecture):
    """Compiles every kernel that a call launches, and returns their names."""
    with collected() as found:
        call.results("triton")
    for launch in found:
        binary = build(launch, architecture)
        assert f".target sm_{architecture}" in binary.asm["ptx"]
        assert "atom." not in binary.asm["ptx"]
        assert binary.asm["cubin"]
    return {launch.kernel.__name__ for launch in found}


#: Heads and channels whose rows are loaded 16 bytes a thread, and others.
DENSE = [(8, 8), (4, 64), (3, 24), (8, 32), (1, 8), (2, 8), (16, 64), (1, 512)]
LOOSE = [(1, 7), (1, 40), (6, 121), (3, 3), (1, 17), (1, 1)]


@pytest.mark.parametrize("kernel", PASSES)
@pytest.mark.parametrize(
    ("layer", "width", "has_edges", "dtype"),
    [
        ("transformer", (3, 24), False, "float32"),
        ("gat", (8, 32), True, "bfloat16"),
        ("gatv2", (1, 7), True, "float32"),
        *(
            pytest.param(*case, marks=slow)
            for case in itertools.product(
                ("gat", "gatv2", "transformer"), [*DENSE, *LOOSE], (False, True), ("float32", "bfloat16")
            )
        ),
    ],
)
def test_the_loop_over_edges(layer, width, has_edges, dtype, kernel):
    """It has no barriers, loads dense rows as wide as it gets, and moves few bytes that it need not."""
    case = Compilation(layer, *width, has_edges, dtype, 90, kernel)
    (launch,) = (launch for launch in launches(case) if launch.kernel.__name__ == kernel)
    found = analyse(case, launch)
    assert found["spilled_bytes"] == 0
    assert found["barriers"] == 0
    assert found["bytes"] <= 1.15 * found["least_bytes"]
    assert found["bytes"] >= 0.85 * found["least_bytes"]
    if width in DENSE and not (layer == "gat" and kernel == "backward_by_target"):
        is_padded = width == (3, 24)
        assert (" × 64" if is_padded and dtype == "bfloat16" else " × 128") in found["loads"]


@pytest.mark.parametrize("kernel", ROWS)
@pytest.mark.parametrize("width", [(8, 8), *(pytest.param(width, marks=slow) for width in ((1, 8), (3, 24), (64, 8)))])
def test_the_loop_of_kernels_of_whole_rows(width, kernel):
    case = Compilation("gat", *width, False, "float32", 90, kernel)
    (launch,) = (launch for launch in launches(case) if launch.kernel.__name__ == kernel)
    found = analyse(case, launch)
    assert found["spilled_bytes"] == 0
    assert found["barriers"] <= 1  # the edges' numbers change threads, within a warp
    assert found["bytes"] <= 1.15 * found["least_bytes"]
    assert found["bytes"] >= 0.85 * found["least_bytes"]


def variants(launches):
    """How many variants of each kernel Triton would compile for launches, by its own rules."""
    backend, seen = make_backend(GPUTarget("cuda", 90, 32)), {}
    for kernel, _, warps, arguments in launches:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, _ = bind(**arguments)
        name = kernel.__name__, arguments.get("WIDTH")  # that of keys and that of values
        seen.setdefault(name, set()).add((str(specialization), warps))
    return {name: len(keys) for name, keys in seen.items()}


def minibatches(call, count=200):
    """What random minibatches of all sizes launch, one node and no edges included."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1, 0), (1, 1, 1), (2, 1, 2), (16, 16, 16), (300, 200, 3000)]
    with collected() as found:
        for step in range(count):
            draw = torch.randint(1, 70, (3,), generator=generator).tolist()
            sources, targets, edges = sizes[step] if step < len(sizes) else draw
            sources = max(sources, targets)
            call(sources, targets, random_edge_index(sources, targets, edges, hub=0.5 * (step % 2)))
    return found


def of_layer(conv, has_edges):
    def call(sources, targets, edges):
        x = torch.randn(sources, 8)
        features = {"edge_attr": torch.randn(edges.size(1), 3)} if has_edges else {}
        conv((x, x[:targets]), edges, **features).sum().backward()

    return call


def of_sequences(sources, targets, edges):
    """Views of one projection, the batch first or second; number and size of the graphs differ."""
    batch = 1 + sources % 5
    fused = torch.randn(sources, batch, 3, 2, 24, requires_grad=True).transpose(0, 1)
    query, key, value = fused.unbind(2)
    bias = torch.randn(batch, edges.size(1), 2, requires_grad=True)
    options = {"dropout": min(0.9, 0.01 * sources), "training": True, "backend": "triton"}
    out = attend(query[:, :targets], key, value, edges, bias=bias, **options)
    out.sum().backward()


def of_gat_terms(sources, targets, edges):
    key, value = torch.randn(sources, 3, requires_grad=True), torch.randn(sources, 3, 5, requires_grad=True)
    attend(key[:targets], key, value, edges, score=GATScore(), backend="triton").sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        of_layer(GATv2Conv(8, 6, heads=3, edge_dim=3, add_self_loops=False), True),
        pytest.param(of_layer(TransformerConv(8, 8, heads=2), False), marks=slow),
        of_sequences,
        pytest.param(of_gat_terms, marks=slow),
    ],
    ids=["GATv2Conv", "TransformerConv", "sequences", "GAT's terms"],
)
def test_minibatches_compile_nothing_anew(call):
    import gattn

    with gattn.backend("triton"):
        found = minibatches(call)
    counts = variants(found)
    assert {name for name, _ in counts} == KERNELS
    assert set(counts.values()) == {1}, counts


def test_sizes_are_not_compiled_in():
    """Every argument that is no tensor and no constant is one that Triton does not specialize on."""
    for score, distribution in (
        (DotScore(), "sparsemax"),
        (DotScore(), TopK(2)),
        (AdditiveScore(torch.ones(2, 4)), "softmax"),
    ):
        x = torch.randn(5, 2, 4, requires_grad=True)
        options = {"score": score, "distribution": distribution, "backend": "triton"}
        with collected() as found:
            attend(x, x, x, random_edge_index(5, 5, 9), **options).sum().backward()
        for launch in found:
            for parameter in launch.kernel.params:
                value = launch.arguments[parameter.name]
                if isinstance(value, int) and not parameter.is_constexpr:
                    assert parameter.do_not_specialize, (launch.kernel.__name__, parameter.name)
