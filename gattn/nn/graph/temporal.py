"""Encodings of time, and the attention of temporal graph networks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Module

from gattn.errors import InputError, InputTypeError, check_at_least, is_integer
from gattn.graphs import GraphLike, as_graph
from gattn.nn.graph.transformer_conv import TransformerConv
from gattn.nn.shared.declared import Declared

__all__ = ["GraphAttentionEmbedding", "TemporalEncoding"]


class TemporalEncoding(Declared, Module):
    r"""The encoding of time by cosines with fixed frequencies of `GraphMixer <https://openreview.net/forum?id=ayPPc0SyLv1>`_.

    .. math::
        y_c = \cos\big(t \cdot \sqrt{d}^{\,-s_c}\big), \qquad s = 0, \dots, \sqrt d \text{ in } d \text{ equal steps}

    This is a drop-in replacement for `torch_geometric.nn.encoding.TemporalEncoding` with the same buffer. Angles are
    computed in double precision, so that large times, such as Unix times, keep their fraction; PyG computes them in
    single precision.

    Args:
        out_channels: The number of channels, d.
        device: The device of the buffer. (default: `None`)

    Shapes:
        - **input:** times, `[N]` or of any other shape.
        - **output:** one row for each time, `[N, d]`.

    Raises:
        ValueError: If `out_channels` is not positive.

    Example:
        >>> import torch, gattn
        >>> gattn.nn.TemporalEncoding(8)(torch.tensor([0.0, 60.0, 3600.0])).shape
        torch.Size([3, 8])
    """

    weight: Tensor

    _shown = "out_channels"

    def __init__(self, out_channels: int, device: torch.device | None = None):
        super().__init__()
        check_at_least(1, out_channels=out_channels)
        self.out_channels = out_channels
        root = math.sqrt(out_channels)
        self.register_buffer("weight", 1.0 / root ** torch.linspace(0, root, out_channels, device=device).view(1, -1))

    def forward(self, x: Tensor) -> Tensor:
        """Encodes times.

        Args:
            x: The times, in any unit.

        Raises:
            TypeError: If they are not a tensor.
        """
        if not isinstance(x, Tensor):
            raise InputTypeError(f"x must be a tensor of times; got {type(x).__name__}.")
        angle = x.reshape(-1, 1).double() * self.weight.double()
        return angle.cos().to(x.dtype if x.is_floating_point() else self.weight.dtype)


class GraphAttentionEmbedding(Declared, Module):
    r"""The attention of temporal graph networks: a `TransformerConv` whose edges know when they happened.

    The embedding module of `Temporal Graph Networks <https://arxiv.org/abs/2006.10637>`_ as in PyG's example `tgn.py`,
    whose parameters have the same names:

    .. math::
        x'_i = \mathrm{TransformerConv}\big(x, \ e_{ij} = [\Phi(t_j - t_{ij}) \,\Vert\, m_{ij}]\big)

    where :math:`t_j` is the time of the source's last update, and :math:`t_{ij}` and :math:`m_{ij}` are the time and
    the message of an event.

    Args:
        in_channels: The number of channels of the nodes' memory.
        out_channels: The number of channels of the output, a multiple of `heads`.
        msg_dim: The number of channels of messages.
        time_enc: The encoding :math:`\Phi` of times, such as `torch_geometric.nn.models.tgn.TimeEncoder` or
            `TemporalEncoding`, with the attribute `out_channels`.
        heads: The number of heads. (default: `2`)
        dropout: The probability of dropping an attention weight during training. (default: `0.1`)

    Shapes:
        - **input:** memory `[N, in_channels]`, times of the last updates `[N]`, edge indices `[2, E]`, times `[E]`,
          messages `[E, msg_dim]`.
        - **output:** `[N, out_channels]`.

    Raises:
        ValueError: If `out_channels` is not a multiple of `heads`.
        TypeError: If `time_enc` does not say how many channels it has.

    Example:
        >>> import torch, gattn
        >>> embedding = gattn.nn.GraphAttentionEmbedding(16, 8, msg_dim=4, time_enc=gattn.nn.TemporalEncoding(6))
        >>> x, last_update = torch.randn(3, 16), torch.tensor([5.0, 7.0, 7.0])
        >>> edge_index, t = torch.tensor([[0, 1], [1, 2]]), torch.tensor([2.0, 7.0])
        >>> embedding(x, last_update, edge_index, t, torch.randn(2, 4)).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        msg_dim: int,
        time_enc: Module,
        heads: int = 2,
        dropout: float = 0.1,
    ):
        super().__init__()
        check_at_least(0, msg_dim=msg_dim)
        check_at_least(1, out_channels=out_channels, heads=heads)
        if out_channels % heads != 0:
            raise InputError(f"out_channels must be a multiple of heads; got {out_channels} and {heads} heads.")
        time_channels = getattr(time_enc, "out_channels", None)
        if not is_integer(time_channels):
            raise TypeError(
                f"time_enc must have the number of its channels as out_channels, but {type(time_enc).__name__} has "
                f"{time_channels!r}."
            )
        self.time_enc = time_enc
        edge_dim = msg_dim + time_channels
        self.conv = TransformerConv(in_channels, out_channels // heads, heads, dropout=dropout, edge_dim=edge_dim)

    def forward(self, x: Tensor, last_update: Tensor, edge_index: GraphLike, t: Tensor, msg: Tensor) -> Tensor:
        """Attends to the sources of events.

        Args:
            x: The memory of the nodes, `[N, in_channels]`.
            last_update: The time of each node's last update, `[N]`, integers or not.
            edge_index: The events, `[2, E]`, or a graph in another form that `gattn.attend` takes.
            t: Their times, `[E]`.
            msg: Their messages, `[E, msg_dim]`.

        Returns:
            The embeddings, `[N, out_channels]`.

        Raises:
            TypeError: If an input is not a tensor.
            ValueError: If shapes do not fit each other.
        """
        for name, tensor in (("x", x), ("last_update", last_update), ("t", t), ("msg", msg)):
            if not isinstance(tensor, Tensor):
                raise InputTypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
        graph = as_graph(edge_index).resolve(x.size(0), x.size(0), device=x.device).listed(x.device)
        if last_update.shape != x.shape[:1] or t.shape != (graph.num_edges,) or msg.shape[:-1] != t.shape:
            raise InputError(
                f"last_update must have one time per node, t one and msg one row per event; got "
                f"{list(last_update.shape)}, {list(t.shape)} and {list(msg.shape)} for {x.size(0)} nodes and "
                f"{graph.num_edges} events."
            )
        last_update, t = (time if time.is_floating_point() else time.long() for time in (last_update, t))
        passed = last_update[graph.sources_and_targets()[0].long()] - t
        # Other encodings multiply times by weights of the same type.
        passed = passed if isinstance(self.time_enc, TemporalEncoding) else passed.to(x.dtype)
        encoded = self.time_enc(passed).to(x.dtype)
        return self.conv(x, graph, torch.cat([encoded, msg], -1))
