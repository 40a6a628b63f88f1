"""Every way in which attention is computed: what happens between the passes, tensors that are not plain, threads."""

import re

import pytest
import torch

from tests.cases import threads
from tests.ops.fuzz_shared import apart, negated, transposed
from tests.ops.ways import WAYS, in_parts, ways

#: Those in which PyTorch multiplies matrices, whose bits depend on the number of threads: see docs/backends.md.
BY_MATRICES = {
    "matrix",
    "buckets",
    "buckets of bytes",
    "buckets of one head",
    "buckets, mask",
    "pairs, mask",
    "window, buckets",
    "lengths, own score",
    "linear",
    "linear, causal",
    "own score",
    "own score, buckets",
    "sigmoid",
    "sparsemax",
    "weights",
    "logits",
}

each_way = pytest.mark.parametrize("name", WAYS)


@pytest.fixture
def small_parts():
    with in_parts(), threads(1):
        yield


def leaves_of(way, dtype=torch.float64):
    return {name: x.requires_grad_(x.is_floating_point()) for name, x in way.tensors(dtype).items()}


def run(way, leaves):
    """The results and the gradients."""
    torch.manual_seed(2)
    outs = way.outputs(leaves)
    return [*(x.detach() for x in outs), *way.gradients(outs, leaves)]


def edit(x):
    """In place, to what else a tensor of its kind may hold."""
    if x.dtype == torch.bool:
        x.logical_not_()
    elif x.is_floating_point():
        x.mul_(-2.0)
    elif x.dim() == 1 and len(x) == 2:  # lengths
        x.sub_(1)
    else:
        x.copy_(x.flip(0) if x.size(0) > 2 else x.flip(1))


@each_way
@pytest.mark.usefixtures("small_parts")
def test_edits_between_the_passes_are_noticed_or_change_nothing(name):
    way = WAYS[name]
    expected = run(way, leaves_of(way))
    noticed = []
    for edited in way.tensors():
        leaves = leaves_of(way)
        torch.manual_seed(2)
        outs = way.outputs(leaves)
        results = [x.detach().clone() for x in outs]
        with torch.no_grad():
            edit(leaves[edited])
        try:
            grads = way.gradients(outs, leaves)
        except RuntimeError as error:
            if not re.search("modified (by an )?inplace", str(error)):
                raise
            noticed.append(edited)
            continue
        torch.testing.assert_close([*results, *grads], expected, msg=lambda m, edited=edited: f"{edited}: {m}")
    assert noticed or name in ("logits", "dropout")


CHANGES = [transposed, apart, negated]


@each_way
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # which is slower for other strides
def test_hooks_on_saved_tensors_may_give_back_other_strides(name, change):
    way = WAYS[name]
    expected = run(way, leaves_of(way))
    for unpacks in (True, False):
        hooks = (lambda x: x.clone(), change) if unpacks else (lambda x: change(x.clone()), lambda x: x)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            for _ in range(2):  # first without a plan
                torch.testing.assert_close(run(way, leaves_of(way)), expected)


@each_way
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("change", CHANGES)
def test_inputs_that_are_not_plain(name, change):
    way = WAYS[name]
    expected = run(way, leaves_of(way))
    for changed in way.tensors():
        leaves = leaves_of(way)
        given = leaves | {changed: change(leaves[changed])}
        torch.manual_seed(2)
        outs = way.outputs(given)
        found = [*(x.detach() for x in outs), *way.gradients(outs, leaves)]
        torch.testing.assert_close(found, expected, msg=lambda m, changed=changed: f"{changed}: {m}")


@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_for_one_and_two_threads(name, dtype):
    """Forward and backward; where matrices are multiplied, at least for two runs with as many threads."""
    way = ways(100 if name in BY_MATRICES else 400)[name]
    found = []
    for number in (2, 2) if name in BY_MATRICES else (1, 2):
        with threads(number):
            found.append(run(way, leaves_of(way, dtype)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
