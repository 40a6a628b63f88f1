"""AttentiveFP against PyG's."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from allpairspy import AllPairs
from torch_geometric.nn.models import AttentiveFP as PyGAttentiveFP
from torch_geometric.utils import coalesce

import gattn
from gattn.models.attentive_fp import AttentiveFP
from gattn.testing import assert_as_exact_as, random_edge_index
from tests.nn.against_pyg import FORMS, mapped, results

N, F_IN, C, OUT, D = 11, 5, 6, 2, 3
OPTIONS = {
    "form": FORMS,
    "num_layers": (1, 3),
    "num_timesteps": (0, 1, 2),
    "dtype": (torch.float32, torch.float64),
}


@pytest.fixture
def molecules():
    """Molecule 1 has a single atom, molecule 2 none, and no bond leaves its molecule."""
    batch = torch.tensor([0] * 6 + [1] + [3] * 4)
    edge_index = random_edge_index(N, num_edges=60, seed=2)
    edge_index = coalesce(edge_index[:, batch[edge_index[0]] == batch[edge_index[1]]])
    return torch.randn(N, F_IN), edge_index, torch.randn(edge_index.size(1), D), batch


def make(layer=AttentiveFP, num_layers=2, num_timesteps=2, **kwargs):
    return layer(F_IN, C, OUT, D, num_layers=num_layers, num_timesteps=num_timesteps, **kwargs)


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()))), ids=str)
def test_as_pyg(options, molecules):
    form, num_layers, num_timesteps, dtype = options
    x, edge_index, edge_attr, batch = molecules
    ours, theirs = (
        make(layer, num_layers, num_timesteps, dropout=0.4).eval() for layer in (AttentiveFP, PyGAttentiveFP)
    )
    for name, parameter in ours.named_parameters():
        if name.endswith(("att_l", "att_src")):  # where logits of a target all have one sign, other gradients are zero
            parameter.data.normal_(std=5)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())

    def in_type(model, dtype):
        floats = mapped((x, FORMS[form](edge_index, (N, N)), edge_attr), lambda tensor: tensor.to(dtype))
        return results(copy.deepcopy(model).to(dtype), *floats, batch)

    exact, expected, found = in_type(theirs, torch.double), in_type(theirs, dtype), in_type(ours, dtype)
    assert list(found) == list(expected)
    for name in expected:  # gradients of attention are small differences of terms of about 1
        assert_as_exact_as(found[name], expected[name], exact[name], scale=1.0, name=name)


def test_fresh_parameters_are_those_of_pyg():
    states, words = [], []
    for layer in (AttentiveFP, PyGAttentiveFP):
        torch.manual_seed(5)
        model = make(layer)
        words.append(str(model))
        states.append(model.state_dict())
    assert words[0] == words[1]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_formula_of_the_readout(molecules):
    model = make(num_layers=1, num_timesteps=1).double()
    x, edge_index, edge_attr, batch = (t.double() if t.is_floating_point() else t for t in molecules)
    h = F.leaky_relu(model.lin1(x), 0.01)
    h = model.gru(F.elu(model.gate_conv(h, edge_index, edge_attr)), h).relu()
    conv, rows = model.mol_conv, []
    for m in range(4):
        atoms = h[batch == m]
        total = atoms.sum(0).relu()
        values = atoms @ conv.lin.weight.t()
        logits = values @ conv.att_src[0, 0] + conv.lin.weight @ total @ conv.att_dst[0, 0]
        message = F.elu(F.leaky_relu(logits, 0.01).softmax(0) @ values + conv.bias)
        rows.append(model.lin2(model.mol_gru(message, total).relu()))
    torch.testing.assert_close(model(x, edge_index, edge_attr, batch), torch.stack(rows))


def test_gradients_and_backends(molecules):
    model = make().double()
    x, edge_index, edge_attr, batch = (t.double() if t.is_floating_point() else t for t in molecules)
    inputs = x.requires_grad_(), edge_attr.requires_grad_()
    with gattn.backend("cpu"):
        out = model(x, edge_index, edge_attr, batch)
        assert torch.autograd.gradcheck(lambda x, edge_attr: model(x, edge_index, edge_attr, batch), inputs)
    with gattn.backend("reference"):
        torch.testing.assert_close(model(x, edge_index, edge_attr, batch), out)


def test_molecules_do_not_see_each_other(molecules):
    model, (x, edge_index, edge_attr, batch) = make(), molecules
    expected = model(x, edge_index, edge_attr, batch)
    alone = edge_index[0] < 6
    torch.testing.assert_close(model(x[:6], edge_index[:, alone], edge_attr[alone], batch[:6]), expected[:1])
    torch.testing.assert_close(model(*molecules, batch_size=6)[:4], expected)


def test_dropout_is_for_training(molecules):
    model = make(dropout=0.5)
    outs = [model(*molecules), model(*molecules)]
    assert not torch.allclose(*outs)
    assert torch.equal(model.eval()(*molecules), model(*molecules))
    torch.testing.assert_close(make(dropout=1.0)(*molecules).std(0), torch.zeros(OUT))


def test_around_it(molecules):
    model = make()
    expected = model(*molecules)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(*molecules), expected)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*molecules, batch_size=4), expected)
    with gattn.record_attention(model) as records:
        model(*molecules)
    assert {name: len(calls) for name, calls in records.items()} == {"gate_conv": 1, "atom_convs.0": 1, "mol_conv": 2}
    weights, graph = records["mol_conv"][1]
    totals = torch.zeros(4, 1).index_add(0, graph.edge_index[1], weights)
    torch.testing.assert_close(totals.flatten(), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    half = copy.deepcopy(model).bfloat16()
    out = half(*(t.bfloat16() if t.is_floating_point() else t for t in molecules))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(*molecules).float(), expected, atol=0.05, rtol=0.05)


def test_no_atoms(molecules):
    x, edge_index, edge_attr, batch = molecules
    assert make()(x[:0], edge_index[:, :0], edge_attr[:0], batch[:0]).shape == (0, OUT)
    assert make()(x[:0], edge_index[:, :0], edge_attr[:0], batch[:0], batch_size=2).shape == (2, OUT)


def test_wrong_inputs(molecules):
    model, (x, edge_index, edge_attr, batch) = make(), molecules
    with pytest.raises(ValueError, match="num_layers must be at least 1; got 0"):
        make(num_layers=0)
    with pytest.raises(ValueError, match="num_timesteps must be at least 0; got -1"):
        make(num_timesteps=-1)
    with pytest.raises(TypeError, match="batch must be a tensor; got NoneType"):
        model(x, edge_index, edge_attr, None)
    with pytest.raises(ValueError, match=r"x must have shape \[N, 5\]; got \[11, 4\]"):
        model(x[:, :4], edge_index, edge_attr, batch)
    with pytest.raises(ValueError, match=r"batch must hold .* \[11\]; got \[3\] of type torch.int64"):
        model(x, edge_index, edge_attr, batch[:3])
    with pytest.raises(ValueError, match="got .* of type torch.float32"):
        model(x, edge_index, edge_attr, batch.float())
    with pytest.raises(IndexError, match="negative"):
        model(x, edge_index, edge_attr, batch - 1)
    with pytest.raises(IndexError, match="3"):
        model(x, edge_index, edge_attr, batch, batch_size=2)
