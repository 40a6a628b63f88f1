"""Whole networks."""

from gattn.models.gat import GAT

__all__ = ["GAT"]
