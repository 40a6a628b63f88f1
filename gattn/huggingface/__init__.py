"""Models of Hugging Face's `transformers` on gattn's attention, and any graph under them.

Importing this module registers the attention implementation `"gattn"`: `AutoModel.from_pretrained(path,
attn_implementation="gattn")`, or `model.set_attn_implementation("gattn")`. The masks that models make become graphs,
so there is no tensor of all pairs of tokens, and padding is not computed. `graph` puts another graph under a model.

Example:
    >>> import torch, gattn.huggingface
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=10, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
    ...                     intermediate_size=8, attn_implementation="gattn")
    >>> model, tokens = BertModel(config).eval(), torch.arange(10).view(1, 10)
    >>> model(tokens).last_hidden_state.shape
    torch.Size([1, 10, 8])
    >>> with gattn.huggingface.graph(gattn.CompleteGraph(10, window=2)):  # each token sees two before and after it
    ...     near = model(tokens).last_hidden_state
"""

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(
        "gattn.huggingface needs transformers 4.53 or later, which has registries of attention functions and masks: "
        "pip install transformers."
    ) from error

from gattn.huggingface.function import attention
from gattn.huggingface.masks import GraphMask, graph_mask
from gattn.huggingface.swapped import graph

__all__ = ["GraphMask", "attention", "graph", "graph_mask"]

AttentionInterface.register("gattn", attention)
AttentionMaskInterface.register("gattn", graph_mask)
