"""Graphormer against the paper's equations, graph by graph in float64."""

import pytest
import torch
from torch_geometric.data import Batch, Data

import gattn
from gattn.models import Graphormer
from gattn.testing import assert_alone_equals_in_batch, random_edge_index
from gattn.transforms import ShortestPathBuckets

F, D, C, H, CUTOFF = 4, 3, 8, 2, 2


def graph_of(size, num_edges, seed):
    torch.manual_seed(seed)
    edges = random_edge_index(size, num_edges=num_edges, seed=seed)
    x, edge_attr = torch.randn(size, F).double(), torch.randn(edges.size(1), D).double()
    return ShortestPathBuckets(CUTOFF, paths=True)(Data(x, edges, edge_attr))


GRAPHS = [graph_of(7, 9, 1), graph_of(1, 0, 2), graph_of(5, 12, 3)]


def made(**options):
    torch.manual_seed(0)
    model = Graphormer(F, C, 3, num_layers=2, heads=H, cutoff=CUTOFF, max_degree=2, **options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    return model


def walk(data, start):
    """The hops from a node to all others."""
    hops, reached = {start: 0}, [start]
    for node in reached:
        for source, target in data.edge_index.t().tolist():
            if source == node and target not in hops:
                hops[target] = hops[node] + 1
                reached.append(target)
    return hops


def by_hand(model, data):
    """The paper's equations on one graph."""
    n = len(data.x)
    out_degree, in_degree = (torch.tensor([(end == i).sum() for i in range(n)]).clamp(max=2) for end in data.edge_index)
    h = model.lin_in(data.x) + model.degrees.encoder1(in_degree) + model.degrees.encoder2(out_degree)
    bias = torch.zeros(n, n, H, dtype=torch.double)
    for j in range(n):
        hops = walk(data, j)
        for i in range(n):
            distance = hops.get(i)
            bucket = CUTOFF + 2 if distance is None else min(distance, CUTOFF + 1)
            bias[i, j] = model.distances.weight[bucket]
            if model.paths is not None and distance:
                edges = data.pair_paths.view(n, n, -1)[i, j].tolist()
                edges = [edge for edge in edges if edge >= 0]
                assert len(edges) == min(distance, CUTOFF)
                edges = edges[: model.paths.max_len]
                weight = model.paths.embedding_table.weight.view(-1, H, D)
                parts = [weight[place] @ data.edge_attr[edge] for place, edge in enumerate(edges)]
                bias[i, j] += torch.stack(parts).mean(0)
    if model.token is not None:
        h = torch.cat([h, model.token.weight])
        wider = model.token_bias.weight.expand(n + 1, n + 1, H).clone()
        wider[:n, :n] = bias
        bias = wider
    h = h if model.embedding_norm is None else model.embedding_norm(h)
    for layer in model.layers:
        first = layer.norm_first
        attn, x = layer.attn, layer.attn_layer_norm(h) if first else h
        q, k, v = (lin(x).view(len(x), H, -1) for lin in (attn.q_proj, attn.k_proj, attn.v_proj))
        logits = torch.einsum("ihc,jhc->ijh", q, k) / (C / H) ** 0.5 + bias
        h = h + attn.out_proj(torch.einsum("ijh,jhc->ihc", logits.softmax(1), v).flatten(1))
        h = h if first else layer.attn_layer_norm(h)
        hidden = layer.ffn_layer_norm(h) if first else h
        h = h + layer.ffn[3](torch.nn.functional.gelu(layer.ffn[0](hidden)))
        h = h if first else layer.ffn_layer_norm(h)
    h = h if model.norm is None else model.norm(h)
    if model.lin_head is not None:
        h = model.head_norm(torch.nn.functional.gelu(model.lin_head(h)))
    out = model.lin_out(h)
    return out if model.token is None else out[-1:]


#: Those of the published models for PCQM4M.
PUBLISHED = {"norm_first": False, "embedding_norm": True, "head": "gelu", "path_cutoff": 1}


@pytest.mark.parametrize("options", [{}, PUBLISHED], ids=["default", "published"])
@pytest.mark.parametrize("virtual_node", [True, False])
@pytest.mark.parametrize("edge_dim", [None, D])
def test_by_hand(virtual_node, edge_dim, options):
    model = made(virtual_node=virtual_node, edge_dim=edge_dim, **options)
    assert (model.norm is None) == bool(options)
    leaves, results = list(model.parameters()), []
    for out in (model(Batch.from_data_list(GRAPHS)), torch.cat([by_hand(model, data) for data in GRAPHS])):
        loss = (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum()
        results.append([out, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)])
    torch.testing.assert_close(*results)


def test_alone_equals_in_batch():
    assert_alone_equals_in_batch(made(edge_dim=D), GRAPHS, lambda model, data: model(data))


def test_edges_in_any_order():
    model, batch = made(edge_dim=D), Batch.from_data_list(GRAPHS)
    expected = model(batch)
    order = torch.randperm(batch.num_edges)
    mixed = Data(batch.x, batch.edge_index[:, order], batch.edge_attr[order], batch=batch.batch)
    torch.testing.assert_close(model(ShortestPathBuckets(CUTOFF, paths=True)(mixed)), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch's, at graph breaks
def test_compiled_and_recorded():
    model, batch = made(edge_dim=D), Batch.from_data_list(GRAPHS)
    with gattn.record_attention(model) as records:
        expected = model(batch)
    assert len(records) == 2
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(batch), expected)


def test_dropout_and_new_parameters():
    model, batch = made(edge_dim=D), Batch.from_data_list(GRAPHS)
    assert not torch.allclose(model.train()(batch), model.eval()(batch))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.reset_parameters()
    same = {"attn.q_proj.bias"}
    assert all(
        not torch.equal(before[name], parameter) for name, parameter in model.named_parameters() if name not in same
    )


def test_wrong_inputs():
    data = GRAPHS[0]
    with pytest.raises(ValueError, match="no pair_buckets"):
        made()(Data(data.x, data.edge_index))
    with pytest.raises(ValueError, match=r"needs edge_attr and ShortestPathBuckets\(..., paths=True\)"):
        made(edge_dim=D)(ShortestPathBuckets(CUTOFF)(Data(data.x, data.edge_index, data.edge_attr)))
    with pytest.raises(ValueError, match=r"this network has 5 buckets: apply ShortestPathBuckets\(2\)"):
        made()(ShortestPathBuckets(7)(Data(data.x, data.edge_index)))
    fewer = data.clone()
    fewer.edge_index, fewer.edge_attr = data.edge_index[:, :3], data.edge_attr[:3]
    for batch in (fewer, Batch.from_data_list([fewer, GRAPHS[2]])):
        with pytest.raises(ValueError, match="pair_paths name edges that are not there"):
            made(edge_dim=D)(batch)
    other = ShortestPathBuckets(CUTOFF - 1, paths=True)(Data(data.x, data.edge_index, data.edge_attr))
    with pytest.raises(ValueError, match="paths of 2 edges, the cut-off of the transform"):
        made(edge_dim=D)(other)
    with pytest.raises(TypeError, match="Data"):
        made()(data.x)
    with pytest.raises(ValueError, match="multiple of heads"):
        Graphormer(F, 7, 3, num_layers=1, heads=2)


def test_vmap():
    """Over features of the same graphs."""
    model, data = made(), Batch.from_data_list(GRAPHS)
    x = torch.randn(2, *data.x.shape, dtype=torch.double)

    def run(x):
        given = data.clone()
        given.x = x
        return model(given)

    torch.testing.assert_close(torch.func.vmap(run)(x), torch.stack([run(each) for each in x]))
