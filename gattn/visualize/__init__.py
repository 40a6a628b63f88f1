"""Attention as pictures: on a graph, as a matrix, as arcs over words, head by head, and through all layers.

Weights are taken as gattn's layers return them: `[E, H]` beside an `edge_index`, or `[H, N, M]` for a complete graph.
Or pass what `gattn.record_attention` gathers, `records[name]` of one layer or `records` of all. Every function draws
into `ax`, or into a new figure, and returns the axes. All pictures show weights on one scale of blue. Classes and heads
have the colours of Okabe and Ito, which colour-blind readers can tell apart.

Example:
    >>> import torch
    >>> from gattn.visualize import attention_matrix
    >>> attention_matrix(torch.eye(3), ["the", "cat", "sat"], title="Every token attends to itself").get_title()
    'Every token attends to itself'
"""

try:
    import matplotlib as _matplotlib  # noqa: F401
    import networkx as _networkx  # noqa: F401
except ImportError as error:
    raise ImportError("gattn.visualize needs matplotlib and networkx: pip install matplotlib networkx") from error

from gattn.visualize.arcs import attention_arcs
from gattn.visualize.entropies import attention_entropy, entropy
from gattn.visualize.explorer import Exploration, explore
from gattn.visualize.graphs import attention_graph
from gattn.visualize.grids import attention_grid
from gattn.visualize.matrices import attention_matrix
from gattn.visualize.rollouts import attention_rollout, rollout
from gattn.visualize.style import COLOURS, EDGES, WEIGHTS

__all__ = [
    "COLOURS",
    "EDGES",
    "WEIGHTS",
    "Exploration",
    "attention_arcs",
    "attention_entropy",
    "attention_graph",
    "attention_grid",
    "attention_matrix",
    "attention_rollout",
    "entropy",
    "explore",
    "rollout",
]
