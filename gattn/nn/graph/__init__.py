"""Layers of graphs with one type of nodes."""

__all__: list[str] = []
