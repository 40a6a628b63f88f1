"""Layers."""

from gattn.nn.agnn_conv import AGNNConv
from gattn.nn.dense_gat_conv import DenseGATConv
from gattn.nn.gat_conv import GATConv
from gattn.nn.gatv2_conv import GATv2Conv
from gattn.nn.gps_conv import GPSConv
from gattn.nn.key_value_cache import KeyValueCache
from gattn.nn.multihead_attention import MultiheadAttention
from gattn.nn.pooling import AttentionPooling
from gattn.nn.positional import (
    ALiBi,
    GraphPositionalEncoding,
    LearnedPositionalEncoding,
    RelativePosition,
    RelativePositionBias,
    RotaryPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from gattn.nn.rnn_attention import (
    AdditiveAttention,
    DotProductAttention,
    GeneralAttention,
    HardAttention,
    LocalAttention,
    MemoryAttention,
    ReinforceLoss,
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
    "AGNNConv",
    "ALiBi",
    "AdditiveAttention",
    "AttentionPooling",
    "DenseGATConv",
    "DotProductAttention",
    "GATConv",
    "GATv2Conv",
    "GPSConv",
    "GeneralAttention",
    "GraphPositionalEncoding",
    "HardAttention",
    "KeyValueCache",
    "LearnedPositionalEncoding",
    "LocalAttention",
    "MemoryAttention",
    "MultiheadAttention",
    "ReinforceLoss",
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
