"""The figures in README.md and in the pages on performance, deployment and several processes are those of tables.

Each quote is a text of the document, with `{}` in place of what a table gives. In the sections below, no digit may be
left that is neither quoted, nor somebody else's, nor pending.
"""

import json
import math
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LAYERS = {"GAT": "gat", "GATv2": "gatv2", "Transformer": "transformer"}
CONVS = {"gat": "GATConv", "gatv2": "GATv2Conv", "transformer": "TransformerConv"}


# Tables --------------------------------------------------------------------------------------------------------------


def rows(folder, name="table.md", **wanted):
    """The rows of a committed table that have these cells; underscores stand for spaces."""
    lines = [
        line.strip("| ").split(" | ") for line in (RESULTS / folder / name).read_text().splitlines() if line[:1] == "|"
    ]
    found = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    return [row for row in found if all(row[key.replace("_", " ")] == value for key, value in wanted.items())]


def cell(folder, column, name="table.md", **wanted):
    """The cell of the one row that has these others."""
    (row,) = rows(folder, name, **wanted)
    return row[column]


def number(text):
    """What a cell begins with."""
    return float(re.match(r"[\d.]+(e[+-]\d+)?", text)[0])


def two_digits(value):
    """As a factor is quoted."""
    return f"{value:.1f}" if value < 9.95 else f"{float(f'{value:.2g}'):.0f}"


def two_digits_or_dash(text):
    """Two digits, or a dash where the table has no ratio."""
    return text if text == "–" else two_digits(number(text))


def span(values, to=" to "):
    """The smallest and the largest, or one figure if they are equal in two digits."""
    ends = dict.fromkeys(two_digits(end) for end in (min(values), max(values)))
    return to.join(ends)


def one_decimal(text):
    """Mean and deviation."""
    return " ± ".join(f"{float(part):.1f}" for part in text.split(" ± "))


def milliseconds(row):
    """The time of both passes."""
    return number(row["forward + backward, ms"])


# What the documents quote --------------------------------------------------------------------------------------------


def citations():
    for folder, runs, model, words in (
        ("citation_100", 100, "gat", ""),
        ("citation", 10, "gat", None),
        ("citation", 10, "gatv2", ", untuned"),
        ("citation", 10, "transformer", ", untuned"),
    ):
        found = [cell(folder, "test, %", data_set=name, model=model, runs=str(runs)) for name in ("cora", "citeseer")]
        name = "the same, with the ten seeds of the next rows" if words is None else f'`GAT(conv="{model}")`{words}'
        yield f"| {name} | {runs} | {{}} | {{}} |", found


def nodes():
    def score(name, split, model, column="test, %"):
        return one_decimal(cell("nodes", column, data_set=name, split=split, model=model))

    def published(name, split):
        return score(name, split, "gat"), score(name, split, "gat", "published")

    others = "{} with `GATv2Conv`, and {} with `TransformerConv`"
    text = f"{{}} with `GATConv` (published: {{}}); on ten random 60/20/20 splits, {{}} with `GATConv`, {others}"
    yield text, [*published("photo", "luo"), *(score("photo", "60-20-20", model) for model in CONVS)]
    found = [json.loads(line) for line in (RESULTS / "nodes" / "runs.jsonl").read_text().splitlines()]
    three = [100 * row["test_score"] for row in found if (row["dataset"], row["model"]) == ("minesweeper", "gat")][:3]
    ours, theirs = published("minesweeper", "public")
    values = [ours, f"{statistics.mean(three):.1f} ± {statistics.stdev(three):.1f}", theirs]
    text = f"{{}} with `GATConv` (on the first three splits {{}}; published for three splits: {{}}), {others}"
    yield text, [*values, *(score("minesweeper", "public", model) for model in ("gatv2", "transformer"))]
    factors = []
    for name, split in (("photo", "60-20-20"), ("minesweeper", "public")):
        for column in ("seconds/epoch (quartiles)", "MB per step"):
            times = [
                [
                    number(cell("nodes_speed", column, data_set=name, split=split, model=model, layers=layers))
                    for model in CONVS
                ]
                for layers in ("pyg", "gattn")
            ]
            factors.append(span([theirs / ours for theirs, ours in zip(*times, strict=True)]))
    text = "{} times as long and {} times as much memory on "
    yield f"{text}Photo, and {text}Minesweeper", factors
    kinds = [("photo", "luo", model) for model in ("sgformer", "sgformer-frobenius", "gps")]
    text = (
        "{} with `SGFormer`, each row divided by its own norm as in PyG's, {} with the paper's `norm=\"frobenius\"` "
        "([table](benchmarks/results/nodes_sgformer/table.md)), and {} with `GPSConv` and linear attention; "
        "on Minesweeper, {} with `SGFormer` and {} with `GPSConv`, seven points below"
    )
    found = [
        one_decimal(cell(folder, "test, %", data_set=name, split=split, model=model))
        for folder, (name, split, model) in zip(("nodes_sgformer", "nodes_sgformer", "nodes"), kinds, strict=True)
    ]
    for model in ("sgformer", "gps"):
        found.append(one_decimal(cell("nodes_gpu", "test, %", data_set="minesweeper", split="public", model=model)))
    yield text, found


def molecules():
    def score(model):
        return cell("molecules", "test", data_set="rebuilt molhiv", model=model)

    faster = cell("molecules_times", "× PyG", data_set="rebuilt molhiv", model="gps", layers="gattn").rstrip("×")
    text = (
        "test ROC-AUC is {} with `GATv2Conv`, {} with `GatedGCNConv`, {} with `TransformerConv`, {} with attention "
        "among all atoms, and {} with `GPSConv`, whose epochs are {} times as fast"
    )
    yield text, [*map(score, ("gatv2", "gatedgcn", "transformer", "complete", "gps")), faster]
    yield "features: GCN {} and GIN {}", [score(f"{model}, published") for model in ("GCN", "GIN")]
    yield "GPS {} (as in", [score("GPS, published")]


def translation():
    spans = []
    for column in ("test BLEU", "long BLEU"):
        base = number(cell("translation", column, attention="none"))
        gains = [100 * (number(row[column]) / base - 1) for row in rows("translation") if row["attention"] != "none"]
        spans.append(span(gains, "–"))
    yield "every kind of attention improves BLEU by {} % over a fixed-size vector, and by {} % on long", spans


COMPILED, EAGER, BEST = (f"× {peer}, memory kept" for peer in ("PyG compiled", "PyG eager", "PyG's best"))
EAGER_BY_DEFAULT = "× PyG eager, default allocator"
TIME = "forward + backward, ms, memory kept"


def kernels():
    """One row of the table in docs/performance.md per part and layer."""
    parts = {
        "attention alone": ("attention", ""),
        "whole layer": ("layer", ""),
        "whole layer, 16 edge features": ("layer", " + edge features"),
    }
    for title, (part, features) in parts.items():
        for name, layer in LAYERS.items():
            which = {"shape": "mid", "part": part, "layer": layer + features, "dtype": "float32"}
            ours, memory = {**which, "peer": "gattn"}, {"name": "memory.md", **which, "allocator": "default"}
            peaks = [number(cell("kernels", "peak, MB", peer=peer, **memory)) / 1000 for peer in ("gattn", "pyg")]
            columns = (BEST, COMPILED, EAGER, EAGER_BY_DEFAULT)
            factors = [two_digits_or_dash(cell("kernels", column, **ours)) for column in columns]
            text = f"| {title}: {name} | {{}} s | {{}} | {{}} | {{}} | {{}} | {{}} GB, PyG {{}} GB |"
            time = f"{number(cell('kernels', TIME, **ours)) / 1000:.2f}"
            yield text, [time, *factors, f"{peaks[0]:.2f}", f"{peaks[1]:.1f}"]


def kernels_on_arxiv():
    which = {"shape": "arxiv", "part": "layer", "layer": "gat", "dtype": "float32", "peer": "gattn"}
    factors = [two_digits(number(cell("kernels", column, **which))) for column in (COMPILED, EAGER, EAGER_BY_DEFAULT)]
    yield "PyG's `GATConv` takes {}, {} and {} times as long", factors


def kernels_in_gathers():
    which = {"shape": "mid", "part": "attention", "peer": "gattn"}
    text = "takes as long as {} (GAT), {} (GATv2) and {} (dot products) of them"
    gathers = [
        cell("kernels", "gathers, memory kept", layer=layer, dtype="float32", **which) for layer in LAYERS.values()
    ]
    yield text, gathers
    times = [
        [number(cell("kernels", TIME, layer=layer, dtype=dtype, **which)) for layer in LAYERS.values()]
        for dtype in ("float32", "bfloat16")
    ]
    yield "bfloat16, attention alone is {} times as fast", [span([x / y for x, y in zip(*times, strict=True)])]


def beside_eager():
    """Whole layers whose best peer is the best of compiled and eager ones."""
    found = rows("kernels", shape="mid", part="layer", dtype="float32", peer="gattn")
    return [row for row in found if row[EAGER] != "–"]


def whole_layers():
    """The smallest and the largest factor of all whole layers, as far as eager PyG has times."""
    found = beside_eager()
    best, compiled, default = ([number(row[x]) for row in found] for x in (BEST, COMPILED, EAGER_BY_DEFAULT))
    text = (
        "it is {} times as fast as the fastest form of PyG's layer, and {} times as fast as the compiled one. With "
        "glibc's default allocator, it is {} to {} times as fast as PyG's eager layer"
    )
    yield text, [span(best), span(compiled), f"{min(default):.0f}", f"{max(default):.0f}"]


def calls():
    """The smaller ratio of both allocators, which the table rounds."""
    found = [json.loads(line) for line in (RESULTS / "calls" / "runs.jsonl").read_text().splitlines()]

    def ratio(call, mode):
        return f"{min(row[mode]['ratio']['median'] for row in found if row['call'] == call):.1f}"

    for mode, text in (
        ("forward", "are {}, {} and {} times as fast as PyG's without gradients"),
        ("forward_backward", "and {}, {} and {} times with them"),
    ):
        yield text, [ratio(f"10 nodes, {conv}", mode) for conv in CONVS.values()]
    modes = ("forward", "forward_backward")
    yield "`GPSConv` is {} and {} times as fast", [ratio("molecules, GPSConv", mode) for mode in modes]


def training_steps():
    """The smaller ratio of both allocators."""
    found = [
        json.loads(line)
        for folder in ("calls", "calls_compiled")
        for line in (RESULTS / folder / "runs.jsonl").read_text().splitlines()
    ]
    for data, words in (
        ("two hops", "1 024 seeds"),
        ("molecules", "batches of 32 molecules"),
        ("256 molecules", "batches of 256 molecules"),
    ):
        factors = []
        for peer in ("", ", compiled"):
            for conv in ("GATv2Conv", "TransformerConv"):
                call = f"training step, {data}, {conv}{peer}"
                ratios = [row["forward_backward"]["ratio"]["median"] for row in found if row["call"] == call]
                factors.append(f"{min(ratios):.1f}")
        yield f"| {words} | {{}} | {{}} | {{}} | {{}} |", factors


def steps():
    for task, words in STEPS.items():
        own, theirs = (rows("steps", task=task, layers=peer, allocator="kept")[0] for peer in ("gattn", "pyg"))
        step, products = (number(own[column]) for column in ("step, ms", "products, ms"))
        total = sum(number(own[f"{part}, ms"]) for part in ("products", "attention", "dropout", "Adam", "other"))
        factors = [two_digits(number(own[column])) for column in ("× PyG's best", "× PyG") if own[column] != "–"]
        if not factors:
            compared = [row for row in rows("steps", task=task, allocator="kept") if row["layers"] != "gattn"]
            in_turns = {row["layers"]: number(row["time over gattn's, in turns"]) for row in compared}
            factors = [two_digits(value) for value in (min(in_turns.values()), in_turns["pyg"])]
        dropout = [two_digits(number(row["dropout, ms"])) for row in (own, theirs)]
        yield (
            f"| {words} | {{}} ms | {{}} | {{}} | {{}} and {{}} ms | {{}} % |",
            [f"{step:.0f}", *factors, *dropout, f"{100 * products / total:.0f}"],
        )


STEPS = {
    "GAT, 2 layers of 8 × 8, cora": "GAT, two layers of 8 × 8, Cora's size",
    "GAT, 3 layers of 4 × 64, photo": "GAT, three layers of 4 × 64, Photo",
    "GATv2, 3 layers of 4 × 64, photo": "GATv2, the same",
    "GAT, 3 layers of 4 × 64, larger, mid": "GAT, the same, 42 000 nodes and 580 000 edges",
    "GAT, tunedGNN's, photo": "tunedGNN's GAT for Photo",
    "SGFormer, photo": "SGFormer, Photo",
    "Polynormer, photo": "Polynormer, Photo",
    "GPS, 4 blocks of 64, 32 molecules": "four GPS blocks of 64 channels, molecules",
    "Transformer, 4 layers of 4 × 16, 32 molecules": "four `TransformerConv` of 4 × 16, molecules",
}


def layers():
    for column, words in ((BEST, "the fastest form of PyG's"), (COMPILED, "PyG compiled"), (EAGER, "PyG eager")):
        factors = [number(row[column]) for row in rows("layers", peer="gattn") if row[column] != "–"]
        yield f"{{}} times as fast as {words}", [span(factors)]


def custom_scores():
    which = {"shape": "mid", "part": "attention", "dtype": "float32"}
    ours, fused = (rows("kernels", peer=peer, **which) for peer in ("gattn-custom", "gattn"))
    slower = [number(x[TIME]) / number(y[TIME]) for x, y in zip(ours, fused, strict=True)]
    text = (
        "takes {} times as long as one that the kernels know. Attention with it is {} times as fast as the fastest form"
    )
    yield text, [span(slower), span([number(row[BEST]) for row in ours])]


def families():
    """The smallest and the largest factor of each group; of both passes, of the forward pass, and per byte."""
    found = rows("families", shape="mid") + rows("families", shape="arxiv")
    groups = {
        "gates, a sink, a softcap, clamps": "sigmoid|tanh|identity|sink|softcap|dot, clamped",
        "cosines, terms by type": "cosine|.*of 100 types",
        "an additive score with tanh, ELU or SiLU for each channel of each edge": "GATv2, (tanh|ELU|SiLU)",
        "the same with GELU": "GATv2, GELU",
        "`Sparsemax`, `Entmax15`, `TopK(8)`, also on a graph of ogbn-arxiv's size": "sparsemax|entmax15|top 8",
        "gates per channel (256 heads of one channel)": "gates of .*|weights of .*",
    }

    def factors(names, column):
        values = [
            number(row[column]) for row in found if re.fullmatch(names, row["family"].removesuffix(", normalized"))
        ]
        low, high = (two_digits(value) for value in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    for group, names in groups.items():
        values = [factors(names, f"{passes}, × base") for passes in ("forward + backward", "forward")]
        text = f"| {group} | × {{}} ({{}})"
        if group.startswith("gates per"):
            text += ", per byte that has to move × {} ({})"
            values += [factors(names, f"{passes}, per byte") for passes in ("forward + backward", "forward")]
        yield text, values


def tiles():
    """Both passes of everything on complete graphs, by gattn and its peers."""

    def times(attention, by="gattn"):
        (row,) = rows("complete", attention=attention, N="4 096", by=by)
        forward, both = (row[f"{passes}, × base"] for passes in ("forward", "forward + backward"))
        if by == "flex":
            return f"{two_figures(forward)} \\| refuses"
        return " \\| ".join(map(two_figures, (forward, both)))

    def two_figures(text):
        return text if text == "–" else f"{number(text):.2f}" if number(text) < 1 else two_digits(number(text))

    for words, attention, peer, more, has_flex in (
        ("causal", "causal", "sdpa", ", fused", False),
        ("a causal window of 256", "causal window", "dense", ", fused, with a mask", False),
        ("a softcap", "softcap", "formula", "", True),
        ("a causal softcap", "causal softcap", "formula", "", False),
        ("a sink", "sink", "formula", "", False),
        ("sigmoids in place of the softmax", "sigmoid", "formula", "", False),
        ("a learnt bias of 500 000 pairs", "sparse bias", "dense", ", fused, with a dense bias", False),
        ("a learnt bias of 20 buckets", "bucket bias", "dense", ", fused, with a dense bias", True),
    ):
        found = [times(attention), times(attention, peer), *([times(attention, "flex")] if has_flex else [])]
        yield f"| {words} | {{}} | {{}}{more} | {'{} |' * has_flex}", found
    yield "| nothing else | {} |", [times("none")]


def complete():
    """Times of both passes, beside a base or a peer, and the peaks of memory."""

    def found(attention, nodes, by="gattn"):
        (row,) = rows("complete", attention=attention, N=nodes, by=by)
        return row

    def peak(row):
        return f"{number(row['peak, MB']):,.0f}".replace(",", " ")

    def share(attention, nodes, peer):
        ours, theirs = found(attention, nodes), found(attention, nodes, peer)
        return f"{milliseconds(ours) / milliseconds(theirs):.2f}"

    def times(attention, nodes):
        return two_digits(number(found(attention, nodes)["forward + backward, × base"]))

    def peaks(attention, nodes, *bys):
        return [peak(found(attention, nodes, by)) for by in ("gattn", *bys)]

    yield (
        "| 1 024 | {} of three lines of `einsum` | {} MB |",
        [share("linear", "1 024", "einsum"), *peaks("linear", "1 024")],
    )
    middle, most = "16 384", "1 000 000"
    values = [share("linear", middle, "einsum"), *peaks("linear", middle, "einsum")]
    yield f"| {middle} | {{}} of them | {{}} MB, `einsum` {{}} MB |", values
    gigabytes = [f"{number(found('linear', most, by)['peak, MB']) / 1000:.1f}" for by in ("gattn", "einsum")]
    values = [f"{milliseconds(found('linear', most)) / 1000:.1f}", share("linear", most, "einsum"), *gigabytes]
    yield f"| {most} | {{}} s, {{}} of them | {{}} GB, `einsum` {{}} GB |", values
    causal = rows("complete", attention="linear causal", by="gattn")
    factors = [number(x) for row in causal if (x := row["forward + backward, × base"]) != "–"]
    text = f"| linear attention, causal | {causal[0]['N']} to {causal[-1]['N']} | {{}} times full"
    yield text, [span(factors)]
    (ragged,) = rows("complete", attention="ragged", by="gattn")
    values = [share("ragged", ragged["N"], "padded"), *peaks("ragged", ragged["N"], "padded")]
    text = f"64 graphs of 10 to 500 nodes | {ragged['N']} | {{}} of padding them | {{}} MB, padded {{}} MB"
    yield text, values
    ours, theirs = (
        [row for row in rows("complete", N=ragged["N"], by=by) if row["attention"].startswith("ragged layer")]
        for by in ("gattn", "pyg")
    )
    shares = []
    for column in ("forward + backward, ms", "peak, MB"):
        values = [number(x[column]) / number(y[column]) for x, y in zip(ours, theirs, strict=True)]
        shares.append(f"{min(values):.2f} to {max(values):.2f}")
    yield f"on these graphs | {ragged['N']} | {{}} of PyG's layers on a padded batch | {{}} of theirs |", shares
    for kind, words in (("sparse bias", "500 000 pairs"), ("bucket bias", "20 buckets of pairs")):
        is_sparse, nodes = kind == "sparse bias", "4 096"
        none = [peak(found("none", nodes, "sdpa"))] if is_sparse else []
        text = (
            f"{words} | {nodes} | {{}} times fused attention without one | {{}} MB, {'without one {} MB, ' * is_sparse}"
        )
        ours, dense = peaks(kind, nodes, "dense")
        yield text + "as a tensor {} MB |", [times(kind, nodes), ours, *none, dense]
        none = [peak(found("none", middle, "sdpa"))] if is_sparse else []
        text = f"| {middle} | {{}} times | {{}} MB{', without one {} MB' * is_sparse} |"
        yield text, [times(kind, middle), *peaks(kind, middle), *none]
    text = "| one query, as in decoding, forward | 16 384 | {} times fused attention on keys with heads first | |"
    forward = [number(found("decoding", middle, by)["forward, ms"]) for by in ("gattn", "sdpa")]
    yield text, [two_digits(forward[0] / forward[1])]
    first, last = (milliseconds(found("linear", nodes)) for nodes in ("1 024", most))
    yield "grows with an exponent of {}", [f"{math.log(last / first) / math.log(1_000_000 / 1024):.2f}"]
    forward = [number(found("linear", "1 024", by)["forward, ms"]) for by in ("gattn", "einsum")]
    yield "pass alone takes {} times as long as the `einsum`", [two_digits(forward[0] / forward[1])]
    text = (
        "On windows of 33 of 32 000 tokens, layers with `ALiBi` and with learnt positions take {} and {} times as long"
    )
    alibi = found("window, ALiBi", "32 000")["forward + backward, × base"].rstrip("×")
    yield text, [alibi, times("window, learnt", "32 000")]


def large_graphs():
    """Times and memory with glibc's default, and the smaller factor of both allocators."""

    def steps(graph, layers, **more):
        return {row["memory"]: row for row in rows("scale", graph=graph, part="step", layers=layers, **more)}

    def factor(graph, layers):
        ours, theirs = steps(graph, "gattn"), steps(graph, layers)
        factors = [milliseconds(theirs[memory]) / milliseconds(ours[memory]) for memory in ("default", "kept")]
        return two_digits(min(factors))

    def gigabytes(row, digits):
        return f"{number(row['peak, MB']) / 1000:.{digits}f}"

    million, ten_million = (steps(graph, "gattn")["default"] for graph in ("1e6", "1e7"))
    values = [
        f"{milliseconds(million) / 1000:.1f}",
        gigabytes(million, 2),
        factor("1e6", "pyg"),
        gigabytes(steps("1e6", "pyg")["default"], 1),
        factor("1e6", "dgl"),
    ]
    yield "| 10⁶ | {} s, {} GB | × {}, {} GB | × {} |", values
    values = [f"{milliseconds(ten_million) / 1000:.1f}", factor("1e7", "dgl")]
    assert {row["forward + backward, ms"] for row in steps("1e7", "pyg").values()} == {"out of memory"}
    yield "| 10⁷ | {} s | out of memory (21 GiB) | × {} |", values
    products = steps("products", "gattn")["default"]
    values = [f"{number(products['edges'].replace(',', '')) / 1e6:.0f}", f"{milliseconds(products) / 1000:.0f}"]
    yield (
        "| {} million, as in ogbn-products | {} s, {} GiB in all",
        [*values, f"{number(products['process, MB']) * 1e6 / 2**30:.0f}"],
    )
    times = [milliseconds(steps(graph, "gattn")["kept"]) / 1000 for graph in ("communities", "shuffled")]
    yield "a step takes {} s instead of {} s", [f"{time:.1f}" for time in times]

    def gain(graph, order):
        return f"{number(cell('scale', 'speed', 'reordered.md', graph=graph, order=order)):.1f}"

    text = "is {} times as fast on a mesh of 150 000 nodes whose numbers are random, and {} times on communities; "
    values = [gain(graph, order) for order in ("rcm", "metis") for graph in ("mesh", "communities")]
    yield text + "with METIS, it is {} and {} times as fast", values
    yield "the gain is small ({} and {} times)", [gain(graph, "rcm") for graph in ("power law", "photo")]


def scale():
    """Of a step: a range is that of both allocators."""

    def own(graph, memory="default", part="step"):
        layers = "embedding_bag" if part == "gather" else "gattn"
        (row,) = rows("scale", graph=graph, part=part, memory=memory, layers=layers)
        return row

    def both(graph, column, part="step"):
        return span([number(own(graph, memory, part)[column]) for memory in ("default", "kept")])

    def gibibytes(row):
        return f"{number(row['process, MB']) * 1e6 / 2**30:.0f}"

    sizes = [own(graph, memory)["bytes/edge"] for graph in ("1e6", "1e7") for memory in ("default", "kept", "huge")]
    theirs = [number(row["bytes/edge"]) / 1000 for row in rows("scale", graph="1e6", part="step", layers="pyg")]
    products, largest = own("products"), own("1e8", part="recomputed")
    text = "between {} (products) and {} bytes per edge, and one of PyG takes {} kB"
    yield text, [products["bytes/edge"], max(sizes, key=number), span(theirs)]
    values = [f"{milliseconds(products) / 1000:.0f}", gibibytes(products)]
    yield "The step on products takes {} s and {} GiB, code and inputs included", values
    values = [f"{milliseconds(largest) / 1000:.0f}", gibibytes(largest)]
    yield "it takes {} s and {} GiB if it recomputes", values
    for edges, graph in (("10⁴ to 10⁵", "1e5"), ("10⁵ to 10⁶", "1e6"), ("10⁶ to 10⁷", "1e7")):
        values = [both(graph, "exponent"), both(graph, "exponent", "gather"), both(graph, "gathers")]
        yield f"| {edges} | {{}} | {{}} | {{}} |", values
    assert largest["exponent"].endswith("†")
    yield "| 10⁷ to 10⁸, recomputed | {}† | | |", [two_digits(number(largest["exponent"]))]
    times = [milliseconds(own(graph, "kept")) / 1000 for graph in ("communities", "shuffled")]
    yield "a step takes {} s, compared with {} s", [f"{time:.1f}" for time in times]
    huge = [two_digits(number(own(graph, "huge")["gathers"])) for graph in ("1e6", "1e7")]
    yield "In huge pages, a step takes {} and {} gathers", huge


def sequences():
    """Times relative to those of a peer, both with the gradients unless the text says otherwise."""
    table = {(row["graph"], row["T"], row["peer"]): row for row in rows("sequence", "speed.md")}

    def share(graph, length, peer="torch", column="forward + backward, ms"):
        return number(table[graph, length, "gattn"][column]) / number(table[graph, length, peer][column])

    for lengths, text in (
        (("128", "256"), "| 128 and 256 tokens, full or causal | {} to {} of"),
        (("512", "1024", "2048", "4096"), "| 512 to 4 096 tokens, full or causal | {} to {} of"),
    ):
        shares = [share(graph, length) for graph in ("full", "causal") for length in lengths]
        yield text, [f"{min(shares):.2f}", f"{max(shares):.2f}"]
    forward = "forward, ms"
    values = [two_digits(share("full", "16")), two_digits(share("full", "16", column=forward))]
    yield "| 16 tokens, one sequence | {} times `torch.nn.MultiheadAttention` (forward alone: {})", values
    yield (
        "| decoding 256 tokens one by one (forward only) | {} times",
        [two_digits(share("decode", "256", column=forward))],
    )
    whole, window = (milliseconds(table[graph, "4096", "gattn"]) for graph in ("full", "window"))
    yield "| a window of 128 over 4 096 tokens | {} of full attention", [f"{window / whole:.2f}"]
    values = [f"{share('ragged', '512', peer):.2f}" for peer in ("gattn-padded", "torch")]
    yield "64 sequences of 32 to 512 tokens | {} of padding it with gattn, {} of padding it with `torch.nn`", values


def training():
    epochs = "seconds/epoch (quartiles)"
    ours, theirs = (
        number(cell("citation_speed", epochs, layers=x)) for x in ("gattn, sparse features", "pyg, dense features")
    )
    yield (
        "takes {} s with sparse features. The same script on PyG's layers with dense features takes {} s",
        [f"{ours:.4f}", f"{theirs:.3f}"],
    )
    yield (
        "Epochs of GPS on ogbg-molhiv are {} times as fast",
        [cell("molecules_times", "× PyG", data_set="rebuilt molhiv", model="gps", layers="gattn").rstrip("×")],
    )
    ours, theirs = (number(cell("training", "seconds/epoch", task="molbace", layers=x)) for x in ("gattn", "pyg"))
    yield "GatedGCN on ogbg-molbace takes {} % less time", [f"{100 - 100 * ours / theirs:.0f}"]


# Where they are ------------------------------------------------------------------------------------------------------


#: For each section: who quotes there, what is nobody's figure or somebody else's, and what waits for new measurements.
SECTIONS = {
    ("README.md", "## Results"): (
        (citations, nodes, molecules, translation),
        (
            "[published](https://arxiv.org/abs/1710.10903) | 100 | 83.0 ± 0.7 | 72.5 ± 0.7 |",
            "https://arxiv.org/abs/2406.08993",
            "five seeds of 12 epochs",
            "[OGB, 2020](https://arxiv.org/abs/2005.00687)",
            "[Choi et al. 2025](https://arxiv.org/abs/2511.13010)",
            "GATv2",
            "notebooks/02_",
            "100 %",
        ),
        (),
    ),
    ("README.md", "- **Fast.**"): (
        (whole_layers,),
        ("two CPU cores and a graph of 622 000 edges", "GATv2"),
        (),
    ),
    ("docs/performance.md", "## A training step"): (
        (steps,),
        ("in batches of 32", "float32", "AVX-512"),
        (),
    ),
    ("docs/performance.md", "## Graph layers beside PyG"): (
        (kernels, kernels_on_arxiv, kernels_in_gathers, calls, training_steps),
        (
            "a graph of 42 000 nodes and 622 000 edges, 8 heads of 32 channels, float32",
            "2.5 million edges, 4 heads of 64 channels",
            "GATv2",
            "on 32 molecules",
        ),
        (),
    ),
    ("docs/performance.md", "## Large graphs"): (
        (large_graphs,),
        (
            "a two-layer GAT (100 → 4 × 32 → 4 × 32)",
            "x, edge_index = torch.randn(10_000, 100), torch.randperm(10_000)[grid(100, 100)[0]]",
            "gattn.nn.GATConv(100, 32, heads=4)",
            "num_nodes=10_000",
        ),
        (),
    ),
    ("benchmarks/README.md", "## scale"): (
        (scale,),
        (
            "(100 → 4 × 32)",
            "10⁴ to 10⁸ edges with 20 edges per node",
            "(2.4 M, 124 M)",
            "64 labelled nodes",
            "float64",
            "10⁷ edges within communities of 500 nodes",
            "all three of 150 000 nodes",
            "1e8 --parts step recomputed --peers gattn --allocators default --timeout 2400",
            "at most 21 GiB",
            "On power-law graphs of 10⁶ edges",
            "on 10⁶.",
            "On 10⁸ edges",
            "From 10⁵ edges on",
            "(32 MB, which other machines may share)",
            "those of 50 000 nodes take 26 MB, and those of 500 000 ten times as much",
            "on 10⁶ and 10⁷ edges",
        ),
        (),
    ),
    ("docs/performance.md", "## Sequences"): (
        (sequences,),
        ("with 256 channels and 8 heads",),
        (),
    ),
    ("docs/performance.md", "## Training"): (
        (training,),
        (),
        (),
    ),
    ("README.md", "## Anything on a complete graph"): (
        (tiles,),
        ("4 096 nodes, 8 heads of 32 channels, float32", "1 \\| 1"),
        (),
    ),
    ("docs/performance.md", "## Everyone attends to everyone"): (
        (complete,),
        (
            "8 heads of 32 channels",
            "it reads 512 rows at a time",
            "for each 32 nodes, with a state of 32 × 33 numbers",
            "its gradient (16 MB)",
        ),
        (),
    ),
    ("docs/performance.md", "## Other layers"): (
        (layers, custom_scores, families),
        ("GATv2",),
        (),
    ),
}


@pytest.mark.parametrize("place", SECTIONS, ids=lambda place: place[1])
def test_every_figure_is_that_of_a_table(place):
    document, start = place
    prefix = re.escape(start.partition(re.search(r"\w", start)[0])[0])  # the next part begins with it, too
    text = (ROOT / document).read_text()
    found = re.search(rf"^{re.escape(start)}\s(.*?)(?=^{prefix}|\Z)", text, re.DOTALL | re.MULTILINE)
    left, (quotes, others, pending) = " ".join(found[1].split()), SECTIONS[place]
    for quote in quotes:
        for text, values in quote():
            expected = text.format(*values)
            assert expected in left, f"{document}, {start}: the tables say {expected!r}"
            left = left.replace(expected, " ", 1)
    for text in sorted((*others, *pending), key=len, reverse=True):
        assert text in left, f"{document}, {start}: {text!r} is not there any more"
        left = left.replace(text, " ")
    assert not re.findall(r".{0,40}\d.{0,40}", left), "quote these figures above, or say whose they are"


def test_the_first_screen_says_what_the_table_does():
    best = span([number(row[BEST]) for row in beside_eager()])
    introduction = " ".join((ROOT / "README.md").read_text().partition("```python")[0].split())
    assert f"fused kernels make whole graph-attention layers {best} times as fast as the fastest form" in introduction


def test_a_figure_that_is_not_that_of_a_table_is_found(monkeypatch):
    monkeypatch.setitem(globals(), "two_digits", lambda value: f"{value + 1:.1f}")
    with pytest.raises(AssertionError, match="the tables say"):
        test_every_figure_is_that_of_a_table(("docs/performance.md", "## Other layers"))


FORMS = {
    "eager mode": "eager",
    "exported program": "exported",
    "exported program with kernels": "exported with kernels",
    "compiled package": "AOTInductor",
    "compiled package with kernels": "AOTInductor with kernels",
    "ONNX file, onnxruntime": "onnxruntime",
}


@pytest.mark.parametrize("form", FORMS)
def test_latencies(form):
    times = [number(cell("deployment", "forward, ms", model=x, way=FORMS[form])) for x in ("GAT", "TransformerLM")]
    line = f"| {form} | {times[0]:.1f} | {times[1]:.1f} |"
    assert f"{line}\n" in (ROOT / "docs" / "deployment.md").read_text(), f"the table says {line}"


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("graph", ["power law", "mesh"])
def test_shards(graph, processes):
    (row,) = rows("sharding", graph=graph, partition="blocks", processes=str(processes))
    whole = {name: int(row[name].split(" (")[0].replace(",", "")) for name in ("nodes", "fetched")}
    fetched = whole["fetched"] * processes / whole["nodes"]
    shares = [re.search(r"\((.*)\)", row[name])[1] for name in ("processor, ms", "peak, MB")]
    sent = number(row["sent, MB"])
    found = [str(processes), f"{float(f'{fetched:.1g}') if fetched < 1 else round(fetched, 1)}"]
    line = " | ".join([*found, f"{sent:.0f}" if sent > 10 else f"{sent:.1f}", *shares])
    assert f"| {line} |\n" in (ROOT / "docs" / "distributed.md").read_text(), f"the table says {line}"
