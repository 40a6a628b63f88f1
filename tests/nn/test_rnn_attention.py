"""Attention over a memory: against formulas written out in float64, and gradients of choices against enumeration."""

import copy
import math

import pytest
import torch
from torch import nn

from gattn import DotScore
from gattn.nn import (
    AdditiveAttention,
    DotProductAttention,
    GeneralAttention,
    HardAttention,
    LocalAttention,
    ReinforceLoss,
)
from gattn.nn.recurrent.rnn_attention import MemoryAttention
from gattn.testing import assert_as_exact_as

B, N, M, CQ, CM = 3, 4, 5, 6, 7

#: Layers with a score of their own, and the channels of their queries.
SCORES = {
    "dot": (lambda: DotProductAttention(scale=1.0), CM),
    "scaled_dot": (DotProductAttention, CM),
    "dot of any scale": (lambda: DotProductAttention(scale=0.3), CM),
    "general": (lambda: GeneralAttention(CQ, CM), CQ),
    "scaled general": (lambda: GeneralAttention(CQ, CM, scale=None), CQ),
    "general of any scale": (lambda: GeneralAttention(CQ, CM, scale=0.3), CQ),
    "additive": (lambda: AdditiveAttention(CQ, CM, hidden_channels=5), CQ),
    "additive without bias": (lambda: AdditiveAttention(CQ, CM, bias=False), CQ),
}
LAYERS = [
    "soft",
    "monotonic",
    "monotonic with a Gaussian",
    "predictive",
    "predictive without a Gaussian",
    "predictive with other hidden channels",
    "hard",
]
each_score = pytest.mark.parametrize("score", SCORES)
each_layer = pytest.mark.parametrize("layer", LAYERS)


def make(layer, score="general", window=1.5):
    make_score, channels = SCORES[score]
    attention = make_score()
    if layer.startswith("monotonic"):
        attention = LocalAttention(attention, window, gaussian=True if "with" in layer else None)
    elif layer.startswith("predictive"):
        attention = LocalAttention(
            attention,
            window,
            "predictive",
            channels,
            hidden_channels=3 if "hidden" in layer else None,
            gaussian=False if "without" in layer else None,
        )
    elif layer == "hard":
        attention = HardAttention(attention)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return attention.double().eval(), torch.randn(B, N, channels).double(), torch.randn(B, M, CM).double()


def logit(attention, q, m):
    """The score of one query and one place, with a layer's own parameters."""
    if isinstance(attention, DotProductAttention | GeneralAttention):
        scale = 1 / math.sqrt(CM) if attention.scale is None else attention.scale
        return scale * ((attention.query_proj.weight @ q if isinstance(attention, GeneralAttention) else q) @ m)
    hidden = attention.query_proj.weight @ q + attention.key_proj.weight @ m
    if attention.key_proj.bias is not None:
        hidden = hidden + attention.key_proj.bias
    return attention.vector @ hidden.tanh()


def weights_of(attention, queries, memory):
    """The weights of all queries over one whole memory, by the formulas of the documentation."""
    inner = getattr(attention, "attention", attention)
    rows, size = [], memory.size(0)
    for t, q in enumerate(queries):
        row = torch.stack([logit(inner, q, m) for m in memory])
        if isinstance(attention, HardAttention):
            rows.append(nn.functional.one_hot(row.argmax(), size).double())
            continue
        near = torch.ones(size, dtype=torch.double)
        if isinstance(attention, LocalAttention):
            centre = torch.tensor(float(t), dtype=torch.double)
            if attention.alignment == "predictive":
                hidden = (attention.place_hidden.weight @ q).tanh()
                centre = size * torch.sigmoid(attention.place.weight[0] @ hidden)
            places = torch.arange(size, dtype=torch.double)
            if attention.gaussian:
                near = torch.exp(-((places - centre) ** 2) / (2 * (attention.window / 2) ** 2))
            inside = (places >= centre - attention.window) & (places <= centre + attention.window)
            if not inside.any():
                rows.append(torch.zeros(size, dtype=torch.double))
                continue
            row = row.masked_fill(~inside, -torch.inf)
        rows.append(row.softmax(0) * near)
    return torch.stack(rows)


def by_hand(attention, query, memory, lengths):
    """Contexts and weights, each element alone and as long as it is."""
    contexts, all_weights = [], []
    for queries, places, length in zip(query, memory, lengths, strict=True):
        weights = torch.zeros(queries.size(0), memory.size(1), dtype=torch.double)
        if length:
            weights = nn.functional.pad(weights_of(attention, queries, places[:length]), (0, memory.size(1) - length))
        all_weights.append(weights)
        contexts.append(weights[:, :length] @ places[:length])
    return torch.stack(contexts), torch.stack(all_weights)


class TestFormulas:
    @each_score
    @each_layer
    @pytest.mark.parametrize("lengths", [None, (5, 0, 2)])
    def test_values_and_gradients(self, layer, score, lengths):
        attention, query, memory = make(layer, score)
        leaves = [query.requires_grad_(), memory.requires_grad_(), *attention.parameters()]
        given = None if lengths is None else torch.tensor(lengths)
        actual = attention(query, memory, given, return_weights=True)
        expected = by_hand(attention, query, memory, lengths or [M] * B)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(attention(query, memory, given), expected[0])
        grads = []
        for context, _ in (actual, expected):
            incoming = torch.linspace(-1, 1, context.numel(), dtype=torch.double).view_as(context)
            grads.append(torch.autograd.grad(context, leaves, incoming, allow_unused=True, materialize_grads=True))
        torch.testing.assert_close(*grads)
        if layer != "hard":
            learnt = [(grad != 0).any() for grad in grads[0][2:]]
            # Without the Gaussian a centre has no gradient; the place of a window is no smooth function.
            assert len(learnt) - sum(learnt) == (2 if "without a" in layer else 0)

    @each_layer
    def test_without_a_batch(self, layer):
        attention, query, memory = make(layer)
        together = attention(query, memory, return_weights=True)
        for element in range(B):
            alone = attention(query[element], memory[element], return_weights=True)
            torch.testing.assert_close(alone, tuple(x[element] for x in together))

    @each_score
    @each_layer
    def test_step_by_step_on_a_prepared_memory(self, layer, score):
        attention, query, memory = make(layer, score)
        lengths = torch.tensor([5, 1, 3])
        prepared = attention.prepare(memory, lengths)
        steps = [attention(query[:, i : i + 1], prepared, first=i, return_weights=True) for i in range(query.size(1))]
        expected = attention(query, memory, lengths, return_weights=True)
        for actual, whole in zip(zip(*steps, strict=True), expected, strict=True):
            torch.testing.assert_close(torch.cat(actual, 1), whole)

    @pytest.mark.parametrize("sizes", [(0, N, M), (B, 0, M), (B, N, 0)])
    @each_layer
    def test_nothing(self, layer, sizes):
        attention = make(layer)[0]
        query = torch.randn(*sizes[:2], CQ, dtype=torch.double, requires_grad=True)
        memory = torch.randn(sizes[0], sizes[2], CM, dtype=torch.double)
        for lengths in (None, torch.full(sizes[:1], sizes[2])):
            context, weights = attention(query, memory, lengths, return_weights=True)
            assert context.shape == (*sizes[:2], CM)
            assert weights.shape == sizes
            assert (context == 0).all()

    @each_layer
    def test_non_contiguous_inputs(self, layer):
        attention, query, memory = make(layer)
        torch.testing.assert_close(
            attention(query.transpose(0, 1).contiguous().transpose(0, 1), memory.mT.contiguous().mT),
            attention(query, memory),
        )


class TestLengths:
    @each_score
    @each_layer
    @pytest.mark.parametrize("padding", [7.0, math.nan, math.inf])
    @pytest.mark.parametrize("training", [False, True])
    def test_nothing_beyond_is_looked_at(self, layer, score, padding, training):
        attention, query, memory = make(layer, score)
        attention.train(training)
        lengths = torch.tensor([5, 0, 2])
        beyond = torch.arange(M) >= lengths.unsqueeze(1)
        results = []
        for content in (memory, memory.masked_fill(beyond.unsqueeze(-1), padding)):
            leaves = [query.clone().requires_grad_(), content.clone().requires_grad_(), *attention.parameters()]
            torch.manual_seed(1)
            context, weights = attention(*leaves[:2], lengths, return_weights=True)
            grads = torch.autograd.grad(
                context.square().sum() + weights.square().sum(), leaves, allow_unused=True, materialize_grads=True
            )
            results.append((context, weights, *grads))
        for actual, expected in zip(*results, strict=True):
            assert torch.equal(actual, expected)
        context, weights, _, grad_memory = results[1][:4]
        assert (weights[beyond.unsqueeze(1).expand_as(weights)] == 0).all()
        assert (context[1] == 0).all()
        assert (grad_memory[beyond] == 0).all()
        assert all(result.isfinite().all() for result in results[1])

    def test_a_product_with_a_mask_would_leave_weight(self):
        """Some texts multiply logits by zeros and ones; then a padded place still gets exp(0)."""
        attention, query, memory = make("soft", "dot")
        lengths = torch.tensor([5, 3, 2])
        weights = attention(query, memory, lengths, return_weights=True)[1]
        mask = (torch.arange(M) < lengths.unsqueeze(1)).unsqueeze(1)
        wrong = (query @ memory.mT * mask).softmax(-1)
        assert (weights.masked_select(~mask) == 0).all()
        assert (wrong.masked_select(~mask) > 0).all()
        right = (query @ memory.mT).masked_fill(~mask, -torch.inf).softmax(-1)
        torch.testing.assert_close(weights, right)
        assert not torch.allclose(wrong[1:], right[1:])

    def test_wrong_ones(self):
        attention, query, memory = make("soft")
        for lengths, message in (
            (torch.tensor([6, 1, 1]), r"must lie between 0 and 5; got \[6, 1, 1\]"),
            (torch.tensor([-1, 1, 1]), "must not be negative"),
            (torch.tensor([1, 1]), r"one length for each memory, \[3\]; got \[2\]"),
            (torch.tensor([1.0, 1.0, 1.0]), "must hold one integer"),
            (torch.tensor([True, True, False]), "must hold one integer"),
        ):
            with pytest.raises(ValueError, match=message):
                attention(query, memory, lengths)
        with pytest.raises(TypeError, match="source_lengths must be a tensor"):
            attention(query, memory, [1, 2, 3])


class TestLocal:
    @staticmethod
    def at(share, window, gaussian=None):
        """A layer whose centres are at that share of the memory, and all of whose logits are equal."""
        attention = LocalAttention(DotProductAttention(), window, "predictive", 1, gaussian=gaussian).double()
        with torch.no_grad():
            attention.place_hidden.weight.fill_(100.0)  # tanh gives one
            attention.place.weight.fill_(math.log(share / (1 - share)) if 0 < share < 1 else (share - 0.5) * 1e4)
        return attention

    @pytest.mark.parametrize("window", [0.5, 1, 2, 2.5, 100])
    def test_monotonic_windows(self, window):
        """With more queries than places: the last windows have none."""
        attention = LocalAttention(DotProductAttention(), window)
        query = torch.randn(1, 9, 2, requires_grad=True)
        context, weights = attention(query, torch.randn(1, 5, 2), return_weights=True)
        for t in range(9):
            assert [(w > 0) for w in weights[0, t].tolist()] == [abs(s - t) <= window for s in range(5)]
            total = 1.0 if t - window <= 4 else 0.0
            torch.testing.assert_close(weights[0, t].sum(), torch.tensor(total))
            assert total or (context[0, t] == 0).all()
        context.sum().backward()
        assert query.grad.isfinite().all()

    def test_predictive_windows_with_a_pencil(self):
        """Five places have their centre at 2.5: half a place from two, one and a half from two others."""
        one, memory = torch.ones(1, 1, 1).double(), torch.ones(1, 5, 1).double()
        weights = self.at(0.5, 1)(one, memory, return_weights=True)[1].flatten()
        near = math.exp(-0.5) / 2  # σ is 1/2, and the distance, too
        assert weights.tolist() == pytest.approx([0, 0, near, near, 0])
        weights = self.at(0.5, 1.5)(one, memory, return_weights=True)[1].flatten()
        near, far = math.exp(-((0.5 / 0.75) ** 2) / 2) / 4, math.exp(-2) / 4
        assert weights.tolist() == pytest.approx([0, far, near, near, far])
        weights = self.at(0.5, 1.5, gaussian=False)(one, memory, return_weights=True)[1].flatten()
        assert weights.tolist() == pytest.approx([0, 0.25, 0.25, 0.25, 0.25])

    def test_the_first_and_the_last_place(self):
        one, memory = torch.ones(1, 1, 1).double(), torch.ones(1, 5, 1).double()
        first = self.at(0.0, 2)(one, memory, return_weights=True)[1].flatten()
        assert first.tolist() == pytest.approx([1 / 3, math.exp(-0.5) / 3, math.exp(-2) / 3, 0, 0])
        # The end of the memory, 5, is one beyond its last place.
        last = self.at(1.0, 2)(one, memory, return_weights=True)[1].flatten()
        assert last.tolist() == pytest.approx([0, 0, 0, math.exp(-2) / 2, math.exp(-0.5) / 2])
        attention, memory = self.at(1.0, 0.5), torch.randn(1, 5, 1, dtype=torch.double, requires_grad=True)
        context, weights = attention(one, memory, return_weights=True)
        assert context == 0
        assert (weights == 0).all()
        context.sum().backward()
        assert all(x.grad.isfinite().all() for x in (memory, *attention.parameters()))

    def test_centres(self):
        attention = self.at(0.25, 2)
        memory = attention.prepare(torch.randn(3, 8, 1).double(), torch.tensor([8, 4, 0]))
        centres = attention.centres(torch.ones(3, 2, 1).double(), memory)
        torch.testing.assert_close(centres, torch.tensor([[2.0, 2], [1, 1], [0, 0]], dtype=torch.double))
        monotonic = LocalAttention(DotProductAttention(), 2)
        assert monotonic.centres(torch.ones(3, 2, 1), memory, first=4).tolist() == [4, 5]

    @pytest.mark.parametrize("layer", LAYERS[1:6])
    def test_half_precision_tells_far_places_apart(self, layer):
        """Of 16 bits, places beyond a few hundred are rounded."""
        attention, _, _ = make(layer, window=3)
        query, memory = torch.randn(1, 700, CQ).bfloat16(), torch.randn(1, 700, CM).bfloat16()
        half = copy.deepcopy(attention).bfloat16()
        exact = copy.deepcopy(half).double()
        prepared = half.prepare(memory), exact.prepare(memory.double())
        centres = half.centres(query, prepared[0]), exact.centres(query.double(), prepared[1])
        assert centres[0].dtype == torch.float32
        if attention.alignment == "monotonic":
            assert torch.equal(centres[0].double(), centres[1].double())
            seen = [
                layer(*given, return_weights=True)[1] > 0
                for layer, given in ((half, (query, prepared[0])), (exact, (query.double(), prepared[1])))
            ]
            assert torch.equal(*seen)
        else:  # the network's own error, and none of rounding 700 · share
            assert (centres[0].double() % 1 != 0).double().mean() > 0.9
        out = half(query, memory)
        assert out.dtype == torch.bfloat16
        assert out.isfinite().all()


class TestHard:
    def test_choices(self):
        attention, query, memory = make("hard")
        attention.train()
        lengths = torch.tensor([5, 0, 2])
        context, choice = attention.choose(query, memory, lengths)
        assert ((choice.weights == 0) | (choice.weights == 1)).all()
        assert choice.weights.sum(-1).tolist() == [[1.0] * N, [0.0] * N, [1.0] * N]
        torch.testing.assert_close(context, choice.weights @ memory)
        soft = attention.attention(query, memory, lengths, return_weights=True)[1]
        torch.testing.assert_close(choice.log_prob[::2].exp(), (soft * choice.weights).sum(-1)[::2])
        torch.testing.assert_close(choice.entropy, -torch.special.xlogy(soft, soft).sum(-1))
        assert (choice.log_prob[1] == 0).all()
        assert (choice.entropy[1] == 0).all()

    def test_it_draws_in_training_and_decides_in_evaluation(self):
        attention, query, memory = make("hard")
        first = attention(query, memory)
        torch.manual_seed(1)
        assert torch.equal(attention(query, memory), first)
        attention.train()
        draws = [attention(query, memory, return_weights=True)[1] for _ in range(20)]
        assert not all(torch.equal(draw, draws[0]) for draw in draws)
        for state in (1, 2):
            torch.manual_seed(state)
            expected = attention.choose(query, memory)[1].weights
            torch.manual_seed(state)
            assert torch.equal(attention(query, memory, return_weights=True)[1], expected)

    def test_options_reach_the_distribution(self):
        general, query, memory = GeneralAttention(CQ, CM), torch.randn(B, N, CQ), torch.randn(B, M, CM)
        always = HardAttention(general, expected=1.0)
        torch.testing.assert_close(always(query, memory), general(query, memory))
        torch.testing.assert_close(
            always.eval()(query, memory), HardAttention(general).eval()(query, memory), rtol=0, atol=0
        )
        grads = []
        for temperature in (1.0, 0.1):
            straight = HardAttention(general, estimator="straight_through", temperature=temperature)
            torch.manual_seed(1)
            grads.append(torch.autograd.grad(straight(query, memory).square().sum(), general.query_proj.weight)[0])
        assert (grads[0] != 0).any()
        assert not torch.allclose(*grads)

    def test_a_shared_memory_is_prepared_once(self):
        attention, query, memory = make("hard", "additive")
        prepared = attention.prepare(memory)
        torch.testing.assert_close(attention.choose(query, prepared)[0], attention(query, memory))
        with pytest.raises(ValueError, match="already has its lengths: pass source_lengths to prepare"):
            attention.choose(query, prepared, torch.tensor([1, 1, 1]))
        with pytest.raises(ValueError, match="or both without B"):
            attention.choose(query[0], prepared)


#: One query over three places, a reward for each that is no linear function of its content, and enough draws.
QUERY, PLACES = torch.tensor([0.7, -0.4]).double(), torch.tensor([[1.5, 0.5], [-0.8, 1.3], [0.2, -1.1]]).double()
DRAWS = 40_000


def reward_of(context):
    return context[..., 0] ** 2 - context[..., 1] + (context[..., 0] * context[..., 1]).sin()


def exact_gradient(function):
    leaf = QUERY.clone().requires_grad_()
    return torch.autograd.grad(function((PLACES @ leaf).softmax(0)), leaf)[0]


def expected_reward(p):
    """Enumerated."""
    return sum(p[j] * reward_of(PLACES[j]) for j in range(3))


class Draws:
    """Many draws at once, and the gradient of each with respect to a query of its own."""

    def __init__(self, seed=0, **options):
        torch.manual_seed(seed)
        self.query = QUERY.repeat(DRAWS, 1, 1).requires_grad_()
        hard = HardAttention(DotProductAttention(scale=1.0), **options)
        self.context, self.choice = hard.choose(self.query, PLACES.expand(DRAWS, 3, 2))
        self.reward = reward_of(self.context)

    def gradients(self, loss):
        """Of what is to become large, `[DRAWS, 2]`."""
        return -torch.autograd.grad(loss, self.query, retain_graph=True)[0].squeeze(1) * DRAWS


def errors(gradients, exact):
    """How many standard errors the mean is away from what it should be."""
    return ((gradients.mean(0) - exact) / (gradients.std(0) / math.sqrt(DRAWS))).abs()


class TestReinforce:
    @pytest.mark.parametrize("baseline", [None, 0.0, 3.0])
    def test_unbiased(self, baseline):
        """Whatever the baseline, that of another batch among them."""
        draws, loss = Draws(), ReinforceLoss()
        if baseline is None:
            other = Draws(seed=1)
            loss(other.reward, other.choice.log_prob)
            assert loss.baseline.item() == pytest.approx(other.reward.mean().item(), rel=1e-6)
        else:
            loss.baseline.fill_(baseline)
        exact = exact_gradient(expected_reward)
        gradients = draws.gradients(loss(draws.reward, draws.choice.log_prob))
        assert (errors(gradients, exact) < 4).all()
        assert (errors(gradients, 0 * exact) > 10).all(), "zero would be noticed"

    def test_a_baseline_lowers_the_variance(self):
        draws, variances = Draws(), []
        for baseline in (0.0, 10.0, draws.reward.mean().item()):
            loss = ReinforceLoss()
            loss.baseline.fill_(baseline)
            variances.append(draws.gradients(loss(draws.reward, draws.choice.log_prob)).var(0).sum())
        assert variances[2] < variances[0] < variances[1]

    def test_it_is_not_one_by_a_factor(self):
        """The same test sees a loss that forgets the weight, and one of the wrong sign."""
        draws = Draws()
        gradients = draws.gradients(ReinforceLoss(weight=0.5)(draws.reward, draws.choice.log_prob))
        exact = exact_gradient(expected_reward)
        assert (errors(gradients, exact / 2) < 4).all()
        assert (errors(gradients, exact) > 10).any()
        assert (errors(-gradients, exact / 2) > 10).any()

    def test_expected_contexts_are_the_other_half_of_a_mixture(self):
        """Half of E[r(m_j)], through the choices, and half of r(E[m_j]), through the contexts."""
        draws, loss = Draws(expected=0.5), ReinforceLoss()
        gradients = draws.gradients(loss(draws.reward, draws.choice.log_prob) - draws.reward.mean())
        exact = exact_gradient(lambda p: (expected_reward(p) + reward_of(p @ PLACES)) / 2)
        assert (errors(gradients, exact) < 4).all()
        assert (errors(gradients, exact_gradient(expected_reward)) > 10).any()

    def test_straight_through_is_biased(self):
        """Its mean is many standard errors from the gradient of the expected reward, and it varies less."""
        draws = Draws(estimator="straight_through")
        gradients = draws.gradients(-draws.reward.mean())
        exact = exact_gradient(expected_reward)
        assert (errors(gradients, exact) > 20).any()
        reinforce = Draws()
        others = reinforce.gradients(ReinforceLoss()(reinforce.reward, reinforce.choice.log_prob))
        assert gradients.var(0).sum() < others.var(0).sum()

    def test_the_entropy_term(self):
        draws = Draws()
        terms = draws.reward, draws.choice.log_prob, draws.choice.entropy
        without = draws.gradients(ReinforceLoss()(*terms))
        with_entropy = draws.gradients(ReinforceLoss(entropy_weight=0.3)(*terms))
        exact = exact_gradient(lambda p: -0.3 * (p * p.log()).sum())
        torch.testing.assert_close(with_entropy - without, exact.expand(DRAWS, 2))

    def test_its_value(self):
        loss = ReinforceLoss(weight=2.0, entropy_weight=0.5)
        loss.baseline.fill_(1.0)
        reward, log_prob, entropy = torch.tensor([[3.0, 0.0]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.4, 0.6]])
        # (2 · 2 · 1 - 0.2 + 2 · (-1) · 2 - 0.3) / 2
        assert loss(reward, log_prob, entropy).item() == pytest.approx(-0.25)
        reward.requires_grad_()
        assert not loss(reward, log_prob, entropy).requires_grad

    def test_the_baseline(self):
        loss, zero = ReinforceLoss(decay=0.75), torch.zeros(2)
        ones = torch.ones(2, requires_grad=True)
        loss(torch.tensor([1.0, 3.0]), zero)
        assert loss.baseline == 2
        # What is judged now is judged by what was before.
        assert loss(torch.tensor([6.0, 6.0]), ones).item() == -4
        assert loss.baseline == 3
        loss.eval()
        loss(torch.tensor([9.0, 9.0]), zero)
        assert loss.baseline == 3
        other = ReinforceLoss(decay=0.75)
        other.load_state_dict(loss.state_dict())
        other(torch.tensor([7.0, 7.0]), zero)
        assert other.baseline == 4
        assert loss.baseline == 3

    @pytest.mark.parametrize("missing", [math.nan, -math.inf, 100.0])
    def test_what_does_not_count(self, missing):
        mask = torch.tensor([[True, False], [True, True]])
        reward, log_prob = torch.tensor([[1.0, missing], [2.0, 6.0]]), torch.randn(2, 2, requires_grad=True)
        entropy = torch.tensor([[1.0, missing], [1.0, 1.0]])
        loss, plain = (ReinforceLoss(entropy_weight=1.0) for _ in range(2))
        (grad,) = torch.autograd.grad(loss(reward, log_prob, entropy, mask), log_prob)
        (expected,) = torch.autograd.grad(plain(reward[mask], log_prob[mask], entropy[mask]), log_prob)
        assert torch.equal(grad, expected)
        assert grad[0, 1] == 0
        assert loss.baseline == plain.baseline == 3

    def test_nothing_counts(self):
        for reward, mask in ((torch.zeros(0), None), (torch.ones(3), torch.zeros(3, dtype=torch.bool))):
            loss = ReinforceLoss()
            assert loss(reward, torch.zeros_like(reward), mask=mask) == 0
            assert loss.is_new
            loss(torch.ones(2), torch.zeros(2))
            assert loss.baseline == 1

    def test_wrong_ones(self):
        for options, message in (
            ({"weight": -1.0}, "weight and entropy_weight must be at least 0; got -1.0 and 0.0"),
            ({"entropy_weight": -1.0}, "weight and entropy_weight must be at least 0"),
            ({"decay": 1.0}, "decay must be at least 0 and less than 1; got 1.0"),
            ({"decay": -0.1}, "decay must be at least 0"),
        ):
            with pytest.raises(ValueError, match=message):
                ReinforceLoss(**options)
        two, three = torch.zeros(2), torch.zeros(3)
        with pytest.raises(ValueError, match=r"log_prob must have one entry per reward, \[2\]; got \[3\]"):
            ReinforceLoss()(two, three)
        with pytest.raises(ValueError, match=r"entropy must have one entry per reward"):
            ReinforceLoss()(two, two, three)
        with pytest.raises(ValueError, match=r"mask must have one entry per reward"):
            ReinforceLoss()(two, two, mask=three)
        with pytest.raises(ValueError, match="the entropy of the choices must be passed"):
            ReinforceLoss(entropy_weight=0.1)(two, two)


class TestModule:
    @each_layer
    def test_dropout(self, layer):
        attention, query, memory = make(layer)
        expected = attention(query, memory)
        getattr(attention, "attention", attention).dropout = 0.5
        assert torch.equal(attention(query, memory), expected)
        getattr(attention, "attention", attention).dropout = 1.0
        assert (attention.train()(query, memory) == 0).all()

    def test_dropout_keeps_the_mean(self):
        attention = DotProductAttention(dropout=0.25)
        ones = torch.ones(2000, 1, 1)
        contexts = attention(ones, torch.ones(2000, 8, 1))
        # Of 8 equal weights a binomial number is left.
        error = math.sqrt(0.25 / 0.75 / 8 / 2000)
        assert abs(contexts.mean().item() - 1) < 4 * error
        assert contexts.std().item() == pytest.approx(math.sqrt(0.25 / 0.75 / 8), rel=0.1)

    @each_score
    def test_same_seed_same_parameters(self, score):
        make_score, _ = SCORES[score]
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append([x.detach().flatten() for x in make_score().parameters()])
        if found[0]:
            assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))
            assert not torch.equal(torch.cat(found[0]), torch.cat(found[2]))

    @each_layer
    def test_reset_draws_everything_anew(self, layer):
        attention = make(layer, "additive")[0]
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.fill_(7)
        attention.reset_parameters()
        assert not any((parameter == 7).any() for parameter in attention.parameters())

    def test_sizes_of_the_parameters(self):
        shapes = {name: list(x.shape) for name, x in AdditiveAttention(2, 3, 4).named_parameters()}
        assert shapes == {
            "vector": [4],
            "query_proj.weight": [4, 2],
            "key_proj.weight": [4, 3],
            "key_proj.bias": [4],
        }
        local = LocalAttention(GeneralAttention(2, 3), 2, "predictive", 2, hidden_channels=5)
        shapes = {name: list(x.shape) for name, x in local.named_parameters()}
        assert shapes == {
            "attention.query_proj.weight": [3, 2],
            "place_hidden.weight": [5, 2],
            "place.weight": [1, 5],
        }

    @each_layer
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, layer, dtype):
        attention, query, memory = make(layer, window=100)
        half, exact = attention.to(dtype), copy.deepcopy(attention.to(dtype)).double()
        query, memory = query.to(dtype).requires_grad_(), memory.to(dtype).requires_grad_()
        out = half(query, memory, torch.tensor([5, 0, 2]))
        assert out.dtype == dtype
        assert (out[1] == 0).all()
        out.sum().backward()
        assert memory.grad.isfinite().all()
        if layer == "hard":
            assert (out[0].unsqueeze(1) == memory[0]).all(-1).any(-1).all(), "a place itself"
            return
        assert query.grad.isfinite().all()
        if layer in ("soft", "monotonic"):  # the window is as wide as the memory
            peer = (half.get_submodule("attention" * (layer != "soft")).query_proj(query[0]) @ memory[0].mT).softmax(-1)
            expected = exact(query.double(), memory.double(), torch.tensor([5, 0, 2]))
            assert_as_exact_as(out[0], peer @ memory[0], expected[0])

    @each_layer
    def test_autocast(self, layer):
        """Projections are rounded, and nothing else."""
        attention, query, memory = make(layer, "additive")
        attention, query, memory = attention.float(), query.float(), memory.float()
        with torch.autocast("cpu", torch.bfloat16):
            context = attention(query, memory)
        assert context.dtype == torch.float32
        assert context.isfinite().all()
        if layer == "soft":
            with torch.autocast("cpu", torch.bfloat16):
                hidden = attention.query_proj(query).unsqueeze(2), attention.key_proj(memory).unsqueeze(1)
            logits = (hidden[0].float() + hidden[1].float()).tanh() @ attention.vector
            torch.testing.assert_close(context, logits.softmax(-1) @ memory)

    def test_what_is_printed(self):
        text = str(LocalAttention(DotProductAttention(scale=1.0), 3))
        assert "window=3, alignment='monotonic', gaussian=False" in text
        assert "DotProductAttention(scale=1.0)" in text
        assert "estimator='straight_through', temperature=0.5, expected=0.1" in str(
            HardAttention(DotProductAttention(), "straight_through", 0.5, 0.1)
        )

    def test_one_of_your_own(self):
        class Projected(MemoryAttention):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(CQ, CM), nn.Tanh())

            def keys(self, memory):
                return 2 * memory

            def score(self, query):
                return self.net(query), DotScore(1.0)

        attention = Projected().double()
        query, memory = torch.randn(B, N, CQ).double(), torch.randn(B, M, CM).double()
        expected = (attention.net(query) @ (2 * memory).mT).softmax(-1) @ memory
        torch.testing.assert_close(attention(query, memory), expected)
        torch.testing.assert_close(LocalAttention(attention, 100)(query, memory), expected)
        before = attention.net[0].weight.clone()
        attention.reset_parameters()
        assert not torch.equal(attention.net[0].weight, before)
        with pytest.raises(NotImplementedError, match="MemoryAttention does not define score"):
            MemoryAttention()(query, memory)


class TestErrors:
    def test_options(self):
        general = GeneralAttention(CQ, CM)
        for function, message in (
            (lambda: GeneralAttention(0, CM), "query_channels must be at least 1; got 0"),
            (lambda: GeneralAttention(CQ, -1), "memory_channels must be at least 1; got -1"),
            (lambda: AdditiveAttention(CQ, CM, 0), "hidden_channels must be at least 1; got 0"),
            (lambda: DotProductAttention(dropout=1.5), "dropout must be a probability between 0 and 1; got 1.5"),
            (lambda: LocalAttention(general, 0), "half-width D of .* must be positive; got 0"),
            (lambda: LocalAttention(general, -2.5), "the half-width D"),
            (lambda: LocalAttention(general, math.nan), "the half-width D"),
            (lambda: LocalAttention(general, 2, "diagonal"), "'monotonic' or 'predictive', not 'diagonal'"),
            (lambda: LocalAttention(general, 2, "predictive"), "predictive alignment needs query_channels"),
            (lambda: LocalAttention(general, 2, query_channels=CQ), "and monotonic alignment takes neither"),
            (lambda: LocalAttention(general, 2, hidden_channels=CQ), "and monotonic alignment takes neither"),
            (lambda: LocalAttention(general, 2, "predictive", 0), "query_channels must be at least 1; got 0"),
            (lambda: LocalAttention(general, 2, "predictive", CQ, 0), "hidden_channels must be at least 1; got 0"),
            (lambda: HardAttention(general, "gumbel"), "estimator must be 'reinforce' or 'straight_through'"),
            (lambda: HardAttention(general, temperature=0.0), "temperature must be positive"),
            (lambda: HardAttention(general, expected=2.0), "expected must be a probability"),
        ):
            with pytest.raises(ValueError, match=message):
                function()

    @pytest.mark.parametrize("wrapper", [lambda x: LocalAttention(x, 2), HardAttention])
    def test_what_is_wrapped(self, wrapper):
        hard = HardAttention(GeneralAttention(CQ, CM))
        for wrong in (hard, LocalAttention(DotProductAttention(), 2), nn.Linear(1, 1), "dot", None):
            with pytest.raises(TypeError, match=f"whose score it uses; got {type(wrong).__name__}"):
                wrapper(wrong)

    @each_layer
    def test_shapes(self, layer):
        attention, query, memory = make(layer)
        with pytest.raises(ValueError, match=r"a memory must be \[B, M, C\] or \[M, C\]; got \[7\]"):
            attention(query, memory[0, 0])
        with pytest.raises(ValueError, match=r"both without B; got \[4, 6\] and \[3, 5, 7\]"):
            attention(query[0], memory)
        with pytest.raises(ValueError, match="already has its lengths"):
            attention(query, attention.prepare(memory), torch.tensor([1, 1, 1]))
        with pytest.raises(ValueError, match="same batch"):
            attention(query[:2], memory)

    def test_channels(self):
        with pytest.raises(ValueError, match="query and key must have the same batch, heads and channels"):
            DotProductAttention()(torch.randn(B, N, CQ), torch.randn(B, M, CM))
