"""The library in its process: threads, forks, instruction sets, and what happens where it is missing."""

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gattn
from gattn import GATScore, attend
from gattn.ops import choose
from gattn.ops.backends import cpu, kernels
from gattn.ops.backends.cpu import native
from gattn.testing import random_edge_index
from tests.cases import KERNEL_SCORES, NO_AUTOGRAD_AFTER_FORK, make_score, mostly_slow
from tests.ops.fuzz import DTYPES, case, threads

ROOT = Path(__file__).parents[2]
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
X = torch.randn(200, 4, 16, generator=torch.Generator().manual_seed(0))
EDGE_INDEX = random_edge_index(200, num_edges=20_000)  # enough for several threads


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request):
    library = native.library()
    before = library.gattn_instruction_set()
    if not library.gattn_use_instruction_set(request.param.encode()):
        pytest.skip(f"no {request.param} here")
    yield request.param
    library.gattn_use_instruction_set(before)


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


class TestThreads:
    @pytest.mark.slow
    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
    def test_one_openmp_runtime(self):
        """In a process of its own, since other packages of this one may bring theirs."""
        done = run(
            "import torch, gattn\n"
            "x = torch.randn(300, 4, 16); edge_index = torch.randint(300, (2, 30_000))\n"
            "torch.set_num_threads(2)\n"
            "gattn.attend(x, x, x, edge_index, backend='cpu'); torch.randn(500, 500) @ torch.randn(500, 500)\n"
            "from pathlib import Path\n"
            "files = {line.split(maxsplit=5)[5] for line in Path('/proc/self/maps').read_text().splitlines() "
            "if line.count('/')}\n"
            "print(*sorted(f for f in files if any(name in f for name in ('libgomp', 'libomp', 'libiomp'))), sep='\\n')"
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) == 1, done.stdout

    @pytest.mark.slow
    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
    def test_no_more_threads_are_started(self):
        done = run(
            "import os, torch, gattn\n"
            "torch.set_num_threads(1)\n"
            "x = torch.randn(300, 4, 16, requires_grad=True); edge_index = torch.randint(300, (2, 30_000))\n"
            "gattn.attend(x, x, x, edge_index, backend='cpu').sum().backward()\n"
            "before = len(os.listdir('/proc/self/task'))\n"
            "torch.set_num_threads(3)\n"
            "gattn.attend(x, x, x, edge_index, backend='cpu')\n"
            "print(len(os.listdir('/proc/self/task')) - before)"
        )
        assert done.stdout.strip() == "2", done.stderr


class InWorkers(Dataset):
    """Attends wherever it is asked for an item."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.get_num_threads(), attend(X, X, X, EDGE_INDEX, backend="cpu")


def in_child(expected, connection):
    x = X.clone().requires_grad_()
    out = attend(x, x, x, EDGE_INDEX, backend="cpu")
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    same = [actual.detach().numpy().tobytes() == wanted for actual, wanted in zip((out, grad), expected, strict=True)]
    connection.send((torch.get_num_threads(), same))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.skipif(NO_AUTOGRAD_AFTER_FORK, reason="autograd refuses to run in the child")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
class TestFork:
    @pytest.fixture(autouse=True)
    def used_before(self):
        """The parent's threads are there, and lost in the child."""
        with threads(2):
            x = X.clone().requires_grad_()
            out = attend(x, x, x, EDGE_INDEX, backend="cpu")
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
            self.out, self.grad = out.detach(), grad
            yield

    def test_a_child_has_threads_of_its_own(self):
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        expected = [tensor.numpy().tobytes() for tensor in (self.out, self.grad)]
        child = context.Process(target=in_child, args=(expected, sender), daemon=True)
        child.start()
        try:
            assert receiver.poll(60), "the child hangs"
            assert receiver.recv() == (2, [True, True])
        finally:
            child.kill()
            child.join()

    def test_the_parent_goes_on(self):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert torch.equal(attend(X, X, X, EDGE_INDEX, backend="cpu"), self.out)

    def test_another_thread_goes_on(self):
        """A fork ends OpenMP's threads only of the thread that forks."""
        ended, wrong = threading.Event(), []

        def work():
            torch.set_num_threads(2)
            while not ended.is_set():
                wrong.extend([True] * (not torch.equal(attend(X, X, X, EDGE_INDEX, backend="cpu"), self.out)))

        worker = threading.Thread(target=work)
        worker.start()
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0) == (child, 0)
        ended.set()
        worker.join()
        assert not wrong

    def test_workers_of_a_loader(self):
        loader = DataLoader(InWorkers(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
        for number, out in loader:
            assert number == 1
            assert torch.equal(out, self.out)


class TestInstructionSets:
    def test_every_score_and_type(self, instruction_set):
        assert native.library().gattn_instruction_set().decode() == instruction_set
        for seed in range(10_000, 10_150):
            case(seed)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("channels", [1, 16, 61])
    def test_conversions_of_every_number(self, instruction_set, dtype, channels):
        """One edge a target hands its value on: widened, narrowed, the same bits."""
        patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        count = -(-patterns.numel() // channels)
        value = patterns.new_zeros(count * channels)
        value[: patterns.numel()] = patterns
        value = value.view(count, 1, channels)
        logit, edge_index = torch.zeros(count, 1, dtype=dtype), torch.arange(count).repeat(2, 1)
        out = attend(logit, logit, value, edge_index, score=GATScore(), backend="cpu")
        number = ~value.isnan() & (value != 0)
        assert torch.equal(out.view(torch.int16)[number], value.view(torch.int16)[number])
        assert torch.equal(out.isnan(), value.isnan())
        assert (out[value == 0] == 0).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_rounding(self, instruction_set, dtype):
        """The mean of two neighbours is a tie, or falls between others: as PyTorch rounds it."""
        patterns = torch.arange(2**15).to(torch.int16).view(dtype)
        value = patterns[patterns < torch.finfo(dtype).max / 2].view(-1, 1, 1)  # sums come before their division
        count = value.size(0)
        partner = torch.randperm(count)
        for other in (torch.arange(count).roll(1), partner):
            edge_index = torch.stack([torch.cat([torch.arange(count), other]), torch.arange(count).repeat(2)])
            logit = torch.zeros(count, 1, dtype=dtype)
            out = attend(logit, logit, value, edge_index, score=GATScore(), backend="cpu")
            expected = (value.double() / 2 + value[other].double() / 2).float().to(dtype)
            assert torch.equal(out, expected)

    @pytest.mark.parametrize("name", mostly_slow(INSTRUCTION_SETS))
    def test_the_environment_chooses(self, name):
        if name != "baseline" and name not in available():
            pytest.skip(f"no {name} here")
        done = run(
            "from gattn.ops.backends.cpu import native; print(native.library().gattn_instruction_set().decode())\n"
            "from tests.ops.fuzz import case\nfor seed in range(10): case(seed + 77_000)",
            GATTN_INSTRUCTION_SET=name,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == name

    @pytest.mark.slow
    def test_an_unknown_one(self):
        done = run(
            "import warnings, torch, gattn\n"
            "x = torch.ones(2, 1, 1); edge_index = torch.tensor([[0], [1]])\n"
            "with warnings.catch_warnings(record=True) as caught:\n"
            "    warnings.simplefilter('always')\n"
            "    for _ in range(2): assert gattn.attend(x, x, x, edge_index).flatten().tolist() == [0, 1]\n"
            "print(*[w.message for w in caught if 'gattn' in str(w.message)], sep='\\n')\n"
            "try: gattn.attend(x, x, x, edge_index, backend='cpu')\n"
            "except RuntimeError as error: print(error)\n",
            GATTN_INSTRUCTION_SET="mmx",
        )
        assert done.returncode == 0, done.stderr
        warning, error = done.stdout.splitlines()
        assert "GATTN_INSTRUCTION_SET=mmx is not available" in warning
        assert "GATTN_INSTRUCTION_SET=mmx is not available" in error


def available():
    library = native.library()
    before = library.gattn_instruction_set()
    found = [name for name in INSTRUCTION_SETS if library.gattn_use_instruction_set(name.encode())]
    library.gattn_use_instruction_set(before)
    return found


class TestFamilies:
    def test_every_one_has_a_number_and_named_constants(self):
        numbers = set()
        for score in KERNEL_SCORES:
            family = make_score(score, torch.zeros(1, 1)).family(1)
            number, constants = native.family(family.name)
            assert len(constants) == len(family.constants)
            numbers.add(number)
        assert numbers == set(range(len(numbers)))

    @pytest.mark.parametrize("name", ["", "ga", "gat2"])
    def test_an_unknown_one(self, name):
        with pytest.raises(ValueError, match="no score of the family"):
            native.family(name)


class TestMissing:
    @pytest.fixture
    def lose(self, monkeypatch):
        """Makes the library impossible to load, as if found out at import."""
        monkeypatch.delenv("GATTN_KERNELS", raising=False)

        def lose(**changes):
            for name, value in changes.items():
                monkeypatch.setattr(native, name, value)
            native.library.cache_clear()
            monkeypatch.setattr(cpu, "_load_error", native.load_error())
            monkeypatch.setattr(choose, "_warned", set())

        yield lose
        monkeypatch.undo()
        native.library.cache_clear()
        assert native.load_error() is None

    def check(self, reason):
        x, edge_index = torch.randn(4, 2, 3, requires_grad=True), torch.tensor([[0, 1], [1, 2]])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                out = attend(x, x, x, edge_index)
        assert [reason in str(warning.message) for warning in caught] == [True]
        assert torch.equal(out, attend(x, x, x, edge_index, backend="reference"))
        out.sum().backward()
        with pytest.raises(RuntimeError, match=f"backend='cpu' needs gattn's CPU kernels, but .*{reason}"):
            attend(x, x, x, edge_index, backend="cpu")
        gattn.nn.GATConv(3, 4)(torch.randn(4, 3), edge_index)

    def test_not_built(self, lose):
        lose(find_spec=lambda name: None)
        self.check("were not built")

    def test_not_loadable(self, lose, tmp_path):
        broken = tmp_path / "_kernels.so"
        broken.write_bytes(b"no library")
        lose(find_spec=lambda name: type("Spec", (), {"origin": str(broken)}))
        self.check("could not be loaded")

    @pytest.mark.parametrize("name", ["libgomp.so.1", "libomp.dylib"])
    def test_without_openmp(self, lose, monkeypatch, name):
        def refuse(path):
            raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr(native.ctypes, "CDLL", refuse)
        lose()
        self.check("this is OpenMP's runtime: install libgomp1")

    def test_of_somebody_else(self, lose, monkeypatch):
        monkeypatch.setenv("GATTN_KERNELS", torch._C.__file__)
        lose()
        self.check("is another library, not gattn's")

    def test_of_another_version(self, lose):
        lose(Arguments=native.Rows)
        self.check("another version of the sources")


class TestProcess:
    def test_subnormal_numbers_stay(self):
        """Libraries that are built with -ffast-math switch them off for everybody."""
        native.library()
        assert (torch.tensor(1e-40) * 1).item() != 0
        assert 5e-324 * 1.0 != 0
        assert (torch.tensor([1e-40]).numpy() * 1)[0] != 0
        attend(X, X, X, EDGE_INDEX, backend="cpu")
        assert (torch.full((100_000,), 1e-40) * 0.5 != 0).all()

    def test_every_type_is_known(self):
        assert set(kernels.DTYPES) == set(DTYPES)

    def test_errors_have_words(self):
        for status, error in ((-1, ValueError), (-2, ValueError), (-3, MemoryError)):
            with pytest.raises(error, match=".+"):
                native.raise_for(status)
        native.raise_for(0)
