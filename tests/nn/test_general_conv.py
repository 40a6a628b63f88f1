"""GeneralConv against PyG's, its formula, and what it has beyond."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch_geometric.utils import coalesce

import gattn
from gattn.nn.graph.general_conv import GeneralConv
from gattn.testing import assert_permutation_equivariant, random_edge_index
from tests.cases import mostly_slow
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of
from tests.nn.largest_tensor import LargestTensor

N, IN, OUT, D = 9, 6, 5, 3
KINDS = ("sum", "additive", "dot_product")
BOTH = list(itertools.product(KINDS, (True, False)))
OPTIONS = {
    "form": FORMS,
    "inputs": ("single", "pair", "bipartite", "lazy"),
    "flow": ("source_to_target", "target_to_source"),
    "kind": KINDS,
    "directed_msg": (True, False),
    "edge": (None, D, -1),
    "heads": (1, 3),
    "aggr": ("add", "mean", "max"),
    "skip": ("other channels", "identity", "linear"),
    "l2_normalize": (False, True),
    "bias": (True, False),
    "dtype": (torch.float32, torch.float64),
}


def possible(row):
    get = dict(zip(OPTIONS, row, strict=False)).get
    is_backwards = get("flow") == "target_to_source"
    if is_backwards and (get("form") not in ("edge_index", "EdgeIndex") or get("inputs") == "pair"):
        return False
    # PyG's shares a matrix between both ends then, and gives a pair's output the wrong number of rows for this flow.
    is_shared = get("kind") == "dot_product" or get("directed_msg") is False
    return not (get("inputs") == "bipartite" and (is_shared or is_backwards))


def kind_of(kind):
    return {} if kind == "sum" else {"attention": True, "attention_type": kind}


def graph_of(num_sources, num_targets):
    return coalesce(random_edge_index(num_sources, num_targets, 30, seed=1))


@pytest.fixture
def x():
    return torch.randn(N, IN)


@pytest.fixture
def edge_index():
    return graph_of(N, N)


@pytest.mark.parametrize("row", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(row):
    form, inputs, flow, kind, directed_msg, edge, heads, aggr, skip, l2_normalize, bias, dtype = row
    sizes = (N, 7) if inputs in ("pair", "bipartite") else (N, N)
    channels = (IN, 4) if inputs == "bipartite" else IN
    out_channels = IN if skip != "other channels" else OUT
    edge_index = graph_of(*sizes)
    x = torch.randn(N, IN)
    x = (x, torch.randn(7, 4 if inputs == "bipartite" else IN)) if sizes[1] != N else x
    options = {"in_edge_channels": edge, "aggr": aggr, "skip_linear": skip == "linear", "directed_msg": directed_msg}
    options |= {"heads": heads, "l2_normalize": l2_normalize, "bias": bias, "flow": flow, **kind_of(kind)}
    ours, theirs = (
        layer(-1 if inputs == "lazy" else channels, out_channels, **options) for layer in (GeneralConv, pyg.GeneralConv)
    )
    args = [x, FORMS[form](edge_index, sizes)]
    args += [] if edge is None else [torch.randn(edge_index.size(1), D)]
    ours(*args), theirs(*args)  # which finds lazy channels
    assert_as_pyg(ours, theirs, *args, dtype=dtype)


@pytest.mark.parametrize(("kind", "directed_msg"), BOTH)
def test_fresh_layers_are_pygs(kind, directed_msg):
    states = []
    for layer in (GeneralConv, pyg.GeneralConv):
        torch.manual_seed(3)
        conv = layer((IN, IN), OUT, D, directed_msg=directed_msg, heads=2, **kind_of(kind))
        states.append(conv.state_dict())
    assert list(states[0]) == list(states[1])
    torch.testing.assert_close(*states, rtol=0, atol=0)
    ours = GeneralConv(IN, OUT, D, directed_msg=directed_msg, **kind_of(kind))
    before = copy.deepcopy(ours.state_dict())
    ours.reset_parameters()
    assert all(name == "scaler" or not value.equal(before[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize(("kind", "directed_msg"), BOTH)
def test_formula(kind, directed_msg, x, edge_index):
    conv = GeneralConv(IN, OUT, D, directed_msg=directed_msg, heads=2, **kind_of(kind)).double()
    x, edge_attr = x.double(), torch.randn(edge_index.size(1), D).double()
    out = conv(x, edge_index, edge_attr)

    def message(source, target, edge):
        sent = conv.lin_msg(x[source]) + conv.lin_edge(edge_attr[edge])
        return (sent if directed_msg else sent + conv.lin_msg_i(x[target])).view(2, OUT)

    for i in range(N):
        edges = [(int(j), i, e) for e, (j, t) in enumerate(edge_index.t()) if t == i]
        expected = conv.lin_self(x[i])
        if edges:
            sent = torch.stack([message(*edge) for edge in edges])
            if kind == "additive":
                weights = F.leaky_relu((sent * conv.att_msg).sum(-1), 0.2).softmax(0)
            elif kind == "dot_product":
                back = torch.stack([message(i, j, e) for j, _, e in edges])
                weights = F.leaky_relu((sent * back).sum(-1) / OUT**0.5, 0.2).softmax(0)
            else:
                weights = torch.ones(len(edges), 2).double()
            expected = expected + (weights.unsqueeze(-1) * sent).sum(0).mean(0)
        torch.testing.assert_close(out[i], expected, rtol=1e-6, atol=1e-6)  # PyG's scale is a number in float32


@pytest.mark.parametrize(("kind", "directed_msg"), mostly_slow(BOTH, every=7))
def test_everywhere_the_same(kind, directed_msg, x, edge_index):
    conv, edge_attr = GeneralConv(IN, OUT, D, directed_msg=directed_msg, heads=2, **kind_of(kind)), None
    edge_attr = torch.randn(edge_index.size(1), D)
    out = conv(x, edge_index, edge_attr)
    for backend in ("cpu", "reference"):
        with gattn.backend(backend):
            torch.testing.assert_close(conv(x, gattn.SparseGraph(edge_index), edge_attr), out)
    batch = conv(torch.stack([x, 2 * x]), edge_index, edge_attr)
    torch.testing.assert_close(batch, torch.stack([out, conv(2 * x, edge_index, edge_attr)]))
    torch.testing.assert_close(conv(x, edge_index, torch.stack([edge_attr] * 2)[0]), out)
    for clone in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(clone(x, edge_index, edge_attr), out)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, edge_index, edge_attr), out)

    plain = GeneralConv(IN, OUT, directed_msg=directed_msg, heads=2, **kind_of(kind))
    assert_permutation_equivariant(plain, x, edge_index)
    complete = gattn.CompleteGraph(N, causal=True)
    torch.testing.assert_close(plain(x, complete), plain(x, complete.edge_index))
    edge_attr = torch.randn(complete.num_edges, D)
    torch.testing.assert_close(conv(x, complete, edge_attr), conv(x, complete.edge_index, edge_attr))


@pytest.mark.parametrize("kind", KINDS)
def test_a_watched_projection_is_called(kind, x, edge_index):
    conv, edge_attr = GeneralConv(IN, OUT, D, heads=2, **kind_of(kind)), torch.randn(edge_index.size(1), D)
    expected = conv(x, edge_index, edge_attr)
    calls = []
    conv.lin_edge.register_forward_hook(lambda *given: calls.append(given))
    torch.testing.assert_close(conv(x, edge_index, edge_attr), expected)
    assert len(calls) == 1


@pytest.mark.parametrize(("kind", "directed_msg"), BOTH)
def test_gradients(kind, directed_msg, x, edge_index):
    conv = GeneralConv(IN, 2, D, directed_msg=directed_msg, heads=2, **kind_of(kind)).double()
    inputs = x.double().requires_grad_(), torch.randn(edge_index.size(1), D).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, edge_attr: conv(x, edge_index, edge_attr), inputs)


def test_nodes_without_edges_and_graphs_without_nodes(x):
    none = torch.empty(2, 0, dtype=torch.long)
    for kind, directed_msg in BOTH:
        conv = GeneralConv(IN, OUT, D, directed_msg=directed_msg, **kind_of(kind))
        torch.testing.assert_close(conv(x, none, torch.empty(0, D)), conv.lin_self(x))
        torch.testing.assert_close(conv(x, torch.tensor([[0], [1]]), torch.ones(1, D))[2:], conv.lin_self(x)[2:])
        assert conv(x[:0], none, torch.empty(0, D)).shape == (0, OUT)


@pytest.mark.parametrize("kind", ["sum", "additive"])
def test_no_channels_of_edges(kind):
    heads, num_edges = 2, 1000
    conv = GeneralConv(IN, 16, D, heads=heads, directed_msg=False, **kind_of(kind))
    edge_index, edge_attr = random_edge_index(20, num_edges=num_edges), torch.randn(num_edges, D, requires_grad=True)
    with LargestTensor() as largest:
        conv(torch.randn(20, IN), edge_index, edge_attr).sum().backward()
    assert num_edges * heads <= largest.numel < num_edges * heads * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(dtype, kind, x, edge_index):
    conv = GeneralConv(IN, OUT, D, directed_msg=False, heads=2, **kind_of(kind))
    edge_attr = torch.randn(edge_index.size(1), D)
    expected = conv(x, edge_index, edge_attr)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(conv(x, edge_index, edge_attr).float(), expected, atol=0.1, rtol=0.1)
    out = conv.to(dtype)(x.to(dtype), edge_index, edge_attr.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.1)


def test_recorded_weights_and_lengths(x, edge_index):
    conv = GeneralConv(IN, OUT, heads=2, attention=True, directed_msg=False)
    with gattn.record_attention(conv) as records:
        conv(x, edge_index)
    ((weights, graph),) = records[""]
    totals = torch.zeros(N, 2).index_add(0, graph.edge_index[1], weights)
    torch.testing.assert_close(totals.sum(1), 2.0 * (graph.edge_index[1].bincount(minlength=N) > 0))
    lengths = gattn.CompleteGraph(N, source_lengths=torch.tensor([4, 0]))
    out = conv(torch.stack([x, x]), lengths)
    torch.testing.assert_close(out[1], conv.lin_self(x))  # nobody to attend to


def test_wrong_inputs(x, edge_index):
    edge_attr = torch.randn(edge_index.size(1), D)
    conv, with_edges = GeneralConv(IN, OUT), GeneralConv(IN, OUT, D)
    with pytest.raises(ValueError, match="in_edge_channels"):
        conv(x, edge_index, edge_attr)
    with pytest.raises(ValueError, match="so it needs edge_attr"):
        with_edges(x, edge_index)
    with pytest.raises(ValueError, match="edge_attr has 2 channels"):
        with_edges(x, edge_index, edge_attr[:, :2])
    with pytest.raises(ValueError, match="x\\[1\\] may not be None"):
        conv((x, None), edge_index)
    with pytest.raises(ValueError, match="in_channels=6"):
        conv(x[:, :5], edge_index)
    with pytest.raises(ValueError, match="size gives 8 targets"):
        conv(x, edge_index, size=(N, 8))
    with pytest.raises(IndexError):
        conv(x, edge_index + N)
    with pytest.raises(ValueError, match="must be 'additive' or 'dot_product'; got 'cosine'"):
        GeneralConv(IN, OUT, attention=True, attention_type="cosine")
    with pytest.raises(ValueError, match="heads must be at least 1; got 0"):
        GeneralConv(IN, OUT, heads=0)
    for options in ({"directed_msg": False}, kind_of("dot_product")):
        with pytest.raises(ValueError, match="share a matrix"):
            GeneralConv((IN, 4), OUT, **options)
