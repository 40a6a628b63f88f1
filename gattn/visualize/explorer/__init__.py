"""Attention to click through: one HTML file with a graph, a matrix and the neighbours of a node."""

from gattn.visualize.explorer.explore import Exploration, explore

__all__ = ["Exploration", "explore"]
