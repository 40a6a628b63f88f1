"""Attention by tiles of pairs: every score, law, term, graph and option of these kernels, against the reference."""

import functools
import math

import pytest
import torch

from gattn import BucketBias, CompleteGraph, DotScore, Identity, Sigmoid, Softmax, SparseBias, Tanh, attend
from gattn.bias import DistanceBias
from gattn.ops.backends.cpu import native
from gattn.ops.backends.dense import tile_rules, tiles
from gattn.ops.backends.dense.gpu_tiles import GPUCall
from gattn.ops.backends.triton import forms as launcher
from gattn.ops.dropout import keep_mask_of_pairs
from gattn.testing import assert_as_exact_as
from tests.cases import mostly_slow, pairs
from tests.ops.bounds import check_bounds

pytestmark = [
    pytest.mark.skipif(
        native.load_error() is not None and torch.get_default_device().type == "cpu",
        reason="the CPU kernels are missing",
    ),
    # NumPy, of which Triton's interpreter is made, warns where a GPU's arithmetic goes on.
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning"
    ),
]

H = 4
LAWS = {
    "dropout": Softmax(),
    "softcap": Softmax(softcap=1.5),
    "sink": Softmax(sink=0.5),
    "sink of heads": Softmax(sink=torch.linspace(-1, 1, H).double()),
    "far sink": Softmax(sink=60.0),
    "both": Softmax(sink=-1.0, softcap=2.0),
    "sigmoid": Sigmoid(),
    "tanh": Tanh(),
    "identity": Identity(),
    "normalized": Sigmoid(normalize=True, eps=1e-6),
}
SCORES = {"dot": DotScore(), "bounded": DotScore(0.7, negative_slope=0.3, clamp=0.8)}
#: Targets, sources: at the edges of vectors, groups, tiles and blocks.
SIZES = [(1, 1), (1, 70), (3, 130), (5, 7), (12, 64), (13, 65), (48, 63), (49, 130), (97, 128), (200, 20)]
CHANNELS = [(1, 1), (3, 5), (8, 16), (33, 31)]
GRAPHS = {
    "full": lambda n, m: CompleteGraph(n, m),
    "causal": lambda n, m: CompleteGraph(n, m, causal=True),
    "window": lambda n, m: CompleteGraph(n, m, window=(9, 4)),
    "earlier": lambda n, m: CompleteGraph(n, m, causal=True, window=30),
    "lengths": lambda n, m: CompleteGraph(n, m, source_lengths=torch.tensor([m, m // 2])),
    "both lengths": lambda n, m: CompleteGraph(
        n, m, causal=True, source_lengths=torch.tensor([m // 3, m]), target_lengths=torch.tensor([n, n // 2])
    ),
}
#: Which dimensions of `[B, H, N, M]` a bias and a mask have.
TERMS = [None, "BHNM", "HNM", "NM", "BM", "HN", "H", "N"]


#: Biases of something of which there is less than of pairs.
BIASES = {
    "distances": lambda n, m, count: (torch.randn(n + m, H), lambda values: DistanceBias(values, -m)),
    "buckets": lambda n, m, count: (
        torch.randn(count, H),
        functools.partial(BucketBias, torch.randint(count, (2, n, m), dtype=torch.uint8)),
    ),
    "one head's buckets": lambda n, m, count: (
        torch.randn(count),
        functools.partial(BucketBias, torch.randint(count, (n, m))),
    ),
    "listed": lambda n, m, count: (
        torch.randn(n * m // 2 + 1, H),
        functools.partial(SparseBias, torch.stack([torch.randint(x, (n * m // 2 + 1,)) for x in (m, n)])),
    ),
}


def term(of, sizes, make):
    """A tensor with some of the dimensions."""
    if of is None or of in BIASES:
        return None
    return make([size if name in of else 1 for name, size in zip("BHNM", sizes, strict=True)])


class Case:
    """A call, and its results on either backend."""

    def __init__(
        self, law, score, sizes, channels, graph, bias=None, mask=None, key_heads=H, dropout=0.0, weights=False
    ):
        torch.manual_seed(0)
        n, m = sizes
        c, d = channels
        self.inputs = [torch.randn(2, size, h, w) for size, h, w in ((n, H, c), (m, key_heads, c), (m, key_heads, d))]
        self.bias, self.of_bias, self.weights = term(bias, (2, H, n, m), torch.randn), lambda bias: bias, weights
        if bias in BIASES:
            self.bias, self.of_bias = BIASES[bias](n, m, (7, 29, 47)[n % 3])
        self.mask = term(mask, (2, H, n, m), lambda size: torch.rand(size) < 0.7)
        self.law, self.score, self.graph, self.dropout = LAWS.get(law, law), SCORES[score], GRAPHS[graph](n, m), dropout

    def results(self, dtype, backend=None, ran=None):
        """The output and all gradients."""
        inputs = [x.to(dtype).requires_grad_() for x in self.inputs]
        bias = None if self.bias is None else self.bias.to(dtype).requires_grad_()
        law, sinks = self.law, []
        if isinstance(law, Softmax) and isinstance(law.sink, torch.Tensor):
            sinks = [law.sink.detach().clone().requires_grad_()]
            law = Softmax(sinks[0], law.softcap)
        out = attend(
            *inputs,
            self.graph,
            score=self.score,
            bias=None if bias is None else self.of_bias(bias),
            mask=self.mask,
            distribution=law,
            return_weights=self.weights,
            dropout=self.dropout,
            training=True,
            **({} if backend is None else {"backend": backend}),
        )
        torch.manual_seed(1)
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        grads = [torch.randn(x.shape).to(dtype) for x in outs]
        leaves = [*inputs, *([] if bias is None else [bias]), *sinks]
        return [*outs, *torch.autograd.grad(outs, leaves, grads)]


FORWARD, WEIGHTS, BACKWARD = NAMES = "gattn_tiles_forward", "gattn_tiles_weights", "gattn_tiles_backward"
BOTH = [FORWARD, BACKWARD]
#: Those of a GPU, the last for nodes in their turns.
TWINS = dict(zip(("tiles_forward", "tiles_weights", "tiles_by_target"), NAMES, strict=True))


@pytest.fixture
def ran(monkeypatch):
    """The kernels that ran, those of a GPU by the names of the CPU's."""
    names = []
    for kind in (tiles.CPUCall, GPUCall):
        record(kind, names, monkeypatch)
    return names


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def either(request, monkeypatch):
    """The kernels of the CPU or, in Triton's interpreter, of a GPU."""
    if request.param == "gpu":
        use_twins(monkeypatch)


def record(kind, names, monkeypatch):
    """Appends the name of each kernel that a kind of call runs."""
    run = kind.run

    def recorded(call, name, **options):
        if name != "tiles_by_source":
            names.append(TWINS.get(name, name))
        run(call, name, **options)

    monkeypatch.setattr(kind, "run", recorded)


def use_twins(monkeypatch):
    """The kernels of GPUs compute on the CPU, in Triton's interpreter, and inside their tensors."""
    pytest.importorskip("triton")
    if not launcher.INTERPRETED:
        pytest.skip("kernels run on the CPU with TRITON_INTERPRET=1 only")
    check_bounds(monkeypatch)
    monkeypatch.setitem(tiles.CALLS, "cpu", GPUCall)


CELLS = pairs(
    *([law for law in LAWS if law != "dropout"], SCORES, SIZES, CHANNELS, GRAPHS),
    *([*TERMS, *BIASES], [None, "BHNM", "NM", "BM"], [H, 1], [False, True, "dropped"]),
)


@pytest.mark.parametrize(("law", "score", "sizes", "channels", "graph", "bias", "mask", "key_heads", "weights"), CELLS)
def test_every_cell(law, score, sizes, channels, graph, bias, mask, key_heads, weights, ran):
    case = Case(law, score, sizes, channels, graph, bias, mask, key_heads, weights=weights)
    found = case.results(torch.float64)
    assert ran == (BOTH if not weights else [FORWARD, WEIGHTS, BACKWARD])
    for part, expected in zip(found, case.results(torch.float64, "reference"), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS[::6]]
    + [
        ("both", "bounded", (40, 70), (3, 5), "window", "listed", "BHNM", 1, "dropped"),
        ("tanh", "bounded", (20, 45), (8, 8), "causal", "HN", "BM", 2, False),
        ("softcap", "dot", (35, 66), (40, 24), "earlier", "distances", "NM", H, False),
        ("identity", "bounded", (49, 70), (16, 16), "window", "HNM", None, 2, "dropped"),
        ("sigmoid", "dot", (70, 5), (1, 3), "full", "one head's buckets", "BM", H, False),
        *(
            pytest.param(cell, marks=pytest.mark.slow)
            for cell in (
                ("normalized", "dot", (33, 35), (17, 8), "both lengths", "buckets", None, H, True),
                ("softcap", "dot", (97, 128), (40, 64), "earlier", "distances", "NM", H, False),
                ("sink of heads", "dot", (12, 64), (130, 31), "lengths", "BHNM", None, 1, True),
            )
        ),
    ],
    ids=lambda cell: f"{cell[0]}, {cell[4]}, {cell[5]}",
)
def test_a_few_cells_on_a_gpu(cell, monkeypatch):
    """In Triton's interpreter or, with `--device cuda`, on one."""
    is_there = torch.get_default_device().type == "cuda"
    if not is_there:
        use_twins(monkeypatch)
    record(GPUCall, ran := [], monkeypatch)
    case = Case(*cell[:-1], weights=cell[-1])
    dtype, tolerance = (torch.float32, 1e-4) if is_there else (torch.float64, 1e-9)
    for part, expected in zip(case.results(dtype), case.results(torch.float64, "reference"), strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=tolerance, atol=tolerance)
    assert ran == [FORWARD, *[WEIGHTS] * bool(cell[-1]), BACKWARD] or (is_there and "lengths" in cell[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("law", "bias"),
    [("softcap", "HNM"), ("sink of heads", "buckets"), ("sigmoid", "distances"), ("normalized", "listed")],
)
def test_thousands_of_terms(law, bias, dtype, ran):
    """Sums are made in float32 at least, and compared with float64."""
    case = Case(law, "dot", (8, 5000), (16, 16), "full", bias)
    case.inputs = [x.to(dtype).float() for x in case.inputs]
    case.bias = case.bias.to(dtype).float()
    found = case.results(dtype)
    assert ran == BOTH
    exact = case.results(torch.float64, "reference")
    for part, expected, rounded in zip(found, exact, case.results(dtype, "reference"), strict=True):
        assert_as_exact_as(part, rounded, expected)


@pytest.mark.parametrize("graph", ["full", "causal"])
@pytest.mark.parametrize(("law", "returned"), [("dropout", True), ("softcap", False), ("normalized", "dropped")])
def test_dropout(law, returned, graph, either, ran, monkeypatch):
    check_dropout(law, returned, graph, ran, monkeypatch)


def test_dropout_on_a_gpu(ran, monkeypatch):
    """One of the cases that are slow."""
    use_twins(monkeypatch)
    check_dropout("dropout", True, "causal", ran, monkeypatch)


def check_dropout(law, returned, graph, ran, monkeypatch):
    """It is that of `keep_mask_of_pairs`, forward and backward, and of weights that are returned."""
    case = Case(law, "dot", (50, 70), (8, 8), graph, dropout=0.4, weights=returned)
    seed = torch.tensor(2**40 + 77)
    monkeypatch.setattr(tiles, "new_seed", lambda *_: seed)
    found = case.results(torch.float64)
    assert ran[:: 1 + bool(returned)] == BOTH
    kept = keep_mask_of_pairs(seed, torch.Size((2, H, 50, 70)), 0.4).double() / 0.6
    query, key, value = (x.double().requires_grad_() for x in case.inputs)
    options = {"distribution": case.law, "return_weights": True}
    weights = attend(query, key, value, case.graph, backend="reference", **options)[1]
    assert weights.shape == kept.shape
    out = torch.einsum("bhnm,bmhc->bnhc", weights * kept, value)
    outs = [out, *([weights] if returned is True else [weights * kept] if returned else [])]
    torch.manual_seed(1)
    grads = [torch.randn(x.shape).double() for x in outs]
    expected = [*outs, *torch.autograd.grad(outs, (query, key, value), grads)]
    for part, other in zip(found, expected, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65])
def test_tables_that_are_held_in_registers(count, ran):
    """In float32, tables of up to 32 or 64 numbers are looked up there."""
    x, graph = torch.randn(3, 40, H, 8), CompleteGraph(40)
    buckets = (torch.arange(1600) % count)[torch.randperm(1600)].view(40, 40)
    found = []
    for dtype, backend in ((torch.float32, "dense"), (torch.float64, "reference")):
        rows = torch.arange(count * H).view(count, H).sin().to(dtype).requires_grad_()
        query, key, value = (x + place for place in range(3))
        out = attend(
            *(y.to(dtype) for y in (query, key, value)), graph, bias=BucketBias(buckets, rows), backend=backend
        )
        found.append([out.double(), torch.autograd.grad(out.square().sum(), rows)[0].double()])
    assert ran == BOTH
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


def test_the_dropout_is_uniform():
    """As many of each row, column and pair of neighbours are kept as should be."""
    kept = keep_mask_of_pairs(torch.tensor(5), torch.Size((1, 4, 500, 500)), 0.3).double() - 0.7
    size = math.sqrt(0.21)
    for means, count in (
        (kept.mean(-1), 500),
        (kept.mean(-2), 500),
        ((kept[..., 1:] * kept[..., :-1]).mean() / size, kept.numel()),
        ((kept[..., 1:, :] * kept[..., :-1, :]).mean() / size, kept.numel()),
        ((kept[:, 1:] * kept[:, :-1]).mean() / size, kept.numel()),
    ):
        assert means.abs().max() < 5 * size / math.sqrt(count)


@pytest.mark.parametrize(
    ("law", "bias"),
    [
        ("softcap", "listed"),
        ("sigmoid", "HNM"),
        ("dropout", None),
        ("sink", "distances"),
        ("tanh", "one head's buckets"),
    ],
)
@pytest.mark.parametrize("num_targets", [3, 150])
def test_bits(num_targets, law, bias, monkeypatch):
    """They are those of any number of threads, and of each element of a batch alone."""
    graph, key_heads = ("window", H) if num_targets == 150 else ("causal", 1)
    case = Case(law, "dot", (num_targets, 1200), (16, 16), graph, bias, key_heads=key_heads)
    if law == "dropout":
        monkeypatch.setattr(tiles, "new_seed", lambda *_: torch.tensor(3))
        case.dropout = 0.1
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):  # the last is more than a few targets of one element have tasks
            torch.set_num_threads(count)
            found.append(case.results(torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*parts) for other in found[1:] for parts in zip(found[0], other, strict=True))
    case.inputs = [x[:1] for x in case.inputs]
    torch.manual_seed(1)
    out = case.results(torch.float32)[0]
    assert torch.equal(out[0], found[0][0][0])


@pytest.mark.parametrize("law", ["softcap", "sigmoid"])
@pytest.mark.parametrize("graph", ["causal", "window", "lengths"])
def test_what_is_hidden_does_not_count(law, graph, either, ran):
    """Not even if it is NaN or infinite: rows are those of the reference, which multiplies padding by zero."""
    case = Case(law, "dot", (70, 70), (8, 8), graph)
    case.inputs[2][0, 40], case.inputs[1][1, 69], case.inputs[0][0, 3] = math.nan, math.inf, -math.inf
    for part, expected in zip(case.results(torch.float64), case.results(torch.float64, "reference"), strict=True):
        if graph == "lengths":
            part, expected = part[:1], expected[:1]
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert ran == BOTH


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_infinite_products_and_any_nan(dtype, either, ran):
    """A row whose logits are all minus infinity sees only its sink; of a NaN, all bits may be set."""
    case = Case("sink", "dot", (64, 128), (1, 3), "full")
    case.inputs[1].abs_().add_(0.1)
    case.inputs[0][:, 5] = -math.inf
    found, expected = case.results(dtype), case.results(torch.float64, "reference")
    assert (found[0][:, 5] == 0).all()
    for part, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(part.double(), exact, rtol=1e-4, atol=1e-4, equal_nan=True)
    case.inputs = [x.detach().clone() for x in case.inputs]
    case.inputs[0][:, 5] = 0.0
    case.inputs[0][:, 7] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    out = case.results(dtype)[0]
    assert torch.equal(out.isnan().all(-1).all(-1)[0], torch.arange(64) == 7)
    assert ran == BOTH * 2


def test_windows_far_wider_than_the_graph(ran):
    x = torch.randn(1, 70, H, 3)
    wide, whole = (CompleteGraph(70, window=(width, 1)) for width in (2**62, 70))
    found = attend(x, x, x, wide, distribution=LAWS["softcap"])
    assert ran == BOTH[:1]
    torch.testing.assert_close(found, attend(x, x, x, whole, distribution=LAWS["softcap"], backend="reference"))


def test_logits_far_apart(either, ran):
    """Maxima rise along a row, rows have nothing but minus infinity, and one has a single source."""
    case = Case("sink", "dot", (20, 300), (4, 4), "full", "NM")
    case.bias = (torch.arange(300) * 5.0 - 700).expand(1, 1, 20, 300).clone()
    case.bias[..., 1, :], case.bias[..., 2, 1:] = -math.inf, -math.inf
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        found, expected = case.results(dtype), case.results(torch.float64, "reference")
        for part, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(part.double(), exact, rtol=tolerance, atol=tolerance)
            assert part.isfinite().all()
    assert ran == BOTH * 2


@pytest.mark.parametrize(
    ("law", "bias", "weights"),
    mostly_slow(
        [
            ("softcap", "HNM", False),
            ("sink of heads", "listed", "dropped"),
            ("normalized", "buckets", True),
            ("dropout", "distances", "dropped"),
            ("dropout", "one head's buckets", True),
        ],
        2,
    ),
)
def test_second_derivatives(law, bias, weights, monkeypatch):
    monkeypatch.setattr(tiles, "new_seed", lambda *_: torch.tensor(11))
    dropout = 0.5 * (law == "dropout")
    case = Case(law, "bounded", (4, 5), (2, 3), "causal", bias, "NM", 2, dropout, weights)
    inputs = [x.double().requires_grad_() for x in (*case.inputs, case.bias)]

    def call(query, key, value, bias):
        options = {"distribution": case.law, "score": case.score, "dropout": case.dropout, "training": True}
        options |= {"mask": case.mask, "return_weights": case.weights}
        found = attend(query, key, value, case.graph, bias=case.of_bias(bias), **options)
        return (found,) if isinstance(found, torch.Tensor) else found

    def loss():
        return sum(x.sin().sum() for x in call(*inputs))

    torch.manual_seed(0)
    of_kernels, kept = (torch.autograd.grad(loss(), inputs, create_graph=create) for create in (False, True))
    torch.testing.assert_close(kept, of_kernels, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize(
    ("law", "graph", "bias", "dropout", "weights"),
    mostly_slow(
        [
            ("softcap", "causal", "HNM", 0.0, False),
            ("dropout", "full", None, 0.3, "dropped"),
            ("sink of heads", "window", "buckets", 0.0, True),
            ("sigmoid", "full", "distances", 0.5, False),
            ("normalized", "earlier", None, 0.0, True),
        ],
        2,
    ),
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiled(law, graph, bias, dropout, weights, dtype, either, ran):
    """As a whole, with open sizes, by the same kernels."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ((30, 40), (50, 35)):
        case = Case(law, "bounded", sizes, (6, 5), graph, bias, None, 2, dropout, weights)
        found = []
        for function in (compiled, attend):
            inputs = [x.to(dtype).requires_grad_() for x in case.inputs]
            of_bias = None if case.bias is None else case.bias.to(dtype).requires_grad_()
            torch.manual_seed(5)
            out = function(
                *inputs,
                case.graph,
                score=case.score,
                bias=None if of_bias is None else case.of_bias(of_bias),
                distribution=case.law,
                dropout=dropout,
                training=True,
                return_weights=weights,
            )
            outs = list(out) if weights else [out]
            torch.manual_seed(1)
            leaves = [*inputs, *([] if of_bias is None else [of_bias])]
            grads = torch.autograd.grad(outs, leaves, [torch.randn(x.shape).to(x) for x in outs])
            found.append([*outs, *grads])
        assert len(ran) == 2 * (2 + bool(weights))
        assert ran[: len(ran) // 2] == ran[len(ran) // 2 :]
        ran.clear()
        for part, expected in zip(*found, strict=True):
            torch.testing.assert_close(part, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_and_compiled(causal, ran):
    """Also with other blocks, for which sizes become open."""
    for sizes in (([20, 0, 31], [19, 2, 31]), ([23, 0, 40], [18, 3, 41])):
        graph = CompleteGraph.packed(*sizes, causal=causal)
        inputs = [torch.randn(2, sum(sizes[side]), H, 8, requires_grad=True) for side in (0, 1, 1)]
        pairs_of_graph = graph.edge_index[:, ::3]
        bias = SparseBias(pairs_of_graph, torch.randn(pairs_of_graph.size(1), H))
        found = []
        for function in (torch.compile(attend, fullgraph=True, backend="aot_eager"), attend):
            outs = function(*inputs, graph, return_lse=True)
            loss = outs[0].sin().sum() + outs[1].masked_fill(outs[1] == -torch.inf, 0.0)[:, :40].sum()
            found.append([*outs, *torch.autograd.grad(loss, inputs)])
        assert ran == BOTH * 2
        torch.testing.assert_close(*found)
        torch.testing.assert_close(  # compiled code does not know which pairs are where
            *(function(*inputs, graph, bias=bias) for function in (torch.compile(attend, backend="aot_eager"), attend))
        )
        ran.clear()


def test_transforms_in_compiled_code():
    """They need plain PyTorch, as elsewhere."""
    inputs = [torch.randn(3, 8, H, 4) for _ in range(3)]

    def call(query, key, value):
        return attend(query, key, value, CompleteGraph(8), distribution=Softmax(softcap=2.0))

    mapped = torch.vmap(call)
    torch.testing.assert_close(torch.compile(mapped, backend="aot_eager")(*inputs), call(*inputs))


@pytest.mark.parametrize("graph", ["full", "window", "both lengths"])
def test_log_sums(graph, either, ran):
    """They have gradients, too; those of targets that see nothing are minus infinity."""
    case, found = Case("dropout", "bounded", (30, 40), (6, 5), graph, "HNM", "BHNM"), []
    for backend in ("auto", "reference"):
        inputs = [x.double().requires_grad_() for x in (*case.inputs, case.bias)]
        options = {"score": case.score, "mask": case.mask, "backend": backend, "return_lse": True}
        out, log_sum = attend(*inputs[:3], case.graph, bias=inputs[3], **options)
        loss = out.sin().sum() + log_sum.masked_fill(log_sum == -math.inf, 0.0).cos().sum()
        found.append([out, log_sum, *torch.autograd.grad(loss, inputs)])
    assert ran == BOTH
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("graph", ["window", "lengths"])
@pytest.mark.parametrize("law", ["softcap", "normalized", "dropout"])
def test_weights_change_no_bit_of_the_output(law, graph):
    case = Case(law, "bounded", (30, 40), (6, 5), graph, "HNM", "NM")
    options = {"score": case.score, "bias": case.bias, "mask": case.mask, "distribution": case.law}
    out, weights = attend(*case.inputs, case.graph, return_weights=True, **options)
    assert torch.equal(out, attend(*case.inputs, case.graph, **options))
    summed = torch.einsum("bhnm,bmhc->bnhc", weights, case.inputs[2])
    torch.testing.assert_close(out, summed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graph", ["full", "causal"])
@pytest.mark.parametrize(
    ("sizes", "dtype", "options", "is_faster"),
    [
        ((32, 32), torch.float32, {}, True),
        ((33, 31), torch.float32, {}, False),
        ((2, 512), torch.float32, {}, True),
        ((32, 64), torch.float64, {}, True),
        ((32, 63), torch.float64, {}, False),
        ((16, 32), torch.bfloat16, {}, None),
        ((16, 31), torch.float16, {}, False),
        ((5, 5), torch.float32, {"mask": "NM"}, True),
        ((5, 5), torch.float64, {"bias": "HNM"}, True),
        ((5, 5), torch.bfloat16, {"bias": "HNM"}, None),
        ((5, 5), torch.float64, {"dropout": 0.5}, True),
    ],
)
def test_where_it_replaces_fused_attention(sizes, dtype, options, is_faster, graph, ran, monkeypatch):
    """The same way is chosen with and without a plan; in half precision, it depends on the processor."""
    if is_faster is None:
        is_faster = tiles._is_compared(dtype)
    if tiles._is_compared(torch.float32):
        case = Case(Softmax(), "dot", sizes, (8, 8), "full" if sizes[0] != sizes[1] else graph, **options)
        monkeypatch.setattr(tiles, "new_seed", lambda p, *_: torch.tensor(3) if p else None)
        found = [case.results(dtype) for _ in range(3)]
        assert ran == BOTH * 3 * is_faster
        assert all(torch.equal(*parts) for other in found for parts in zip(found[0], other, strict=True))
        if "dropout" not in options:
            for part, expected in zip(found[0], case.results(torch.float64, "reference"), strict=True):
                near = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
                torch.testing.assert_close(part.double(), expected, rtol=near, atol=near)


@pytest.mark.parametrize(
    ("num_targets", "num_sources", "key_heads", "dtype", "expected"),
    [
        (1, 1024, 4, torch.float16, BOTH),
        (1, 1023, 4, torch.float16, []),
        (2, 512, 1, torch.bfloat16, BOTH),
        (1, 2**13, 1, torch.float32, BOTH),
        (1, 2**13 - 1, 1, torch.float32, []),
        (1, 2**13, 2, torch.float64, BOTH),
        (1, 2**15, 4, torch.float32, [FORWARD]),
        (1, 2**15 - 1, 4, torch.float32, []),
        (2, 2**10, 4, torch.float32, BOTH),
    ],
)
def test_few_targets_that_read_many_keys(num_targets, num_sources, key_heads, dtype, expected, ran):
    """The same with and without a plan; with gradients, one target may be PyTorch's."""
    torch.manual_seed(0)
    query = torch.randn(num_targets, H, 8).to(dtype)
    key, value = (torch.randn(num_sources, key_heads, 8).to(dtype) for _ in range(2))
    graph = CompleteGraph(num_targets, num_sources)
    first, second = attend(query, key, value, graph), attend(query, key, value, graph)
    expected = expected if tiles._is_compared(dtype) else []
    assert ran == expected[:1] * 2
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    exact = attend(query.double(), key.double(), value.double(), graph, backend="reference")
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(first.double(), exact, rtol=near, atol=near)
    ran.clear()
    attend(query.requires_grad_(), key, value, graph).sum().backward()
    assert ran == (BOTH if expected == BOTH else [])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("law", [law for law in LAWS if law not in ("dropout", "identity")])
def test_packed_blocks_with_every_law(law, causal, ran):
    """Those that are not small; a list of their edges would take many times as long."""
    sizes = [70, 90, 65]
    graph, batch = CompleteGraph.packed(sizes, causal=causal), torch.arange(3).repeat_interleave(torch.tensor(sizes))
    x = [torch.randn(sum(sizes), H, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = []
    for backend in ("auto", "reference"):
        out = attend(*x, graph, distribution=LAWS[law], backend=backend)
        found.append([out, *torch.autograd.grad((out * out).sum(), x)])
    assert ran == BOTH
    torch.testing.assert_close(*found)
    alone = [part[batch == 1].detach() for part in x]
    assert torch.equal(
        attend(*alone, CompleteGraph(90, causal=causal), distribution=LAWS[law]), found[0][0][batch == 1]
    )


def test_blocks_of_a_batch_have_their_own_terms(ran):
    """A bias and a mask of each block serve all entries of the batch."""
    graph, x = CompleteGraph.packed([3, 5]), torch.randn(2, 8, H, 4, dtype=torch.float64)
    terms = {"bias": torch.randn(2, H, 5, 5, dtype=torch.float64), "mask": torch.rand(2, 1, 5, 5) < 0.8}
    out = attend(x, x, x, graph, **terms, backend="dense")
    assert ran == [FORWARD]
    torch.testing.assert_close(out, attend(x, x, x, graph, **terms, backend="reference"))


@pytest.mark.parametrize("bias", ["listed", "HNM"])
def test_what_shares_a_gradient_is_one_task(bias, monkeypatch):
    """Two threads would add to the same numbers."""
    found, run = [], tiles.CPUCall.run

    def recorded(call, name):
        found.append((name, call.arguments.shared_elements))
        run(call, name)

    monkeypatch.setattr(tiles.CPUCall, "run", recorded)
    Case("softcap", "dot", (5, 7), (4, 4), "full", bias).results(torch.float32)
    assert found[-1] == (BACKWARD, 1)


def test_a_mask_of_inference_mode(ran):
    case = Case("softcap", "dot", (6, 6), (4, 4), "full", mask="NM")
    with torch.inference_mode():
        case.mask = case.mask.clone()
    assert all(x.isfinite().all() for x in case.results(torch.float32))


def test_any_strides(either, ran):
    case = Case("softcap", "dot", (30, 40), (6, 5), "full", "BHNM", "BHNM")
    expected = case.results(torch.float64, "reference")
    case.inputs = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in case.inputs]
    case.bias, case.mask = (x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (case.bias, case.mask))
    for part, other in zip(case.results(torch.float64), expected, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-9, atol=1e-9)
    assert ran == BOTH


def test_without_a_batch(either, ran):
    """Tensors are taken as they are; the same bits as in a batch of one, second derivatives too."""
    sink = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    leaves = [torch.randn(n, H, 5, dtype=torch.float64, requires_grad=True) for n in (6, 9, 9)]
    graph, found = CompleteGraph(6, 9), []
    for is_one in (True, False, True, False):  # the last two are planned
        given = leaves if is_one else [x.unsqueeze(0) for x in leaves]
        outs = [*attend(*given, graph, return_weights=True, return_lse=True)]
        outs += [attend(*given, graph, distribution=Softmax(sink=sink))]
        outs = [x if is_one else x.squeeze(0) for x in outs]
        grads = torch.autograd.grad([x.square().sum() for x in outs], [*leaves, sink], retain_graph=True)
        twice = torch.autograd.grad([x.square().sum() for x in outs], [*leaves, sink], create_graph=True)
        torch.testing.assert_close(twice, grads, rtol=1e-9, atol=1e-9)
        found.append([*outs, *grads, *torch.autograd.grad([x.sum() for x in twice], [*leaves, sink])])
    assert (ran.count(FORWARD), ran.count(BACKWARD)) == (8, 16)
    for other in found[1:]:
        torch.testing.assert_close(other[:8], found[0][:8], rtol=0, atol=0)
        torch.testing.assert_close(other[8:], found[0][8:], rtol=1e-9, atol=1e-9)


def test_edits_between_the_passes_are_noticed():
    case = Case("softcap", "dot", (6, 6), (4, 4), "full", "HNM", "NM")
    inputs = [x.requires_grad_() for x in case.inputs]
    out = attend(*inputs, case.graph, bias=case.bias, mask=case.mask, distribution=case.law)
    case.mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("length", [6, -1])
@pytest.mark.parametrize("side", ["source_lengths", "target_lengths"])
def test_lengths_that_were_edited_are_checked(side, length):
    graph = CompleteGraph(5, **{side: torch.tensor([5, 5])})
    getattr(graph, side)[1] = length
    x = torch.randn(2, 5, H, 3)
    with pytest.raises(ValueError, match="lengths must lie between 0 and its sizes"):
        attend(x, x, x, graph)


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": (2, 6, 4, 3)},
        {"key": (2, 5, 4, 2)},
        {"value": (1, 5, 4, 3)},
        {"key": (2, 5, 3, 3), "value": (2, 5, 3, 3)},
        {"bias": (1, 4, 4, 5)},
        {"bias": (1, 3, 5, 5)},
        {"mask": (2, 1, 5, 4)},
    ],
)
def test_what_kernels_read_is_checked(wrong):
    shapes = {**dict.fromkeys(("query", "key", "value"), (2, 5, 4, 3)), **wrong}
    tensors = {"bias": None, "mask": None, **{name: torch.ones(shape) for name, shape in shapes.items()}}
    elements, _ = tile_rules.elements_for_tiles(None, None, (2, 5, 5, 1), 0)
    rule = tiles.Rule(1.0, 1.0, math.inf, Softmax().law(), None, None, elements, 0.0)
    with pytest.raises(ValueError, match="do not fit"):
        tiles.attend(**tensors, sink=None, rule=rule)


def test_memory():
    """Nothing has a number for each pair."""
    sizes = []
    n = 2048
    query = torch.randn(1, n, 2, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        attend(query, query, query, CompleteGraph(n), distribution=Softmax(softcap=3.0)).sum().backward()
    assert max(sizes) <= query.numel()


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_terms_of_another_batch_or_other_heads(batch):
    x, graph = torch.randn(*batch, 5, H, 2), CompleteGraph(5)
    whole = (*batch, H, 5, 5)
    for size in ((2, H, 5, 5), (2, 1, 1, 5), (H, H, 5, 5), (2, 5, 5), (1, 1, 1, 1, 5, 5), (2, 1, H, 5, 5)):
        if len(size) <= len(whole) and all(n in (1, m) for n, m in zip(size[::-1], whole[::-1], strict=False)):
            continue
        for term in ({"bias": torch.randn(size)}, {"mask": torch.ones(size, dtype=torch.bool)}):
            with pytest.raises(ValueError, match="must be broadcastable to"):
                attend(x, x, x, graph, **term)
