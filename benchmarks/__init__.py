"""Benchmarks: `python -m benchmarks.<name>`, and `python -m benchmarks` for a list of them."""


def summary(docstring: str | None) -> str:
    """What a benchmark measures, in one sentence: the docstring of its module up to the first colon."""
    return (docstring or "").split("\n\n")[0].split(":")[0].rstrip(".") + "."
