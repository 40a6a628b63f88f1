import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A background job of a shell ignores Ctrl-C, and so would what it starts; handlers do not outlive `exec`, defaults do.
LAUNCHER = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def start():
    """Starts Python with arguments, in a session of its own; whatever becomes of the test, all of that ends with it."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", LAUNCHER, sys.executable, *map(str, arguments)],
                **{"cwd": Path(__file__).parents[2], "start_new_session": True, **options},
            )
            stack.callback(end, process)
            return process

        yield start


def end(process):
    """Ends a process and all of its session that is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
