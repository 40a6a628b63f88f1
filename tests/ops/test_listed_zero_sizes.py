"""Zero is a size: lists of edges with nothing of one kind, with every term of a call, against the reference."""

import pytest
import torch

from gattn import AdditiveScore, DotScore, GATScore, Projected, Softmax, SparseGraph, Typed, attend
from gattn.ops.backends.triton.forms import INTERPRETED
from tests.cases import pairs

SIZES = {"N": 4, "M": 5, "E": 9, "H": 2, "C": 3, "V": 3, "D": 2, "R": 3, "B": 2}
SCORES = {
    "dot": lambda of: DotScore(),
    "product of edges": lambda of: DotScore(edge="multiply"),
    "gat": lambda of: GATScore(),
    "additive": lambda of: AdditiveScore(of("H", "C")),
    "tanh": lambda of: AdditiveScore(of("H", "C"), "tanh"),
}
TERMS = {
    "none": lambda of, wide: {},
    "edge": lambda of, wide: {"edge": of("E", "H", *wide)},
    "projected": lambda of, wide: {"edge": Projected(of("E", "D"), of("H", *wide, "D"))},
    "typed": lambda of, wide: {"edge": Typed(of("R", "H", *wide), torch.arange(of.size("E")) % max(of.size("R"), 1))},
    "edge value": lambda of, wide: {"edge_value": of("E", "H", "V")},
    "projected value": lambda of, wide: {"edge_value": Projected(of("E", "D"), of("H", "V", "D"))},
    "typed value": lambda of, wide: {
        "edge_value": Typed(of("R", "H", "V"), torch.arange(of.size("E")) % max(of.size("R"), 1))
    },
    "both": lambda of, wide: {"edge": (term := Projected(of("E", "D"), of("H", "V", "D"))), "edge_value": term},
    "others": lambda of, wide: {
        "bias": of("E", "H"),
        "mask": torch.rand(of.size("E"), of.size("H")) < 0.5,
        "out_bias": of("H", "V"),
        "distribution": Softmax(of("H")),
    },
}


class Sizes:
    """Makes tensors of the sizes that letters stand for, one of which is zero, and keeps them as leaves."""

    def __init__(self, empty):
        torch.manual_seed(0)
        self.sizes, self.leaves = SIZES | {empty: 0}, []
        if empty in "NMR":  # without nodes or types there are no edges
            self.sizes["E"] = 0
        if empty in "CV":
            self.sizes["C"] = self.sizes["V"] = 0

    def size(self, letter):
        return self.sizes[letter]

    def __call__(self, *letters):
        self.leaves.append(torch.randn([self.sizes[x] for x in letters], dtype=torch.double, requires_grad=True))
        return self.leaves[-1]


@pytest.mark.parametrize("backend", ["cpu", *([pytest.param("triton", marks=pytest.mark.slow)] if INTERPRETED else [])])
@pytest.mark.parametrize(
    ("score", "term", "empty", "batched"),
    [("product of edges", "projected", "D", False), *pairs(SCORES, TERMS, SIZES, (False, True))],
)
def test_as_the_reference(score, term, empty, batched, backend):
    if empty == "H" and score in ("dot", "product of edges"):
        pytest.skip("heads of key and value divide those of the query: a dot product has some")
    if (empty == "B" and not batched) or (term == "both" and score == "gat"):
        pytest.skip("there is no such call")
    found = []
    for name in (backend, "reference"):
        of = Sizes(empty)
        front, wide = ("B",) * batched, () if score == "gat" else ("C",)
        query, key, value = of(*front, "N", "H", *wide), of(*front, "M", "H", *wide), of(*front, "M", "H", "V")
        ends = (torch.randint(max(of.size(x), 1), (of.size("E"),)) for x in "MN")
        graph = SparseGraph(torch.stack(list(ends)), num_sources=of.size("M"), num_targets=of.size("N"))
        options = TERMS[term](of, wide)
        made = SCORES[score](of)
        outs = attend(query, key, value, graph, score=made, return_weights=True, backend=name, **options)
        loss = sum((out * torch.arange(out.numel()).view(out.shape).cos()).sum() for out in outs)
        found.append([*(out.detach() for out in outs), *torch.autograd.grad(loss, of.leaves, materialize_grads=True)])
    torch.testing.assert_close(*found)
