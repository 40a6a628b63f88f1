"""CollegeMsg: the real file where it is, and small ones in its format."""

import gzip
import hashlib
import io
import pickle

import pytest
import torch
from torch_geometric.data import TemporalData
from torch_geometric.loader import TemporalDataLoader

from gattn import datasets
from gattn.datasets import DatasetUnavailableError, data_root
from gattn.datasets.registry import families

FAMILY = next(family for family in families() if "collegemsg" in family.names)
FILE = "CollegeMsg/CollegeMsg.txt"
URL = "https://snap.stanford.edu/data/CollegeMsg.txt.gz"
LINES = b"1 2 100\n3 1 300\n2 3 200\n2 1 300\n"


def write(root, content):
    path = root / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def server(monkeypatch):
    """What is at each address; notes what was asked for."""
    files, asked = {}, []

    def answer(request, *arguments, **kwargs):
        asked.append(request.full_url)
        if request.full_url not in files:
            raise OSError("404")
        return io.BytesIO(files[request.full_url])

    monkeypatch.setattr("urllib.request.urlopen", answer)
    return files, asked


def test_the_real_file(load):
    """The figures of its publisher."""
    data = load("collegemsg")
    assert (data.num_events, data.num_nodes) == (59835, 1899)
    assert (int(data.src.min()), int(data.src.max()), int(data.dst.max())) == (0, 1898, 1897)
    assert data.t.diff().min() == 0
    assert (int(data.t[-1]) - int(data.t[0])) // 86400 == 193  # days
    assert torch.cat([data.src, data.dst]).unique().numel() == 1899
    path = data_root() / FILE
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FAMILY.sha256[path.name]


@pytest.mark.parametrize("name", ["collegemsg", "CollegeMsg", "college_msg"])
def test_messages_are_in_the_order_of_time(name, tmp_path):
    write(tmp_path, LINES)
    data = datasets.load(name, root=tmp_path)
    assert isinstance(data, TemporalData)
    assert sorted(data.keys()) == ["dst", "src", "t"]
    assert data.src.tolist() == [0, 1, 2, 1]
    assert data.dst.tolist() == [1, 2, 0, 0]
    assert data.t.tolist() == [100, 200, 300, 300]
    assert {data.src.dtype, data.dst.dtype, data.t.dtype} == {torch.int64}
    assert [part.num_events for part in data.train_val_test_split(0.25, 0.5)] == [1, 1, 2]
    assert [len(batch.t) for batch in TemporalDataLoader(data, batch_size=3)] == [3, 1]


def test_nothing_is_written_beside_it(tmp_path):
    write(tmp_path, LINES)
    datasets.load("collegemsg", root=tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["CollegeMsg", "CollegeMsg.txt"]


def test_there_is_one_split(tmp_path):
    with pytest.raises(ValueError, match="collegemsg has no split 'random': it has 'public'"):
        datasets.load("collegemsg", split="random", root=tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"1 2\n3 1\n", "each line must hold three numbers, but it holds 2"),
        (b"1 2 100\n3 1", "the number of columns changed"),
        (b"1 2 100\n3 x 100\n", "could not convert string 'x'"),
        (b"0 2 100\n", "users must have numbers from 1 to 1899; got 0 to 2"),
        (b"1 1900 100\n", "users must have numbers from 1 to 1899; got 1 to 1900"),
        (b"1 2 99999999999999999999\n", "ValueError"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (pickle.dumps(print), "UnicodeDecodeError"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_else_is_touched(content, reason, tmp_path):
    path = write(tmp_path, content)
    (tmp_path / "processed").mkdir()
    (tmp_path / "processed" / "mine").touch()
    with pytest.raises(DatasetUnavailableError, match=r"CollegeMsg.txt cannot be read \(.*delete it") as error:
        datasets.load("collegemsg", root=tmp_path)
    assert reason in str(error.value)
    assert path.read_bytes() == content
    assert (tmp_path / "processed" / "mine").exists()


def test_a_missing_file_is_downloaded_unpacked_and_verified(tmp_path, server, monkeypatch):
    files, asked = server
    files[URL] = gzip.compress(LINES, mtime=0)
    monkeypatch.setitem(FAMILY.sha256, "CollegeMsg.txt", hashlib.sha256(LINES).hexdigest())
    for _ in range(2):
        assert datasets.load("collegemsg", root=tmp_path).num_events == 4
    assert asked == [URL]
    assert [path.name for path in (tmp_path / "CollegeMsg").iterdir()] == ["CollegeMsg.txt"]
    assert (tmp_path / FILE).read_bytes() == LINES


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(LINES, mtime=0), "SHA-256"),
        (gzip.compress(LINES, mtime=0)[:-9], "EOFError"),
        (b"<html>please log in</html>", "BadGzipFile"),
        (None, "404"),
    ],
)
def test_a_download_that_is_something_else_is_not_kept(content, reason, tmp_path, server):
    files, _ = server
    if content is not None:
        files[URL] = content
    with pytest.raises(DatasetUnavailableError, match=f"could not be downloaded.*{reason}") as error:
        datasets.load("collegemsg", root=tmp_path)
    for part in (f"Missing: {FILE}", "https://snap.stanford.edu", "GATTN_DATA"):
        assert part in str(error.value)
    assert not list(tmp_path.iterdir())
