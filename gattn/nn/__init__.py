"""Layers."""

from gattn.nn.gat_conv import GATConv
from gattn.nn.gatv2_conv import GATv2Conv
from gattn.nn.transformer_conv import TransformerConv

__all__ = ["GATConv", "GATv2Conv", "TransformerConv"]
