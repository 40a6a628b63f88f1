"""EGT, GRIT and TGAT against their papers' equations, written out pair by pair in float64."""

import pytest
import torch
from torch_geometric.data import Data

import gattn
from gattn import CompleteGraph, nn
from gattn.graphs import earlier_than
from gattn.ops.pair_roots import signed_root
from gattn.testing import assert_alone_equals_in_batch, random_edge_index

N, F, D, C, H = 6, 8, 3, 4, 2
ALL = CompleteGraph(N).edge_index  # by target, then by source


def randn(*shape):
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def split(x):
    return x.unflatten(-1, (H, -1))


def egt(conv, x, e):
    """The paper's equations on all pairs; `e` is `[N, N, D]`, targets first."""
    q, k, v = (split(lin(x)) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    clipped = (torch.einsum("ihc,jhc->ijh", q, k) / (F / H) ** 0.5).clamp(-5, 5)
    h, gates = clipped + conv.lin_edge(e), conv.lin_gate(e).sigmoid()
    weights = h.softmax(1) * gates
    out = torch.einsum("ijh,jhc->ihc", weights, v) * (1 + gates.sum(1)).log().unsqueeze(-1)
    return conv.lin_out(out.flatten(1)), conv.lin_edge_out(h)


def grit(conv, x, e):
    q, k, v = (split(lin(x)) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    z = (q.unsqueeze(1) + k.unsqueeze(0)) * split(conv.lin_edge_weight(e))
    pair = (z.sign() * z.abs().sqrt() + split(conv.lin_edge_bias(e))).relu()
    weights = torch.einsum("ijhc,hc->ijh", pair, conv.att).clamp(-5, 5).softmax(1)
    of_pairs = v.unsqueeze(0) + torch.einsum("ijhc,hcd->ijhd", pair, conv.edge_value)
    out = (weights.unsqueeze(-1) * of_pairs).sum(1).flatten(1)
    first, second = conv.degree_scale
    return out * first + out * second * torch.tensor(1.0 + N).log(), pair.flatten(2)


LAYERS = {
    "egt": (lambda: nn.EGTConv(F, D, heads=H), egt),
    "grit": (lambda: nn.GRITConv(F, D, C, heads=H), grit),
}
each = pytest.mark.parametrize("name", LAYERS)


def made(name):
    conv = LAYERS[name][0]().double()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_()
    return conv


@each
def test_by_hand(name):
    conv, x, e = made(name), randn(N, F), randn(N, N, D)
    leaves, results = [x, e, *conv.parameters()], []
    for out in (conv(x, ALL, e.flatten(0, 1)), LAYERS[name][1](conv, x, e)):
        out = out[0], out[1].reshape(N * N, -1)
        loss = sum((part * torch.linspace(-1, 2, part.numel()).view(part.shape)).sum() for part in out)
        results.append([*out, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)  # near zero, roots are steep


@each
def test_graphs_as_values_and_batches(name):
    conv, e = made(name), randn(N * N, D)
    x = randn(2, N, F)
    out, pairs = conv(x[0], CompleteGraph(N), e)
    torch.testing.assert_close((out, pairs), conv(x[0], ALL, e))
    torch.testing.assert_close(conv(x, ALL, e)[0][0], out)
    fewer = random_edge_index(N, num_edges=10)
    out, pairs = conv(x[0], fewer, e[:10])
    order = torch.randperm(10)
    torch.testing.assert_close(conv(x[0], fewer[:, order], e[:10][order]), (out, pairs[order]))


@each
def test_alone_equals_in_batch(name):
    graphs = []
    for size in (4, 1, 6):
        pairs = CompleteGraph(size).edge_index
        graphs.append(Data(torch.randn(size, F), pairs, torch.randn(pairs.size(1), D)))
    conv = LAYERS[name][0]()
    assert_alone_equals_in_batch(conv, graphs, lambda conv, data: conv(data.x, data.edge_index, data.edge_attr)[0])
    assert_alone_equals_in_batch(conv, graphs, lambda conv, data: conv(data.x, data.edge_index, data.edge_attr)[1])


@each
def test_gradients_of_gradients_and_zeros(name):
    conv = LAYERS[name][0]().double()
    pairs = random_edge_index(4, num_edges=6)
    if name == "egt":
        assert torch.autograd.gradgradcheck(lambda x, e: conv(x, pairs, e), (randn(4, F), randn(6, D)))
    x, e = torch.zeros(4, F).double().requires_grad_(), torch.zeros(6, D).double().requires_grad_()
    out, pair = conv(x, pairs, e)
    assert all(
        grad.isfinite().all() for grad in torch.autograd.grad(out.sum() + pair.sum(), [x, e, *conv.parameters()])
    )
    out, pair = conv(x[:0], pairs[:, :0], e[:0])
    assert out.shape[0] == pair.shape[0] == 0


def test_thesigned_root():
    x = torch.tensor([-4.0, 0.0, 9.0], requires_grad=True)
    y = signed_root(x)
    assert y.tolist() == [-2.0, 0.0, 3.0]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0.25, 0.0, pytest.approx(1 / 6)]


def test_degrees():
    conv, x, e = made("grit"), randn(N, F), randn(N * N, D)
    torch.testing.assert_close(conv(x, ALL, e), conv(x, ALL, e, degree=torch.full((N,), N)))
    plain = nn.GRITConv(F, D, C, heads=H, use_degrees=False).double()
    plain.load_state_dict(conv.state_dict(), strict=False)
    out = plain(x, ALL, e)[0]
    expected = out * conv.degree_scale[0] + out * conv.degree_scale[1] * torch.tensor(1.0 + N).log()
    torch.testing.assert_close(conv(x, ALL, e)[0], expected)


@each
def test_dropped_weights(name):
    """In training alone, with their expectation, and in GRIT the same for values and pairs."""
    conv, x, e = made(name), randn(N, F), randn(N * N, D)
    expected = conv(x, ALL, e)
    conv.dropout = 0.5
    torch.testing.assert_close(conv.eval()(x, ALL, e), expected)
    conv.train()
    mean = sum(conv(x, ALL, e)[0].detach() for _ in range(3000)) / 3000
    torch.testing.assert_close(mean, expected[0].detach(), rtol=0.2, atol=0.2 * expected[0].abs().max().item())
    assert not torch.allclose(conv(x, ALL, e)[0], expected[0])
    torch.testing.assert_close(conv(x, ALL, e)[1], expected[1])
    conv.dropout = 1.0
    out = conv(x, ALL, e)[0]
    torch.testing.assert_close(out, (conv.lin_out(out * 0) if name == "egt" else torch.zeros_like(out)))


def test_grit_drops_the_same_for_values_and_pairs():
    found = []
    for of_values in (1.0, 0.0):
        conv = nn.GRITConv(F, F, C, heads=H, use_degrees=False, dropout=0.5)
        with torch.no_grad():
            for parameter in conv.parameters():
                parameter.zero_()
            conv.lin_value.weight.fill_(of_values / F)
            conv.lin_edge_bias.bias.fill_(1.0)
            conv.edge_value.copy_((1.0 - of_values) * torch.eye(C))
        torch.manual_seed(1)
        found.append(conv(torch.ones(N, F), ALL, torch.zeros(N * N, F))[0])
    torch.testing.assert_close(found[0], found[1])
    assert len(found[0].unique()) > 1


@pytest.mark.parametrize("count", [0, 1, 2])
def test_virtual_nodes_are_not_scaled_by_degree(count):
    """As in the program of EGT's authors, whose virtual nodes come first."""
    conv, x = made("egt"), randn(N, F)
    conv.num_virtual_nodes = count
    sizes = (4, 2)
    pairs, batch = CompleteGraph.packed(sizes).edge_index, torch.tensor([0, 0, 0, 0, 1, 1])
    e = randn(pairs.size(1), D)
    found = conv(x, pairs, e, batch=batch)[0]
    for first, size, of_pairs in zip((0, 4), sizes, e.split([16, 4]), strict=True):
        nodes, of_pairs = x[first : first + size], of_pairs.view(size, size, D)
        scaled = egt(conv, nodes, of_pairs)[0]
        gates = conv.lin_gate(of_pairs).sigmoid()
        q, k, v = (split(lin(nodes)) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
        logits = (torch.einsum("ihc,jhc->ijh", q, k) / (F / H) ** 0.5).clamp(-5, 5) + conv.lin_edge(of_pairs)
        whole = torch.einsum("ijh,jhc->ihc", logits.softmax(1) * gates, v)
        expected = torch.cat([conv.lin_out(whole.flatten(1))[:count], scaled[count:]])
        torch.testing.assert_close(found[first : first + size], expected)
    conv.scale_degree = False
    torch.testing.assert_close(conv(x, pairs, e)[0][4:], conv.lin_out(whole.flatten(1)))


def test_options_of_pair_layers_are_checked():
    for make, message in (
        (lambda: nn.EGTConv(F, D, dropout=1.5), "dropout"),
        (lambda: nn.GRITConv(F, D, C, dropout=-0.5), "dropout"),
        (lambda: nn.EGTConv(F, D, num_virtual_nodes=-1), "num_virtual_nodes"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="scale_degree"):
        nn.EGTConv(F, D, scale_degree="no")


@each
def test_recorded_and_compiled(name):
    conv, x, e = made(name), randn(N, F), randn(N * N, D)
    with gattn.record_attention(conv) as records:
        expected = conv(x, ALL, e)
    assert len(records) == 1
    torch.testing.assert_close(torch.compile(conv, backend="aot_eager")(x, ALL, e), expected)


def tgat(conv, sources, targets, edges, time, features):
    out = []
    for i, x in enumerate(targets):
        into = [n for n in range(edges.size(1)) if edges[1, n] == i]
        total = torch.zeros(conv.lin_key.weight.size(0), dtype=torch.double)
        if into:
            e = torch.stack([torch.cat([features[n], conv.encode(time[n])]) for n in into])
            x_j = sources[edges[0, into]]
            q = split(conv.lin_query(torch.cat([x, conv.encode(torch.zeros(()))])))
            k, v = (
                split(near(x_j) + far(e))
                for near, far in ((conv.lin_key, conv.lin_edge_key), (conv.lin_value, conv.lin_edge_value))
            )
            weights = (torch.einsum("hc,jhc->jh", q, k) / q.size(-1) ** 0.5).softmax(0)
            total = torch.einsum("jh,jhc->hc", weights, v).flatten()
        out.append(conv.lin_out(conv.lin_hidden(torch.cat([total, x])).relu()))
    return torch.stack(out)


class TestTGAT:
    @pytest.mark.parametrize("edge_dim", [None, D])
    def test_by_hand(self, edge_dim):
        conv = nn.TGATConv(F, 6, time_channels=5, heads=H, edge_dim=edge_dim).double()
        edges, time = random_edge_index(5, 4, 7), torch.rand(7, dtype=torch.double) * 1e3
        sources, targets, e = randn(5, F), randn(4, F), randn(7, D)
        given = {} if edge_dim is None else {"edge_attr": e}
        out = conv((sources, targets), edges, time, **given)
        expected = tgat(conv, sources, targets, edges, time, e if edge_dim else e[:, :0])
        leaves, results = [sources, targets, *conv.parameters()], []
        for y in (out, expected):
            results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
        torch.testing.assert_close(*results)

    def test_the_encoding(self):
        conv = nn.TGATConv(F, 6, time_channels=10)
        time = torch.tensor([0.0, 1e3])
        expected = torch.outer(time.double(), 10.0 ** -torch.arange(10).double()).cos().float()
        torch.testing.assert_close(conv.encode(time), expected, rtol=0, atol=1e-4)  # frequencies are in float32
        assert (conv.encode(time)[0] == 1).all()

    def test_on_earlier_neighbours(self):
        times = torch.tensor([3.0, 1.0, 2.0, 5.0])
        graph, passed = earlier_than(times, k=2)
        conv, x = nn.TGATConv(F, 6, time_channels=5).double(), randn(4, F)
        out = conv(x, graph, passed)
        alone = conv(x[1:2], torch.zeros(2, 0, dtype=torch.long), torch.zeros(0))
        torch.testing.assert_close(out[1:2], alone)  # the first has no neighbours

    def test_wrong_inputs(self):
        conv, x, edges = nn.TGATConv(F, 6, time_channels=5), torch.randn(4, F), torch.tensor([[0], [1]])
        with pytest.raises(ValueError, match=r"time must have one entry per edge, \[1\]"):
            conv(x, edges, torch.zeros(2))
        with pytest.raises(ValueError, match="pass edge_dim"):
            conv(x, edges, torch.zeros(1), torch.zeros(1, D))
        with pytest.raises(TypeError, match="time must be a tensor"):
            conv(x, edges, 1.0)
        with pytest.raises(ValueError, match="multiple of heads"):
            nn.TGATConv(F, 5, 4, heads=2)
        with pytest.raises(ValueError, match="multiple of heads"):
            nn.EGTConv(9, D, heads=2)


def exphormer(conv, x, e, edges):
    q, k, v = (split(lin(x)) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
    products = (q[edges[1]] * k[edges[0]] * split(conv.lin_edge(e))).sum(-1) / (F / H) ** 0.5
    logits = torch.full((N, edges.size(1), H), -torch.inf, dtype=torch.double)
    places = edges[1], torch.arange(edges.size(1))
    weights = logits.index_put(places, products.clamp(-5, 5)).softmax(1)[places]
    return torch.zeros_like(v).index_add(0, edges[1], weights.unsqueeze(-1) * v[edges[0]]).flatten(1)


class TestExphormer:
    @pytest.mark.parametrize("bias", [False, True])
    def test_by_hand(self, bias):
        conv, x, e = nn.ExphormerConv(F, D, heads=H, bias=bias).double(), randn(N, F), randn(N + 8, D)
        with torch.no_grad():
            for parameter in conv.parameters():
                parameter.normal_()
        edges = torch.cat([torch.arange(N).repeat(2, 1), random_edge_index(N, num_edges=8)], 1)
        leaves, results = [x, e, *conv.parameters()], []
        for out in (conv(x, edges, e), exphormer(conv, x, e, edges)):
            results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
        torch.testing.assert_close(*results)
        assert (
            conv.weigh(
                split(conv.lin_query(x)),
                split(conv.lin_key(x)),
                edges,
                score=conv.score,
                edge=split(conv.lin_edge(e)),
                distribution=None,
            ).abs()
            <= 5
        ).all()

    def test_on_the_papers_graph(self):
        graphs = []
        for size in (5, 1, 8):
            edges = random_edge_index(size, num_edges=6)
            graphs.append(Data(torch.randn(size, F), edges))
        conv, kinds = nn.ExphormerConv(F, D, heads=H), torch.randn(4, D)
        virtual = torch.randn(1, F)

        def run(conv, data):
            batch = data.batch if data.batch is not None else torch.zeros(len(data.x), dtype=torch.long)
            more = gattn.graphs.expander(len(data.x), 2, batch)
            joined = gattn.graphs.union(data.edge_index, more, num_nodes=len(data.x), typed=True)
            graph = gattn.graphs.with_virtual_nodes(joined, batch=batch)
            x = torch.cat([data.x, virtual.expand(int(batch.max()) + 1, -1).to(data.x.dtype)])
            return conv(x, graph, kinds[graph.edge_type].to(x.dtype))[: len(data.x)]

        assert_alone_equals_in_batch(conv, graphs, run)

    def test_recorded_compiled_and_explained(self):
        conv, x, edges = nn.ExphormerConv(F, D, heads=H).double(), randn(N, F), random_edge_index(N, num_edges=8)
        e = randn(8, D)
        with gattn.record_attention(conv) as records:
            expected = conv(x, edges, e)
        assert len(records) == 1
        compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, edges, e), expected)
        assert torch.autograd.gradgradcheck(lambda x, e: conv(x, edges, e), (x, e))

    def test_dropout_and_wrong_inputs(self):
        conv, x, edges = nn.ExphormerConv(F, D, heads=H, dropout=0.5), torch.randn(N, F), ALL
        e = torch.randn(N * N, D)
        assert not torch.allclose(conv.train()(x, edges, e), conv.eval()(x, edges, e))
        with pytest.raises(ValueError, match="needs edge_attr"):
            conv(x, edges)
        with pytest.raises(ValueError, match="multiple of heads"):
            nn.ExphormerConv(9, D, heads=2)
        with pytest.raises(ValueError, match="clamp must be positive"):
            nn.ExphormerConv(F, D, clamp=0)


@pytest.mark.parametrize("name", ["EGTConv", "GRITConv", "ExphormerConv"])
def test_pairs_are_refused(name):
    conv = nn.GRITConv(F, D, C) if name == "GRITConv" else getattr(nn, name)(F, D)
    with pytest.raises(ValueError, match=f"{name} attends among one set of nodes"):
        conv((torch.randn(N, F), torch.randn(N, F)), ALL, torch.randn(N * N, D))


def test_edge_set_attention():
    """Edges attend to edges with which they share a node: the same as a mask on all pairs of edges."""
    edges = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0, 4, 1], [1, 0, 2, 1, 3, 2, 0, 3, 1, 4]])
    graph, _ = gattn.graphs.line_graph(edges, directed=False)
    ends = edges[:, edges[0] < edges[1]]
    shares = (ends.t()[:, None, :, None] == ends.t()[None, :, None, :]).flatten(2).any(-1)
    shares.fill_diagonal_(False)
    x = randn(ends.size(1), F)
    theirs = torch.nn.MultiheadAttention(F, H, batch_first=True).double()
    ours = nn.MultiheadAttention(F, H, batch_first=True).double()
    ours.load_state_dict(theirs.state_dict())
    expected, _ = theirs(x, x, x, attn_mask=~shares)
    torch.testing.assert_close(ours(x, x, x, graph=graph)[0], expected)
    assert 0 < shares.sum() < shares.numel()
