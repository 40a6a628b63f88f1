"""Shakespeare's plays."""

from __future__ import annotations

from gattn.datasets.registry import Text, register


@register
class TinyShakespeare(Text):
    """40 000 lines of Shakespeare's plays, the file `input.txt` of Karpathy's char-rnn."""

    name = "tinyshakespeare"
    file = "tinyshakespeare/input.txt"
    url = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
