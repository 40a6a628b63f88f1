"""What DGL's graph attention layers share: one projection for both ends of an edge, or one for each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gattn.errors import InputError, check_at_least, is_integer
from gattn.nn.shared.attention_conv import BaseConv
from gattn.nn.shared.linear import Linear

__all__ = ["DGLConv"]


class DGLConv(BaseConv):
    """Base class of `DotGatConv` and `EdgeGATConv`.

    Args:
        in_channels: The number of channels of the nodes, or a pair for sources and targets, which then have projections
            of their own.
        out_channels: The number of channels of each head, C.
        heads: The number of heads, H.
        **kwargs: Arguments of `torch_geometric.nn.conv.MessagePassing`.

    Raises:
        ValueError: If a number is not positive, or `in_channels` is neither a number nor a pair.
    """

    takes_shards = True

    def __init__(self, in_channels: int | tuple[int, int], out_channels: int, heads: int, **kwargs: Any):
        super().__init__(**kwargs)
        ends = in_channels if isinstance(in_channels, (tuple, list)) else (in_channels,)
        if len(ends) not in (1, 2):
            raise InputError(f"in_channels must be a number, or a pair for sources and targets; got {in_channels}.")
        check_at_least(1, in_channels=min(ends), out_channels=out_channels, heads=heads)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        names = ("fc",) if is_integer(in_channels) else ("fc_src", "fc_dst")
        for name, channels in zip(names, ends, strict=True):
            self.add_module(name, Linear(channels, heads * out_channels, bias=False))

    def _ends(self, x: Any) -> tuple[Tensor, Tensor]:
        """The features of sources and targets, checked."""
        sources, targets = self._inputs(x)
        if targets is None:
            raise InputError(f"{type(self).__name__} compares sources with targets: x[1] may not be None.")
        return sources, targets

    def _projected(self, sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The projections of both ends, `[..., M, H, C]` and `[..., N, H, C]`; the same one if they are the same."""
        if hasattr(self, "fc_src"):
            return self._heads(self.fc_src(sources)), self._heads(self.fc_dst(targets))
        of_sources = self._heads(self.fc(sources))
        return of_sources, of_sources if targets is sources else self._heads(self.fc(targets))
