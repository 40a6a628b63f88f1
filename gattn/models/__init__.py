"""Whole networks."""

from gattn.models.gat import GAT
from gattn.models.transformer import TransformerLM, TransformerSeq2Seq

__all__ = ["GAT", "TransformerLM", "TransformerSeq2Seq"]
