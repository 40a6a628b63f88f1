"""Whole networks."""

from gattn.models.gat import GAT
from gattn.models.han import HAN
from gattn.models.seq2seq import Seq2Seq
from gattn.models.transformer import TransformerLM, TransformerSeq2Seq

__all__ = ["GAT", "HAN", "Seq2Seq", "TransformerLM", "TransformerSeq2Seq"]
