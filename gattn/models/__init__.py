"""Whole networks."""

from gattn.models.attentive_fp import AttentiveFP
from gattn.models.gat import GAT
from gattn.models.graphormer import Graphormer
from gattn.models.han import HAN
from gattn.models.lpformer import LPFormer
from gattn.models.lstmn import LSTMN
from gattn.models.polynormer import Polynormer
from gattn.models.seq2seq import Seq2Seq
from gattn.models.sgformer import SGFormer
from gattn.models.transformer import TransformerLM, TransformerSeq2Seq

__all__ = [
    "GAT",
    "HAN",
    "LSTMN",
    "AttentiveFP",
    "Graphormer",
    "LPFormer",
    "Polynormer",
    "SGFormer",
    "Seq2Seq",
    "TransformerLM",
    "TransformerSeq2Seq",
]
