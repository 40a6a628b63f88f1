"""Dropout of features: as PyTorch's in all but what it draws."""

import copy
import inspect
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import gattn
from gattn.nn import Dropout
from tests import layers
from tests.cases import DTYPES
from tests.ops.fuzz import threads


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    """PyTorch's function would be tested."""
    monkeypatch.setattr("gattn.nn.shared.dropout._SMALL", 0)


SHAPES = [(), (0,), (7,), (3, 0), (5, 6), (2, 3, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_form(dtype, shape):
    x = torch.randn(shape, dtype=dtype).add_(10)
    found, expected = gattn.dropout(x, 0.5), F.dropout(x, 0.5)
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    torch.testing.assert_close(found, torch.where(found == 0, found, 2 * x))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1), (2, 0, 1)])
def test_strides_of_other_orders_are_kept(order):
    x = torch.randn(3, 4, 5).add_(10).permute(order).requires_grad_()
    found = gattn.dropout(x, 0.5)
    assert found.stride() == F.dropout(x, 0.5).stride()
    torch.testing.assert_close(found, torch.where(found == 0, found, 2 * x))
    (grad,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(grad, (found != 0) * 2.0)


@pytest.mark.parametrize("x", [torch.randn(4, 6)[:, ::2], torch.randn(3, 1).expand(3, 5), torch.randn(8)[1:]])
def test_views(x):
    found = gattn.dropout(x + 10 if x.is_contiguous() else x, 0.5)
    assert ((found == 0) | torch.isclose(found, 2 * (x + 10 if x.is_contiguous() else x))).all()


def test_nothing_is_dropped():
    x = torch.randn(5)
    assert gattn.dropout(x, 0.5, training=False) is x
    assert Dropout(0.5).eval()(x) is x
    torch.testing.assert_close(gattn.dropout(x, 0.0), x)
    assert gattn.dropout(x, 1.0).eq(0).all()


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), "half"])
def test_wrong_probabilities_raise_what_pytorch_raises(p):
    x = torch.randn(3)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        F.dropout(x, p)
    with pytest.raises(expected.type):
        gattn.dropout(x, p)
    if p != p or p == "half":
        return
    with pytest.raises(ValueError, match="between 0 and 1"):
        Dropout(p)


def test_other_wrong_inputs():
    with pytest.raises(RuntimeError):
        gattn.dropout(torch.arange(3), 0.5)
    leaf = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        gattn.dropout(leaf, 0.5, inplace=True)


def test_in_place():
    leaf = torch.randn(50).add_(10).requires_grad_()
    x = leaf * 1
    found = Dropout(0.5, inplace=True)(x)
    assert found is x
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    torch.testing.assert_close(grad, (found != 0) * 2.0)
    x = torch.randn(4, 5).t()
    assert gattn.dropout(x, 0.5, inplace=True) is x


def test_the_seed_and_not_the_threads():
    x, found = torch.ones(200_000), []
    for number in (1, 2):
        with threads(number):
            torch.manual_seed(3)
            found.append([gattn.dropout(x, 0.3), gattn.dropout(x, 0.3)])
    for first, second in zip(*found, strict=True):
        assert first.equal(second)
    assert not found[0][0].equal(found[0][1])
    assert (found[0][0] == 0).float().mean() == pytest.approx(0.3, abs=0.005)


def test_derivatives():
    x = torch.randn(40, dtype=torch.double, requires_grad=True)

    def function(x):
        torch.manual_seed(0)
        return gattn.dropout(x, 0.4) ** 2

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_a_checkpoint_drops_the_same():
    x = torch.randn(60, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda x: gattn.dropout(x.exp(), 0.5), x, use_reentrant=False)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, out.detach())


def test_compiled_as_a_whole():
    layer = Dropout(0.5)
    x = torch.randn(30, 4).add_(10).requires_grad_()
    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, (out != 0) * 2.0)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap(randomness):
    found = torch.func.vmap(lambda x: gattn.dropout(x, 0.5), randomness=randomness)(torch.ones(3, 400))
    assert bool(found.eq(found[0]).all()) == (randomness == "same")


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_sparse_features(layout):
    x = torch.eye(200)
    x = x.to_sparse_csr() if layout == "csr" else x.to_sparse()
    found = Dropout(0.5)(x)
    assert found.layout == torch.sparse_csr
    assert set(found.values().tolist()) == {0.0, 2.0}
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    sources, targets = Dropout(0.5)((x, None))
    assert targets is None
    assert sources.layout == torch.sparse_csr


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    found = gattn.dropout(torch.nested.nested_tensor([torch.ones(3, 9), torch.ones(5, 9)], layout=layout), 0.5)
    assert [(part.shape, part.unique().tolist()) for part in found.unbind()] == [((n, 9), [0.0, 2.0]) for n in (3, 5)]


def test_it_is_a_module_like_any_other():
    layer = copy.deepcopy(Dropout(0.3, inplace=True))
    assert repr(layer) == repr(torch.nn.Dropout(0.3, inplace=True))
    assert isinstance(layer, torch.nn.Dropout)


def of_weights(caller):
    """Whether it drops attention weights, which is not this function's."""
    return caller.endswith(("dense/matrices.py", "attention_conv.py", "rgat_conv.py"))


@pytest.mark.parametrize("name", [*layers.LAYERS, *layers.MODELS])
def test_every_layer_uses_it(name, monkeypatch):
    """With PyTorch's function, a layer would spend more time in dropout than in attention."""
    layer, callers = layers.made(name).train(), []
    for module in layer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
        for attribute, value in vars(module).items():
            if "drop" in attribute and type(value) is float:  # in PyG's MLP, always the integer 0
                setattr(module, attribute, 0.5)
    plain = F.dropout

    def dropped(x, p=0.5, *args, **kwargs):
        if p:
            callers.append(inspect.stack()[1].filename)
        return plain(x, p, *args, **kwargs)

    for place in (F, torch):
        monkeypatch.setattr(place, "dropout", dropped)
    row = layers.row(name)
    row.call(layer, *row.inputs(layers.Draw()))
    assert [caller for caller in callers if not of_weights(caller)] == []


def drawn_with(setting):
    program = "import torch, gattn; torch.manual_seed(0); print(gattn.dropout(torch.ones(5000)).sum().item())"
    environment = {**os.environ, "GATTN_TORCH": setting}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_pytorchs_draws_by_an_environment_variable():
    torch.manual_seed(0)
    assert float(drawn_with("products,dropout").stdout) == F.dropout(torch.ones(5000)).sum()
    assert "GATTN_TORCH may name" in drawn_with("dropuot").stderr
