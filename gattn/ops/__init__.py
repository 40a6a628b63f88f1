"""The computations behind the core."""
