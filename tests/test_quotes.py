"""The figures in README.md and docs/performance.md are those of the committed tables.

Each quote is a text of the document, with `{}` in place of what a table gives. In the sections below, no digit may be
left that is neither quoted, nor somebody else's, nor pending.
"""

import json
import re
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


def span(values, to=" to "):
    """The smallest and the largest."""
    return f"{two_digits(min(values))}{to}{two_digits(max(values))}"


def one_decimal(text):
    """Mean and deviation."""
    return " ± ".join(f"{float(part):.1f}" for part in text.split(" ± "))


# What the documents quote --------------------------------------------------------------------------------------------


def citations():
    for folder, runs, model, words in (
        ("citation_100", 100, "gat", ""),
        ("citation", 10, "gatv2", ", untuned"),
        ("citation", 10, "transformer", ", untuned"),
    ):
        found = [cell(folder, "test, %", data_set=name, model=model, runs=str(runs)) for name in ("cora", "citeseer")]
        yield f'| `GAT(conv="{model}")`{words} | {runs} | {{}} | {{}} |', found


def nodes():
    texts = {
        "photo": "{} with `GATConv` (published, on one fixed split: {}), {}",
        "minesweeper": "{} with `GATConv` (published: {}), {}",
    }
    texts = {name: text + " with `GATv2Conv`, and {} with `TransformerConv`" for name, text in texts.items()}
    for (name, text), split in zip(texts.items(), ("60-20-20", "public"), strict=True):
        ours = [cell("nodes", "test, %", data_set=name, split=split, model=model) for model in CONVS]
        published = cell("nodes", "Luo et al., GAT", data_set=name, split=split, model="gat")
        yield text, map(one_decimal, [ours[0], published, *ours[1:]])
    factors = []
    for name in texts:
        for column in ("seconds/epoch (quartiles)", "MB per step"):
            times = [
                [number(cell("nodes_speed", column, data_set=name, model=model, layers=layers)) for model in CONVS]
                for layers in ("pyg", "gattn")
            ]
            factors.append(span([theirs / ours for theirs, ours in zip(*times, strict=True)]))
    text = "{} times as long and {} times as much memory on "
    yield f"{text}Photo, and {text}Minesweeper", factors


def molecules():
    models = ["GCN, published", "GIN, published", "gatv2", "gatedgcn", "transformer", "gps"]
    found = [cell("molecules", "test", data_set="rebuilt molhiv", model=model) for model in models]
    faster = cell("molecules", "× PyG", data_set="rebuilt molhiv", model="gps").rstrip("×")
    text = (
        "published: GCN {}, GIN {}), test ROC-AUC is {} with `GATv2Conv`, {} with `GatedGCNConv`, {} with "
        "`TransformerConv`, and {} with `GPSConv`, whose epochs are {} times as fast"
    )
    yield text, [*found, faster]


def translation():
    spans = []
    for column in ("test BLEU", "long BLEU"):
        base = number(cell("translation", column, attention="none"))
        gains = [100 * (number(row[column]) / base - 1) for row in rows("translation") if row["attention"] != "none"]
        spans.append(span(gains, "–"))
    yield "every kind of attention improves BLEU by {} % over a fixed-size vector, and by {} % on long", spans


KERNELS = "kernels_allocators"
KEPT, DEFAULT = "× PyG, kept", "× PyG"
"""The columns that compare with PyG eager."""
TIME = "forward + backward, ms, kept"


def kernels():
    """One row of the table in docs/performance.md per part and layer; the first of each part names it."""
    parts = {
        "attention alone": ("attention", ""),
        "whole layer": ("layer", ""),
        "whole layer, 16 edge features": ("layer", " + edge features"),
    }
    for title, (part, features) in parts.items():
        for name, layer in LAYERS.items():
            which = {"shape": "mid", "part": part, "layer": layer + features, "dtype": "float32"}
            ours, memory = {**which, "peer": "gattn"}, {"name": "memory.md", **which, "allocator": "default"}
            time = number(cell(KERNELS, TIME, **ours))
            peaks = [number(cell(KERNELS, "peak, MB", peer=peer, **memory)) / 1000 for peer in ("gattn", "pyg")]
            values = [f"{time / 1000:.2f}", *(two_digits(number(cell(KERNELS, x, **ours))) for x in (KEPT, DEFAULT))]
            text = "{} s | {} | {} | – | {} GB, PyG {} GB |"
            if part == "attention":
                text = "{} s | {} | {} | {} | {} GB, PyG {} GB |"
                values.append(two_digits(number(cell(KERNELS, TIME, peer="dgl", **which)) / time))
            label = f"{title}: {name}" if layer == "gat" else name
            yield f"| {label} | {text}", [*values, f"{peaks[0]:.2f}", f"{peaks[1]:.1f}"]


def whole_layers():
    """The smallest and the largest factor of all whole layers."""
    found = rows(KERNELS, shape="mid", part="layer", dtype="float32", peer="gattn")
    kept, default = ([number(row[column]) for row in found] for column in (KEPT, DEFAULT))
    text = (
        "is {} times as fast as through PyG's eager layer if the allocator keeps freed memory, {} to {} times as fast"
    )
    yield text, [span(kept), f"{min(default):.0f}", f"{max(default):.0f}"]


def small_graphs():
    for text, shapes in {
        "| 10 nodes | {}: both": ["tiny"],
        "| 1 000 nodes | {} |": ["thousand"],
        "| batches of molecules, sampled minibatches | {} |": ["batch", "sampled"],
    }.items():
        found = [row for shape in shapes for row in rows(KERNELS, shape=shape, part="layer", peer="gattn")]
        yield text, [span([number(row[column]) for row in found for column in (KEPT, DEFAULT)])]


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


def layers():
    column = "forward + backward, × PyG"
    factors = {row["layer"]: number(row[column]) for row in rows("layers")}
    gates = factors.pop("ResGatedGraphConv")
    low, high = (f"{factor:.0f}" for factor in (min(factors.values()), max(factors.values())))
    yield "eight of them are {} to {} times as fast", [low, high]
    yield "(`ResGatedGraphConv`) are {} times as fast", [two_digits(gates)]


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


# Where they are ------------------------------------------------------------------------------------------------------


#: For each section: who quotes there, what is nobody's figure or somebody else's, and what waits for new measurements.
SECTIONS = {
    ("README.md", "## Results"): (
        (citations, nodes, molecules, translation),
        (
            "[published](https://arxiv.org/abs/1710.10903) | 100 | 83.0 ± 0.7 | 72.5 ± 0.7 |",
            "60/20/20",
            "https://arxiv.org/abs/2406.08993",
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
    ("docs/performance.md", "## Graph layers beside PyG and DGL"): (
        (kernels, small_graphs, calls),
        (
            "a graph of 42 000 nodes and 622 000 edges, 8 heads of 32 channels, float32",
            "within 6 %",
            "× DGL 2.1",
            "GATv2Conv",
            "on 32 molecules",
        ),
        (
            "| 169 000 nodes, 2.5 million edges (the size of ogbn-arxiv), 4 heads of 64 channels | memory kept: GAT "
            "5.0; PyG's GATv2 and Transformer need more than the machine's 24 GB. glibc's default: GAT 22, GATv2 23, "
            "Transformer 11 |",
        ),
    ),
    ("docs/performance.md", "## Other layers"): (
        (layers, families),
        ("GATv2",),
        ("gates of 256 channels",),
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


def test_a_figure_that_is_not_that_of_a_table_is_found(monkeypatch):
    monkeypatch.setitem(globals(), "two_digits", lambda value: f"{value + 1:.1f}")
    with pytest.raises(AssertionError, match="the tables say"):
        test_every_figure_is_that_of_a_table(("docs/performance.md", "## Other layers"))
