"""How strongly heads choose among neighbours: the entropy of their weights."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.graphs import GraphLike
from gattn.visualize.inputs import ArrayLike, complete_weights, edge_list, edge_weights, select_head
from gattn.visualize.style import COLOURS, add_title_and_colorbar

__all__ = ["attention_entropy", "entropy"]

_MAX_HEADS = 24
_UNIFORM_COLOUR = "#C8C8C8"


def entropy(weights: ArrayLike, edge_index: GraphLike | None = None) -> tuple[Tensor, Tensor]:
    r"""Computes the entropy of each target's weights, and that of the uniform distribution over the same neighbours.

    .. math::
        H_i = -\sum_{j \in \mathcal{N}(i)} \alpha_{ij} \ln \alpha_{ij} \le \ln |\mathcal{N}(i)|

    Weights that do not sum to one are first divided by their sum.

    Args:
        weights: `[N, M]` or `[H, N, M]`, or with `edge_index` `[E]` or `[E, H]`.
        edge_index: The graph that the weights belong to, as in `attention_graph`. (default: `None`, a complete
            graph, in which a source that has no weight in any head, such as one behind a causal mask, is no neighbour)

    Returns:
        Two float64 tensors, in nats: the entropies `[N]` or `[H, N]` (with `edge_index`, `[N]` or `[N, H]`), and the
        entropies of uniform attention, `[N]`.

    Raises:
        ValueError: If weights and graph do not fit each other.

    Example:
        >>> import torch
        >>> from gattn.visualize import entropy
        >>> entropy(torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]))
        (tensor([0.6931, 0.0000], dtype=torch.float64), tensor([0.6931, 0.0000], dtype=torch.float64))
    """
    if edge_index is None:
        matrices = complete_weights(weights)
        total = matrices.sum(-1, keepdim=True)
        nats = torch.special.entr(matrices / total.masked_fill(total == 0, 1.0)).sum(-1)
        neighbours = (matrices > 0).any(0).sum(-1)
        nats = nats if torch.as_tensor(weights).dim() == 3 else nats[0]
    else:
        edges, (_, num_targets) = edge_list(edge_index)
        alpha = edge_weights(weights, edges)
        total = scatter(alpha, edges[1], 0, num_targets, reduce="sum")
        alpha = alpha / total.masked_fill(total == 0, 1.0)[edges[1]]
        nats = scatter(torch.special.entr(alpha), edges[1], 0, num_targets, reduce="sum")
        neighbours = edges[1].bincount(minlength=num_targets)
        nats = nats if torch.as_tensor(weights).dim() == 2 else nats[:, 0]
    return nats, neighbours.clamp(min=1).double().log()


def attention_entropy(
    weights: ArrayLike,
    edge_index: GraphLike | None = None,
    *,
    head: int | str | None = None,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draws how strongly heads choose: a histogram of the entropies of all targets, in front of uniform attention's.

    A head that weighs all neighbours equally covers the grey histogram, and one that selects a single neighbour lies at
    zero. Targets with fewer than two neighbours have no choice and are left out.

    Args:
        weights: `[N, M]` or `[H, N, M]`, or with `edge_index` `[E]` or `[E, H]`.
        edge_index: The graph that the weights belong to, as in `attention_graph`. (default: `None`, a complete graph)
        head: The number of the only head to draw, or `"mean"` for the mean of all heads. (default: `None`, every head)
        ax: The axes to draw into. (default: `None`, a new figure)
        title: The title of the axes. (default: `None`)

    Raises:
        ValueError: If weights and graph do not fit each other, no target has a choice, or there are too many heads.
        IndexError: If there is no such head.

    Returns:
        The axes.

    Example:
        >>> import torch, gattn
        >>> from gattn.testing import random_edge_index
        >>> from gattn.visualize import attention_entropy
        >>> edge_index = random_edge_index(50, num_edges=300)
        >>> conv = gattn.nn.GATv2Conv(4, 8, heads=2)
        >>> _, (edge_index, weights) = conv(torch.randn(50, 4), edge_index, return_attention_weights=True)
        >>> ax = attention_entropy(weights, edge_index)
    """
    if edge_index is None:
        weights, dim = complete_weights(weights), 0
    else:
        weights, dim = edge_weights(weights, edge_list(edge_index)[0]), 1
    names = [f"head {number}" for number in range(weights.size(dim))]
    if head is not None:
        names = ["mean of heads" if head == "mean" else f"head {head}"]
        weights = select_head(weights, head, dim).unsqueeze(dim)
    if len(names) > _MAX_HEADS:
        raise ValueError(
            f"{len(names)} heads are too many for one picture of at most {_MAX_HEADS}: choose one, such as head=0."
        )
    nats, uniform = entropy(weights, edge_index)
    nats = nats if dim == 0 else nats.t()
    has_choice = uniform > 0
    if not bool(has_choice.any()):
        raise ValueError("no target has two neighbours to choose from, so there is no choice to draw.")
    if ax is None:
        _, ax = plt.subplots(figsize=(5.6, 1.0 + 0.5 * len(names)), layout="constrained")
    edges = np.linspace(0.0, 1.02 * float(uniform.max()), 33)
    counts = [np.histogram(values[has_choice].numpy(), edges)[0] for values in (uniform, *nats)]
    for row, count in enumerate(counts[1:]):
        for heights, colour in ((counts[0], _UNIFORM_COLOUR), (count, COLOURS[0])):
            ax.stairs(row - 0.85 * heights / heights.max(), edges, baseline=row, fill=True, color=colour, alpha=0.85)
        ax.axhline(row, color="black", linewidth=0.5)
    ax.set_ylim(len(names) - 0.95, -1.0)  # the first head is on top
    ax.set_yticks(range(len(names)), names)
    ax.set_xlim(0.0, edges[-1])
    ax.set_xlabel("entropy of a target's weights, nats", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (COLOURS[0], _UNIFORM_COLOUR)]
    ax.legend(handles, ["attention", "uniform"], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    add_title_and_colorbar(ax, title, None)
    return ax
