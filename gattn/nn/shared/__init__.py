"""What layers share."""

__all__: list[str] = []
