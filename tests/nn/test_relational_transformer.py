"""The Relational Transformer's block beside four matrices of all pairs of cells."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gattn import CompleteGraph
from gattn.graphs import from_tables
from gattn.nn import RelationalTransformerLayer
from gattn.recording import record_attention

C, H = 8, 2

pytestmark = pytest.mark.usefixtures("in_double")


def randomized(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.7, 0.7)
    return layer


def database(cells, rows, contexts=1):
    """Cells in any order within each context, rows in several contexts, links that repeat, miss, or lead to itself."""
    links = torch.randint(rows + 2, (2, 2 * rows))
    links = torch.cat([links, links[:, :3], links[:, :1].flip(0), links[:1, :1].expand(2, -1)], 1)
    batch = torch.randint(contexts, (cells,)).sort()[0]
    return torch.randint(rows, (cells,)), torch.randint(5, (cells,)), links, batch


def zeros(*sizes):
    return torch.zeros(sizes, dtype=torch.long)


DATABASES = {
    "one context": lambda: database(23, 7),
    "contexts": lambda: database(30, 6, contexts=4),
    "rows of one cell": lambda: (torch.arange(9), zeros(9), torch.randint(9, (2, 12)), torch.arange(9) // 5),
    "no links": lambda: (*database(11, 4)[:2], zeros(2, 0), zeros(11)),
    "a single cell": lambda: database(1, 1),
    "nothing": lambda: database(0, 3),
    "large numbers": lambda: tuple(x * 2**40 if i < 3 else x for i, x in enumerate(database(15, 4, contexts=2))),
    "int32": lambda: tuple(x.int() for x in database(15, 4, contexts=2)),
}


def masks(row, column, links, batch):
    """The authors' four masks, targets before sources."""
    same = batch.unsqueeze(1) == batch
    is_link = (row.view(-1, 1, 1) == links[0]) & (row.view(1, -1, 1) == links[1])  # from the row of i to that of j
    parent = is_link.any(-1)
    return {
        "col": (column.unsqueeze(1) == column) & same,
        "feat": ((row.unsqueeze(1) == row) | parent) & same,
        "nbr": parent.t() & same,
        "full": same,
    }


def formula(layer, x, masks):
    for name, mask in masks.items():
        attention, h = layer.attns[name], layer.norms[name](x)
        q, k, v = (lin(h).view(-1, H, C // H).transpose(0, 1) for lin in (attention.wq, attention.wk, attention.wv))
        logits = (q @ k.mT / (C // H) ** 0.5).masked_fill(~mask, -torch.inf)
        weights = logits.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0)  # a row without sources is NaN
        x = x + attention.wo((weights @ v).transpose(0, 1).flatten(1))
    h, ffn = layer.norms["ffn"](x), layer.ffn
    return x + ffn.w2(F.silu(ffn.w1(h)) * ffn.w3(h))


@pytest.mark.parametrize("name", DATABASES)
def test_graphs_are_the_masks(name):
    """Each pair once, and target by target."""
    row, column, links, batch = DATABASES[name]()
    graphs, expected = from_tables(row, column, links, batch=batch), masks(row, column, links, batch)
    for kind, graph in zip(expected, graphs[1:], strict=True):
        source, target = graph.edge_index
        assert (target.diff() >= 0).all()
        if kind == "col":
            source, target = graphs.order[source], graphs.order[target]
        found = torch.zeros_like(expected[kind], dtype=torch.long).index_put((target, source), torch.tensor(1), True)
        assert found.equal(expected[kind].long()), kind


@pytest.mark.parametrize("name", DATABASES)
def test_formula(name):
    row, column, links, batch = DATABASES[name]()
    layer, x = randomized(RelationalTransformerLayer(C, H, 12)), torch.randn(len(row), C, requires_grad=True)
    found = layer(x, from_tables(row, column, links, batch=batch))
    expected = formula(layer, x, masks(row, column, links, batch))
    leaves = [x, *layer.parameters()]
    grads = [
        torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True, materialize_grads=True)
        for out in (found, expected)
    ]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


def test_contexts_as_alone():
    row, column, links, batch = DATABASES["contexts"]()
    layer, x = randomized(RelationalTransformerLayer(C, H)), torch.randn(len(row), C)
    found = layer(x, from_tables(row, column, links, batch=batch))
    for context in range(4):
        some = batch == context
        alone = layer(x[some], from_tables(row[some], column[some], links))
        torch.testing.assert_close(found[some], alone)


@pytest.mark.parametrize("name", ["one context", "contexts"])
@pytest.mark.parametrize("chosen", [[], [4], [0, 0, 3, 9, 20]], ids=str)
def test_chosen_targets(name, chosen):
    graphs, targets = (
        from_tables(*DATABASES[name]()[:3], batch=DATABASES[name]()[3].sort()[0]),
        torch.tensor(chosen).long(),
    )
    layer, x = randomized(RelationalTransformerLayer(C, H)), torch.randn(len(graphs.order), C, requires_grad=True)
    found, expected = layer(x, graphs, targets=targets), layer(x, graphs)[targets]
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()]) for out in (found, expected)]
    torch.testing.assert_close(*grads)


class NothingAsLarge(TorchDispatchMode):
    """Refuses tensors with memory for as many elements as this."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                assert leaf.untyped_storage().nbytes() < self.limit * leaf.element_size(), (func, leaf.shape)
        return out


def test_no_tensor_of_all_pairs():
    size = 1024
    row, column, links = torch.arange(size) // 4, torch.arange(size) % 64, torch.randint(size // 4, (2, size // 4))
    layer, x = RelationalTransformerLayer(C, H), torch.randn(size, C, requires_grad=True)
    with NothingAsLarge(size * size // 8):
        layer(x, from_tables(row, column, links)).sum().backward()
    with pytest.raises(AssertionError), NothingAsLarge(size * size // 8):
        masks(row, column, links, row)


_LARGE = """
import resource, torch, gattn
size = 16384
row, column = torch.arange(size) // 8, torch.arange(size) % 128
links = torch.stack([torch.arange(size // 8), torch.randint(size // 8, (size // 8,))])
layer, x = gattn.nn.RelationalTransformerLayer(64, 4), torch.randn(size, 64, requires_grad=True)
layer(x[:8], gattn.graphs.from_tables(row[:8], column[:8], links)).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
layer(x, gattn.graphs.from_tables(row, column, links)).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


@pytest.mark.slow
def test_memory_of_a_large_context():
    """16 384 cells, forward and backward, in gigabytes above the start of the process."""
    found = subprocess.run([sys.executable, "-c", _LARGE], capture_output=True, text=True, check=True)
    assert 0 < float(found.stdout) < 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    row, column, links, batch = DATABASES["contexts"]()
    layer, x, graphs = (
        RelationalTransformerLayer(C, H),
        torch.randn(30, C),
        from_tables(row, column, links, batch=batch),
    )
    exact = layer(x, graphs)
    found = layer.to(dtype)(x.to(dtype), graphs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.05)


def test_weights_are_recorded_by_graph():
    row, column, links, batch = DATABASES["contexts"]()
    layer, graphs = RelationalTransformerLayer(C, H), from_tables(row, column, links, batch=batch)
    with record_attention(layer) as records:
        layer(torch.randn(30, C), graphs)
    assert list(records) == [f"attns.{name}" for name in ("col", "feat", "nbr", "full")]
    weights = records["attns.feat"][0].weights
    sums = torch.zeros(30, H).index_add(0, graphs.feature.edge_index[1], weights)
    torch.testing.assert_close(sums, torch.ones(30, H))


def test_parameters_have_the_authors_names():
    names = {f"attns.{name}.w{part}.weight" for name in ("col", "feat", "nbr", "full") for part in "qkvo"}
    names |= {f"norms.{name}.weight" for name in ("col", "feat", "nbr", "full", "ffn")}
    layer = RelationalTransformerLayer(C, H)
    assert layer.state_dict().keys() == names | {f"ffn.w{part}.weight" for part in "123"}
    assert layer.ffn.w1.weight.shape == (4 * C, C)


def test_wrong_inputs():
    row, column, links, batch = database(10, 3, contexts=2)
    for arguments, error, text in (
        ((row.double(), column, links), TypeError, "row must be a tensor of integers; got torch.float64"),
        ((row, None, links), TypeError, "column must be a tensor of integers; got NoneType"),
        ((row, column[1:], links), ValueError, r"one number per cell, \[S\]; got \[10\] and \[9\]"),
        ((row, column, links[0]), ValueError, r"links must be \[2, L\]"),
        ((row - 5, column, links), ValueError, "row must hold numbers from 0"),
        ((row, column, links - 9), ValueError, "links must hold numbers from 0"),
    ):
        with pytest.raises(error, match=text):
            from_tables(*arguments)
    with pytest.raises(ValueError, match="one integer|ascending|graph of each cell"):
        from_tables(row, column, links, batch=batch.flip(0))
    with pytest.raises(ValueError, match="graph of each cell"):
        from_tables(row, column, links, batch=batch[1:])
    layer, x, graphs = (
        RelationalTransformerLayer(C, H),
        torch.randn(10, C),
        from_tables(row, column, links, batch=batch),
    )
    for arguments, error, text in (
        ((None, graphs), TypeError, "x must be a tensor"),
        ((x, tuple(graphs)), TypeError, "from_tables; got tuple"),
        ((x, CompleteGraph(10)), TypeError, "from_tables; got CompleteGraph"),
        ((x[1:], graphs), ValueError, r"x must be \[10, 8\] for these graphs; got \[9, 8\]"),
        ((x[:, 1:], graphs), ValueError, r"x must be \[10, 8\]"),
        ((x.float(), graphs), ValueError, "float32"),
    ):
        with pytest.raises(error, match=text):
            layer(*arguments)
    for targets, error, text in (
        (torch.tensor([10]), IndexError, "10 targets"),
        (torch.tensor([9, 0]), ValueError, "order of its blocks"),
        (torch.tensor([True]), TypeError, "tensor of integers"),
    ):
        with pytest.raises(error, match=text):
            layer(x, graphs, targets=targets)
    for arguments in ((C, 3), (C, 0), (0, 1), (C, H, 0)):
        with pytest.raises(ValueError, match="multiple of heads|at least 1"):
            RelationalTransformerLayer(*arguments)
