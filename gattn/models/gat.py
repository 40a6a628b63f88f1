"""Graph attention networks: layers × heads × channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.typing import Adj

from gattn.errors import check_at_least
from gattn.graphs import Graph
from gattn.nn import GATConv, GATv2Conv, TransformerConv
from gattn.nn.shared.dropout import Dropout
from gattn.nn.shared.norms import check_norms

__all__ = ["GAT"]


class GAT(BasicGNN):
    r"""A graph attention network of any depth, after `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_.

    The layers are `GATConv`, `GATv2Conv` or `TransformerConv`. Activation, normalisation, jumping knowledge, trimming
    and layer-wise inference are inherited from PyG's `BasicGNN`. The model differs from PyG's model of the same name:
    `heads` is 8 by default instead of 1, the last layer has `out_heads` heads, `conv="gatv2"` replaces `v2=True`, `act`
    is `"elu"` instead of `"relu"`, and input features are dropped, too (unless `input_dropout=0.0`). With `jk`, all
    layers are alike, the norm follows each of them, a linear layer makes the output, and `out_heads` has no effect.

    Args:
        in_channels: The number of channels of the input, or `-1` to infer it in the first call.
        hidden_channels: The number of channels between layers, counting all heads together.
        num_layers: The number of attention layers.
        out_channels: The number of channels of the output. The last layer averages its heads. (default: `None`,
            `hidden_channels`)
        conv: The layers, `"gat"`, `"gatv2"` or `"transformer"`. (default: `"gat"`)
        heads: The number of heads of each layer. (default: `8`)
        out_heads: The number of heads of the last layer, if `out_channels` is given. (default: `1`)
        dropout: The probability of dropping a feature between layers during training. (default: `0.0`)
        input_dropout: The probability of dropping an input feature during training. (default: `None`, `dropout`)
        attention_dropout: The probability of dropping an attention weight during training. (default: `None`, `dropout`)
        residual: Whether layers have a linear skip connection. (default: `None`, the default of the layer: only
            `"transformer"` has one)
        act: The activation, by name or as a module. (default: `"elu"`)
        norm: The normalisation after each layer but the last, by name or as a module. (default: `None`)
        jk: Jumping knowledge: `None`, `"last"`, `"cat"`, `"max"` or `"lstm"`. (default: `None`)
        **kwargs: Further arguments of `BasicGNN` (`act_first`, `act_kwargs`, `norm_kwargs`) and of the layers
            (`edge_dim`, `value_dropout`, `add_self_loops`, ...).

    Shapes:
        - **input:** features `[N, F]`, dense or sparse (dropout keeps sparse features sparse), the graph in any form
          that the layers take, and edge features `[E, D]`.
        - **output:** `[N, out_channels]`.

    Raises:
        ValueError: If `conv` is unknown, or `hidden_channels` is not a multiple of `heads`.

    Example:
        The network of the paper, for Cora:

        >>> import torch, gattn
        >>> model = gattn.models.GAT(1433, 64, num_layers=2, out_channels=7, heads=8, dropout=0.6)
        >>> model(torch.rand(5, 1433).to_sparse_csr(), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([5, 7])
    """

    #: The layers that `conv` names.
    conv_types: ClassVar[dict[str, type[MessagePassing]]] = {
        "gat": GATConv,
        "gatv2": GATv2Conv,
        "transformer": TransformerConv,
    }
    supports_edge_weight = False
    supports_edge_attr = True

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        *,
        conv: str = "gat",
        heads: int = 8,
        out_heads: int = 1,
        dropout: float = 0.0,
        input_dropout: float | None = None,
        attention_dropout: float | None = None,
        residual: bool | None = None,
        act: str | Callable[..., Any] | None = "elu",
        norm: str | Callable[..., Any] | None = None,
        jk: str | None = None,
        **kwargs: Any,
    ):
        if conv not in self.conv_types:
            raise ValueError(f"conv must be 'gat', 'gatv2' or 'transformer'; got {conv!r}.")
        check_at_least(1, hidden_channels=hidden_channels, num_layers=num_layers, heads=heads)
        if hidden_channels % heads != 0:
            raise ValueError(
                f"hidden_channels counts all heads together, so it must be a multiple of heads: "
                f"{hidden_channels} is not one of {heads}."
            )
        if residual is not None:
            kwargs["root_weight" if conv == "transformer" else "residual"] = residual
        super().__init__(
            in_channels,
            hidden_channels,
            num_layers,
            out_channels,
            dropout=dropout,
            act=act,
            norm=norm,
            jk=jk,
            conv=conv,
            heads=heads,
            out_heads=out_heads,
            attention_dropout=dropout if attention_dropout is None else attention_dropout,
            **kwargs,
        )
        self.dropout = Dropout(dropout)
        self.input_dropout = Dropout(dropout if input_dropout is None else input_dropout)

    def init_conv(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        conv: str,
        heads: int,
        out_heads: int,
        attention_dropout: float,
        **kwargs: Any,
    ) -> MessagePassing:
        """Makes one layer. `BasicGNN` calls this method."""
        to_out = getattr(self, "_is_conv_to_out", False)
        return self.conv_types[conv](
            in_channels,
            out_channels if to_out else out_channels // heads,
            heads=out_heads if to_out else heads,
            concat=not to_out,
            dropout=attention_dropout,
            **kwargs,
        )

    # PyG's to_hetero traces this signature, so it cannot be *args, **kwargs.
    def forward(
        self,
        x: Tensor,
        edge_index: Adj | Graph,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        num_sampled_nodes_per_hop: list[int] | None = None,
        num_sampled_edges_per_hop: list[int] | None = None,
    ) -> Tensor:
        """Runs all layers.

        Args:
            x: The features, `[N, F]`, dense or sparse.
            edge_index: The graph, in any form that `gattn.attend` takes.
            edge_weight: Must be `None`, since attention layers do not support edge weights. (default: `None`)
            edge_attr: The edge features, `[E, D]`, if `edge_dim` was given. (default: `None`)
            batch: The graph of each node, `[N]`, for normalisations that need it. (default: `None`)
            batch_size: The number of graphs, likewise. (default: `None`)
            num_sampled_nodes_per_hop: The numbers of nodes that PyG's `NeighborLoader` sampled in each hop, with which
                unnecessary computation is avoided. (default: `None`)
            num_sampled_edges_per_hop: The numbers of edges that it sampled in each hop. (default: `None`)

        Raises:
            ValueError: If `edge_weight` is given, or the graph is sharded and a normalisation reads other nodes.
        """
        if isinstance(edge_index, Graph) and edge_index.is_sharded:
            some = "of which a process has some on a sharded graph"
            check_norms(self.norms, some, "on GPUs torch.nn.SyncBatchNorm", joins_processes=True)
        if isinstance(edge_weight, Tensor):
            raise ValueError(
                "attention layers compute their own weights: pass edge_attr (and edge_dim), not edge_weight."
            )
        out: Tensor = super().forward(
            self.input_dropout(x),
            edge_index,
            edge_weight,
            edge_attr,
            batch,
            batch_size,
            num_sampled_nodes_per_hop,
            num_sampled_edges_per_hop,
        )
        return out
