"""Mutation tests: small, plausible mistakes in the code, one at a time, each of which the tests must notice.

    python -m tests.mutations --output mutations.csv

All mistakes in C++ go into one build; when the library is loaded, `GATTN_MUTANT` selects one of them. Mistakes in
Python go into copies of the package. The exit status is 0 if all were noticed. In the text of a mutation,
`«right → wrong»` is what changes, and the surrounding text says where. It must occur in the code exactly once.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: The folder of the C++ kernels; a mutation's text may be in any of its files.
KERNELS = "gattn/ops/backends/cpu/csrc"
LAYOUT, MEANS, MATRIX, TILES, SUMS, BY_SOURCE = (
    f"{KERNELS}/{name}"
    for name in ("layout.cpp", "means.h", "matrix.h", "tiles.h", "products.h", "backward_by_source.h")
)
TILE_CALLS, CPU_TILES, TRITON_TILES, GPU_CALLS = (
    f"gattn/ops/backends/dense/{name}.py" for name in ("tiles", "cpu_tiles", "triton_tiles", "gpu_tiles")
)
TRITON, TRITON_LAYOUT = "gattn/ops/backends/triton", "gattn/ops/backends/triton/layout.py"
REORDERING, TRANSFORMS, MATRIX_CALLS, PAIRS = (
    f"gattn/{name}.py"
    for name in ("graphs/reordering", "transforms/reorder", "ops/backends/cpu/matrix", "ops/backends/cpu/pairs")
)
DENSE, REFERENCE, CUSTOM_PARTS, EDGE_LISTS, GRAPH, BASE, EDGES, PLANS, KERNEL_PLANS, CPU, OPERATOR = (
    f"gattn/{name}"
    for name in (
        "ops/backends/dense",
        "ops/reference.py",
        "ops/custom_parts.py",
        "graphs/edge_lists.py",
        "graphs/base.py",
        "ops/backends/base.py",
        "edges.py",
        "ops/plans.py",
        "ops/backends/kernels.py",
        "ops/backends/cpu",
        "ops/operator.py",
    )
)

LINEAR = "gattn/ops/backends/dense/linear.py"
BIAS, FEATURES, STRUCTURE = (f"gattn/{name}.py" for name in ("bias", "features", "structure"))
CACHE, MULTIHEAD = "gattn/nn/transformers/key_value_cache.py", "gattn/nn/transformers/multihead_attention.py"
RADIAL, RADIAL_CALLS = "gattn/ops/backends/cpu/csrc/radial.h", "gattn/ops/radial.py"
PAIR_ROOTS, PAIR_ROOT_CALLS = "gattn/ops/backends/cpu/csrc/pair_roots.h", "gattn/ops/pair_roots.py"
EXPHORMER, DOT_GAT, EDGE_GAT, BIASED, ENCODERS, EGT_LAYER, TEMPORAL, HGT, ATTENTION_CONV, FACTORS = (
    f"gattn/nn/{name}.py"
    for name in (
        "transformers/exphormer_conv",
        "graph/dgl_conv",
        "graph/edge_gat_conv",
        "transformers/graphormer_layer",
        "transformers/graph_encoders",
        "transformers/egt_layer",
        "graph/temporal",
        "hetero/hgt_conv",
        "shared/attention_conv",
        "shared/edge_features",
    )
)
GRAPHORMER, PATHS = "gattn/models/graphormer.py", "gattn/transforms/structure.py"
ALL_PAIRS, PERFORMER, SGFORMER, POLYNORMER, SETS, AGGREGATIONS, PATCHES, EGT, GRIT, TGAT = (
    f"gattn/nn/{name}.py"
    for name in (
        "transformers/all_pairs",
        "transformers/performer_attention",
        "transformers/sgformer_attention",
        "transformers/polynormer_attention",
        "pooling/set_transformer",
        "pooling/aggregations",
        "pooling/patch_transformer",
        "transformers/egt_conv",
        "transformers/grit_conv",
        "graph/tgat_conv",
    )
)
OPEN_BLOCKS, TILE_OPERATOR, LINEAR_OPERATOR, DEGREES, LOOPS, SUPERGAT = (
    f"gattn/{name}.py"
    for name in (
        "graphs/complete",
        "ops/backends/dense/tile_operator",
        "ops/backends/dense/linear_operator",
        "nn/shared/degrees",
        "graphs/sparse",
        "nn/graph/supergat_conv",
    )
)
PRODUCTS, DROPOUT = "gattn/products.py", "gattn/nn/shared/dropout.py"
SGFORMER_MODEL, POLYNORMER_MODEL = (f"gattn/models/{name}.py" for name in ("sgformer", "polynormer"))
GCN, LPFORMER, PAIR_BIAS = "gattn/nn/graph/gcn_conv.py", "gattn/models/lpformer.py", "gattn/pair_bias.py"
BLOCKS, PAIR_LAYERS = (f"gattn/nn/transformers/{name}.py" for name in ("graph_blocks", "pair_layers"))
BLOCK_LISTS = "gattn/graphs/block_lists.py"
MASKS, FUNCTION, POSITIONS, SWAPPED = (
    f"gattn/huggingface/{name}.py" for name in ("masks", "function", "positions", "swapped")
)
DENSE_INIT, DISPATCH = "gattn/ops/backends/dense/__init__.py", f"{KERNELS}/dispatch.cpp"

#: The tests that should notice a mutation, in the order in which they run.
TESTS = {
    KERNELS: [
        "tests/ops/test_lists.py",
        "tests/ops/test_cpu.py",
        "tests/ops/test_score_variants.py",
        "tests/ops/test_laws_of_rows.py",
    ],
    DISPATCH: ["tests/ops/test_cpu.py"],
    BLOCK_LISTS: ["tests/test_block_graph.py"],
    **{file: ["tests/huggingface/test_masks.py"] for file in (MASKS, FUNCTION, POSITIONS, SWAPPED)},
    RADIAL: ["tests/ops/test_radial.py"],
    RADIAL_CALLS: ["tests/ops/test_radial.py"],
    MEANS: ["tests/ops/test_laws_of_rows.py"],
    MATRIX: ["tests/ops/test_laws_of_rows.py"],
    **{file: ["tests/ops/test_tiles.py"] for file in (TILE_CALLS, CPU_TILES)},
    TILES: ["tests/test_block_graph.py", "tests/ops/test_tiles.py"],
    SUMS: ["tests/test_products.py"],
    BY_SOURCE: ["tests/ops/test_plans.py"],
    **{
        file: [f"tests/ops/test_tiles.py::test_{name}" for name in ("a_few_cells_on_a_gpu", "dropout_on_a_gpu")]
        for file in (TRITON_TILES, GPU_CALLS)
    },
    LAYOUT: ["tests/ops/test_layout.py", "tests/ops/test_cpu.py", "tests/ops/test_compiled.py"],
    TRITON: ["tests/ops/test_triton.py"],
    TRITON_LAYOUT: ["tests/ops/test_triton.py"],
    **{file: ["tests/test_authors.py"] for file in (BLOCKS, LPFORMER)},
    PAIR_LAYERS: ["tests/nn/test_alphafold.py"],
    **{file: ["tests/test_pair_bias.py"] for file in (PAIR_BIAS, DENSE_INIT)},
    DENSE: ["tests/ops/test_dense.py", "tests/ops/test_plans.py", "tests/ops/test_tiles.py"],
    PAIRS: ["tests/ops/test_dense.py"],
    LINEAR: ["tests/ops/test_linear.py"],
    BIAS: ["tests/test_bias.py"],
    FEATURES: ["tests/test_features.py"],
    **{
        file: ["tests/nn/test_all_pairs.py"]
        for file in (ALL_PAIRS, PERFORMER, SGFORMER, POLYNORMER, SETS, AGGREGATIONS, PATCHES)
    },
    **{
        file: ["tests/nn/test_pair_layers.py", "tests/test_authors.py"]
        for file in (EGT, GRIT, TGAT, EXPHORMER, PAIR_ROOTS, PAIR_ROOT_CALLS)
    },
    **{file: ["tests/nn/test_dgl_layers.py"] for file in (DOT_GAT, EDGE_GAT, BIASED, ENCODERS, EGT_LAYER)},
    **{file: ["tests/nn/test_edge_weight.py"] for file in (ATTENTION_CONV, FACTORS)},
    **{file: ["tests/nn/test_multihead_attention.py"] for file in (CACHE, MULTIHEAD)},
    PRODUCTS: ["tests/test_products.py"],
    **{
        file: ["tests/test_compiled_whole.py"]
        for file in (OPEN_BLOCKS, TILE_OPERATOR, LINEAR_OPERATOR, DEGREES, LOOPS, SUPERGAT)
    },
    DROPOUT: ["tests/nn/test_dropout.py"],
    TEMPORAL: ["tests/nn/test_temporal_layers.py"],
    HGT: ["tests/nn/test_hgt_conv.py"],
    GRAPHORMER: ["tests/models/test_graphormer.py"],
    PATHS: ["tests/test_structure.py"],
    **{file: ["tests/models/test_graph_transformers.py"] for file in (SGFORMER_MODEL, POLYNORMER_MODEL)},
    GCN: ["tests/models/test_graph_transformers.py", "tests/nn/test_gcn_conv.py"],
    STRUCTURE: ["tests/test_structure.py", "tests/nn/test_positional.py"],
    REFERENCE: ["tests/test_attention.py", "tests/ops/test_cpu.py", "tests/ops/test_dense.py"],
    CUSTOM_PARTS: ["tests/ops/test_custom_parts.py"],
    GRAPH: ["tests/ops/test_custom_parts.py"],
    BASE: ["tests/test_verbs.py"],
    EDGES: ["tests/test_verbs.py", "tests/test_attention.py"],
    PLANS: ["tests/ops/test_plans.py"],
    KERNEL_PLANS: ["tests/ops/test_plans.py"],
    CPU: ["tests/ops/test_plans.py"],
    OPERATOR: ["tests/ops/test_plans.py"],
    REORDERING: ["tests/test_reordering.py"],
    TRANSFORMS: ["tests/test_transforms.py"],
    MATRIX_CALLS: ["tests/ops/test_laws_of_rows.py"],
    EDGE_LISTS: [
        "tests/ops/test_triton.py",
        "tests/test_graphs.py",
        "tests/ops/test_layout.py",
        "tests/nn/test_layers.py",
    ],
}


class Place(NamedTuple):
    """A file, the start and end of a mistake in it, the right text and the wrong one."""

    file: str
    start: int
    end: int
    right: str
    wrong: str


class Mutation(NamedTuple):
    """A mistake: its name, its file (or the folder of that file), and the text around `«right → wrong»`."""

    name: str
    file: str
    text: str

    def place(self) -> Place:
        """The place of the mistake."""
        before, _, rest = self.text.partition("«")
        change, _, after = rest.partition("»")
        right, _, wrong = (part.strip(" ") for part in change.partition("→"))
        context = before + right + after
        path = ROOT / self.file
        sources = {x: x.read_text() for x in (sorted(path.glob("*.*")) if path.is_dir() else [path])}
        counts = {path: source.count(context) for path, source in sources.items() if context in source}
        if list(counts.values()) != [1]:
            raise SystemExit(
                f"{self.name}: {self.file} contains {context!r} {sum(counts.values())} times instead of once."
            )
        (path,) = counts
        start = sources[path].index(context) + len(before)
        return Place(path.relative_to(ROOT).as_posix(), start, start + len(right), right, wrong)

    @property
    def compiled(self) -> bool:
        return self.file.startswith(KERNELS)


MUTATIONS = [
    Mutation("a window sees a token more", MASKS, 'Pattern(«window - 1 → window», None) if kind == "before"'),
    Mutation("chunks are a token longer", MASKS, 'position.div(«size → size + 1», rounding_mode="floor")'),
    Mutation("chunks begin in the padding", MASKS, "is None else position - «padding → 0 * padding»[:, None]"),
    Mutation(
        "missing padding is on the left",
        MASKS,
        "F.pad(padding, «(0, max(end - padding.shape[-1], 0)) → (max(end - padding.shape[-1], 0), 0)»)",
    ),
    Mutation("slots that are not written are seen", MASKS, "m = «min(m, n + offset) → m»  # a static cache"),
    Mutation("packed texts see each other", MASKS, 'texts=«(cells["packed_sequence_mask"],) → ()»'),
    Mutation("models have no soft caps", FUNCTION, "s_aux.reshape(-1), «softcap → None»)"),
    Mutation("models have no sinks", FUNCTION, "Softmax(«None if s_aux is None else s_aux.reshape(-1) → None»,"),
    Mutation("products have the usual scale", FUNCTION, '"score": DotScore(«scaling → None»)'),
    Mutation("heads are not scaled", FUNCTION, "return out if head_mask is «None → head_mask» else"),
    Mutation("a target's sink takes nothing", FUNCTION, "out = out * «part.unsqueeze(-1) → 1»"),
    Mutation("distances begin with the text", POSITIONS, "first = -(«past → 0» + n - 1)"),
    Mutation("only the other layers have the graph", SWAPPED, "number «not in → in» self.layers:"),
    # ----------------------------------------------------------------------------------------------- channels and edges
    Mutation(
        "a last channel alone is skipped",
        KERNELS,
        "c += W;\n  if («c < channels → c + 1 < channels») f(Strip<1, true>",
    ),
    Mutation("a strip of two vectors counts as one", KERNELS, "2 * W}), «c += 2 * W → c += W»;"),
    Mutation(
        "a long row ends only where its last block is full",
        KERNELS,
        "p == first, whole.ends && «p + n == last → p + kBlock == last»}",
    ),
    Mutation("a row that just fits starts no new block", KERNELS, "last - first > «kBlock - n → kBlock - n + 1»)"),
    Mutation("a row's sum forgets its earlier blocks", KERNELS, "«if (!run.begins) sum = heads.load_at(to, k); →»"),
    # ------------------------------------------------------------------------------------------------------- the scores
    Mutation("the slope has the wrong sign", KERNELS, "return x > A(0) ? x : «x * slope → x * -slope»;"),
    Mutation(
        "the slope of a sum is its square",
        KERNELS,
        "store(logits + at, «applied.value → applied.value * applied.derivative»);\n    }\n  }\n};",
    ),
    Mutation(
        "channels of the edge's other end lack the slope",
        KERNELS,
        "of_ends = «gradient * score.derivative → gradient»;",
    ),
    Mutation(
        "channels that are heads lose their delta",
        KERNELS,
        "own_value[k] * grad - «strip.load_at(delta, k) → Vec<A>{}»",
    ),
    Mutation("tanh has another derivative", KERNELS, "y = vector_tanh(x);\n        return {y, A(1) - «y * y → y»};"),
    Mutation("GELU's derivative lacks a term", KERNELS, "below + «x * (A(0.39894228040143268) * density) → Vec<A>{}»}"),
    Mutation("GELU's density is not squared", KERNELS, "bounded_exp(A(-0.5) * «x * x → x»)"),
    Mutation("the last of several vectors is left out", KERNELS, "apply_all(values, nullptr, «n * S::kVectors → n»)"),
    Mutation("derivatives of several edges are the first's", KERNELS, "derivatives[«e → 0» * S::kVectors + k]"),
    Mutation("kept logits are those of the first edges", KERNELS, "this->kept(position[«e → 0»], b));"),
    Mutation(
        "the rows of a kept block are not whole", KERNELS, "if («runs[0].begins && last.ends → runs[0].begins») {"
    ),
    Mutation(
        "a long row begins at its end",
        KERNELS,
        "this->cut_row({last.row, 0, 0, true, true}, start[0], «start[1] → start[1] - 1»,",
    ),
    Mutation("a hub is not rewritten", KERNELS, "if («pass.is_of_rows() && rows.num_split > 0 → false»)"),
    Mutation("ties are kept from the end", KERNELS, "if (logit == equal && «left-- <= 0 → true»)"),
    Mutation("a threshold stops early", KERNELS, "«if (!any_lane(grows)) break; → break;»"),
    Mutation("entmax is sparsemax with a root", KERNELS, "return {«root * root → root», root};"),
    Mutation(
        "numbers beside a row count",
        KERNELS,
        "first_lanes_of<A>(load_part(logits + i * stride, n), «beside → Vec<A>{}», n)",
    ),
    Mutation("-0 is less than 0", KERNELS, "x == x ? «x + A(0) → x» :"),
    Mutation("a mean leaves out what dropout takes", MEANS, "«finish_products(b, n); →»"),
    Mutation("a mean is a sum", MEANS, "«acc[h] / acc_key[h] → acc[h]»"),
    Mutation(
        "a hub's mean is that of its last part",
        MEANS,
        "«acc[h] += partial(b, slot)[h] → acc[h] = partial(b, slot)[h]», acc_key",
    ),
    Mutation("a mean has no edges' values", MEANS, "const T* const* edges = «value_edges(b, n) → nullptr»;"),
    Mutation("a matrix's weights are not divided", MATRIX, "return «x * scale → x»;"),
    Mutation("a matrix's gradient has no mean", MATRIX, "derivative * («gradient - mean → gradient»)"),
    Mutation("a matrix's rest is not differentiated", MATRIX, "const int lanes = int(«min(W, count - at) → W»);"),
    Mutation("a matrix's entmax has another derivative", MATRIX, "derivative = «vector_sqrt(weight) → weight»;"),
    Mutation("clamped logits keep their slope", KERNELS, "y > high ? «Vec<A>{} → derivative» :"),
    Mutation("a multiplied edge is not in the key's gradient", KERNELS, "multiplies ? «other * edge → other» : other}"),
    Mutation("all edges have the first one's type", KERNELS, "type[e] = a.edge_type[edge[«e → 0»]];"),
    Mutation(
        "a type's gradient is that of its last edge",
        KERNELS,
        "«strip.load_at(to, k) → Vec<A>{}» + strip.load_at(row, k));",
    ),
    Mutation("a slope is zero in the derivative", KERNELS, "splat<Vec<A>>(A(1)) : «splat<Vec<A>>(slope) → Vec<A>{}»};"),
    Mutation(
        "the derivative leaves out the edge",
        KERNELS,
        "applied = «family.template apply<kOwn>(fixed[k], other[k], edge)"
        " → family.template apply<kOwn>(fixed[k], other[k], None{})»;",
    ),
    Mutation("logits by source leave out the edge", KERNELS, "else return «with_edge(own, edge) → own» * other;"),
    Mutation("the scale is forgotten in the query's gradient", KERNELS, "«weigh(sums, H * C); →»"),
    Mutation(
        "the scale is forgotten",
        KERNELS,
        "const Vec<A> gradient = «load(gradients + at) * family.scale() → load(gradients + at)»;",
    ),
    Mutation(
        "the edge's gradient leaves out the edge",
        KERNELS,
        "apply<kSource>(«strip.load_at(score_edge[e] + h * C, k) → Vec<A>{}», strip",
    ),
    Mutation("signs of all strips are read from the first", KERNELS, "signs_offset + «strip.first / 8 → 0» + k"),
    # ------------------------------------------------------------------------------------------- the bias of the output
    Mutation(
        "rows in one part lack the output's bias",
        KERNELS,
        "heads.spread(scale, k);\n          strip.store_at(out + h * V, k, «bias == nullptr → true» ?",
    ),
    Mutation(
        "rows in several parts lack the output's bias",
        KERNELS,
        "k) * by;\n          strip.store_at(out + h * V, k, «bias == nullptr → true» ?",
    ),
    Mutation(
        "the output's bias stays in delta",
        KERNELS,
        "output(i, b) + h * V, k) - «strip.load_at(bias + h * V, k) → Vec<A>{}»;",
    ),
    # ------------------------------------------------------------------------------------------- bias, mask and dropout
    Mutation(
        "no bias beside an edge term", KERNELS, "if («a.bias != nullptr → a.bias != nullptr && !a.edge») add_edge"
    ),
    Mutation(
        "all of a batch get the first bias", KERNELS, "add_edge_scalars(a.bias, «a.bias_batch → 0», b, n, logits)"
    ),
    Mutation("all heads get the first head's mask", KERNELS, "a.mask_edge + «h * a.mask_head → 0»]"),
    Mutation("all of a batch get the first mask", KERNELS, "a.mask + b * «a.mask_batch → 0»;"),
    Mutation(
        "the backward pass forgets bias and mask", KERNELS, "«if (!this->keeps_logits) this->finish_logits(b, n); →»"
    ),
    Mutation("all of a batch drop the same", KERNELS, "uint64_t((«b * a.edges + edge[e] → edge[e]») * H)"),
    Mutation("what dropout keeps is not scaled", KERNELS, "const A scale = A(«a.keep_scale → 1.0»);"),
    Mutation("the value's gradient ignores dropout", KERNELS, "a.dropout ? «kept * load(keep + at) → kept» : kept"),
    Mutation(
        "the weights' gradient ignores dropout",
        KERNELS,
        "store(products + at, load(products + at) * «load(keep + at) → splat<Vec<A>>(A(1))»);",
    ),
    # ------------------------------------------------------------------------------------------------------ the softmax
    Mutation(
        "the maximum is not subtracted", KERNELS, "vector_exp(lanes.load_or(logits + at, lowest) - «base → Vec<A>{}»)"
    ),
    Mutation(
        "a fully masked row is NaN",
        KERNELS,
        "exp(-inf + inf).\n    const Vec<A> base = «most == -A(INFINITY) ? Vec<A>{} : most → most»;",
    ),
    Mutation(
        "a running sum keeps its old maximum",
        KERNELS,
        "total_weight += «repeat_heads(sum) * by → repeat_heads(sum)»;",
    ),
    Mutation(
        "a running sum keeps its old maximum, other heads",
        KERNELS,
        "heads.store_at(factor_, k, «vector_exp(before - base) → Vec<A>{} + A(1)»);",
    ),
    Mutation(
        "a running output keeps its old maximum",
        KERNELS,
        "sum[k] = «strip.load_at(acc + h * V, k) * heads.spread(factor, k) → strip.load_at(acc + h * V, k)»;",
    ),
    Mutation("a part of a hub keeps its own maximum", KERNELS, "part[c] * «new_factor → A(1)»;"),
    Mutation("a hub's sum keeps its old maximum", KERNELS, "sum[h] = «sum[h] * old_factor → sum[h]» + state"),
    Mutation(
        "a fully masked hub is infinite",
        KERNELS,
        "static INLINE Vec<A> reciprocal(Vec<A> x) { return «x == A(0) ? Vec<A>{} : A(1) / x → A(1) / x»; }",
    ),
    Mutation(
        "a part of a hub leaves out its last weight", KERNELS, "logit, «task.last_edge → task.last_edge - 1», b);"
    ),
    Mutation("a part of a hub has no logits", KERNELS, "A(kNever) : A(«first_logit - first_edge → kNever»);"),
    Mutation(
        "weights without a base stay those",
        KERNELS,
        "slopes, k, «vector_exp(-heads.load_at(base, k)) → splat<Vec<A>>(A(1))» *",
    ),
    Mutation("logits are taken for weights", KERNELS, "if (p < «first_logit → last»)"),
    Mutation("sums may be huge", KERNELS, "totals[h] > kTiny && «totals[h] < 1 / kTiny → true»;"),
    Mutation("sums may be tiny", KERNELS, "is = is && «totals[h] > kTiny → true» &&"),
    Mutation("a sum without a base has no sink", KERNELS, "else if («has_sink → false») total += weight_of_sink;"),
    Mutation("a sum without a base forgets the row", KERNELS, "begins) total += «repeat_heads(sum) → Vec<A>{}»;"),
    Mutation(
        "gradients of a part are stored as a row's",
        KERNELS,
        "std::is_same_v<T, A> && «run.begins && run.ends → run.ends» && gradients",
    ),
    Mutation(
        "dropout is no part of a kept weight's value",
        KERNELS,
        "store(logits + at, «weight * load(keep + at) → weight»);",
    ),
    # --------------------------------------------------------------------------------------------- other distributions
    Mutation("each part of a hub has the sink", KERNELS, "has_sink = «sink != nullptr && !is_part → sink != nullptr»;"),
    Mutation("a hub has no sink", KERNELS, "maximum[h] = «sink != nullptr ? sink[h] : -A(INFINITY) → -A(INFINITY)»;"),
    Mutation("a sink takes no weight", KERNELS, "if («begins_with_sink → false») {"),
    Mutation("a cap has no derivative", KERNELS, "store(derivatives + at, «law.cap == 0 → true» ?"),
    Mutation(
        "gates depend on each other", KERNELS, "delta = «is_normalized ? terms[e] + 2 * H : none → terms[e] + 2 * H»;"
    ),
    Mutation("a sum forgets its epsilon", KERNELS, "reciprocal(«sums + law.epsilon → sums»)"),
    Mutation(
        "rows of a block share a gradient of keys", KERNELS, "A* const sums = «acc_key + r * key_width() → acc_key»;"
    ),
    Mutation(
        "rows of a block share a gradient of queries", KERNELS, "A* const sums = «acc + r * query_width() → acc»;"
    ),
    Mutation("rows of a block have the first one's scale", KERNELS, "«scale += sums.scale_stride(); →»"),
    Mutation(
        "heads of few channels change places",
        KERNELS,
        "shuffle(total, («lane % kPerVector * kChannels + lane / kPerVector → lane») & (W - 1));",
    ),
    Mutation("heads of few channels have the first ones' numbers", KERNELS, "LaneInt<A>(«k * (W / kChannels) → 0»));"),
    Mutation("numbers of edges are not added", KERNELS, "load(to + at) + «load(gradients + at) → Vec<A>{}»);"),
    Mutation("rows of a block share a gradient of values", KERNELS, "G * V, «acc + r * G * V → acc»);"),
    Mutation(
        "edges add nothing to products with values",
        KERNELS,
        "other[k] *= «fixed[k] + segment.template edge<kRows>(strip, e, k) → fixed[k]»;",
    ),
    Mutation(
        "gates of channels begin each block anew",
        KERNELS,
        "total[k] = «run.begins → true» ? Vec<A>{} : strip.load_at(acc",
    ),
    Mutation(
        "gates of channels forget the output's bias", KERNELS, "result + «strip.load_at(out_bias, k) → Vec<A>{}»);"
    ),
    Mutation("a masked edge has a weight", KERNELS, "return {«is_edge ? y.value : Vec<A>{} → y.value», is_edge"),
    # ---------------------------------------------------------------------------------------------------- the gradients
    Mutation(
        "delta is taken of the rounded output", KERNELS, "if («a.out_wide != nullptr → false») products[k] *= strip"
    ),
    Mutation(
        "delta leaves out the weights' gradient",
        KERNELS,
        "«terms[2 * H + h] += weights[at + h] * grads[at + h]; →»",
    ),
    Mutation(
        "only a hub's last part counts, by source",
        KERNELS,
        "«acc_key[c] += from[G * V + c]; → acc_key[c] = from[G * V + c];»",
    ),
    Mutation(
        "only a hub's last part counts, by target",
        KERNELS,
        "query_width(); ++c) «acc[c] += from[c]; → acc[c] = from[c];»",
    ),
    Mutation(
        "the vector's gradient leaves out hubs",
        KERNELS,
        "if (task.slot >= 0) {\n      «this->add_source_to_vector_gradient(task.first_row, b, acc_key); →»",
    ),
    Mutation(
        "the vector's gradient is of the last of a batch", KERNELS, "(«task * a.batch + b → task * a.batch») * H * C;"
    ),
    Mutation("logits' gradients in another order", KERNELS, "terms + «position[e] → (p + e)» * H);\n    }\n    if"),
    Mutation(
        "one tensor as key and value, one gradient",
        KERNELS,
        "++c) «sums[c] += value_sums[c]; → sums[c] = value_sums[c];»",
    ),
    Mutation(
        "one tensor as both edge terms, one gradient",
        KERNELS,
        "if constexpr (kIsValue) «result += of_value; →»",
    ),
    # --------------------------------------------------------------------------------------------- batches, heads, hubs
    Mutation(
        "keys lie apart as queries do", KERNELS, "static_cast<const T*>(a.key) + b * «a.key_batch → a.query_batch»"
    ),
    Mutation(
        "a value's batch stride is its key's",
        KERNELS,
        "static_cast<const T*>(a.value) + b * «a.value_batch → a.key_batch»",
    ),
    Mutation("a query head gets another key head", KERNELS, "return end == kTarget ? «h / group → h % G» : h; }"),
    Mutation("a query head gets another value head", KERNELS, "{gathered, «h / group → h % G» * V, edges"),
    Mutation(
        "a value head's gradient is of its last query head",
        KERNELS,
        "return «run.begins && (end == kTarget || h % group == 0) → run.begins»; }",
    ),
    Mutation(
        "hubs of a batch share their memory, forward",
        KERNELS,
        "static_cast<A*>(a.partial) + («b * a.by_target.num_slots + slot → slot») * (RowSums",
    ),
    Mutation(
        "hubs of a batch share their memory, by source",
        KERNELS,
        "static_cast<A*>(a.partial) + («b * a.by_source.num_slots + slot → slot») * (G",
    ),
    Mutation(
        "a hub's parts are merged for the first of a batch",
        KERNELS,
        "FOR_TASKS for (int64_t t = 0; t < split * batch; ++t) f(t % split, «t / split → 0»);",
    ),
    # ------------------------------------------------------------------------------------------------------- the layout
    Mutation("self-loops are numbered from zero", LAYOUT, "edge[at] = «number + int32_t(i) → int32_t(i)»;"),
    Mutation(
        "later edges' numbers count loops that went out",
        LAYOUT,
        "int32_t next = «kept[piece] → int32_t(num_edges * piece / pieces)»;",
    ),
    Mutation(
        "a descent between two pieces is not seen",
        LAYOUT,
        "before = «first > 0 ? target[(first - 1) * target_stride] : 0 → 0»;",
    ),
    Mutation(
        "an index of N is in range", LAYOUT, "«uint64_t(i) >= uint64_t(targets) → uint64_t(i) > uint64_t(targets)»)"
    ),
    Mutation(
        "the last index of the padding is not written", LAYOUT, "memset(node + total, 0, «kPadding → (kPadding - 1)» *"
    ),
    Mutation(
        "a part of a hub leaves out its last edge",
        LAYOUT,
        "«start[row] + degree * (part + 1) / parts → start[row] + degree * (part + 1) / parts - 1», num",
    ),
    Mutation("the hash ignores the order of edges", LAYOUT, "hash += «mix(mix(ends) + uint64_t(e)) → mix(mix(ends))»;"),
    # -------------------------------------------------------------------------------------------- dropout of any tensor
    Mutation("every chunk drops the same", KERNELS, "low = «uint32_t(first) → 0u»;"),
    Mutation("the seed's upper half is ignored", KERNELS, "(uint64_t(first) >> 32) ^ «high_seed → 0u»,"),
    Mutation("the generator mixes once less", KERNELS, "return «mix(mix(low) ^ high) → mix(low ^ high)» >= threshold"),
    # -------------------------------------------------------------------------------- tiles of pairs on complete graphs
    Mutation("a product begins anew", SUMS, "store(to, «adds ? load(to) + sum[r][v] : sum[r][v] → sum[r][v]»);"),
    Mutation("parts begin where others do", SUMS, "n = «rows * part / parts → 0», begin"),
    Mutation("only the last part counts", SUMS, "«c[i * right + j] += from[j]; → c[i * right + j] = from[j];»"),
    Mutation("the first rows come again", SUMS, "multiply(left, vectors, «a + n * a_row → a», 1"),
    Mutation("a rising maximum leaves the sum", TILES, "«added *= by; → »"),
    Mutation("a window ends too early", TILES, "last = i + e.offset + a.right + «1 → 0»;"),
    Mutation("a window begins too late", TILES, "first = i + e.offset - «a.left → a.left - 1»;"),
    Mutation("rows have one key", TILES, "return {first, mix(«first ^ 0x9e3779b9u → 0x9e3779b9u»)};"),
    Mutation("panels drop the same", TILES, "from = «uint32_t(source) + key.first → key.first»"),
    Mutation("a slope has the wrong side", TILES, "if (has_slope) derivative = «x > A(0) → x < A(0)»"),
    Mutation(
        "a bound has a gradient",
        TILES,
        "derivative = (x > clamp) | (x < -clamp) ? «Vec<A>{} → derivative» : derivative;",
    ),
    Mutation("a cap's derivative is one", TILES, "store(of_cap + at, A(1) - part * «part → Vec<A>{}»);"),
    Mutation("a sink far above is left out", TILES, "sum = sum * by + «1 → 0», base"),
    Mutation("the sums of a sink far above are not scaled", TILES, "factor = «by → A(1)»;"),
    Mutation("epsilon is forgotten", TILES, "sum += «law.epsilon → 0»;"),
    Mutation("gates are not divided going backward", TILES, "y.value * stat, y.derivative * «stat → A(1)»);"),
    Mutation("columns share a bias's gradient", TILES, "if (s.channel == 0) *to += «sum_lanes(sum) → sum[0]»;"),
    Mutation("blocks that are not listed are seen", TILES, "if («tile < 0 → false» || !*mask++) logits[j] = -A("),
    Mutation(
        "holes of a block have the rows of another",
        TILES,
        "(tile * a.block + row.i % a.block) * a.block + source % «a.block → 1»",
    ),
    Mutation(
        "columns end before the last block that is seen",
        TILES,
        "(panel + all.last - 1) / a.block * a.block - «panel → panel - 1»",
    ),
    Mutation("targets of two blocks are computed together", TILES, "return left < most ? «left → most» : most;"),
    Mutation("what blocks hide has NaN", TILES, "count && !(«has_holes → false» && weights[j] == 0)"),
    Mutation(
        "a block's own scores do not count", BLOCK_LISTS, "number.unsqueeze(1) == number, «torch.inf → -torch.inf»"
    ),
    Mutation("edges that are listed twice are lost", BLOCK_LISTS, "if int(holes.sum()) «< → >» pairs.numel():"),
    Mutation("what is hidden has NaN", TILES, "else if («is_finite → true» || (a.tiles == nullptr"),
    Mutation(
        "the first panel of a part is left out",
        TILES,
        "panel = «first_panel * kPanel → (first_panel + (part > 0)) * kPanel»; panel <",
    ),
    Mutation("heads of a task have the first one's keys", TILES, "key_head = «head_of(of_keys) → head» / sharing;"),
    Mutation("elements have one term", TILES, "bias += e.term * «s.batch → 0» + row.i"),
    Mutation(
        "distances begin one too far",
        TILES,
        "return row.source - row.i - e.offset - «a.first_distance → a.first_distance - 1»;",
    ),
    Mutation(
        "rows of buckets are a panel apart", TILES, "e.bias_at + row.i * «e.bias_step → kPanel» + row.source, low"
    ),
    Mutation("heads have the first one's table", TILES, "a.bias) + row.head * «a.bias_strides.head → 0»;"),
    Mutation("the last bucket is unknown", TILES, "const Wide last = Wide(a.bias_count - «1 → 2»);"),
    Mutation(
        "pairs of the tile's last column are left out", TILES, "*pair < «origin + column → origin + column - 1»; ++pair"
    ),
    Mutation(
        "a search for pairs goes too far",
        TILES,
        "return «std::lower_bound(first, end, source) → std::upper_bound(first, end, source)»;",
    ),
    Mutation("heads that share keys share a query", TILES, "queries + h * targets * «width → 0»);"),
    Mutation(
        "few targets see what the last one sees",
        TILES,
        "columns(e, head_of(group + r), «target_of(group + r) → last», 1, panel, n);\n            multiply(1",
    ),
    Mutation(
        "products of few targets lack a rest", TILES, "for (; c < «width → whole_vectors(channels) - W»; c += W)\n"
    ),
    Mutation("of many buckets, some have another's number", TILES, "_mm256_slli_epi32(at, «27 → 28»));"),
    Mutation(
        "masks are those of the source before",
        TILES,
        "_mm_loadl_epi64(reinterpret_cast<const __m128i*>(«p → p - (column > 0)»)",
    ),
    Mutation("a listed bias is added before a bound", TILES, "const bool adds = «!has_slope && !has_clamp → true»;"),
    Mutation("pairs have the sources of the element", TILES, "const int64_t origin = «e.bias_step → 0» + panel;"),
    Mutation(
        "heads that share keys have pairs of the next panel",
        TILES,
        "if («head == (key_head + 1) * group - 1 → true») c",
    ),
    Mutation("diagonals are those of the first row", TILES, "diagonals + (size - 1 - «r → 0»), table"),
    Mutation(
        "distances have the sums of the last tile",
        TILES,
        "«table[first + k] += double(diagonals[k]); → table[first + k] = double(diagonals[k]);»",
    ),
    Mutation(
        "buckets have a quarter of their sums",
        TILES,
        "parts[k][buckets[j + k]] += «double(slopes[j + k]) → k ? 0 : double(slopes[j])»;",
    ),
    Mutation("heads share their sums", TILES, "table += ((place * a.heads + «head → 0») * a.parts + part) * sums;"),
    Mutation("weights of a group's rows are the first one's", TILES, "r < size; ++r, out += «e.weights_row → 0»"),
    Mutation("weights are those before dropout", TILES, "const bool drops = a.dropout && «a.dropped → false»;"),
    Mutation("what is returned dropped has whole gradients", TILES, "if (!a.dropout || «a.dropped → false»)"),
    Mutation(
        "weights' gradients have no mean",
        TILE_CALLS,
        "_add_inner(delta, native.readable(weights), «grad_weights → 0 * grad_weights», rule",
    ),
    Mutation(
        "elements share their pairs", CPU_TILES, "arguments.shared_elements = «len(set(places)) < len(places) → False»"
    ),
    Mutation("parts are not added", CPU_TILES, "«of_query += part → pass»"),
    Mutation("a sink has the other sign", TILE_CALLS, "of_sink = «-(shares → (shares»_of_sink"),
    Mutation("a log-sum has no gradient", TILE_CALLS, "«delta -= grad_log_sum → delta - grad_log_sum»"),
    Mutation("a second derivative has no slope", TILE_CALLS, "rule.scale, «rule.slope → 1.0», clamp)"),
    # -------------------------------------------------------------------------------------------- tiles on GPUs
    Mutation("a tile sees one source too far", TRITON_TILES, "(j[None] <= (position + right«→ + 1»)[:, None])"),
    Mutation("a window's last targets are not visited", TRITON_TILES, "BLOCK_S - offset + left«→ - BLOCK_T», n)"),
    Mutation("a sink takes no share", TRITON_TILES, "total * shrinks + «tl.exp(by - base) → 0.0 * by»"),
    Mutation("a cap has no derivative", TRITON_TILES, "1.0 - «(z / SOFTCAP) → 0.0» * (z / SOFTCAP)"),
    Mutation("gradients of weights are not dropped", TRITON_TILES, "p, dp = p * kept, «dp * kept → dp»"),
    Mutation("distances begin at the first source", TRITON_TILES, "i[:, None] «- tl.load(element + 5) →» - first"),
    Mutation("one head of a group has gradients", TRITON_TILES, "«(key_head + 1) * GROUP → key_head * GROUP + 1»):"),
    Mutation(
        "listed pairs are those of the first targets", TRITON_TILES, "starts + «tl.load(element + 7) + i → 0 * i»"
    ),
    Mutation("a bound has gradients", TRITON_TILES, "tl.where((z > CLAMP) | (z < -CLAMP), «0.0 → of_score», of_score)"),
    Mutation("buckets have the row before", TRITON_TILES, "i[:, None] * tl.load(element + 8) + j[None]«→ * 0»"),
    Mutation("a bias of all is not summed", GPU_CALLS, "is_shared = «sizes[1] == 1 or sizes[0] == 1 or → False and»"),
    Mutation("rows of a bias are always summed", GPU_CALLS, "SUMS_ROWS=«sizes[2] == 1 and is_shared → is_shared»"),
    # ------------------------------------------------------------------------------------------------------ the vectors
    Mutation("bfloat16 is cut off", KERNELS, "uint16_t((«bits + 0x7fff + (bits >> 16 & 1) → bits») >> 16);"),
    Mutation("float16's infinity is a number", KERNELS, "if («magnitude >= 0x7c00 → magnitude > 0x7c00») return"),
    Mutation("the last channel of a part is not stored", KERNELS, "memcpy(p, lanes, size_t(«n → n - 1») * sizeof(T));"),
    Mutation("half of the lanes are not summed", KERNELS, "return sum_lanes(«low + high → low»);"),
    Mutation("the last lane of a part is left out", KERNELS, "lane_numbers<A>() < LaneInt<A>(«n → n - 1»)"),
    Mutation("exp of minus infinity is not zero", KERNELS, "y = «x < lowest ? Vec<float>{} : y → y»;"),
    Mutation(
        "tanh is bounded too early", KERNELS, "bounded(x, «splat<Vec<float>>(-87.0f) → splat<Vec<float>>(-7.0f)», splat"
    ),
    # -------------------------------------------------------------------------------------------------- the GPU kernels
    Mutation("the scale is forgotten", TRITON, "s = «tl.sum(q * k, axis=2) * scale → tl.sum(q * k, axis=2)»"),
    Mutation("slopes are on the wrong side", TRITON, "tl.where(«z > 0 → z < 0», through, through * slope)"),
    Mutation("a running sum keeps its old maximum", TRITON, "«total *= shrink → pass»"),
    Mutation("all of a batch get the first mask", TRITON, "place = «batch * mask_batch + number → number»"),
    Mutation("a part of a hub keeps its own maximum", TRITON, "tl.sum(«shrink[:, :, None] * part → part», axis=0)"),
    Mutation("a query head gets another key head", TRITON, "key_offset = («h // GROUP → h % GROUP»)[:, None]"),
    Mutation(
        "a gradient through dropout is not scaled",
        TRITON,
        "tl.where(kept, «grad_alpha * keep_scale → grad_alpha», 0.0)",
    ),
    Mutation(
        "all of a batch drop the same, backward",
        TRITON,
        "n = («batch * num_edges + e → e».to(tl.int64)[:, None]) * HEADS + h[None]\n                kept",
    ),
    Mutation(
        "one tensor as both edge terms, one gradient",
        TRITON,
        "if «EDGE_IS_VALUE → EDGE_IS_VALUE and not EDGE_IS_VALUE»:\n                t += u",
    ),
    Mutation(
        "the vector's gradient forgets the slope",
        TRITON,
        "through * slope)\n        return through, through, grad * «y → z»",
    ),
    Mutation(
        "delta is taken of the rounded output",
        TRITON,
        "unrounded = «others[0] if others else out.contiguous() → out.contiguous()»",
    ),
    Mutation("gradients of grouped heads are not summed", TRITON, "(-1, self.form.group)).«sum(3) → select(3, 0)»"),
    Mutation(
        "a hub's parts overlap",
        TRITON_LAYOUT,
        "last = «torch.minimum(first + length, start[row + 1]) → start[row + 1]»",
    ),
    Mutation(
        "an edge's number is another batch's",
        TRITON,
        "num_edges = «tl.load(edge_count) → 0»\n"
        "        keep_scale = (tl.zeros([1, 1], COMPUTE) + keep_scale).to(COMPUTE)\n    maximum",
    ),
    Mutation("a query's gradient is the logits'", TRITON, "«tl.sum(by_query, axis=2) → ds» if STORES_BY_QUERY"),
    Mutation("rows of a batch are read as one's", TRITON, "batch * «(batch_stride * UNIT) → batch_stride»"),
    Mutation(
        "parts of the vector's gradient are lost", TRITON, "range(«tl.program_id(0) → 0», num_blocks, tl.num_programs"
    ),
    Mutation("tensors of any alignment share code", TRITON, "key = name, kind, «self.unaligned → ()»"),
    Mutation(
        "a plan forgets a cast",
        KERNEL_PLANS,
        "inputs[place] = «tensor if dtype is None else tensor.to(dtype) → tensor»",
    ),
    Mutation("a bias gets the query's gradient", TRITON, '"query" in tensors and «"bias" not in tensors → True»'),
    Mutation(
        "Newton's iteration stops at its first step",
        TRITON,
        "«num_growing = tl.sum(grows.to(tl.int32)) → num_growing = 0»",
    ),
    Mutation(
        "a row of -inf alone is NaN",
        TRITON,
        'maximum = «tl.where(maximum == -float("inf"), 0.0, maximum) → maximum»  # -inf +',
    ),
    Mutation("each block of a row keeps equal logits", TRITON, "«num_left -= tl.sum(is_next, axis=0) → pass»"),
    Mutation(
        "a threshold has no gradient",
        TRITON,
        "is_normalized = «form.divides or form.derivatives is not None → form.divides»",
    ),
    Mutation("rows of one task are long", TRITON_LAYOUT, "is_long = parts > «1 → 0»"),
    Mutation("another stream does not wait", EDGE_LISTS, "«stream.wait_event(self._made) → pass»"),
    # -------------------------------------------------------------------------------------------------- complete graphs
    Mutation(
        "targets without sources come last",
        DENSE,
        "outs.«append(_nothing(call, 1, first - end)) → insert(0, _nothing(call, 1, first - end))»",
    ),
    Mutation("a window begins one source too late", DENSE, "max(position - left«→ + 1», 0)"),
    Mutation("a window ends one source too early", DENSE, "position + part.num_targets + right«→ - 1»"),
    Mutation("cropped sources have the first ones' places", DENSE, "self.first_target «- self.first_source →»\n"),
    Mutation("second derivatives hide the target itself", DENSE, ".triu(«1 → 0»)"),
    Mutation("a bias of minus infinity is NaN", REFERENCE, "logits«.masked_fill(empty, 0.0) →».softmax(-1)"),
    Mutation("kernels compute all targets at once", DENSE, "counts = «pairs.counts(n, m, batch) → [n]» if by_lists"),
    Mutation("what kernels compute is always kept", DENSE, "n * held <= («_MOST_KEPT → 2**60» if"),
    Mutation(
        "pairs have one element's bias", PAIRS, "return «term.squeeze(0) if term.size(0) == 1 else term → term[0]»"
    ),
    Mutation("pairs are of any score", PAIRS, "value)) and «_KERNELS.knows(family_of(score, call.channels)) → True»"),
    Mutation("pairs drop nothing", PAIRS, "inputs_of(«per_pair → per_pair._replace(dropout=0.0)», edges"),
    Mutation("pairs of a window do not move on", PAIRS, "source += «target → 0 * target»"),
    Mutation("pairs lack their order", PAIRS, "term = term.«permute(0, 2, 3, 1) → permute(0, 3, 2, 1)»"),
    Mutation("all blocks get the first one's bias", DENSE, "return x[[«place % x.size(0) → 0 * place» for"),
    Mutation("all of a packed batch see the first sources", DENSE, "size[0], «b * num_sources + s → s», size[1]"),
    Mutation("returned weights forget the scale", REFERENCE, "@ keys.transpose(-3, -2).mT «* scale →»\n"),
    # ------------------------------------------------------------------------------------------------------- the verbs
    Mutation("logits are not masked", BASE, "return logits if «call.mask is None → True» else logits.masked_fill"),
    Mutation("logits of pairs without an edge are zero", BASE, "«x.masked_fill(~there, -torch.inf) → x» for x, there"),
    Mutation(
        "projected features are those of one head",
        EDGES,
        "«weight.flatten(0, -2) → weight[:1].expand_as(weight).flatten(0, -2)»",
    ),
    Mutation("all edges are of one type", EDGES, "index_select(0, «term.types → term.types * 0»)"),
    # ------------------------------------------------------------------------------------------------------- the plans
    Mutation("plans are for any number of channels", PLANS, "shape = «shape[1:] → shape[1:0]» if is_list"),
    Mutation("plans are for any strides", PLANS, "layout = «tensor.is_contiguous() or tensor.stride() → True»"),
    Mutation("plans are for any weights", PLANS, "of_call = dropout, backend, «weights → False», log_sum"),
    Mutation(
        "plans are for terms of any size",
        DENSE,
        "if not «_fits(bias, graph, front, query.size(-2)) → True»:",
    ),
    Mutation(
        "plans drop what is asked for before dropout", KERNEL_PLANS, 'if «self.weights == "dropped" → True» and inputs'
    ),
    Mutation("plans are for any scale of a score", PLANS, "type(score), «of_score → None», of_weights"),
    Mutation(
        "plans fold scores into half precision",
        PLANS,
        "return dtypes in ({torch.float32}, {torch.float64}«→ , {torch.bfloat16}»)",
    ),
    Mutation("a scale that is not a number is lost", DENSE, 'value.device.type != "cpu" or «not is_scaled → True»'),
    Mutation("plans are for graphs with and without loops", PLANS, "(graph.flow, «graph.self_loops → False»)"),
    Mutation("plans are for values that are keys and others", PLANS, "type(bias), «value is key → None»,"),
    Mutation(
        "plans are for any number of types", PLANS, 'of_terms.append(«getattr(edge.table, "shape", None) → None»)'
    ),
    Mutation("plans are for any number of edges", KERNEL_PLANS, "if inputs[place].size(dim) «!= size → < 0»:"),
    Mutation(
        "plans are for any number of sources",
        KERNEL_PLANS,
        "if given.num_sources not in (None, «num_sources → given.num_sources»)",
    ),
    Mutation(
        "copies of saved tensors are read with the strides of the originals",
        OPERATOR,
        "if «_forms(tensors, count) != forms → False»:",
    ),
    Mutation(
        "a single row has no stride",
        CPU,
        "strides[1] = «math.prod(rows.shape[2:]) if rows.is_contiguous() else rows.stride(1) → strides[1]»",
    ),
    Mutation(
        "plans forget terms of the output",
        DENSE,
        "given.complete is None or «has_more → False» or len(call.batch) > 1",
    ),
    Mutation("plans do not check biases", DENSE, "«bias.check(graph, front, query.size(-2)) → _ = front»\n"),
    Mutation("plans are for any lengths", DENSE, "and any(«x is not None and x.shape != front → False» for x in"),
    Mutation(
        "plans are for calls with and without a log-sum-exp",
        PLANS,
        "of_call = dropout, backend, weights, «log_sum → False»",
    ),
    Mutation(
        "the gradient of a log-sum-exp has the other sign",
        BY_SOURCE,
        "«terms[2 * H + h] -= grads[h]; → terms[2 * H + h] += grads[h];»",
    ),
    Mutation("nothing has a log-sum-exp", CPU, "(scale == 0.0, «-torch.inf → 0.0»)"),
    Mutation(
        "the gradient of a log-sum-exp of nothing is read",
        OPERATOR,
        "wanted, «grad_log_sum.masked_fill(is_empty, 0.0) → grad_log_sum»)",
    ),
    Mutation(
        "listed values stay in their order", BIAS, "«rows.new_empty(rows.shape).index_copy(1, place, rows) → rows»"
    ),
    # -------------------------------------------------------------------------------- the reference, and lists of edges
    Mutation("no bias beside an edge term", REFERENCE, "if «bias is not None → bias is not None and edge is None»:"),
    Mutation("weights are those after dropout", REFERENCE, "return out, «alpha → dropped»"),
    Mutation(
        "query heads take key heads in turn",
        REFERENCE,
        "else «tensor.repeat_interleave(heads // tensor.size(-2), dim=-2)"
        " → torch.cat([tensor] * (heads // tensor.size(-2)), dim=-2)»",
    ),
    Mutation("loops for sources that are no targets", EDGE_LISTS, "add_loops(edge_index, «min → max»(num_sources"),
    Mutation(
        "loops that exist already stay",
        EDGE_LISTS,
        "    edge_index, features = «remove_self_loops(edge_index, features) → edge_index, features»",
    ),
    Mutation(
        "features of loops instead of the others'", EDGE_LISTS, "places = (index[0] «!= → ==» index[1]).nonzero()"
    ),
    Mutation(
        "an edit in place is not seen",
        EDGE_LISTS,
        "    return «tensor._version, tensor.shape, tensor.stride() → tensor.shape, tensor.stride()»,",
    ),
    Mutation("an index of N is in range", EDGE_LISTS, "if highest «>= → >» limit:"),
    # ------------------------------------------------------------------------------- complete graphs without all pairs
    Mutation("a chunk does not see itself", LINEAR, "(query @ key.mT).tril(«→ -1») @ value).flatten"),
    Mutation("chunks see what comes after them", LINEAR, "return states[..., «:-1 → 1:», :, :], states[..., -1, :, :]"),
    Mutation(
        "a causal graph's first sources are not seen", LINEAR, "seen, unseen = «min(max(offset, 0), num_sources) → 0»"
    ),
    Mutation("sums of weights have no gradient", LINEAR, "-(part * out[rows]).sum(-1, keepdim=True)«→ * 0.0»], -1)"),
    Mutation("the scale is not in queries' gradients", LINEAR, "else «grad_query.mul_(rule.scale) → grad_query»,"),
    Mutation(
        "heads that share a key have the first one's gradient",
        LINEAR,
        "torch.unflatten(part, 0, (to.size(1), -1)).«sum(1) → select(1, 0)»",
    ),
    Mutation("zero is divided by", LINEAR, "return «total.masked_fill(total == 0.0, torch.inf) → total»"),
    Mutation(
        "pairs that are listed twice count once", BIAS, "values.size(1), count).«index_add → index_copy»(1, number"
    ),
    Mutation("distances are those of the whole", BIAS, "return DistanceBias(self.table, self.first, «offset → 0»)"),
    Mutation(
        "elements have the first one's buckets",
        BIAS,
        "buckets = buckets[[«element % buckets.size(0) → 0» for element in elements]]",
    ),
    Mutation("keys have no maximum", FEATURES, "value=-torch.inf).«amax → amin»(-3, keepdim=True)"),
    Mutation("features may be as small as any", FEATURES, "«.masked_fill(exponents < smallest, 0.0) → »"),
    Mutation("a random walk takes one of parallel edges", STRUCTURE, "share, «accumulate=True → accumulate=False»"),
    Mutation("second eigenvectors come first", STRUCTURE, "vectors[..., «1 : k + 1 → 2 : k + 2»]"),
    # ------------------------------------------------------------------------------------------------- orders of nodes
    Mutation("edges are sorted by source", REORDERING, "lexsort(«[source, target] → [target, source]»)"),
    Mutation("the way back is the way there", REORDERING, "inverse = «permutation.argsort() → permutation»"),
    Mutation("edges are of one direction", REORDERING, "adjacency = («adjacency + adjacency.T → adjacency»).tocsr()"),
    Mutation("nodes are in the order of their parts' first", REORDERING, "order[«parts[order] → parts».argsort("),
    Mutation("a data set's types share their first number", TRANSFORMS, "first = «last → 0»"),
    Mutation("an earlier order is forgotten", TRANSFORMS, "if «name not in store → True»:"),
    Mutation("pairs have one order for both nodes", TRANSFORMS, "(«nodes.unsqueeze(1) → nodes» * size + nodes)"),
    Mutation("paths name the old edges", TRANSFORMS, "F.pad(«edges.argsort() → edges», (0, 1)"),
    Mutation("a number of N is in range", TRANSFORMS, "row.max() «< → <=» len(numbers)"),
    Mutation(
        "inverse reorders once more", TRANSFORMS, "{key: «order.argsort() → order» for key, order in orders.items()}"
    ),
    Mutation(
        "a second derivative has no mean", MATRIX_CALLS, "derivative * («grad - → grad + 0 *» (derivative * grad)"
    ),
    Mutation("a second derivative takes entmax's weights", MATRIX_CALLS, "1.0)«.sqrt() →».where"),
    Mutation(
        "gradients are of rows without constants",
        MATRIX_CALLS,
        "arguments.distribution_constants[«: len(constants)] = constants → :0] = []»",
    ),
    Mutation(
        "logits are overwritten",
        MATRIX_CALLS,
        "_call(«logits.clone(memory_format=torch.contiguous_format) → logits.contiguous()», None",
    ),
    # ------------------------------------------------------------------------------------------------ users' own scores
    Mutation(
        "a gathered gradient is of its last chunk",
        CUSTOM_PARTS,
        "        «gathers.sum.index_add_ → gathers.sum = grad.new_zeros(ctx.shape).index_add_»(grad.dim()",
    ),
    Mutation("a chunk's queries are at its sources", CUSTOM_PARTS, "gather_query(query, «target → source»)"),
    Mutation(
        "edges in the other flow are not turned",
        GRAPH,
        "self.edge_index.long()\n        return (first, second) if self.flow == FLOWS[0] else «(second, → (first,»",
    ),
    Mutation("masked edges take part", CUSTOM_PARTS, "masked_fill(«~call.mask → call.mask & False», -torch.inf)"),
    Mutation("padding has keys", ALL_PAIRS, "else «x.masked_fill(~mask[..., None, None], 0.0) → x»"),
    Mutation("graphs have the nodes of all", ALL_PAIRS, "return mask.«sum(-1, keepdim=True) → sum().view(1, 1)».to(x)"),
    Mutation(
        "a packed graph has its smallest one's nodes",
        ALL_PAIRS,
        "num_blocks).index_add(0, block, «torch.ones_like(block) → torch.ones_like(block) * (block > 0)»)",
    ),
    Mutation("NaN in padding reaches gradients", ALL_PAIRS, "«x = x.masked_fill(~mask.unsqueeze(-1), 0.0) → pass»  #"),
    Mutation(
        "features may be zero", PERFORMER, "«self.projection_matrix.t()) + 0.001 → self.projection_matrix.t())» for x"
    ),
    Mutation("open blocks see their sources alone", OPEN_BLOCKS, "(«self.of_target → self.of_source».unsqueeze(1) =="),
    Mutation(
        "all sources share a block", OPEN_BLOCKS, "return «torch.searchsorted(sources, → torch.zeros_like(» getattr("
    ),
    Mutation(
        "an order is never checked", OPEN_BLOCKS, "if «batch.numel() → False» and (bool((batch.diff() < 0).any())"
    ),
    Mutation("sources lie as targets do", OPEN_BLOCKS, "is_one = «of_target → True or of_target» is of_source"),
    Mutation(
        "the blocks of a batch are one", TILE_OPERATOR, "_blocks_of(integers) if of_target is «None → not None» else"
    ),
    Mutation("no linear attention is causal", LINEAR_OPERATOR, "packed_by(of_target, of_source«, causal →»)"),
    Mutation("linear attention loses its scale", LINEAR_OPERATOR, "        scale=«scale → 1.0»,"),
    Mutation("a self-loop counts twice in degrees", DEGREES, "weight«.masked_fill(is_loop, 0.0) →», of_loops"),
    Mutation(
        "self-loops lose their weight",
        DEGREES,
        ".where(is_loop, num_nodes), «weight → torch.ones_like(weight)»)",
    ),
    Mutation(
        "hidden self-loops count", LOOPS, "kept = torch.cat([«index[0] != index[1] → index[0] == index[0]», torch"
    ),
    Mutation("supervised attention sees all", SUPERGAT, "bias=bias, «mask=graph.kept, →» dropout"),
    Mutation("compiled, the bias has no gradient", PRODUCTS, "grad.flatten(0, -2).sum(0) if «wants_bias → False» and"),
    Mutation(
        "compiled, small products have no rows", PRODUCTS, "if is_large else «grad @ weight → grad @ weight * 0»\n"
    ),
    Mutation(
        "compiled, the last of several products counts",
        PRODUCTS,
        "if of_x is None else «of_x.add_(part) → part»",
    ),
    Mutation("a node is itself once", SGFORMER, "(sums[..., :-1] + «count * value → value»)"),
    Mutation("graphs share a norm", SGFORMER, "scatter(squares, «block → block * 0», -1"),
    Mutation("sums are not divided by all", SGFORMER, "/ (sums[..., -1:] + «count → 1»)"),
    Mutation(
        "heads are not side by side",
        POLYNORMER,
        "«self.head_channels, self.heads).transpose(-2, -1) → self.heads, self.head_channels)»",
    ),
    Mutation("beta is not bounded", POLYNORMER, "else self.betas«.sigmoid() →»"),
    Mutation("empty sets have a vector", SETS, "masked_fill((counts «== → <» 0)"),
    Mutation("elements stay in their order", SETS, "x, index = «x.index_select(-2, order) → x», index"),
    Mutation("seeds are those of other sets", SETS, "«seeds.flatten(0, 1) → seeds.flip(1).flatten(0, 1)», x, graph"),
    Mutation("weights are no constants", AGGREGATIONS, "x«.detach() →» * t if self.semi_grad"),
    Mutation("what was read comes first", AGGREGATIONS, "torch.cat([«query, read → read, query»], -1)"),
    Mutation("the last patch is full", PATCHES, "patches = (counts «+ 1 → + 0») // self.patch_size"),
    Mutation(
        "patches are numbered in the batch",
        PATCHES,
        "torch.arange(num_patches, device=x.device) - first[of«] → ] * 0»)",
    ),
    Mutation("a variance is biased", PATCHES, "squares / (patches «- 1 → - 0»)"),
    Mutation("gates are not counted from one", EGT, "torch.ones_like(value[..., :1]), graph).«log1p → log»()"),
    Mutation("weights have no gates", EGT, "self.weigh(None, None, graph, bias=shown) * «gates → gates.ceil()»"),
    Mutation("logits are not clamped", GRIT, "(pair * self.att).sum(-1)«.clamp(-self.clamp, self.clamp) →»"),
    Mutation("degrees have no one", GRIT, "degree.to(out).«log1p → log»()"),
    Mutation(
        "values have the keys' times", TGAT, '"edge_value": self._heads(self.«lin_edge_value → lin_edge_key»(edge))'
    ),
    Mutation("queries have no time", TGAT, "torch.cat([targets, «now → now * 0»], -1)"),
    Mutation("weights are exchanged", SGFORMER_MODEL, "out = self.graph_weight * «on_edges → z» +"),
    Mutation("nodes stay in another order", SGFORMER_MODEL, "z = «torch.empty_like(z).index_copy(0, order, z) → z»"),
    Mutation(
        "sums on the kernels hide messages from explainers", GCN, 'for name in (*_STEPS, «"propagate" → "message"»)):'
    ),
    Mutation(
        "sums on the kernels have no bias",
        GCN,
        '="identity").out.squeeze(-2)\n        return out if self.bias is None else «out + self.bias → out»',
    ),
    Mutation("loops of a shard count twice", GCN, "weight = weight.masked_fill(is_loop, «0.0 → 1.0»)"),
    Mutation("a shard's sources bring no degree", GCN, "value = «value * root → value»"),
    Mutation("hidden pairs have no gates", EGT, "«shown → logits» = logits - 1e9"),
    Mutation(
        "a root of degrees is added anyway", BLOCKS, "h = self._normed(«x + attended → attended» if self.residual"
    ),
    Mutation("pairs are not projected", BLOCKS, "pairs = «self.O_e(pairs) → pairs»"),
    Mutation(
        "each edge has its own pair",
        BLOCKS,
        "first + source - «pair_index[0].long().index_select(0, first.clamp_max(pair_index.size(1) - 1)) → first * 0»",
    ),
    Mutation(
        "the third edge is turned", PAIR_LAYERS, "«.movedim(-1, -3).unsqueeze(-4) → .movedim(-1, -3).mT.unsqueeze(-4)»"
    ),
    Mutation(
        "masks hide targets",
        PAIR_LAYERS,
        "size(-2))\n        shown = None if mask is None else mask[«..., None, None, : → ..., None, :, None»]",
    ),
    Mutation("incoming edges leave", PAIR_LAYERS, "if self.outgoing else «a.mT @ b → b.mT @ a»"),
    Mutation("blocks have the first one's nodes", PAIR_BIAS, "firsts = [self.firsts[«element % len(self.firsts) → 0»]"),
    Mutation("parts of a causal bias see all", DENSE_INIT, "seen = min(offset + stop«, m) → + 1, m)»"),
    Mutation("parts of tasks are not summed", DISPATCH, "for (int64_t t = 1; t < «tasks → 1»; ++t)"),
    Mutation("a projection is not turned", DISPATCH, "to[«j * rows + i → i * columns + j»] = from"),
    Mutation("thresholds keep PyG's counts", LPFORMER, 'if self.mask == «"cn" → "no"»:\n            counts'),
    Mutation("a distance of zero has another sine", RADIAL, "splat<Vec<A>>(«scale → A(1)» * factors[k])"),
    Mutation("far Gaussian functions have a gradient", RADIAL, "exponent < least ? «Vec<A>{} → step» : (-2"),
    Mutation("the third vector of a strip is not summed", RADIAL, "«third → second» * load(g + 2 * W)"),
    Mutation("the pairs behind the last source have gradients", RADIAL, "memset(rows, «0 → 63», size_t(a.heads"),
    Mutation("a quadrant's cosine has the wrong sign", RADIAL, "((quadrant + «1 → 0») & 2) != 0"),
    Mutation("distances of zero have a gradient", RADIAL, "slope = is_same ? «zero → slope» : slope / distance;"),
    Mutation("parts of sources are not summed", RADIAL_CALLS, "grad_x.«sum(-3) → select(-3, 0)», grad_y"),
    Mutation("a root is steep at zero", PAIR_ROOTS, "of_product = root > 0 ? ratio : «T(0) → ratio»"),
    Mutation(
        "a pair has the ends of the first one", PAIR_ROOTS, "else f(pair * p.width, i * p.width, «j * p.width → 0»);"
    ),
    Mutation("sums below zero have a gradient", PAIR_ROOTS, "of_sum = out[e + c] > 0 ? g : «T(0) → g»"),
    Mutation(
        "second derivatives have the first root", PAIR_ROOT_CALLS, "size = (ends * weight)«.abs() → .abs().detach()»"
    ),
    Mutation("features of edges are added", EXPHORMER, 'DotScore(edge="«multiply → add»"'),
    Mutation("logits of edges are not bounded", EXPHORMER, "clamp=«clamp → None»)"),
    Mutation("targets have the sources' projection", DOT_GAT, "self._heads(self.fc_dst(«targets → sources»))"),
    Mutation("messages have no features of edges", EDGE_GAT, "edge_value=«edge_value → None»,"),
    Mutation("both ends have one vector", EDGE_GAT, "(received * self.«attn_r → attn_l»).sum(-1)"),
    Mutation("hidden pairs are the others", BIASED, '"attn_mask", attn_mask, x, ()).unsqueeze(-3) «== → !=» 0'),
    Mutation("biases are factors of nothing", BIASED, "distribution=None) «* → +» attn_bias"),
    Mutation(
        "edges are counted from the other end", ENCODERS, "* self.max_len + «place → (self.max_len - 1 - place)»)"
    ),
    Mutation("paths are not averaged", ENCODERS, "return (sums «/ lengths →»)"),
    Mutation("unreachable nodes are neighbours", ENCODERS, "dist.long().clamp(«-1 → 0», self.max_dist)"),
    Mutation(
        "gates do not see the mask", EGT_LAYER, "logits + mask.unsqueeze(-3), gates «+ → - 0 *» mask.unsqueeze(-3)"
    ),
    Mutation("times are those of the targets", TEMPORAL, "sources_and_targets()[«0 → 1»]"),
    Mutation("sines are cosines", HGT, "torch.stack([angle.«sin → cos»(), angle.cos()]"),
    Mutation(
        "values have the keys' times",
        HGT,
        "F.linear(encoded, of_key)), self._heads(F.linear(encoded, «of_value → of_key»))",
    ),
    Mutation(
        "dropped weights have no factors",
        ATTENTION_CONV,
        "dropped = F.dropout(alpha, self.dropout, «self.training → False»)",
    ),
    Mutation("small products are oneDNN's", PRODUCTS, "or «x.numel() * weight.size(0) → _LEAST» < _LEAST:"),
    Mutation("forward mode is not asked for", PRODUCTS, "if «uses_forward_mode() → False» or is_autocast(x)"),
    Mutation("a weight's gradient has the other's rows", PRODUCTS, "len(a), *out.shape, «a.stride(0) → b.stride(0)»"),
    Mutation("a bias has no gradient", PRODUCTS, "rows.sum(0) if «needs_bias → False»"),
    Mutation("what is dropped loses its strides", DROPOUT, "return «torch.empty_like(x).copy_(result) → result»"),
    Mutation("PyG's modules keep PyTorch's dropout", DROPOUT, "if type(each) is «torch.nn.Dropout → Dropout»"),
    Mutation("self-loops weigh nothing", FACTORS, "graph.with_features(edge_weight.unsqueeze(-1), «1.0 → 0.0»)"),
    Mutation("the token is a neighbour", GRAPHORMER, "(1, 0, 1, 0), value=«len(table) → 1»)"),
    Mutation(
        "degrees are exchanged",
        GRAPHORMER,
        "ends = («data.edge_index[1], data.edge_index[0] → data.edge_index[0], data.edge_index[1]»)",
    ),
    Mutation("edges are those of the first graph", GRAPHORMER, "order[(paths «+ first → + 0»)"),
    Mutation("paths begin at their source", PATHS, "paths[target, source, «length - 1 → 0»] = numbers"),
    Mutation("paths have their first edge only", PATHS, "paths[target, source] = paths[target, «step → target»]"),
    Mutation("only the last local layer counts", POLYNORMER_MODEL, "else «total + x → x»"),
    Mutation("nodes stay where they are", POLYNORMER_MODEL, "x = «torch.empty_like(x).index_copy(0, order, x) → x»"),
    # ----------------------------------------------------------------------------------------------- caches that forget
    Mutation(
        "what a cache forgot is not counted", CACHE, "_Entry(key, value, «forgotten → 0»)\n        return key, value"
    ),
    Mutation("a cache's memory is written from its start", CACHE, "memory.narrow(-3, «start + length → length», new"),
    Mutation("a cache keeps one token less", CACHE, "min(length, «self.window → self.window - 1»)"),
    Mutation(
        "a cache does not hide what is further back",
        MULTIHEAD,
        "CompleteGraph(num_targets, num_sources, window=«window → None»)",
    ),
    Mutation(
        "rotations of a cache that forgets start too early",
        MULTIHEAD,
        'positions("source", «first → num_sources - num_new», num_new',
    ),
]

# Makes Python import a copy of the package, however gattn is installed.
RUN = """
import sys
from importlib.machinery import PathFinder

class First:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "gattn":
            return PathFinder.find_spec(name, [sys.argv[1]] if name == "gattn" else path)

sys.meta_path.insert(0, First)
import pytest

status = pytest.main(sys.argv[2:])
gattn = sys.modules.get("gattn")
sys.exit(4 if gattn and not gattn.__file__.startswith(sys.argv[1]) else status)
"""

MUTANT_H = """
#include <cstdlib>
static const char* const gattn_mutant_text = std::getenv("GATTN_MUTANT");
static const int gattn_mutant = gattn_mutant_text ? std::atoi(gattn_mutant_text) : 0;
"""


class Result(NamedTuple):
    """The outcome of a mutation: its name and file, what happened, in which test, and after how many seconds."""

    mutation: str
    file: str
    outcome: str
    test: str
    seconds: float


def choices(file: str, places: Sequence[tuple[int, Place]]) -> str:
    """The C++ source with all mutations; each is active if `gattn_mutant` is its number."""
    source = (ROOT / file).read_text()
    changes = []
    for number, (_, start, end, right, wrong) in places:
        if right.endswith(";"):
            changed = f"{{ if (gattn_mutant == {number}) {{ {wrong} }} else {{ {right} }} }}"
        else:
            changed = f"(gattn_mutant == {number} ? ({wrong}) : ({right}))"
        changes.append((start, end, changed))
    for (start, end, changed), (limit, _, _) in zip(
        sorted(changes, reverse=True), [(len(source), 0, ""), *sorted(changes, reverse=True)], strict=False
    ):
        if end > limit:
            raise SystemExit(f"{file}: two mutations overlap at {source[start:end]!r}.")
        source = source[:start] + changed + source[end:]
    return source


def build(folder: Path, numbered: Sequence[tuple[int, Mutation]]) -> Path:
    """Compiles the kernels with all mutations, recompiling only what has changed."""
    sources = folder / "csrc"
    sources.mkdir(parents=True, exist_ok=True)
    texts = {path.name: path.read_text() for path in (ROOT / KERNELS).iterdir()} | {"mutant.h": MUTANT_H}
    places = [(number, mutation.place()) for number, mutation in numbered]
    for file in {place.file for _, place in places}:
        texts[Path(file).name] = choices(file, [pair for pair in places if pair[1].file == file])
    for name, text in texts.items():
        path = sources / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    flags = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    widest = next((name for name, flag in (("avx512", "avx512dq"), ("avx2", "avx2")) if flag in flags), "baseline")
    subprocess.run(
        [
            *("cmake", "-S", sources, "-B", folder / "build", f"-DGATTN_INSTRUCTION_SETS={widest}"),
            *("-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DCMAKE_CXX_FLAGS=-include {sources / 'mutant.h'}"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(["cmake", "--build", folder / "build"], check=True, stdout=subprocess.DEVNULL)
    return folder / "build/_kernels.so"


def copy(folder: Path, mutation: Mutation | None) -> Path:
    """A copy of the package with a mutation; Python's caches require a new folder each time."""
    path = Path(tempfile.mkdtemp(dir=folder))
    shutil.copytree(ROOT / "gattn", path / "gattn", ignore=shutil.ignore_patterns("__pycache__", "csrc"))
    if mutation is not None:
        file, start, end, _, wrong = mutation.place()
        source = (path / file).read_text()
        (path / file).write_text(source[:start] + wrong + source[end:])
    return path


def pytest(package: Path, tests: Sequence[str], environment: dict[str, str], timeout: float) -> tuple[str, str, float]:
    """Runs tests up to the first failure; returns what happened, in which test, and after how many seconds."""
    start = time.monotonic()
    command = [sys.executable, "-c", RUN, package, "-x", "-v", "--tb=short", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = None, (error.stdout or b"").decode(errors="replace")
    ran = [line for line in output.splitlines() if line.startswith("tests/") and "::" in line]
    test = re.split(" (?:PASSED|FAILED|ERROR|SKIPPED)| *$", ran[-1])[0] if ran else ""
    if code is not None and (2 <= code <= 5 or (code == 1 and not ran)):
        raise SystemExit(f"{output}\npytest ended with {code}.")
    outcome = {None: "timeout", 0: "not caught", 1: "caught"}.get(code, f"crash ({code})")
    return outcome, "" if code == 0 else test, time.monotonic() - start


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="run only mutations whose name or file contains one of these",
    )
    parser.add_argument("--tests", nargs="+", help="tests to run (default: those of each file)")
    parser.add_argument("--workers", type=int, default=1, help="number of mutations tested at once (default: 1)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a run is ended (default: 600)")
    parser.add_argument("--folder", type=Path, help="folder for the build, which is kept (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="CSV file for the table")
    arguments = parser.parse_args()
    numbered = list(enumerate(MUTATIONS, 1))
    files = {number: mutation.place().file for number, mutation in numbered}
    chosen = [
        (number, mutation)
        for number, mutation in numbered
        if not arguments.only or any(text in mutation.name or text in files[number] for text in arguments.only)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environment = {}
        if any(mutation.compiled for _, mutation in chosen):
            start = time.monotonic()
            library = build(arguments.folder or folder, [pair for pair in numbered if pair[1].compiled])
            environment["GATTN_KERNELS"] = str(library)
            print(f"built in {time.monotonic() - start:.0f} s", flush=True)

        def run(number: int, mutation: Mutation) -> Result:
            package = copy(folder, None if mutation.compiled else mutation)
            mutant = {"GATTN_MUTANT": str(number)} if mutation.compiled else {}
            tests = arguments.tests or TESTS[mutation.file]
            result = Result(
                mutation.name, files[number], *pytest(package, tests, environment | mutant, arguments.timeout)
            )
            shutil.rmtree(package)
            where = f"by {result.test}" if result.test else ""
            print(f"{result.seconds:6.0f} s  {result.outcome:12} {result.file}: {mutation.name} {where}", flush=True)
            return result

        right = copy(folder, None)
        every = dict.fromkeys(test for _, mutation in chosen for test in arguments.tests or TESTS[mutation.file])
        outcome, test, seconds = pytest(right, list(every), environment, 10 * arguments.timeout)
        if outcome != "not caught":
            raise SystemExit(f"Without a mutation: {outcome}, {test}")
        print(f"{seconds:6.0f} s  without a mutation all tests pass", flush=True)
        results = []
        output = arguments.output or os.devnull
        with ThreadPoolExecutor(arguments.workers) as pool, open(output, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Result._fields)
            for result in pool.map(run, *zip(*chosen, strict=True)):
                results.append(result)
                writer.writerow((*result[:-1], f"{result.seconds:.1f}"))
                file.flush()
    missed = [result for result in results if result.outcome == "not caught"]
    print(f"{len(results) - len(missed)} of {len(results)} were noticed")
    for result in missed:
        print(f"not caught: {result.file}: {result.mutation}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
