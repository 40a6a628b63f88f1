"""Layers."""

from gattn.nn.graph.agnn_conv import AGNNConv
from gattn.nn.graph.dense_gat_conv import DenseGATConv
from gattn.nn.graph.dna_conv import DNAConv
from gattn.nn.graph.dot_gat_conv import DotGatConv
from gattn.nn.graph.edge_gat_conv import EdgeGATConv
from gattn.nn.graph.egat_conv import EGATConv
from gattn.nn.graph.fa_conv import FAConv
from gattn.nn.graph.gat_conv import GATConv
from gattn.nn.graph.gate_conv import GATEConv
from gattn.nn.graph.gated_gcn_conv import GatedGCNConv
from gattn.nn.graph.gatv2_conv import GATv2Conv
from gattn.nn.graph.gcn_conv import GCNConv
from gattn.nn.graph.general_conv import GeneralConv
from gattn.nn.graph.hypergraph_conv import HypergraphConv
from gattn.nn.graph.lp_att_layer import LPAttLayer
from gattn.nn.graph.point_transformer_conv import PointTransformerConv
from gattn.nn.graph.res_gated_graph_conv import ResGatedGraphConv
from gattn.nn.graph.supergat_conv import SuperGATConv
from gattn.nn.graph.temporal import GraphAttentionEmbedding, TemporalEncoding
from gattn.nn.graph.tgat_conv import TGATConv
from gattn.nn.graph.transformer_conv import TransformerConv
from gattn.nn.hetero.han_conv import HANConv
from gattn.nn.hetero.heat_conv import HEATConv
from gattn.nn.hetero.hgt_conv import HGTConv
from gattn.nn.hetero.rgat_conv import RGATConv
from gattn.nn.pooling.aggregations import (
    AttentionalAggregation,
    JumpingKnowledge,
    MultiAggregation,
    Set2Set,
    SoftmaxAggregation,
)
from gattn.nn.pooling.attention_pooling import AttentionPooling
from gattn.nn.pooling.patch_transformer import PatchTransformerAggregation
from gattn.nn.pooling.set_transformer import (
    GraphMultisetTransformer,
    InducedSetAttentionBlock,
    MultiheadAttentionBlock,
    PoolingByMultiheadAttention,
    SetAttentionBlock,
    SetTransformerAggregation,
)
from gattn.nn.recurrent.hard_attention import HardAttention, ReinforceLoss
from gattn.nn.recurrent.local_attention import LocalAttention
from gattn.nn.recurrent.lstmn_cell import LSTMNCell
from gattn.nn.recurrent.rnn_attention import AdditiveAttention, DotProductAttention, GeneralAttention, MemoryAttention
from gattn.nn.shared.dropout import Dropout
from gattn.nn.transformers.egt_conv import EGTConv
from gattn.nn.transformers.egt_layer import EGTLayer
from gattn.nn.transformers.exphormer_conv import ExphormerConv
from gattn.nn.transformers.gps_conv import GPSConv
from gattn.nn.transformers.graph_blocks import EGTBlock, ExphormerLayer, GRITLayer, RRWPEncoder
from gattn.nn.transformers.graph_encoders import DegreeEncoder, PathEncoder, SpatialEncoder
from gattn.nn.transformers.graphormer_layer import BiasedMHA, GraphormerLayer
from gattn.nn.transformers.grit_conv import GRITConv
from gattn.nn.transformers.key_value_cache import KeyValueCache
from gattn.nn.transformers.multihead_attention import MultiheadAttention
from gattn.nn.transformers.pair_biases import MLPBias, RadialBias
from gattn.nn.transformers.pair_layers import AttentionPairBias, TriangleAttention, TriangleMultiplication
from gattn.nn.transformers.performer_attention import PerformerAttention, PerformerProjection
from gattn.nn.transformers.polynormer_attention import PolynormerAttention
from gattn.nn.transformers.positional import (
    ALiBi,
    GraphPositionalEncoding,
    LearnedPositionalEncoding,
    RelativePosition,
    RelativePositionBias,
    RotaryPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from gattn.nn.transformers.relational_attention import RelationalAttention
from gattn.nn.transformers.relational_transformer import RelationalTransformerLayer
from gattn.nn.transformers.sgformer_attention import SGFormerAttention
from gattn.nn.transformers.transformer_layers import (
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
    "AttentionPairBias",
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
    "EGTBlock",
    "EGTConv",
    "EGTLayer",
    "EdgeGATConv",
    "ExphormerConv",
    "ExphormerLayer",
    "FAConv",
    "GATConv",
    "GATEConv",
    "GATv2Conv",
    "GCNConv",
    "GPSConv",
    "GRITConv",
    "GRITLayer",
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
    "MLPBias",
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
    "RRWPEncoder",
    "RadialBias",
    "ReinforceLoss",
    "RelationalAttention",
    "RelationalTransformerLayer",
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
    "TriangleAttention",
    "TriangleMultiplication",
]
