# %% [markdown]
# # A Transformer and a GAT from scratch
#
# Two architectures of 2017 carry most of today's attention: the Transformer of [Attention Is All You
# Need](https://arxiv.org/abs/1706.03762), for sequences, and the graph attention network (GAT) of [Veličković et
# al.](https://arxiv.org/abs/1710.10903), for graphs. Libraries wrap both in thousands of lines, which suggests that
# they are complicated. They are not. In this notebook, each of them takes about thirty lines of plain PyTorch.
#
# We build them piece by piece, with the equation beside each piece, and then load the same weights into the layers of
# gattn and of PyTorch or PyTorch Geometric (PyG). Wherever the text says that two things are equal, a cell checks it.
# On the way we answer the questions that students ask most often:
#
# - What does $W^O$ do, and are several heads several computations? (Sections 1 and 2)
# - If attention is only a weighted average, where does the non-linearity come from? (Sections 3 and 4)
# - Why sines and cosines? (Section 5)
# - What does attention gain over a recurrent or a convolutional network? (Section 7)
# - Why does GAT concatenate its heads in one layer and average them in another? (Section 8)
# - How far does a graph network see? (Section 10)
#
# You need some linear algebra and the basics of PyTorch; nothing about attention is assumed. Two good texts to read
# beside this one are [The Annotated Transformer](https://nlp.seas.harvard.edu/annotated-transformer/) and the chapter
# on attention in [Dive into Deep Learning](https://d2l.ai/chapter_attention-mechanisms-and-transformers/index.html).
# No data have to be downloaded.

# %%
import inspect
import math
from itertools import chain, pairwise

import matplotlib.pyplot as plt
import networkx as nx
import torch
import torch.nn.functional as F
from matplotlib.patches import FancyBboxPatch
from scipy.spatial import ConvexHull
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GATConv
from torch_geometric.utils import to_networkx

import gattn
from gattn.visualize import COLOURS, WEIGHTS, attention_matrix

torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 120, "font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
equal = torch.testing.assert_close

# %% [markdown]
# ## Part one: a Transformer
#
# ## 1. One head
#
# A sequence of $T$ tokens is a matrix $X \in \mathbb{R}^{T \times d}$ with one row per token. Attention lets every
# token collect information from the others. Three linear maps give each token a **query** (what it looks for), a
# **key** (what it can be found by) and a **value** (what it hands over):
#
# $$ Q = X W^Q, \qquad K = X W^K, \qquad V = X W^V. $$
#
# A token compares its query with all keys by dot products. A softmax turns the results into weights that are positive
# and sum to one, and the output is the average of the values with these weights:
#
# $$ \mathrm{Attention}(Q, K, V) = A V, \qquad A = \mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{C}}\right), \tag{1} $$
#
# where $C$ is the number of channels of a query. (The first notebook shows what would go wrong without $\sqrt{C}$.)


# %%
def attention(q, k, v, allowed=None):
    """Equation (1), for any number of leading dimensions: `[..., T, C]`."""
    logits = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if allowed is not None:  # True where a token may look
        logits = logits.masked_fill(~allowed, -torch.inf)
    weights = logits.softmax(-1)
    return weights @ v, weights


T, d, H = 6, 16, 4
C = d // H
x = torch.randn(T, d)
w_q, w_k, w_v = (torch.randn(d, C) / math.sqrt(d) for _ in range(3))
out, weights = attention(x @ w_q, x @ w_k, x @ w_v)
equal(weights.sum(-1), torch.ones(T))
print(f"input {list(x.shape)}, weights {list(weights.shape)}, output {list(out.shape)}")

# %% [markdown]
# ## 2. Several heads, and what $W^O$ is for
#
# A single softmax can concentrate on one thing at a time. **Multi-head attention** runs $H$ heads side by side, each
# with maps of its own to $C = d / H$ channels. The heads are concatenated, and one more linear map, $W^O$, follows:
#
# $$
# \mathrm{head}_h = \mathrm{Attention}(X W^Q_h, X W^K_h, X W^V_h), \qquad
# \mathrm{MultiHead}(X) = [\mathrm{head}_1, \ldots, \mathrm{head}_H]\, W^O. \tag{2}
# $$
#
# Read literally, that is a loop:

# %%
heads_q, heads_k, heads_v = (torch.randn(H, d, C) / math.sqrt(d) for _ in range(3))  # one matrix per head
w_o = torch.randn(d, d) / math.sqrt(d)

heads = [attention(x @ heads_q[h], x @ heads_k[h], x @ heads_v[h])[0] for h in range(H)]
naive = torch.cat(heads, dim=-1) @ w_o

# %% [markdown]
# Nobody computes it that way. The matrices of all heads, put side by side, are a single matrix of size $d \times d$;
# one product makes the queries of all heads, and a reshape tells them apart. The heads then become one more leading
# dimension, which `attention` accepts already. The numbers are the same, but a few large products replace many small
# ones, which is what processors are good at.


# %%
def side_by_side(matrices):
    """`[H, d, C]` as one matrix `[d, H * C]`."""
    return matrices.transpose(0, 1).flatten(1)


q, k, v = (
    (x @ side_by_side(w)).unflatten(-1, (H, C)).transpose(0, 1) for w in (heads_q, heads_k, heads_v)
)  # [H, T, C]
together, _ = attention(q, k, v)
batched = together.transpose(0, 1).flatten(1) @ w_o
equal(batched, naive)

# %% [markdown]
# What is $W^O$ for? Cut it into $H$ blocks of $C$ rows, $W^O_1, \ldots, W^O_H$. A product with a concatenation is a
# sum of products, so that
#
# $$ [\mathrm{head}_1, \ldots, \mathrm{head}_H]\, W^O = \sum_{h=1}^{H} \mathrm{head}_h\, W^O_h . \tag{3} $$
#
# Each head owns a block. The block says where in the $d$ channels of the token the head writes what it has found, and
# the contributions of all heads are added. Without $W^O$, head 1 could only ever write into the first $C$ channels.

# %%
blocks = w_o.unflatten(0, (H, C))  # [H, C, d]
equal(sum(head @ block for head, block in zip(heads, blocks, strict=True)), naive)

# %% [markdown]
# As a module, with `nn.Linear` for the four maps (whose bias we have left out of the equations, as the paper does):


# %%
class MultiHead(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, allowed=None):  # x: [B, T, d]
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.w_q, self.w_k, self.w_v))
        out, self.weights = attention(q, k, v, allowed)  # [B, H, T, C], and [B, H, T, T] to look at later
        return self.w_o(out.transpose(1, 2).flatten(2))


# %% [markdown]
# The library layers keep the three input maps as one matrix of $3d$ rows. With that, the same weights give the same
# numbers in our module, in gattn's and in PyTorch's:


# %%
def copy_multi_head(ours, theirs):
    """Loads the weights of our module into a library's."""
    maps = ours.w_q, ours.w_k, ours.w_v
    parameters = {
        "in_proj_weight": torch.cat([w.weight for w in maps]),
        "in_proj_bias": torch.cat([w.bias for w in maps]),
        "out_proj.weight": ours.w_o.weight,
        "out_proj.bias": ours.w_o.bias,
    }
    theirs.load_state_dict(parameters)
    return theirs


ours = MultiHead(d, H)
batch = torch.randn(3, T, d)
for library in (gattn.nn.MultiheadAttention, torch.nn.MultiheadAttention):
    layer = copy_multi_head(ours, library(d, H, batch_first=True))
    out, weights = layer(batch, batch, batch, average_attn_weights=False)
    equal(out, ours(batch))
    equal(weights, ours.weights)
    print(f"{library.__module__:28} same outputs, same weights")

# %% [markdown]
# ## 3. Attention is linear in its values
#
# Once the weights $A$ are known, equation (1) is a matrix product, $A V$. Attention is therefore **linear in the
# values**: a sum of values gives the sum of the outputs, and doubled values give doubled outputs. It is *not* linear
# in queries and keys, because they pass through the softmax. We check both with numbers:

# %%
q, k, v, more = torch.randn(4, T, C).unbind()
combined = attention(q, k, 2 * v + 3 * more)[0]
apart = 2 * attention(q, k, v)[0] + 3 * attention(q, k, more)[0]
equal(combined, apart)
print(f"values:  largest difference between f(2a + 3b) and 2f(a) + 3f(b): {(combined - apart).abs().max():.1e}")

combined = attention(2 * q + 3 * more, k, v)[0]
apart = 2 * attention(q, k, v)[0] + 3 * attention(more, k, v)[0]
print(f"queries: largest difference between f(2a + 3b) and 2f(a) + 3f(b): {(combined - apart).abs().max():.1e}")

# %% [markdown]
# We can say more. Each row of $A$ is positive and sums to one, so every output is a weighted mean of the values. It
# lies inside their **convex hull**, the smallest convex region around them, and no query can change that. The picture
# shows six values in the plane and the outputs of 400 random queries. Short queries give nearly equal weights, and the
# outputs crowd around the mean. Long queries pick single values, and the outputs move towards the corners; they never
# leave the polygon.

# %%
values = torch.tensor([[-1.6, -0.7], [-0.5, 1.3], [0.2, -1.2], [1.4, 0.9], [1.7, -0.6], [0.1, 0.2]])
keys = torch.randn(6, 8)
hull = values[ConvexHull(values).vertices]
figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.5), layout="constrained", sharex=True, sharey=True)
for ax, length in zip(axes, (0.5, 2.0, 8.0), strict=True):
    outputs, _ = attention(length * torch.randn(400, 8), keys, values)
    ax.fill(*hull.T, color=COLOURS[0], alpha=0.1, linewidth=0)
    ax.scatter(*outputs.T, s=3, color=COLOURS[0], linewidths=0, label="outputs")
    ax.scatter(*values.T, s=28, color=COLOURS[1], edgecolor="black", linewidth=0.6, label="values")
    ax.set_title(f"queries × {length:g}", fontsize=9)
    ax.set_aspect("equal")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)

points = outputs.unsqueeze(1) - hull  # of the longest queries: inside, each lies on the same side of all edges
edges = hull.roll(-1, 0) - hull
assert (edges[:, 0] * points[..., 1] - edges[:, 1] * points[..., 0] > -1e-5).all()

# %% [markdown]
# So attention moves information between tokens, but it creates nothing new *within* a token. With fixed weights, even
# a stack of attention layers is one linear map. Whatever a network computes beyond averages must come from the
# softmax or from something between the attention layers.
#
# ## 4. The block: feed-forward network, Add & Norm
#
# That something is a **feed-forward network** (FFN), two linear maps with a non-linearity between them, applied to
# each token by itself:
#
# $$ \mathrm{FFN}(x) = \max(0,\; x W_1 + b_1)\, W_2 + b_2 . \tag{4} $$
#
# The division of labour is strict: the weighted average mixes tokens and treats all channels of a head alike; the FFN
# mixes channels and treats all tokens alike. Around both of them the Transformer puts **Add & Norm**, a skip
# connection ([He et al.](https://arxiv.org/abs/1512.03385)) and a layer normalisation ([Ba et
# al.](https://arxiv.org/abs/1607.06450)):
#
# $$
# y = \mathrm{LayerNorm}\big(x + \mathrm{MultiHead}(x)\big), \qquad
# z = \mathrm{LayerNorm}\big(y + \mathrm{FFN}(y)\big). \tag{5}
# $$
#
# The skip connection keeps what a token already knows, so that a layer only has to learn what to add, and gives
# gradients a short way back. The normalisation subtracts the mean of a token's channels and divides by their standard
# deviation, which keeps numbers at the same scale in every layer. Here is the block as the paper draws it, and beside
# it the inside of multi-head attention:


# %%
def box(ax, x, y, text, colour, width=2.2, height=0.55):
    """A rounded box around a centre."""
    corner = x - width / 2, y - height / 2
    style = {"boxstyle": "round,pad=0.02,rounding_size=0.1", "linewidth": 0.8, "edgecolor": "black"}
    ax.add_patch(FancyBboxPatch(corner, width, height, facecolor=colour, zorder=2, **style))
    ax.text(x, y, text, ha="center", va="center", fontsize=8, zorder=3)


def arrow(ax, *points):
    """A line through the points, with a head at the last one."""
    ax.plot(*zip(*points[:-1], strict=True), color="black", linewidth=1, zorder=1)
    ax.annotate("", points[-1], points[-2], arrowprops={"arrowstyle": "-|>", "lw": 1, "color": "black"}, zorder=1)


ORANGE, BLUE, YELLOW, GREY = "#F6C9A8", "#BBD9EC", "#F3EFA6", "#E6E6E6"  # pale, and apart in grey as well
figure, (left, right) = plt.subplots(1, 2, figsize=(6.8, 4.0), layout="constrained")
box(left, 0, 1.2, "multi-head attention", ORANGE, 2.6)
box(left, 0, 2.3, "Add & Norm", YELLOW)
box(left, 0, 3.7, "feed-forward", BLUE)
box(left, 0, 4.8, "Add & Norm", YELLOW)
for below, above in ((-0.2, 0.92), (1.48, 2.02), (2.58, 3.42), (3.98, 4.52), (5.08, 5.8)):
    arrow(left, (0, below), (0, above))
for start, end in ((0.3, 2.3), (3.0, 4.8)):
    arrow(left, (0, start), (1.7, start), (1.7, end), (1.13, end))
    left.text(1.78, (start + end) / 2, "skip\nconnection", va="center", fontsize=7)
for y, name in ((-0.45, "x"), (2.78, "y"), (6.0, "z")):
    left.text(0.0 if name != "y" else -0.2, y, f"${name}$", ha="center", fontsize=10)
left.text(-1.5, 1.2, "mixes\ntokens", ha="right", va="center", fontsize=7)
left.text(-1.5, 3.7, "mixes\nchannels", ha="right", va="center", fontsize=7)

for shift in (0.24, 0.12, 0.0):
    for place, name in ((-2.1, "$W^Q_h$"), (0, "$W^K_h$"), (2.1, "$W^V_h$")):
        box(right, place + shift, 1.1 + shift, name if not shift else "", GREY, 1.5)
    box(
        right,
        shift,
        2.8 + shift,
        "" if shift else "attention: softmax$(Q_h K_h^\\top / \\sqrt{C})\\, V_h$",
        ORANGE,
        5.4,
    )
box(right, 0, 4.2, "concatenate", YELLOW)
box(right, 0, 5.2, "$W^O$", GREY, 1.5)
for place in (-2.1, 0, 2.1):
    arrow(right, (0, -0.2), (0, 0.2), (place, 0.2), (place, 0.82))
    arrow(right, (place, 1.6), (place, 2.52))
arrow(right, (0, 3.3), (0, 3.92))
arrow(right, (0, 4.48), (0, 4.92))
arrow(right, (0, 5.48), (0, 5.95))
right.text(0, -0.5, "$x$", ha="center", fontsize=10)
right.text(1.2, 3.6, "$H$ heads", fontsize=7)
right.text(0, 6.1, "MultiHead$(x)$", ha="center", fontsize=8)
for ax, title in ((left, "one block of a Transformer"), (right, "inside multi-head attention")):
    ax.set_title(title, fontsize=9)
    ax.set_xlim(-3.2, 3.8)
    ax.set_ylim(-0.7, 6.3)
    ax.set_axis_off()

# %% [markdown]
# ## 5. Positions
#
# Equation (1) never asks where a token stands. Shuffle the rows of $X$ and the rows of the output are shuffled in the
# same way; nothing else changes. If order matters, it must be supplied. The paper adds to token $t$ a vector of sines
# and cosines of different wavelengths:
#
# $$
# PE_{t, 2i} = \sin(\omega_i t), \qquad PE_{t, 2i+1} = \cos(\omega_i t), \qquad \omega_i = 10000^{-2i/d}. \tag{6}
# $$


# %%
def sinusoids(length, d):
    """Equation (6): `[length, d]`."""
    omega = 10000.0 ** (-torch.arange(0, d, 2) / d)
    angles = torch.arange(length).unsqueeze(1) * omega
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


pe = sinusoids(100, 64)
equal(pe, gattn.nn.SinusoidalPositionalEncoding(64)(torch.zeros(100, 64)), atol=1e-5, rtol=0)

products = pe @ pe.T
figure, (left, right) = plt.subplots(1, 2, figsize=(6.8, 2.4), layout="constrained", width_ratios=[1.2, 1])
image = left.imshow(pe[:64].T, cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
left.set(xlabel="position t", ylabel="channel", title="sinusoids $PE_t$")
figure.colorbar(image, ax=left, pad=0.02).outline.set_visible(False)
for number, place in enumerate((20, 50, 80)):
    right.plot(
        torch.arange(100) - place, products[place], color=COLOURS[number], lw=5 - 2 * number, label=f"t = {place}"
    )
right.set(xlabel="distance s − t", title="dot product of $PE_t$ and $PE_s$", xlim=(-40, 40))
right.legend(frameon=False)
right.grid(alpha=0.25)

# %% [markdown]
# Read the heat map from top to bottom. The first channels oscillate quickly and tell neighbours apart; those in the
# middle change slowly and tell the beginning from the end; the last ones hardly change here and are meant for much
# longer sequences. It is a clock with many hands, or a binary number whose digits are smooth.
#
# Why *both* sines and cosines? Because $\sin a \sin b + \cos a \cos b = \cos(a - b)$. The dot product of two
# positions is
#
# $$ PE_t^\top PE_s = \sum_i \cos\big(\omega_i (t - s)\big), $$
#
# which depends on their **distance** alone: in the right-hand picture, the curves of three positions lie on top of
# each other. The same identity makes $PE_{t+s}$ a rotation of $PE_t$ by angles that depend on $s$ only, so that a
# linear map can express "the token three places before me". Both claims, in numbers:

# %%
omega = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
distance = torch.arange(100) - torch.arange(100).unsqueeze(1)
equal(products, (distance.unsqueeze(-1) * omega).cos().sum(-1), atol=1e-4, rtol=0)

sines, cosines = pe[:90, 0::2], pe[:90, 1::2]
turn = 3 * omega  # one rotation for all positions
turned = torch.stack([sines * turn.cos() + cosines * turn.sin(), cosines * turn.cos() - sines * turn.sin()], -1)
equal(turned.flatten(1), pe[3:93], atol=1e-4, rtol=0)

# %% [markdown]
# ## 6. A Transformer in thirty lines
#
# Everything is there. The block is equation (5) around our `MultiHead`; the network is an embedding, the positions, a
# stack of blocks, and a linear map to the output. With `allowed` set to a lower triangle, tokens see only themselves
# and earlier ones, and the same lines are a language model like GPT.


# %%
class Block(nn.Module):
    def __init__(self, d, heads, hidden):
        super().__init__()
        self.attention, self.norm1, self.norm2 = MultiHead(d, heads), nn.LayerNorm(d), nn.LayerNorm(d)
        self.ffn = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, d))

    def forward(self, x, allowed=None):
        x = self.norm1(x + self.attention(x, allowed))
        return self.norm2(x + self.ffn(x))


class Transformer(nn.Module):
    def __init__(self, tokens, d=64, heads=4, hidden=128, layers=2):
        super().__init__()
        self.embed, self.read = nn.Embedding(tokens, d), nn.Linear(d, tokens)
        self.blocks = nn.ModuleList(Block(d, heads, hidden) for _ in range(layers))

    def forward(self, tokens, allowed=None):  # tokens: [B, T]
        x = self.embed(tokens)
        x = x + sinusoids(tokens.size(1), x.size(-1))
        for block in self.blocks:
            x = block(x, allowed)
        return self.read(x)


def count_lines(*parts):
    """Lines of code of functions and classes, without empty ones."""
    methods = [
        [part] if inspect.isfunction(part) else filter(inspect.isfunction, vars(part).values()) for part in parts
    ]
    lines = [line for method in chain(*methods) for line in inspect.getsource(method).splitlines()]
    return sum(bool(line.strip()) for line in lines) + sum(inspect.isclass(part) for part in parts)


print(count_lines(MultiHead, Block, Transformer), "lines, and", count_lines(attention, sinusoids), "for (1) and (6)")

# %% [markdown]
# Now the library. gattn's `TransformerEncoderLayer` takes the same arguments as PyTorch's and has the same parameter
# names. We copy our weights into it and compare, with and without the triangle (a `CompleteGraph` that is causal):


# %%
def copy_block(ours, theirs):
    """Loads the weights of our block into a library's."""
    copy_multi_head(ours.attention, theirs.self_attn)
    pairs = (ours.ffn[0], theirs.linear1), (ours.ffn[2], theirs.linear2)
    for mine, other in (*pairs, (ours.norm1, theirs.norm1), (ours.norm2, theirs.norm2)):
        other.load_state_dict(mine.state_dict())
    return theirs


T, d, H = 12, 64, 4
block = Block(d, H, hidden=128)
with torch.no_grad():
    for norm in (block.norm1, block.norm2):  # fresh norms multiply by one and add zero, which would hide a mistake
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-0.5, 0.5)
layer = copy_block(block, gattn.nn.TransformerEncoderLayer(d, H, 128, dropout=0.0, batch_first=True))
batch, triangle = torch.randn(3, T, d), torch.ones(T, T, dtype=torch.bool).tril()
equal(layer(batch), block(batch))
equal(layer(batch, graph=gattn.CompleteGraph(T, causal=True)), block(batch, triangle))

torchs = copy_block(block, torch.nn.TransformerEncoderLayer(d, H, 128, dropout=0.0, batch_first=True))
equal(torchs(batch), block(batch))
print("our block, gattn's and PyTorch's: the same numbers")

# %% [markdown]
# ### Does it learn?
#
# A toy task that needs attention *and* positions: write a random sequence of 12 digits backwards. Token $t$ has to
# find token $11 - t$, wherever that is, and say its digit. For comparison we train the same network without
# positions. Guessing is right one time in ten.


# %%
class NoPositions(Transformer):
    def forward(self, tokens, allowed=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, allowed)
        return self.read(x)


def train_to_reverse(model, steps=400):
    """Trains; returns the part of the digits that are right, step by step. Every batch is new."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    curve = []
    for _ in range(steps):
        digits = torch.randint(10, (64, 12))
        logits, wanted = model(digits), digits.flip(1)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append((logits.argmax(-1) == wanted).float().mean().item())
    return curve


figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 2.9), layout="constrained", width_ratios=[1.4, 1])
for number, (name, kind) in enumerate({"with positions": Transformer, "without positions": NoPositions}.items()):
    torch.manual_seed(1)
    model = kind(tokens=10)
    curve = train_to_reverse(model)
    print(f"{name:18} {sum(curve[-20:]) / 20:6.1%} of the digits right, the mean of the last 20 batches")
    left.plot(100 * torch.tensor(curve), color=COLOURS[number], label=name)
    if kind is Transformer:
        trained = model
others = F.one_hot(torch.randint(10, (10_000, 11)), 10).sum(1)  # how often each digit occurs in the other 11 places
print(f"naming the most frequent digit of the other places is right for {others.amax(1).float().mean() / 11:.1%}")
left.axhline(10, color="black", linewidth=0.8, linestyle=":", label="guessing")
left.set(xlabel="step", ylabel="digits right, %", ylim=(0, 103), title="writing 12 digits backwards, one seed")
left.legend(frameon=False, loc="center right")
digits = torch.randint(10, (1, 12))
trained(digits)
weights = torch.stack([block.attention.weights[0] for block in trained.blocks])  # [layers, H, T, T]
backwards = weights[..., torch.arange(12), torch.arange(11, -1, -1)].mean(-1)  # the weight on the right place
layer, head = divmod(int(backwards.argmax()), H)
title = f"layer {layer}, head {head}"
ax = attention_matrix(weights[layer, head].detach(), range(12), range(12), ax=right, maximum=1.0, title=title)

# %% [markdown]
# With positions, the network solves the task within about a hundred steps. The picture on the right shows how, by the
# head that looks most consistently at the right place: its weights lie on the other diagonal, which joins the first
# token to the last and the last to the first. Without positions, the network knows which digits occur but not where,
# and stays far behind. (It beats guessing because it can name the digit that occurs most often in the other eleven
# places. The last line printed above says how far this trick gets.)

# %% [markdown]
# ## 7. Why not a recurrent or a convolutional network?
#
# The paper compares layers by three numbers. One is the amount of work. The other two are about the *graph of the
# computation*, which has a node for every vector and an arrow wherever one is computed from another:
#
# - **Path length.** How many steps lie between the first input and the last output? A signal, and later its gradient,
#   must survive all of them.
# - **Parallelism.** What is the longest chain of steps that must wait for each other? More processors cannot shorten
#   it.
#
# We do not copy the paper's table but build these graphs, for four kinds of layers: a recurrent network (RNN);
# convolutions of width 3, in as many layers as it takes until the last output sees the first input; *dilated*
# convolutions, which read the token itself and the one 1, 2, 4, … places before it, with twice the distance in each
# layer (as in [WaveNet](https://arxiv.org/abs/1609.03499)); and one layer of attention.


# %%
def computation(kind, n):
    """The graph of a computation on n tokens; nodes are (layer, position), layer 0 is the input."""
    graph = nx.DiGraph()
    if kind == "RNN":
        graph.add_edges_from(((0, t), (1, t)) for t in range(n))
        graph.add_edges_from(((1, t), (1, t + 1)) for t in range(n - 1))
    elif kind == "attention":
        graph.add_edges_from(((0, s), (1, t)) for s in range(n) for t in range(n))
    else:
        seen, layer = 0, 0
        while seen < n - 1:
            reach = 2**layer if kind == "dilated" else 1
            offsets = (0, reach) if kind == "dilated" else (-1, 0, 1)
            reads = [(t - offset, t) for t in range(n) for offset in offsets if 0 <= t - offset < n]
            graph.add_edges_from(((layer, s), (layer + 1, t)) for s, t in reads)
            seen, layer = seen + reach, layer + 1
    return graph


def last_node(graph, n):
    """The last position of the last layer."""
    return max(layer for layer, _ in graph), n - 1


kinds = ["RNN", "convolution", "dilated", "attention"]
figure, axes = plt.subplots(1, 4, figsize=(6.8, 2.1), layout="constrained")
for ax, kind, colour in zip(axes, kinds, COLOURS, strict=False):
    graph = computation(kind, 6)
    pos = {(layer, t): (t, layer) for layer, t in graph}
    path = nx.shortest_path(graph, (0, 0), last_node(graph, 6))
    nx.draw_networkx_edges(graph, pos, ax=ax, edge_color="#BBBBBB", width=0.7, arrowsize=5, node_size=25)
    nx.draw_networkx_nodes(graph, pos, ax=ax, node_color="black", node_size=14)
    steps = list(pairwise(path))
    nx.draw_networkx_edges(graph, pos, steps, ax=ax, edge_color=colour, width=2, arrowsize=9, node_size=25)
    ax.set_title(f"{kind}: path of {len(steps)}", fontsize=9)
    ax.set_ylim(-0.4, 5.4)
    ax.set_axis_off()

# %% [markdown]
# Inputs are at the bottom, layers go upwards, and the coloured path is the shortest one from the first input to the
# last output. Now for longer sequences: path length, the longest chain, and the multiplications of one layer with 64
# channels. The last are counted by PyTorch while the layers run (they include the linear maps for queries, keys,
# values and outputs).


# %%
def multiplications(kind, n, d=64):
    """Multiplications of one layer, in millions."""
    x = torch.randn(1, n, d)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if kind == "RNN":
            cell, state = nn.RNNCell(d, d), torch.zeros(1, d)
            for t in range(n):
                state = cell(x[:, t], state)
        elif kind == "attention":
            MultiHead(d, 4)(x)
        else:
            width = 2 if kind == "dilated" else 3
            nn.Conv1d(d, d, width)(F.pad(x.transpose(1, 2), (width - 1, 0)))
    return counter.get_total_flops() / 2e6  # a multiplication and an addition count as two


lengths = [16, 64, 256]
print(f"{'':12}" + "".join(f"{title:^30}" for title in ("path length", "longest chain", "million multiplications")))
print(f"{'tokens':12}" + "".join(f"{n:10}" for _ in range(3) for n in lengths))
paths = {}
for kind in kinds:
    graphs = [computation(kind, n) for n in lengths]
    ends = [last_node(graph, n) for graph, n in zip(graphs, lengths, strict=True)]
    paths[kind] = [nx.shortest_path_length(graph, (0, 0), end) for graph, end in zip(graphs, ends, strict=True)]
    chains = [nx.dag_longest_path_length(graph) for graph in graphs]
    work = [multiplications(kind, n) for n in lengths]
    columns = [*(f"{number:10}" for number in paths[kind] + chains), *(f"{number:10.2f}" for number in work)]
    print(f"{kind:12}" + "".join(columns))

# %% [markdown]
# Attention has paths of length one and chains of length one, whatever the length of the sequence. An RNN has both as
# long as the sequence: it cannot start with the last token before it has finished with all others. Dilated
# convolutions lie between, with a logarithm. (The convolutions' multiplications are those of *one* layer; their path
# length says how many layers they need.)
#
# The price is in the last columns. From 64 to 256 tokens, four times as many, an RNN or a convolution needs four
# times the multiplications; attention needs eight times as many, because its two products with the $T \times T$
# weights grow with $T^2$.
#
# Does a short path help? Here are the *gradients* of the last output with respect to each input, in freshly
# initialised networks, relative to the gradient of the last input: the sizes of what training can learn from.

# %%
n, d = 32, 64


def influence(network):
    """The size of the last output's gradient with respect to each input, the mean of 20 inputs."""
    x = torch.randn(20, n, d, requires_grad=True)
    out = network(x)[:, -1]
    (gradient,) = torch.autograd.grad((out * torch.randn_like(out)).sum(), x)
    return gradient.norm(dim=-1).mean(0)


class Convolutions(nn.Module):
    def __init__(self, depth):
        super().__init__()
        layers = [layer for _ in range(depth) for layer in (nn.Conv1d(d, d, 3, padding="same"), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x):
        return self.layers(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.RNN):
    def forward(self, x):
        return super().forward(x)[0]


depth = nx.shortest_path_length(computation("convolution", n), (0, 0), (n - 1, n - 1))
torch.manual_seed(0)
networks = {"RNN": Recurrent(d, d, batch_first=True), "convolution": Convolutions(depth), "attention": MultiHead(d, 4)}
figure, ax = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
for kind, network in networks.items():
    sizes = influence(network)
    relative = sizes / sizes[-1]
    print(f"{kind:12} gradient of the first input: {relative[0]:.0e} of the last one's")
    reached = relative > 0  # what underflows is not drawn
    distances = torch.arange(n - 1, -1, -1)
    ax.plot(distances[reached], relative[reached], "o-", markersize=2.5, color=COLOURS[kinds.index(kind)], label=kind)
assert influence(Convolutions(depth - 1))[0] == 0 < influence(networks["convolution"])[0]
ax.set(xlabel="distance between input and output", ylabel="gradient, relative", yscale="log")
ax.set_title(f"what reaches the last of {n} tokens, fresh networks, one seed", fontsize=9)
ax.legend(frameon=False)
ax.grid(alpha=0.25)

# %% [markdown]
# In the recurrent network, the gradient falls by about the same factor with every step, that is, exponentially.
# Through the convolutions, inputs in the middle are reached on many paths, but the farther away an input is, the
# fewer paths there are, until a single one is left. Gates ([LSTM](https://doi.org/10.1162/neco.1997.9.8.1735)) and
# skip connections were invented against such losses. Attention needs neither here: apart from the token itself, all
# distances are alike to it. (The `assert` in the cell confirms the path length of the convolutions: with one layer
# fewer, the first input has no influence at all.)

# %% [markdown]
# ## Part two: a graph attention network
#
# ## 8. GAT, and two ways to merge its heads
#
# In a Transformer everybody attends to everybody. In a graph, node $i$ attends to its neighbours $\mathcal{N}(i)$ and
# to itself. GAT uses the same softmax and the same weighted sum; its score is a small network instead of a dot
# product. One matrix $W$ serves as query, key and value map, and two vectors say how important node $i$ is as a
# target and node $j$ as a source:
#
# $$
# h_i = W x_i, \qquad
# e_{ij} = \mathrm{LeakyReLU}\big(a_{dst}^\top h_i + a_{src}^\top h_j\big), \qquad
# \alpha_{ij} = \frac{\exp e_{ij}}{\sum_{l \in \mathcal{N}(i) \cup \{i\}} \exp e_{il}}, \qquad
# \mathrm{head}_i = \sum_{j \in \mathcal{N}(i) \cup \{i\}} \alpha_{ij} h_j . \tag{7}
# $$
#
# (The paper writes one vector $a$ and concatenates, $a^\top [h_i, h_j]$; cut $a$ in two and you have the sum above.)
# A graph is a list of edges, `edge_index`, with sources in the first row and targets in the second. Three operations
# replace the matrix products: *gather* what belongs to the two ends of each edge (`h[source]`), compute something for
# each edge, and *scatter*, that is, add up the edges of each target (`index_add`).
#
# Several heads are merged in one of two ways:
#
# $$
# \text{hidden layers: } [\mathrm{head}_1, \ldots, \mathrm{head}_H], \qquad
# \text{last layer: } \frac{1}{H} \sum_h \mathrm{head}_h . \tag{8}
# $$


# %%
class GATLayer(nn.Module):
    def __init__(self, in_channels, channels, heads, concat=True):
        super().__init__()
        self.heads, self.concat = heads, concat
        self.w = nn.Linear(in_channels, heads * channels, bias=False)
        self.a_src, self.a_dst = (nn.Parameter(torch.randn(heads, channels) / math.sqrt(channels)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(heads * channels if concat else channels))

    def forward(self, x, edge_index):
        source, target = edge_index
        h = self.w(x).unflatten(-1, (self.heads, -1))  # [N, H, C]
        logits = (h * self.a_dst).sum(-1)[target] + (h * self.a_src).sum(-1)[source]  # [E, H]
        logits = F.leaky_relu(logits, 0.2)
        scores = (logits - logits.detach().max()).exp()  # no overflow; it cancels in the next line
        alpha = scores / torch.zeros(h.shape[:2]).index_add(0, target, scores)[target]
        out = torch.zeros_like(h).index_add(0, target, alpha.unsqueeze(-1) * h[source])  # [N, H, C]
        self.alpha = alpha
        return (out.flatten(1) if self.concat else out.mean(1)) + self.bias


class GAT(nn.Module):
    def __init__(self, in_channels, channels, classes, heads):
        super().__init__()
        self.first = GATLayer(in_channels, channels, heads)
        self.last = GATLayer(heads * channels, classes, heads, concat=False)

    def forward(self, x, edge_index):
        return self.last(F.elu(self.first(x, edge_index)), edge_index)


print(count_lines(GATLayer, GAT), "lines")

# %% [markdown]
# Our graph is [Zachary's karate club](https://en.wikipedia.org/wiki/Zachary%27s_karate_club): 34 members, and an edge
# between two members who met outside the club. Self-loops are added, so that a node attends to itself as well. With
# the same weights, gattn's layer, PyG's layer and ours give the same numbers, for both ways of merging:

# %%
club = KarateClub()[0]
N = club.num_nodes
edge_index = torch.cat([club.edge_index, torch.arange(N).expand(2, N)], dim=1)
print(f"{N} members, {club.num_edges // 2} friendships, {edge_index.size(1)} edges with both directions and self-loops")

features = torch.randn(N, 12)
for concat in (True, False):
    ours = GATLayer(12, 8, heads=4, concat=concat)
    nn.init.normal_(ours.bias)
    parameters = {
        "lin.weight": ours.w.weight,
        "att_src": ours.a_src[None],
        "att_dst": ours.a_dst[None],
        "bias": ours.bias,
    }
    for library in (gattn.nn.GATConv, GATConv):
        layer = library(12, 8, heads=4, concat=concat)
        layer.load_state_dict(parameters)
        out, (_, alpha) = layer(features, club.edge_index, return_attention_weights=True)
        equal(out, ours(features, edge_index))
        equal(alpha, ours.alpha)
    print(f"concat={concat!s:5}  output {list(out.shape)}: ours, gattn's and PyG's are the same")

# %% [markdown]
# Why two ways? **Concatenating** keeps the heads apart: the next layer gets $H \cdot C$ channels and can treat what
# each head found differently, exactly as $W^O$ does in a Transformer (the $W$ of the next layer takes its place). The
# **last** layer has no next layer, and its channels are the classes: concatenation would give $H$ logits per class,
# so the heads vote, and their mean counts. Averaging is a special case of the Transformer's merge, one in which $W^O$
# is not learnt: it consists of $H$ identity matrices on top of each other, divided by $H$.

# %%
concatenated, averaged = GATLayer(12, 8, heads=4), GATLayer(12, 8, heads=4, concat=False)
averaged.load_state_dict({**concatenated.state_dict(), "bias": averaged.bias})
w_o = torch.eye(8).repeat(4, 1) / 4  # [H * C, C]
equal(averaged(features, edge_index), concatenated(features, edge_index) @ w_o)

# %% [markdown]
# ## 9. Does it learn?
#
# The club fell apart in a quarrel, and the data set divides its members into four communities. The network learns
# from **one labelled member per community** and has to name the community of the other 30. Members have no features
# except their number (a one-hot vector), so everything must come from the friendships. One seed would say
# little; we train with ten.

# %%
labelled, y = club.train_mask, club.y
accuracies, models = [], []
for seed in range(10):
    torch.manual_seed(seed)
    model = GAT(N, 8, int(y.max()) + 1, heads=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(100):
        loss = F.cross_entropy(model(club.x, edge_index)[labelled], y[labelled])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (model(club.x, edge_index).argmax(-1) == y)[~labelled]
    accuracies.append(right.float().mean().item())
    models.append(model)
most_frequent = y[~labelled].bincount().max() / (~labelled).sum()
print(f"{labelled.sum()} labelled members; of the other {(~labelled).sum()}, right:", *(f"{a:.0%}" for a in accuracies))
print(f"mean {sum(accuracies) / 10:.0%}; naming the most frequent community would be right for {most_frequent:.0%}")

# %%
graph = to_networkx(club, to_undirected=True)
layout = nx.kamada_kawai_layout(graph)
places = torch.tensor([list(map(float, layout[node])) for node in range(N)])
predicted = models[0](club.x, edge_index).argmax(-1)
alpha = models[0].first.alpha.detach().mean(1)  # the mean of the heads
apart = edge_index[0] != edge_index[1]
arrows = nx.DiGraph(edge_index[:, apart].T.tolist())
widths = dict(zip(map(tuple, edge_index[:, apart].T.tolist()), (4 * alpha[apart]).tolist(), strict=True))
figure, axes = plt.subplots(1, 2, figsize=(6.8, 2.9), layout="constrained")
for ax, classes, title in zip(axes, (y, predicted), ("communities", "the network's answers, seed 0"), strict=True):
    drawn = [widths[edge] for edge in arrows.edges]
    nx.draw_networkx_edges(arrows, layout, ax=ax, width=drawn, edge_color="#777777", arrowsize=5, node_size=50)
    for kind, colour in enumerate(COLOURS[:4]):
        ax.scatter(*places[classes == kind].T, s=50, color=colour, label=f"community {kind}", zorder=3)
    ax.scatter(*places[labelled].T, s=140, facecolor="none", edgecolor="black", label="told to the network")
    wrong = classes != y
    ax.scatter(*places[wrong].T, s=120, marker="s", facecolor="none", edgecolor="black", linestyle=":", label="wrong")
    ax.set_title(title, fontsize=9)
    ax.set_axis_off()
legend = figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)

# %% [markdown]
# Large circles mark the four members whose community the network was told, dotted squares those that it got wrong.
# Arrows show the attention of the first layer, wider for larger weights (the mean of its heads). In this seed, the
# mistakes lie where communities touch: such a member has friends on both sides, and a single example per community
# does not tell the network which of them to believe.

# %% [markdown]
# ## 10. How far a graph network sees
#
# One layer of GAT looks at the neighbours. The second layer looks at neighbours whose features already contain
# *their* neighbours. After $k$ layers, a node's output depends on everything within $k$ hops and on nothing else: its
# **receptive field**. (The word comes from vision, where each neuron sees a patch of the image.)
#
# This can be measured instead of believed. We stack $k$ untrained layers, pick one member, and differentiate its
# output with respect to the features of all members. Where nothing of a member's features reaches the output, the
# gradient is exactly zero. The `assert` compares with the hops that networkx counts in the graph.

# %%
hops = nx.single_source_shortest_path_length(graph, 16)  # member 16 sits at the rim
hops = torch.tensor([hops[node] for node in range(N)])
assert hops.max() == 5
torch.manual_seed(0)
figure, axes = plt.subplots(1, 4, figsize=(6.8, 2.1), layout="constrained")
print("layers   members that are seen   part of the gradient that comes from 0, 1, 2, ... hops away")
for k, ax in enumerate(axes, start=1):
    layers = [GATLayer(16, 4, heads=4) for _ in range(k)]
    x = features = torch.randn(N, 16, requires_grad=True)
    for layer in layers:
        x = F.elu(layer(x, edge_index))
    (gradient,) = torch.autograd.grad(x[16].sum(), features)
    size = gradient.norm(dim=1)
    assert torch.equal(size > 0, hops <= k)
    shares = torch.zeros(int(hops.max()) + 1).index_add(0, hops, size / size.sum())
    print(
        f"{k:6} {(size > 0).sum():14} of {N}        ", "  ".join(f"{share:5.1%}" for share in shares[: k + 1].tolist())
    )
    nx.draw_networkx_edges(graph, layout, ax=ax, edge_color="#CCCCCC", width=0.6)
    for nodes, rim in ((size > 0, "black"), (size == 0, "#BBBBBB")):
        shade = WEIGHTS((size[nodes] / size.max()).sqrt().numpy()) if rim == "black" else "white"
        ax.scatter(*places[nodes].T, s=32, color=shade, edgecolors=rim, linewidths=0.7, zorder=3)
    ax.scatter(*places[16], s=90, facecolor="none", edgecolor=COLOURS[1], linewidth=1.5)
    ax.set_title("1 layer" if k == 1 else f"{k} layers", fontsize=9)
    ax.set_axis_off()

# %% [markdown]
# White members have no influence on the circled one; the darker a member, the more it has (on a square-root scale, for
# random weights and one seed). The field grows by one hop per layer; the members farthest away would need a fifth
# layer. Look also at the last row of the table. The eight members four hops away are seen, but together they contribute
# little more than one per cent of the gradient, since every layer averages over more and more members. Depth alone is
# therefore no cure for distance, which is related to what is known as *over-squashing* ([Alon and
# Yahav](https://arxiv.org/abs/2006.05205)).
#
# The Transformer is the case in which every token is a neighbour of every other. Its receptive field is complete
# after one layer, which is the path length of one in section 7. The price is $T^2$ pairs instead of $E$ edges, and
# that the structure, the order of the tokens or the shape of the graph, has to be supplied in other ways.
#
# ## What to remember
#
# | | Transformer | GAT |
# | --- | --- | --- |
# | who attends to whom | everybody to everybody, or to all before | along the edges, and to itself |
# | score | $q_i^\top k_j / \sqrt{C}$ | $\mathrm{LeakyReLU}(a_{dst}^\top h_i + a_{src}^\top h_j)$ |
# | weights | softmax | softmax |
# | heads are merged by | concatenation and $W^O$ | concatenation, or the mean in the last layer |
# | around attention | FFN, Add & Norm | a non-linearity (ELU) |
# | receptive field of $k$ layers | everything | $k$ hops |
#
# ## Exercises
#
# 1. Count the parameters of `MultiHead(d, H)`. How does the number depend on $H$? Check your answer with
#    `sum(p.numel() for p in MultiHead(64, 8).parameters())`.
# 2. Show that with $A$ fixed, $W^V_h$ and $W^O_h$ can be replaced by a single matrix per head. How many numbers would
#    it hold, and why does nobody do it?
# 3. Train the reversing Transformer with one layer and one head. Does it still work? Now ask it to *sort* the digits
#    instead. What do its heads look at?
# 4. Apply the trained model to sequences of 16 digits. Why does it fail, and on which positions first?
# 5. `GATLayer` subtracts the largest logit of the *whole graph* before `exp`. Construct a graph and logits for which
#    this gives 0 / 0. What should be subtracted instead? (`gattn` does, and so does PyG.)
# 6. Turn `attention` into GAT: build the $N \times N$ matrix `allowed` of the karate club, replace the score, and
#    check that you get the numbers of `GATLayer`.
# 7. Write the decoder's *cross-attention*: queries from one sequence, keys and values from another. Which line of
#    `MultiHead` has to change? Compare with `gattn.nn.MultiheadAttention(d, H, batch_first=True)(x, memory, memory)`.
# 8. Add a residual connection to `GATLayer`, stack ten of them, and repeat the experiment of section 10. What happens
#    to the gradients of the node itself, and of those far away?
