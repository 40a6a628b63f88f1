"""`python -m gattn.migrate`: what it finds in programs, and how it fails."""

import inspect
import json
import os
import re
import shutil
import subprocess

import pytest
import torch_geometric.nn

from gattn import convert, migrate, models, nn

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
        f"{tmp_path}/model.py:1: torch_geometric.nn.GATConv -> gattn.nn.GATConv",
        f"{tmp_path}/all.py:1: torch_geometric.nn.* says no names: import them one by one",
        f"{tmp_path}/model.py:1: torch_geometric.nn.SAGEConv stays: gattn has no SAGEConv",
        "1 can change, 2 cannot. These, and all else of PyG and PyTorch, work beside gattn as they are.",
    ]


#: The imports of six programs, and what they become. Classes around them are only there to use what is imported.
PROGRAMS = {
    "GraphGPS": (
        """import torch
import torch.nn as nn
import torch_geometric.nn as pygnn
from performer_pytorch import SelfAttention
from torch_geometric.data import Batch
from torch_geometric.nn import Linear as Linear_pyg


class GPSLayer(nn.Module):
    def __init__(self, dim_h, num_heads):
        self.local = pygnn.GATConv(dim_h, dim_h // num_heads, heads=num_heads, edge_dim=dim_h)
        self.other = pygnn.GENConv(dim_h, dim_h)
        self.kind: pygnn.GATConv = self.local
        self.self_attn = torch.nn.MultiheadAttention(dim_h, num_heads, batch_first=True)
""",
        {
            "import torch": "import gattn\nimport torch",
            "= pygnn.GATConv(dim_h": "= gattn.nn.GATConv(dim_h",
        },
        ["class GPSLayer -> gattn.nn.GPSConv around"],
    ),
    "tunedGNN": (
        """import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv, SAGEConv, GATConv, GINConv
""",
        {
            "from torch_geometric.nn import GCNConv, SAGEConv, GATConv, GINConv": (
                "from gattn.nn import GCNConv, GATConv\nfrom torch_geometric.nn import SAGEConv, GINConv"
            ),
        },
        [],
    ),
    "SGFormer": (
        """from torch_geometric.nn import (
    GCNConv,
    GATConv,  # for the baselines
    APPNP,
    JumpingKnowledge, MessagePassing, global_mean_pool, SuperGATConv, TransformerConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm

class TransConvLayer(nn.Module): ...
""",
        {
            """from torch_geometric.nn import (
    GCNConv,
    GATConv,  # for the baselines
    APPNP,
    JumpingKnowledge, MessagePassing, global_mean_pool, SuperGATConv, TransformerConv,
)""": (
                "from gattn.nn import GCNConv, GATConv, JumpingKnowledge, SuperGATConv, TransformerConv\n"
                "from torch_geometric.nn import APPNP, MessagePassing, global_mean_pool"
            ),
        },
        ['class TransConvLayer -> gattn.nn.SGFormerAttention(norm="frobenius", qkv_bias=True)'],
    ),
    "Polynormer": (
        """from torch_geometric.nn import GATConv
class GlobalAttn(torch.nn.Module): ...
class Polynormer(torch.nn.Module): ...
""",
        {"from torch_geometric.nn import GATConv": "from gattn.nn import GATConv"},
        ["class GlobalAttn -> gattn.models.Polynormer", "class Polynormer -> gattn.models.Polynormer"],
    ),
    "pyHGT": (
        """import torch
from torch_geometric.nn import GCNConv, GATConv
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.inits import glorot, uniform
class HGTConv(MessagePassing):
    pass
class HGTModel(HGTConv):
    pass
""",
        {"from torch_geometric.nn import GCNConv, GATConv": "from gattn.nn import GCNConv, GATConv"},
        ["class HGTConv -> gattn.nn.HGTConv(use_norm=True)"],
    ),
    "LPFormer": (
        """import torch
from torch_geometric.nn import GCNConv
from torch_sparse.matmul import spmm_add
if True:
    from torch_geometric.nn import GATv2Conv as Conv; from torch_geometric.nn import MLP
class LinkAttention(MessagePassing): ...
class LinkTransformer(nn.Module): ...
""",
        {
            "from torch_geometric.nn import GCNConv": "from gattn.nn import GCNConv",
            "    from torch_geometric.nn import GATv2Conv as Conv;": "    from gattn.nn import GATv2Conv as Conv;",
        },
        [
            "class LinkAttention -> gattn.nn.LPAttLayer",
            'class LinkTransformer -> gattn.models.LPFormer(gnn_norm="node")',
        ],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_patches_of_programs(name, tmp_path, capsys):
    source, changes, classes = PROGRAMS[name]
    expected = source
    for before, after in changes.items():
        expected = expected.replace(before, after, 1)
    file = tmp_path / "model.py"
    file.write_text(source)
    assert migrate.patched(source) == expected
    assert migrate.patched(expected) == expected
    with pytest.raises(SystemExit):
        migrate.main([str(file)])
    out = capsys.readouterr().out
    assert all(line in out for line in classes)
    assert out.count("class ") == len(classes)
    with pytest.raises(SystemExit):
        migrate.main([str(file), "--diff"])
    patch = capsys.readouterr().out
    assert file.read_text() == source
    (tmp_path / "change.patch").write_text(patch)
    command = ["patch", "-s", str(file), str(tmp_path / "change.patch")]
    if shutil.which("patch"):
        subprocess.run(command, check=True)
        assert file.read_text() == expected
        file.write_text(source)
    with pytest.raises(SystemExit):
        migrate.main([str(file), "--write"])
    assert capsys.readouterr().out == f"{file}: written\n"
    assert file.read_text() == expected


def test_every_class_that_is_recognised_has_a_successor():
    for repository, instead, converter in migrate._OWN.values():
        assert repository
        for place in re.findall(r"gattn\.(?:nn|models)\.\w+", instead):
            assert place.rpartition(".")[2] in {*nn.__all__, *models.__all__}
        assert converter is None or converter in convert.__all__
    assert not list(migrate.classes_in("class MAB(Block): ...\nclass MABs(nn.Module): ..."))


def test_windows_ends_of_lines_and_long_imports():
    names = "GATConv, GATv2Conv, GCNConv, SuperGATConv, TransformerConv, ResGatedGraphConv, AGNNConv"
    found = migrate.patched(f"if x:\r\n    from torch_geometric.nn import {names}\r\n")
    inner = "".join(f"        {name},\r\n" for name in names.split(", "))
    assert found == f"if x:\r\n    from gattn.nn import (\r\n{inner}    )\r\n"


def test_notebooks(tmp_path, capsys):
    """Cells are one program, lines for IPython are left alone, and so is all else of the file."""
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["from torch_geometric.nn import GATConv"]},
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [],
            "source": ["%matplotlib inline\n", "import torch_geometric.nn as gnn"],
        },
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": "!ls\nconv = gnn.GATConv(3, 4)\nawait conv"},
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": ["%%bash\n", "import this is not Python"]},
    ]
    file = tmp_path / "é.ipynb"
    file.write_text(json.dumps({"cells": cells, "metadata": {"a": "ü"}, "nbformat": 4}))
    with pytest.raises(SystemExit) as end:
        migrate.main([str(tmp_path)])
    assert end.value.code == 0
    assert "torch_geometric.nn.GATConv -> gattn.nn.GATConv" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        migrate.main([str(tmp_path), "--write"])
    found = json.loads(file.read_text())
    assert found["metadata"] == {"a": "ü"}
    expected = [cell["source"] for cell in cells]
    expected[1] = ["%matplotlib inline\n", "import gattn\n", "import torch_geometric.nn as gnn"]
    expected[2] = "!ls\nconv = gattn.nn.GATConv(3, 4)\nawait conv"
    assert [cell["source"] for cell in found["cells"]] == expected


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
