"""Attention from sets to their elements."""

__all__: list[str] = []
