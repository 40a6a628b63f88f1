"""Products by oneDNN: as PyTorch's own, wherever that is asked for, and only where the rule says so."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from gattn import products
from gattn.nn.shared.linear import Linear, side_by_side
from gattn.testing import assert_as_exact_as
from tests import layers
from tests.ops.fuzz import threads

SHAPES = [((6, 7), 5), ((2, 3, 7), 5), ((0, 7), 5), ((1, 64), 1), ((300, 33), 17)]


@pytest.fixture(autouse=True)
def everything(monkeypatch):
    """By oneDNN and the kernel, on any processor and for any size."""
    monkeypatch.setattr(products, "_USES_ONEDNN", True)
    monkeypatch.setattr(products, "_SUMS_ROWS", True)
    monkeypatch.setattr(products, "_LEAST", 1)


@pytest.fixture
def called(monkeypatch):
    """The sizes that oneDNN was called with."""
    found, plain = [], products._product

    def product(x, weight, bias):
        found.append((*x.shape, *weight.shape))
        return plain(x, weight, bias)

    monkeypatch.setattr(products, "_product", product)
    return found


def drawn(shape, out, dtype=torch.float32):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size, dtype=torch.double) for size in (shape, (out, shape[-1]), (out,)))
    return [tensor.to(dtype).requires_grad_() for tensor in (x, weight, bias)]


def results(function, inputs, grad):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("shape", "out"), SHAPES)
def test_it_is_as_exact_as_pytorchs(shape, out, has_bias, called):
    grad = torch.randn(*shape[:-1], out, dtype=torch.double)
    inputs = drawn(shape, out)[: 2 + has_bias]
    exact = results(F.linear, [tensor.detach().double().requires_grad_() for tensor in inputs], grad)
    found, theirs = (results(function, inputs, grad) for function in (products.linear, F.linear))
    for one, other, reference in zip(found, theirs, exact, strict=True):
        assert_as_exact_as(one, other, reference)
    with torch.no_grad():
        assert products.linear(*inputs).equal(found[0])
    assert len(called) == (3 if 0 not in shape else 0)


@pytest.mark.parametrize("least", [1, 1 << 40], ids=["large", "small"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("shape", "out"), SHAPES)
def test_compiled_it_is_as_exact(shape, out, has_bias, least, called, monkeypatch):
    """By one operator, which looks at the number of rows itself."""
    monkeypatch.setattr(products, "_LEAST_COMPILED", 1)
    monkeypatch.setattr(products, "_LEAST", least)
    torch.compiler.reset()
    compiled = torch.compile(products.linear, backend="aot_eager", fullgraph=True, dynamic=True)
    grad = torch.randn(*shape[:-1], out, dtype=torch.double)
    inputs = drawn(shape, out)[: 2 + has_bias]
    exact = results(F.linear, [tensor.detach().double().requires_grad_() for tensor in inputs], grad)
    found, theirs = (results(function, inputs, grad) for function in (compiled, F.linear))
    for one, other, reference in zip(found, theirs, exact, strict=True):
        assert_as_exact_as(one, other, reference)
    assert len(called) == (2 if least == 1 and 0 not in shape else 0)
    for wanted in range(len(inputs)):  # a gradient of one of them alone
        ours, others = (
            torch.autograd.grad(function(*inputs), inputs[wanted], grad.float()) for function in (compiled, F.linear)
        )
        torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [((4, 7), (5, 6), (5,)), ((4, 7), (5, 7), (4,)), ((7,), (5, 7), (5,))])
def test_compiled_other_sizes_are_left_to_pytorch(sizes, called, monkeypatch):
    """The operator would read what is not there."""
    monkeypatch.setattr(products, "_LEAST_COMPILED", 1)
    torch.compiler.reset()
    inputs = [torch.randn(size) for size in sizes]
    compiled = torch.compile(products.linear, backend="aot_eager", fullgraph=True)
    try:
        expected = F.linear(*inputs)
    except RuntimeError:
        with pytest.raises((RuntimeError, torch._dynamo.exc.Unsupported)):
            compiled(*inputs)
    else:
        torch.testing.assert_close(compiled(*inputs), expected)
    assert called == []


def test_compiled_layers_side_by_side(called, monkeypatch):
    monkeypatch.setattr(products, "_LEAST_COMPILED", 1)
    lins = [Linear(7, 5), Linear(7, 3), Linear(7, 5, bias=False), Linear(7, 2)]
    x = torch.randn(9, 7, requires_grad=True)
    for chosen, used in ((lins[:2], 2), (lins, 4), (lins[2:], 1), (lins[:3], 1)):
        torch.compiler.reset()
        compiled, found = torch.compile(side_by_side, backend="aot_eager", fullgraph=True), []
        leaves = [x, *(parameter for lin in chosen for parameter in lin.parameters())]
        for outs in (compiled(x, *chosen), [lin(x) for lin in chosen]):
            grads = torch.autograd.grad(sum(out.square().sum() for out in outs[:used]), leaves, materialize_grads=True)
            found.append((outs, grads))
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "x", [torch.randn(4, 14)[:, ::2], torch.randn(7, 4).t(), torch.randn(1, 7).expand(4, 7), torch.randn(4, 8)[:, 1:]]
)
@pytest.mark.parametrize("weight", [torch.randn(7, 5).t(), torch.randn(1, 7).expand(5, 7), torch.randn(10, 7)[::2]])
def test_views(x, weight, called):
    torch.testing.assert_close(products.linear(x, weight), F.linear(x, weight))
    assert called


def test_expanded_gradients():
    x, weight, _ = drawn((6, 7), 5)
    found, expected = (
        torch.autograd.grad(function(x, weight).sum(), (x, weight)) for function in (F.linear, products.linear)
    )
    torch.testing.assert_close(found, expected)


def test_second_derivatives(called):
    def penalty(function):
        x, weight, bias = drawn((6, 7), 5)
        out = function(x, weight, bias)
        grads = torch.autograd.grad(out.sigmoid().sum(), (x, weight, bias), create_graph=True)
        return torch.autograd.grad(sum((grad**2).sum() for grad in grads), (x, weight, bias))

    torch.testing.assert_close(penalty(products.linear), penalty(F.linear))
    assert len(called) > 2


def test_some_gradients():
    for needed in ((True, False), (False, True)):
        x, weight, bias = drawn((6, 7), 5)
        inputs = [
            tensor.requires_grad_(is_needed)
            for tensor, is_needed in zip((x.detach(), weight.detach()), needed, strict=True)
        ]
        products.linear(*inputs, bias.detach()).sum().backward()
        assert [tensor.grad is not None for tensor in inputs] == list(needed)


def test_what_pytorch_computes(called):
    """Everything that is not plain float32 on a CPU, or that something else looks at."""
    x, weight, bias = (tensor.detach() for tensor in drawn((6, 7), 5))
    for dtype in (torch.double, torch.bfloat16):
        assert products.linear(x.to(dtype), weight.to(dtype)).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight, bias).dtype == torch.bfloat16
    assert products.linear(x.to("meta"), weight.to("meta")).is_meta
    torch.testing.assert_close(torch.func.vmap(products.linear, (0, None))(x, weight), F.linear(x, weight))
    derivative = torch.func.jvp(lambda x: products.linear(x, weight), (x,), (x,))[1]
    torch.testing.assert_close(derivative, F.linear(x, weight))
    with forward_ad.dual_level():
        dual = products.linear(forward_ad.make_dual(x, x), weight)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, F.linear(x, weight))
    torch.testing.assert_close(
        torch.compile(products.linear, backend="eager", fullgraph=True)(x, weight), F.linear(x, weight)
    )
    products.linear(x[0], weight)
    assert called == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    parts, lin = [torch.randn(3, 7), torch.randn(5, 7)], Linear(7, 5)
    nested = torch.nested.nested_tensor(parts, layout=layout)
    for found in (lin(nested), products.linear(nested, lin.weight, lin.bias)):
        for one, part in zip(found.unbind(), parts, strict=True):
            torch.testing.assert_close(one, F.linear(part, lin.weight, lin.bias))


def test_wrong_inputs_raise_what_pytorch_raises():
    x, weight, bias = drawn((6, 7), 5)
    for inputs in ((x, weight.t(), bias), (x, weight, bias[:1].expand(2)), (x, weight.double(), bias)):
        with pytest.raises(Exception) as expected:  # noqa: PT011
            F.linear(*inputs)
        with pytest.raises(expected.type):
            products.linear(*inputs)
    torch.testing.assert_close(products.linear(x, weight, bias[:1]), F.linear(x, weight, bias[:1]))


def test_batches_of_gradients():
    x, weight, bias = drawn((6, 7), 5)
    grads = torch.randn(3, 6, 5)
    found, expected = (
        torch.autograd.grad(function(x, weight, bias), (x, weight, bias), grads, is_grads_batched=True)
        for function in (products.linear, F.linear)
    )
    torch.testing.assert_close(found, expected)


def test_bits_do_not_depend_on_threads():
    x, weight, bias = (tensor.detach() for tensor in drawn((3000, 65), 130))
    found = []
    for number in (1, 2):
        with threads(number):
            found += [products.linear(x, weight, bias), products.linear(x, weight, bias)]
    assert all(found[0].equal(other) for other in found[1:])


@pytest.mark.parametrize(
    ("rows", "left", "right"),
    [(1, 1, 1), (255, 6, 64), (257, 7, 65), (513, 13, 33), (1000, 64, 7), (3000, 40, 1433), (9000, 520, 130)],
)
def test_sums_over_rows(rows, left, right):
    torch.manual_seed(0)
    a, b = (
        torch.randn(rows, left + 3)[:, 1:-2],
        torch.randn(right, rows).t(),
    )  # views, rows of one, columns of the other
    found = []
    for number in (1, 2):
        with threads(number), torch.no_grad():
            found += [products._sum_over_rows(a, b), products._sum_over_rows(a, b)]
    assert_as_exact_as(found[0], a.t() @ b, a.double().t() @ b.double())
    assert all(found[0].equal(other) for other in found[1:])


@pytest.mark.parametrize("rows", [127, 128])
def test_small_products_are_pytorchs(rows, monkeypatch, called):
    monkeypatch.setattr(products, "_LEAST", 128 * 8 * 4)
    products.linear(torch.randn(rows, 8), torch.randn(4, 8))
    assert len(called) == (rows == 128)


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [("AMD EPYC 9B45", "AVX512", True), ("AMD EPYC", "AVX2", False), ("Intel(R) Xeon(R)", "AVX512", False)],
)
def test_which_processors(name, capability, expected):
    assert products._prefers_onednn(name, capability) == expected


def test_it_can_be_turned_off():
    program = "from gattn import products; products._prefers_onednn = lambda *_: True; print(products.rule())"
    environment = {**os.environ, "GATTN_TORCH": "products"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "PyTorch's"
    assert "oneDNN" in products.rule()


@pytest.mark.parametrize(
    "name", ["GATConv", "GATv2Conv", "TransformerConv", "MultiheadAttention", "TransformerEncoderLayer"]
)
def test_layers_use_it(name, called, monkeypatch):
    layer, row = layers.made(name, torch.float32), layers.row(name)
    inputs = row.inputs(layers.Draw(torch.float32))
    found = row.call(layer, *inputs)
    assert called
    monkeypatch.setattr(products, "_USES_ONEDNN", False)
    torch.testing.assert_close(found, row.call(layer, *inputs))


def test_a_feed_forward_network_that_somebody_watches_is_called(called):
    layer, seen = layers.made("TransformerEncoderLayer", torch.float32), []
    layer.linear1.register_forward_hook(lambda *_: seen.append(1))
    layer(torch.randn(3, 2, layers.F))
    assert seen == [1]
    assert (3, 2, 16, layers.F, 16) in called
    assert (3, 2, layers.F, 16, layers.F) not in called
