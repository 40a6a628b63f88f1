# %% [markdown]
# # Graph attention on Cora
#
# A graph attention network ([GAT](https://arxiv.org/abs/1710.10903)) lets each node average its neighbours, with
# weights that it computes from their features:
#
# $$
# x'_i = \sum_{j \in \mathcal{N}(i) \cup \{i\}} \alpha_{ij} W x_j,
# \qquad
# \alpha_{i\cdot} = \mathrm{softmax}_j\, \mathrm{LeakyReLU}\big(a_{dst}^\top W x_i + a_{src}^\top W x_j\big)
# $$
#
# We train one on Cora, look at what it has learnt, and then at its weights: who attends to whom, whether heads choose
# at all, and what would be lost if they did not. The second half is a problem that only attention can solve, where GAT
# fails and [GATv2](https://arxiv.org/abs/2105.14491) shows what it is for.

# %%
import copy
import warnings
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.manifold import TSNE
from torch_geometric.transforms import NormalizeFeatures

import gattn
from gattn.recording import AttentionRecord
from gattn.visualize import COLOURS, EDGES, attention_entropy, attention_graph, attention_matrix, entropy

warnings.filterwarnings("ignore", "Sparse")  # PyTorch says that its sparse matrices are in beta
plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The data
#
# Cora's nodes are papers on machine learning, its edges citations (taken in both directions), its features the words
# of each paper. Seven subjects; 20 papers of each are labelled for training, 500 validate, 1 000 test. As in the GAT
# paper, each row of features is divided by its sum. They stay sparse: 1.3 % of them are not zero.

# %%
data = NormalizeFeatures()(gattn.datasets.load("Cora"))
subjects = ["Theory", "Reinforcement", "Genetic", "Neural nets", "Probabilistic", "Case-based", "Rules"]
x, y, edge_index = data.x.to_sparse_csr(), data.y, data.edge_index
print(f"{data.num_nodes} papers, {data.num_edges} edges, {data.num_features} words")
print(f"{(data.x > 0).double().mean():.1%} of the features are not zero")
print(f"{(y[edge_index[0]] == y[edge_index[1]]).double().mean():.0%} of the edges stay within a subject")

# %% [markdown]
# ## Training
#
# The paper's network and its hyper-parameters: 8 heads of 8 channels, then one head that classifies, much dropout (on
# features, attention weights and values), Adam with weight decay. The paper trains until validation has not improved
# for 100 epochs; by that protocol, over 100 seeds, gattn's GAT gets 83.2 ± 0.6 % on test papers (see the
# [README](../README.md)). For pictures 150 epochs do.
#
# For comparison we train three others in the same way: **uniform** is GAT with the attention vectors $a$ fixed at zero,
# so all weights are $1 / |\mathcal{N}(i)|$; **GATv2**; and **Transformer**, dot products along the edges. Three seeds
# each, since one would say little.


# %%
def network(conv: str, seed: int) -> gattn.models.GAT:
    """The GAT paper's network for Cora, with one kind of layer or another."""
    torch.manual_seed(seed)
    return gattn.models.GAT(data.num_features, 64, 2, 7, conv=conv, heads=8, dropout=0.6, value_dropout=0.6)


def without_attention(seed: int) -> gattn.models.GAT:
    """A GAT in which each node weighs all neighbours alike, for ever."""
    model = network("gat", seed)
    for conv in model.convs:
        for vector in (conv.att_src, conv.att_dst):
            vector.data.zero_()
            vector.requires_grad_(False)
    return model


def accuracy(logits: torch.Tensor, mask: torch.Tensor) -> float:
    """The part of the papers in `mask` that are classified right."""
    return (logits.argmax(-1) == y)[mask].double().mean().item()


@torch.no_grad()
def predict(model: gattn.models.GAT) -> torch.Tensor:
    """Logits of all papers."""
    return model.eval()(x, edge_index)


def train(model: gattn.models.GAT) -> list[float]:
    """Trains; returns the accuracy on validation papers after every fifth epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=0.0005)
    curve = []
    for epoch in range(1, 151):
        model.train()
        loss = F.cross_entropy(model(x, edge_index)[data.train_mask], y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 5 == 0:
            curve.append(accuracy(predict(model), data.val_mask))
    return curve


# %%
makers = {
    "GAT": partial(network, "gat"),
    "uniform": without_attention,
    "GATv2": partial(network, "gatv2"),
    "Transformer": partial(network, "transformer"),
}
models: dict[str, list[gattn.models.GAT]] = {}
epochs = torch.arange(5, 151, 5)
figure, ax = plt.subplots(figsize=(7.5, 3), layout="constrained")
for (name, make), colour in zip(makers.items(), COLOURS, strict=False):
    models[name], rows = [], []
    for seed in range(3):
        models[name].append(make(seed))
        rows.append(train(models[name][-1]))
    curves = 100 * torch.tensor(rows)
    ax.plot(epochs, curves.mean(0), color=colour, label=name)
    ax.fill_between(epochs, curves.amin(0), curves.amax(0), color=colour, alpha=0.15, linewidth=0)
    tests = [100 * accuracy(predict(model), data.test_mask) for model in models[name]]
    print(f"{name:12} test accuracy", "  ".join(f"{test:.1f} %" for test in tests))
ax.set(xlabel="epoch", ylabel="validation accuracy, %", ylim=(50, 85), title="mean and range of three seeds")
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
ax.grid(alpha=0.25)

# %% [markdown]
# Keep one thing in mind for later: GAT's curve and that of uniform weights run into each other, and test accuracies
# differ more between seeds than between the two.
#
# ## The hidden layer
#
# What has the first layer made of the words? We map its 64 channels to the plane by
# [t-SNE](https://jmlr.org/papers/v9/vandermaaten08a.html), which keeps near what is near, and do the same with the
# words, for the 1 640 papers that train, validate or test. Above each map stands a number that does not depend on the
# map: which part of a paper's 10 nearest among all papers, in the full space, have its subject.

# %%
gat = models["GAT"][0]
with torch.no_grad():
    hidden = gat.act(gat.convs[0](x, edge_index))


def alike(features: torch.Tensor) -> float:
    """The part of papers' 10 nearest that have their subject."""
    distances = torch.cdist(features, features).fill_diagonal_(torch.inf)
    nearest = distances.topk(10, largest=False).indices
    return (y[nearest] == y.unsqueeze(1)).double().mean().item()


drawn = data.train_mask | data.val_mask | data.test_mask
components, scales, _ = torch.pca_lowrank(data.x, q=50)  # t-SNE is slow with 1 433 words
words = components * scales
figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.7), layout="constrained")
for ax, name, features, reduced in zip(axes, ["words", "hidden layer"], [data.x, hidden], [words, hidden], strict=True):
    places = TSNE(init="pca", max_iter=500, random_state=0).fit_transform(reduced[drawn].numpy())
    for subject, colour in zip(sorted(subjects), COLOURS, strict=False):
        chosen = places[y[drawn] == subjects.index(subject)]
        ax.scatter(*chosen.T, s=3, color=colour, linewidths=0, antialiased=False, label=subject)
    ax.set_title(f"{name}: {alike(features):.0%} of the nearest are alike", fontsize=10)
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False, markerscale=4)
for ax in axes:
    ax.set_axis_off()

# %% [markdown]
# By their words alone, most subjects lie mixed, with a few clusters at the rim. After one layer each has a region of
# its own, although the network has seen the labels of only 140 papers.
#
# ## Who attends to whom
#
# `gattn.record_attention` gathers the weights of every layer while a model runs. Here are those of one paper with
# neighbours of several subjects: an arrow is wider and darker the larger its weight, and the rim of the middle is its
# weight on itself.

# %%
with gattn.record_attention(gat) as records:
    predict(gat)
for name, (record,) in records.items():
    print(f"{name}: weights {list(record.weights.shape)} on edges {list(record.edge_index.shape)}")
first, last = (records[name][0] for name in ("convs.0", "convs.1"))
sources, targets = first.edge_index
degrees = targets.bincount()  # neighbours and itself

others = torch.zeros(data.num_nodes, 7).index_put((targets, y[sources]), torch.ones(len(targets)), accumulate=True)
paper = int(((others > 0).sum(1) * (degrees == 10)).argmax())
figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.7), layout="constrained")
named = [subjects[kind] for kind in y.tolist()]
for ax, record, title in zip(axes, (first, last), ("first layer, head 0", "last layer"), strict=True):
    attention_graph(
        record.edge_index, record.weights, head=0, node=paper, classes=named, ax=ax, title=title, maximum=0.2
    )
    ax.margins(0.15)
legend = axes[0].get_legend()
names = [text.get_text() for text in legend.get_texts()]
for ax in axes:
    ax.get_legend().remove()
figure.legend(legend.legend_handles, names, loc="outside lower center", ncols=len(names), frameon=False)
bar = figure.colorbar(plt.cm.ScalarMappable(plt.Normalize(0, 0.2), EDGES), ax=axes, shrink=0.8, aspect=25)
bar.set_label("attention weight α")
bar.set_ticks([0.0, 0.05, 0.1, 0.15, 0.2])
bar.outline.set_visible(False)

# %% [markdown]
# All arrows look alike: of ten sources, each gets about a tenth. The preferences that there are show only as
# percentages above or below the uniform weight. For this paper, all heads of the first layer, and the last layer's one:

# %%
mine = targets == paper
ratio = torch.cat([first.weights[mine], last.weights[mine]], dim=1) * degrees[paper]
names = [f"{subjects[y[j]]} {'itself' if j == paper else int(j)}" for j in sources[mine]]
figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
percent = 100 * (ratio - 1)
ax.imshow(percent, cmap="PuOr_r", vmin=-20, vmax=20, aspect="auto")
for row, column in torch.cartesian_prod(torch.arange(percent.size(0)), torch.arange(percent.size(1))).tolist():
    ax.text(column, row, f"{percent[row, column]:+.1f}", ha="center", va="center", fontsize=8)
ax.set_xticks(range(9), [*(f"head {head}" for head in range(8)), "last layer"])
ax.set_yticks(range(len(names)), names)
ax.set_title("weight above or below 1 / |N(i)|, %", fontsize=10)
ax.tick_params(length=0)

# %% [markdown]
# ## Do heads choose?
#
# The entropy of a target's weights, $H_i = -\sum_j \alpha_{ij} \ln \alpha_{ij}$, says how much its head chooses: zero
# if it picks one neighbour, $\ln |\mathcal{N}(i)|$ if it weighs all alike. Below are histograms over all papers, head
# by head, of the first layers. Behind the blue ones stand those of uniform weights, in grey. (The bars to the left are
# papers with two, three, four neighbours, themselves included.)


# %%
def weights_of(model: gattn.models.GAT) -> list[AttentionRecord]:
    """What each layer attends to."""
    with gattn.record_attention(model) as records:
        predict(model)
    return [calls[0] for calls in records.values()]


def freedom(record: AttentionRecord) -> float:
    """Entropy as a part of what it could be, the mean over papers and heads: 1 is uniform."""
    nats, uniform = entropy(record.weights, record.edge_index)
    return (nats / uniform.unsqueeze(1))[uniform > 0].mean().item()


figure, axes = plt.subplots(1, 3, figsize=(9, 3.6), layout="constrained", sharex=True)
for ax, name in zip(axes, ("GAT", "GATv2", "Transformer"), strict=True):
    record = weights_of(models[name][0])[0]
    attention_entropy(record.weights, record.edge_index, ax=ax, title=f"{name}: {freedom(record):.2%} of uniform")
    if ax is not axes[2]:
        ax.get_legend().remove()
    if ax is not axes[0]:
        ax.set_yticklabels([])

# %% [markdown]
# There is no grey to be seen: blue covers it. On Cora, trained like this, **heads do not choose**. What do the small
# preferences do for the result? We overwrite what makes the logits of the trained networks with zeros, so that all
# neighbours count alike, and test again, without any further training.


# %%
def made_uniform(model: gattn.models.GAT) -> gattn.models.GAT:
    """A copy whose logits are all zero; everything else is as trained."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if ".att" in name or ".lin_key" in name:
            parameter.data.zero_()
    assert all(freedom(record) > 1 - 1e-6 for record in weights_of(model))
    return model


def mean_test(trained: list[gattn.models.GAT]) -> float:
    """Test accuracy in percent, the mean over seeds."""
    return 100 * sum(accuracy(predict(model), data.test_mask) for model in trained) / len(trained)


print("              part of the largest entropy    test accuracy, %")
print("              first layer     last layer     trained     made uniform")
for name, trained in models.items():
    records = zip(*map(weights_of, trained), strict=True)
    one, two = (sum(map(freedom, layer)) / len(layer) for layer in records)
    flat = mean_test([made_uniform(model) for model in trained])
    print(f"{name:13} {one:11.2%} {two:14.2%} {mean_test(trained):11.1f} {flat:16.1f}")

# %% [markdown]
# Nothing is lost: made uniform, the networks' accuracies change by at most 0.3 points, and those that were trained with
# uniform weights do as well. Two reasons suggest themselves. An average is hard to beat where 81 % of the edges stay
# within a subject. And much holds the logits near zero: features that sum to one, weight decay on $a$, and dropout,
# under which no head can rely on a single neighbour. The cell below tests neither; what it shows is what heads do
# instead.
#
# ## What heads do
#
# If heads do not differ in whom they attend to, then in what? In what they hand on: each has a $W$ of its own. We keep
# one head of the hidden layer at a time (the others' channels are set to zero) and see which subjects the last layer
# still finds. Then we take one away and keep the others.


# %%
def recalls(keep: list[int]) -> torch.Tensor:
    """The part of each subject's test papers that is found with these heads of the hidden layer, `[7]`; then of all."""
    kept = torch.zeros(8, 1)
    kept[keep] = 1.0
    with torch.no_grad():
        logits = gat.convs[1]((hidden.view(-1, 8, 8) * kept).flatten(1), edge_index)
    right = (logits.argmax(-1) == y)[data.test_mask].double()
    kinds = y[data.test_mask]
    return torch.stack([*(right[kinds == subject].mean() for subject in range(7)), right.mean()])


everything = list(range(8))
torch.testing.assert_close(recalls(everything)[-1].item(), accuracy(predict(gat), data.test_mask))
alone = torch.stack([*(recalls([head]) for head in everything), recalls(everything)])
without = torch.stack([recalls([other for other in everything if other != head])[-1] for head in everything])

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=[2, 1])
rows = [*(f"head {head} alone" for head in everything), "all heads"]
attention_matrix(alone, rows, [*subjects, "all papers"], ax=left, maximum=1.0)
left.set(xlabel="", ylabel="", title="part of test papers classified right")
for i, j in torch.cartesian_prod(torch.arange(9), torch.arange(8)).tolist():
    colour = "white" if alone[i, j] > 0.5 else "black"
    left.text(j, i, f"{alone[i, j]:.2f}", ha="center", va="center", color=colour, fontsize=8)
left.set_aspect("auto")
right.plot(100 * without, everything, "o", color=COLOURS[0])
right.axvline(100 * alone[-1, -1].item(), color="black", linewidth=1)
right.set(xlim=(70, 90), yticks=everything, yticklabels=[f"without head {head}" for head in everything])
right.set(xlabel="test accuracy, % (line: all heads)")
right.invert_yaxis()

# %% [markdown]
# Alone, each head finds some subjects and is nearly blind to others, which are not the same from head to head; the best
# gets two papers of three, all together four of five. Yet none of them is needed: without any one, accuracy changes by
# less than two points. On Cora, heads are an ensemble of projections that share one average.
#
# ## Where attention must choose
#
# A dictionary of $k$ entries: $k$ sources carry a key and a value, $k$ targets only a key, and each target has an edge
# from every source. Which value belongs to its key? No average helps, since all dictionaries hold the same values in
# another order: each target must tell *its* source from the others. This is the lookup problem of [How Attentive are
# Graph Attention Networks?](https://arxiv.org/abs/2105.14491), where GAT fails. The two scores say why:
#
# $$
# s_\mathrm{GAT} = \mathrm{LeakyReLU}\big(a_q^\top W_q x_i + a_k^\top W_k x_j\big),
# \qquad
# s_\mathrm{GATv2} = a^\top\, \mathrm{LeakyReLU}\big(W_q x_i + W_k x_j\big)
# $$
#
# GAT's is an increasing function of $t_i + s_j$, one number for the target and one for the source. Whatever $t_i$ is,
# the source with the largest $s_j$ comes first: **all targets rank the sources alike**. In GATv2 the sum over channels
# comes after the nonlinearity, so the ranking can depend on who asks.
#
# Below both get the same layer around them. Each step draws 32 new dictionaries (a batch over one graph), so nothing
# can be memorised, and what they are tested on is new, too.


# %%
class Lookup(torch.nn.Module):
    """One layer of attention from keys with values to keys without."""

    def __init__(self, conv: type[torch.nn.Module], size: int, heads: int, channels: int = 64):
        super().__init__()
        self.keys = torch.nn.Embedding(size, channels)
        self.values = torch.nn.Embedding(size, channels)
        self.conv = conv((channels, channels), channels // heads, heads=heads, add_self_loops=False)
        self.read = torch.nn.Linear(channels, size)
        targets, sources = torch.cartesian_prod(torch.arange(size), torch.arange(size)).t()
        self.edge_index = torch.stack([sources, targets])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Logits of the value of each key, `[B, k, k]`, in dictionaries `values`, `[B, k]`."""
        targets = self.keys.weight.expand(len(values), -1, -1)
        sources = targets + self.values(values)
        return self.read(self.conv((sources, targets), self.edge_index))


def dictionaries(count: int, size: int) -> torch.Tensor:
    """The value of each key: permutations `[count, size]`."""
    return torch.rand(count, size).argsort(-1)


def fit(
    conv: type[torch.nn.Module], size: int, heads: int, *, steps: int = 300, draw: Any = dictionaries
) -> tuple[Lookup, float]:
    """A trained model and its accuracy on new dictionaries."""
    torch.manual_seed(0)
    model = Lookup(conv, size, heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        values = draw(32, size)
        loss = F.cross_entropy(model(values).flatten(0, 1), values.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    values = draw(500, size)
    with torch.no_grad():
        return model, (model(values).argmax(-1) == values).double().mean().item()


# %%
kinds = {
    "GAT, 1 head": (gattn.nn.GATConv, 1),
    "GAT, 8 heads": (gattn.nn.GATConv, 8),
    "GATv2, 1 head": (gattn.nn.GATv2Conv, 1),
}
sizes = [4, 6, 8, 10, 14, 20]
lookups, curves = {}, {}
for name, (conv, heads) in kinds.items():
    results = [fit(conv, size, heads) for size in sizes]
    lookups[name] = results[sizes.index(10)][0]
    curves[name] = [accuracy for _, accuracy in results]
    print(f"{name:14}", "  ".join(f"k={k}: {a:4.0%}" for k, a in zip(sizes, curves[name], strict=True)))

longer = {size: fit(gattn.nn.GATConv, size, heads=8, steps=1500)[1] for size in (10, 20)}
print("GAT, 8 heads, five times the steps:", "  ".join(f"k={k}: {a:.0%}" for k, a in longer.items()))

# %%
figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for (name, accuracies), colour in zip(curves.items(), COLOURS, strict=False):
    ax.plot(sizes, [100 * accuracy for accuracy in accuracies], "o-", color=colour, markersize=4, label=name)
ax.plot(
    list(longer), [100 * a for a in longer.values()], "x", color=COLOURS[1], label="GAT, 8 heads, 5 times the steps"
)
ax.plot(sizes, [100 / size for size in sizes], ":", color="black", label="guessing, 1/k")
ax.set(xlabel="entries of the dictionary, k", ylabel="right values, %", ylim=(0, 104), xticks=sizes)
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
ax.grid(alpha=0.25)

# %% [markdown]
# One head of GAT does little better than guessing, GATv2 gets 100 % at every size. Eight heads of GAT lie between, and
# fall as the dictionary grows; with five times the steps they come further, but not to where one head of GATv2 is. They
# have eight rankings to combine; and though targets share each, they do not share how steeply it falls: below zero the
# LeakyReLU shrinks differences to a fifth, and $t_i$ moves the logits there.
#
# The weights of the models for $k = 10$ in one dictionary show what they do. Rows are targets, columns sources; the
# diagonal holds the weight of each target on the source that it is asked about. The fourth model is GATv2 once more,
# trained and tested on dictionaries whose values are drawn independently, so that some occur twice and others not at
# all. The cell also checks the claim above, to the last rank.


# %%
def independent(count: int, size: int) -> torch.Tensor:
    """The value of each key, drawn without a look at the others."""
    return torch.randint(size, (count, size))


def weights_in(model: Lookup, values: torch.Tensor) -> torch.Tensor:
    """Who attends to whom in one dictionary: `[heads, targets, sources]`, in float64, so that ranks have no ties."""
    model = copy.deepcopy(model).double()
    with torch.no_grad(), gattn.record_attention(model) as records:
        model(values)
    size = values.size(1)
    return records["conv"][0].weights[0].t().reshape(-1, size, size)


other, right = fit(gattn.nn.GATv2Conv, 10, 1, draw=independent)
print(f"GATv2 on independent values: {right:.0%}")
torch.manual_seed(1)
values = dictionaries(1, 10)
alphas = {name: weights_in(model, values) for name, model in lookups.items()}
alphas["GATv2, independent"] = weights_in(other, independent(1, 10))

for name in ("GAT, 1 head", "GAT, 8 heads"):
    ranking = alphas[name].argsort(-1)
    assert (ranking == ranking[:, :1]).all(), "GAT's targets would disagree"
assert (alphas["GATv2, 1 head"][0].argmin(-1) == torch.arange(10)).all()
assert (alphas["GATv2, independent"][0].argmax(-1) == torch.arange(10)).all()

figure, axes = plt.subplots(1, 4, figsize=(9, 2.6), layout="constrained")
for ax, (name, alpha) in zip(axes, alphas.items(), strict=True):
    attention_matrix(alpha, head="mean", ax=ax, title=name + (", mean" if len(alpha) > 1 else ""))
    ax.set_ylabel("target" if ax is axes[0] else "")

# %% [markdown]
# With one head, GAT's columns are its ranking: whoever asks, the same sources are dark, steeply or flatly. GATv2's
# pictures depend on the row. But the third is not the diagonal that one expects: each target attends to **everything
# but** its own source. That works, too: all values occur once in a dictionary, so the one that is missing from the
# average is the answer. Where values are independent nothing can be concluded from the others, and the diagonal
# appears. (Each picture has its own scale, from zero to its largest weight.) Weights say where a network looks; what it
# concludes from there is another question.
#
# ## What to take along
#
# - On Cora, with the paper's recipe, graph attention is an average: neighbours are mostly of the same subject, and the
#   network does as well when its weights are made uniform. Its heads differ in what they hand on.
# - A picture of attention weights needs the uniform ones beside it, or one sees choices where there are none.
# - GAT's targets share one ranking a head. Where each target must choose for itself, take GATv2, or dot products, whose
#   ranking depends on the target as well.
#
# The [next notebook](03_graph_vs_sequence_attention.ipynb) puts the same layer on other graphs.
