"""Layers."""

from gattn.nn.gat_conv import GATConv
from gattn.nn.gatv2_conv import GATv2Conv
from gattn.nn.gps_conv import GPSConv
from gattn.nn.multihead_attention import KeyValueCache, MultiheadAttention
from gattn.nn.positional import (
    ALiBi,
    GraphPositionalEncoding,
    LearnedPositionalEncoding,
    RelativePosition,
    RelativePositionBias,
    RotaryPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from gattn.nn.transformer_conv import TransformerConv
from gattn.nn.transformer_layers import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "ALiBi",
    "GATConv",
    "GATv2Conv",
    "GPSConv",
    "GraphPositionalEncoding",
    "KeyValueCache",
    "LearnedPositionalEncoding",
    "MultiheadAttention",
    "RelativePosition",
    "RelativePositionBias",
    "RotaryPositionalEncoding",
    "SinusoidalPositionalEncoding",
    "Transformer",
    "TransformerConv",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
