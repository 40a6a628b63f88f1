"""`python -m gattn.migrate`: what it finds in programs, and how it fails."""

import inspect
import os

import pytest
import torch_geometric.nn

from gattn import migrate, models, nn

PROGRAM = r"""
import torch_geometric, torch_geometric as pyg, torch_geometric.nn as gnn
from torch_geometric import nn as library
from torch_geometric.nn import GATConv as Conv, SAGEConv, conv
from torch_geometric.nn.conv.gatv2_conv import GATv2Conv
from torch_geometric.data import Data
from torch import nn
from .nn import TransformerConv
torch_geometric.nn.AGNNConv(3), pyg.nn.conv.FAConv(3)
gnn.HGTConv.forward, library.Linear, conv.RGATConv
nn.Linear, self.gnn.GATConv, gnn.GATConv(3, 4).forward, torch_geometric.data.Data, "\d"
def inside():
    from torch_geometric.nn.aggr import SoftmaxAggregation
"""


def test_every_way_to_import_is_found_and_nothing_else():
    found = [(line, name.removeprefix("torch_geometric.nn.")) for line, name in sorted(migrate.names_in(PROGRAM))]
    assert found == [
        (4, "GATConv"),
        (4, "SAGEConv"),
        (5, "conv.gatv2_conv.GATv2Conv"),
        (9, "AGNNConv"),
        (9, "conv.FAConv"),
        (10, "HGTConv"),
        (10, "Linear"),
        (10, "conv.RGATConv"),
        (11, "GATConv"),
        (13, "aggr.SoftmaxAggregation"),
    ]


@pytest.mark.parametrize("module", [nn, models])
def test_every_name_that_both_libraries_have_can_change(module):
    shared = [name for name in module.__all__ if inspect.isclass(getattr(torch_geometric.nn, name, None))]
    assert len(shared) >= 3
    for name in shared:
        can_change, text = migrate.verdict(f"torch_geometric.nn.{name}")
        assert can_change
        assert text.partition(",")[0] == f"{module.__name__}.{name}"


def test_what_replaces_pytorchs():
    program = "from torch import nn\nimport torch.nn.functional as F\nnn.Dropout, F.dropout, nn.Linear, F.relu, nn.GRU"
    assert sorted(name for _, name in migrate.names_in(program)) == ["torch.nn.Dropout", "torch.nn.functional.dropout"]
    assert migrate.verdict("torch.nn.Dropout") == (True, "gattn.nn.Dropout")
    assert migrate.verdict("torch.nn.functional.dropout") == (True, "gattn.dropout")
    assert migrate.verdict("torch.nn.MultiheadAttention") == (True, "gattn.nn.MultiheadAttention")


def test_other_defaults_are_mentioned():
    """PyG's model has one head and ReLU, gattn's eight and ELU."""
    assert migrate.verdict("torch_geometric.nn.models.GAT") == (
        True,
        "gattn.models.GAT, whose arguments differ (act): see its documentation",
    )
    assert "differ" not in migrate.verdict("torch_geometric.nn.GATConv")[1]


def test_the_report_of_a_folder(tmp_path, capsys):
    (tmp_path / "model.py").write_text("from torch_geometric.nn import GATConv, SAGEConv\n")
    (tmp_path / "all.py").write_text("from torch_geometric.nn import *\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "theirs.py").write_text("from torch_geometric.nn import GATConv\n")
    with pytest.raises(SystemExit) as end:
        migrate.main([str(tmp_path)])
    assert end.value.code == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/all.py:1: torch_geometric.nn.* says no names: import them one by one",
        f"{tmp_path}/model.py:1: torch_geometric.nn.GATConv -> gattn.nn.GATConv",
        f"{tmp_path}/model.py:1: torch_geometric.nn.SAGEConv stays: gattn has no SAGEConv",
        "1 can change, 2 cannot. These, and all else of PyG and PyTorch, work beside gattn as they are.",
    ]


NESTED = [b"x = " + b"-" * 200_000 + b"1", b"x = a" + b".b" * 2_000, b"x = " + b"a + " * 50_000 + b"b"]


@pytest.mark.parametrize("content", [b"def (:\n", b"x = '\xff'\n", b"\x00", *NESTED], ids=range(6))
def test_a_file_that_is_not_python_is_one_line_and_the_others_are_read(content, tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(content)
    (tmp_path / "b.py").write_text("from torch_geometric.nn import GATConv\n")
    (tmp_path / "c.py").mkdir()
    os.mkfifo(tmp_path / "d.py")
    with pytest.raises(SystemExit) as end:
        migrate.main([str(tmp_path)])
    assert end.value.code == 1
    out, err = capsys.readouterr()
    first, *others = err.splitlines()
    assert first.startswith(f"{tmp_path}/a.py: cannot be read: ")
    assert others == [f"{tmp_path}/{name}.py: cannot be read: it is no file" for name in "cd"]
    assert "b.py:1: torch_geometric.nn.GATConv -> gattn.nn.GATConv" in out


def test_a_path_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        migrate.main([str(tmp_path / "nowhere")])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"{tmp_path}/nowhere: there is no such file or folder.\n"
