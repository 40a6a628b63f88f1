"""RGATConv against PyG's, and what it has beyond."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch_geometric.utils import coalesce

import gattn
from gattn.nn.hetero.rgat_conv import RGATConv
from gattn.testing import assert_permutation_equivariant, random_edge_index
from tests.cases import mostly_slow
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of

N, F, C, R, D, E = 9, 6, 4, 5, 3, 40
OPTIONS = {
    "mod": (None, "additive", "scaled", "f-additive", "f-scaled"),
    "attention_mechanism": ("within-relation", "across-relation"),
    "attention_mode": ("additive-self-attention", "multiplicative-self-attention"),
    "dim": (1, 2),
    "matrices": ({}, {"num_bases": 3}, {"num_blocks": 2}),
    "edge_dim": (None, D),
    "concat": (True, False),
    "bias": (True, False),
    "heads": (1, 3),
    "negative_slope": (0.2, 0.01),
    "aggr": ("add", "mean", "max"),
    "form": FORMS,
    "flow": ("source_to_target", "target_to_source"),
}
NAMES = list(OPTIONS)


def possible(row):
    given = dict(zip(NAMES, row, strict=False))
    if given.get("dim") == 2 and given["attention_mode"].startswith("additive"):
        return False
    return given.get("flow") != "target_to_source" or given["form"] in ("edge_index", "EdgeIndex")


def make(layer=RGATConv, heads=2, **options):
    conv = layer(F, C, R, heads=heads, **options)
    for parameter in conv.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return conv


@pytest.fixture
def x():
    return torch.randn(N, F)


@pytest.fixture
def edge_index():
    return random_edge_index(N, num_edges=E, seed=1)


@pytest.fixture
def edge_type():
    types = torch.randint(R, (E,))
    types[types == 3] = 0  # a relation without edges
    return types


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(options, x, edge_index, edge_type):
    options = dict(zip(NAMES, options, strict=True))
    form, matrices = options.pop("form"), options.pop("matrices")
    ours, theirs = (make(layer, **options, **matrices) for layer in (RGATConv, pyg.RGATConv))
    edge_index = edge_index if form == "edge_index" else coalesce(edge_index)
    edge_attr = None if options["edge_dim"] is None else torch.randn(edge_index.size(1), D)
    graph = FORMS[form](edge_index, (N, N))
    edge_type = edge_type[: edge_index.size(1)]
    assert_as_pyg(ours, theirs, x, graph, edge_type, edge_attr, return_attention_weights=True)
    assert_as_pyg(ours, theirs, x, graph, edge_type, edge_attr=edge_attr)
    assert ours._alpha is None


@pytest.mark.parametrize("matrices", [{}, {"num_bases": 3}, {"num_blocks": 2}], ids=str)
def test_same_start(matrices):
    ours, theirs = (
        (torch.manual_seed(1), layer(F, C, R, edge_dim=D, **matrices))[1] for layer in (RGATConv, pyg.RGATConv)
    )
    for (name, parameter), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, torch.full_like(parameter, 1 / C) if name == "l2" else expected)


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("additive", [True, False])
def test_formula(additive, within, x, edge_index, edge_type):
    conv = make(
        attention_mechanism="within-relation" if within else "across-relation",
        attention_mode="additive-self-attention" if additive else "multiplicative-self-attention",
        mod="f-scaled",
    ).double()
    x = x.double()
    out = conv(x, edge_index, edge_type)
    for i in range(N):
        edges = (edge_index[1] == i).nonzero().flatten()
        h = [conv.weight[edge_type[e]].t() @ x[edge_index[0, e]] for e in edges]
        q = [conv.weight[edge_type[e]].t() @ x[i] @ conv.q for e in edges]
        k = [source @ conv.k for source in h]
        logits = [torch.nn.functional.leaky_relu(a + b, 0.2) if additive else a * b for a, b in zip(q, k, strict=True)]
        expected = torch.zeros(2, C, dtype=torch.double)
        for n, e in enumerate(edges):
            rivals = [m for m, other in enumerate(edges) if not within or edge_type[other] == edge_type[e]]
            alpha = logits[n].exp() / sum(logits[m].exp() for m in rivals)
            expected += len(edges) * alpha.unsqueeze(-1) * h[n].view(2, C)
        torch.testing.assert_close(out[i], expected.flatten() + conv.bias)


@pytest.mark.parametrize("mechanism", OPTIONS["attention_mechanism"])
@pytest.mark.parametrize("mode", OPTIONS["attention_mode"])
@pytest.mark.parametrize("mod", ["additive", "scaled", "f-additive"])
def test_backends_and_gradients(mechanism, mode, mod, x, edge_index, edge_type):
    conv = make(attention_mechanism=mechanism, attention_mode=mode, mod=mod, edge_dim=D).double()
    x, edge_attr = x.double().requires_grad_(), torch.randn(E, D, dtype=torch.double, requires_grad=True)
    with gattn.backend("cpu"):
        out = conv(x, edge_index, edge_type, edge_attr)
        batch = conv(torch.stack([x, 2 * x]), edge_index, edge_type, edge_attr)
        torch.testing.assert_close(batch, torch.stack([out, conv(2 * x, edge_index, edge_type, edge_attr)]))
    with gattn.backend("reference"):
        torch.testing.assert_close(conv(x, edge_index, edge_type, edge_attr), out)
    call = lambda x, edge_attr: conv(x, edge_index, edge_type, edge_attr)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, edge_attr), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x, edge_attr), fast_mode=True)


def test_no_matrix_per_edge():
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **kwargs or {})
            largest = max([largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(x))])
            return out

    num_edges = 3000
    conv = RGATConv(16, 4, 10, heads=4)
    edge_index, edge_type = random_edge_index(50, num_edges=num_edges), torch.randint(10, (num_edges,))
    with Sizes():
        conv(torch.randn(50, 16), edge_index, edge_type).sum().backward()
    assert 0 < largest <= 2 * num_edges * 16 < num_edges * 16 * 16


def test_sources_and_targets(x, edge_index, edge_type):
    conv = make()
    other = torch.randn(4, F)
    edge_index[1] %= 4
    out = conv((x, other), edge_index, edge_type, size=(N, 4))
    torch.testing.assert_close(out, pyg_twin(conv)((x, other), edge_index, edge_type, size=(N, 4)))
    flipped = copy.deepcopy(conv)
    flipped.flow = "target_to_source"
    torch.testing.assert_close(flipped((x, other), edge_index.flip(0), edge_type), out)
    torch.testing.assert_close(conv((x, other), gattn.SparseGraph(edge_index, 4, N), edge_type), out)


def pyg_twin(conv):
    theirs = pyg.RGATConv(F, C, R, heads=conv.heads)
    theirs.load_state_dict(conv.state_dict())
    return theirs


@pytest.mark.parametrize("mechanism", OPTIONS["attention_mechanism"])
def test_few_edges_and_nodes(mechanism, x):
    conv = make(attention_mechanism=mechanism)
    assert conv(x[:0], torch.empty(2, 0, dtype=torch.long), torch.empty(0, dtype=torch.long)).shape == (0, 2 * C)
    out = conv(x, torch.empty(2, 0, dtype=torch.long), torch.empty(0, dtype=torch.long))
    torch.testing.assert_close(out, conv.bias.expand(N, -1))
    out = conv(x, torch.tensor([[2], [5]]), torch.tensor([4]))
    torch.testing.assert_close(out[5], x[2] @ conv.weight[4] + conv.bias)


def test_relations_as_values_of_an_adjacency(x, edge_index):
    edge_index = coalesce(edge_index)
    types = torch.randint(R, (edge_index.size(1),))
    adjacency = torch.sparse_coo_tensor(edge_index.flip(0), types, (N, N)).coalesce()
    conv = make()
    out, (weighted, alpha) = conv(x, adjacency.to_sparse_csr(), return_attention_weights=False)  # as PyG
    torch.testing.assert_close(out, conv(x, edge_index, types))
    torch.testing.assert_close(weighted.values(), alpha)


def test_dropout(x, edge_index, edge_type):
    conv = make(dropout=0.6)
    alpha = conv(x, edge_index, edge_type, return_attention_weights=True)[1][1]
    totals = torch.zeros(N, 2).index_add(0, edge_index[1], alpha)  # before dropout
    torch.testing.assert_close(totals[:-1], torch.ones(N - 1, 2))
    assert not torch.equal(conv(x, edge_index, edge_type), conv(x, edge_index, edge_type))
    conv.eval()
    torch.testing.assert_close(conv(x, edge_index, edge_type), pyg_twin(conv)(x, edge_index, edge_type))
    mean = make(dropout=1.0, aggr="mean")
    torch.testing.assert_close(mean(x, edge_index, edge_type), mean.bias.expand(N, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, x, edge_index, edge_type):
    for mechanism in OPTIONS["attention_mechanism"]:
        conv = make(attention_mechanism=mechanism, mod="scaled").eval()
        expected = conv(x, edge_index, edge_type)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            close = {"atol": 0.05 * expected.abs().max().item(), "rtol": 0.05}
            torch.testing.assert_close(conv(x, edge_index, edge_type).float(), expected, **close)
        out = conv.to(dtype)(x.to(dtype), edge_index, edge_type)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, **close)


@pytest.mark.parametrize("options", [("within-relation", "f-additive"), ("across-relation", None)], ids=str)
def test_compiled(options, x, edge_index, edge_type):
    conv = make(attention_mechanism=options[0], mod=options[1])
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, edge_index, edge_type), conv(x, edge_index, edge_type))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("num_relations", [1, R])
@pytest.mark.parametrize("how", ["export", "trace"])
def test_programs_serve_few_edges(how, num_relations, x, edge_index, edge_type):
    conv = RGATConv(F, C, num_relations, heads=2).requires_grad_(False)
    inputs, auto = (x, edge_index, edge_type % num_relations), torch.export.Dim.AUTO
    if how == "export":
        program = torch.export.export(conv, inputs, dynamic_shapes=({0: auto}, {1: auto}, {0: auto})).module()
    else:
        program = torch.jit.trace(conv, inputs)
    for count in (3 * R, 2, 1, 0):
        given = x[:-1], edge_index[:, :count] % (N - 1), inputs[2][:count]
        torch.testing.assert_close(program(*given), conv(*given))


@pytest.mark.parametrize(("end", "bad"), mostly_slow([(0, -1), (0, N), (1, N), (2, -1), (2, R)], every=3))
def test_compiled_code_takes_no_index_for_another(end, bad, x, edge_index, edge_type):
    conv = make()
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    compiled(x, edge_index, edge_type).sum().backward()
    [*edge_index, edge_type][end][3] = bad
    with pytest.raises(RuntimeError, match="edge_type holds a relation" if end == 2 else "edge_index holds a"):
        compiled(x, edge_index, edge_type)


def test_around_it(x, edge_index, edge_type):
    conv = make(attention_mechanism="within-relation", mod="additive")
    out = conv(x, edge_index, edge_type)
    for twin in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(twin(x, edge_index, edge_type), out)
    assert_permutation_equivariant(lambda x, edges: conv(x, edges, torch.zeros(E).long()), x, edge_index)
    order = torch.randperm(E)
    torch.testing.assert_close(conv(x, edge_index[:, order], edge_type[order]), out)
    with gattn.record_attention(conv) as records:
        torch.testing.assert_close(conv(x, edge_index, edge_type), out)
    [record] = records[""]
    torch.testing.assert_close(record.edge_index, edge_index)
    totals = torch.zeros(R * N, 2).index_add(0, edge_type * N + edge_index[1], record.weights)
    assert (totals.isclose(torch.tensor(1.0)) | (totals == 0)).all()
    edge_type.copy_((edge_type + 1) % R)  # nothing about the edges is remembered
    torch.testing.assert_close(conv(x, edge_index, edge_type), conv(x, edge_index.clone(), edge_type.clone()))
    assert not torch.allclose(conv(x, edge_index, edge_type), out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mod": "adaptive"}, "mod must be one of None, 'additive', .*; got 'adaptive'"),
        ({"attention_mechanism": "within"}, "attention_mechanism must be one of 'within-relation'"),
        ({"attention_mode": "additive"}, "attention_mode must be one of"),
        ({"dim": 2}, "dim=2 requires attention_mode='multiplicative-self-attention'"),
        ({"dropout": 0.5, "mod": "scaled"}, "use mod=None or dropout=0"),
        ({"num_bases": 2, "num_blocks": 2}, "give num_bases or num_blocks, not both"),
        ({"num_blocks": 4}, "num_blocks=4 must divide in_channels=6 and heads"),
        ({"num_bases": 0}, "num_bases must be at least 1; got 0"),
    ],
    ids=str,
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        RGATConv(F, C, R, **options)


def test_wrong_inputs(x, edge_index, edge_type):
    conv = make()
    for wrong, error, message in (
        (None, TypeError, "edge_type must be a tensor, the relation of each edge; got None"),
        (edge_type.float(), ValueError, "integers from 0; got torch.float32"),
        (edge_type[1:], ValueError, r"one relation per edge, \[40\]; got shape \[39\]"),
        (edge_type + R, IndexError, r"num_relations=5 \(0 to 4\)"),
        (edge_type - 1, IndexError, "edge_type holds relation -1"),
    ):
        with pytest.raises(error, match=message):
            conv(x, edge_index, wrong)
    with pytest.raises(ValueError, match="RGATConv compares sources with targets"):
        conv((x, None), edge_index, edge_type)
    with pytest.raises(ValueError, match="needs a graph that lists its edges"):
        conv(x, gattn.CompleteGraph(N), edge_type)
    with pytest.raises(ValueError, match="got edge_attr, but this layer was made without edge features"):
        conv(x, edge_index, edge_type, torch.randn(E, D))
    with pytest.raises(ValueError, match="it needs edge_attr"):
        make(edge_dim=D)(x, edge_index, edge_type)
    with pytest.raises(IndexError, match="source index"):
        conv(x, edge_index + N, edge_type)
    with pytest.raises(ValueError, match="edge_type is on meta, the features are on cpu"):
        conv(x, edge_index, edge_type.to("meta"))
    with pytest.raises(ValueError, match="the graph is on cpu, the features are on meta"):
        conv.to("meta")(x.to("meta"), edge_index, edge_type)
