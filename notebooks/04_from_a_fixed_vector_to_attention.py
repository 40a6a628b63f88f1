# %% [markdown]
# # From a fixed vector to attention
#
# In 2014, neural networks learnt to translate. [Cho et al.](https://arxiv.org/abs/1406.1078) and [Sutskever et
# al.](https://arxiv.org/abs/1409.3215) trained one recurrent network, the **encoder**, to read a sentence, and
# another, the **decoder**, to write its translation. All that passed between the two was one vector of a fixed size.
# In the same year, [Bahdanau et al.](https://arxiv.org/abs/1409.0473) let the decoder look back at the sentence while
# it wrote. They called the mechanism by which it looked back *attention*.
#
# This notebook follows that history:
#
# 1. What is wrong with a fixed vector?
# 2. What does it mean to read from a memory?
# 3. How is padding kept out of it?
# 4. How does Bahdanau's decoder work, step by step?
# 5. What does a trained decoder look at?
# 6. Must it look everywhere? Global and local attention ([Luong et al.](https://arxiv.org/abs/1508.04025))
# 7. Must it average? Soft and hard attention ([Xu et al.](https://arxiv.org/abs/1502.03044))
# 8. Can it look at an image?
#
# You need some linear algebra and the basics of PyTorch, including a recurrent layer such as `torch.nn.GRU`; nothing
# about attention is assumed. No data have to be downloaded. Everything is trained here, in a minute or two, so the
# models are small. Unless the text says otherwise, a picture shows one run with one random seed: other seeds give
# slightly different numbers.

# %%
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import gattn
from gattn.visualize import COLOURS, WEIGHTS, attention_matrix

torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 120, "font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
equal = torch.testing.assert_close

# %% [markdown]
# ## 1. The bottleneck
#
# The encoder reads the words $x_1, \dots, x_S$ of the source sentence one after the other and updates its state $h_j$.
# The decoder starts from the last state, and predicts each target word $y_t$ from the words before it:
#
# $$
# h_j = \mathrm{RNN}(x_j, h_{j-1}), \qquad c = h_S, \qquad
# s_t = \mathrm{RNN}([y_{t-1}; c],\, s_{t-1}), \qquad
# p(y_t \mid y_{<t}, x) = \mathrm{softmax}(V s_t)
# $$
#
# where $[\,\cdot\,;\,\cdot\,]$ concatenates vectors. Whatever the decoder is to know about the source must fit into
# $c$, which has as many numbers for a sentence of 4 words as for one of 40. That should hurt long sentences most. It
# does: the picture shows the results of this project's translation benchmark (German to English, short everyday
# sentences from Tatoeba, about 1.8 million parameters per model, three seeds). BLEU measures how many words and phrases
# a translation shares with human translations; 100 is the best.

# %%
root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "benchmarks" / "results").is_dir())
lines = (root / "benchmarks" / "results" / "translation" / "runs.jsonl").read_text().splitlines()
rows = [json.loads(line) for line in lines]
runs = [row for row in rows if "bins" in row]  # the others are trials, which chose the learning rates

bins = [part for part in runs[0]["bins"] if part["count"] > 50]  # few sentences make BLEU meaningless
names = {"none": "one vector", "additive": "attention (Bahdanau)", "dot": "attention (dot product)"}
bleu = {
    row: torch.tensor([[part["bleu"] for part in run["bins"][: len(bins)]] for run in runs if run["row"] == row])
    for row in names
}  # [seeds, bins]

figure, ax = plt.subplots(figsize=(4, 2.1), layout="constrained")
for (row, name), marker, colour in zip(names.items(), "xo^", ("black", COLOURS[0], COLOURS[1]), strict=True):
    ax.plot(bleu[row].mean(0), marker=marker, color=colour, label=name)
ax.set_xticks(range(len(bins)), [f"{part['low']} to {part['high']}\n({part['count']})" for part in bins])
ax.set(xlabel="words in the German sentence (number of test sentences)", ylabel="BLEU", ylim=(0, None))
ax.grid(axis="y", alpha=0.25)
ax.legend(frameon=False)

print("words      one vector   attention (Bahdanau)   ratio")
for part, fixed, attentive in zip(bins, bleu["none"].mean(0).tolist(), bleu["additive"].mean(0).tolist(), strict=True):
    print(f"{part['low']:2} to {part['high']:2}   {fixed:10.1f}   {attentive:20.1f}   {attentive / fixed:5.1f}")
spread = max((seeds.amax(0) - seeds.amin(0)).max() for seeds in bleu.values())
print(f"seeds of the same model differ by at most {spread:.1f} BLEU")

# %% [markdown]
# All models are worse at long sentences, which are harder. But one vector suffers more: Bahdanau's attention improves
# BLEU by about a sixth on the shortest sentences, and about doubles it on those of more than 8 words.
#
# Making $c$ larger only moves the problem. The idea of attention is to keep *all* states $h_1, \dots, h_S$, which are
# called the **memory**, and to let every step of the decoder compute a $c_t$ of its own from them.

# %% [markdown]
# ## 2. Reading from a memory
#
# How can one read from a memory whose size is not known in advance, by an operation that can be learnt by gradients?
# Statistics has had an answer since 1964. Suppose that the memory holds pairs $(k_j, v_j)$, measurements $v_j$ at
# places $k_j$, and that we would like to know the value at another place $q$. The estimator of [Nadaraya and
# Watson](https://en.wikipedia.org/wiki/Kernel_regression#Nadaraya%E2%80%93Watson_kernel_regression) averages all
# measurements, with larger weights for those that are close to $q$:
#
# $$
# f(q) = \sum_j \alpha_j(q)\, v_j, \qquad
# \alpha_j(q) = \frac{K(q - k_j)}{\sum_l K(q - k_l)}, \qquad
# K(u) = \exp\left(-\frac{u^2}{2 h^2}\right)
# $$
#
# In today's words: $q$ is a **query**, the $k_j$ are **keys**, the $v_j$ **values**, the $\alpha_j$ **attention
# weights**, and the whole operation is *attention pooling*. The weights are positive and sum to one. The width $h$
# decides how picky the average is.

# %%
keys = 5 * torch.rand(40).sort().values
values = torch.sin(2 * keys) + 0.4 * keys + 0.3 * torch.randn(40)
queries = torch.linspace(0, 5, 100)


def nadaraya_watson(queries: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """Returns the estimates, `[N]`, and the weights, `[N, M]`."""
    kernel = (-((queries.unsqueeze(1) - keys) ** 2) / (2 * width**2)).exp()
    weights = kernel / kernel.sum(1, keepdim=True)
    return weights @ values, weights


figure, axes = plt.subplots(2, 3, figsize=(6.4, 2.8), layout="constrained", sharey="row")
for (above, below), width in zip(axes.T, (2.0, 0.3, 0.03), strict=True):
    estimate, weights = nadaraya_watson(queries, width)
    above.plot(queries, torch.sin(2 * queries) + 0.4 * queries, ":", color="black", label="truth")
    above.plot(keys, values, "o", markersize=3, color="#999999", label="memory")
    above.plot(queries, estimate, color=COLOURS[1], label="estimate f(q)")
    above.set_title(f"width h = {width}")
    above.set(xlabel="query q")
    image = below.imshow(
        weights[::4], cmap=WEIGHTS, vmin=0, vmax=1, aspect="auto", extent=(0, 40, 5, 0), interpolation="nearest"
    )
    below.set(xlabel="key number j")
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
axes[1, 0].set_ylabel("query q")
bar = figure.colorbar(image, ax=axes[1], label="attention weight α", aspect=12)

# %% [markdown]
# A wide kernel (left) averages almost everything, and the estimate is flat. A narrow one (right) attends to a single
# neighbour, and the estimate copies its noise. In between (centre), each query averages a few neighbours.
#
# Dividing exponentials by their sum is a **softmax**. If we write $-(q - k)^2 / 2h^2$ as a **score** $s(q, k)$, then
#
# $$
# \alpha_j(q) = \mathop{\mathrm{softmax}}_j\; s(q, k_j).
# $$
#
# For the Gaussian kernel, the score is even a dot product: $-(q - k)^2 = 2qk - k^2 - q^2$, and the last term, which is
# the same for all keys, cancels in the softmax. What is left is the product of $(q, 1)$ and $(k, -k^2/2)$, divided by
# $h^2$. So a library for attention computes Nadaraya and Watson's estimator. `gattn.attend` takes queries, keys and
# values of shape `[number, heads, channels]`, here with one head:

# %%
width = 0.3
query = torch.stack([queries, torch.ones(100)], 1).unsqueeze(1) / width**2
key = torch.stack([keys, -(keys**2) / 2], 1).unsqueeze(1)
everybody = gattn.CompleteGraph(100, 40)  # 100 queries, each of which attends to all 40 keys
by_attention = gattn.attend(query, key, values.view(40, 1, 1), everybody, score=gattn.DotScore(1.0))

equal(by_attention.flatten(), nadaraya_watson(queries, width)[0], rtol=1e-3, atol=1e-4)
print(f"largest difference: {(by_attention.flatten() - nadaraya_watson(queries, width)[0]).abs().max():.0e}")

# %% [markdown]
# Two things are missing for translation. The keys of a sentence are not places on a line but states of an encoder, and
# what makes a key close to a query cannot be written down: the score has to be learnt. The score is what the papers of
# the following sections differ in.

# %% [markdown]
# ## 3. Padding, and where to put the mask
#
# Sentences have different lengths. To compute with several of them at once, one pads the short ones until all have the
# length of the longest. The softmax must not give any weight to padding. Take a sentence of three words with the
# scores 2, 1 and 0. Its padding consists of zeros, and zeros are likely to score 0. (They do with a dot product.)
#
# A mask is 1 for words and 0 for padding. One way to apply it is a common mistake, which is also found in print: to
# multiply the weights by the mask after the softmax. The other is to set the scores of padding to minus infinity
# before the softmax. Here are both, and the weights without any mask, for three lengths to which the sentence might be
# padded:

# %%
scores, words = torch.tensor([2.0, 1.0, 0.0]), 3


def padded_weights(length: int) -> dict[str, Tensor]:
    """Returns the weights of the sentence in three ways, when it is padded to this length."""
    logits = F.pad(scores, (0, length - words))
    mask = torch.arange(length) < words
    return {
        "no mask": logits.softmax(0),
        "times 0/1 after the softmax": logits.softmax(0) * mask,
        "minus infinity before it": logits.masked_fill(~mask, -torch.inf).softmax(0),
    }


for length in (3, 6, 24):
    print(f"padded to {length}:                   the three words     their sum   padding")
    for name, alpha in padded_weights(length).items():
        real = "  ".join(f"{number:.3f}" for number in alpha[:words].tolist())
        print(f"  {name:28} {real}   {alpha[:words].sum():9.3f}   {alpha[words:].sum():7.3f}")

# %% [markdown]
# Multiplying by 0 or 1 after the softmax does remove padding from the sum, but too late: padding has already taken
# part in the softmax's denominator, and the share that it took is lost. The weights of the words no longer sum to one,
# and the result shrinks as padding is added. The same sentence would get a different context vector, depending on how
# long the *other* sentences of its batch are. Minus infinity before the softmax makes padding's share $\exp(-\infty) =
# 0$, in the numerator and in the denominator, and the result is that of the sentence on its own.
#
# The gradient is wrong, too. With the mask after the softmax, the result depends on the scores of the padding, so
# training would change parameters because of words that do not exist. Here is the gradient of the weighted sum of
# three values (1, 2 and 3) with respect to the scores:

# %%
for name in ("times 0/1 after the softmax", "minus infinity before it"):
    logits = F.pad(scores, (0, 3)).requires_grad_()
    mask = torch.arange(6) < words
    alpha = logits.softmax(0) * mask if "0/1" in name else logits.masked_fill(~mask, -torch.inf).softmax(0)
    (alpha[:words] @ torch.tensor([1.0, 2.0, 3.0])).backward()
    gradient = "  ".join(f"{number:6.3f}" for number in logits.grad.tolist())
    print(f"{name:28} gradient of the three words and of three paddings: {gradient}")

# %% [markdown]
# One could divide by the sum again after the multiplication. That is right on paper, but fails when the score of a
# padding position is much larger than those of the words: their shares are then rounded to zero, and zero is divided
# by zero.
#
# Why infinity, and not a large number such as $-10^9$? The two differ for a sentence of length 0. All of its scores
# would equally be $-10^9$, so padding would silently get uniform weights. With minus infinity, PyTorch's softmax
# returns NaN, which is at least visible. An average of nothing has no right value; gattn defines it as zero. Its
# layers take `source_lengths` and handle all of this. They also ignore padding that contains NaN, which a product with
# a weight of zero would not remove ($0 \cdot \mathrm{NaN} = \mathrm{NaN}$):

# %%
attention = gattn.nn.DotProductAttention(scale=1.0)
memory = torch.randn(3, 6, 4)
lengths = torch.tensor([6, 3, 0])
padding = torch.arange(6) >= lengths.unsqueeze(1)
memory[padding] = torch.nan
query = torch.randn(3, 1, 4)
context, alpha = attention(query, memory, lengths, return_weights=True)

equal(context[1], attention(query[1], memory[1, :3]))  # the second sentence on its own
print("weights:\n", alpha.squeeze(1).numpy().round(3))
print("contexts:\n", context.squeeze(1).numpy().round(3))

# %% [markdown]
# From the point of view of [the first notebook](01_attention_is_message_passing.ipynb), a mask should not even be
# needed: attention is message passing, words send messages to queries along edges, and from padding there is simply no
# edge. With a list of edges, nothing has to be padded in the first place:

# %%
sentences = [memory[i, :length] for i, length in enumerate(lengths)]
source = torch.cat(sentences)  # 6 + 3 + 0 words, without padding
edge_index = torch.stack([torch.arange(9), torch.arange(3).repeat_interleave(lengths)])  # each word to its query
by_edges = gattn.attend(query, source.unsqueeze(1), source.unsqueeze(1), edge_index, score=gattn.DotScore(1.0))
equal(by_edges, context)

# %% [markdown]
# ## 4. Bahdanau's decoder, step by step
#
# Bahdanau et al. changed two things. The encoder is **bidirectional**: one recurrent network reads the sentence
# forwards and another backwards, and $h_j$ concatenates their states at word $j$. So $h_j$ describes the word together
# with what surrounds it on both sides. And the decoder computes a context $c_t$ in every step, in which the query is
# its state $s_{t-1}$:
#
# $$
# \begin{aligned}
# e_{tj} &= v^\top \tanh(W s_{t-1} + U h_j + b) && \text{a score per source word (the \emph{additive} score)} \\
# \alpha_{tj} &= \mathop{\mathrm{softmax}}_j\; e_{tj} && \text{attention weights} \\
# c_t &= \sum_j \alpha_{tj} h_j && \text{the context} \\
# s_t &= \mathrm{GRU}([y_{t-1}; c_t],\, s_{t-1}) && \text{the recurrent step} \\
# p(y_t) &= \mathrm{softmax}(V \tanh(W_o [s_t; c_t; y_{t-1}])) && \text{the next word}
# \end{aligned}
# $$
#
# The score is a small neural network with one hidden layer, which learns what fits together. The last line is a slight
# simplification of the paper's output layer. Here is all of it in bare PyTorch:

# %%
PAD, START, END = range(3)


class BareBahdanau(nn.Module):
    """Bahdanau's encoder and decoder in nothing but PyTorch, with E channels of embeddings and C of states."""

    def __init__(self, num_source: int, num_target: int, e: int, c: int):
        super().__init__()
        self.source_embedding, self.target_embedding = nn.Embedding(num_source, e), nn.Embedding(num_target, e)
        self.encoder = nn.GRU(e, c // 2, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(c, c)  # from the encoder's last states to the decoder's first one
        self.query_proj = nn.Linear(c, c, bias=False)  # W
        self.key_proj = nn.Linear(c, c)  # U and b
        self.vector = nn.Parameter(torch.randn(c))  # v
        self.cell = nn.GRUCell(e + c, c)
        self.combine = nn.Linear(2 * c + e, c)  # W_o
        self.output = nn.Linear(c, num_target)  # V

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of the target's words, `[B, T, V]`, and the attention weights, `[B, T, S]`."""
        packed = pack_padded_sequence(self.source_embedding(source), lengths, batch_first=True, enforce_sorted=False)
        memory, last = self.encoder(packed)
        memory, _ = pad_packed_sequence(memory, batch_first=True)  # h: [B, S, C]
        state = self.bridge(torch.cat([last[0], last[1]], 1)).tanh()  # s_0: [B, C]
        keys = self.key_proj(memory)  # U h + b: [B, S, C], once for all steps
        padding = torch.arange(source.size(1)) >= lengths.unsqueeze(1)

        previous = F.pad(target, (1, 0), value=START)[:, :-1]  # what the decoder has written before each word
        logits, alignment = [], []
        for y in self.target_embedding(previous).unbind(1):  # y: [B, E]
            scores = (self.query_proj(state).unsqueeze(1) + keys).tanh() @ self.vector  # [B, S]
            alpha = scores.masked_fill(padding, -torch.inf).softmax(1)
            context = (alpha.unsqueeze(1) @ memory).squeeze(1)  # [B, C]
            state = self.cell(torch.cat([y, context], 1), state)
            logits.append(self.output(self.combine(torch.cat([state, context, y], 1)).tanh()))
            alignment.append(alpha)
        return torch.stack(logits, 1), torch.stack(alignment, 1)


# %% [markdown]
# During training, the decoder reads the *right* previous word, not the one that it would have written itself (*teacher
# forcing*), which is why the whole target is an argument.
#
# In gattn, the three lines from `scores` to `context` are a layer, `AdditiveAttention`. Its method `prepare` computes
# the keys and the mask, once for all steps. With the same parameters it gives the same numbers:

# %%
bare = BareBahdanau(num_source=20, num_target=20, e=8, c=16)
source, target = torch.randint(3, 20, (2, 7)), torch.randint(3, 20, (2, 5))
lengths = torch.tensor([7, 4])
logits, alignment = bare(source, target, lengths)

layer = gattn.nn.AdditiveAttention(query_channels=16, memory_channels=16)
layer.query_proj, layer.key_proj, layer.vector = bare.query_proj, bare.key_proj, bare.vector

states = torch.randn(2, 7, 16)  # h of a batch of two sentences
s = torch.randn(2, 16)  # a state of the decoder
scores = (bare.query_proj(s).unsqueeze(1) + bare.key_proj(states)).tanh() @ bare.vector
alpha = scores.masked_fill(torch.arange(7) >= lengths.unsqueeze(1), -torch.inf).softmax(1)
context, weights = layer(s.unsqueeze(1), layer.prepare(states, lengths), return_weights=True)
equal(weights.squeeze(1), alpha)
equal(context.squeeze(1), (alpha.unsqueeze(1) @ states).squeeze(1))
print(f"queries [2, 1, 16], memory [2, 7, 16]: context {list(context.shape)}, weights {list(weights.shape)}")

# %% [markdown]
# And `gattn.models.Seq2Seq` is the whole model. Its parameters have slightly different names; when they are copied,
# the logits and the weights of all steps agree:

# %%
model = gattn.models.Seq2Seq(20, 20, 8, 16, attention="additive")
renamed = {"cell.": "decoder.0.", "query_proj.": "attention.query_proj.", "key_proj.": "attention.key_proj."}
parameters = {}
for name, parameter in bare.state_dict().items():
    for old, new in renamed.items():
        name = new + name.removeprefix(old) if name.startswith(old) else name
    parameters["attention.vector" if name == "vector" else name] = parameter
model.load_state_dict(parameters)

logits_of_model, alignment_of_model = model(source, target, lengths, return_weights=True)
equal(logits_of_model, logits)
equal(alignment_of_model, alignment)
print(f"logits {list(logits.shape)}, weights {list(alignment.shape)}: the same")

# %% [markdown]
# ## 5. What does it look at?
#
# To see a decoder at work, we need a language that is learnt in seconds, in which we know which word translates which.
# Numbers are such a language. German and English count alike, with one difference: German says the units before the
# tens, with an *und* ("and") between them, so that 43 is *drei und vierzig*. (Germans write such a number as one word;
# we split it into its parts.)
#
# `spell` also returns, for every English word, which German word it comes from: the right **alignment**, which models
# are never shown.

# %%
GERMAN = "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
GERMAN = (GERMAN + "siebzehn achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig").split()
ENGLISH = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
ENGLISH = (ENGLISH + "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety").split()


def spell(number: int) -> tuple[list[str], list[str], list[int]]:
    """Returns a number below a billion in German and English, and the German place of each English word."""
    pairs: list[tuple[str, str | None, int]] = []  # German word, its English word, and that word's order

    def say(german: str, english: str | None, later: int = 0) -> None:
        pairs.append((german, english, 2 * len(pairs) + later))

    for size, german, english in ((10**6, "Millionen", "million"), (1000, "tausend", "thousand"), (1, "", "")):
        part, number = divmod(number, size)
        is_one = part == 1
        hundreds, part = divmod(part, 100)
        tens, units = divmod(part, 10)
        if hundreds:
            say("ein" if hundreds == 1 else GERMAN[hundreds], ENGLISH[hundreds])
            say("hundert", "hundred")
        if part >= 20 and units:  # units come first in German, and after the tens in English
            say("ein" if units == 1 else GERMAN[units], ENGLISH[units], later=5)
            say("und", None)
        if part >= 20:
            say(GERMAN[18 + tens], ENGLISH[18 + tens])
        elif part:
            one = {"Millionen": "eine", "tausend": "ein"}.get(german, "eins")
            say(one if part == 1 else GERMAN[part], ENGLISH[part])
        if german and (hundreds or part):
            say("Million" if is_one and german == "Millionen" else german, english)
    order = sorted((order, place) for place, (_, word, order) in enumerate(pairs) if word is not None)
    return [pair[0] for pair in pairs], [pairs[place][1] or "" for _, place in order], [place for _, place in order]


for number in (43, 1_000_700, 743_261):
    german, english, places = spell(number)
    print(f"{number:9,}   {' '.join(german)}   →   {' '.join(english)}   {places}")

# %% [markdown]
# A few thousand random numbers of one to nine digits train the models; others, none of which was seen in training,
# test them.

# %%
generator = torch.Generator().manual_seed(0)
digits = torch.randint(1, 10, (12_000,), generator=generator)
drawn = (10**digits * torch.rand(12_000, generator=generator, dtype=torch.float64)).long().clamp_min(1)
test_numbers = drawn[:1000].unique().tolist()
train_numbers = drawn[~torch.isin(drawn, torch.tensor(test_numbers))].tolist()
spelt = {number: spell(number) for number in [*train_numbers, *test_numbers]}

german_words = ["", "", "end", *sorted({word for german, _, _ in spelt.values() for word in german})]
english_words = ["", "", "end", *sorted({word for _, english, _ in spelt.values() for word in english})]


def encode(numbers: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns sources, targets, and the lengths of both."""
    parts = []
    for side, vocabulary in enumerate((german_words, english_words)):
        place = {word: index for index, word in enumerate(vocabulary)}
        sentences = [torch.tensor([place[word] for word in [*spelt[number][side], "end"]]) for number in numbers]
        parts.append((pad_sequence(sentences, True, PAD), torch.tensor([len(sentence) for sentence in sentences])))
    (source, source_lengths), (target, target_lengths) = parts
    return source, target, source_lengths, target_lengths


train_data, test_data = encode(train_numbers), encode(test_numbers)
print(f"{len(train_numbers)} numbers train, {len(test_numbers)} test")
print(f"{len(german_words) - 3} German and {len(english_words) - 3} English words")
print(f"up to {train_data[2].max() - 1} German and {train_data[3].max() - 1} English words per number")


# %% [markdown]
# One function trains all kinds of attention: 250 steps of Adam on batches of 64 numbers, with the same learning rate
# and the same 64 channels for every kind. A translation counts as right if every word is.


# %%
def train(kind: str | None, **options: Any) -> tuple[gattn.models.Seq2Seq, list[float]]:
    """Returns a trained model, and its loss on test numbers after every 25 steps."""
    torch.manual_seed(0)
    model = gattn.models.Seq2Seq(len(german_words), len(english_words), 32, 64, attention=kind, **options)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=250, pct_start=0.2)
    losses = []
    for step in range(250):
        chosen = torch.randint(len(train_numbers), (64,))
        source, target, source_lengths, target_lengths = (part[chosen] for part in train_data)
        source, target = source[:, : source_lengths.max()], target[:, : target_lengths.max()]
        loss = model.loss(source, target, source_lengths, target_lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 24:
            model.eval()
            with torch.no_grad():
                losses.append(model.loss(*(part[:200] for part in test_data)).item())
            model.train()
    return model.eval(), losses


def is_right(model: gattn.models.Seq2Seq) -> Tensor:
    """Returns whether each test number is translated without a mistake."""
    source, target, source_lengths, target_lengths = test_data
    written = model.generate(source, source_lengths, max_length=target.size(1))  # padded with ends
    written = F.pad(written, (0, target.size(1) - written.size(1)), value=END)
    padding = torch.arange(target.size(1)) >= target_lengths.unsqueeze(1)
    return (written == target.masked_fill(padding, END)).all(1)


models, curves, right = {}, {}, {}
for name, kind in {"one vector": None, "Bahdanau": "additive"}.items():
    models[name], curves[name] = train(kind)
    right[name] = is_right(models[name]).float()
    print(f"{name:10}  {right[name].mean():.1%} of the test numbers are right")

# %%
lengths = test_data[2] - 1
length_bins = [(1, 3), (4, 6), (7, 9), (10, 12), (13, 15), (16, 17)]
print("words     ", "  ".join(f"{low:2}–{high:2}" for low, high in length_bins))
figure, ax = plt.subplots(figsize=(4.8, 2.2), layout="constrained")
for (name, correct), marker, colour in zip(right.items(), "xo", ("black", COLOURS[0]), strict=True):
    shares = [correct[(lengths >= low) & (lengths <= high)].mean() for low, high in length_bins]
    ax.plot(shares, marker=marker, color=colour, label=name)
    print(f"{name:10}", "  ".join(f"{share:5.0%}" for share in shares))
counts = [((lengths >= low) & (lengths <= high)).sum() for low, high in length_bins]
ax.set_xticks(range(6), [f"{low} to {high}\n({count})" for (low, high), count in zip(length_bins, counts, strict=True)])
ax.set(xlabel="words in the German number (how many are tested)", ylabel="right translations", ylim=(0, 1.05))
ax.set_title("one seed")
ax.grid(axis="y", alpha=0.25)
legend = ax.legend(frameon=False)

# %% [markdown]
# This is the bottleneck in miniature. With one vector, a little more than half of the numbers of up to six words are
# right, and none of more than nine. With attention, the length hardly matters. (Trained for longer, the model with one
# vector gets better, too: a vector *can* hold a number of nine digits. But the network has to learn how to pack it and
# unpack it, and attention makes that unnecessary.)
#
# Now the weights. Row $t$ shows where the decoder looked when it wrote word $t$. Circles mark the right alignment.

# %%
example = 743_265_821
german, english, places = spell(example)
example_source, example_target = [*german, "end"], [*english, "end"]
place = {word: index for index, word in enumerate(german_words)}, {word: i for i, word in enumerate(english_words)}
example_tokens = [
    torch.tensor([[vocabulary[word] for word in sentence]])
    for vocabulary, sentence in zip(place, (example_source, example_target), strict=True)
]


def draw_alignment(model: gattn.models.Seq2Seq, ax: plt.Axes, title: str) -> None:
    """Draws the weights of the example, with circles where a word's translation is."""
    with torch.no_grad():
        _, weights = model(*example_tokens, return_weights=True)
    attention_matrix(weights[0], example_target, example_source, ax=ax, title=title, maximum=1.0)
    ax.plot(places, range(len(places)), "o", markersize=5, markerfacecolor="none", color=COLOURS[1])
    ax.set(xlabel="", ylabel="")
    ax.tick_params(labelsize=6.5)
    plt.setp(ax.get_xticklabels(), rotation=90, rotation_mode="default", ha="center", va="top")


def hits(model: gattn.models.Seq2Seq) -> float:
    """Returns how often the largest weight is on the German word that an English word comes from."""
    source, target, source_lengths, _ = test_data
    with torch.no_grad():
        _, weights = model(source, target, source_lengths, return_weights=True)
    found = [
        weights[row, : len(spelt[number][2])].argmax(-1) == torch.tensor(spelt[number][2])
        for row, number in enumerate(test_numbers)
    ]
    return torch.cat(found).float().mean().item()


figure, ax = plt.subplots(figsize=(3.8, 3.3), layout="constrained")
draw_alignment(models["Bahdanau"], ax, "Bahdanau (one seed)")
bar = figure.colorbar(ax.images[0], label="attention weight α", shrink=0.7)
print(f"largest weight on the right word: {hits(models['Bahdanau']):.0%} of all words")

# %% [markdown]
# The weights run from the upper left to the lower right, because both languages say the large parts of a number first.
# Where English says the tens before the units, they step forward and back, skipping *und*, which has no translation.
# Nobody told the model which word translates which. The alignment is a by-product of learning to translate, and it is
# one reason why attention became popular: one can see what the network reads.
#
# Some rows are less clear. To write "hundred" after "seven", the decoder hardly needs to look anywhere. And the
# weights are not a proof of what a word is based on: $h_j$ is a state of a recurrent network and knows the neighbours
# of word $j$, too.

# %% [markdown]
# ## 6. Global and local
#
# [Luong et al.](https://arxiv.org/abs/1508.04025) simplified and varied all parts of this. In their form of the
# decoder, the query is the *new* state $s_t$, after the recurrent step. They compared scores:
#
# | name | $s(q, h_j)$ | layer |
# | --- | --- | --- |
# | dot | $q^\top h_j$ | `DotProductAttention(scale=1.0)` |
# | general | $q^\top W h_j$ | `GeneralAttention` |
# | concat (Bahdanau's, *additive*) | $v^\top \tanh(W q + U h_j + b)$ | `AdditiveAttention` |
#
# The dot product needs no parameters, but queries and memory must have the same size and live in the same space. The
# general score learns a map between them. All of these are **global**: every step attends to every source word. That
# is slow for long documents, so they also proposed **local** attention, to a window $[p_t - D, p_t + D]$ around a
# centre:
#
# - **local-m** (*monotonic*) sets $p_t = t$, as if source and target ran in parallel.
# - **local-p** (*predictive*) computes $p_t = S \cdot \sigma(v_p^\top \tanh(W_p s_t))$ from the state, where $S$ is
#   the length of the source and $\sigma$ the sigmoid. A window with hard edges has no gradient with respect to its
#   place. Therefore, the weights are multiplied by a Gaussian around $p_t$: $\alpha_{tj} = \mathrm{softmax}_j(e_{tj})
#   \exp\big(-\tfrac{(j - p_t)^2}{2 \sigma_D^2}\big)$ with $\sigma_D = D/2$.
#
# In the words of message passing, local attention is the same attention on fewer edges. A layer for it wraps the
# layer whose score it uses:

# %%
torch.manual_seed(0)
general = gattn.nn.GeneralAttention(16, 16)
queries, memory = torch.randn(12, 16), torch.randn(12, 16)
wrapped = {
    "global": general,
    "local-m": gattn.nn.LocalAttention(general, window=2),
    "local-p": gattn.nn.LocalAttention(general, window=2, alignment="predictive", query_channels=16),
}
for name, layer in wrapped.items():
    _, weights = layer(queries, memory, return_weights=True)
    sums = weights.sum(1)
    print(
        f"{name}: {(weights > 0).sum():3} of 144 weights are not zero; rows sum to {sums.min():.2f} to {sums.max():.2f}"
    )

# %% [markdown]
# With local-p, rows may sum to less than one, as the paper does not normalise again after the Gaussian.
#
# We train each on the numbers, with a half-width of $D = 2$. How well does $p_t = t$ suit German? Every *und* moves
# German one word further ahead of English.

# %%
for name, kind in {"general": "general", "local-m": "local-m", "local-p": "local-p"}.items():
    models[name], curves[name] = train(kind, window=2)
    right[name] = is_right(models[name]).float()
    print(f"{name:8}  right: {right[name].mean():6.1%}   largest weight on the right word: {hits(models[name]):.0%}")

# %%
figure, axes = plt.subplots(1, 3, figsize=(7.8, 2.9), layout="constrained", sharey=True)
for ax, name in zip(axes, ("general", "local-m", "local-p"), strict=True):
    draw_alignment(models[name], ax, f"{name} (one seed)")
    if name == "local-m":
        for row in range(len(example_target)):
            ax.add_patch(Rectangle((row - 2.5, row - 0.5), 5, 1, fill=False, color="#999999", linewidth=0.6))
        ax.set_xlim(-0.5, len(example_source) - 0.5)
bar = figure.colorbar(axes[0].images[0], ax=axes, label="attention weight α", shrink=0.65)

# %% [markdown]
# All three learn the task almost completely, but local-m does so in spite of its window, which the grey frames show.
# English falls behind German by one word per *und*, so that the word to be translated drifts to the right edge of the
# window and then out of it ("sixty" and "twenty"). There, the decoder looks at a word near the right one, whose state
# knows about that one from the recurrent encoder. It also looks elsewhere for each "hundred", although the right word
# is within the window: as above, it hardly needs to look for this one. So its largest weight is on the right word in
# only 73 % of the cases, against 100 % for global attention, although 96 % of its translations are right. The guess
# $p_t = t$ suits languages with the same word order and sentences of nearly the same length.
#
# Local-p has learnt to move its window with the word to be translated, including the steps forward and back. Its
# weights are paler where the predicted centre is not quite at the word. It is a little less accurate than global
# attention here, because it has to learn where to look as well as what to look for. (On the real sentences of the
# benchmark, the two are about equal.)

# %% [markdown]
# ## 7. Soft and hard
#
# So far attention returned an average. Xu et al., who described images in words, called that **soft** attention, and
# compared it with **hard** attention, which picks one position, at random with the attention weights as probabilities:
#
# $$
# \text{soft: } c = \sum_j \alpha_j h_j, \qquad\qquad \text{hard: } c = h_j, \quad j \sim \alpha .
# $$
#
# Hard attention reads one position only, and it is clear which. The price is paid in training. The choice $j$ jumps,
# so the loss has no derivative with respect to the scores. But its *expectation* has. If $r_j$ is the reward for
# choosing $j$, such as the log-probability that the right word then gets, then
#
# $$
# \nabla \sum_j \alpha_j r_j = \sum_j \alpha_j\, r_j \nabla \log \alpha_j
# = \mathbb{E}_{j \sim \alpha}\big[\, r_j\, \nabla \log \alpha_j \,\big]
# = \mathbb{E}_{j \sim \alpha}\big[\, (r_j - b)\, \nabla \log \alpha_j \,\big].
# $$
#
# So one may draw a $j$, and use $r_j \nabla \log \alpha_j$ in place of the gradient: it is right on average. This is
# REINFORCE ([Williams, 1992](https://doi.org/10.1007/BF00992696)). The **baseline** $b$ may be any number that does
# not depend on the choice, because $\mathbb{E}[\nabla \log \alpha_j] = \nabla \sum_j \alpha_j = \nabla 1 = 0$.
#
# Right on average can still be useless. We take five positions, for which the true gradient is easily computed, and 20
# 000 draws. `HardAttention.choose` returns the log-probability of each choice, and `ReinforceLoss` makes a loss of it;
# its baseline is a moving average of the rewards it has seen, starting with zero. With $\nabla \log \alpha_j$ taken
# with respect to the scores, which is $\mathrm{onehot}(j) - \alpha$:

# %%
scores = torch.tensor([1.0, 0.5, 0.0, -0.5, 0.0])
rewards = torch.tensor([-3.0, -1.0, -2.0, -4.0, -3.0])  # such as log-probabilities, which are negative
draws = 20_000
memory = torch.eye(5)  # the dot product of a query with the five rows is the query itself


def gradients(estimator: str, reinforce: gattn.nn.ReinforceLoss | None = None) -> Tensor:
    """Returns the estimated gradient of the expected reward with respect to the scores, once per draw, `[draws, 5]`."""
    query = scores.repeat(draws, 1).requires_grad_()  # one query per draw, so that each has a gradient of its own
    hard = gattn.nn.HardAttention(gattn.nn.DotProductAttention(scale=1.0), estimator=estimator)
    context, choice = hard.choose(query, memory)
    reward = context @ rewards
    loss = -reward.sum() if reinforce is None else draws * reinforce(reward, choice.log_prob)
    (gradient,) = torch.autograd.grad(-loss, query)
    return gradient


torch.manual_seed(0)
alpha = scores.softmax(0)
exact = alpha * (rewards - alpha @ rewards)
reinforce = gattn.nn.ReinforceLoss()
estimates = {"REINFORCE, no baseline": gradients("reinforce", reinforce)}
estimates["REINFORCE, baseline"] = gradients("reinforce", reinforce)  # it has seen the mean reward by now
estimates["straight-through"] = gradients("straight_through")
equal(reinforce.baseline, alpha @ rewards, rtol=0.02, atol=0.0)

figure, axes = plt.subplots(1, 3, figsize=(5.4, 2), layout="constrained", sharey=True)
for ax, (name, estimate), colour in zip(axes, estimates.items(), COLOURS, strict=False):
    ax.errorbar(range(5), estimate.mean(0), estimate.std(0), fmt="o", color=colour, capsize=3, markersize=4)
    ax.plot(range(5), exact, "_", color="black", markersize=16, label="exact gradient")
    ax.axhline(0, color="#C8C8C8", linewidth=0.8, zorder=0)
    ax.set(title=name, xlabel="position", xticks=range(5))
axes[0].set_ylabel("gradient: mean ± std of one draw")
axes[2].legend(frameon=False, loc="lower right")
print(f"{'exact':24}", "  ".join(f"{number:6.3f}" for number in exact.tolist()))
for name, estimate in estimates.items():
    mean = "  ".join(f"{number:6.3f}" for number in estimate.mean(0).tolist())
    noise = (estimate.var(0).sum() / exact.square().sum()).sqrt()
    bias = (estimate.mean(0) - exact).norm() / exact.norm()
    print(f"{name:24} {mean}   noise {noise:.1f}, bias {bias:.2f} times the gradient")

# %% [markdown]
# Both means of REINFORCE agree with the exact gradient: the estimator is unbiased. (What the table calls its bias is
# what is left of the noise after averaging 20 000 draws.) But one draw alone tells next to nothing. Without a
# baseline, its noise is five times as large as the gradient itself. The reason is that all rewards are negative. Every
# draw lowers the probability of whatever was drawn, be it good or bad, and position 1, the best, rises only because
# the others are lowered by more. With the mean reward as a baseline, a draw lowers what is worse than average and
# raises what is better, and the noise falls to a third.
#
# The noise of a mean over $n$ draws is $\sqrt{n}$ times smaller, so one hundred times as many draws are needed for a
# tenth of the noise. A longer sentence makes it worse, as each word adds a choice.
#
# The third panel is a compromise, the **straight-through** estimator ([Jang et
# al.](https://arxiv.org/abs/1611.01144)). It chooses one position in the forward pass, and in the backward pass uses
# the gradient of a softmax instead. Its noise is small, but it is wrong on average, by a third of the gradient here,
# and no number of draws can remove that.
#
# Both estimators train our translator. Like the paper, `Seq2Seq` replaces half of the choices by their expectation
# when it trains with REINFORCE, and it rewards entropy a little, so that the model does not settle on choices too
# early. After training, hard attention takes the most probable position.

# %%
for name, kind in {"hard (REINFORCE)": "hard", "hard (straight-through)": "hard-st"}.items():
    models[name], curves[name] = train(kind)
    right[name] = is_right(models[name]).float()
    print(f"{name:24} right: {right[name].mean():6.1%}   choice is the right word: {hits(models[name]):.0%}")
print(f"{'soft (general)':24} right: {right['general'].mean():6.1%}")

# %%
figure, axes = plt.subplots(1, 3, figsize=(7.6, 2.8), layout="constrained", width_ratios=[1, 1.1, 1.1])
styles = {"general": ("soft (general)", "o"), "hard (REINFORCE)": (None, "<"), "hard (straight-through)": (None, ">")}
for (name, (label, marker)), colour in zip(styles.items(), COLOURS, strict=False):
    axes[0].plot(range(25, 251, 25), curves[name], marker=marker, color=colour, markersize=4, label=label or name)
axes[0].set(xlabel="training steps", ylabel="loss on test numbers, nats per word", yscale="log", title="one seed each")
axes[0].set_ylim(top=20)  # room for the legend
axes[0].legend(frameon=False, fontsize=7, loc="upper right")
for ax, name in zip(axes[1:], list(styles)[1:], strict=True):
    draw_alignment(models[name], ax, name)
for name, (label, _) in styles.items():
    print(f"{label or name:24} loss after 100 steps: {curves[name][3]:.2f}")

# %% [markdown]
# Hard attention learns the task nearly as well as soft attention with the same score, but later: after 100 steps, the
# losses of both estimators are about twice that of soft attention. It is easy to see where a hard decoder looked, since
# each row has one entry. But it looks at the right word less often (78 % with REINFORCE and 81 % with the
# straight-through estimator, against 100 % for the largest soft weight), mostly where the word hardly depends on the
# choice: the decoder's state may already know that a "hundred" or a "thousand" comes next. A reward for the right word
# cannot tell a good choice from one that did no harm.

# %% [markdown]
# ## 8. Attention over an image
#
# A memory need not be a sentence. Xu et al. encoded an image by a convolutional network, which gives one vector per
# region, and let a decoder attend to the regions while it wrote a caption. Our images are the handwritten digits of
# scikit-learn, of 8 × 8 pixels, and all that has to be said about each is which digit it shows.
#
# **Soft.** Each of the 36 windows of 3 × 3 pixels, together with where it is, becomes a vector $x_j$. There is one
# query only, which is a parameter: *which windows tell most about digits?* This is the attention pooling of [Yang et
# al.](https://aclanthology.org/N16-1174), which `gattn.nn.AttentionPooling` implements:
#
# $$
# c = \sum_j \alpha_j x_j, \qquad \alpha_j = \mathop{\mathrm{softmax}}_j\; u^\top \tanh(W x_j + b)
# $$

# %%
digits = load_digits()
images, classes = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train_set, test_set = order[:-500], order[-500:]


def train_classifier(model: nn.Module, patches: Tensor) -> float:
    """Trains on patches, `[images, patches, pixels]`, and returns the accuracy on test images."""
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=600, pct_start=0.2)
    model.train()
    for _ in range(600):
        chosen = train_set[torch.randint(len(train_set), (128,))]
        loss = model.loss(patches[chosen], classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return (model(patches[test_set])[0].argmax(1) == classes[test_set]).float().mean().item()


class PooledWindows(nn.Module):
    """Encodes windows on their own, averages them by attention, and classifies the average."""

    def __init__(self, num_windows: int, num_pixels: int, c: int = 32):
        super().__init__()
        self.place = nn.Parameter(0.1 * torch.randn(num_windows, c))
        self.see = nn.Linear(num_pixels, c)
        self.hidden = nn.Linear(c, c)
        self.pool = gattn.nn.AttentionPooling(c)
        self.output = nn.Linear(c, 10)

    def forward(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits `[B, 10]` and attention weights `[B, M]`."""
        x = self.hidden((self.see(windows) + self.place).relu()).relu()
        lengths = torch.full((len(x),), x.size(1))
        context, weights = self.pool(x, lengths=lengths, return_weights=True)
        return self.output(context), weights

    def loss(self, windows: Tensor, classes: Tensor) -> Tensor:
        """Returns the cross entropy."""
        return F.cross_entropy(self(windows)[0], classes)


windows = F.unfold(images.unsqueeze(1), kernel_size=3).transpose(1, 2)  # [images, 36, 9]
torch.manual_seed(0)
pooled = PooledWindows(36, 9)
print(f"{train_classifier(pooled, windows):.1%} of the test images are classified correctly")

# %% [markdown]
# The weights can be drawn on the image. A pixel gets the mean weight of the windows that it belongs to:

# %%
shown = torch.stack([test_set[classes[test_set] == digit][0] for digit in range(10)])
with torch.no_grad():
    weights = pooled(windows[shown])[1]
spread = weights.unsqueeze(1).expand(-1, 9, -1)
ones = torch.ones_like(spread)
on_pixels = (F.fold(spread, 8, 3) / F.fold(ones, 8, 3)).squeeze(1)

figure, axes = plt.subplots(2, 10, figsize=(8, 2), layout="constrained")
for column in range(10):
    axes[0, column].imshow(images[shown[column]], cmap="gray_r")
    heat = axes[1, column].imshow(on_pixels[column], cmap=WEIGHTS, vmin=0, vmax=on_pixels.max().item())
    axes[1, column].contour(images[shown[column]], [0.5], colors=COLOURS[1], linewidths=0.8)
for ax in axes.flat:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
bar = figure.colorbar(heat, ax=axes, label="mean weight", aspect=12, shrink=0.8)
print(f"largest weight of a window: {weights.max():.2f}; uniform would be {1 / 36:.3f}")

# %% [markdown]
# Orange lines outline the digits. Nobody told the model where to look. It gives most of the weight to a few windows,
# which differ from digit to digit: the end of the upper bar of the 5, or the flag of the 1. Some of them are in the
# background, as with the 2 and the 3, because missing ink tells something about a digit, too.
#
# **Hard.** Soft attention has to look at the whole image before it can ignore most of it. A hard model never needs to
# see the rest, like an eye that jumps from place to place. Ours may look at four patches of 2 × 2 pixels, out of 16,
# one after another. A GRU remembers what it has seen, and its state is the query that chooses where to look next.
# (This is close to the *recurrent attention model* of [Mnih et al.](https://arxiv.org/abs/1406.6247).) Computing
# scores from the patches would be cheating, because that means looking at all of them. So the keys are the *places* of
# the patches, and only the values are what they show. In gattn, that is a subclass with another method `keys`:


# %%
class Where(gattn.nn.GeneralAttention):
    """The general score of a query and the place of a patch, whatever the patch shows."""

    def __init__(self, num_places: int, channels: int):
        super().__init__(channels, channels)
        self.places = nn.Parameter(0.5 * torch.randn(num_places, channels))

    def keys(self, memory: Tensor) -> Tensor:
        """Returns the same keys for all images."""
        return self.places.expand(len(memory), -1, -1)


class Glimpses(nn.Module):
    """Looks at four patches, each of which `attention` chooses (or chance, without it), and classifies."""

    def __init__(self, attention: gattn.nn.MemoryAttention | None, c: int = 48):
        super().__init__()
        self.attention = attention
        self.place = nn.Parameter(torch.randn(16, c))
        self.see = nn.Linear(4, c)
        self.hidden = nn.Linear(c, c)
        self.cell = nn.GRUCell(c, c)
        self.start = nn.Parameter(0.1 * torch.randn(c))
        self.output = nn.Linear(c, 10)
        self.reinforce = gattn.nn.ReinforceLoss(entropy_weight=0.01)
        self.choices: list[gattn.nn.recurrent.hard_attention.Choice] = []

    def look(self, state: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what is seen, `[B, C]`, and the weights, `[B, M]`."""
        if self.attention is None:
            weights = F.one_hot(torch.randint(16, (len(patches),)), 16).float()
            return (weights.unsqueeze(1) @ patches).squeeze(1), weights
        memory = self.attention.prepare(patches)
        if isinstance(self.attention, gattn.nn.HardAttention):
            context, choice = self.attention.choose(state.unsqueeze(1), memory)
            self.choices.append(choice)
            return context.squeeze(1), choice.weights.squeeze(1)
        context, weights = self.attention(state.unsqueeze(1), memory, return_weights=True)
        return context.squeeze(1), weights.squeeze(1)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits `[B, 10]` and the weights of each glimpse `[B, 4, M]`."""
        patches = self.hidden((self.see(patches) + self.place).relu()).relu()
        state, all_weights, self.choices = self.start.expand(len(patches), -1), [], []
        for _ in range(4):
            seen, weights = self.look(state, patches)
            state = self.cell(seen, state)
            all_weights.append(weights)
        return self.output(state), torch.stack(all_weights, 1)

    def loss(self, patches: Tensor, classes: Tensor) -> Tensor:
        """Returns the cross entropy, and for hard attention adds REINFORCE's loss."""
        logits, _ = self(patches)
        cross_entropy = F.cross_entropy(logits, classes, reduction="none")
        if not self.choices:
            return cross_entropy.mean()
        reward = -cross_entropy.detach().unsqueeze(1).expand(-1, 4)  # all four choices are to blame, or to praise
        log_prob = torch.cat([choice.log_prob for choice in self.choices], 1)
        entropy = torch.cat([choice.entropy for choice in self.choices], 1)
        return cross_entropy.mean() + self.reinforce(reward, log_prob, entropy)


patches = F.unfold(images.unsqueeze(1), kernel_size=2, stride=2).transpose(1, 2)  # [images, 16, 4]
makers = {
    "random glimpses": lambda: None,
    "soft glimpses": lambda: Where(16, 48),
    "hard glimpses (REINFORCE)": lambda: gattn.nn.HardAttention(Where(16, 48)),
}
lookers = {}
for name, make in makers.items():
    torch.manual_seed(0)
    lookers[name] = Glimpses(make())
    print(f"{name:25}  {train_classifier(lookers[name], patches):.1%} of the test images are right")

# %%
hard = lookers["hard glimpses (REINFORCE)"]
with torch.no_grad():
    logits, weights = hard(patches[shown])
paths = weights.argmax(-1)  # [10, 4]
figure, axes = plt.subplots(2, 5, figsize=(7, 3.1), layout="constrained")
for ax, index, path, named in zip(axes.flat, shown, paths.tolist(), logits.argmax(1).tolist(), strict=True):
    ax.imshow(images[index], cmap="gray_r", vmin=0, vmax=1)
    for patch in set(range(16)) - set(path):
        ax.add_patch(Rectangle((patch % 4 * 2 - 0.5, patch // 4 * 2 - 0.5), 2, 2, color=COLOURS[5], alpha=0.55, lw=0))
    for patch in set(path):
        turns = textwrap.fill(" ".join(str(turn + 1) for turn in range(4) if path[turn] == patch), width=3)
        x, y = patch % 4 * 2 + 0.5, patch // 4 * 2 + 0.5
        text = ax.text(x, y, turns, color=COLOURS[1], ha="center", va="center", fontweight="bold", fontsize=8)
        text.set_path_effects([withStroke(linewidth=2, foreground="white")])
    ax.set(xticks=[], yticks=[])
    ax.set_title(f"a {classes[index]}, read as {named}", color="black" if named == classes[index] else COLOURS[1])
    ax.spines[:].set_visible(False)
figure.suptitle("four glimpses at each (one seed)", fontsize=9)
with torch.no_grad():
    paths = hard(patches[test_set])[1].argmax(-1)
for turn in range(4):
    print(f"glimpse {turn + 1}: {len(paths[:, turn].unique())} different places over all test images")

# %% [markdown]
# The model never saw what is under the blue. Orange numbers say in which glimpse it looked at a patch. (These are the
# first images of each digit among the test images; an orange title marks a mistake. With three mistakes in ten, they
# are unluckier than the rest.)
#
# Choosing pays: with four glimpses, hard attention is right on 86 % of the images, and random glimpses on 65 %. (With
# 500 test images and one seed, two or three points mean nothing.) Soft glimpses are right on 74 %, although each of
# them averages all patches. Their weights depend on places alone, so the average has to blur what was seen where. In
# the model with windows above, weights could depend on what the windows show, and the average could be that of the few
# that matter.
#
# The first glimpse is the same for all images, as nothing has been seen yet. Later glimpses depend on the image, but
# not by much: the second goes to one of three places, and the third and the fourth to one of five. Sometimes the model
# looks at a patch a second time, which tells it nothing new. Nothing forbids that, and once REINFORCE has settled on a
# choice, it rarely tries another one.

# %% [markdown]
# ## Where this leads
#
# Attention began as a remedy for a bottleneck of recurrent networks. Three years later, [Attention Is All You
# Need](https://arxiv.org/abs/1706.03762) removed the recurrence and kept the attention. [The first
# notebook](01_attention_is_message_passing.ipynb) shows that computation as message passing on a graph.
#
# ## Exercises
#
# 1. **A learnt width.** Choose the width $h$ of Nadaraya and Watson's kernel by gradient descent on the squared error
#    of predicting each $v_j$ from all *other* pairs. Why must the pair itself be left out?
# 2. **A mask of products.** Somebody multiplies the *scores* by 0 or 1 before the softmax. Which weight does padding
#    get? For which scores would this be right?
# 3. **Turn the source around.** [Sutskever et al.](https://arxiv.org/abs/1409.3215) found that their model with one
#    vector translates much better when it reads the source backwards. Try it with `kind=None`. Why is the encoder of
#    our `Seq2Seq` less sensitive to that?
# 4. **A better guess for local-m.** Replace $p_t = t$ by $p_t = t \cdot S / T$ with the lengths of both sides:
#    subclass `gattn.nn.LocalAttention` and override `centres`. Does that help on long numbers? What is wrong with
#    using $T$ when translating?
# 5. **The best baseline.** For a single score, which $b$ makes the variance of $(r_j - b)\, \partial \log \alpha_j$
#    smallest? Compare with $\mathbb{E}[r]$ on the five positions above.
# 6. **How many glimpses?** Plot the accuracy of hard and of random glimpses against their number, from 1 to 8.
