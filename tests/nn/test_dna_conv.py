"""DNAConv against PyG's, its formula, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch_geometric.utils import coalesce, to_torch_csc_tensor, to_torch_csr_tensor

import gattn
from gattn.nn.graph.dna_conv import DNAConv
from gattn.testing import assert_permutation_equivariant, random_edge_index
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of
from tests.nn.largest_tensor import LargestTensor

N, L, F = 9, 3, 8
OPTIONS = {
    "form": FORMS,
    "flow": ("source_to_target", "target_to_source"),
    "normalize": (True, False),
    "weight": (False, True),
    "heads": (1, 4),
    "groups": (1, 2, 8),
    "layers": (1, L),
    "aggr": ("add", "mean", "max"),
    "add_self_loops": (True, False),
    "bias": (True, False),
    "dtype": (torch.float32, torch.float64),
}


def possible(row):
    get = dict(zip(OPTIONS, row, strict=False)).get
    is_list = get("form") in ("edge_index", "EdgeIndex")
    if get("flow") == "target_to_source" and not is_list:
        return False
    if get("form") == "SparseTensor":  # of which PyG's normalizes every one
        return get("normalize") is not False and not get("weight")
    # PyG's needs weights then, and does not look at those beside a sparse adjacency otherwise.
    return get("weight") is None or is_list == (get("weight") or get("normalize")) or (is_list and get("normalize"))


@pytest.fixture
def x():
    return torch.randn(N, L, F)


@pytest.fixture
def edge_index():
    return coalesce(random_edge_index(N, num_edges=30, seed=1))


@pytest.mark.parametrize("row", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(row, edge_index):
    form, flow, normalize, weight, heads, groups, layers, aggr, add_self_loops, bias, dtype = row
    options = {"normalize": normalize, "add_self_loops": add_self_loops, "bias": bias, "aggr": aggr, "flow": flow}
    ours, theirs = (layer(F, heads, groups, **options) for layer in (DNAConv, pyg.DNAConv))
    args = [torch.randn(N, layers, F), FORMS[form](edge_index, (N, N))]
    args += [torch.rand(edge_index.size(1)) + 0.5] if weight else []
    if form in ("csr", "coo"):
        args[1] = args[1].to(dtype)
    assert_as_pyg(ours, theirs, *args, dtype=dtype)


def test_fresh_layers_are_pygs():
    states = []
    for layer in (DNAConv, pyg.DNAConv):
        torch.manual_seed(3)
        states.append(layer(F, 2, 4).state_dict())
    assert list(states[0]) == list(states[1])
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("aggr", ["add", "max"])
def test_formula(aggr, x, edge_index):
    conv = DNAConv(F, heads=2, normalize=False, aggr=aggr).double()
    x, weight = x.double(), torch.rand(edge_index.size(1)).double()
    out = conv(x, edge_index, weight)
    lins = conv.multi_head
    for i in range(N):
        messages = []
        for e in (edge_index[1] == i).nonzero().flatten().tolist():
            j = edge_index[0, e]
            query, keys, values = lins.lin_q(x[i, -1]), lins.lin_k(x[j]), lins.lin_v(x[j])
            parts = []
            for h in (slice(0, 4), slice(4, 8)):
                found = (keys[:, h] @ query[h] / 2).exp()
                parts.append(found / (1 + found.sum()) @ values[:, h])
            messages.append(weight[e] * torch.cat(parts))
        empty = torch.zeros(F).double()
        expected = torch.stack(messages) if messages else empty.unsqueeze(0)
        torch.testing.assert_close(out[i], expected.sum(0) if aggr == "add" else expected.amax(0))


def test_large_logits_and_nodes_without_edges(x, edge_index):
    x = (x * 1e4).requires_grad_()
    out = DNAConv(F, normalize=False)(x, torch.tensor([[0, 1], [1, 1]]))
    assert out[2:].eq(0).all()
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    none = torch.empty(2, 0, dtype=torch.long)
    for aggr in ("add", "max"):
        assert DNAConv(F, aggr=aggr)(x[:0], none).shape == (0, F)
        assert DNAConv(F, add_self_loops=False, aggr=aggr)(x, none).eq(0).all()


def test_everywhere_the_same(x, edge_index):
    conv = DNAConv(F, heads=4, groups=2)
    out = conv(x, edge_index)
    for backend in ("cpu", "reference"):
        with gattn.backend(backend):
            torch.testing.assert_close(conv(x, edge_index), out)
            torch.testing.assert_close(conv(x, gattn.SparseGraph(edge_index.flip(0), flow="target_to_source")), out)
    csr, csc = (make(edge_index.flip(0), size=(N, N)) for make in (to_torch_csr_tensor, to_torch_csc_tensor))
    torch.testing.assert_close(conv(x, csc), conv(x, csr))
    torch.testing.assert_close(conv(x.transpose(0, 1).contiguous().transpose(0, 1), edge_index), out)
    for clone in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(clone(x, edge_index), out)
    assert_permutation_equivariant(conv, x, edge_index)
    complete = gattn.CompleteGraph(N)
    for normalize in (True, False):
        plain = DNAConv(F, normalize=normalize)
        torch.testing.assert_close(plain(x, complete), plain(x, complete.edge_index))
    ones = torch.ones(edge_index.size(1))
    torch.testing.assert_close(plain(x, edge_index), plain(x, edge_index, ones))


@pytest.mark.parametrize("has_weights", [False, True])
def test_compile(has_weights, x, edge_index):
    conv = DNAConv(F, heads=2, normalize=not has_weights)
    args = x, edge_index, torch.rand(edge_index.size(1)) if has_weights else None
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(conv, fullgraph=True, backend="aot_eager")(*args), conv(*args))


def test_gradients(edge_index):
    conv = DNAConv(2, heads=2).double()
    weight = (torch.rand(edge_index.size(1)) + 0.5).double().requires_grad_()
    x = torch.randn(N, 2, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: conv(x, edge_index, weight), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x: conv(x, edge_index), (x,), fast_mode=True)


@pytest.mark.parametrize("aggr", ["add", "max"])
def test_dropout(aggr, x):
    """Many targets like one another, each with one edge: their mean is what would be without dropout."""
    conv = DNAConv(F, heads=2, dropout=0.5, normalize=False, aggr=aggr)
    edge_index = torch.stack([torch.zeros(5000, dtype=torch.long), torch.arange(1, 5001)])
    x = torch.cat([x[:1], x[1:2].expand(5000, L, F)])
    out = conv(x, edge_index)[1:]
    expected = conv.eval()(x, edge_index)[1:]
    assert out.std(0).min() > 0.01
    torch.testing.assert_close(expected, expected[:1].expand_as(expected))
    torch.testing.assert_close(out.mean(0), expected[0], atol=0.03, rtol=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_cached(form, x, edge_index):
    conv = DNAConv(F, cached=True)
    out = conv(x, FORMS[form](edge_index, (N, N)))
    kept = conv._cached_adj_t if form == "SparseTensor" else conv._cached_edge_index
    assert kept is not None
    torch.testing.assert_close(conv(x, FORMS[form](edge_index[:, :0], (N, N))), out)
    conv.reset_parameters()
    assert conv._cached_edge_index is None
    assert conv._cached_adj_t is None


def test_an_edited_graph_is_normalized_again(x, edge_index):
    conv = DNAConv(F)
    conv(x, edge_index)
    edge_index[0, 3] = (edge_index[0, 3] + 1) % N
    torch.testing.assert_close(conv(x, edge_index), conv(x, edge_index.clone()))


def test_no_channels_of_edges():
    num_edges, channels = 2000, 32
    edge_index, x = random_edge_index(20, num_edges=num_edges), torch.randn(20, L, channels, requires_grad=True)
    with LargestTensor() as largest:
        DNAConv(channels, heads=2)(x, edge_index).sum().backward()
    assert num_edges * L * 2 <= largest.numel < num_edges * channels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, x, edge_index):
    conv = DNAConv(F, heads=2)
    expected = conv(x, edge_index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(conv(x, edge_index).float(), expected, atol=0.05, rtol=0.05)
    out = conv.to(dtype)(x.to(dtype), edge_index)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    hub = torch.stack([torch.arange(1000), torch.zeros(1000, dtype=torch.long)])
    features = torch.randn(1000, 1, F).to(dtype)
    out = conv(features, hub)[0].float()
    torch.testing.assert_close(out, copy.deepcopy(conv).float()(features.float(), hub)[0], atol=0.02, rtol=0.02)


def test_recorded_weights(x, edge_index):
    conv = DNAConv(F, heads=2, normalize=False)
    with gattn.record_attention(conv) as records:
        conv(x, edge_index)
    ((weights, graph),) = records[""]
    assert graph.edge_index.equal(edge_index)
    totals = weights.view(-1, L, 2).sum(1)
    assert weights.shape == (edge_index.size(1), L * 2)
    assert totals.min() > 0
    assert totals.max() < 1  # the rest went to the sink


def test_wrong_inputs(x, edge_index):
    conv = DNAConv(F)
    with pytest.raises(TypeError, match="x must be a tensor, the features of all nodes; got tuple"):
        conv((x, x), edge_index)
    for wrong in (x[:, 0], x[:, :0]):
        with pytest.raises(ValueError, match=r"shape \[N, L, F\], with at least one layer; got"):
            conv(wrong, edge_index)
    with pytest.raises(ValueError, match="in_channels=8"):
        conv(x[..., :4], edge_index)
    with pytest.raises(ValueError, match=r"for each of 20 edges; got torch.float32 of shape \[2\]"):
        conv(x, edge_index[:, :20], torch.ones(2))
    with pytest.raises(ValueError, match="got torch.int64"):
        conv(x, edge_index, torch.ones(edge_index.size(1), dtype=torch.long))
    with pytest.raises(IndexError):
        conv(x, edge_index + N)
    for options in ({"heads": 3}, {"groups": 5}, {"channels": 24, "heads": 2, "groups": 3}):
        with pytest.raises(ValueError, match="heads and groups must divide channels"):
            DNAConv(**{"channels": F, **options})
    with pytest.raises(ValueError, match="heads must be at least 1; got 0"):
        DNAConv(F, heads=0)
    with pytest.raises(ValueError, match="dropout"):
        DNAConv(F, dropout=1.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_degrees_are_counted_in_single_precision(dtype):
    """Half precision cannot count the weights of 4 000 edges, each of which is one."""
    nodes = 4000
    edges = torch.stack([torch.arange(nodes), torch.zeros(nodes, dtype=torch.long)])
    x = torch.ones(nodes, 2, F)
    conv = DNAConv(F)
    weight = torch.ones(nodes)
    found = copy.deepcopy(conv).to(dtype)(x.to(dtype), edges, weight.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), conv(x, edges, weight), rtol=0.03, atol=0.03)
