"""German sentences and their English translations."""

from __future__ import annotations

import unicodedata
import zipfile
from pathlib import Path

from gattn.datasets.download import check_unpacked
from gattn.datasets.registry import SentencePairs, register

__all__ = ["Tatoeba"]

#: Soft hyphens and spaces without width.
_INVISIBLE = dict.fromkeys((0xAD, 0x200B, 0xFEFF))


@register
class Tatoeba(SentencePairs):
    """169 000 short German sentences with English translations, which ManyThings selected from Tatoeba."""

    name = "tatoeba"
    file = "tatoeba/deu-eng.zip"
    url = "https://www.manythings.org/anki/deu-eng.zip"
    measured = ("2018-04-07", "71750f704aeb6b0a01fe57341c3051b9efd98f63b61ee266b2c2283d1b80cb71", 169_159)

    def read(self, path: Path) -> list[tuple[str, str]]:
        """Reads the pairs (German, English) in the order of the file, without duplicates."""
        check_unpacked(path)
        with zipfile.ZipFile(path) as archive:
            lines = archive.read("deu.txt").decode("utf-8").split("\n")
        # Newer files have a third column, which names the authors.
        pairs = [tuple(_clean(sentence) for sentence in line.split("\t")[:2]) for line in lines if line]
        return list(dict.fromkeys((german, english) for english, german in pairs))


def _clean(sentence: str) -> str:
    """Converts a sentence to normal form C with single spaces and without invisible characters."""
    return " ".join(unicodedata.normalize("NFC", sentence).translate(_INVISIBLE).split())
