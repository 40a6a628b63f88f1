"""The public names, frozen: a change here is a change for users, and belongs into the changelog."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gattn

PUBLIC = {
    gattn: (
        "AdditiveScore Attention Bias BucketBias CompleteGraph CosineScore Distribution DotScore Entmax15 GATScore "
        "Gate Hard Identity LinearPairBias LocalGaussian "
        "PairBias Projected Score Sigmoid Softmax SparseBias SparseGraph Sparsemax Tanh "
        "TopK Typed TypedGraph WithinTypes aggregate attend backend check_finite datasets dropout explain_call merge "
        "models nn record_attention softmax weigh"
    ),
    gattn.nn: (
        "AGNNConv ALiBi AdditiveAttention AttentionPairBias AttentionPooling AttentionalAggregation BiasedMHA DNAConv "
        "DegreeEncoder DenseGATConv DotGatConv DotProductAttention Dropout EGATConv EGTBlock EGTConv EGTLayer "
        "EdgeGATConv ExphormerConv ExphormerLayer FAConv GATConv GATEConv GATv2Conv GCNConv GPSConv GRITConv GRITLayer "
        "GatedGCNConv "
        "GeneralAttention GeneralConv GraphAttentionEmbedding GraphMultisetTransformer GraphPositionalEncoding "
        "GraphormerLayer HANConv HEATConv HGTConv HardAttention HypergraphConv InducedSetAttentionBlock "
        "JumpingKnowledge KeyValueCache LPAttLayer LSTMNCell LearnedPositionalEncoding LocalAttention "
        "MLPBias "
        "MemoryAttention MultiAggregation MultiheadAttention MultiheadAttentionBlock "
        "PatchTransformerAggregation PathEncoder PerformerAttention PerformerProjection "
        "PointTransformerConv PolynormerAttention PoolingByMultiheadAttention RGATConv "
        "RRWPEncoder RadialBias ReinforceLoss RelationalAttention RelationalTransformerLayer "
        "RelativePosition RelativePositionBias ResGatedGraphConv RotaryPositionalEncoding SGFormerAttention "
        "Set2Set SetAttentionBlock SetTransformerAggregation SinusoidalPositionalEncoding "
        "SoftmaxAggregation SpatialEncoder SuperGATConv TGATConv TemporalEncoding Transformer "
        "TransformerConv TransformerDecoder TransformerDecoderLayer TransformerEncoder "
        "TransformerEncoderLayer TriangleAttention TriangleMultiplication"
    ),
    gattn.convert: (
        "egt exphormer gated_gcn gatv2 gps graphormer grit hgt lpformer part polynormer set_transformer sgformer "
        "supergat tgat tgn"
    ),
    gattn.features: ("Favor cosine elu1 favor orthogonal_features relu sigmoid softplus"),
    gattn.lora: "config",
    gattn.models: (
        "GAT HAN LSTMN AttentiveFP Graphormer LPFormer Polynormer SGFormer Seq2Seq TransformerLM TransformerSeq2Seq"
    ),
}


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names(module):
    assert module.__all__ == PUBLIC[module].split()
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_verbs_are_methods_of_the_core():
    core = gattn.Attention
    methods = [core.attend, core.weigh, core.weighted_sum]
    assert [verb.__func__ for verb in (gattn.attend, gattn.weigh, gattn.aggregate)] == methods


@pytest.mark.parametrize("name", [name for name in gattn.__all__ if callable(getattr(gattn, name))])
def test_everything_public_explains_itself(name):
    docstring = inspect.getdoc(getattr(gattn, name))
    assert docstring
    assert "Example:" in docstring


def test_importing_gattn_needs_no_optional_package():
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'networkx', 'rich', 'ogb', 'allpairspy', 'peft', 'pytest', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import gattn\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_version_everywhere():
    root = Path(__file__).parents[1]
    assert f"\nversion: {gattn.__version__}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## {gattn.__version__} (" in (root / "CHANGELOG.md").read_text()
