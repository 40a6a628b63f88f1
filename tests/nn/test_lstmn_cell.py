import copy
import pickle

import pytest
import torch

import gattn
from gattn.errors import InputError, InputTypeError
from gattn.nn.recurrent.lstmn_cell import LSTMNCell, LSTMNState

B, T, IN, C, A = 3, 5, 4, 6, 7


def make(**options):
    cell = LSTMNCell(IN, C, **{"attention_size": A, **options}).double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return cell, torch.randn(B, T, IN, dtype=torch.double)


def steps(cell, x, state=None, mask=None):
    """Hidden states, the last state and the weights, token by token."""
    outputs, rows = [], []
    for number, token in enumerate(x.unbind(-2)):
        real = None if mask is None else mask[..., number]
        h, state, weights = cell(token, state, real, return_weights=True)
        outputs.append(h)
        rows.append(weights)
    return torch.stack(outputs, -2), state, rows


def by_hand(cell, x):
    """One sequence, as the paper has it: hidden states, memories and weights."""
    weight = torch.cat([cell.summary_gates.weight, cell.input_gates.weight], 1)
    zero = torch.zeros((), dtype=torch.double)
    of_query, of_gates = (zero if proj.bias is None else proj.bias for proj in (cell.query_proj, cell.input_gates))
    summary = torch.zeros(cell.hidden_size, dtype=torch.double)
    hidden, memories, rows = [], [], []
    for token in x:
        query = cell.query_proj.weight @ token + of_query + cell.summary_proj.weight @ summary
        first = 0 if cell.window is None else max(len(hidden) - cell.window, 0)
        seen = [*zip(hidden, memories, strict=True)][first:]
        logits = [cell.vector @ (cell.key_proj.weight @ h + query).tanh() for h, _ in seen]
        weights = torch.stack(logits).softmax(0) if logits else torch.zeros(0, dtype=torch.double)
        summary, memory = torch.zeros(2, cell.hidden_size, dtype=torch.double)
        for share, (h, c) in zip(weights, seen, strict=True):
            summary, memory = summary + share * h, memory + share * c
        i, f, o, candidate = (weight @ torch.cat([summary, token]) + of_gates).chunk(4)
        memory = f.sigmoid() * memory + i.sigmoid() * candidate.tanh()
        hidden.append(o.sigmoid() * memory.tanh())
        memories.append(memory)
        rows.append(weights)
    return torch.stack(hidden), torch.stack(memories), rows


@pytest.mark.parametrize("options", [{}, {"attention_size": None}, {"bias": False}, {"window": 2}])
class TestFormula:
    def test_values_and_gradients(self, options):
        cell, x = make(**options)
        leaves = [x.requires_grad_(), *cell.parameters()]
        expected = [by_hand(cell, sequence) for sequence in x]
        hidden, memory = (torch.stack([parts[side] for parts in expected]) for side in (0, 1))
        out, state = cell.unroll(x)
        torch.testing.assert_close(out, hidden)
        torch.testing.assert_close(state.hidden, hidden[:, -options.get("window", T) :])
        torch.testing.assert_close(state.memory, memory[:, -options.get("window", T) :])
        actual, _, rows = steps(cell, x)
        torch.testing.assert_close(actual, hidden)
        for number, weights in enumerate(rows):
            torch.testing.assert_close(weights, torch.stack([parts[2][number] for parts in expected]))
        incoming = torch.randn_like(out)
        grads = [torch.autograd.grad(result, leaves, incoming) for result in (out, actual, hidden)]
        assert all((grad != 0).any() for grad in grads[0])
        torch.testing.assert_close(grads[0], grads[2])
        torch.testing.assert_close(grads[1], grads[2])

    def test_continued(self, options):
        cell, x = make(**options)
        whole, last = cell.unroll(x)
        first, state = cell.unroll(x[:, :2])
        rest, state = cell.unroll(x[:, 2:], state)
        torch.testing.assert_close(torch.cat([first, rest], 1), whole)
        torch.testing.assert_close(tuple(state), tuple(last))

    @pytest.mark.parametrize("padding", [7.0, torch.nan])
    @pytest.mark.parametrize("left", [False, True])
    def test_padding_changes_nothing(self, options, left, padding):
        """Each sequence alone gives the same, wherever the padding is, and so does what follows."""
        cell, x = make(**options)
        lengths = torch.tensor([5, 0, 3])
        mask = torch.arange(T) < lengths.unsqueeze(1)
        mask = mask.flip(1) if left else mask
        x = x.masked_fill(~mask.unsqueeze(-1), padding)
        after = torch.randn(B, 1, IN, dtype=torch.double)
        out, state = cell.unroll(x, mask=mask)
        assert (out[~mask] == 0).all()
        one, mixed, rows = steps(cell, x, mask=mask)
        torch.testing.assert_close((one, tuple(mixed)), (out, tuple(state)))
        for number, row in enumerate(rows if cell.window is None else []):
            assert (row[mask[:, number : number + 1] & ~mask[:, :number]] == 0).all()
        following, _ = cell.unroll(after, state)
        for element, real in enumerate(mask):
            alone, its_own = cell.unroll(x[element, real])
            torch.testing.assert_close(out[element, real], alone)
            torch.testing.assert_close(state.summary[element], its_own.summary)
            if cell.window is None or left:  # a window counts the padding before it
                torch.testing.assert_close(following[element], cell.unroll(after[element], its_own)[0])


@pytest.mark.parametrize("run", [LSTMNCell.unroll, steps])
def test_padding_has_no_gradient(run):
    cell, x = make()
    mask = torch.arange(T) < torch.tensor([5, 0, 3]).unsqueeze(1)
    grads = []
    for padding in (0.0, torch.nan):
        padded = x.masked_fill(~mask.unsqueeze(-1), padding).requires_grad_()
        out = run(cell, padded, mask=mask)[0].square().sum()
        grads.append(torch.autograd.grad(out, [padded, *cell.parameters()]))
    torch.testing.assert_close(*grads)
    assert (grads[0][0][~mask] == 0).all()


def test_padding_after_tokens_without_a_mask():
    cell, x = make()
    mask = torch.arange(T) < torch.tensor([5, 2, 3]).unsqueeze(1)
    whole, last = cell.unroll(x, mask=mask)
    first, state = cell.unroll(x[:, :2])
    rest, state = cell.unroll(x[:, 2:], state, mask[:, 2:])
    torch.testing.assert_close((torch.cat([first, rest], 1), tuple(state)), (whole, tuple(last)))


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, True, True], [False, True, False]])])
def test_gradcheck(mask):
    cell, x = LSTMNCell(2, 2, 3).double(), torch.randn(2, 3, 2, dtype=torch.double, requires_grad=True)

    def out(x, *parameters):  # which gradcheck changes in place
        return cell.unroll(x, None, mask)[0]

    assert torch.autograd.gradcheck(out, (x, *cell.parameters()))
    assert torch.autograd.gradgradcheck(out, (x,))


def test_causal():
    cell, x = make()
    x.requires_grad_()
    out, _ = cell.unroll(x)
    (gradient,) = torch.autograd.grad(out[:, 2].sum(), x, retain_graph=True)
    assert (gradient[:, 3:] == 0).all()
    assert (gradient[:, :3] != 0).any(-1).all()
    changed = x.detach().clone()
    changed[:, 3] += 1.0
    other, _ = cell.unroll(changed)
    torch.testing.assert_close(other[:, :3], out[:, :3], rtol=0, atol=1e-14)
    assert not torch.isclose(other[:, 3:], out[:, 3:]).all(-1).any()


@pytest.mark.parametrize("front", [(), (2, 3), (0,)])
def test_other_batches(front):
    cell, _ = make()
    x = torch.randn(*front, T, IN, dtype=torch.double)
    mask = torch.ones(*front, T, dtype=torch.bool)
    out, state = cell.unroll(x)
    assert out.shape == (*front, T, C)
    assert state.keys.shape == (*front, T, A)
    torch.testing.assert_close(out.reshape(-1, T, C), cell.unroll(x.reshape(-1, T, IN))[0])
    torch.testing.assert_close(cell.unroll(x, mask=mask)[0], out)
    torch.testing.assert_close(steps(cell, x, mask=mask)[0], out)
    assert cell.unroll(x[..., :0, :])[0].shape == (*front, 0, C)


def test_a_state_is_not_changed():
    """Two continuations of one state do not see each other."""
    cell, x = make()
    _, state = cell.unroll(x)
    before = tuple(x if x is None else x.detach().clone() for x in state)
    one, _ = cell.unroll(x, state)
    other, _ = cell.unroll(x + 1, state)
    assert not torch.allclose(one, other)
    torch.testing.assert_close(tuple(state), before, rtol=0, atol=0)
    torch.testing.assert_close(cell.unroll(x, state)[0], one, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["dense", "cpu", "reference"])
def test_backends(backend):
    cell, x = make()
    x.requires_grad_()
    results = []
    for name in ("reference", backend):
        with gattn.backend(name):
            out, _ = cell.unroll(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *cell.parameters()])))
    torch.testing.assert_close(results[1], results[0])


def test_record_attention():
    cell, x = make()
    with gattn.record_attention(cell) as records:
        out, _ = cell.unroll(x)
    expected, _, rows = steps(cell, x)
    torch.testing.assert_close(out, expected)
    for record, row in zip(records[""], rows, strict=True):
        torch.testing.assert_close(record.weights.flatten(1), row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    cell, x = make()
    cell, x = LSTMNCell(IN, C).to(dtype), x.to(dtype)
    exact = copy.deepcopy(cell).double().unroll(x.double())[0]
    out, state = cell.unroll(x)
    assert out.dtype == state.keys.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.02)
    cell = cell.float()
    with torch.autocast("cpu", dtype):
        out, _ = cell.unroll(x.float())
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.02)


def test_compiled():
    cell, x = make()
    x = x[:, :2].requires_grad_()
    expected, _ = cell.unroll(x)
    out = torch.compile(lambda x: cell.unroll(x)[0], fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, expected)
    leaves = [x, *cell.parameters()]
    grads = [torch.autograd.grad(result.square().sum(), leaves) for result in (out, expected)]
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        _, before = cell.unroll(x[:, :1])
        h, state = torch.compile(cell, fullgraph=True, backend="aot_eager")(x[:, 1], before)
        torch.testing.assert_close((h, tuple(state)), (expected[:, 1], tuple(cell.unroll(x)[1])))


def test_copies():
    cell, x = make(window=3)
    other = LSTMNCell(IN, C, A, window=3).double()
    other.load_state_dict(cell.state_dict())
    for copied in (other, copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        torch.testing.assert_close(copied.unroll(x)[0], cell.unroll(x)[0], rtol=0, atol=0)
    assert repr(cell).startswith("LSTMNCell(\n  4, 6, attention_size=7, window=3\n")
    torch.manual_seed(1)
    cell.reset_parameters()
    assert all(parameter.abs().max() <= C**-0.5 for parameter in cell.parameters())
    assert all(parameter.std() > 0.3 * C**-0.5 for parameter in cell.parameters())


def test_wrong_inputs():
    for options, message in (
        ((0, C), "input_size must be at least 1; got 0"),
        ((IN, 0), "hidden_size must be at least 1; got 0"),
        ((IN, C, -1), "attention_size must be at least 1; got -1"),
        ((IN, C, A, True, 0), "window must be at least 1; got 0"),
    ):
        with pytest.raises(InputError, match=message):
            LSTMNCell(*options)
    cell, x = make()
    _, state = cell.unroll(x)
    for given, message in (
        ((x[..., :3],), r"x must be \[B, T, I\] with I = 4; got \[3, 5, 3\]"),
        ((x[0, 0],), r"x must be \[B, T, I\] with I = 4; got \[4\]"),
        ((x[:2], state), r"keys of the state must be \[2, 5, 7\]; got \[3, 5, 7\]"),
        ((x, state._replace(values=state.values[..., 1:])), r"values of the state must be \[3, 5, 12\]; got"),
        ((x, state._replace(summary=state.summary[0])), r"summary of the state must be \[3, 6\]; got \[6\]"),
        ((x, state._replace(mask=torch.ones(3, 4).bool())), r"mask of the state must be \[3, 5\]; got \[3, 4\]"),
        ((x, None, torch.ones(B, T)), r"mask must be booleans, \[3, 5\]; got torch.float32 of shape \[3, 5\]"),
        ((x, None, torch.ones(B).bool()), r"mask must be booleans, \[3, 5\]; got torch.bool of shape \[3\]"),
    ):
        with pytest.raises(InputError, match=message):
            cell.unroll(*given)
    with pytest.raises(InputError, match=r"x must be \[B, I\] with I = 4; got \[3, 5\]"):
        cell(x[..., 0])
    with pytest.raises(InputTypeError, match="state must be an LSTMNState that the cell returned; got tuple"):
        cell.unroll(x, tuple(state))
    assert isinstance(state, LSTMNState)
