"""Makes an executed notebook small enough to commit: `python notebooks/tools/shrink.py notebooks/01_*.ipynb`.

Pictures are reduced to 256 colours, and the metadata of the machine are dropped. `--save four_graphs=2` also writes the
second picture to `notebooks/pictures/four_graphs.png`.
"""

from __future__ import annotations

import argparse
import base64
import io
from pathlib import Path

import nbformat
from PIL import Image

PICTURES = Path(__file__).parents[1] / "pictures"


def shrunk(picture: bytes) -> bytes:
    """Returns a PNG with at most 256 colours."""
    image = Image.open(io.BytesIO(picture))
    if image.mode != "P":
        image = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    file = io.BytesIO()
    image.save(file, "png", optimize=True)
    return min(picture, file.getvalue(), key=len)


def main() -> None:
    """Rewrites one notebook."""
    parser = argparse.ArgumentParser(description="Make an executed notebook small enough to commit.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--save", nargs="*", default=[], metavar="NAME=NUMBER", help="pictures that README shows")
    options = parser.parse_args()
    names = {int(number): name for name, number in (text.split("=") for text in options.save)}
    notebook = nbformat.read(options.notebook, 4)
    count = 0
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "image/png" not in output.get("data", {}):
                continue
            count += 1
            picture = shrunk(base64.b64decode(output.data["image/png"]))
            output.data["image/png"] = base64.b64encode(picture).decode()
            if count in names:
                (PICTURES / f"{names[count]}.png").write_bytes(picture)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.write(notebook, options.notebook)
    print(f"{options.notebook.name}: {count} pictures, {options.notebook.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
