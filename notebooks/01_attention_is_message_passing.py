# %% [markdown]
# # Attention is message passing
#
# A Transformer's attention is usually written as three matrix products, and a graph network's as messages along edges.
# They are the same computation. A target $i$ compares itself with each source $j$ from which it has an edge, turns the
# scores into weights, and averages:
#
# $$
# \mathrm{out}_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij}\, v_j,
# \qquad
# \alpha_{ij} = \frac{\exp s(q_i, k_j)}{\sum_{l \in \mathcal{N}(i)} \exp s(q_i, k_l)}
# $$
#
# In a Transformer, $\mathcal{N}(i)$ contains every token. This notebook takes five words, computes their attention in
# five ways, draws the $n \times n$ matrix as the graph that it is, and removes edges from it. It then turns to the
# choices that remain: the scale, the heads, the positions, and the score $s$. Wherever the text says that two results
# are equal, a cell checks it.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, leaky_relu

import gattn
from gattn.visualize import COLOURS, WEIGHTS, attention_graph, attention_grid, attention_matrix

torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 120, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
equal = torch.testing.assert_close

# %% [markdown]
# ## Five words and a pencil
#
# Each word gets four numbers that we can read: is it an article, a noun, a verb, a human? Trained models learn such
# features, and many less readable ones. Ours are made up so that a pencil is enough.

# %%
words = ["The", "man", "walked", "the", "dog"]
x = torch.tensor(
    [  # article, noun, verb, human
        [1.0, 0.0, 0.0, 0.0],  # The
        [0.0, 1.0, 0.0, 1.0],  # man
        [0.0, 0.0, 1.0, 0.0],  # walked
        [1.0, 0.0, 0.0, 0.0],  # the
        [0.0, 1.0, 0.0, 0.0],  # dog
    ]
)
n, d = x.shape

# %% [markdown]
# A word's **query** says what it looks for, its **key** what it offers, and its **value** what it hands over. All three
# are linear maps of its features: $q_i = x_i W^Q$, and likewise for keys and values. In our example, keys and values
# are the features themselves, and the queries are as follows. An article looks for nouns. A noun looks for verbs and,
# with less weight, for articles. A verb looks for nouns, and more so if they are human.

# %%
w_query = torch.tensor(
    [  # what a word looks for: article, noun, verb, human
        [0.0, 4.0, 0.0, 0.0],  # if it is an article
        [2.0, 0.0, 4.0, 0.0],  # if it is a noun
        [0.0, 4.0, 0.0, 2.0],  # if it is a verb
        [0.0, 0.0, 0.0, 0.0],  # if it is a human
    ]
)
query, key, value = x @ w_query, x, x

# %% [markdown]
# Consider "walked". Its query is $(0, 4, 0, 2)$, so "man" scores $4 + 2 = 6$, "dog" scores 4, and the other words score
# 0. The scores are divided by $\sqrt{d} = 2$ (we shall see why), and the weights are $e^3$, $e^2$ and $e^0$, divided by
# their sum.

# %%
walked = words.index("walked")
scores = [sum(a * b for a, b in zip(query[walked].tolist(), k, strict=True)) / math.sqrt(d) for k in key.tolist()]
total = sum(math.exp(s) for s in scores)
for word, s in zip(words, scores, strict=True):
    print(f"{word:8} score {s:.0f}   weight {math.exp(s) / total:.3f}")

# %% [markdown]
# The output of "walked" is the average of all values under these weights. Its last number was 0 before and is 0.659
# now: the word has learnt that a human did it. Here are all five words, computed with nothing but loops:

# %%
by_hand = torch.zeros(n, d)
for i in range(n):
    scores = [sum(query[i, c].item() * key[j, c].item() for c in range(d)) / math.sqrt(d) for j in range(n)]
    total = sum(math.exp(s) for s in scores)
    for j in range(n):
        by_hand[i] += math.exp(scores[j]) / total * value[j]
print("         article  noun   verb   human")
for word, row in zip(words, by_hand.tolist(), strict=True):
    print(f"{word:8}", "  ".join(f"{number:.3f}" for number in row))

# %% [markdown]
# ## The same computation with matrices
#
# $$\mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d}}\right) V$$

# %%
matrix = (query @ key.T / math.sqrt(d)).softmax(dim=1)
as_matrices = matrix @ value
equal(as_matrices, by_hand)

# %% [markdown]
# ## The same computation with messages
#
# A graph is a list of edges, with the sources in its first row and the targets in its second. This one has all 25
# edges. Attention along edges takes three steps, which are those of every message-passing network: **gather** the
# vectors at the two ends of each edge, compute one weight per edge (the softmax runs over the edges that share a
# target), and **scatter** the weighted values to the targets.

# %%
target, source = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
edge_index = torch.stack([source.flatten(), target.flatten()])
source, target = edge_index

logits = (query[target] * key[source]).sum(-1) / math.sqrt(d)  # one per edge
weights = gattn.softmax(logits, target, num_targets=n)
as_messages = torch.zeros(n, d).index_add(0, target, weights.unsqueeze(-1) * value[source])
equal(as_messages, by_hand)

# %% [markdown]
# ## The same computation with `gattn.attend`
#
# `attend` performs this computation with fast kernels. Its fourth argument says who attends to whom. A `CompleteGraph`
# connects every node with every other without listing the edges. This is the Transformer's way, and PyTorch's fused
# attention computes it. An `edge_index` is the graph network's way. (Tensors are `[nodes, heads, channels]`; so far we
# have one head.)

# %%
q, k, v = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
as_transformer = gattn.attend(q, k, v, gattn.CompleteGraph(n))
as_graph_network = gattn.attend(q, k, v, edge_index)
print('The output of "walked":')
for name, out in {
    "by hand": by_hand,
    "softmax(QKᵀ/√d)V": as_matrices,
    "gather, softmax, scatter": as_messages,
    "attend, complete graph": as_transformer.squeeze(1),
    "attend, edge list": as_graph_network.squeeze(1),
}.items():
    equal(out, by_hand)
    print(f"  {name:26}", "  ".join(f"{number:.4f}" for number in out[walked].tolist()))

# %% [markdown]
# ## The matrix is a graph
#
# An $n \times n$ matrix of weights *is* a weighted graph: the entry in row $i$ and column $j$ is an arrow from $j$ to
# $i$. Both pictures below show the same 25 numbers. An entry on the diagonal is a self-loop, which is drawn as the rim
# of its node.

# %%
circle = torch.tensor([[math.sin(2 * math.pi * i / n), math.cos(2 * math.pi * i / n)] for i in range(n)])


def write_words(ax):
    """Writes the words around a graph that was drawn without names, where no arrow crosses them."""
    ax.margins(0.5, 0.15)
    for word, (x, y) in zip(words, circle.tolist(), strict=True):
        sides = {"ha": ("right", "center", "left")[round(x) + 1], "va": "bottom" if y > 0.9 else "center"}
        text = ax.annotate(word, (x, y), (14 * x, 12 * y), textcoords="offset points", fontsize=8, **sides)
        text.set_in_layout(False)


figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.9), layout="constrained")
attention_graph(edge_index, weights, labels=[""] * n, pos=circle, ax=right, title="as a graph", colorbar=True)
write_words(right)
attention_matrix(matrix, words, words, ax=left, title="as a matrix")
for i in range(n):
    for j in range(n):
        colour = "white" if matrix[i, j] > 0.4 else "black"
        left.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", color=colour, fontsize=8)

# %% [markdown]
# The weights are what the queries asked for: "walked" attends to "man" and "dog", the nouns attend to "walked", and the
# articles attend to the nouns. The picture also shows what is missing. The rows of "The" and "the" are equal: neither
# article knows which noun stands next to it, because a graph has no order. We shall come back to this.

# %% [markdown]
# ## Causal attention has fewer edges
#
# A language model must not look ahead: word $i$ attends to the words $j \le i$. With matrices, we add a mask of
# $-\infty$ before the softmax. With a graph there is nothing to mask, because the edges are simply absent.

# %%
ahead = torch.ones(n, n, dtype=torch.bool).triu(1)
masked = (query @ key.T / math.sqrt(d)).masked_fill(ahead, -torch.inf).softmax(dim=1) @ value
earlier = edge_index[:, source <= target]
equal(gattn.attend(q, k, v, earlier).squeeze(1), masked)
equal(gattn.attend(q, k, v, gattn.CompleteGraph(n, causal=True)).squeeze(1), masked)
print(f"{edge_index.size(1)} edges, causal {earlier.size(1)}")

# %% [markdown]
# Any other list of edges works as well. Models of long sequences use a window; ours has a radius of 1, so each word
# attends to itself and to one neighbour on each side. A sentence also has a graph of its own, its syntax: each article
# belongs to its noun, and both nouns belong to the verb. Attention over such a graph is what *graph attention networks*
# compute. Queries, keys and values stay the same, and only the edges change.

# %%
near = edge_index[:, (source - target).abs() <= 1]
syntax = torch.tensor([[0, 1, 3, 4], [1, 2, 4, 2]])
syntax = torch.cat([syntax, syntax.flip(0), torch.arange(n).expand(2, -1)], dim=1)
graphs = {"complete": edge_index, "causal": earlier, "window, radius 1": near, "syntax": syntax}

figure, axes = plt.subplots(2, 4, figsize=(9, 4.7), layout="constrained")
for (name, edges), (above, below) in zip(graphs.items(), axes.T, strict=True):
    _, alpha = gattn.attend(q, k, v, edges, return_weights=True)
    title = f"{name}: {edges.size(1)} edges"
    attention_graph(edges, alpha, labels=[""] * n, pos=circle, ax=above, title=title, maximum=1.0)
    write_words(above)
    dense = torch.full((n, n), torch.nan).index_put((edges[1], edges[0]), alpha.squeeze(1))
    attention_matrix(dense.nan_to_num(), words, words, ax=below, maximum=1.0)
    for i, j in dense.isnan().nonzero().tolist():
        below.text(j, i, "×", ha="center", va="center", color="#999999", fontsize=8)
    if below is not axes[1, 0]:
        below.set_ylabel("")
        below.set_yticklabels([])
bar = figure.colorbar(plt.cm.ScalarMappable(plt.Normalize(0, 1), WEIGHTS), ax=axes, shrink=0.6, aspect=30)
bar.set_label("attention weight α")
bar.outline.set_visible(False)

# %% [markdown]
# A cross marks a missing edge. Its weight is shared out among the edges that remain, since each row still sums to one.
# In the causal graph, "The" has no source but itself and therefore gives itself a weight of 1, although its query asks
# for nouns. On the syntax graph, "The" attends to "man" and not to "dog": the graph supplies what the vectors cannot
# express.

# %% [markdown]
# ## Why divide by √d?
#
# If the entries of $q$ and $k$ are independent, with mean 0 and variance 1, then $q^\top k$ is a sum of $d$ products of
# variance 1, so its standard deviation is $\sqrt{d}$. Large *logits*, which is what the numbers that enter a softmax
# are called, make it select one neighbour and ignore the rest. What does this do to learning? A query learns through
# the derivative of its weights,
#
# $$
# \frac{\partial \alpha_j}{\partial q} = c\, \alpha_j \Big(k_j - \sum_l \alpha_l k_l\Big),
# $$
#
# where the logits are $c\, q^\top k_j$ and $c$ is either $1/\sqrt{d}$ or 1. Once one weight is close to 1, every term
# is close to zero: for the selected key the bracket vanishes, and for all others $\alpha_j$ does. But where two keys
# are nearly tied for the first place, nothing cancels, and the derivative is as large as the difference between two
# keys, which grows with $\sqrt{d}$. We draw 500 queries with 32 keys each and compute the norm of this Jacobian matrix
# for every draw. The lines are medians, and the bands extend from the 5th to the 95th percentile.


# %%
def derivative(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Logits and weights, `[draws, keys]`, and the derivative of the weights, `[draws, keys, channels]`."""
    s = scale * torch.einsum("nc,njc->nj", queries, keys)
    alpha = s.softmax(-1)
    mean_key = torch.einsum("nj,njc->nc", alpha, keys)
    return s, alpha, scale * alpha.unsqueeze(-1) * (keys - mean_key.unsqueeze(1))


one_query, its_keys = torch.randn(8), torch.randn(32, 8)
by_autograd = torch.autograd.functional.jacobian(lambda q: (q @ its_keys.T).softmax(-1), one_query)
equal(derivative(one_query.unsqueeze(0), its_keys.unsqueeze(0), 1.0)[2].squeeze(0), by_autograd)

channels = [2**power for power in range(11)]
percentiles = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
curves: dict[str, list[list[torch.Tensor]]] = {"with 1/√d": [], "without": []}
for c in channels:
    random_queries, random_keys = torch.randn(500, c), torch.randn(500, 32, c)
    for name, scale in (("with 1/√d", 1 / math.sqrt(c)), ("without", 1.0)):
        s, alpha, jacobian = derivative(random_queries, random_keys, scale)
        curves[name].append([s.std(-1), alpha.amax(-1), jacobian.norm(dim=(1, 2))])

figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
titles = ["standard deviation of 32 logits", "largest of 32 weights", "norm of ∂α/∂q"]
for number, (ax, title) in enumerate(zip(axes, titles, strict=True)):
    for (name, rows), colour in zip(curves.items(), COLOURS, strict=False):
        low, _, median, _, high = torch.stack([row[number].quantile(percentiles) for row in rows], dim=1)
        ax.plot(channels, median, "o-", color=colour, label=name, markersize=3)
        ax.fill_between(channels, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("channels d")
axes[0].plot(channels, [math.sqrt(c) for c in channels], ":", color="black", label="√d")
axes[0].set_yscale("log", base=2)
axes[0].legend(frameon=False)
axes[1].set_ylim(0, 1.02)
axes[2].set_yscale("log")
axes[2].set_ylim(1e-9, 1e2)

print("d = 1024     largest weight    norm of ∂α/∂q:   mean        5 %       25 %     median       75 %       95 %")
for name, rows in curves.items():
    _, weight, norm = rows[-1]
    spread = " ".join(f"{value:10.2g}" for value in norm.quantile(percentiles).tolist())
    print(f"{name:10} {weight.mean():16.2f} {norm.mean():24.2f} {spread}")

# %% [markdown]
# With the division, attention behaves in the same way for any number of channels, and all draws are alike. Without it,
# at $d = 1024$, 95 % of the weight lies on one of the 32 neighbours on average, and the derivative is **usually tiny
# and occasionally huge**. Its median, 0.0044, is more than fifty times smaller than with the division, and for one
# query in four it is smaller by at least five orders of magnitude. Yet its mean is eight times *larger*: for another
# query in four, the derivative is more than three times as large, and in one draw out of twenty it reaches 14 or more.
# An optimiser that sees such gradients either stands still or overshoots. The mean alone would hide the first half of
# this, and the median the second.

# %% [markdown]
# ## Several heads
#
# One head asks one question. With $H$ heads, a word asks several questions at the same time, each with queries, keys
# and values of its own. In terms of the graph, each edge carries $H$ weights instead of one. Heads do not see each
# other, so computing them one at a time gives the same result as computing all of them at once.

# %%
same_kind = 6.0 * torch.eye(4)  # each word looks for words like itself
nouns = torch.zeros(4, 4)
nouns[:, 1] = 6.0  # everybody looks for nouns
articles = torch.zeros(4, 4)
articles[1, 0], articles[0, 0], articles[2, 2] = 6.0, 6.0, 6.0  # nouns look for articles, others for themselves
heads = torch.stack([w_query, same_kind, nouns, articles], dim=1)  # [features, heads, channels]

q4 = torch.einsum("nf,fhc->nhc", x, heads)
k4 = v4 = x.unsqueeze(1).expand(n, 4, d)
all_at_once, alpha4 = gattn.attend(q4, k4, v4, edge_index, return_weights=True)
one_at_a_time = [gattn.attend(q4[:, [h]], k4[:, [h]], v4[:, [h]], edge_index) for h in range(4)]
equal(all_at_once, torch.cat(one_at_a_time, dim=1))
print(f"output {list(all_at_once.shape)}, weights {list(alpha4.shape)}: [words, heads, channels], [edges, heads]")

axes = attention_grid({"": alpha4}, edge_index, labels=[""] * n, pos=circle)
axes[0, 0].figure.set_size_inches(9, 2.5)
for ax, name in zip(axes[0], ["as before", "like to like", "to nouns", "nouns to articles"], strict=True):
    ax.set_title(name, fontsize=10)
    write_words(ax)

# %% [markdown]
# With learnt maps before it and a linear map after it, this is the multi-head attention of [Attention Is All You
# Need](https://arxiv.org/abs/1706.03762). `gattn.nn.MultiheadAttention` accepts the parameters of PyTorch's layer and
# computes the same numbers. In addition, it accepts a graph, which makes it a layer of a graph Transformer.

# %%
pytorch = torch.nn.MultiheadAttention(16, num_heads=4)
ours = gattn.nn.MultiheadAttention(16, num_heads=4)
ours.load_state_dict(pytorch.state_dict())
tokens = torch.randn(n, 16)
expected, _ = pytorch(tokens, tokens, tokens)
equal(ours(tokens, tokens, tokens)[0], expected)
equal(ours(tokens, tokens, tokens, graph=edge_index)[0], expected)
on_syntax, _ = ours(tokens, tokens, tokens, graph=syntax)
print(f"on the syntax graph, the outputs differ by up to {(on_syntax - expected).abs().max():.2f}")

# %% [markdown]
# ## Positions
#
# If we renumber the nodes of a graph, the outputs are renumbered in the same way, and nothing else changes. For
# attention over a complete graph, this means that we can shuffle the words, and each keeps its output. "The" and "the"
# have the same features, so they have the same output, whatever stands beside them.

# %%
shuffled = torch.tensor([4, 2, 0, 3, 1])
equal(gattn.attend(q[shuffled], k[shuffled], v[shuffled], gattn.CompleteGraph(n)), as_transformer[shuffled])
equal(as_transformer[0], as_transformer[3])

# %% [markdown]
# If order matters, it must be supplied. There are three common ways. *Sinusoidal* encodings add a vector that depends
# on the position to the features of each word ([Vaswani et al.](https://arxiv.org/abs/1706.03762)). *Relative*
# positions depend on the distance between the two words: [Shaw et al.](https://arxiv.org/abs/1803.02155) add a learnt
# vector per distance to the keys (and another one to the values), and [Raffel et al.](https://arxiv.org/abs/1910.10683)
# (T5) simplify this to a learnt number per distance and head, which is added to the logit. *Rotary* encodings rotate
# queries and keys by angles that are proportional to the position ([Su et al.](https://arxiv.org/abs/2104.09864)). In
# terms of the graph, the first is a node feature and the second an edge feature. The third starts from a node feature,
# but its effect on the logit depends only on the edge, because two rotations differ by their distance.
#
# The smallest task that needs order shows what each of them achieves: *name the previous token*, in random sequences of
# 16 letters from an alphabet of 16. The model is one layer with one head on a complete graph; "relative" is the learnt
# number of Raffel et al. We then test each model on sequences that are four times as long.

# %%
alphabet = 16


class PreviousToken(torch.nn.Module):
    """One layer of attention, trained to name the token before each token."""

    def __init__(self, add: torch.nn.Module | None = None, position: torch.nn.Module | None = None):
        super().__init__()
        self.embed = torch.nn.Embedding(alphabet, 32)
        self.add = torch.nn.Identity() if add is None else add
        self.attention = gattn.nn.MultiheadAttention(32, num_heads=1, batch_first=True, position=position)
        self.read = torch.nn.Linear(32, alphabet)

    def forward(self, letters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the letter before each, and attention weights."""
        x = self.add(self.embed(letters))
        x, alpha = self.attention(x, x, x)
        return self.read(x), alpha


def accuracy(model: PreviousToken, length: int) -> float:
    """The fraction of letters that the model names correctly, in 256 sequences and without the first letter of each."""
    letters = torch.randint(alphabet, (256, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        named = model(letters)[0].argmax(-1)
    return (named[:, 1:] == letters[:, :-1]).float().mean().item()


# %%
models = {
    "none": lambda: PreviousToken(),
    "sinusoidal": lambda: PreviousToken(add=gattn.nn.SinusoidalPositionalEncoding(32)),
    "relative": lambda: PreviousToken(position=gattn.nn.RelativePositionBias(1, max_distance=8)),
    "rotary": lambda: PreviousToken(position=gattn.nn.RotaryPositionalEncoding(32)),
}
figure, axes = plt.subplots(1, 4, figsize=(9, 2.6), layout="constrained")
example = torch.randint(alphabet, (1, 16))
print("positions    16 letters  64 letters")
for ax, (name, make) in zip(axes, models.items(), strict=True):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(400):
        letters = torch.randint(alphabet, (64, 16))
        loss = cross_entropy(model(letters)[0][:, 1:].flatten(0, 1), letters[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    short, long = accuracy(model, 16), accuracy(model, 64)
    print(f"{name:12} {short:10.1%}  {long:10.1%}")
    attention_matrix(model(example)[1], ax=ax, title=f"{name}: {short:.0%}", maximum=1.0)
    ax.set_ylabel("target" if name == "none" else "")

# %% [markdown]
# Without positions, the layer knows which letters occur but not where, and it attends to all of them about equally.
# With positions, all three models learn the same graph: the line below the diagonal is a list of edges, one from each
# letter to the next, and this time it was learnt. Two of them are less sharp: the sinusoidal model also gives weight to
# the places next to that line, and the relative one spreads a part over all letters. (The first letter has no
# predecessor and may attend to anything.)
#
# On sequences four times as long, relative and rotary positions mostly hold, since they depend on distances, and a
# distance of one occurred in training. Sinusoidal encodings are new to the model from the 17th position on. These are
# single runs, with one seed each, on a toy problem; their order says little about large models.

# %% [markdown]
# ## Which score?
#
# So far, $s$ was a dot product. Other scores have been used as well:
#
# | score | $s(q, k)$ | from |
# | --- | --- | --- |
# | dot | $q^\top k$ | [Luong et al.](https://arxiv.org/abs/1508.04025) |
# | scaled dot | $q^\top k \,/ \sqrt{d}$ | [Vaswani et al.](https://arxiv.org/abs/1706.03762) |
# | general | $q^\top W k$, with $W = W_q^\top W_k$ | Luong et al.; divided by $\sqrt{d}$, a Transformer's |
# | additive | $a^\top \tanh(W_q q + W_k k)$ | [Bahdanau et al.](https://arxiv.org/abs/1409.0473) |
# | GAT | $\mathrm{LeakyReLU}(a^\top W_q q + a^\top W_k k)$ | [Veličković et al.](https://arxiv.org/abs/1710.10903) |
# | GATv2 | $a^\top \mathrm{LeakyReLU}(W_q q + W_k k)$ | [Brody et al.](https://arxiv.org/abs/2105.14491) |
#
# To compare them, we take vectors in the plane, two queries and five keys, and give all scores the same $W_q$ and $W_k$
# ($8 \times 2$) and the same $a$, drawn at random with a seed that shows the differences well. (The unscaled dot
# product differs from the scaled one only by the factor $\sqrt{2}$ and is left out.) We begin with the formulas, for
# the first query and the first key:

# %%
torch.manual_seed(40)
w_q, w_k, a = torch.randn(8, 2), torch.randn(8, 2), torch.randn(8)
queries = torch.tensor([[1.5, 0.5], [-1.0, 1.0]])
angles = torch.arange(5) * 2 * math.pi / 5 + 0.3
keys = 1.6 * torch.stack([angles.cos(), angles.sin()], dim=1)

first, other = queries[0], keys[0]
formulas = {
    "scaled dot": first @ other / math.sqrt(2),
    "general": first @ w_q.T @ w_k @ other,
    "additive": a @ (w_q @ first + w_k @ other).tanh(),
    "GAT": leaky_relu(a @ w_q @ first + a @ w_k @ other, 0.2),
    "GATv2": a @ leaky_relu(w_q @ first + w_k @ other, 0.2),
}

# %% [markdown]
# In gattn, a score is an object that compares the vectors at the two ends of an edge. *General* is a dot product of
# projected vectors, *additive* and *GATv2* are one class with two activations, and *GAT* compares two scalars, which is
# why it is cheap. The last column of the output counts in how many different orders 1000 random queries put the five
# keys.

# %%
hidden = (lambda q: (q @ w_q.T).unsqueeze(1), lambda k: (k @ w_k.T).unsqueeze(1))  # [N, 1, 8]
scalars = (lambda q: (q @ w_q.T @ a).unsqueeze(1), lambda k: (k @ w_k.T @ a).unsqueeze(1))  # [N, 1]
plain = (lambda q: q.unsqueeze(1), lambda k: k.unsqueeze(1))  # [N, 1, 2]
score_functions = {
    "scaled dot": (gattn.DotScore(), *plain),
    "general": (gattn.DotScore(scale=1.0), *hidden),
    "additive": (gattn.AdditiveScore(a.unsqueeze(0), activation="tanh"), *hidden),
    "GAT": (gattn.GATScore(), *scalars),
    "GATv2": (gattn.AdditiveScore(a.unsqueeze(0)), *hidden),
}


def compare(name: str, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The score of every query with every key, `[queries, keys]`."""
    score, of_query, of_key = score_functions[name]
    i, j = torch.meshgrid(torch.arange(len(queries)), torch.arange(len(keys)), indexing="ij")
    return score.logits(of_query(queries)[i.flatten()], of_key(keys)[j.flatten()], None).view(len(queries), len(keys))


many = torch.randn(1000, 2)
print("            first query, first key   weights of the five keys       orders for 1000 queries")
for name, (score, of_query, of_key) in score_functions.items():
    s = compare(name, queries, keys)
    equal(s[0, 0], formulas[name])
    everybody = gattn.CompleteGraph(2, 5)
    _, alpha = gattn.attend(
        of_query(queries), of_key(keys), torch.zeros(5, 1, 1), everybody, score=score, return_weights=True
    )
    equal(alpha.squeeze(0), s.softmax(-1))
    orders = len(compare(name, many, keys).argsort(-1).unique(dim=0))
    print(f"{name:11} {s[0, 0]:22.3f}   {' '.join(f'{weight:.2f}' for weight in alpha[0, 0].tolist())} {orders:29}")

# %% [markdown]
# The last column shows a difference in kind. GAT adds a number from the query to a number from the key, and the
# LeakyReLU that follows is monotone. The key with the largest $a^\top W_k k$ therefore wins for *every* query, and the
# other keys follow in the same order. Brody et al. call such attention static. GATv2 has the same parameters but
# applies $a$ after the LeakyReLU, and its queries disagree here. (Whether they do depends on the parameters.)
#
# The picture shows this. Each panel is the plane of keys, darker where a key would score higher. The arrow is the
# query, the dots are our five keys, and the orange dot is the key with the highest score. Compare the first row with
# the second, where the query has turned: what turns with it?

# %%
side = torch.linspace(-2.2, 2.2, 60)
plane = torch.cartesian_prod(side, side)
figure, axes = plt.subplots(2, 5, figsize=(9, 3.9), sharex=True, sharey=True, layout="constrained")
for column, name in zip(axes.T, score_functions, strict=True):
    landscape, s = compare(name, queries, plane), compare(name, queries, keys)
    column[0].set_title(name, fontsize=10)
    for row, ax in enumerate(column):
        height = landscape[row].view(60, 60).T  # rows are the second coordinate
        ax.contourf(side, side, height, levels=12, cmap=WEIGHTS)
        ax.scatter(*keys.T, s=22, color="white", edgecolor="black", linewidth=0.7, zorder=3)
        ax.scatter(*keys[s[row].argmax()], s=42, color=COLOURS[1], edgecolor="black", linewidth=0.7, zorder=4)
        ax.annotate("", queries[row].tolist(), (0, 0), arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 1.4})
        ax.set_aspect("equal")
        ax.set_xticks([-2, 0, 2])
        ax.set_yticks([-2, 0, 2])
for row, name in enumerate(("first", "second")):
    axes[row, 0].set_ylabel(f"{name} query")

# %% [markdown]
# The scores of *scaled dot* and *general* increase in one direction, which turns with the query. The score of *GAT*
# also increases in one direction, but that direction is the same in both rows, and so is the winner. The landscapes of
# *additive* and *GATv2* are curved, and their shape depends on the query.
#
# ## Summary
#
# Attention is defined by a graph (who attends to whom), a score (how the two ends of an edge are compared) and a
# distribution (how scores become weights). A Transformer and a graph attention network differ in the first two choices,
# not in the computation. [The second notebook](02_graph_attention_on_cora.ipynb) trains graph attention and examines
# what it attends to; [the third](03_graph_vs_sequence_attention.ipynb) compares graphs with sequences.
