"""Local message passing in parallel with global attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import Adj
from torch_geometric.utils import to_dense_batch

from gattn.bias import Bias
from gattn.errors import InputError, InputTypeError
from gattn.graphs import CompleteGraph, Graph, GraphLike
from gattn.graphs.builders import checked_batch
from gattn.nn.shared.dropout import dropout, replace_dropout
from gattn.nn.shared.linear import through
from gattn.nn.shared.norms import check_norms
from gattn.nn.transformers.all_pairs import check_whole
from gattn.nn.transformers.exphormer_conv import ExphormerConv
from gattn.nn.transformers.multihead_attention import MultiheadAttention
from gattn.nn.transformers.performer_attention import PerformerAttention
from gattn.tracing import Leaf

__all__ = ["GPSConv"]


def _multihead(channels: int, heads: int, options: dict[str, Any]) -> MultiheadAttention:
    attn = MultiheadAttention(channels, heads, batch_first=True, **options)
    attn._explain = False  # explainers mask edges, which it does not use; the setter would pin its propagate()
    return attn


_ATTENTIONS: dict[str, Callable[[int, int, dict[str, Any]], Any]] = {
    "multihead": _multihead,
    "performer": lambda channels, heads, options: PerformerAttention(channels, heads, **options),
    "favor": lambda channels, heads, options: PerformerAttention(channels, heads, kernel="favor", **options),
    "exphormer": lambda channels, heads, options: ExphormerConv(channels, heads=heads, **options),
}
_OF_ATTENTION = inspect.signature(MultiheadAttention.forward).parameters.keys()

_NORMS_OF_GRAPHS = (torch_geometric.nn.LayerNorm, torch_geometric.nn.GraphNorm, torch_geometric.nn.PairNorm)


class GPSConv(Leaf, torch_geometric.nn.GPSConv):
    r"""A graph layer on the edges in parallel with attention between all nodes of the same graph.

    The block of `Recipe for a General, Powerful, Scalable Graph Transformer <https://arxiv.org/abs/2205.12454>`_:

    .. math::
        h = \mathrm{norm}(x + \mathrm{conv}(x, E)) + \mathrm{norm}(x + \mathrm{attention}(x)), \qquad
        x' = \mathrm{norm}(h + \mathrm{MLP}(h))

    This is a drop-in replacement for `torch_geometric.nn.GPSConv`: arguments, parameter names and results are the same,
    but with `attn_type="performer"` only on one graph, as PyG's linear attention depends on the padding. The graphs of
    a batch form a packed `CompleteGraph`, so there is no padding here.

    A layer on the edges may return features of edges as well, as `GatedGCNConv` does; so does the block then, whose
    next one gets them as `edge_attr`. As in the authors' program, the block adds no input to what has it already:
    :math:`h = \mathrm{norm}(\mathrm{conv}(x, E)) + \ldots` with a `GatedGCNConv` of F channels for nodes and edges.

    Args:
        channels: The number of channels of the features, F.
        conv: The layer on the edges, from gattn or PyG, or `None` for attention only.
        heads: The number of attention heads. (default: `1`)
        dropout: The probability of dropping a feature during training. (default: `0.0`)
        act: The activation of the MLP, by name. (default: `"relu"`)
        act_kwargs: The arguments of the activation. (default: `None`)
        norm: The normalisation, by name. (default: `"batch_norm"`)
        norm_kwargs: The arguments of the normalisation. (default: `None`)
        attn_type: The kind of attention: `"multihead"`; `"performer"` for linear attention as in PyG, or `"favor"` for
            that of the authors' program, which approximates a softmax; or `"exphormer"`, `ExphormerConv` on a graph of
            its own. (default: `"multihead"`)
        attn_kwargs: Further arguments of `MultiheadAttention`, `PerformerAttention` or `ExphormerConv`, of which the
            last needs `edge_channels`. (default: `None`)

    Shapes:
        - **input:** features `[N, F]`, edge indices `[2, E]`, and the graph of each node `[N]` in ascending order.
        - **output:** `[N, F]`, and features of edges `[E, D]` if the layer on the edges returns them.

    Raises:
        ValueError: If `attn_type` is unknown, or `channels` is not a multiple of `heads`.
        TypeError: If `attn_type` is `"exphormer"`, and `attn_kwargs` has no `edge_channels`.

    Example:
        >>> import torch, gattn
        >>> block = gattn.nn.GPSConv(16, gattn.nn.GATConv(16, 4, heads=4), heads=4)
        >>> batch = torch.tensor([0, 0, 0, 1, 1])  # two graphs, of 3 and 2 nodes
        >>> block(torch.randn(5, 16), torch.tensor([[0, 1, 3], [1, 2, 4]]), batch).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        channels: int,
        conv: MessagePassing | None,
        heads: int = 1,
        dropout: float = 0.0,
        act: str = "relu",
        act_kwargs: dict[str, Any] | None = None,
        norm: str | None = "batch_norm",
        norm_kwargs: dict[str, Any] | None = None,
        attn_type: str = "multihead",
        attn_kwargs: dict[str, Any] | None = None,
    ):
        if attn_type not in _ATTENTIONS:
            raise ValueError(f"attn_type must be one of {', '.join(map(repr, _ATTENTIONS))}, not {attn_type!r}.")
        options = dict(attn_kwargs or {})
        with torch.random.fork_rng(devices=[]):  # so that the other parameters get the same random numbers as in PyG
            attn = _ATTENTIONS[attn_type](channels, heads, options)
        # PyG's layer only makes what it knows, and where it can draw a projection; the other arguments are ours.
        is_pygs = attn_type == "performer" and torch.get_default_device().type != "meta"
        attn_type_of_pyg, attn_kwargs = ("performer", attn_kwargs) if is_pygs else ("multihead", None)
        super().__init__(
            channels, conv, heads, dropout, act, act_kwargs, norm, norm_kwargs, attn_type_of_pyg, attn_kwargs
        )
        self.attn_type = attn_type
        self.attn = attn
        replace_dropout(self.mlp)

    def reset_parameters(self) -> None:
        """Resets all parameters."""
        super().reset_parameters()
        if isinstance(self.attn, MultiheadAttention):  # PyG calls its private method
            self.attn.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | Graph,
        batch: Tensor | None = None,
        *,
        attn_bias: Bias | None = None,
        attn_graph: tuple[GraphLike, Tensor] | None = None,
        targets: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the block.

        Args:
            x: The features, `[N, F]`.
            edge_index: The graph, in any form that the layer on the edges takes.
            batch: The graph of each node, `[N]`, in ascending order. (default: `None`, a single graph)
            attn_bias: What is added to the logits of multi-head attention, such as a `gattn.SparseBias` of bonds or a
                `gattn.BucketBias` of distances, by the nodes' numbers in the batch. (default: `None`)
            attn_graph: The graph of `"exphormer"` and the features of its edges, `[E', D]`, such as the union of the
                edges with an expander. (default: `None`)
            targets: The nodes whose output is wanted, `[n]`, such as those with labels in a last layer, in the order of
                their graphs: multi-head attention, norms and the MLP are computed for them alone. The layer on the
                edges, whose options only it knows, and other kinds of attention, which take linear time, are computed
                for all nodes. (default: `None`, all)
            **kwargs: Further arguments of the layer on the edges, such as `edge_attr`. Without this layer they have no
                effect, as in PyG.

        Returns:
            The features, `[N, F]`, or those of the targets, `[n, F]`; with a layer on the edges that returns those of
            edges as well, both.

        Raises:
            ValueError: If `batch` does not hold the graph of each node in ascending order, or the attention takes no
                `attn_bias`, or no `attn_graph`, or lacks it. With `targets`: if they are not in the order of their
                graphs, an `attn_bias` is given, or a norm reads all nodes, as batch norms do in training.
            IndexError: If there is no such target.
            TypeError: If an argument of the attention is given, or `attn_graph` is not a pair.
        """
        if targets is not None:
            for norm in (self.norm1, self.norm2, self.norm3):
                if norm is not None:
                    check_norms(norm, "of which targets are some", "a batch norm in evaluation")
            if attn_bias is not None:
                raise InputError("targets cannot be combined with an attn_bias, which is that of all nodes.")
        if self.conv is None and (meant := [name for name in sorted(_OF_ATTENTION) if name in kwargs]):
            raise TypeError(
                f"{type(self).__name__} passes further arguments to the layer on the edges, not to its attention; got "
                f"{', '.join(meant)}."
            )
        graph = (
            CompleteGraph(x.size(0)) if batch is None else CompleteGraph.packed(batch=checked_batch(batch, x.size(0)))
        )
        check_whole(self, edge_index)
        rows, batch_of_rows = x, batch
        if targets is not None:
            graph_of_rows = graph.for_targets(targets)
            rows = x.index_select(0, targets)
            batch_of_rows = None if batch is None else batch.index_select(0, targets)
        local, edges = None, None  # first, so that dropout gets the same random numbers as in PyG
        if self.conv is not None:
            local = self.conv(x, edge_index, **kwargs)
            if isinstance(local, tuple):
                local, edges = local
            local = local if targets is None else local.index_select(0, targets)
            if getattr(self.conv, "adds_input", False):
                local = self._norm(local, self.norm1, batch_of_rows)
            else:
                local = self._add_and_norm(local, rows, self.norm1, batch_of_rows)
        if (attn_graph is not None) != isinstance(self.attn, ExphormerConv):
            raise InputError("attn_graph is for attn_type='exphormer', which needs it.")
        is_multihead = type(self.attn) is MultiheadAttention  # a subclass may have PyTorch's arguments alone
        if targets is not None and is_multihead:
            attended = self.attn(rows, x, x, need_weights=False, graph=graph_of_rows)[0]
        elif attn_graph is None:
            attended = self._attend(x, batch, graph, attn_bias)
        elif attn_bias is not None:
            raise InputError("attn_type='exphormer' takes no attn_bias, but features of the edges of attn_graph.")
        elif not isinstance(attn_graph, tuple) or len(attn_graph) != 2:
            raise InputTypeError("attn_graph must be a graph and the features of its edges, (graph, features).")
        else:
            attended = self.attn(x, *attn_graph)
        if targets is not None and not is_multihead:
            attended = attended.index_select(0, targets)
        out = self._add_and_norm(attended, rows, self.norm2, batch_of_rows)
        if local is not None:
            out = local + out
        out = self._norm(out + through(self.mlp, out), self.norm3, batch_of_rows)
        return out if edges is None else (out, edges)

    def _attend(self, x: Tensor, batch: Tensor | None, graph: CompleteGraph, attn_bias: Bias | None) -> Tensor:
        """Attention among the nodes of each graph; another module gets a padded batch, by the arguments that it has."""
        attn: Any = self.attn
        if attn is None:
            return x
        # A subclass may have PyTorch's arguments alone.
        takes = ["graph"] if type(attn) is MultiheadAttention else inspect.signature(attn.forward).parameters
        attended: Tensor
        if isinstance(attn, MultiheadAttention) and "graph" in takes:
            more = {} if attn_bias is None else {"attn_bias": attn_bias}
            attended = attn(x, x, x, need_weights=False, graph=graph, **more)[0]
            return attended
        if attn_bias is not None:
            raise InputError(f"{type(attn).__name__} takes no attn_bias: use attn_type='multihead'.")
        if "graph" in takes:  # such as PerformerAttention
            attended = attn(x, graph=graph)
            return attended
        padded, is_real = to_dense_batch(x, batch)
        if "key_padding_mask" in takes or "kwargs" in takes:
            attended = attn(padded, padded, padded, key_padding_mask=~is_real, need_weights=False)[0]
        else:  # such as PyG's PerformerAttention
            attended = attn(padded, mask=is_real) if "mask" in takes else attn(padded)
        return attended[is_real]

    def _add_and_norm(self, h: Tensor, x: Tensor, norm: Any, batch: Tensor | None) -> Tensor:
        h = dropout(h, self.dropout, self.training)
        return self._norm(h + x, norm, batch)

    def _norm(self, h: Tensor, norm: Any, batch: Tensor | None) -> Tensor:
        if norm is None:
            return h
        if h.size(0) == 0:  # PyG's norms look for the last graph; they are called all the same, as some join processes
            batch = None
        more: dict[str, Any] = {"batch": batch} if self.norm_with_batch else {}
        if batch is not None and torch.compiler.is_compiling() and isinstance(norm, _NORMS_OF_GRAPHS):
            # They would count graphs, whose number the program does not know.
            graph = CompleteGraph.packed(batch=batch)
            more["batch"], more["batch_size"] = graph.block_of_each("target", batch.device)
        out: Tensor = norm(h, **more)
        return out
