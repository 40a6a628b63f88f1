"""Attention in recurrent networks."""

__all__: list[str] = []
