"""SGFormer: linear attention among all nodes beside a graph network."""

from __future__ import annotations

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.models import sgformer
from torch_geometric.typing import Adj

from gattn.errors import InputError, check_at_least, check_flag
from gattn.graphs import CompleteGraph
from gattn.nn.graph.gcn_conv import GCNConv
from gattn.nn.shared.dropout import dropout
from gattn.nn.shared.linear import through
from gattn.nn.transformers.all_pairs import check_whole
from gattn.nn.transformers.packed import packed_batch
from gattn.nn.transformers.sgformer_attention import SGFormerAttention
from gattn.ops.dropout import check_probability

__all__ = ["SGFormer"]


class SGFormer(torch_geometric.nn.SGFormer):
    r"""A network of linear attention among all nodes beside a network on the edges.

    `SGFormer: Simplifying and Empowering Transformers for Large-Graph Representations
    <https://arxiv.org/abs/2306.10759>`_, with layers :math:`A` of `gattn.nn.SGFormerAttention` and a graph convolution:

    .. math::
        z^{(l+1)} = \mathrm{ReLU}\big(\mathrm{LN}(\alpha\, A(z^{(l)}) + (1 - \alpha)\, z^{(l)})\big), \qquad
        \mathrm{out} = \log \mathrm{softmax}\big(W\, (w\, \mathrm{GCN}(x, E) + (1 - w)\, z^{(L)}) + b\big)

    This is a drop-in replacement for `torch_geometric.nn.SGFormer`: arguments, parameter names and, on one graph,
    results are the same. The graphs of a batch are laid end to end instead of being padded, and a graph's output does
    not depend on the others.

    The defaults are PyG's. The authors' program has `norm="frobenius"` and `qkv_bias=True`; `use_act` and `alpha` are
    options there, too. *Difference from it:* the output is a logarithm of probabilities, as PyG's.

    Args:
        in_channels: The number of channels of the input.
        hidden_channels: The number of channels inside.
        out_channels: The number of classes.
        trans_num_layers: The number of layers of attention. (default: `2`)
        trans_num_heads: The number of attention heads. (default: `1`)
        trans_dropout: The probability of dropping a feature beside attention, during training. (default: `0.5`)
        gnn_num_layers: The number of layers on the edges. (default: `3`)
        gnn_dropout: The probability of dropping a feature beside these, during training. (default: `0.5`)
        graph_weight: The weight :math:`w` of the network on the edges. (default: `0.5`)
        aggregate: How both are combined: `"add"` as above, or `"cat"`, side by side. (default: `"add"`)
        norm: What queries and keys are divided by; see `gattn.nn.SGFormerAttention`. (default: `"row"`)
        qkv_bias: Whether queries, keys and values have a bias. (default: `False`)
        use_act: Whether a ReLU follows each layer of attention. (default: `True`)
        alpha: The weight :math:`\alpha` of attention beside its input. (default: `0.5`)

    Shapes:
        - **input:** features `[N, F]`, edge indices `[2, E]`, and the graph of each node `[N]`, in any order.
        - **output:** the logarithms of the classes' probabilities, `[N, out_channels]`.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> import torch, gattn
        >>> model = gattn.models.SGFormer(16, 32, 4).eval()
        >>> model(torch.randn(5, 16), torch.tensor([[0, 1, 3], [1, 2, 4]]), torch.tensor([0, 0, 0, 1, 1])).shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        trans_num_layers: int = 2,
        trans_num_heads: int = 1,
        trans_dropout: float = 0.5,
        gnn_num_layers: int = 3,
        gnn_dropout: float = 0.5,
        graph_weight: float = 0.5,
        aggregate: str = "add",
        *,
        norm: str = "row",
        qkv_bias: bool = False,
        use_act: bool = True,
        alpha: float = 0.5,
    ):
        check_flag("qkv_bias", qkv_bias)
        check_flag("use_act", use_act)
        check_probability("alpha", alpha)
        check_at_least(0, trans_num_layers=trans_num_layers, gnn_num_layers=gnn_num_layers)
        check_probability("trans_dropout", trans_dropout)
        check_probability("gnn_dropout", gnn_dropout)
        if aggregate not in ("add", "cat"):
            raise InputError(f"aggregate must be 'add' or 'cat'; got {aggregate!r}.")
        super().__init__(
            in_channels,
            hidden_channels,
            out_channels,
            trans_num_layers,
            trans_num_heads,
            trans_dropout,
            gnn_num_layers,
            gnn_dropout,
            graph_weight,
            aggregate,
        )
        attns = self.trans_conv.attns
        for place, theirs in enumerate(attns):
            with torch.random.fork_rng(devices=[]):  # the numbers are those that PyG has drawn
                ours = SGFormerAttention(hidden_channels, trans_num_heads, hidden_channels, qkv_bias, norm=norm)
            ours.load_state_dict(theirs.state_dict(), strict=not qkv_bias)  # PyG's network has no biases
            attns[place] = ours
        for conv in self.graph_conv.convs:
            conv.__class__ = GCNConv
        self.use_act, self.alpha = use_act, alpha
        self.params1 = list(self.trans_conv.parameters())

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        """Runs the network.

        Args:
            x: The features, `[N, F]`.
            edge_index: The edges, `[2, E]`.
            batch: The graph of each node, `[N]`, in any order. (default: `None`, a single graph)

        Returns:
            The logarithms of the classes' probabilities, `[N, out_channels]`.

        Raises:
            ValueError: If shapes do not fit each other, or the graph is sharded.
        """
        check_whole(self, edge_index)
        order, graph = packed_batch(x, batch)
        z = self._attended(x if order is None else x.index_select(0, order), graph)
        if order is not None:
            z = torch.empty_like(z).index_copy(0, order, z)
        on_edges = self._on_edges(x, edge_index)
        if self.aggregate == "add":
            out = self.graph_weight * on_edges + (1 - self.graph_weight) * z
        else:
            out = torch.cat((z, on_edges), 1)
        return torch.log_softmax(through(self.fc, out), -1)

    def _attended(self, x: Tensor, graph: CompleteGraph) -> Tensor:
        net: sgformer.SGModule = self.trans_conv
        x = _after(net, through(net.fcs[0], x), net.bns[0])
        for attn, norm in zip(net.attns, net.bns[1:], strict=True):
            x = norm(self.alpha * attn(x, graph=graph) + (1 - self.alpha) * x)
            x = dropout(net.activation(x) if self.use_act else x, net.dropout, net.training)
        return x

    def _on_edges(self, x: Tensor, edge_index: Adj) -> Tensor:
        net: sgformer.GraphModule = self.graph_conv
        x = first = _after(net, through(net.fcs[0], x), net.bns[0])
        for conv, norm in zip(net.convs, net.bns[1:], strict=True):
            x = _after(net, conv(x, edge_index), norm) + first
        return x


def _after(net: sgformer.SGModule | sgformer.GraphModule, x: Tensor, norm: torch.nn.Module) -> Tensor:
    """What follows each layer."""
    return dropout(net.activation(norm(x)), net.dropout, net.training)
