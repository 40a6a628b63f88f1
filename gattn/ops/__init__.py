"""The computations behind the core."""

__all__: list[str] = []
