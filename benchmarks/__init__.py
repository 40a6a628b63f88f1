"""Benchmarks: `python -m benchmarks.<name>`, and `python -m benchmarks` for a list of them."""

import os
import re
import signal
import sys


def summary(docstring: str | None) -> str:
    """What a benchmark measures, in one sentence: the docstring of its module up to the first colon."""
    return (docstring or "").split("\n\n")[0].split(":")[0].rstrip(".") + "."


def durations(docstring: str | None) -> tuple[str, str]:
    """About how long a benchmark takes on two idle cores, by default and with `--quick`: its docstring's last line."""
    found = re.search(r"^Duration: (.+); with `--quick`: (.+)\.$", docstring or "", re.MULTILINE)
    return (found[1], found[2]) if found else ("unknown", "unknown")


def interrupted(*_: object) -> None:
    """What Ctrl-C does outside of `Benchmark.session`, such as in imports: it ends the process without a traceback."""
    if os.environ.get("RANK", "0") == "0":  # that of torchrun's first process
        os.write(2, b"Interrupted.\n")
    os._exit(130)


# `python -m benchmarks.<name>` imports this package first, and only then is the first argument `-m`.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupted)
