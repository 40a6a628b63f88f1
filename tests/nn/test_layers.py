"""The layers where PyG's layers work, and what they can beyond."""

import copy
import functools
import math
import pickle
import subprocess
import sys
from typing import Optional

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.utils import prune
from torch_geometric import EdgeIndex
from torch_geometric.data import HeteroData
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.nn import HeteroConv, Sequential, to_hetero
from torch_geometric.utils import softmax

import gattn
from gattn import CompleteGraph, SparseGraph
from gattn.nn import GATConv, GATv2Conv, TransformerConv
from gattn.ops.backends.cpu import native
from gattn.testing import assert_permutation_equivariant, random_edge_index
from tests.cases import Recorded

LAYERS = [GATConv, GATv2Conv, TransformerConv]
LOOPED = [GATConv, GATv2Conv]
N, F = 10, 6
Maybe, Size = Optional[Tensor], Optional[int]  # noqa: UP045 - as PyG parses


@pytest.fixture
def x():
    return torch.randn(N, F)


@pytest.fixture
def edge_index():
    return random_edge_index(N, num_edges=30)


@pytest.mark.parametrize("layer", LAYERS)
class TestEverywhere:
    def test_permutation(self, layer, x, edge_index):
        assert_permutation_equivariant(layer(F, 4, heads=2).double(), x.double(), edge_index)

    def test_isolated_targets(self, layer, x):
        conv = layer(
            F, 4, bias=False, **({"root_weight": False} if layer is TransformerConv else {"add_self_loops": False})
        )
        out = conv(x.requires_grad_(), torch.tensor([[0], [1]]))
        assert (out[2:] == 0).all()
        out.sum().backward()
        assert x.grad.isfinite().all()

    def test_static_batches(self, layer, edge_index):
        conv = layer(F, 4, heads=2, edge_dim=3)
        x, edge_attr = torch.randn(3, N, F), torch.randn(30, 3)
        out, (edges, alpha) = conv(x, edge_index, edge_attr, return_attention_weights=True)
        assert alpha.shape == (3, edges.size(1), 2)
        torch.testing.assert_close(out, torch.stack([conv(one, edge_index, edge_attr) for one in x]))
        pair = conv((x, x[:, :7]), edge_index.clamp(max=6), edge_attr)
        assert pair.shape == (3, 7, 8)

    def test_sparse_features(self, layer, x, edge_index):
        conv = layer(F, 4, heads=2)
        x = torch.relu(x).requires_grad_()
        expected = conv(x, edge_index)
        expected.sum().backward()
        gradients = [parameter.grad.clone() for parameter in conv.parameters()]
        for sparse in (x.detach().to_sparse_csr(), x.detach().to_sparse_csc(), x.detach().to_sparse()):
            conv.zero_grad()
            out = conv(sparse, edge_index)
            torch.testing.assert_close(out, expected)
            out.sum().backward()
            for parameter, gradient in zip(conv.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_sparse_features_in_other_types(self, layer, x, edge_index, dtype):
        conv = layer(F, 4, heads=2).to(dtype)
        x = torch.relu(x).to(dtype)
        out = conv(x.to_sparse_csr(), edge_index)
        assert out.dtype == dtype
        torch.testing.assert_close(
            out, conv(x, edge_index), rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
        )
        out.float().sum().backward()

    def test_sparse_features_under_autocast(self, layer, x, edge_index):
        conv = layer(F, 4, heads=2)
        x = torch.relu(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = conv(x.to_sparse_csr(), edge_index)
            out.float().sum().backward()
        torch.testing.assert_close(out.float(), conv(x, edge_index), rtol=0.05, atol=0.05)

    def test_sparse_features_that_need_a_gradient(self, layer, x, edge_index):
        conv = layer(F, 4, heads=2)
        dense = torch.relu(x).requires_grad_()
        conv(dense, edge_index).sum().backward()
        sparse = torch.relu(x).to_sparse_csr().requires_grad_()
        conv(sparse, edge_index).sum().backward()
        stored = dense.detach() != 0
        torch.testing.assert_close(sparse.grad.to_dense()[stored], dense.grad[stored])

    @pytest.mark.parametrize("edit", [lambda x: x.mul_(5), lambda x: x.values().mul_(5)])
    def test_sparse_features_edited_before_the_backward_pass(self, layer, x, edge_index, edit):
        sparse = torch.relu(x).to_sparse_csr()
        out = layer(F, 4)(sparse, edge_index).sum()
        edit(sparse)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()

    def test_sparse_graph_instead_of_edge_index(self, layer, x, edge_index):
        conv = layer(F, 4, heads=2)
        torch.testing.assert_close(conv(x, SparseGraph(edge_index)), conv(x, edge_index))
        torch.testing.assert_close(conv(x, SparseGraph(edge_index, num_sources=N, num_targets=N)), conv(x, edge_index))

    def test_autocast_gives_the_types_that_pyg_gives(self, layer, x, edge_index):
        theirs, ours = getattr(pyg, layer.__name__)(F, 4, heads=2), layer(F, 4, heads=2)
        ours.load_state_dict(theirs.state_dict())
        exact = theirs(x, edge_index)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, out = theirs(x, edge_index), ours(x, edge_index)
        assert out.dtype == expected.dtype
        assert (out - exact).abs().max() <= 2 * (expected - exact).abs().max()
        out.sum().backward()
        assert all(parameter.grad is not None for parameter in ours.parameters())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, layer, x, edge_index, dtype):
        conv = layer(F, 4, heads=2)
        exact = conv(x, edge_index)
        out = conv.to(dtype)(x.to(dtype), edge_index)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)

    def test_copies_and_checkpoints(self, layer, x, edge_index):
        conv = layer(F, 4, heads=2).eval()
        expected = conv(x, edge_index)
        for copied in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
            torch.testing.assert_close(copied(x, edge_index), expected)
        fresh = layer(-1, 4, heads=2).eval()
        fresh.load_state_dict(conv.state_dict())
        torch.testing.assert_close(fresh(x, edge_index), expected)
        assert pickle.loads(pickle.dumps(layer(-1, 4)))(x, edge_index).shape == (N, 4)

    def test_sequential(self, layer, x, edge_index):
        model = Sequential(
            "x, edge_index", [(layer(F, 8), "x, edge_index -> x"), nn.ReLU(), (layer(8, 4), "x, edge_index -> x")]
        )
        assert model(x, edge_index).shape == (N, 4)

    def test_compile(self, layer, x, edge_index):
        torch._dynamo.reset()
        conv = layer(F, 4, heads=2)
        expected, backend = conv(x, edge_index), Recorded()
        out = torch.compile(conv, fullgraph=True, backend=backend)(x, edge_index)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        assert "gattn.attention.default" in backend.operators or native.load_error() is not None

    @pytest.mark.slow
    @pytest.mark.parametrize("dynamic", [None, True])
    def test_compile_with_edge_features_and_self_loops(self, layer, x, edge_index, dynamic):
        torch._dynamo.reset()
        conv, edge_attr = layer(F, 4, heads=2, edge_dim=3), torch.randn(30, 3)
        compiled = torch.compile(conv, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for num_edges in (30, 21, 9):
            inputs = x, edge_index[:, :num_edges], edge_attr[:num_edges]
            torch.testing.assert_close(compiled(*inputs), conv(*inputs))

    @pytest.mark.parametrize("edge_dim", [None, 3])
    def test_export(self, layer, x, edge_index, edge_dim):
        conv = layer(F, 4, heads=2, edge_dim=edge_dim).eval()
        inputs = (x, edge_index) if edge_dim is None else (x, edge_index, torch.randn(30, edge_dim))
        exported = torch.export.export(conv, inputs, strict=False).module()
        torch.testing.assert_close(exported(*inputs), conv(*inputs))

    def test_function_transforms_leave_nothing_behind(self, layer, x, edge_index):
        conv = layer(F, 4)

        def function(x):
            return conv(x, edge_index).square().sum()

        expected = torch.autograd.functional.hessian(function, x)
        for _ in range(2):
            torch.testing.assert_close(torch.func.hessian(function)(x), expected)
        gradient = torch.func.grad(function)(x)
        torch.testing.assert_close(gradient, torch.autograd.grad(function(x.requires_grad_()), x)[0])
        _, (edges, _) = conv(x, edge_index, return_attention_weights=True)
        pickle.dumps(edges)
        torch.testing.assert_close(
            torch.func.vmap(lambda x: conv(x, edge_index))(torch.stack([x.detach()] * 2))[1], conv(x, edge_index)
        )

    def test_without_numbers_to_look_at(self, layer, x, edge_index):
        conv = layer(F, 4, **({} if layer is TransformerConv else {"add_self_loops": False})).to("meta")
        assert conv(x.to("meta"), edge_index.to("meta")).shape == (N, 4)

    def test_edge_projection_may_be_wrapped_pruned_and_watched(self, layer, x, edge_index):
        theirs, ours = (getattr(module, layer.__name__)(F, 4, heads=2, edge_dim=3) for module in (pyg, gattn.nn))
        ours.load_state_dict(theirs.state_dict())
        calls, outs = [], []
        edge_attr = torch.randn(30, 3)
        for conv in (theirs, ours):
            prune.l1_unstructured(conv.lin_edge, "weight", amount=0.3)
            conv.lin_edge.register_forward_hook(lambda *arguments: calls.append(1))
            for _ in range(2):
                conv(x, edge_index, edge_attr).sum().backward()
            outs.append(conv(x, edge_index, edge_attr))
        torch.testing.assert_close(*outs)
        assert len(calls) == 6
        outs = []
        for conv in (theirs, ours):
            torch.manual_seed(0)
            conv.lin_edge = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 8))
            outs.append(conv(x, edge_index, edge_attr))
        torch.testing.assert_close(*outs)

    def test_lazy_edge_features_of_dimension_zero(self, layer, x, edge_index):
        assert layer(F, 4, edge_dim=0)(x, edge_index, torch.randn(30, 3)).shape == (N, 4)

    def test_weights_of_a_graph_that_has_its_own_self_loops(self, layer, x, edge_index):
        csr = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(30), (N, N)).coalesce().to_sparse_csr()
        for graph in (SparseGraph(edge_index, self_loops=True), SparseGraph(csr, self_loops=True)):
            _, (edges, alpha) = layer(F, 4)(x, graph, return_attention_weights=True)
            assert alpha.size(0) == (edges.size(1) if edges.layout == torch.strided else edges._nnz())

    def test_weights_of_a_batch_do_not_fit_a_sparse_matrix(self, layer, edge_index):
        csr = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(30), (N, N)).coalesce().to_sparse_csr()
        conv, x = layer(F, 4, heads=2), torch.randn(3, N, F)
        assert conv(x, csr).shape == (3, N, 8)
        if layer is not TransformerConv:  # which returns the adjacency as it is
            with pytest.raises(ValueError, match="cannot be the values of one sparse matrix"):
                conv(x, csr, return_attention_weights=True)

    def test_an_edge_index_that_knows_fewer_nodes_than_there_are(self, layer, x):
        """PyG infers an EdgeIndex's size from its largest index."""
        edge_index = random_edge_index(N - 3, num_edges=30)
        sorted_edges = EdgeIndex(edge_index).sort_by("col").values
        sorted_edges.get_csc()
        conv = layer(F, 4)
        torch.testing.assert_close(conv(x, sorted_edges), conv(x, edge_index))
        with pytest.raises((ValueError, IndexError)):
            conv(x[:2], sorted_edges)

    def test_hooks_that_ask_for_what_is_not_there(self, layer):
        class Wrong(layer):
            def message(self, value_j, alpha):
                return alpha.unsqueeze(-1) * value_j

        with pytest.raises(TypeError, match="asks for 'value_j', which is not passed to it. Available are x, alpha"):
            Wrong(F, 4)

        class WrongUpdate(layer):
            def edge_update(self, value_j, index):
                return value_j

        with pytest.raises(TypeError, match="asks for 'value_j'.*Available are query, key"):
            WrongUpdate(F, 4)

    def test_dropout_is_reproducible_and_only_in_training(self, layer, x, edge_index):
        conv = layer(F, 4, heads=2, dropout=0.5, value_dropout=0.5)
        outs = []
        for _ in range(2):
            torch.manual_seed(1)
            outs.append(conv(x, edge_index))
        assert torch.equal(*outs)
        assert not torch.equal(conv(x, edge_index), outs[0])
        conv.eval()
        plain = layer(F, 4, heads=2)
        plain.load_state_dict(conv.state_dict())
        torch.testing.assert_close(conv(x, edge_index), plain(x, edge_index))

    def test_value_dropout_leaves_the_weights_alone(self, layer, x, edge_index):
        conv = layer(F, 4, heads=2, value_dropout=0.9)
        out, (_, alpha) = conv(x, edge_index, return_attention_weights=True)
        conv.eval()
        expected, (_, expected_alpha) = conv(x, edge_index, return_attention_weights=True)
        torch.testing.assert_close(alpha, expected_alpha)
        assert not torch.allclose(out, expected)

    def test_backend_reference(self, layer, x, edge_index):
        conv = layer(F, 4)
        with gattn.backend("reference"):
            expected = conv(x, edge_index)
        torch.testing.assert_close(conv(x, edge_index), expected)

    def test_user_subclasses(self, layer, x, edge_index):
        class Doubled(layer):
            def message(self, x_j, alpha):
                return 2 * alpha.unsqueeze(-1) * x_j

        conv = Doubled(F, 4, bias=False, **({"root_weight": False} if layer is TransformerConv else {}))
        plain = layer(F, 4, bias=False, **({"root_weight": False} if layer is TransformerConv else {}))
        plain.load_state_dict(conv.state_dict())
        torch.testing.assert_close(conv(x, edge_index), 2 * plain(x, edge_index))

    def test_a_hook_that_wraps_ours(self, layer, x, edge_index):
        """With the attributes of what it wraps, but another result."""

        class Doubled(layer):
            @functools.wraps(layer.message)
            def message(self, *args, **kwargs):
                return 2 * layer.message(self, *args, **kwargs)

        conv = Doubled(F, 4, bias=False, **({"root_weight": False} if layer is TransformerConv else {}))
        plain = layer(F, 4, bias=False, **({"root_weight": False} if layer is TransformerConv else {}))
        plain.load_state_dict(conv.state_dict())
        torch.testing.assert_close(conv(x, edge_index), 2 * plain(x, edge_index))

    def test_a_class_that_is_defined_anew(self, layer, x, edge_index):
        """As in a notebook: it has the name of the one before, and nothing else."""

        def define(base, factor):
            class Scaled(base):
                if base is TransformerConv:

                    def message(self, x_j, alpha, edge_value):
                        return factor * super().message(x_j, alpha, edge_value)
                else:

                    def message(self, x_j, alpha):
                        return factor * super().message(x_j, alpha)

            return Scaled(F, 4, bias=False, **({"root_weight": False} if base is TransformerConv else {}))

        convs = [
            (define(base, factor), base, factor) for base, factor in ((layer, 1), (TransformerConv, 2), (layer, 3))
        ]
        for conv, base, factor in convs:
            plain = base(F, 4, bias=False, **({"root_weight": False} if base is TransformerConv else {}))
            plain.load_state_dict(conv.state_dict())
            torch.testing.assert_close(conv(x, edge_index), factor * plain(x, edge_index))

    def test_first_call_in_inference_mode(self, layer, x, edge_index):
        conv = layer(F, 4)
        with torch.inference_mode():
            expected = conv(x, edge_index)
        torch.testing.assert_close(conv(x, edge_index), expected)


class TestFlow:
    @pytest.mark.parametrize("layer", LAYERS)
    def test_target_to_source_has_a_row_for_each_target(self, layer):
        """PyG's GAT layers give as many rows as there are sources."""
        edge_index = random_edge_index(9, 7, 30)
        x = (torch.randn(9, F), torch.randn(7, F))
        conv = layer(F, 4, heads=2)
        backwards = layer(F, 4, heads=2, flow="target_to_source")
        backwards.load_state_dict(conv.state_dict())
        out = backwards(x, edge_index.flip(0))
        assert out.shape == (7, 8)
        torch.testing.assert_close(out, conv(x, edge_index))

    def test_a_graphs_own_flow_holds(self):
        edge_index, x = random_edge_index(9, 7, 30), torch.randn(9, F)
        conv = GATConv(F, 4)
        backwards = SparseGraph(edge_index.flip(0), flow="target_to_source")
        expected = conv((x, None), edge_index, size=(9, 7))
        torch.testing.assert_close(conv((x, None), backwards, size=(7, 9)), expected)

    def test_size_counts_the_rows_of_edge_index(self):
        edge_index = random_edge_index(9, 7, 30)
        conv = GATConv(F, 4)
        backwards = GATConv(F, 4, flow="target_to_source")
        backwards.load_state_dict(conv.state_dict())
        x = torch.randn(9, F)
        out = conv((x, None), edge_index, size=(9, 7))
        assert out.shape == (7, 4)
        torch.testing.assert_close(backwards((x, None), edge_index.flip(0), size=(7, 9)), out)


class TestTheSwap:
    """A graph layer on a complete graph is a Transformer's attention."""

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("batch", [(), (3,)])
    def test_transformer_conv_on_a_complete_graph(self, causal, batch):
        heads, channels = 2, 4
        conv = TransformerConv(F, channels, heads=heads, root_weight=False).double()
        x = torch.randn(*batch, N, F, dtype=torch.double)
        out, (_, alpha) = conv(x, CompleteGraph(N, causal=causal), return_attention_weights=True)

        def split(linear):
            return linear(x).view(*batch, N, heads, channels).transpose(-3, -2)

        query, key, value = split(conv.lin_query), split(conv.lin_key), split(conv.lin_value)
        logits = query @ key.transpose(-1, -2) / math.sqrt(channels)
        if causal:
            logits = logits.masked_fill(torch.ones(N, N).triu(1).bool(), -math.inf)
        expected_alpha = logits.softmax(-1)
        torch.testing.assert_close(alpha, expected_alpha)
        torch.testing.assert_close(out, (expected_alpha @ value).transpose(-3, -2).flatten(-2))

    @pytest.mark.parametrize("layer", LAYERS)
    def test_complete_equals_its_edge_list(self, layer, x):
        conv = layer(F, 4, heads=2)
        torch.testing.assert_close(conv(x, CompleteGraph(N)), conv(x, CompleteGraph(N).edge_index))

    def test_edge_features_on_a_complete_graph(self, x):
        graph = CompleteGraph(N, causal=True)
        edge_index = graph.edge_index
        edge_attr = torch.randn(edge_index.size(1), 3)
        conv = TransformerConv(F, 4, edge_dim=3)
        torch.testing.assert_close(conv(x, graph, edge_attr), conv(x, edge_index, edge_attr))


@pytest.mark.parametrize("layer", [GATv2Conv, TransformerConv])
def test_kernels_project_edge_features_as_the_layer_does(layer, x, edge_index, monkeypatch):
    conv, x = layer(F, 4, heads=2, edge_dim=3).double(), x.double().requires_grad_()
    edge_attr = torch.randn(30, 3, dtype=torch.double, requires_grad=True)
    results = []
    for small in (0, math.inf):
        monkeypatch.setattr(layer, "_small", small)
        assert isinstance(conv._project_edges(conv.lin_edge, edge_attr), gattn.Projected) == (small == 0)
        out = conv(x, edge_index, edge_attr)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, edge_attr, *conv.parameters()))))
    torch.testing.assert_close(*results)


class TestHeterogeneous:
    edge_types = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "rev_writes", "author")]

    def data(self):
        data = HeteroData()
        data["author"].x, data["paper"].x = torch.randn(6, 16), torch.randn(8, 12)
        sizes = {"author": 6, "paper": 8}
        for source, name, target in self.edge_types:
            data[source, name, target].edge_index = random_edge_index(sizes[source], sizes[target], 20)
        return data

    @pytest.mark.parametrize("layer", LAYERS)
    def test_hetero_conv(self, layer):
        data = self.data()
        kwargs = {} if layer is TransformerConv else {"add_self_loops": False}
        conv = HeteroConv({edge_type: layer((-1, -1), 4, heads=2, **kwargs) for edge_type in self.edge_types})
        out = conv(data.x_dict, data.edge_index_dict)
        assert out["paper"].shape == (8, 8)
        assert out["author"].shape == (6, 8)

    def test_hetero_conv_refuses_self_loops_between_different_nodes(self):
        with pytest.raises(ValueError, match="add_self_loops"):
            HeteroConv({("author", "writes", "paper"): GATConv((-1, -1), 4)})

    @pytest.mark.parametrize("layer", LAYERS)
    def test_to_hetero(self, layer):
        kwargs = {} if layer is TransformerConv else {"add_self_loops": False}

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = layer((-1, -1), 8, heads=2, **kwargs)
                self.second = layer((-1, -1), 4, **kwargs)

            def forward(self, x, edge_index):
                return self.second(self.first(x, edge_index).relu(), edge_index)

        data = self.data()
        model = to_hetero(Net(), data.metadata())
        out = model(data.x_dict, data.edge_index_dict)
        assert out["paper"].shape == (8, 4)
        out["paper"].sum().backward()

    def test_to_hetero_refuses_self_loops_between_different_nodes(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = GATConv((-1, -1), 8)

            def forward(self, x, edge_index):
                return self.conv(x, edge_index)

        with pytest.raises(ValueError, match="add_self_loops"):
            to_hetero(Net(), self.data().metadata())


class AttentionNet(nn.Module):
    def __init__(self, module=gattn.nn, **kwargs):
        super().__init__()
        self.conv1 = module.GATConv(F, 8, heads=2, **kwargs)
        self.conv2 = module.GATv2Conv(16, 8, heads=2, **kwargs)
        self.conv3 = module.TransformerConv(16, 3)

    def forward(self, x, edge_index):
        return self.conv3(self.conv2(self.conv1(x, edge_index).relu(), edge_index).relu(), edge_index)


class TestExplainers:
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}

    def test_attention_explainer_agrees_with_pygs_layers(self, x, edge_index):
        theirs, ours = AttentionNet(pyg), AttentionNet()
        ours.load_state_dict(theirs.state_dict())
        masks = []
        for model in (theirs, ours):
            explainer = Explainer(
                model, AttentionExplainer(), explanation_type="model", edge_mask_type="object", model_config=self.config
            )
            masks.append(explainer(x, edge_index).edge_mask)
        torch.testing.assert_close(*masks)
        assert masks[1].max() > 0

    @pytest.mark.parametrize("index", [None, 2])
    def test_gnn_explainer(self, x, edge_index, index):
        explainer = Explainer(
            AttentionNet(),
            GNNExplainer(epochs=5),
            explanation_type="model",
            node_mask_type="attributes",
            edge_mask_type="object",
            model_config=self.config,
        )
        explanation = explainer(x, edge_index, index=index)
        assert explanation.edge_mask.shape == (edge_index.size(1),)
        assert explanation.edge_mask.max() > 0

    @pytest.mark.slow
    def test_explaining_survives_a_bare_message_passing(self):
        """Instantiating MessagePassing replaces its methods by generated ones, which cannot explain."""
        code = (
            "import torch, gattn\n"
            "from torch_geometric.nn import MessagePassing\n"
            "x, edge_index = torch.randn(3, 2), torch.tensor([[0, 1], [1, 2]])\n"
            "before = gattn.nn.TransformerConv(2, 4)\n"
            "MessagePassing()\n"
            "for conv in (before, gattn.nn.TransformerConv(2, 4)):\n"
            "    conv.explain, conv._edge_mask, conv._loop_mask = True, torch.zeros(2), torch.ones(2).bool()\n"
            "    conv(x, edge_index)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.parametrize("layer", LAYERS)
    def test_an_edge_mask_reaches_the_messages(self, layer, x, edge_index):
        theirs, ours = getattr(pyg, layer.__name__)(F, 4), layer(F, 4)
        ours.load_state_dict(theirs.state_dict())
        outs = []
        for conv in (theirs, ours):
            conv.explain = True
            conv._edge_mask = torch.full((edge_index.size(1),), -100.0)
            conv._loop_mask = edge_index[0] != edge_index[1]
            outs.append(conv(x, edge_index))
            conv.explain = False
        torch.testing.assert_close(*outs)
        assert not torch.allclose(outs[1], ours(x, edge_index))


class TestBadInput:
    edge_index = torch.tensor([[0, 1], [1, 2]])
    x = torch.randn(4, F)

    @pytest.mark.parametrize("layer", LAYERS)
    def test_features_with_other_channels(self, layer):
        with pytest.raises(ValueError, match="x has 7 channels, but this layer was made for in_channels=6"):
            layer(F, 4)(torch.randn(4, 7), self.edge_index)
        with pytest.raises(ValueError, match="target x has 6 channels, but this layer was made for in_channels=5"):
            layer((F, 5), 4)((self.x, self.x), self.edge_index)

    @pytest.mark.parametrize("layer", LAYERS)
    def test_features_of_other_dimensions(self, layer):
        with pytest.raises(ValueError, match=r"features must have shape \[N, F\]"):
            layer(F, 4)(self.x[0], self.edge_index)
        with pytest.raises(TypeError, match="a pair of tensors .*; got a list of 4"):
            layer(F, 4)(self.x.tolist(), self.edge_index)
        with pytest.raises(TypeError, match="source features must be a tensor; got str"):
            layer(F, 4)("x", self.edge_index)
        with pytest.raises(ValueError, match="source features must be of a floating-point type; got torch.int64"):
            layer(F, 4)(self.x.long(), self.edge_index)

    @pytest.mark.parametrize("layer", LAYERS)
    def test_too_few_nodes(self, layer):
        with pytest.raises(IndexError, match="but there are 2 source nodes|but there are 2 target nodes"):
            layer(F, 4)(self.x[:2], self.edge_index)

    @pytest.mark.parametrize(
        "call",
        [
            lambda x, edges: gattn.nn.RGATConv(F, 4, 2)(x, edges, torch.zeros(2, dtype=torch.int64)),
            lambda x, edges: gattn.nn.FAConv(F)(x, x, edges),
            lambda x, edges: gattn.nn.FAConv(F, normalize=False)(x, x, edges, torch.ones(2)),
            lambda x, edges: gattn.nn.DNAConv(F)(x.unsqueeze(1), edges),
            lambda x, edges: gattn.nn.AGNNConv()(x, edges),
        ],
        ids=["RGATConv", "FAConv", "FAConv with weights", "DNAConv", "AGNNConv"],
    )
    def test_other_devices(self, call):
        """Numbers of a tensor without any must not be taken for those of the other."""
        with torch.device("meta"):
            nowhere = torch.empty(4, F), torch.zeros(2, 2, dtype=torch.int64)
        with pytest.raises(ValueError, match="the graph is on meta, the features are on cpu"):
            call(self.x, nowhere[1])
        with pytest.raises((ValueError, RuntimeError), match=r"is on cpu, the features are on meta|on device cpu"):
            call(nowhere[0], self.edge_index)

    @pytest.mark.parametrize("layer", LAYERS)
    def test_wrong_edge_index(self, layer):
        with pytest.raises(ValueError, match="its dtype must be an integer type"):
            layer(F, 4)(self.x, self.edge_index.float())
        with pytest.raises(ValueError, match=r"edge_index must have shape \[2, E\]"):
            layer(F, 4)(self.x, self.edge_index[0])
        with pytest.raises(TypeError, match="a graph must be an edge_index tensor"):
            layer(F, 4)(self.x, None)

    @pytest.mark.parametrize("layer", LAYERS)
    def test_edge_attr_without_edge_dim_and_the_reverse(self, layer):
        with pytest.raises(ValueError, match="made without edge features: make .* edge_dim=3"):
            layer(F, 4)(self.x, self.edge_index, torch.randn(2, 3))
        with pytest.raises(ValueError, match="made for edge features of 3 channels, so it needs edge_attr"):
            layer(F, 4, edge_dim=3)(self.x, self.edge_index)
        with pytest.raises(
            ValueError, match="edge_attr has 2 channels, but this layer was made for edge features of 3"
        ):
            layer(F, 4, edge_dim=3)(self.x, self.edge_index, torch.randn(2, 2))
        with pytest.raises(ValueError, match=r"floating-point type; got torch.int64: use .float\(\)"):
            layer(F, 4, edge_dim=3)(self.x, self.edge_index, torch.ones(2, 3, dtype=torch.long))
        with pytest.raises(TypeError, match="edge_attr must be a tensor; got list"):
            layer(F, 4, edge_dim=3)(self.x, self.edge_index, [[1.0, 2.0, 3.0]] * 2)
        with pytest.raises(IndexError, match="target index 9"):
            layer(F, 4, edge_dim=3)(self.x, torch.tensor([[0, 1], [1, 9]]), torch.randn(2, 3))
        with pytest.raises(ValueError, match="edge_attr needs one row per edge; got 5 rows for 2 edges"):
            layer(F, 4, edge_dim=3)(self.x, self.edge_index, torch.randn(5, 3))

    @pytest.mark.parametrize("layer", LOOPED)
    def test_self_loops_of_a_bipartite_complete_graph(self, layer):
        with pytest.raises(ValueError, match="add_self_loops=True is not possible here"):
            layer(F, 4)((self.x, self.x[:3]), CompleteGraph(3, 4))
        assert layer(F, 4, add_self_loops=False)((self.x, self.x[:3]), CompleteGraph(3, 4)).shape == (3, 4)

    def test_missing_targets(self):
        for layer in (GATv2Conv, TransformerConv):
            with pytest.raises(ValueError, match=r"x\[1\] may not be None"):
                layer(F, 4)((self.x, None), self.edge_index)

    def test_wrong_size(self):
        with pytest.raises(ValueError, match="size gives 5 sources, but their features have 4 rows"):
            GATConv(F, 4)(self.x, CompleteGraph(4), size=(5, 4))
        with pytest.raises(ValueError, match="the same batch dimensions"):
            GATConv(F, 4)((self.x.expand(2, 4, F), self.x.expand(3, 4, F)), self.edge_index)
        with pytest.raises(ValueError, match="size gives 5 sources, but their features have 4 rows"):
            GATConv(F, 4)(self.x, self.edge_index, size=(5, 4))

    @pytest.mark.parametrize("layer", LAYERS)
    def test_options_out_of_range(self, layer):
        for kwargs, message in (
            ({"heads": 0}, "heads must be at least 1"),
            ({"dropout": -0.1}, "dropout must be a probability"),
            ({"value_dropout": 2}, "value_dropout must be a probability"),
        ):
            with pytest.raises(ValueError, match=message):
                layer(F, 4, **kwargs)
        for kwargs, message in (
            ({"heads": 2.5}, "heads must be an integer; got 2.5"),
            ({"out_channels": "4"}, "out_channels must be an integer; got '4'"),
        ):
            with pytest.raises(TypeError, match=message):
                layer(F, **{"out_channels": 4} | kwargs)

    def test_shared_weights_of_different_sizes(self):
        with pytest.raises(ValueError, match="share_weights=True needs"):
            GATv2Conv((3, 4), 4, share_weights=True)

    @pytest.mark.parametrize("layer", LAYERS)
    def test_nan_is_named_on_request(self, layer):
        bad = self.x.clone()
        bad[1, 2] = math.nan
        with gattn.check_finite():
            with pytest.raises(ValueError, match="x holds 1 value that is NaN"):
                layer(F, 4)(bad, self.edge_index)
            with pytest.raises(ValueError, match=r"x\[1\] holds 1 value that is NaN"):
                layer(F, 4)((self.x, bad), self.edge_index)
            with pytest.raises(ValueError, match="x holds 1 value"):
                layer(F, 4)(bad.to_sparse_csr(), self.edge_index)
            with pytest.raises(ValueError, match="edge_attr holds 3 values that are NaN"):
                layer(F, 4, edge_dim=3)(self.x, self.edge_index, torch.tensor([[0.0], [math.nan]]).expand(2, 3))


@pytest.mark.parametrize("conv", [GATConv, GATv2Conv, TransformerConv])
@pytest.mark.parametrize("how", ["bias", "forward", "hook"])
def test_a_changed_edge_projection_is_called(conv, how):
    """Kernels project edges by the weight alone: what else a layer does there must not be lost."""
    x, edge_index, edge_attr = torch.randn(4, 8), torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.randn(3, 5)
    layer = conv(8, 4, heads=2, edge_dim=5)
    before = layer(x, edge_index, edge_attr)
    if how == "bias":
        layer.lin_edge.bias = torch.nn.Parameter(torch.randn(8))
    elif how == "forward":
        layer.lin_edge.forward = lambda features: (
            torch.full((features.size(0), 8), 3.0) * features.sum(-1, keepdim=True)
        )
    else:
        layer.lin_edge.register_forward_hook(lambda module, inputs, output: output**2)
    found = layer(x, edge_index, edge_attr)
    assert not torch.allclose(found, before)
    with gattn.backend("reference"):
        torch.testing.assert_close(found, layer(x, edge_index, edge_attr))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("layer", LOOPED)
def test_subclasses_that_update_edges_with_the_names_of_pyg(layer, flow, x, edge_index):
    # Without annotations, PyG generates no code, and what it then runs reads pairs in another order.
    def with_update(base):
        class OfScalars(base):
            def edge_update(
                self, alpha_j: Tensor, alpha_i: Maybe, edge_attr: Maybe, index: Tensor, ptr: Maybe, size_i: Size
            ) -> Tensor:
                logits = nn.functional.leaky_relu(alpha_j + alpha_i, self.negative_slope) + edge_attr.log().view(-1, 1)
                return softmax(logits, index, ptr, size_i)

        class OfVectors(base):
            def edge_update(
                self, x_j: Tensor, x_i: Tensor, edge_attr: Maybe, index: Tensor, ptr: Maybe, dim_size: Size
            ) -> Tensor:
                logits = ((x_j - x_i).sigmoid() * self.att).sum(-1) + edge_attr.log().view(-1, 1)
                return softmax(logits, index, ptr, dim_size)

        made = OfScalars if layer is GATConv else OfVectors
        made.__name__ += base.__module__.split(".")[0]  # one name means one generated code to PyG
        return made

    weight, found = torch.rand(edge_index.size(1)) + 0.1, []
    theirs = with_update(getattr(pyg, layer.__name__))(F, 4, heads=2, fill_value=1.0, flow=flow, residual=True)
    ours = with_update(layer)(F, 4, heads=2, fill_value=1.0, flow=flow, residual=True)
    ours.load_state_dict(theirs.state_dict())
    for conv in (ours, theirs):
        found.append((conv(x, edge_index, weight), conv(x, edge_index, weight, return_attention_weights=True)))
    torch.testing.assert_close(*found)
    with gattn.record_attention(ours) as records:
        _, (_, alpha) = ours(x, edge_index, weight, return_attention_weights=True)
    assert torch.equal(records[""][0].weights, alpha)
    with pytest.raises(ValueError, match="without a batch"):
        ours(x.unsqueeze(0), edge_index, weight)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_while_edges_are_updated_the_layer_is_as_it_was(flow, x, edge_index):
    """Another thread may call it; what a subclass keeps is kept."""
    seen = []

    class Watched(GATConv):
        def edge_update(self, alpha_j: Tensor, alpha_i: Maybe, index: Tensor, ptr: Maybe, size_i: Size) -> Tensor:
            self.kept = alpha_j
            seen.append((conv.flow, conv.node_dim))
            return softmax(alpha_j, index, ptr, size_i)

    conv = Watched(F, 4, heads=2, flow=flow)
    before = conv.flow, conv.node_dim
    _, (_, alpha) = conv(x, edge_index, return_attention_weights=True)
    assert seen == [before]
    assert (conv.flow, conv.node_dim) == before
    assert conv.kept.shape == alpha.shape


def test_a_subclass_may_update_edges_with_other_names_than_its_parent(x, edge_index):
    class OfPyG(GATConv):
        def edge_update(self, alpha_j: Tensor, index: Tensor, ptr: Maybe, size_i: Size) -> Tensor:
            return softmax(alpha_j, index, ptr, size_i)

    class OfGattn(OfPyG):
        def edge_update(self, query_i: Maybe, key_j: Tensor, index: Tensor, num_targets: int) -> Tensor:
            return gattn.softmax(key_j.squeeze(-1), index, num_targets)

    parent, child = OfPyG(F, 4, heads=2), OfGattn(F, 4, heads=2)
    child.load_state_dict(parent.state_dict())
    for conv in (parent, OfPyG(F, 4), child):
        assert conv(x, edge_index).isfinite().all()
    torch.testing.assert_close(child(x, edge_index), parent(x, edge_index))


def test_an_override_of_propagate_counts_in_subclasses_and_for_explainers(x, edge_index):
    class Zero(GATConv):
        def propagate(self, edge_index, size=None, **kwargs):
            return torch.zeros(kwargs["x"].shape)

    class Below(Zero):
        pass

    for conv in (Zero(F, 4), Below(F, 4), copy.deepcopy(Below(F, 4)), pickle.loads(pickle.dumps(GATConv(F, 4)))):
        is_zero = isinstance(conv, Zero)
        assert bool((conv(x, edge_index) == conv.bias).all()) == is_zero
        conv.explain, conv._edge_mask = True, torch.zeros(edge_index.size(1))
        conv._loop_mask = edge_index[0] != edge_index[1]
        assert bool((conv(x, edge_index) == conv.bias).all()) == is_zero
