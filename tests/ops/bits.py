"""Whether a change keeps every bit of every result: digests of the fuzzer's cases, written before and compared after.

python -m tests.ops.bits before.json --cases 5000     # in a checkout of what was before
python -m tests.ops.bits before.json                  # with the change
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.cases import Call, Results, threads
from tests.ops import fuzz_calls, fuzz_layers, fuzz_sequences
from tests.ops.fuzz_shared import Draw

KINDS = {"call": fuzz_calls.call, "layer": fuzz_layers.layer, "sequence": fuzz_sequences.sequence}


def digest(results: Results) -> str:
    """Of names, types, shapes and contents."""
    found = hashlib.sha256()
    for name, tensor in results.items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.new_empty(tensor.numel()).copy_(tensor.detach().flatten()).view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def digests(kind: str, seed: int) -> list[str]:
    """What a case computes, by the backend that is tested and by the reference."""
    found: list[str] = []

    def compare(call: Call, *_: Any, **__: Any) -> None:
        with threads(call.threads):
            found.append(digest(call.results("cpu")))
        found.append(digest(call.results("reference")))

    def compare_types(run: Any, dtype: torch.dtype, *_: Any, **__: Any) -> None:
        found.extend(digest(run(dtype, by_reference)) for by_reference in (False, True))

    fuzz_calls.compare = compare
    fuzz_layers.compare_types = fuzz_sequences.compare_types = compare_types
    with threads(1):
        KINDS[kind](Draw(seed), None)
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the digests; compared with if it exists, else written")
    parser.add_argument("--cases", type=int, default=3000, help="how many cases of each kind to write (default: 3000)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "Sparse", UserWarning)
    if not arguments.file.exists():
        found = {kind: [digests(kind, seed) for seed in range(arguments.cases)] for kind in KINDS}
        arguments.file.write_text(json.dumps(found))
        return 0
    before = json.loads(arguments.file.read_text())
    off = [
        (kind, seed)
        for kind, cases in before.items()
        for seed, expected in enumerate(cases)
        if digests(kind, seed) != expected
    ]
    print(f"{len(off)} of {sum(map(len, before.values()))} cases have other bits: {off[:20]}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
