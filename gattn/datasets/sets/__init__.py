"""One file for each family of data sets. Every file here is imported when a data set is first asked for.

To add a family of graphs, write a file with a subclass of `gattn.datasets.registry.GraphFamily`, decorated with
`register`; `karate.py` is the shortest example. A text is a subclass of `Text` (`tinyshakespeare.py`), and pairs of
sentences are a subclass of `SentencePairs` (`tatoeba.py`). Files whose names begin with `_` are not imported.
"""

__all__: list[str] = []
