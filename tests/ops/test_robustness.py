"""Kernels that are called wrongly, interrupted, out of memory, or from several threads and processes."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gattn
from gattn import AdditiveScore, GATScore, SparseGraph, attend
from gattn.ops.backends import cpu, triton
from gattn.ops.operator import DIFFERENTIABLE, Inputs
from gattn.testing import random_edge_index
from tests.cases import NO_AUTOGRAD_AFTER_FORK
from tests.ops.fuzz import threads

N, M, E, H, C, V, D = 5, 7, 20, 2, 3, 4, 6


def child(code, timeout=120):
    """Runs code in a process of its own, which ends within `timeout` seconds; what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


class TestInputsAreChecked:
    """By the operators themselves, since compiled code calls them without any other check."""

    def inputs(self, **changes):
        given = Inputs(
            query=torch.randn(N, H, C),
            key=torch.randn(M, H, C),
            value=torch.randn(M, H, V),
            vector=torch.randn(H, C),
            edge=torch.randn(E, H, C),
            edge_projection=None,
            edge_type=None,
            bias=torch.randn(E, H),
            mask=torch.ones(E, H, dtype=torch.bool),
            edge_value=torch.randn(E, H, V),
            edge_index=torch.stack([torch.randint(M, (E,)), torch.randint(N, (E,))]),
            num_targets=N,
            self_loops=False,
            flow="source_to_target",
            family="leaky_relu",
            constants=[0.2],
            edge_is_value=False,
            distribution="softmax",
            distribution_constants=[0.0],
            sink=torch.randn(H),
            out_bias=torch.randn(H, V),
            dropout=0.0,
            seed=None,
            traced=False,
        )
        return given._replace(**changes)

    wrong = {
        "few queries": {"query": torch.randn(N - 1, H, C)},
        "narrow queries": {"query": torch.randn(N, H, C - 1)},
        "one more query head": {"query": torch.randn(N, H + 1, C)},
        "few values": {"value": torch.randn(M - 1, H, V)},
        "a batch of keys": {"key": torch.randn(2, M, H, C)},
        "few sinks": {"sink": torch.randn(H - 1)},
        "a bias of other heads": {"out_bias": torch.randn(1, V)},
        "a bias of double precision": {"out_bias": torch.randn(H, V, dtype=torch.float64)},
        "a sink beside gates": {"distribution": "tanh"},
        "other constants": {"distribution_constants": [0.0, 1.0]},
        "an unknown distribution": {"distribution": "sparsemax", "sink": None},
        "a narrow vector": {"vector": torch.randn(H, C - 1)},
        "few edges": {"edge": torch.randn(E - 1, H, C)},
        "an edge": {"edge": torch.randn(1, H, C)},
        "narrow edges": {"edge": torch.randn(E, H, 1)},
        "a bias": {"bias": torch.randn(1, H)},
        "a bias for a head": {"bias": torch.randn(E, 1)},
        "a flat bias": {"bias": torch.randn(E)},
        "a batch of biases": {"bias": torch.randn(2, E, H)},
        "few masks": {"mask": torch.ones(E - 1, 1, dtype=torch.bool)},
        "masks of bytes": {"mask": torch.ones(E, H, dtype=torch.uint8)},
        "ten edge values": {"edge_value": torch.randn(10, H, V)},
        "narrow edge values": {"edge_value": torch.randn(E, H, V - 1)},
        "double values": {"value": torch.randn(M, H, V, dtype=torch.float64)},
        "half a bias": {"bias": torch.randn(E, H, dtype=torch.float16)},
        "double edges": {"edge": torch.randn(E, H, C, dtype=torch.float64)},
        "a bias elsewhere": {"bias": torch.randn(E, H, device="meta")},
        "edges elsewhere": {"edge_value": torch.randn(E, H, V, device="meta")},
    }

    @pytest.mark.parametrize("operator", [cpu.Cpu.operator, triton.Triton.operator], ids=["cpu", "triton"])
    @pytest.mark.parametrize("case", wrong)
    def test_refused(self, operator, case):
        operator.run(self.inputs())
        with pytest.raises(
            ValueError,
            match="has shape|must divide|on the same device|no distribution|can have a sink|wrong number of constants",
        ):
            operator.run(self.inputs(**self.wrong[case]))

    projected = {"edge": torch.randn(E, D), "edge_projection": torch.randn(H, C, D), "edge_value": None}

    @pytest.mark.parametrize(
        "changes",
        [
            {"edge_projection": torch.randn(H, C, D + 1)},
            {"edge_projection": torch.randn(H, C - 1, D)},
            {"edge_projection": torch.randn(H, C)},
            {"edge_projection": torch.randn(H, C, D, dtype=torch.float64)},
            {"edge_projection": torch.randn(H, C, D, device="meta")},
            {"edge": torch.randn(E - 1, D)},
            {"edge": torch.randn(2, E, D)},
            {"edge": torch.randn(E, H, C)},
            {"edge": torch.randn(E, D, dtype=torch.float64)},
            {"edge": None},
            {"edge_is_value": True},
            {"edge_value": torch.randn(E, H, V)},
        ],
        ids=lambda changes: ", ".join(f"{n} {list(getattr(x, 'shape', [x]))}" for n, x in changes.items()),
    )
    def test_refused_projections(self, changes):
        cpu.Cpu.operator.run(self.inputs(**self.projected))
        with pytest.raises(ValueError, match="has shape|edge_projection projects|on the same device"):
            cpu.Cpu.operator.run(self.inputs(**(self.projected | changes)))

    @pytest.mark.parametrize("case", [*wrong, "a narrow projection", "two slopes"])
    def test_refused_after_a_call_that_was_right(self, case):
        """What is kept of that call must not let this one pass."""
        changes = self.wrong | {
            "a narrow projection": self.projected | {"edge_projection": torch.randn(H, C - 1, D)},
            "two slopes": {"constants": [0.2, 0.3]},
        }
        inputs = self.inputs()
        for right in (inputs, inputs._replace(**self.projected)):
            cpu.Cpu.operator.run(right)
        with pytest.raises((ValueError, AssertionError)):
            cpu.Cpu.operator.run(inputs._replace(**changes[case]))

    typed = {"edge": torch.randn(D, H, C), "edge_type": torch.randint(D, (E,)), "edge_value": None}

    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"edge_type": torch.randint(D, (E - 1,))}, ValueError),
            ({"edge_type": torch.randint(D, (E,), dtype=torch.int32)}, ValueError),
            ({"edge_type": torch.randint(D, (E,), device="meta")}, ValueError),
            ({"edge_type": torch.full((E,), D)}, IndexError),
            ({"edge_type": torch.full((E,), -1)}, IndexError),
            ({"edge": torch.randn(D, H, C + 1)}, ValueError),
            ({"edge": torch.randn(D, H)}, ValueError),
            ({"edge": None}, ValueError),
            ({"edge_value": torch.randn(E, H, V)}, ValueError),
            ({"edge_projection": torch.randn(H, C, D)}, ValueError),
            ({"edge_is_value": True}, ValueError),
        ],
        ids=lambda value: (
            ", ".join(f"{n} {list(getattr(x, 'shape', [x]))}" for n, x in value.items())
            if isinstance(value, dict)
            else value.__name__
        ),
    )
    def test_refused_types(self, changes, error):
        cpu.Cpu.operator.run(self.inputs(**self.typed))
        with pytest.raises(error, match="has shape|edge_type selects|edge_type holds|on the same device|projects"):
            cpu.Cpu.operator.run(self.inputs(**(self.typed | changes)))
        with pytest.raises(ValueError, match="Triton kernels neither"):
            triton.Triton.operator.run(self.inputs(**self.typed))

    def test_triton_projects_nothing(self):
        with pytest.raises(ValueError, match="Triton kernels neither project"):
            triton.Triton.operator.run(self.inputs(**self.projected))

    def test_kept_tensors_of_another_call(self):
        without = dict.fromkeys(("vector", "edge", "bias", "mask", "edge_value"))
        inputs = self.inputs(family="dot", constants=[1.0, 1.0, 0.0, 0.0], **without)
        out, weights, *kept = torch.ops.gattn.attention(*inputs.arguments, True, False)
        good = [torch.randn_like(out), None, out, weights, *kept]
        wanted = [name in ("query", "key", "value") for name in DIFFERENTIABLE]

        def backward(grad_out, grad_weights, out, weights, *kept):
            torch.ops.gattn.attention_backward(
                grad_out, grad_weights, out, weights, list(kept), *inputs.arguments, wanted
            )

        backward(*good)
        for place, other in (
            (0, torch.randn(N - 1, H, V)),
            (0, torch.randn(N, H, V, dtype=torch.float64)),
            (1, torch.randn(E, H)),  # without the weights that it is the gradient of
            (2, torch.randn(N, H, V - 1)),
            (4, kept[0][:, :1]),
            (5, torch.zeros(3, dtype=torch.uint8)),
        ):
            with pytest.raises(ValueError, match="has changed between"):
                backward(*good[:place], other, *good[place + 1 :])

    @pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
    @pytest.mark.parametrize("name", ["edge", "bias", "mask", "edge_value"])
    def test_a_term_on_another_device(self, backend, name):
        terms = self.inputs()
        x, index = terms.key, terms.edge_index % N
        with pytest.raises(ValueError, match=f"{name} is on meta, the features are on cpu"):
            attend(x, x, x, index, backend=backend, **{name: getattr(terms, name).to("meta")})

    def test_features_on_two_devices(self):
        x, index = torch.randn(N, H, C), torch.zeros(2, 1, dtype=torch.long)
        with pytest.raises(ValueError, match="value is on meta, but key is on cpu"):
            attend(x, x, x.to("meta"), index)
        with pytest.raises(ValueError, match="AdditiveScore has a tensor on meta"):
            attend(x, x, x, index, score=AdditiveScore(torch.randn(H, C, device="meta")))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_out_of_memory_in_one_thread():
    """Some budgets suffice for the workspace of one thread and not for two: an error then, and no waiting for ever."""
    outcomes = child(
        "import resource, torch\n"
        "from gattn import GATScore, attend\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(100, 64, 16)\n"
        "attend(x, x, x, torch.randint(100, (2, 3000)))  # starts the threads\n"
        "query, value = torch.randn(1, 200_000), torch.randn(1, 200_000, 1)\n"
        "for budget in range(0, 1000, 50):\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + (budget << 20), -1))\n"
        "    try:\n"
        "        attend(query, query, value, torch.zeros(2, 1, dtype=torch.long), score=GATScore())\n"
        "        outcome = 'done'\n"
        "    except (MemoryError, RuntimeError) as error:\n"
        "        outcome = type(error).__name__\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "    print(outcome)\n"
    ).split()
    assert set(outcomes) <= {"RuntimeError", "MemoryError", "done"}  # the first is PyTorch's, for the output
    assert outcomes[-1] == "done"
    assert "MemoryError" in outcomes


@pytest.mark.skipif(not os.environ.get("GATTN_HUGE_TESTS"), reason="needs 16 GiB; runs with GATTN_HUGE_TESTS=1")
class TestMoreElementsThan32BitsCount:
    def test_of_nodes(self):
        nodes, channels, last = 2_200_000, 1024, 1000
        x = torch.ones(nodes, 1, channels, dtype=torch.bfloat16)
        x[-last:] = torch.randn(last, 1, channels)
        ends = torch.randint(last // 2, last, (2, 4000))
        out = attend(
            x, x, x, SparseGraph(ends + nodes - last, num_sources=nodes, num_targets=nodes), score=gattn.DotScore(0.01)
        )
        assert out.numel() > 2**31
        part = x[-last:].double()
        exact = attend(
            part, part, part, SparseGraph(ends, num_sources=last, num_targets=last), score=gattn.DotScore(0.01)
        )
        torch.testing.assert_close(out[-last:].double(), exact, atol=0.02, rtol=0.01)
        assert not out[: nodes - last].any()

    def test_of_edges_and_weights(self):
        edges, nodes = 2_200_000, 2000
        index = torch.randint(nodes, (2, edges))
        x = torch.randn(nodes, 1, 1024).bfloat16()
        values = torch.full((edges, 1, 1024), 0.5, dtype=torch.bfloat16, requires_grad=True)
        out = attend(x, x, x, index, score=gattn.DotScore(0.01), edge_value=values)
        (grad,) = torch.autograd.grad(out[7].float().sum(), values)
        reached = index[1] == 7
        torch.testing.assert_close(grad[reached].float().sum(0), torch.ones(1, 1024), atol=0.02, rtol=0)
        assert not grad[~reached].any()
        del values, grad, out
        scores = torch.randn(nodes, 1000)
        out, weights = attend(scores, scores, scores.unsqueeze(-1), index, score=GATScore(), return_weights=True)
        assert weights.numel() > 2**31
        weights = weights[reached]
        torch.testing.assert_close(weights.sum(0), torch.ones(1000))
        torch.testing.assert_close((weights * scores[index[0][reached]]).sum(0), out[7].squeeze(-1))


def test_an_interrupted_kernel():
    """The interrupt comes after the kernel, and what is kept is whole."""
    x, index = torch.randn(20_000, 8, 32, requires_grad=True), torch.randint(20_000, (2, 400_000))
    expected = attend(x, x, x, index.clone())
    done, armed, interrupted = threading.Event(), False, 0

    def raise_once(*_):
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def interrupt():
        while not done.wait(0.02):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, raise_once)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        while interrupted < 20:
            try:
                armed = True
                attend(x, x, x, index).sum().backward()
                armed = False
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert torch.equal(attend(x, x, x, index), expected)


@pytest.mark.parametrize("score", [GATScore(), AdditiveScore(torch.ones(H, C))])
def test_another_number_of_threads_in_the_backward_pass(score):
    index = random_edge_index(300, num_edges=30_000, hub=0.4)
    grads = []
    for forward, backward in ((1, 1), (1, 3), (3, 1), (2, 3)):
        x = torch.ones(300, H, C).cumsum(0).sin().requires_grad_()
        query = x.sum(-1) if score.scalar else x
        with threads(forward):
            out = attend(query, query, x, index.clone(), score=score)
        with threads(backward):
            grads.append(torch.autograd.grad(out.square().sum(), x)[0])
    assert all(torch.equal(grad, grads[0]) for grad in grads)


class Attended(Dataset):
    """A data set that attends while it is loaded."""

    def __init__(self):
        self.index = random_edge_index(50, num_edges=4000)

    def __len__(self):
        return 4

    def __getitem__(self, item):
        x = torch.full((50, H, C), float(item)).cumsum(0).sin().requires_grad_()
        out = attend(x, x, x, self.index)
        return torch.stack([out, *torch.autograd.grad(out.square().sum(), x)]).detach()


@pytest.mark.parametrize(
    "start",
    [
        *["fork"] * (not NO_AUTOGRAD_AFTER_FORK),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver")),
    ],
)
def test_workers_of_a_data_loader(start):
    data = Attended()
    expected = [data[item] for item in range(4)]
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start, timeout=100)
    for found, item in zip(loader, expected, strict=True):
        torch.testing.assert_close(found, item)


class TestInferenceMode:
    """Tensors made there cannot be saved for a backward pass: a graph made there can, as it is copied."""

    @pytest.mark.parametrize("backend", ["auto", "reference"])
    @pytest.mark.parametrize("self_loops", [False, True])
    @pytest.mark.parametrize("sized", [False, True])
    def test_attend(self, backend, self_loops, sized):
        index = random_edge_index(9, num_edges=30)
        x = torch.randn(9, H, C, requires_grad=True)
        graphs = [SparseGraph(index, num_sources=9, num_targets=9, self_loops=self_loops)]
        with torch.inference_mode():
            copy = index.clone()
            graphs.append(SparseGraph(copy, *((9, 9) if sized else ()), self_loops=self_loops))
            attend(x, x, x, graphs[1], backend=backend)
        found = []
        for graph in graphs:
            out = attend(x, x, x, graph, backend=backend)
            found.append((out, *torch.autograd.grad(out.square().sum(), x)))
        torch.testing.assert_close(*found)

    @pytest.mark.parametrize("layer", [gattn.nn.GATConv, gattn.nn.GATv2Conv, gattn.nn.TransformerConv])
    def test_layers(self, layer):
        conv, x = layer(4, 3, edge_dim=2), torch.randn(9, 4)
        index, features = random_edge_index(9, num_edges=30), torch.randn(30, 2, requires_grad=True)
        with torch.inference_mode():
            copy = index.clone()
        found = []
        for graph in (index, copy):
            out = conv(x, graph, features)
            found.append((out, *torch.autograd.grad(out.square().sum(), [features, *conv.parameters()])))
        torch.testing.assert_close(*found)

    def test_sequence_layer(self):
        index = random_edge_index(9, num_edges=30)
        with torch.inference_mode():
            copy = index.clone()
        attention = gattn.nn.MultiheadAttention(8, 2)
        x, mask = torch.randn(9, 8), torch.randn(9, 9, requires_grad=True)
        found = []
        for graph in (index, copy):
            out, _ = attention(x, x, x, attn_mask=mask, graph=graph)
            found.append((out, *torch.autograd.grad(out.square().sum(), [mask, *attention.parameters()])))
        torch.testing.assert_close(*found)


class TestNumbersThatAreTensors:
    """A parameter where kernels take a number keeps its gradient, or is refused."""

    @pytest.mark.parametrize("backend", ["cpu", "triton", "reference", "dense", "auto"])
    @pytest.mark.parametrize("shape", [(), (1,), (H,)])
    def test_scale(self, backend, shape):
        complete = backend == "dense"
        graph = gattn.CompleteGraph(6) if complete else random_edge_index(6, num_edges=30)
        x = torch.randn(6, H, C, dtype=torch.double)
        scale = torch.rand(shape, dtype=torch.double).add(0.5).requires_grad_()

        def function(scale, backend=backend):
            return attend(x, x, x, graph, score=gattn.DotScore(scale), backend=backend, return_weights=True)

        torch.testing.assert_close(function(scale), function(scale, "reference"))
        grads = [torch.autograd.grad(function(scale, name)[0].sin().sum(), scale) for name in (backend, "reference")]
        torch.testing.assert_close(*grads)
        assert grads[0][0].abs().min() > 0
        number = attend(x, x, x, graph, score=gattn.DotScore(0.7), backend=backend)
        torch.testing.assert_close(function(torch.full(shape, 0.7, dtype=torch.double))[0], number)

    def test_a_scale_of_another_shape(self):
        x = torch.randn(6, H, C)
        with pytest.raises(ValueError, match=r"one per head, \[2\]; got a tensor of \[3\]"):
            attend(x, x, x, random_edge_index(6, num_edges=9), score=gattn.DotScore(torch.ones(3)))

    @pytest.mark.parametrize("make", [GATScore, lambda **slope: AdditiveScore(torch.ones(H, C), **slope)])
    def test_slope(self, make):
        with pytest.raises(TypeError, match="negative_slope must be a number, as it gets no gradient"):
            make(negative_slope=torch.tensor(0.2, requires_grad=True))


class TestMessages:
    x, index = torch.randn(5, H, C), torch.tensor([[0, 1], [2, 2]])

    @pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
    @pytest.mark.parametrize("name", ["edge", "bias", "edge_value"])
    def test_complex_terms(self, name, backend):
        term = torch.zeros(2, H, *([] if name == "bias" else [C]), dtype=torch.complex64)
        with pytest.raises(ValueError, match=f"{name} must be of a floating-point type; got torch.complex64"):
            attend(self.x, self.x, self.x, self.index, backend=backend, **{name: term})

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: attend(TestMessages.x, TestMessages.x, TestMessages.x, TestMessages.index, dropout=p),
            lambda p: gattn.nn.GATConv(3, 2, dropout=p),
            lambda p: gattn.nn.GATConv(3, 2, value_dropout=p),
            lambda p: gattn.nn.MultiheadAttention(4, 2, dropout=p),
            lambda p: gattn.nn.DotProductAttention(dropout=p),
            lambda p: gattn.nn.AttentionPooling(4, 2, dropout=p),
        ],
    )
    def test_dropout_that_is_no_probability(self, make):
        with pytest.raises(TypeError, match=r"dropout must be a probability, a number between 0 and 1; got '0\.1'"):
            make("0.1")
        with pytest.raises(ValueError, match="dropout must be a probability between 0 and 1; got 1.5"):
            make(1.5)

    @pytest.mark.parametrize("bad", [-1, 5])
    @pytest.mark.parametrize("self_loops", [False, True])
    def test_a_bad_index_under_vmap(self, bad, self_loops):
        graph = SparseGraph(torch.tensor([[0, bad], [2, 2]]), num_sources=5, num_targets=5, self_loops=self_loops)
        with pytest.raises(IndexError, match="edge_index holds"):
            torch.func.vmap(lambda x: attend(x, x, x, graph))(self.x.expand(3, 5, H, C))


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_that_have_escaped_from_a_transform(grad):
    """They are wrappers without memory, which PyTorch's operators unwrap."""
    x, query = torch.randn(3, 2, 4), torch.randn(3, 2, 4, requires_grad=grad)
    escaped = []
    torch.func.grad(lambda x: (escaped.append(x), x.sum())[1])(x)
    edge_index = torch.tensor([[0, 1], [1, 2]])
    found, expected = (attend(query, key, x, edge_index) for key in (escaped[0], x))
    torch.testing.assert_close(found, expected)
    if grad:
        first, second = (torch.autograd.grad(out.sum(), query)[0] for out in (found, expected))
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("graph", [torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), gattn.CompleteGraph.packed([2, 3])])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_another_default_device(graph, backend):
    """What is made on the way lies where the inputs do."""
    x = torch.randn(5, 2, 4, requires_grad=True)
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        graph = graph.clone() if isinstance(graph, torch.Tensor) else graph  # of which nothing is kept
        with torch.device(device):
            out = attend(x, x, x, graph, dropout=0.4, training=True, backend=backend)
            found.append((out, *torch.autograd.grad(out.square().sum(), x)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


class TestLazyTensors:
    """Whose memory does not hold their numbers."""

    LAZY = {  # by what makes them, with what they are
        "negated": (torch._neg_view, torch.neg),
        "zero": (lambda x: torch._efficientzerotensor(x.shape), torch.zeros_like),
    }

    @pytest.mark.parametrize("name", ["query", "key", "value", "edge", "bias", "vector", "grad"])
    @pytest.mark.parametrize("kind", LAZY)
    def test_attend(self, kind, name):
        edge_index = random_edge_index(6, num_edges=20)
        tensors = {what: torch.randn(6, 2, 3) for what in ("query", "key", "value", "grad")}
        tensors |= {"edge": torch.randn(20, 2, 3), "bias": torch.randn(20, 2), "vector": torch.randn(2, 3)}
        found = []
        for change in self.LAZY[kind]:
            changed = tensors | {name: change(tensors[name])}
            value, vector, grad = (changed.pop(what) for what in ("value", "vector", "grad"))
            value = value + 0 if name == "grad" else value
            leaf = torch.ones((), requires_grad=True)
            query, key = changed.pop("query"), changed.pop("key")
            out = attend(query, key, value, edge_index, score=AdditiveScore(vector), **changed)
            by_leaf = attend(query * leaf, key, value, edge_index, score=AdditiveScore(vector), **changed)
            found.append((out, *torch.autograd.grad(by_leaf, leaf, grad)))
        torch.testing.assert_close(*found)

    def test_dropout_of_features(self):
        x = torch.randn(40, 30)
        found = []
        for lazy in (torch._neg_view(x), -x):
            torch.manual_seed(0)
            found.append(gattn.dropout(lazy, 0.5, True))
        torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("layer", [gattn.nn.GATConv, gattn.nn.GATv2Conv, gattn.nn.TransformerConv])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_batches_of_gradients(layer, dropout):
    """As `torch.autograd.functional.jacobian(vectorize=True)` asks for."""
    conv, x = layer(3, 4, heads=2, dropout=dropout).double(), torch.randn(6, 3).double().requires_grad_()
    out = conv(x, random_edge_index(6, num_edges=20))
    wanted = [x, *conv.parameters()]
    grads = torch.randn(5, *out.shape).double()
    found = torch.autograd.grad(out, wanted, grads, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, wanted, grad, retain_graph=True) for grad in grads]
    torch.testing.assert_close(list(found), [torch.stack(parts) for parts in zip(*one_by_one, strict=True)])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_gradients_of_dropped_features():
    x = torch.randn(6, 3, requires_grad=True)
    out = gattn.dropout(x, 0.5, True)
    grads = torch.randn(5, 6, 3)
    (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True)
    torch.testing.assert_close(found, grads * (out / x).detach())
