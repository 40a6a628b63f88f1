"""What the core computes with."""
