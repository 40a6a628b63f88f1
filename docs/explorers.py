"""Writes the explorer pages that the documentation embeds: a citation graph, a molecule and a sentence.

    python docs/explorers.py FOLDER

Trains three small models, which takes about a minute on one core. The data are those of `gattn.datasets`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import networkx as nx
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_add_pool
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import to_networkx

import gattn
from gattn.visualize import explore

SUBJECTS = ["Theory", "Reinforcement", "Genetic", "Neural nets", "Probabilistic", "Case-based", "Rules"]
ELEMENTS = {5: "B", 6: "C", 7: "N", 8: "O", 9: "F", 15: "P", 16: "S", 17: "Cl", 35: "Br", 53: "I"}
BONDS = ["single", "double", "triple", "aromatic"]
START, END = 1, 2


def cora(folder: Path) -> None:
    """A GAT with two layers of eight heads, trained on Cora."""
    torch.manual_seed(0)
    data = NormalizeFeatures()(gattn.datasets.load("Cora"))
    x, y, edge_index = data.x, data.y, data.edge_index
    model = gattn.models.GAT(data.num_features, 64, 2, 7, heads=8, out_heads=8, dropout=0.6, value_dropout=0.6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=0.0005)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x, edge_index)[data.train_mask], y[data.train_mask]).backward()
        optimizer.step()
    # A paper with neighbours of several subjects says more than one among its like.
    kinds = torch.zeros(data.num_nodes, 7).index_put((edge_index[1], y[edge_index[0]]), torch.tensor(1.0))
    node = int((kinds.sum(1) * (edge_index[1].bincount(minlength=data.num_nodes) == 9)).argmax())
    explore(
        model,
        x,
        edge_index,
        classes=[SUBJECTS[subject] for subject in y.tolist()],
        labels=[f"paper {number}" for number in range(data.num_nodes)],
        node=node,
        title="Cora: a trained GAT",
        path=folder / "cora.html",
    )


class MoleculeNet(nn.Module):
    """Atoms and bonds, three layers of GATv2 with edge features, and the sum over atoms."""

    def __init__(self, channels: int = 32, heads: int = 4):
        super().__init__()
        self.atom = nn.Embedding(120, channels)
        self.bond = nn.Embedding(8, 8)
        self.convs = nn.ModuleList(
            gattn.nn.GATv2Conv(channels, channels // heads, heads=heads, edge_dim=8, residual=True) for _ in range(3)
        )
        self.out = nn.Linear(channels, 1)

    def forward(self, atoms: Tensor, edge_index: Tensor, bonds: Tensor, batch: Tensor | None = None) -> Tensor:
        """Returns the logit of each molecule."""
        x, edge_attr = self.atom(atoms), self.bond(bonds)
        for conv in self.convs:
            x = F.elu(conv(x, edge_index, edge_attr))
        logits: Tensor = self.out(global_add_pool(x, batch) / 10).squeeze(-1)
        return logits


def molecule(folder: Path) -> None:
    """One molecule, in a model trained to find inhibitors of the enzyme BACE-1."""
    torch.manual_seed(0)
    molecules = [data for data in gattn.datasets.load("ogbg-molbace") if data.num_edges]
    model = MoleculeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(6):
        for batch in DataLoader(molecules, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            logits = model(batch.x[:, 0], batch.edge_index, batch.edge_attr[:, 0], batch.batch)
            F.binary_cross_entropy_with_logits(logits, batch.y.view(-1).float()).backward()
            optimizer.step()
    data = next(data for data in molecules if 20 <= data.num_nodes <= 28 and len(data.x[:, 0].unique()) >= 4)
    elements = [ELEMENTS.get(number + 1, str(number + 1)) for number in data.x[:, 0].tolist()]
    bonds = [BONDS[kind] if kind < len(BONDS) else "other" for kind in data.edge_attr[:, 0].tolist()]
    explore(
        model,
        data.x[:, 0],
        data.edge_index,
        data.edge_attr[:, 0],
        classes=elements,
        labels=[f"{element}{number}" for number, element in enumerate(elements)],
        edge_labels=dict(zip(map(tuple, data.edge_index.t().tolist()), bonds, strict=True)),
        pos=nx.kamada_kawai_layout(to_networkx(data, to_undirected=True)),
        title="A molecule from BACE: GATv2 with bonds as edge features",
        path=folder / "molecule.html",
    )


def words(sentence: str) -> list[str]:
    """Splits a sentence into words and punctuation marks."""
    return re.findall(r"\w+(?:['’]\w+)?|[^\w\s]", sentence.lower())


def sentence(folder: Path) -> None:
    """A Transformer that translates short German sentences into English."""
    torch.manual_seed(0)
    pairs = [(words(german), words(english)) for german, english in gattn.datasets.load_pairs("tatoeba")]
    pairs = [pair for pair in pairs if max(map(len, pair)) <= 8]
    vocabularies = []
    for side in range(2):
        frequent = Counter(word for pair in pairs for word in pair[side]).most_common(800)
        vocabularies.append({word: number for number, (word, _) in enumerate(frequent, 3)})
    pairs = [pair for pair in pairs if all(set(pair[side]) <= set(vocabularies[side]) for side in range(2))]
    source, target = (
        pad_sequence([torch.tensor([*map(vocabularies[side].get, pair[side]), END]) for pair in pairs], True)
        for side in range(2)
    )
    lengths = (source > 0).sum(1)
    sizes = [len(vocabulary) + 3 for vocabulary in vocabularies]
    model = gattn.models.TransformerSeq2Seq(*sizes, channels=64, num_layers=2, heads=4, start=START, end=END)
    steps = 300
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.004, steps)
    for _ in range(steps):
        chosen = torch.randint(len(pairs), (64,))
        optimizer.zero_grad()
        logits = model(source[chosen], target[chosen], lengths[chosen])
        F.cross_entropy(logits.transpose(1, 2), target[chosen], ignore_index=0).backward()
        optimizer.step()
        schedule.step()
    german = words("Ich habe das Buch noch nicht gelesen.")
    english = words("I haven't read the book yet.")
    ids = [
        torch.tensor([[*map(vocabulary.__getitem__, text), END]])
        for vocabulary, text in zip(vocabularies, (german, english), strict=True)
    ]
    explore(
        model,
        *ids,
        # A decoder reads what it has written so far, and each position predicts the next word.
        tokens=([*german, "<end>"], ["<start>", *english]),
        node=2,
        title="A sentence in a Transformer that translates",
        path=folder / "sentence.html",
    )


def main(folder: Path) -> None:
    """Writes all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for write in (cora, molecule, sentence):
        write(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/explorers.py FOLDER")
    main(Path(sys.argv[1]))
