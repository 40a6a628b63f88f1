"""Layers."""

from gattn.nn.aggregations import (
    AttentionalAggregation,
    JumpingKnowledge,
    MultiAggregation,
    Set2Set,
    SoftmaxAggregation,
)
from gattn.nn.agnn_conv import AGNNConv
from gattn.nn.dense_gat_conv import DenseGATConv
from gattn.nn.dna_conv import DNAConv
from gattn.nn.dot_gat_conv import DotGatConv
from gattn.nn.dropout import Dropout
from gattn.nn.edge_gat_conv import EdgeGATConv
from gattn.nn.egat_conv import EGATConv
from gattn.nn.egt_conv import EGTConv
from gattn.nn.egt_layer import EGTLayer
from gattn.nn.exphormer_conv import ExphormerConv
from gattn.nn.fa_conv import FAConv
from gattn.nn.gat_conv import GATConv
from gattn.nn.gate_conv import GATEConv
from gattn.nn.gated_gcn_conv import GatedGCNConv
from gattn.nn.gatv2_conv import GATv2Conv
from gattn.nn.general_conv import GeneralConv
from gattn.nn.gps_conv import GPSConv
from gattn.nn.graph_encoders import DegreeEncoder, PathEncoder, SpatialEncoder
from gattn.nn.graphormer_layer import BiasedMHA, GraphormerLayer
from gattn.nn.grit_conv import GRITConv
from gattn.nn.han_conv import HANConv
from gattn.nn.hard_attention import HardAttention, ReinforceLoss
from gattn.nn.heat_conv import HEATConv
from gattn.nn.hgt_conv import HGTConv
from gattn.nn.hypergraph_conv import HypergraphConv
from gattn.nn.key_value_cache import KeyValueCache
from gattn.nn.local_attention import LocalAttention
from gattn.nn.lp_att_layer import LPAttLayer
from gattn.nn.lstmn_cell import LSTMNCell
from gattn.nn.multihead_attention import MultiheadAttention
from gattn.nn.patch_transformer import PatchTransformerAggregation
from gattn.nn.performer_attention import PerformerAttention, PerformerProjection
from gattn.nn.point_transformer_conv import PointTransformerConv
from gattn.nn.polynormer_attention import PolynormerAttention
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
from gattn.nn.res_gated_graph_conv import ResGatedGraphConv
from gattn.nn.rgat_conv import RGATConv
from gattn.nn.rnn_attention import AdditiveAttention, DotProductAttention, GeneralAttention, MemoryAttention
from gattn.nn.set_transformer import (
    GraphMultisetTransformer,
    InducedSetAttentionBlock,
    MultiheadAttentionBlock,
    PoolingByMultiheadAttention,
    SetAttentionBlock,
    SetTransformerAggregation,
)
from gattn.nn.sgformer_attention import SGFormerAttention
from gattn.nn.supergat_conv import SuperGATConv
from gattn.nn.temporal import GraphAttentionEmbedding, TemporalEncoding
from gattn.nn.tgat_conv import TGATConv
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
    "AttentionalAggregation",
    "BiasedMHA",
    "DNAConv",
    "DegreeEncoder",
    "DenseGATConv",
    "DotGatConv",
    "DotProductAttention",
    "Dropout",
    "EGATConv",
    "EGTConv",
    "EGTLayer",
    "EdgeGATConv",
    "ExphormerConv",
    "FAConv",
    "GATConv",
    "GATEConv",
    "GATv2Conv",
    "GPSConv",
    "GRITConv",
    "GatedGCNConv",
    "GeneralAttention",
    "GeneralConv",
    "GraphAttentionEmbedding",
    "GraphMultisetTransformer",
    "GraphPositionalEncoding",
    "GraphormerLayer",
    "HANConv",
    "HEATConv",
    "HGTConv",
    "HardAttention",
    "HypergraphConv",
    "InducedSetAttentionBlock",
    "JumpingKnowledge",
    "KeyValueCache",
    "LPAttLayer",
    "LSTMNCell",
    "LearnedPositionalEncoding",
    "LocalAttention",
    "MemoryAttention",
    "MultiAggregation",
    "MultiheadAttention",
    "MultiheadAttentionBlock",
    "PatchTransformerAggregation",
    "PathEncoder",
    "PerformerAttention",
    "PerformerProjection",
    "PointTransformerConv",
    "PolynormerAttention",
    "PoolingByMultiheadAttention",
    "RGATConv",
    "ReinforceLoss",
    "RelativePosition",
    "RelativePositionBias",
    "ResGatedGraphConv",
    "RotaryPositionalEncoding",
    "SGFormerAttention",
    "Set2Set",
    "SetAttentionBlock",
    "SetTransformerAggregation",
    "SinusoidalPositionalEncoding",
    "SoftmaxAggregation",
    "SpatialEncoder",
    "SuperGATConv",
    "TGATConv",
    "TemporalEncoding",
    "Transformer",
    "TransformerConv",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
