"""Random computations, each compared with the reference, or with the same one done in another way.

    python -m tests.ops.fuzz --cases 100000 --seed 1
    TRITON_INTERPRET=1 python -m tests.ops.fuzz --kinds triton --cases 2000

A case is decided by its kind and its seed alone. A new kind of case is a function in a file of its own, and an entry of
`KINDS`.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import secrets
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.cases import DIFFERENTIABLE, DTYPES, LONG_ROW, SCORES, Alter, Call, compare, grid, on_device, threads
from tests.ops.fuzz_calls import call, random_call, triton
from tests.ops.fuzz_compiled import compiled
from tests.ops.fuzz_edits import edits
from tests.ops.fuzz_formulas import formula
from tests.ops.fuzz_layers import layer
from tests.ops.fuzz_sequences import blocks, sequence
from tests.ops.fuzz_sharded import sharded
from tests.ops.fuzz_shared import Draw, compare_types
from tests.ops.fuzz_threads import concurrent
from tests.ops.fuzz_variants import conv, variant

__all__ = [
    "DIFFERENTIABLE",
    "DTYPES",
    "KINDS",
    "LONG_ROW",
    "SCORES",
    "Call",
    "Draw",
    "case",
    "compare",
    "compare_types",
    "grid",
    "kind_of",
    "on_device",
    "random_call",
    "threads",
]


class Kind(NamedTuple):
    """A kind of case: what runs it, and its share of all cases."""

    run: Callable[[Draw, Alter], None]
    weight: float


KINDS = {
    "call": Kind(call, 40),
    "variant": Kind(variant, 20),
    "formula": Kind(formula, 30),
    "layer": Kind(layer, 20),
    "conv": Kind(conv, 10),
    "sequence": Kind(sequence, 25),
    "blocks": Kind(blocks, 5),
    "edits": Kind(edits, 8),
    "sharded": Kind(sharded, 6),
    "threads": Kind(concurrent, 2),
    "compiled": Kind(compiled, 0.5),  # the first cases compile for seconds, later ones share what they compiled
}

#: Kinds that only run when they are asked for: what they need is not everywhere.
OTHER_KINDS = {"triton": Kind(triton, 1)}


def kind_of(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> str:
    """Which of these kinds the case of a seed is."""
    return random.Random(f"kind {seed}").choices(kinds, [(KINDS | OTHER_KINDS)[kind].weight for kind in kinds])[0]


def case(seed: int, kind: str = "call", alter: Alter = None) -> None:
    """Draws a case of a kind and runs it.

    Raises:
        AssertionError: If results differ; the message says how to run the case again.
    """
    draw = Draw(seed)
    try:
        with threads(1):  # on tiny graphs more would only wait for each other
            (KINDS | OTHER_KINDS)[kind].run(draw, alter)
    except Exception as error:
        notes = "\n".join(f"{name}: {note}" for name, note in draw.notes.items())
        again = f"python -m tests.ops.fuzz --cases 1 --kinds {kind} --seed {seed}"
        raise AssertionError(f"case {seed}: {type(error).__name__}: {error}\n{notes}\nAgain: {again}") from error


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long (default: never)")
    parser.add_argument("--seed", type=int, nargs="?", help="of the first case (default: a random one)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which (default: %(default)s)")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    known = KINDS | OTHER_KINDS
    if unknown := set(kinds) - set(known):
        parser.error(f"there is no kind {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    first = secrets.randbelow(10**9) if arguments.seed is None else arguments.seed
    print(f"The first case has seed {first}.", flush=True)

    warnings.filterwarnings("ignore", "Sparse", UserWarning)
    ran: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    start = time.monotonic()
    for seed in range(first, first + arguments.cases):
        if time.monotonic() - start > arguments.seconds:
            break
        kind = kind_of(seed, kinds)
        # Said before it runs, in case the process does not survive it.
        print(f"\r--cases 1 --kinds {kind} --seed {seed}   ", end="", file=sys.stderr, flush=True)
        before = time.process_time()
        try:
            case(seed, kind)
        except AssertionError as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
        ran[kind] += 1
        spent[kind] += time.process_time() - before
    print(file=sys.stderr)
    each = ", ".join(f"{ran[kind]} {kind} of {1000 * spent[kind] / ran[kind]:.1f} ms" for kind in known if ran[kind])
    print(f"{ran.total()} cases are as they should be ({each} of processor time).")
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
