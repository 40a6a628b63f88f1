# %% [markdown]
# # Attention is message passing
#
# A Transformer's attention is usually written as three matrix products, a graph network's as messages along edges. They
# are the same computation. A target $i$ compares itself with each source $j$ that it has an edge from, turns the scores
# into weights, and averages:
#
# $$
# \mathrm{out}_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij}\, v_j,
# \qquad
# \alpha_{ij} = \frac{\exp s(q_i, k_j)}{\sum_{l \in \mathcal{N}(i)} \exp s(q_i, k_l)}
# $$
#
# In a Transformer $\mathcal{N}(i)$ is everybody. This notebook takes five words and computes that in five ways, draws
# the $n \times n$ matrix as the graph that it is, takes edges away, and then looks at what is left to choose: the
# scale, heads, positions, and the score $s$. Wherever the text says that two things are equal, a cell checks it.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, leaky_relu

import gattn
from gattn.visualize import COLOURS, WEIGHTS, attention_graph, attention_grid, attention_matrix

torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
equal = torch.testing.assert_close

# %% [markdown]
# ## Five words, with a pencil
#
# Each word gets four numbers that we can read: is it an article, a noun, a verb, a human?
# Trained models learn such features (and less readable ones); ours are made up so that a pencil suffices.

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
# A word's **query** says what it looks for, its **key** what it offers, its **value** what it hands over. All three are
# linear maps of its features, $q_i = x_i W^Q$ and so on. Here keys and values are the features themselves, and queries
# say: an article looks for nouns, a noun for verbs and, less, for articles, a verb for nouns, more so if they are
# human.

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
# Now "walked" looks around. Its query is $(0, 4, 0, 2)$, so "man" scores $4 + 2 = 6$, "dog" 4, the others 0. Scores are
# divided by $\sqrt{d} = 2$ (why, we shall see), and weights are $e^3, e^2, e^0$ over their sum.

# %%
walked = words.index("walked")
scores = [sum(a * b for a, b in zip(query[walked].tolist(), k, strict=True)) / math.sqrt(d) for k in key.tolist()]
total = sum(math.exp(s) for s in scores)
for word, s in zip(words, scores, strict=True):
    print(f"{word:8} score {s:.0f}   weight {math.exp(s) / total:.3f}")

# %% [markdown]
# The output of "walked" is the average of all values under these weights. Its last number, 0.659, was 0 before: the
# word now knows that a human did it. All five words at once, by nothing but loops:

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
# ## The same as matrices
#
# $$\mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d}}\right) V$$

# %%
matrix = (query @ key.T / math.sqrt(d)).softmax(dim=1)
as_matrices = matrix @ value
equal(as_matrices, by_hand)

# %% [markdown]
# ## The same as messages
#
# A graph is a list of edges: sources above, targets below. Here it has all 25. Attention along edges is three steps,
# the three of every message-passing network: **gather** what lies at the two ends of each edge, make one weight an edge
# (the softmax runs over the edges that share a target), **scatter** the weighted values to the targets.

# %%
target, source = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
edge_index = torch.stack([source.flatten(), target.flatten()])
source, target = edge_index

logits = (query[target] * key[source]).sum(-1) / math.sqrt(d)  # one an edge
weights = gattn.softmax(logits, target, num_targets=n)
as_messages = torch.zeros(n, d).index_add(0, target, weights.unsqueeze(-1) * value[source])
equal(as_messages, by_hand)

# %% [markdown]
# ## The same with `gattn.attend`
#
# `attend` is this computation with fast kernels beneath; who attends to whom is its fourth argument. A `CompleteGraph`
# is everybody to everybody without a list of edges: the Transformer's way, through PyTorch's fused attention. An
# `edge_index` is the graph network's way. (Tensors are `[nodes, heads, channels]`; we have one head so far.)

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
# An $n \times n$ matrix of weights *is* a weighted graph: row $i$, column $j$ is an arrow from $j$ to $i$. Both
# pictures below show the same 25 numbers; an entry of the diagonal is a loop, drawn as the rim of its node.

# %%
circle = torch.tensor([[math.sin(2 * math.pi * i / n), math.cos(2 * math.pi * i / n)] for i in range(n)])
figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.9), layout="constrained")
attention_graph(edge_index, weights, labels=words, pos=circle, ax=right, title="as a graph", colorbar=True)
attention_matrix(matrix, words, words, ax=left, title="as a matrix")
for i in range(n):
    for j in range(n):
        colour = "white" if matrix[i, j] > 0.4 else "black"
        left.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", color=colour, fontsize=8)

# %% [markdown]
# "walked" hears from "man" and "dog", the nouns from "walked", the articles from the nouns, as their queries asked. One
# more thing shows: the rows of "The" and "the" are equal, and no arrow cares which noun stands next to which article. A
# graph has no order. We shall come back to that.

# %% [markdown]
# ## Causal means fewer edges
#
# A language model must not look ahead: word $i$ attends to $j \le i$. With matrices one adds a mask of $-\infty$ before
# the softmax. With a graph there is nothing to mask: those edges are not there.

# %%
ahead = torch.ones(n, n, dtype=torch.bool).triu(1)
masked = (query @ key.T / math.sqrt(d)).masked_fill(ahead, -torch.inf).softmax(dim=1) @ value
earlier = edge_index[:, source <= target]
equal(gattn.attend(q, k, v, earlier).squeeze(1), masked)
equal(gattn.attend(q, k, v, gattn.CompleteGraph(n, causal=True)).squeeze(1), masked)
print(f"{edge_index.size(1)} edges, causal {earlier.size(1)}")

# %% [markdown]
# Any other list of edges does as well. A window of one word to each side is what long-sequence models use; and a
# sentence has a graph of its own, its syntax: each article belongs to its noun, both nouns to the verb. Attention over
# such a graph is what *graph attention networks* do. Queries, keys and values stay the same; only the edges change.

# %%
near = edge_index[:, (source - target).abs() <= 1]
syntax = torch.tensor([[0, 1, 3, 4], [1, 2, 4, 2]])
syntax = torch.cat([syntax, syntax.flip(0), torch.arange(n).expand(2, -1)], dim=1)
graphs = {"complete": edge_index, "causal": earlier, "window of 1": near, "syntax": syntax}

figure, axes = plt.subplots(2, 4, figsize=(9, 4.9), layout="constrained")
for (name, edges), (above, below) in zip(graphs.items(), axes.T, strict=True):
    _, alpha = gattn.attend(q, k, v, edges, return_weights=True)
    attention_graph(
        edges, alpha, labels=words, pos=circle, ax=above, title=f"{name}: {edges.size(1)} edges", maximum=1.0
    )
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
# × stands where there is no edge. What a missing edge leaves is shared out among those that remain, since each row
# still sums to one: a causal "The" has nobody but itself and gives itself a weight of 1, although its query asks for
# nouns. On the syntax graph "The" hears from "man" and not from "dog": the graph says what the vectors cannot.

# %% [markdown]
# ## Why divide by √d?
#
# If entries of $q$ and $k$ are independent, with mean 0 and variance 1, then $q^\top k$ is a sum of $d$ products of
# variance 1, so its standard deviation is $\sqrt{d}$. Large logits make the softmax pick one neighbour and ignore the
# rest, and a softmax that has picked hardly changes: its derivative $\partial \alpha_i / \partial s_j = \alpha_i
# (\delta_{ij} - \alpha_j)$ vanishes, and with it what queries and keys learn from. We draw queries and 32 keys at
# random and look at all three.

# %%
channels = [2**power for power in range(11)]
curves: dict[str, list[list[float]]] = {"with 1/√d": [], "without": []}
for c in channels:
    products = torch.einsum("nc,njc->nj", torch.randn(500, c), torch.randn(500, 32, c))
    for name, s in (("with 1/√d", products / math.sqrt(c)), ("without", products)):
        alpha = s.softmax(-1)
        jacobian = torch.diag_embed(alpha) - alpha.unsqueeze(-1) * alpha.unsqueeze(-2)
        curves[name].append([s.std().item(), alpha.amax(-1).mean().item(), jacobian.norm(dim=(1, 2)).mean().item()])

figure, axes = plt.subplots(1, 3, figsize=(9, 2.7), layout="constrained")
titles = ["standard deviation of logits", "largest of 32 weights", "size of the softmax's derivative"]
for number, (ax, title) in enumerate(zip(axes, titles, strict=True)):
    for (name, rows), colour in zip(curves.items(), COLOURS, strict=False):
        ax.plot(channels, [row[number] for row in rows], "o-", color=colour, label=name, markersize=3)
    ax.set_xscale("log", base=2)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("channels d")
axes[0].plot(channels, [math.sqrt(c) for c in channels], ":", color="black", label="√d")
axes[0].set_yscale("log", base=2)
axes[0].legend(frameon=False)
axes[1].set_ylim(0, 1)
axes[2].set_ylim(0, None)
for name, rows in curves.items():
    deviation, largest, derivative = rows[-1]
    print(f"{name:10} d = 1024: logits ± {deviation:.1f}, largest weight {largest:.2f}, derivative {derivative:.3f}")

# %% [markdown]
# Divided by $\sqrt{d}$, attention behaves alike for any number of channels. Without it, at $d = 1024$ nearly the
# whole weight lies on one of 32 neighbours, and the derivative is a quarter of what the division keeps. (With few
# channels it is larger: logits of a standard deviation of two or three would not hurt yet.)

# %% [markdown]
# ## Several heads
#
# One head asks one question. With $H$ heads a word asks several at the same time, each with queries, keys and values of
# its own. In terms of the graph: each edge carries $H$ weights instead of one. Heads don't see each other, so
# one at a time is the same as all at once.

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

axes = attention_grid({"": alpha4}, edge_index, labels=words, pos=circle)
axes[0, 0].figure.set_size_inches(9, 2.5)
for ax, name in zip(axes[0], ["as before", "like to like", "to nouns", "nouns to articles"], strict=True):
    ax.set_title(name, fontsize=10)

# %% [markdown]
# With learnt maps before and a linear map after it, this is the multi-head attention of [Attention Is All You
# Need](https://arxiv.org/abs/1706.03762). `gattn.nn.MultiheadAttention` takes the parameters of PyTorch's and gives the
# same numbers; beyond PyTorch's it takes a graph, and so becomes a layer of a graph Transformer.

# %%
pytorch = torch.nn.MultiheadAttention(16, num_heads=4)
ours = gattn.nn.MultiheadAttention(16, num_heads=4)
ours.load_state_dict(pytorch.state_dict())
tokens = torch.randn(n, 16)
expected, _ = pytorch(tokens, tokens, tokens)
equal(ours(tokens, tokens, tokens)[0], expected)
equal(ours(tokens, tokens, tokens, graph=edge_index)[0], expected)
on_syntax, _ = ours(tokens, tokens, tokens, graph=syntax)
print(f"over the syntax graph other numbers: they differ by up to {(on_syntax - expected).abs().max():.2f}")

# %% [markdown]
# ## Positions
#
# Renumber the nodes of a graph, and the outputs are renumbered with them; nothing else happens. For attention over a
# complete graph this means: shuffle the words, and each keeps its output. "The" and "the" have the same features, so
# they have the same output, whatever stands beside them.

# %%
shuffled = torch.tensor([4, 2, 0, 3, 1])
equal(gattn.attend(q[shuffled], k[shuffled], v[shuffled], gattn.CompleteGraph(n)), as_transformer[shuffled])
equal(as_transformer[0], as_transformer[3])

# %% [markdown]
# Who needs order must put it in. Three ways, from the oldest: add a vector that depends on the place to each word's
# features (*sinusoidal*, [Vaswani et al.](https://arxiv.org/abs/1706.03762)); add a learnt number to the logit of each
# distance (*relative*, [Shaw et al.](https://arxiv.org/abs/1803.02155), [Raffel et
# al.](https://arxiv.org/abs/1910.10683)); rotate queries and keys by angles that grow with the place (*rotary*, [Su et
# al.](https://arxiv.org/abs/2104.09864)). In terms of the graph the first is a node feature, the second an edge
# feature, and the third turns a node's place into something that depends on the edge alone.
#
# What that buys shows in the smallest task that needs order: *name the token before you*, in random sequences of 16
# letters out of 16. One layer, one head, complete graph. A test on sequences four times as long follows.

# %%
alphabet = 16


class PreviousToken(torch.nn.Module):
    """One layer of attention that is to name the token before each."""

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
    """The part of 256 sequences' letters that the model names; the first one has none before it."""
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
# Without positions the layer knows which letters are there, not where, and attends to all alike. With them it learns
# the same graph in three ways: the line below the diagonal is a list of edges, each letter's from the one before it,
# learnt this time. (The first letter has none before it, and may look anywhere.)
#
# On four times the length, relative and rotary positions mostly hold: they know distances, and a distance of one
# was there in training. Sinusoidal ones are new from the 17th place on. That was one seed each of a toy; its order
# says little about large models.

# %% [markdown]
# ## Which score?
#
# So far $s$ was a dot product. It is the last thing to choose, and the literature chose differently:
#
# | score | $s(q, k)$ | from |
# | --- | --- | --- |
# | dot | $q^\top k \,/ \sqrt{d}$ | [Luong et al.](https://arxiv.org/abs/1508.04025), Vaswani et al. |
# | general | $q^\top W k$, with $W = W_q^\top W_k$ | Luong et al.; divided by $\sqrt{d}$, a Transformer's |
# | additive | $a^\top \tanh(W_q q + W_k k)$ | [Bahdanau et al.](https://arxiv.org/abs/1409.0473) |
# | GAT | $\mathrm{LeakyReLU}(a^\top W_q q + a^\top W_k k)$ | [Veličković et al.](https://arxiv.org/abs/1710.10903) |
# | GATv2 | $a^\top \mathrm{LeakyReLU}(W_q q + W_k k)$ | [Brody et al.](https://arxiv.org/abs/2105.14491) |
#
# We take vectors in the plane, two queries and five keys, and give all scores the same $W_q$, $W_k$ ($8 \times 2$) and
# $a$, drawn at random (with a seed that shows the differences well). Formulas first, for the first query and key:

# %%
torch.manual_seed(40)
w_q, w_k, a = torch.randn(8, 2), torch.randn(8, 2), torch.randn(8)
queries = torch.tensor([[1.5, 0.5], [-1.0, 1.0]])
angles = torch.arange(5) * 2 * math.pi / 5 + 0.3
keys = 1.6 * torch.stack([angles.cos(), angles.sin()], dim=1)

first, other = queries[0], keys[0]
formulas = {
    "dot": first @ other / math.sqrt(2),
    "general": first @ w_q.T @ w_k @ other,
    "additive": a @ (w_q @ first + w_k @ other).tanh(),
    "GAT": leaky_relu(a @ w_q @ first + a @ w_k @ other, 0.2),
    "GATv2": a @ leaky_relu(w_q @ first + w_k @ other, 0.2),
}

# %% [markdown]
# In gattn a score is an object that compares what lies at the two ends of an edge. *General* is a dot product of
# projected vectors; *additive* and *GATv2* are one class; *GAT* compares two scalars, which is what makes it cheap.

# %%
hidden = (lambda q: (q @ w_q.T).unsqueeze(1), lambda k: (k @ w_k.T).unsqueeze(1))  # [N, 1, 8]
scalars = (lambda q: (q @ w_q.T @ a).unsqueeze(1), lambda k: (k @ w_k.T @ a).unsqueeze(1))  # [N, 1]
plain = (lambda q: q.unsqueeze(1), lambda k: k.unsqueeze(1))  # [N, 1, 2]
score_functions = {
    "dot": (gattn.DotScore(), *plain),
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
print("          first query, first key   weights of the five keys       rankings of them by 1000 queries")
for name, (score, of_query, of_key) in score_functions.items():
    s = compare(name, queries, keys)
    equal(s[0, 0], formulas[name])
    everybody = gattn.CompleteGraph(2, 5)
    _, alpha = gattn.attend(
        of_query(queries), of_key(keys), torch.zeros(5, 1, 1), everybody, score=score, return_weights=True
    )
    equal(alpha.squeeze(0), s.softmax(-1))
    rankings = len(compare(name, many, keys).argsort(-1).unique(dim=0))
    print(f"{name:9} {s[0, 0]:22.3f}   {' '.join(f'{weight:.2f}' for weight in alpha[0, 0].tolist())} {rankings:38}")

# %% [markdown]
# The last column is a difference in kind. GAT's query and key are added before anything bends, and the LeakyReLU after
# it is monotone: the key with the largest $a^\top W_k k$ wins with *every* query. Brody et al. call such attention
# static. GATv2 has the same parameters and swaps the order of $a$ and LeakyReLU, and its queries disagree here. (They
# need not: that depends on the parameters.)
#
# The picture shows it. Each panel is the plane of keys, darker where a key would score higher; the arrow is the query,
# the dots are our five keys, and the orange one wins. Turn the query (from the first row to the second) and see what
# turns with it.

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
# *Dot* and *general* climb in one direction, which turns with the query. *GAT* climbs in one direction, too, but it is
# the same in both rows, and so is the winner. *Additive* and *GATv2* are bent, and where they bend depends on the
# query.
#
# ## In one sentence
#
# Attention has a graph (who attends to whom), a score (how the two ends of an edge compare) and a distribution (how
# scores become weights); a Transformer and a graph attention network differ in the first two answers, not in the
# computation. [The second notebook](02_graph_attention_on_cora.ipynb) trains graph attention and looks at what it
# attends to; [the third](03_graph_vs_sequence_attention.ipynb) sets graphs and sequences side by side.
