"""How strongly heads choose among neighbours: the entropy of their weights."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch_geometric.utils import scatter

from gattn.graphs import GraphLike
from gattn.visualize.inputs import Weights, complete_weights, edge_list, edge_weights, select_head, unpack
from gattn.visualize.style import COLOURS, add_title_and_colorbar

__all__ = ["attention_entropy", "entropy"]

_MAX_HEADS = 24
_BINS = 25
_ROUNDING = 1e-4  # a relative entropy this close to 1 is that of uniform weights in half precision


def entropy(
    weights: Weights, edge_index: GraphLike | None = None, *, call: int = -1, element: int | None = None
) -> tuple[Tensor, Tensor]:
    r"""Computes the entropy of each target's weights, and that of the uniform distribution over the same neighbours.

    .. math::
        H_i = -\sum_{j \in \mathcal{N}(i)} \alpha_{ij} \ln \alpha_{ij} \le \ln |\mathcal{N}(i)|

    Weights that do not sum to one are first divided by their sum.

    Args:
        weights: `[N, M]` or `[H, N, M]`, or with `edge_index` `[E]` or `[E, H]`, or what `gattn.record_attention`
            gathered of one layer.
        edge_index: The graph that the weights belong to, as in `attention_graph`. (default: `None`, a complete
            graph, in which a source that has no weight in any head, such as one behind a causal mask, is not a
            neighbour; recorded weights know their graph)
        call: Which call of a recorded layer to take. (default: `-1`, the last one)
        element: Which element of a batch to take. (default: `None`, the only one)

    Returns:
        Two float64 tensors, in nats: the entropies `[N]` or `[H, N]` (with `edge_index`, `[N]` or `[N, H]`), and the
        entropies of uniform attention, `[N]`.

    Raises:
        ValueError: If weights and graph do not fit each other.
        IndexError: If there is no such call or element.

    Example:
        >>> import torch
        >>> from gattn.visualize import entropy
        >>> entropy(torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]))
        (tensor([0.6931, 0.0000], dtype=torch.float64), tensor([0.6931, 0.0000], dtype=torch.float64))
    """
    weights, edge_index = unpack(weights, edge_index, call=call, element=element)
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
    weights: Weights,
    edge_index: GraphLike | None = None,
    *,
    head: int | str | None = None,
    call: int = -1,
    element: int | None = None,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    r"""Draws how strongly heads choose: per head, a histogram of each target's entropy relative to uniform attention.

    The relative entropy :math:`H_i / \ln |\mathcal{N}(i)|` is 1 if a target weighs all its neighbours equally, however
    many they are, and 0 if it selects a single one. Heights are shares of targets, on one scale for all heads; the mean
    is written beside each head, or "uniform" if no target prefers any neighbour. Targets with fewer than two neighbours
    have no choice and are left out; the axis says how many.

    Args:
        weights: `[N, M]` or `[H, N, M]`, or with `edge_index` `[E]` or `[E, H]`, or what `gattn.record_attention`
            gathered of one layer.
        edge_index: The graph that the weights belong to, as in `attention_graph`. (default: `None`, a complete graph,
            or that of the record)
        head: The number of the only head to draw, or `"mean"` for the mean of all heads. (default: `None`, every head)
        call: Which call of a recorded layer to draw. (default: `-1`, the last one)
        element: Which element of a batch to draw. (default: `None`, the only one)
        ax: The axes to draw into. (default: `None`, a new figure)
        title: The title of the axes. (default: `None`)

    Returns:
        The axes.

    Raises:
        ValueError: If weights and graph do not fit each other, no target has a choice, or there are too many heads.
        IndexError: If there is no such head, call or element.

    Example:
        >>> import torch, gattn
        >>> from gattn.testing import random_edge_index
        >>> from gattn.visualize import attention_entropy
        >>> edge_index = random_edge_index(50, num_edges=300)
        >>> conv = gattn.nn.GATv2Conv(4, 8, heads=2)
        >>> _, (edge_index, weights) = conv(torch.randn(50, 4), edge_index, return_attention_weights=True)
        >>> ax = attention_entropy(weights, edge_index)
    """
    weights, edge_index = unpack(weights, edge_index, call=call, element=element)
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
    has_choice = uniform > 0
    if not bool(has_choice.any()):
        raise ValueError("no target has two neighbours to choose from, so there is no choice to draw.")
    relative = ((nats if dim == 0 else nats.t())[:, has_choice] / uniform[has_choice]).clamp(0.0, 1.0)
    if ax is None:
        _, ax = plt.subplots(figsize=(5.6, 1.3 + 0.5 * len(names)), layout="constrained")
    edges = np.linspace(0.0, 1.0, _BINS + 1)
    shares = [np.histogram(values.numpy(), edges)[0] / relative.size(1) for values in relative]
    largest = max(share.max() for share in shares)
    for row, (share, values) in enumerate(zip(shares, relative, strict=True)):
        ax.stairs(row - 0.85 * share / largest, edges, baseline=row, fill=True, color=COLOURS[0])
        ax.axhline(row, color="black", linewidth=0.5)
        is_uniform = bool((values > 1.0 - _ROUNDING).all())
        said = "uniform" if is_uniform else f"mean {float(values.mean()):.2f}"
        ax.annotate(said, (1.0, row), (4, 2), xycoords=ax.get_yaxis_transform(), textcoords="offset points", fontsize=8)
    ax.set_ylim(len(names) - 0.95, -1.0)  # the first head is on top
    ax.set_yticks(range(len(names)), names)
    ax.set_xlim(0.0, 1.0)
    ax.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0], ["0\none neighbour", "0.25", "0.5", "0.75", "1\nuniform"])
    left_out = int((~has_choice).sum())
    ax.set_xlabel(
        "entropy of a target's weights, H / ln|N|"
        + f"\n({left_out} of {len(uniform)} targets have no choice and are left out)" * (left_out > 0),
        fontsize=9,
    )
    ax.tick_params(labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    add_title_and_colorbar(ax, title, None)
    return ax
