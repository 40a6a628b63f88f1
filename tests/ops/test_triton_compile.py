"""The GPU kernels are compiled ahead of time, without a GPU: by tests in a process without Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [["-m", "not slow"], ["-m", "slow", "-k", "not loop"]], ids=["fast", "slow"])
def test_compiled_kernels(chosen):
    pytest.importorskip("triton", "3.7", reason="older compilers have other interfaces")
    inner = Path(__file__).with_name("compiled_triton.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *chosen, "-p", "no:cacheprovider", inner],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
