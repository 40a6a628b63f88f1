"""Shakespeare's plays."""

from __future__ import annotations

from gattn.datasets.registry import Text, register

__all__ = ["TinyShakespeare"]


@register
class TinyShakespeare(Text):
    """40 000 lines of Shakespeare's plays, the file `input.txt` of Karpathy's char-rnn."""

    name = "tinyshakespeare"
    file = "tinyshakespeare/input.txt"
    url = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    sha256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
