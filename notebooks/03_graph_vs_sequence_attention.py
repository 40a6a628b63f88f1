# %% [markdown]
# # Graph attention against sequence attention
#
# Graph attention and a Transformer's attention are one computation,
#
# $$
# \mathrm{out}_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij}\, v_j,
# \qquad
# \alpha_{ij} = \mathop{\mathrm{softmax}}_{j \in \mathcal{N}(i)} \frac{q_i^\top k_j}{\sqrt{C}},
# $$
#
# and differ in who the neighbours $\mathcal{N}(i)$ are. So here is one layer, and four graphs for it: the edges that a
# data set comes with, everybody to everybody, everybody before, and a window. What does each of them cost, and what can
# be learnt through it, about papers, about a board of Minesweeper and about Shakespeare?
#
# The notebook needs Cora, Minesweeper and tiny Shakespeare. Models are small, so that everything runs in a minute or
# two: compare the bars, not a bar with the literature.

# %%
import time
import warnings

import matplotlib.pyplot as plt
import networkx as nx
import torch
import torch.nn.functional as F
from torch_geometric.utils import from_networkx, k_hop_subgraph

import gattn
from gattn.nn.linear import Linear
from gattn.testing import random_edge_index
from gattn.visualize import COLOURS, WEIGHTS, attention_graph, attention_grid, attention_matrix

warnings.filterwarnings("ignore", "Sparse (CSR tensor support|invariant checks)")  # PyTorch says so of sparse matrices
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## One layer, four graphs
#
# Ten papers of Cora, that is one and all within two citations of it. The layer is a Transformer's,
# `MultiheadAttention`, with random weights; only its `graph` changes. Above, the weights on the graph; below, the same
# as a matrix, a row for each target.

# %%
cora = gattn.datasets.load("Cora")
nodes, citations, _, _ = k_hop_subgraph(35, 2, cora.edge_index, relabel_nodes=True)
n = len(nodes)
graphs = {
    "citations": citations,
    "complete": gattn.CompleteGraph(n),
    "causal": gattn.CompleteGraph(n, causal=True),
    "window": gattn.CompleteGraph(n, window=1),
}
layer = gattn.nn.MultiheadAttention(16, num_heads=1)
x = 1.5 * torch.randn(n, 16)

angles = torch.linspace(0, 2 * torch.pi, n + 1)[:-1]
circle = torch.stack([angles.sin(), angles.cos()], 1)
figure, axes = plt.subplots(2, 4, figsize=(8.6, 4.6), layout="constrained")
for (name, graph), (above, below) in zip(graphs.items(), axes.T, strict=True):
    _, weights = layer(x, x, x, graph=graph)
    if isinstance(graph, gattn.CompleteGraph):
        edges, matrix = graph.edge_index, weights
        weights = matrix[edges[1], edges[0]]
    else:
        edges, matrix = graph, torch.zeros(n, n).index_put((graph[1], graph[0]), weights)
    attention_graph(edges, weights, pos=circle, ax=above, maximum=1.0, title=f"{name}: {edges.size(1)} edges")
    above.margins(0.15)
    attention_matrix(matrix.detach(), ax=below, maximum=1.0)

# %% [markdown]
# Among the papers' edges there are none from a paper to itself; in the other three graphs there are, the rims of the
# nodes and the diagonals of the matrices.
#
# People usually get such a restriction by a mask over the complete graph. That is the same, only slower: the layer
# computes what it then throws away. (A paper that cites nobody here and is cited by nobody would get zeros.)

# %%
may_not_attend = torch.ones(n, n, dtype=torch.bool)
may_not_attend[citations[1], citations[0]] = False
masked, _ = layer(x, x, x, attn_mask=may_not_attend)
torch.testing.assert_close(layer(x, x, x, graph=citations)[0], masked)

before = gattn.CompleteGraph(n, causal=True)
torch.testing.assert_close(layer(x, x, x, graph=before)[0], layer(x, x, x, graph=before.edge_index)[0])

# %% [markdown]
# ## What a graph costs
#
# The layer again, forward and backward, with more and more nodes. Time is the processor's, the fastest of three;
# memory what the forward pass returns and keeps for the backward pass. A fifth line asks the complete graph for its
# weights as well, as pictures like the one above do.


# %%
def kept_bytes(function):
    """What the function returns, and what autograd keeps of its call."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = function()
    for result in results:
        if result is not None:
            keep(result)
    return sum(storages.values())


def cost(layer, graph, n, need_weights=False):
    """Seconds and bytes of a forward and a backward pass."""
    x = torch.randn(n, layer.embed_dim)

    def forward():
        return layer(x, x, x, graph=graph, need_weights=need_weights)

    seconds = []
    for _ in range(4):  # the first is a warm-up
        start = time.process_time()
        forward()[0].sum().backward()
        seconds.append(time.process_time() - start)
    return min(seconds[1:]), kept_bytes(forward)


sizes = [256, 512, 1024, 2048, 4096]
layer = gattn.nn.MultiheadAttention(32, num_heads=2)
costs = {
    "4 edges a node": [cost(layer, random_edge_index(n, num_edges=4 * n), n) for n in sizes],
    "window of 17": [cost(layer, gattn.CompleteGraph(n, window=8), n) for n in sizes],
    "complete": [cost(layer, gattn.CompleteGraph(n), n) for n in sizes],
    "causal": [cost(layer, gattn.CompleteGraph(n, causal=True), n) for n in sizes],
    "complete, with weights": [cost(layer, gattn.CompleteGraph(n), n, need_weights=True) for n in sizes[:-1]],
}

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for number, (name, measured) in enumerate(costs.items()):
    style = {"marker": "o", "markersize": 3, "color": COLOURS[number], "label": name}
    style["linestyle"] = "--" if name == "causal" else "-"  # in memory it lies on top of another
    for ax, values in zip(axes, zip(*measured, strict=True), strict=True):
        ax.plot(sizes[: len(values)], [value * (1e3 if ax is axes[0] else 1e-6) for value in values], **style)
for ax, label in zip(axes, ("time, ms", "memory, MB"), strict=True):
    ax.set(xscale="log", yscale="log", xlabel="nodes N", ylabel=label)
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    ax.grid(alpha=0.25)
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
for name, measured in costs.items():
    (seconds, size), (more_seconds, more_size) = measured[-2:]
    print(f"{name:23} twice the nodes: {more_seconds / seconds:.1f} × the time, {more_size / size:.1f} × the memory")

# %% [markdown]
# With a few edges a node, or a window, twice the nodes take about twice the time; on the complete graph it goes
# towards four times, and the causal one, with half the edges, saves a constant factor. Memory is another matter: it
# grows no faster than $N$ on all four graphs, since fused attention never writes the $N^2$ weights down (it finishes
# each row's softmax while it reads, as in [FlashAttention](https://arxiv.org/abs/2205.14135)). Only who asks for the
# weights pays for them.

# %% [markdown]
# ## What a graph knows
#
# Now one layer of a Transformer (attention, a feed-forward network, skip connections, norms) between an embedding and a
# classifier. Three tasks, and for each of them the same model on five graphs, trained alike, with one seed each: a
# difference of a few hundredths says nothing. (Sizes and learning rates come from a few trials, not from a search.)
#
# - **papers**: the subject of a paper, from its words. Cora's split: 140 papers to learn from. The order of papers
#   is that of a file, and means little.
# - **board**: is there a mine? The upper quarter of [Minesweeper](https://arxiv.org/abs/2302.11640)'s board; half of
#   the squares say how many of their eight neighbours hold mines, the others say nothing, so all a square knows is told
#   by others. The score is the area under the ROC curve: 0.5 is guessing. Squares are numbered row by row, so that some
#   who are close in this order are neighbours.
# - **text**: the next character of Shakespeare, in bits (fewer are better). A learnt bias $b_{i-j}$ for each distance
#   tells the layer who is how far away. Its "edges" come from the characters 0, 1, 2, 4, 8, 16 and 32 back.


# %%
class Blocks(torch.nn.Module):
    """An embedding, a Transformer's layers over any graph, a classifier."""

    def __init__(self, embed, num_outputs, channels=32, num_layers=1, heads=2, dropout=0.0, position=None):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "position": position}
        self.embed = embed
        self.layers = torch.nn.ModuleList(
            gattn.nn.TransformerEncoderLayer(channels, heads, 2 * channels, **options) for _ in range(num_layers)
        )
        self.norm = torch.nn.LayerNorm(channels)
        self.dropout = torch.nn.Dropout(dropout)
        self.output = torch.nn.Linear(channels, num_outputs)

    def forward(self, x, graph):
        x = self.dropout(self.embed(x))
        for layer in self.layers:
            x = layer(x, graph=graph)
        return self.output(self.dropout(self.norm(x)))


def accuracy(logits, y):
    return (logits.argmax(-1) == y).double().mean().item()


def area(logits, y):
    """How often a mine is ranked above a square without one."""
    rank = (logits[:, 1] - logits[:, 0]).argsort().argsort() + 1.0
    mines = int(y.sum())
    return ((rank[y == 1].sum() - mines * (mines + 1) / 2) / (mines * (len(y) - mines))).item()


def train_on_nodes(model, x, graph, data, score, epochs, lr=0.01, weight_decay=0.05):
    """The best validation score, and the test score of the first epoch that reached it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
    best_val, chosen_test = 0.0, 0.0
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x, graph)[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        if epoch % 5 == 4:
            model.eval()
            with torch.no_grad():
                logits = model(x, graph)
            val, test = (score(logits[mask], data.y[mask]) for mask in (data.val_mask, data.test_mask))
            if val > best_val:
                best_val, chosen_test = val, test
    return best_val, chosen_test


# %% [markdown]
# The graphs of each task. "Nobody" is a node alone with itself: what can be said without attention. The cell prints
# how often the two ends of an edge are of one class.


# %%
def graphs_of(num_nodes, edges, window):
    """The same five for each task."""
    return {
        "nobody": torch.arange(num_nodes).expand(2, -1),
        "window": gattn.CompleteGraph(num_nodes, window=window),
        "causal": gattn.CompleteGraph(num_nodes, causal=True),
        "complete": gattn.CompleteGraph(num_nodes),
        "edges": edges,
    }


bags = (cora.x / cora.x.sum(1, keepdim=True)).to_sparse_csr()  # each paper's words, as parts of one
board = gattn.datasets.load("minesweeper").subgraph(torch.arange(25 * 100))
scores = {"papers": {}, "board": {}, "text": {}}

for name, data, width in (("papers", cora, 2), ("board", board, 1)):
    strangers = gattn.CompleteGraph(data.num_nodes, window=width).edge_index
    strangers = strangers[:, strangers[0] != strangers[1]]
    by_edges, by_window = (
        (data.y[source] == data.y[target]).double().mean() for source, target in (data.edge_index, strangers)
    )
    by_chance = (data.y.bincount() / data.num_nodes).square().sum()
    print(f"{name}: of one class by edges {by_edges:.0%}, within the window {by_window:.0%}, by chance {by_chance:.0%}")


def papers_model(seed=0, num_layers=1, dropout=0.5):
    torch.manual_seed(seed)
    embed = torch.nn.Sequential(Linear(1433, 32), torch.nn.LayerNorm(32))
    return Blocks(embed, 7, num_layers=num_layers, dropout=dropout)


def board_model(seed=0, num_layers=1, dropout=0.0):
    torch.manual_seed(seed)
    return Blocks(torch.nn.Linear(7, 32), 2, num_layers=num_layers, dropout=dropout)


for name, graph in graphs_of(cora.num_nodes, cora.edge_index, window=2).items():
    scores["papers"][name] = train_on_nodes(papers_model(), bags, graph, cora, accuracy, epochs=30)[1]
for name, graph in graphs_of(board.num_nodes, board.edge_index, window=1).items():
    scores["board"][name] = train_on_nodes(board_model(), board.x, graph, board, area, epochs=40)[1]

# %%
text = gattn.datasets.load_text("tinyshakespeare")
symbols = sorted(set(text))
characters = torch.tensor([symbols.index(character) for character in text])
first_part, last_part = characters[: int(0.9 * len(characters))], characters[int(0.9 * len(characters)) :]
context = 64


def train_on_text(model, iterations, lr):
    """Bits a character on text that the model has not seen; `model` maps `[B, T]` tokens to logits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, iterations)
    generator = torch.Generator().manual_seed(0)
    for _ in range(iterations):
        starts = torch.randint(len(first_part) - context, (16, 1), generator=generator)
        pieces = first_part[starts + torch.arange(context + 1)]
        optimizer.zero_grad()
        F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
    pieces = last_part[: 256 * (context + 1)].view(256, -1)
    with torch.no_grad():
        loss = F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
    return loss.item() / torch.tensor(2.0).log().item()


class Reader(torch.nn.Module):
    """The same blocks on text."""

    def __init__(self, graph, position=None, encoding=None):
        super().__init__()
        torch.manual_seed(0)
        embed = torch.nn.Embedding(len(symbols), 32)
        if encoding is not None:
            embed = torch.nn.Sequential(embed, encoding)
        self.blocks, self.graph = Blocks(embed, len(symbols), position=position), graph

    def forward(self, tokens):
        return self.blocks(tokens, self.graph)


back = [0, 1, 2, 4, 8, 16, 32]
powers = torch.cat([torch.stack([torch.arange(context - b), torch.arange(b, context)]) for b in back], 1)
for name, graph in graphs_of(context, powers, window=(7, 0)).items():
    bias = gattn.nn.RelativePositionBias(heads=2, max_distance=16)
    scores["text"][name] = train_on_text(Reader(graph, bias), iterations=250, lr=0.01)

# %%
titles = {
    "papers": "papers: accuracy",
    "board": "board: area under the ROC curve",
    "text": "text: bits a character (fewer: better)",
}
figure, axes = plt.subplots(1, 3, figsize=(9, 2.5), layout="constrained", sharey=True)
for ax, (task, bars) in zip(axes, scores.items(), strict=True):
    cheats = task == "text"
    names, values = list(bars), list(bars.values())
    best = min(values[:3] + values[4:]) if cheats else max(values)
    colours = [COLOURS[0] if value == best else "#B5D3E7" for value in values]
    drawn = ax.barh(names, values, color=colours)
    labels = [f"{value:.2f}" for value in values]
    if cheats:
        drawn[3].set(facecolor="white", edgecolor="#808080", hatch="///")
        labels[3] += " sees the answer"
    ax.bar_label(drawn, labels, padding=2, fontsize=8)
    ax.set_title(titles[task], fontsize=9)
    ax.set_xlim(0, 1.18 * max(values))
axes[0].invert_yaxis()

# %% [markdown]
# Three tasks, three answers:
#
# - **papers**: citations say most. The other graphs add little to what a paper's own words say: a window over the order
#   of a file holds strangers, if not quite by chance, and on the complete graph, where each paper might find its likes
#   by their words, the layer did not learn from 140 examples whom to look for.
# - **board**: without the edges, all is guessing, however many squares one sees: "complete" cannot tell neighbours
#   from others. The window, which holds two of a square's eight neighbours, knows a part.
# - **text**: a window of eight characters is no worse than the whole past, in so short a training. "Complete" shows why
#   language models are causal: the next character is among those it sees, so it copies that.
#
# A graph is what one knows beforehand about who matters to whom. Where it is known, it beats learning it.

# %% [markdown]
# ## A graph Transformer against GAT
#
# The blocks above on the edges of a graph are a graph Transformer. [GAT](https://arxiv.org/abs/1710.10903) has another
# score, $\mathrm{LeakyReLU}(a^\top [W x_i \,\|\, W x_j])$, no feed-forward network, and no skip connections unless one
# asks for them. Two layers each, and one budget for all: 50 epochs, and the same four choices of learning rate and
# dropout, of which the first seed's validation score takes the best, for each model and task. (GAT has its dropout on
# attention weights as well.) What was chosen is trained with two more seeds. Cora's neighbours are alike; on the board,
# a mine's neighbours mostly are none.

# %%
for name, data in (("papers", cora), ("board", board)):
    source, target = data.edge_index
    alike = (data.y[source] == data.y[target])[data.y[target] == data.y.bincount().argmin()]
    print(f"{name}: of what nodes of the rarest class hear, {alike.double().mean():.0%} comes from their own class")


def papers_gat(seed, dropout, residual=False):
    torch.manual_seed(seed)
    return gattn.models.GAT(1433, 64, 2, 7, dropout=dropout, value_dropout=dropout, residual=residual)


def board_gat(seed, dropout, residual=False):
    torch.manual_seed(seed)
    return gattn.models.GAT(7, 32, 2, 2, heads=2, dropout=dropout, value_dropout=dropout, residual=residual)


def contend(make, options, choice, seed, arguments):
    """The best validation score, its test score, and the model."""
    lr, dropout = choice
    model = make(seed, dropout=dropout, **options)
    return (*train_on_nodes(model, *arguments, epochs=50, lr=lr), model)


tasks = {"papers": (bags, cora.edge_index, cora, accuracy), "board": (board.x, board.edge_index, board, area)}
contestants = {
    "GAT": ({}, papers_gat, board_gat),
    "GAT, skip connections": ({"residual": True}, papers_gat, board_gat),
    "graph Transformer": ({"num_layers": 2}, papers_model, board_model),
}
choices = [(lr, dropout) for lr in (0.005, 0.02) for dropout in (0.0, 0.6)]
contest, mines = {}, {}
for name, (options, *makers) in contestants.items():
    contest[name] = {}
    for (task, arguments), make in zip(tasks.items(), makers, strict=True):
        first = {choice: contend(make, options, choice, 0, arguments) for choice in choices}
        best = max(first, key=lambda choice: first[choice][0])
        runs = [first[best], *(contend(make, options, best, seed, arguments) for seed in (1, 2))]
        contest[name][task] = [test for _, test, _ in runs]
        tried = ", ".join(f"{val:.3f}" for val, *_ in first.values())
        print(f"{task:6}  {name:21}  learning rate {best[0]}, dropout {best[1]}  (validation: {tried})")
    with torch.no_grad():  # the board comes last
        mines[name] = runs[0][2](board.x, board.edge_index).softmax(1)[:, 1]

figure, axes = plt.subplots(1, 2, figsize=(9, 1.9), layout="constrained", sharey=True)
axes[0].set_yticks(range(3), list(contest))
axes[0].set_ylim(2.4, -0.8)
for ax, task in zip(axes, ("papers", "board"), strict=True):
    for row, results in enumerate(contest.values()):
        mean = sum(results[task]) / 3
        ax.plot(results[task], [row] * 3, "o", color=COLOURS[row], alpha=0.5, markersize=5)
        ax.plot(mean, row, "|", color="black", markersize=14)
        ax.annotate(f"{mean:.3f}", (mean, row), (0, 9), textcoords="offset points", ha="center", fontsize=8)
    ax.set_title(titles[task], fontsize=9)
    ax.margins(x=0.15)
    ax.grid(axis="x", alpha=0.25)

# %% [markdown]
# All three were best with dropout on papers, which has few labels, and without it on the board.
#
# On papers, the less a model may do the better: a GAT without skip connections must average neighbours, which is what
# helps where they are alike. Skip connections and a feed-forward network let a paper keep to its own words, of which
# 140 examples teach little ("nobody" above). On the board it is the other way round. There, a GAT without skip
# connections can only blur, since what a square itself shows is one voice among nine; skip connections make nearly all
# of the difference, and score and feed-forward network matter little. The same seen on a part of the board (right: the
# squares that were not trained on; those that were are grey):

# %%
is_known = board.x[:, 0] == 0
clues = torch.where(is_known, board.x[:, 1:].argmax(1), -1)
figure, axes = plt.subplots(1, 3, figsize=(9, 2.3), layout="constrained")
figure.supxlabel("× a mine", fontsize=9)
orange = plt.get_cmap("Oranges", 7).with_extremes(under="#D8D8D8")
axes[0].imshow(clues.view(25, 100)[:, :40], cmap=orange, vmin=-0.5, vmax=6)
axes[0].set_title("clues: darker, more mines; grey: no clue", fontsize=9)
for ax, name in zip(axes[1:], ("GAT", "graph Transformer"), strict=True):
    unseen = mines[name].masked_fill(board.train_mask, torch.nan).view(25, 100)[:, :40]
    ax.imshow(unseen, cmap=WEIGHTS.with_extremes(bad="#D8D8D8"), vmin=0, vmax=1)
    ax.set_title(f"{name}: probability of a mine", fontsize=9)
for ax in axes:
    drawn = board.y.bool() if ax is axes[0] else board.y.bool() & ~board.train_mask
    row, column = drawn.view(25, 100)[:, :40].nonzero().T
    ax.plot(column, row, "x", color="black" if ax is axes[0] else COLOURS[1], markersize=3, markeredgewidth=0.8)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)

# %% [markdown]
# ## What positions buy
#
# Attention itself does not know where anybody is: exchange two nodes, and their outputs are exchanged. A graph of edges
# breaks that tie; on a complete graph, something has to be added to the features. For sequences these are waves over
# the places. For graphs, too: the eigenvectors of a graph's Laplacian with the smallest eigenvalues
# ([Dwivedi and Bresson](https://arxiv.org/abs/2012.09699)) are its slowest waves. On a path, which is what a sequence
# is, they are cosines, times the root of the number of neighbours: the two ends have one, all others two.

# %%
encoding = gattn.nn.GraphPositionalEncoding("laplacian", k=32, channels=32)
line = torch.arange(context - 1)
path = torch.cat([torch.stack([line, line + 1]), torch.stack([line + 1, line])], 1)
path_waves = encoding.compute(path, context)
board_waves = encoding.compute(board.edge_index, board.num_nodes)

degree = path[1].bincount(minlength=context)
for number in range(3):
    cosine = (torch.pi * (number + 1) * torch.arange(context) / (context - 1)).cos() * degree.sqrt()
    alignment = F.cosine_similarity(cosine, path_waves[:, number], dim=0).abs()
    torch.testing.assert_close(alignment, torch.tensor(1.0))

figure = plt.figure(figsize=(9, 2.4), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1, 1.4])
ax = left.subplots()
for number in range(3):
    ax.plot(path_waves[:, number], color=COLOURS[number])
ax.set(xlabel="place in a sequence of 64", yticks=[])
ax.set_title("eigenvectors 1, 2, 3 of a path", fontsize=9)
for number, ax in enumerate(right.subplots(2, 2).flat):
    wave = board_waves[:, (0, 1, 4, 9)[number]].view(25, 100)
    ax.imshow(wave, cmap="PuOr", vmin=-wave.abs().max(), vmax=wave.abs().max())
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_title(f"of the board: {(1, 2, 5, 10)[number]}", fontsize=9)

# %% [markdown]
# Another encoding says what a place looks like instead of where it is: the probabilities to be back after 1, 2, ...,
# $k$ random steps ([Dwivedi et al.](https://arxiv.org/abs/2110.07875)). Decalin, two rings of six atoms, and
# bicyclopentyl, two rings of five, are the textbook's pair that no message passing tells apart: from every atom,
# neighbours and their neighbours look alike. Walks come back to where they were in five steps in only one of them.

# %%
decalin = nx.cycle_graph(10)
decalin.add_edge(0, 5)
bicyclopentyl = nx.disjoint_union(nx.cycle_graph(5), nx.cycle_graph(5))
bicyclopentyl.add_edge(0, 5)
molecules = [from_networkx(molecule).edge_index for molecule in (decalin, bicyclopentyl)]

conv = gattn.nn.GATv2Conv(8, 8)
atoms = torch.ones(10, 8)  # all of them carbon
outputs = [conv(conv(atoms, molecule), molecule) for molecule in molecules]
torch.testing.assert_close(outputs[0].sum(0), outputs[1].sum(0))

walks = gattn.nn.GraphPositionalEncoding("random_walk", k=5, channels=8)
placed = [walks(atoms, walks.compute(molecule, 10)) for molecule in molecules]
outputs = [conv(conv(x, molecule), molecule) for x, molecule in zip(placed, molecules, strict=True)]
assert not torch.allclose(outputs[0].sum(0), outputs[1].sum(0), atol=1e-3)
for name, molecule in zip(("decalin", "bicyclopentyl"), molecules, strict=True):
    print(f"{name:14} back after 5 steps: {walks.compute(molecule, 10)[:, 4].max():.3f} at most")

# %% [markdown]
# What is that worth in training? Left: the papers again, on three graphs, with eigenvectors or walks added to the
# words. (The eigenvectors are those of the largest connected part, which holds 2 485 papers; the others get zeros.) An
# eigenvector's sign means nothing, so the encoding draws signs anew in every step of training, lest a model rely on
# them. That is meant for many graphs; where there is only one, signs can stay as they are. Both are shown: the mean of
# three seeds, and their reach. Right: text, on the causal graph, one seed.

# %%
largest = max(nx.connected_components(nx.Graph(cora.edge_index.T.tolist())), key=len)
largest = torch.tensor(sorted(largest))
part = cora.subgraph(largest)
waves = torch.zeros(cora.num_nodes, 32)
waves[largest] = encoding.compute(part.edge_index, part.num_nodes) * len(largest) ** 0.5  # of variance one
waves *= waves.gather(0, waves.abs().argmax(0, keepdim=True)).sign()  # the same signs in every run of this notebook
returns = gattn.nn.GraphPositionalEncoding("random_walk", k=8, channels=32).compute(cora.edge_index, cora.num_nodes)


class Placed(torch.nn.Module):
    """An embedding of papers, and where each is."""

    def __init__(self, kind, structure, random_signs=True):
        super().__init__()
        self.words = torch.nn.Sequential(Linear(1433, 32), torch.nn.LayerNorm(32))
        self.encoding = gattn.nn.GraphPositionalEncoding(kind, structure.size(1), 32)
        self.structure, self.random_signs = structure, random_signs

    def forward(self, x):
        if self.random_signs:
            return self.encoding(self.words(x), self.structure)
        return self.words(x) + self.encoding.lin(self.structure)


encodings = {
    "none": None,
    "random walk": ("random_walk", returns),
    "Laplacian": ("laplacian", waves, False),
    "Laplacian, random signs": ("laplacian", waves),
}
chosen = {"nobody": graphs_of(cora.num_nodes, None, 1)["nobody"], "complete": None, "edges": cora.edge_index}
placed_scores = {}
for kind, options in encodings.items():
    for name, graph in chosen.items():
        placed_scores[kind, name] = []
        for seed in range(3):
            model = papers_model(seed)
            if options is not None:
                torch.manual_seed(seed)
                model = Blocks(Placed(*options), 7, dropout=0.5)
            placed_scores[kind, name].append(train_on_nodes(model, bags, graph, cora, accuracy, epochs=25)[1])

past = gattn.CompleteGraph(context, causal=True)
places = {
    "none": {},
    "learnt, added": {"encoding": gattn.nn.LearnedPositionalEncoding(context, 32)},
    "sinusoidal, added": {"encoding": gattn.nn.SinusoidalPositionalEncoding(32)},
    "rotary": {"position": gattn.nn.RotaryPositionalEncoding(16)},
}
text_scores = {kind: train_on_text(Reader(past, **options), 250, lr=0.01) for kind, options in places.items()}
text_scores["relative bias"] = scores["text"]["causal"]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.9), layout="constrained", width_ratios=[1.6, 1])
for number, kind in enumerate(encodings):
    runs = torch.tensor([placed_scores[kind, name] for name in chosen])
    mean, reach = runs.mean(1), torch.stack([runs.mean(1) - runs.amin(1), runs.amax(1) - runs.mean(1)])
    place = torch.arange(3) + 0.21 * (number - 1.5)
    colour = ("#C8C8C8", COLOURS[3], COLOURS[0], COLOURS[5])[number]
    drawn = left.bar(place, mean, 0.2, color=colour, label=kind, yerr=reach, error_kw={"linewidth": 0.8})
    left.bar_label(drawn, [f"{value:.2f}" for value in mean], fontsize=7)
left.set_xticks(range(3), list(chosen))
left.set_ylim(0, 0.95)
left.set_title(titles["papers"], fontsize=9)
left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, fontsize=8, frameon=False)
drawn = right.barh(list(text_scores), list(text_scores.values()), color=["#C8C8C8", *[COLOURS[0]] * 4])
right.bar_label(drawn, [f"{value:.2f}" for value in text_scores.values()], padding=2, fontsize=8)
right.set_xlim(0, 1.18 * max(text_scores.values()))
right.set_title(titles["text"], fontsize=9)
right.invert_yaxis()

# %% [markdown]
# On papers, fixed eigenvectors tell where a paper stands among the others, and so give back about half of what was lost
# without edges. But they do so for a paper on its own ("nobody") nearly as well as on the complete graph: most of it is
# the position itself, not attention. With edges there is little to gain. Random signs undo the gain, and walks, which
# tell what a neighbourhood looks like, tell next to nothing of the subject.
#
# In text, places inside attention (rotary, or a bias for each distance) are learnt faster than places added to the
# features; those learnt from nothing are no help yet after 250 iterations.

# %% [markdown]
# ## The same blocks write
#
# `TransformerLM` stacks the layers that read Cora above, over a causal graph. Its first layer, given the edges of that
# graph as a list, computes the same:

# %%
torch.manual_seed(0)
model = gattn.models.TransformerLM(len(symbols), channels=64, num_layers=2, heads=4, context=context, position="rotary")
x = torch.randn(context, 64)
layer = model.layers[0]
torch.testing.assert_close(layer(x, is_causal=True), layer(x, graph=past.edge_index), rtol=1e-4, atol=1e-5)

bits = train_on_text(model, iterations=400, lr=0.006)
print(f"{bits:.2f} bits a character on text it has not seen\n")
start = torch.tensor([[symbols.index(character) for character in "ROMEO:\n"]])
written = model.generate(start, 160, temperature=0.7, generator=torch.Generator().manual_seed(0))
print("".join(symbols[token] for token in written[0].tolist()))

# %% [markdown]
# And its heads: a row for each character, the characters that it attends to in blue. `record_attention` gathers the
# weights while the model runs.

# %%
line = "to be, or not"
tokens = torch.tensor([[symbols.index(character) for character in line]])
with gattn.record_attention(model.eval()) as records, torch.no_grad():
    model(tokens)
heads = {f"layer {number}": calls[0].weights[0] for number, calls in enumerate(records.values())}
axes = attention_grid(heads, row_labels=list(line), column_labels=list(line))
axes[0, 0].figure.set_size_inches(9, 4.9)
for ax in axes.flat:
    ax.tick_params(labelsize=7)

is_space = torch.tensor([character == " " for character in line])
for name, weights in heads.items():
    for number, head in enumerate(weights):
        own, previous, spaces = head.diagonal().mean(), head.diagonal(-1).mean(), head[:, is_space].sum(1).mean()
        print(f"{name}, head {number}: own {own:.2f}, previous {previous:.2f}, spaces {spaces:.2f}")

# %% [markdown]
# Nobody told the heads what to do, and they took on different things: some look at the character itself, some at the
# one before, some back to the last space, where a word begins, and some spread over all that came before.
