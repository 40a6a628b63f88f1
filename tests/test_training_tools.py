"""Tools that people train with take gattn's layers as any others."""

import functools
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import gattn
from gattn.testing import random_edge_index

LIGHTNING = """
import lightning
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_mean_pool
import gattn


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.gnn = gattn.models.GAT(4, 8, 2, 8, heads=2)
        self.linear = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        out = self.linear(global_mean_pool(self.gnn(batch.x, batch.edge_index), batch.batch)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(out, batch.y)
        self.log("loss", loss, batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


torch.manual_seed(0)
ring = torch.stack([torch.arange(6), torch.arange(1, 7) % 6])
graphs = [Data(x=torch.randn(6, 4) + (n % 2), edge_index=ring, y=torch.tensor([n % 2.0])) for n in range(64)]
trainer = lightning.Trainer(
    max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Classifier(), DataLoader(graphs, batch_size=16))
assert trainer.callback_metrics["loss"] < 0.4, trainer.callback_metrics
"""


@pytest.mark.slow
def test_lightning(tmp_path):
    """It learns to tell two kinds of graphs apart."""
    result = subprocess.run([sys.executable, "-c", LIGHTNING], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [gattn.nn.GATConv, gattn.nn.GATv2Conv, gattn.nn.TransformerConv])
def test_activation_checkpointing(kind, reentrant):
    """Computing activations anew gives the same output and gradients, dropout included."""
    edge_index, x = random_edge_index(20, 20, 90), torch.randn(20, 8)
    conv, found = kind(8, 4, heads=2, dropout=0.5), []
    for run in (conv, functools.partial(checkpoint, conv, use_reentrant=reentrant)):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        out = run(leaf, edge_index)
        out.square().sum().backward()  # reentrant checkpoints know no torch.autograd.grad
        found.append((out, leaf.grad))
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_loaders_with_workers():
    """Graphs that workers send are computed with as those made here."""
    graphs = [Data(x=torch.randn(5, 4), edge_index=random_edge_index(5, 5, 12)) for _ in range(8)]
    conv = gattn.nn.GATConv(4, 3)
    for batch, same in zip(DataLoader(graphs, 4, num_workers=2), DataLoader(graphs, 4), strict=True):
        torch.testing.assert_close(conv(batch.x, batch.edge_index), conv(same.x, same.edge_index))
