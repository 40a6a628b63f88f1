"""SuperGATConv against PyG's, and what it has beyond."""

import copy
import pickle
import random

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from allpairspy import AllPairs
from torch.nn.functional import binary_cross_entropy_with_logits, leaky_relu
from torch_geometric.utils import coalesce, to_undirected

import gattn
from gattn.nn.graph.supergat_conv import SuperGATConv
from gattn.testing import assert_permutation_equivariant, random_edge_index
from tests.nn.against_pyg import FORMS, assert_as_pyg, name_of

N, F, C = 9, 6, 5
OPTIONS = {
    "form": FORMS,
    "heads": (1, 3),
    "concat": (True, False),
    "negative_slope": (0.2, 0.7),
    "add_self_loops": (True, False),
    "bias": (True, False),
    "attention_type": ("MX", "SD"),
    "aggr": ("add", "mean"),
    "flow": ("source_to_target", "target_to_source"),
    "dtype": (torch.float32, torch.float64),
}


@pytest.fixture
def x():
    return torch.randn(N, F)


@pytest.fixture
def edge_index():
    return coalesce(random_edge_index(N, num_edges=30, seed=1))


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def possible(row):
    return len(row) < 9 or row[8] == "source_to_target" or row[0] in ("edge_index", "EdgeIndex")


@pytest.mark.parametrize("options", list(AllPairs(list(OPTIONS.values()), filter_func=possible)), ids=name_of)
def test_as_pyg(options, x, edge_index):
    form, *rest, dtype = options
    chosen = dict(zip(list(OPTIONS)[1:-1], rest, strict=True))
    ours, theirs = (layer(F, C, **chosen).eval() for layer in (SuperGATConv, pyg.SuperGATConv))
    if chosen["bias"]:
        ours.bias.data.normal_()
    assert_as_pyg(ours, theirs, x, FORMS[form](edge_index, (N, N)), dtype=dtype)


class WithLoss(torch.nn.Module):
    """A layer whose output is everything that training looks at."""

    def __init__(self, conv, number):
        super().__init__()
        self.conv, self.number = conv, number

    def forward(self, *args, **kwargs):
        seed(self.number)
        out = self.conv(*args, **kwargs)
        return out, self.conv.att_x, self.conv.att_y, self.conv.get_attention_loss()

    def __repr__(self):
        return repr(self.conv)


TRAINING = {
    "attention_type": ("MX", "SD"),
    "ratios": ((0.5, 1.0), (2.0, 0.6)),
    "is_undirected": (False, True),
    "negatives": ("drawn", "drawn in a batch", "given"),
    "add_self_loops": (True, False),
    "form": ("edge_index", *(["SparseTensor"] if "SparseTensor" in FORMS else [])),
    "dtype": (torch.float32, torch.float64),
}


@pytest.mark.parametrize("options", list(AllPairs(list(TRAINING.values()))), ids=str)
def test_training_as_pyg(options, x, edge_index):
    attention_type, ratios, is_undirected, negatives, add_self_loops, form, dtype = options
    edge_index = torch.cat([edge_index[:, (edge_index < 5).all(0)], torch.tensor([[5, 6, 8], [7, 6, 5]])], dim=1)
    edge_index = to_undirected(edge_index) if is_undirected else edge_index
    chosen = {"neg_sample_ratio": ratios[0], "edge_sample_ratio": ratios[1], "is_undirected": is_undirected}
    chosen |= {"attention_type": attention_type, "add_self_loops": add_self_loops}
    ours, theirs = (WithLoss(layer(F, C, heads=2, **chosen), 7) for layer in (SuperGATConv, pyg.SuperGATConv))
    given = {
        "drawn": {},
        "drawn in a batch": {"batch": torch.tensor([0] * 5 + [1] * 4)},
        "given": {"neg_edge_index": torch.tensor([[0, 8, 3], [8, 1, 3]])},
    }[negatives]
    assert_as_pyg(ours, theirs, x, FORMS[form](edge_index, (N, N)), dtype=dtype, **given)


@pytest.mark.skipif("SparseTensor" not in FORMS, reason="needs torch-sparse")
def test_vectors_of_a_sparse_tensor_are_not_looked_at(x, edge_index):
    adjacency = FORMS["SparseTensor"](edge_index, (N, N))
    with_vectors = adjacency.set_value(torch.rand(edge_index.size(1), 2), layout="coo")
    conv = SuperGATConv(F, C)
    torch.testing.assert_close(conv(x, with_vectors), conv(x, adjacency))


def test_same_seeds_draw_the_same_pairs(edge_index):
    batch = torch.tensor([0] * 5 + [1] * 4)
    ours, theirs = (
        layer(F, C, neg_sample_ratio=1.0, edge_sample_ratio=0.5) for layer in (SuperGATConv, pyg.SuperGATConv)
    )
    for draw in (
        lambda conv: conv.negative_sampling(edge_index, N),
        lambda conv: conv.negative_sampling(edge_index[:, (edge_index < 5).all(0)], N, batch),
        lambda conv: conv.positive_sampling(edge_index),
    ):
        results = []
        for number, conv in ((3, ours), (3, theirs), (4, ours)):
            seed(number)
            results.append(draw(conv))
        assert torch.equal(results[0], results[1])
        assert results[0].numel() > 0
        assert not torch.equal(results[0], results[2])
    drawn = ours.negative_sampling(edge_index, N)
    edges, pairs = ({tuple(pair) for pair in found.t().tolist()} for found in (edge_index, drawn))
    assert not edges & pairs
    assert torch.equal(ours.eval().positive_sampling(edge_index), edge_index)


@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_fresh_layers_and_lazy_ones(attention_type, x, edge_index):
    for channels in (F, -1):
        found = []
        for layer in (SuperGATConv, pyg.SuperGATConv):
            seed(1)
            conv = layer(channels, C, 2, attention_type=attention_type)
            conv(x, edge_index)
            found.append(dict(conv.state_dict()))
            assert str(conv) == f"SuperGATConv({channels}, 5, heads=2, type={attention_type})"
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_formula(attention_type, x, edge_index):
    conv = SuperGATConv(F, C, 2, concat=False, bias=False, attention_type=attention_type).double()
    out = conv(x.double(), edge_index)
    h = conv.lin(x.double()).view(N, 2, C)
    edges = gattn.SparseGraph(edge_index, N, N).with_self_loops().edge_index
    for i in range(N):
        sources = edges[0, edges[1] == i]
        heads = []
        for head in range(2):
            products = torch.stack([h[i, head] @ h[j, head] for j in sources])
            logits = products / C**0.5
            if attention_type == "MX":
                left, right = conv.att_l[0, head], conv.att_r[0, head]
                logits = torch.stack([right @ h[i, head] + left @ h[j, head] for j in sources]) * products.sigmoid()
            heads.append(leaky_relu(logits, 0.2).softmax(0) @ h[sources, head])
        torch.testing.assert_close(out[i], (heads[0] + heads[1]) / 2)


@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_formula_of_the_loss(attention_type, x):
    edge_index, pairs = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 5, 6], [3, 4, 8]])
    conv = SuperGATConv(F, C, 2, add_self_loops=False, attention_type=attention_type)
    conv(x, edge_index, pairs)
    h = conv.lin(x).view(N, 2, C)
    scale = 1 if attention_type == "MX" else C**-0.5
    logits = torch.stack([(h[i] * h[j]).sum(-1) * scale for j, i in [(0, 1), (1, 2), (0, 3), (5, 4), (6, 8)]])
    torch.testing.assert_close(conv.att_x, logits)
    expected = binary_cross_entropy_with_logits(logits.mean(-1), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(conv.get_attention_loss(), expected)
    assert conv.eval().get_attention_loss() == 0


@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_every_backend_and_graph(attention_type, x, edge_index):
    conv = SuperGATConv(F, C, 2, attention_type=attention_type)
    pair = torch.stack([x, 2 * x])
    pairs = torch.tensor([[0, 8, 3], [8, 1, 3]])
    causal = gattn.CompleteGraph(N, causal=True)
    for graph in (edge_index, gattn.SparseGraph(edge_index), causal):
        out, loss = conv(pair, graph, pairs), conv.get_attention_loss()
        with gattn.backend("reference"):
            torch.testing.assert_close(conv(pair, graph, pairs), out)
        torch.testing.assert_close(conv.get_attention_loss(), loss)
        torch.testing.assert_close(conv(x, graph, pairs), out[0])
    packed = gattn.CompleteGraph.packed([4, 5])
    listed = SuperGATConv(F, C, 2, add_self_loops=False, attention_type=attention_type)
    listed.load_state_dict(conv.state_dict())
    for graph in (causal, packed):
        torch.testing.assert_close(conv(x, graph, pairs), listed(x, graph.edge_index, pairs))
        torch.testing.assert_close(conv.att_x, listed.att_x)
    with gattn.backend("cpu"):
        torch.testing.assert_close(conv(pair, edge_index)[1], conv(2 * x, edge_index))
    torch.testing.assert_close(conv(x.to_sparse_csr(), edge_index), conv(x, edge_index))
    adjacency = FORMS["csr"](edge_index, (N, N))
    torch.testing.assert_close(conv(x, adjacency, pairs), conv(x, edge_index, pairs))
    loss = conv.get_attention_loss()
    conv(x, adjacency, pairs)  # which PyG cannot train on
    torch.testing.assert_close(conv.get_attention_loss(), loss)


@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_gradients(attention_type, x, edge_index):
    conv = SuperGATConv(F, 2, 2, attention_type=attention_type).double()
    pairs = torch.tensor([[0, 8, 3], [8, 1, 3]])
    names, parameters = zip(*conv.named_parameters(), strict=True)

    def call(x, *parameters):
        out = torch.func.functional_call(conv, dict(zip(names, parameters, strict=True)), (x, edge_index, pairs))
        return out, conv.get_attention_loss()

    assert torch.autograd.gradcheck(call, (x.double().requires_grad_(), *parameters))


def test_dropout_is_for_training(x, edge_index):
    conv = SuperGATConv(F, C, dropout=1.0)
    assert conv(x, edge_index).eq(conv.bias).all()
    assert conv.eval()(x, edge_index).ne(conv.bias).any(-1).all()


def test_no_edges_and_no_nodes(x):
    conv = SuperGATConv(F, C, add_self_loops=False)
    none = torch.empty(2, 0, dtype=torch.int64)
    assert conv(x, none).eq(conv.bias).all()
    assert conv(x[:0], none).shape == (0, C)
    assert conv.att_x.shape == (0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_half_precision(attention_type, dtype, x, edge_index):
    conv = SuperGATConv(F, C, 2, attention_type=attention_type)
    expected = conv(x, edge_index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(conv(x, edge_index).float(), expected, atol=0.05, rtol=0.05)
    out = conv.to(dtype)(x.to(dtype), edge_index)
    assert out.dtype == conv.att_x.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("attention_type", ["MX", "SD"])
def test_around_it(attention_type, x, edge_index):
    conv = SuperGATConv(F, C, 2, attention_type=attention_type)
    assert_permutation_equivariant(conv, x, edge_index)
    with gattn.record_attention(conv) as records:
        conv(x, edge_index)
    weights, graph = records[""][0]
    assert len(records[""]) == 1  # the pairs of the loss are not attended to
    torch.testing.assert_close(torch.zeros(N, 2).index_add(0, graph.edge_index[1], weights), torch.ones(N, 2))
    for again in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(again(x, edge_index), conv(x, edge_index))
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager" if attention_type == "MX" else "inductor")
    pairs = torch.tensor([[0, 8, 3], [8, 1, 3]])
    conv.add_self_loops = False
    expected = conv(x, edge_index, pairs), conv.get_attention_loss()
    torch.testing.assert_close((compiled(x, edge_index, pairs), conv.get_attention_loss()), expected)
    conv.eval().add_self_loops = True
    torch.testing.assert_close(compiled(x, edge_index), conv(x, edge_index))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler, of the logits of the last call
def test_drawing_pairs_is_left_out_of_compiled_code(x, edge_index):
    conv = SuperGATConv(F, C)
    with pytest.raises(RuntimeError, match="pass neg_edge_index to compile SuperGATConv as a whole"):
        torch.compile(conv, fullgraph=True, backend="aot_eager")(x, edge_index)
    torch._dynamo.reset()
    losses = []
    for layer in (conv, torch.compile(conv, backend="aot_eager")):
        seed(3)
        losses.append((layer(x, edge_index), conv.get_attention_loss()))
    torch.testing.assert_close(*losses)


def test_wrong_inputs(x, edge_index):
    conv = SuperGATConv(F, C)
    with pytest.raises(ValueError, match="there has been none"):
        conv.get_attention_loss()
    with pytest.raises(TypeError, match="x must be a tensor, the features of all nodes; got tuple"):
        conv((x, x), edge_index)
    with pytest.raises(ValueError, match="made for in_channels=6"):
        conv(x[:, :5], edge_index)
    with pytest.raises(IndexError, match="edge_index holds"):
        conv(x, edge_index + N)
    with pytest.raises(IndexError, match="edge_index holds"):
        conv(x, edge_index, edge_index + N)
    with pytest.raises(ValueError, match=r"edge_index must have shape \[2, E\]"):
        conv(x, edge_index, edge_index.t())
    with pytest.raises(ValueError, match="batch must give the graph of each node in ascending order"):
        conv(x, edge_index, batch=torch.tensor([0] * 5 + [1] * 3 + [0]))
    with pytest.raises(ValueError, match="the same for the whole batch"):
        conv(x.unsqueeze(0), gattn.CompleteGraph(N, source_lengths=torch.tensor([3])))
    for options, message in (
        ({"attention_type": "XX"}, "attention_type must be 'MX' or 'SD'; got 'XX'"),
        ({"neg_sample_ratio": 0.0}, "neg_sample_ratio must be positive; got 0.0"),
        ({"edge_sample_ratio": 1.5}, "edge_sample_ratio must be above 0 and at most 1; got 1.5"),
        ({"heads": 0}, "heads must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            SuperGATConv(F, C, **options)
