"""Linear attention among all nodes, set attention and other aggregations, beside PyG's layers and by hand."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn.aggr import utils
from torch_geometric.nn.attention import PerformerAttention, PolynormerAttention, SGFormerAttention
from torch_geometric.utils import to_dense_batch

import gattn
from gattn import CompleteGraph, nn
from gattn.testing import assert_alone_equals_in_batch, random_edge_index
from tests.cases import mostly_slow

F, C, H = 8, 4, 2
SIZES = [5, 1, 12, 3]
BATCH = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))


#: PyG's SGFormer makes tensors of the default type.
pytestmark = pytest.mark.usefixtures("in_double")


def randn(*shape):
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def like(ours, theirs):
    """Both in double, with the parameters of PyG's, which must have the same names."""
    ours.load_state_dict(theirs.state_dict())
    return ours.double().eval(), theirs.double().eval()


def assert_same(ours, theirs, call, *inputs, call_theirs=None):
    """Outputs and gradients with respect to inputs and parameters."""
    found = []
    for module, how in ((ours, call), (theirs, call_theirs or call)):
        out = how(module, *inputs)
        leaves = [*inputs, *module.parameters()]
        loss = (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum()
        found.append([out, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)])
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-9)
    return found[0][0]


GLOBAL = {
    "performer": (nn.PerformerAttention, PerformerAttention, {"head_channels": C, "heads": H}),
    "performer, biases": (
        nn.PerformerAttention,
        PerformerAttention,
        {"heads": H, "head_channels": C, "qkv_bias": True, "attn_out_bias": False, "kernel": torch.nn.Softplus()},
    ),
    "sgformer": (nn.SGFormerAttention, SGFormerAttention, {"heads": H, "head_channels": C}),
    "sgformer, one head": (nn.SGFormerAttention, SGFormerAttention, {"head_channels": F, "qkv_bias": True}),
    "polynormer": (nn.PolynormerAttention, PolynormerAttention, {"heads": H, "head_channels": C}),
    "polynormer, own queries": (
        nn.PolynormerAttention,
        PolynormerAttention,
        {"heads": H, "head_channels": C, "qk_shared": False, "beta": 0.3, "qkv_bias": True},
    ),
}
EXTRA = {
    "sgformer, paper": lambda: nn.SGFormerAttention(F, H, C, norm="frobenius"),
    "polynormer, learnt": lambda: nn.PolynormerAttention(F, H, C, learn_beta=True),
}


class TestGlobalAttention:
    @pytest.mark.parametrize("size", [1, 7])
    @pytest.mark.parametrize("name", GLOBAL)
    def test_pygs_numbers_on_graphs_of_one_size(self, name, size):
        ours, theirs, options = GLOBAL[name]
        pair = like(ours(F, **options), theirs(F, **options))
        assert repr(pair[0]) == repr(pair[1])
        assert_same(*pair, lambda module, x: module(x), randn(2, size, F))
        assert_same(*pair, lambda module, x: module(x, torch.ones(2, size, dtype=torch.bool)), randn(2, size, F))

    @pytest.mark.parametrize("name", GLOBAL)
    def test_the_same_seed_gives_pygs_parameters(self, name):
        ours, theirs, options = GLOBAL[name]
        states = []
        for layer in (ours, theirs):
            torch.manual_seed(3)
            module = layer(F, **options)
            states.append([*module.state_dict().values(), torch.rand(1)])
        torch.testing.assert_close(*states, rtol=0, atol=0)

    @pytest.mark.parametrize("name", [*GLOBAL, *EXTRA])
    def test_padded_packed_and_alone_are_the_same(self, name):
        module = (EXTRA[name]() if name in EXTRA else GLOBAL[name][0](F, **GLOBAL[name][2])).double()
        x = randn(len(BATCH), F)
        padded, mask = to_dense_batch(x, BATCH)
        padded = padded.masked_fill(~mask.unsqueeze(-1), torch.nan)  # nobody may look at it
        alone = torch.cat([module(part) for part in x.split(SIZES)])
        graph = CompleteGraph.packed(SIZES)
        torch.testing.assert_close(module(x, graph=graph), alone)
        torch.testing.assert_close(module(padded, mask)[mask], alone)
        found = [
            torch.autograd.grad(out.square().sum(), [x, *module.parameters()], allow_unused=True)
            for out in (module(x, graph=graph), module(padded, mask)[mask], alone)
        ]
        torch.testing.assert_close(found[0], found[2])
        torch.testing.assert_close(found[1], found[2])

    @pytest.mark.parametrize("name", ["performer", "sgformer", "polynormer", *EXTRA])
    def test_gradients_of_gradients(self, name):
        module = (EXTRA[name]() if name in EXTRA else GLOBAL[name][0](F, **GLOBAL[name][2])).double().eval()
        x = (randn(4, F) * 0.3).detach().requires_grad_()
        assert torch.autograd.gradcheck(module, x)
        if name != "performer":  # whose ReLU has a kink
            assert torch.autograd.gradgradcheck(
                lambda x: module(x, graph=CompleteGraph.packed([3, 1])), x, fast_mode=True
            )

    def test_sgformer_by_hand(self):
        """The paper's equation, with Frobenius norms, of one graph and one head."""
        module, x = nn.SGFormerAttention(F, 1, C, norm="frobenius").double(), randn(6, F)
        q, k, v = (x @ lin.weight.T for lin in (module.q, module.k, module.v))
        q, k = q / torch.linalg.matrix_norm(q), k / torch.linalg.matrix_norm(k)
        weights = q @ k.T
        expected = (6 * v + weights @ v) / (6 + weights.sum(1, keepdim=True))
        torch.testing.assert_close(module(x), expected)

    def test_polynormers_beta_is_learnt(self):
        module, x = nn.PolynormerAttention(F, H, C, beta=0.3, learn_beta=True).double(), randn(6, F)
        constant = nn.PolynormerAttention(F, H, C, beta=0.3).double()
        constant.load_state_dict(module.state_dict(), strict=False)
        torch.testing.assert_close(module(x), constant(x))
        module(x).square().sum().backward()
        assert (module.betas.grad != 0).any()
        with torch.no_grad():
            module.betas.add_(1.0)
        module.reset_parameters()
        torch.testing.assert_close(module.betas.sigmoid(), torch.full_like(module.betas, 0.3))

    def test_performers_projection_is_drawn_again(self):
        module, x = nn.PerformerAttention(F, H, C), torch.randn(5, F)
        before = module(x)
        module.redraw_projection_matrix()
        assert not torch.allclose(before, module(x))
        assert torch.allclose(module.fast_attn.projection_matrix.norm(dim=1), torch.ones(5))

    @pytest.mark.parametrize("name", mostly_slow(["performer", "sgformer", "polynormer"]))
    def test_compiled(self, name):
        module = GLOBAL[name][0](F, **GLOBAL[name][2]).double().eval()
        x, mask = randn(2, 40, F), torch.arange(40) < torch.tensor([[40], [17]])
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))
        torch.testing.assert_close(compiled(x, mask), module(x, mask))

    @pytest.mark.parametrize("name", ["performer", "sgformer", "polynormer"])
    def test_autocast_and_half_precision(self, name):
        torch.set_default_dtype(torch.float)
        module, x = GLOBAL[name][0](F, **GLOBAL[name][2]).eval(), torch.randn(6, F)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(module(x).float(), module.float()(x).float(), rtol=0.1, atol=0.1)
        half = copy.deepcopy(module).bfloat16()(x.bfloat16())
        torch.testing.assert_close(half.float(), module(x), rtol=0.1, atol=0.1)

    @pytest.mark.parametrize("name", ["performer", "sgformer", "polynormer"])
    def test_recorded(self, name):
        """The weights are those whose sums the layer takes, on request only."""
        module, x = GLOBAL[name][0](F, **GLOBAL[name][2]).double().eval(), randn(6, F)
        expected = module(x)
        with gattn.record_attention(module) as records:
            torch.testing.assert_close(module(x), expected)
        assert len(records) == 1

    @pytest.mark.parametrize("name", ["performer", "sgformer", "polynormer"])
    def test_wrong_inputs(self, name):
        module, x = GLOBAL[name][0](F, **GLOBAL[name][2]), torch.randn(2, 6, F)
        with pytest.raises(ValueError, match=r"mask must be \[2, 6\]"):
            module(x, torch.ones(2, 5, dtype=torch.bool))
        with pytest.raises(TypeError, match="booleans"):
            module(x, torch.ones(2, 6))
        with pytest.raises(ValueError, match="give one of them"):
            module(x, torch.ones(2, 6, dtype=torch.bool), graph=CompleteGraph(6))
        with pytest.raises(TypeError, match="must be a CompleteGraph"):
            module(x, graph=torch.zeros(2, 3))
        with pytest.raises(ValueError, match=r"\[B, N, F\]"):
            module(torch.randn(F))
        assert module(x[:, :0]).shape[:2] == (2, 0)
        assert module(x[:0]).shape[:2] == (0, 6)

    def test_sgformer_needs_whole_graphs(self):
        lengths = torch.tensor([6, 3])
        for graph in (
            CompleteGraph(6, causal=True),
            CompleteGraph(6, window=(1, 1)),
            CompleteGraph(6, source_lengths=lengths),
        ):
            with pytest.raises(ValueError, match="a packed graph, or a mask for padding"):
                nn.SGFormerAttention(F)(torch.randn(2, 6, F), graph=graph)

    def test_wrong_options(self):
        for layer in (nn.PerformerAttention, nn.SGFormerAttention):
            with pytest.raises(ValueError, match="multiple of heads"):
                layer(9, 2)
        with pytest.raises(ValueError, match="'row' or 'frobenius'"):
            nn.SGFormerAttention(F, norm="column")
        with pytest.raises(ValueError, match="between 0 and 1"):
            nn.PolynormerAttention(F, H, beta=1.5, learn_beta=True)


BLOCKS = {
    "SAB": (nn.SetAttentionBlock, utils.SetAttentionBlock, {}),
    "ISAB": (nn.InducedSetAttentionBlock, utils.InducedSetAttentionBlock, {"num_induced_points": 3}),
    "PMA": (nn.PoolingByMultiheadAttention, utils.PoolingByMultiheadAttention, {"num_seed_points": 3}),
}


@pytest.mark.parametrize("layer_norm", [True, False])
class TestBlocks:
    @pytest.mark.parametrize("name", BLOCKS)
    def test_pygs_numbers(self, name, layer_norm):
        ours, theirs, options = BLOCKS[name]
        options = {**options, "heads": H, "layer_norm": layer_norm}
        pair = like(ours(F, **options), theirs(F, **options))
        assert repr(pair[0]) == repr(pair[1])
        mask = torch.arange(6) < torch.tensor([[6], [2]])
        assert_same(*pair, lambda module, x: module(x), randn(2, 6, F))
        out = assert_same(*pair, lambda module, x: module(x, mask), randn(2, 6, F))
        assert out.shape[1] == (3 if name == "PMA" else 6)

    def test_mab(self, layer_norm):
        options = {"heads": H, "layer_norm": layer_norm}
        pair = like(nn.MultiheadAttentionBlock(F, **options), utils.MultiheadAttentionBlock(F, **options))
        assert repr(pair[0]) == repr(pair[1])
        masks = torch.arange(4) < torch.tensor([[4], [2]]), torch.arange(6) < torch.tensor([[3], [6]])
        assert_same(*pair, lambda module, x, y: module(x, y), randn(2, 4, F), randn(2, 6, F))
        assert_same(*pair, lambda module, x, y: module(x, y, *masks), randn(2, 4, F), randn(2, 6, F))


def gate():
    return torch.nn.Linear(F, 1)


OPTIONS = {"in_channels": F, "out_channels": C, "num_heads": 2}
AGGREGATIONS = {
    "set transformer": ("SetTransformerAggregation", lambda: ((F,), {"num_seed_points": 2, "heads": H})),
    "set transformer, averaged": (
        "SetTransformerAggregation",
        lambda: ((F,), {"num_encoder_blocks": 2, "num_decoder_blocks": 0, "concat": False, "layer_norm": True}),
    ),
    "multiset": ("GraphMultisetTransformer", lambda: ((F,), {"k": 3, "heads": H})),
    "attentional": ("AttentionalAggregation", lambda: ((gate(), torch.nn.Linear(F, C)), {})),
    "attentional, by channel": ("AttentionalAggregation", lambda: ((torch.nn.Linear(F, F),), {})),
    "attentional, MLP": ("AttentionalAggregation", lambda: ((pyg.MLP([F, 4, 1], norm=None),), {})),
    "softmax": ("SoftmaxAggregation", lambda: ((0.7,), {})),
    "softmax, learnt": ("SoftmaxAggregation", lambda: ((), {"learn": True})),
    "softmax, by channel": ("SoftmaxAggregation", lambda: ((2.0,), {"learn": True, "channels": F})),
    "softmax, constant weights": ("SoftmaxAggregation", lambda: ((), {"semi_grad": True})),
    "set2set": ("Set2Set", lambda: ((F, 3), {})),
    "set2set, two layers": ("Set2Set", lambda: ((F, 2), {"num_layers": 2})),
    "attention of aggregations": (
        "MultiAggregation",
        lambda: ((["mean", "max", "std"],), {"mode": "attn", "mode_kwargs": dict(OPTIONS)}),
    ),
}
ONLY_OURS = {
    "patches": ("PatchTransformerAggregation", lambda: ((F, C, 2, F), {"heads": H, "aggr": ["mean", "std"]})),
}


def pair_of(name):
    cls, given = (AGGREGATIONS | ONLY_OURS)[name]
    args, kwargs = given()
    return like(getattr(nn, cls)(*args, **kwargs), getattr(pyg, cls)(*copy.deepcopy(args), **copy.deepcopy(kwargs)))


class TestAggregations:
    @pytest.mark.parametrize("name", AGGREGATIONS)
    def test_pygs_numbers(self, name):
        pair = pair_of(name)
        assert repr(pair[0]) == repr(pair[1])
        assert_same(*pair, lambda module, x: module(x, BATCH), randn(len(BATCH), F))
        ptr = torch.tensor([0, 5, 6, 18, 21])
        torch.testing.assert_close(pair[0](x := randn(21, F), ptr=ptr), pair[0](x, BATCH))

    @pytest.mark.parametrize("name", [*AGGREGATIONS, *ONLY_OURS])
    def test_any_order_and_empty_sets(self, name):
        module, _ = pair_of(name)
        x, order = randn(len(BATCH), F), torch.randperm(len(BATCH))
        if name == "patches":  # whose elements have an order within their set
            order = torch.argsort(torch.arange(len(BATCH)) - 7 * BATCH)
        torch.testing.assert_close(module(x[order], BATCH[order]), module(x, BATCH))
        out = module(x, BATCH + 1, dim_size=6)
        torch.testing.assert_close(out[1:5], module(x, BATCH))
        assert out.isfinite().all()
        assert out.shape[0] == 6
        if "set2set" not in name and name not in ("patches", "attention of aggregations"):
            assert (out[[0, 5]] == 0).all()
        nothing = module(x[:0], BATCH[:0], dim_size=2)
        assert nothing.isfinite().all()

    @pytest.mark.parametrize("name", [*AGGREGATIONS, *ONLY_OURS])
    def test_alone_equals_in_batch(self, name):
        graphs = [Data(torch.randn(n, F), random_edge_index(n, num_edges=n)) for n in SIZES]
        assert_alone_equals_in_batch(pair_of(name)[0], graphs, lambda module, data: module(data.x, data.batch))

    @pytest.mark.parametrize("name", ["multiset", "attentional, by channel", "softmax, learnt"])
    def test_in_message_passing(self, name):
        pair = [pyg.SAGEConv((F, F), C, aggr=aggr, root_weight=False) for aggr in pair_of(name)]
        x, edges = torch.randn(6, F, dtype=torch.double), random_edge_index(6, num_edges=20)
        edges = torch.cat([edges, torch.arange(6).expand(2, -1)], 1)  # PyG's give NaN for empty sets
        edges = edges[:, edges[1].argsort(stable=True)]  # as PyG's need them
        ours, theirs = like(*pair)
        torch.testing.assert_close(ours(x, edges), theirs(x, edges))

    def test_patches_of_one_set(self):
        for aggr in ("mean", "sum", "min", "max", "var", "std", ["mean", "max"]):
            options = {"patch_size": 2, "hidden_channels": F, "heads": H, "aggr": aggr, "num_transformer_blocks": 2}
            pair = like(
                nn.PatchTransformerAggregation(F, C, **options), pyg.PatchTransformerAggregation(F, C, **options)
            )
            assert repr(pair[0]) == repr(pair[1])
            for size in (4, 5, 9):
                assert_same(
                    *pair, lambda module, x, size=size: module(x, torch.zeros(size, dtype=torch.long)), randn(size, F)
                )

    def test_softmax_by_hand(self):
        x = torch.tensor([[0.0], [torch.tensor(3.0).log()]])
        torch.testing.assert_close(nn.SoftmaxAggregation()(x), 0.75 * x[1:])

    def test_jumping_knowledge(self):
        for mode in ("cat", "max", "lstm"):
            sizes = {"channels": F, "num_layers": 3} if mode == "lstm" else {}
            pair = like(nn.JumpingKnowledge(mode, **sizes), pyg.JumpingKnowledge(mode, **sizes))
            assert repr(pair[0]) == repr(pair[1])
            assert_same(*pair, lambda module, *xs: module(list(xs)), randn(5, F), randn(5, F), randn(5, F))

    @pytest.mark.parametrize("name", ["attentional", "softmax, learnt"])
    def test_compiled(self, name):
        module, x = pair_of(name)[0], randn(len(BATCH), F)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, BATCH, dim_size=4), module(x, BATCH, dim_size=4))

    @pytest.mark.parametrize("name", ["attentional", "softmax", "set2set", "set transformer", "multiset", "patches"])
    def test_recorded(self, name):
        module, x = pair_of(name)[0], randn(len(BATCH), F)
        with gattn.record_attention(module) as records:
            torch.testing.assert_close(module(x, BATCH), module(x, BATCH))
        assert len(records) > 0

    @pytest.mark.parametrize(
        ("sets", "error", "match"),
        [
            ({"index": BATCH, "dim_size": 3}, ValueError, "invalid 'dim_size' .got '3' but expected >= '4'."),
            ({"index": BATCH[:-1], "dim_size": 4}, ValueError, "index must hold the set of each element, 21 integers"),
            ({"index": BATCH.float(), "dim_size": 4}, ValueError, "21 integers; got torch.float32"),
            ({"index": BATCH - 1, "dim_size": 4}, IndexError, "index must not be negative"),
            ({"ptr": torch.tensor([0, 5, 20])}, ValueError, "ends at 21 here"),
            ({"ptr": torch.tensor([0, 6, 5, 21])}, ValueError, "never decreases"),
        ],
    )
    @pytest.mark.parametrize("name", ["set transformer", "multiset", "attentional", "softmax", "set2set", "patches"])
    def test_wrong_sets(self, name, sets, error, match):
        with pytest.raises(error, match=match):
            pair_of(name)[0](randn(len(BATCH), F), **sets)

    def test_wrong_inputs(self):
        with pytest.raises(ValueError, match="made for channels=8"):
            nn.GraphMultisetTransformer(F, k=2)(torch.randn(3, F + 1))
        with pytest.raises(ValueError, match="aggr must be some of"):
            nn.PatchTransformerAggregation(F, C, 2, F, aggr="product")
