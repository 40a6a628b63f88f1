# %% [markdown]
# # Graph Transformers
#
# A graph attention network passes messages along the edges of a graph, so that a node needs as many layers as there are
# steps to whatever it must know. A Transformer lets everyone attend to everyone, which takes a single layer, but it
# knows nothing about edges and compares all pairs of nodes. **Graph Transformers** are attempts to have both. They look
# very different in their papers; as message passing, they differ in a few choices:
#
# | | graph: who attends to whom | score | weights |
# | --- | --- | --- | --- |
# | [GAT](https://arxiv.org/abs/1710.10903) | neighbours | sum of scalars | softmax |
# | [Transformer](https://arxiv.org/abs/1706.03762) | all pairs | dot product | softmax |
# | [Graphormer](https://arxiv.org/abs/2106.05234) | all pairs | dot product, and a bias by distance | softmax |
# | [Exphormer](https://arxiv.org/abs/2303.06147) | edges, expander, virtual node | dot product with edges | softmax |
# | [SGFormer](https://arxiv.org/abs/2306.10759) | all pairs, in linear time | product of normed vectors | the product |
#
# In gattn, each row is one call of `gattn.attend`,
#
# $$
# \mathrm{out}_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij}\, v_j, \qquad
# \alpha_{i\cdot} = p\big(s(q_i, k_j, e_{ij}) + b_{ij} \text{ for } j \in \mathcal{N}(i)\big),
# $$
#
# with a graph $\mathcal{N}$, a score $s$, a bias $b$ and a distribution $p$. The first part of this notebook builds the
# last three rows from that call, on a batch of molecules, and checks each against its plain formula. The second part
# asks what the ingredients are good for:
#
# 1. What does each of the three cost?
# 2. What does a bias by distance add to attention among all pairs?
# 3. What does a virtual node add to message passing?
#
# The last two questions are answered by tiny models on tasks that are made for them. You should know what attention
# on a graph is ([notebook 1](01_attention_is_message_passing.ipynb) explains it). No data are downloaded.

# %%
import matplotlib.pyplot as plt
import networkx as nx
import torch
import torch.nn.functional as F
from matplotlib.colors import PowerNorm
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.utils import scatter, to_undirected

import gattn
from gattn.graphs import expander, union, with_virtual_nodes
from gattn.visualize import COLOURS, WEIGHTS

torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 120, "font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
equal = torch.testing.assert_close

# %% [markdown]
# ## Part one: three graph Transformers in a few lines each
#
# Our batch consists of the skeletons of four molecules (without hydrogen atoms). Bonds are single or double, and every
# bond is an edge in both directions. The graphs have different sizes and lie end to end; nothing is padded, here or
# anywhere else in this notebook. Queries, keys and values are random, with $H$ heads of $C$ channels.

# %%
SINGLE = {
    "aspirin": [(0, 1), (1, 3), (3, 4), (5, 6), (7, 8), (9, 4), (9, 10), (10, 12)],
    "caffeine": [(0, 1), (1, 2), (3, 4), (5, 1), (5, 6), (6, 8), (8, 9), (9, 11), (11, 4), (11, 12), (8, 13)],
    "toluene": [(0, 1), (2, 3), (4, 5), (6, 1)],
    "ethanol": [(0, 1), (1, 2)],
}
DOUBLE = {
    "aspirin": [(1, 2), (4, 5), (6, 7), (8, 9), (10, 11)],
    "caffeine": [(2, 3), (4, 5), (6, 7), (9, 10)],
    "toluene": [(1, 2), (3, 4), (5, 6)],
    "ethanol": [],
}
bonds = {
    name: [torch.tensor(kind[name], dtype=torch.int64).view(-1, 2).t() for kind in (SINGLE, DOUBLE)] for name in SINGLE
}
molecules = Batch.from_data_list(
    [
        Data(edge_index=to_undirected(torch.cat(pair, 1)), num_nodes=1 + int(torch.cat(pair, 1).max()))
        for pair in bonds.values()
    ]
)
sizes, starts = molecules.ptr.diff().tolist(), molecules.ptr[:-1].tolist()
single, double = (
    to_undirected(torch.cat([pair[kind] + start for pair, start in zip(bonds.values(), starts, strict=True)], 1))
    for kind in (0, 1)
)
N, H, C = molecules.num_nodes, 2, 8
query, key, value = torch.randn(3, N, H, C).unbind()
for name, n, graph in zip(bonds, sizes, molecules.to_data_list(), strict=True):
    print(f"{name:9} {n:3} atoms {graph.num_edges // 2:3} bonds")
assert single.size(1) + double.size(1) == molecules.num_edges

# %% [markdown]
# ### Graphormer: all pairs, and a bias by distance
#
# [Graphormer](https://arxiv.org/abs/2106.05234) is a Transformer over all nodes of a graph. What it knows about edges
# is in a number that is added to each logit, and that is learnt for each length $d_{ij}$ of the shortest path between
# two nodes (the paper's *spatial encoding*):
#
# $$
# \alpha_{ij} = \mathop{\mathrm{softmax}}_{j} \left( \frac{q_i^\top k_j}{\sqrt{C}} + b_{d_{ij}} \right).
# $$
#
# The graph is `CompleteGraph.packed`, which is complete within each molecule and lists no pairs. The distances are
# computed once, by a transform, and kept as small integers; `BucketBias` looks up the learnt number of each. (The paper
# has more: a vector for the degree of each node, which `gattn.transforms.Degrees` prepares; a second bias from the
# edges along the path; and a node that represents the whole graph.)

# %%
paths = gattn.transforms.ShortestPathBuckets(cutoff=6)
distances = paths.matrices(paths(molecules))  # one matrix per molecule
table = torch.randn(paths.num_buckets, H)


def graphormer(query, key, value, sizes, distances, table):
    bias = gattn.BucketBias(distances, table)
    return gattn.attend(query, key, value, gattn.CompleteGraph.packed(sizes), bias=bias)


out = graphormer(query, key, value, sizes, distances, table)
by_molecule = [x.split(sizes) for x in (query, key, value)]
for q, k, v, distance, result in zip(*by_molecule, distances, out.split(sizes), strict=True):
    logits = torch.einsum("ihc,jhc->hij", q, k) / C**0.5 + table[distance.long()].permute(2, 0, 1)
    equal(result, torch.einsum("hij,jhc->ihc", logits.softmax(-1), v))
print("Graphormer: equal to its formula on all", len(sizes), "molecules")

# %% [markdown]
# ### A bias of positions, learnt by a function
#
# Atoms also have positions $r_i$, and models of molecules and proteins learn a function of distances: a sum of bumps
# $\phi_k$ at different distances, whose heights $w_k$ are learnt for each head.
#
# $$
# b_{ij} = \sum_k w_k\, \phi_k\big(\lVert r_i - r_j \rVert\big)
# $$
#
# A matrix of biases would need $N^2 H$ numbers, and the bumps $K$ times as many. `RadialBias` makes those of some
# targets at a time instead, and makes them again when gradients are computed, which also reach the positions: that is
# how forces are learnt. Here, each molecule gets some positions, and the result is compared with the whole matrix.

# %%
radial = gattn.nn.RadialBias(H, num_radial=8, cutoff=4.0)
position = torch.cat([torch.randn(size, 3) for size in sizes]).requires_grad_()
out = gattn.attend(query, key, value, gattn.CompleteGraph.packed(sizes), bias=radial(position))
(forces,) = torch.autograd.grad(out.square().sum(), position)

parts = []
for q, k, v, r in zip(*by_molecule, position.split(sizes), strict=True):
    centres = torch.linspace(0, 4.0, 8)
    distance = (r[:, None] - r).square().sum(-1).add(1e-20).sqrt()  # the root is steep at zero
    bumps = torch.exp(-((distance[..., None] - centres) ** 2) / (2 * (4 / 7) ** 2))
    logits = torch.einsum("ihc,jhc->hij", q, k) / C**0.5 + (bumps @ radial.kernel.weight).permute(2, 0, 1)
    parts.append(torch.einsum("hij,jhc->ihc", logits.softmax(-1), v))
equal(out, torch.cat(parts))
equal(forces, torch.autograd.grad(torch.cat(parts).square().sum(), position)[0])
print("RadialBias: output and gradients of positions equal to the formula")

# %% [markdown]
# ### Exphormer: a sparse graph in which everyone is close
#
# [Exphormer](https://arxiv.org/abs/2303.06147) does not attend to all pairs but to three sparse graphs at once: the
# edges that are given; an **expander**, a random graph in which every node has the same small number of neighbours, and
# any two nodes are a few steps apart; and a **virtual node**, which is joined to all nodes of its graph and carries
# messages from everywhere to everywhere. The score tells these edges apart. A vector $e_{ij}$ of the edge is multiplied
# into the key, and logits are clamped, for stability:
#
# $$
# \alpha_{ij} = \mathop{\mathrm{softmax}}_{j \in \mathcal{N}(i)} \;
# \mathrm{clamp}\left( \frac{q_i^\top (k_j \odot e_{ij})}{\sqrt{C}}, -5, 5 \right), \qquad
# \mathcal{N} = \text{bonds} \cup \text{expander} \cup \text{virtual}.
# $$
#
# Here, $e_{ij}$ is learnt for each type of edge, of which there are five: both kinds of bonds, the expander, and the
# edges to and from the virtual nodes. `union` and `with_virtual_nodes` number these types. Virtual nodes come last and
# have queries, keys and values like everyone else.

# %%
everything = union(single, double, expander(N, degree=4, batch=molecules.batch), num_nodes=N, typed=True)
everything = with_virtual_nodes(everything, batch=molecules.batch)
kinds = ("single", "double", "expander", *everything.edge_types[-2:])
edge_table = torch.randn(len(kinds), H, C)
virtual = torch.randn(1, 3, H, C)  # query, key and value of a virtual node, the same in every graph


def exphormer(query, key, value, graph, edge_table):
    score, edge = gattn.DotScore(edge="multiply", clamp=5.0), gattn.Typed(edge_table, graph.edge_type)
    return gattn.attend(query, key, value, graph, score=score, edge=edge)


qkv = torch.cat([torch.stack([query, key, value], 1), virtual.expand(len(sizes), -1, -1, -1)])
out = exphormer(*qkv.unbind(1), everything, edge_table)

source, target = everything.edge_index
for i in range(N + len(sizes)):  # the formula, one target after the other
    arrives, (q, k, v) = target == i, qkv.unbind(1)
    keys = k[source[arrives]] * edge_table[everything.edge_type[arrives]]
    weights = ((q[i] * keys).sum(-1) / C**0.5).clamp(-5, 5).softmax(0)
    equal(out[i], (weights.unsqueeze(-1) * v[source[arrives]]).sum(0))
print("Exphormer: equal to its formula at all", N, "atoms and", len(sizes), "virtual nodes")
for kind, count in zip(kinds, everything.edge_type.bincount().tolist(), strict=True):
    print(f"  {kind:16} {count:4} edges")

# %% [markdown]
# ### SGFormer: all pairs in linear time
#
# [SGFormer](https://arxiv.org/abs/2306.10759) attends to all pairs without a softmax. All queries of a graph are
# divided by their Frobenius norm, $\tilde q_i = q_i / \lVert Q \rVert_F$, and so are all keys. The weight of a pair is
# the product, plus the number of nodes $N$ for a node with itself, divided by the sum:
#
# $$
# \mathrm{out}_i = \frac{N v_i + \sum_j (\tilde q_i^\top \tilde k_j)\, v_j}{N + \sum_j \tilde q_i^\top \tilde k_j}
# = \frac{N v_i + \big(\sum_j v_j \tilde k_j^\top\big)\, \tilde q_i}{N + \big(\sum_j \tilde k_j\big)^\top \tilde q_i}.
# $$
#
# Without a softmax between them, the two products can be taken in the other order, on the right-hand side: what is in
# brackets is computed once per graph, and no pair is ever looked at. To gattn, this is a choice of score
# (`DotScore(scale=1.0)`) and distribution (`Identity()`, the products as they are), and it decides by itself which
# order is faster; on graphs as small as these, it is the first. A channel of ones among the values gives the sum in the
# denominator.
#
# (What is left out here is what the paper puts around this: a share of the previous layer, and a graph convolution
# beside it, from which the model learns about edges. The *Performer* is linear attention as well, with features that
# approximate a softmax: `gattn.features.Favor`.)


# %%
def sgformer(query, key, value, sizes):
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    query, key = (x / scatter(x.square().sum((1, 2)), batch).sqrt()[batch, None, None] for x in (query, key))
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    options = {"score": gattn.DotScore(scale=1.0), "distribution": gattn.Identity()}
    sums = gattn.attend(query, key, value, gattn.CompleteGraph.packed(sizes), **options)
    sums = sums + torch.tensor(sizes)[batch, None, None] * value
    return sums[..., :-1] / sums[..., -1:]


out = sgformer(query, key, value, sizes)
for q, k, v, result in zip(*by_molecule, out.split(sizes), strict=True):
    weights = torch.einsum("ihc,jhc->hij", q / q.norm(), k / k.norm()) + len(q) * torch.eye(len(q))
    equal(result, torch.einsum("hij,jhc->ihc", weights / weights.sum(-1, keepdim=True), v))

layer, x = gattn.nn.SGFormerAttention(16, heads=H, head_channels=C, norm="frobenius"), torch.randn(N, 16)
projected = (linear(x).unflatten(-1, (H, C)) for linear in (layer.q, layer.k, layer.v))
equal(layer(x, graph=gattn.CompleteGraph.packed(sizes)), sgformer(*projected, sizes).mean(1))
print("SGFormer: equal to its formula, and to gattn.nn.SGFormerAttention")

# %% [markdown]
# ### Alone or in a batch
#
# A molecule must get the same result whichever molecules are beside it. That is true of all three, and of the expander
# as well, which depends on a graph's size alone:

# %%
alone = slice(starts[1], starts[1] + sizes[1])  # caffeine
q, k, v = query[alone], key[alone], value[alone]
own = union(
    *(to_undirected(pair) for pair in bonds["caffeine"]), expander(sizes[1], degree=4), num_nodes=sizes[1], typed=True
)
own_qkv = torch.cat([torch.stack([q, k, v], 1), virtual]).unbind(1)
equal(
    graphormer(q, k, v, sizes[1:2], distances[1:2], table),
    graphormer(query, key, value, sizes, distances, table)[alone],
)
equal(sgformer(q, k, v, sizes[1:2]), sgformer(query, key, value, sizes)[alone])
equal(
    exphormer(*own_qkv, with_virtual_nodes(own), edge_table)[:-1],
    exphormer(*qkv.unbind(1), everything, edge_table)[alone],
)
print("caffeine alone and in the batch: the same results")

# %% [markdown]
# ## Part two: what for?
#
# ### 1. What it costs
#
# Here is who attends to whom in aspirin: along bonds, as in message passing; in Exphormer; and among all pairs, as in
# Graphormer and SGFormer.

# %%
GREY = "#BBBBBB"
skeleton = nx.Graph(SINGLE["aspirin"] + DOUBLE["aspirin"])
layout = nx.kamada_kawai_layout(skeleton)
figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.9), layout="constrained")
far = expander(sizes[0], degree=4).edge_index.t().tolist()
with_virtual = {**layout, "virtual": (0.45, -0.95)}
for ax, title in zip(axes, ("bonds", "Exphormer", "all pairs"), strict=True):
    if title == "Exphormer":
        nx.draw_networkx_edges(nx.Graph(far), layout, ax=ax, edge_color=COLOURS[0], width=0.8)
        star = nx.Graph([("virtual", node) for node in skeleton])
        nx.draw_networkx_edges(star, with_virtual, ax=ax, edge_color=COLOURS[1], width=0.8, alpha=0.6)
        nx.draw_networkx_nodes(star, with_virtual, ["virtual"], ax=ax, node_color=COLOURS[1], node_size=90)
    if title == "all pairs":
        nx.draw_networkx_edges(nx.complete_graph(sizes[0]), layout, ax=ax, edge_color=COLOURS[0], width=0.5, alpha=0.6)
    nx.draw_networkx_edges(skeleton, layout, ax=ax, edge_color="black", width=2)
    nx.draw_networkx_nodes(skeleton, layout, ax=ax, node_color="white", edgecolors="black", node_size=60, linewidths=1)
    ax.set_title(title, fontsize=9)
    ax.set_axis_off()
handles = [plt.Line2D([], [], color=colour, lw=2) for colour in ("black", COLOURS[0], COLOURS[1])]
legend = figure.legend(
    handles,
    ["bonds", "expander, or all other pairs", "virtual node"],
    loc="outside lower center",
    ncols=3,
    frameon=False,
)

# %% [markdown]
# What does a layer cost as graphs grow? We count multiplications, which do not depend on a machine. A pair takes $C$ of
# them for the product of query and key, and $C$ more for the weighted value; Exphormer's edge vectors take another $C$.
# SGFormer has no pairs: each node adds a matrix $v_j \tilde k_j^\top$ to a sum and multiplies the sum by its query,
# which makes $2 C^2$ per node. The graphs are random, with few branches and a few rings, like molecules.


# %%
def molecule_like(n, generator):
    """A random tree with short branches, and rings from a few more edges."""
    nodes = torch.arange(1, n)
    parents = (nodes - 1 - torch.randint(3, (n - 1,), generator=generator)).clamp(min=0)
    rings = torch.randint(n, (2, n // 8), generator=generator)
    edges = torch.cat([torch.stack([parents, nodes]), rings], 1)
    return Data(edge_index=to_undirected(edges[:, edges[0] != edges[1]]), num_nodes=n)


def pairs(n, generator):
    """How many pairs are compared by message passing, Exphormer, and attention among all nodes."""
    graph = molecule_like(n, generator).edge_index
    wider = with_virtual_nodes(union(graph, expander(n, degree=4), num_nodes=n, typed=True))
    return graph.size(1), wider.num_edges, n * n


C = 16
grown = [4**power for power in range(2, 8)]
counts = [pairs(n, torch.Generator().manual_seed(n)) for n in grown]
work = {
    "message passing": [2 * C * few for few, _, _ in counts],
    "Exphormer": [3 * C * some for _, some, _ in counts],
    "Graphormer": [2 * C * every for _, _, every in counts],
    "SGFormer": [2 * C**2 * n for n in grown],
}
figure, ax = plt.subplots(figsize=(4.6, 2.6), layout="constrained")
colours = {"message passing": "black", "Exphormer": COLOURS[1], "Graphormer": COLOURS[0], "SGFormer": COLOURS[2]}
for name, numbers in work.items():
    ax.plot(grown, numbers, "o-", markersize=3, color=colours[name], label=name)
ax.set(xscale="log", yscale="log", xlabel="nodes", ylabel="multiplications per head")
ax.set_xticks(grown, grown)
ax.minorticks_off()
ax.grid(alpha=0.25)
figure.legend(loc="outside right center", frameon=False)

print(f"{'':7}{'pairs':^36}{f'thousand multiplications, C = {C}':^64}")
print(f"{'nodes':>7}{'bonds':>10}{'Exphormer':>12}{'all pairs':>14}" + "".join(f"{name:>16}" for name in work))
for row, (n, numbers) in enumerate(zip(grown, counts, strict=True)):
    columns = "".join(f"{numbers[row] / 1e3:16,.0f}" for numbers in work.values())
    print(f"{n:7}{numbers[0]:10,}{numbers[1]:12,}{numbers[2]:14,}" + columns)
print(
    f"\nour four molecules: {sum(n * n for n in sizes)} pairs end to end, {len(sizes) * max(sizes) ** 2} if they were "
    f"padded to {max(sizes)} atoms each"
)

# %% [markdown]
# All lines but one are parallel: message passing, Exphormer and SGFormer are linear in the number of nodes, and
# Graphormer is quadratic. Where the lines meet matters, too. As long as a graph has fewer nodes than a head has
# channels, all pairs cost less than SGFormer's sums, and with twice as many nodes, which is the size of many drugs,
# they cost only twice as much. This is where Graphormer is at home; Exphormer and SGFormer were made for larger graphs.
# Padding a batch, as implementations of Graphormer usually do, adds pairs that nobody needs. The line below the table
# counts them.
#
# Linear attention has a price of its own. A bias of a pair needs the pair, so it cannot have Graphormer's distances.
# SGFormer learns about edges from a graph convolution beside it instead.
#
# ### 2. What a bias by distance does
#
# Does attention need to be told about distances? Here is a task in which nothing else matters. Every node throws a
# coin, $+1$ or $-1$, and has to say the **mean of the coins at distance exactly $k$**. There is one task for each of
# $k = 1, 2, 3, 4$. The graphs are random ones of different sizes; those of the test are new, and the coins are new in
# every batch. The score is the share of the variance that is explained: 0 for always saying zero, and 1 for no error.
#
# All models consist of the same block, an ordinary one of a Transformer with a single head. They differ in the number
# of blocks, in the graph, and in whether there is a bias. (Message passing has the same dot products here instead of
# GAT's score, so that the graph is the only difference. It would not see farther with another score.)


# %%
class Block(nn.Module):
    def __init__(self, channels, num_buckets):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.ffn = nn.Sequential(nn.Linear(channels, 2 * channels), nn.ReLU(), nn.Linear(2 * channels, channels))
        self.table = nn.Parameter(torch.zeros(num_buckets)) if num_buckets else None

    def prepare(self, x, distances):
        query, key, value = self.qkv(self.norm1(x)).view(len(x), 3, 1, -1).unbind(1)
        return query, key, value, None if self.table is None else gattn.BucketBias(distances, self.table)

    def forward(self, x, graph, distances):
        query, key, value, bias = self.prepare(x, distances)
        x = x + self.out(gattn.attend(query, key, value, graph, bias=bias).flatten(1))
        return x + self.ffn(self.norm2(x))


class Model(nn.Module):
    def __init__(self, layers=1, num_buckets=0, channels=16):
        super().__init__()
        self.embed, self.read = nn.Linear(1, channels), nn.Linear(channels, 1)
        self.virtual = nn.Parameter(torch.randn(channels))  # the input of every virtual node, if there are any
        self.blocks = nn.ModuleList(Block(channels, num_buckets) for _ in range(layers))

    def inputs(self, coins, num_virtual=0):
        return torch.cat([self.embed(coins.unsqueeze(1)), self.virtual.expand(num_virtual, -1)])

    def forward(self, coins, graph, distances=None, num_virtual=0):
        x = self.inputs(coins, num_virtual)
        for block in self.blocks:
            x = block(x, graph, distances)
        return self.read(x[: len(coins)]).squeeze(1)


def throw(num_nodes, generator=None):
    return 2.0 * torch.randint(2, (num_nodes,), generator=generator) - 1.0


def train(model, loss, steps, lr):
    """Trains with Adam and a learning rate that rises and falls."""
    optimizer = torch.optim.Adam(model.parameters(), lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()


paths = gattn.transforms.ShortestPathBuckets(cutoff=7)


def molecules_like(count, seed):
    """A batch of random graphs with 10 to 24 nodes, and their distances."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(10, 25, (count,), generator=generator).tolist()
    batch = Batch.from_data_list([molecule_like(n, generator) for n in sizes])
    return batch, paths.matrices(paths(batch))


def graph_of(batch, kind):
    """The edges, or all pairs of nodes of the same graph."""
    if kind == "edges":
        return gattn.SparseGraph(batch.edge_index, batch.num_nodes, batch.num_nodes)
    return gattn.CompleteGraph.packed(ptr=batch.ptr)


def averages(k, distances):
    """The matrix that takes the mean over the nodes at distance k, and which nodes have any."""
    is_there = torch.block_diag(*(matrix == k for matrix in distances)).float()
    return is_there / is_there.sum(1, keepdim=True).clamp(min=1), is_there.any(1)


learning, testing = molecules_like(20, seed=1), molecules_like(60, seed=2)
models = {
    "message passing, 1 layer": (1, "edges", 0),
    "message passing, 2 layers": (2, "edges", 0),
    "message passing, 4 layers": (4, "edges", 0),
    "all pairs, 1 layer": (1, "pairs", 0),
    "all pairs with a bias, 1 layer": (1, "pairs", paths.num_buckets),
}
tasks = [1, 2, 3, 4]
trained, explained = {}, {name: [] for name in [*models, "best that ignores edges"]}
for k in tasks:
    mean, exists = averages(k, learning[1])
    for name, (layers, kind, num_buckets) in models.items():
        torch.manual_seed(0)
        model = trained[name, k] = Model(layers, num_buckets)
        graph = graph_of(learning[0], kind)

        def loss(model=model, graph=graph, mean=mean, exists=exists):
            coins = throw(len(mean))
            return F.mse_loss(model(coins, graph, learning[1])[exists], (mean @ coins)[exists])

        train(model, loss, steps=150, lr=0.03)

    batch, distances = testing
    coins = throw(batch.num_nodes, torch.Generator().manual_seed(3))
    mean, exists = averages(k, distances)
    wanted = mean @ coins
    others = scatter(coins, batch.batch)[batch.batch] - coins
    answers = {"best that ignores edges": others / (batch.ptr.diff()[batch.batch] - 1)}
    with torch.no_grad():
        for name, (_, kind, _) in models.items():
            answers[name] = trained[name, k](coins, graph_of(batch, kind), distances)
    for name, answer in answers.items():
        errors = (answer - wanted)[exists].square().sum() / wanted[exists].square().sum()
        explained[name].append(1 - errors.item())

print(f"{'share of the variance explained':34}" + "".join(f"{f'k = {k}':>8}" for k in tasks))
for name, shares in explained.items():
    print(f"{name:34}" + "".join(f"{round(share, 2) + 0.0:8.2f}" for share in shares))
assert min(explained["all pairs with a bias, 1 layer"]) > 0.95
assert max(explained["message passing, 1 layer"][1:] + explained["message passing, 2 layers"][2:]) < 0.05
assert max(explained["all pairs, 1 layer"]) < 0.25

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.3), layout="constrained")
styles = zip(models, [*3 * ["black"], COLOURS[1], COLOURS[0]], [":", "--", "-", "-", "-"], strict=True)
for name, colour, style in styles:
    left.plot(tasks, explained[name], style, marker="o", markersize=3, color=colour, label=name)
left.set(xlabel="task: distance k", ylabel="variance explained", title="the mean of the coins at distance k")
left.set(xticks=tasks, ylim=(-0.05, 1.05))
left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=1)
for k in tasks:
    table = trained["all pairs with a bias, 1 layer", k].blocks[0].table.detach()
    right.plot(table[:8] - table[:8].max(), "o-", markersize=3, color=COLOURS[k - 1], label=f"k = {k}")
right.set(xlabel="distance d", ylabel="bias − its maximum", title="what the bias has learnt")
right.legend(frameon=False, title="trained for", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4)
for ax in (left, right):
    ax.title.set_fontsize(9)
    ax.grid(alpha=0.25)

# %% [markdown]
# Three different things happen.
#
# **Message passing** explains nothing as long as it has fewer layers than $k$: what a node must know has not arrived.
# Enough layers are necessary, but they are not sufficient. Messages that walk $k$ steps also end at nodes that are
# closer, or come back to where they started. The network has to learn to tell them apart, and in this short training it
# succeeds less and less as $k$ grows.
#
# **All pairs without a bias** have everything within reach, but cannot tell it apart. Such attention is blind to edges,
# so that two nodes with the same coin in the same graph must say the same. The little that it explains is what the last
# line of the table shows for an answer that needs no edges, the mean of all other coins of the graph: those at distance
# $k$ are among them.
#
# **All pairs with a bias** solve each of the tasks with one layer. The picture on the right shows how. The learnt bias
# has its peak at distance $k$, and the softmax turns a difference of a few units into most of the weight. Since
# nothing but differences matters to a softmax, the curves are shifted so that their peak is at zero.
#
# The claim about blindness, as a check, and the weights on a molecule that none of the models has seen: one node
# (outlined in orange) attends to the others, before and after there is a bias. The numbers are distances.

# %%
blind, graph = trained["all pairs, 1 layer", 2], graph_of(testing[0], "pairs")
with torch.no_grad():
    said = blind(coins, graph)
group = 2 * testing[0].batch + (coins > 0)  # nodes of the same graph with the same coin
highest, lowest = (scatter(said, group, reduce=way)[group] for way in ("max", "min"))
equal(highest, lowest, atol=1e-5, rtol=0)

node, n = 3, sizes[0]
aspirin = molecules[0]
distance = paths.matrices(paths(aspirin))
flips = throw(n, torch.Generator().manual_seed(0))
panels = {
    "message passing, 1 layer": ("message passing, 1 layer", 2),
    "all pairs": ("all pairs, 1 layer", 2),
    "with a bias, k = 2": ("all pairs with a bias, 1 layer", 2),
    "with a bias, k = 4": ("all pairs with a bias, 1 layer", 4),
}
figure, axes = plt.subplots(1, 4, figsize=(9, 2.5), layout="constrained")
shares = {}
for ax, (title, which) in zip(axes, panels.items(), strict=True):
    model, kind = trained[which], models[which[0]][1]
    graph = graph_of(Batch.from_data_list([aspirin]), kind)
    with torch.no_grad():
        q, k, _, bias = model.blocks[0].prepare(model.inputs(flips), distance)
        alpha = gattn.weigh(q, k, graph, bias=bias)
    if kind == "edges":
        received, arrives = torch.zeros(n), graph.edge_index[1] == node
        received[graph.edge_index[0, arrives]] = alpha[arrives, 0]
    else:
        received = (alpha[0] if isinstance(alpha, list) else alpha)[0, node]
    equal(received.sum(), torch.tensor(1.0))
    shares[title] = received
    nx.draw_networkx_edges(skeleton, layout, ax=ax, edge_color=GREY, width=2)
    style = {"cmap": WEIGHTS, "vmin": 0, "vmax": 0.4, "node_size": 130, "node_color": received}
    style["edgecolors"] = [COLOURS[1] if atom == node else "black" for atom in range(n)]
    style["linewidths"] = [2.5 if atom == node else 0.8 for atom in range(n)]
    drawn = nx.draw_networkx_nodes(skeleton, layout, range(n), ax=ax, **style)
    for atom in range(n):
        colour = "white" if received[atom] > 0.2 else "black"
        ax.text(*layout[atom], int(distance[0][node, atom]), ha="center", va="center", fontsize=7, color=colour)
    ax.set_title(title, fontsize=9)
    ax.set_aspect("equal")
    ax.margins(0.1)
    ax.set_axis_off()
bar = figure.colorbar(drawn, ax=axes, shrink=0.8, aspect=20, extend="max")
bar.set_label("attention weight α")
bar.outline.set_visible(False)
for title, received in shares.items():
    parts = [received[distance[0][node] == d].sum() for d in range(6)]
    print(f"{title:25} weight by distance 0, 1, …, 5: " + " ".join(f"{part:5.2f}" for part in parts))

# %% [markdown]
# Without the bias, the weight lies on all nodes, more or less evenly. With it, most of the weight lies on the nodes at
# the distance that the model was trained for. A bias of minus infinity removes a pair altogether, so message passing
# can be seen as attention among all pairs with a bias that is fixed instead of learnt: zero at distance one, and minus
# infinity elsewhere.

# %%
neighbours_only = torch.full((paths.num_buckets,), -torch.inf)
neighbours_only[1] = 0.0
by_bias = graphormer(query, key, value, sizes, paths.matrices(paths(molecules)), neighbours_only)
equal(by_bias, gattn.attend(query, key, value, molecules.edge_index))

# %% [markdown]
# ### 3. What a virtual node does
#
# A mean at some distance is a question about a part of the graph. The opposite is a question about all of it: **which
# side of the coin has the majority?** The graphs are paths of different, odd numbers of nodes. No other connected graph
# with as many nodes takes more steps from end to end. Every node has to give the answer for its graph, and we compare
# four graphs for the same model: the path itself; the path and an expander; the path and a virtual node; and all pairs,
# without a bias.
#
# How well could *any* model do? With $L$ layers, a node knows the coins that are at most $L$ steps away, and its best
# answer is their majority (or a guess, if heads and tails are equal in number). `k_hop` lists who is within reach, and
# `aggregate` adds up the coins, with weights of one.

# %%
lengths = list(range(21, 62, 4))
batch = Batch.from_data_list(
    [Data(edge_index=to_undirected(torch.arange(n).unfold(0, 2, 1).t()), num_nodes=n) for n in lengths]
)
N, B = batch.num_nodes, len(lengths)
path = gattn.SparseGraph(batch.edge_index, N, N)
graphs = {
    "path": (path, 0),
    "path, expander": (union(path, expander(N, degree=4, batch=batch.batch)), 0),
    "path, virtual node": (with_virtual_nodes(path, batch=batch.batch), B),
    "all pairs": (gattn.CompleteGraph.packed(lengths), 0),
}


def majority(coins):
    return (scatter(coins, batch.batch) > 0).float()[batch.batch]


THROWS = [throw(N, torch.Generator().manual_seed(seed)) for seed in range(40)]  # for the scores


def best_possible(graph, num_virtual, layers):
    """How often the majority of what is within reach is that of the graph; half a point if there is none."""
    reach, _ = gattn.graphs.k_hop(graph, layers, loop=True)
    coins = F.pad(torch.stack(THROWS), (0, num_virtual))  # virtual nodes have no coin
    seen = gattn.aggregate(torch.ones(reach.num_edges, 1), coins.t().unsqueeze(1), reach)[:N, 0].sign()
    truth = torch.stack([majority(coins) for coins in THROWS], 1)
    return (0.5 + seen * (truth - 0.5)).mean().item()


depths = [1, 2, 3]
right_answers = {name: [] for name in graphs}
limits = {name: [] for name in graphs}
solvers = {}
for name, (graph, num_virtual) in graphs.items():
    for layers in depths:
        torch.manual_seed(0)
        model = solvers[name, layers] = Model(layers)

        def loss(model=model, graph=graph, num_virtual=num_virtual):
            coins = throw(N)
            return F.binary_cross_entropy_with_logits(model(coins, graph, num_virtual=num_virtual), majority(coins))

        train(model, loss, steps=200, lr=0.01)
        with torch.no_grad():
            says = [(model(coins, graph, num_virtual=num_virtual) > 0) == (majority(coins) > 0) for coins in THROWS]
        right_answers[name].append(torch.stack(says).float().mean().item())
        limits[name].append(best_possible(graph, num_virtual, layers))

print(f"{'':20}{'pairs':>8}{'right answers, with layers':^36}{'the most that is possible':^32}")
print(f"{'':20}{'':>8}" + "".join(f"{layers:8}" for _ in range(2) for layers in depths))
for name, (graph, _) in graphs.items():
    count = graph.num_edges if isinstance(graph, gattn.SparseGraph) else sum(n * n for n in lengths)
    print(f"{name:20}{count:8,}" + "".join(f"{share:8.1%}" for share in right_answers[name] + limits[name]))
assert right_answers["path, virtual node"][1] > 0.95
assert right_answers["all pairs"][0] > 0.95
assert max(right_answers["path"]) < 0.7

# %%
n, name_of = 29, {"path": "path", "path, expander": "and an expander", "path, virtual node": "and a virtual node"}
one_path = gattn.SparseGraph(to_undirected(torch.arange(n).unfold(0, 2, 1).t()), n, n)
alike = {
    "path": (one_path, 0),
    "path, expander": (union(one_path, expander(n, degree=4)), 0),
    "path, virtual node": (with_virtual_nodes(one_path), 1),
}
figure, axes = plt.subplots(1, 4, figsize=(9, 2.7), layout="constrained", width_ratios=[1.3, 1, 1, 1])
for (name, shares), colour in zip(right_answers.items(), ("black", COLOURS[0], COLOURS[1], COLOURS[2]), strict=True):
    axes[0].plot(depths, [100 * share for share in shares], "o-", markersize=3, color=colour, label=name)
    axes[0].plot(depths, [100 * share for share in limits[name]], ":", color=colour, linewidth=1)
axes[0].set(xlabel="layers", ylabel="right answers, %", title="majority of a path", ylim=(48, 102))
axes[0].set_xticks(depths)
axes[0].grid(alpha=0.25)
for ax, (name, (graph, num_virtual)) in zip(axes[1:], alike.items(), strict=True):
    influence = torch.zeros(n, n)
    for seed in range(10):
        coins = throw(n, torch.Generator().manual_seed(seed)).requires_grad_()
        said = solvers[name, 2](coins, graph, num_virtual=num_virtual)
        influence += torch.stack([torch.autograd.grad(one, coins, retain_graph=True)[0].abs() for one in said]).detach()
    influence = influence / influence.sum(1, keepdim=True)
    drawn = ax.imshow(influence, cmap=WEIGHTS, norm=PowerNorm(0.5, 0, 0.4), interpolation="nearest")
    within = (influence > 0).float().mean().item()
    ax.set_title(f"{name_of[name]}: {within:.0%}", fontsize=9)
    ax.set(xlabel="coin of node", xticks=[0, 14, 28], yticks=[0, 14, 28])
axes[1].set_ylabel("answer of node")
axes[0].title.set_fontsize(9)
bar = figure.colorbar(drawn, ax=axes[1:], shrink=0.8, aspect=20, extend="max")
bar.set_label("part of the influence")
bar.outline.set_visible(False)
legend = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)

# %% [markdown]
# The dotted lines are the limits that we computed. On the path, the model stays near its limit, which is low: each
# layer adds at most two nodes to what a node knows. With the expander, reach grows by a factor from layer to layer, so
# that few layers see most of a path, and the limit rises quickly. (The model does not use all of it. What a node sees
# arrives along several paths and with different weights, while a majority needs equal ones.) With a virtual node, the
# first layer, in which it collects, is of no use to the others; the second, in which it distributes, solves the task.
# That takes two more edges per node. All pairs do it in one layer, with the number of pairs that the table shows.
#
# The three matrices show how much the answer of each node depends on each coin in models of two layers, measured by
# gradients. The percentages say which part of all pairs of nodes have any influence. On the path, they are a band
# around the diagonal. The expander adds nodes everywhere. With a virtual node, every answer depends on every coin, and
# all rows are nearly the same: everything passes through a single vector, which is the same for all nodes. That suits
# a majority, but whoever wants to know what is at distance $k$ still needs edges or a bias.
#
# ## What to remember
#
# - Graph Transformers differ in who attends to whom and in what attention is told about edges. Each of the three is one
#   call of `gattn.attend`, and batches of graphs of different sizes need no padding.
# - Attention among all pairs is blind to the graph. A bias with one number per distance is enough to tell it, and what
#   the bias has learnt can be plotted and read.
# - Comparing all pairs is cheap on small graphs and out of the question on large ones. Then the choice is between fewer
#   pairs (Exphormer) and no pairs (SGFormer), which also means no bias of pairs.
# - A virtual node turns any graph into one in which all nodes are two steps apart, for two edges per node. It passes on
#   summaries of the whole graph, not single nodes.
#
# ## Exercises
#
# 1. Set the `cutoff` of the distances to 2 and train for $k = 4$. How much is explained now, and why is it more than
#    without a bias?
# 2. Give the models in section 2 *two* heads and ask for the mean at distance 1 minus the mean at distance 3. What
#    does each head's bias look like?
# 3. Message passing with two layers does not explain everything at $k = 2$, although all coins are within reach. Give
#    it the degree of each node as a second input (`gattn.transforms.Degrees`). Does that help?
# 4. Let the blocks of section 3 call `exphormer`, on the path, an expander and a virtual node, with a vector to learn
#    for each type of edge. Which vectors become small, and what does that mean for the weights along these edges?
# 5. Replace the softmax of the all-pairs model in section 3 with linear attention: `gattn.features.elu1` for queries
#    and keys, `DotScore(scale=1.0)`, and `Identity(normalize=True)`. Does it still find the majority? Then try
#    SGFormer's weights, in which $N$ is added to the weight of a node with itself. What has changed, and why?
# 6. Use several virtual nodes per graph (`count=4`), and ask each node for the majority of *its half* of the path. What
#    would the virtual nodes have to know?
