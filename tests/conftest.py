import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

# Several processes of `-n` would wait for each other's threads; tests of threads ask for them themselves.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# PyG's GraphGym imports ogb, which would look for a newer version on the network in a thread, whatever test is running.
sys.modules.setdefault("outdated", None)

CPU_ONLY = ("benchmarks", "ops/test_cpu.py", "ops/test_fuzz.py", "ops/test_layout.py", "ops/test_native.py")


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where tests compute (default: cpu)")
    text = "the share of the chosen tests that run, and a number that decides which (default: all)"
    parser.addoption("--share", nargs=2, metavar=("SHARE", "SEED"), default=("1", "0"), help=text)


def pytest_report_header(config):
    share, seed = config.getoption("--share")
    return [] if share == "1" else [f"a random share: --share {share} {seed}"]


def pytest_configure(config):
    device = config.getoption("--device")
    # Triton reads the variable when it is imported, which PyG does, and so gattn.
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    elif torch.cuda.is_available():
        os.environ.pop("TRITON_INTERPRET", None)
        torch.set_default_device(device)
    else:
        raise pytest.UsageError("--device cuda needs a GPU that PyTorch can use, and finds none")


def pytest_collection_modifyitems(config, items):
    share, seed = config.getoption("--share")
    left_out = [item for item in items if random.Random(f"{seed} {item.nodeid}").random() >= float(share)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    if config.getoption("--device") != "cpu":
        folder = Path(__file__).parent
        for item in items:
            if any(item.path.is_relative_to(folder / name) for name in CPU_ONLY):
                item.add_marker(pytest.mark.skip(reason="computes on the CPU only"))


def pytest_collection_finish():
    """Each garbage collection would go through all that was imported: with PyTorch, half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def in_double():
    """Layers and random numbers are made in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.double)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def no_plans():
    """Tests replace parts on which the plans of earlier calls rest."""
    from gattn.ops import plans  # not before the configuration, which Triton reads with it
    from gattn.ops.backends.cpu import plan

    plans.forget()
    plan._plans.clear()


@pytest.fixture
def without_tiles(monkeypatch):
    """What is computed on GPUs, and without kernels."""
    from gattn.ops.backends.dense import tiles  # not before the configuration, which Triton reads with it

    monkeypatch.setattr(tiles, "refuses", lambda *_: "a test has none")


@pytest.fixture(autouse=True)
def plain_sequential(monkeypatch):
    """PyG's Sequential overrides `forward` of its class, so that one test's model would run in another's."""
    from torch_geometric.nn import Sequential  # not before the configuration, which Triton reads with it

    monkeypatch.setattr(Sequential, "forward", Sequential.forward)


@pytest.fixture
def load():
    """Loads real data; where they are missing, the test fails in CI and is skipped elsewhere."""
    import gattn

    def load(name, **kwargs):
        try:
            return gattn.datasets.load(name, **kwargs)
        except gattn.datasets.DatasetUnavailableError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))

    return load


# A background job of a shell ignores Ctrl-C, and so would what it starts; handlers do not outlive `exec`, defaults do.
LAUNCHER = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def start():
    """Starts Python with arguments, in a session of its own; whatever becomes of the test, all of that ends with it."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", LAUNCHER, sys.executable, *map(str, arguments)],
                **{"cwd": Path(__file__).parents[1], "start_new_session": True, **options},
            )
            stack.callback(end, process)
            return process

        yield start


def end(process):
    """Ends a process and all of its session that is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(autouse=True, scope="session")
def generated_code():
    """PyG falls back to slower code in silence where it cannot generate some; for gattn's layers, that is a failure."""
    from torch_geometric.nn.conv import message_passing

    generate = message_passing.module_from_template

    def loudly(module_name, **kwargs):
        try:
            return generate(module_name=module_name, **kwargs)
        except Exception as error:
            if module_name.startswith("gattn."):
                pytest.fail(f"PyG cannot generate {module_name}: {error}")  # which PyG does not catch
            raise

    message_passing.module_from_template = loudly
    yield
    message_passing.module_from_template = generate
