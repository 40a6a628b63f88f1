"""Attention among all tokens or nodes, with layers and encodings for it."""

__all__ = ["nested", "positional"]
