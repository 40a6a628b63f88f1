"""Pooling against its formula, and where PyG's aggregations work."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric import EdgeIndex
from torch_geometric.nn.aggr import AttentionalAggregation, MultiAggregation
from torch_geometric.nn.resolver import aggregation_resolver
from torch_geometric.utils import to_torch_csr_tensor

import gattn
from gattn.nn import AttentionPooling
from gattn.testing import assert_as_exact_as, random_edge_index

C, A = 7, 5
INDEX = torch.tensor([3, 0, 5, 0, 3, 3, 0, 1, 3, 5, 3])  # sets 2, 4 and 6 are empty, set 1 has one element
M, N = INDEX.numel(), 7


@pytest.fixture
def x():
    return torch.randn(M, C, dtype=torch.double)


@pytest.fixture
def pool():
    pool = AttentionPooling(C, A).double()
    with torch.no_grad():
        pool.query.mul_(4)  # so that weights differ
    return pool


def formula(pool, x):
    """The vector and the weights of one set, `[M, C]`, word for word."""
    hidden = torch.tanh(x @ pool.lin.weight.T + pool.lin.bias)
    weights = (hidden @ pool.query).exp()
    weights = weights / weights.sum()
    return (weights.unsqueeze(-1) * x).sum(0), weights


def expected(pool, x, index=INDEX, num_sets=N):
    return torch.stack([formula(pool, x[index == i])[0] for i in range(num_sets)])


def gradients(pool, out, x):
    loss = (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    return torch.autograd.grad(loss, [x, *pool.parameters()])


def test_with_a_pencil():
    pool = AttentionPooling(1)
    with torch.no_grad():
        pool.lin.weight.fill_(1e3)  # tanh gives 1 and -1
        pool.lin.bias.zero_()
        pool.query.fill_(torch.tensor(3.0).log() / 2)  # so that one weight is three times the other
    out, weights = pool(torch.tensor([[4.0], [-8.0]]), return_weights=True)
    torch.testing.assert_close(weights, torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(out, torch.tensor([[1.0]]))


@pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("order", ["any", "sorted", "ptr"])
def test_equals_the_formula(pool, x, order, backend):
    x.requires_grad_()
    index = INDEX if order == "any" else INDEX.sort().values
    ptr = torch.tensor([0, 3, 4, 4, 9, 9, 11, 11])
    sets = {"ptr": ptr} if order == "ptr" else {"index": index, "dim_size": N}
    with gattn.backend(backend):
        out, weights = pool(x, **sets, return_weights=True)
        actual = gradients(pool, out, x)
    wanted = expected(pool, x, index)
    torch.testing.assert_close(out, wanted)
    assert (out[[2, 4, 6]] == 0).all()
    for i in range(N):
        torch.testing.assert_close(weights[index == i], formula(pool, x[index == i])[1])
    for gradient, other in zip(actual, gradients(pool, wanted, x), strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("backend", ["auto", "reference", "cpu", "dense"])
def test_padded_batches_equal_the_formula(pool, backend):
    x = torch.randn(5, 6, C, dtype=torch.double, requires_grad=True)
    lengths = torch.tensor([6, 1, 0, 3, 3])
    with gattn.backend(backend):
        out, weights = pool(x, lengths=lengths, return_weights=True)
        actual = gradients(pool, out, x)
    wanted = torch.stack([formula(pool, one[:n])[0] for one, n in zip(x, lengths, strict=True)])
    assert weights.shape == (5, 6)
    torch.testing.assert_close(out, wanted)
    for one, n, row in zip(x, lengths, weights, strict=True):
        torch.testing.assert_close(row[:n], formula(pool, one[:n])[1])
        assert (row[n:] == 0).all()
    for gradient, other in zip(actual, gradients(pool, wanted, x), strict=True):
        torch.testing.assert_close(gradient, other)
    padding = torch.arange(6) >= lengths.unsqueeze(1)
    assert (actual[0][padding] == 0).all()
    with gattn.backend(backend):
        assert torch.equal(pool(x.masked_fill(padding.unsqueeze(-1), 1e6), lengths=lengths), out)


def test_a_padded_batch_and_its_sets_are_the_same(pool):
    x, lengths = torch.randn(4, 6, C, dtype=torch.double), torch.tensor([2, 6, 0, 5])
    real = torch.arange(6) < lengths.unsqueeze(1)
    ptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    torch.testing.assert_close(pool(x, lengths=lengths), pool(x[real], ptr=ptr))


@pytest.mark.parametrize("front", [(2,), (2, 3), (2, 1, 2)])
def test_batches_of_padded_batches(pool, front):
    x, lengths = torch.randn(*front, 4, C, dtype=torch.double), torch.randint(0, 5, front)
    out, weights = pool(x, lengths=lengths, return_weights=True)
    assert out.shape == (*front, C)
    assert weights.shape == (*front, 4)
    wanted = [formula(pool, one[:n])[0] for one, n in zip(x.flatten(0, -3), lengths.flatten(), strict=True)]
    torch.testing.assert_close(out.flatten(0, -2), torch.stack(wanted))


@pytest.mark.parametrize("dim", [0, -2, 1, -3])
def test_elements_in_any_dimension(pool, dim):
    x = torch.randn(3, 4, M, C, dtype=torch.double).movedim(-2, dim)
    out, weights = pool(x, INDEX, dim_size=N, dim=dim, return_weights=True)
    assert weights.shape == x.shape[:-1]
    x, out, weights = (tensor.movedim(dim, -2) for tensor in (x, out, weights.unsqueeze(-1)))
    for i in range(3):
        for j in range(4):
            torch.testing.assert_close(out[i, j], expected(pool, x[i, j]))
            wanted = formula(pool, x[i, j, INDEX == 3])[1]
            torch.testing.assert_close(weights[i, j, INDEX == 3].squeeze(-1), wanted)


def test_many_batch_dimensions(pool):
    x = torch.randn(2, 3, 1, 2, M, C, dtype=torch.double)
    out = pool(x, INDEX, dim_size=N)
    assert out.shape == (2, 3, 1, 2, N, C)
    torch.testing.assert_close(out[1, 2, 0, 1], expected(pool, x[1, 2, 0, 1]))


def test_without_an_index_all_elements_are_one_set(pool, x):
    out = pool(x)
    torch.testing.assert_close(out, formula(pool, x)[0].unsqueeze(0))
    torch.testing.assert_close(pool.forward(x), out)
    assert pool(torch.stack([x, x])).shape == (2, 1, C)


def test_number_of_sets(pool, x):
    assert pool(x, INDEX).shape == (6, C)
    assert pool(x, INDEX, dim_size=9).shape == (9, C)


@pytest.mark.parametrize("index", [INDEX.int(), INDEX.to(torch.uint8), INDEX.repeat_interleave(2)[::2]])
def test_index_in_other_types(pool, x, index):
    torch.testing.assert_close(pool(x, index, dim_size=N), expected(pool, x))


def test_elements_in_any_order(pool, x):
    order = torch.randperm(M)
    torch.testing.assert_close(pool(x[order], INDEX[order], dim_size=N), pool(x, INDEX, dim_size=N))


def test_no_elements(pool):
    nothing = torch.empty(0, C, dtype=torch.double, requires_grad=True)
    empty = torch.empty(0, dtype=torch.int64)
    for out in (pool(nothing, empty, dim_size=3), pool(nothing.expand(3, 0, C), lengths=torch.zeros(3).long())):
        assert torch.equal(out, torch.zeros(3, C, dtype=torch.double))
        assert all((gradient == 0).all() for gradient in gradients(pool, out, nothing))
    assert pool(nothing, empty).shape == (0, C)
    assert pool(nothing.new_empty(0, 4, C), lengths=empty).shape == (0, C)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("padded", [False, True])
def test_other_types(pool, dtype, padded):
    x = torch.randn(3, 50, C, dtype=dtype)
    pool = pool.to(dtype)
    exact = copy.deepcopy(pool).double()

    def run(pool, x):
        return pool(x, lengths=torch.tensor([50, 20, 0])) if padded else pool(x, torch.arange(50) % 4, dim_size=5)

    out = run(pool, x)
    assert out.dtype == dtype
    with gattn.backend("reference"):
        assert_as_exact_as(out, run(pool, x), run(exact, x.double()))


def test_autocast(pool, x):
    pool, x = pool.float(), x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pool(x, INDEX, dim_size=N)
    torch.testing.assert_close(out, pool(x, INDEX, dim_size=N), rtol=0.05, atol=0.05)


def test_gradcheck(pool, x):
    def sparse(x, *parameters):
        return torch.func.functional_call(
            pool, dict(zip(names, parameters, strict=True)), (x, INDEX), {"dim_size": N, "return_weights": True}
        )

    names = [name for name, _ in pool.named_parameters()]
    inputs = [x.requires_grad_(), *(parameter.detach().clone().requires_grad_() for parameter in pool.parameters())]
    assert torch.autograd.gradcheck(sparse, inputs)
    assert torch.autograd.gradgradcheck(lambda *inputs: sparse(*inputs)[0], inputs)


class TestInPyG:
    @pytest.mark.parametrize(
        "form",
        [
            lambda edges: edges,
            lambda edges: EdgeIndex(edges, sparse_size=(M, M)).sort_by("col")[0],
            lambda edges: EdgeIndex(edges, sparse_size=(M, M)),
            lambda edges: to_torch_csr_tensor(edges.flip(0), size=(M, M)),
        ],
    )
    def test_aggregation_of_a_layer(self, pool, x, form):
        edges = random_edge_index(M, num_edges=40, seed=1).unique(dim=1).contiguous()
        conv = pyg.SAGEConv(C, 4, aggr=copy.deepcopy(pool), root_weight=False, bias=False).double()
        with torch.no_grad():
            conv.aggr_module.query.copy_(pool.query)  # the layer drew it anew
            conv.aggr_module.lin.load_state_dict(pool.lin.state_dict())
        pooled = torch.stack([formula(pool, x[edges[0, edges[1] == i]])[0] for i in range(M)])
        torch.testing.assert_close(conv(x, form(edges)), pooled @ conv.lin_l.weight.T)
        assert repr(pool) in conv.aggr

    def test_layers_draw_its_parameters_anew(self, pool):
        before = pool.query.clone()
        conv = pyg.SAGEConv(C, 4, aggr=pool)
        assert conv.aggr_module is pool
        assert not torch.equal(pool.query, before)

    def test_messages_with_heads(self, pool):
        # A layer with node_dim=0: each head of each set is pooled by itself.
        x = torch.randn(M, 2, C, dtype=torch.double)
        out = pool(x, INDEX, dim_size=N, dim=0)
        for head in range(2):
            torch.testing.assert_close(out[:, head], expected(pool, x[:, head]))

    def test_among_other_aggregations(self, pool, x):
        both = MultiAggregation([pool, "mean"])
        index = INDEX.sort().values
        out = both(x, index, dim_size=N)
        torch.testing.assert_close(out[:, :C], expected(pool, x, index))
        assert aggregation_resolver(pool) is pool
        assert aggregation_resolver([pool, "sum"]).aggrs[0] is pool

    def test_equals_pygs_attentional_aggregation(self, pool, x):
        class Gate(torch.nn.Module):
            def forward(self, x):
                return (pool.lin(x).tanh() @ pool.query).unsqueeze(-1)

        theirs = AttentionalAggregation(Gate())
        torch.testing.assert_close(pool(x, INDEX, dim_size=N), theirs(x, INDEX, dim_size=N))


@pytest.mark.parametrize(
    ("sets", "backend"),
    [
        ({"index": INDEX, "dim_size": N}, "inductor"),
        ({"ptr": torch.tensor([0, 3, 4, 4, 9, 9, 11, 11])}, "aot_eager"),
        ({"lengths": torch.tensor([11, 3, 0, 3])}, "aot_eager"),
        ({"lengths": torch.tensor([11, 3, 0, 3]), "return_weights": True}, "aot_eager"),
    ],
)
def test_compile(pool, sets, backend):
    torch._dynamo.reset()
    x = torch.randn(*((4,) if "lengths" in sets else ()), M, C, dtype=torch.double, requires_grad=True)
    compiled = torch.compile(pool, fullgraph=True, backend=backend)
    out, wanted = compiled(x, **sets), pool(x, **sets)
    torch.testing.assert_close(out, wanted)
    if "return_weights" in sets:
        out, wanted = out[0], wanted[0]
    for gradient, other in zip(gradients(pool, out, x), gradients(pool, wanted, x), strict=True):
        torch.testing.assert_close(gradient, other)


def test_compile_in_a_layer(x):
    torch._dynamo.reset()
    conv = pyg.SAGEConv(C, 4, aggr=AttentionPooling(C)).double()
    edges = random_edge_index(M, num_edges=40)
    torch.testing.assert_close(torch.compile(conv, fullgraph=True, backend="aot_eager")(x, edges), conv(x, edges))


def test_export(pool, x):
    exported = torch.export.export(pool, (x, INDEX), {"dim_size": N}, strict=False).module()
    torch.testing.assert_close(exported(x, INDEX, dim_size=N), pool(x, INDEX, dim_size=N))


def test_dropout_acts_in_training_only():
    pool = AttentionPooling(C, A, dropout=0.5)
    x, index = torch.ones(4000, C), torch.arange(4000) % 2
    assert not torch.equal(pool(x, index), pool(x, index))
    assert (pool(x, index) - 1).abs().max() < 0.1  # weights that are kept count twice
    pool.eval()
    torch.testing.assert_close(pool(x, index), torch.ones(2, C))
    assert (AttentionPooling(C, dropout=1.0)(x, index) == 0).all()


def test_copies(pool, x):
    other = AttentionPooling(C, A).double()
    other.load_state_dict(pool.state_dict())
    assert list(pool.state_dict()) == ["query", "lin.weight", "lin.bias"]
    for copied in (other, copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert torch.equal(copied(x, INDEX, dim_size=N), pool(x, INDEX, dim_size=N))


def test_reset_draws_everything_anew(pool):
    with torch.no_grad():
        for parameter in pool.parameters():
            parameter.fill_(7)
    pool.reset_parameters()
    assert all((parameter.abs() <= A**-0.5).all() for parameter in pool.parameters())
    assert all(parameter.unique().numel() == parameter.numel() for parameter in pool.parameters())


def test_sizes_and_repr(pool):
    assert repr(pool) == f"AttentionPooling({C}, {A})"
    assert repr(AttentionPooling(C)) == f"AttentionPooling({C}, {C})"
    assert pool.lin.weight.shape == (A, C)


def test_recorded(pool, x):
    with gattn.record_attention(torch.nn.ModuleDict({"pool": pool})) as records:
        _, weights = pool(x, INDEX, return_weights=True)
        pool(x.unsqueeze(0), lengths=torch.tensor([4]))
    sparse, padded = records["pool"]
    assert torch.equal(sparse.weights, weights.unsqueeze(-1))
    assert torch.equal(sparse.edge_index[1], INDEX)
    assert padded.weights.shape == (1, 1, 1, M)


def test_hooks_run(pool, x):
    shapes = []
    pool.register_forward_hook(lambda module, inputs, out: shapes.append(out.shape))
    pool(x, INDEX)
    pool(x.unsqueeze(0), lengths=torch.tensor([4]))
    assert shapes == [(6, C), (1, C)]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"in_channels": 0}, "in_channels must be at least 1; got 0"),
        ({"in_channels": 3, "attention_channels": 0}, "attention_channels must be at least 1; got 0"),
        ({"in_channels": 3, "dropout": 1.5}, "between 0 and 1; got 1.5"),
    ],
)
def test_bad_options(kwargs, match):
    with pytest.raises(ValueError, match=match):
        AttentionPooling(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"index": INDEX[:-1]}, ValueError, r"11 integers; got torch.int64 of shape \[10\]"),
        ({"index": INDEX.float()}, ValueError, "11 integers; got torch.float32"),
        ({"index": INDEX > 2, "dim_size": 2}, ValueError, "11 integers; got torch.bool"),
        ({"index": INDEX.unsqueeze(1)}, ValueError, r"of shape \[11, 1\]"),
        ({"index": INDEX - 1}, IndexError, "index must not be negative, .* counted from 0; got -1"),
        ({"index": INDEX, "dim_size": 3}, ValueError, "'dim_size'"),
        ({"ptr": torch.tensor([0, 4, 10])}, ValueError, r"ends at 11 here; got \[0, 4, 10\]"),
        ({"ptr": torch.tensor([1, 4, 11])}, ValueError, "starts at 0"),
        ({"ptr": torch.tensor([0, 6, 4, 11])}, ValueError, "never decreases"),
        ({"ptr": torch.tensor([[0, 11]])}, ValueError, "the first element of each set"),
        ({"ptr": torch.tensor([], dtype=torch.int64)}, ValueError, "the first element of each set"),
        ({"ptr": torch.tensor([0, 11]), "dim_size": 2}, ValueError, "'dim_size'"),
        ({"index": INDEX, "dim": -1}, ValueError, "cannot be the last one, which is that of the channels"),
        ({"lengths": torch.tensor([3]), "index": INDEX}, ValueError, "leave out index, ptr and dim_size"),
        ({"lengths": torch.tensor([3]), "ptr": INDEX}, ValueError, "leave out index, ptr and dim_size"),
        ({"lengths": torch.tensor([3]), "dim_size": 1}, ValueError, "leave out index, ptr and dim_size"),
        ({"lengths": torch.tensor([3])}, ValueError, r"\[\] for this x; got \[1\]"),
        ({"lengths": [3]}, TypeError, "lengths must be a tensor; got list"),
    ],
)
def test_bad_sets(pool, x, kwargs, error, match):
    with pytest.raises(error, match=match):
        pool(x, **kwargs)


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        ([3, 5], "between 0 and 4"),
        ([-1, 2], "must not be negative"),
        ([1.0, 2.0], "must hold one integer"),
        ([1, 2, 3], r"\[2\] for this x; got \[3\]"),
    ],
)
def test_bad_lengths(pool, lengths, match):
    with pytest.raises(ValueError, match=match):
        pool(torch.randn(2, 4, C, dtype=torch.double), lengths=torch.tensor(lengths))


def test_bad_channels(pool):
    with pytest.raises(ValueError, match=f"x has 3 channels, but this layer was made for in_channels={C}"):
        pool(torch.randn(4, 3))


def test_nan_in_the_padding_reaches_nothing():
    pool = AttentionPooling(4)
    x = torch.randn(2, 5, 4)
    x[1, 3:] = float("nan")
    out = pool(x, lengths=torch.tensor([5, 3]))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in pool.parameters())
