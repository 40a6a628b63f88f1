# %% [markdown]
# # What the machine does
#
# Two programs can compute the same formula, give the same numbers, and differ tenfold in time and memory. The formula
# of a graph attention layer is three lines long:
#
# $$
# \mathrm{out}_i = \sum_{j \in \mathcal{N}(i)} \alpha_{ij}\, v_j, \qquad
# \alpha_{ij} = \frac{\exp s_{ij}}{\sum_{l \in \mathcal{N}(i)} \exp s_{il}}, \qquad
# s_{ij} = \mathrm{LeakyReLU}\big(a_{dst}^\top h_i + a_{src}^\top h_j\big).
# $$
#
# Here $h_i = W x_i$ are the projected features of node $i$, which also serve as its value, $v_i = h_i$. The vectors
# $a_{dst}$ and $a_{src}$ are learnt, and $s_{ij}$ is the logit of the edge from $j$ to $i$.
#
# This notebook follows one call of such a layer down to the memory pages: in PyTorch Geometric (PyG), which computes
# it with PyTorch's general operations, and in gattn, which has kernels for it. The questions are
#
# 1. Which tensors does a call make, and how large are they?
# 2. How do time and memory grow with the graph?
# 3. Why does fresh memory cost time, and what does the allocator have to do with it?
# 4. What does a fused kernel do instead?
# 5. Who computes a given call, and why?
# 6. How exact are the results?
# 7. What if the score is one's own?
# 8. What does `torch.compile` add?
#
# **About the numbers.** Times depend on the machine, on its load, and on the versions of everything. The text
# therefore says what to look at, not what the clock showed; the outputs come from one thread of the machine that made
# this page, which ran other programs at the same time. Times are the processor's, which other programs disturb less
# than the clock; they are given as medians with quartiles, and no cell fails because something was slow. What does
# *not* depend on the machine, such as sizes of tensors, is checked.
#
# You need the basics of PyTorch and should know what a graph attention layer is ([notebook
# 5](05_a_transformer_and_a_gat_from_scratch.ipynb) builds one). No data are downloaded. The page faults need Linux or
# macOS, and the experiment with the allocator needs Linux.

# %%
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
from itertools import pairwise

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise
import matplotlib.pyplot as plt
import torch
from torch.profiler import ProfilerActivity, profile
from torch_geometric.nn import GATConv

import gattn
from gattn.attention import Attention
from gattn.ops.backends import BACKENDS
from gattn.visualize import COLOURS

torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 120, "font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
equal = torch.testing.assert_close

# %% [markdown]
# ## The layer, and the proof that both compute the same
#
# We use a random graph with $N$ nodes, $E$ edges, $H$ heads and $C$ channels per head. Both libraries get the same
# weights. Before anything is measured, we compare outputs and gradients: a fast wrong result is worth nothing.

# %%
N, E, H, C = 4000, 60_000, 8, 16
x = torch.randn(N, 64)
edge_index = torch.randint(N, (2, E))
theirs = GATConv(64, C, heads=H, add_self_loops=False)
ours = gattn.nn.GATConv(64, C, heads=H, add_self_loops=False)
ours.load_state_dict(theirs.state_dict())


def step(layer, x, edge_index):
    """A forward and a backward pass."""
    out = layer(x, edge_index)
    out.square().mean().backward()
    return out


equal(step(ours, x, edge_index), step(theirs, x, edge_index))
for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
    equal(mine.grad, other.grad)
    print(f"{name:12} {list(mine.shape)!s:14} same gradient")

# %% [markdown]
# ## 1. Which tensors are made?
#
# PyG computes the formula edge by edge. It *gathers* the row $v_j$ of each edge's source, multiplies it by the
# weight, and *scatters* the products, that is, adds up those of each target. Each of these steps is one operation of
# PyTorch, and each operation writes its result to memory. The gathered rows and the products have one row per edge:
# they are tensors of shape $[E, H, C]$, larger by a factor of $E / N$ than the features of the nodes.
#
# We need not take that on trust. PyTorch's profiler notes how much memory each operation allocates, and for which
# inputs. Here is everything in a forward and backward pass that allocates at least a megabyte, and beside it the size
# of *one* tensor $[E, H, C]$:


# %%
def allocations(layer):
    """What a forward and backward pass allocates: operation, shapes of its inputs, calls, and bytes."""
    step(layer, x, edge_index)  # anything that is prepared once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        step(layer, x, edge_index)
    events = profiler.key_averages(group_by_input_shape=True)
    rows = [(event.key, event.input_shapes, event.count, event.self_cpu_memory_usage) for event in events]
    return sorted((row for row in rows if row[3] > 0), key=lambda row: -row[3])


MB = 1e6
per_edge = E * H * C * 4
per_node = N * H * C * 4
made = {"PyG": allocations(theirs), "gattn": allocations(ours)}
print(
    f"one tensor [E, H, C] = [{E}, {H}, {C}] has {per_edge / MB:.1f} MB, one tensor [N, H, C] {per_node / MB:.1f} MB\n"
)
for name, rows in made.items():
    print(f"{name}: {sum(row[3] for row in rows) / MB:.0f} MB in all")
    for operation, shapes, count, size in rows:
        if size >= MB:
            tensors = " ".join(str(shape).replace(" ", "") for shape in shapes if len(shape) > 1)
            print(f"  {size / MB:6.1f} MB  {count} × {operation:19} {tensors}")
assert sum(row[3] >= 0.99 * per_edge for row in made["PyG"]) >= 2
assert all(row[3] < per_edge for row in made["gattn"])

# %% [markdown]
# PyG's list begins with operations that make tensors of the size $[E, H, C]$: in the forward pass the gathered rows
# (`index_select`) and their products with the weights (`mul`), and in the backward pass the gradients that go back
# through both (`gather` and two more `mul`). gattn's list contains none; the `assert` says so. Its largest item,
# `empty`, is several tensors together, and each has a row per *node* or a number per edge and head.
#
# Part of this memory lives long. What autograd needs for the backward pass is kept from the moment it is made until
# that pass uses it, and in a deep network all layers keep theirs at the same time. PyTorch lets us watch that as
# well:


# %%
def kept(call, *given):
    """What autograd keeps of a call for its backward pass, besides what it was given: shapes and bytes."""
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = (
                list(tensor.shape),
                storage.nbytes(),
                tensor,
            )  # held, or its place is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    del out
    return sorted(((shape, size) for shape, size, _ in storages.values()), key=lambda row: -row[1])


def kept_by(layer, x, edge_index):
    """What autograd keeps of a layer's call."""
    return kept(lambda: layer(x, edge_index), x, edge_index, *layer.parameters())


keeps = {"PyG": kept_by(theirs, x, edge_index), "gattn": kept_by(ours, x, edge_index)}
for name, rows in keeps.items():
    print(
        f"{name:6} keeps {sum(size for _, size in rows) / MB:5.1f} MB:",
        *(f"{shape}" for shape, size in rows if size > 1e5),
    )

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.2), layout="constrained")
for ax, table, title in ((left, made, "allocated in forward + backward"), (right, keeps, "kept for the backward pass")):
    for place, rows in enumerate(table.values()):
        start = 0.0
        for row in rows:
            size = row[-1] / MB
            is_large = row[-1] >= 0.99 * per_edge
            ax.barh(
                place, size, left=start, color=COLOURS[1] if is_large else COLOURS[5], edgecolor="white", linewidth=0.5
            )
            start += size
    ax.set_yticks(range(len(table)), table)
    ax.invert_yaxis()
    ax.set_xlabel("MB")
    ax.set_title(title, fontsize=9)
handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[number]) for number in (1, 5)]
labels = ["one row per edge, [E, H, C]", "anything else"]
legend = figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)

# %% [markdown]
# Each segment is one entry of the lists above (small entries, which are not printed, are drawn as well). The orange
# ones are what a fused kernel avoids.
#
# ## 2. How time and memory grow
#
# Now a series of graphs, each with twice the edges of the one before and always 15 edges per node. For each we take
# the time of a forward and backward pass, as the median and the quartiles of some calls, and the bytes that autograd
# keeps. Both scales are logarithmic.


# %%
def seconds(call, repeats=9, at_least=3):
    """The quartiles of a call's processor time: (first, median, third). Slow calls are repeated less often."""
    call()  # a warm-up
    times, start = [], time.process_time()
    while len(times) < repeats and (len(times) < at_least or time.process_time() - start < 3.0):
        before = time.process_time()
        call()
        times.append(time.process_time() - before)
    return tuple(statistics.quantiles(times, n=4, method="inclusive"))


edges = [7500 * 2**power for power in range(5)]
times, memory = {"PyG": [], "gattn": []}, {"PyG": [], "gattn": []}
for e in edges:
    features, graph = torch.randn(e // 15, 64), torch.randint(e // 15, (2, e))
    for name, layer in (("PyG", theirs), ("gattn", ours)):
        times[name].append(seconds(lambda layer=layer, inputs=(features, graph): step(layer, *inputs)))
        memory[name].append(sum(size for _, size in kept_by(layer, features, graph)))

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.6), layout="constrained")
for (name, rows), colour in zip(times.items(), COLOURS[1::-1], strict=True):
    low, middle, high = 1e3 * torch.tensor(rows).T
    left.plot(edges, middle, "o-", markersize=3, color=colour, label=name)
    left.fill_between(edges, low, high, color=colour, alpha=0.2, linewidth=0)
    right.plot(edges, [size / MB for size in memory[name]], "o-", markersize=3, color=colour, label=name)
left.set(ylabel="ms", title="forward + backward (median, quartiles)")
right.set(ylabel="MB", title="kept for the backward pass")
for ax in (left, right):
    ax.set(xscale="log", yscale="log", xlabel="edges")
    ax.title.set_fontsize(9)
    ax.set_xticks(edges, [f"{e / 1000:g}k" for e in edges])
    ax.minorticks_off()
    ax.grid(alpha=0.25)
left.legend(frameon=False)

print(f"{'edges':>8} {'PyG, ms':>22} {'gattn, ms':>22} {'ratio of medians':>18} {'ratio of memory':>17}")
for number, e in enumerate(edges):
    cells = ["{1:.1f} ({0:.1f} – {2:.1f})".format(*(1e3 * t for t in times[name][number])) for name in times]
    ratio = times["PyG"][number][1] / times["gattn"][number][1]
    share = memory["PyG"][number] / memory["gattn"][number]
    print(f"{e:8} {cells[0]:>22} {cells[1]:>22} {ratio:18.1f} {share:17.1f}")

# %% [markdown]
# The lines for memory are parallel: both grow in proportion to the graph, and their distance is a constant factor,
# which depends on the edges per node but not on the machine. Time is less regular. Look at the right end of PyG's
# line: does it become steeper, although the work only doubles from point to point? And look at the shaded bands: the
# same computation on the same data takes different times from call to call. Some of that is other programs on the
# machine. Some of it has to do with memory.
#
# ## 3. Fresh memory costs time
#
# A program's memory is a promise. `torch.empty` asks the operating system for address space and gets it at once,
# without any memory behind it. Only when a byte of a **page** (usually 4096 bytes) is first written to does the
# processor stop with a *page fault*; the system then finds a free page, fills it with zeros, enters it into its
# tables, and lets the program continue. The `resource` module counts these faults. Here we fill a tensor of 64 MB
# twice, three times over:


# %%
def faults():
    """Page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


print("                first fill                second fill")
for _ in range(3):
    tensor = torch.empty(64 * 2**20 // 4)
    marks = [(faults(), time.process_time())]
    for value in (1.0, 2.0):
        tensor.fill_(value)
        marks.append((faults(), time.process_time()))
    parts = [f"{b[0] - a[0]:6} faults {1e3 * (b[1] - a[1]):7.1f} ms" for a, b in pairwise(marks)]
    print("   tensor", "        ".join(parts))
    del tensor
print(f"64 MB are {64 * 2**20 // resource.getpagesize()} pages of {resource.getpagesize()} bytes")

# %% [markdown]
# The first fill takes a fault for each page; compare its time with that of the second one, which writes the same
# number of bytes into pages that are there already. And it happens again with the next tensor, although the one
# before was freed: its memory had been handed back to the system at once.
#
# That was the decision of the **allocator**, `malloc` in the C library. It can keep freed memory for the next
# request, which costs no faults, or return it, which leaves more for other programs. glibc, the library of most Linux
# systems, returns blocks above a threshold that it adapts while the program runs, up to 32 MB (see
# [mallopt](https://man7.org/linux/man-pages/man3/mallopt.3.html)). Tensors $[E, H, C]$ of a real graph are often
# larger than that. Whether a smaller one faults depends on what was allocated and freed before it, so equal
# calls may take different times.
#
# Environment variables tell glibc to keep everything, but it reads them only when a process starts. So we measure in
# processes of their own. The program below is the same each time; it prints the quartiles of the time, the page
# faults per call, and by how much the first call raised the peak of the process's memory.

# %%
PROGRAM = """
import json, resource, statistics, sys, time
import torch
from torch_geometric.nn import GATConv
import gattn

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

torch.manual_seed(0)
torch.set_num_threads(1)
layer = (gattn.nn.GATConv if sys.argv[1] == "gattn" else GATConv)(64, 16, heads=8, add_self_loops=False)
layer(torch.randn(9, 64), torch.randint(9, (2, 9))).sum().backward()  # loads code
x, edge_index = torch.randn(8000, 64), torch.randint(8000, (2, 120_000))
before = peak()
times, faults = [], []
for call in range(10):
    start, count = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layer(x, edge_index).square().mean().backward()
    times.append(time.process_time() - start)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - count)
    if call == 0:
        memory = peak() - before
quartiles = statistics.quantiles(times[1:], n=4, method="inclusive")
print(json.dumps({"times": quartiles, "faults": statistics.median(faults[1:]), "memory": memory}))
"""
ALLOCATORS = {
    "default": {},
    "kept": {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)},
}
results = {}
if sys.platform == "linux":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    print(
        f"{'library':8} {'allocator':10} {'ms: median (quartiles)':>26} {'page faults per call':>22} {'peak, MB':>10}"
    )
    for library in ("PyG", "gattn"):
        for allocator, variables in ALLOCATORS.items():
            command = [sys.executable, "-c", PROGRAM, library]
            run = subprocess.run(command, env={**clean, **variables}, capture_output=True, text=True, check=True)
            row = results[library, allocator] = json.loads(run.stdout)
            quartiles = "{1:.0f} ({0:.0f} – {2:.0f})".format(*(1e3 * t for t in row["times"]))
            print(f"{library:8} {allocator:10} {quartiles:>26} {row['faults']:22.0f} {row['memory'] / MB:10.0f}")

    figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.4), layout="constrained")
    for place, ((_, allocator), row) in enumerate(results.items()):
        low, middle, high = (1e3 * t for t in row["times"])
        style = {"color": COLOURS[2] if allocator == "kept" else COLOURS[3], "width": 0.7}
        axes[0].bar(place, middle, yerr=[[middle - low], [high - middle]], capsize=3, **style)
        axes[1].bar(place, row["faults"], **style)
        axes[2].bar(place, row["memory"] / MB, **style)
    for ax, title in zip(axes, ("ms per call (quartiles)", "page faults per call", "peak memory, MB"), strict=True):
        ax.set_xticks(range(len(results)), [f"{library}\n{allocator}" for library, allocator in results])
        ax.set_title(title, fontsize=9)

# %% [markdown]
# Look at PyG's two rows first. The computation is the same, instruction by instruction; only what happens to freed
# memory differs. Where the faults vanish, so does their time. Then compare the *kept* rows: that is what the
# libraries need for the computation itself. A fair comparison names the allocator, which is why gattn's
# [benchmarks](../benchmarks/README.md) measure under both. (jemalloc and tcmalloc, which some people load for this
# reason, keep freed memory for a while by themselves.)
#
# gattn's faults, if it has any, are few for two reasons: it asks for less memory, and for its larger tensors it asks
# the system for *huge pages* of two megabytes where Linux grants them, so that one fault brings 512 pages at once.
#
# ## 4. What a fused kernel does instead
#
# Why can a kernel do without the rows per edge? Because a sum can be computed as its terms arrive. For one target, we
# go through its neighbours and keep three things: the largest logit so far $m$, the sum of the exponentials $z$, and
# the weighted sum of values $o$. If a logit exceeds the maximum, what was summed before is rescaled:
#
# $$
# m' = \max(m, s_{ij}), \qquad z' = z\, e^{m - m'} + e^{s_{ij} - m'}, \qquad o' = o\, e^{m - m'} + e^{s_{ij} - m'} v_j .
# $$
#
# At the end, $\mathrm{out}_i = o / z$. This *online softmax* ([Milakov and
# Gimelshein](https://arxiv.org/abs/1805.02867)) is also the core of
# [FlashAttention](https://arxiv.org/abs/2205.14135). The row $v_j$ is read where it lies, among the nodes' features,
# and never copied:


# %%
def attend_to_one(logits, values, neighbours):
    """The output of one target with one head, without a tensor per edge: `(out, m, z)`."""
    m, z, o = -math.inf, 0.0, torch.zeros(values.size(-1), dtype=values.dtype)
    for logit, j in zip(logits.tolist(), neighbours.tolist(), strict=True):
        larger = max(m, logit)
        rescale, weight = math.exp(m - larger), math.exp(logit - larger)
        m, z, o = larger, z * rescale + weight, o * rescale + weight * values[j]
    return o / z, m, z


values = torch.randn(N, C, dtype=torch.float64)
neighbours = edge_index[0, edge_index[1] == 0]
logits = 3 * torch.randn(len(neighbours), dtype=torch.float64)
out, m, z = attend_to_one(logits, values, neighbours)
equal(out, logits.softmax(0) @ values[neighbours])
print(f"target 0 has {len(neighbours)} neighbours: same output as softmax(logits) @ values, m = {m:.3f}, z = {z:.3f}")

# %% [markdown]
# gattn's kernels do this for a block of edges at a time, with the processor's vector instructions, and with edges
# sorted by target so that each output row is written once. (Sorting takes time, too. It is done once per `edge_index`
# tensor and remembered.)
#
# The **backward pass** seems to need the weights of all edges. It recomputes them instead: from a logit, $m$ and
# $z$, a weight is one exponential, $\alpha_{ij} = e^{s_{ij} - m_i} / z_i$. If $g_i$ is the gradient of
# $\mathrm{out}_i$, then
#
# $$
# \frac{\partial L}{\partial v_j} = \sum_i \alpha_{ij}\, g_i, \qquad
# \frac{\partial L}{\partial s_{ij}} = \alpha_{ij} \big(g_i^\top v_j - g_i^\top \mathrm{out}_i\big),
# $$
#
# and all of it is made of rows per node and numbers per target and head. That is what the list of kept tensors in
# section 1 showed: outputs and projected features, a key per node and head, and two numbers per target and head,
# which stand for $m$ and $z$. Check the formulas with autograd:

# %%
rows, scores = values[neighbours].requires_grad_(), logits.clone().requires_grad_()
g = torch.randn(C, dtype=torch.float64)
expected_rows, expected_scores = torch.autograd.grad(scores.softmax(0) @ rows, (rows, scores), g)

alpha = (logits - m).exp() / z
equal(alpha.unsqueeze(1) * g, expected_rows)
equal(alpha * (values[neighbours] @ g - out @ g), expected_scores)
print("both formulas agree with autograd")

# %% [markdown]
# ## 5. Who computes a call, and why?
#
# gattn has several **backends**, and they do not all serve every call. `backend="auto"` asks them one after the other
# and takes the first that can. A backend that is named explicitly computes the call or raises an error that says why
# it cannot; it never hands the call to another one silently. So we can simply ask each of them:


# %%
class NegativeDistance(gattn.Score):
    """How near a query and a key are."""

    def logits(self, query, key, edge):
        return -(query - key).square().sum(-1)


class Broadcasting(NegativeDistance):
    """The same, with the promise that `logits` compares all pairs if it gets `[N, 1, H, C]` and `[1, M, H, C]`."""

    broadcasts = True


def bystander(module, inputs):
    """A hook on messages, which must be there for it to look at."""


small = 200
q, k, v = torch.randn(3, small, 2, 8).unbind()
some = torch.randint(small, (2, 1000))
complete = gattn.CompleteGraph(small)
hooked = Attention()
hooked.register_message_forward_pre_hook(bystander)
calls = {
    "a list of edges, dot products": lambda name: gattn.attend(q, k, v, some, backend=name),
    "a complete graph, dot products": lambda name: gattn.attend(q, k, v, complete, backend=name),
    "a list of edges, one's own score": lambda name: gattn.attend(
        q, k, v, some, score=NegativeDistance(), backend=name
    ),
    "a complete graph, one's own score": lambda name: gattn.attend(
        q, k, v, complete, score=NegativeDistance(), backend=name
    ),
    "the same score, which says that it broadcasts": lambda name: gattn.attend(
        q, k, v, complete, score=Broadcasting(), backend=name
    ),
    "a hook on the messages": lambda name: hooked(q, k, v, some, backend=name),
    "inside torch.func.vmap": lambda name: torch.func.vmap(
        lambda scale: gattn.attend(scale * q, k, v, some, backend=name)
    )(torch.ones(2)),
}
for title, call in calls.items():
    print(title)
    automatic, is_chosen = call("auto"), False
    for backend in BACKENDS:
        try:
            out = call(backend.name)
        except (ValueError, RuntimeError) as error:
            answer = "no: " + str(error).partition(": ")[2].removesuffix(" backend='auto' can.")
        else:
            answer = "yes" if is_chosen else "yes, and the first: this is what 'auto' takes"
            if not is_chosen:
                assert torch.equal(out, automatic)  # bit by bit
            is_chosen = True
        print(textwrap.fill(f"{backend.name:10} {answer}", 110, initial_indent="   ", subsequent_indent=" " * 14))

# %% [markdown]
# - **dense** is for complete graphs. For dot products it uses PyTorch's `scaled_dot_product_attention`, and it never
#   lists the edges. Other scores must say that their `logits` broadcast (`broadcasts = True`).
# - **cpu** has the C++ kernels for lists of edges. It also serves complete graphs, as a list of all pairs.
# - **triton** has the kernels for GPUs. Here the tensors are on the CPU, so it refuses.
# - **reference** is PyG's message passing with all its hooks. It serves every call, and is what the others are tested
#   against. You get it without asking when something needs the messages to exist: a hook, an explainer, a
#   `torch.func` transform.
#
# If a model is slower than you expect, name a backend; the error tells you what stands in its way.
#
# ## 6. How exact are the results?
#
# Kernels add in another order than PyTorch's operations, so the last digits may differ. Whether that is a loss
# is a question for a more exact computation. We compute everything once more in float64 with the `reference` backend,
# from the very same (rounded) inputs and weights, and take the largest difference, relative to the largest output, at
# the hub and elsewhere.
#
# The graph has a *hub*: a third of its edges point to node 0. Long sums are where rounding hurts.

# %%
hub = edge_index.clone()
hub[1, : E // 3] = 0
errors = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    peers = {"PyG": GATConv(64, C, heads=H, add_self_loops=False), "gattn, reference": None, "gattn, kernels": None}
    peers["PyG"].load_state_dict(theirs.state_dict())
    peers["PyG"].to(dtype)
    exact = gattn.nn.GATConv(64, C, heads=H, add_self_loops=False).double()
    exact.load_state_dict(peers["PyG"].state_dict())  # rounded already
    for name in ("gattn, reference", "gattn, kernels"):
        peers[name] = gattn.nn.GATConv(64, C, heads=H, add_self_loops=False).to(dtype)
        peers[name].load_state_dict(peers["PyG"].state_dict())
    inputs = x.to(dtype)
    with torch.no_grad():
        with gattn.backend("reference"):
            wanted = exact(inputs.double(), hub)
        for name, layer in peers.items():
            with gattn.backend("cpu" if name == "gattn, kernels" else "reference"):
                difference = (layer(inputs, hub).double() - wanted).abs()
            parts = slice(0, 1), slice(1, None)  # the hub, and the others
            errors[dtype, name] = [(difference[part].max() / wanted[part].abs().max()).item() for part in parts]

print(f"{'':16} {'error at the hub':^50} {'error elsewhere':^50}")
names = ["PyG", "gattn, reference", "gattn, kernels"]
print(f"{'':16}" + "".join(f"{name:>17}" for _ in range(2) for name in names) + "   one rounding")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    cells = [f"{errors[dtype, name][part]:17.1e}" for part in range(2) for name in names]
    print(f"{str(dtype).removeprefix('torch.'):16}" + "".join(cells) + f"{torch.finfo(dtype).eps / 2:15.1e}")

# %% [markdown]
# The last column is the error of a single rounding, and the scale for everything else. In float32, look at the hub:
# every addition rounds, and a sum of 20 000 terms adds up many small errors. The kernels sum up parts of such a long
# row and then the parts, which keeps the error lower than adding one term after the other. In bfloat16 and float16,
# gattn stores features in the short type but computes in float32, in the reference as in the kernels, and rounds the
# output once. PyG's operations each round their results, so PyG's errors are somewhat larger. All of these errors
# are small: choose a backend for its speed, not for its digits.
#
# ## 7. Your own score at full speed
#
# A score of one's own is a subclass of `gattn.Score` with a formula for the two ends of edges, such as
# `NegativeDistance` above. The kernels cannot know it. Must it then make the tensors $[E, H, C]$ after all? It must,
# but not all at once: `logits` is called for some edges at a time, and what remains of each part are its logits, one
# number per edge and head. The softmax and the weighted sum are the kernels' again. In the backward pass, each part
# is computed once more. A score that writes down what it is asked for shows this:


# %%
class Watched(NegativeDistance):
    """Notes the number of edges of each call."""

    def __init__(self):
        self.sizes = []

    def logits(self, query, key, edge):
        self.sizes.append(len(key))
        return super().logits(query, key, edge)


q, k, v = (torch.randn(N, H, C, requires_grad=True) for _ in range(3))
watched = Watched()
out = gattn.attend(q, k, v, edge_index, score=watched)
forward = list(watched.sizes)
out.sum().backward()
print(f"forward pass: {E} edges in {len(forward)} parts of {min(forward)} to {max(forward)}")
print(
    f"backward pass: {sum(watched.sizes) - sum(forward)} edges once more, in {len(watched.sizes) - len(forward)} parts"
)
print(
    f"one part [edges, H, C] has at most {max(forward) * H * C * 4 / MB:.1f} MB, all edges have {per_edge / MB:.1f} MB"
)
assert sum(forward) == E
assert max(forward) < E / 4

# %% [markdown]
# The parts take turns in the same small piece of memory. (Their sizes differ a little, so that what one part gives
# back fits the next.) Some formulas can be made faster still, with pencil and paper. The distance is one of them:
#
# $$ -\lVert q_i - k_j \rVert^2 = 2\, q_i^\top k_j - \lVert k_j \rVert^2 - \lVert q_i \rVert^2 . $$
#
# The last term is the same for all neighbours of $i$, so it cancels in the softmax. What is left is a dot
# product of the vectors $[2 q_i, 1]$ and $[k_j, -\lVert k_j \rVert^2]$, for which there is a kernel. The cell checks
# that all ways agree, gradients included, and measures them:


# %%
def folded(q, k, v):
    """The attention of NegativeDistance as dot products."""
    query = torch.cat([2 * q, torch.ones_like(q[..., :1])], -1)
    key = torch.cat([k, -k.square().sum(-1, keepdim=True)], -1)
    return gattn.attend(query, key, v, edge_index, score=gattn.DotScore(scale=1.0))


ways = {
    "reference, all edges at once": lambda: gattn.attend(
        q, k, v, edge_index, score=NegativeDistance(), backend="reference"
    ),
    "own score, part by part": lambda: gattn.attend(q, k, v, edge_index, score=NegativeDistance()),
    "folded into dot products": lambda: folded(q, k, v),
    "plain dot products": lambda: gattn.attend(q, k, v, edge_index),
}
expected = torch.autograd.grad(ways["reference, all edges at once"]().square().sum(), (q, k, v))
own_times = {}
for name, way in ways.items():
    if name != "plain dot products":
        for found, wanted in zip(torch.autograd.grad(way().square().sum(), (q, k, v)), expected, strict=True):
            equal(found, wanted, atol=1e-3, rtol=1e-3)
    own_times[name] = seconds(lambda way=way: way().sum().backward())
    quartiles = "{1:6.1f} ms ({0:.1f} – {2:.1f})".format(*(1e3 * t for t in own_times[name]))
    print(f"{name:30} {quartiles:28} keeps {sum(size for _, size in kept(way, q, k, v, edge_index)) / MB:5.1f} MB")

figure, ax = plt.subplots(figsize=(6.2, 1.8), layout="constrained")
for place, (low, middle, high) in enumerate(own_times.values()):
    bars = [[1e3 * (middle - low)], [1e3 * (high - middle)]]
    ax.barh(place, 1e3 * middle, xerr=bars, capsize=3, height=0.6, color=COLOURS[0] if place else COLOURS[1])
ax.set_yticks(range(len(own_times)), own_times)
ax.invert_yaxis()
ax.set_xlabel("ms, forward + backward (median, quartiles)")
ax.spines["left"].set_visible(False)

# %% [markdown]
# Look at the second line and at the second bar. The part-by-part computation keeps far less than the reference,
# although both compute the same formula with the same plain operations of PyTorch. It computes it twice, the second
# time in the backward pass; compare the bars to see whether that made it slower. That formula is most of its time: in
# the third bar it is inside a kernel.
#
# ## 8. What `torch.compile` adds
#
# `torch.compile` takes Python code, records the operations, and generates code that fuses them where it can. A
# natural question is whether it makes special kernels unnecessary. Let us first see what it gets. A compiler of our
# own, which only prints the operations, shows them:


# %%
def printed(module, inputs):
    """A compiler that prints the operations and changes nothing."""
    operations = [str(node.target) for node in module.graph.nodes if node.op in ("call_function", "call_method")]
    names = [getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes if "call" in node.op]
    print(f"{len(operations)} operations:", *names)
    return module.forward


for name, layer in (("PyG", theirs), ("gattn", ours)):
    print(f"{name}, ", end="")
    torch.compiler.reset()
    equal(torch.compile(layer, backend=printed, fullgraph=True)(x, edge_index), layer(x, edge_index))

# %% [markdown]
# PyG's layer becomes a long list of elementary operations: an opportunity for the compiler, which can fuse those that
# follow each other edge by edge. gattn's layer is shorter, because the whole attention is a single operation,
# `attention.default`. To the compiler it is a black box that it schedules like a matrix product. It knows the shapes
# of the results and where to find the gradient, so nothing breaks the graph (with `fullgraph=True`, a break
# would be an error).
#
# Now PyTorch's real compiler, Inductor, which needs a C++ compiler. Compiling takes its time, but only once (the
# first time includes starting the compiler). Then we look at the time of a call and at memory:

# %%
if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
    print(f"{'':18} {'compiling':>10} {'forward + backward':>26} {'allocated':>12} {'kept':>10}")
    for name, layer in (("PyG", theirs), ("gattn", ours)):
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True)
        start = time.perf_counter()
        equal(step(compiled, x, edge_index), step(layer, x, edge_index), atol=1e-4, rtol=1e-4)
        waited = f"{time.perf_counter() - start:.0f} s"
        for kind, version, wait in (("eager", layer, ""), ("compiled", compiled, waited)):
            quartiles = seconds(lambda version=version: step(version, x, edge_index))
            spread = "{1:.0f} ms ({0:.0f} – {2:.0f})".format(*(1e3 * t for t in quartiles))
            total = sum(row[3] for row in allocations(version)) / MB
            held = sum(size for _, size in kept_by(version, x, edge_index)) / MB
            print(f"{name + ', ' + kind:18} {wait:>10} {spread:>26} {total:9.0f} MB {held:7.1f} MB")
else:
    print("no C++ compiler was found")

# %% [markdown]
# Compare PyG's two rows: the compiler removes many of the intermediate tensors, and what it saves in memory shows in
# the time. (PyG's eager row need not repeat the time of section 2: what the allocator has learnt since then decides
# whether its tensors of 30.7 MB cost page faults.) But a compiler that fuses operations does not change the
# algorithm: the sums over edges are still scattered. Look also at what is kept for the backward pass: the compiler
# chooses it among the tensors of the program that it was given. gattn's rows differ less, since little was left to
# fuse. In a whole model, compiling also fuses what lies around attention, such as activations, norms and dropout, and
# there it helps both.
#
# ## What to remember
#
# - What costs time in graph attention is memory: tensors with one row per edge, written and read again by each
#   operation, and the page faults of fresh ones.
# - A fused kernel makes none of them. It computes the softmax while it reads, keeps a maximum and a sum per target,
#   and recomputes weights in the backward pass.
# - A comparison of speeds should say which allocator it used, whether results were checked, and how much the times
#   spread.
# - `backend="auto"` takes the first backend that can serve a call. If you name one, an error says what is in the way.
# - A score of one's own is computed for some edges at a time, and the kernels do the rest. See first whether it can
#   be folded into dot products.
#
# ## Exercises
#
# 1. In section 1, set $H = 1$ and $C = 128$. Which entries of the lists change, and which stay the same? Predict it
#    before you run it.
# 2. Add `dropout=0.6` to both layers. What does PyG keep now, and what does gattn keep? (gattn makes the same random
#    decisions twice, from one seed, instead of storing them.)
# 3. Fill tensors of 1, 16 and 64 MB ten times each in the way of section 3. For which sizes do the faults stop after
#    a while, and why? At which size does this change on your machine?
# 4. `attend_to_one` reads its neighbours one by one. Split them into two halves, compute $(m, z, o)$ for each half,
#    and combine the two triples. Why is this what one needs to compute a single target on several threads?
# 5. Write the score $s(q, k) = -\lVert q - k \rVert_1$. Can it be folded into a dot product? Measure it on a list of
#    edges and on a complete graph, with and without `broadcasts = True`.
# 6. Set `torch.set_num_threads` to the number of your cores and run section 2 again. Which of the two lines moves,
#    and at which sizes?
