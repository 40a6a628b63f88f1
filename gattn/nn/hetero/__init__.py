"""Layers of graphs with several types of nodes or edges."""

__all__: list[str] = []
